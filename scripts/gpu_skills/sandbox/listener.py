"""HTTP/1.1 on loopback: requests off the socket and replies onto it.

Not the standard library's request handler: that reads headers with the parser for mail, which costs more than all the
rest of a request here.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from gpu_skills.sandbox.face import Reply, Request
from gpu_skills.sandbox.http import HangUp, Service

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_LINE_BYTES = 65536
MAX_HEADERS = 100
LAST_ANSWERS_S = 0.5
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class BadRequest(Exception):
    """What came is no request to answer in full: the reply, and the end of the connection."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.reply = Reply(status, {"error": "invalid_request", "msg": message})


class _Connection(socketserver.StreamRequestHandler):
    # Without these two every keep-alive request waits 44 ms for a delayed acknowledgement.
    disable_nagle_algorithm = True
    wbufsize = 65536
    timeout = 120  # of silence between two requests
    server: HttpServer

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def handle(self) -> None:
        try:
            while self._serve_one():
                pass
        except TimeoutError:
            pass  # the client has nothing more to say

    def _serve_one(self) -> bool:
        """Answer one request; False when the connection is to end."""
        try:
            request = self._read()
        except BadRequest as exc:
            self._send(exc.reply, is_last=True)
            return False
        if request is None:
            return False
        self.server.answering.add(self.connection)
        try:
            return self._answer(request)
        finally:
            self.server.answering.discard(self.connection)

    def _answer(self, request: Request) -> bool:
        try:
            reply = self.server.service.answer(request)
        except HangUp as exc:
            self._hang_up(exc.reply)
            return False
        is_last = request.headers.get("connection", "").lower() == "close" or isinstance(reply.body, Iterator)
        self._send(reply, is_last=is_last, has_body=request.method != "HEAD")
        return not is_last

    # reading -------------------------------------------------------------------------------------------------------

    def _read(self) -> Request | None:
        """The next request; None when the client is done. Raises BadRequest."""
        line = self._line()
        if not line:
            return None
        words = line.decode("latin-1").split()
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise BadRequest(400, "that is no HTTP/1.1 request")
        headers = self._headers()
        if words[2] == "HTTP/1.0":
            headers["connection"] = "close"
        if headers.get("host", LOOPBACK_NAMES[0]).rsplit(":", 1)[0] not in LOOPBACK_NAMES:
            # A web page that resolves its own name to loopback must not reach us.
            raise BadRequest(421, "the sandbox answers to loopback names only")
        raw = self._body(headers)
        if raw is None:
            return None
        path, _, query = words[1].partition("?")
        return Request(words[0], path, query, headers, raw, self.server.url)

    def _line(self) -> bytes:
        line = self.rfile.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            raise BadRequest(414, "a line is too long")
        return line

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for _ in range(MAX_HEADERS + 1):
            line = self._line()
            if line in (b"\r\n", b"\n"):
                return headers
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or not name.strip():
                raise BadRequest(400, "a header line has no colon")
            headers[name.strip().lower()] = value.strip()
        raise BadRequest(431, "too many headers")

    def _body(self, headers: dict[str, str]) -> bytes | None:
        length_text = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not (length_text.isascii() and length_text.isdigit()):
            raise BadRequest(400, "the body needs a Content-Length")
        if len(length_text) > 10 or int(length_text) > MAX_BODY_BYTES:
            raise BadRequest(413, "the body is too large")
        length = int(length_text)
        if headers.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wfile.flush()
        raw = self.rfile.read(length) if length else b""
        return raw if len(raw) == length else None

    # writing -------------------------------------------------------------------------------------------------------

    def _send(self, reply: Reply, *, is_last: bool, has_body: bool = True) -> None:
        stream = reply.body if isinstance(reply.body, Iterator) else None
        body = b"" if stream is not None else reply.encoded()
        length = None if stream is not None or reply.status == 204 else len(body)
        self.wfile.write(self._head(reply, length, is_last=is_last))
        if has_body:
            self.wfile.write(body)
            if stream is not None:
                self.wfile.flush()  # a stream says at once that it has begun, however long its first piece takes
            for piece in stream or ():
                self.wfile.write(piece)
                self.wfile.flush()
        self.wfile.flush()

    def _head(self, reply: Reply, length: int | None, *, is_last: bool) -> bytes:
        lines = [f"HTTP/1.1 {reply.status} {_PHRASES.get(reply.status, 'Unknown')}", f"Date: {self.server.date()}"]
        if length or (length is None and reply.status != 204):
            lines.append(f"Content-Type: {reply.content_type}")
        if length is not None:
            lines.append(f"Content-Length: {length}")
        if is_last:
            lines.append("Connection: close")
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def _hang_up(self, reply: Reply | None) -> None:
        """Nothing, or the head and half of the body, and then the end of the connection."""
        if reply is not None:
            body = reply.encoded()
            self.wfile.write(self._head(reply, max(len(body), 2), is_last=False) + body[: len(body) // 2])
            self.wfile.flush()
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client was faster


class HttpServer(socketserver.ThreadingTCPServer):
    """Listens on loopback, a thread per connection. `url` is the origin for every vendor."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, service: Service, port: int = 0):
        self.service = service
        super().__init__(("127.0.0.1", port), _Connection)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread: threading.Thread | None = None
        self._date = (0, "")
        self.connections: set[socket.socket] = set()
        self.answering: set[socket.socket] = set()

    def start(self) -> None:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="sandbox http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self.shutdown()
            self._thread.join(10)
        self.server_close()
        ends = time.monotonic() + LAST_ANSWERS_S
        while self.answering and time.monotonic() < ends:
            time.sleep(0.002)  # the answer to `down` is one of them
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # nobody goes on talking to a sandbox that has ended

    def date(self) -> str:
        """Now, as HTTP writes it; made once a second."""
        second = int(time.time())
        if self._date[0] != second:
            self._date = (second, formatdate(second, usegmt=True))
        return self._date[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        exc = sys.exc_info()[1]
        if not isinstance(exc, ConnectionError | TimeoutError):
            self.service.world.crashes.append(traceback.format_exc())
