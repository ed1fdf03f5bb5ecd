"""What a machine costs while it runs, sleeps and starts: the few numbers that every rule here compares.

The rules compare in *full-rate seconds*: one second of a running machine is 1, one second of a stopped one is storage
rate ÷ running rate. Money is that times the rate. So a rule that only keeps or destroys cannot depend on the price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from statistics import median
from typing import Literal

from gpu_skills.errors import UsageError
from gpu_skills.units import MAX_DURATION_S

Action = Literal["keep", "stop", "destroy"]
Number = Decimal | int | float | str

MAX_RATE_USD_HR = 100_000
MAX_JOBS = 1_000_000
HOUR_S = Decimal(3600)


@dataclass(frozen=True)
class MachineCost:
    """startup_s: from nothing to ready, billed at the full rate. rate_usd_hr: all-in.

    storage_usd_hr and resume_s go together: the bill of a stopped machine, and the time from there to ready. Without
    them stopping is no choice. gone_probability: how often the GPU of a stopped machine has been given to someone else
    by the time it is wanted, so that a start-up from nothing follows after all.
    """

    rate_usd_hr: Decimal
    startup_s: Decimal
    storage_usd_hr: Decimal | None = None
    resume_s: Decimal | None = None
    gone_probability: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        self._set("rate_usd_hr", at_most=MAX_RATE_USD_HR)
        self._set("startup_s", at_most=MAX_DURATION_S)
        self._set("gone_probability", at_most=1)
        if (self.storage_usd_hr is None) != (self.resume_s is None):
            raise UsageError(
                "storage_usd_hr and resume_s belong together: what a stopped machine costs, and how long it wakes",
                next_step="give both, or neither",
            )
        if self.storage_usd_hr is not None:
            self._set("storage_usd_hr", at_most=MAX_RATE_USD_HR)
            self._set("resume_s", at_most=MAX_DURATION_S)

    @classmethod
    def of(
        cls,
        rate_usd_hr: Number,
        startup_s: Number,
        *,
        storage_usd_hr: Number | None = None,
        resume_s: Number | None = None,
        gone_probability: Number = 0,
    ) -> MachineCost:
        """From whatever a flag or a file holds. UsageError names the value that is no number or out of range."""
        return cls(rate_usd_hr, startup_s, storage_usd_hr, resume_s, gone_probability)  # type: ignore[arg-type]

    @property
    def is_free(self) -> bool:
        return self.rate_usd_hr == 0

    @property
    def can_stop(self) -> bool:
        return self.storage_usd_hr is not None

    def idle_rate(self, action: Action) -> Decimal:
        """Full-rate seconds per second of a gap spent in this state. Not for a free machine: it has no full rate."""
        if action == "stop":
            assert self.storage_usd_hr is not None
            return self.storage_usd_hr / self.rate_usd_hr
        return Decimal(1 if action == "keep" else 0)

    def idle_usd_hr(self, action: Action) -> Decimal:
        if action == "stop":
            assert self.storage_usd_hr is not None
            return self.storage_usd_hr
        return self.rate_usd_hr if action == "keep" else Decimal(0)

    def restart_s(self, action: Action) -> Decimal:
        """From this state to ready, billed at the full rate; for a stopped machine what is to be expected."""
        if action == "stop":
            assert self.resume_s is not None
            return (1 - self.gone_probability) * self.resume_s + self.gone_probability * self.startup_s
        return self.startup_s if action == "destroy" else Decimal(0)

    def usd(self, full_rate_s: Decimal) -> Decimal:
        return full_rate_s * self.rate_usd_hr / HOUR_S

    def actions(self) -> tuple[Action, ...]:
        """The choices there are. Where two cost the same the earlier one is preferred: less is left to forget."""
        return ("destroy", "stop", "keep") if self.can_stop else ("destroy", "keep")

    def _set(self, name: str, *, at_most: int) -> None:
        object.__setattr__(self, name, number(name, getattr(self, name), at_most=at_most))


def number(name: str, value: Number, *, at_most: int, above_zero: bool = False) -> Decimal:
    """A finite Decimal from 0 to at_most, or UsageError."""
    try:
        if isinstance(value, bool):
            raise ValueError
        found = Decimal(str(value))
        in_range = found.is_finite() and 0 <= found <= at_most and not (above_zero and found == 0)
    except (InvalidOperation, ValueError):
        in_range = False
    if not in_range:
        least = "above 0" if above_zero else "0"
        raise UsageError(
            f"{name} is {value}; it must be a number from {least} to {at_most}", next_step="gpu economics --help"
        )
    return found


def count(name: str, value: int, *, at_most: int = MAX_JOBS) -> int:
    """A whole number from 1 to at_most, or UsageError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
        raise UsageError(
            f"{name} is {value}; it must be a whole number from 1 to {at_most}", next_step="gpu economics --help"
        )
    return value


def typical_startup_s(startups_s: Sequence[Number]) -> Decimal | None:
    """The start-up to reckon with, from past ones; None without history.

    The middle one: a single host that pulled its image for an hour says little about the next.
    """
    known = [number("startup_s", startup, at_most=MAX_DURATION_S) for startup in startups_s]
    return median(known) if known else None
