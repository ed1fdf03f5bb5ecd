"""A model as a directory: `model.yaml`, `setup.sh`, `verify.sh` and pinned requirements; or its record in models.json.

A manifest that changed is a new version: deployments and ledger lines name the version they were made with.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_skills import schemas, strict_yaml
from gpu_skills.clock import Clock
from gpu_skills.errors import ConfigError, UsageError
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.state import files, registry
from gpu_skills.state.project import Project

FILE = "model.yaml"
SCRIPTS = {"setup": "setup.sh", "verify": "verify.sh"}
MAX_SCRIPT_BYTES = 1 << 20
MAX_WORKFLOW_BYTES = 16 << 20
_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[^\]]*\])?\s*(==\s*[^\s,*]+|@\s*\S+(#|@[0-9a-f]{7,})\S*)")


@dataclass(frozen=True)
class ModelDir:
    """path None: only a record says what the model is, and nothing can be set up. findings: lines for people."""

    manifest: ModelManifest
    record: dict[str, Any]
    path: Path | None = None
    setup_sha256: str | None = None
    verify_sha256: str | None = None
    findings: tuple[str, ...] = field(default=())

    @property
    def id(self) -> str:
        return self.manifest.id

    def script(self, which: str) -> str | None:
        return self.setup_sha256 if which == "setup" else self.verify_sha256


def read(path: Path) -> ModelDir:
    """The model of a directory. ConfigError with file and line for what is wrong in it."""
    try:
        path = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as exc:
        raise UsageError(
            f"{path}: {getattr(exc, 'strerror', None) or exc}", next_step="name a model directory"
        ) from exc
    document = strict_yaml.read(path / FILE, shown=f"{path.name}/{FILE}")
    if document is None:
        raise UsageError(f"{path.name} has no {FILE}, so it is no model directory", next_step="gpu model setup DIR")
    schemas.check(document.data, FILE, file=document.shown, line=document.line_of, error=ConfigError)
    record = {name: value for name, value in document.data.items() if name != "$schema"}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    found = {which: _sha256(path / name) for which, name in SCRIPTS.items()}
    return ModelDir(
        _manifest(record, path),
        {**record, "manifest_sha256": digest, "directory": str(path)}
        | {f"{which}_sha256": sha256 for which, sha256 in found.items() if sha256 is not None},
        path,
        found["setup"],
        found["verify"],
        tuple(_unpinned(path)),
    )


def known(project: Project, name: str, *, cwd: Path | None = None) -> ModelDir:
    """The model of a directory, or of an id in models.json. UsageError when there is neither."""
    place = (cwd or project.root) / Path(name).expanduser()
    if (place / FILE).is_file():
        return read(place)
    records = {record["id"]: record for record in registry.load(project, "models")}
    if name not in records:
        there = ", ".join(list(records)[:10]) or "none"
        raise UsageError(
            f"{name} is no directory with a {FILE} and no model of models.json; there is {there}",
            next_step="name the directory of a model",
        )
    record = records[name]
    directory = record.get("directory")
    if isinstance(directory, str) and (Path(directory) / FILE).is_file():
        found = read(Path(directory))
        if found.id == name:
            return found
    return ModelDir(_manifest(record, None), record)


def put_on_record(project: Project, model: ModelDir, clock: Clock) -> ModelDir:
    """Write models.json; the model with its version. ConfigError for a change that kept the version it had.

    Without `version` in model.yaml versions are counted from 1.
    """
    if model.path is None:
        return model
    before = next((r for r in registry.load(project, "models") if r["id"] == model.id), {})
    is_same = before.get("manifest_sha256") == model.record["manifest_sha256"]
    version = model.manifest.version
    if version is None:
        was = before.get("version")
        version = was if is_same else was + 1 if isinstance(was, int) else 1
    elif before.get("manifest_sha256") and not is_same and before.get("version") == version:
        raise ConfigError(
            file=f"{model.path.name}/{FILE}",
            problem=f"it has changed and is still version {version}, which is on record with other content",
            next_step=f"raise `version` in {FILE}, or leave it out to have versions counted",
        )
    record = {**model.record, "version": version}
    if before != record:
        registry.put(project, "models", record, clock=clock)
    return ModelDir(
        _manifest(record, model.path), record, model.path, model.setup_sha256, model.verify_sha256, model.findings
    )


def _manifest(record: dict[str, Any], path: Path | None) -> ModelManifest:
    workflow, name = None, (record.get("test") or {}).get("workflow")
    if name is not None and path is not None:
        workflow = _workflow(path, name)
    return ModelManifest.of(record, test_workflow=workflow)


def _workflow(path: Path, name: str) -> dict[str, Any]:
    """The file that `test.workflow` names, which lies in the model's directory and nowhere else."""
    place = _inside(path, name)
    raw = None if place is None else files.read_bytes(place, max_bytes=MAX_WORKFLOW_BYTES)
    if place is None or raw is None:
        raise ConfigError(file=f"{path.name}/{FILE}", problem=f"test.workflow: no file {name} in the directory")
    found = files.parse(raw, place)
    if not isinstance(found, dict):
        raise ConfigError(file=f"{path.name}/{name}", problem="it is no workflow in API format")
    return found


def _inside(path: Path, name: str) -> Path | None:
    try:
        place = (path / name).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        return None
    return place if place.is_relative_to(path) else None


def _sha256(path: Path) -> str | None:
    raw = files.read_bytes(path, max_bytes=MAX_SCRIPT_BYTES)
    return None if raw is None else hashlib.sha256(raw).hexdigest()


def _unpinned(path: Path) -> list[str]:
    """Lines of requirements files that would install something else tomorrow."""
    found: list[str] = []
    for place in sorted(path.glob("requirements*.txt"))[:20]:
        text = strict_yaml.read_text(place, shown=place.name) or ""
        logical = text.replace("\\\n", " ").splitlines()
        for number, line in enumerate(logical, 1):
            wanted = re.split(r"(?:^|\s)#|;", line, maxsplit=1)[0].strip()
            if wanted and not wanted.startswith("-") and not _PINNED.match(wanted):
                found.append(f"{place.name}:{number}: {wanted[:80]} is not pinned: write name==version")
    return found
