"""The two log streams of a pod as server-sent events: what its container printed, and what its host did with it.

A line is stamped when it is first seen here, on the vendor's clock. The stream stays open until the pod is gone.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from gpu_skills.sandbox.face import Reply, Request
from gpu_skills.sandbox.runpod_wire import invalid, moment, stamp, whole
from gpu_skills.sandbox.world import Instance, World

SOURCES = ("container", "system")
DEFAULT_TAIL = 100
MAX_TAIL = 5000
KEPT_LINES = 20_000
READ_BYTES = 1_000_000
MAX_LINE_BYTES = 16_384
POLL_S = 0.1
KEEP_ALIVE_S = 5.0  # a client that has gone is noticed by writing to it


@dataclass(frozen=True)
class Line:
    number: int
    at: float
    source: str
    text: str

    def frame(self) -> bytes:
        data = {"ts": stamp(self.at), "source": self.source, "line": self.text}
        return f"id: {stamp(self.at)}/{self.number:012d}\ndata: {json.dumps(data)}\n\n".encode()


@dataclass
class LogBook:
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    written: int = 0
    offset: int = 0
    unfinished: bytes = b""
    phase: str = ""

    def add(self, at: float, source: str, text: str) -> None:
        self.written += 1
        self.lines.append(Line(self.written, at, source, text))

    def after(self, number: int) -> list[Line]:
        new = min(self.written - number, len(self.lines))
        return list(islice(self.lines, len(self.lines) - new, None)) if new > 0 else []


class Logs:
    """Everything here is called with the world's lock held, but for what `events` does between two looks."""

    def __init__(self, world: World):
        self.world = world

    def book(self, instance: Instance) -> LogBook:
        book: LogBook = instance.extra.setdefault("log", LogBook())
        return book

    def note(self, instance: Instance, text: str) -> None:
        self.book(instance).add(self.world.now(), "system", text)

    def note_phase(self, instance: Instance) -> None:
        """Tell what the host does, once per phase. A `create container` without a `start` is a stalled pull."""
        book = self.book(instance)
        if book.phase == instance.phase:
            return
        book.phase = instance.phase
        if instance.phase == "loading":
            self.note(instance, f"create container {instance.image}")
        elif instance.phase == "running":
            self.note(instance, f"start container for {instance.image}: begin")
        elif instance.phase in ("stopping", "exited", "destroyed"):
            self.note(instance, f"stop container {instance.id}")

    def keep_up(self, instance: Instance) -> None:
        """Take in what the container printed since the last time."""
        if instance.container is None:
            return
        book, now = self.book(instance), self.world.now()
        try:
            with open(instance.container.etc / "log", "rb") as stream:
                stream.seek(book.offset)
                fresh = stream.read(READ_BYTES)
        except OSError:
            return
        book.offset += len(fresh)
        *whole_lines, book.unfinished = (book.unfinished + fresh).split(b"\n")
        if len(book.unfinished) > MAX_LINE_BYTES:
            whole_lines.append(book.unfinished)
            book.unfinished = b""
        for line in whole_lines:
            book.add(now, "container", line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r"))

    def stream(self, request: Request, instance: Instance) -> Reply:
        source = request.query.get("source")
        if source is not None and source not in SOURCES:
            raise invalid("query parameter 'source'", source)
        self.keep_up(instance)
        start = self._start(request, self.book(instance), source)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        events = self._events(instance, start, source)
        return Reply(200, events, headers, content_type="text/event-stream")

    def _start(self, request: Request, book: LogBook, source: str | None) -> int:
        """The number of the last line that is not sent. Last-Event-ID goes before `since`, and that before `tail`."""
        tail = whole(request, "tail", 0, MAX_TAIL)
        resumed, since = request.headers.get("last-event-id"), request.query.get("since")
        if resumed:
            at, _, number = resumed.partition("/")
            if number.isdecimal() and len(number) <= 12:
                return int(number)
            return self._before(book, moment(at, "Last-Event-ID"))
        if since:
            return self._before(book, moment(since, "query parameter 'since'"))
        tail = DEFAULT_TAIL if tail is None else tail
        wanted = [line.number for line in book.lines if source in (None, line.source)]
        return book.written if not tail else wanted[-tail] - 1 if len(wanted) >= tail else 0

    def _before(self, book: LogBook, since: float) -> int:
        return next((line.number - 1 for line in book.lines if line.at >= since), book.written)

    def _events(self, instance: Instance, position: int, source: str | None) -> Iterator[bytes]:
        last_sent = time.monotonic()
        while True:
            with self.world.lock:
                self.keep_up(instance)
                book = self.book(instance)
                lines, position = book.after(position), book.written
                is_over = instance.is_destroyed or self.world.clock.is_stopped
            for line in lines:
                if source in (None, line.source):
                    yield line.frame()
                    last_sent = time.monotonic()
            if is_over:
                return
            if time.monotonic() - last_sent > KEEP_ALIVE_S:
                yield b": keep-alive\n\n"
                last_sent = time.monotonic()
            time.sleep(POLL_S)
