"""Starting, finding and asking the sandbox process of a directory. The other side is server.py."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpu_skills.errors import Failed, UsageError
from gpu_skills.sandbox import processes

INFO_NAME = "sandbox.json"
_USER = "user-"
START_TIMEOUT_S = 20.0
_SECRET_NAME = re.compile(r"(?i)key|token|secret|passw|credential")


class SandboxFailed(Failed):
    code = "sandbox_failed"
    template = "the sandbox does not start: {reason}"
    next_step = "gpu sandbox up"


class NoSandbox(UsageError):
    code = "no_sandbox"
    template = "no sandbox runs in {directory}"
    next_step = "gpu sandbox up"


class SandboxRefused(UsageError):
    code = "sandbox_refused"
    template = "the sandbox refused: {reason}"
    next_step = "gpu sandbox chaos --help"


@dataclass(frozen=True)
class Running:
    """A sandbox that answers. keys: one full key per provider."""

    directory: Path
    url: str
    pid: int
    token: str
    keys: dict[str, str]
    ssh_user: str
    seed: int

    @property
    def user_home(self) -> Path:
        """Where its customer keeps what belongs to the user, not the project: accounts, runs, keys. It goes with it.

        Named by the token, which each start makes anew: what an earlier world left there is nobody's.
        """
        return self.directory / f"{_USER}{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"

    def ask(self, method: str, call: str, body: dict[str, Any] | None = None, *, timeout_s: float = 120) -> Any:
        """One admin call. Raises NoSandbox when it went away, SandboxRefused when it says no."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=timeout_s)
        try:
            connection.request(method, f"/_sandbox/{call}", json.dumps(body or {}), {"X-Sandbox-Token": self.token})
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as exc:
            raise NoSandbox(directory=str(self.directory)) from exc
        finally:
            connection.close()
        if response.status != 200:
            raise SandboxRefused(reason=str(answer.get("error", response.status)))
        return answer


def find(directory: Path) -> Running | None:
    """The sandbox that runs there and answers, or None."""
    running = _read(directory)
    if running is None:
        return None
    try:
        running.ask("GET", "status", timeout_s=10)
    except (NoSandbox, SandboxRefused):
        return None
    return running


def require(directory: Path) -> Running:
    running = find(directory)
    if running is None:
        raise NoSandbox(directory=str(directory))
    return running


def _read(directory: Path) -> Running | None:
    path = directory / INFO_NAME
    try:
        if path.stat().st_uid != os.geteuid():
            return None  # somebody else's: its keys and URL mean nothing to us
        content = json.loads(path.read_text(encoding="utf-8"))
        address = urlsplit(content["url"])
        if address.scheme != "http" or address.hostname != "127.0.0.1":
            return None
        return Running(
            directory,
            str(content["url"]),
            int(content["pid"]),
            str(content["token"]),
            {str(name): str(key) for name, key in content["keys"].items() if str(key).startswith("sbx_")},
            str(content["ssh_user"]),
            int(content["seed"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def start(directory: Path, options: list[str]) -> tuple[Running, bool]:
    """Start one, or find the one that runs. Returns it and whether it is new. options: those of server.py."""
    running = find(directory)
    if running is not None:
        return running, False
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    package_parent = str(Path(__file__).resolve().parent.parent.parent)
    # A sandbox has no use for the keys of real accounts, so it never has them.
    environment = {name: value for name, value in os.environ.items() if not _SECRET_NAME.search(name)}
    environment["PYTHONPATH"] = package_parent
    log = directory / "sandbox.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_skills.sandbox", str(directory), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (running := _read(directory)) is not None and running.pid == process.pid:
            _forget_users(directory, but=running.user_home)
            return running, True
        if process.poll() is not None:
            if process.returncode == 3 and (running := _wait_for_the_other(directory, deadline)) is not None:
                return running, False
            break
        time.sleep(0.01)
    else:
        process.kill()
        process.wait()
    raise SandboxFailed(reason=_last_line(log))


def _wait_for_the_other(directory: Path, deadline: float) -> Running | None:
    """Another `up` was faster by a moment."""
    while time.monotonic() < deadline:
        if (running := find(directory)) is not None:
            return running
        time.sleep(0.05)
    return None


def stop(directory: Path) -> dict[str, Any] | None:
    """End the one that runs there; None when none does. Returns once its process is gone, and what it was used for."""
    running = find(directory)
    if running is None:
        _forget_users(directory)
        return None
    answer = running.ask("POST", "down")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # A dead process that nobody has collected yet has no start time: it has ended.
        if not (directory / INFO_NAME).exists() and processes.start_time(running.pid) is None:
            _forget_users(directory)
            return answer
        time.sleep(0.02)
    raise SandboxFailed(reason=f"process {running.pid} does not end")


def _forget_users(directory: Path, *, but: Path | None = None) -> None:
    """Remove what customers of sandboxes that have ended kept here."""
    for place in directory.glob(f"{_USER}*"):
        if place != but:
            shutil.rmtree(place, ignore_errors=True)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"
