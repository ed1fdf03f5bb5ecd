"""Numbered changes of the records between major versions, each with a backup of what it found.

Fields are only added within a major version, so there is rarely anything to do here. The ledger is never migrated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_skills.errors import StateNewer
from gpu_skills.state import files
from gpu_skills.state import project as projects

# From a version to the next one: the files to change, each with a function from its old value to its new one.
# `project.json` is rewritten last and says which version the directory has.
Step = Mapping[str, Callable[[Any], Any]]
STEPS: dict[int, Step] = {}


def migrate(project: projects.Project, *, steps: Mapping[int, Step] | None = None, target: int) -> projects.Project:
    """Bring a state directory to `target`; one that is there already is returned as it is.

    Each step is safe to repeat: it starts from the backup it made, and the version goes up only when all its files
    are written. A file that someone edited between a crash and the repetition is ChangedMeanwhile and stays.
    StateNewer for a directory from the future.
    """
    steps = STEPS if steps is None else steps
    if project.schema_version > target:
        raise StateNewer(file="project.json", found=project.schema_version, known=target)
    name = project.state.name
    while project.schema_version < target:
        with files.lock(project.path("project.json")):
            project = projects.load(project.root, name=name)  # another command may have been here
            if project.schema_version < target:
                _step(project, steps[project.schema_version])
        project = projects.load(project.root, name=name)
    return project


def _step(project: projects.Project, step: Step) -> None:
    version = project.schema_version
    backup = project.path("backups") / f"v{version}"
    _back_up(project.state, backup)
    for name, change in step.items():
        with files.lock(project.path(name)):
            before = files.read_bytes(backup / name)
            if before is None:
                continue
            after = files.dumps_pretty(change(files.parse(before, project.path(name))))
            if files.read_bytes(project.path(name)) != after:
                files.commit(project.path(name), after, expected=before)
    content = files.read_json(project.path("project.json"))
    content["schema_version"] = version + 1
    files.commit(project.path("project.json"), files.dumps_pretty(content))


def _back_up(state: Path, backup: Path) -> None:
    """Copy the whole files beside. `project.json` comes last and says that the backup is complete."""
    if (backup / "project.json").exists():
        return
    files.make_directory(backup)
    for path in sorted(state.glob("*.json"), key=lambda p: (p.name == "project.json", p.name)):
        files.commit(backup / path.name, files.read_bytes(path) or b"")
