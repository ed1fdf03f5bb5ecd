"""Workflows on record: a ComfyUI workflow in API format becomes a versioned manifest, and is read again for a run."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_skills.clock import Clock
from gpu_skills.errors import StateError, UsageError, WorkflowInvalid
from gpu_skills.runtimes.workflow import WorkflowManifest, propose
from gpu_skills.state import files, registry
from gpu_skills.state.project import Project

MAX_BYTES = 16 << 20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
FOLDER = "workflows"  # in the state directory: a copy of each version, by its digest


@dataclass(frozen=True)
class Workflow:
    """content None: a manifest written by hand that names no file. Jobs note id and version."""

    manifest: WorkflowManifest
    record: dict[str, Any]
    content: dict[str, Any] | None = None
    is_new: bool = False

    @property
    def id(self) -> str:
        return str(self.record["id"])


def add(
    project: Project, path: Path, clock: Clock, *, identity: str | None = None, model: str | None = None
) -> Workflow:
    """Put the workflow of a file on record. What is there already with the same content stays as it is.

    Other content, or another model, is the next version. Runs use a copy: the file may change or go.
    """
    raw = _read(path)
    content = _parsed(raw, path)
    proposal = propose(content)
    identity = identity or _slug(path.stem)
    if not _ID.fullmatch(identity):
        raise UsageError(
            f"{identity!r} is no id: letters, digits, dot, dash and underscore", next_step="give another with --id"
        )
    before = next((r for r in registry.load(project, "workflows") if r["id"] == identity), {})
    wanted_model = model or before.get("model")
    copy = _copy(project, raw)
    if before.get("sha256") == proposal.sha256 and before.get("model") == wanted_model and before.get("file"):
        return Workflow(replace(WorkflowManifest.of(before), notes=proposal.notes), before, content)
    version = _next(before.get("version")) if before else 1
    manifest = replace(proposal, id=identity, version=version)
    kept = {name: before[name] for name in ("private_inputs",) if before.get(name)}
    record = kept | manifest.to_record(identity, model=wanted_model, file=copy)
    registry.put(project, "workflows", record, clock=clock)
    return Workflow(manifest, record, content, is_new=True)


def load(project: Project, identity: str) -> Workflow:
    """The workflow of an id as workflows.json has it, with the content of its file where it names one."""
    record = registry.show(project, "workflows", identity)[0]
    manifest, name = WorkflowManifest.of(record), record.get("file")
    if not name:
        return Workflow(manifest, record)
    path = (project.root / name).resolve()
    if not path.is_relative_to(project.root.resolve()) and not path.is_relative_to(project.state.resolve()):
        raise UsageError(
            f"workflow {identity} names a file outside the project: {name}",
            next_step=f"gpu model add-workflow FILE --id {identity}",
        )
    return Workflow(manifest, record, _parsed(_read(path), path))


def choose(project: Project, model: str | None, wanted: str | None) -> Workflow:
    """The workflow that is named, else the only one of the model."""
    if wanted is not None:
        return load(project, wanted)
    records = registry.load(project, "workflows")
    fitting = [r["id"] for r in records if r.get("model") in (model, None) and r.get("runtime") in ("comfyui", None)]
    if len(fitting) != 1:
        there = ", ".join(fitting[:10]) or "none"
        raise UsageError(
            f"which workflow is to run? There is {there} for {model or 'this model'}",
            next_step="name one with --workflow" if fitting else "gpu model add-workflow FILE",
        )
    return load(project, fitting[0])


def _read(path: Path) -> bytes:
    try:
        raw = files.read_bytes(path, max_bytes=MAX_BYTES)
    except StateError as exc:
        raise WorkflowInvalid(what=path.name, problem=exc.message) from exc
    if raw is None:
        raise UsageError(f"there is no file {path}", next_step="name a workflow in API format")
    return raw


def _parsed(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        content = files.parse(raw, path)
    except StateError as exc:
        raise WorkflowInvalid(what=path.name, problem=exc.message) from exc
    if not isinstance(content, dict):
        raise WorkflowInvalid(what=path.name, problem="it is no JSON object")
    return content


def _copy(project: Project, raw: bytes) -> str:
    """Where the copy lies, below the project. Named by what it contains, so that versions never meet."""
    project.require_writable()
    folder = project.state / FOLDER
    files.make_directory(folder)
    path = folder / f"{hashlib.sha256(raw).hexdigest()}.json"
    if not path.exists():
        files.commit(path, raw)
    return str(path.relative_to(project.root))


def _slug(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:80] or "workflow"


def _next(version: Any) -> int | str:
    if isinstance(version, int):
        return version + 1
    return f"{version}-2" if version else 2
