"""Money that a command reserved and died before anything came of it: free again, once nobody can be on the way."""

from __future__ import annotations

import contextlib

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import StateBusy, StateError
from gpu_skills.lifecycle import intents, machines, runs
from gpu_skills.lifecycle.books import accounting
from gpu_skills.lifecycle.intents import Intent
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.recovery.readback import ON_ITS_WAY
from gpu_skills.state import budget

IS_APPROVAL = "a_"


def free_unbound(op: Operator, provider: str) -> list[str]:
    """Settle at nothing what was reserved for a rental that was never bound, or a change that was never begun.

    Between the two lie moments, so what is some minutes old has nobody at it.
    """
    known = intents.read(op.project)
    freed = []
    for name, reserved in budget.open_reservations(op.project, op.environ).items():
        directory = reserved.reservation.account or ""
        is_young = op.clock.now() - parse_timestamp(reserved.reservation.ts) < ON_ITS_WAY
        if not directory.startswith(f"{provider}-") or is_young or _may_have_begun(name, known):
            continue
        is_approval = name.startswith(IS_APPROVAL)
        if is_approval and _has_run(op, name):
            continue  # its run settles it
        if not all(_is_ours(op, machine_id) for machine_id in reserved.machine_ids):
            continue
        try:
            with runs.working_on(op, name) if is_approval else contextlib.nullcontext():
                budget.settle(op.project, op.clock, intent=name, directory=directory, settled_usd=0, environ=op.environ)
        except StateBusy:
            continue
        freed.append(name)
    return freed


def _has_run(op: Operator, approval_id: str) -> bool:
    """One that cannot be read is one."""
    try:
        return runs.load(op, approval_id) is not None
    except StateError:
        return True


def _may_have_begun(name: str, known: dict[str, Intent]) -> bool:
    """Whether the change it is for was written down: then how that ended decides about its money."""
    mine = (intent for intent in known.values() if name in (intent.id, intent.approval_id))
    return any(intent.is_open or intent.result == "done" for intent in mine)


def _is_ours(op: Operator, machine_id: str) -> bool:
    """Whether this state directory would know of what was begun for the machine: a copy of it does not."""
    machine = machines.find(op.project, machine_id)
    return machine is not None and accounting.books_here(op, machine)
