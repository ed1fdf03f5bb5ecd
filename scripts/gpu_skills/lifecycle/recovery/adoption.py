"""What carries our label and is not on record: taken back from its label alone, when somebody asks for that.

A lost state directory loses the records, not the machines: the label tells project, intent and deadline, the provider
tells rate and state, and the user's own state directory still has the runs. A machine of another state directory of the
same project is never taken while that directory is there: its books are kept there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal

from gpu_skills.clock import timestamp
from gpu_skills.errors import Refused, UsageError
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.ending import ownership
from gpu_skills.lifecycle.labels import Label
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.renting import outcomes
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.providers.base import SshEndpoint
from gpu_skills.state import budget, files
from gpu_skills.state.project import ALLOWED_ID, PROJECT_ID, Project


@dataclass(frozen=True)
class Unrecorded:
    """run: the one that made it, if the user's state directory has it. elsewhere: the state directory that keeps it."""

    seen: Instance
    label: Label
    run: Run | None
    elsewhere: str | None


def unrecorded(op: Operator, provider: str, shown: Iterable[Instance], *, has_own: bool = False) -> list[Unrecorded]:
    """The instances with our label that no record names.

    has_own: also those of own runs, whose record was lost; reconcile finds them by their run. Never one whose record
    waits for its id.
    """
    ours = [m for m in machines.all_machines(op.project) if m.provider == provider and m.is_rented]
    on_record = {m.instance_id for m in ours}
    awaited = {m.intent for m in ours if m.instance_id is None}
    all_of_user = [run for run in runs.all_runs(op) if run.project_id == op.project.project_id]
    owner, found = runs.owner_of(op), []
    for seen in shown:
        label = labels.ours(seen.label, op.project.project_id)
        if label is None or seen.instance_id in on_record:
            continue
        run = next((r for r in all_of_user if any(a.intent == label.intent for a in r.attempts)), None)
        if run is not None and run.owner == owner and (not has_own or label.intent in awaited):
            continue
        found.append(Unrecorded(seen, label, run, run.owner if run is not None and runs.is_there(run) else None))
    return found


def take(op: Operator, one: Unrecorded) -> Machine:
    """Put it on record, and its run under this state directory. Refused while another one keeps it."""
    if one.elsewhere is not None:
        raise Refused(
            f"{one.seen.provider} {one.seen.instance_id} belongs to {one.elsewhere.rpartition(':')[0]}",
            next_step="run the command there",
        )
    if one.run is not None:
        take_run(op, one.run)
    record = rebuilt(op, one)
    known = intents.read(op.project).get(one.label.intent)
    if known is None:
        intents.begin(
            op.project,
            op.clock,
            "create",
            one.label.intent,
            provider=one.seen.provider,
            machine_id=record.id,
            label=one.seen.label,
            approval_id=one.run.approval_id if one.run is not None else None,
            reason="adopted: rebuilt from its label",
        )
    intents.close(
        op.project, op.clock, one.label.intent, "done", machine_id=record.id, instance_id=one.seen.instance_id
    )
    machines.save(op.project, record)
    if one.run is not None:
        _won(op, one.run, one.label.intent, record.id)
    return record


def note_lost(op: Operator, run: Run, machine: Machine) -> Machine:
    """Mark a machine whose record was lost and made anew from its run: what it has of jobs may be lost as well.

    Without its plan nobody can go on making it ready as it was planned: the run is over, and it is brought up as it is.
    """
    now = timestamp(op.clock.now())
    if machine.intent is not None and plans.find(op.project, run.plan_sha256) is None:
        _won(op, run, machine.intent, machine.id)
    return machines.update(
        op.project, machine.id, lambda m: replace(m, extra={**m.extra, "adopted_at": now}), clock=op.clock
    )


def rebuilt(op: Operator, one: Unrecorded) -> Machine:
    """The record that label, provider and run make. What it cost before now is billed from when it was made."""
    seen, label = one.seen, one.label
    now = timestamp(op.clock.now())
    attempt = next((a for a in one.run.attempts if a.intent == label.intent), None) if one.run is not None else None
    identity = attempt.machine_id if attempt is not None else labels.machine_id(label.intent)
    if machines.find(op.project, identity) is not None:
        identity = labels.machine_id(f"{label.intent}\0{seen.instance_id}")
    rates = [seen.rate_usd_hr, Decimal(str(attempt.rate_usd_hr)) if attempt is not None else None]
    made = attempt.began_at if attempt is not None else now if seen.created_at is None else timestamp(seen.created_at)
    is_up = seen.status == "running"
    return Machine(
        id=identity,
        provider=seen.provider,
        host=seen.instance_id,
        status=states.AS_SHOWN.get(seen.status, "unknown"),
        rate_usd_hr=max((rate for rate in rates if rate is not None), default=Decimal(0)),
        storage_usd_hr=seen.storage_usd_hr,
        gpu=seen.gpu,
        gpu_count=seen.gpu_count or 0,
        vram_gb=seen.vram_gb,
        disk_gb=seen.disk_gb,
        endpoint=next(iter(endpoints_of(op, seen)), None) if is_up else None,
        root=outcomes.root_of(op, one.run.plan_sha256 if one.run is not None else None),
        label=seen.label,
        machine_class=label.machine_class,
        intent=label.intent,
        plan=one.run.plan_sha256 if one.run is not None else None,
        account=one.run.account if one.run is not None else ownership.account_of(op, seen.provider),
        host_key=f"{seen.provider}:{seen.machine_id}" if seen.machine_id else None,
        created_at=made,
        ready_at=made if seen.status in ("running", "stopped", "stopping") else None,
        deadline_at=None if label.deadline_at is None else timestamp(label.deadline_at),
        last_seen_at=now,
        extra={"adopted_at": now, **({"approval_id": one.run.approval_id} if one.run is not None else {})},
    )


def endpoints_of(op: Operator, seen: Instance) -> list[SshEndpoint]:
    """The ways in that carry commands, with this user's key for rented machines."""
    key = str(op.user_state / "ssh" / "id_ed25519")
    return [replace(way.endpoint, identity_file=key) for way in seen.ways if way.carries_commands]


# runs of a state directory that is gone -----------------------------------------------------------------------------


def orphaned(op: Operator) -> list[Run]:
    """Those whose reservation nobody would settle."""
    return [run for run in runs.orphaned(op) if not run.is_settled]


def take_run(op: Operator, run: Run) -> Run:
    """Make a run this state directory's. What its lost journal knew of creates is looked for again."""
    if run.owner == runs.owner_of(op):
        return run
    if runs.is_there(run):
        raise Refused(
            f"approval {run.approval_id} belongs to another state directory", next_step="run gpu reconcile there"
        )
    known = intents.read(op.project)
    for attempt in run.attempts:
        if attempt.intent not in known and attempt.result != "refused" and not attempt.is_over:
            remember_create(op, run, attempt)
    return runs.update(op, run.approval_id, lambda found: replace(found, owner=runs.owner_of(op)))


def remember_create(op: Operator, run: Run, attempt: Attempt) -> None:
    """Write into a journal that was lost what the run's file still knows: that this create may have been sent."""
    intents.begin(
        op.project,
        op.clock,
        "create",
        attempt.intent,
        provider=run.provider,
        account=run.account,
        machine_id=attempt.machine_id,
        label=attempt.label,
        approval_id=run.approval_id,
        reason="adopted: its journal is lost",
    )


def _won(op: Operator, run: Run, intent: str, machine_id: str) -> None:
    """A run whose machine was taken back makes no further one."""

    def won(found: Run) -> Run:
        attempt = next(a for a in found.attempts if a.intent == intent)
        marked: Attempt = replace(attempt, machine_id=machine_id, result="done", is_over=False)
        state = "won" if found.state == "open" else found.state
        return replace(runs.with_attempt(found, marked), state=state, won=found.won or intent)

    runs.update(op, run.approval_id, won)
    budget.note_attempt(
        op.project, op.clock, intent=run.approval_id, directory=run.account, machine_id=machine_id, environ=op.environ
    )


# a lost project.json ------------------------------------------------------------------------------------------------


def project_ids(shown: Iterable[Instance]) -> dict[str, int]:
    """The project ids in the labels of an account, each with how many instances carry it."""
    found: dict[str, int] = {}
    for seen in shown:
        label = labels.parse(seen.label)
        if label is not None:
            found[label.project_id] = found.get(label.project_id, 0) + 1
    return dict(sorted(found.items()))


def take_project_id(project: Project, project_id: str, seen: Iterable[str]) -> Project:
    """Give a project the id that its machines carry: one seen on an account, while the project has nothing else."""
    if project.project_id == project_id:
        return project
    if not PROJECT_ID.fullmatch(project_id):
        raise UsageError(f"found project id {project_id[:80]!r}, allowed are {ALLOWED_ID}", next_step="gpu reconcile")
    known = sorted(seen)
    if project_id not in known:
        raise Refused(
            f"no instance carries the project id {project_id}; seen are {', '.join(known) or 'none'}",
            next_step="gpu reconcile",
        )
    alive = [m.id for m in machines.all_machines(project) if m.is_rented and m.status not in states.FINAL]
    if alive:
        raise Refused(
            f"this project has machines under its own id {project.project_id}: {', '.join(alive[:5])}",
            next_step="gpu destroy",
        )
    project.require_writable()
    files.update(project.path("project.json"), lambda content: {**content, "project_id": project_id})
    return replace(project, project_id=project_id)
