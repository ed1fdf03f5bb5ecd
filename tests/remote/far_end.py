"""Far ends for tests: machines that say what a script says, and a network that breaks after so many bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_skills.errors import Unreachable
from gpu_skills.remote.session import Session
from gpu_skills.remote.ssh import SshTransport
from gpu_skills.remote.sshconfig import SshEndpoint
from gpu_skills.remote.tree import Entry, Tree
from sshd import Sshd

FAKE_RUNNER = b"# a runner in name only\n"


def transport_to(server: Sshd, tmp_path: Path, **options: object) -> SshTransport:
    options = {"machine_id": "m_1", "known_hosts": tmp_path / "pins" / "known_hosts"} | options
    endpoint = options.pop("endpoint", None) or SshEndpoint(server.host)
    return SshTransport(endpoint, config_file=server.client_config, **options)


def session_to(server: Sshd, tmp_path: Path, **options: object) -> Session:
    return Session.open(transport_to(server, tmp_path, **options), root=str(tmp_path / "root"))


def programs(tmp_path: Path, *names: str) -> str:
    """A PATH with these programs and nothing else."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in names:
        # Not what a version manager puts first on PATH: its shims need programs of their own.
        (folder / name).symlink_to(shutil.which(name, path="/usr/bin:/bin"))
    return str(folder)


def tree_of(folder: Path, *, keep_data: bool = False) -> Tree:
    entries = []
    for path in sorted(folder.rglob("*")):
        name = os.fsencode(path.relative_to(folder))
        if path.is_dir():
            if not any(path.iterdir()):
                entries.append(Entry(name, is_dir=True))
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        mode = path.stat().st_mode & 0o777
        entries.append(Entry(name, len(content), mode, digest, data=content if keep_data else None))
    return Tree(folder, entries)


# a machine of bytes -------------------------------------------------------------------------------------------------


def greeting(runner: str, **changes: object) -> bytes:
    said = {"protocol": 1, "runner": runner, "python": "3.11.2", "root": "/r", "boot_id": "b", "pid": 7} | changes
    return b"GPU-SKILLS-RUNNER " + json.dumps(said).encode() + b"\n"


def ok(result: dict[str, object]) -> bytes:
    return json.dumps({"ok": True, "result": result}).encode() + b"\n"


def refused(code: str, message: str = "no", **details: object) -> bytes:
    return json.dumps({"ok": False, "error": {"code": code, "message": message, "details": details}}).encode() + b"\n"


def data(payload: bytes, **header: object) -> bytes:
    return json.dumps({**header, "n": len(payload)}).encode() + b"\n" + payload


class ScriptedTransport:
    """Every connection hears the greeting and then what `says` yields, whatever it asks.

    says: one list of chunks per connection; None in it is silence until the time is up.
    """

    host = "far.example"
    python = "python3"

    def __init__(self, *connections: list[bytes | None]):
        self._connections = list(connections)
        self.channels: list[ScriptedChannel] = []

    def start(self, command: str) -> ScriptedChannel:
        if not self._connections:
            raise Unreachable(host=self.host, reason="no further connection in the script")
        self.channels.append(ScriptedChannel(self.host, self._connections.pop(0)))
        return self.channels[-1]

    def failed(self, words: str) -> Unreachable:
        return Unreachable(host=self.host, reason=words or "it closed")

    def close(self) -> None:
        pass


class ScriptedChannel:
    def __init__(self, host: str, says: list[bytes | None]):
        self._host = host
        self._says: Iterator[bytes | None] = iter(says)
        self._rest = b""
        self.heard = bytearray()
        self.timeout_s = 60.0
        self.is_closed = False

    def write(self, *buffers: bytes | memoryview) -> None:
        for buffer in buffers:
            self.heard += buffer

    def close_write(self) -> None:
        pass

    def has_input(self) -> bool:
        return False

    def read(self, n: int) -> bytes:
        if not self._rest:
            chunk = next(self._says, b"")
            if chunk is None:
                raise Unreachable(host=self._host, reason=f"no answer for {self.timeout_s:g} s")
            self._rest = chunk
        given, self._rest = self._rest[:n], self._rest[n:]
        return given

    def stderr_tail(self) -> str:
        return ""

    def wait(self, timeout_s: float) -> int | None:
        return None

    def close(self) -> None:
        self.is_closed = True


HELLO = greeting(hashlib.sha256(FAKE_RUNNER).hexdigest())


# a network that breaks ----------------------------------------------------------------------------------------------


class CuttingProxy:
    """Forwards connections to a port and cuts each after `limit` bytes in one direction; `limits` has one per
    connection (None: never), and later ones are not cut."""

    def __init__(self, port: int, *, up: list[int | None] = (), down: list[int | None] = ()):
        self._target = port
        self._up, self._down = list(up), list(down)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.connections = 0
        self.bytes_up = self.bytes_down = 0
        self.port = self._server.getsockname()[1]
        self._run(self._accept)

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        for open_socket in [self._server, *self._sockets]:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()
        for thread in self._threads:
            thread.join(10)

    def _run(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self.connections += 1
            self._sockets += [near, far]
            for source, target, limits in ((near, far, self._up), (far, near, self._down)):
                self._run(self._forward, source, target, limits.pop(0) if limits else None, limits is self._up)

    def _forward(self, source: socket.socket, target: socket.socket, limit: int | None, is_up: bool) -> None:
        moved = 0
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                if limit is not None and moved + len(chunk) > limit:
                    break
                target.sendall(chunk)
                moved += len(chunk)
                if is_up:
                    self.bytes_up += len(chunk)
                else:
                    self.bytes_down += len(chunk)
        # What was forwarded still arrives, then the end: a reset would throw away what lies in buffers there.
        for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                end.shutdown(how)
