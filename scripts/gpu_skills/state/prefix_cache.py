"""What was computed from the beginning of an append-only file, and whether that beginning is still the same.

A cache is a file beside the ledger that may be deleted at any time. It holds for a prefix of the ledger when nobody but
us has written since (chain.Seal.custody says so at once), or when the checksum of the prefix is what it was.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_skills.errors import DiskFull, NotWritable
from gpu_skills.state import chain, files

VERSION = 1
# Below this size reading everything is as fast as finding out what can be left out.
WORTHWHILE_BYTES = 4 * 1024 * 1024
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Prefix:
    """data: computed from bytes 0 to `offset`. sums: (start, end, CRC-32) of ranges that cover them."""

    offset: int
    sums: list[tuple[int, int, int]]
    data: Any


def load(cache: Path, ledger: Path, seal: chain.Seal | None, *, may_save: bool) -> Prefix | None:
    """The cached prefix, None when there is none or it is not true any more. Never fails: a cache is a convenience."""
    stamp = chain.stamp_of(ledger)
    if stamp is None or stamp.size < WORTHWHILE_BYTES:
        return None
    try:
        with open(cache, "rb") as stream:
            record = json.loads(stream.read())
        if record["version"] != VERSION:
            return None
        prefix = Prefix(record["offset"], [tuple(s) for s in record["sums"]], record["data"])
        if not 0 < prefix.offset <= stamp.size:
            return None
        if chain.still_true(seal, stamp, record["custody"]):
            return prefix
        if not _same_file(record["stamp"], stamp) and not _sums_match(ledger, prefix.sums):
            return None
        if may_save and seal is not None and seal.stamp == stamp:
            save(cache, prefix, stamp=stamp, seal=seal)  # next time its custody says so at once
        return prefix
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def save(cache: Path, prefix: Prefix, *, stamp: chain.Stamp, seal: chain.Seal | None) -> None:
    """Keep it for the next command. stamp: of the ledger before it was read."""
    custody = seal.custody if seal is not None and seal.stamp == stamp else None
    record = {
        "version": VERSION,
        "offset": prefix.offset,
        "custody": custody,
        "stamp": [stamp.size, stamp.mtime_ns, stamp.inode],
        "sums": prefix.sums,
        "data": prefix.data,
    }
    try:
        files.commit(cache, json.dumps(record, separators=(",", ":")).encode(), durable=False)
    except (DiskFull, NotWritable):
        pass  # the next command computes again


def checksum(path: Path, start: int, end: int) -> int:
    total, position = 0, start
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while position < end:
            block = os.pread(descriptor, min(_BLOCK, end - position), position)
            if not block:
                return -1
            total = zlib.crc32(block, total)
            position += len(block)
    finally:
        os.close(descriptor)
    return total


def checksums(path: Path, start: int, end: int) -> list[tuple[int, int, int]]:
    """Sums of a range in two halves, so that they can be checked by two threads."""
    from concurrent.futures import ThreadPoolExecutor  # here, because it costs every command its start otherwise

    middle = (start + end) // 2
    halves = [(a, b) for a, b in ((start, middle), (middle, end)) if a < b]
    with ThreadPoolExecutor(2) as pool:
        return [
            (a, b, total) for (a, b), total in zip(halves, pool.map(lambda h: checksum(path, *h), halves), strict=True)
        ]


def _sums_match(path: Path, sums: list[tuple[int, int, int]]) -> bool:
    if len(sums) == 1:
        return checksum(path, sums[0][0], sums[0][1]) == sums[0][2]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max(1, min(len(sums), os.cpu_count() or 1))) as pool:
        return all(pool.map(lambda s: checksum(path, s[0], s[1]) == s[2], sums))


def _same_file(recorded: list[int], stamp: chain.Stamp) -> bool:
    return recorded == [stamp.size, stamp.mtime_ns, stamp.inode]
