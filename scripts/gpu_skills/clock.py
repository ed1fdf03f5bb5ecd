"""Time behind one small interface, so that tests own it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """Wall time, aware, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as every record writes it: `2026-11-30T18:08:00Z`."""
    utc = moment if moment.tzinfo is UTC else moment.astimezone(UTC)
    return utc.isoformat(timespec="seconds").removesuffix("+00:00") + "Z"


def parse_timestamp(text: str) -> datetime:
    """Read RFC 3339. A time without a zone is a ValueError: it would mean something else on another host."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"time without zone: {text!r}")
    return moment.astimezone(UTC)


def time_of(text: object) -> datetime | None:
    """As `parse_timestamp`; None for what is no time: a record may have been written by hand."""
    try:
        return parse_timestamp(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None
