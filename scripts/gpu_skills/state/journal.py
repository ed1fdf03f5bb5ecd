"""Append-only files of records, one JSON object a line, and the write-ahead journal of what bills or destroys."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills import units
from gpu_skills.doors import door
from gpu_skills.state import files, strict_json

MAX_LINE_BYTES = 8 * 1024 * 1024
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Problem:
    """A line that is not a record. It stays in the file; readers say so and go on."""

    at: str
    message: str
    torn: bool = False  # the last line, without its newline: a write that was cut


@dataclass(frozen=True)
class Reservation:
    """The worst case of a billed action that is not settled yet; it counts against every ceiling.

    resumes: the older job that job_id goes on with. session: the intent of the start that this prolongs.
    """

    intent: str
    reserved_usd: Decimal
    ts: str
    account: str | None = None
    project_id: str | None = None
    job_id: str | None = None
    resumes: str | None = None
    session: str | None = None


def append(path: Path, records: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Add records at the end of a file, all or none, synced; return (offset, length) of what was added."""
    with files.lock(path):
        return append_locked(path, b"".join(files.dumps_line(record) for record in records))


@door("state.journal.append")
def append_locked(path: Path, data: bytes, *, durable: bool = True) -> tuple[int, int]:
    """As `append`, for callers that hold the lock and have the bytes of whole lines.

    A torn last line (someone died in the middle of a write) gets its newline first: it stays a bad line of its own and
    never swallows the first of ours. One `write`; a short one, on a full disk, is cut off again. durable=False leaves
    out the fsync, for what can be made again from other files.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise files.writing_failed(path, exc) from exc
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        block = b"\n" + data if torn else data
        try:
            if os.write(descriptor, block) < len(block):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(descriptor)
            if durable and size == 0:
                files.sync_directory(path.parent)
        except OSError as exc:
            os.ftruncate(descriptor, size)
            raise files.writing_failed(path, exc) from exc
        return size + torn, len(data)
    finally:
        os.close(descriptor)


def scan(path: Path, start: int = 0, *, stop: int | None = None) -> Iterator[tuple[int, int, dict[str, Any] | Problem]]:
    """Yield (offset, line number, record or Problem) of each line from byte `start`, which begins a line.

    Line numbers count from `start`. Blank lines are skipped. `stop` leaves out what was appended after it.
    """
    for offset, number, line in raw_lines(path, start, stop=stop):
        if line.strip():
            yield offset, number, parse_line(line, number)


def raw_lines(path: Path, start: int = 0, *, stop: int | None = None) -> Iterator[tuple[int, int, bytes]]:
    """Lines as bytes with their newline, in bounded memory: a longer line than MAX_LINE_BYTES comes cut, unclosed."""
    descriptor = files.open_regular(path)
    if descriptor is None:
        return
    with open(descriptor, "rb", buffering=_CHUNK) as stream:
        stream.seek(start)
        offset, number = start, 0
        while stop is None or offset < stop:
            line = stream.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            length, number = len(line), number + 1
            while not line.endswith(b"\n") and length > MAX_LINE_BYTES:
                rest = stream.readline(_CHUNK)
                length += len(rest)
                if not rest or rest.endswith(b"\n"):
                    break
            yield offset, number, line
            offset += length


def blocks_backward(path: Path, block_bytes: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    """(offset, whole lines) from the end of a file to its beginning; the last line may lack its newline."""
    descriptor = files.open_regular(path)
    if descriptor is None:
        return
    try:
        end, carry = os.fstat(descriptor).st_size, b""
        while end > 0:
            start = max(0, end - block_bytes)
            data = os.pread(descriptor, end - start, start) + carry
            end, cut = start, data.find(b"\n") + 1 if start else 0
            if start and not cut:  # one line longer than the block
                carry, block_bytes = data, block_bytes * 2
                continue
            carry = data[:cut]
            yield start + cut, data[cut:]
    finally:
        os.close(descriptor)


def parse_line(line: bytes, number: int) -> dict[str, Any] | Problem:
    """The record of a line, or what is wrong with it."""
    if len(line) > MAX_LINE_BYTES:
        allowed = units.format_bytes(MAX_LINE_BYTES)
        return Problem(f":{number}", f"found a line longer than {allowed}, allowed are {allowed}")
    torn = not line.endswith(b"\n")
    try:
        record = strict_json.loads(line)
    except strict_json.Fault as fault:
        place = f":{number}:{fault.column}" + (f" {fault.pointer}" if fault.pointer else "")
        return Problem(place, str(fault), torn)
    if not isinstance(record, dict):
        return Problem(f":{number}", f"found {_kind(record)}, allowed is an object", torn)
    return record


def open_reservations(events: Iterable[dict[str, Any]]) -> list[Reservation]:
    """Fold journal events into the reservations that still count, oldest first.

    `reservation` opens one for its intent (again: the new amount holds), `settlement` closes it. An outcome alone does
    not: money is free again only when what was billed has been booked.
    """
    found: dict[str, Reservation] = {}
    for event in events:
        kind, intent = event.get("kind"), event.get("intent")
        if kind == "reservation":
            found[intent] = Reservation(  # type: ignore[index]
                intent=str(intent),
                reserved_usd=units.usd(event["reserved_usd"]),
                ts=str(event.get("ts", "")),
                account=event.get("account"),
                project_id=event.get("project_id"),
                job_id=event.get("job_id"),
                resumes=event.get("resumes"),
                session=event.get("session"),
            )
        elif kind == "settlement":
            found.pop(intent, None)  # type: ignore[arg-type]
    return list(found.values())


def reserved_usd(
    reservations: Iterable[Reservation], *, account: str | None = None, project_id: str | None = None
) -> Decimal:
    """What is reserved for one account or one project, or in all."""
    return sum(
        (
            r.reserved_usd
            for r in reservations
            if (account is None or r.account == account) and (project_id is None or r.project_id == project_id)
        ),
        Decimal(0),
    )


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
