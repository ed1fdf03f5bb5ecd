"""Finding and ending every process of one instance, whatever it did to get away from its parents.

A process belongs to an instance when it carries the instance's mark in the environment it was started with, when it
descends from such a process or from the instance's SSH server, when it shares a session with one, or when it is an
orphan that works below the instance's directory. Jobs that detach twice and clear their environment meet the last.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "GPU_SANDBOX_INSTANCE"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    is_zombie: bool = False


def become_subreaper() -> bool:
    """Make orphans below this process its own children, so that none is lost to init. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    return False


def reap_orphans(own: Collection[int]) -> None:
    """Collect dead children that nobody waits for. own: pids that a Popen of ours will collect itself."""
    for process in snapshot():
        if process.parent == os.getpid() and process.is_zombie and process.pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def kill_instance(mark: str, directory: Path, roots: Collection[int], *, within_s: float = 10.0) -> bool:
    """Kill until nothing of the instance is left. False: something survived `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        family = instance_processes(mark, directory, roots)
        if not family:
            return True
        for pid in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)


def instance_processes(mark: str, directory: Path, roots: Collection[int]) -> set[int]:
    """Living processes of the instance (no zombies). roots: its SSH server and its main process."""
    everyone = [process for process in snapshot() if process.pid != os.getpid()]
    needle = f"{MARK}={mark}".encode() + b"\0"
    orphan_parents = {1, os.getpid()}
    below = str(directory) + "/"
    family = set(roots)
    for process in everyone:
        if needle in _environment(process.pid) or (
            process.parent in orphan_parents and _working_directory(process.pid).startswith(below)
        ):
            family.add(process.pid)
    family = _closure(family, everyone)
    return {process.pid for process in everyone if process.pid in family and not process.is_zombie}


def sweep(directory: Path) -> int:
    """Kill what a sandbox of this directory left behind when it was killed itself. Returns how many it found."""
    found = 0
    for _ in range(100):
        left = _left_behind(directory)
        if not left:
            break
        found += len(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return found


def _left_behind(directory: Path) -> set[int]:
    """Living processes of any instance below a directory whose sandbox is dead."""
    everyone = [process for process in snapshot() if process.pid != os.getpid()]
    mark, below = f"{MARK}={mark_of(directory)}-".encode(), f"{directory}/containers/"
    orphan_parents = {1, os.getppid()}  # our own parent collects orphans too, when it is what collects them here
    family = {
        process.pid
        for process in everyone
        if mark in _environment(process.pid)
        or (b"sshd" in (line := _command_line(process.pid)) and below.encode() in line)
        or (process.parent in orphan_parents and _working_directory(process.pid).startswith(below))
    }
    family = _closure(family, everyone)
    return {process.pid for process in everyone if process.pid in family and not process.is_zombie}


def mark_of(directory: Path) -> str:
    """What the marks of all instances below a directory begin with."""
    return hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]


def start_time(pid: int) -> int | None:
    """When the process began, in ticks since boot: with the pid it names one process. None: there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rsplit(b")", 1)[1].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except FileNotFoundError:
        if os.path.isdir("/proc/1"):
            return None
    except (OSError, ValueError, IndexError):
        return None
    return 0 if any(process.pid == pid and not process.is_zombie for process in _from_ps()) else None


def have_children(pids: Collection[int]) -> bool:
    """Whether anything runs below these: an SSH session, a start command's child."""
    return any(process.parent in pids and not process.is_zombie for process in snapshot())


def _closure(family: set[int], everyone: Iterable[Process]) -> set[int]:
    """Add descendants and those in a session that a member leads, until nothing is added."""
    everyone = list(everyone)
    while True:
        more = {p.pid for p in everyone if p.pid not in family and (p.parent in family or p.session in family)}
        if not more:
            return family
        family |= more


def snapshot() -> list[Process]:
    """Every process of this machine."""
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return _from_ps()
    found = []
    for name in names:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", "rb") as stream:
                fields = stream.read().rsplit(b")", 1)[1].split()
            found.append(Process(int(name), int(fields[1]), int(fields[3]), fields[0] in (b"Z", b"X")))
    return found


def _from_ps() -> list[Process]:
    """Without /proc there are no environments to read: descendants and sessions have to do."""
    listed = subprocess.run(["ps", "-axo", "pid=,ppid=,pgid=,state="], capture_output=True, text=True, check=False)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [Process(int(r[0]), int(r[1]), int(r[2]), r[3].startswith("Z")) for r in rows if len(r) == 4]


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as stream:
        return stream.read() + b"\0"
    return b""


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as stream:
        return stream.read()
    return b""


def _working_directory(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd") + "/"
    return ""
