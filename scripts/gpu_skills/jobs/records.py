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

from gpu_skills.errors import JobNotFound
from gpu_skills.state import files
from gpu_skills.state.project import Project


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
        path = self.path / f"{name}.json"
        return files.read_json(path) if path.exists() else None

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
    """The outputs a release would lose, as the machine's last manifest says. Empty: nothing, or all collected."""
    if is_collected(project, job):
        return []
    manifest = JobFolder(project, job).read("manifest")
    return manifest["files"] if manifest else []


def display(record: dict[str, Any]) -> str:
    """One line for a person: the label, else the command."""
    text = str(record.get("label") or record.get("run") or "")
    text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text if len(text) <= 60 else text[:57] + "…"
