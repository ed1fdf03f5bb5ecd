"""The vendor's clock: it starts at real now, runs with real time, and can be moved forward.

Only what belongs to the vendor reads it: the meter, stock, the end of an offer, being outbid, delays of booting. Real
processes inside an instance live in real time.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(order=True)
class Timer:
    """One call in the future. `cancel()` is enough to forget it."""

    due: float
    number: int
    action: Callable[[], Any] = field(compare=False)
    is_cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.is_cancelled = True


class VirtualClock:
    """Epoch seconds that nobody can turn back.

    frozen: time stands still but for `advance`, so that a bill can be predicted to the second.
    settle: called after each timer that `advance` ran; the world waits there for the real things (an SSH server that
    starts) which the timer set going, so that they happen at the timer's time and not after the jump.
    """

    def __init__(self, *, start: float | None = None, frozen: bool = False):
        self._frozen = frozen
        self._base = time.time() if start is None else start
        if frozen:
            self._base = float(int(self._base))  # whole, so that so many seconds later is so many seconds on the bill
        self._began = time.monotonic()
        self._timers: list[Timer] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._one_at_a_time = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.settle: Callable[[], Any] = bool
        self.on_failure: Callable[[Exception], Any] = _raise

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def now(self) -> float:
        return self._base if self._frozen else self._base + time.monotonic() - self._began

    def call_at(self, due: float, action: Callable[[], Any]) -> Timer:
        """Run `action` when the clock reaches `due` (at once when it has). It runs on a thread of the clock's."""
        with self._changed:
            timer = Timer(due, next(self._numbers), action)
            heapq.heappush(self._timers, timer)
            self._changed.notify_all()
        return timer

    def call_in(self, delay_s: float, action: Callable[[], Any]) -> Timer:
        return self.call_at(self.now() + delay_s, action)

    def advance(self, seconds: float) -> float:
        """Move forward; what falls due on the way happens in order, each at its own time. Returns the new time."""
        if not 0 <= seconds < 10 * 366 * 86400:
            raise ValueError("the clock moves forward only, and by ten years at most")
        with self._one_at_a_time:
            target = self.now() + seconds
            while (timer := self._next_due(target)) is not None:
                self._jump_to(timer.due)
                self._run(timer)
                self.settle()
            self._jump_to(target)
        return self.now()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="sandbox clock", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and not (self._timers and self._timers[0].due <= self.now()):
                    wait_s = self._timers[0].due - self.now() if self._timers and not self._frozen else 3600.0
                    self._changed.wait(min(max(wait_s, 0.0), 3600.0))
                if self._stopped:
                    return
            with self._one_at_a_time:
                if (timer := self._next_due(self.now())) is not None:
                    self._run(timer)

    def _next_due(self, until: float) -> Timer | None:
        with self._changed:
            while self._timers and self._timers[0].is_cancelled:
                heapq.heappop(self._timers)
            if self._timers and self._timers[0].due <= until and not self._stopped:
                return heapq.heappop(self._timers)
        return None

    def _run(self, timer: Timer) -> None:
        if timer.is_cancelled:
            return
        try:
            timer.action()
        except Exception as exc:
            self.on_failure(exc)

    def _jump_to(self, moment: float) -> None:
        with self._changed:
            if moment > (now := self.now()):
                self._base += moment - now
            self._changed.notify_all()


def _raise(exc: Exception) -> None:
    raise exc
