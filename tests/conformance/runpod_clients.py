"""The vendor's own clients, unmodified: installed once into the user's cache from locks, driven from outside."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gpu_skills.bootstrap

HERE = Path(__file__).resolve().parent
SDK_LOCK = HERE / "runpod.lock"
MCP_LOCK = HERE / "runpod_mcp"
ANSWER_S = 60.0

# Runs in the SDK's own environment: one call per line of input, one answer per line of output.
_SDK_DRIVER = """
import json, sys
import runpod
runpod.api_key = json.loads(sys.stdin.readline())
for line in sys.stdin:
    name, arguments = json.loads(line)
    try:
        answer = {"value": getattr(runpod, name)(**arguments)}
    except Exception as exc:
        answer = {"error": type(exc).__name__, "message": str(exc)}
    print("answer " + json.dumps(answer), flush=True)
"""


class Raised(Exception):
    """What the client raised: its class, and its words."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


def sdk_python(environ: dict[str, str]) -> str:
    """The Python of an environment that holds the SDK."""
    command = [sys.executable, "-I", "-B", gpu_skills.bootstrap.__file__, "conformance", str(SDK_LOCK)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900)
    assert done.returncode == 0, done.stderr
    return str(Path(done.stdout.strip()) / "bin" / "python")


def mcp_server(environ: dict[str, str]) -> str:
    """The program of the MCP server; skips where there is no npm, unless this is CI."""
    npm = shutil.which("npm", path=environ.get("PATH"))
    if npm is None:
        if environ.get("CI"):
            pytest.fail("npm is not installed: the vendor's MCP server cannot be tried")
        pytest.skip("npm is not installed: the vendor's MCP server cannot be tried")
    key = hashlib.sha256((MCP_LOCK / "package-lock.json").read_bytes()).hexdigest()[:16]
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/tmp"), ".cache")
    folder = Path(home, "gpu-skills", f"npm-{key}")
    program = folder / "node_modules" / "@runpod" / "mcp-server" / "dist" / "stdio.mjs"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # one worker installs, the others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            for name in ("package.json", "package-lock.json"):
                shutil.copy(MCP_LOCK / name, folder / name)
            command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            done = subprocess.run(
                command, cwd=folder, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900
            )
            assert done.returncode == 0, done.stderr
            (folder / "whole").touch()
    return str(program)


class _Lines:
    """A process that answers line by line, with a deadline for each."""

    def __init__(self, command: list[str], environ: dict[str, str], cwd: Path):
        self._process = subprocess.Popen(
            command, env=environ, cwd=cwd, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._answers: queue.Queue[str | None] = queue.Queue()
        self.complaints: list[str] = []
        for stream, take in ((self._process.stdout, self._answers.put), (self._process.stderr, self.complaints.append)):
            threading.Thread(target=self._pump, args=(stream, take), daemon=True).start()

    def _pump(self, stream: Any, take: Any) -> None:
        for line in stream:
            take(line)
        if stream is self._process.stdout:
            self._answers.put(None)

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        line = self._answers.get(timeout=ANSWER_S)
        assert line is not None, f"the client ended: {''.join(self.complaints)}"
        return line

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Sdk:
    """The `runpod` package: `sdk("create_pod", name="x", …)`. Raises Raised for what it raises."""

    def __init__(self, python: str, url: str, key: str, home: Path):
        environ = {"PATH": os.environ["PATH"], "HOME": str(home), "RUNPOD_API_BASE_URL": url, "NO_PROXY": "127.0.0.1"}
        self._lines = _Lines([python, "-c", _SDK_DRIVER], environ, home)
        self._lines.say(json.dumps(key))

    def __call__(self, name: str, /, **arguments: Any) -> Any:
        self._lines.say(json.dumps([name, arguments]))
        while not (line := self._lines.hear()).startswith("answer "):
            pass  # the SDK prints here and there
        answer = json.loads(line.removeprefix("answer "))
        if "error" in answer:
            raise Raised(answer["error"], answer["message"])
        return answer["value"]

    def end(self) -> None:
        self._lines.end()


class Mcp:
    """The MCP server over stdio: `mcp("list-pods")` gives what the tool says, as JSON where it is JSON."""

    def __init__(self, program: str, url: str, key: str, home: Path):
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "RUNPOD_API_BASE_URL": url,
            "RUNPOD_API_KEY": key,
            "NO_PROXY": "127.0.0.1",
        }
        self._lines = _Lines(["node", program], environ, home)
        self._number = 0
        client = {"name": "tests", "version": "1"}
        self.ask("initialize", protocolVersion="2025-03-26", capabilities={}, clientInfo=client)
        self._lines.say(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}))

    def ask(self, method: str, /, **params: Any) -> Any:
        self._number += 1
        self._lines.say(json.dumps({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}))
        while (answer := json.loads(self._lines.hear())).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def __call__(self, tool: str, /, **arguments: Any) -> Any:
        result = self.ask("tools/call", name=tool, arguments=arguments)
        text = "".join(part.get("text", "") for part in result["content"])
        if result.get("isError"):
            raise Raised("tool error", text)
        try:
            return json.loads(text)
        except ValueError:
            return text

    def end(self) -> None:
        self._lines.end()


@contextmanager
def ended(client: Any) -> Iterator[Any]:
    try:
        yield client
    finally:
        client.end()
