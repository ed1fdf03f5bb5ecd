"""A create whose answer never came, or came wrong: found by the intent in its label, the only handle on it.

find()           what carries the intent; several are one request that arrived twice
settle_on_one()  the oldest becomes the record's, the others go
unknown()        nobody knows: it bills as far as anybody can tell, and is never sent again
unwanted()       why one that turned up late has to go again
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import GpuError, NoCapacity, ProviderSilent, Unreachable, UsageError, one_line
from gpu_skills.lifecycle import intents, labels, machines, states
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import outcomes
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import Machine as Instance


def find(op: Operator, provider: str, intent: str) -> list[Instance]:
    """All instances that carry the intent in their label, the oldest first. Raises what a list raises.

    Never by the whole label: its deadline may have been moved since.
    """
    return find_any(op, provider, [intent])[intent]


def find_any(op: Operator, provider: str, wanted: Iterable[str]) -> dict[str, list[Instance]]:
    """As `find`, for several intents in one list."""
    found: dict[str, list[Instance]] = {intent: [] for intent in wanted}
    for seen in op.reader(provider).machines():
        intent = labels.intent_of(seen.label, op.project.project_id)
        if intent in found:
            found[intent].append(seen)
    now = op.clock.now()
    for same in found.values():
        same.sort(key=lambda seen: (seen.created_at is None, seen.created_at or now, seen.instance_id))
    return found


def found_out(op: Operator, run: Run, attempt: Attempt) -> Machine | None:
    """The machine of an attempt, None when it is clear that there is none. Raises when nobody knows."""
    intent = intents.read(op.project).get(attempt.intent)
    machine = machines.find(op.project, attempt.machine_id)
    if intent is None:
        outcomes.refused(op, run, attempt, NoCapacity("it was written down and never sent"))
        return None
    if intent.result == "refused":
        outcomes.end_refused(op, run, attempt, intent.reason or "refused", intent.details.get("code"))
        return None
    if machine is not None and machine.instance_id is not None:
        return machine
    if intent.result == "done" and intent.instance_id is not None:
        return outcomes.record_created(op, run, attempt, intent.instance_id)
    found = find(op, run.provider, attempt.intent)
    if found:
        return settle_on_one(op, run, attempt, found)
    raise unknown(op, run, attempt, Unreachable(host=run.provider, reason="no list shows it so far"))


def unknown(op: Operator, run: Run, attempt: Attempt, problem: GpuError) -> ProviderSilent:
    """Say so on record: it counts as burning and keeps its reservation until reconcile has found out."""
    reason = one_line(problem.message, limit=300)
    intents.close(op.project, op.clock, attempt.intent, "unknown", reason=reason)
    if machines.find(op.project, attempt.machine_id) is not None:
        machines.update(
            op.project,
            attempt.machine_id,
            lambda machine: machine if machine.status in states.FINAL else replace(machine, status="unknown"),
            clock=op.clock,
        )
    outcomes.note(op, run, attempt, result="unknown", reason=problem.code)
    op.notify("recovery", attempt.machine_id, what="create_unknown", reason=reason, intent=attempt.intent)
    return ProviderSilent(
        provider=run.provider,
        what=f"the create of {attempt.label}",
        reason=reason,
        machine=attempt.machine_id,
        label=attempt.label,
        next_step="gpu reconcile",
    )


def settle_on_one(op: Operator, run: Run, attempt: Attempt, found: Sequence[Instance]) -> Machine:
    """The oldest becomes ours; what else one request made goes: it has the very same label.

    Another deadline in it is another request, of a state directory that used the approval too: left alone.
    """
    first, *others = sorted(found, key=lambda seen: not is_of(attempt, seen))
    machine = adopt(op, run, attempt, first)
    for other in others:
        if is_of(attempt, other):
            destroy_twin(op, run, attempt, other)
    return machine


def is_of(attempt: Attempt, seen: Instance) -> bool:
    """Whether this very attempt made it, as far as a label tells."""
    return seen.label == attempt.label


def adopt(op: Operator, run: Run, attempt: Attempt, found: Instance) -> Machine:
    """The machine of an attempt was found by its label: it is on record from now on. Whether it is wanted: `unwanted`.

    The caller works on the run. The record's status is `booting`: whoever goes on looks at it anew.
    """
    return outcomes.record_created(op, run, attempt, found.instance_id, found)


def unwanted(op: Operator, run: Run, attempt: Attempt, found: Instance, plan: Plan | None) -> str | None:
    """Why a machine that turned up late has to go again; None: its plan still holds and it may be used."""
    now = op.clock.now()
    if run.state != "open":
        return f"its run is {run.state}"
    if now >= parse_timestamp(run.approval_expires_at):
        return "its approval has expired"
    if attempt.deadline_at is not None and now >= parse_timestamp(attempt.deadline_at):
        return "its deadline has passed"
    if any(a.number != attempt.number and a.result == "done" and not a.is_over for a in run.attempts):
        return "another machine of its run is there"
    if plan is None:
        return "its plan is not there any more"
    if found.rate_usd_hr is not None and found.rate_usd_hr > plan.max_rate_usd_hr:
        return f"it costs ${found.rate_usd_hr:.4f}/h, approved are at most ${plan.max_rate_usd_hr:.4f}/h"
    return None


def destroy_twin(op: Operator, run: Run, attempt: Attempt, twin: Instance) -> Machine:
    """A second machine of the same intent gets a record of its own and goes at once. Its end is confirmed later."""
    machine = twin_record(op, run, attempt, twin)
    op.say(f"{twin.provider} made a second machine ({twin.instance_id}): it is destroyed")
    try:
        from gpu_skills.lifecycle.ending import release

        release.destroy(op, machine, why="a second machine of one create", wait_s=0)
    except GpuError as exc:  # it is on record: reconcile and sentinel end it
        op.say(f"{machine.id} is still there: {exc.message}")
    return machine


def twin_record(op: Operator, run: Run, attempt: Attempt, twin: Instance) -> Machine:
    if twin.instance_id == "":
        raise UsageError("an instance without id")
    identity = labels.machine_id(f"{attempt.intent}\0{twin.instance_id}")
    known = machines.find(op.project, identity)
    if known is not None:
        return known
    base = replace(outcomes.from_attempt(op, run, attempt), id=identity, host=twin.instance_id, status="unknown")
    machine = outcomes.with_seen(base, twin, op.clock.now())
    machines.save(op.project, machine)
    return machine
