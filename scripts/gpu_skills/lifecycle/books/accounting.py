"""The books of a rented machine: each second it bills is in a job's line of the ledger or in one line of charges.jsonl.

What is over is booked: a set-up once the machine is ready, idle time when it stops or is gone, storage in slices. Every
line carries the stretch of the machine's life it belongs to, and is written under the lock of the file unless it is
there: twice or from two processes adds nothing. These are estimates from rates; `correct` makes their sum the
provider's own, once the provider has written everything down.

Only the state directory that holds a run books its machines: a copy of it would book everything again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import parse_timestamp, time_of, timestamp
from gpu_skills.errors import UnexpectedReply
from gpu_skills.lifecycle import intents, machines, runs, states
from gpu_skills.lifecycle.books import lives
from gpu_skills.lifecycle.books.lives import Stretch
from gpu_skills.lifecycle.intents import Intent
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.runs import Run
from gpu_skills.providers.base import Charge
from gpu_skills.state import budget, files, journal
from gpu_skills.state.job_record import interval_s, is_terminal
from gpu_skills.state.project import Project
from gpu_skills.units import json_number, usd

# RunPod writes charges every 5 minutes, Vast within seconds: what ended this long ago is complete.
CHARGES_LAG = timedelta(minutes=15)
# Storage of a machine that goes on standing still is booked in slices of at least this.
STORAGE_SLICE = timedelta(hours=1)
# After that nobody asks again whether the provider's sum is another one.
CORRECTED_WITHIN = timedelta(days=28)
CORRECTED = "charges_corrected"
LONGEST_QUESTION = timedelta(days=30)  # charges are asked for a month at a time
_ENDS_OF_JOBS = ("deadline_passed", "session_budget", "max_lifetime", "cancelled")
_TRAFFIC = ("download", "upload")
_BILLS_TRAFFIC = ("vast",)
_EVEN = Decimal("0.00001")  # providers round each part they list
# A provider is believed up to so many times what time and rate make, and a sum that any machine may cost.
_MOST_TIMES = 10
_ALWAYS_POSSIBLE = Decimal("0.10")


# booking --------------------------------------------------------------------------------------------------------------


def close(op: Operator, machine: Machine) -> list[dict[str, Any]]:
    """Book what of a machine's life is over; the lines that were written now. Repeating adds nothing.

    Of one that is gone its jobs are ended first, as of when it went.
    """
    machine = machines.find(op.project, machine.id) or machine
    if not machine.is_rented or not books_here(op, machine):
        return []
    now = op.clock.now()
    known, seen = intents.read(op.project), intents.observations(op.project, *lives.SEEN, machine_id=machine.id)
    for at, kind in lives.untold(machine, lives.told(machine, known, seen), now):
        what = lives.STOPPED if kind == "stopped" else lives.RUNNING
        intents.observe(op.project, op.clock, what, machine_id=machine.id, details={"at": timestamp(at)})
        seen = intents.observations(op.project, *lives.SEEN, machine_id=machine.id)
    if (ended := lives.ended_at(machine, known, seen, now=now)) is not None:
        op.settle_jobs(machine.id, _why_gone(machine, ended, known.values()), at=ended)
    life = lives.life(machine, known, seen, now=now)
    path = op.ledger.charges
    op.project.require_writable()
    with files.lock(path):
        booked = lines_of(op, machine.id)
        fresh = _unbooked(machine, life, booked, op.ledger.last_lines_on(machine.id), now)
        _append(op, fresh)
    return fresh


def life_of(op: Operator, machine: Machine) -> tuple[Stretch, ...]:
    seen = intents.observations(op.project, *lives.SEEN, machine_id=machine.id)
    return lives.life(machine, intents.read(op.project), seen, now=op.clock.now())


def ended_at(op: Operator, machine: Machine) -> datetime | None:
    """When a machine that is gone went, as far as anybody knows; its jobs ended then."""
    seen = intents.observations(op.project, *lives.SEEN, machine_id=machine.id)
    return lives.ended_at(machine, intents.read(op.project), seen, now=op.clock.now())


def lines_of(op: Operator, machine_id: str) -> list[dict[str, Any]]:
    """The charges of one machine, oldest first."""
    return [line for line in _lines(op) if line.get("machine_id") == machine_id]


def books_here(op: Operator, machine: Machine) -> bool:
    """Whether its run is this state directory's. A machine without a run is booked where its record is."""
    found = runs_of(op, machine)
    return not found or any(run.owner == runs.owner_of(op) for run in found)


def runs_of(op: Operator, machine: Machine) -> list[Run]:
    """The runs that made this machine, of whatever state directory."""
    return [
        run
        for run in runs.all_runs(op)
        if run.project_id == op.project.project_id
        and any(a.machine_id == machine.id or a.intent == machine.intent for a in run.attempts)
    ]


def _unbooked(
    machine: Machine, life: Iterable[Stretch], booked: list[dict[str, Any]], jobs: list[dict[str, Any]], now: datetime
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for stretch in life:
        mine = [line for line in booked if line.get("stretch") == stretch.number]
        if stretch.kind == "stopped":
            found += _storage(machine, stretch, mine, now)
        elif not any(line.get("kind") in ("idle", "setup_failed") for line in mine):
            found += _running(machine, stretch, mine, jobs)
    return found


def _running(
    machine: Machine, stretch: Stretch, booked: list[dict[str, Any]], jobs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Set-up once it is over, idle time once the stretch is, and no job that ran in it is still without an end."""
    set_up = next((line for line in booked if line.get("kind") == "setup"), None)
    ready_at = stretch.ready_at if set_up is None else time_of(set_up.get("completed_at")) or stretch.ready_at
    if ready_at is None:
        if stretch.ended_at is None or set_up is not None:
            return []
        return [_line(machine, stretch, "setup_failed", stretch.started_at, stretch.ended_at)]
    found = [_line(machine, stretch, "setup", stretch.started_at, ready_at)] if set_up is None else []
    if stretch.ended_at is None:
        return found
    start, end = ready_at.timestamp(), stretch.ended_at.timestamp()
    spans, paid_usd = [], Decimal(0)
    for job in jobs:
        span = interval_s(job)
        if span is None or span[0] >= end or (span[1] is not None and span[1] <= start):
            continue
        if not is_terminal(job) and machine.status not in states.FINAL:
            return found  # asked when the machine is up again, or ended when it is gone
        spans.append((span[0], end if span[1] is None else span[1]))
        paid_usd += usd(job.get("cost_usd") or 0)
    idle_s = max(0.0, end - start - lives.covered_s(spans, start, end))
    whole_usd = usd(machine.rate_usd_hr * Decimal(str(end - start)) / 3600)
    line = _line(machine, stretch, "idle", ready_at, stretch.ended_at)
    return [
        *found,
        {**line, "duration_s": round(idle_s, 3), "cost_usd": json_number(max(Decimal(0), whole_usd - paid_usd))},
    ]


def _storage(machine: Machine, stretch: Stretch, booked: list[dict[str, Any]], now: datetime) -> list[dict[str, Any]]:
    until = [at for line in booked if (at := time_of(line.get("completed_at"))) is not None]
    start = max([stretch.started_at, *until])
    end = stretch.ended_at or now
    if end <= start or (stretch.ended_at is None and end - start < STORAGE_SLICE):
        return []
    return [_line(machine, stretch, "storage", start, end, part=len(booked))]


def _line(
    machine: Machine, stretch: Stretch, kind: str, start: datetime, end: datetime | None, *, part: int | None = None
) -> dict[str, Any]:
    assert end is not None
    rate = (machine.storage_usd_hr or Decimal(0)) if kind == "storage" else machine.rate_usd_hr
    duration_s = Decimal(str(round(lives.seconds(start, end), 3)))
    return {
        "id": _line_id(machine, stretch.number, kind, part),
        "kind": kind,
        "machine_id": machine.id,
        "provider": machine.provider,
        "account": machine.account,
        "intent": machine.intent,
        "stretch": stretch.number,
        "started_at": timestamp(start),
        "completed_at": timestamp(end),
        "duration_s": json_number(duration_s),
        "rate_usd_hr": json_number(rate),
        "cost_usd": json_number(usd(rate * duration_s / 3600)),
        "estimated": True,
        "note": "closed at its last sight" if machine.status == "lost" else None,
    }


def _line_id(machine: Machine, *parts: object) -> str:
    """The same for the same piece of a life, whoever writes it."""
    return "/".join([machine.id, *(str(part) for part in parts if part is not None)])


def _why_gone(machine: Machine, ended: datetime, known: Iterable[Intent]) -> str:
    """What its open jobs end with: why it was sent away, or its deadline."""
    orders = [i.reason or i.details.get("why") for i in known if i.machine_id == machine.id and i.action == "destroy"]
    if orders and orders[-1] in _ENDS_OF_JOBS:
        return str(orders[-1])
    deadline = time_of(machine.deadline_at)
    # The machine ends its jobs some minutes before its deadline, to have their outputs whole by then.
    if deadline is not None and ended >= deadline - timedelta(minutes=5):
        return str((machine.session or {}).get("deadline_reason") or "deadline_passed")
    return "machine_lost" if machine.status == "lost" else "machine_destroyed"


# settling -------------------------------------------------------------------------------------------------------------


def settle_run(op: Operator, run: Run) -> bool:
    """Free what a run reserved, at what it came to; False while something of it may still bill. Repeating is harmless.

    Books its machines first. The reservations for later starts and extensions of its machines go with it. A run that
    rented nothing and whose approval holds stays open: the next attempt reserves again.
    """
    run = runs.load(op, run.approval_id) or run
    if run.owner != runs.owner_of(op):
        return False
    mine = machines_of(op, run)
    known = intents.read(op.project)
    for attempt in run.attempts:
        on_record = [m for m in mine if m.intent == attempt.intent or m.id == attempt.machine_id]
        is_refused = attempt.result == "refused" or (attempt.is_over and not on_record)
        intent = known.get(attempt.intent)
        if intent is not None and intent.is_open and not attempt.is_over:
            return False
        if not is_refused and not (on_record and all(m.status in states.FINAL for m in on_record)):
            return False
    budget.settle(
        op.project,
        op.clock,
        intent=run.approval_id,
        provider=run.provider,
        directory=run.account,
        settled_usd=cost_of(op, run),
        environ=op.environ,
    )
    _settle_what_came_later(op, run, {machine.id for machine in mine})
    may_go_on = run.state == "open" and not mine and op.clock.now() < parse_timestamp(run.approval_expires_at)
    runs.update(op, run.approval_id, lambda r: replace(r, is_settled=True, state=r.state if may_go_on else "closed"))
    return True


def machines_of(op: Operator, run: Run) -> list[Machine]:
    """The machines on record that a run made: those of its attempts that came to an instance."""
    made_by = {attempt.intent for attempt in run.attempts}
    ids = {attempt.machine_id for attempt in run.attempts}
    return [
        machine
        for machine in machines.all_machines(op.project)
        if (machine.intent in made_by or machine.id in ids)
        and not (machine.status == "lost" and machine.instance_id is None)
    ]


def cost_of(op: Operator, run: Run) -> Decimal:
    """What the machines of a run have cost so far, booked first as far as their lives are over."""
    mine = machines_of(op, run)
    for machine in mine:
        close(op, machine)
    return sum((booked_usd(op, machine.id) for machine in mine), Decimal(0))


def booked_usd(op: Operator, machine_id: str) -> Decimal:
    """What a machine has cost by our books: its jobs and its charges."""
    return sum(_booked(op, machine_id).values(), Decimal(0))


def _settle_what_came_later(op: Operator, run: Run, machine_ids: set[str]) -> None:
    """Their money is in what the run came to."""
    for intent, found in budget.open_reservations(op.project, op.environ).items():
        if intent != run.approval_id and found.reservation.account and machine_ids & set(found.machine_ids):
            budget.settle(
                op.project,
                op.clock,
                intent=intent,
                provider=run.provider,
                directory=found.reservation.account,
                settled_usd=0,
                environ=op.environ,
            )


# the provider's own ---------------------------------------------------------------------------------------------------


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
        life = life_of(op, machine)
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
        for kind, amount in _booked(op, record.id).items():
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
    life = life_of(op, machine)
    # Nobody knows how long a lost one went on.
    ended = life[-1].ended_at if life and machine.status != "lost" else None
    hours = Decimal(str(lives.seconds(began(op, machine), ended or op.clock.now()))) / 3600
    time_usd = machine.rate_usd_hr * hours
    if kind == "time":
        return time_usd
    return max([time_usd, *(Decimal(str(run.reserved_usd)) for run in runs_of(op, machine))])


def correct(op: Operator, machine: Machine, charges: Iterable[Charge] | None = None) -> list[dict[str, Any]]:
    """Write what the provider charged and we have not booked, once it is complete; the lines that were written.

    charges: when the caller has asked already. A provider that shows nothing at all for a machine that lived proves
    nothing, unless it shows what others cost later: until then its books stay as they are. UnexpectedReply for charges
    that cannot be true: nothing is written, and it may be asked again.
    """
    machine = machines.find(op.project, machine.id) or machine
    if not is_due(op, machine):
        return []
    close(op, machine)
    given = charges_between(op, machine.provider, began(op, machine), op.clock.now()) if charges is None else [*charges]
    life = life_of(op, machine)
    if not any(charge.instance_id == machine.instance_id for charge in given) and not _is_past(op, life, given):
        return []
    if doubts := [row.doubt for row in rows_of(op, machine, given, is_complete=True) if row.doubt is not None]:
        raise UnexpectedReply(provider=machine.provider, what="charges", reason=f"{machine.id}: {'; '.join(doubts)}")
    with files.lock(op.ledger.charges):
        number = sum(1 for line in _lines(op) if line.get("machine_id") == machine.id)
        fresh = []
        for row in rows_of(op, machine, given, is_complete=True):
            if not row.is_even:
                fresh.append(_correction(machine, life, row, number + len(fresh)))
        _append(op, fresh)
    settle_anew(op, machine)  # always: whoever wrote these lines may have died before this
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
        life_of(op, m)
        for m in machines.all_machines(op.project)
        if m.is_rented and (m.provider, m.instance_id) in charged
    )
    return any(after and after[0].started_at >= ended for after in lives_after)


def is_due(op: Operator, machine: Machine) -> bool:
    """Whether its books can be held against the provider's: it is gone long enough, and that was not done yet."""
    if machine.status not in states.FINAL or machine.instance_id is None or not books_here(op, machine):
        return False
    if _of_instance(op, machine)[-1].id != machine.id or is_corrected(op, machine):
        return False
    life = life_of(op, machine)
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
        if machine.provider in _BILLS_TRAFFIC
        and machine.instance_id is not None
        and machine.id not in corrected
        and (since is None or (time_of(machine.destroyed_at) or since) >= since)
    ]


def is_corrected(op: Operator, machine: Machine) -> bool:
    """Whether its books were made the provider's own: nothing is booked after that."""
    return bool(intents.observations(op.project, CORRECTED, machine_id=machine.id))


def began(op: Operator, machine: Machine) -> datetime:
    """When it, or an earlier record of the same instance, began to bill."""
    starts = [life[0].started_at for record in _of_instance(op, machine) if (life := life_of(op, record))]
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
        "id": _line_id(machine, "correction", number),
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


def settle_anew(op: Operator, machine: Machine) -> None:
    """What the settled run of a machine came to may have changed: other projects see its new sum."""
    for run in runs_of(op, machine):
        if run.owner != runs.owner_of(op) or not run.is_settled:
            continue
        if budget.settled_usd(op.project, run.approval_id, op.environ) != usd(cost_of(op, run)):
            settle_run(op, run)


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


# the lines ------------------------------------------------------------------------------------------------------------


def _booked(op: Operator, machine_id: str) -> dict[str, Decimal]:
    """By kind: `job`, and the kinds of charges."""
    found: dict[str, Decimal] = defaultdict(Decimal)
    for job in op.ledger.last_lines_on(machine_id):
        if job.get("cost_usd"):
            found["job"] += usd(job["cost_usd"])
    for line in _lines(op):
        if line.get("machine_id") == machine_id:
            found[str(line.get("kind"))] += usd(line["cost_usd"])
    return dict(found)


def _lines(op: Operator) -> list[dict[str, Any]]:
    """The readable charges, oldest first."""
    return [
        line
        for _offset, _number, line in journal.scan(op.ledger.charges)
        if isinstance(line, dict) and isinstance(line.get("cost_usd"), int | float)
    ]


def _append(op: Operator, lines: list[dict[str, Any]]) -> None:
    """Whoever calls has the lock, and has looked for what is there."""
    if not lines:
        return
    ts = timestamp(op.clock.now())
    whole = [{key: value for key, value in {**line, "ts": ts}.items() if value is not None} for line in lines]
    journal.append_locked(op.ledger.charges, b"".join(files.dumps_line(line) for line in whole))
