"""The folder `jobs/<id>/` in the project's state: what a job sent, what came back, and which locks guard it.

`schemas/jobs/` says what each record holds: job, accepted, manifest, collected, artifacts, ended, abandoned,
events_cursor, and a line of events.jsonl. Beside them `log` is the log as it was when the job's outputs were collected,
verified.json a cache of `remote.destination`, and uploads.json one of `artifacts.uploads`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_skills.errors import JobNotFound, StateError
from gpu_skills.state import files, quick_check
from gpu_skills.state.ledger import OUTPUTS_NAME
from gpu_skills.state.project import Project

# The reason of a job that the machine said no to: nothing of it is there.
START_REFUSED = "start_refused"


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
        return self.project.root / OUTPUTS_NAME / self.job

    def read(self, name: str) -> dict[str, Any] | None:
        """A record of this job as `schemas/jobs/<name>.json` has it, None when there is none.

        StateError when somebody left something else in its place.
        """
        path = self.path / f"{name}.json"
        try:
            raw = files.read_bytes(path)
            record = None if raw is None else files.parse(raw, path)
        except StateError as exc:
            raise StateError(**{**exc.details, "file": self._shown(name)}) from exc
        if raw is None:
            return None
        if not quick_check.fits(record, f"jobs/{name}"):
            self._refuse_misfit(name, record)
        return record

    def _refuse_misfit(self, name: str, record: Any) -> None:
        from gpu_skills import schemas

        for problem in schemas.problems(record, f"jobs/{name}")[:1]:
            raise StateError(
                file=self._shown(name),
                at=f" {problem.pointer}" if problem.pointer else "",
                problem=f"found {problem.found}, allowed is {problem.allowed}",
                pointer=problem.pointer,
                found=problem.found,
                allowed=problem.allowed,
            )

    def _shown(self, name: str) -> str:
        return f"jobs/{self.job}/{name}.json"

    def write(self, name: str, record: dict[str, Any]) -> None:
        files.commit(self.path / f"{name}.json", files.dumps_pretty(record))

    @property
    def was_sent(self) -> bool:
        """Whether a machine may have it: what is to be started was written down."""
        return (self.path / "job.json").exists()

    @property
    def is_request(self) -> bool:
        """Whether a deployment was asked: the machine's runner knows nothing of it."""
        return (self.path / "request.json").exists()

    def submission(self) -> dict[str, Any]:
        record = self.read("job")
        if record is None:
            raise JobNotFound(job=self.job)
        return record

    def submitting(self, *, timeout_s: float = 10.0):
        """Held from before the ledger line until the machine answered; free again when the submitter dies."""
        return files.lock(self.path / "submit", timeout_s=timeout_s)

    def launching(self, *, timeout_s: float = 0):
        """Held while a machine of the job's own is prepared and the job sent there; StateBusy: another command does."""
        return files.lock(self.path / "launch", timeout_s=timeout_s)

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
