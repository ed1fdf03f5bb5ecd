"""The seam to a machine: start one command there and talk to its stdin and stdout.

`LocalTransport` starts it here; `ssh.SshTransport` and `bulk.OpenSshTransport` start it over SSH. Above this line
nobody knows which it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from gpu_skills.errors import GpuError, MissingProgram, Unreachable, one_line

SILENCE_S = 60.0
STDERR_KEPT_BYTES = 8 << 10
PIPE_BYTES = 1 << 20
CLOSE_GRACE_S = 2.0


class Channel(Protocol):
    """One running command. Nothing blocks longer than `timeout_s` without a byte moving: that is Unreachable.

    A command that went away is the end of `read` and Unreachable in `write`.
    """

    timeout_s: float

    def write(self, *buffers: bytes | memoryview) -> None: ...

    def close_write(self) -> None: ...

    def has_input(self) -> bool:
        """Whether `read` would return at once."""
        ...

    def read(self, n: int) -> bytes:
        """Between 1 and n bytes; b"" at the end."""
        ...

    def stderr_tail(self) -> str: ...

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None while it runs or when the machine never told."""
        ...

    def close(self) -> None:
        """End the conversation. The command sees the end of its stdin; a child process of ours is also reaped."""
        ...


class Transport(Protocol):
    """host: the machine's name in messages. python: how its interpreter is called."""

    host: str
    python: str

    def start(self, command: str) -> Channel:
        """Run a line for the machine's login shell. Raises the kinds of RemoteError that say why it cannot."""
        ...

    def failed(self, words: str) -> GpuError:
        """What it means that a command ended before it said anything, with these last words on stderr."""
        ...

    def close(self) -> None: ...


class LocalTransport:
    """This machine. Its commands see the environment of a login, not the secrets this process may hold."""

    def __init__(self, environ: Mapping[str, str] | None = None):
        self.host = "this machine"
        self.python = sys.executable or "python3"
        self._environ = login_environment(os.environ if environ is None else environ)

    def start(self, command: str) -> Channel:
        return ProcessChannel(["/bin/sh", "-c", command], host=self.host, environ=self._environ)

    def failed(self, words: str) -> GpuError:
        return Unreachable(host=self.host, reason=words or "the command ended before it said anything")

    def close(self) -> None:
        """Nothing is kept open between commands."""


# What a login gives and tools on this machine need. An allow-list, because the names of secrets cannot be listed.
_LOGIN_NAMES = {
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LIBRARY_PATH",
    "DISPLAY", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_DEFAULT_TIMEOUT", "PIP_CONFIG_FILE",
    "PIP_CACHE_DIR", "PIP_DISABLE_PIP_VERSION_CHECK", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_FIND_LINKS",
    "UV_CACHE_DIR", "UV_PYTHON_INSTALL_DIR", "PYENV_ROOT", "CONDA_PREFIX",
}  # fmt: skip
_LOGIN_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "ROCR_", "HIP_")


def login_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name in _LOGIN_NAMES or (name.startswith(_LOGIN_PREFIXES) and "KEY" not in name and "TOKEN" not in name)
    }


class ProcessChannel:
    """A child process of ours as a channel: a local command, or the `ssh` program running one elsewhere."""

    def __init__(
        self, argv: Sequence[str], *, host: str, environ: Mapping[str, str] | None = None, timeout_s: float = SILENCE_S
    ):
        self.host = host
        self.timeout_s = timeout_s
        try:
            # A session of its own: Ctrl-C on the terminal is for us to act on, and nothing can ask for a password.
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(environ) if environ is not None else None,
                start_new_session=True,
            )
        except FileNotFoundError as exc:
            raise MissingProgram(program=argv[0]) from exc
        except OSError as exc:
            raise Unreachable(host=host, reason=f"{argv[0]} cannot be started: {exc.strerror}") from exc
        process = self.process
        assert process.stdin and process.stdout and process.stderr
        self._in, self._out, self._err = process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()
        for descriptor in (self._in, self._out, self._err):
            os.set_blocking(descriptor, False)
            _enlarge_pipe(descriptor)
        self._stderr = bytearray()
        self._stderr_open = True

    def write(self, *buffers: bytes | memoryview) -> None:
        pending = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while pending:
            try:
                sent = os.writev(self._in, pending[:64])
            except BlockingIOError:
                self._await(self._in, select.POLLOUT, "it takes no more data")
                continue
            except (BrokenPipeError, OSError, ValueError) as exc:
                raise Unreachable(host=self.host, reason=self._why_closed()) from exc
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if sent:
                pending[0] = pending[0][sent:]

    def close_write(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def has_input(self) -> bool:
        return bool(select.select([self._out], [], [], 0)[0])

    def read(self, n: int) -> bytes:
        while True:
            try:
                return os.read(self._out, n)
            except BlockingIOError:
                self._await(self._out, select.POLLIN, "no answer")

    def stderr_tail(self) -> str:
        self._drain_stderr()
        return self._stderr.decode("utf-8", "replace")

    def wait(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while True:  # read on meanwhile: a child that cannot write its last words does not end
            self._drain_stderr()
            left_s = deadline - time.monotonic()
            try:
                return self.process.wait(max(0.0, min(left_s, 0.05)))
            except subprocess.TimeoutExpired:
                if left_s <= 0:
                    return None

    def close(self) -> None:
        self.close_write()
        self._drain_stderr()
        with contextlib.suppress(OSError):
            self.process.stdout.close()
        if self.wait(CLOSE_GRACE_S) is None:
            for sign in (signal.SIGTERM, signal.SIGKILL):
                self.process.send_signal(sign)
                if self.wait(CLOSE_GRACE_S) is not None:
                    break
        self._stderr_open = False
        self.process.stderr.close()

    def _await(self, descriptor: int, event: int, complaint: str) -> None:
        """Wait for the descriptor, taking what arrives on stderr meanwhile so that it never blocks the child."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Unreachable(host=self.host, reason=f"{complaint} for {self.timeout_s:g} s")
            poll = select.poll()
            poll.register(descriptor, event)
            if self._stderr_open:
                poll.register(self._err, select.POLLIN)
            ready = dict(poll.poll(left_s * 1000))
            if self._err in ready:
                self._drain_stderr()
            if descriptor in ready:
                return

    def _drain_stderr(self) -> None:
        while self._stderr_open:
            try:
                data = os.read(self._err, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._stderr_open = bool(data)
            self._stderr += data
            del self._stderr[:-STDERR_KEPT_BYTES]

    def _why_closed(self) -> str:
        self.wait(0.2)
        words = last_line(self.stderr_tail())
        return f"the connection closed: {words}" if words else "the connection closed"


def last_line(text: str) -> str:
    """The last line that says something, fit for a message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return one_line(lines[-1], limit=300) if lines else ""


def _enlarge_pipe(descriptor: int) -> None:
    """64 KiB pipes cost a switch of processes every 64 KiB; larger ones are a privilege that may be refused."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
