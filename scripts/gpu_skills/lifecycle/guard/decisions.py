"""What is due for a machine by its deadline, and what proves that the deadline stopped it. Sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.errors import GpuError
from gpu_skills.lifecycle.ending import ownership
from gpu_skills.lifecycle.labels import Label
from gpu_skills.providers.base import Charge, RentedReader
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.units import format_usd

# So long a provider may say that it ends a machine before it is told once more.
ENDING_TAKES = timedelta(minutes=10)
STORAGE_GRACE_S = 24 * 3600.0
# A GPU that was charged until this close to the deadline was stopped by it, not by idleness before.
STOPPED_AT_DEADLINE = timedelta(minutes=2)
_JUST_NOW = timedelta(minutes=10)
_BUCKET = timedelta(hours=1)
Action = Literal["none", "stop", "destroy", "keep"]


@dataclass(frozen=True)
class Decision:
    """alarm: what a person should hear about it."""

    action: Action
    why: str
    alarm: str | None = None


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
        if is_protected or seen.is_locked or now < deadline_at + ENDING_TAKES:
            return Decision("none", "the provider is ending it")
        burn = "an unknown amount" if seen.burn_usd_hr is None else f"{format_usd(seen.burn_usd_hr)}/h"
        return Decision("destroy", "it was told to go", f"told to go, past its deadline, still there, and costs {burn}")
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
    return Proofs(reader, clock, remembered(earlier, reader.name, account, project_id)).holds


@dataclass
class Proofs:
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


def remembered(earlier: Iterable[Any], provider: str, account: str, project_id: str) -> dict[str, Mapping[str, str]]:
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


def _is_moment(value: Any) -> bool:
    try:
        return isinstance(value, str) and parse_timestamp(value) is not None
    except (ValueError, OverflowError):
        return False
