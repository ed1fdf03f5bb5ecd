"""A port of a machine's loopback as a port of ours, over the connection that is open; both ends are loopback only.

A connection here becomes one channel there. What the machine does not take is closed at once, so that a client sees a
service that is not there. A local machine needs no tunnel: its loopback is ours.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from gpu_skills.doors import door
from gpu_skills.errors import NotWritable, RemoteError
from gpu_skills.remote.session import Session

MAX_CONNECTIONS = 64
ENDS_WITHIN_S = 2.0
READ_BYTES = 1 << 16


class _Forwards(Protocol):
    def open_port(self, port: int) -> Any: ...


@contextlib.contextmanager
def open_tunnel(session: Session, port: int) -> Iterator[str]:
    """The base URL here of an HTTP service on that port there. It ends with the block, and so do its connections.

    A connection to the machine that broke is made again by the next request through the tunnel.
    """
    if not hasattr(session.transport, "open_port"):
        yield f"http://127.0.0.1:{port}"
        return
    tunnel = Tunnel(session.transport, port)
    try:
        yield f"http://127.0.0.1:{tunnel.port}"
    finally:
        tunnel.close()


class Tunnel:
    """Listens on a port of the kernel's choice until it is closed. problem: why the last connection failed."""

    def __init__(self, transport: _Forwards, port: int, *, max_connections: int = MAX_CONNECTIONS):
        self.problem: RemoteError | None = None
        self._transport = transport
        self._port_there = port
        self._free = threading.BoundedSemaphore(max_connections)
        self._ends = threading.Event()
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        try:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=max_connections)
        except OSError as exc:
            raise NotWritable(path="a port of 127.0.0.1", reason=exc.strerror or str(exc)) from exc
        self._listener.settimeout(0.2)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True, name=f"tunnel-{self.port}")]
        self._threads[0].start()

    def close(self) -> None:
        self._ends.set()
        self._listener.close()
        with self._guard:
            for client in self._open:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(ENDS_WITHIN_S)

    def _accept(self) -> None:
        while not self._ends.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                self._threads = [t for t in self._threads if t.is_alive()]
                continue
            except OSError:
                return
            if not self._free.acquire(blocking=False):  # a client with so many open requests is told, not queued
                client.close()
                continue
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with self._guard:
            self._open.add(client)
        try:
            channel = self._reach()
            if channel is not None:
                _carry(client, channel, self._ends)
        finally:
            with self._guard:
                self._open.discard(client)
            client.close()
            self._free.release()

    @door("remote.execute")
    def _reach(self) -> Any:
        try:
            channel = self._transport.open_port(self._port_there)
        except RemoteError as exc:
            self.problem = exc
            return None
        self.problem = None
        return channel


def _carry(client: socket.socket, channel: Any, ends: threading.Event) -> None:
    """Bytes both ways until both sides have ended, or one is gone."""
    client.settimeout(None)
    is_open = {client: True, channel: True}
    other = {client: channel, channel: client}
    try:
        while any(is_open.values()) and not ends.is_set():
            readable, _, _ = select.select([end for end in is_open if is_open[end]], [], [], 0.5)
            for end in readable:
                data = end.recv(READ_BYTES)
                if data:
                    other[end].sendall(data)
                    continue
                is_open[end] = False
                if end is client:
                    channel.shutdown_write()
                else:
                    client.shutdown(socket.SHUT_WR)
    except (OSError, EOFError):
        return
    finally:
        channel.close()
