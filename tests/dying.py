"""Death at a door, in process: what a later run finds on disk is what a crash would have left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gpu_skills import doors

SIDES = ("before", "after")


class Died(BaseException):
    """What a crash is to the code under test: no `except Exception` catches it."""


def dies(action: Callable[[], Any], *, crossing: int, side: str) -> bool:
    """Run `action`, dying before or after the given crossing (from 1) of any door; False when it ended before that.

    The dead stay dead: whatever would still go out of a door while the stack unwinds is not let through.
    """
    seen, is_dead, here = 0, False, threading.get_ident()

    def watcher(name: str, now: str) -> None:
        nonlocal seen, is_dead
        if threading.get_ident() != here:
            return
        if not is_dead and now == side:
            seen += 1
            is_dead = seen == crossing
        if is_dead:
            raise Died(f"{side} crossing {crossing}: {name}")

    doors.watch(watcher)
    try:
        action()
    except Died:
        return True
    finally:
        doors.watch(None)
    assert not is_dead, "something caught a death and went on"
    return False
