"""Which jobs of a ledger have not ended and which id comes next, without reading the whole ledger each time."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_skills.state import chain, journal, prefix_cache
from gpu_skills.state.job_record import JOB_ID, STATE

_SAVE_AFTER_BYTES = 1 << 20
_BULK_BYTES = 4 << 20
_AT_ONCE_BYTES = 1 << 20
_MANY_LINES = 200
_TAIL_BYTES = 200
_RECENT_IDS = 20_000
_MAX_UNREAD_IDS = 20_000
_LINE_BEGINS = b'{"id":"'


# `json.loads` without its guess at the encoding: half the time.
_scan = json.JSONDecoder().scan_once


@dataclass
class JobIndex:
    """open: offset of the last line of each job without an end, oldest first. max_number: of the ids seen.

    recent: the ids of all lines from `recent_from` on, so that the file need not be searched for them.
    unread: the ids of the lines from `offset` to `looked`. What these say is not in the fields above: whoever appends
    among many writers asks only whether they speak of its own job.
    """

    offset: int = 0
    open: dict[str, int] = field(default_factory=dict)
    max_number: int = 0
    stamp: chain.Stamp | None = None
    lines_read: int = 0
    tail: bytes = b""  # what stands just before `looked`
    recent: set[str] = field(default_factory=set)
    recent_from: int = 0
    unread: set[bytes] = field(default_factory=set)
    looked: int = 0

    def see(self, identity: Any, status: Any, offset: int) -> None:
        if not isinstance(identity, str) or not JOB_ID.fullmatch(identity):
            return
        if not isinstance(status, str) or status not in STATE:
            return
        self.max_number = max(self.max_number, int(identity[2:]))
        if len(self.recent) >= _RECENT_IDS:
            self.recent, self.recent_from = set(), offset
        self.recent.add(identity)
        if status == "running":
            self.open[identity] = offset
        else:
            self.open.pop(identity, None)

    def add(self, offset: int, lines: list[tuple[str, str, bytes]], stamp: chain.Stamp) -> None:
        """Take in what was just appended at `offset`: (id, status, bytes) of each line; stamp: of the file after it."""
        if offset != self.looked:
            return  # there was something before it: the next look reads both
        if self.unread:
            self.unread.update(identity.encode() for identity, _status, _data in lines)
        for identity, status, data in lines:
            if not self.unread:
                self.see(identity, status, offset)
            offset += len(data)
        self._move_to(offset, stamp, lines[-1][2])
        if not self.unread:
            self.offset = offset

    def look(self, ledger: Path, stamp: chain.Stamp | None) -> bool:
        """Note which ids were appended since, without decoding the lines.

        False when that cannot be told from the bytes alone: the lines have to be read.
        """
        if stamp is None or self.stamp == stamp:
            return self.stamp == stamp
        if stamp.size - self.looked > _AT_ONCE_BYTES or len(self.unread) > _MAX_UNREAD_IDS:
            return False
        fresh = self._grown(ledger, stamp, _AT_ONCE_BYTES)
        ids = _plain_ids(fresh) if fresh else None
        if not fresh or ids is None:
            return False
        self.unread.update(ids)
        self._move_to(stamp.size, stamp, fresh)
        return True

    def goes_on(self, ledger: Path, stamp: chain.Stamp) -> bool:
        """Whether the file only grew since, as far as its inode and the end of what was read tell.

        That is enough within one process; what a process finds on disk is checked as prefix_cache does.
        """
        return self.stamp == stamp or self._grown(ledger, stamp, 0) is not None

    def _grown(self, ledger: Path, stamp: chain.Stamp, wanted_bytes: int) -> bytes | None:
        """The first of what stands behind `looked`, if the file only grew since."""
        tail = self.tail
        if self.stamp is None or not tail or self.stamp.inode != stamp.inode or stamp.size < self.looked:
            return None
        descriptor = os.open(ledger, os.O_RDONLY | os.O_CLOEXEC)
        try:
            wanted = min(stamp.size - self.looked, wanted_bytes) + len(tail)
            data = os.pread(descriptor, wanted, self.looked - len(tail))
        finally:
            os.close(descriptor)
        return data[len(tail) :] if data.startswith(tail) else None

    def _move_to(self, looked: int, stamp: chain.Stamp, read: bytes) -> None:
        self.looked, self.stamp, self.tail = looked, stamp, read[-_TAIL_BYTES:]


def refresh(index: JobIndex | None, ledger: Path, head: Path, cache: Path, *, may_save: bool) -> JobIndex:
    """The index of the ledger as it is now: from the one in memory, the one on disk, or from the beginning."""
    stamp = chain.stamp_of(ledger)
    if stamp is None:
        return JobIndex()
    if index is None or not index.goes_on(ledger, stamp):
        index = _from_cache(cache, ledger, head, may_save)
    began = index.offset
    if began == stamp.size and index.stamp == stamp:
        return index
    index.lines_read += _read(index, ledger, stamp.size)
    index.stamp, index.looked, index.unread = stamp, index.offset, set()
    if may_save and stamp.size >= prefix_cache.WORTHWHILE_BYTES and index.offset - began > _SAVE_AFTER_BYTES:
        sums = prefix_cache.checksums(ledger, 0, index.offset)
        data = {"open": index.open, "max_number": index.max_number}
        prefix = prefix_cache.Prefix(index.offset, sums, data)
        prefix_cache.save(cache, prefix, stamp=stamp, seal=chain.last_seal(head))
    return index


def count(ledger: Path) -> int:
    """How many jobs the ledger names, whatever else its lines hold."""
    stamp = chain.stamp_of(ledger)
    if stamp is None:
        return 0
    decode, numbers = _decoder(JobIndex(), stamp.size), set()
    for _offset, line in _lines(ledger, 0, stamp.size):
        try:
            identity, status = decode(line)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if isinstance(identity, str) and JOB_ID.fullmatch(identity) and isinstance(status, str) and status in STATE:
            numbers.add(int(identity[2:]))
    return len(numbers)


def _from_cache(cache: Path, ledger: Path, head: Path, may_save: bool) -> JobIndex:
    prefix = prefix_cache.load(cache, ledger, chain.last_seal(head), may_save=may_save)
    try:
        if prefix is not None:
            data = prefix.data
            opened, number = dict(data["open"]), int(data["max_number"])
            return JobIndex(prefix.offset, opened, number, recent_from=prefix.offset, looked=prefix.offset)
    except (KeyError, TypeError, ValueError):
        pass
    return JobIndex()


def _read(index: JobIndex, ledger: Path, size: int) -> int:
    """Fold the lines behind `index.offset`; return how many. What cannot be read is passed over: `verify` tells it."""
    decode, see = _decoder(index, size), index.see
    count = 0
    for offset, line in _lines(ledger, index.offset, size):
        if not line.endswith(b"\n"):
            if len(line) <= journal.MAX_LINE_BYTES:
                break  # torn: read again when it is whole
            continue  # longer than any line of ours
        count += 1
        index.offset, whole = offset + len(line), line
        try:
            identity, status = decode(line)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        see(identity, status, offset)
    if count:
        index.tail = whole[-_TAIL_BYTES:]
    return count


def _plain_ids(block: bytes) -> list[bytes] | None:
    """Ids of lines as we write them: `id` comes first and no other key of the line could be it. None for others."""
    if b"\\" in block and b"\\u" in block:  # an escape may spell a key; one character is found ten times faster
        return None
    lines = block.split(b"\n")
    if lines.pop() or block.count(b'"id"') != len(lines):
        return None
    begins, start = _LINE_BEGINS, len(_LINE_BEGINS)
    ids = [line[start : line.find(b'"', start)] for line in lines if line.startswith(begins)]
    return ids if len(ids) == len(lines) else None


def _lines(ledger: Path, start: int, size: int) -> Iterator[tuple[int, bytes]]:
    if size - start > _AT_ONCE_BYTES:
        yield from ((offset, line) for offset, _number, line in journal.raw_lines(ledger, start, stop=size))
        return
    with open(ledger, "rb", buffering=0) as stream:
        data = os.pread(stream.fileno(), size - start, start)
    for line in data.split(b"\n"):
        end = start + len(line) + 1
        if line or end <= size:
            yield start, line + b"\n" if end <= size else line
        start = end


def _decoder(index: JobIndex, size: int) -> Callable[[bytes], tuple[Any, Any]]:
    """From a line to its id and status. The fast one is worth its import from a few hundred lines on."""
    if size - index.offset < _BULK_BYTES and index.lines_read < _MANY_LINES:

        def slow(line: bytes) -> tuple[Any, Any]:
            text = line.decode()
            try:
                record, end = _scan(text, 0)
            except StopIteration:
                record, end = None, 0
            if text[end:] != "\n":  # white space around it, or no record
                record = json.loads(text)
            return record["id"], record["status"]

        return slow
    return _fast_decoder()


@functools.cache
def _fast_decoder() -> Callable[[bytes], tuple[str, str]]:
    import msgspec

    class Line(msgspec.Struct, gc=False):
        id: str
        status: str

    decode = msgspec.json.Decoder(Line).decode

    def fast(line: bytes) -> tuple[str, str]:
        seen = decode(line)
        return seen.id, seen.status

    return fast
