"""The records of one job when somebody has been at them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpu_skills import resources
from gpu_skills.errors import StateError
from gpu_skills.jobs import observe
from gpu_skills.jobs.records import JobFolder, is_collected, uncollected
from gpu_skills.state import files
from gpu_skills.state import project as projects

JOB = "J-000001"
GOOD = {
    "job": {"machine_id": "m_1", "spec": {}, "upload": {}},
    "manifest": {"files": [{"path": "a", "bytes": 1}]},
    "collected": {"destination": "/x", "final": True},
    "ended": {"state": "failed"},
}


@pytest.fixture
def folder(tmp_path):
    made = JobFolder(projects.init(tmp_path), JOB)
    files.make_directory(made.path)
    return made


@pytest.mark.parametrize("name", GOOD)
def test_a_record_is_read_as_it_was_written_and_none_is_none(folder, name):
    assert folder.read(name) is None
    folder.write(name, GOOD[name])
    assert folder.read(name) == GOOD[name]


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("content", ["", "null", "[]", "[5]", "5", '"x"', "{", '{"a":NaN}', "[" * 5000])
def test_what_is_no_record_is_named_with_its_file(folder, name, content):
    (folder.path / f"{name}.json").write_text(content)
    with pytest.raises(StateError) as caught:
        folder.read(name)
    assert f"jobs/{JOB}/{name}.json" in caught.value.message and caught.value.details["allowed"]


@pytest.mark.parametrize(
    ("name", "content", "at"),
    [
        ("job", "{}", "/machine_id"),
        ("job", '{"machine_id":5,"spec":{},"upload":{}}', "/machine_id"),
        ("job", '{"machine_id":"m","spec":[],"upload":{}}', "/spec"),
        ("manifest", "{}", "/files"),
        ("manifest", '{"files":[5]}', "/files/0"),
        ("manifest", '{"files":[{"path":"a","bytes":1},{"path":"b"}]}', "/files/1/bytes"),
        ("collected", '{"final":true}', "/destination"),
    ],
)
def test_a_field_that_readers_rely_on_is_named_when_it_is_wrong(folder, name, content, at):
    (folder.path / f"{name}.json").write_text(content)
    with pytest.raises(StateError) as caught:
        folder.read(name)
    assert f"jobs/{JOB}/{name}.json {at}: found" in caught.value.message


def test_a_damaged_record_never_counts_as_collected(folder):
    folder.write("manifest", GOOD["manifest"])
    assert uncollected(folder.project, JOB) == GOOD["manifest"]["files"]
    (folder.path / "collected.json").write_text("[]")
    for ask in (is_collected, uncollected):
        with pytest.raises(StateError):
            ask(folder.project, JOB)


@pytest.mark.subprocess
def test_a_plain_record_is_read_without_a_validator_and_the_schema_module(folder):
    for name, record in GOOD.items():
        folder.write(name, record)
    program = (
        "import sys; from pathlib import Path\n"
        "from gpu_skills.jobs.records import JobFolder\n"
        "from gpu_skills.state import project\n"
        f"folder = JobFolder(project.find(Path(sys.argv[1])), {JOB!r})\n"
        f"assert all(folder.read(name) for name in {list(GOOD)!r})\n"
        "print(sorted({'jsonschema', 'gpu_skills.schemas'} & sys.modules.keys()))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(resources.PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder.project.root)], env=environ, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


class Machine:
    """Answers with what a broken or hostile machine may say of a job's outputs and events."""

    host = "box"
    skipped: list = []
    events = b""

    def call(self, verb, args, on_data=None, **more):
        if verb == "events":
            on_data({}, self.events)
            return {"next": len(self.events)}
        return {"files": 0, "bytes": 0, "final": True, "skipped": self.skipped}


def test_what_a_machine_says_cannot_make_a_record_that_is_refused_when_it_is_read(folder):
    machine = Machine()
    machine.skipped = [
        5,
        {},
        {"path": 5, "why": "x"},
        {"path": "f", "why": "fifo", "more": 1},
        {"path": "g", "why": []},
    ]
    good = b'{"event":"log_lost","ts":"2026-01-02T03:04:05Z","bytes":3}'
    wrong = [b"5", b"{}", b'{"event":"log_lost","ts":"now"}', good.replace(b"3}", b'"3"}')]
    machine.events = b"\n".join([good, *wrong, good.replace(b"3}", b"4}")])
    link = SimpleNamespace(session=machine, host="box")
    observe.outputs_now(folder.project, link, JOB)
    observe.sync_events(folder.project, link, JOB)
    assert folder.read("manifest")["skipped"] == [{"path": "f", "why": "fifo"}]
    assert [json.loads(line)["bytes"] for line in folder.events.read_text().splitlines()] == [3, 4]
    assert folder.read("events_cursor") == {"next": len(machine.events)}
