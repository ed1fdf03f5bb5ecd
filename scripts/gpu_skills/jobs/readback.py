"""Jobs whose records were lost, put on record again as their machine tells them.

The machine says that a job is there, when it began and how it ended; what was sent and what it is called is lost.
"""

from __future__ import annotations

import math
import secrets
from datetime import UTC, datetime
from typing import Any

from gpu_skills.clock import Clock, timestamp
from gpu_skills.errors import StateError
from gpu_skills.jobs import gone, observe
from gpu_skills.jobs.observe import Notify
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle.connect import Link
from gpu_skills.state import files
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project

# Of one machine. One that tells more than anybody submits is not believed, nor numbers that leave none above them.
MAX_TAKEN = 1000
MAX_NUMBER = 10**12


def jobs_there(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    link: Link,
    *,
    write: bool,
    notify: Notify = lambda event, subject, **facts: None,
) -> tuple[list[str], list[str]]:
    """(put on record now, still on no record): the jobs the machine has that no record here names, by id.

    write: put them on record. What stays is more than MAX_TAKEN, or a number that is another job's here: two jobs are
    never one.
    """
    known = set(gone.jobs_of(project, ledger, link.machine.id))
    strange = {job: status for job, status in observe.jobs_there(project, link).items() if job not in known}
    taken: list[str] = []
    for job, status in strange.items() if write else ():
        if len(taken) < MAX_TAKEN and _take(project, ledger, clock, link, job, status):
            taken.append(job)
    if taken:
        observe.settle(project, ledger, clock, link, notify=notify)
    return taken, [job for job in strange if job not in taken]


def highest_there(project: Project, link: Link) -> int:
    """The highest number of a job that the machine has, 0 without one."""
    numbers = (int(job[2:]) for job in observe.jobs_there(project, link))
    return max((number for number in numbers if number < MAX_NUMBER), default=0)


def _take(project: Project, ledger: Ledger, clock: Clock, link: Link, job: str, status: dict[str, Any]) -> bool:
    machine, folder = link.machine, JobFolder(project, job)
    if int(job[2:]) >= MAX_NUMBER:
        return False
    files.make_directory(folder.path)
    with folder.submitting():
        if ledger.latest(job) is not None or not _is_free_for(folder, machine.id):
            return False
        now = clock.now()
        began = _moment(status.get("started_epoch_s"), now)
        if not folder.was_sent:
            nonce = status.get("nonce")
            record = {
                "nonce": nonce if isinstance(nonce, str) else secrets.token_hex(8),
                "created_at": timestamp(began),
            }
            of_machine = {"machine_id": machine.id, "provider": machine.provider, "gpu": machine.gpu}
            folder.write("job", {"id": job, **record, **of_machine, "rate_usd_hr": machine.rate_json})
        if folder.read("accepted") is None:
            folder.write("accepted", {"at": timestamp(now), "state": status["state"]})
        ledger.start(
            {
                "id": job,
                "deployment_id": None,
                "machine_id": machine.id,
                "provider": machine.provider,
                "model": None,
                "workflow": None,
                "workflow_version": None,
                "inputs": {},
                "gpu": machine.gpu,
                "started_at": timestamp(began),
            }
        )
    return True


def _is_free_for(folder: JobFolder, machine_id: str) -> bool:
    """Whether what is known of a job by this number, if anything, is of this machine's."""
    try:
        sent = folder.read("job")
    except StateError:  # damaged: the machine knows better
        return False
    return sent is None or sent["machine_id"] == machine_id


def _moment(epoch_s: Any, now: datetime) -> datetime:
    """When it began, by the machine's clock; never in what is still to come."""
    if isinstance(epoch_s, int | float) and math.isfinite(epoch_s) and 0 <= epoch_s <= now.timestamp():
        return datetime.fromtimestamp(epoch_s, tz=UTC)
    return now
