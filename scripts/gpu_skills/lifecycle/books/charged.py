"""Our books of a machine beside what its provider charged: shown by `compare`, made even by `correct`.

What is booked before is an estimate from rates. A provider's own sum is written once, when it is complete and can be
true; traffic that bills by the GB comes into the books that way only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import time_of, timestamp
from gpu_skills.errors import UnexpectedReply
from gpu_skills.lifecycle import intents, machines, states
from gpu_skills.lifecycle.books import accounting, lives
from gpu_skills.lifecycle.books.lives import Stretch
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.base import Charge
from gpu_skills.providers.known import RENTED_PROVIDERS, traits_of
from gpu_skills.state import files
from gpu_skills.state.project import Project
from gpu_skills.units import json_number, usd

# RunPod writes charges every 5 minutes, Vast within seconds: what ended this long ago is complete.
CHARGES_LAG = timedelta(minutes=15)
# After that nobody asks again whether the provider's sum is another one.
CORRECTED_WITHIN = timedelta(days=28)
CORRECTED = "charges_corrected"
LONGEST_QUESTION = timedelta(days=30)  # charges are asked for a month at a time
_TRAFFIC = ("download", "upload")
_EVEN = Decimal("0.00001")  # providers round each part they list
# A provider is believed up to so many times what time and rate make, and a sum that any machine may cost.
_MOST_TIMES = 10
_ALWAYS_POSSIBLE = Decimal("0.10")


@dataclass(frozen=True)
class Row:
    """One machine, one kind of money: `time` (GPU, CPU and disk by the second) or `traffic`.

    ours, theirs: the parts by their own names. is_complete: the provider has written down all of it. doubt: why what it
    charged cannot be true. machine_id None: an instance that is not on record here.
    """

    provider: str
    machine_id: str | None
    instance_id: str
    kind: str
    ours_usd: Decimal
    theirs_usd: Decimal
    ours: Mapping[str, Decimal] = field(default_factory=dict)
    theirs: Mapping[str, Decimal] = field(default_factory=dict)
    is_complete: bool = True
    doubt: str | None = None

    @property
    def difference_usd(self) -> Decimal:
        """Theirs less ours."""
        return self.theirs_usd - self.ours_usd

    @property
    def is_even(self) -> bool:
        return abs(self.difference_usd) < _EVEN


def compare(op: Operator, provider: str, since: datetime, until: datetime) -> list[Row]:
    """Our books beside the provider's, machine by machine, of all that lived in that time; reads only.

    Asks from the beginning of the oldest of them: the sum of a life is compared, not the part that falls into it.
    """
    now = op.clock.now()
    spans = {}
    for machine in machines.all_machines(op.project):
        if machine.provider != provider or machine.instance_id is None:
            continue
        life = accounting.life_of(op, machine)
        if life and life[0].started_at <= until and (life[-1].ended_at or now) >= since:
            spans[machine.id] = (machine, life[0].started_at, life[-1].ended_at)
    first = min([since, *(start for _, start, _ in spans.values())])
    charges = charges_between(op, provider, first, until)
    rows: list[Row] = []
    newest = {machine.instance_id: machine.id for machine, _, _ in spans.values()}
    for machine, _, ended in spans.values():
        is_complete = ended is not None and now - ended >= CHARGES_LAG
        if newest[machine.instance_id] == machine.id:
            rows += rows_of(op, machine, charges, is_complete=is_complete)
    ours = {machine.instance_id for machine, _, _ in spans.values()}
    return rows + _of_others(provider, [c for c in charges if c.instance_id not in ours])


def charges_between(op: Operator, provider: str, since: datetime, until: datetime) -> list[Charge]:
    """All charges of the account, asked for in whole hours and a month at a time."""
    reader, found = op.reader(provider), []
    start = since.replace(minute=0, second=0, microsecond=0)
    while start < until:
        end = min(start + LONGEST_QUESTION, until)
        found += reader.charges(start, end)
        start = end
    return found


def rows_of(op: Operator, machine: Machine, charges: Iterable[Charge], *, is_complete: bool) -> list[Row]:
    """The rows of one machine, with all records of its instance; one for traffic only where there was some."""
    theirs: dict[str, Decimal] = defaultdict(Decimal)
    least: dict[str, Decimal] = {}
    for charge in charges:
        if charge.instance_id == machine.instance_id:
            theirs[charge.kind] += charge.amount_usd
            kind = "traffic" if charge.kind in _TRAFFIC else "time"
            least[kind] = min(least.get(kind, Decimal(0)), charge.amount_usd)
    ours: dict[str, Decimal] = defaultdict(Decimal)
    for record in _of_instance(op, machine):
        for kind, amount in accounting.booked_by_kind(op, record.id).items():
            ours[kind] += amount
    found = []
    for kind in ("time", "traffic"):
        mine = {k: v for k, v in ours.items() if (k == "bandwidth") == (kind == "traffic")}
        there = {k: v for k, v in theirs.items() if (k in _TRAFFIC) == (kind == "traffic")}
        if kind == "time" or mine or there:
            sums = usd(sum(mine.values(), Decimal(0))), usd(sum(there.values(), Decimal(0)))
            instance_id = str(machine.instance_id)
            doubt = _doubt(op, machine, kind, least.get(kind, Decimal(0)), sums[1])
            found.append(Row(machine.provider, machine.id, instance_id, kind, *sums, mine, there, is_complete, doubt))
    return found


def _doubt(op: Operator, machine: Machine, kind: str, least_usd: Decimal, sum_usd: Decimal) -> str | None:
    """Why what a provider says it charged cannot be true: a slip, or a lie, that would bend the books and ceilings."""
    if least_usd < 0:
        return f"a charge of {json_number(least_usd)} USD for {kind} is less than nothing"
    most = _MOST_TIMES * _possible_usd(op, machine, kind) + _ALWAYS_POSSIBLE
    if sum_usd > most:
        return f"{json_number(sum_usd)} USD for {kind} are more than it could have cost, even {json_number(most)} USD"
    return None


def _possible_usd(op: Operator, machine: Machine, kind: str) -> Decimal:
    """What it could cost from its beginning to its end, at its rate; traffic, which has no rate: what was approved."""
    life = accounting.life_of(op, machine)
    # Nobody knows how long a lost one went on.
    ended = life[-1].ended_at if life and machine.status != "lost" else None
    hours = Decimal(str(lives.seconds(began(op, machine), ended or op.clock.now()))) / 3600
    time_usd = machine.rate_usd_hr * hours
    if kind == "time":
        return time_usd
    return max([time_usd, *(Decimal(str(run.reserved_usd)) for run in accounting.runs_of(op, machine))])


def correct(op: Operator, machine: Machine, charges: Iterable[Charge] | None = None) -> list[dict[str, Any]]:
    """Write what the provider charged and we have not booked, once it is complete; the lines that were written.

    charges: when the caller has asked already. A provider that shows nothing at all for a machine that lived proves
    nothing, unless it shows what others cost later: until then its books stay as they are. UnexpectedReply for charges
    that cannot be true: nothing is written, and it may be asked again.
    """
    machine = machines.find(op.project, machine.id) or machine
    if not is_due(op, machine):
        return []
    accounting.close(op, machine)
    given = charges_between(op, machine.provider, began(op, machine), op.clock.now()) if charges is None else [*charges]
    life = accounting.life_of(op, machine)
    if not any(charge.instance_id == machine.instance_id for charge in given) and not _is_past(op, life, given):
        return []
    if doubts := [row.doubt for row in rows_of(op, machine, given, is_complete=True) if row.doubt is not None]:
        raise UnexpectedReply(provider=machine.provider, what="charges", reason=f"{machine.id}: {'; '.join(doubts)}")
    with files.lock(op.ledger.charges):
        number = len(accounting.lines_of(op, machine.id))
        fresh = []
        for row in rows_of(op, machine, given, is_complete=True):
            if not row.is_even:
                fresh.append(_correction(machine, life, row, number + len(fresh)))
        accounting.append(op, fresh)
    accounting.settle_anew(op, machine)  # always: whoever wrote these lines may have died before this
    intents.observe(op.project, op.clock, CORRECTED, machine_id=machine.id)
    return fresh


def _is_past(op: Operator, life: tuple[Stretch, ...], charges: Iterable[Charge]) -> bool:
    """Whether the provider has written down what came after a life: then what it took for the life would be there too.

    Charges may come in whole hours, so those of a machine of ours that came later tell as well as their times.
    """
    ended = life[-1].ended_at if life else None
    if ended is None:
        return False
    found = list(charges)
    if any(charge.started_at is not None and charge.started_at >= ended for charge in found):
        return True
    charged = {(charge.provider, charge.instance_id) for charge in found}
    lives_after = (
        accounting.life_of(op, m)
        for m in machines.all_machines(op.project)
        if m.is_rented and (m.provider, m.instance_id) in charged
    )
    return any(after and after[0].started_at >= ended for after in lives_after)


def is_due(op: Operator, machine: Machine) -> bool:
    """Whether its books can be held against the provider's: it is gone long enough, and that was not done yet."""
    if machine.status not in states.FINAL or machine.instance_id is None or not accounting.books_here(op, machine):
        return False
    if _of_instance(op, machine)[-1].id != machine.id or is_corrected(op, machine):
        return False
    life = accounting.life_of(op, machine)
    if not life or life[-1].ended_at is None:
        return False
    # A lost machine may have gone on after its last sight.
    over_at = max(life[-1].ended_at, time_of(machine.destroyed_at) or life[-1].ended_at)
    return CHARGES_LAG <= op.clock.now() - over_at <= CORRECTED_WITHIN


def without_traffic(project: Project, since: datetime | None = None) -> list[Machine]:
    """Machines whose traffic bills by the GB and is in no line yet: only the provider's own charges tell how much.

    since: leave out what was gone by then.
    """
    corrected = {event.get("machine_id") for event in intents.observations(project, CORRECTED)}
    return [
        machine
        for machine in machines.all_machines(project)
        if machine.provider in RENTED_PROVIDERS
        and traits_of(machine.provider).bills_traffic
        and machine.instance_id is not None
        and machine.id not in corrected
        and (since is None or (time_of(machine.destroyed_at) or since) >= since)
    ]


def is_corrected(op: Operator, machine: Machine) -> bool:
    """Whether its books were made the provider's own: nothing is booked after that."""
    return bool(intents.observations(op.project, CORRECTED, machine_id=machine.id))


def began(op: Operator, machine: Machine) -> datetime:
    """When it, or an earlier record of the same instance, began to bill."""
    starts = [life[0].started_at for record in _of_instance(op, machine) if (life := accounting.life_of(op, record))]
    return min(starts, default=op.clock.now())


def _of_instance(op: Operator, machine: Machine) -> list[Machine]:
    """All records of one instance, in the order in which they were made: one that came back has another."""
    return [
        m
        for m in machines.all_machines(op.project)
        if m.provider == machine.provider and m.instance_id == machine.instance_id
    ]


def _correction(machine: Machine, life: tuple[Stretch, ...], row: Row, number: int) -> dict[str, Any]:
    end = life[-1].ended_at
    assert end is not None
    is_traffic = row.kind == "traffic" and row.difference_usd > 0
    parts = ", ".join(f"{name} {json_number(amount)}" for name, amount in sorted(row.theirs.items()))
    return {
        "id": accounting.line_id(machine, "correction", number),
        "kind": "bandwidth" if is_traffic else "correction",
        "machine_id": machine.id,
        "provider": machine.provider,
        "account": machine.account,
        "intent": machine.intent,
        "started_at": timestamp(life[0].started_at),
        "completed_at": timestamp(end),
        "cost_usd": json_number(row.difference_usd),
        "estimated": False,
        "note": f"{row.kind}: charged {parts or 'nothing'}; booked {json_number(row.ours_usd)}",
    }


def _of_others(provider: str, charges: list[Charge]) -> list[Row]:
    sums: dict[tuple[str, str], dict[str, Decimal]] = {}
    for charge in charges:
        kind = "traffic" if charge.kind in _TRAFFIC else "time"
        parts = sums.setdefault((charge.instance_id, kind), {})
        parts[charge.kind] = parts.get(charge.kind, Decimal(0)) + charge.amount_usd
    return [
        Row(provider, None, instance_id, kind, Decimal(0), usd(sum(parts.values(), Decimal(0))), {}, parts, False)
        for (instance_id, kind), parts in sums.items()
    ]
