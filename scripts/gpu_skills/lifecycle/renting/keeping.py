"""What lets a rented machine live longer, or keeps hands off it: extend, hold, protect. What it costs: changes.py.

An extension moves three things, in this order, and reads each back: the deadline in the label, which sentinels go by;
the deadline that the machine's own fuse goes by; the end of the session there. Until the fuse has told the new one,
the old one may hold.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from gpu_skills.clock import parse_timestamp, time_of, timestamp
from gpu_skills.errors import GpuError, Refused, RemoteError, UnexpectedReply
from gpu_skills.lifecycle import intents, labels, machines, runs, states, unrecorded
from gpu_skills.lifecycle.approval import actions, approval_record, approvals
from gpu_skills.lifecycle.approval.actions import ActionPlan
from gpu_skills.lifecycle.approval.approvals import Approval
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.ending import ownership, witness
from gpu_skills.lifecycle.labels import Label
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.state import budget

ASKED_FOR = timedelta(hours=1)
HELD_UNTIL = "held_until"


@dataclass(frozen=True)
class Extended:
    """deadlines: what a sentinel elsewhere has to be told with --deadlines, where the label could not be changed."""

    machine: Machine
    deadline_at: datetime
    deadlines: dict[str, str]


# asking -------------------------------------------------------------------------------------------------------------


def start_plan(op: Operator, machine: Machine, *, lasts_s: float | None, session_usd: Decimal | None) -> ActionPlan:
    """To start a stopped machine, as priced now; one that was allowed already and is no dearer goes before."""
    from gpu_skills.lifecycle.approval import changes

    machine = witness.current(op, machine)
    if machine.status != "stopped":
        step = f"gpu machine show {machine.id}"
        raise Refused(f"{machine.id} is {machine.status}: only one that is stopped can be started", next_step=step)
    fresh = changes.start_plan(op, machine, lasts_s=lasts_s, session_usd=session_usd)
    known = allowed(op, "start", machine, lambda plan: _lasts_s(plan) == _lasts_s(fresh) and _is_no_dearer(fresh, plan))
    return known or fresh


def extension_plan(op: Operator, machine: Machine, more_s: float) -> ActionPlan:
    """To move the deadline by more_s, as priced now; one that was allowed already and is no dearer goes before.

    Refused for what does not run. One that was begun and is not over is gone on with.
    """
    from gpu_skills.lifecycle.approval import changes

    machine, seen, _ = _running(op, machine, "extended")
    if changes.held_deadline(op, machine, seen) is None:
        raise Refused(f"{machine.id} has no deadline to extend", next_step=f"gpu machine show {machine.id}")
    begun = witness.under_way(op, "extend", machine.id)
    if begun is not None:
        wanted = begun.details.get("deadline_at")
        known = allowed(op, "extend", machine, lambda plan: plan.deadline_at == wanted)
        if known is None:
            raise Refused(f"an extension of {machine.id} began and is not over", next_step="gpu reconcile")
        return known
    fresh = changes.extend_plan(op, machine, more_s)

    def is_the_same(plan: ActionPlan) -> bool:
        times = (plan.old_deadline_at, plan.deadline_at) == (fresh.old_deadline_at, fresh.deadline_at)
        return times and _is_no_dearer(fresh, plan)

    return allowed(op, "extend", machine, is_the_same) or fresh


def _lasts_s(plan: ActionPlan) -> float | None:
    if plan.deadline_at is None or plan.measured_at is None:
        return None
    return (parse_timestamp(plan.deadline_at) - parse_timestamp(plan.measured_at)).total_seconds()


def _is_no_dearer(now: ActionPlan, then: ActionPlan) -> bool:
    return (now.rate_usd_hr or Decimal(0)) <= (then.rate_usd_hr or Decimal(0))


# extending ----------------------------------------------------------------------------------------------------------


def extend(op: Operator, plan: ActionPlan, approval: Approval) -> Extended:
    """Move the deadline as approved. Repeating after a crash goes on; what was moved already stays.

    Raises OverCeiling before anything is changed, and FuseMissing or FuseSilent when the machine does not take it
    over: then the old deadline may hold.
    """
    assert plan.deadline_at is not None
    deadline_at = parse_timestamp(plan.deadline_at)
    with runs.working_on(op, approval.id):
        machine = machines.find(op.project, plan.machine_id)
        if machine is None:
            raise Refused(f"{plan.machine_id} is not on record any more", next_step="gpu machine ls")
        machine, seen, label = _running(op, machine, "extended")
        with unrecorded.told(op.project, "extend", lambda: [plan.machine_id]):
            with closing(op.connect(machine)) as link:
                runs.require_readable(op)
                _require_no_earlier_fuse(link, machine, plan)
                approvals.use(op, approval, plan.ask())
                intent = labels.action_intent(approval.id, "extend", machine.id)
                _reserve(op, machine, plan, intent, deadline_at)
                intents.begin(
                    op.project,
                    op.clock,
                    "extend",
                    intent,
                    provider=machine.provider,
                    account=machine.account,
                    machine_id=machine.id,
                    instance_id=machine.instance_id,
                    approval_id=approval.id,
                    label=str(label.with_deadline(deadline_at)),
                    details={"deadline_at": plan.deadline_at},
                )
                shown = _relabel(op, machine, seen, label.with_deadline(deadline_at))
                told = _move_on_machine(op, machine, link, deadline_at)

                def moved(found: Machine) -> Machine:
                    return replace(found, deadline_at=plan.deadline_at, label=shown, extra={**found.extra, **told})

                machine = machines.update(op.project, machine.id, moved, clock=op.clock)
                intents.close(op.project, op.clock, intent, "done")
            approvals.finish(op, approval)
            approvals.note_used(op, approval)
    is_in_label = shown == str(label.with_deadline(deadline_at))
    deadlines = {} if is_in_label else {str(machine.intent): plan.deadline_at}
    return Extended(machine, deadline_at, deadlines)


def _require_no_earlier_fuse(link: Link, machine: Machine, plan: ActionPlan) -> None:
    """The money is for the time from the old deadline on: a fuse that holds an earlier one would get more for it."""
    from gpu_skills.lifecycle.guard import fuse, sentinel_records

    receipt, before = fuse.read_receipt(link, machine), time_of(plan.old_deadline_at)
    held = None if receipt is None else receipt.deadline_at
    if held is not None and before is not None and before - held > sentinel_records.SAME_MOMENT:
        reason = f"its fuse acts at {timestamp(held)}, the extension is priced from {plan.old_deadline_at}"
        raise Refused(f"{machine.id} is not extended: {reason}", next_step=f"gpu machine show {machine.id}")


def _running(op: Operator, machine: Machine, what: str) -> tuple[Machine, Instance, Label]:
    """A machine of ours that the provider shows running, and the label it has there."""
    machine = witness.current(op, machine)
    if machine.status not in ("ready", "busy"):
        step = f"gpu machine start {machine.id}" if machine.status == "stopped" else f"gpu machine show {machine.id}"
        raise Refused(f"{machine.id} is {machine.status}: only one that runs can be {what}", next_step=step)
    seen = witness.look(op, machine)
    if seen is None or seen.status != "running":
        shown = "nothing of it" if seen is None else seen.status
        raise Refused(f"{machine.provider} shows {shown} for {machine.id}", next_step="gpu reconcile")
    return machine, seen, ownership.require_ours(op, machine, seen)


def _reserve(op: Operator, machine: Machine, plan: ActionPlan, intent: str, deadline_at: datetime) -> None:
    left_h = Decimal(str((deadline_at - op.clock.now()).total_seconds())) / 3600
    budget.reserve(
        op.project,
        op.ledger,
        op.clock,
        op.policy(),
        intent=intent,
        account=op.account(machine.provider),
        provider=machine.provider,
        cost_usd=plan.worst_case_usd,
        rate_usd_hr=plan.rate_usd_hr or machine.rate_usd_hr,
        deadline_h=max(left_h, Decimal(0)),
        job_id=budget.job_on(op.project, machine.id, op.environ),
        session=runs.session_of(op, machine),
        machine_id=machine.id,
        machines=0,
        environ=op.environ,
    )


def _relabel(op: Operator, machine: Machine, seen: Instance, label: Label) -> str:
    """The label as the provider shows it afterwards. Left alone where changing it could reset what runs."""
    if not op.reader(machine.provider).traits.relabel_is_safe:
        return str(seen.label)
    if seen.label != str(label):
        op.writer(machine.provider).set_label(str(machine.instance_id), str(label))
    again = witness.look(op, machine)
    if again is None or again.label != str(label):
        found = None if again is None else again.label
        reason = f"it shows {found!r}, {label} was wanted"[:300]
        raise UnexpectedReply(provider=machine.provider, what="label", reason=reason)
    return str(again.label)


def _move_on_machine(op: Operator, machine: Machine, link: Link, deadline_at: datetime) -> dict[str, Any]:
    """The fuse first, then the session; what goes on record of the receipt.

    What the session there says of idleness stays: a record that was rebuilt knows none. Where it says nothing, the
    machine's plan does.
    """
    from gpu_skills.lifecycle.guard import fuse

    fuse.set_deadline(link, machine, deadline_at, clock=op.clock)
    receipt = fuse.read_receipt(link, machine)
    session = link.session.call("session", {"project": op.project.project_id})["session"]
    idle_s, plan = (session or {}).get("idle_timeout_s"), plans.find(op.project, machine.plan)
    if idle_s is None and plan is not None:
        idle_s = plan.idle_timeout_s
    reason = (session or {}).get("deadline_reason") or (None if plan is None else plan.deadline_reason)
    machines.open_rented_session(
        op.project,
        link,
        clock=op.clock,
        deadline_at=fuse.session_deadline(deadline_at),
        reason=str(reason or "max_lifetime"),
        idle_timeout_s=idle_s,
        is_moved=session is not None,
    )
    return {} if receipt is None else {fuse.ON_RECORD: receipt.to_record()}


def allowed(
    op: Operator, action: actions.Action, machine: Machine, fits: Callable[[ActionPlan], bool] = lambda plan: True
) -> ActionPlan | None:
    """The newest frozen plan to do this to this machine that somebody has said yes to and that is not used up.

    A command that was refused for want of a yes froze one; called again after the yes, it goes on with that.
    """
    for name in approval_record.plans_named(op.project):
        try:
            plan = _as_frozen(op, name)
            if plan.action == action and plan.machine_id == machine.id and fits(plan):
                approvals.find(op, plan.ask())
                return plan
        except GpuError:  # another kind of plan, a damaged one, or one whose yes does not hold
            continue
    return None


def _as_frozen(op: Operator, name: str) -> ActionPlan:
    _, plan = actions.load(op.project, name)
    if not isinstance(plan, ActionPlan):
        raise Refused(f"plan {name[:12]} rents a machine", next_step="gpu machine --help")
    return plan


# holding and protecting ---------------------------------------------------------------------------------------------


def hold(op: Operator, machine: Machine, until: datetime) -> Machine:
    """Keep a machine for review: neither idleness nor the end of its job ends it before. Its deadline still does."""
    machine, _, _ = _running(op, machine, "held")
    deadline_at = parse_timestamp(machine.deadline_at) if machine.deadline_at else None
    until = until if deadline_at is None else min(until, deadline_at)
    with closing(op.connect(machine)) as link:
        _hold_there(op, link, until)
    intents.observe(op.project, op.clock, "held", machine_id=machine.id, details={"until": timestamp(until)})
    return _with_extra(op, machine, HELD_UNTIL, timestamp(until))


def _hold_there(op: Operator, link: Link, until: datetime | None) -> None:
    """Tell the machine: what ends it by itself waits so long. Its idle timeout stays what it is, for afterwards."""
    current = link.session.call("session", {"project": op.project.project_id})["session"] or {}
    idle_s, reason = current.get("idle_timeout_s"), str(current.get("deadline_reason") or "max_lifetime")
    is_review = reason == "hold_for"  # the machine counts the review of its job itself
    if current.get("expired_at") is not None or (idle_s is None and not is_review):
        return
    ends = parse_timestamp(current["deadline_at"]) if isinstance(current.get("deadline_at"), str) else None
    if is_review and ends is not None and until is not None:
        ends = max(ends, until)
    machines.open_rented_session(
        op.project,
        link,
        clock=op.clock,
        deadline_at=ends,
        reason=reason,
        idle_timeout_s=idle_s,
        held_s=0 if until is None else max(0.0, (until - op.clock.now()).total_seconds()),
        is_moved=True,
    )


def let_go(op: Operator, machine: Machine) -> Machine:
    """End a hold. What is due then happens when somebody looks next, and by the machine's own idleness."""
    machine = witness.current(op, machine)
    if machine.status in ("ready", "busy"):
        try:
            with closing(op.connect(machine)) as link:
                _hold_there(op, link, None)
        except RemoteError as exc:
            op.say(f"{machine.id} could not be told, its idleness ends it after the hold: {exc.message}")
    intents.observe(op.project, op.clock, "hold_ended", machine_id=machine.id)
    return _with_extra(op, machine, HELD_UNTIL, None)


def held_until(machine: Machine, now: datetime) -> datetime | None:
    """When the hold of a machine ends; None: it is not held now."""
    text = machine.extra.get(HELD_UNTIL)
    try:
        until = parse_timestamp(text) if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None
    return until if until is not None and now < until else None


def _with_extra(op: Operator, machine: Machine, key: str, value: str | None) -> Machine:
    def changed(found: Machine) -> Machine:
        kept = {name: old for name, old in found.extra.items() if name != key}
        return replace(found, extra=kept if value is None else {**kept, key: value})

    return machines.update(op.project, machine.id, changed, clock=op.clock)


def protect(op: Operator, machine: Machine) -> Machine:
    """From now on ending it takes an approval that names it."""
    return _mark(op, machine, lambda c: tuple(dict.fromkeys((*c, ownership.PROTECTED))), None)


def named_plan(op: Operator, action: Literal["stop", "destroy", "unprotect"], machine: Machine) -> ActionPlan:
    """What a person is asked before a protected machine ends, or its protection does: the plan that was allowed
    already, or a new one, frozen. An earlier one that was used, or is over, stands in nobody's way."""
    known = allowed(op, action, machine)
    if known is not None:
        return known
    now = op.clock.now()
    wanted = ActionPlan(
        action,
        op.project.project_id,
        machine.id,
        machine.provider,
        machine.instance_id,
        measured_at=timestamp(now),
        expires_at=timestamp(now + ASKED_FOR),
    )
    return _as_frozen(op, actions.freeze(op.project, wanted))


def unprotect(op: Operator, machine: Machine, approval: Approval) -> Machine:
    """Take the protection away, with a yes that names the machine."""
    machine = witness.current(op, machine)
    plan = actions.named_by(op.project, approval, "unprotect", machine.id)
    approvals.use(op, approval, plan.ask())
    machine = _mark(op, machine, lambda c: tuple(x for x in c if x != ownership.PROTECTED), approval.id)
    approvals.finish(op, approval)
    approvals.note_used(op, approval)
    return machine


def _mark(
    op: Operator, machine: Machine, change: Callable[[tuple[str, ...]], tuple[str, ...]], approval_id: str | None
) -> Machine:
    machine = witness.current(op, machine)
    if machine.status in states.FINAL:
        raise Refused(f"{machine.id} is {machine.status}", next_step="gpu machine ls")
    intent = intents.new_id()
    intents.begin(
        op.project, op.clock, "protect", intent, provider=machine.provider, machine_id=machine.id,
        approval_id=approval_id, details={"is_protected": ownership.PROTECTED in change(machine.conditions)},
    )  # fmt: skip
    machine = machines.update(
        op.project, machine.id, lambda m: replace(m, conditions=change(m.conditions)), clock=op.clock
    )
    intents.close(op.project, op.clock, intent, "done")
    return machine
