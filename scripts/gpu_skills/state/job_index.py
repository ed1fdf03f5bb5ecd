"""Which jobs of a ledger have not ended and which id comes next, without reading the whole ledger each time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_skills.state import chain, journal, prefix_cache
from gpu_skills.state.job_record import JOB_ID, STATE

_SAVE_AFTER_BYTES = 1 << 20
_BULK_BYTES = 4 << 20


@dataclass
class JobIndex:
    """open: offset of the last line of each job without an end, oldest first. max_number: of the ids seen."""

    offset: int = 0
    open: dict[str, int] = field(default_factory=dict)
    max_number: int = 0
    custody: int | None = None
    stamp: chain.Stamp | None = None

    def see(self, identity: Any, status: Any, offset: int) -> None:
        if not isinstance(identity, str) or not JOB_ID.fullmatch(identity) or status not in STATE:
            return
        self.max_number = max(self.max_number, int(identity[2:]))
        if status == "running":
            self.open[identity] = offset
        else:
            self.open.pop(identity, None)


def refresh(index: JobIndex | None, ledger: Path, seal: chain.Seal | None, cache: Path, *, may_save: bool) -> JobIndex:
    """The index of the ledger as it is now: from the one in memory, the one on disk, or from the beginning."""
    stamp = chain.stamp_of(ledger)
    if stamp is None:
        return JobIndex()
    if index is None or not (index.stamp == stamp or chain.still_true(seal, stamp, index.custody)):
        index = _from_cache(cache, ledger, seal)
    began = index.offset
    if began == stamp.size and index.stamp == stamp:
        return index
    if stamp.size - began > _BULK_BYTES:
        _read_bulk(index, ledger, stamp.size)
    else:
        _read(index, ledger, stamp.size)
    index.stamp = stamp
    index.custody = seal.custody if seal is not None and seal.stamp == stamp else None
    if may_save and stamp.size >= prefix_cache.WORTHWHILE_BYTES and index.offset - began > _SAVE_AFTER_BYTES:
        sums = prefix_cache.checksums(ledger, 0, index.offset)
        data = {"open": index.open, "max_number": index.max_number}
        prefix_cache.save(cache, prefix_cache.Prefix(index.offset, sums, data), stamp=stamp, seal=seal)
    return index


def _from_cache(cache: Path, ledger: Path, seal: chain.Seal | None) -> JobIndex:
    prefix = prefix_cache.load(cache, ledger, seal)
    try:
        if prefix is not None:
            return JobIndex(prefix.offset, dict(prefix.data["open"]), int(prefix.data["max_number"]))
    except (KeyError, TypeError, ValueError):
        pass
    return JobIndex()


def _read(index: JobIndex, ledger: Path, size: int) -> None:
    for offset, _number, line in journal.raw_lines(ledger, index.offset, stop=size):
        if not line.endswith(b"\n"):
            if len(line) <= journal.MAX_LINE_BYTES:
                return  # torn: read again when it is whole
            continue  # longer than any line of ours
        index.offset = offset + len(line)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # `verify` reports it
        if isinstance(record, dict):
            index.see(record.get("id"), record.get("status"), offset)


def _read_bulk(index: JobIndex, ledger: Path, size: int) -> None:
    import msgspec

    class Line(msgspec.Struct, gc=False):
        id: str
        status: str

    decode = msgspec.json.Decoder(Line).decode
    for offset, _number, line in journal.raw_lines(ledger, index.offset, stop=size):
        if not line.endswith(b"\n"):
            if len(line) <= journal.MAX_LINE_BYTES:
                return
            continue
        index.offset = offset + len(line)
        try:
            seen = decode(line)
        except (msgspec.DecodeError, RecursionError):  # ValidationError and bad UTF-8 are among them
            continue
        index.see(seen.id, seen.status, offset)
