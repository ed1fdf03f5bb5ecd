"""Giving a rented machine back, and never believing that it worked until it shows.

    destroy()   asks the provider until it takes the delete, then looks until the machine is proven gone
    confirm()   one step of that: one look, one more delete if it is still there; any command may go on with it

What was seen and said is in the journal (see witness.py), so that another command, days later, goes on where this one
ended. Putting one to sleep is in stops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from gpu_skills.clock import time_of, timestamp
from gpu_skills.errors import AuthRejected, ProviderError, ProviderSilent, Refused
from gpu_skills.lifecycle import intents, machines, runs, states, unrecorded
from gpu_skills.lifecycle.ending import absence, asking, ownership, witness
from gpu_skills.lifecycle.guard import fuse
from gpu_skills.lifecycle.intents import Intent
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.units import counted, format_duration, json_number

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval

DEFAULT_WAIT_S = 240.0
PAUSE_BETWEEN_LOOKS_S = 30.0
_AUTH_ATTEMPTS = 3
# From when on, and how often, people hear of a delete that does not come true.
ALARM_AFTER = timedelta(minutes=5)
ALARM_EVERY = timedelta(minutes=10)


@unrecorded.tells("destroy")
def destroy(
    op: Operator,
    machine: Machine,
    *,
    why: str,
    wait_s: float = DEFAULT_WAIT_S,
    gate: Sequence[Refused] = (),
    approval: Approval | None = None,
    tell: asking.Tell = asking.untold,
) -> Literal["destroyed", "terminating"]:
    """End a machine of ours for good; `terminating` when that is not proven within wait_s.

    gate: what stands in the way, as the layers above see it (jobs, outputs): the first is raised and nothing happens.
    approval: of a plan to destroy this machine, for a protected one: it is verified, and used up once nothing stands
    in the way any more. What was begun goes on without another. Raises NotOwned, Protected, what is wrong with the
    approval, and whatever keeps the provider from being asked at all; AuthRejected when it does not let us: the wish
    stays in the journal.
    """
    machine = witness.current(op, machine)
    if machine.status in states.FINAL:
        finish_books(op, machine)
        return "destroyed"
    for obstacle in gate:
        raise obstacle
    seen = witness.look(op, machine)
    if seen is not None:
        machine = witness.with_instance(op, machine, seen)
        ownership.require_ours(op, machine, seen)
    if witness.open_destroy(op, machine.id) is None:
        asking.begin(op, "destroy", machine, why, asking.used_for("destroy", op, machine, seen, approval))
    # One that no one ever saw is not known to be there: it is looked for, and sent away when it turns up.
    witness.set_status(op, machine, "unknown" if machine.instance_id is None else "terminating")
    return _until_gone(op, machine, seen, wait_s, tell)


def _until_gone(
    op: Operator, machine: Machine, seen: Instance | None, wait_s: float, tell: asking.Tell
) -> Literal["destroyed", "terminating"]:
    """Steps with growing pauses while the provider does not take it, with even ones while we watch it stay away."""
    began = op.clock.monotonic()
    ends = began + wait_s
    failures = refusals = looks = 0
    while True:
        pause_s = PAUSE_BETWEEN_LOOKS_S
        try:
            step = _act_on(op, machine, seen if not looks else witness.look(op, machine))
        except AuthRejected:
            refusals += 1
            if refusals >= _AUTH_ATTEMPTS:
                alarm(op, machine, at_once=True)
                raise
            pause_s = asking.FIRST_PAUSE_S * 2**refusals
            told = f"{machine.provider} does not let this key destroy it"
        except (ProviderError, ProviderSilent) as exc:
            failures += 1
            pause_s = asking.pause_after(exc, failures)
            alarm(op, machine)
            told = exc.message
        else:
            if step in states.FINAL:
                return "destroyed"
            if step == "taken":  # a moment, so that the first look is not at what is just going
                pause_s = asking.FIRST_PAUSE_S
                failures = 0
            told = _progress(op, machine, step)
        if op.clock.monotonic() + pause_s > ends:
            return "terminating"
        waited = format_duration(op.clock.monotonic() - began)
        tell(f"{machine.id}: {told}; looking again in {format_duration(pause_s)} ({waited} so far)")
        op.clock.sleep(pause_s)
        looks += 1


def _progress(op: Operator, machine: Machine, step: str) -> str:
    if step == "taken":
        return f"{machine.provider} took the delete"
    absences = counted(len(witness.evidence_of(op, machine).absences), "look")
    return f"{machine.provider} does not show it any more, {absences} in a row; it takes several over a minute"


@unrecorded.tells("destroy")
def confirm(op: Operator, machine: Machine) -> str:
    """One look at a machine and what follows from it; its state on record afterwards. Callable from anywhere.

    One that should be gone and is there is asked to go once more. One that nobody sent away and that is absent is
    `unknown`, and `lost` when that is proven; past its deadline it is `destroyed`, for that was its end. Raises what
    the provider raises: no answer is no observation.
    """
    machine = witness.current(op, machine)
    if machine.status in states.FINAL:
        finish_books(op, machine)
        return machine.status
    alarm(op, machine)
    _act_on(op, machine, witness.look(op, machine))
    return witness.current(op, machine).status


def _act_on(op: Operator, machine: Machine, seen: Instance | None) -> str:
    """What follows from one look: one delete if it is there and should not be.

    A final state, `taken`, `present` or `absent`.
    """
    machine = witness.current(op, machine)
    intent = witness.open_destroy(op, machine.id)
    if seen is None:
        return _absent(op, machine, intent)
    machine = witness.with_instance(op, machine, seen)
    ownership.require_ours(op, machine, seen)  # one that is not ours now may be again: what was begun stays open
    witness.observe(op, machine, witness.PRESENT, status=seen.status)
    if intent is None:
        witness.set_status(
            op, machine, states.AS_SHOWN.get(seen.status, "unknown") if machine.status == "unknown" else None
        )
        return "present"
    _send_delete(op, machine)
    return "taken"


def _send_delete(op: Operator, machine: Machine) -> None:
    try:
        answer = op.writer(machine.provider).destroy(str(machine.instance_id))
    except (ProviderError, ProviderSilent) as exc:
        witness.observe(op, machine, witness.NOT_TAKEN, reason=exc.message, code=exc.code)
        raise
    witness.observe(op, machine, witness.TAKEN, answer=answer)


def _absent(op: Operator, machine: Machine, intent: Intent | None) -> str:
    since = witness.charges_since(op, machine, intent)
    witness.observe(op, machine, witness.ABSENT, charged_usd=witness.charged(op, machine, since))
    if machine.instance_id is None:
        return "absent"  # a create that nobody knows the end of: looked for by its intent, given up by reconcile
    evidence = witness.evidence_of(op, machine)
    if intent is not None and evidence.taken_at is None and any(seen.is_present for seen in evidence.looks):
        # It went without an answer to our delete: ask again, for an answer. Never for what was not seen to be ours.
        _send_delete(op, machine)
        return "taken"
    is_gone = absence.is_gone(
        evidence.looks,
        asked_at=evidence.taken_at,
        was_seen=machine.last_seen_at is not None,
    )
    if not is_gone:
        if intent is None:
            witness.set_status(op, machine, "unknown")
        return "absent"
    deadline = time_of(machine.deadline_at)
    was_its_end = intent is not None or (deadline is not None and op.clock.now() >= fuse.planned_end(deadline))
    return note_gone(op, machine, "destroyed" if was_its_end else "lost")


def note_gone(op: Operator, machine: Machine, status: str = "destroyed") -> str:
    """A machine is proven gone: its record ends, its books are closed."""
    now = timestamp(op.clock.now())

    def ended(found: Machine) -> Machine:
        if found.status in states.FINAL:  # another command saw the same
            return found
        kept = tuple(c for c in found.conditions if c != "stop_failed")
        reason = (found.session or {}).get("deadline_reason")
        extra = {**found.extra, machines.DEADLINE_REASON: reason} if reason else found.extra
        return replace(found, status=status, destroyed_at=now, session=None, conditions=kept, extra=extra)

    machine = machines.update(op.project, machine.id, ended, clock=op.clock)
    finish_books(op, machine)
    return machine.status


def finish_books(op: Operator, machine: Machine) -> None:
    """What follows the end of a machine: its jobs end, its time is booked, its run is settled. Repeating is harmless.

    A destroy that is still open in the journal says that a command died in between.
    """
    from gpu_skills.lifecycle.books import accounting

    intent = witness.open_destroy(op, machine.id)
    if intent is None and is_booked(op, machine):
        return
    runs.take_moved(op)
    accounting.close(op, machine)
    for run in runs.own_runs(op):
        if any(a.machine_id == machine.id for a in run.attempts):
            _settle(op, run.approval_id, machine.id)
    while intent is not None:  # several commands may have asked at once
        intents.close(op.project, op.clock, intent.id, "done")
        intent = witness.open_destroy(op, machine.id)
    intents.observe(op.project, op.clock, "machine_booked", machine_id=machine.id)


def _settle(op: Operator, approval_id: str, machine_id: str) -> None:
    from gpu_skills.lifecycle.books import accounting

    def over(run: runs.Run) -> runs.Run:
        attempts = tuple(replace(a, is_over=True) if a.machine_id == machine_id else a for a in run.attempts)
        return replace(run, attempts=attempts)

    run = runs.update(op, approval_id, over)
    # An open run may still make its next attempt: the money for that stays reserved.
    if run.state != "open" and all(a.is_over or a.result == "refused" for a in run.attempts):
        accounting.settle_run(op, run)


def is_booked(op: Operator, machine: Machine) -> bool:
    """Whether nothing is left to do about a machine that is gone."""
    return bool(intents.observations(op.project, "machine_booked", machine_id=machine.id))


def alarm(op: Operator, machine: Machine, *, at_once: bool = False) -> None:
    """Tell people of a destroy that is not confirmed: after a while, then again and again, but not at every look."""
    evidence, now = witness.evidence_of(op, machine), op.clock.now()
    if evidence.begun_at is None:
        return
    is_late = at_once or now - evidence.begun_at >= ALARM_AFTER
    if not is_late or (evidence.alarmed_at is not None and now - evidence.alarmed_at < ALARM_EVERY):
        return
    witness.observe(op, machine, witness.ALARM)
    op.notify(
        "destroy_unconfirmed",
        machine.id,
        provider=machine.provider,
        instance_id=machine.instance_id,
        since=timestamp(evidence.begun_at),
        burn_usd_hr=json_number(machine.rate_usd_hr),
        reason=evidence.refused or "it is not proven gone",
    )
