"""Services: what is started once, is there until it is told to end, and comes back with its machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remote.runner_client import Refused, RunnerClient, eventually, is_alive

pytestmark = pytest.mark.subprocess

NAME = "dep_a1"
SERVER = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/slow": time.sleep(30)
        if self.path == "/die": os._exit(7)
        body = str(os.getpid()).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def serve(machine: RunnerClient, port: int, run: str | None = None, **spec: object) -> dict:
    tree = machine.upload({"server.py": SERVER.encode()})
    command = run or f"echo here; exec {sys.executable} server.py {port}"
    return machine.start(command, job=NAME, tree=tree, service={"port": port}, **spec)


def ask(port: int, path: str = "/", timeout_s: float = 5.0) -> bytes | None:
    """The body of one answer; None where nobody answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as line:
            line.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            said = b""
            while piece := line.recv(4096):
                said += piece
    except OSError:
        return None
    return said.partition(b"\r\n\r\n")[2] or None


def served(port: int) -> int:
    return int(eventually(lambda: ask(port)))


def set_deadline(machine: RunnerClient, in_s: float | None, name: str = "s1", **more: object) -> None:
    machine.call("session", session={"id": name, "deadline_in_s": in_s, "on_expiry": "record", **more})


def test_a_service_outlives_the_connection_that_started_it(root: Path, port: int) -> None:
    with RunnerClient(root) as machine:
        assert serve(machine, port)["state"] == "running"
    pid = served(port)
    with RunnerClient(root) as machine:
        shown = machine.status(NAME)
        assert (shown["state"], shown["phase"]) == ("running", "run")
        assert shown["service"]["port"] == port and shown["service"]["restarts"] == 0
        assert machine.log(NAME).startswith(b"here\n")
        machine.call("cancel", job=NAME, wait_s=5)
        assert machine.wait(NAME)["state"] == "cancelled"
    assert not is_alive(pid)


def test_a_service_that_ends_is_started_again_and_says_how_it_ended(machine: RunnerClient, port: int) -> None:
    serve(machine, port)
    first = served(port)
    ask(port, "/die")
    second = eventually(lambda: (found := ask(port)) and int(found) != first and int(found))
    assert second != first
    shown = machine.status(NAME)["service"]
    assert (shown["restarts"], shown["last_exit_code"]) == (1, 7)
    assert b"ended with exit code 7; it starts again in 1 s" in machine.log(NAME)


def test_pauses_between_starts_grow_and_a_cancel_needs_not_wait_for_one(machine: RunnerClient, port: int) -> None:
    serve(machine, port, "exit 3")
    eventually(lambda: b"starts again in 2 s" in machine.log(NAME))
    began = time.monotonic()
    machine.call("cancel", job=NAME, wait_s=5)
    assert machine.wait(NAME)["state"] == "cancelled" and time.monotonic() - began < 4


def test_what_is_left_of_one_life_ends_before_the_next(machine: RunnerClient, port: int) -> None:
    """A worker that keeps the port would keep its successor out."""
    serve(machine, port, f"{sys.executable} server.py {port} & sleep 0.7; exit 1")
    first = served(port)
    eventually(lambda: (found := ask(port)) and int(found) != first)
    assert not is_alive(first)


def test_a_service_whose_supervisor_was_killed_goes_on_with_its_log(machine: RunnerClient, port: int) -> None:
    serve(machine, port)
    first = served(port)
    os.kill(machine.supervisor_pid(NAME), signal.SIGKILL)
    shown = eventually(lambda: (s := machine.status(NAME)) and s["service"] and s["service"]["restarts"] == 1 and s)
    assert shown["state"] == "running"
    second = eventually(lambda: (found := ask(port)) and int(found) != first and int(found))
    assert not is_alive(first) and is_alive(second)
    assert machine.log(NAME).count(b"here\n") == 2
    assert [event["event"] for event in machine.events(NAME)] == ["service_restarted"]


def reboot(machine: RunnerClient) -> None:
    """As far as records go: the supervisor is gone and belonged to another boot."""
    state = machine.folder / "jobs" / NAME / "state.json"
    pid = machine.supervisor_pid(NAME)
    os.kill(pid, signal.SIGKILL)
    for carrier in machine.carriers(NAME):
        os.kill(carrier, signal.SIGKILL)
    eventually(lambda: not is_alive(pid))
    state.write_text(json.dumps(json.loads(state.read_text()) | {"boot_id": "another"}))


def test_a_machine_that_starts_anew_has_its_services_again_without_anybody(root: Path, port: int) -> None:
    intent = "p" + "0" * 16
    fuse = root.parent / ".gpu-fuse" / intent
    fuse.mkdir(parents=True)
    with RunnerClient(root) as machine:
        machine.call("session", session={"id": "s1", "deadline_in_s": 600, "on_expiry": "fuse", "fuse": intent})
        serve(machine, port)
        first = served(port)
        reboot(machine)
    assert ask(port) is None
    subprocess.run(["bash", str(fuse / "boot")], check=True, timeout=20)
    assert served(port) != first


def test_the_next_request_revives_a_service_where_nothing_runs_at_boot(root: Path, port: int) -> None:
    with RunnerClient(root) as machine:
        serve(machine, port)
        first = served(port)
        reboot(machine)
    with RunnerClient(root) as machine:
        machine.call("session")
        assert served(port) != first


def test_the_end_of_a_session_suspends_a_service_until_there_is_another(machine: RunnerClient, port: int) -> None:
    set_deadline(machine, 600)
    serve(machine, port)
    served(port)
    set_deadline(machine, 0.5)
    eventually(lambda: machine.status(NAME)["state"] == "suspended")
    assert ask(port) is None
    set_deadline(machine, 600, "s2")
    assert eventually(lambda: machine.status(NAME)["state"] == "running")
    assert served(port)


def test_a_suspended_service_can_be_told_to_end(machine: RunnerClient, port: int) -> None:
    set_deadline(machine, 600)
    serve(machine, port)
    set_deadline(machine, 0.3)
    eventually(lambda: machine.status(NAME)["state"] == "suspended")
    machine.call("cancel", job=NAME)
    assert machine.wait(NAME)["state"] == "cancelled"
    machine.call("forget", job=NAME)


def test_a_service_is_no_job(machine: RunnerClient, port: int) -> None:
    """It has no line in a ledger, and does not keep a machine that nobody asks for anything."""
    serve(machine, port)
    assert machine.call("jobs")["jobs"] == []
    set_deadline(machine, None, idle_timeout_s=1)
    eventually(lambda: machine.call("session")["session"]["expired_why"] == "idle")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells on Linux only")
def test_a_request_that_waits_for_its_answer_is_work(machine: RunnerClient, port: int) -> None:
    serve(machine, port)
    served(port)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
        set_deadline(machine, None, idle_timeout_s=1)
        time.sleep(4)
        assert machine.call("session")["session"]["expired_why"] is None
    eventually(lambda: machine.call("session")["session"]["expired_why"] == "idle")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells on Linux only")
def test_a_connection_that_is_kept_open_is_no_work(machine: RunnerClient, port: int) -> None:
    serve(machine, port)
    served(port)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert line.recv(4096)
        set_deadline(machine, None, idle_timeout_s=1)
        eventually(lambda: machine.call("session")["session"]["expired_why"] == "idle")


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": "J-000001"},
        {"service": None},
        {"service": {"port": 0}},
        {"service": {"port": "80"}},
        {"service": 80},
        {"setup": "true"},
        {"timeout_s": 5},
        {"expect": ["a"]},
        {"secret": ["HF_TOKEN"]},
        {"job": "dep_../../x"},
    ],
)
def test_what_is_no_whole_service_is_refused(machine: RunnerClient, wrong: dict) -> None:
    with pytest.raises(Refused) as refused:
        machine.start("true", **{"job": NAME, "service": {"port": 8000}, "nonce": "n", **wrong})
    assert refused.value.code == "bad_request"


def test_what_starts_a_service_is_for_its_user_only(machine: RunnerClient, port: int) -> None:
    serve(machine, port, env={"TOKEN": "of-the-service"})
    kept = machine.folder / "jobs" / NAME / "wire.json"
    assert kept.stat().st_mode & 0o777 == 0o600 and "of-the-service" in kept.read_text()
    assert b"of-the-service" not in (machine.folder / "jobs" / NAME / "job.json").read_bytes()
