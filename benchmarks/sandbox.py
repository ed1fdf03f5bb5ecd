"""The sandbox: how fast it starts, how many requests it serves, and what 64 machines with live SSH weigh."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpu_skills.sandbox import client, processes
from report import Figure

CLIENTS = 16
SECONDS = 4.0
REQUESTS_PER_S = 2000
MACHINES = 64
MEMORY_MB = 1000


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "sandbox"
        began = time.perf_counter()
        running, _ = client.start(directory, ["--limits", "off", "--balance-usd", "100000", "--delays", _no_delays()])
        started_s = time.perf_counter() - began
        try:
            figures = [Figure("sandbox up", started_s, "promised", 2.0, limit=1.0)]
            for what, path in (("one user", "/api/v0/users/current/"), ("an empty list", "/api/v1/instances/")):
                rate = _requests_per_s(running, path)
                name = f"{REQUESTS_PER_S} requests of {CLIENTS} clients: {what}"
                figures.append(Figure(name, REQUESTS_PER_S / rate, "promised", 1.0, limit=1.0))
            figures += _machines(running)
            return figures
        finally:
            client.stop(directory)


def _no_delays() -> str:
    return json.dumps({"provisioning_s": 0, "loading_s": 0})


def _requests_per_s(running: client.Running, path: str) -> float:
    """Keep-alive requests that all clients together had answered in a second; each client is a process."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(CLIENTS), context.Queue()
    workers = [
        context.Process(target=_client, args=(running.url, running.keys["vast"], path, barrier, results))
        for _ in range(CLIENTS)
    ]
    for worker in workers:
        worker.start()
    answered = sum(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    return answered / SECONDS


def _client(url: str, key: str, path: str, barrier: Any, results: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port)
    headers = {"Authorization": f"Bearer {key}"}
    barrier.wait()
    answered, deadline = 0, time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.read()
        answered += response.status == 200
    results.put(answered)


def _machines(running: client.Running) -> list[Figure]:
    """64 at once: until SSH lets in on all of them, and the memory of everything together."""
    call = _caller(running)
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "id"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        call("POST", "/api/v0/ssh/", {"ssh_key": Path(f"{key}.pub").read_text()})
        began = time.perf_counter()
        _rent(call)
        ports = _wait_until_running(call)
        up_s = time.perf_counter() - began
        sessions = [_session(running, key, port) for port in ports]
        try:
            for session in sessions:
                assert session.stdout is not None and session.stdout.readline() == b"in\n"
            megabytes = _memory_mb(running.pid)
        finally:
            for session in sessions:
                session.terminate()
                session.wait()
    return [
        Figure(f"{MACHINES} machines until all run", up_s, "one minute", 60.0, limit=1.0),
        Figure(f"{MACHINES} machines with an SSH session each, in GB", megabytes / 1000, "promised", 1.0, limit=1.0),
    ]


def _caller(running: client.Running) -> Callable[..., Any]:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(running.url).port)

    def call(method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {running.keys['vast']}", "Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        return json.loads(connection.getresponse().read())

    return call


def _rent(call: Callable[..., Any]) -> None:
    rented = 0
    while rented < MACHINES:
        query = {"limit": 1000, "verified": {}, "rented": {"eq": True}, "num_gpus": {"eq": 1}}
        for offer in call("POST", "/api/v0/bundles/", query)["offers"]:
            if rented < MACHINES:
                body = {"image": "x", "disk": 10, "runtype": "ssh_direct", "cancel_unavail": True}
                rented += call("PUT", f"/api/v0/asks/{offer['id']}/", body)["success"]


def _wait_until_running(call: Callable[..., Any]) -> list[int]:
    while True:
        found, token = [], ""
        while token is not None:
            page = call("GET", f"/api/v1/instances/?limit=25&after_token={token}")
            found += page["instances"]
            token = page["next_token"]
        if len(found) == MACHINES and all(instance["actual_status"] == "running" for instance in found):
            return [instance["ssh_port"] for instance in found]
        time.sleep(0.05)


def _session(running: client.Running, key: Path, port: int) -> subprocess.Popen[bytes]:
    words = ["ssh", "-F", "/dev/null", "-i", str(key), "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    words += ["-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no", "-p", str(port)]
    words += [f"{running.ssh_user}@127.0.0.1", "echo in; sleep 60"]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


def _memory_mb(server: int) -> float:
    """Proportional memory of the server and all that runs below it."""
    everyone = processes.snapshot()
    family = {server}
    while more := {p.pid for p in everyone if p.parent in family and p.pid not in family}:
        family |= more
    return sum(_proportional_kb(pid) for pid in family) / 1000


def _proportional_kb(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as stream:
            return next(int(line.split()[1]) for line in stream if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


if __name__ == "__main__":
    sys.exit(os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("report.py")), "sandbox"]))
