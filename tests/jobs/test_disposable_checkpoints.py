"""Which outputs are checkpoints, and which one a later job goes on from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from gpu_skills.errors import JobNotFound, NotCollected
from gpu_skills.jobs import checkpoints
from gpu_skills.jobs.records import JobFolder
from gpu_skills.state import project as projects


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("checkpoint-1200/model.safetensors", 1200),
        ("out/checkpoint-1200/optimizer.pt", 1200),
        ("step_1200.pt", 1200),
        ("model-step=1200.ckpt", 1200),
        ("epoch=3-step=1200.ckpt", 1200),
        ("epoch-3/step_40.pt", 40),
        ("checkpoint-7/epoch_2.txt", 2),
        ("global_step1200/zero.pt", 1200),
        ("ckpt_0001200.pth", 1200),
        ("iter_0001200/w", 1200),
        ("Checkpoint-5/w", 5),
        ("checkpoint_0.pt", 0),
        ("model-1200.pt", None),
        ("model-00001-of-00004.safetensors", None),
        ("laststep12.pt", None),
        ("log.txt", None),
        ("checkpoint/model.pt", None),
        ("checkpoint-12345678901234567890/w", None),
    ],
)
def test_the_step_of_a_path(path, step):
    assert checkpoints.step_of(path) == step


def test_later_steps_are_later_by_number_and_not_by_text():
    paths = ["checkpoint-9/w", "checkpoint-10/w", "checkpoint-100/w", "log.txt"]
    assert checkpoints.since(paths, 9) == ["checkpoint-10/w", "checkpoint-100/w"]


@pytest.fixture
def project(tmp_path: Path):
    return projects.init(tmp_path)


def a_job(project, files: dict[str, bytes], *, final: bool = True, here: dict[str, bytes] | None = None) -> Path:
    """A job that left these files; `here` is what of it lies in gpu-outputs."""
    folder = JobFolder(project, "J-000001")
    folder.path.mkdir(parents=True)
    folder.write("job", {"machine_id": "m_1"})
    listed = [{"path": p, "bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for p, c in files.items()]
    folder.write("manifest", {"final": final, "files": listed})
    folder.write("collected", {"final": final, "destination": str(folder.outputs)})
    for path, content in (files if here is None else here).items():
        target = folder.outputs / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return folder.outputs


OUTPUTS = {"checkpoint-9/w": b"nine", "checkpoint-10/w": b"ten", "checkpoint-10/o": b"opt", "log": b"x"}


def test_the_latest_checkpoint_is_the_one_with_the_highest_step_and_all_of_its_files(project):
    a_job(project, OUTPUTS)
    found = checkpoints.latest(project, "J-000001")
    assert found.step == 10 and [path for path, _, _ in found.files] == ["checkpoint-10/o", "checkpoint-10/w"]
    again = checkpoints.of_plan(project, json.loads(json.dumps(found.to_record())))
    assert again == found


@pytest.mark.parametrize("spoilt", [b"tem", None])
def test_a_checkpoint_that_is_not_what_its_manifest_lists_is_refused_by_name(project, spoilt):
    outputs = a_job(project, OUTPUTS)
    record = checkpoints.latest(project, "J-000001").to_record()
    (outputs / "checkpoint-10/w").unlink()
    if spoilt is not None:
        (outputs / "checkpoint-10/w").write_bytes(spoilt)
    for attempt in (lambda: checkpoints.latest(project, "J-000001"), lambda: checkpoints.of_plan(project, record)):
        with pytest.raises(checkpoints.CheckpointChanged, match="checkpoint-10/w"):
            attempt()


def test_a_link_in_its_place_is_not_followed(project, tmp_path):
    outputs = a_job(project, OUTPUTS)
    (tmp_path / "elsewhere").write_bytes(b"ten")
    (outputs / "checkpoint-10/w").unlink()
    (outputs / "checkpoint-10/w").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(checkpoints.CheckpointChanged):
        checkpoints.latest(project, "J-000001")


def test_of_a_job_that_goes_on_the_newest_checkpoint_that_is_here_as_a_whole_counts(project):
    a_job(project, OUTPUTS, final=False, here={"checkpoint-9/w": b"nine", "checkpoint-10/w": b"ten"})
    assert checkpoints.latest(project, "J-000001").step == 9


def test_a_job_without_checkpoints_or_outputs_says_so(project):
    with pytest.raises(JobNotFound):
        checkpoints.latest(project, "J-000001")
    a_job(project, {"log": b"x"})
    with pytest.raises(checkpoints.NoCheckpoint):
        checkpoints.latest(project, "J-000001")
    JobFolder(project, "J-000001").path.joinpath("collected.json").unlink()
    with pytest.raises(NotCollected):
        checkpoints.latest(project, "J-000001")


def test_a_path_that_leaves_the_outputs_is_no_checkpoint_file(project):
    outputs = a_job(project, OUTPUTS)
    record = checkpoints.latest(project, "J-000001").to_record()
    (outputs.parent / "step_99.pt").write_bytes(b"secret")
    sha256 = hashlib.sha256(b"secret").hexdigest()
    record["files"] = [{"path": "../step_99.pt", "bytes": 6, "sha256": sha256}]
    with pytest.raises(checkpoints.CheckpointChanged):
        checkpoints.of_plan(project, record)
