"""A real OpenSSH server per test: its own port on loopback, its own keys, nothing of the machine's SSH configuration.

    def test_something(sshd):
        subprocess.run(["ssh", "-F", sshd.client_config, "machine", "true"])

`start_sshd` gives several in one test. Works as root and as an ordinary user; logs in as whoever runs the tests.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
USER = pwd.getpwuid(os.getuid()).pw_name
# Below the kernel's range for outgoing connections (32768-60999), which may hold any port of it at any time.
PORTS = range(20000, 32000)
START_TIMEOUT_S = 10.0


@dataclass
class Sshd:
    """A running server. `host` is what the client configuration calls it; `client_config` is for `ssh -F`."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    user: str = USER
    host: str = "machine"
    address: str = "127.0.0.1"
    _settings: list[str] = field(default_factory=list)

    @property
    def identity(self) -> Path:
        return self.folder / "id"

    @property
    def home(self) -> Path:
        """The home directory of its sessions."""
        return self.folder / "home"

    @property
    def client_config(self) -> Path:
        return self.folder / "client_config"

    @property
    def host_key(self) -> str:
        """`ssh-ed25519 AAAA…`"""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def stop(self) -> None:
        """End the server and every connection it still serves."""
        family = _descendants(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restart(self, *, new_host_key: bool = False, key_type: str = "ed25519") -> None:
        """The same port again, as after a reboot; with `new_host_key` as after a reinstallation."""
        self.stop()
        if new_host_key:
            for name in ("host_key", "host_key.pub"):
                (self.folder / name).unlink()
            make_key(self.folder / "host_key", key_type)
        self.process = _launch(self.folder, self.port, self._settings)

    def disconnect_all(self) -> None:
        """Cut every connection, as a network would; the server and what runs behind the connections stay."""
        for pid in _descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def start_sshd(
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
    key_type: str = "ed25519",
    identity: Path | None = None,
) -> Iterator[Sshd]:
    """A server with its files in `folder` (made when missing).

    environment: variables of every session there; HOME is an empty folder of the server's own unless it is named.
    settings: further lines of sshd_config. identity: a key pair to let in, in place of a new one.
    """
    if SSHD is None:
        raise RuntimeError("no OpenSSH server here: scripts/test installs it")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_key(folder / "host_key", key_type)
    if identity is None:
        make_key(folder / "id")
    else:
        for ending in ("", ".pub"):
            shutil.copy(f"{identity}{ending}", folder / f"id{ending}")
    shutil.copy(folder / "id.pub", folder / "authorized_keys")
    (folder / "home").mkdir(exist_ok=True)
    variables = {"HOME": str(folder / "home"), **(environment or {})}
    lines = [*settings, "SetEnv " + " ".join(f'{name}="{value}"' for name, value in variables.items())]
    port, process = _start_on_a_free_port(folder, lines)
    server = Sshd(folder, port, process, _settings=lines)
    server.client_config.write_text(
        f"Host {server.host}\n"
        f"  HostName {server.address}\n"
        f"  Port {port}\n"
        f"  User {USER}\n"
        f"  IdentityFile {server.identity}\n"
        "  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/user_known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking accept-new\n"
    )
    try:
        yield server
    finally:
        server.stop()


def make_key(path: Path, key_type: str = "ed25519", passphrase: str = "") -> Path:
    """A key pair in two files, `path` and `path.pub`."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", key_type, "-N", passphrase, "-C", "", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path


def free_port() -> int:
    """A port that nobody has at this moment. Somebody may take it next: be ready to ask again."""
    for port in random.sample(PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise RuntimeError("no free port")


def _start_on_a_free_port(folder: Path, lines: Sequence[str]) -> tuple[int, subprocess.Popen[bytes]]:
    failure = None
    for _ in range(20):
        port = free_port()
        try:
            return port, _launch(folder, port, lines)
        except _DidNotStart as exc:
            failure = exc
            if "in use" not in str(exc):
                break
    raise RuntimeError(f"sshd does not start: {failure}")


class _DidNotStart(Exception):
    pass


def _launch(folder: Path, port: int, lines: Sequence[str]) -> subprocess.Popen[bytes]:
    if os.getuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    (folder / "log").write_text("")
    (folder / "sshd_config").write_text(
        "\n".join(
            [
                *lines,  # first, because sshd takes the first value it reads
                f"Port {port}",
                "ListenAddress 127.0.0.1",
                f"HostKey {folder}/host_key",
                f"PidFile {folder}/sshd.pid",
                f"AuthorizedKeysFile {folder}/authorized_keys",
                "StrictModes no",  # the key file lies below the temporary folder, which everybody may write to
                "UsePAM no",
                "UseDNS no",
                "PermitRootLogin prohibit-password",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "MaxStartups 200",
                "MaxSessions 100",
                "PrintMotd no",
                "PrintLastLog no",
                "Subsystem sftp internal-sftp",
                "",
            ]
        )
    )
    process = subprocess.Popen(
        [SSHD, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "log")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        # Its own word, not a connection that succeeds: a stranger may listen on that port.
        if "Server listening on" in (folder / "log").read_text(errors="replace"):
            return process
        if process.poll() is not None:
            break
        time.sleep(0.005)
    process.kill()
    process.wait()
    raise _DidNotStart((folder / "log").read_text(errors="replace"))


def _descendants(root: int) -> list[int]:
    """Every process below `root`. sshd gives each connection a session of its own, so a process group is not enough."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{name}/stat").read_text()
                children.setdefault(int(text.rsplit(")", 1)[1].split()[1]), []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


try:
    import pytest
except ModuleNotFoundError:  # the benchmarks start servers too, in an environment without pytest
    pass
else:

    @pytest.fixture
    def sshd(tmp_path: Path, allow_subprocess: None) -> Iterator[Sshd]:
        with start_sshd(tmp_path / "sshd") as server:
            yield server

    @pytest.fixture
    def sshd_factory(tmp_path: Path, allow_subprocess: None) -> Iterator[Callable[..., Sshd]]:
        """`sshd_factory(environment=…, settings=…)` as often as a test needs."""
        with contextlib.ExitStack() as stack:
            numbers = itertools.count(1)

            def start(**options: object) -> Sshd:
                return stack.enter_context(start_sshd(tmp_path / f"sshd{next(numbers)}", **options))

            yield start
