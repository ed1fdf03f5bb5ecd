"""What is seen of a machine at its end, and what the journal holds of it; the record is brought up to what was seen.

look()          the instance as its provider shows it now, by all the ways there are
evidence_of()   looks, answers and alarms of the end that has begun, folded from the journal
current()       the machine as it is on record now
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import time_of, timestamp
from gpu_skills.errors import (
    GpuError,
)
from gpu_skills.lifecycle import intents, labels, machines
from gpu_skills.lifecycle.ending import absence, ownership
from gpu_skills.lifecycle.ending.absence import Look
from gpu_skills.lifecycle.intents import Intent
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.units import json_number

if TYPE_CHECKING:
    pass

# Observations in the journal.
PRESENT, ABSENT = "present", "absent"
TAKEN, NOT_TAKEN, ALARM = "destroy_taken", "destroy_not_taken", "destroy_unconfirmed"
_OF_A_RELEASE = (PRESENT, ABSENT, TAKEN, NOT_TAKEN, ALARM)


@dataclass(frozen=True)
class Evidence:
    """What the journal holds of the end of a machine.

    begun_at, why: of the destroy that is open. taken_at: when the provider first took the delete of it. refused: why
    it did not, the last time it did not, while none was taken since.
    """

    begun_at: datetime | None
    why: str | None
    looks: tuple[Look, ...]
    taken_at: datetime | None
    refused: str | None
    refused_code: str | None
    alarmed_at: datetime | None

    @property
    def absences(self) -> tuple[Look, ...]:
        """The last looks that found nothing, while nothing more was charged."""
        return tuple(absence.quiet(self.looks))


def evidence_of(op: Operator, machine: Machine) -> Evidence:
    """Folded from the journal, of the destroy that is open if there is one."""
    intent = open_destroy(op, machine.id)
    begun_at = time_of(intent.ts) if intent is not None else None
    looks: list[Look] = []
    taken_at = alarmed_at = None
    refused = code = None
    for event in intents.observations(op.project, *_OF_A_RELEASE, machine_id=machine.id):
        at, what = time_of(event.get("ts")), event.get("what")
        details = event.get("details") if isinstance(event.get("details"), dict) else {}
        if at is None:
            continue
        if what in (PRESENT, ABSENT):
            looks.append(Look(at, what == PRESENT, _usd(details.get("charged_usd"))))
        elif begun_at is None or at < begun_at:
            continue
        elif what == TAKEN:
            taken_at, refused, code = taken_at or at, None, None
        elif what == NOT_TAKEN:
            refused, code = str(event.get("reason") or ""), str(details.get("code") or "")
        else:
            alarmed_at = at
    why = intent.details.get("why") if intent is not None else None
    return Evidence(begun_at, why, tuple(looks), taken_at, refused, code, alarmed_at)


def open_destroy(op: Operator, machine_id: str) -> Intent | None:
    """The destroy of a machine that has begun and not ended."""
    return under_way(op, "destroy", machine_id)


def was_sent_away(op: Operator, machine_id: str) -> bool:
    """Whether a destroy of it was ever begun: what stood in the way of that was asked for then."""
    return any(i.action == "destroy" and i.machine_id == machine_id for i in intents.read(op.project).values())


def under_way(op: Operator, action: str, machine_id: str) -> Intent | None:
    """What has begun with a machine and not ended."""
    for intent in intents.read(op.project).values():
        if intent.action == action and intent.machine_id == machine_id and intent.is_open:
            return intent
    return None


def look(op: Operator, machine: Machine) -> Instance | None:
    """The instance as the provider shows it now: in the complete list, or, as a list may lag, by its own id.

    One whose id is not known is found by the intent in its label; of two, the older one. None: both are sure that it
    is not there. Everything else raises.
    """
    reader = op.reader(machine.provider)
    listed = reader.machines()
    if machine.instance_id is not None:
        found = next((seen for seen in listed if seen.instance_id == machine.instance_id), None)
        found = found if found is not None else reader.machine(machine.instance_id)
    else:
        same = [seen for seen in listed if _is_named_by(op, machine, seen)]
        found = min(same, key=lambda seen: (seen.created_at is None, seen.created_at, seen.instance_id), default=None)
    if found is None:
        ownership.require_its_account(op, machine)
    return found


def _is_named_by(op: Operator, machine: Machine, seen: Instance) -> bool:
    """Whether the label of an instance names the create of this record."""
    return machine.intent is not None and labels.intent_of(seen.label, op.project.project_id) == machine.intent


def charges_since(op: Operator, machine: Machine, intent: Intent | None) -> datetime:
    """A fixed begin, the same for all looks of one release: their sums are compared."""
    anchor = time_of(intent.ts) if intent is not None else time_of(machine.last_seen_at) or time_of(machine.created_at)
    return (anchor or op.clock.now()).replace(minute=0, second=0, microsecond=0) - timedelta(hours=2)


def charged(op: Operator, machine: Machine, since: datetime) -> int | float | None:
    """None: this key may not read charges, or they cannot be read now; more looks are needed then."""
    now = op.clock.now()
    try:
        charges = op.reader(machine.provider).charges(max(since, now - timedelta(days=30)), now)
    except GpuError:
        return None
    return json_number(sum((c.amount_usd for c in charges if c.instance_id == machine.instance_id), Decimal(0)))


def current(op: Operator, machine: Machine) -> Machine:
    """The machine as it is on record now; as given when it is not on record."""
    return machines.find(op.project, machine.id) or machine


def with_instance(op: Operator, machine: Machine, seen: Instance) -> Machine:
    """The machine with the provider's id of it, learned from a label, and with when it was seen."""
    now = timestamp(op.clock.now())
    account = None
    with contextlib.suppress(GpuError):  # its name matters for what is absent: what is there can be ended without it
        account = ownership.account_of(op, machine.provider)

    def known(found: Machine) -> Machine:
        host = seen.instance_id if found.instance_id is None and _is_named_by(op, found, seen) else found.host
        is_renewed = account is not None and found.account not in (None, account) and _is_named_by(op, found, seen)
        extra = {**found.extra, ownership.SEEN_IN: account} if is_renewed else found.extra
        return replace(found, host=host, last_seen_at=now, extra=extra)

    return machines.update(op.project, machine.id, known, clock=op.clock)


def set_status(op: Operator, machine: Machine, status: str | None) -> None:
    """Unless it has come to its end meanwhile. None: as it is."""
    if status is None or status == machine.status:
        return

    machines.set_status(op.project, machine.id, status, clock=op.clock)


def observe(op: Operator, machine: Machine, what: str, *, reason: str | None = None, **details: Any) -> None:
    intents.observe(
        op.project,
        op.clock,
        what,
        provider=machine.provider,
        account=machine.account,
        machine_id=machine.id,
        instance_id=machine.instance_id,
        reason=reason,
        details={key: value for key, value in details.items() if value is not None} or None,
    )


def _usd(value: Any) -> Decimal | None:
    return Decimal(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None
