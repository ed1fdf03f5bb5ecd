"""What is spent and what is reserved now, and the one way to reserve more: the facts that a policy is asked with.

Reservations belong to an account of a provider, not to a project: two projects that rent on one account share its
money. They lie in the user's state directory, in `accounts/<provider>-<hash of the account>/journal.jsonl`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills import userdirs
from gpu_skills.clock import Clock, parse_timestamp, time_of, timestamp
from gpu_skills.errors import StateError, UsageError
from gpu_skills.state import files, journal, registry
from gpu_skills.state.journal import Reservation
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.policy import Policy, Spent, amount, require
from gpu_skills.state.project import Project
from gpu_skills.units import json_number, usd

# May bill at the full rate. A stopped machine bills storage, which its reservation covers.
BILLING = ("requested", "booting", "ready", "busy", "stopping", "terminating", "unknown")
_PROVIDER = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")
_DIRECTORY = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}-[0-9a-f]{16}")


@dataclass(frozen=True)
class Books:
    """spent and reservations at one moment, as `policy.check` wants them.

    A reservation holds what it is still good for: what is booked on its machines is spent, and counts there.
    """

    spent: Spent
    reservations: tuple[Reservation, ...]

    @property
    def reserved_usd(self) -> Decimal:
        return journal.reserved_usd(self.reservations)


def account_directory(provider: str, account: str, environ: Mapping[str, str] = os.environ) -> Path:
    """What all projects of this user share about one account. account: whatever names it; only its hash is used."""
    if not _PROVIDER.fullmatch(provider) or not account:
        raise UsageError(f"{provider!r} with account {account!r} names no account", next_step="gpu doctor")
    return _accounts(environ) / f"{provider}-{hashlib.sha256(account.encode()).hexdigest()[:16]}"


def account_journal(provider: str, account: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the reservations on one account are written."""
    return account_directory(provider, account, environ) / "journal.jsonl"


def books(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    environ: Mapping[str, str] = os.environ,
    *,
    job_id: str | None = None,
    resumes: str | None = None,
    session: str | None = None,
    without_intent: str | None = None,
    without_machine: str | None = None,
) -> Books:
    """The project's jobs and charges, what other projects settled on the same accounts, and all open reservations.

    job_id: the job that money is wanted for; what its earlier attempts cost counts, also those under the ids of older
    jobs that it goes on with (resumes: the newest of them, where no reservation says so yet). session: the intent that
    a start was reserved for; what prolonged it counts too. without_intent: leave this reservation out, it is about to
    be replaced, and do not count the machines it has paid for: they are what is asked for. without_machine: nor this
    one. What is booked after "now" counts as today: a clock that went back gives no money back.
    """
    now = clock.now().astimezone(UTC)
    today, first = now.strftime("%Y-%m-%d"), now.strftime("%Y-%m-01")
    booked = ledger.spend(by="day", since=first, include_charges=True)
    day = sum((row.cost_usd for row in booked.rows if (row.key or today) >= today), Decimal(0))
    accounts = _Accounts.read(project, environ)
    reservations = tuple(r for r in accounts.open() if r.intent != without_intent)
    on_machines = _booked_on_machines(project, ledger, reservations, accounts)
    others = [s for s in accounts.settlements.values() if s.project_id != project.project_id]
    asked_for = {(project.project_id, machine) for machine in accounts.machines.get(without_intent or "", ())}
    asked_for.add((project.project_id, without_machine or ""))
    spent = Spent(
        day_usd=day + sum((s.usd for s in others if s.day >= today), Decimal(0)),
        month_usd=booked.total_usd + sum((s.usd for s in others if s.day >= first), Decimal(0)),
        session_usd=journal.reserved_usd(r for r in reservations if session and session in (r.intent, r.session)),
        machines=len((_billing(project, accounts) | {accounts.machine_of(r) for r in reservations}) - asked_for),
        job_usd=sum(
            (
                _of_job(one, project, ledger, reservations, accounts, on_machines)
                for one in accounts.attempts_of(project, job_id, resumes)
            ),
            Decimal(0),
        ),
        incomplete=booked.incomplete or accounts.bad_lines > 0,
    )
    return Books(spent, tuple(_less_what_is_booked(project, reservations, accounts, on_machines)))


def _booked_on_machines(
    project: Project, ledger: Ledger, reservations: Iterable[Reservation], accounts: _Accounts
) -> dict[str, Decimal]:
    """What this project's books say that the machines of these reservations have cost so far."""
    wanted = {
        machine
        for reservation in reservations
        if reservation.project_id == project.project_id
        for machine in accounts.machines.get(reservation.intent, ())
    }
    found = dict.fromkeys(wanted, Decimal(0))
    for machine in wanted:
        for job in ledger.last_lines_on(machine):
            found[machine] += usd(job.get("cost_usd") or 0)
    if wanted:
        for _offset, _number, line in journal.scan(ledger.charges):
            if isinstance(line, dict) and line.get("machine_id") in found:
                cost = line.get("cost_usd")
                found[line["machine_id"]] += usd(cost) if type(cost) in (int, float) else Decimal(0)
    return {machine: max(Decimal(0), cost) for machine, cost in found.items()}


def _less_what_is_booked(
    project: Project, reservations: Iterable[Reservation], accounts: _Accounts, on_machines: Mapping[str, Decimal]
) -> list[Reservation]:
    """The reservations with what they are still good for. One dollar booked makes one of them smaller, the oldest."""
    rest = dict(on_machines)
    found = []
    for reservation in sorted(reservations, key=lambda r: r.ts):
        left = reservation.reserved_usd
        is_ours = reservation.project_id == project.project_id
        for machine in accounts.machines.get(reservation.intent, ()) if is_ours else ():
            part = min(left, rest[machine])
            left, rest[machine] = left - part, rest[machine] - part
        found.append(replace(reservation, reserved_usd=left))
    return found


def _of_job(
    job_id: str,
    project: Project,
    ledger: Ledger,
    reservations: Iterable[Reservation],
    accounts: _Accounts,
    on_machines: Mapping[str, Decimal],
) -> Decimal:
    """What a job of this project (others have the same ids) has cost and has reserved.

    Settled is what its machine billed, and that has the job's own line in it: the dearer of the two counts, not both.
    The same holds for what is reserved and what is booked on its machine so far.
    """
    ours = (None, project.project_id)
    settled = [s.usd for s in accounts.settlements.values() if s.job_id == job_id and s.project_id in ours]
    line = ledger.latest(job_id) or {}
    booked = usd(line.get("cost_usd") or 0)
    open_usd = Decimal(0)
    for reservation in reservations:
        if reservation.job_id == job_id and reservation.project_id in ours:
            mine = accounts.machines.get(reservation.intent, {})
            open_usd += max(
                reservation.reserved_usd, sum((on_machines.get(machine, Decimal(0)) for machine in mine), Decimal(0))
            )
            booked = Decimal(0) if line.get("machine_id") in mine else booked
    return open_usd + max(sum(settled, Decimal(0)), booked)


def reserve(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    policy: Policy,
    *,
    intent: str,
    account: str,
    provider: str,
    cost_usd: Decimal | float | int | str,
    rate_usd_hr: Decimal | float | int | str,
    deadline_h: Decimal | float | int | str | None,
    job_id: str | None = None,
    resumes: str | None = None,
    machine_id: str | None = None,
    session: str | None = None,
    machines: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> Reservation:
    """Admission: under one lock ask the policy and write the worst case down, synced. OverCeiling writes nothing.

    From its return until `settle` the money counts against every ceiling of every project on these accounts. Reserving
    again for an intent replaces its amount, and opens it again when it was settled. machine_id: one that is there
    already, and among `machines`. session: of what prolongs it, the intent of the start. resumes: the older job
    that job_id goes on with. To be called before the request that bills leaves; no lock is held then.
    """
    project.require_writable()
    path = account_journal(provider, account, environ)
    files.make_directory(path.parent)
    with files.lock(_accounts(environ)):
        found = books(
            project,
            ledger,
            clock,
            environ,
            job_id=job_id,
            resumes=resumes,
            session=session,
            without_intent=intent,
            without_machine=machine_id if machines else None,
        )
        require(
            policy,
            cost_usd=cost_usd,
            rate_usd_hr=rate_usd_hr,
            deadline_h=deadline_h,
            provider=provider,
            spent=found.spent,
            reserved_usd=found.reserved_usd,
            machines=machines,
        )
        event = {
            "kind": "reservation",
            "ts": timestamp(clock.now()),
            "intent": intent,
            "provider": provider,
            "account": path.parent.name,
            "project_id": project.project_id,
            "machine_id": machine_id,
            "job_id": job_id,
            **{k: v for k, v in {"resumes": resumes, "session": session}.items() if v is not None},
            "reserved_usd": json_number(amount("cost_usd", cost_usd)),
        }
        journal.append(path, [event])
    return journal.open_reservations([event])[0]


def note_attempt(
    project: Project,
    clock: Clock,
    *,
    intent: str,
    directory: str,
    machine_id: str,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Say which machine a reservation pays for now, so that reservation and record count as one machine.

    directory: the account's, as the reservation names it (`Reservation.account`).
    """
    event = {
        "kind": "attempt",
        "ts": timestamp(clock.now()),
        "intent": intent,
        "account": directory,
        "project_id": project.project_id,
        "machine_id": machine_id,
    }
    with files.lock(_accounts(environ)):
        journal.append(_journal_in(directory, environ), [event])


def settle(
    project: Project,
    clock: Clock,
    *,
    intent: str,
    settled_usd: Decimal | float | int | str,
    account: str | None = None,
    provider: str | None = None,
    directory: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Free what was reserved, once what was really billed is booked. Repeating is harmless.

    By provider and account, or by the directory that the reservation named: a key that changed since names another
    account, and money reserved on the old one has to come free all the same.
    """
    path = (
        _journal_in(directory, environ)
        if directory is not None
        else account_journal(provider or "", account or "", environ)
    )
    files.make_directory(path.parent)
    event = {
        "kind": "settlement",
        "ts": timestamp(clock.now()),
        "intent": intent,
        "provider": provider,
        "account": path.parent.name,
        "project_id": project.project_id,
        "settled_usd": json_number(amount("settled_usd", settled_usd)),
    }
    with files.lock(_accounts(environ)):
        journal.append(path, [event])


def settled_usd(project: Project, intent: str, environ: Mapping[str, str] = os.environ) -> Decimal | None:
    """What an intent was settled at last; None: it never was."""
    found = _Accounts.read(project, environ).settlements.get(intent)
    return None if found is None else found.usd


def open_reservations(project: Project, environ: Mapping[str, str] = os.environ) -> dict[str, Open]:
    """The reservations of this project that are not settled, by intent."""
    accounts = _Accounts.read(project, environ)
    return {
        r.intent: Open(r, tuple(accounts.machines.get(r.intent, ())))
        for r in accounts.open()
        if r.project_id == project.project_id
    }


def job_on(project: Project, machine_id: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The job that a machine was rented for, as its open reservations say."""
    found = open_reservations(project, environ).values()
    jobs = (one.reservation.job_id for one in found if machine_id in one.machine_ids)
    return next((job for job in jobs if job is not None), None)


@dataclass(frozen=True)
class Open:
    """machine_ids: the machines it has paid for, the newest last."""

    reservation: Reservation
    machine_ids: tuple[str, ...]


@dataclass(frozen=True)
class Attempt:
    """A create that rented nothing, or of which nobody knows yet: result None is an intent without an outcome."""

    intent: str
    ts: str
    provider: str | None
    label: str | None
    result: str | None
    reason: str | None

    def to_record(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Attempts:
    """attempts, the newest last; of many the last `shown`, `count` in all. bad_offsets: where a line is no record."""

    attempts: tuple[Attempt, ...]
    count: int
    bad_lines: int
    bad_offsets: tuple[int, ...]


def failed_creates(project: Project, *, since: datetime | None = None, shown: int = 50) -> Attempts:
    """The creates in the journal that did not end with a machine. They cost nothing and were still attempts."""
    creates: dict[str, dict[str, Any]] = {}
    outcomes: dict[str, dict[str, Any]] = {}
    bad: list[int] = []
    for offset, _number, event in journal.scan(project.path("journal.jsonl")):
        if isinstance(event, journal.Problem):
            bad.append(offset)
        elif isinstance(event.get("intent"), str):
            if event.get("kind") == "intent" and event.get("action") == "create" and not _is_before(event, since):
                creates[event["intent"]] = event
            elif event.get("kind") == "outcome":
                outcomes[event["intent"]] = event
    found = []
    for intent, event in creates.items():
        outcome = outcomes.get(intent, {})
        if outcome.get("result") == "done":
            continue
        words = {key: _text(event.get(key)) for key in ("provider", "label")}
        answer = {key: _text(outcome.get(key)) for key in ("result", "reason")}
        found.append(Attempt(intent, str(event.get("ts", "")), **words, **answer))
    return Attempts(tuple(found[-shown:]), len(found), len(bad), tuple(bad[:20]))


def _is_before(event: dict[str, Any], since: datetime | None) -> bool:
    try:
        return since is not None and parse_timestamp(event["ts"]) < since
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _accounts(environ: Mapping[str, str]) -> Path:
    return userdirs.state_dir(environ) / "accounts"


def _journal_in(directory: str, environ: Mapping[str, str]) -> Path:
    """Of an account by the name of its directory, which comes from a record."""
    if not _DIRECTORY.fullmatch(directory):
        raise UsageError(f"{directory[:80]!r} names no account", next_step="gpu doctor")
    return _accounts(environ) / directory / "journal.jsonl"


def _billing(project: Project, accounts: _Accounts) -> set[tuple[str, str]]:
    """Machines on record that may bill. One that its reservation does not name yet, which is written right after the
    record, counts as what the reservation counts as: it is one machine.
    """
    found = set()
    for record in registry.load(project, "machines"):
        if record["status"] not in BILLING or record["provider"] in registry.OWN_HOSTS:
            continue
        counted, paid_by = record["id"], record.get("approval_id")
        if isinstance(paid_by, str) and record["status"] in ("requested", "booting"):
            named = accounts.machines.get(paid_by) or {paid_by: None}
            counted = counted if counted in named else next(reversed(named))
        found.add((project.project_id, counted))
    return found


@dataclass(frozen=True)
class _Settlement:
    """reopened_at: when the same file reserved for this intent again, below this line."""

    usd: Decimal
    ts: str
    project_id: str | None
    job_id: str | None
    reopened_at: str | None = None

    @property
    def day(self) -> str:
        return self.ts[:10]

    def is_before(self, reservation: Reservation) -> bool:
        """Within one second the order of the lines decides, where they stand in one file."""
        return self.reopened_at == reservation.ts


@dataclass
class _Accounts:
    """The events of all accounts of this user and of the project's own journal, each intent once.

    machines: by intent, those it has paid for, the newest last.
    """

    reservations: dict[str, Reservation] = field(default_factory=dict)
    settlements: dict[str, _Settlement] = field(default_factory=dict)
    machines: dict[str, dict[str, None]] = field(default_factory=dict)
    bad_lines: int = 0
    _still_open: list[Reservation] = field(default_factory=list)

    @classmethod
    def read(cls, project: Project, environ: Mapping[str, str]) -> _Accounts:
        found = cls()
        for path in [*sorted(_accounts(environ).glob("*/journal.jsonl")), project.path("journal.jsonl")]:
            found._add(path)
        return found

    def open(self) -> list[Reservation]:
        """What no settlement freed, in whatever file that stands. One that was reserved again since is open again."""
        kept = {}
        for reservation in self._still_open:
            settlement = self.settlements.get(reservation.intent)
            if settlement is None or settlement.ts < reservation.ts or settlement.is_before(reservation):
                kept[reservation.intent] = reservation
        return list(kept.values())

    def attempts_of(self, project: Project, *jobs: str | None) -> list[str]:
        """These jobs of a project and the older ones that they go on with."""
        older: dict[str, list[str]] = {}
        for reservation in self.reservations.values():
            if reservation.project_id == project.project_id and reservation.job_id and reservation.resumes:
                older.setdefault(reservation.job_id, []).append(reservation.resumes)
        found: dict[str, None] = {}
        waiting = [job for job in jobs if job]
        while waiting:
            job = waiting.pop()
            if job not in found:
                found[job] = None
                waiting += older.get(job, [])
        return list(found)

    def machine_of(self, reservation: Reservation) -> tuple[str, str]:
        """The machine it pays for; one without an id yet is one more machine."""
        newest = next(reversed(self.machines.get(reservation.intent, {reservation.intent: None})))
        return reservation.project_id or "", newest

    def _add(self, path: Path) -> None:
        events: list[dict[str, Any]] = []
        for _offset, number, event in journal.scan(path):
            if isinstance(event, journal.Problem):
                self.bad_lines += 1  # a write that was cut: nothing was sent after it
                continue
            if event.get("kind") in ("reservation", "settlement"):
                _check(event, path, number)
                events.append(event)
            if isinstance(event.get("machine_id"), str) and isinstance(event.get("intent"), str):
                of_intent = self.machines.setdefault(event["intent"], {})
                of_intent.pop(event["machine_id"], None)
                of_intent[event["machine_id"]] = None
        known = journal.open_reservations(e for e in events if e["kind"] == "reservation")
        self.reservations |= {r.intent: r for r in known}
        still_open = journal.open_reservations(events)
        self._still_open += still_open
        reopened = {r.intent: r.ts for r in still_open}
        for event in events:
            if event["kind"] != "settlement":
                continue
            reservation = self.reservations.get(event["intent"])
            self._settle(
                event["intent"],
                _Settlement(
                    usd=usd(event.get("settled_usd") or 0),
                    ts=str(event.get("ts", "")),
                    project_id=event.get("project_id") or (reservation.project_id if reservation else None),
                    job_id=event.get("job_id") or (reservation.job_id if reservation else None),
                    reopened_at=reopened.get(event["intent"]),
                ),
            )

    def _settle(self, intent: str, settlement: _Settlement) -> None:
        before = self.settlements.get(intent)
        if before is None or before.ts <= settlement.ts:
            self.settlements[intent] = settlement


def _check(event: dict[str, Any], path: Path, number: int) -> None:
    """A reservation that cannot be added up is an error: taking it for nothing would free its money."""
    name = f"{path.parent.name}/{path.name}"
    if not isinstance(event.get("intent"), str):
        raise StateError(file=name, at=f":{number} /intent", problem="found no text, allowed is the name of an intent")
    for key in ("project_id", "job_id", "resumes", "session", "account", "provider", "machine_id"):
        if not isinstance(event.get(key), str | None):
            raise StateError(file=name, at=f":{number} /{key}", problem="found no text, allowed are a text and null")
    if time_of(event.get("ts")) is None:
        raise StateError(file=name, at=f":{number} /ts", problem="found no time, allowed is a time with its zone")
    key = "reserved_usd" if event["kind"] == "reservation" else "settled_usd"
    value = event.get(key)
    if value is None and key == "settled_usd":
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise StateError(file=name, at=f":{number} /{key}", problem=f"found {value!r}, allowed is a number from 0")
