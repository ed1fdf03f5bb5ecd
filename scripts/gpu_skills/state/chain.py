"""The hash chain over an append-only file: evidence that tells a rewritten line from an appended one.

Beside `jobs.jsonl` lies `jobs.head.jsonl`. Each of its lines seals the file up to an offset:
`chain` after n lines is SHA-256(chain after n-1 lines ‖ the line's bytes with its newline), before the first line 64
zeros. It is written after the ledger and is not synced: after a crash it may lag, and the next append seals what is
there. It can never lead. It guards against accidents: whoever can write the ledger can write the chain.

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

from gpu_skills.state import files, journal

CHECKPOINT_LINES = 1000
ZERO = "0" * 64
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


def chained(pieces: Iterable[tuple[int, bytes]], start: Seal) -> Iterator[Seal]:
    """A seal after each line. pieces: (offset, bytes) from the seal's offset on, lines or parts of very long ones."""
    chain, count = bytes.fromhex(start.chain), start.lines
    for offset, piece in pieces:
        chain = extend(chain, piece)
        if piece.endswith(b"\n"):
            count += 1
            yield Seal(offset + len(piece), count, chain.hex(), None, start.custody)


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


def seal_appended(
    path: Path, head: Path, last: Seal | None, *, before: Stamp | None, data: bytes, offset: int
) -> Seal | None:
    """Seal everything behind the last seal, after `data` was appended at `offset`. The caller holds the ledger's lock.

    last: the newest seal. before: the stamp the file had before this append. Returns None, and writes nothing, when
    the file is shorter than what is sealed or was cut inside a line: the evidence stays for `verify`, until someone
    accepts it with a reason.
    """
    last = last or Seal()
    untouched = last.stamp == before  # both None: the first line of a new ledger
    if not untouched and (last.offset > (before.size if before else 0) or not _ends_a_line(path, last.offset)):
        return None
    custody = last.custody if untouched else last.custody + 1
    start = Seal(last.offset, last.lines, last.chain, None, custody)
    if start.offset == offset:
        fresh = chained(_split(data, offset), start)
    else:
        fresh = chained(pieces(path, start.offset), start)
    return _write(path, head, list(_checkpoints_and_last(fresh)))


def reseal(path: Path, head: Path, *, reason: str, ts: str) -> Seal:
    """Accept the file as it is: a new head, with the reason, in place of the old one. The caller holds the lock."""
    old = last_seal(head) or Seal()
    start = Seal(custody=old.custody + 1, reason=reason, ts=ts)
    kept = [s for s in seals(head) if s.reason is not None]
    fresh = list(_checkpoints_and_last(chained(pieces(path), start)))
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


def _checkpoints_and_last(found: Iterable[Seal]) -> Iterator[Seal]:
    last = None
    for seal in found:
        last = seal
        if seal.lines % CHECKPOINT_LINES == 0:
            yield seal
            last = None
    if last is not None:
        yield last


def _write(path: Path, head: Path, fresh: list[Seal]) -> Seal | None:
    if not fresh:
        return None
    newest = fresh[-1]
    fresh[-1] = newest = Seal(newest.offset, newest.lines, newest.chain, stamp_of(path), newest.custody)
    wanted_bytes = newest.lines // CHECKPOINT_LINES * _ENTRY_BYTES + _SLACK_BYTES
    found = stamp_of(head)
    data = b"".join(files.dumps_line(seal.to_record()) for seal in fresh)
    if found is not None and found.size > wanted_bytes:
        files.commit(head, _thinned(files.read_bytes(head) or b"") + data)
    else:
        journal.append_locked(head, data, durable=False)
    return newest


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


def _split(data: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    for line in data.splitlines(keepends=True):  # made by us: JSON escapes every other line end
        yield offset, line
        offset += len(line)


def _parse(line: bytes) -> Seal | None:
    try:
        return Seal.from_record(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
