"""An example's server as a process of its own, and a plain HTTP client that keeps what a server really said."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "a-key-of-the-tests"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Running:
    process: subprocess.Popen
    port: int
    log: Path
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {KEY}"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
            connection.request(method, path, data, self.headers if headers is None else headers)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()


@contextmanager
def running(server: Path, variable: str, *options: str, log: Path) -> Iterator[Running]:
    """The server on a port of its own choice, told to end and waited for afterwards."""
    environ = {**os.environ, variable: KEY, "PYTHONDONTWRITEBYTECODE": "1"}
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(server), "--port", "0", *options],
            env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)", first)
            assert found, (first, log.read_text())
            yield Running(process, int(found[1]), log)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
