"""The hash chain over an append-only file: evidence that tells a rewritten line from an appended one.

Beside `jobs.jsonl` lies `jobs.head.jsonl`. Each of its lines seals the file up to an offset:
`chain` after n lines is SHA-256(chain after n-1 lines ‖ the line's bytes with its newline), before the first line 64
zeros. It is written after the ledger, at the latest when the process ends, and is not synced: after a crash it may
lag, and the next append seals what is there. It can never lead. It guards against accidents: whoever can write the
ledger can write the chain.

The newest lines of the head lie close together; older ones are thinned to one per 1,000 ledger lines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from gpu_skills.errors import GpuError
from gpu_skills.state import files, journal

CHECKPOINT_LINES = 1000
ZERO = "0" * 64
SEAL_AFTER_BYTES = 32 * 1024
_ENTRY_BYTES = 260  # more than an entry needs
_SLACK_BYTES = 256 * 1024
_KEPT = 100
_STAYS = re.compile(rb'"lines":(\d*000|0),|"reason":')


class Stamp(NamedTuple):
    """How the file system describes a state of the file."""

    size: int
    mtime_ns: int
    inode: int


class Seal(NamedTuple):
    """The file up to `offset` (its first `lines` lines) hashed to `chain`.

    custody counts how often someone else than us has changed the file: while it and the stamp stay, what was computed
    from an older state of the file is still true of its beginning.
    """

    offset: int = 0
    lines: int = 0
    chain: str = ZERO
    stamp: Stamp | None = None
    custody: int = 0
    reason: str | None = None  # given when someone accepted a changed file
    ts: str | None = None

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"offset": self.offset, "lines": self.lines, "chain": self.chain}
        if self.stamp is not None:
            record |= {"mtime_ns": self.stamp.mtime_ns, "inode": self.stamp.inode, "size": self.stamp.size}
        record["custody"] = self.custody
        if self.reason is not None:
            record |= {"reason": self.reason, "ts": self.ts}
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Seal:
        """ValueError or KeyError for what is not a seal."""
        numbers = [record[key] for key in ("offset", "lines", "custody")]
        chain = record["chain"]
        if any(type(n) is not int or n < 0 for n in numbers) or type(chain) is not str or len(chain) != 64:
            raise ValueError("not a seal")
        bytes.fromhex(chain)
        stamp = None
        if "inode" in record:
            stamp = Stamp(int(record["size"]), int(record["mtime_ns"]), int(record["inode"]))
        return cls(numbers[0], numbers[1], chain, stamp, numbers[2], record.get("reason"), record.get("ts"))


def stamp_of(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino)


def last_seal(head: Path) -> Seal | None:
    """The newest readable line of the head file. A torn one is what a crash left: the one before it counts."""
    try:
        descriptor = os.open(head, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        end = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, 8 * _ENTRY_BYTES, max(0, end - 8 * _ENTRY_BYTES))
    finally:
        os.close(descriptor)
    for line in reversed(tail.split(b"\n")):
        if line and (seal := _parse(line)) is not None:
            return seal
    return max(seals(head), key=lambda s: s.lines, default=None)


def seals(head: Path) -> list[Seal]:
    """All readable lines of the head file, in their order."""
    raw = files.read_bytes(head)
    return [seal for line in (raw or b"").splitlines() if (seal := _parse(line)) is not None]


def extend(chain: bytes, line: bytes) -> bytes:
    return sha256(chain + line).digest()


def checkpoints_and_last(pieces: Iterable[tuple[int, bytes]], start: Seal) -> Iterator[Seal]:
    """Seals of every CHECKPOINT_LINES lines and of the last whole line.

    pieces: (offset, bytes) from the seal's offset on, lines or parts of very long ones.
    """
    chain, count, end = bytes.fromhex(start.chain), start.lines, start.offset
    last = chain
    for offset, piece in pieces:
        chain = sha256(chain + piece).digest()  # `extend`, whose call would cost a third of it
        if piece.endswith(b"\n"):
            count, end, last = count + 1, offset + len(piece), chain
            if count % CHECKPOINT_LINES == 0:
                yield Seal(end, count, chain.hex(), None, start.custody)
    if count > start.lines and count % CHECKPOINT_LINES:
        yield Seal(end, count, last.hex(), None, start.custody)


def pieces(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Lines with their newline; one over journal.MAX_LINE_BYTES comes in parts."""
    descriptor = files.open_regular(path)
    if descriptor is None:
        return
    with open(descriptor, "rb", buffering=1 << 20) as stream:
        stream.seek(start)
        while piece := stream.readline(journal.MAX_LINE_BYTES):
            yield start, piece
            start += len(piece)


class Sealer:
    """Seals what one process appends: together, when enough has come together or when it is closed.

    A seal for each line would cost as much as the line. A process that is killed before it closes leaves a head that
    lags.
    """

    def __init__(self, path: Path, head: Path):
        self.path, self.head = path, head
        # The seal that was current before our first append and the file after our last one; None for the first when
        # somebody else has written in between.
        self._pending: tuple[Seal | None, Stamp] | None = None
        self._sealed_bytes = 0

    def appended(self, before: Stamp | None) -> Stamp:
        """Note an append of ours; the lock is held. before: the stamp it found. Returns the stamp it left."""
        after = stamp_of(self.path)
        assert after is not None
        if self._pending is None:
            last = last_seal(self.head) or Seal()
            self._sealed_bytes = last.offset
            self._pending = (last if last.stamp == before else None, after)
        else:
            base, previous = self._pending
            self._pending = (base if previous == before else None, after)
        if after.size - self._sealed_bytes >= SEAL_AFTER_BYTES:
            self._sealed_bytes = (last_seal(self.head) or Seal()).offset  # another process may have done it
            if after.size - self._sealed_bytes >= SEAL_AFTER_BYTES:
                self.seal_locked()
        return after

    def seal_locked(self) -> None:
        """Seal everything behind the last seal; the lock is held.

        Nothing is written when the file is shorter than what is sealed or was cut inside a line: the evidence stays for
        `verify`, until someone accepts it with a reason.
        """
        if self._pending is None:
            return
        (base, after), self._pending = self._pending, None
        last, stamp = last_seal(self.head) or Seal(), stamp_of(self.path)
        if stamp is None or last.offset > stamp.size or not _ends_a_line(self.path, last.offset):
            return
        untouched = base == last and after == stamp
        start = Seal(last.offset, last.lines, last.chain, None, last.custody if untouched else last.custody + 1)
        fresh = list(checkpoints_and_last(pieces(self.path, start.offset), start))
        if fresh:
            fresh[-1] = fresh[-1]._replace(stamp=stamp)
            _write(self.head, fresh)

    def close(self) -> None:
        """Seal what is pending, if that is possible without waiting long; never raises."""
        if self._pending is not None:
            try:
                with files.lock(self.path, timeout_s=1):
                    self.seal_locked()
            except GpuError:
                pass  # the head lags; the next append seals


def reseal(path: Path, head: Path, *, reason: str, ts: str) -> Seal:
    """Accept the file as it is: a new head, with the reason, in place of the old one. The caller holds the lock."""
    old = last_seal(head) or Seal()
    start = Seal(custody=old.custody + 1, reason=reason, ts=ts)
    kept = [s for s in seals(head) if s.reason is not None]
    fresh = list(checkpoints_and_last(pieces(path), start))
    stamp = stamp_of(path)
    last = fresh.pop() if fresh else start
    # Earlier reasons stay readable: they seal nothing any more (zero lines) but say what was accepted.
    history = [Seal(custody=s.custody, reason=s.reason, ts=s.ts) for s in kept]
    final = Seal(last.offset, last.lines, last.chain, stamp, start.custody)
    _commit(head, [*history, start, *fresh, final])
    return final


def still_true(seal: Seal | None, stamp: Stamp, custody: int | None) -> bool:
    """Whether something computed under `custody` holds for the beginning of a file that now has `stamp`."""
    return seal is not None and custody is not None and seal.stamp == stamp and seal.custody == custody


def _write(head: Path, fresh: list[Seal]) -> None:
    wanted_bytes = fresh[-1].lines // CHECKPOINT_LINES * _ENTRY_BYTES + _SLACK_BYTES
    data = b"".join(files.dumps_line(seal.to_record()) for seal in fresh)
    found = stamp_of(head)
    if found is not None and found.size > wanted_bytes:
        files.commit(head, _thinned(files.read_bytes(head) or b"") + data)
    else:
        journal.append_locked(head, data, durable=False)


def _thinned(head: bytes) -> bytes:
    """Lines at checkpoints or with a reason, and the newest ones. As bytes: this happens on the way of an append."""
    lines = head.splitlines(keepends=True)
    return b"".join([line for line in lines[:-_KEPT] if _STAYS.search(line)] + lines[-_KEPT:])


def _commit(head: Path, found: list[Seal]) -> None:
    files.commit(head, b"".join(files.dumps_line(seal.to_record()) for seal in found))


def _ends_a_line(path: Path, offset: int) -> bool:
    if offset == 0:
        return True
    with open(path, "rb") as stream:
        stream.seek(offset - 1)
        return stream.read(1) == b"\n"


def _parse(line: bytes) -> Seal | None:
    try:
        return Seal.from_record(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
