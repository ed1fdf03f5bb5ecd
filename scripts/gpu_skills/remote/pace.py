"""What uploads and downloads share: which way bytes go, how often a broken way is tried again, how progress is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_skills.errors import GpuError, HashMismatch, TransferIncomplete, Unreachable
from gpu_skills.remote.answers import MachineBusy
from gpu_skills.remote.bulk import RSYNC_BROKEN, Bulk

# Up to here the open control connection is faster than a new OpenSSH one, which costs about 0.2 s.
CONTROL_BYTES = 64 << 20
# From here a file is worth a place in rsync's list; smaller ones go in one stream.
LARGE_FILE_BYTES = 8 << 20
FRUITLESS_ROUNDS = 2
BUSY_ROUNDS = 20
BUSY_PAUSE_S = 0.5
PROGRESS_STEP_BYTES = 512 << 10

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Ways:
    """The files of one round by the way they go."""

    control: list[int]
    stream: list[int]
    rsync: list[int]


def ways_for(sizes: Sequence[int], bulk: Bulk | None, *, rsync_unfit: bool) -> Ways:
    """sizes: what each file still misses. Positions of the files are returned."""
    everything = list(range(len(sizes)))
    if bulk is None or sum(sizes) <= CONTROL_BYTES or not bulk.has_ssh:
        return Ways(everything, [], [])
    if rsync_unfit or not bulk.has_rsync:
        return Ways([], everything, [])
    large = [at for at in everything if sizes[at] >= LARGE_FILE_BYTES]
    small = [at for at in everything if sizes[at] < LARGE_FILE_BYTES]
    few = sum(sizes[at] for at in small) <= CONTROL_BYTES
    return Ways(small if few else [], [] if few else small, large)


class Attempts:
    """Goes on after a broken connection as long as it moves something; two rounds in vain are enough."""

    def __init__(self, host: str, *, sleep: Callable[[float], None] = time.sleep):
        self._host = host
        self._sleep = sleep
        self._busy = 0
        self._left_before: int | None = None
        self._fruitless = 0

    def begin(self, left_bytes: int) -> None:
        """Call with what is missing at the start of each round."""
        if self._left_before is not None and left_bytes >= self._left_before:
            self._fruitless += 1
        else:
            self._fruitless = 0
        self._left_before = left_bytes

    def failed(self, exc: GpuError) -> None:
        """Return when another round makes sense, else raise what the caller should see."""
        if isinstance(exc, MachineBusy) and self._busy < BUSY_ROUNDS:
            # The runner of a connection that broke may still be writing down what it had received.
            self._busy += 1
            self._left_before = None
            self._sleep(BUSY_PAUSE_S)
            return
        if not may_pass(exc):
            raise exc
        if self._fruitless + 1 >= FRUITLESS_ROUNDS:
            if isinstance(exc, Unreachable):
                raise TransferIncomplete(reason=exc.message, host=self._host) from exc
            raise exc


def may_pass(exc: GpuError) -> bool:
    """Whether the same transfer may succeed over a new connection."""
    if isinstance(exc, TransferIncomplete):
        return exc.details.get("rsync_code", 255) in RSYNC_BROKEN
    return isinstance(exc, Unreachable | HashMismatch)


class Meter:
    """Adds up bytes and tells `progress` now and then; also at the very end."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress = progress
        self.total = total
        self.done = 0
        self._told = -1

    def add(self, count: int) -> None:
        self.set(self.done + count)

    def set(self, done: int) -> None:
        self.done = done
        if self._progress is not None and (done - self._told >= PROGRESS_STEP_BYTES or done < self._told):
            self._tell()

    def finish(self) -> None:
        self.done = self.total
        if self._progress is not None and self._told != self.total:
            self._tell()

    def _tell(self) -> None:
        self._told = self.done
        self._progress(min(self.done, self.total), self.total)
