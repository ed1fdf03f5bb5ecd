"""Keep a job's machine for a while after its end, so that somebody can look at it; then it is let go.

An interrupted hold ends the machine: Ctrl-C, a closed terminal and a polite kill all mean "I have seen enough". What no
program notices (kill -9, no power) the machine notices itself: its session ends with the hold.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Literal

from gpu_skills.clock import Clock

LOOK_S = 5.0  # how soon it is seen that somebody else ended the machine
TOLD_S = 300.0

Ending = Literal["over", "interrupted", "ended"]


def review(
    clock: Clock,
    until: Callable[[], datetime],
    *,
    tell: Callable[[float], None],
    is_ended: Callable[[], bool] = lambda: False,
) -> Ending:
    """Wait until then. `over`: the time is up; `interrupted`: somebody here ended it; `ended`: somebody elsewhere did.

    until: asked again and again, since somebody may hold it for longer. tell: called with the seconds that are left, at
    once, every few minutes and in the last one. is_ended: whether there is nothing to hold any more.
    """
    told_at: float | None = None
    try:
        with interruptible():
            while True:
                left_s = (until() - clock.now()).total_seconds()
                if left_s <= 0:
                    return "over"
                if is_ended():
                    return "ended"
                if told_at is None or told_at - left_s >= TOLD_S or (left_s <= 60 < told_at):
                    tell(left_s)
                    told_at = left_s
                clock.sleep(min(left_s, LOOK_S))
    except KeyboardInterrupt:
        return "interrupted"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Here a polite end of the process (SIGTERM, SIGHUP) is a KeyboardInterrupt, so that what follows still happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """The first Ctrl-C here changes nothing: what is under way is the end that was asked for. The second one does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
