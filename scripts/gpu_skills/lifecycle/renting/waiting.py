"""How long a machine that boots is waited for: as long as something moves, and never longer than the cap. Pure.

A slow host that pulls an image for half an hour is fine, one on which nothing moves for minutes is not; no fixed time
tells them apart. So every look at a machine is compared with the one before: its state, the provider's words, the
bytes of the pull, the lines of its log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpu_skills.providers.base import Machine
from gpu_skills.units import format_duration

# Nothing seen to move: also a pull of whose bytes nobody tells looks like this.
QUIET_S = 600.0
# A pull whose bytes are told and do not grow.
FLAT_S = 180.0
# A host that has to free the GPUs of a stopped machine first, or never does.
START_S = 300.0

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# `6f28985ad184: Downloading [===>   ]  12.3MB/45.6MB`: what stands before the numbers names the layer.
_PULLED = re.compile(r"(?i)(\d{1,12}(?:\.\d{1,6})?)\s?([kmgt]?)i?b\s?/\s?\d{1,12}(?:\.\d{1,6})?\s?[kmgt]?i?b")


@dataclass(frozen=True)
class Seen:
    """One look. status None: the list did not show it. log: the newest lines, None when nobody asked for them."""

    at_s: float
    status: str | None
    said: str = ""
    dead_end: str | None = None
    may_recover: bool = False
    log: tuple[str, ...] | None = None

    @property
    def pulled_bytes(self) -> int | None:
        """Of the image, by the provider's words and the log; None where no such number stands."""
        return pulled_bytes([self.said, *(self.log or ())])


@dataclass(frozen=True)
class Watch:
    """What was seen so far. is_start: a stopped machine was told to start, so `stopped` is where it comes from."""

    began_s: float
    cap_s: float
    is_start: bool = False
    moved_s: float | None = None
    status: str | None = None
    said: str = ""
    pulled_bytes: int | None = None
    log: tuple[str, ...] = ()

    @property
    def since_s(self) -> float:
        """When something moved last."""
        return self.began_s if self.moved_s is None else self.moved_s


@dataclass(frozen=True)
class GaveUp:
    """code: dead_end, no_progress, setup_cap or host_full."""

    code: str
    reason: str


def look(watch: Watch, seen: Seen) -> tuple[Watch, GaveUp | None]:
    """Take one look into account: the new watch, and why it is no use to wait any longer, if it is none."""
    after = _after(watch, seen)
    return after, _verdict(watch, after, seen)


def seen_now(machine: Machine | None, at_s: float, log: Iterable[str] | None = None) -> Seen:
    lines = None if log is None else tuple(log)
    if machine is None:
        return Seen(at_s, None, log=lines)
    return Seen(at_s, machine.status, machine.said, machine.dead_end, machine.may_recover, lines)


def pulled_bytes(lines: Iterable[str]) -> int | None:
    """The sum over layers of what was last told of each; None when nothing is told."""
    layers: dict[str, float] = {}
    for line in lines:
        for number, found in enumerate(_PULLED.finditer(line)):
            layer = line.split(":", 1)[0].strip() if ":" in line[: found.start()] else ""
            layers[f"{layer}#{number}"] = float(found[1]) * _UNITS[found[2].lower()]
    return round(sum(layers.values())) if layers else None


def _after(watch: Watch, seen: Seen) -> Watch:
    pulled = seen.pulled_bytes
    moved = seen.status != watch.status and seen.status is not None
    if pulled is not None:
        # Words that come again and again with the same number are no progress.
        moved = moved or pulled > (watch.pulled_bytes or 0)
    else:
        moved = moved or (bool(seen.said) and seen.said != watch.said)
        moved = moved or (bool(seen.log) and seen.log != watch.log and not watch.pulled_bytes)
    return replace(
        watch,
        moved_s=seen.at_s if moved else watch.moved_s,
        status=seen.status or watch.status,
        said=seen.said or watch.said,
        pulled_bytes=pulled if pulled is not None else watch.pulled_bytes,
        log=seen.log if seen.log is not None else watch.log,
    )


def _verdict(before: Watch, watch: Watch, seen: Seen) -> GaveUp | None:
    waited_s, quiet_s = seen.at_s - watch.began_s, seen.at_s - watch.since_s
    if _has_not_begun(before, seen):
        if waited_s >= START_S:
            return GaveUp("host_full", f"it did not start within {format_duration(waited_s)}: {seen.said}")
        return None
    if seen.status == "terminating":
        return GaveUp("dead_end", f"the provider is taking it away: {seen.said}")
    if seen.dead_end is not None and not seen.may_recover:
        return GaveUp("dead_end", seen.dead_end)
    if waited_s >= watch.cap_s:
        return GaveUp("setup_cap", f"it is not ready after {format_duration(waited_s)}, the limit of the plan")
    limit_s = FLAT_S if watch.pulled_bytes is not None and seen.status == "booting" else QUIET_S
    if quiet_s >= limit_s:
        state = seen.status or "not shown by the provider"
        why = seen.dead_end or watch.said or "the provider says nothing"
        return GaveUp("no_progress", f"nothing moved for {format_duration(quiet_s)}: {state}, {why}")
    return None


def _has_not_begun(before: Watch, seen: Seen) -> bool:
    """A start that is still waiting for its GPUs: stopped all the time."""
    return before.is_start and before.status in (None, "stopped") and seen.status in ("stopped", "stopping")
