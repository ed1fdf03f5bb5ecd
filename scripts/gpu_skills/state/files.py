"""Whole files that a crash leaves old or new, and the locks that keep writers apart."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills import units
from gpu_skills.doors import door
from gpu_skills.errors import Bug, ChangedMeanwhile, DiskFull, NotWritable, StateBusy, StateError
from gpu_skills.state import strict_json

ANY = object()  # `commit(expected=ANY)`: whatever is there may be replaced
LOCK_TIMEOUT_S = 10.0
MAX_RECORD_FILE_BYTES = 64 * 1024 * 1024

# Locks are taken from left to right only, so that two commands can never wait for each other. A file that is not
# named here (the locks of one job's folder) comes before all of them, among its like by path.
LOCK_ORDER = (
    "accounts",
    "project.json",
    "policy.json",
    "providers.json",
    "machines.json",
    "deployments.json",
    "models.json",
    "workflows.json",
    "memory.json",
    "approvals.jsonl",
    "journal.jsonl",
    "jobs.jsonl",
    "charges.jsonl",
)
# Linux lists locks with their holders. Elsewhere the holder writes its name, which costs a write per lock.
_PROC_LOCKS = Path("/proc/locks")
_HOLDERS_ARE_LISTED = _PROC_LOCKS.exists()
_RANKS = {name: rank for rank, name in enumerate(LOCK_ORDER)}
_held = threading.local()


@door("state.files.commit")
def commit(
    path: Path, data: bytes, *, expected: bytes | object | None = ANY, mode: int = 0o600, durable: bool = True
) -> None:
    """Replace a file so that a crash leaves the old or the new content, never a mixture.

    expected: what the caller read (None: no file). Something else on disk raises ChangedMeanwhile and writes nothing.
    durable=False leaves out the fsyncs, for what can be made again from other files.
    """
    if expected is not ANY and read_bytes(path) != expected:
        raise ChangedMeanwhile(file=path.name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            write_all(descriptor, data)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
        if durable:
            sync_directory(path.parent)
    except OSError as exc:
        _remove_quietly(temporary)
        raise writing_failed(path, exc) from exc
    except BaseException:
        _remove_quietly(temporary)
        raise


def update(path: Path, function: Callable[[Any], Any], *, default: Any = None, attempts: int = 5) -> Any:
    """Lock, read, `function(value)`, commit; return what was committed.

    A change by hand between reading and committing is not overwritten: the function is applied again to what is there
    now, so it must have no effects. `default` stands for a missing file. Nothing is written when nothing changes.
    """
    with lock(path):
        for _ in range(attempts):
            raw = read_bytes(path)
            before = parse(raw, path) if raw is not None else default
            after = function(before)
            data = dumps_pretty(after)
            if data == raw:
                return after
            try:
                commit(path, data, expected=raw)
                return after
            except ChangedMeanwhile:
                continue
    raise ChangedMeanwhile(file=path.name)


class lock:  # used as a function is, and faster than a generator where appends follow each other
    """`with lock(path):` hold the lock of a file; StateBusy names who has it after `timeout_s`.

    The lock is on `<name>.lock` beside it, because the file itself is replaced. It ends with the process, whatever
    kills it. Locks have one order (LOCK_ORDER); none may be held across a network call.
    """

    __slots__ = ("_descriptor", "_path", "_timeout_s")

    def __init__(self, path: Path, timeout_s: float = LOCK_TIMEOUT_S):
        self._path = path
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        path, rank = self._path, _rank(self._path)
        held = _held_ranks()
        if held and held[-1] >= rank:
            raise Bug(message=f"lock {path.name} wanted while {held[-1][1]} is held: against the order of locks")
        descriptor = _open_lock(path)
        try:
            _wait_for(descriptor, path, self._timeout_s)
            if not _HOLDERS_ARE_LISTED:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _who_am_i(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        held.append(rank)

    def __exit__(self, *_exc: object) -> None:
        _held_ranks().pop()
        os.close(self._descriptor)


def read_bytes(path: Path, *, max_bytes: int = MAX_RECORD_FILE_BYTES) -> bytes | None:
    """Content of a regular file, None when there is none. A pipe or device does not block, it is a StateError."""
    descriptor = open_regular(path)
    if descriptor is None:
        return None
    with open(descriptor, "rb") as stream:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            problem = f"found {units.format_bytes(size)}, allowed are {units.format_bytes(max_bytes)}"
            raise StateError(file=path.name, at="", problem=problem)
        return stream.read(max_bytes + 1)


def open_regular(path: Path) -> int | None:
    """A descriptor for reading, None when there is no file; a StateError for what is not a readable file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StateError(file=path.name, at="", problem=f"cannot be read: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StateError(file=path.name, at="", problem="found something that is not a file, allowed is a file")
    return descriptor


def read_json(
    path: Path, *, max_bytes: int = MAX_RECORD_FILE_BYTES, max_depth: int = strict_json.MAX_DEPTH, default: Any = ANY
) -> Any:
    """The strict JSON value of a file. StateError says file, line, column, pointer, what was found and is allowed.

    A missing file gives `default`, or a StateError when none is given.
    """
    raw = read_bytes(path, max_bytes=max_bytes)
    if raw is None:
        if default is ANY:
            raise StateError(file=path.name, at="", problem="found no file", next_step="gpu init")
        return default
    return parse(raw, path, max_depth=max_depth)


def parse(raw: bytes, path: Path, *, max_depth: int = strict_json.MAX_DEPTH) -> Any:
    """Strict JSON of bytes that came from `path`."""
    try:
        return strict_json.loads(raw, max_depth=max_depth)
    except strict_json.Fault as fault:
        details = {
            "line": fault.line,
            "column": fault.column,
            "pointer": fault.pointer,
            "found": fault.found,
            "allowed": fault.allowed,
        }
        raise StateError(file=path.name, at=fault.at, problem=str(fault), **details) from fault


def dumps_pretty(value: Any) -> bytes:
    """Two spaces, keys as given, a newline at the end: made to be read and edited by hand."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_plain) + "\n").encode()


def dumps_line(record: Any) -> bytes:
    """One line with its newline. A string's line separators are escaped by JSON itself."""
    return _encode_line(record).encode() + b"\n"


def make_directory(path: Path) -> None:
    """A private directory (0700); one that is there keeps its mode."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise writing_failed(path, exc) from exc


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writing_failed(path: Path, exc: OSError) -> DiskFull | NotWritable:
    """The operating system's refusal to write in our words."""
    reason = exc.strerror or str(exc)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(path=str(path), reason=reason)
    return NotWritable(path=str(path), reason=reason)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return units.json_number(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_encode_line = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain).encode


def _rank(path: Path) -> tuple[int, str]:
    return _RANKS.get(path.name, -1), str(path)


def _held_ranks() -> list[tuple[int, str]]:
    try:
        return _held.ranks  # type: ignore[no-any-return]
    except AttributeError:
        _held.ranks = []
        return _held.ranks  # type: ignore[no-any-return]


def _open_lock(path: Path) -> int:
    lock_path = f"{path}.lock"
    try:
        return os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise writing_failed(Path(lock_path), exc) from exc


def _wait_for(descriptor: int, path: Path, timeout_s: float) -> None:
    """flock with an end. Short, growing, uneven pauses: many writers neither starve nor march in step."""
    deadline, pause_s = None, 0.0001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError as exc:  # ENOLCK: a file system without locks
            raise NotWritable(path=str(path), reason=f"it cannot be locked: {exc.strerror}") from exc
        now = time.monotonic()
        deadline = now + timeout_s if deadline is None else deadline
        if now >= deadline:
            raise StateBusy(file=path.name, holder=_holder(descriptor), waited_s=f"{timeout_s:g}")
        time.sleep(pause_s * (0.5 + now * 1e6 % 1))
        pause_s = min(pause_s * 2, 0.01)


def _holder(descriptor: int) -> str:
    """Who has the lock: from the kernel's own list, or from what the holder wrote where there is no such list."""
    try:
        inode = f":{os.fstat(descriptor).st_ino}"
        for line in _PROC_LOCKS.read_text().splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 fd:00:1234 0 EOF; waiting ones have "->" first
            if fields[1] == "FLOCK" and fields[5].endswith(inode) and int(fields[4]) > 0:
                command = Path(f"/proc/{fields[4]}/cmdline").read_bytes().replace(b"\0", b" ").strip()
                return f"pid {fields[4]} ({command[:120].decode('utf-8', 'replace')})"
    except (OSError, ValueError, IndexError):
        pass
    return os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "another process"


def _who_am_i() -> bytes:
    command = " ".join([os.path.basename(sys.argv[0]) or "python", *sys.argv[1:3]]) if sys.argv else "python"
    return f"pid {os.getpid()} ({command[:120]})".encode("utf-8", "replace")


def _remove_quietly(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass
