"""A sentinel pass where there are records: what they know beside the labels, and how they learn what the pass did."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import GpuError, StateError
from gpu_skills.lifecycle import intents, machines, runs, states
from gpu_skills.lifecycle.approval import actions, uses
from gpu_skills.lifecycle.ending import ownership, release, witness
from gpu_skills.lifecycle.ending.stops import note_stopped
from gpu_skills.lifecycle.guard import decisions
from gpu_skills.lifecycle.guard.sentinel import Note, Pass
from gpu_skills.lifecycle.intents import Intent
from gpu_skills.lifecycle.labels import Label
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.state import files

DEADLINE = "deadline_passed"
# Seconds are cut from times on record and in labels.
SAME_MOMENT = timedelta(seconds=2)
_MAX_FILE_BYTES = 1 << 20


def deadlines(op: Operator, provider: str) -> dict[str, datetime | None]:
    """The deadlines that were approved here, by intent: of each create, and of each extension that was done.

    The machine registry is not asked: it is a file for hands, and a slip there must not keep a machine burning.
    """
    found: dict[str, datetime | None] = {}
    for run in runs.own_runs(op):
        if run.provider == provider:
            for attempt in run.attempts:
                _later(found, attempt.intent, attempt.deadline_at)
    by_machine = {m.id: m.intent for m in machines.all_machines(op.project) if m.provider == provider and m.intent}
    for intent in intents.read(op.project).values():
        is_done = intent.action in ("extend", "start") and intent.result == "done"
        if is_done and intent.machine_id in by_machine and _was_allowed(op, intent):
            _later(found, str(by_machine[intent.machine_id]), intent.details.get("deadline_at"))
    return found


def _was_allowed(op: Operator, intent: Intent) -> bool:
    """Whether an approval was used for a plan of just this: the journal of a project is a file for hands too."""
    try:
        used = uses.load(op, intent.approval_id) if intent.approval_id else None
        if used is None or (used.project_id, used.action) != (op.project.project_id, intent.action):
            return False
        _, plan = actions.load(op.project, used.plan_sha256)
    except GpuError:
        return False
    told = (intent.machine_id, intent.details.get("deadline_at"))
    return isinstance(plan, actions.ActionPlan) and (plan.machine_id, plan.deadline_at) == told


def deadline_of(op: Operator, machine: Machine, seen: Instance, label: Label) -> datetime | None:
    """What holds: the label, or what was approved later. Never what stands in the registry."""
    known = deadlines(op, machine.provider)
    if never_came_true(op, machine, label):
        return known[label.intent]
    return decisions.effective_deadline(seen, label, known)


def never_came_true(op: Operator, machine: Machine, label: Label) -> bool:
    """Whether the label holds the deadline of a start or an extension that came to nothing."""
    approved = deadlines(op, machine.provider).get(label.intent)
    if approved is None or label.deadline_at is None or label.deadline_at - approved <= SAME_MOMENT:
        return False
    return any(
        i.action in ("start", "extend") and i.machine_id == machine.id and i.result in ("failed", "refused")
        for i in intents.read(op.project).values()
    )


def protected(op: Operator, provider: str) -> set[str]:
    """The intents of machines whose end takes an approval that names them."""
    found = (m for m in machines.all_machines(op.project) if m.provider == provider and m.intent)
    return {str(m.intent) for m in found if ownership.needs_named_approval(m, None)}


def _later(found: dict[str, datetime | None], intent: str, text: Any) -> None:
    try:
        moment = parse_timestamp(text) if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return
    before = found.get(intent)
    if moment is not None and (before is None or moment > before):
        found[intent] = moment


def read_deadlines(path: str) -> dict[str, datetime | None]:
    """A file of deadlines: one object, intent or instance id → time, or null for production. StateError otherwise."""
    from pathlib import Path

    record = files.read_json(Path(path).expanduser(), max_bytes=_MAX_FILE_BYTES, default=None)
    if record is None:
        raise StateError(file=path, at="", problem="found no file", next_step="gpu sentinel --help")
    if not isinstance(record, dict):
        raise StateError(file=path, at="", problem="found something else, allowed is an object of times")
    found: dict[str, datetime | None] = {}
    for key, value in record.items():
        try:
            found[key] = None if value is None else parse_timestamp(value)
        except (TypeError, ValueError, OverflowError) as exc:
            raise StateError(
                file=path, at=f" /{key}", problem=f"found {value!r}, allowed is a time with its zone, or null"
            ) from exc
    return found


def stops(op: Operator, provider: str, account: str) -> dict[str, Any]:
    """As an earlier receipt would tell it: the machines of this project that were stopped here for their deadline."""
    on_record = {m.id: m for m in machines.all_machines(op.project) if m.provider == provider}
    found: dict[str, Any] = {}
    for intent in intents.read(op.project).values():
        machine = on_record.get(intent.machine_id or "")
        if (
            machine is None
            or intent.action != "stop"
            or intent.result != "done"
            or intent.details.get("why") != DEADLINE
        ):
            continue
        if machine.instance_id is not None and machine.deadline_at is not None and intent.closed_at:
            found[machine.instance_id] = {"at": intent.closed_at, "deadline_at": machine.deadline_at}
    return {"provider": provider, "account": account, "project_id": op.project.project_id, "stopped": found}


def recorder(op: Operator, provider: str) -> Note:
    """Writes each act of a pass ahead into the journal of this project, and what came of it behind.

    What could not be written ahead has no end to write behind: the record still learns what the machine is now.
    """
    begun: dict[str, str] = {}

    def note(action: str, seen: Instance, why: str, result: str | None) -> None:
        machine = _on_record(op, provider, seen)
        if machine is None or (action == "stop" and seen.status == "stopped"):  # that was no deadline
            return
        if result is None:
            begun[seen.instance_id] = _begin(op, machine, action)
            after = "stopping" if action == "stop" else "terminating"
            if machine.status not in states.FINAL and not (action == "stop" and machine.status == "terminating"):
                witness.set_status(op, machine, after)
            return
        if action == "stop" and (intent := begun.get(seen.instance_id)) is not None:
            word = "done" if result == "stopped" else "failed" if result == "failed" else "unknown"
            intents.close(op.project, op.clock, intent, word, machine_id=machine.id)
        if result == "stopped":
            note_stopped(op, machine, seen, DEADLINE)
        elif result == "destroyed":
            release.note_gone(op, machine)

    return note


def _begin(op: Operator, machine: Machine, action: str) -> str:
    open_one = witness.open_destroy(op, machine.id) if action == "destroy" else None
    if open_one is not None:
        return open_one.id
    intent = intents.new_id()
    intents.begin(
        op.project,
        op.clock,
        "stop" if action == "stop" else "destroy",
        intent,
        provider=machine.provider,
        account=machine.account,
        machine_id=machine.id,
        instance_id=machine.instance_id,
        label=machine.label,
        details={"why": DEADLINE},
    )
    return intent


def _on_record(op: Operator, provider: str, seen: Instance) -> Machine | None:
    for machine in machines.all_machines(op.project):
        if machine.provider == provider and machine.instance_id == seen.instance_id:
            return machine
    return None


def tell(op: Operator, done: Pass) -> None:
    """Alarms of a pass reach whoever the policy names."""
    for row in done.rows:
        if row.alarm is None:
            continue
        try:
            machine = _on_record(op, done.provider, row.seen)
        except GpuError:
            machine = None
        event = "destroy_unconfirmed" if row.result in ("failed", "stopping", "terminating") else "recovery"
        op.notify(
            event,
            machine.id if machine is not None else f"{done.provider} {row.seen.instance_id}",
            what=row.alarm,
            provider=done.provider,
            instance_id=row.seen.instance_id,
            deadline_at=None if row.deadline_at is None else timestamp(row.deadline_at),
            intent=row.label.intent,
        )
