"""The life of a rented machine as stretches that bill at one rate: what the journal and the record say, folded. Pure.

A life begins when its create was asked for and ends when it was first seen absent, or was last seen at all. Between
these it runs or stands still. Where two readings are possible the dearer one holds: what was billed too much at first
is corrected when the provider has told its own sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal

from gpu_skills.clock import time_of
from gpu_skills.lifecycle import states
from gpu_skills.lifecycle.intents import Intent
from gpu_skills.lifecycle.machines import Machine

# Observations that say since when it runs or stands still: `details.at`, else the time of the line.
STOPPED, RUNNING, READY = "machine_stopped", "machine_running", "machine_ready"
PRESENT, ABSENT = "present", "absent"  # as `release` writes them
SEEN = (STOPPED, RUNNING, READY, PRESENT, ABSENT)

Kind = Literal["running", "stopped"]


@dataclass(frozen=True)
class Stretch:
    """number: its place in the life. ready_at: of a running one, when its set-up was over; None: it never was.

    ended_at None: it goes on.
    """

    number: int
    kind: Kind
    started_at: datetime
    ended_at: datetime | None
    ready_at: datetime | None = None


def life(
    machine: Machine, intents: Mapping[str, Intent], observations: Iterable[dict[str, Any]], *, now: datetime
) -> tuple[Stretch, ...]:
    """Oldest first; nothing for a create of which nothing came. observations: of this machine, oldest first."""
    seen = list(observations)
    begun = _begun_at(machine, intents)
    if begun is None:
        return ()
    ended = ended_at(machine, intents, seen, now=now)
    marks = told(machine, intents, seen)
    marks += untold(machine, marks, now)
    turns: list[tuple[datetime, Kind]] = [(begun, "running")]
    for at, kind in sorted(marks, key=lambda mark: mark[0]):
        at = max(at, begun)
        if kind != turns[-1][1] and at >= turns[-1][0] and (ended is None or at < ended):
            turns.append((at, kind))
    bounds: list[datetime | None] = [at for at, _ in turns[1:]]
    ready = _ready_moments(machine, seen)
    return tuple(
        Stretch(number, kind, start, end, _first_within(ready, start, end) if kind == "running" else None)
        for number, ((start, kind), end) in enumerate(zip(turns, [*bounds, ended], strict=True))
    )


def ended_at(
    machine: Machine, intents: Mapping[str, Intent], observations: Iterable[dict[str, Any]], *, now: datetime
) -> datetime | None:
    """None: it is not over. Of a lost one: when it was last seen."""
    if machine.status not in states.FINAL:
        return None
    seen = list(observations)
    if machine.status == "lost":
        accepted = [time_of(i.closed_at) for i in intents.values() if _is_create_of(machine, i) and i.result == "done"]
        sights = [time_of(machine.last_seen_at), time_of(machine.ready_at), *accepted, *_ready_moments(machine, seen)]
        last = max((at for at in sights if at is not None), default=None)
        return last or time_of(machine.created_at) or now
    absences: list[datetime] = []
    for event in seen:
        at = _moment(event)
        if event.get("what") == ABSENT and at is not None:
            absences.append(at)
        elif event.get("what") in (PRESENT, RUNNING, STOPPED):
            absences.clear()
    destroyed = time_of(machine.destroyed_at)
    return min((at for at in [*absences[:1], destroyed] if at is not None), default=now)


def _begun_at(machine: Machine, intents: Mapping[str, Intent]) -> datetime | None:
    create = next((i for i in intents.values() if _is_create_of(machine, i)), None)
    if machine.instance_id is None and (create is None or create.result != "done"):
        return None
    asked = [time_of(create.ts if create is not None else None), time_of(machine.created_at)]
    first = min((at for at in asked if at is not None), default=None)
    return first or time_of(machine.ready_at) or time_of(machine.last_seen_at)


def _is_create_of(machine: Machine, intent: Intent) -> bool:
    if intent.action != "create":
        return False
    return intent.machine_id == machine.id or (intent.machine_id is None and intent.id == machine.intent)


Mark = tuple[datetime, Kind]


def told(machine: Machine, intents: Mapping[str, Intent], seen: Iterable[dict[str, Any]]) -> list[Mark]:
    """Since when it ran or stood still, as the journal has it."""
    found: list[tuple[datetime | None, Kind]] = []
    for intent in intents.values():
        if intent.machine_id != machine.id:
            continue
        if intent.action == "start" and intent.result == "done":
            found.append((time_of(intent.ts), "running"))
        elif intent.action == "stop" and intent.result == "done":
            found.append((time_of(intent.closed_at), "stopped"))
    for event in seen:
        if event.get("what") == RUNNING:
            found.append((_moment(event), "running"))
        elif event.get("what") == STOPPED:
            found.append((_moment(event), "stopped"))
    return sorted((mark for mark in found if mark[0] is not None), key=lambda mark: mark[0])  # type: ignore[misc]


def untold(machine: Machine, marks: list[Mark], now: datetime) -> list[Mark]:
    """A step that the record has taken and the journal does not tell: it counts from now where nothing says more."""
    last = marks[-1] if marks else (None, "running")
    if machine.status == "stopped" and last[1] == "running":
        since = time_of(machine.extra.get("stopped_at"))
        is_of_this_stop = since is not None and (last[0] is None or since >= last[0])
        return [(since if is_of_this_stop and since is not None else now, "stopped")]
    if machine.status in ("booting", "ready", "busy", "stopping") and last[1] == "stopped":
        return [(now, "running")]
    return []


def _ready_moments(machine: Machine, seen: list[dict[str, Any]]) -> list[datetime]:
    told = [_moment(event) for event in seen if event.get("what") == READY]
    return sorted({at for at in [*told, time_of(machine.ready_at)] if at is not None})


def _first_within(moments: list[datetime], start: datetime, end: datetime | None) -> datetime | None:
    return next((at for at in moments if start <= at and (end is None or at <= end)), None)


def _moment(event: Mapping[str, Any]) -> datetime | None:
    details = event.get("details")
    return time_of(details.get("at") if isinstance(details, dict) else None) or time_of(event.get("ts"))


def seconds(start: datetime, end: datetime) -> float:
    return max(0.0, (end - start).total_seconds())


def covered_s(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """How much of [start, end] these cover together."""
    edges = sorted({start, end, *(min(max(edge, start), end) for interval in intervals for edge in interval)})
    spans = list(intervals)
    return sum(right - left for left, right in pairwise(edges) if any(s <= left and right <= e for s, e in spans))
