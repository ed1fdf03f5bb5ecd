"""Where the real work on containers is done: off the world's lock, for each instance in order, else side by side."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class MachineRoom:
    """A queue per instance. `settle` waits until nothing is queued or under way."""

    def __init__(self, *, on_failure: Callable[[Exception], Any], workers: int = 8):
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="sandbox room")
        self._on_failure = on_failure
        self._queues: dict[Hashable, deque[Callable[[], Any]]] = {}
        self._idle = threading.Condition()
        self._is_closed = False

    def submit(self, instance: Hashable, work: Callable[[], Any]) -> None:
        """Do it later, after what this instance already waits for. After `close` nothing is done any more."""
        with self._idle:
            if self._is_closed:
                return
            if instance in self._queues:
                self._queues[instance].append(work)
                return
            self._queues[instance] = deque([work])
        self._workers.submit(self._serve, instance)

    def settle(self, within_s: float = 30.0) -> bool:
        deadline = time.monotonic() + within_s
        with self._idle:
            while self._queues:
                if not self._idle.wait(max(deadline - time.monotonic(), 0)) and time.monotonic() > deadline:
                    return False
        return True

    def close(self) -> None:
        self.settle()
        with self._idle:
            self._is_closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _serve(self, instance: Hashable) -> None:
        while True:
            with self._idle:
                queue = self._queues[instance]
                if not queue:
                    del self._queues[instance]
                    self._idle.notify_all()
                    return
                work = queue.popleft()
            try:
                work()
            except Exception as exc:
                self._on_failure(exc)
