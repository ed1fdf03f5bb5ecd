"""Tunnels through a real SSH server to real servers behind it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gpu_skills.remote.session import Session
from gpu_skills.remote.transport import LocalTransport
from gpu_skills.remote.tunnel import Tunnel, open_tunnel
from remote.far_end import transport_to

pytestmark = pytest.mark.subprocess


@contextlib.contextmanager
def echo_server() -> Iterator[int]:
    """Sends back what it got once the client has ended its side."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(client: socket.socket) -> None:
            with client, contextlib.suppress(OSError):
                got = b""
                while piece := client.recv(1 << 16):
                    got += piece
                client.sendall(b"echo " + got)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def say(port: int, words: bytes, timeout_s: float = 10) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client:
        with contextlib.suppress(OSError):
            client.sendall(words)
            client.shutdown(socket.SHUT_WR)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                got += piece
        return got


def test_bytes_go_both_ways_and_many_connections_at_once(sshd, tmp_path):
    transport = transport_to(sshd, tmp_path)
    big = b"x" * 3_000_000
    with echo_server() as there, contextlib.closing(Tunnel(transport, there)) as tunnel:
        assert say(tunnel.port, big) == b"echo " + big
        answers: list[bytes] = []
        threads = [threading.Thread(target=lambda n=n: answers.append(say(tunnel.port, b"%d" % n))) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(answers) == sorted(b"echo %d" % n for n in range(20))
        assert sshd.log.count("Accepted publickey") == 1
    transport.close()


def test_a_connection_that_broke_is_made_again_by_the_next_request(sshd, tmp_path):
    transport = transport_to(sshd, tmp_path)
    with echo_server() as there, contextlib.closing(Tunnel(transport, there)) as tunnel:
        assert say(tunnel.port, b"one") == b"echo one"
        sshd.disconnect_all()
        deadline = time.monotonic() + 10
        while say(tunnel.port, b"two") != b"echo two":
            assert time.monotonic() < deadline, tunnel.problem
        assert tunnel.problem is None
    transport.close()


def test_a_port_with_nothing_behind_it_closes_at_once_and_says_why(sshd, tmp_path):
    transport = transport_to(sshd, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with contextlib.closing(Tunnel(transport, port)) as tunnel:
        assert say(tunnel.port, b"hello") == b""
        assert tunnel.problem is not None and tunnel.problem.code == "unreachable"
    transport.close()


def test_a_server_that_forwards_nothing_is_named_as_the_cause(sshd_factory, tmp_path):
    server = sshd_factory(settings=["AllowTcpForwarding no"])
    transport = transport_to(server, tmp_path)
    with echo_server() as there, contextlib.closing(Tunnel(transport, there)) as tunnel:
        assert say(tunnel.port, b"hello") == b""
        assert tunnel.problem is not None and "AllowTcpForwarding" in tunnel.problem.message
    transport.close()


def test_more_connections_than_allowed_are_turned_away_and_others_go_on(sshd, tmp_path):
    transport = transport_to(sshd, tmp_path)
    with echo_server() as there, contextlib.closing(Tunnel(transport, there, max_connections=1)) as tunnel:
        first = socket.create_connection(("127.0.0.1", tunnel.port), timeout=10)
        first.sendall(b"slow")
        deadline = time.monotonic() + 5
        while say(tunnel.port, b"too many") != b"":
            assert time.monotonic() < deadline
        first.shutdown(socket.SHUT_WR)
        assert first.recv(100).startswith(b"echo")
        first.close()
    transport.close()


def test_the_end_of_the_block_ends_its_connections_and_its_port(sshd, tmp_path):
    session = Session.open(transport_to(sshd, tmp_path))
    with echo_server() as there:
        with open_tunnel(session, there) as base_url:
            port = int(base_url.rpartition(":")[2])
            assert base_url == f"http://127.0.0.1:{port}"
            left_open = socket.create_connection(("127.0.0.1", port), timeout=10)
            left_open.sendall(b"never finished")
        with contextlib.suppress(ConnectionResetError):
            assert left_open.recv(100) == b""
        left_open.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1)
    session.close()


def test_this_machine_needs_no_tunnel(tmp_path, allow_subprocess):
    session = Session.open(LocalTransport(), root=str(tmp_path / "root"))
    with open_tunnel(session, 4321) as base_url:
        assert base_url == "http://127.0.0.1:4321"
    session.close()
