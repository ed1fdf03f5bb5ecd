from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from gpu_skills.remote.runner import START_AS_MODULE
from remote.runner_client import RUNNER, Refused, RunnerClient, eventually

pytestmark = pytest.mark.subprocess
OLD_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.8.*/bin/python3"))


def test_the_greeting_names_the_file_that_answers(machine: RunnerClient, root: Path) -> None:
    assert machine.greeting == {
        "protocol": 1,
        "runner": hashlib.sha256(RUNNER.read_bytes()).hexdigest(),
        "python": machine.greeting["python"],
        "root": str(root),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid": machine.process.pid,
    }


def test_the_file_is_python_3_8_and_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse(RUNNER.read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    import sys

    assert imported <= set(sys.stdlib_module_names)


@pytest.mark.skipif(not OLD_PYTHONS, reason="no Python 3.8 on this machine")
def test_a_job_runs_with_a_machine_that_has_only_python_3_8(root: Path) -> None:
    with RunnerClient(root, python=str(OLD_PYTHONS[0])) as machine:
        assert machine.greeting["python"].startswith("3.8.")
        tree = machine.upload({"a.txt": b"hello"})
        ended = machine.run(
            "cat a.txt; cp a.txt $GPU_OUTPUT_DIR; echo progress rows=3; exit 4", tree=tree, setup="echo set up"
        )
        assert (ended["state"], ended["exit_code"], ended["outputs"]) == ("failed", 4, {"files": 1, "bytes": 5})
        assert machine.log() == b"set up\nhelloprogress rows=3\n"
        assert machine.call("probe")["python"].startswith("3.8.")


def test_the_end_of_stdin_ends_the_conversation_with_success(machine: RunnerClient) -> None:
    assert machine.close() == 0


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[1,2]\n",
        b'"text"\n',
        b'{"verb":"probe","verb":"probe"}\n',
        b'{"verb":"probe","args":{"x":NaN}}\n',
        b'{"verb":"\xff"}\n',
        b'{"n":-1}\n',
        b'{"n":4194305}\n',
        b'{"n":true}\n',
        b'{"n":1.5}\n',
        b'{"n":0}\n',
        b'{"verb":' + b"[" * 20_000 + b"]" * 20_000 + b"}\n",
        b'{"verb":"probe","args":{"x":"' + b"y" * (64 << 10) + b'"}}\n',
        b"x" * (200 << 10),
    ],
    ids=lambda line: line[:20].decode("latin-1"),
)
def test_a_header_that_cannot_be_understood_is_answered_and_closes(machine: RunnerClient, line: bytes) -> None:
    try:
        machine.process.stdin.write(line)
        machine.process.stdin.flush()
    except BrokenPipeError:
        pass  # it may have closed before it read all of it
    with pytest.raises(Refused) as refused:
        machine.answer()
    assert refused.value.code == "bad_request"
    assert machine.process.wait(timeout=10) == 1


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("sing", {}),
        ("have", {"project": "../x", "tree": "a" * 64}),
        ("have", {"project": "p\n", "tree": "a" * 64}),
        ("have", {"project": "A", "tree": "a" * 64}),
        ("have", {"project": 5, "tree": "a" * 64}),
        ("have", {"tree": "../" + "a" * 61}),
        ("have", {"tree": "A" * 64}),
        ("status", {"jobs": ["J-1"]}),
        ("status", {"jobs": ["../../etc"]}),
        ("status", {"jobs": ["J-000001\n"]}),
        ("status", {"jobs": "J-000001"}),
        ("jobs", {"after": "../J-000001"}),
        ("jobs", {"after": 7}),
        ("log", {"job": "J-000001/.."}),
        ("cancel", {"job": None}),
        ("forget", {"job": "J-00000a"}),
        ("session", {"session": {"id": "s1", "deadline_in_s": 1e300}}),
        ("session", {"session": {"id": "s1", "deadline_in_s": -1}}),
        ("session", {"session": {"id": "s1", "idle_timeout_s": 0}}),
        ("session", {"session": {"id": "s1", "on_expiry": "rm"}}),
        ("session", {"session": [1]}),
        ("start", {"job": {"id": "J-000001", "nonce": "n", "tree": "a" * 64, "run": ""}}),
        ("start", {"job": {"id": "J-000001", "nonce": "n", "tree": "a" * 64, "run": "a\0b"}}),
        ("start", {"job": {"id": "J-000001", "nonce": "n n", "tree": "a" * 64, "run": "true"}}),
        ("start", {"job": {"id": "J-000001", "nonce": "n", "tree": "a" * 64, "run": "true", "timeout_s": "1h"}}),
        ("start", {"job": {"id": "J-000001", "nonce": "n", "tree": "a" * 64, "run": "true"}, "env": {"A=B": "x"}}),
        ("start", {"job": {"id": "J-000001", "nonce": "n", "tree": "a" * 64, "run": "true"}, "env": {"A": 1}}),
        ("start", {"job": {"id": "J-000001", "nonce": "n", "tree": "a" * 64, "run": "true"}, "env": {"A": "\ud800"}}),
    ],
)
def test_a_wrong_argument_is_refused_and_the_conversation_goes_on(machine: RunnerClient, verb: str, args: dict) -> None:
    with pytest.raises(Refused) as refused:
        machine.call(verb, **args)
    assert refused.value.code == "bad_request"
    assert machine.call("have", tree="a" * 64) == {"known": False}


def test_a_number_too_large_for_a_float_is_refused(machine: RunnerClient) -> None:
    line = '{"verb":"session","args":{"project":"p-test","session":{"id":"s1","deadline_in_s":1e999}}}\n'
    machine.process.stdin.write(line.encode())
    machine.process.stdin.flush()
    with pytest.raises(Refused) as refused:
        machine.answer()
    assert refused.value.code == "bad_request"


def test_a_request_refused_before_its_body_ended_leaves_the_conversation_in_step(machine: RunnerClient) -> None:
    with pytest.raises(Refused):
        machine.ask("put", [({"sha256": "zz", "size": 1, "offset": 0}, b"x")] * 500)
    assert machine.call("have", tree="a" * 64) == {"known": False}


def test_a_folder_that_cannot_be_written_is_named(root: Path) -> None:
    (root / "projects").write_text("a file where a folder has to be")
    with RunnerClient(root) as machine:
        with pytest.raises(Refused) as refused:
            machine.call("incoming")
        assert refused.value.code in ("failed", "not_writable")
        assert "projects" in str(refused.value)


def test_probe_tells_what_the_machine_has(machine: RunnerClient) -> None:
    probe = machine.call("probe")
    assert probe["os"] == "Linux"
    assert probe["bash"] is True
    assert probe["cpus"] == len(os.sched_getaffinity(0))
    assert 0 < probe["ram_gb"] < 10_000
    assert probe["disk_free_gb"] > 0


SMI_ANSWERS = {
    "two GPUs": ("echo '0, NVIDIA GeForce RTX 4090, 24564, 570.124.06'; echo '1, NVIDIA GB10, [N/A], 580.65'", 0),
    "a broken driver": ("echo 'NVIDIA-SMI has failed because it could not talk to the driver.'", 9),
}


@pytest.mark.parametrize("case", SMI_ANSWERS)
def test_probe_reads_nvidia_smi_and_passes_its_complaint_on(root: Path, tmp_path: Path, case: str) -> None:
    says, code = SMI_ANSWERS[case]
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{says}\nexit {code}\n")
    smi.chmod(0o755)
    with RunnerClient(root, env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}) as machine:
        probe = machine.call("probe")
    if code == 0:
        assert probe["gpu_error"] is None
        assert probe["gpus"] == [
            {"index": 0, "name": "NVIDIA GeForce RTX 4090", "vram_mib": 24564, "driver": "570.124.06"},
            {"index": 1, "name": "NVIDIA GB10", "vram_mib": None, "driver": "580.65"},
        ]
    else:
        assert probe["gpus"] == []
        assert "could not talk to the driver" in probe["gpu_error"]


def test_started_as_a_module_it_answers_the_same_and_keeps_its_bytecode(root: Path, tmp_path: Path) -> None:
    installed = tmp_path / f"runner-{'a' * 64}.py"
    installed.write_bytes(RUNNER.read_bytes())
    command = ["python3", "-I", "-c", START_AS_MODULE, str(tmp_path), installed.stem, "serve", "--root", str(root)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    greeting = json.loads(done.stdout.removeprefix(b"GPU-SKILLS-RUNNER "))
    assert greeting["runner"] == hashlib.sha256(RUNNER.read_bytes()).hexdigest()
    assert list((tmp_path / "__pycache__").glob("runner-*.pyc"))


def test_what_it_writes_is_for_its_user_only(machine: RunnerClient, root: Path) -> None:
    machine.upload({"a": b"x"}, {"a": 0o777})
    machine.call("session", session={"id": "s1", "deadline_in_s": 60, "deadline_reason": "max_lifetime"})
    machine.run("echo hello")
    eventually(lambda: (machine.folder / "watch.json").exists())
    for path in root.rglob("*"):
        if "src" not in path.parts and not path.is_symlink():
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_wrong_command_line_says_how_it_is_used() -> None:
    done = subprocess.run(["python3", "-I", str(RUNNER), "dance"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "usage: runner.py serve --root ROOT" in done.stderr
