"""The conversation with the runner on one machine: install it when needed, then ask and be answered.

docs/runner-protocol.md has the frames and the verbs. The far end may be broken or hostile: sizes, times, types and
depth are bounded here, and what does not fit is a ProtocolError, never a hang.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_skills import resources
from gpu_skills.doors import door
from gpu_skills.errors import (
    CommandFailed,
    MachineDiskFull,
    MachineLacks,
    NotWritable,
    OutcomeUnknown,
    ProtocolError,
    RemoteError,
    Unreachable,
)
from gpu_skills.remote.answers import (
    MAX_HEADER_BYTES,
    PROTOCOL,
    check_result,
    parse_header,
    payload_size,
    raise_machine_error,
)
from gpu_skills.remote.transport import Channel, Transport, last_line

DEFAULT_ROOT = "~/.gpu-skills"
GREETING_TIMEOUT_S = 30.0
MAX_NOISE_BYTES = 64 << 10
MAX_DATA_BYTES = 256 << 20  # of one answer that is collected in memory
SLOWEST_BYTES_S = 1000  # a frame that comes slower than this is silence in disguise
ATTEMPTS = 2
READ_BYTES = 1 << 20
WRITE_BYTES = 256 << 10
BODY_FRAME_BYTES = 1 << 20
_MARK = b"GPU-SKILLS-RUNNER "
_ANSWER = b"GPU-SKILLS-ANSWER "
# Reads exactly the program's length from stdin, which stays open: a shell that closes it early tells nothing.
_PROGRAM = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv.pop(1))), 'checkup', 'exec'))"

# Asking twice is the same as asking once. `start` too: the machine knows a job by its id and nonce, and a session by
# its id. What destroys (`forget`) is not here, nor is a verb nobody has thought about.
REPEATABLE = frozenset(
    {"probe", "session", "fuse", "have", "offer", "put", "incoming", "admit", "seal", "start", "status", "cancel"}
    | {"jobs", "log", "events", "manifest", "get", "stage", "export", "home"}
)

Buffer = bytes | memoryview
OnData = Callable[[dict[str, Any], bytes], None]


@dataclass(frozen=True, slots=True)
class Frame:
    """A piece of a request's body. members: what its header says, as the inside of a JSON object, ready-made because
    a body may have many thousand of them."""

    members: str
    payload: Buffer = b""


class RunnerAbsent(RemoteError):
    code = "runner_absent"
    template = "{host} does not have this version's runner yet, and a command that only reads installs none"
    next_step = "gpu setup"


@dataclass(frozen=True)
class Greeting:
    runner: str
    python: str
    root: str
    boot_id: str
    pid: int


class Session:
    """An open conversation. A connection that broke is opened again by the next call, when that is safe."""

    def __init__(
        self, transport: Transport, *, root: str | None = None, runner: Path | None = None, may_install: bool = True
    ):
        self.transport = transport
        self._may_install = may_install
        self.root = root or DEFAULT_ROOT
        self._runner = runner or resources.runner()
        self._channel: Channel | None = None
        self._reader: FrameReader | None = None
        self.greeting: Greeting

    @classmethod
    def open(
        cls, transport: Transport, *, root: str | None = None, runner: Path | None = None, may_install: bool = True
    ) -> Session:
        """Connect and greet; installs the runner when the machine has another one or none.

        may_install: False for whoever only reads; a machine without our runner is then RunnerAbsent.
        root: its folder on the machine, `~/…` is the home of the user there. Raises the kinds of RemoteError, among
        them MachineLacks for a machine without python3 or bash.
        """
        session = cls(transport, root=root, runner=runner, may_install=may_install)
        session._connect()
        return session

    @property
    def host(self) -> str:
        return self.transport.host

    @door("remote.execute")
    def call(
        self,
        verb: str,
        args: Mapping[str, Any] | None = None,
        body: bytes | Iterable[Frame] | None = None,
        on_data: OnData | None = None,
        timeout_s: float = 60.0,
        *,
        max_data_bytes: int | None = MAX_DATA_BYTES,
    ) -> dict[str, Any]:
        """One request and its answer. on_data gets every data frame; without it data is a ProtocolError.

        timeout_s: the longest silence. body: bytes go in frames without a header of their own. max_data_bytes bounds
        what a machine may send; None leaves that to on_data. A repeatable verb is asked again once over a new
        connection, unless data was handed over already or the body was an iterator. Otherwise a broken connection is
        Unreachable, or OutcomeUnknown where the machine may have done what must not be done twice.
        """
        args = dict(args or {})
        repeatable = verb in REPEATABLE and (body is None or isinstance(body, bytes | list | tuple))
        handed_over = 0

        def hand_over(header: dict[str, Any], payload: bytes) -> None:
            nonlocal handed_over
            if on_data is None:
                raise ProtocolError(host=self.host, reason=f"{verb} was answered with data nobody asked for")
            handed_over += 1
            on_data(header, payload)

        for attempt in itertools.count(1):
            if self._channel is None:
                self._connect()
            try:
                return self._exchange(verb, args, body, hand_over, timeout_s, max_data_bytes)
            except Unreachable as exc:
                if repeatable and not handed_over and attempt < ATTEMPTS:
                    continue
                if verb not in REPEATABLE:
                    raise OutcomeUnknown(what=verb, host=self.host, next_step="gpu job ls") from exc
                raise
        raise AssertionError("unreachable")

    @door("remote.execute")
    def run_program(self, source: str, asked: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Run a small Python program of ours beside the runner and return the JSON object it answers with.

        It finds `asked` as JSON in its first argument and prints `GPU-SKILLS-ANSWER {…}`; what a login shell prints
        before that is skipped. It changes nothing, so it may be run again. Raises RemoteError kinds.
        """
        data = source.encode()
        words = shlex.join([self.transport.python, "-c", _PROGRAM, str(len(data)), json.dumps(asked)])
        channel = self.transport.start(f"exec sh -c {shlex.quote(f'exec {words}')}")
        channel.timeout_s = timeout_s
        said = b""
        end_by = time.monotonic() + timeout_s
        try:
            channel.write(data)
            while piece := channel.read(READ_BYTES):
                said += piece
                if len(said) > MAX_NOISE_BYTES + MAX_HEADER_BYTES:
                    raise ProtocolError(host=self.host, reason="a program of ours was answered with too much")
                if time.monotonic() > end_by:
                    raise Unreachable(host=self.host, reason=f"no answer for {timeout_s:g} s")
            status, words = channel.wait(5), last_line(channel.stderr_tail())
        finally:
            channel.close()
        found = said.rpartition(_ANSWER)[2].partition(b"\n")[0] if _ANSWER in said else b""
        try:
            return parse_header(found)
        except ValueError as exc:
            ended = f"it ended with code {status}" + (f": {words}" if words else "")
            raise CommandFailed(what="a check of the machine", host=self.host, reason=ended) from exc

    def reopen(self) -> None:
        """Drop the connection and make a new one."""
        self.close()
        self._connect()

    def close(self) -> None:
        self._drop()
        self.transport.close()

    # one exchange ---------------------------------------------------------------------------------------------------

    def _exchange(
        self,
        verb: str,
        args: dict[str, Any],
        body: bytes | Iterable[Frame] | None,
        on_data: OnData,
        timeout_s: float,
        max_data_bytes: int | None,
    ) -> dict[str, Any]:
        channel, reader = self._channel, self._reader
        assert channel is not None and reader is not None
        channel.timeout_s = timeout_s
        try:
            self._send(channel, verb, args, body)
            answer = self._receive(reader, on_data, timeout_s, max_data_bytes)
            ok, result = answer.get("ok"), answer.get("result")
            if ok is True:
                return check_result(verb, result)
        except ValueError as exc:
            self._drop()
            raise ProtocolError(host=self.host, reason=str(exc)) from exc
        except BaseException:  # also what on_data or the body raised: the frames are out of step now
            self._drop()
            raise
        if ok is not False:
            self._drop()
            raise ProtocolError(host=self.host, reason=f"{verb} was neither done nor refused")
        raise_machine_error(self.host, verb, args, answer.get("error"))

    def _send(self, channel: Channel, verb: str, args: dict[str, Any], body: bytes | Iterable[Frame] | None) -> None:
        pending: list[Buffer] = [_line({"verb": verb, "args": args})]
        if len(pending[0]) > MAX_HEADER_BYTES:
            raise CommandFailed(
                what=verb, host=self.host, reason=f"the request has {len(pending[0])} bytes, 64 KiB fit"
            )
        size = len(pending[0])
        frames = _frames(body) if isinstance(body, bytes) else body
        if frames is not None:
            for frame in frames:  # many small frames share one write, or each would be a packet of its own
                n = len(frame.payload)
                head = f'{{{frame.members},"n":{n}}}\n' if frame.members else f'{{"n":{n}}}\n'
                pending += (head.encode("ascii"), frame.payload)
                size += len(head) + n
                if size >= WRITE_BYTES:
                    _write(channel, pending, size)
                    pending, size = [], 0
                    if channel.has_input():  # refused already: the rest would only be thrown away there
                        break
            pending.append(b'{"end":true}\n')
        _write(channel, pending, size)

    def _receive(
        self, reader: FrameReader, on_data: OnData, timeout_s: float, max_data_bytes: int | None
    ) -> dict[str, Any]:
        received = 0
        # Whoever collects the answer waits for its end, so that has to come. A stream may take as long as it is large.
        end_by = time.monotonic() + 10 * timeout_s
        while True:
            header, payload, size = reader.next_frame(timeout_s)
            if payload is None:
                return header
            received += size
            if max_data_bytes is not None and received > max_data_bytes:
                raise ValueError(f"an answer of more than {max_data_bytes} bytes")
            now = time.monotonic()
            if max_data_bytes is not None and now > end_by:
                raise ValueError(f"an answer without end, {10 * timeout_s:g} s long so far")
            if now > end_by + received / SLOWEST_BYTES_S:
                raise Unreachable(host=self.host, reason="it answers too slowly to be waited for")
            on_data(header, payload)

    # connecting -----------------------------------------------------------------------------------------------------

    @door("remote.execute")
    def _connect(self) -> None:
        source = _read_runner(self._runner)
        digest = hashlib.sha256(source).hexdigest()
        greeting = self._start(_serve_command(self.transport.python, self.root, digest), b"")
        if greeting is None or greeting.runner != digest:
            self._drop()
            if not self._may_install:
                raise RunnerAbsent(host=self.host)
            install = _install_command(self.transport.python, self.root, digest, len(source))
            greeting = self._start(install, source)
        if greeting is None or greeting.runner != digest:
            self._drop()
            raise ProtocolError(host=self.host, reason="it did not keep the runner it was given")
        self.greeting = greeting

    def _start(self, command: str, source: bytes) -> Greeting | None:
        """Run the command and read its greeting; None when it has no runner yet, or one that does not start."""
        channel = self.transport.start(command)
        self._channel, self._reader = channel, FrameReader(channel, self.host)
        channel.timeout_s = GREETING_TIMEOUT_S
        try:
            if source:
                channel.write(source)
            line = self._reader.find_greeting()
        except ValueError as exc:
            self._drop()
            raise ProtocolError(host=self.host, reason=str(exc)) from exc
        except Unreachable:
            if channel.wait(0.5) not in _SAID:
                self._drop()
                raise
            line = None
        except BaseException:
            self._drop()
            raise
        if line is not None:
            return self._greeting(line)
        status, words = channel.wait(5), channel.stderr_tail()
        self._drop()
        is_damaged = not source and status not in (None, 127, 255) and status not in _SAID
        if status == _NO_RUNNER or is_damaged:
            return None
        raise self._start_failed(status, words)

    def _greeting(self, line: bytes) -> Greeting:
        try:
            said = parse_header(line)
            if said.get("protocol") != PROTOCOL:
                raise ValueError(f"protocol {said.get('protocol')!r}, this is {PROTOCOL}")
            values = [said.get(name) for name in ("runner", "python", "root", "boot_id")]
            if not all(isinstance(value, str) and "\0" not in value for value in values):
                raise ValueError("a greeting without runner, python, root or boot_id")
            if not values[2].startswith("/"):
                raise ValueError("a greeting whose root is not absolute")
            pid = said.get("pid")
            return Greeting(*values, pid=pid if type(pid) is int else 0)
        except ValueError as exc:
            self._drop()
            raise ProtocolError(host=self.host, reason=str(exc)) from exc

    def _start_failed(self, status: int | None, words: str) -> Exception:
        host, words = self.host, last_line(words)
        match status:
            case 91:
                return MachineLacks(host=host, what="python3")
            case 92:
                return MachineLacks(host=host, what="bash")
            case 94:
                return MachineLacks(host=host, what="python3 of version 3.8 or later")
            case 95:
                return MachineDiskFull(host=host, reason=words or "no space left")
            case 96:
                return NotWritable(path=f"{host}:{self.root}", reason=words or "it refused")
            case 127 if words:
                return MachineLacks(host=host, what=f"usable shell ({words})")
            case 255 | None:
                return self.transport.failed(words)
        ended = f"its shell ended with code {status} before the runner spoke"
        return ProtocolError(host=host, reason=f"{ended}: {words}" if words else ended)

    def _drop(self) -> None:
        channel, self._channel, self._reader = self._channel, None, None
        if channel is not None:
            channel.close()


class FrameReader:
    """Frames from a channel. ValueError for what is no frame, Unreachable for an end where none may be."""

    def __init__(self, channel: Channel, host: str):
        self._channel = channel
        self._host = host
        self._buffer = b""
        self._at = 0

    def next_frame(self, timeout_s: float) -> tuple[dict[str, Any], bytes | None, int]:
        """Header, payload (None when it is not a data frame) and the bytes both took."""
        line = self._line(time.monotonic() + timeout_s)
        header = parse_header(line)
        n = payload_size(header)
        if n is None:
            return header, None, len(line)
        payload = self._take(n, time.monotonic() + timeout_s + n / SLOWEST_BYTES_S)
        return header, payload, len(line) + n

    def find_greeting(self) -> bytes | None:
        """The greeting's JSON after whatever a login shell printed; None when the command ended without one."""
        deadline = time.monotonic() + GREETING_TIMEOUT_S
        while True:
            start = self._buffer.find(_MARK)
            end = self._buffer.find(b"\n", start) if start >= 0 else -1
            if end >= 0:
                self._at = end + 1
                return self._buffer[start + len(_MARK) : end]
            noise = start if start >= 0 else len(self._buffer)
            if noise > MAX_NOISE_BYTES or len(self._buffer) > MAX_NOISE_BYTES + MAX_HEADER_BYTES:
                raise ValueError("its shell printed more than 64 KiB before the runner spoke")
            if not self._fill(deadline):
                return None

    def _line(self, deadline: float) -> bytes:
        while True:
            end = self._buffer.find(b"\n", self._at)
            length = (end if end >= 0 else len(self._buffer)) - self._at
            if length > MAX_HEADER_BYTES:
                raise ValueError("a header of more than 64 KiB")
            if end >= 0:
                line = self._buffer[self._at : end]
                self._at = end + 1
                return line
            if not self._fill(deadline):
                raise self._ended()

    def _take(self, n: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while True:
            part = self._buffer[self._at : self._at + n]
            self._at += len(part)
            n -= len(part)
            parts.append(part)
            if not n:
                return part if len(parts) == 1 else b"".join(parts)
            if not self._fill(deadline):
                raise self._ended()

    def _fill(self, deadline: float) -> bool:
        if time.monotonic() > deadline:
            raise Unreachable(host=self._host, reason="it answers too slowly to be waited for")
        data = self._channel.read(READ_BYTES)
        self._buffer = self._buffer[self._at :] + data
        self._at = 0
        return bool(data)

    def _ended(self) -> Unreachable:
        words = last_line(self._channel.stderr_tail())
        return Unreachable(host=self._host, reason="the connection closed" + (f": {words}" if words else ""))


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def _frames(data: bytes) -> Iterator[Frame]:
    view = memoryview(data)
    for start in range(0, len(data), BODY_FRAME_BYTES):
        yield Frame("", view[start : start + BODY_FRAME_BYTES])


def _write(channel: Channel, buffers: list[Buffer], size: int) -> None:
    if size <= 4 * WRITE_BYTES and len(buffers) > 2:
        channel.write(b"".join(buffers))
    else:
        channel.write(*buffers)


# installing ---------------------------------------------------------------------------------------------------------

# What the shell lines below say by their exit code; above the codes shells use, below those of signals.
_NO_RUNNER = 93
_SAID = frozenset(range(91, 98))

# `python3 runner.py` compiles the file at every start, which takes longer than all the rest of it. As a module its
# bytecode is kept beside it and checked by time and size, as Python does for every module.
_LAUNCHER = (
    "import sys; from importlib.machinery import SourceFileLoader; "
    "del sys.argv[0]; __file__ = sys.argv[0]; "
    "exec(SourceFileLoader(__name__, __file__).get_code(__name__))"
)

# Reads exactly the runner's length from stdin, so that frames may follow at once. Without single quotes and
# backslashes, about which shells differ.
_INSTALLER = """\
import hashlib, os, sys
if sys.version_info < (3, 8):
    sys.exit(94)
size, digest, path, root = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
data = b""
while len(data) < size:
    piece = os.read(0, size - len(data))
    if not piece:
        sys.exit(97)
    data += piece
if hashlib.sha256(data).hexdigest() != digest:
    sys.exit(97)
try:
    os.makedirs(root, 0o700, exist_ok=True)
    part = "%s.%d" % (path, os.getpid())
    with open(part, "wb") as file:
        file.write(data)
    os.rename(part, path)
except OSError as exc:
    sys.stderr.write(str(exc))
    sys.exit(95 if exc.errno in (28, 122) else 96)
os.execv(sys.executable, [sys.executable, "-I", "-c", sys.argv[5], path, "serve", "--root", root])
"""


def _serve_command(python: str, root: str, digest: str) -> str:
    script = (
        f"{_prelude(python, root, digest)} "
        f'[ -f "$f" ] || exit {_NO_RUNNER}; '
        f'exec {shlex.quote(python)} -I -c {shlex.quote(_LAUNCHER)} "$f" serve --root "$r"'
    )
    return f"exec sh -c {shlex.quote(script)}"


def _install_command(python: str, root: str, digest: str, size: int) -> str:
    code = shlex.quote(f"exec({_INSTALLER!r})")
    script = (
        f"{_prelude(python, root, digest)} "
        f'exec {shlex.quote(python)} -I -c {code} {size} {digest} "$f" "$r" {shlex.quote(_LAUNCHER)}'
    )
    return f"exec sh -c {shlex.quote(script)}"


def _prelude(python: str, root: str, digest: str) -> str:
    folder = f'"$HOME"/{shlex.quote(root[2:])}' if root.startswith("~/") else shlex.quote(root)
    return (
        f"command -v {shlex.quote(python)} >/dev/null 2>&1 || exit 91; "
        "command -v bash >/dev/null 2>&1 || exit 92; "
        f'umask 077; r={folder}; f="$r/runner-{digest}.py";'
    )


def _read_runner(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise NotWritable(f"{path} cannot be read: {exc.strerror}", path=str(path)) from exc
