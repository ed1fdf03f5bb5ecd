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
from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.errors import GpuError, InstanceAbsent
from gpu_skills.lifecycle import labels
from gpu_skills.lifecycle.ending import absence, ownership
from gpu_skills.lifecycle.ending.absence import Look
from gpu_skills.lifecycle.labels import Label
from gpu_skills.providers.base import Charge, RentedReader, RentedWriter
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.units import format_usd, json_number

STORAGE_GRACE_S = 24 * 3600.0
WAIT_S = 240.0
LOOK_EVERY_S = 20.0
# A GPU that was charged until this close to the deadline was stopped by it, not by idleness before.
STOPPED_AT_DEADLINE = timedelta(minutes=2)
_JUST_NOW = timedelta(minutes=10)
_BUCKET = timedelta(hours=1)

Action = Literal["none", "stop", "destroy", "keep"]
# What came of it: `stopping` and `terminating` were taken by the provider and not seen to come true; `failed` was not.
Result = Literal["none", "kept", "stopped", "destroyed", "stopping", "terminating", "failed"]
# Told before and after each request: action, instance, why, and what came of it (None before it is sent).
Note = Callable[[str, Instance, str, str | None], None]


@dataclass(frozen=True)
class Decision:
    """alarm: what a person should hear about it."""

    action: Action
    why: str
    alarm: str | None = None


@dataclass(frozen=True)
class Row:
    """One machine of ours in a pass. status: as the provider showed it when the pass began."""

    seen: Instance
    label: Label
    deadline_at: datetime | None
    decision: Decision
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
    storage_grace_s: float = STORAGE_GRACE_S,
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
    remembered = _remembered(earlier, reader.name, account, project_id)
    try:
        listed = reader.machines()
    except GpuError as exc:
        return Pass(**about, ended_at=clock.now(), complete=False, stopped=remembered, problem=exc)
    ours = [(seen, label) for seen in listed if (label := labels.ours(seen.label, project_id)) is not None]
    proofs = _Proofs(reader, clock, remembered)
    rows = []
    for seen, label in ours:
        deadline_at = effective_deadline(seen, label, deadlines or {})
        decision = decide(
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
    remembered = _remembered(earlier, provider, account, project_id)
    return Pass(provider, account, project_id, began, clock.now(), complete=False, stopped=remembered)


def effective_deadline(seen: Instance, label: Label, deadlines: Mapping[str, datetime | None]) -> datetime | None:
    """The later one of what the label says and what we were told; None: it has none, it is in production."""
    if label.deadline_at is None:
        return None
    found = label.deadline_at
    for key in (label.intent, seen.instance_id):
        if key in deadlines:
            told = deadlines[key]
            if told is None:
                return None
            found = max(found, told)
    return found


# deciding -----------------------------------------------------------------------------------------------------------


def decide(
    seen: Instance,
    label: Label,
    deadline_at: datetime | None,
    now: datetime,
    storage_grace: timedelta,
    was_stopped_by_deadline: Callable[[Instance, Label, datetime], bool],
    *,
    is_protected: bool = False,
) -> Decision:
    """What is due for one machine of ours. Pure but for was_stopped_by_deadline, asked only when it matters.

    A deadline ends what a machine bills: it is stopped where its workspace survives that, else destroyed, and after
    the storage grace destroyed whether collected or not: the plan named this end. But the end of a protected machine
    takes an approval that names it, and no pass has one. So one that is protected on record, or locked at its
    provider, is stopped by its deadline and never destroyed, also not after the grace; where a stop would lose its
    disk it is left as it is. What then bills on is alarmed at every pass. Production has no deadline.
    """
    if deadline_at is None:
        return Decision("none", "production is never touched")
    if now < deadline_at:
        return Decision("none", "its deadline is ahead")
    if seen.status == "terminating":
        return Decision("none", "the provider is ending it")
    if is_protected or seen.is_locked:
        return _of_protected(seen)
    if seen.status != "stopped":
        if not ownership.may_be_stopped(seen):
            return Decision("destroy", f"its deadline has passed, and it cannot be stopped: {seen.dead_end}")
        if ownership.workspace_survives(seen):
            return Decision("stop", "its deadline has passed", _kept_until(deadline_at + storage_grace))
        return Decision("destroy", "its deadline has passed, and nothing on it survives a stop")
    if now < deadline_at + storage_grace:
        # One that was outbid starts again by itself when the price falls, unless it is told to stop.
        action: Action = "stop" if seen.is_interruptible else "none"
        return Decision(action, "stopped, its disk is kept for a while", _kept_until(deadline_at + storage_grace))
    if label.machine_class in ("job", "canary"):
        return Decision("destroy", "its deadline and the time its disk is kept have passed")
    if was_stopped_by_deadline(seen, label, deadline_at):
        return Decision("destroy", "its deadline stopped it, and the time its disk is kept has passed")
    burn = "an unknown amount" if seen.burn_usd_hr is None else f"{format_usd(seen.burn_usd_hr)}/h"
    return Decision(
        "keep",
        "it was not its deadline that stopped it",
        f"stopped with its disk, past its deadline, and costs {burn}: pull what is needed, then gpu machine destroy",
    )


def _of_protected(seen: Instance) -> Decision:
    burn = "an unknown amount" if seen.burn_usd_hr is None else f"{format_usd(seen.burn_usd_hr)}/h"
    ends = "only a person ends it, with what gpu machine destroy then asks for"
    if seen.status == "stopped" and not seen.is_interruptible:
        return Decision("keep", "it is protected", f"protected, past its deadline, and its disk costs {burn}: {ends}")
    if ownership.may_be_stopped(seen) and ownership.workspace_survives(seen):
        return Decision("stop", "its deadline has passed", f"protected, so its disk is kept after its deadline: {ends}")
    why = "it is protected, and a stop would lose its disk" if seen.dead_end is None else "it is protected"
    return Decision("keep", why, f"protected, past its deadline, and goes on billing {burn}: {ends}")


def _kept_until(moment: datetime) -> str:
    return f"its disk is kept until {timestamp(moment)}, then it is destroyed: pull what is needed before"


def proofs(
    reader: RentedReader, clock: Clock, account: str, project_id: str, earlier: Iterable[Any]
) -> Callable[[Instance, Label, datetime], bool]:
    """What `decide` asks last, from receipts of earlier passes and from charges."""
    return _Proofs(reader, clock, _remembered(earlier, reader.name, account, project_id)).holds


@dataclass
class _Proofs:
    """What shows that a deadline stopped a machine: an earlier pass that did it, or the charges of its GPU."""

    reader: RentedReader
    clock: Clock
    remembered: Mapping[str, Mapping[str, str]]

    def holds(self, seen: Instance, label: Label, deadline_at: datetime) -> bool:
        if self.remembered.get(seen.instance_id, {}).get("deadline_at") == timestamp(deadline_at):
            return True
        now = self.clock.now()
        try:
            charges = self.reader.charges(max(deadline_at - timedelta(days=1), now - timedelta(days=30)), now)
        except GpuError:
            return False
        until = gpu_billed_until([c for c in charges if c.instance_id == seen.instance_id])
        # Charged until just now means that the row has no end of its own for the GPU: it proves nothing.
        return until is not None and deadline_at - STOPPED_AT_DEADLINE <= until <= now - _JUST_NOW


def gpu_billed_until(charges: Iterable[Charge]) -> datetime | None:
    """When the GPU of one machine was last charged; None when the charges do not tell so exactly.

    Hourly buckets do not say when within the hour it ended: the amount does, held against that of a full hour, which
    two hours that cost the same are.
    """
    found = [c for c in charges if c.kind == "gpu" and c.amount_usd > 0 and c.started_at and c.ended_at]
    if not found:
        return None
    last = max(found, key=lambda c: c.ended_at)
    if not all(_is_bucket(c) for c in found):
        return last.ended_at
    *_, second, fullest = [Decimal(0), *sorted(c.amount_usd for c in found)]
    if second < fullest * Decimal("0.99"):
        return None
    return last.started_at + _BUCKET * float(min(Decimal(1), last.amount_usd / fullest))


def _is_bucket(charge: Charge) -> bool:
    begun = charge.started_at
    return charge.ended_at - begun == _BUCKET and begun.minute == begun.second == 0


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


def _remembered(earlier: Iterable[Any], provider: str, account: str, project_id: str) -> dict[str, Mapping[str, str]]:
    """Which machines earlier passes stopped, at which deadline. Receipts come from files: they may hold anything."""
    found: dict[str, Mapping[str, str]] = {}
    for receipt in earlier:
        if not isinstance(receipt, Mapping) or not isinstance(receipt.get("stopped"), Mapping):
            continue
        about = (receipt.get("provider"), receipt.get("account"), receipt.get("project_id"))
        if about != (provider, account, project_id):
            continue
        for instance_id, entry in receipt["stopped"].items():
            if isinstance(entry, Mapping) and all(_is_moment(entry.get(key)) for key in ("at", "deadline_at")):
                found[str(instance_id)] = {key: str(entry[key]) for key in ("at", "deadline_at")}
    return found


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


def _is_moment(value: Any) -> bool:
    try:
        return isinstance(value, str) and parse_timestamp(value) is not None
    except (ValueError, OverflowError):
        return False
