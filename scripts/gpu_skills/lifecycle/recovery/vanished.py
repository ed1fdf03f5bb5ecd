"""Money reserved for a machine that no record has and no list shows: its records are lost, and it is gone.

settle()   at what it can have come to at most, once look after look over a while has shown none of it
named()    the same reservations, only looked at
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import parse_timestamp, time_of, timestamp
from gpu_skills.errors import GpuError, OtherAccount, StateBusy
from gpu_skills.lifecycle import intents, labels, machines, runs
from gpu_skills.lifecycle.books import accounting, charged
from gpu_skills.lifecycle.ending import absence, ownership
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.recovery.findings import Pass
from gpu_skills.lifecycle.recovery.leftovers import IS_APPROVAL
from gpu_skills.lifecycle.recovery.readback import ON_ITS_WAY
from gpu_skills.lifecycle.runs import Run
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.state import budget, files
from gpu_skills.state.budget import Open
from gpu_skills.units import format_usd, json_number, usd

ABSENT = "unrecorded_absent"
# As long as charges may still come in after the first look that did not find it.
_SPAN = charged.CHARGES_LAG


def named(op: Operator, provider: str, shown: Sequence[Instance]) -> Iterator[tuple[str, Open]]:
    """Reservations for machines that nothing here has on record, by the approval or intent they were made for.

    Not those of another state directory, nor of a create that is still looked for, nor of a machine that is shown.
    """
    there = {labels.machine_id(label.intent) for s in shown if (label := labels.ours(s.label, op.project.project_id))}
    all_runs = runs.all_runs(op)
    if runs.damaged(op):  # whose machine it is cannot be told
        return
    for name, reserved in budget.open_reservations(op.project, op.environ).items():
        ids = set(reserved.machine_ids)
        is_young = op.clock.now() - parse_timestamp(reserved.reservation.ts) < ON_ITS_WAY
        if not ids or is_young or not (reserved.reservation.account or "").startswith(f"{provider}-"):
            continue
        if ids & there or any(machines.find(op.project, machine_id) is not None for machine_id in ids):
            continue
        of_it = [r for r in all_runs if r.approval_id == name or ids & {a.machine_id for a in r.attempts}]
        if all(_is_ended(op, run) for run in of_it):
            yield name, reserved


def _is_ended(op: Operator, run: Run) -> bool:
    """Whether each of its creates was answered: one that was not is looked for longer, and by its label."""
    is_answered = all(a.is_over or a.result not in (None, "unknown") for a in run.attempts)
    return run.owner == runs.owner_of(op) and is_answered


def text_of(name: str, reserved: Open, provider: str) -> str:
    ids = ", ".join(reserved.machine_ids)
    money = format_usd(reserved.reservation.reserved_usd)
    return f"{money} are reserved for {name}, whose machine {ids} is on no record, and {provider} shows none of it"


def settle(here: Pass) -> None:
    op = here.op
    for name, reserved in list(named(op, here.provider, here.shown)):
        if reserved.reservation.account != ownership.account_of(op, here.provider):
            problem = OtherAccount(what=reserved.machine_ids[-1], provider=here.provider)
            here.say(
                problem.code,
                problem.message,
                machine_id=reserved.machine_ids[-1],
                next_step=problem.next_step,
                is_uncertain=True,
            )
            continue
        absent_since = _absent_since(op, reserved.machine_ids[-1])
        if absent_since is None:
            here.say(
                "reservation_open",
                text_of(name, reserved, here.provider)
                + f"; {absence.LOOKS} looks over {_SPAN.total_seconds() / 60:g} minutes or more settle it",
                machine_id=reserved.machine_ids[-1],
                next_step=f"gpu reconcile --provider {here.provider}",
                is_uncertain=True,
            )
            continue
        try:
            cost_usd = _settle_one(here, name, reserved, absent_since)
        except StateBusy:
            continue
        here.say("settled", f"{text_of(name, reserved, here.provider)}: settled at {format_usd(cost_usd)}")


def _absent_since(op: Operator, machine_id: str) -> datetime | None:
    """When this machine was first not shown, once enough looks did not show it; each call is one more look."""
    intents.observe(op.project, op.clock, ABSENT, machine_id=machine_id)
    seen = [time_of(event.get("ts")) for event in intents.observations(op.project, ABSENT, machine_id=machine_id)]
    looks = [at for at in seen if at is not None]
    enough = len(looks) >= absence.LOOKS and looks[-1] - looks[0] >= _SPAN
    return looks[0] if enough else None


def _settle_one(here: Pass, name: str, reserved: Open, absent_since: datetime) -> Decimal:
    """Into the books first: what dies in between is settled by the next pass, and booked once."""
    op, directory, machine_id = here.op, reserved.reservation.account or "", reserved.machine_ids[-1]
    most_usd = _most_usd(here, reserved)
    is_approval = name.startswith(IS_APPROVAL)
    with runs.working_on(op, name) if is_approval else contextlib.nullcontext():
        with files.lock(op.ledger.charges):
            line = _line(here, name, reserved, absent_since)
            rest_usd = most_usd - accounting.booked_usd(op, machine_id)
            if rest_usd > 0 and not any(one.get("id") == line["id"] for one in accounting.lines_of(op, machine_id)):
                accounting.append(op, [{**line, "cost_usd": json_number(rest_usd)}])
                here.booked += 1
        budget.settle(op.project, op.clock, intent=name, directory=directory, settled_usd=most_usd, environ=op.environ)
        if is_approval and (run := runs.load(op, name)) is not None:
            _close(op, run)
    return most_usd


def _line(here: Pass, name: str, reserved: Open, absent_since: datetime) -> dict[str, Any]:
    machine_id = reserved.machine_ids[-1]
    return {
        "id": f"{machine_id}/{name}/vanished",
        "kind": "correction",
        "machine_id": machine_id,
        "provider": here.provider,
        "account": reserved.reservation.account,
        "intent": name,
        "started_at": reserved.reservation.ts,
        "completed_at": timestamp(absent_since),
        "estimated": True,
        "note": "its records are lost: what it can have cost at most",
    }


def _close(op: Operator, run: Run) -> None:
    known = intents.read(op.project)
    for attempt in run.attempts:
        if attempt.intent in known and known[attempt.intent].is_open:
            intents.close(op.project, op.clock, attempt.intent, "done", reason="its records were lost; it is gone")
    over = tuple(replace(attempt, is_over=True) for attempt in run.attempts)
    runs.update(op, run.approval_id, lambda r: replace(r, attempts=over, is_settled=True, state="closed"))


def _most_usd(here: Pass, reserved: Open) -> Decimal:
    """What the account was charged in its time for instances on no record here, and never more than was reserved.

    Which of them it was nobody knows any more. Charges that are not there, or cannot be read or true, say nothing.
    """
    most = reserved.reservation.reserved_usd
    since = parse_timestamp(reserved.reservation.ts) - timedelta(minutes=1)
    ours = {machine.instance_id for machine in here.machines()}
    try:
        charges = charged.charges_between(here.op, here.provider, since, here.op.clock.now())
    except GpuError:
        return most
    theirs = [charge.amount_usd for charge in charges if charge.instance_id not in ours]
    if not theirs or min(theirs) < 0:
        return most
    return min(most, usd(sum(theirs, Decimal(0))))
