"""The durable home of a job's outputs: pushed, read back, and what that is worth when a machine is to go."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import timedelta
from pathlib import Path

import pytest

from gpu_skills.errors import ArtifactChanged, ArtifactMissing, NotCollected, StoreIgnoresConditions, Unavailable
from gpu_skills.jobs import durable
from gpu_skills.jobs.records import JobFolder
from gpu_skills.state import files
from gpu_skills.state import project as projects
from s3_server import s3, s3_application

__all__ = ["s3", "s3_application"]
JOB = "J-000001"
CONTENT = {"model.bin": b"weights" * 100, "logs/a b.txt": b"done\n", "empty": b""}


@pytest.fixture
def folder(tmp_path) -> JobFolder:
    """A job whose three outputs were pulled and verified."""
    made = JobFolder(projects.init(tmp_path), JOB)
    files.make_directory(made.path)
    made.write("job", {"machine_id": "m_1", "nonce": "29e919d6e481bd12", "spec": {}, "upload": {}})
    for path, content in CONTENT.items():
        (made.outputs / path).parent.mkdir(parents=True, exist_ok=True)
        (made.outputs / path).write_bytes(content)
    listed = [
        {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for path, content in CONTENT.items()
    ]
    made.write("manifest", {"final": True, "files": listed, "skipped": []})
    made.write("collected", {"final": True, "destination": str(made.outputs), "files": 3, "bytes": 1})
    return made


def test_outputs_are_pushed_under_a_name_that_is_the_jobs_own_and_recorded(folder, s3, fake_clock):
    done = durable.push(folder.project, fake_clock, JOB, f"{s3.uri}/runs")
    home = "runs/J-000001-29e919d6"
    assert (done.uri, done.files, done.kept, done.left_out) == (f"{s3.uri}/{home}", 3, 0, [])
    assert sorted(s3.keys()) == sorted(f"{home}/{path}" for path in CONTENT)
    assert {path: s3.content(f"{home}/{path}") for path in CONTENT} == CONTENT
    record = folder.read("artifacts")
    assert {f["path"]: f["uri"] for f in record["files"]} == {p: f"{s3.uri}/{home}/{p}" for p in CONTENT}
    assert not any(secret in json.dumps(record) for secret in ("AKIA", "X-Amz", "Signature"))


def test_a_second_push_sends_nothing_and_a_lost_record_is_found_out_again(folder, s3, fake_clock):
    durable.push(folder.project, fake_clock, JOB, f"{s3.uri}/runs")
    s3.application.requests.clear()
    again = durable.push(folder.project, fake_clock, JOB, f"{s3.uri}/runs")
    assert (again.kept, again.bytes_sent) == (3, 0)
    assert {r.method for r in s3.application.requests} == {"HEAD"}
    (folder.path / "artifacts.json").unlink()
    assert durable.push(folder.project, fake_clock, JOB, f"{s3.uri}/runs").kept == 3
    assert len(folder.read("artifacts")["files"]) == 3


def test_a_push_that_broke_off_says_so_keeps_what_arrived_and_goes_on(folder, s3, fake_clock, monkeypatch):
    monkeypatch.setattr(durable, "AT_ONCE", 1)
    monkeypatch.setattr("gpu_skills.artifacts.s3_client.ATTEMPTS", 1)
    s3.application.fault = lambda r: 500 if r.path.endswith("a b.txt") and r.method == "HEAD" else None
    with pytest.raises(Unavailable):
        durable.push(folder.project, fake_clock, JOB, f"{s3.uri}/runs")
    assert [f["path"] for f in folder.read("artifacts")["files"]] == ["model.bin"]
    s3.application.fault = None
    assert durable.push(folder.project, fake_clock, JOB, f"{s3.uri}/runs").kept == 1


def test_before_all_of_it_is_here_nothing_is_pushed(folder, s3, fake_clock):
    folder.write("collected", {"final": False, "destination": str(folder.outputs)})
    with pytest.raises(NotCollected) as caught:
        durable.push(folder.project, fake_clock, JOB, s3.uri)
    assert caught.value.next_step == f"gpu job pull {JOB}" and s3.keys() == []


def test_an_output_that_was_changed_here_is_named_and_the_others_are_pushed(folder, s3, fake_clock):
    (folder.outputs / "model.bin").write_bytes(b"weights" * 99 + b"weighty")
    (folder.outputs / "empty").unlink()
    os.symlink("/etc/hostname", folder.outputs / "empty")
    with pytest.raises(ArtifactChanged, match=r"empty, model\.bin"):
        durable.push(folder.project, fake_clock, JOB, s3.uri)
    assert s3.keys() == ["J-000001-29e919d6/logs/a b.txt"]
    assert not durable.is_kept(folder.project, JOB, fake_clock.now())


def test_a_store_that_ignores_conditions_gets_nothing(folder, s3, fake_clock):
    s3.application.ignores_conditions = True
    with pytest.raises(StoreIgnoresConditions):
        durable.push(folder.project, fake_clock, JOB, s3.uri)
    assert s3.keys() == []


def test_names_that_are_no_text_are_pushed_as_they_are_shown_and_doubles_are_left_out(folder, tmp_path, fake_clock):
    odd = [b"a\nb", b"\xff", b"\xfe"]
    shown = ["a\\nb", "\ufffd", "\ufffd"]
    manifest = folder.read("manifest")
    for name, path in zip(odd, shown, strict=True):
        Path(os.fsdecode(os.fsencode(folder.outputs) + b"/" + name)).write_bytes(b"x")
        manifest["files"].append({"path": path, "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()})
    manifest["files"].append({"path": "link", "bytes": 0, "sha256": None})
    folder.write("manifest", manifest)
    done = durable.push(folder.project, fake_clock, JOB, str(tmp_path / "nas"))
    assert done.files == 5
    assert [left["path"] for left in done.left_out] == ["\ufffd", "link"]
    assert (tmp_path / "nas/J-000001-29e919d6/a\\nb").read_bytes() == b"x"
    durable.read_back(folder.project, fake_clock, JOB)
    assert not durable.is_kept(folder.project, JOB, fake_clock.now()), "not all of it is there"


# what a read-back is worth --------------------------------------------------------------------------------------------


@pytest.fixture(params=["bucket", "folder"])
def home(request, tmp_path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}/na%20s"
    return f"{request.getfixturevalue('s3').uri}/runs"


def test_only_what_was_read_back_within_a_day_counts_as_kept(folder, home, fake_clock):
    durable.push(folder.project, fake_clock, JOB, home)
    assert not durable.is_kept(folder.project, JOB, fake_clock.now())
    assert durable.read_back(folder.project, fake_clock, JOB) == 3
    now = fake_clock.now()
    assert durable.is_kept(folder.project, JOB, now)
    assert durable.is_kept(folder.project, JOB, now + timedelta(hours=23, minutes=59))
    assert not durable.is_kept(folder.project, JOB, now + timedelta(hours=24))
    assert not durable.is_kept(folder.project, JOB, now - timedelta(hours=1)), "a read-back of the future"


def test_a_read_back_finds_what_was_changed_and_what_is_missing(folder, s3, fake_clock):
    durable.push(folder.project, fake_clock, JOB, s3.uri)
    durable.read_back(folder.project, fake_clock, JOB)
    home = "J-000001-29e919d6"
    digest = hashlib.sha256(CONTENT["model.bin"]).hexdigest()
    s3.client.put_object(Bucket=s3.bucket, Key=f"{home}/model.bin", Body=b"Weights" * 100, Metadata={"sha256": digest})
    s3.client.delete_object(Bucket=s3.bucket, Key=f"{home}/empty")
    with pytest.raises(ArtifactChanged) as caught:
        durable.read_back(folder.project, fake_clock, JOB)
    assert "2 of 3" in caught.value.message and "missing" in caught.value.message
    verified = {f["path"]: f["verified_at"] is not None for f in folder.read("artifacts")["files"]}
    assert verified == {"model.bin": False, "logs/a b.txt": True, "empty": False}
    assert not durable.is_kept(folder.project, JOB, fake_clock.now())


def test_without_a_push_there_is_nothing_to_read_back(folder, fake_clock):
    with pytest.raises(ArtifactMissing, match=JOB):
        durable.read_back(folder.project, fake_clock, JOB)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m | {"final": False},
        lambda m: m | {"files": [*m["files"], {"path": "late", "bytes": 1, "sha256": "0" * 64}]},
        lambda m: m | {"files": [m["files"][0] | {"sha256": "0" * 64}, *m["files"][1:]]},
        lambda m: m | {"files": [m["files"][0] | {"bytes": 1}, *m["files"][1:]]},
        lambda m: m | {"files": [m["files"][0] | {"sha256": None}, *m["files"][1:]]},
    ],
)
def test_what_the_machine_lists_otherwise_is_not_kept(folder, tmp_path, fake_clock, change):
    durable.push(folder.project, fake_clock, JOB, str(tmp_path / "nas"))
    durable.read_back(folder.project, fake_clock, JOB)
    manifest = folder.read("manifest")
    assert durable.is_kept(folder.project, JOB, fake_clock.now(), manifest)
    assert not durable.is_kept(folder.project, JOB, fake_clock.now(), change(manifest))


def test_a_push_to_another_place_forgets_what_was_read_back_at_the_first(folder, tmp_path, fake_clock):
    durable.push(folder.project, fake_clock, JOB, str(tmp_path / "one"))
    durable.read_back(folder.project, fake_clock, JOB)
    durable.push(folder.project, fake_clock, JOB, str(tmp_path / "two"))
    assert not durable.is_kept(folder.project, JOB, fake_clock.now())
