#!/usr/bin/env python3
"""The one file that works for gpu-skills on a machine. Standard library, Python 3.8 or later, bash for jobs.

    python3 -I runner.py serve --root ROOT            answers frames on stdin and stdout until stdin ends
    python3 -I runner.py supervise ROOT PROJECT JOB   one job or service, detached; its spec comes through stdin
    python3 -I runner.py settle ROOT PROJECT JOB      writes the end of a job whose supervisor is gone
    python3 -I runner.py watch ROOT PROJECT           ends the session of a project: deadline or idleness
    python3 -I runner.py revive ROOT                  starts services again whose machine was started anew

docs/runner-protocol.md is the contract. The file reads top to bottom: ground, processes, folders, the connection and
its verbs (store, jobs, log, outputs, session, probe), then what outlives the connection: supervisor, settling, watcher.
Imports stay few because every command of the user waits for them; what is rarely needed is imported where it is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import select
import signal
import stat
import sys
import time
from json.encoder import encode_basestring_ascii as json_string

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Iterator, NoReturn

PROTOCOL = 1
MAX_HEADER = 64 << 10
MAX_DATA = 4 << 20
MAX_BODY = 256 << 20  # of a list that comes as a body; blobs have no such limit
BLOCK = 1 << 20
SMALL = 256 << 10
LOG_HEAD = 4 << 20
LOG_CAP = 36 << 20
TERM_GRACE_S = 10.0
STEADY_S = 60.0  # a service that lived as long is started again at once when it ends
LONGEST_PAUSE_S = 60.0
UNKILLABLE_S = 60.0  # a process in the driver's hands may never end; the exit record does not wait for ever
RESERVE_BYTES = 1 << 20
# Of the Hugging Face hub's client: how it names what is not complete, and what keeps it from its Xet transfer.
UNFINISHED = ".incomplete"
PLAIN_HTTP = "HF_HUB_DISABLE_XET"
DOWNLOAD_STALL_S = 60.0
STARTING_S = 30.0
MARKER = "GPU_JOB_NONCE"
ENDED = ("succeeded", "failed", "timeout", "cancelled", "lost")

# Imported instead of run as a script, so that Python keeps its bytecode: compiling takes longer than all the rest.
START_AS_MODULE = (
    "import sys;sys.path.insert(0,sys.argv[1]);m=__import__(sys.argv[2]);del sys.path[0];sys.exit(m.main(sys.argv[3:]))"
)

PROJECT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}\Z")
JOB_ID = re.compile(r"J-[0-9]{6,18}\Z")
SERVICE_ID = re.compile(r"dep_[A-Za-z0-9_-]{1,60}\Z")
WORK_ID = re.compile(r"(?:J-[0-9]{6,18}|dep_[A-Za-z0-9_-]{1,60})\Z")
DIGEST = re.compile(r"[0-9a-f]{64}\Z")
NONCE = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
SLUG = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
BLOB_IN_MANIFEST = re.compile(rb'"sha256":"([0-9a-f]{64})","size":([0-9]+)')
NOT_FOR_JOBS = re.compile(
    r"(SSH_.*|GPU_JOB_.*|OLDPWD|SHLVL|_|INVOCATION_ID"
    r"|(VAST|VASTAI|RUNPOD|CONTAINER|LAMBDA|PAPERSPACE|TENSORDOCK|DATACRUNCH)(_\w+)?_(KEY|TOKEN|SECRET|PASSWORD))\Z"
)


# ground: errors, JSON, time, files ---------------------------------------------------------------------------------


class Refusal(Exception):
    """An answer to the other side; the conversation goes on."""

    def __init__(self, code: str, message: str, **details: Any):
        super().__init__(message)
        self.code, self.message, self.details = code, message, details


class Broken(Exception):
    """The stream of frames cannot be followed any further."""


class Closed(Exception):
    """The other side is gone."""


def bad(message: str) -> NoReturn:
    raise Refusal("bad_request", message)


def refusal_of(exc: OSError) -> Refusal:
    reason = f"{exc.strerror or exc}: {exc.filename}" if exc.filename else str(exc.strerror or exc)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refusal("disk_full", reason)
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Refusal("not_writable", reason)
    return Refusal("failed", reason)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name + " is not JSON")


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant).decode
dumps = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def parse_object(line: bytes) -> dict[str, Any]:
    """One JSON object, ASCII, without duplicate keys or NaN. Anything else is a ValueError."""
    try:
        value = _decode(line.decode("ascii"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if type(value) is not dict:
        raise ValueError("not an object")
    return value


def text(value: Any, pattern: Any, what: str) -> str:
    if type(value) is not str or not pattern.match(value):
        bad(f"{what} is not valid")
    return value


def whole(value: Any, what: str, low: int = 0, high: int = 1 << 50) -> int:
    if type(value) is not int or not low <= value <= high:
        bad(f"{what} is not a whole number from {low} to {high}")
    return value


def seconds(value: Any, what: str, high: float = 366 * 86400.0) -> float:
    if type(value) not in (int, float) or not 0 <= value <= high:  # NaN and infinity fail the comparison
        bad(f"{what} is not a number of seconds from 0 to {high:.0f}")
    return float(value)


def timestamp(epoch_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch_s))


def boot_clock() -> float:
    """Seconds since boot, suspension included where the system tells; the same in every process of this machine."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


_boot_id = ""


def boot_id() -> str:
    global _boot_id
    if not _boot_id:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                _boot_id = file.read().strip()
        except OSError:
            _boot_id = run_program(["sysctl", "-n", "kern.bootsessionuuid"])[1].strip() or "unknown"
    return _boot_id


def run_program(command: list[str], timeout_s: float = 10.0) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; 127 when it is not there, 124 when it did not end in time."""
    import subprocess

    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {timeout_s:.0f} s"
    except OSError as exc:
        return 127, "", str(exc.strerror)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def read_json(path: str, limit: int = 1 << 20) -> dict[str, Any] | None:
    """The object in a file of ours, None when there is none or it is not one."""
    try:
        with open(path, "rb") as file:
            return parse_object(file.read(limit))
    except (OSError, ValueError):
        return None


def write_all(fd: int, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: str, data: bytes, sync: bool = True) -> None:
    """The old or the new content, never half of it. Without `sync` a power failure may bring the old one back."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    if sync:
        sync_folder(os.path.dirname(path))


def write_json(path: str, value: dict[str, Any], sync: bool = True) -> None:
    write_atomic(path, dumps(value).encode() + b"\n", sync)


def append_event(path: str, event: str, **fields: Any) -> None:
    """One line in an events file. A full disk loses the event, never the job."""
    line = dumps(dict(fields, event=event, ts=timestamp(time.time()))).encode() + b"\n"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError:
        pass


def remove(path: Any) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def remove_tree(path: str) -> None:
    """Whatever depth and modes a job left behind."""
    run_program(["rm", "-rf", "--", path], 600)
    if os.path.lexists(path):
        run_program(["chmod", "-R", "u+rwX", "--", path], 600)
        code, _, error = run_program(["rm", "-rf", "--", path], 600)
        if os.path.lexists(path):
            raise Refusal("failed", f"cannot remove {path}: {error.strip()[-300:] or code}")


def try_lock(path: str, wait_s: float = 0.0, shared: bool = False) -> int | None:
    """A descriptor that holds the lock until it is closed, or None. Locks vanish with their process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return fd
        except OSError as exc:
            if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR) or time.monotonic() >= until:
                os.close(fd)
                if exc.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    return None
                raise
        time.sleep(0.01)


def is_locked(path: str) -> bool:
    if not os.path.exists(path):
        return False
    fd = try_lock(path, shared=True)
    if fd is not None:
        os.close(fd)
    return fd is None


class SessionLock:
    """Under it a job appears and a session expires, so that neither happens behind the other's back."""

    def __init__(self, project: Project):
        self.path = project.file("session.lock")

    def __enter__(self) -> None:
        fd = try_lock(self.path, wait_s=10)
        if fd is None:
            raise Refusal("busy", "the session of this project is locked for more than 10 s")
        self.fd = fd

    def __exit__(self, *exc: Any) -> None:
        os.close(self.fd)


# processes ---------------------------------------------------------------------------------------------------------


class Process:
    __slots__ = ("pid", "ppid", "session", "start", "state")

    def __init__(self, pid: int, ppid: int, session: int, start: str, state: str):
        self.pid, self.ppid, self.session, self.start, self.state = pid, ppid, session, start, state

    @property
    def key(self) -> tuple[int, str]:
        """A pid comes back; together with its start time it does not."""
        return self.pid, self.start


HAS_PROC = os.path.exists("/proc/self/stat")


def find_process(pid: int) -> Process | None:
    """None when it is gone or only waits for its parent to notice that it ended."""
    if not HAS_PROC:
        return next(iter(_ps(["-p", str(pid)])), None)
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            line = file.read(4096)
    except OSError:
        return None
    # The name in parentheses may hold anything, also parentheses: count from the last one.
    fields = line[line.rfind(b")") + 2 :].split()
    state = fields[0].decode()
    if state in ("Z", "X"):
        return None
    return Process(pid, int(fields[1]), int(fields[3]), fields[19].decode(), state)


def all_processes() -> dict[int, Process]:
    if not HAS_PROC:
        return {process.pid: process for process in _ps(["-ax"])}
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = find_process(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def _ps(which: list[str]) -> Iterator[Process]:
    """Where there is no /proc. The process group stands in for the session, which ps does not tell there."""
    for line in run_program(["ps", *which, "-o", "pid=,ppid=,pgid=,stat=,lstart="])[1].splitlines():
        fields = line.split(None, 4)
        if len(fields) == 5 and fields[3][0] != "Z":
            yield Process(int(fields[0]), int(fields[1]), int(fields[2]), fields[4].strip(), fields[3][0])


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def reap_children() -> bool:
    """Take notice of those that ended. False when there are no children at all any more."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def has_marker(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in b"\0" + file.read() + b"\0"
    except OSError:  # gone, or another user's: not started by us
        return False


class JobTree:
    """All processes of one job: what descends from its supervisor, the sessions it made, what carries its marker, and
    what descends from any of these. Each way alone can be left: by a double fork, by setsid, by a cleared environment.
    """

    def __init__(self, nonce: str, sessions: dict[int, str], supervisor: int | None = None):
        self.marker = f"\0{MARKER}={nonce}\0".encode()
        self.sessions = sessions
        self.supervisor = supervisor
        self.seen: dict[tuple[int, str], bool] = {}

    def members(self) -> list[Process]:
        processes = all_processes()
        children: dict[int, list[Process]] = {}
        for process in processes.values():
            children.setdefault(process.ppid, []).append(process)
        ahead = list(children.get(self.supervisor, ())) if self.supervisor else []
        ahead += [p for p in processes.values() if self._is_root(p, processes)]
        found: dict[int, Process] = {}
        while ahead:
            process = ahead.pop()
            if process.pid not in found and process.pid not in (os.getpid(), self.supervisor):
                found[process.pid] = process
                ahead += children.get(process.pid, ())
        # Without a subreaper an orphan leaves the tree: what was once a member stays one.
        self.seen = {process.key: True for process in found.values()}
        return list(found.values())

    def has_children(self) -> bool:
        """As subreaper we are the parent of every orphan. A walk through /proc may miss what forks on and on."""
        return self.supervisor is not None and reap_children()

    def _is_root(self, process: Process, processes: dict[int, Process]) -> bool:
        if process.key in self.seen:
            return True
        if process.session in self.sessions:
            # The number is not given away while the session has members, so a living leader must be ours.
            leader = processes.get(process.session)
            if leader is None or leader.start == self.sessions[process.session]:
                return True
        return HAS_PROC and has_marker(process.pid, self.marker)


class Ending:
    """Ends a tree step by step: TERM once to each, KILL after 10 s, again until nothing is left."""

    def __init__(self, tree: JobTree):
        self.tree = tree
        self.began = time.monotonic()
        self.told: dict[tuple[int, str], bool] = {}
        self.left: list[Process] = []

    def step(self) -> bool:
        """True when nothing is left, or when what is left cannot be killed (then `left` names it)."""
        members = self.tree.members()
        past_s = time.monotonic() - self.began
        if not members and not self.tree.has_children():
            self.left = []
            return True
        if past_s < TERM_GRACE_S:
            for process in members:
                if process.key not in self.told:
                    self.told[process.key] = True
                    send_signal(process.pid, signal.SIGTERM)
                    send_signal(process.pid, signal.SIGCONT)  # a stopped one could not react
            return False
        self._kill(members)
        self.left = members
        return past_s > TERM_GRACE_S + UNKILLABLE_S

    def _kill(self, members: list[Process]) -> None:
        # Something that forks faster than we look is first stopped as a whole: what stands still has no children.
        frozen: dict[tuple[int, str], Process] = {}
        for _ in range(50):
            fresh = [process for process in members if process.key not in frozen]
            if not fresh:
                break
            for process in fresh:
                send_signal(process.pid, signal.SIGSTOP)
                frozen[process.key] = process
            members = self.tree.members()
        for process in frozen.values():
            send_signal(process.pid, signal.SIGKILL)
        if self.tree.supervisor == os.getpid():
            _kill_children()


def _kill_children() -> None:
    """A chain in which each process forks the next and ends outruns a walk through /proc; its orphans come to us."""
    for _ in range(3000):
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", "rb", buffering=0) as file:
                pids = file.read(1 << 16).split()
        except OSError:
            return
        for pid in pids:
            send_signal(int(pid), signal.SIGKILL)
        if not reap_children():
            return


def become_subreaper() -> bool:
    """Orphans among our descendants come back to us instead of to init. Linux only."""
    if not HAS_PROC:
        return False
    import ctypes

    pr_set_child_subreaper = 36
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def spawn(
    role: str, project: Project, job: str = "", spec: bytes = b"", errors: str = os.devnull, wait_s: float = 0.0
) -> str:
    """Start this file in another role: a session of its own, no descriptor of ours. Answers what it said when ready."""
    import subprocess

    environment = {name: value for name, value in os.environ.items() if not NOT_FOR_JOBS.match(name)}
    folder, file_name = os.path.split(os.path.abspath(__file__))
    command = [sys.executable or "python3", "-I", "-S", "-c", START_AS_MODULE, folder, file_name[: -len(".py")]]
    command += [role, project.root, project.name] + ([job] if job else [])
    with open(errors, "ab") as error_file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error_file,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    with child.stdin, child.stdout:
        try:
            child.stdin.write(spec)
            child.stdin.close()
        except OSError:
            pass
        said = b""
        until = time.monotonic() + wait_s
        while wait_s and b"\n" not in said:
            if not select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                return "late"
            piece = os.read(child.stdout.fileno(), 4096)
            if not piece:
                child.wait()
                return "gone"
            said += piece
    return said.decode("ascii", "replace").strip()


def say_ready(word: str) -> None:
    """Tell whoever spawned us, then let go of everything that connects us."""
    try:
        os.write(1, word.encode() + b"\n")
    except OSError:
        pass
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


# folders -----------------------------------------------------------------------------------------------------------


class Project:
    def __init__(self, root: str, name: str):
        self.root, self.name = root, name
        self.path = f"{root}/projects/{name}"
        self.store = self.path + "/store/"

    def file(self, name: str) -> str:
        return f"{self.path}/{name}"

    def blob(self, digest: str) -> str:
        return self.store + digest[:2] + "/" + digest

    def tree(self, digest: str) -> str:
        return f"{self.path}/trees/{digest}"

    def job(self, name: str) -> Job:
        return Job(self, name)

    def make(self) -> None:
        for folder in ("", "/workspace", "/store", "/incoming", "/trees", "/jobs"):
            os.makedirs(self.path + folder, mode=0o700, exist_ok=True)

    def job_names(self) -> list[str]:
        return self._names(JOB_ID)

    def service_names(self) -> list[str]:
        return self._names(SERVICE_ID)

    def _names(self, which: Any) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.file("jobs")) if which.match(name))
        except FileNotFoundError:
            return []

    def touch_activity(self) -> None:
        """Sign of life for the watcher: work is done for this project although no job runs yet."""
        try:
            with open(self.file("activity"), "ab"):
                os.utime(self.file("activity"))
        except OSError:
            pass


class Job:
    def __init__(self, project: Project, name: str):
        self.project, self.name = project, name
        self.path = project.file("jobs/" + name)
        self.src = self.path + "/src"
        self.outputs = self.path + "/outputs"
        self.exit_file = self.path + "/exit.json"

    def file(self, name: str) -> str:
        return f"{self.path}/{name}"

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def is_service(self) -> bool:
        return SERVICE_ID.match(self.name) is not None

    def ended(self) -> bool:
        return os.path.exists(self.exit_file)

    def is_suspended(self) -> bool:
        """A service whose machine's session is over: the next session has it again, unless it was told to end."""
        if not self.is_service() or self.ended() or os.path.exists(self.file("cancel")) or self.supervisor_lives():
            return False
        session = read_session(self.project)
        return session is not None and (bool(session.get("expired_at")) or deadline_passed(session))

    def supervisor_lives(self) -> bool:
        """It holds the lock as long as it lives. The pid counts as well: some network filesystems ignore locks."""
        if is_locked(self.file("lock")):
            return True
        state = read_json(self.file("state.json"))
        if state is None:  # not there yet: a moment ago it was still being started
            try:
                return time.time() - os.stat(self.file("job.json")).st_mtime < STARTING_S
            except OSError:
                return False
        if state.get("boot_id") != boot_id():
            return False
        process = find_process(state.get("pid") or 0)
        return process is not None and process.start == state.get("start")


# the connection ----------------------------------------------------------------------------------------------------


class Connection:
    def __init__(self) -> None:
        self.input = open(0, "rb", buffering=BLOCK, closefd=False)  # noqa: SIM115
        self.output = open(1, "wb", buffering=BLOCK, closefd=False)  # noqa: SIM115
        self.in_body = False
        for fd in (0, 1):  # the SSH server works on while we write files; sockets have no such size, users a limit
            try:
                fcntl.fcntl(fd, getattr(fcntl, "F_SETPIPE_SZ", 1031), BLOCK)
            except OSError:
                pass

    def read(self) -> tuple[dict[str, Any], bytes]:
        line = self.input.readline(MAX_HEADER + 1)
        if not line.endswith(b"\n"):
            if len(line) > MAX_HEADER:
                raise Broken("a header of more than 64 KiB")
            raise Closed()
        try:
            header = parse_object(line)
        except ValueError as exc:
            raise Broken(f"a header that is not a JSON object: {exc}") from None
        count = header.get("n")
        if count is None:
            return header, b""
        if type(count) is not int or not 0 <= count <= MAX_DATA:
            raise Broken("n is not a number of bytes up to 4 MiB")
        data = self.input.read(count)
        if len(data) < count:
            raise Closed()
        return header, data

    def body(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        while self.in_body:
            header, data = self.read()
            if header.get("end") is True:
                self.in_body = False
                return
            if "verb" in header:
                raise Broken("a request where a body was expected")
            yield header, data

    def body_lines(self) -> list[dict[str, Any]]:
        """The body as JSON lines."""
        return parse_lines(self.body_bytes())

    def body_bytes(self) -> bytes:
        parts, total = [], 0
        for _, data in self.body():
            total += len(data)
            if total > MAX_BODY:
                bad(f"a list of more than {MAX_BODY >> 20} MiB")
            parts.append(data)
        return b"".join(parts)

    def send(self, header: dict[str, Any], data: Any = b"") -> None:
        try:
            self.output.write(dumps(header).encode() + b"\n")
            if data:
                self.output.write(data)
        except OSError:
            raise Closed() from None

    def send_bytes(self, data: bytes) -> None:
        for at in range(0, len(data), MAX_DATA):
            part = data[at : at + MAX_DATA]
            self.send({"n": len(part)}, part)

    def flush(self) -> None:
        try:
            self.output.flush()
        except OSError:
            raise Closed() from None

    def refuse(self, refusal: Refusal) -> None:
        message = printable(refusal.message)[:2000]
        self.send({"ok": False, "error": {"code": refusal.code, "message": message, "details": refusal.details}})
        self.flush()


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    if data and not data.endswith(b"\n"):
        bad("a list that ends in the middle of a line")
    try:
        return [parse_object(line) for line in data.splitlines()]
    except ValueError as exc:
        bad(f"a line that is not a JSON object: {exc}")


def printable(value: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in value)


class Server:
    def __init__(self, root: str):
        self.root = root
        self.connection = Connection()
        self.umask = os.umask(0o077)
        self.watcher_seen = 0.0
        self.touched = 0.0
        self.growing: Growing | None = None

    def project(self, args: dict[str, Any]) -> Project:
        project = Project(self.root, text(args.get("project"), PROJECT_ID, "project"))
        if time.monotonic() - self.watcher_seen > 5:
            self.watcher_seen = time.monotonic()
            ensure_watcher(project)
            ensure_services(project)
        return project

    def job(self, args: dict[str, Any]) -> Job:
        job = self.project(args).job(text(args.get("job"), WORK_ID, "job"))
        if not job.exists():
            raise Refusal("job_unknown", f"no job {job.name} on this machine")
        return job

    def busy(self, project: Project) -> None:
        if time.monotonic() - self.touched > 1:
            self.touched = time.monotonic()
            project.touch_activity()

    def run(self) -> int:
        with open(__file__, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        greeting = {"protocol": PROTOCOL, "runner": digest, "python": sys.version.split()[0], "root": self.root}
        greeting.update(boot_id=boot_id(), pid=os.getpid())
        try:
            self.connection.output.write(f"GPU-SKILLS-RUNNER {dumps(greeting)}\n".encode())
            self.connection.flush()
            while True:
                self.answer_one()
        except Closed:
            return 0
        except Broken as exc:
            try:
                self.connection.refuse(Refusal("bad_request", str(exc)))
            except Closed:
                pass
            return 1

    def answer_one(self) -> None:
        request, _ = self.connection.read()
        reap_children()
        name = request.get("verb")
        if type(name) is not str:
            raise Broken("a frame without a verb where a request was expected")
        verb, has_body = VERBS.get(name, (None, False))
        self.connection.in_body = has_body
        try:
            if verb is None:
                bad(f"no verb {name[:50]}")
            args = request.get("args", {})
            if type(args) is not dict:
                bad("args is not an object")
            result = verb(self, args)
            self.connection.send({"ok": True, "result": result})
            self.connection.flush()
        except Refusal as refusal:
            self.connection.refuse(refusal)
        except OSError as exc:
            self.connection.refuse(refusal_of(exc))
        except (Broken, Closed):
            raise
        except Exception as exc:
            self.connection.refuse(Refusal("failed", f"{type(exc).__name__}: {exc}"))
        for _ in self.connection.body():  # after an early refusal: what is still on its way is thrown away
            pass


VERBS: dict[str, tuple[Callable[[Server, dict[str, Any]], dict[str, Any]], bool]] = {}


def verb(name: str, body: bool = False) -> Any:
    def register(function: Any) -> Any:
        VERBS[name] = (function, body)
        return function

    return register


# store: content by digest ------------------------------------------------------------------------------------------


def entry_path(entry: dict[str, Any], name: str = "path") -> bytes:
    """The bytes of a path that the other side names. Refusal unless it is relative and stays below where it starts."""
    path = any_path(entry, name)
    if len(path) > 4096 or any(part in (b"", b".", b"..") or len(part) > 255 for part in path.split(b"/")):
        bad(f"an unsafe path: {path[:200]!r}")
    return path


def any_path(entry: dict[str, Any], name: str) -> bytes:
    encoded = entry.get(name + "_b64")
    try:
        if encoded is not None:
            import base64

            path = base64.b64decode(encoded, validate=True)
        else:
            path = entry.get(name).encode("utf-8")
    except (ValueError, TypeError, AttributeError):
        bad(f"{name} is not a path")
    if b"\0" in path or not path:
        bad(f"{name} is not a path")
    return path


# A file whose name has nothing odd in it, as nearly all have: no escapes, no part that starts with a dot.
PLAIN_FILE = re.compile(
    rb'\{"mode":(?:0|[1-9][0-9]{0,3}),"path":"((?:[\w@+-][\w@+. =,-]{0,99}/){0,30}[\w@+-][\w@+. =,-]{0,99})"'
    rb',"sha256":"[0-9a-f]{64}","size":(?:0|[1-9][0-9]{0,14})\}\Z'
)


def check_manifest(data: bytes) -> None:
    """Refuse what could not be unpacked into a folder of its own."""
    last, files = b"", 0
    if data and not data.endswith(b"\n"):
        bad("the manifest ends in the middle of a line")
    for line in data.splitlines():
        plain = PLAIN_FILE.match(line)
        entry = {} if plain else parse_lines(line + b"\n")[0]
        path = plain.group(1) if plain else entry_path(entry)
        if path <= last:
            bad(f"the manifest is not sorted at {path[:200]!r}")
        last = path
        if plain:
            files += 1
        elif "link" in entry:
            target = os.path.normpath(os.path.join(os.path.dirname(path), any_path(entry, "link")))
            if target.startswith((b"/", b"../")) or target == b"..":
                bad(f"a link that leaves the directory: {path[:200]!r}")
        elif entry.get("dir") is not True:
            files += 1
            text(entry.get("sha256"), DIGEST, "sha256")
            whole(entry.get("size"), "size")
            whole(entry.get("mode"), "mode", 0, 0o7777)
    if files != len(BLOB_IN_MANIFEST.findall(data)):
        bad("the manifest is not in canonical form")


def missing_blobs(project: Project, manifest: bytes) -> list[tuple[str, int]]:
    """What the store lacks. A wrong size counts as missing: it is all that a crash can leave (see store_small)."""
    missing, store, stat_of = [], os.fsencode(project.store), os.stat
    for digest, size in set(BLOB_IN_MANIFEST.findall(manifest)):
        try:
            if stat_of(store + digest[:2] + b"/" + digest).st_size == int(size):
                continue
        except OSError:
            pass
        missing.append((digest.decode(), int(size)))
    return sorted(missing)


def read_file(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


@verb("have")
def have(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    manifest = read_file(project.tree(text(args.get("tree"), DIGEST, "tree")))
    return {"known": manifest is not None and not missing_blobs(project, manifest)}


@verb("offer", body=True)
def offer(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    digest = text(args.get("tree"), DIGEST, "tree")
    manifest = server.connection.body_bytes()
    found = hashlib.sha256(manifest).hexdigest()
    if found != digest:
        raise Refusal("hash_mismatch", "the manifest is not the one it is named after", found=found)
    check_manifest(manifest)
    project.make()
    server.busy(project)
    write_atomic(project.tree(digest) + ".offered", manifest, sync=False)
    missing = missing_blobs(project, manifest)
    cut_off = set(os.listdir(project.file("incoming")))
    lines = []
    for blob, size in missing:
        have_bytes = received(project, blob, size) if blob in cut_off else 0
        lines.append(f'{{"have_bytes":{have_bytes},"sha256":"{blob}","size":{size}}}\n')
    server.connection.send_bytes("".join(lines).encode())
    return {"missing": len(missing)}


def received(project: Project, digest: str, size: int) -> int:
    """How much of a blob came before the transfer was cut."""
    try:
        have_bytes = os.lstat(project.file("incoming/" + digest)).st_size
    except OSError:
        return 0
    return have_bytes if have_bytes <= size else 0


@verb("seal")
def seal(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    path = project.tree(text(args.get("tree"), DIGEST, "tree"))
    manifest = read_file(path + ".offered")
    if manifest is None:
        manifest = read_file(path)
    if manifest is None:
        raise Refusal("tree_unknown", "this directory was never offered")
    missing = missing_blobs(project, manifest)
    if missing:
        raise Refusal("blobs_missing", f"{len(missing)} files are missing", first=[d for d, _ in missing[:20]])
    try:
        os.rename(path + ".offered", path)
    except FileNotFoundError:
        pass  # sealed before, or by another connection a moment ago
    return {"known": True}


@verb("put", body=True)
def put(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    project.make()
    blobs = total = 0
    part: PartialBlob | None = None
    try:
        for header, data in server.connection.body():
            if "blobs" in header:
                server.busy(project)
                blobs += store_batch(project, header["blobs"], memoryview(data))
                total += len(data)
                continue
            digest = text(header.get("sha256"), DIGEST, "sha256")
            size, offset = whole(header.get("size"), "size"), whole(header.get("offset"), "offset")
            server.busy(project)
            total += len(data)
            if part is None and offset == 0 and len(data) == size:
                store_small(project, digest, data)
                blobs += 1
                continue
            if part is None or part.digest != digest:
                if part is not None:
                    part.close()
                part = PartialBlob(project, digest, size, offset)
            part.append(offset, data)
            if part.at == size:
                part.finish()
                part = None
                blobs += 1
    finally:
        if part is not None:
            part.close()
    return {"blobs": blobs, "bytes": total}


def store_batch(project: Project, blobs: Any, data: memoryview) -> int:
    """Several whole blobs in one frame: a header for each of many small files costs more than the files."""
    if type(blobs) is not list or not all(type(blob) is list and len(blob) == 2 for blob in blobs):
        bad("blobs is not a list of [sha256, size]")
    at = 0
    for digest, size in blobs:
        end = at + whole(size, "size", high=MAX_DATA)
        if end > len(data):
            bad("blobs are larger than their frame")
        store_small(project, text(digest, DIGEST, "sha256"), data[at:end])
        at = end
    if at != len(data):
        bad("blobs are smaller than their frame")
    return len(blobs)


def store_small(project: Project, digest: str, data: bytes | memoryview) -> None:
    """Verify in memory, then write under the final name at once: a rename for each of many small files would add half.

    Killed half-way this leaves a file that is too short, never one with wrong bytes: a wrong size counts as missing.
    After a power failure the size may be right and the bytes not: a job hashes what it copies and drops a bad blob.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise Refusal("hash_mismatch", "a file arrived changed", sha256=digest, found=found)
    path = project.blob(digest)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return store_small(project, digest, data)
    except FileExistsError:
        if os.stat(path).st_size != len(data):
            write_atomic(path, data, sync=False)
        return
    try:
        write_all(fd, data)
    except BaseException:
        remove(path)
        raise
    finally:
        os.close(fd)


class PartialBlob:
    """A blob that comes in several frames. What was received stays in `incoming` when the transfer is cut."""

    def __init__(self, project: Project, digest: str, size: int, offset: int):
        self.project, self.digest, self.size, self.at = project, digest, size, offset
        self.path = project.file("incoming/" + digest)
        self.fd = self._open(offset)
        try:
            if not stat.S_ISREG(os.fstat(self.fd).st_mode) or os.fstat(self.fd).st_size < offset:
                bad(f"offset {offset} is beyond what is here")
            os.ftruncate(self.fd, offset)
            self.hash = hashlib.sha256()
            for block in read_blocks(self.fd):
                self.hash.update(block)
        except BaseException:
            os.close(self.fd)
            raise

    def _open(self, offset: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        while True:
            fd = os.open(self.path, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # It may have been finished and moved to the store between our open and our lock.
                if os.path.exists(self.path) and os.path.samestat(os.fstat(fd), os.lstat(self.path)):
                    return fd
                os.close(fd)
            except OSError as exc:
                os.close(fd)
                if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if offset:
                    raise Refusal("busy", f"another connection is sending {self.digest}") from None
                # Two submissions send the same new file: each into a file of its own, the last rename wins.
                self.path = self.project.file(f"incoming/{self.digest}.{os.getpid()}")

    def append(self, offset: int, data: bytes) -> None:
        if offset != self.at or offset + len(data) > self.size:
            bad(f"offset {offset} where {self.at} was expected")
        write_all(self.fd, data)
        self.hash.update(data)
        self.at += len(data)

    def finish(self) -> None:
        found = self.hash.hexdigest()
        if found != self.digest:
            remove(self.path)
            self.close()
            raise Refusal("hash_mismatch", "a file arrived changed", sha256=self.digest, found=found)
        move_to_store(self.project, self.path, self.digest)
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if not self.path.endswith(self.digest):
                remove(self.path)


def move_to_store(project: Project, path: str, digest: str) -> None:
    target = project.blob(digest)
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    os.rename(path, target)


def read_blocks(fd: int) -> Iterator[memoryview]:
    """From where the descriptor stands to the end, through one buffer."""
    buffer = memoryview(bytearray(BLOCK))
    while True:
        count = os.readv(fd, [buffer])
        if not count:
            return
        yield buffer[:count]


def hash_descriptor(fd: int) -> str:
    digest = hashlib.sha256()
    for block in read_blocks(fd):
        digest.update(block)
    return digest.hexdigest()


@verb("incoming")
def incoming(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    project.make()
    server.busy(project)
    follow = args.get("follow", [])
    if type(follow) is not list:
        bad("follow is not a list")
    digests = [text(digest, DIGEST, "follow") for digest in follow]
    if server.growing is not None:
        server.growing.finish()
        server.growing.close()
    server.growing = Growing(project, digests) if digests else None
    return {"path": project.file("incoming")}


class Growing:
    """Hashes blobs while rsync writes them, so that `admit` has only the last bytes left.

    rsync writes a new file from start to end. Where it did not, `admit` sees a wrong digest and hashes all of it again.
    """

    def __init__(self, project: Project, digests: list[str]):
        import threading

        self.folder, self.digests = project.file("incoming/"), digests
        self.held: dict[str, tuple[int, Any]] = {}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def finish(self) -> None:
        self.ended.set()
        self.thread.join()

    def digest(self, name: str, fd: int) -> str | None:
        """Of the file that `fd` has open; None when it is not the one that was followed. Only after `finish`."""
        held = self.held.get(name)
        if held is None or not os.path.samestat(os.fstat(held[0]), os.fstat(fd)):
            return None
        self._advance(name)
        return held[1].hexdigest()

    def close(self) -> None:
        for fd, _ in self.held.values():
            os.close(fd)
        self.held = {}

    def _follow(self) -> None:
        while not self.ended.is_set():
            moved = [self._advance(name) for name in self.digests]
            if not any(moved):
                self.ended.wait(0.02)

    def _advance(self, name: str) -> bool:
        if name not in self.held:
            try:
                fd = os.open(self.folder + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                return False
            self.held[name] = fd, hashlib.sha256()
        fd, digest = self.held[name]
        moved = False
        try:
            while True:
                block = os.read(fd, BLOCK)
                if not block:
                    break
                digest.update(block)
                moved = True
        except OSError:
            pass  # not a file, or the disk fails: `admit` finds out
        return moved


@verb("admit", body=True)
def admit(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    wanted = []
    for entry in server.connection.body_lines():
        wanted.append((text(entry.get("sha256"), DIGEST, "sha256"), whole(entry.get("size"), "size")))
    server.busy(project)
    growing, server.growing = server.growing, None
    if growing is not None:
        growing.finish()

    def one(blob: tuple[str, int]) -> dict[str, Any] | None:
        return admit_one(project, *blob, growing)

    if len(wanted) > 1 and sum(size for _, size in wanted) > 64 << 20:
        from concurrent.futures import ThreadPoolExecutor  # hashing lets go of the interpreter lock

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            answers = list(pool.map(one, wanted))
    else:
        answers = [one(blob) for blob in wanted]
    if growing is not None:
        growing.close()
    failed = [answer for answer in answers if answer is not None]
    return {"admitted": len(wanted) - len(failed), "failed": failed[:200], "failed_count": len(failed)}


def admit_one(project: Project, digest: str, size: int, growing: Growing | None) -> dict[str, Any] | None:
    """None when the blob is in the store now, else what is wrong. What is wrong is removed, so that it comes anew."""
    path = project.file("incoming/" + digest)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno == errno.ENOENT and not missing_blobs(
            project, b'"sha256":"%s","size":%d' % (digest.encode(), size)
        ):
            return None
        remove(path)
        return {"sha256": digest, "found": None}
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            found = None
        else:
            found = growing.digest(digest, fd) if growing is not None else None
            if found != digest:
                found = hash_descriptor(fd)
        if found == digest and os.fstat(fd).st_size == size:
            os.fchmod(fd, 0o600)
            move_to_store(project, path, digest)
            return None
    finally:
        os.close(fd)
    remove(path)
    return {"sha256": digest, "found": found}


# jobs --------------------------------------------------------------------------------------------------------------


@verb("start")
def start(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    spec, env, secrets = check_start(args)
    job = project.job(spec["id"])
    project.make()
    if not job.exists():
        if not os.path.exists(project.tree(spec["tree"])):
            raise Refusal("tree_unknown", "the directory of this job is not on the machine")
        folder = prepare_job_folder(project, spec, sorted(env), secrets)
        try:
            with SessionLock(project):
                session = read_session(project)
                if session is not None and (session.get("expired_at") or deadline_passed(session)):
                    raise Refusal("session_expired", "the session of this machine has ended")
                project.touch_activity()
                os.rename(folder, job.path)  # from here on the watcher sees a job
        except FileExistsError:
            remove_tree(folder)
        except OSError as exc:
            remove_tree(folder)
            if exc.errno != errno.ENOTEMPTY:
                raise
        except BaseException:
            remove_tree(folder)
            raise
        sync_folder(os.path.dirname(job.path))
    known = read_json(job.file("job.json")) or {}
    if known.get("nonce") != spec["nonce"]:
        raise Refusal("job_exists", f"{job.name} is another job on this machine")
    # A connection that died here left a folder and no supervisor: whoever asks again starts it; the lock admits one.
    if not os.path.exists(job.file("state.json")) and not job.ended():
        wire = dumps({"job": spec, "env": env, "secret": secrets, "umask": server.umask}).encode()
        if job.is_service():
            write_atomic(job.file(WIRE), wire)
        said = spawn("supervise", project, job.name, wire, errors=job.file("supervisor.err"), wait_s=10)
        if said == "gone" and not os.path.exists(job.file("state.json")):
            reason = (read_file(job.file("supervisor.err")) or b"").decode("utf-8", "replace")[-300:]
            close_job(job, {}, ending("failed", 1, "runner_error", "it did not start: " + reason), time.time(), [])
    if job.is_service():
        write_boot_script(server.root, read_session(project))
    return job_status(job)


def check_start(args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    spec, env = args.get("job"), args.get("env", {})
    if type(spec) is not dict or type(env) is not dict:
        bad("job and env are objects")
    progress = spec.get("progress") or {}
    if type(progress) is not dict:
        bad("progress is an object")
    checked = {
        "id": text(spec.get("id"), WORK_ID, "job.id"),
        "service": check_service(spec),
        "nonce": text(spec.get("nonce"), NONCE, "job.nonce"),
        "tree": text(spec.get("tree"), DIGEST, "job.tree"),
        "run": command_line(spec.get("run"), "run"),
        "setup": command_line(spec["setup"], "setup") if spec.get("setup") else None,
        "timeout_s": seconds(spec["timeout_s"], "timeout_s") if spec.get("timeout_s") is not None else None,
        "expect": names(spec.get("expect"), "expect"),
        "label": spec.get("label") if type(spec.get("label")) is str else None,
        "log_cap_bytes": max(BLOCK, whole(spec.get("log_cap_bytes") or LOG_CAP, "log_cap_bytes")),
        "progress": {
            "unit": progress.get("unit") if type(progress.get("unit")) is str else None,
            "stall_s": seconds(progress["stall_s"], "stall_s") if progress.get("stall_s") else None,
            "on_stall": "cancel" if progress.get("on_stall") == "cancel" else "event",
        },
        "download_stall_s": seconds(spec.get("download_stall_s") or DOWNLOAD_STALL_S, "download_stall_s"),
    }
    if checked["service"] is not None and (spec.get("secret") or args.get("secret")):
        bad("a service has no secrets: what starts it is kept on the machine")
    for name, value in env.items():
        text(name, ENV_NAME, "a name in env")
        try:
            if type(value) is not str or b"\0" in os.fsencode(value):
                bad(f"env {name} is not text")
        except UnicodeEncodeError:
            bad(f"env {name} is not text")
    return checked, env, sorted(set(names(spec.get("secret"), "secret") + names(args.get("secret"), "secret")))


def check_service(spec: dict[str, Any]) -> dict[str, Any] | None:
    """What makes a job a service: `{port}`. It has the id of a deployment, no end of its own and no set-up."""
    wanted = spec.get("service")
    if (wanted is None) != (SERVICE_ID.match(str(spec.get("id"))) is None):
        bad("a service, and nothing else, has the id of a deployment")
    if wanted is None:
        return None
    if type(wanted) is not dict:
        bad("service is not an object")
    if spec.get("setup") or spec.get("timeout_s") is not None or spec.get("expect"):
        bad("a service has no setup, timeout or expected outputs")
    return {"port": whole(wanted.get("port"), "service.port", 1, 65535)}


def command_line(value: Any, what: str) -> str:
    if type(value) is not str or not value.strip() or "\0" in value:
        bad(f"{what} is not a command")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        bad(f"{what} is not text")
    return value


def names(value: Any, what: str) -> list[str]:
    if value is None:
        return []
    if type(value) is not list or len(value) > 1000 or any(type(item) is not str or not item for item in value):
        bad(f"{what} is not a list of names")
    return value


def prepare_job_folder(project: Project, spec: dict[str, Any], env_names: list[str], secrets: list[str]) -> str:
    """The whole folder under a name that nobody reads, so that a job appears complete or not at all."""
    folder = project.file("jobs/.new-{}-{}".format(spec["id"], os.getpid()))
    if os.path.exists(folder):
        remove_tree(folder)
    try:
        for name in ("", "/src", "/outputs", "/log"):
            os.mkdir(folder + name, 0o700)
        record = dict(spec, env_names=env_names, secret=secrets, accepted_at=timestamp(time.time()))
        write_json(folder + "/job.json", record)
        # Space for the end of the job, taken before it can fill the disk.
        reserve(folder + "/reserve", RESERVE_BYTES)
        reserve(folder + "/exit.reserve", 64 << 10)
    except BaseException:
        remove_tree(folder)
        raise
    return folder


def reserve(path: str, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(fd, bytes(size))
    finally:
        os.close(fd)


@verb("status")
def status(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    return statuses(project, [text(name, WORK_ID, "job") for name in names(args.get("jobs"), "jobs")])


@verb("jobs")
def jobs(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    """Every job of the project that has a folder here, whoever started it; `after` is where an answer ended."""
    project = server.project(args)
    after = text(args["after"], JOB_ID, "after") if args.get("after") is not None else ""
    return statuses(project, [name for name in project.job_names() if name > after])


def statuses(project: Project, wanted: list[str]) -> dict[str, Any]:
    """As many as fit into a header, in this order."""
    answers: list[dict[str, Any]] = []
    room, until = MAX_HEADER - 2048, time.monotonic() + SETTLE_WAIT_S
    for name in wanted:
        answer = job_status(project.job(name), until)
        room -= len(dumps(answer)) + 1
        if room < 0:
            break
        answers.append(answer)
    return {"jobs": answers, "left_out": len(wanted) - len(answers)}


STATUS = [
    "job",
    "nonce",
    "state",
    "phase",
    "exit_code",
    "reason",
    "message",
    "started_at",
    "started_epoch_s",
    "ended_at",
    "duration_s",
    "log_bytes",
    "progress",
    "outputs",
    "service",
]


SETTLE_WAIT_S = 3.0


def job_status(job: Job, until: float | None = None) -> dict[str, Any]:
    """What a job is doing, or how it ended. One whose supervisor is gone is settled by a process of its own.

    until: how long (monotonic) to wait for that. It may take longer, after which the job still counts as running.
    """
    answer: dict[str, Any] = dict.fromkeys(STATUS)
    answer.update(job=job.name, state="unknown")
    if not job.exists():
        return answer
    until = time.monotonic() + SETTLE_WAIT_S if until is None else until
    if job.is_suspended():
        answer.update(state="suspended", service=(read_json(job.file("state.json")) or {}).get("service"))
        return answer
    if not job.ended() and not job.supervisor_lives() and not job.ended() and time.monotonic() < until:
        spawn("settle", job.project, job.name)
        while not job.ended() and not (job.is_service() and job.supervisor_lives()) and time.monotonic() < until:
            time.sleep(0.03)
    record = read_json(job.exit_file)
    if not is_ending(record) and job.ended():
        record = ending("lost", None, "runner_error", "the exit record on the machine cannot be read")
    if record is not None:
        answer.update({name: record.get(name) for name in STATUS})
        answer.update(job=job.name, phase=None)
        return answer
    state = read_json(job.file("state.json")) or {}
    known = read_json(job.file("job.json")) or {}
    answer.update(nonce=known.get("nonce"), state="running", phase=state.get("phase", "preparing"))
    answer.update(started_at=state.get("started_at", known.get("accepted_at")), log_bytes=Log(job).total())
    answer.update(started_epoch_s=state.get("started_epoch_s"), service=state.get("service"))
    if state.get("boot_id") == boot_id():
        answer["duration_s"] = round(max(0.0, boot_clock() - state["started_boot_s"]), 3)
        answer["progress"] = progress_now(state.get("progress"), boot_clock())
    return answer


def is_ending(record: dict[str, Any] | None) -> bool:
    """Whether an exit record says how a job ended. The folder is the job's user's as well, who may have written it."""
    if record is None or record.get("state") not in ENDED:
        return False
    code, took_s = record.get("exit_code"), record.get("duration_s", 0)
    return (code is None or type(code) is int) and type(took_s) in (int, float) and took_s >= 0


def progress_now(found: Any, now_boot_s: float) -> dict[str, Any] | None:
    if not isinstance(found, dict):
        return None
    shown = {name: found[name] for name in ("unit", "value", "rate_per_s", "updated_at")}
    return dict(shown, stalled_s=round(max(0.0, now_boot_s - found["increased_boot_s"]), 1))


@verb("cancel")
def cancel(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    job = server.job(args)
    why = text(args.get("why", "user"), SLUG, "why")
    wait_s = seconds(args.get("wait_s", 0), "wait_s", 10)
    if not job.ended():
        write_json(job.file("cancel"), {"why": why, "at": timestamp(time.time())})
    until = time.monotonic() + wait_s
    while not job.ended() and job.supervisor_lives() and time.monotonic() < until:
        time.sleep(0.05)
    return job_status(job)


@verb("forget")
def forget(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    job = project.job(text(args.get("job"), WORK_ID, "job"))
    if job.exists():
        if job_status(job)["state"] not in ENDED:
            raise Refusal("busy", f"job {job.name} is running")
        os.rename(job.path, project.file(f"jobs/.gone-{job.name}-{os.getpid()}"))
    if os.path.isdir(project.file("jobs")):
        for name in os.listdir(project.file("jobs")):  # also what a connection that died here left behind
            if name.startswith(".gone-"):
                remove_tree(project.file("jobs/" + name))
    return {}


@verb("events")
def events(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    job, offset = server.job(args), whole(args.get("offset", 0), "offset")
    data = b""
    try:
        with open(job.file("events.jsonl"), "rb") as file:
            file.seek(offset)
            data = file.read(MAX_DATA)
    except FileNotFoundError:
        pass
    data = data[: data.rfind(b"\n") + 1]  # a line that is being written comes next time
    server.connection.send_bytes(data)
    return {"next": offset + len(data)}


# log: segments named by the offset of their first byte --------------------------------------------------------------


class Log:
    """Reads the segments; the supervisor writes and drops them meanwhile."""

    def __init__(self, job: Job):
        self.folder = job.file("log")

    def segments(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self.folder) if name.isdigit())
        except FileNotFoundError:
            return []

    def path(self, first: int) -> str:
        return f"{self.folder}/{first:020d}"

    def total(self) -> int:
        for _ in range(5):
            segments = self.segments()
            if not segments:
                return 0
            try:
                return segments[-1] + os.stat(self.path(segments[-1])).st_size
            except FileNotFoundError:
                continue
        return segments[-1]

    def read(self, offset: int, limit: int) -> tuple[int, bytes]:
        """Bytes without a gap from `offset` on, or from where the kept ones go on after it."""
        for _ in range(5):
            try:
                return self._read(offset, limit)
            except FileNotFoundError:
                continue  # dropped between our look and our open
        return self._read(self.segments()[-1], limit)

    def _read(self, offset: int, limit: int) -> tuple[int, bytes]:
        at, data = offset, b""
        for first in self.segments():
            size = os.stat(self.path(first)).st_size
            if first + size <= at or len(data) >= limit:
                continue
            if first > at:
                if data:
                    break  # a gap: the next call starts behind it
                at = offset = first
            with open(self.path(first), "rb") as file:
                file.seek(at - first)
                part = file.read(min(limit - len(data), first + size - at))
            data += part
            at += len(part)
        return offset, data


@verb("log")
def log(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    job = server.job(args)
    limit = whole(args.get("max_bytes", MAX_DATA), "max_bytes", 1, MAX_DATA)
    until = time.monotonic() + seconds(args.get("wait_s", 0), "wait_s", 10)
    source = Log(job)
    if args.get("tail_bytes") is not None:
        wanted = max(0, source.total() - whole(args["tail_bytes"], "tail_bytes"))
    else:
        wanted = whole(args.get("offset", 0), "offset")
    pause_s = 0.02
    while True:
        ended = job.ended()  # looked at before the data, so that the end never hides the last lines
        offset, data = source.read(wanted, limit)
        if data or ended or time.monotonic() >= until or not job.supervisor_lives():
            break
        time.sleep(min(pause_s, max(0.0, until - time.monotonic())))
        pause_s = min(0.25, pause_s * 1.5)
    server.connection.send_bytes(data)
    answer = {"offset": offset, "next": offset + len(data), "gap_bytes": offset - wanted, "total": source.total()}
    state = job_status(job)
    if state["state"] != "running" and not ended:  # it ended while we answered: there may be more to read
        state = dict(state, state="running", phase="collecting")
    return dict(answer, status=state)


# outputs -----------------------------------------------------------------------------------------------------------


class Outputs:
    """The files a job has written, hashed. Hashes are remembered by size, times and inode."""

    def __init__(self, job: Job, final: bool):
        self.job, self.final = job, final
        self.base = os.fsencode(job.outputs)
        self.real_base = OutputReader(job).base
        self.remembered = read_json(job.file("hashes.json"), MAX_BODY) or {}
        self.hashes: dict[str, list[Any]] = {}
        self.files: dict[bytes, int] = {}
        self.skipped: list[dict[str, str]] = []
        self.lines: list[tuple[bytes, str]] = []

    def scan(self) -> Outputs:
        ahead = [b""]
        if os.path.islink(self.base):
            ahead = []
            self._skip(b".", "the output directory was replaced by a link")
        while ahead:
            folder = ahead.pop()
            try:
                with os.scandir(os.path.join(self.base, folder)) as found:
                    entries = list(found)
            except OSError as exc:
                self._skip(folder, exc.strerror or "unreadable")
                continue
            if not entries and folder:
                self.lines.append((folder, f'{{"dir":true,{path_fields(folder)}}}\n'))
            for entry in entries:
                path = os.path.join(folder, entry.name)
                try:
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(path)
                    else:
                        self._file(path, entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    pass  # a job removes what it no longer needs
                except OSError as exc:
                    self._skip(path, exc.strerror or "unreadable")
        self.lines.sort()
        if self.hashes != self.remembered:
            try:
                write_json(self.job.file("hashes.json"), self.hashes, sync=False)
            except OSError:
                pass
        return self

    def _skip(self, path: bytes, why: str) -> None:
        self.skipped.append({"path": printable(path.decode("utf-8", "replace")), "why": why})

    def _file(self, path: bytes, found: os.stat_result) -> None:
        real = os.path.join(self.base, path)
        if stat.S_ISLNK(found.st_mode):
            real = os.path.realpath(real)
            if not real.startswith(self.real_base + b"/"):
                return self._skip(path, "link leaves the outputs")
            try:
                found = os.lstat(real)
            except FileNotFoundError:
                return self._skip(path, "broken link")
            if stat.S_ISDIR(found.st_mode):
                return self._skip(path, "link to a directory")
        if not stat.S_ISREG(found.st_mode):
            kinds = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "fifo", stat.S_IFLNK: "broken link"}
            return self._skip(path, kinds.get(stat.S_IFMT(found.st_mode), "device"))
        digest, found = self._hash(path, real, found)
        if digest is None:
            return self._skip(path, "changing")
        self.files[path] = found.st_size
        fields = f'"mode":{found.st_mode & 0o777},{path_fields(path)},"sha256":"{digest}","size":{found.st_size}'
        self.lines.append((path, "{" + fields + "}\n"))

    def _hash(self, path: bytes, real: bytes, found: os.stat_result) -> tuple[str | None, os.stat_result]:
        name = os.fsdecode(path)
        known = self.remembered.get(name)
        if known and known[:4] == fingerprint(found):
            self.hashes[name] = known
            return known[4], found
        for _ in range(2):
            fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    return None, before
                digest = hash_descriptor(fd)
                after = os.fstat(fd)
            finally:
                os.close(fd)
            if fingerprint(before) == fingerprint(after):
                # Changed a moment ago it may change again within the clock's tick: hash it anew next time.
                if time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > 2_000_000_000:
                    self.hashes[name] = [*fingerprint(after), digest]
                return digest, after
        return (digest if self.final else None), after

    def manifest(self) -> bytes:
        return "".join(line for _, line in self.lines).encode("ascii")

    def summary(self) -> dict[str, int]:
        return {"files": len(self.files), "bytes": sum(self.files.values())}

    def skipped_shown(self) -> dict[str, Any]:
        """As many as fit into a header."""
        shown, room = [], 24 << 10
        for item in self.skipped:
            room -= len(dumps(item)) + 1
            if room < 0:
                break
            shown.append(item)
        return {"skipped": shown, "skipped_left_out": len(self.skipped) - len(shown)}


def fingerprint(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def path_fields(path: bytes) -> str:
    try:
        return '"path":' + json_string(path.decode("utf-8"))
    except UnicodeDecodeError:
        import base64

        shown = json_string(path.decode("utf-8", "replace"))
        return f'"path":{shown},"path_b64":"{base64.b64encode(path).decode()}"'


@verb("manifest")
def manifest(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    job = server.job(args)
    server.busy(job.project)
    final = job_status(job)["state"] in ENDED
    kept = read_file(job.file("manifest.jsonl")) if final else None
    record = read_json(job.exit_file) if final else None
    if kept is not None and record and record.get("outputs"):
        server.connection.send_bytes(kept)
        shown = {"skipped": record.get("skipped", []), "skipped_left_out": record.get("skipped_left_out", 0)}
        return dict(record["outputs"], final=True, **shown)
    outputs = Outputs(job, final).scan()
    server.connection.send_bytes(outputs.manifest())
    return dict(outputs.summary(), final=final, **outputs.skipped_shown())


class OutputReader:
    """Opens what the other side names, never outside the outputs: folders may be links, a file may be one inside."""

    def __init__(self, job: Job):
        # Only what is above it may be a link: the folder itself is never followed to somewhere else.
        above, name = os.path.split(os.fsencode(job.outputs))
        self.base = os.path.join(os.path.realpath(above), name)
        self.is_folder = not os.path.islink(self.base)
        self.folders: dict[bytes, bytes] = {}

    def real_path(self, path: bytes) -> bytes | None:
        folder, name = os.path.split(path)
        if folder not in self.folders:
            self.folders[folder] = os.path.realpath(os.path.join(self.base, folder)) if folder else self.base
        real = os.path.join(self.folders[folder], name)
        if os.path.islink(real):
            real = os.path.realpath(real)
        return real if self.is_folder and real.startswith(self.base + b"/") else None

    def open(self, path: bytes) -> int | None:
        real = self.real_path(path)
        if real is None:
            return None
        try:
            fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return None
        return fd


@verb("get", body=True)
def get(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    job = server.job(args)
    wanted = []
    for entry in server.connection.body_lines():
        wanted.append((whole(entry.get("i"), "i"), entry_path(entry), whole(entry.get("offset", 0), "offset")))
    reader = OutputReader(job)
    batch = Batch(server.connection)
    files = total = 0
    for number, path, offset in wanted:
        fd = reader.open(path)
        if fd is None:
            batch.flush()
            server.connection.send({"i": number, "n": 0, "last": True, "error": "vanished"})
            continue
        try:
            small = read_small(fd) if args.get("batch") is True and not offset else None
            if small is not None:
                server.busy(job.project)
                batch.add(number, small)
                total += len(small)
            else:
                batch.flush()
                total += send_file(server, job.project, fd, number, offset)
            files += 1
        finally:
            os.close(fd)
    batch.flush()
    return {"files": files, "bytes": total}


class Batch:
    """Whole small files in one frame, as long as their numbers follow each other."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.first, self.parts, self.held = 0, [], 0

    def add(self, number: int, data: bytes) -> None:
        if self.parts and (number != self.first + len(self.parts) or len(self.parts) == 4000 or self.held > BLOCK):
            self.flush()
        if not self.parts:
            self.first = number
        self.parts.append(data)
        self.held += len(data)

    def flush(self) -> None:
        if self.parts:
            sizes = [len(part) for part in self.parts]
            self.connection.send({"i": self.first, "sizes": sizes, "n": self.held}, b"".join(self.parts))
            self.parts, self.held = [], 0


def read_small(fd: int) -> bytes | None:
    """All of a file of at most 256 KiB, else None with the descriptor at the start again."""
    try:
        data = os.read(fd, SMALL + 1)
        if len(data) > SMALL:
            os.lseek(fd, 0, os.SEEK_SET)
            return None
        return data
    except OSError:
        return None


def send_file(server: Server, project: Project, fd: int, number: int, offset: int) -> int:
    """A file that grows meanwhile is sent up to the size it had."""
    left = max(0, os.fstat(fd).st_size - offset)
    if offset:
        os.lseek(fd, offset, os.SEEK_SET)
    sent = 0
    while True:
        try:
            data = os.read(fd, min(left, MAX_DATA)) if left else b""
        except OSError:
            server.connection.send({"i": number, "n": 0, "last": True, "error": "unreadable"})
            return sent
        left = left - len(data) if data else 0
        sent += len(data)
        server.busy(project)
        server.connection.send({"i": number, "n": len(data), "last": not left}, data)
        if not left:
            return sent


@verb("stage", body=True)
def stage(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    job = server.job(args)
    reader = OutputReader(job)
    links = []
    for entry in server.connection.body_lines():
        links.append((whole(entry.get("i"), "i"), reader.real_path(entry_path(entry))))
    server.busy(job.project)
    folder = job.file("stage")
    if os.path.lexists(folder):
        remove_tree(folder)
    os.mkdir(folder, 0o700)
    for number, real in links:
        if real is not None:
            os.symlink(real, os.path.join(os.fsencode(folder), b"%d" % number))
    return {"path": folder}


# Signed addresses are keys: they come in a body, are kept nowhere, and no answer repeats one.
EXPORT_TIMEOUT_S = 120.0  # of the store's silence


@verb("export", body=True)
def export(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    job = server.job(args)
    wanted = []
    for entry in server.connection.body_lines():
        span = whole(entry.get("offset", 0), "offset"), whole(entry.get("bytes"), "bytes")
        wanted.append((whole(entry.get("i"), "i"), entry_path(entry), span, signed_request(entry)))
    reader = OutputReader(job)
    sent = 0
    for number, path, (offset, size), request in wanted:
        fd = reader.open(path)
        if fd is None:
            told = {"error": "vanished"}
        else:
            try:
                told = put_piece(fd, offset, size, request, lambda: server.busy(job.project))
            finally:
                os.close(fd)
        sent += "etag" in told
        server.connection.send(dict(told, i=number, n=0))
        server.connection.flush()
    return {"sent": sent}


def signed_request(entry: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """(address in parts, headers) of one PUT; over TLS, or to this very machine."""
    from urllib.parse import urlsplit

    headers = entry.get("headers", {})
    if not isinstance(headers, dict) or any(not isinstance(v, str) or "\r" in v or "\n" in v for v in headers.values()):
        bad("headers are not texts")
    try:
        address = urlsplit(entry.get("url"))
        host, _ = address.hostname, address.port
    except (ValueError, TypeError, AttributeError):
        bad("url is no address")
    is_here = address.scheme == "http" and host in ("127.0.0.1", "::1", "localhost")
    if not isinstance(host, str) or not (address.scheme == "https" or is_here):
        bad("url is no address that something may be sent to")
    return address, headers


def put_piece(
    fd: int, offset: int, size: int, request: tuple[Any, dict[str, str]], look: Callable[[], None]
) -> dict[str, Any]:
    """PUT some bytes of a file; the ETag, or what went wrong."""

    def blocks() -> Iterator[bytes]:
        at = offset
        while at < offset + size:
            data = os.pread(fd, min(BLOCK, offset + size - at), at)
            if not data:
                return
            at += len(data)
            yield data

    return put_bytes(request, size, blocks(), look)


def put_bytes(
    request: tuple[Any, dict[str, str]], size: int, blocks: Iterable[bytes], look: Callable[[], None]
) -> dict[str, Any]:
    """PUT `size` bytes; the ETag, or what went wrong. No redirect is followed and no proxy asked."""
    import http.client

    address, headers = request
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname, address.port, timeout=EXPORT_TIMEOUT_S)
    try:
        connection.putrequest("PUT", (address.path or "/") + "?" + address.query, skip_accept_encoding=True)
        for name, value in dict(headers, **{"Content-Length": str(size)}).items():
            connection.putheader(name, value)
        connection.endheaders()
        left = size
        for data in blocks:
            connection.send(data)
            left -= len(data)
            look()
        if left:
            return {"error": "changed"}
        answer = connection.getresponse()
        said = answer.read(2000)
        if answer.status != 200:
            code = re.search(rb"<Code>(\w{1,60})</Code>", said)
            return {"error": "refused", "status": answer.status, "reason": code.group(1).decode() if code else ""}
        return {"etag": printable(answer.getheader("ETag") or "")[:200]}
    except (OSError, http.client.HTTPException, ValueError) as exc:
        reason = getattr(exc, "strerror", None)
        return {"error": "unreachable", "reason": printable(reason if isinstance(reason, str) else type(exc).__name__)}
    finally:
        connection.close()


# What a session's end sends away when nobody came for it. The addresses lie beside the job, 0600, each for one object.
MAX_SLOTS = 256
SLOT_BYTES = 64 << 20  # more where there are not enough slots
LARGEST_PUT = 4 << 30  # a store takes 5 GiB at once
HOMES_LIMIT_S = 3600.0  # the machine bills meanwhile


@verb("home", body=True)
def home(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    job = server.job(args)
    slots = server.connection.body_lines()
    for slot in slots:
        signed_request(slot)
    if not slots:
        remove(job.file("home.json"))
    elif 2 <= len(slots) <= MAX_SLOTS:
        kept = [{"url": slot["url"], "headers": slot.get("headers", {})} for slot in slots]
        write_json(job.file("home.json"), {"slots": kept})
    else:
        bad("slots are two or more")
    return {"slots": len(slots)}


def send_home(project: Project) -> None:
    """Send what each ended job left to the addresses it was given, once, whatever comes of it."""
    until = time.monotonic() + HOMES_LIMIT_S
    for name in project.job_names():
        job = project.job(name)
        kept = read_json(job.file("home.json"))
        if kept is None or not job.ended() or time.monotonic() > until:
            continue
        try:
            told = send_job_home(job, kept["slots"], until)
        except (OSError, Refusal, LookupError, TypeError, ValueError) as exc:
            told = {"error": type(exc).__name__}
        facts = {fact: told[fact] for fact in ("files", "bytes", "error", "status", "reason") if fact in told}
        event = "outputs_not_sent" if "error" in told else "outputs_sent"
        append_event(project.file("events.jsonl"), event, job=name, **facts)
        remove(job.file("home.json"))


def send_job_home(job: Job, slots: list[dict[str, Any]], until: float) -> dict[str, Any]:
    """All outputs as one stream, cut to fill the slots in order; into the last one the manifest, once all are there."""
    listed = read_file(job.file("manifest.jsonl"))
    if listed is None:
        return {"error": "no manifest"}
    *pieces, last = [signed_request(slot) for slot in slots]
    entries = [entry for entry in parse_lines(listed) if "sha256" in entry]
    total = sum(whole(entry.get("size"), "size") for entry in entries)
    at_once = max(SLOT_BYTES, -(-total // len(pieces)))
    if at_once > LARGEST_PUT:
        return {"error": "too large"}

    def look() -> None:
        if time.monotonic() > until:
            raise TimeoutError(errno.ETIMEDOUT, "no time left")

    stream = Joined(OutputReader(job), entries)
    left = total
    for request in pieces:
        if left:
            told = put_bytes(request, min(at_once, left), stream.take(min(at_once, left)), look)
            if "etag" not in told:
                return told
            left -= min(at_once, left)
    told = put_bytes(last, len(listed), [listed], look)
    return told if "error" in told else {"files": len(entries), "bytes": total}


class Joined:
    """The contents of files one behind the other; it ends early where one is shorter than listed, or gone."""

    def __init__(self, reader: OutputReader, entries: list[dict[str, Any]]):
        self.blocks = self._blocks(reader, entries)
        self.rest = b""

    def take(self, size: int) -> Iterator[bytes]:
        while size:
            data = self.rest or next(self.blocks, b"")
            if not data:
                return
            piece, self.rest = data[:size], data[size:]
            size -= len(piece)
            yield piece

    @staticmethod
    def _blocks(reader: OutputReader, entries: list[dict[str, Any]]) -> Iterator[bytes]:
        for entry in entries:
            left = entry["size"]
            fd = reader.open(entry_path(entry))
            if fd is None:
                return
            try:
                while left:
                    data = os.read(fd, min(BLOCK, left))
                    if not data:
                        return
                    left -= len(data)
                    yield data
            finally:
                os.close(fd)


# session -----------------------------------------------------------------------------------------------------------


def read_session(project: Project) -> dict[str, Any] | None:
    return read_json(project.file("session.json"))


def deadline_passed(session: dict[str, Any]) -> bool:
    return deadline_in_s(session) <= 0


def deadline_in_s(session: dict[str, Any]) -> float:
    """Wall clock or boot clock, whichever is first: setting the one back does not give more time."""
    left = [float("inf")]
    if isinstance(session.get("deadline_epoch_s"), (int, float)):
        left.append(session["deadline_epoch_s"] - time.time())
        if session.get("boot_id") == boot_id():
            left.append(session["deadline_boot_s"] - boot_clock())
    return min(left)


@verb("session")
def session(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    project = server.project(args)
    wanted = args.get("session")
    if wanted is not None:
        if type(wanted) is not dict:
            bad("session is not an object")
        open_session(project, wanted)
    elif args.get("end") is True and read_session(project) is not None:
        with SessionLock(project):
            expire_session(project, "ended", action_done=True)
    current = read_session(project)
    ensure_watcher(project, wait_s=5.0 if wanted is not None else 0.0)
    shown = None
    if current is not None:
        fields = "id started_at deadline_at deadline_reason idle_timeout_s held_until expired_at expired_why"
        shown = {name: current.get(name) for name in fields.split()}
    return {"session": shown, "watcher": is_locked(project.file("watch.lock")), "events": last_events(project)}


def open_session(project: Project, wanted: dict[str, Any]) -> None:
    """The same id again moves deadline and idle timeout; an expired one stays expired; another id is a new session.

    held_s: so long from now idleness ends nothing, 0: a hold is over; without it a hold stays as it is.
    """
    name = text(wanted.get("id"), NONCE, "session.id")
    limit_s, idle_s = wanted.get("deadline_in_s"), wanted.get("idle_timeout_s")
    limit_s = seconds(limit_s, "deadline_in_s") if limit_s is not None else None
    idle_s = seconds(idle_s, "idle_timeout_s") if idle_s is not None else None
    held_s = seconds(wanted["held_s"], "held_s") if wanted.get("held_s") is not None else None
    if idle_s == 0:
        bad("idle_timeout_s is 0: for no idle stop it is null")
    reason = text(wanted.get("deadline_reason") or "max_lifetime", SLUG, "deadline_reason")
    action = wanted.get("on_expiry") or "record"
    if action not in ACTIONS:
        bad("on_expiry is one of: " + ", ".join(sorted(ACTIONS)))
    intent = text(wanted.get("fuse"), INTENT, "session.fuse") if action == "fuse" else None
    project.make()
    with SessionLock(project):
        current = read_session(project)
        now = time.time()
        if current is not None and not current.get("expired_at") and wanted.get("only_if_none") is True:
            return  # two set-ups at once: the first one's session stands, and its deadline with it
        if current is None or current.get("id") != name:
            if current is not None and current.get("fuse"):
                remove(os.path.join(Fuse(project.root, current["fuse"]).folder, "fire"))  # nobody's end any more
            current = {"id": name, "started_at": timestamp(now), "expired_at": None, "expired_why": None}
        elif current.get("expired_at"):
            return
        current.update(deadline_reason=reason, idle_timeout_s=idle_s, on_expiry=action, boot_id=boot_id())
        current.update(fuse=intent)
        if held_s is not None:
            is_held = held_s > 0
            current.update(held_epoch_s=now + held_s, held_until=timestamp(now + held_s) if is_held else None)
        if limit_s is None:
            current.update(deadline_at=None, deadline_epoch_s=None, deadline_boot_s=None)
        else:
            current.update(deadline_at=timestamp(now + limit_s), deadline_epoch_s=now + limit_s)
            current.update(deadline_boot_s=boot_clock() + limit_s)
        write_json(project.file("session.json"), current)
        project.touch_activity()


def expire_session(project: Project, why: str, action_done: bool = False) -> dict[str, Any] | None:
    """Under the session lock."""
    current = read_session(project)
    if current is not None and not current.get("expired_at"):
        current.update(expired_at=timestamp(time.time()), expired_why=why, action_done=action_done)
        write_json(project.file("session.json"), current)
    return current


def change_session(project: Project, name: str, **fields: Any) -> None:
    """Of this session only: another one may have been opened meanwhile."""
    with SessionLock(project):
        current = read_session(project)
        if current is not None and current.get("id") == name:
            write_json(project.file("session.json"), dict(current, **fields))


def last_events(project: Project) -> list[dict[str, Any]]:
    data = read_file(project.file("events.jsonl")) or b""
    found = []
    for line in data[-(32 << 10) :].splitlines()[-20:]:
        try:
            found.append(parse_object(line))
        except ValueError:
            pass
    return found


def needs_watcher(session: dict[str, Any] | None) -> bool:
    if session is None:
        return False
    if session.get("expired_at"):
        return not session.get("action_done")
    return session.get("deadline_epoch_s") is not None or session.get("idle_timeout_s") is not None


def ensure_watcher(project: Project, wait_s: float = 0.0) -> None:
    if needs_watcher(read_session(project)) and not is_locked(project.file("watch.lock")):
        try:
            spawn("watch", project, errors=project.file("watch.err"), wait_s=wait_s)
        except OSError:  # no memory or no disk for it now: the next request tries again
            pass


# fuse --------------------------------------------------------------------------------------------------------------

# What ends the machine's billing when nobody else does is a loop of its own, started with the container (fuse.sh of the
# lifecycle). It and this file talk through a folder beside our root; each file there begins with the intent.
INTENT = re.compile(r"[a-z][0-9a-f]{16}\Z")
BOOT = re.compile(r"[0-9a-f]{1,40}\Z")
FUSE_ALIVE_S = 90.0
FUSE_SLACK_S = 30.0  # what the loop has counted is written down now and then only


class Fuse:
    def __init__(self, root: str, intent: str):
        self.intent = intent
        self.folder = os.path.join(os.path.dirname(root), ".gpu-fuse", intent)

    def words(self, name: str) -> list[str]:
        """What a file of the folder says behind the intent; nothing when it is not there or of another one."""
        try:
            fd = os.open(os.path.join(self.folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return []
        try:
            said = os.read(fd, 200).decode("ascii", "replace").split()
        except OSError:
            return []
        finally:
            os.close(fd)
        return said[1:] if said[:1] == [self.intent] else []

    def write(self, name: str, *words: Any) -> None:
        write_atomic(os.path.join(self.folder, name), " ".join(map(str, (self.intent, *words))).encode() + b"\n")

    def receipt(self) -> dict[str, Any] | None:
        path = os.path.join(self.folder, "receipt.json")
        if os.path.islink(path) or not os.path.isfile(path):
            return None
        found = read_json(path, 2000)
        return found if found is not None and found.get("intent") == self.intent else None

    def boot(self) -> str | None:
        """Changes when the machine was stopped and started, not when its container was restarted."""
        boot = (self.receipt() or {}).get("boot")
        return boot if type(boot) is str and BOOT.match(boot) else None

    def alive(self) -> list[int] | None:
        """Wall time and seconds counted, as the loop last wrote them."""
        said = self.words("alive")
        return [int(word) for word in said[:2]] if len(said) >= 2 and all(map(is_number, said[:2])) else None

    def is_alive(self) -> bool:
        """The process that the loop named is there, and it wrote a moment ago."""
        pid, alive = self.words("pid"), self.alive()
        if len(pid) != 2 or not is_number(pid[0]) or alive is None or abs(time.time() - alive[0]) > FUSE_ALIVE_S:
            return False
        process = find_process(int(pid[0]))
        return process is not None and process.start == pid[1]

    def set_deadline(self, epoch_s: int | None, in_s: float) -> None:
        """The wall clock may be wrong or move: what the loop counts itself bounds it."""
        if epoch_s is None:
            self.write("deadline", "never", 0)
            return
        at, used_s = self.alive() or [0, 0]
        since_s = min(max(time.time() - at, 0.0), 60.0) if at else 0.0
        self.write("deadline", epoch_s, int(used_s + since_s + in_s + FUSE_SLACK_S))


def is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 11


@verb("fuse")
def fuse(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    """Read the receipt; with a deadline, write that first and wait until the loop says that it holds it."""
    here = Fuse(server.root, text(args.get("intent"), INTENT, "intent"))
    wanted = args.get("deadline")
    expected = None
    until = time.monotonic() + seconds(args.get("wait_s", 0), "wait_s", 10)
    if wanted is not None:
        if type(wanted) is not dict:
            bad("deadline is not an object")
        epoch_s = wanted.get("epoch_s")
        if epoch_s is not None:
            whole(epoch_s, "deadline.epoch_s", 1, 9_999_999_999)
        in_s = 0.0 if epoch_s is None else seconds(wanted.get("in_s"), "deadline.in_s")
        if os.path.islink(here.folder) or not os.path.isdir(here.folder):
            raise Refusal("failed", f"no fuse has made its folder {here.folder}")
        here.set_deadline(epoch_s, in_s)
        expected = "never" if epoch_s is None else str(epoch_s)
    while True:
        receipt = here.receipt()
        acknowledged = expected is not None and receipt is not None and receipt.get("deadline") == expected
        if acknowledged or expected is None or time.monotonic() >= until:
            return {"receipt": receipt, "alive": here.is_alive(), "acknowledged": acknowledged, "folder": here.folder}
        time.sleep(0.1)


# probe -------------------------------------------------------------------------------------------------------------


@verb("probe")
def probe(server: Server, args: dict[str, Any]) -> dict[str, Any]:
    import shutil

    system = os.uname()
    rsync = re.search(r"rsync\s+version\s+v?(\d[\w.]*)", run_program(["rsync", "--version"])[1])
    gpus, gpu_error = find_gpus()
    os.makedirs(server.root, mode=0o700, exist_ok=True)
    disk = os.statvfs(server.root)
    return {
        "os": system.sysname,
        "arch": system.machine,
        "hostname": printable(system.nodename)[:255],
        "python": sys.version.split()[0],
        "bash": shutil.which("bash") is not None,
        "rsync": rsync.group(1) if rsync else None,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "ram_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "disk_free_gb": round(disk.f_bavail * disk.f_frsize / 1e9, 1),
        "gpus": gpus,
        "gpu_error": gpu_error,
    }


def find_gpus() -> tuple[list[dict[str, Any]], str | None]:
    fields = "index,name,memory.total,driver_version"
    code, out, error = run_program(["nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader,nounits"], 20)
    if code == 127:
        return [], "nvidia-smi is missing" if os.path.exists("/dev/nvidiactl") else None
    if code != 0:
        lines = (out + "\n" + error).strip().splitlines()
        return [], printable(lines[-1] if lines else f"nvidia-smi: exit code {code}")[:300]
    gpus = []
    for line in out.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[0].isdigit():
            # A GPU that shares the machine's memory answers [N/A].
            vram_mib = int(parts[2]) if parts[2].isdigit() else None
            gpus.append({"index": int(parts[0]), "name": parts[1], "vram_mib": vram_mib, "driver": parts[3]})
    return gpus[:64], None


# the end of a job --------------------------------------------------------------------------------------------------


SESSION_OVER = "session_over"


class Stop(Exception):
    """The job is over before its command is: a limit, a cancel, or inputs that are not what they should be."""

    def __init__(self, state: str, exit_code: int, reason: str, message: str):
        super().__init__(message)
        self.end = ending(state, exit_code, reason, message)


def ending(state: str, exit_code: int | None, reason: str | None, message: str | None) -> dict[str, Any]:
    return {"state": state, "exit_code": exit_code, "reason": reason, "message": message}


def close_job(job: Job, state: dict[str, Any], end: dict[str, Any], ended_epoch_s: float, expect: list[str]) -> None:
    """Manifest first, then the exit record: once that is there the job has ended and its outputs are listed."""
    remove(job.file("reserve"))
    outputs = Outputs(job, final=True).scan()
    if end["state"] == "succeeded":
        missing = missing_outputs(expect, outputs.files)
        if missing:
            message = "exit code 0, but these expected outputs are missing: {}".format(", ".join(missing))
            end = ending("failed", 1, "outputs_missing", message)
    try:
        write_atomic(job.file("manifest.jsonl"), outputs.manifest())
    except OSError as exc:  # it is made again when asked for
        append_event(job.file("events.jsonl"), "manifest_not_written", why=str(exc.strerror))
    known = read_json(job.file("job.json")) or {}
    record = dict(end, job=job.name, nonce=known.get("nonce"), outputs=outputs.summary(), **outputs.skipped_shown())
    record.update(started_at=state.get("started_at", known.get("accepted_at")), ended_at=timestamp(ended_epoch_s))
    record.update(started_epoch_s=state.get("started_epoch_s"), duration_s=state.get("duration_s", 0.0))
    record.update(log_bytes=Log(job).total(), progress=progress_now(state.get("progress"), boot_clock()))
    write_exit(job, record)
    job.project.touch_activity()


def write_exit(job: Job, record: dict[str, Any]) -> None:
    """Into blocks that were taken when the job came, so that no disk is too full for it."""
    path = job.file("exit.reserve")
    until = time.monotonic() + 3600
    while True:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                data = dumps(record).encode() + b"\n"
                write_all(fd, data)
                os.ftruncate(fd, len(data))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(path, job.exit_file)
            return sync_folder(job.path)
        except OSError as exc:  # a copy-on-write filesystem may be too full all the same: wait for space
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or time.monotonic() > until:
                raise
            time.sleep(1)


def missing_outputs(patterns: list[str], files: dict[bytes, int]) -> list[str]:
    """The patterns that no file with content matches. An empty file is what a failed save leaves: it does not count."""
    sizes = {os.fsdecode(path): size for path, size in files.items()}
    missing = []
    for pattern in patterns:
        matcher = glob_matcher(pattern)
        found = [size for path, size in sizes.items() if matcher.match(path)]
        if not any(found):
            missing.append(pattern + (" (0 bytes)" if found else ""))
    return missing


def glob_matcher(pattern: str) -> Any:
    """`*` and `?` stay within a folder, `**` does not; the name of a folder stands for what is in it."""
    pattern = pattern.strip("/")
    while pattern.startswith("./"):
        pattern = pattern[2:]
    found, at = "", 0
    for piece in re.finditer(r"(\*\*/)+|\*\*+|\*|\?|\[!?\]?[^\]/]*\]", pattern):
        found += re.escape(pattern[at : piece.start()])
        token, at = piece.group(), piece.end()
        if token.startswith("["):
            inner = token[1:-1].replace("\\", "\\\\").replace("[", "\\[")
            found += "[^/" + inner[1:] + "]" if inner.startswith("!") else "[" + inner.replace("^", "\\^") + "]"
        else:
            found += {"*": "[^/]*", "?": "[^/]"}.get(token, "(?:.*/)?" if token.endswith("/") else ".*")
    found += re.escape(pattern[at:])
    try:
        return re.compile("(?s:" + found + r")(?:/.*)?\Z", re.S)
    except re.error:  # a range that runs backwards: taken literally
        return re.compile(re.escape(pattern) + r"\Z")


# what happens to a job's output -------------------------------------------------------------------------------------


class LogWriter:
    """Writes the segments: the first bytes and the last ones stay. A full disk costs lines, which are counted."""

    def __init__(self, job: Job, cap: int):
        self.job, self.log = job, Log(job)
        self.head = min(LOG_HEAD, cap // 9)
        self.segment = max(64 << 10, (cap - self.head) // 8)
        self.keep = cap - self.head
        segments = self.log.segments()  # there are some when a service goes on
        self.tail = segments[1:]
        self.total = self.first = self.log.total()
        self.lost = 0
        self.fd = -1
        self.capped = False
        self.retry_at = 0.0

    def write(self, data: bytes) -> None:
        if self.lost:
            if time.monotonic() < self.retry_at:
                self.lost += len(data)
                return
            notice = f"\n[gpu: {self.lost} bytes of log lost: the disk was full]\n".encode()
            if self._write(notice) < len(notice):
                self.lost += len(data)
                return
            append_event(self.job.file("events.jsonl"), "log_lost", bytes=self.lost)
            self.lost = 0
        written = self._write(data)
        self.lost += len(data) - written

    def _write(self, data: bytes) -> int:
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                limit = self.head if not self.tail else self.segment
                if self.fd < 0 or self.total - self.first >= limit:
                    self._next_segment()
                    limit = self.head if not self.tail else self.segment
                count = os.write(self.fd, view[done : done + limit - (self.total - self.first)])
                done += count
                self.total += count
        except OSError:
            self.retry_at = time.monotonic() + 1
        return done

    def _next_segment(self) -> None:
        fd = os.open(self.log.path(self.total), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        if self.fd >= 0:
            os.close(self.fd)
        if self.total:
            self.tail.append(self.total)
        self.fd, self.first = fd, self.total
        while len(self.tail) > 1 and self.total - self.tail[1] >= self.keep:
            remove(self.log.path(self.tail.pop(0)))
            if not self.capped:
                self.capped = True
                append_event(self.job.file("events.jsonl"), "log_capped", head_bytes=self.head, tail_bytes=self.keep)

    def close(self) -> None:
        if self.lost:
            self.retry_at = 0.0
            self.write(b"")
        if self.fd >= 0:
            os.close(self.fd)


class Masker:
    """Replaces secret values by ***, also where one is cut by the border between two reads."""

    def __init__(self, values: Iterable[str]):
        wanted = set()
        for value in values:
            wanted.add(os.fsencode(value))
            if "\n" in value:  # a key file: each of its lines is as good as the whole
                wanted.update(os.fsencode(line.strip()) for line in value.splitlines() if len(line.strip()) >= 16)
        # Masking a short value would eat ordinary words and tell its length.
        self.secrets = sorted((value for value in wanted if len(value) >= 6), key=len, reverse=True)
        self.pattern = re.compile(b"|".join(re.escape(value) for value in self.secrets)) if self.secrets else None
        self.held = b""

    def feed(self, data: bytes) -> bytes:
        if self.pattern is None:
            return data
        data = self.held + data
        hold = self._hold_from(data)
        for match in self.pattern.finditer(data):
            if match.start() < hold < match.end():
                hold = match.start()
                break
        self.held = data[hold:]
        return self.pattern.sub(b"***", data[:hold])

    def _hold_from(self, data: bytes) -> int:
        """Where the end of the data may be the beginning of a secret."""
        hold = len(data)
        for value in self.secrets:
            at = data.find(value[:1], max(0, len(data) - len(value) + 1))
            while 0 <= at < hold:
                if value.startswith(data[at:]):
                    hold = at
                    break
                at = data.find(value[:1], at + 1)
        return hold

    def flush(self) -> bytes:
        held, self.held = self.held, b""
        return self.pattern.sub(b"***", held) if self.pattern else held


class Progress:
    """Finds `progress rows=1200` at the start of a line. Of many in one read only the last counts: a flood is cheap."""

    WORD = b"progress "
    LINE = re.compile(rb"progress ([^\s=]{1,64})=([0-9]{1,15}(?:\.[0-9]{1,9})?)[\s]")

    def __init__(self, unit: str | None):
        self.unit = os.fsencode(unit) if unit else None
        self.rest = b""  # of a line that is not complete yet
        self.line_start = True
        self.value: float | None = None
        self.highest: float | None = None
        self.samples: list[tuple[float, float]] = []
        self.updated_at = ""
        self.increased_boot_s = boot_clock()

    def feed(self, data: bytes) -> None:
        text = self.rest + data
        if self.WORD in text:
            self._search(text)
        end = max(text.rfind(b"\n"), text.rfind(b"\r"))
        line_start = end >= 0 or self.line_start
        rest = text[end + 1 : end + 300]
        self.rest = rest if line_start and len(rest) < 200 and self._may_become_a_line(rest) else b""
        # What was dropped from the current line has to be remembered: what follows it is no start of a line.
        self.line_start = line_start and (bool(self.rest) or not rest)

    def _may_become_a_line(self, rest: bytes) -> bool:
        return self.WORD.startswith(rest[: len(self.WORD)])

    def _search(self, text: bytes) -> None:
        at = len(text)
        for _ in range(1000):
            at = text.rfind(self.WORD, 0, at)
            if at < 0:
                return
            if (at == 0 and self.line_start) or text[at - 1 : at] in (b"\n", b"\r"):
                match = self.LINE.match(text, at)
                if match and self.unit in (None, match.group(1)):
                    return self._found(match.group(1), float(match.group(2)))

    def _found(self, unit: bytes, value: float) -> None:
        now = boot_clock()
        self.unit, self.value, self.updated_at = unit, value, timestamp(time.time())
        if self.highest is None or value > self.highest:
            self.highest, self.increased_boot_s = value, now
        if not self.samples or now - self.samples[-1][0] >= 1:
            self.samples = [sample for sample in self.samples if now - sample[0] < 60] + [(now, value)]

    def record(self) -> dict[str, Any] | None:
        if self.value is None:
            return None
        rate = None
        passed_s = boot_clock() - self.samples[0][0]
        if passed_s >= 1:
            rate = round((self.value - self.samples[0][1]) / passed_s, 6)
        value = int(self.value) if self.value == int(self.value) else self.value
        return {
            "unit": self.unit.decode("utf-8", "replace"),
            "value": value,
            "rate_per_s": rate,
            "updated_at": self.updated_at,
            "increased_boot_s": self.increased_boot_s,
        }


# supervisor: one job, detached --------------------------------------------------------------------------------------


class Supervisor:
    def __init__(self, job: Job, wire: dict[str, Any], again: dict[str, Any] | None = None):
        """again: the last state of a service whose supervisor is gone; its log and its copy of the tree go on."""
        self.job, self.spec, self.umask = job, wire["job"], wire["umask"]
        self.env = self.environment(wire["env"])
        self.masker = Masker(wire["env"].get(name, "") for name in wire["secret"])
        self.progress = Progress(self.spec["progress"]["unit"])
        self.log = LogWriter(job, self.spec["log_cap_bytes"])
        self.tree = JobTree(self.spec["nonce"], {}, os.getpid())
        self.downloads = Downloads(self.tree, self.spec.get("download_stall_s") or DOWNLOAD_STALL_S)
        self.ended: dict[int, int] = {}
        self.terminated = False
        self.next_look = self.next_slow_look = self.stalled_told_at = 0.0
        self.session: dict[str, Any] | None = None
        self.saved: Any = None
        self.started = time.monotonic()
        me = find_process(os.getpid())
        self.state: dict[str, Any] = {
            "pid": os.getpid(),
            "start": me.start if me else None,
            "boot_id": boot_id(),
            "phase": "preparing",
            "started_at": timestamp(time.time()),
            "started_epoch_s": time.time(),
            "started_boot_s": boot_clock(),
            "sessions": {},
            "progress": None,
            "service": None,
        }
        if self.spec.get("service"):
            restarts = whole((again or {}).get("restarts", -1), "restarts", -1) + 1
            self.state["service"] = dict(self.spec["service"], restarts=restarts, last_exit_code=None, up_since=None)
        self.is_copied = again is not None and bool(os.listdir(job.src))

    def environment(self, wanted: dict[str, str]) -> dict[str, str]:
        """The machine's own, from which `spawn` took the traces of our connection and provider credentials."""
        env = dict(os.environ)
        env.update(GPU_JOB_ID=self.job.name, GPU_JOB_DIR=self.job.src, GPU_OUTPUT_DIR=self.job.outputs)
        env.update(GPU_WORKSPACE=self.job.project.file("workspace"), PWD=self.job.src)
        env.update(wanted)
        env[MARKER] = self.spec["nonce"]
        return env

    def run(self) -> None:
        self.open_pipes()
        become_subreaper()
        write_json(self.job.file("state.json"), self.state)
        say_ready("ready")
        end = self.work()
        self.enter("collecting")
        self.end_tree()
        if end["reason"] == SESSION_OVER:
            return self.enter("suspended")
        self.state["duration_s"] = round(time.monotonic() - self.started, 3)
        self.state["progress"] = self.progress.record()
        close_job(self.job, self.state, end, time.time(), self.spec["expect"])

    def work(self) -> dict[str, Any]:
        """Copy, setup, run; how it ended."""
        try:
            if not self.is_copied:
                copy_tree(self.job, self.spec["tree"], self.look)
            if self.state["service"] is not None:
                self.serve()
            for phase in ("setup", "run"):
                if self.spec[phase] is None:
                    continue
                self.enter(phase)
                code = self.set_up() if phase == "setup" else self.execute(self.spec[phase])
                if code != 0:
                    return ending(
                        "failed", code, "setup_failed" if phase == "setup" else "exit_code", self.describe(phase, code)
                    )
            return ending("succeeded", 0, None, None)
        except Stop as stop:
            return stop.end
        except Exception as exc:
            return ending("failed", 1, "runner_error", f"{type(exc).__name__}: {exc}")

    def serve(self) -> NoReturn:
        """The command again and again, until something raises Stop. Whatever is left of one life ends before the next:
        it may hold the port.
        """
        service, pause_s = self.state["service"], 1.0
        while True:
            began = time.monotonic()
            service["up_since"] = timestamp(time.time())
            self.enter("run")
            code = self.execute(self.spec["run"])
            self.end_processes(Ending(self.tree))
            pause_s = 1.0 if time.monotonic() - began >= STEADY_S else pause_s
            service.update(up_since=None, restarts=service["restarts"] + 1, last_exit_code=code)
            self.enter("restarting")
            self.take(f"gpu: {self.describe('run', code)}; it starts again in {pause_s:g} s\n".encode())
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                self.pump(0.1)
                self.reap()
                self.look()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def set_up(self) -> int:
        """The setup command; once more, over plain HTTP, when a download of it stands still. By contract it may run
        twice, and the hub's client goes on from the bytes it has.
        """
        try:
            return self.execute(self.spec["setup"])
        except DownloadStalled:
            self.end_processes(Ending(self.tree))
            self.env[PLAIN_HTTP] = "1"
            append_event(self.job.file("events.jsonl"), "download_restarted", with_env=PLAIN_HTTP)
            self.take(b"gpu: a download stood still; setup starts again over plain HTTP\n")
            return self.execute(self.spec["setup"])

    @staticmethod
    def describe(phase: str, code: int) -> str:
        what = "setup" if phase == "setup" else "the command"
        if code == 128 + signal.SIGKILL:
            return f"{what} was killed (SIGKILL): often the machine ran out of memory"
        if code > 128 and code - 128 in [int(number) for number in signal.Signals]:
            return f"{what} was ended by {signal.Signals(code - 128).name}"
        return f"{what} ended with exit code {code}"

    def enter(self, phase: str) -> None:
        self.state["phase"] = phase
        if phase == "run":
            self.progress.increased_boot_s = boot_clock()
        self.save_state(sync=False)

    def save_state(self, sync: bool) -> None:
        try:
            write_json(self.job.file("state.json"), self.state, sync)
        except OSError:
            pass  # a full disk: what is on it stays true but for phase and progress

    # running

    def open_pipes(self) -> None:
        self.pipe, self.pipe_end = os.pipe()
        os.set_blocking(self.pipe, False)
        try:
            fcntl.fcntl(self.pipe_end, 1031, BLOCK)  # F_SETPIPE_SZ: fewer, larger reads
        except OSError:
            pass
        # A signal, the end of a child above all, has to wake the poll at once.
        self.wake, wake_end = os.pipe()
        for fd in (self.wake, wake_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.poll = select.poll()
        self.poll.register(self.pipe, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)
        self.pipe_open = True

    def on_terminate(self, *_: Any) -> None:
        self.terminated = True

    def execute(self, command: str) -> int:
        pid = self.fork_bash(command)
        process = find_process(pid)
        if process is not None:
            self.tree.sessions[pid] = process.start
            self.state["sessions"][str(pid)] = process.start
            self.save_state(sync=False)
        while pid not in self.ended:
            self.pump(0.2)
            self.reap()
            if pid not in self.ended:
                self.look()
        status = self.ended[pid]
        return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def fork_bash(self, command: str) -> int:
        import shutil

        bash = shutil.which("bash", path=self.env.get("PATH")) or "/bin/bash"
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            os.chdir(self.job.src)
            os.umask(self.umask)
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                try:
                    signal.signal(number, signal.SIG_DFL)
                except OSError:
                    pass  # the C library keeps a few for itself
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (self.pipe_end, 1), (self.pipe_end, 2)):
                os.dup2(source, target)
            prefer_as_victim()
            os.execve(bash, ["bash", "-c", command], self.env)
        except BaseException as exc:
            os.write(2, f"gpu: cannot start bash: {exc}\n".encode("utf-8", "replace"))
        finally:
            os._exit(127)
        return 0

    def pump(self, timeout_s: float) -> bool:
        """Take what the job has printed, at most 1 MiB; wait for it or for a signal."""
        if not self.pipe_open:
            time.sleep(min(timeout_s, 0.02))
            return False
        ready = [fd for fd, _ in self.poll.poll(timeout_s * 1000)]
        if self.wake in ready:
            try:
                os.read(self.wake, 4096)
            except BlockingIOError:
                pass
        if self.pipe not in ready:
            return False
        try:
            data = os.read(self.pipe, BLOCK)
        except BlockingIOError:
            return False
        if not data:
            self.pipe_open = False
            return False
        self.take(self.masker.feed(data))
        return True

    def take(self, data: bytes) -> None:
        self.progress.feed(data)
        self.log.write(data)

    def reap(self) -> None:
        """As subreaper all orphans of the job come to us."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.ended[pid] = status
        except ChildProcessError:
            pass

    def end_processes(self, ending_tree: Ending) -> None:
        """TERM, then KILL, taking what they still print."""
        next_step = 0.0
        while True:
            if time.monotonic() >= next_step:
                if ending_tree.step():
                    break
                next_step = time.monotonic() + 0.05
            self.pump(0.05)
            self.reap()
        self.reap()

    def end_tree(self) -> None:
        os.close(self.pipe_end)
        ending_tree = Ending(self.tree)
        self.end_processes(ending_tree)
        while self.pump(0):  # what was printed last; whoever still holds the pipe is not ours
            pass
        self.take(self.masker.flush())
        self.progress.feed(b"\n")  # the last line may end without
        remove(self.job.file("reserve"))
        self.log.close()
        if ending_tree.left:
            pids = [process.pid for process in ending_tree.left[:20]]
            append_event(self.job.file("events.jsonl"), "processes_left", pids=pids, count=len(ending_tree.left))

    # limits

    def look(self) -> None:
        """Raise Stop when the job has to end. Cheap enough to be called all the time."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + 0.2
        if self.terminated:
            raise Stop("cancelled", 130, "supervisor_terminated", "the supervisor was told to end (SIGTERM)")
        if os.path.exists(self.job.file("cancel")):
            why = (read_json(self.job.file("cancel")) or {}).get("why", "user")
            raise Stop("cancelled", 130, why, "gpu job cancel" if why == "user" else f"cancelled: {why}")
        limit_s = self.spec["timeout_s"]
        if limit_s is not None and now - self.started >= limit_s:
            raise Stop("timeout", 124, "timeout", f"the job's timeout of {limit_s:g} s has passed")
        if now >= self.next_slow_look:
            self.next_slow_look = now + 1
            self.slow_look()

    def slow_look(self) -> None:
        self.session = read_session(self.job.project) or self.session
        is_over = self.session is not None and (bool(self.session.get("expired_at")) or deadline_passed(self.session))
        if self.state["service"] is not None and is_over:
            raise Stop("cancelled", 130, SESSION_OVER, "the session of this machine has ended")
        if self.session is not None and deadline_passed(self.session):
            reason = self.session.get("deadline_reason") or "max_lifetime"
            raise Stop("timeout", 124, reason, f"the session's deadline has passed ({reason})")
        if not HAS_PROC:
            self.tree.members()  # remembers them while they can still be seen
        if self.state["phase"] == "run":
            self.look_for_stall()
        self.look_at_downloads()
        self.state["progress"] = self.progress.record()
        if self.state["progress"] is not None and self.state["progress"]["updated_at"] != self.saved:
            self.saved = self.state["progress"]["updated_at"]
            self.save_state(sync=False)
        else:
            try:
                os.utime(self.job.file("state.json"))  # when it was last alive, should it vanish
            except OSError:
                pass

    def look_for_stall(self) -> None:
        limit_s, since = self.spec["progress"]["stall_s"], self.progress.increased_boot_s
        if limit_s is None or boot_clock() - since < limit_s or self.stalled_told_at == since:
            return
        self.stalled_told_at = since
        unit = self.spec["progress"]["unit"] or "progress"
        shown = {"unit": unit, "value": self.progress.value, "stalled_s": round(boot_clock() - since, 1)}
        append_event(self.job.file("events.jsonl"), "no_progress", **shown)
        if self.spec["progress"]["on_stall"] == "cancel":
            raise Stop("cancelled", 130, "no_progress", f"no new {unit} for {limit_s:g} s")

    def look_at_downloads(self) -> None:
        stalled = self.downloads.look()
        if stalled is None:
            return
        append_event(self.job.file("events.jsonl"), "download_stalled", **stalled)
        if self.state["phase"] == "setup" and self.env.get(PLAIN_HTTP) != "1":
            raise DownloadStalled


class DownloadStalled(Exception):
    """A download of the setup command stands still."""


class Downloads:
    """Notices a download from the Hugging Face hub that stands still: files of the hub's cache that processes of the
    job hold open unfinished, and that together have not grown for `stall_s`. What lies there from an earlier time is
    held open by nobody.
    """

    def __init__(self, tree: JobTree, stall_s: float):
        self.tree, self.stall_s = tree, stall_s
        self.pause_s = min(5.0, stall_s / 4)
        self.next_look = self.grown_at = 0.0
        self.seen: dict[str, tuple[int, int]] = {}
        self.told = False

    def look(self) -> dict[str, Any] | None:
        """What to say of a download that has just been found to stand still; once until something grows again."""
        now = time.monotonic()
        if not HAS_PROC or now < self.next_look:
            return None
        self.next_look = now + self.pause_s
        found = self._unfinished()
        if found != self.seen or not found:
            self.seen, self.grown_at, self.told = found, now, False
        if self.told or now - self.grown_at < self.stall_s:
            return None
        self.told = True
        count, size = len(found), sum(size for size, _ in found.values())
        return {"files": count, "bytes": size, "stalled_s": round(now - self.grown_at, 1)}

    def _unfinished(self) -> dict[str, tuple[int, int]]:
        """Size and blocks of each: a transfer that writes here and there fills blocks without growing the size."""
        found: dict[str, tuple[int, int]] = {}
        for process in self.tree.members():
            folder = f"/proc/{process.pid}/fd"
            try:
                for name in os.listdir(folder):
                    path = os.readlink(folder + "/" + name)
                    if path.endswith(UNFINISHED):
                        status = os.stat(folder + "/" + name)
                        found[path] = (status.st_size, status.st_blocks)
            except OSError:
                continue  # it ended, or is not ours to look at
        return found


def prefer_as_victim() -> None:
    """When memory runs out the job has to go, not its supervisor."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            score = int(file.read())
            file.seek(0)
            file.write(str(min(1000, score + 100)))
    except (OSError, ValueError):
        pass


FICLONE = 0x40049409


def copy_tree(job: Job, tree: str, look: Callable[[], None]) -> None:
    """The job's own copy of its directory, hashed on the way. Links come last: nothing is written through one."""
    manifest = read_file(job.project.tree(tree))
    if manifest is None:
        raise Stop("failed", 1, "inputs_corrupt", "the list of the job's files is gone")
    target = os.fsencode(job.src)
    made = {b""}
    links = []
    clone = True
    for line in manifest.splitlines():
        look()
        entry = parse_object(line)
        path = entry_path(entry)
        folder = path if entry.get("dir") else os.path.dirname(path)
        if folder not in made:
            os.makedirs(os.path.join(target, folder), exist_ok=True)
            made.add(folder)
        if "link" in entry:
            links.append((any_path(entry, "link"), os.path.join(target, path)))
        elif not entry.get("dir"):
            clone = copy_blob(job.project.blob(entry["sha256"]), os.path.join(target, path), entry, clone, look)
    for link, path in links:
        os.symlink(link, path)


def copy_blob(source: str, target: bytes, entry: dict[str, Any], clone: bool, look: Callable[[], None]) -> bool:
    """Returns whether this filesystem shares blocks between copies (tried as long as it works)."""
    digest = hashlib.sha256()
    try:
        read_fd = os.open(source, os.O_RDONLY)
    except FileNotFoundError:
        raise Stop("failed", 1, "inputs_corrupt", "missing in the store: {}".format(entry["path"])) from None
    try:
        write_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if clone and entry["size"] >= 64 << 10:
                try:
                    fcntl.ioctl(write_fd, FICLONE, read_fd)
                    copied = True
                except OSError:
                    copied = clone = False
            else:
                copied = False
            for block in read_blocks(read_fd) if entry["size"] > BLOCK else [os.read(read_fd, BLOCK + 1)]:
                digest.update(block)
                if not copied:
                    write_all(write_fd, block)
                look()
            os.fchmod(write_fd, entry["mode"] & 0o777)
        finally:
            os.close(write_fd)
    finally:
        os.close(read_fd)
    if digest.hexdigest() != entry["sha256"]:
        remove(source)  # so that the next upload sends it again
        message = "{} is not what was sent: SHA-256 {}; run the job again".format(entry["path"], digest.hexdigest())
        raise Stop("failed", 1, "inputs_corrupt", message)
    return clone


def supervise(project: Project, name: str) -> int:
    job = project.job(name)
    try:
        wire = json.loads(sys.stdin.buffer.read())
    except ValueError:
        return 1  # the connection died before it had said what to do
    lock = try_lock(job.file("lock"), wait_s=5)
    if lock is None or job.ended() or os.path.exists(job.file("state.json")):
        say_ready("taken")
        return 0
    Supervisor(job, wire).run()
    return 0


# What starts a service, kept so that it can be started again. There is no secret in it.
WIRE = "wire.json"


def ensure_services(project: Project) -> None:
    """Every service that has no end has a supervisor: the machine may have been started anew since."""
    for name in project.service_names():
        job = project.job(name)
        if not job.ended() and not job.is_suspended() and not job.supervisor_lives():
            try:
                spawn("settle", project, name)
            except OSError:
                pass


def write_boot_script(root: str, session: dict[str, Any] | None) -> None:
    """The fuse is what runs first when a rented machine starts: it runs this, and the services are there again."""
    if session is None or not session.get("fuse"):
        return
    folder, file_name = os.path.split(os.path.abspath(__file__))
    words = ["python3", "-I", "-S", "-c", START_AS_MODULE, folder, file_name[: -len(".py")], "revive", root]
    text = "exec " + " ".join("'" + word.replace("'", "'\\''") + "'" for word in words) + "\n"
    write_atomic(os.path.join(Fuse(root, session["fuse"]).folder, "boot"), text.encode())


def revive(root: str) -> int:
    try:
        names = [name for name in os.listdir(root + "/projects") if PROJECT_ID.match(name)]
    except OSError:
        return 1
    for name in names:
        ensure_services(Project(root, name))
    return 0


def settle(project: Project, name: str) -> int:
    """Write the end of a job whose supervisor is gone, after ending what is left of it. A service goes on instead."""
    job = project.job(name)
    if job.ended() or job.is_suspended() or job.supervisor_lives():
        return 0
    lock = try_lock(job.file("lock"), wait_s=1)  # who only looks whether it is held holds it for a moment
    if lock is None or job.ended():
        return 0
    state = read_json(job.file("state.json")) or {}
    nonce = (read_json(job.file("job.json")) or {}).get("nonce") or name
    rebooted = bool(state) and state.get("boot_id") != boot_id()
    sessions = {} if rebooted else {int(pid): start for pid, start in state.get("sessions", {}).items()}
    ending_tree = Ending(JobTree(nonce, sessions))
    ended_epoch_s = last_sign_of_life(job)
    while not ending_tree.step():
        ended_epoch_s = time.time()
        time.sleep(0.1)
    wire = read_json(job.file(WIRE)) if job.is_service() else None
    is_cancelled = os.path.exists(job.file("cancel"))
    if wire is not None and not is_cancelled:
        why = "reboot" if rebooted else "runner_vanished"
        append_event(job.file("events.jsonl"), "service_restarted", why=why)
        if state.get("phase", "preparing") == "preparing":  # its copy may not be whole
            remove_tree(job.src)
            os.mkdir(job.src, 0o700)
        Supervisor(job, wire, again=state.get("service") or {}).run()
        return 0
    started_epoch_s = state.get("started_epoch_s", ended_epoch_s)
    state["duration_s"] = round(max(0.0, ended_epoch_s - started_epoch_s), 3)
    if job.is_service() and is_cancelled:
        end = ending("cancelled", 130, "user", "gpu job cancel")
    elif rebooted:
        end = ending("lost", None, "reboot", "the machine was started anew while the job ran")
    else:
        end = ending("lost", None, "runner_vanished", "the job's supervisor is gone")
    close_job(job, state, end, ended_epoch_s, [])
    return 0


def last_sign_of_life(job: Job) -> float:
    found = []
    for path in [job.file("job.json"), job.file("state.json")] + [
        Log(job).path(first) for first in Log(job).segments()
    ]:
        try:
            found.append(os.stat(path).st_mtime)
        except OSError:
            pass
    return max(found or [time.time()])


# watcher: ends the session ------------------------------------------------------------------------------------------


def record_expiry(project: Project, ended: dict[str, Any]) -> bool:
    append_event(project.file("events.jsonl"), "session_expired", session=ended["id"], why=ended["expired_why"])
    return True


def light_fuse(project: Project, ended: dict[str, Any]) -> bool:
    """Ask the fuse to end the billing of this machine, again and again: it does so by ending all of us.

    True, and no more asking, once the machine was stopped and started since: that end has come, this is another life.
    Or once another session is open, which takes the fire back under the same lock.
    """
    here = Fuse(project.root, str(ended.get("fuse")))
    with SessionLock(project):
        current = read_session(project)
        if current is None or current.get("id") != ended["id"]:
            return True
        boot, asked = here.boot(), current.get("fire_boot")
        if asked and boot and boot != asked:
            return True
        if asked is None:
            record_expiry(project, ended)
        if asked is None or (boot and not asked):  # "": the fuse was not there yet
            write_json(project.file("session.json"), dict(current, fire_boot=boot or ""))
        if boot and here.words("fire") != [ended["id"], boot]:
            here.write("fire", ended["id"], boot)
    return False


# What is done when a session has expired; False: do it again in a moment.
ACTIONS: dict[str, Callable[[Project, dict[str, Any]], bool]] = {"record": record_expiry, "fuse": light_fuse}


class Changed:
    """Whether something is different from the last look. What cannot be read counts as different: busy."""

    def __init__(self, measure: Callable[[], Any]):
        self.measure = measure
        self.last: Any = None
        self.first = True
        self.next_look = 0.0

    def look(self, now: float, force: bool = False) -> bool:
        if now < self.next_look and not force:
            return False
        try:
            found = self.measure()
        except OSError:
            return True
        finally:
            self.next_look = now + 20 * (boot_clock() - now)  # a large folder is walked less often
        changed = not self.first and found != self.last
        self.last, self.first = found, False
        return changed


def any_job_runs(project: Project) -> bool:
    """One that has no end yet. If nobody supervises it any more it is settled; until then it counts."""
    runs = False
    for name in project.job_names():
        job = project.job(name)
        if job.ended():
            continue
        runs = True
        if not job.supervisor_lives():
            spawn("settle", project, name)
    return runs


def folder_size(path: str) -> tuple[int, int, int]:
    """Bytes, entries and newest change below a folder: a download changes one of them."""
    total = count = newest = 0
    ahead = [path]
    while ahead:
        try:
            with os.scandir(ahead.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                    found = entry.stat(follow_symlinks=False)
                    total, count = total + found.st_size, count + 1
                    newest = max(newest, found.st_mtime_ns)
        except FileNotFoundError:
            pass
    return total, count, newest


def activity_time(project: Project) -> int:
    try:
        return os.stat(project.file("activity")).st_mtime_ns
    except FileNotFoundError:
        return 0


OUR_SERVE = re.compile(rb"runner(?:-[0-9a-f]{64})?(?:\.py)?\0serve\0")


def ssh_traffic() -> dict[tuple[int, str], int]:
    """Bytes moved by each SSH session of this machine that does not carry a conversation with this file.

    Keep-alive packets count as well: they cannot be told from somebody who types.
    """
    if not HAS_PROC:
        return {}
    processes, ours, sessions = all_processes(), [], []
    for process in processes.values():
        try:
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                title = file.read(65536)
        except OSError:
            continue
        if OUR_SERVE.search(title):
            ours.append(process)
        elif re.match(rb"sshd(-session|-auth)?: ", title) and b"[listener]" not in title:
            sessions.append(process)
    carrying = set()
    for process in ours:
        above: Process | None = process
        while above is not None and above.pid not in carrying:
            carrying.add(above.pid)
            above = processes.get(above.ppid)
    found = {}
    for process in sessions:
        if process.pid in carrying:
            continue
        try:
            with open(f"/proc/{process.pid}/io", "rb") as file:
                numbers = dict(line.split(b": ") for line in file.read().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[process.key] = int(numbers[b"rchar"]) + int(numbers[b"wchar"])
    return found


def service_traffic(project: Project) -> Any:
    """What moved on the connections of each service. A request that waits for its answer moves nothing: it is work."""
    ports = set()
    for name in project.service_names():
        job = project.job(name)
        if not job.ended():
            ports.add(((read_json(job.file("job.json")) or {}).get("service") or {}).get("port"))
    if not ports:
        return None
    found = {}
    for port, peer, sent, received, waits in tcp_connections():
        if port in ports:
            found[port, peer] = (sent, received, boot_clock() if waits else 0)
    return found


SOCK_DIAG_BY_FAMILY, ESTABLISHED, WANT_TCP_INFO = 20, 1, 2


def tcp_connections() -> Iterator[tuple[int, tuple[bytes, int], int, int, bool]]:
    """Established ones: local port, peer, bytes that the peer has taken, bytes from it, whether it waits for an answer.

    From the kernel's `sock_diag` (linux/inet_diag.h; the fields of tcp_info stand in linux/tcp.h). Where there is none
    OSError is raised, and the caller takes that for work.
    """
    import socket
    import struct

    if not hasattr(socket, "AF_NETLINK"):
        raise OSError(errno.ENOSYS, "no sock_diag here")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as link:
        link.settimeout(5)
        for family in (socket.AF_INET, socket.AF_INET6):
            asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 1 << (WANT_TCP_INFO - 1), 1 << ESTABLISHED)
            asked += bytes(36) + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
            link.send(struct.pack("=IHHII", 16 + len(asked), SOCK_DIAG_BY_FAMILY, 0x301, 1, 0) + asked)
            is_over = False
            while not is_over:
                data = link.recv(1 << 16)
                while len(data) >= 16 and not is_over:
                    size, kind = struct.unpack_from("=IH", data)
                    body, data = data[16:size], data[(size + 3) & ~3 :]
                    is_over = kind in (2, 3) or size < 16
                    if kind == 2:
                        raise OSError(errno.EPERM, "sock_diag is refused")
                    if kind != SOCK_DIAG_BY_FAMILY:
                        continue
                    port, peer_port = struct.unpack_from("!HH", body, 4)
                    peer, rest = body[24:40], body[72:]
                    while len(rest) >= 4:
                        length, name = struct.unpack_from("=HH", rest)
                        if name == WANT_TCP_INFO and length >= 4 + 136:
                            sent_ms, _, received_ms = struct.unpack_from("=III", rest, 4 + 44)
                            sent, received = struct.unpack_from("=QQ", rest, 4 + 120)
                            waits = received > 0 and (sent == 0 or received_ms < sent_ms)
                            yield port, (peer, peer_port), sent, received, waits
                        rest = rest[(max(length, 4) + 3) & ~3 :]


class Watcher:
    def __init__(self, project: Project):
        self.project = project
        self.signals = [
            Changed(lambda: activity_time(project)),
            Changed(lambda: folder_size(project.file("incoming"))),
            Changed(lambda: folder_size(project.file("workspace/cache"))),
            Changed(ssh_traffic),
            Changed(lambda: service_traffic(project)),
        ]
        self.last_busy = boot_clock()
        self.session_id: Any = None

    def busy(self, force: bool = False) -> bool:
        now = boot_clock()
        answers = [signal_.look(now, force) for signal_ in self.signals]  # all of them: each has to see the present
        return any_job_runs(self.project) or any(answers)

    def remember(self) -> None:
        """Watching goes on where a watcher that vanished had stopped."""
        memory = read_json(self.project.file("watch.json")) or {}
        self.session_id = memory.get("session")
        if memory.get("boot_id") == boot_id() and isinstance(memory.get("last_busy_boot_s"), float):
            self.last_busy = min(self.last_busy, memory["last_busy_boot_s"])

    def note(self) -> None:
        memory = {"pid": os.getpid(), "boot_id": boot_id(), "session": self.session_id}
        write_json(self.project.file("watch.json"), dict(memory, last_busy_boot_s=self.last_busy), sync=False)

    def run(self) -> None:
        self.remember()
        while True:
            current = read_session(self.project)
            if current is None or not needs_watcher(current):
                return
            try:
                pause_s = self.turn(current)
            except (OSError, Refusal) as exc:  # a full disk, a lock held by something that hangs: try again
                print(f"{timestamp(time.time())} {exc}", file=sys.stderr, flush=True)
                pause_s = 1.0
            reap_children()
            time.sleep(pause_s)

    def turn(self, current: dict[str, Any]) -> float:
        if current.get("expired_at"):
            return 0.0 if self.finish(current) else 2.0
        if deadline_passed(current):
            with SessionLock(self.project):
                again = read_session(self.project)
                if again is not None and deadline_passed(again):
                    expire_session(self.project, again.get("deadline_reason") or "deadline")
            return 0.0
        if self.busy() or current["id"] != self.session_id:
            self.session_id = current["id"]
            self.last_busy = boot_clock()
        self.note()
        left_s = self.idle_left_s(current)
        if left_s <= 0:
            self.expire_idle()
            return 0.0
        edge_s = min(left_s, deadline_in_s(current))
        return max(0.01, min(edge_s, 1.0 if edge_s < 10 else 5.0))

    def idle_left_s(self, current: dict[str, Any]) -> float:
        limit_s = current.get("idle_timeout_s")
        if limit_s is None:
            return float("inf")
        return max(self.last_busy + limit_s - boot_clock(), (current.get("held_epoch_s") or 0) - time.time())

    def expire_idle(self) -> None:
        """Jobs start under the same lock: one that came a moment ago is seen here, one that comes later is refused."""
        with SessionLock(self.project):
            current = read_session(self.project)
            if current is None or current.get("expired_at"):
                return
            if self.busy(force=True):
                self.last_busy = boot_clock()
            elif self.idle_left_s(current) <= 0:
                expire_session(self.project, "idle")

    def finish(self, current: dict[str, Any]) -> bool:
        """Supervisors end their jobs at the deadline themselves; the machine goes once their records are written."""
        until = time.monotonic() + 120
        while any_job_runs(self.project) and time.monotonic() < until:
            time.sleep(0.2)
        send_home(self.project)
        is_done = ACTIONS.get(current.get("on_expiry"), record_expiry)(self.project, current)
        if is_done:
            change_session(self.project, current["id"], action_done=True)
        return is_done


def watch(project: Project) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    while True:
        lock = try_lock(project.file("watch.lock"), wait_s=1)
        say_ready("ready" if lock is not None else "taken")
        if lock is None:
            return 0
        Watcher(project).run()
        os.close(lock)
        # Whoever opened a session while this one still held the lock relied on it.
        if not needs_watcher(read_session(project)):
            return 0


# the roles of this file ---------------------------------------------------------------------------------------------

USAGE = (
    "usage: runner.py serve --root ROOT | supervise ROOT PROJECT JOB | settle ROOT PROJECT JOB | watch ROOT PROJECT"
    " | revive ROOT"
)


def main(argv: list[str]) -> int:
    if len(argv) == 3 and argv[:2] == ["serve", "--root"]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client; the end of stdin is for us
        return Server(os.path.abspath(argv[2])).run()
    os.umask(0o077)
    if len(argv) == 4 and argv[0] == "supervise":
        return supervise(Project(argv[1], argv[2]), argv[3])
    if len(argv) == 4 and argv[0] == "settle":
        return settle(Project(argv[1], argv[2]), argv[3])
    if len(argv) == 3 and argv[0] == "watch":
        return watch(Project(argv[1], argv[2]))
    if len(argv) == 2 and argv[0] == "revive":
        return revive(os.path.abspath(argv[1]))
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
