"""Stage what a plan froze: exactly the files that were selected then, each with the content it had then.

A file that is gone or says something else is refused before anything is rented. A file that came since is left here:
nobody approved it. The checkpoint a plan resumes from is staged among the inputs, from this computer.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_skills.errors import PlanRefused, Refused
from gpu_skills.jobs import checkpoints, pack
from gpu_skills.jobs.checkpoints import Checkpoint
from gpu_skills.jobs.pack import Packed
from gpu_skills.jobs.select import LeftOut
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.remote.tree import Entry, Tree
from gpu_skills.state.project import Project

RESUME_FOLDER = ".gpu/resume"  # in the job's directory; `.gpu` of the user's own is never uploaded
_MAX_LISTED = 20


class InputsChanged(Refused):
    """details.changed: [{path, why}]."""

    code = "inputs_changed"
    template = "the files are not the ones that were planned: {paths}"
    next_step = "bring them back, or plan what is there now: gpu plan --freeze"


class StagedTree(Tree):
    """A directory and, beside it, files that lie elsewhere on this computer. elsewhere: path in the tree → where."""

    def __init__(self, root: Path, entries: list[Entry], elsewhere: Mapping[bytes, bytes]):
        super().__init__(root, entries)
        self._elsewhere = elsewhere

    def local_path(self, entry: Entry) -> bytes:
        return self._elsewhere.get(entry.path) or super().local_path(entry)


def stage(
    project: Project,
    plan: Plan,
    *,
    progress: Callable[[int, int], None] | None = None,
    allow_secret_files: tuple[str, ...] = (),
) -> Packed:
    """The plan's inputs as they are to be sent. InputsChanged names every file that differs.

    Whatever `pack` refuses is refused here too. What the plan says of secrets in files was decided when it was made.
    """
    job, inputs = plan.job, plan.inputs
    if not job or not inputs:
        raise PlanRefused(summary="this plan has no job", reasons=[], next_step="gpu plan --freeze -- CMD")
    directory = directory_of(project, job)
    packed = pack.pack(
        directory,
        exclude=job.get("exclude") or (),
        allow_secret_files=(*allow_secret_files, *(job.get("allow_secret_files") or ())),
        cache_path=pack.cache_path(project.state, directory),
        progress=progress,
    )
    try:
        staged = as_planned(packed, inputs)
    except InputsChanged as exc:
        exc.next_step = f"bring them back, or plan what is there now: {plan_again(plan)}"
        raise
    if plan.resume_from:
        return with_checkpoint(staged, checkpoints.of_plan(project, plan.resume_from))
    return staged


def plan_again(plan: Plan, *flags: str) -> str:
    """The command that freezes another plan for the same job, with these flags."""
    run = str((plan.job or {}).get("run") or "")
    try:
        is_words = shlex.join(shlex.split(run)) == run
    except ValueError:
        is_words = False
    return " ".join(["gpu plan --freeze", *flags, "--", run if is_words else shlex.quote(run)])


def directory_of(project: Project, job: Mapping[str, Any]) -> Path:
    """The directory a plan's job is made of; a relative one is below the project."""
    return project.root / str(job.get("directory") or ".")


def inputs_record(packed: Packed) -> dict[str, Any]:
    """`inputs` of a plan: what is sent, file by file."""
    files = [{"path": e.display, "bytes": e.size, "sha256": e.sha256} for e in packed.tree.files if e.sha256]
    return {"tree": packed.tree.digest, "count": len(files), "bytes": packed.total_bytes, "files": files}


def as_planned(packed: Packed, inputs: Mapping[str, Any]) -> Packed:
    """The selection cut down to what was planned; InputsChanged when that is not all there as it was."""
    if packed.tree.digest == inputs["tree"]:
        return packed
    planned = {f["path"]: f for f in inputs["files"]}
    here = {entry.display: entry for entry in packed.tree.files if entry.sha256}
    changed = [
        {"path": path, "why": "is gone" if path not in here else "has other content"}
        for path, f in planned.items()
        if path not in here or here[path].sha256 != f["sha256"]
    ]
    if changed:
        raise _changed(changed)
    kept = [e for e in packed.tree.entries if not e.is_file or e.display in planned]
    added = [e for e in packed.tree.files if e.display not in planned]
    tree = Tree(packed.tree.root, kept)
    if tree.digest != inputs["tree"]:
        others = sorted({e.display for e in [*added, *(e for e in kept if not e.is_file)]})
        why = "permissions, links or empty folders are not as planned"
        raise _changed([{"path": path, "why": why} for path in others or ["."]])
    return Packed(
        tree=tree,
        left_out=[*packed.left_out, *(LeftOut(e.display, e.size, 1, "came after the plan") for e in added)],
        warnings=[*packed.warnings, *(f"{e.display} came after the plan and stays here" for e in added[:_MAX_LISTED])],
        total_bytes=sum(e.size for e in kept),
    )


def with_checkpoint(packed: Packed, checkpoint: Checkpoint) -> Packed:
    """The checkpoint's files below RESUME_FOLDER, with the paths they had among the outputs."""
    entries, elsewhere = list(packed.tree.entries), {}
    for path, size, sha256 in checkpoint.files:
        entry = Entry(os.fsencode(f"{RESUME_FOLDER}/{path}"), size, 0o644, sha256)
        entries.append(entry)
        elsewhere[entry.path] = os.fsencode(checkpoint.folder / path)
    tree = StagedTree(packed.tree.root, entries, elsewhere)
    return Packed(tree, packed.left_out, packed.warnings, packed.total_bytes + sum(s for _, s, _ in checkpoint.files))


def _changed(changed: list[dict[str, str]]) -> InputsChanged:
    shown = ", ".join(f"{c['path']} ({c['why']})" for c in changed[:_MAX_LISTED])
    more = len(changed) - _MAX_LISTED
    return InputsChanged(paths=shown + (f" and {more} more" if more > 0 else ""), changed=changed[:200])
