"""A tiny client for the runner: frames over the pipes of a real process, nothing of the package in between."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RUNNER = Path(__file__).resolve().parents[2] / "scripts" / "gpu_skills" / "remote" / "runner.py"


class Refused(Exception):
    def __init__(self, error: dict[str, Any]):
        super().__init__(error["message"])
        self.code, self.details = error["code"], error["details"]


class RunnerClient:
    def __init__(
        self,
        root: Path,
        *,
        project: str = "p-test",
        python: str = sys.executable,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ):
        self.project, self.root = project, root
        self.process = subprocess.Popen(
            [*prefix, python, "-I", str(RUNNER), "serve", "--root", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        line = self.process.stdout.readline()
        assert line.startswith(b"GPU-SKILLS-RUNNER "), line
        self.greeting = json.loads(line.split(b" ", 1)[1])

    def __enter__(self) -> RunnerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> int:
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(timeout=20)

    @property
    def folder(self) -> Path:
        return self.root / "projects" / self.project

    def frame(self, header: dict[str, Any], data: bytes | None = None) -> None:
        if data is not None:
            header = {**header, "n": len(data)}
        self.process.stdin.write(json.dumps(header).encode() + b"\n" + (data or b""))

    def ask(
        self, verb: str, body: Iterable[tuple[dict[str, Any], bytes]] | None = None, **args: Any
    ) -> tuple[dict[str, Any], list]:
        """The result and the data frames of one request; Refused when the machine says no."""
        self.frame({"verb": verb, "args": {"project": self.project, **args}})
        if body is not None:
            for header, data in body:
                self.frame(header, data)
            self.frame({"end": True})
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> tuple[dict[str, Any], list]:
        frames = []
        while True:
            line = self.process.stdout.readline()
            assert line.endswith(b"\n"), f"the runner closed the connection: {line!r}"
            assert len(line) <= 64 << 10
            header = json.loads(line)
            if "ok" in header:
                if not header["ok"]:
                    raise Refused(header["error"])
                return header["result"], frames
            assert 0 <= header["n"] <= 4 << 20
            frames.append((header, self.process.stdout.read(header["n"])))

    def call(self, verb: str, **args: Any) -> dict[str, Any]:
        return self.ask(verb, **args)[0]

    def data(self, verb: str, **args: Any) -> bytes:
        return b"".join(data for _, data in self.ask(verb, **args)[1])

    # what most tests need

    def upload(self, files: dict[str, bytes], modes: dict[str, int] | None = None) -> str:
        """Offer, put and seal a directory given as path → content; its tree."""
        manifest = manifest_of(files, modes)
        tree = hashlib.sha256(manifest).hexdigest()
        _, frames = self.ask("offer", [({}, manifest)], tree=tree)
        by_digest = {hashlib.sha256(content).hexdigest(): content for content in files.values()}
        missing = [json.loads(line) for line in b"".join(data for _, data in frames).splitlines()]
        if missing:
            body = [({"sha256": m["sha256"], "size": m["size"], "offset": 0}, by_digest[m["sha256"]]) for m in missing]
            self.ask("put", body)
        assert self.call("seal", tree=tree) == {"known": True}
        return tree

    def start(
        self,
        run: str,
        *,
        job: str = "J-000001",
        nonce: str | None = None,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        **spec: Any,
    ):
        tree = spec.pop("tree", None) or self.upload({})
        wanted = {"id": job, "nonce": nonce or self.nonce(job), "tree": tree, "run": run, **spec}
        return self.call("start", job=wanted, env=env or {})

    def nonce(self, job: str = "J-000001") -> str:
        """Not the same in two tests that run at once: it marks the processes of the job."""
        return f"n-{job}-{hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]}"

    def carriers(self, job: str = "J-000001") -> list[int]:
        return carriers(self.nonce(job))

    def status(self, job: str = "J-000001") -> dict[str, Any]:
        return self.call("status", jobs=[job])["jobs"][0]

    def wait(self, job: str = "J-000001", limit_s: float = 30) -> dict[str, Any]:
        """The status once the job has ended."""
        return eventually(lambda: (s := self.status(job))["state"] != "running" and s, limit_s)

    def run(self, command: str, *, job: str = "J-000001", limit_s: float = 30, **spec: Any) -> dict[str, Any]:
        self.start(command, job=job, **spec)
        return self.wait(job, limit_s)

    def log(self, job: str = "J-000001", offset: int = 0) -> bytes:
        found = b""
        while True:
            result, frames = self.ask("log", job=job, offset=offset)
            found += b"".join(data for _, data in frames)
            offset = result["next"]
            if not frames:
                return found

    def events(self, job: str = "J-000001") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.data("events", job=job, offset=0).splitlines()]

    def manifest(self, job: str = "J-000001") -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        result, frames = self.ask("manifest", job=job)
        entries = [json.loads(line) for line in b"".join(data for _, data in frames).splitlines()]
        return result, {entry["path"]: entry for entry in entries}

    def supervisor_pid(self, job: str = "J-000001") -> int:
        return json.loads((self.folder / "jobs" / job / "state.json").read_text())["pid"]


def manifest_of(files: dict[str, bytes], modes: dict[str, int] | None = None) -> bytes:
    lines = []
    for path in sorted(files, key=str.encode):
        entry = {
            "mode": (modes or {}).get(path, 0o644),
            "path": path,
            "sha256": hashlib.sha256(files[path]).hexdigest(),
            "size": len(files[path]),
        }
        lines.append(json.dumps(entry, sort_keys=True, separators=(",", ":")) + "\n")
    return "".join(lines).encode()


def eventually(look: Callable[[], Any], limit_s: float = 20) -> Any:
    """The first true answer; fails after limit_s."""
    until = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < until, f"not within {limit_s} s"
        time.sleep(0.03)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def find_start(pid: int) -> str:
    """When a process began, as the system counts it: with its number it names one process."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]


def carriers(nonce: str) -> list[int]:
    """The pids of all processes that carry the marker of a job."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"GPU_JOB_NONCE={nonce}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                pass
    return [pid for pid in found if is_alive(pid)]


def leave_nothing(root: Path) -> None:
    """End what a test left running below `root`: servers, supervisors, watchers and the processes of jobs."""
    wanted = os.fsencode(root) + b"/"
    for _ in range(100):
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                try:
                    told = (folder / "cmdline").read_bytes() + b"/" + (folder / "environ").read_bytes()
                except OSError:
                    continue
                if (wanted in told or os.fsencode(root) + b"\0" in told) and is_alive(int(folder.name)):
                    found.append(int(folder.name))
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)
    raise AssertionError(f"still running: {found}")
