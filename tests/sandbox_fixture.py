"""Sandboxes for tests, and a plain client for them.

    def test_something(make_sandbox):
        sandbox = make_sandbox(seed=3, delays={"loading_s": 30})
        api = Wire(sandbox, "vast")
        status, body = api("GET", "/api/v0/users/current/")

`make_sandbox` gives as many as a test needs; a test fails when its sandbox met a defect of its own, or answered unlike
the vendor's OpenAPI file (openapi_check.py). Real machines need `real=True`, which also allows processes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

import openapi_check
from gpu_skills.sandbox import Sandbox
from sshd import make_key


class Wire:
    """One keep-alive connection with one key. `key=None` sends none."""

    def __init__(self, sandbox: Sandbox, vendor: str = "vast", *, key: str | None = "", timeout_s: float = 20):
        address = urlsplit(sandbox.url)
        self.sandbox = sandbox
        self.key = sandbox.key(vendor) if key == "" else key
        self._connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=timeout_s)

    def __call__(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **query: Any) -> Any:
        """(status, JSON). query: values that are no text go as JSON. A broken answer raises what http.client raises."""
        status, _, data = self.full(method, path, body, raw=raw, **query)
        return status, json.loads(data) if data else None

    def full(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **query: Any
    ) -> tuple[int, dict[str, str], bytes]:
        if query:
            texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in query.items()}
            path += "?" + "&".join(f"{name}={quote(value)}" for name, value in texts.items())
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        payload = raw if raw is not None else None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, path, payload, {**headers, "Content-Type": "application/json"})
            response = self._connection.getresponse()
            data = response.read()
        except Exception:
            self._connection.close()
            raise
        return response.status, {name.lower(): value for name, value in response.getheaders()}, data

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def make_sandbox(tmp_path: Path, guard: Any) -> Iterator[Callable[..., Sandbox]]:
    """`make_sandbox(real=False, **options of Sandbox)`; frozen unless told otherwise."""
    with contextlib.ExitStack() as stack:
        made: list[Sandbox] = []
        complaints: list[str] = []

        def make(*, real: bool = False, **options: Any) -> Sandbox:
            if real:
                guard.subprocess_allowed = True
            options = {"frozen": True, "containers": real, "directory": tmp_path / f"sandbox{len(made)}", **options}
            made.append(stack.enter_context(Sandbox(**options)))
            openapi_check.watch(made[-1], complaints)
            return made[-1]

        yield make
        for sandbox in made:
            assert sandbox.settle(), "real work of the sandbox does not end"
            assert list(sandbox.world.crashes) == []
        assert not complaints, "unlike the vendor's OpenAPI file: " + "\n".join(dict.fromkeys(complaints))


@pytest.fixture
def login_key(tmp_path: Path, allow_subprocess: None) -> Path:
    """A key pair of a user; `.pub` beside it."""
    return make_key(tmp_path / "login_key")


def ssh(key: Path, port: int, command: str, *, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    """One command over the real ssh, with nothing of this user's configuration."""
    from gpu_skills.sandbox.containers import USER

    words = ["ssh", "-F", "/dev/null", "-i", str(key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
    words += ["-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"]
    words += ["-p", str(port), f"{USER}@127.0.0.1", command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)


def eventually(condition: Callable[[], Any], *, within_s: float = 10.0) -> Any:
    """The first true value of `condition`, for what real processes do."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value
