"""Giving a machine back: refused while a job runs on it or outputs would be lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from gpu_skills.clock import Clock, timestamp
from gpu_skills.errors import JobNotFound, JobRunning, NotCollected, Protected, Refused, RemoteError
from gpu_skills.jobs import durable, gone, observe
from gpu_skills.jobs.records import JobFolder, is_collected
from gpu_skills.lifecycle import intents, machines, states
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from gpu_skills.units import counted, format_bytes

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval, Ask
    from gpu_skills.lifecycle.operator import Operator
    from gpu_skills.providers.base import Machine as Instance

    Agree = Callable[[Ask], Approval]

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
    _require_known(project, ledger, abandon)
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
    agree: Agree | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Literal["destroyed", "terminating"]:
    """Destroy a rented machine, unless a job runs there or only it has what jobs left.

    abandon: as for `give_back`; it is recorded before anything is asked of the provider. agree: the approval for the
    end of a protected machine, asked for when nothing else stands in the way; without it such a one is Protected.
    tell: one line for each look.
    """
    from gpu_skills.lifecycle.ending import release, witness

    machine = witness.current(op, machine)
    for obstacle in gate(op, machine, abandon):
        raise obstacle
    approval = _named_approval(op, "destroy", machine, agree)
    if approval is not None:  # a person may have taken minutes
        for obstacle in gate(op, machine, abandon):
            raise obstacle
    _record_abandoned(op.project, op.ledger, op.clock, machine, abandon)
    if abandon:
        given_up = {"names": sorted(set(abandon))[:FILES_SHOWN]}
        intents.observe(op.project, op.clock, "outputs_abandoned", machine_id=machine.id, details=given_up)
    more = {} if wait_s is None else {"wait_s": wait_s}
    return release.destroy(op, machine, why=why, approval=approval, tell=tell, **more)


def stop(
    op: Operator,
    machine: Machine,
    *,
    why: str = "asked",
    wait_s: float | None = None,
    agree: Agree | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Machine:
    """Stop a rented machine, unless a job runs there or a stop would lose outputs. agree, tell: as for `destroy`."""
    from gpu_skills.lifecycle.ending import stops

    machine, seen = stops.stoppable(op, machine)
    for obstacle in _against_a_stop(op, machine, seen):
        raise obstacle
    approval = _named_approval(op, "stop", machine, agree)
    if approval is not None:  # a person may have taken minutes
        machine, seen = stops.stoppable(op, machine)
        for obstacle in _against_a_stop(op, machine, seen):
            raise obstacle
    more = {} if wait_s is None else {"wait_s": wait_s}
    return stops.stop(op, machine, why=why, approval=approval, tell=tell, **more)


def _against_a_stop(op: Operator, machine: Machine, seen: Instance) -> list[Refused]:
    """As a machine that is up tells it; one that was taken back is brought up first, and has to tell.

    Where its disk survives, only what runs is in the way.
    """
    from gpu_skills.lifecycle.ending import ownership
    from gpu_skills.lifecycle.recovery import returned

    if seen.status != "running":
        return []
    try:
        link = returned.bring_up(op, machine) if machine.has_unknown_past else op.connect(machine)
        with closing(link):
            keeps = ownership.workspace_survives(seen)
            return _obstacles_there(op.project, op.ledger, op.clock, link, keeps_outputs=keeps)
    except RemoteError as exc:
        if machine.has_unknown_past:
            raise
        op.say(f"{machine.id} does not answer ({exc.message}): what is on record counts")
        return []


def _named_approval(
    op: Operator, action: Literal["stop", "destroy"], machine: Machine, agree: Agree | None
) -> Approval | None:
    """What the end of a protected machine takes; None where it takes nothing, or has begun already."""
    from gpu_skills.lifecycle.ending import ownership, witness
    from gpu_skills.lifecycle.renting import keeping

    if machine.status in states.FINAL or witness.under_way(op, action, machine.id) is not None:
        return None
    if not ownership.needs_named_approval(machine, witness.look(op, machine)):
        return None
    if agree is None:
        raise Protected(machine=machine.id)
    return agree(keeping.named_plan(op, action, machine).ask())


def gate(op: Operator, machine: Machine, abandon: Collection[str] = ()) -> list[Refused]:
    """What stands against the end of a rented machine: JobRunning, or NotCollected with files, bytes and the command.

    A machine that answers is asked, also for jobs that no record here names. Of one that does not, what is on record
    counts: there nobody can tell a job that runs from one that ended, so every job that is not collected has to be
    named in `abandon`. Where the records are not whole, the machine's own id there stands for what they do not name.
    """
    if machine.status in ("ready", "busy"):
        try:
            with closing(op.connect(machine)) as link:
                return _obstacles_there(op.project, op.ledger, op.clock, link, abandon)
        except RemoteError as exc:
            op.say(f"{machine.id} does not answer ({exc.message}): what is on record counts")
    _require_known(op.project, op.ledger, abandon)
    return [] if machine.status in states.FINAL else _obstacles_on_record(op, machine, abandon)


def _require_known(project: Project, ledger: Ledger, names: Collection[str], others: Collection[str] = ()) -> None:
    """That what is given up exists: a job, or a machine for the jobs there that no record names."""
    for name in names:
        if name not in others and ledger.latest(name) is None and machines.find(project, name) is None:
            raise JobNotFound(job=name)


def _record_abandoned(
    project: Project, ledger: Ledger, clock: Clock, machine: Machine, abandon: Collection[str]
) -> None:
    for job in set(abandon) & set(gone.jobs_of(project, ledger, machine.id)):
        JobFolder(project, job).write("abandoned", {"at": timestamp(clock.now()), "machine_id": machine.id})


def _obstacles_there(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    link: Link,
    abandon: Collection[str] = (),
    *,
    keeps_outputs: bool = False,
) -> list[Refused]:
    """As the machine tells it. keeps_outputs: whatever is done leaves them where they are; only what runs counts."""
    observe.settle(project, ledger, clock, link)
    strange = _unrecorded(project, ledger, link) if link.machine.is_rented else {}
    _require_known(project, ledger, abandon, strange)
    running = observe.open_jobs(ledger, link.machine.id)
    if running:
        return [JobRunning(job=running[0]["id"])]
    lost = {} if keeps_outputs else _uncollected(project, ledger, clock, link, abandon)
    if lost:
        return [_not_collected(lost)]
    for job, status in strange.items():
        if job in abandon or link.machine.id in abandon:
            continue
        adopt = f"gpu reconcile --provider {link.machine.provider} --adopt"
        step = f"{adopt}; or, to lose what it has: gpu machine destroy {link.machine.id} --abandon-outputs {job}"
        if status["state"] == "running":
            return [JobRunning(f"job {job} is running, and no record here names it", job=job, next_step=step)]
        if keeps_outputs:
            continue
        files = (status.get("outputs") or {}).get("files")
        if files != 0:
            how_many = "files, nobody knows how many" if files is None else counted(files, "file")
            jobs = f"{job}, which no record here names: {how_many}"
            return [NotCollected(jobs=jobs, next_step=step, outputs={job: []})]
    return []


def _unrecorded(project: Project, ledger: Ledger, link: Link) -> dict[str, dict[str, Any]]:
    """What the machine has of this project that no record has of this machine: started before the records were lost."""
    recorded = set(gone.jobs_of(project, ledger, link.machine.id))
    return {job: status for job, status in observe.jobs_there(project, link).items() if job not in recorded}


def _obstacles_on_record(op: Operator, machine: Machine, abandon: Collection[str]) -> list[Refused]:
    jobs = [*gone.unverified_on(op.project, op.ledger, machine.id), *gone.running_on(op.ledger, machine.id)]
    lost: dict[str, list[dict[str, Any]]] = {}
    for job in dict.fromkeys(jobs):
        if job not in abandon:
            with JobFolder(op.project, job).collecting():  # a pull that is under way ends first
                if not is_collected(op.project, job) and not durable.is_kept(op.project, job, op.clock.now()):
                    manifest = JobFolder(op.project, job).read("manifest")
                    lost[job] = list(manifest["files"]) if manifest else []
    is_asleep = machine.status in ("stopped", "stopping")
    may_start = is_asleep and plans.find(op.project, machine.plan) is not None
    if lost:
        step = f"gpu job pull {next(iter(lost))}"
        if is_asleep:  # without its plan it cannot start, and what it has cannot be fetched
            given_up = "".join(f" --abandon-outputs {name}" for name in [machine.id, *lost][:FILES_SHOWN])
            step = f"gpu machine start {machine.id}" if may_start else f"gpu machine destroy {machine.id}{given_up}"
        return [_not_collected(lost, next_step=step)]
    if machine.has_unknown_past and machine.id not in abandon:
        given_up = f"gpu machine destroy {machine.id} --abandon-outputs {machine.id}"
        step = f"gpu machine start {machine.id}; to lose what it has: {given_up}" if may_start else given_up
        return [NotCollected(jobs=f"which jobs {machine.id} has is not on record", next_step=step, outputs={})]
    return []


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
    project: Project, ledger: Ledger, clock: Clock, link: Link, abandon: Collection[str]
) -> dict[str, list[dict[str, Any]]]:
    lost: dict[str, list[dict[str, Any]]] = {}
    for job in gone.jobs_of(project, ledger, link.machine.id):
        if job in abandon or is_collected(project, job):
            continue
        folder = JobFolder(project, job)
        if not gone.may_be_there(ledger, folder):
            continue
        with folder.collecting():  # a pull that is under way ends first
            if is_collected(project, job):
                continue
            try:
                manifest = observe.outputs_now(project, link, job)
            except JobNotFound:  # the machine has no trace of it any more: there is nothing left to protect
                continue
        if manifest["files"] and not durable.is_kept(project, job, clock.now(), manifest):
            lost[job] = manifest["files"]
    return lost
