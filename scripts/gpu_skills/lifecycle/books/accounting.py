"""The books of a rented machine: each second it bills is in a job's line of the ledger or in one line of charges.jsonl.

What is over is booked: a set-up once the machine is ready, idle time when it stops or is gone, storage in slices. Every
line carries the stretch of the machine's life it belongs to, and is written under the lock of the file unless it is
there: twice or from two processes adds nothing. These are estimates from rates; `charged` makes their sum the
provider's own, once the provider has written everything down.

Only the state directory that holds a run books its machines: a copy of it would book everything again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import parse_timestamp, time_of, timestamp
from gpu_skills.lifecycle import intents, machines, runs, states
from gpu_skills.lifecycle.books import lives
from gpu_skills.lifecycle.books.lives import Stretch
from gpu_skills.lifecycle.guard import fuse
from gpu_skills.lifecycle.intents import Intent
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.runs import Run
from gpu_skills.state import budget, files, journal
from gpu_skills.state.job_record import interval_s, is_terminal
from gpu_skills.units import json_number, usd

# Storage of a machine that goes on standing still is booked in slices of at least this.
STORAGE_SLICE = timedelta(hours=1)


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
        append(op, fresh)
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
        "id": line_id(machine, stretch.number, kind, part),
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


def line_id(machine: Machine, *parts: object) -> str:
    """The same for the same piece of a life, whoever writes it."""
    return "/".join([machine.id, *(str(part) for part in parts if part is not None)])


def _why_gone(machine: Machine, ended: datetime, known: Iterable[Intent]) -> str:
    """What its open jobs end with: why it was sent away, or its deadline."""
    orders = [i.reason or i.details.get("why") for i in known if i.machine_id == machine.id and i.action == "destroy"]
    if orders and orders[-1] in states.ENDS_OF_JOBS:
        return str(orders[-1])
    deadline = time_of(machine.deadline_at)
    if deadline is not None and ended >= fuse.planned_end(deadline):
        reason = (machine.session or {}).get("deadline_reason") or machine.extra.get(machines.DEADLINE_REASON)
        return reason if isinstance(reason, str) and reason in states.ENDS_OF_JOBS else "deadline_passed"
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
    return sum(booked_by_kind(op, machine_id).values(), Decimal(0))


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


def settle_anew(op: Operator, machine: Machine) -> None:
    """What the settled run of a machine came to may have changed: other projects see its new sum."""
    for run in runs_of(op, machine):
        if run.owner != runs.owner_of(op) or not run.is_settled:
            continue
        if budget.settled_usd(op.project, run.approval_id, op.environ) != usd(cost_of(op, run)):
            settle_run(op, run)


# the lines ------------------------------------------------------------------------------------------------------------


def booked_by_kind(op: Operator, machine_id: str) -> dict[str, Decimal]:
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


def append(op: Operator, lines: list[dict[str, Any]]) -> None:
    """Whoever calls has the lock, and has looked for what is there."""
    if not lines:
        return
    ts = timestamp(op.clock.now())
    whole = [{key: value for key, value in {**line, "ts": ts}.items() if value is not None} for line in lines]
    journal.append_locked(op.ledger.charges, b"".join(files.dumps_line(line) for line in whole))
