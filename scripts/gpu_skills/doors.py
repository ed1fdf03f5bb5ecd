"""The four doors through which every effect passes, in one place so that tests can count them and die at them.

Functions that are a door carry `@door("name")`. A test installs a watcher that sees each crossing twice, before and
after, and may raise there: what a later run finds on disk and on the machine is then what a crash would have left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

DOORS = ("state.files.commit", "state.journal.append", "send", "remote.execute")

_watcher: Callable[[str, str], None] | None = None


def door(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    assert name in DOORS, name

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def crossing(*args: Any, **kwargs: Any) -> Any:
            if _watcher is None:
                return function(*args, **kwargs)
            _watcher(name, "before")
            result = function(*args, **kwargs)
            if _watcher is not None:
                _watcher(name, "after")
            return result

        crossing.__door__ = name  # type: ignore[attr-defined]
        return crossing

    return wrap


def watch(watcher: Callable[[str, str], None] | None) -> None:
    """Install a watcher for the tests, or take it away with None."""
    global _watcher
    _watcher = watcher
