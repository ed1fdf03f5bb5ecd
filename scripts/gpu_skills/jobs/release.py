"""Giving a machine back: refused while a job runs on it or outputs would be lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from gpu_skills.clock import Clock, timestamp
from gpu_skills.errors import JobNotFound, JobRunning, NotCollected, Refused, RemoteError
from gpu_skills.jobs import gone, observe
from gpu_skills.jobs.records import JobFolder, is_collected
from gpu_skills.lifecycle import machines, states
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from gpu_skills.units import counted, format_bytes

if TYPE_CHECKING:
    from gpu_skills.lifecycle.operator import Operator

# Of one job, in a refusal: enough to see what it is about.
FILES_SHOWN = 20


def give_back(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    connect: Callable[[Machine], Link],
    machine: Machine,
    abandon: Collection[str] = (),
) -> str:
    """End the session on a host of the user's own and record the machine as stopped. Its workspace stays there.

    abandon: jobs whose outputs the user said may be lost; recorded. Raises JobRunning or NotCollected.
    """
    if machine.is_rented:
        raise Refused(
            f"{machine.id} is rented: only its destruction ends its bill", next_step=f"gpu machine destroy {machine.id}"
        )
    _require_known(ledger, abandon)
    with closing(connect(machine)) as link:
        for obstacle in _obstacles_there(project, ledger, clock, link, abandon):
            raise obstacle
        _record_abandoned(project, ledger, clock, machine, abandon)
        link.session.call("session", {"project": project.project_id, "session": None, "end": True})
    machines.save(project, replace(machine, status="stopped", session=None))
    return machine.id


def destroy(
    op: Operator,
    machine: Machine,
    *,
    why: str = "asked",
    abandon: Collection[str] = (),
    wait_s: float | None = None,
    approval_id: str | None = None,
) -> Literal["destroyed", "terminating"]:
    """Destroy a rented machine, unless a job runs there or only it has what jobs left.

    abandon: as for `give_back`; it is recorded before anything is asked of the provider.
    """
    from gpu_skills.lifecycle import release

    machine = release.current(op, machine)
    obstacles = gate(op, machine, abandon)
    if not obstacles:
        _record_abandoned(op.project, op.ledger, op.clock, machine, abandon)
    more = {} if wait_s is None else {"wait_s": wait_s}
    return release.destroy(op, machine, why=why, gate=obstacles, approval_id=approval_id, **more)


def gate(op: Operator, machine: Machine, abandon: Collection[str] = ()) -> list[Refused]:
    """What stands against the end of a rented machine: JobRunning, or NotCollected with files, bytes and the command.

    A machine that answers is asked. Of one that does not, what is on record counts: there nobody can tell a job that
    runs from one that ended, so every job that is not collected has to be named in `abandon`.
    """
    _require_known(op.ledger, abandon)
    if machine.status in states.FINAL or not op.ledger.jobs_on(machine.id):
        return []
    if machine.status in ("ready", "busy"):
        try:
            with closing(op.connect(machine)) as link:
                return _obstacles_there(op.project, op.ledger, op.clock, link, abandon)
        except RemoteError as exc:
            op.say(f"{machine.id} does not answer ({exc.message}): what is on record counts")
    return _obstacles_on_record(op, machine, abandon)


def _require_known(ledger: Ledger, jobs: Collection[str]) -> None:
    for job in jobs:
        if ledger.latest(job) is None:
            raise JobNotFound(job=job)


def _record_abandoned(
    project: Project, ledger: Ledger, clock: Clock, machine: Machine, abandon: Collection[str]
) -> None:
    for job in set(abandon) & set(ledger.jobs_on(machine.id)):
        JobFolder(project, job).write("abandoned", {"at": timestamp(clock.now()), "machine_id": machine.id})


def _obstacles_there(
    project: Project, ledger: Ledger, clock: Clock, link: Link, abandon: Collection[str]
) -> list[Refused]:
    """As the machine tells it."""
    observe.settle(project, ledger, clock, link)
    running = observe.open_jobs(ledger, link.machine.id)
    if running:
        return [JobRunning(job=running[0]["id"])]
    lost = _uncollected(project, ledger, link, abandon)
    return [_not_collected(lost)] if lost else []


def _obstacles_on_record(op: Operator, machine: Machine, abandon: Collection[str]) -> list[Refused]:
    jobs = [*gone.unverified_on(op.project, op.ledger, machine.id), *gone.running_on(op.ledger, machine.id)]
    lost: dict[str, list[dict[str, Any]]] = {}
    for job in dict.fromkeys(jobs):
        if job not in abandon:
            with JobFolder(op.project, job).collecting():  # a pull that is under way ends first
                if not is_collected(op.project, job):
                    manifest = JobFolder(op.project, job).read("manifest")
                    lost[job] = list(manifest["files"]) if manifest else []
    if not lost:
        return []
    is_asleep = machine.status in ("stopped", "stopping")
    step = f"gpu machine start {machine.id}" if is_asleep else f"gpu job pull {next(iter(lost))}"
    return [_not_collected(lost, next_step=step)]


def _not_collected(lost: dict[str, list[dict[str, Any]]], *, next_step: str | None = None) -> NotCollected:
    def shown(files: list[dict[str, Any]]) -> str:
        if not files:
            return "nobody knows which"
        return f"{counted(len(files), 'file')}, {format_bytes(sum(f['bytes'] for f in files))}"

    return NotCollected(
        jobs="; ".join(f"{job}: {shown(files)}" for job, files in lost.items()),
        next_step=next_step or f"gpu job pull {next(iter(lost))}",
        outputs={job: files[:FILES_SHOWN] for job, files in lost.items()},
    )


def _uncollected(
    project: Project, ledger: Ledger, link: Link, abandon: Collection[str]
) -> dict[str, list[dict[str, Any]]]:
    lost: dict[str, list[dict[str, Any]]] = {}
    for job in ledger.jobs_on(link.machine.id):
        if job in abandon or is_collected(project, job):
            continue
        folder = JobFolder(project, job)
        if folder.read("accepted") is None:
            continue
        with folder.collecting():  # a pull that is under way ends first
            if is_collected(project, job):
                continue
            try:
                files = observe.outputs_now(project, link, job)["files"]
            except JobNotFound:  # the machine has no trace of it any more: there is nothing left to protect
                continue
        if files:
            lost[job] = files
    return lost
