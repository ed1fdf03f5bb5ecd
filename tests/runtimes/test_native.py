"""A run that is a job on the machine: its file, its inputs, its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpu_skills.errors import ConfigError, InputInvalid, NotServed, UsageError
from gpu_skills.runtimes.base import ENGINES, Endpoint, Request, Served, Surroundings, runtime_of
from gpu_skills.runtimes.manifest import ModelManifest

PROGRAM = """
import json, os, pathlib
request = json.load(open(os.environ["REQUEST_FILE"]))
picture = pathlib.Path(request["inputs"]["image"]).read_bytes()
out = pathlib.Path(os.environ["GPU_OUTPUT_DIR"])
(out / "result.bin").write_bytes(picture * request["inputs"]["times"])
"""


def model(**serve) -> ModelManifest:
    record = {
        "id": "cruncher", "runtime": "native", "version": 3, "serve": serve,
        "inputs": {"image": {"type": "image", "required": True}, "times": {"type": "integer", "min": 1, "default": 2}},
    }  # fmt: skip
    return ModelManifest.of(record)


@pytest.mark.subprocess
def test_the_process_finds_its_inputs_by_the_job_file_and_leaves_its_result(tmp_path):
    """Run as the machine would: the files in a directory, the command in its shell, the job's environment."""
    picture = tmp_path / "../evil name;.png"
    picture.write_bytes(b"ab")
    native = runtime_of("native")
    job = native.job(
        Request("J-000003", model(command=[sys.executable, "crunch.py"]), {"image": picture, "times": "3"})
    )
    source, outputs = tmp_path / "src", tmp_path / "out"
    outputs.mkdir()
    for name, data in job.files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
        assert (source / name).resolve().is_relative_to(source.resolve())
    (source / "crunch.py").write_text(PROGRAM)
    environ = {**os.environ, **job.env, "GPU_OUTPUT_DIR": str(outputs)}
    subprocess.run(["bash", "-c", job.command], cwd=source, env=environ, check=True, timeout=60)
    assert (outputs / "result.bin").read_bytes() == b"ababab"
    request = json.loads(job.files["gpu-request.json"])
    assert (request["id"], request["model"], request["version"]) == ("J-000003", "cruncher", 3)


def test_inputs_are_checked_and_a_command_is_needed(tmp_path):
    native = runtime_of("native")
    with pytest.raises(InputInvalid):
        native.job(Request("J-1", model(command="x"), {"image": tmp_path / "none.png"}))
    with pytest.raises(ConfigError, match=r"serve\.command"):
        native.job(Request("J-1", model(), {}))


@pytest.mark.parametrize("name", ["native", "none"])
def test_what_serves_nothing_says_so_instead_of_pretending(name, sink):
    runtime = runtime_of(name)
    endpoint = Endpoint("http://127.0.0.1:1")
    assert runtime.service(Served(model(), 80, "/w")) is None
    assert runtime.health(endpoint).state == "ready"
    with pytest.raises(NotServed):
        runtime.run(endpoint, Request("J-1", model(), {}), sink)


def test_each_engine_that_gpu_yaml_may_name_has_its_runtime():
    from gpu_skills import resources

    schema = json.loads(resources.schema_path("gpu.yaml").read_bytes())
    named = set(schema["properties"]["runtime"]["properties"]["engine"]["enum"])
    assert named == set(ENGINES)
    assert {runtime_of(name, Surroundings(environ={})).name for name in named} == named
    with pytest.raises(UsageError):
        runtime_of("os")
