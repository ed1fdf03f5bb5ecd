"""One machine on record beside what its provider shows: what differs, what it has become, what is due for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpu_skills.clock import time_of, timestamp
from gpu_skills.errors import ConflictingState, GpuError, StopFailed
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.books import lives
from gpu_skills.lifecycle.ending import ownership, stops, witness
from gpu_skills.lifecycle.guard import decisions
from gpu_skills.lifecycle.guard import sentinel_records as deadlines
from gpu_skills.lifecycle.guard.decisions import Decision
from gpu_skills.lifecycle.guard.sentinel_records import SAME_MOMENT, deadline_of
from gpu_skills.lifecycle.intents import Intent
from gpu_skills.lifecycle.labels import Label
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.renting import keeping
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.state import budget
from gpu_skills.units import format_usd, usd

# A start or an extension whose command died may still be on its way; later it is not.
ON_ITS_WAY = timedelta(minutes=10)
# Why a session ended that was the review of a finished job.
REVIEW_OVER = "hold_for"


@dataclass(frozen=True)
class Note:
    """is_not_ours: the instance is not the one our record is about; nothing more is done about it."""

    what: str
    text: str
    next_step: str | None = None
    is_uncertain: bool = False
    is_not_ours: bool = False


def compare(op: Operator, machine: Machine, seen: Instance) -> list[Note]:
    """What record and provider say differently. Where money is concerned the dearer reading goes on record."""
    label = labels.ours(seen.label, op.project.project_id)
    if label is None or label.intent != machine.intent:
        return [
            Note(
                "not_ours",
                f"{seen.instance_id} carries the label {seen.label!r}, our record says {machine.label!r}: not touched",
                f"look at it at {seen.provider}, then: gpu reconcile --provider {seen.provider}",
                is_uncertain=True,
                is_not_ours=True,
            )
        ]
    found = []
    rate = None if seen.rate_usd_hr is None else usd(seen.rate_usd_hr)
    if rate is not None and rate > machine.rate_usd_hr:
        found.append(
            Note(
                "rate_differs",
                f"it costs {format_usd(rate)}/h, on record were {format_usd(machine.rate_usd_hr)}/h",
                f"gpu machine show {machine.id}",
            )
        )
        machines.update(op.project, machine.id, lambda m: replace(m, rate_usd_hr=max(m.rate_usd_hr, rate)))
    found += _label_too_late(op, machine, seen, label)
    deadline_at = deadline_of(op, machine, seen, label)
    on_record = time_of(machine.deadline_at)
    if _differ(on_record, deadline_at):
        what = "none" if deadline_at is None else timestamp(deadline_at)
        found.append(
            Note("deadline_differs", f"its deadline is {what}, on record was {machine.deadline_at}; {what} holds")
        )
        text = None if deadline_at is None else timestamp(deadline_at)
        machines.update(op.project, machine.id, lambda m: replace(m, deadline_at=text))
    if machine.machine_class != label.machine_class:
        found.append(
            Note("class_differs", f"it was made as {label.machine_class}, on record was {machine.machine_class}")
        )
        machines.update(op.project, machine.id, lambda m: replace(m, machine_class=label.machine_class))
    return found


def worked_on(op: Operator, machine: Machine) -> str | None:
    """The approval of a change to this machine that some process is making right now."""
    for intent in intents.read(op.project).values():
        if intent.machine_id == machine.id and intent.is_open and intent.approval_id is not None:
            if runs.is_worked_on(op, intent.approval_id):
                return intent.approval_id
    return None


def _label_too_late(op: Operator, machine: Machine, seen: Instance, label: Label) -> list[Note]:
    """Put the approved deadline back into the label, where that does not disturb the machine."""
    if not deadlines.never_came_true(op, machine, label):
        return []
    may_relabel = op.reader(machine.provider).traits.relabel_is_safe or seen.status == "stopped"
    if may_relabel:
        approved = label.with_deadline(deadlines.deadlines(op, machine.provider)[label.intent])
        op.writer(machine.provider).set_label(seen.instance_id, str(approved))
        machines.update(op.project, machine.id, lambda m: replace(m, label=str(approved)))
    text = "its label has the deadline of a change that came to nothing"
    return [Note("label_differs", text + (": mended" if may_relabel else "; it is mended once it is stopped"))]


def follow(op: Operator, machine: Machine, seen: Instance) -> Machine:
    """Bring the record to what the provider shows, and close what had begun; the record as it is then."""
    machine = witness.current(op, machine)
    for intent in intents.read(op.project).values():
        if intent.machine_id != machine.id or not intent.is_open:
            continue
        if intent.action == "stop":
            return _finish_stop(op, machine, seen, intent)
        if intent.action == "start":
            return _finish_start(op, machine, seen, intent)
        if intent.action == "extend":
            _finish_extend(op, machine, seen, intent)
    destroy = witness.open_destroy(op, machine.id)
    if destroy is not None and not _would_lose_a_job(op, machine, destroy):
        return machines.set_status(op.project, machine.id, "terminating", clock=op.clock)
    while destroy is not None:  # several commands may have asked at once
        intents.close(op.project, op.clock, destroy.id, "failed", reason="no delete was taken, and a job runs there")
        destroy = witness.open_destroy(op, machine.id)
    return _as_shown(op, witness.current(op, machine), seen)


def _would_lose_a_job(op: Operator, machine: Machine, destroy: Intent) -> bool:
    """Whether a destroy that no provider took yet would end a job that nobody gave up."""
    why = destroy.reason or str(destroy.details.get("why") or "asked")
    is_given_up = intents.observations(op.project, "outputs_abandoned", machine_id=machine.id)
    is_taken = witness.evidence_of(op, machine).taken_at is not None
    return not (why in states.ENDS_OF_JOBS or is_given_up or is_taken) and bool(op.running_jobs(machine.id))


def _finish_stop(op: Operator, machine: Machine, seen: Instance, intent: Intent) -> Machine:
    """It shows as stopped, or is asked once more: a stop of what is stopped changes nothing."""
    why = intent.reason or str(intent.details.get("why") or "asked")
    if seen.status == "stopped":
        intents.close(op.project, op.clock, intent.id, "done", reason="read back")
        return stops.note_stopped(op, machine, seen, why)
    if op.running_jobs(machine.id) and why not in states.ENDS_OF_JOBS:
        intents.close(
            op.project, op.clock, intent.id, "failed", reason="it does not show as stopped, and a job runs there"
        )
        return _as_shown(op, machine, seen)
    intents.close(op.project, op.clock, intent.id, "failed", reason="it does not show as stopped: asked again")
    try:
        return stops.stop(op, machine, why=why, despite_jobs=True)
    except (StopFailed, ConflictingState):
        return witness.current(op, machine)


def _finish_start(op: Operator, machine: Machine, seen: Instance, intent: Intent) -> Machine:
    """Read back, never sent again: it bills."""
    if seen.status in ("booting", "running"):
        intents.close(op.project, op.clock, intent.id, "done", reason="read back")
        return machines.set_status(op.project, machine.id, "booting", clock=op.clock)
    began = time_of(intent.ts)
    if seen.status == "stopped" and began is not None and op.clock.now() - began >= ON_ITS_WAY:
        intents.close(op.project, op.clock, intent.id, "failed", reason="it did not start")
        _free(op, intent)
        return stops.note_stopped(op, machine, seen, "it did not start")
    return machine


def _free(op: Operator, intent: Intent) -> None:
    """What was reserved for a change that came to nothing."""
    for name, reserved in budget.open_reservations(op.project, op.environ).items():
        if name in (intent.id, intent.approval_id) and reserved.reservation.account:
            directory = reserved.reservation.account
            budget.settle(op.project, op.clock, intent=name, directory=directory, settled_usd=0, environ=op.environ)


def _finish_extend(op: Operator, machine: Machine, seen: Instance, intent: Intent) -> None:
    """The fuse on the machine has the last word: what it holds is the deadline.

    What it does not hold after a while came to nothing; `gpu machine extend` asks again.
    """
    wanted = time_of(intent.details.get("deadline_at"))
    if wanted is not None and seen.status == "running" and not _differ(_held_by_fuse(op, machine), wanted):
        intents.close(op.project, op.clock, intent.id, "done", reason="read back")
        machines.update(op.project, machine.id, lambda m: replace(m, deadline_at=timestamp(wanted)), clock=op.clock)
        return
    began = time_of(intent.ts)
    if began is None or op.clock.now() - began >= ON_ITS_WAY:
        intents.close(op.project, op.clock, intent.id, "failed", reason="the machine did not take it")
        _free(op, intent)


def _held_by_fuse(op: Operator, machine: Machine) -> datetime | None:
    """The deadline in the machine's own receipt; None where it cannot be read now."""
    from gpu_skills.lifecycle.guard import fuse

    try:
        link = op.connect(machine)
        try:
            receipt = fuse.read_receipt(link, machine)
            return None if receipt is None else receipt.deadline_at
        finally:
            link.close()
    except GpuError:
        return None


def _as_shown(op: Operator, machine: Machine, seen: Instance) -> Machine:
    now = timestamp(op.clock.now())
    conditions = tuple(dict.fromkeys((*machine.conditions, *seen.conditions)))
    machines.update(
        op.project, machine.id, lambda m: replace(m, last_seen_at=now, conditions=conditions), clock=op.clock
    )
    if seen.status == "stopped" and machine.status != "stopped":
        return _fell_asleep(op, machine, seen)
    if seen.status in ("booting", "running") and machine.status == "stopped":
        intents.observe(op.project, op.clock, lives.RUNNING, machine_id=machine.id, details={"at": now})
        return machines.set_status(op.project, machine.id, "booting", clock=op.clock)
    if seen.status in ("terminating", "unknown"):
        return machines.set_status(op.project, machine.id, seen.status, clock=op.clock)
    if machine.status == "terminating":  # nobody sent it away, and its provider no longer says that it goes
        return machines.set_status(op.project, machine.id, states.AS_SHOWN.get(seen.status, "unknown"), clock=op.clock)
    if machine.status in ("unknown", "requested"):
        shown = "ready" if seen.status == "running" and machine.ready_at else seen.status
        return machines.set_status(op.project, machine.id, "booting" if shown == "running" else shown, clock=op.clock)
    return witness.current(op, machine)


def _fell_asleep(op: Operator, machine: Machine, seen: Instance) -> Machine:
    """It stopped without a word from here: its deadline, its idleness, or its vendor."""
    now = op.clock.now()
    deadline_at = time_of(machine.deadline_at)
    taken_away = [c for c in seen.conditions if c in ("outbid", "preempted")]
    review_ended = _review_ended(machine, now)
    if taken_away:
        why, at = taken_away[0], now
    elif review_ended is not None:
        why, at = REVIEW_OVER, review_ended
    elif deadline_at is not None and now >= deadline_at - timedelta(minutes=1):
        why, at = "deadline_passed", min(now, max(deadline_at, time_of(machine.last_seen_at) or deadline_at))
    else:
        why, at = "stopped_by_itself", now
    details = {"at": timestamp(at), "seen_at": timestamp(now)}
    intents.observe(op.project, op.clock, lives.STOPPED, machine_id=machine.id, reason=why, details=details)
    if why == "deadline_passed":
        intents.observe(op.project, op.clock, "deadline_passed", machine_id=machine.id, details=details)
    if why == "stopped_by_itself":
        op.notify("idle_stop", machine.id, provider=machine.provider, uncollected=", ".join(op.unverified(machine.id)))
    machine = stops.note_stopped(op, machine, seen, why)
    return machines.update(
        op.project, machine.id, lambda m: replace(m, extra={**m.extra, "stopped_at": timestamp(at)}), clock=op.clock
    )


def _review_ended(machine: Machine, now: datetime) -> datetime | None:
    """When the machine itself ended a review that nobody here was left to end; None: it did not, for all we know."""
    session = machine.session or {}
    ends = [time_of(session.get(machines.TOLD_UNTIL)), time_of(machine.extra.get(keeping.HELD_UNTIL))]
    until = max((at for at in ends if at is not None), default=None)
    seen_at = time_of(machine.last_seen_at)
    if session.get("deadline_reason") != REVIEW_OVER or until is None or until > now:
        return None
    return until if seen_at is None else max(until, seen_at)


def reappeared(op: Operator, gone: Machine, seen: Instance) -> Machine:
    """A new record for what came back: a record that is final never changes. It billed all the while."""
    number, identity = 0, gone.id
    while (known := machines.find(op.project, identity)) is not None and known.status in states.FINAL:
        number += 1
        more = "" if number == 1 else f"\0{number}"
        identity = labels.machine_id(f"{gone.intent}\0{seen.instance_id}{more}")
    if known is not None:
        return known
    again = replace(
        gone,
        id=identity,
        status="unknown",
        label=seen.label,
        created_at=gone.destroyed_at or gone.last_seen_at or timestamp(op.clock.now()),
        ready_at=gone.destroyed_at or gone.last_seen_at,
        destroyed_at=None,
        last_seen_at=timestamp(op.clock.now()),
        extra={**gone.extra, "was": gone.id},
    )
    machines.save(op.project, again)
    return again


def due(op: Operator, machine: Machine, seen: Instance) -> Decision:
    """What its deadline asks for now. Idle, with nothing on it that is not elsewhere too, it goes like any other."""
    label = labels.ours(seen.label, op.project.project_id)
    if label is None or machine.machine_class == "production":
        return Decision("none", "not for us to end")
    is_protected = ownership.needs_named_approval(machine, seen)
    decision = decisions.decide(
        seen,
        label,
        deadline_of(op, machine, seen, label),
        op.clock.now(),
        grace_of(op, machine),
        _proof(op, machine),
        is_protected=is_protected,
    )
    if decision.action != "keep" or is_protected:
        return decision
    if machine.has_unknown_past:
        return replace(decision, why="it was taken back from its label: which jobs it has is not on record")
    if op.running_jobs(machine.id) or op.unverified(machine.id):
        return decision
    return Decision("destroy", "its deadline and the time its disk is kept have passed; its outputs are collected")


def _proof(op: Operator, machine: Machine) -> Callable[[Instance, Label, datetime], bool]:
    """What our own journal or the charges say of what stopped it."""

    def was_stopped_by_deadline(seen: Instance, label: Label, deadline_at: datetime) -> bool:
        if machine.extra.get("stopped_why") == "deadline_passed" and _was_up_at(op, machine, deadline_at):
            return True
        account = op.account(machine.provider)
        earlier = [deadlines.stops(op, machine.provider, account)]
        proofs = decisions.proofs(op.reader(machine.provider), op.clock, account, op.project.project_id, earlier)
        return proofs(seen, label, deadline_at)

    return was_stopped_by_deadline


def _was_up_at(op: Operator, machine: Machine, deadline_at: datetime) -> bool:
    """Whether somebody saw it run shortly before its deadline, or ended it there."""
    for intent in intents.read(op.project).values():
        if intent.machine_id == machine.id and intent.action == "stop" and intent.result == "done":
            closed = time_of(intent.closed_at)
            if closed is not None and closed >= deadline_at - decisions.STOPPED_AT_DEADLINE:
                return True
    return False


def grace_of(op: Operator, machine: Machine) -> timedelta:
    """How long the disk of a stopped one is kept after its deadline: as its plan says."""
    plan = plans.find(op.project, machine.plan)
    return timedelta(seconds=decisions.STORAGE_GRACE_S if plan is None else plan.storage_grace_s)


def _differ(one: datetime | None, other: datetime | None) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(one - other) > SAME_MOMENT
