"""The guards of conftest.py hold: otherwise every other test proves less than it says."""

import os
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest


def caught(guard, action):
    """Run `action`, return what the guard refused, and forget it so that this test does not fail for it."""
    with pytest.raises(BaseException) as error:
        action()
    assert not isinstance(error.value, Exception), "an `except Exception` would hide it"
    refused = list(guard.violations)
    guard.violations.clear()
    return refused


def test_connecting_to_another_host_is_refused_before_a_packet_leaves(guard):
    with socket.socket() as s:
        assert caught(guard, lambda: s.connect(("192.0.2.1", 80))) == ["socket.connect ('192.0.2.1', 80)"]
    assert caught(guard, lambda: socket.create_connection(("gpu.example", 80))) == ["socket.getaddrinfo 'gpu.example'"]


def test_listening_on_all_addresses_is_refused(guard):
    with socket.socket() as s:
        assert len(caught(guard, lambda: s.bind(("0.0.0.0", 0)))) == 1


def test_loopback_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.getpeername() == server.getsockname()


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-c", ""]),
        lambda: os.system("true"),
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
        lambda: os.fork() or os._exit(0),
    ],
    ids=["Popen", "system", "posix_spawn", "fork"],
)
def test_starting_a_process_is_refused(guard, start):
    assert len(caught(guard, start)) == 1


@pytest.mark.subprocess
def test_a_marked_test_may_start_processes():
    assert subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout == "42\n"


def test_a_fixture_can_allow_processes(allow_subprocess):
    assert subprocess.run([sys.executable, "-c", "exit(7)"]).returncode == 7


def test_what_a_thread_swallowed_is_remembered(guard):
    def swallow():
        try:
            socket.getaddrinfo("gpu.example", 80)
        except BaseException:
            pass

    thread = threading.Thread(target=swallow)
    thread.start()
    thread.join()
    assert guard.violations == ["socket.getaddrinfo 'gpu.example'"]
    guard.violations.clear()


def test_home_is_an_empty_place_of_this_test(home, tmp_path_factory):
    assert Path.home() == home
    assert tmp_path_factory.getbasetemp() in home.parents
    assert [p for p in home.rglob("*") if p.is_file()] == []
    assert Path(os.environ["XDG_CACHE_HOME"]).parent == home


def test_no_provider_variable_is_left():
    assert not [name for name in os.environ if name.startswith(("VAST_", "RUNPOD_", "HF_", "GPU_", "AWS_"))]


def test_the_fake_clock_moves_only_when_told(fake_clock):
    before, began = fake_clock.now(), fake_clock.monotonic()
    seen = []
    fake_clock.at(90, lambda: seen.append(fake_clock.monotonic() - began))
    fake_clock.sleep(60)
    assert seen == []
    fake_clock.sleep(60)
    assert seen == [90]
    assert (fake_clock.now() - before).total_seconds() == 120 == fake_clock.monotonic() - began
    fake_clock.jump_wall(-3600)
    assert fake_clock.now() < before and fake_clock.monotonic() == began + 120
    assert datetime.now(UTC) != fake_clock.now()
