"""What a machine sent away at its end comes home whole, or not at all."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from gpu_skills.errors import ArtifactMissing, GpuError, HashMismatch, TransferIncomplete, UnsafeManifest
from gpu_skills.jobs import expiry
from gpu_skills.jobs.records import JobFolder, is_collected
from gpu_skills.state import files
from gpu_skills.state import project as projects
from s3_server import s3, s3_application

__all__ = ["s3", "s3_application"]
JOB = "J-000001"
PLACE = "runs/J-000001-29e919d6/.gpu-expiry"
CONTENT = {"a": b"01234", "d/b": b"567" * 1000, "empty": b"", "z": b"end"}


@pytest.fixture
def folder(tmp_path) -> JobFolder:
    made = JobFolder(projects.init(tmp_path), JOB)
    files.make_directory(made.path)
    made.write("job", {"machine_id": "m_1", "nonce": "29e919d6e481bd12", "spec": {}, "upload": {}})
    return made


def line(path: str, content: bytes, **changes) -> str:
    facts = {"mode": 420, "path": path, "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    return json.dumps(facts | changes, sort_keys=True, separators=(",", ":")) + "\n"


def sent(s3, manifest: str | None, content: bytes, *, slot_bytes: int = 1100) -> None:
    """As a machine leaves it."""
    for number, start in enumerate(range(0, len(content), slot_bytes)):
        s3.client.put_object(Bucket=s3.bucket, Key=f"{PLACE}/{number:05}", Body=content[start : start + slot_bytes])
    if manifest is not None:
        s3.client.put_object(Bucket=s3.bucket, Key=f"{PLACE}/manifest.jsonl", Body=manifest.encode())


WHOLE = b"".join(CONTENT.values())
MANIFEST = "".join(line(path, content) for path, content in CONTENT.items())


def test_it_comes_to_where_a_pull_would_have_brought_it_and_counts_as_collected(folder, s3, fake_clock):
    sent(s3, MANIFEST, WHOLE)
    assert expiry.fetch(folder.project, fake_clock, JOB, f"{s3.uri}/runs") == 4
    assert {path: (folder.outputs / path).read_bytes() for path in CONTENT} == CONTENT
    assert is_collected(folder.project, JOB)
    assert [f["path"] for f in folder.read("manifest")["files"]] == list(CONTENT)
    assert sorted(os.listdir(folder.outputs.parent)) == [JOB]


def test_without_the_manifest_nothing_was_sent_whole(folder, s3, fake_clock):
    sent(s3, None, WHOLE)
    with pytest.raises(ArtifactMissing):
        expiry.fetch(folder.project, fake_clock, JOB, f"{s3.uri}/runs")
    assert not is_collected(folder.project, JOB)


@pytest.mark.parametrize(
    ("content", "error"),
    [(WHOLE[:-1], TransferIncomplete), (b"x" + WHOLE[1:], HashMismatch), (b"", TransferIncomplete)],
)
def test_a_stream_that_is_short_or_changed_is_not_called_collected(folder, s3, fake_clock, content, error):
    sent(s3, MANIFEST, content)
    with pytest.raises(error):
        expiry.fetch(folder.project, fake_clock, JOB, f"{s3.uri}/runs")
    assert not is_collected(folder.project, JOB)
    sent(s3, MANIFEST, WHOLE)
    assert expiry.fetch(folder.project, fake_clock, JOB, f"{s3.uri}/runs") == 4


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a\x00b"])
def test_a_manifest_that_leads_outside_is_refused(folder, s3, fake_clock, path, tmp_path):
    sent(s3, line(path, b"01234"), b"01234")
    with pytest.raises(UnsafeManifest):
        expiry.fetch(folder.project, fake_clock, JOB, f"{s3.uri}/runs")
    assert not (tmp_path / "x").exists() and not (tmp_path / "gpu-outputs").exists()


@pytest.mark.parametrize("manifest", ["{", "[]\n", '{"path":"a","size":-1}\n', "[" * 9000])
def test_what_is_no_manifest_is_one_of_our_errors(folder, s3, fake_clock, manifest):
    sent(s3, manifest, b"")
    with pytest.raises(GpuError):
        expiry.fetch(folder.project, fake_clock, JOB, f"{s3.uri}/runs")


def test_a_link_that_waits_where_a_file_arrives_is_not_followed(folder, s3, fake_clock, tmp_path):
    sent(s3, MANIFEST, WHOLE)
    (tmp_path / "elsewhere").mkdir()
    folder.outputs.mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", folder.outputs / "d")
    with pytest.raises(GpuError):
        expiry.fetch(folder.project, fake_clock, JOB, f"{s3.uri}/runs")
    assert os.listdir(tmp_path / "elsewhere") == [] and not is_collected(folder.project, JOB)
