"""What an approval was used for, in the user's state directory: one file for each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_skills.errors import (
    StateError,
)
from gpu_skills.lifecycle import runs
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.state import files


@dataclass(frozen=True)
class Use:
    """That an approval is used up by one action on one machine. finished_at None: it goes on, or died."""

    approval_id: str
    plan_sha256: str
    project_id: str
    action: str
    owner: str
    used_at: str
    finished_at: str | None = None


def path_of(op: Operator, approval_id: str) -> Path:
    return runs.folder(op, approval_id).parent / "uses" / f"{runs.checked(approval_id)}.json"


def load(op: Operator, approval_id: str) -> Use | None:
    path = path_of(op, approval_id)
    record = files.read_json(path, default=None)
    try:
        return None if record is None else Use(**record)
    except TypeError as exc:
        raise StateError(
            file=path.name, at="", problem="found something else, allowed is what gpu wrote", next_step=f"edit {path}"
        ) from exc
