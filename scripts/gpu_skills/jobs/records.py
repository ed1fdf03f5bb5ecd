"""The folder `jobs/<id>/` in the project's state: what a job sent, what came back, and which locks guard it.

job.json        what was submitted (never a secret value), the machine, the nonce that makes a start repeatable
manifest.json   the outputs as the machine listed them last, and whether that list is final
collected.json  which of them were verified here, and where
log             the log as it was when the job's outputs were collected
events.jsonl    progress stalls and other events of the machine
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_skills.errors import JobNotFound, StateError
from gpu_skills.state import files
from gpu_skills.state.project import Project

# What every reader relies on; the rest of a record may be missing.
_FIELDS: dict[str, dict[str, type]] = {
    "job": {"machine_id": str},
    "manifest": {"files": list},
    "collected": {"destination": str},
}
_OPTIONAL_FIELDS: dict[str, dict[str, type]] = {"job": {"spec": dict, "upload": dict}}
_KINDS: dict[type, str] = {str: "text", dict: "an object", list: "a list"}


@dataclass(frozen=True)
class JobFolder:
    project: Project
    job: str

    @property
    def path(self) -> Path:
        return self.project.state / "jobs" / self.job

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def outputs(self) -> Path:
        """Where outputs are pulled to unless the user says otherwise."""
        return self.project.root / "gpu-outputs" / self.job

    def read(self, name: str) -> dict[str, Any] | None:
        """A record of this job, None when there is none. StateError when somebody left something else in its place."""
        path = self.path / f"{name}.json"
        record = files.read_json(path, default=None)
        if record is None and not path.exists():
            return None
        if not isinstance(record, dict):
            raise self._fault(name, "", f"found {_kind(record)}, allowed is an object")
        given = {field: kind for field, kind in _OPTIONAL_FIELDS.get(name, {}).items() if field in record}
        for field, kind in (_FIELDS.get(name, {}) | given).items():
            if not isinstance(record.get(field), kind):
                found = _kind(record[field]) if field in record else "nothing"
                raise self._fault(name, f" /{field}", f"found {found}, allowed is {_KINDS[kind]}")
        for number, file in enumerate(record["files"] if name == "manifest" else ()):
            if (
                not isinstance(file, dict)
                or not isinstance(file.get("path"), str)
                or type(file.get("bytes")) is not int
            ):
                raise self._fault(name, f" /files/{number}", "found no file, allowed is an object with path and bytes")
        return record

    def _fault(self, name: str, at: str, problem: str) -> StateError:
        return StateError(file=f"jobs/{self.job}/{name}.json", at=at, problem=problem)

    def write(self, name: str, record: dict[str, Any]) -> None:
        files.commit(self.path / f"{name}.json", files.dumps_pretty(record))

    def submission(self) -> dict[str, Any]:
        record = self.read("job")
        if record is None:
            raise JobNotFound(job=self.job)
        return record

    def submitting(self, *, timeout_s: float = 10.0):
        """Held from before the ledger line until the machine answered; free again when the submitter dies."""
        return files.lock(self.path / "submit", timeout_s=timeout_s)

    def collecting(self, *, timeout_s: float = 10.0):
        """Held while outputs are pulled: two pulls take turns, and a release waits."""
        return files.lock(self.path / "collect", timeout_s=timeout_s)


def is_collected(project: Project, job: str) -> bool:
    """Whether everything the job left was verified here after its end."""
    record = JobFolder(project, job).read("collected")
    return bool(record and record.get("final"))


def uncollected(project: Project, job: str) -> list[dict[str, Any]]:
    """The outputs a release would lose, as the machine's last manifest says.

    Empty: there are none, all are collected, or the user gave them up.
    """
    folder = JobFolder(project, job)
    if is_collected(project, job) or folder.read("abandoned") is not None:
        return []
    manifest = folder.read("manifest")
    return manifest["files"] if manifest else []


def display(record: dict[str, Any]) -> str:
    """One line for a person: the label, else the command."""
    text = str(record.get("label") or record.get("run") or "")
    text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text if len(text) <= 60 else text[:57] + "…"


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), json.dumps(value)[:40])
