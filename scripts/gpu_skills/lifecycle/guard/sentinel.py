"""One bounded pass over an account: what is past its deadline stops or goes, whatever became of who made it.

It needs a provider's key and the project id, nothing else: the deadline stands in the label. Instances without a label
of this project are counted and never touched, nor is anything in production. What the pass did, and what it could not
do, is its receipt; a later pass reads from it which machines the deadline stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from gpu_skills import __version__
from gpu_skills.clock import Clock, timestamp
from gpu_skills.errors import GpuError, InstanceAbsent
from gpu_skills.lifecycle import labels
from gpu_skills.lifecycle.ending import absence
from gpu_skills.lifecycle.ending.absence import Look
from gpu_skills.lifecycle.guard import decisions
from gpu_skills.lifecycle.labels import Label
from gpu_skills.providers.base import Charge, RentedReader, RentedWriter
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.units import json_number

WAIT_S = 240.0
LOOK_EVERY_S = 20.0

# What came of it: `stopping` and `terminating` were taken by the provider and not seen to come true; `failed` was not.
Result = Literal["none", "kept", "stopped", "destroyed", "stopping", "terminating", "failed"]
# Told before and after each request: action, instance, why, and what came of it (None before it is sent).
Note = Callable[[str, Instance, str, str | None], None]


@dataclass(frozen=True)
class Row:
    """One machine of ours in a pass. status: as the provider showed it when the pass began."""

    seen: Instance
    label: Label
    deadline_at: datetime | None
    decision: decisions.Decision
    result: Result = "none"
    problem: GpuError | None = None

    @property
    def alarm(self) -> str | None:
        if self.result == "failed" and self.problem is not None:
            return f"it could not be ended: {self.problem.message}"
        if self.result in ("stopping", "terminating"):
            return "it was told to end and nobody saw that it did"
        return self.decision.alarm

    def to_record(self) -> dict[str, Any]:
        burn = self.seen.burn_usd_hr
        return {
            "instance_id": self.seen.instance_id,
            "label": self.seen.label,
            "intent": self.label.intent,
            "class": self.label.machine_class,
            "status": self.seen.status,
            "deadline_at": None if self.deadline_at is None else timestamp(self.deadline_at),
            "burn_usd_hr": None if burn is None else json_number(burn),
            "action": self.decision.action,
            "result": self.result,
            "why": self.decision.why,
            "alarm": self.alarm,
        }


@dataclass(frozen=True)
class Pass:
    """complete: everything was listed, and the provider took every request that was due. stopped: by instance id, the
    machines that a deadline stopped, for later passes. problem: what kept the account from being listed."""

    provider: str
    account: str
    project_id: str
    started_at: datetime
    ended_at: datetime
    complete: bool
    rows: tuple[Row, ...] = ()
    foreign: int = 0
    stopped: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    problem: GpuError | None = None

    @property
    def is_confirmed(self) -> bool:
        return self.complete and all(row.result not in ("stopping", "terminating") for row in self.rows)

    def to_record(self) -> dict[str, Any]:
        return {
            "provider": self.provider,
            "account": self.account,
            "project_id": self.project_id,
            "complete": self.complete,
            "started_at": timestamp(self.started_at),
            "ended_at": timestamp(self.ended_at),
            "machines": [row.to_record() for row in self.rows],
            "foreign": self.foreign,
            "stopped": {key: dict(value) for key, value in self.stopped.items()},
            "problem": None if self.problem is None else self.problem.message,
            "tool_version": __version__,
        }


def run_pass(
    reader: RentedReader,
    writer: RentedWriter,
    project_id: str,
    *,
    account: str,
    clock: Clock,
    deadlines: Mapping[str, datetime | None] | None = None,
    earlier: Iterable[Any] = (),
    storage_grace_s: float = decisions.STORAGE_GRACE_S,
    wait_s: float = WAIT_S,
    protected: Collection[str] = (),
    note: Note = lambda action, seen, why, result: None,
) -> Pass:
    """List everything, end what is due, look whether it came true for at most wait_s. Raises nothing of the provider's.

    deadlines: newer ones than the labels', by intent or instance id; None is production. earlier: receipts of passes
    before, as read; what is no receipt of this project is passed over. protected: intents of machines whose end takes
    an approval that names them, as far as records tell; a lock at the provider is seen without.
    """
    began = clock.now()
    about = {"provider": reader.name, "account": account, "project_id": project_id, "started_at": began}
    remembered = decisions.remembered(earlier, reader.name, account, project_id)
    try:
        listed = reader.machines()
    except GpuError as exc:
        return Pass(**about, ended_at=clock.now(), complete=False, stopped=remembered, problem=exc)
    ours = [(seen, label) for seen in listed if (label := labels.ours(seen.label, project_id)) is not None]
    proofs = decisions.Proofs(reader, clock, remembered)
    rows = []
    for seen, label in ours:
        deadline_at = decisions.effective_deadline(seen, label, deadlines or {})
        decision = decisions.decide(
            seen,
            label,
            deadline_at,
            clock.now(),
            timedelta(seconds=storage_grace_s),
            proofs.holds,
            is_protected=label.intent in protected,
        )
        rows.append(_act(writer, Row(seen, label, deadline_at, decision), note))
    rows = _watch(reader, writer, rows, clock, wait_s, note)
    return Pass(
        **about,
        ended_at=clock.now(),
        complete=all(row.result != "failed" for row in rows),
        rows=tuple(rows),
        foreign=len(listed) - len(ours),
        stopped=_to_remember(rows, remembered, clock.now()),
    )


def broken_off(
    provider: str, account: str, project_id: str, *, began: datetime, clock: Clock, earlier: Iterable[Any] = ()
) -> Pass:
    """What is known of a pass that did not come to its end: that it is none. What earlier ones stopped is kept."""
    remembered = decisions.remembered(earlier, provider, account, project_id)
    return Pass(provider, account, project_id, began, clock.now(), complete=False, stopped=remembered)


# acting -------------------------------------------------------------------------------------------------------------


def _act(writer: RentedWriter, row: Row, note: Note) -> Row:
    action, seen = row.decision.action, row.seen
    if action not in ("stop", "destroy"):
        return replace(row, result="kept" if action == "keep" else "none")
    note(action, seen, row.decision.why, None)
    return _send(writer, row)


def _send(writer: RentedWriter, row: Row) -> Row:
    try:
        if row.decision.action == "stop":
            writer.stop(row.seen.instance_id)
            return replace(row, result="stopping", problem=None)
        writer.destroy(row.seen.instance_id)
    except InstanceAbsent:
        pass
    except GpuError as exc:
        return replace(row, result="failed", problem=exc)
    return replace(row, result="terminating", problem=None)


def _watch(
    reader: RentedReader, writer: RentedWriter, rows: list[Row], clock: Clock, wait_s: float, note: Note
) -> list[Row]:
    """Look until everything that was told to end has ended, sending again what was not taken or changed nothing."""
    ends = clock.monotonic() + wait_s
    looks: dict[str, list[Look]] = {row.seen.instance_id: [Look(clock.now(), True)] for row in rows}
    pending = ("stopping", "terminating", "failed")
    taken_at: dict[str, datetime] = {}
    while any(row.result in pending for row in rows):
        for row in rows:
            if row.result == "terminating":
                taken_at.setdefault(row.seen.instance_id, clock.now())
        if clock.monotonic() + LOOK_EVERY_S > ends:
            break
        clock.sleep(LOOK_EVERY_S)
        try:
            shown = {seen.instance_id: seen for seen in reader.machines()}
        except GpuError:
            continue
        charges = _ChargesNow(reader, clock)
        rows = [
            _looked_at(reader, writer, row, shown.get(row.seen.instance_id), looks, taken_at, charges)
            if row.result in pending
            else row
            for row in rows
        ]
    for row in rows:
        if row.decision.action in ("stop", "destroy"):
            note(row.decision.action, row.seen, row.decision.why, row.result)
    return rows


def _looked_at(
    reader: RentedReader,
    writer: RentedWriter,
    row: Row,
    listed: Instance | None,
    looks: dict[str, list[Look]],
    taken_at: Mapping[str, datetime],
    charges: _ChargesNow,
) -> Row:
    """The row after one more look. A list may lag: before it is believed that one is gone it is asked for by its id."""
    instance_id, shown = row.seen.instance_id, listed
    if shown is None:
        looks[instance_id].append(Look(charges.clock.now(), False, charges.of(instance_id)))
        if row.decision.action == "destroy":
            row = replace(row, result="terminating", problem=None)
        if not absence.is_gone(looks[instance_id], asked_at=taken_at.get(instance_id), was_seen=True):
            return row
        try:
            shown = reader.machine(instance_id)
        except GpuError:
            return row
        if shown is None:
            return replace(row, result="destroyed", problem=None)
    looks[instance_id].append(Look(charges.clock.now(), True))
    if shown.label != row.seen.label:
        return row  # whoever took it over since, it is not for this pass to end
    if row.decision.action == "stop":
        if shown.status == "stopped":
            return replace(row, result="stopped")
        return row if row.result == "stopping" else _send(writer, row)
    return _send(writer, row)


@dataclass
class _ChargesNow:
    """What the account was charged by now, read at most once for one look at all machines."""

    reader: RentedReader
    clock: Clock
    _found: list[Charge] | None = None
    _is_read: bool = False

    def of(self, instance_id: str) -> Decimal | None:
        """None: they cannot be read."""
        if not self._is_read:
            self._is_read = True
            now = self.clock.now()
            since = now.replace(minute=0, second=0, microsecond=0) - timedelta(hours=2)
            try:
                self._found = self.reader.charges(since, now)
            except GpuError:
                self._found = None
        if self._found is None:
            return None
        return sum((c.amount_usd for c in self._found if c.instance_id == instance_id), Decimal(0))


# what is remembered -------------------------------------------------------------------------------------------------


def _to_remember(
    rows: Iterable[Row], before: Mapping[str, Mapping[str, str]], now: datetime
) -> dict[str, Mapping[str, str]]:
    """Of the machines that are still there: those that this pass or an earlier one stopped, at the same deadline."""
    kept: dict[str, Mapping[str, str]] = {}
    for row in rows:
        if row.deadline_at is None or row.result == "destroyed":
            continue
        deadline_at, instance_id = timestamp(row.deadline_at), row.seen.instance_id
        if row.decision.action == "stop" and row.result != "failed" and row.seen.status != "stopped":
            kept[instance_id] = {"at": timestamp(now), "deadline_at": deadline_at}
        elif row.seen.status == "stopped" and before.get(instance_id, {}).get("deadline_at") == deadline_at:
            kept[instance_id] = before[instance_id]
    return kept
