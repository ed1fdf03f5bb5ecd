"""Bulk data over the `ssh` and `rsync` programs, bound to the same pinned host key as the control connection.

OpenSSH moves several times what paramiko does; it asks for aes128-gcm first, which is the fastest where the processor
has AES. Every option is on the command line, so the user's configuration is read for the way and never for the trust.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_skills.doors import door
from gpu_skills.errors import (
    AuthFailed,
    GpuError,
    HostKeyMismatch,
    MachineDiskFull,
    MissingProgram,
    NetworkDenied,
    TransferIncomplete,
    Unreachable,
    one_line,
)
from gpu_skills.remote.ssh import SshTransport
from gpu_skills.remote.transport import Channel, ProcessChannel

CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr,aes256-ctr"
RSYNC_SILENCE_S = 60
# Without these versions there is neither progress2 nor a way to leave out checksums (we verify SHA-256 ourselves).
RSYNC_OLDEST = (3, 2)
# Connections that broke; the same command goes on where they stopped.
RSYNC_BROKEN = frozenset({10, 12, 30, 35, 255})
# Some files were not moved: they are gone or cannot be read.
RSYNC_PARTIAL = frozenset({23, 24})
# The other end has no rsync, or one that does not know our options.
RSYNC_UNFIT = frozenset({1, 2, 4, 126, 127})

OnBytes = Callable[[int], None]


class RsyncUnfit(Exception):
    """One of the two ends has no rsync that can do this: use a stream."""


class OpenSshTransport:
    """The `ssh` program as a transport: one process and one connection per command, made for one large stream."""

    python = "python3"

    def __init__(self, bulk: Bulk):
        self.host = bulk.host
        self._bulk = bulk

    def start(self, command: str) -> Channel:
        argv = [*self._bulk.ssh_argv(), "--", self._bulk.transport.settings.alias, command]
        return ProcessChannel(argv, host=self.host, environ=self._bulk.transport.environ)

    def failed(self, words: str) -> GpuError:
        return self._bulk.ssh_failed(words)

    def close(self) -> None:
        """Nothing is kept open between commands."""


class Bulk:
    """How bulk data travels to the machine of an `SshTransport` that is connected, so that its key is pinned."""

    def __init__(self, transport: SshTransport):
        self.transport = transport
        self.host = transport.host

    @property
    def has_ssh(self) -> bool:
        return self._which("ssh") is not None

    @property
    def has_rsync(self) -> bool:
        """Whether this end has an rsync we can use. Whether the other has is found out by trying."""
        program = self._which("rsync")
        if program is None or not self.has_ssh:
            return False
        try:
            done = subprocess.run([program, "--version"], capture_output=True, timeout=10, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):
            return False
        match = re.match(rb"rsync\s+version\s+v?(\d+)\.(\d+)", done.stdout)
        return match is not None and (int(match[1]), int(match[2])) >= RSYNC_OLDEST

    def stream(self) -> OpenSshTransport:
        if not self.has_ssh:
            raise MissingProgram(program="ssh")
        return OpenSshTransport(self)

    def ssh_argv(self) -> list[str]:
        """`ssh` with everything but the host and the command."""
        settings, pin = self.transport.settings, self.transport.pin
        if pin is None:
            raise Unreachable(host=self.host, reason="its key is not pinned yet: there is no control connection")
        options = {
            "HostKeyAlias": pin.machine_id,
            "UserKnownHostsFile": config_value(self.transport.pins.path),
            "GlobalKnownHostsFile": "/dev/null",
            "KnownHostsCommand": "none",
            "StrictHostKeyChecking": "yes",
            "HostKeyAlgorithms": ",".join(pin.key.algorithms),
            "UpdateHostKeys": "no",
            "VerifyHostKeyDNS": "no",
            "CheckHostIP": "no",
            "Ciphers": CIPHERS,
            "Compression": "no",
            "BatchMode": "yes",
            "ConnectTimeout": str(int(settings.connect_timeout_s)),
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "3",
            "ControlMaster": "no",
            "ControlPath": "none",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "ClearAllForwardings": "yes",
            "PermitLocalCommand": "no",
            "RemoteCommand": "none",
            "RequestTTY": "no",
            "LogLevel": "ERROR",
        }
        if settings.proxy_command is not None:
            options["ProxyCommand"] = settings.proxy_command.replace("%", "%%")
        argv = [self._which("ssh") or "ssh", *settings.options]
        argv += ["-o", "IgnoreUnknown=KnownHostsCommand"]  # it came with OpenSSH 8.5
        for name, value in options.items():
            argv += ["-o", f"{name}={value}"]
        return argv

    @door("remote.execute")
    def rsync_up(self, folder: Path, remote: str, *, resume: bool = False, on_bytes: OnBytes | None = None) -> None:
        """Send every file of a folder (links are followed) into a folder of the machine.

        resume: what is there already in part is only completed. Raises TransferIncomplete with rsync's own last line,
        RsyncUnfit when an end cannot.
        """
        self._rsync(["--chmod=F600", "-p"], [f"{folder}/", self._place(remote)], resume, on_bytes)

    @door("remote.execute")
    def rsync_down(
        self,
        remote: str,
        folder: Path,
        names: list[str],
        *,
        resume: bool = False,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Fetch the named files of a machine's folder; links there are followed there, none is made here.

        watch is called a few times a second while it runs; what it raises ends the transfer.
        """
        wanted = "".join(f"{name}\n" for name in names).encode()
        options = ["--files-from=-", "--no-links", "--no-devices", "--no-specials", "--no-perms", "--chmod=F600"]
        self._rsync(options, [self._place(remote) + "/", f"{folder}/"], resume, None, wanted, watch)

    def ssh_failed(self, words: str) -> GpuError:
        """What the `ssh` program's last words mean."""
        host, user = self.host, self.transport.settings.user
        if "Permission denied" in words or "Too many authentication failures" in words:
            return AuthFailed(host=host, user=user, reason=words)
        if "Host key verification failed" in words or "HOST IDENTIFICATION HAS CHANGED" in words:
            pin = self.transport.pin
            pinned = pin.key.fingerprint if pin else "none"
            return HostKeyMismatch(host=host, machine=self.transport.machine_id, found="another one", pinned=pinned)
        if "Operation not permitted" in words:
            return NetworkDenied(reason=words)
        return Unreachable(host=host, reason=words or "the connection closed before it said anything")

    # rsync ----------------------------------------------------------------------------------------------------------

    def _rsync(
        self,
        options: list[str],
        places: list[str],
        resume: bool,
        on_bytes: OnBytes | None,
        stdin: bytes = b"",
        watch: Callable[[], None] | None = None,
    ) -> None:
        # Whole files without rsync's own checksums: we name files by SHA-256 and verify that, and its checksums cost
        # more than the cipher. Completing a file cannot leave them out.
        how = ["--append"] if resume else ["--inplace", "--whole-file", "--checksum-choice=none"]
        shell = " ".join(_rsync_quoted(part) for part in self.ssh_argv())
        argv = [self._which("rsync") or "rsync", "-rL", "--secluded-args", *how, *options]
        argv += ["--info=progress2", "--no-human-readable", f"--timeout={RSYNC_SILENCE_S}", "-e", shell, "--", *places]
        done = _run_rsync(argv, self.transport.environ, stdin, on_bytes, watch)
        if done.code == 0:
            return
        words = done.words
        # A shell without rsync ends with 127, which rsync here may report as a broken stream (12).
        if done.code in RSYNC_UNFIT or (done.code == 12 and "not found" in done.stderr):
            raise RsyncUnfit(words)
        if done.code == 255:
            raise self.ssh_failed(words)
        if "No space left" in done.stderr:
            raise MachineDiskFull(host=self.host, reason=words)
        raise TransferIncomplete(reason=f"rsync exited with {done.code}: {words}", host=self.host, rsync_code=done.code)

    def _place(self, remote: str) -> str:
        host = self.transport.settings.alias
        return f"[{host}]:{remote}" if ":" in host else f"{host}:{remote}"

    def _which(self, program: str) -> str | None:
        return shutil.which(program, path=self.transport.environ.get("PATH"))


@dataclass
class _Done:
    code: int
    stderr: str

    @property
    def words(self) -> str:
        """rsync's own last line; its `rsync error: …` line only sums up what the one before it says."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        telling = [line for line in lines if not line.startswith("rsync error:")] or lines
        return one_line(telling[-1], limit=300) if telling else "it said nothing"


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens here, the process and its ssh are gone afterwards."""
    try:
        yield
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _run_rsync(
    argv: list[str],
    environ: dict[str, str],
    stdin: bytes,
    on_bytes: OnBytes | None,
    watch: Callable[[], None] | None,
) -> _Done:
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as exc:
        raise RsyncUnfit(str(exc)) from exc
    with _ended(process):
        _feed(process, stdin)
        stderr, rest = bytearray(), b""
        open_streams = {process.stdout.fileno(): True, process.stderr.fileno(): False}
        watched_at = 0.0
        while open_streams:
            ready, _, _ = select.select(list(open_streams), [], [], 0.1)
            for descriptor in ready:
                data = os.read(descriptor, 1 << 16)
                if not data:
                    del open_streams[descriptor]
                elif open_streams[descriptor]:
                    *lines, rest = re.split(rb"[\r\n]", rest[-4096:] + data)
                    for line in lines:
                        moved = re.match(rb"\s*(\d+)\s+\d+%", line)
                        if moved and on_bytes is not None:
                            on_bytes(int(moved[1]))
                else:
                    stderr = (stderr + data)[-(64 << 10) :]
            if watch is not None and time.monotonic() - watched_at > 0.1:
                watched_at = time.monotonic()
                watch()
        process.wait()
    return _Done(process.returncode, stderr.decode("utf-8", "replace"))


def _feed(process: subprocess.Popen[bytes], data: bytes) -> None:
    """rsync reads the list before it moves anything, so this does not wait for the transfer."""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(data)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def _rsync_quoted(part: str) -> str:
    """rsync splits `-e` at spaces; in single quotes a doubled one stands for itself (rsync(1), --rsh)."""
    return "'" + part.replace("'", "''") + "'"


def config_value(path: Path) -> str:
    """A path as an option of `ssh`, which splits at spaces and expands `%`."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"'
