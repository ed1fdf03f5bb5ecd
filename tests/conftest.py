"""Guards for every test: no socket but loopback, no process, a home of its own, no provider variable, a fake clock.

The guards hold during a test and its function-scoped fixtures. A fixture that starts something for a whole session or
module (an SSH server) is set up before them and is free; the test that talks to it through a program still says so,
with `@pytest.mark.subprocess` or by asking for `allow_subprocess`, itself or through a fixture.

They are one audit hook, so nothing that holds an older reference to `socket.socket` or `subprocess.Popen` gets past.
What they raise derives from BaseException, so that no `except Exception` of ours hides it; it is also remembered, and
fails the test at its end if something else swallowed it.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_clock import FakeClock

# As the caller had it: for the few slow tests that install packages with the user's own settings.
REAL_ENVIRONMENT = dict(os.environ)

_SCRUBBED_PREFIXES = (
    "VAST_", "VASTAI_", "RUNPOD_", "GPU_", "JAMBU_", "KURA_", "HF_", "HUGGING", "OPENAI_", "AWS_", "R2_", "S3_",
    "GIT_", "SSH_", "XDG_",
)  # fmt: skip
_SCRUBBED = {"NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES", "PAGER", "TERM", "CI"}
_STARTS_A_PROCESS = {
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
}  # fmt: skip


class ForbiddenInTests(BaseException):
    """A test reached for the outside world. It needs a fake, a loopback server, or the marker that allows it."""


class Guard:
    def __init__(self) -> None:
        self.active = False
        self.subprocess_allowed = False
        self.violations: list[str] = []

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in _STARTS_A_PROCESS:
            if not self.subprocess_allowed:
                self._refuse(f"{event} {args[1] if event == 'subprocess.Popen' else args[:1]}")
        elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            if not _is_local(args[1]):
                self._refuse(f"{event} {args[1]}")
        elif event == "socket.bind":
            if not _is_local(args[1]):
                self._refuse(f"socket.bind {args[1]}: servers of tests listen on loopback only")
        elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
            if not _is_local_host(args[0]):
                self._refuse(f"{event} {args[0]!r}")

    def _refuse(self, what: str) -> None:
        self.violations.append(what)
        raise ForbiddenInTests(what)


def _is_local(address: object) -> bool:
    if isinstance(address, tuple):
        return _is_local_host(address[0])
    return True  # AF_UNIX, AF_NETLINK; None is sendmsg on a connected socket


def _is_local_host(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


def _scrub(environ: Any) -> None:
    for name in list(environ):
        if name.startswith(_SCRUBBED_PREFIXES) or name in _SCRUBBED:
            del environ[name]


_guard = Guard()
sys.addaudithook(_guard.audit)
# Also before the first test, for whatever reads the environment while modules are imported.
_scrub(os.environ)


@pytest.fixture(autouse=True)
def guard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guard]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        _scrub(os.environ)
        patch.setenv("HOME", str(home))
        for name, folder in [
            ("XDG_CONFIG_HOME", ".config"),
            ("XDG_CACHE_HOME", ".cache"),
            ("XDG_DATA_HOME", ".local/share"),
            ("XDG_STATE_HOME", ".local/state"),
        ]:
            (home / folder).mkdir(parents=True)
            patch.setenv(name, str(home / folder))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        patch.setattr("gpu_skills.state.policy.account_home", lambda: home)
        _guard.violations.clear()
        _guard.subprocess_allowed = request.node.get_closest_marker("subprocess") is not None
        _guard.active = True
        try:
            yield _guard
        finally:
            _guard.active = False
    if _guard.violations:
        pytest.fail("reached for the outside world: " + "; ".join(_guard.violations))


@pytest.fixture
def allow_subprocess(guard: Guard) -> None:
    """For fixtures that start processes: whoever uses them may start processes too."""
    guard.subprocess_allowed = True


@pytest.fixture
def home(guard: Guard) -> Path:
    """The empty home directory of this test."""
    return Path(os.environ["HOME"])


@pytest.fixture
def fake_clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def real_environment() -> dict[str, str]:
    """The environment the tests were started with: package index settings, not credentials."""
    return {name: value for name, value in REAL_ENVIRONMENT.items() if not name.startswith(_SCRUBBED_PREFIXES)}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the session watchers that jobs of these tests left on this machine: they would go on for their idle time."""
    factory = getattr(session.config, "_tmp_path_factory", None)
    if factory is None:
        return
    ours = os.fsencode(str(factory.getbasetemp()))
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            argv = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0") if name.isdigit() else []
            if b"watch" in argv and any(arg.startswith(ours) for arg in argv):
                os.kill(int(name), signal.SIGTERM)
        except OSError:
            continue  # it ended by itself
