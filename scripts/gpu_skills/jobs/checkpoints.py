"""Checkpoints among a job's outputs: which step a file belongs to, which are newer, and which one to go on from.

A path carries a step number where one of its parts has a word for it followed by digits, or begins with the word
`checkpoint`, `ckpt` and ends in digits:

    checkpoint-1200/model.safetensors    step_1200.pt    model-step=1200.ckpt    global_step1200/…    ckpt_1200.pth
    iter_0001200/…                       epoch-3.pt      checkpoint_0.pt

The last part that has one decides: `epoch-3/step_1200.pt` is step 1200. `model-1200.pt` and `shard-00001-of-00004` are
no checkpoints: their numbers count something else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_skills.errors import Failed, NotCollected, Refused
from gpu_skills.jobs.records import JobFolder, is_collected
from gpu_skills.state.project import Project

_STEP = re.compile(
    r"(?:^|[._/-])(?:global[_-]?step|checkpoint|ckpt|chkpt|steps?|iter(?:ation)?s?|epochs?)[-_=.]?(\d{1,15})(?!\d)",
    re.IGNORECASE,
)


class NoCheckpoint(Failed):
    code = "no_checkpoint"
    template = "{job} left no checkpoint: no output whose path carries a step number, such as checkpoint-1200/"
    next_step = "gpu job status {job}"


class CheckpointChanged(Refused):
    code = "checkpoint_changed"
    template = "the checkpoint of {job} is not what its manifest lists: {paths}"
    next_step = "gpu job pull {job} --force"


def step_of(path: str) -> int | None:
    """The step number in a path, None when it has none."""
    for part in reversed(path.split("/")):
        found = _STEP.findall(part)
        if found:
            return int(found[-1])
    return None


def since(paths: Iterable[str], step: int) -> list[str]:
    """Those of a later step."""
    return [path for path in paths if (found := step_of(path)) is not None and found > step]


@dataclass(frozen=True)
class Checkpoint:
    """The files of one step. files: (path below the outputs, bytes, sha256); folder: where the outputs are here."""

    job: str
    step: int
    folder: Path
    files: tuple[tuple[str, int, str], ...]

    def to_record(self) -> dict[str, Any]:
        """`resume_from` of a plan."""
        files = [{"path": path, "bytes": size, "sha256": sha256} for path, size, sha256 in self.files]
        return {"job": self.job, "step": self.step, "files": files}


def latest(project: Project, job: str) -> Checkpoint:
    """The newest checkpoint of a job whose outputs are here, every file of it hashed and equal to the manifest.

    Nothing is asked of the machine it ran on. NotCollected, NoCheckpoint, CheckpointChanged.
    """
    folder = JobFolder(project, job)
    folder.submission()  # JobNotFound
    collected, manifest = folder.read("collected"), folder.read("manifest")
    if collected is None or manifest is None:
        raise NotCollected(jobs=f"{job}: nothing of it is here", next_step=f"gpu job pull {job}")
    outputs = Path(collected["destination"])
    steps: dict[int, list[tuple[str, int, str]]] = {}
    for listed in manifest["files"]:
        step = step_of(listed["path"])
        if step is not None and listed.get("sha256"):
            steps.setdefault(step, []).append((listed["path"], listed["bytes"], listed["sha256"]))
    # Of a running job the newest may only half be here: the newest one that is whole counts.
    for step in sorted(steps, reverse=True):
        checkpoint = Checkpoint(job, step, outputs, tuple(sorted(steps[step])))
        wrong = differing(checkpoint)
        if not wrong:
            return checkpoint
        if is_collected(project, job):
            raise CheckpointChanged(job=job, paths=", ".join(wrong[:20]), files=wrong[:200])
    if not steps:
        raise NoCheckpoint(job=job)
    raise NotCollected(jobs=f"{job}: no checkpoint of it is here as a whole", next_step=f"gpu job pull {job}")


def of_plan(project: Project, record: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint that a plan froze, found and verified again."""
    job = str(record["job"])
    collected = JobFolder(project, job).read("collected")
    if collected is None:
        raise NotCollected(jobs=f"{job}: its outputs are not here", next_step=f"gpu job pull {job}")
    files = tuple((str(f["path"]), int(f["bytes"]), str(f["sha256"])) for f in record["files"])
    checkpoint = Checkpoint(job, int(record["step"]), Path(collected["destination"]), files)
    wrong = differing(checkpoint)
    if wrong:
        raise CheckpointChanged(job=job, paths=", ".join(wrong[:20]), files=wrong[:200])
    return checkpoint


def differing(checkpoint: Checkpoint) -> list[str]:
    """Paths of a checkpoint whose file here is missing or has other content. Links are not followed."""
    from gpu_skills.remote.destination import hash_path

    wrong = []
    for path, size, sha256 in checkpoint.files:
        local = checkpoint.folder / path
        try:
            is_same = not _has_link(checkpoint.folder, path) and os.lstat(local).st_size == size
            if not is_same or hash_path(local) != sha256:
                wrong.append(path)
        except OSError:
            wrong.append(path)
    return wrong


def _has_link(folder: Path, path: str) -> bool:
    here = folder
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return True
        here = here / part
        if here.is_symlink():
            return True
    return False
