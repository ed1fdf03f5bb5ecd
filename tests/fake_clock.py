"""Time that tests own: it stands still until someone sleeps or advances it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta


class FakeClock:
    """A `clock.Clock`. `sleep` returns at once and moves time; what was planned with `at` happens on the way."""

    def __init__(self, start: datetime = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)):
        self._start = start
        self._elapsed_s = 0.0
        self._planned: list[tuple[float, Callable[[], None]]] = []
        self.slept: list[float] = []

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._elapsed_s)

    def monotonic(self) -> float:
        return 1000.0 + self._elapsed_s

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        end = self._elapsed_s + seconds
        while self._planned and self._planned[0][0] <= end:
            self._elapsed_s, happen = self._planned.pop(0)
            happen()
        self._elapsed_s = end

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        """Call `happen` when time reaches `seconds` after the start: what a rival or a vendor does meanwhile."""
        self._planned.append((max(seconds, self._elapsed_s), happen))
        self._planned.sort(key=lambda plan: plan[0])

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as NTP or a person does; the monotonic clock does not notice."""
        self._start += timedelta(seconds=seconds)
