"""Death at a door, in process: what a later run finds on disk is what a crash would have left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_skills import doors


class Died(BaseException):
    """What a crash is to the code under test: no `except Exception` catches it."""


def dies(action: Callable[[], Any], *, crossing: int, side: str) -> bool:
    """Run `action`, dying before or after the given crossing (from 1) of any door; False when it ended before that."""
    seen = 0

    def watcher(name: str, now: str) -> None:
        nonlocal seen
        if now != side:
            return
        seen += 1
        if seen == crossing:
            doors.watch(None)  # what runs while the stack unwinds would not run after a crash either way
            raise Died(f"{side} crossing {crossing}: {name}")

    doors.watch(watcher)
    try:
        action()
    except Died:
        return True
    finally:
        doors.watch(None)
    return False
