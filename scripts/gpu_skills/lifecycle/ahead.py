"""A connection that is opened while something else is prepared: half of it is waiting for the other side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class _Closes(Protocol):
    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=_Closes)


class Ahead(Generic[Opened]):
    """Calls `open` on a thread at once. Either `take` or `drop` it.

    A daemon thread: a command that has failed for another reason does not wait for a host that is silent.
    """

    def __init__(self, open: Callable[[], Opened]):
        self._open = open
        self._opened: Opened | None = None
        self._failure: BaseException | None = None
        self._dropped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="connect ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            opened = self._open()
        except BaseException as exc:  # whatever it is, it belongs to who takes it
            self._failure = exc
            return
        with self._lock:
            if not self._dropped:
                self._opened = opened
                return
        opened.close()

    def take(self) -> Opened:
        """What was opened, or the error that opening it raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._opened is not None
        return self._opened

    def drop(self) -> None:
        """Nobody wants it any more: close it now, or when it is there."""
        with self._lock:
            self._dropped = True
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
