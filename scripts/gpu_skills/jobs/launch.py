"""A launch: what became of one plan for a job with a machine of its own. One per plan, so a plan launches once.

`launches/<plan>.json` is written before anything is rented and says which job the plan is: whoever runs the plan again
follows that job, and `gpu job cancel` finds what it was doing before there was a ledger line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.errors import StateError
from gpu_skills.state import files, quick_check
from gpu_skills.state.job_record import JOB_ID
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project


@dataclass(frozen=True)
class Limits:
    """What the plan froze, or less. job_timeout_s None: the job may run until it exits."""

    hold_for_s: float
    max_lease_s: float
    job_timeout_s: float | None


@dataclass(frozen=True)
class Launch:
    """jobs: every try of it on its one machine, the first one first. cancelled_at: somebody asked for its end.

    hold_until: until when its machine is kept for review. ended_at: nothing is left to do: machine gone, all booked.
    """

    plan: str
    jobs: tuple[str, ...]
    began_at: str
    hold_for_s: float
    max_lease_s: float
    job_timeout_s: float | None = None
    approval_id: str | None = None
    machine_id: str | None = None
    cancelled_at: str | None = None
    hold_until: str | None = None
    ended_at: str | None = None

    @property
    def job(self) -> str:
        """The try that counts: the last one."""
        return self.jobs[-1]

    @property
    def limits(self) -> Limits:
        return Limits(self.hold_for_s, self.max_lease_s, self.job_timeout_s)

    @property
    def held_until(self) -> datetime | None:
        return None if self.hold_until is None else parse_timestamp(self.hold_until)

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "jobs": list(self.jobs)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Launch:
        known = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        return cls(**{**known, "jobs": tuple(known["jobs"])})


def find(project: Project, plan: str) -> Launch | None:
    """The launch of a plan by its full name; StateError for a file that is none."""
    path = _path(project, plan)
    record = files.read_json(path, default=None)
    return None if record is None else Launch.from_record(_checked(record, path))


def of_job(project: Project, job: str) -> Launch | None:
    """The launch a job belongs to, also before the job has begun."""
    if not JOB_ID.fullmatch(job):
        return None
    return next((launch for launch in all_launches(project) if job in launch.jobs), None)


def all_launches(project: Project) -> list[Launch]:
    """Oldest first."""
    found = (find(project, path.stem) for path in _folder(project).glob("*.json"))
    return sorted((launch for launch in found if launch is not None), key=lambda launch: (launch.began_at, launch.job))


def latest_pending(project: Project, ledger: Ledger) -> Launch | None:
    """The newest launch whose job has not begun, when no job began after it."""
    for launch in reversed(all_launches(project)):
        if launch.ended_at is None and ledger.latest(launch.job) is None:
            newest = ledger.last_id()
            return launch if newest is None or int(newest[2:]) < int(launch.job[2:]) else None
    return None


def begin(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    plan: str,
    limits: Limits,
    approval_id: str,
    *,
    replaces: str | None = None,
) -> Launch:
    """The launch of this plan, made now if there is none. Two commands at once get the same one, with one approval.

    replaces: an approval that led to nothing; before the job has begun a new one takes its place, and that of one whose
    launch was cancelled or has ended. Any other that somebody is at stays: use that.
    """
    path = _path(project, plan)
    files.make_directory(path.parent)
    with files.lock(path):
        found = find(project, plan)
        is_under_way = found is not None and found.ended_at is None
        if is_under_way and found.approval_id == approval_id:
            return found
        if is_under_way and found.cancelled_at is None and found.approval_id not in (None, replaces):
            return found
        if found is None:
            jobs = (ledger.new_job_id(),)
            made = Launch(plan, jobs, timestamp(clock.now()), **vars(limits), approval_id=approval_id)
        else:
            made = replace(found, **vars(limits), approval_id=approval_id, cancelled_at=None, ended_at=None)
        raw = files.read_bytes(path)
        files.commit(path, files.dumps_pretty(made.to_record()), expected=raw)
        return made


def update(project: Project, plan: str, change: Callable[[Launch], Launch]) -> Launch:
    """Read, change, commit under the file's lock. change has no effects, it may be applied again."""
    path = _path(project, plan)
    record = files.update(path, lambda record: change(Launch.from_record(_checked(record, path))).to_record())
    return Launch.from_record(record)


def shorten(project: Project, plan: str, limits: Limits) -> Launch:
    """Of each limit the smaller one counts from now on. A hold that has begun ends so much earlier."""

    def shorter(launch: Launch) -> Launch:
        hold_s = min(launch.hold_for_s, limits.hold_for_s)
        until = launch.held_until
        if until is not None:
            until -= timedelta(seconds=launch.hold_for_s - hold_s)
        timeouts = [limit for limit in (launch.job_timeout_s, limits.job_timeout_s) if limit is not None]
        return replace(
            launch,
            hold_for_s=hold_s,
            max_lease_s=min(launch.max_lease_s, limits.max_lease_s),
            job_timeout_s=min(timeouts, default=None),
            hold_until=None if until is None else timestamp(until),
        )

    return update(project, plan, shorter)


def cancel(project: Project, clock: Clock, plan: str) -> Launch:
    """Ask whoever works on it to end it. What was said first stays."""
    now = timestamp(clock.now())
    return update(project, plan, lambda launch: replace(launch, cancelled_at=launch.cancelled_at or now))


def end(project: Project, clock: Clock, plan: str) -> Launch:
    now = timestamp(clock.now())
    return update(project, plan, lambda launch: replace(launch, ended_at=launch.ended_at or now))


def is_cancelled(project: Project, plan: str) -> bool:
    found = find(project, plan)
    return found is not None and found.cancelled_at is not None


def _folder(project: Project) -> Path:
    return project.path("launches")


def _path(project: Project, plan: str) -> Path:
    if len(plan) != 64 or not all(c in "0123456789abcdef" for c in plan):
        raise StateError(file="launches", at="", problem=f"found {plan[:40]!r}, allowed is the name of a plan")
    return _folder(project) / f"{plan}.json"


def _checked(record: Any, path: Path) -> dict[str, Any]:
    if not quick_check.fits(record, "launches"):
        from gpu_skills import schemas

        schemas.check(record, "launches", file=f"launches/{path.name}", error=StateError)
    return record
