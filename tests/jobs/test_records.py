"""The records of one job when somebody has been at them."""

from __future__ import annotations

import pytest

from gpu_skills.errors import StateError
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
    assert f"{name}.json" in caught.value.message


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
