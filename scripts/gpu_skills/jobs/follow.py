"""Read a job's log: from a byte offset, across broken connections, folded and made safe for a terminal."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu_skills.clock import Clock
from gpu_skills.errors import ProtocolError, RemoteError, one_line
from gpu_skills.lifecycle.connect import Link
from gpu_skills.units import format_bytes

CHUNK_BYTES = 1 << 20
RECONNECT_FOR_S = 600.0
# CSI and OSC sequences, other two-character escapes; then every control character that is left.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]|\x1b.?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def safe_text(text: str) -> str:
    """Text of a machine as it may reach a terminal: escape sequences gone, other control characters spelled out."""
    return _CONTROLS.sub(lambda m: m.group().encode("unicode_escape").decode(), _ESCAPES.sub("", text))


@dataclass
class LineFolder:
    """Bytes in, safe lines out. A line that was rewritten with carriage returns is its last state.

    At most `longest` characters of an unfinished line are kept: the end of it, since progress bars grow to the right.
    """

    longest: int = 1 << 16
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _rest: str = ""

    def feed(self, data: bytes) -> list[str]:
        text = self._rest + self._decoder.decode(data)
        *lines, self._rest = text.split("\n")
        if len(self._rest) > self.longest:
            self._rest = self._rest[-self.longest :]
        return [self._fold(line) for line in lines]

    def unfinished(self) -> str:
        """The line so far, for a terminal that shows progress as it moves."""
        return self._fold(self._rest)

    def finish(self) -> list[str]:
        rest, self._rest = self._rest + self._decoder.decode(b"", True), ""
        return [self._fold(rest)] if rest else []

    @staticmethod
    def _fold(line: str) -> str:
        line = line.rstrip("\r")
        if "\r" in line:
            line = line.rsplit("\r", 1)[1] or line.rstrip("\r").rsplit("\r", 1)[-1]
        return safe_text(line)


@dataclass(frozen=True)
class Piece:
    """Some log, where it starts, and the job as it was then. `gap_bytes` were dropped on the machine before it."""

    offset: int
    next: int
    data: bytes
    gap_bytes: int
    status: dict[str, Any]


def read_log(
    link: Link,
    project_id: str,
    job: str,
    *,
    offset: int | None = None,
    tail_bytes: int | None = None,
    wait_s: float = 0,
) -> Piece:
    chunks: list[bytes] = []
    args: dict[str, Any] = {"project": project_id, "job": job, "max_bytes": CHUNK_BYTES, "wait_s": wait_s}
    if tail_bytes is not None:
        args.update(tail_bytes=tail_bytes, max_bytes=4 << 20)
    else:
        args["offset"] = offset or 0
    answer = link.session.call("log", args, on_data=lambda header, data: chunks.append(data), timeout_s=wait_s + 60)
    piece = Piece(answer["offset"], answer["next"], b"".join(chunks), answer["gap_bytes"], answer["status"])
    _refuse_what_cannot_be(piece, link.host, job, None if tail_bytes is not None else offset or 0)
    return piece


def _refuse_what_cannot_be(piece: Piece, host: str, job: str, asked: int | None) -> None:
    """Offsets that do not add up would have us read the same for ever, or miss some of it."""
    if piece.status["job"] != job:
        raise ProtocolError(host=host, reason=f"it answers for {one_line(piece.status['job'], limit=40)}, not {job}")
    follows = asked is None or piece.offset - piece.gap_bytes == asked
    if not follows or piece.next != piece.offset + len(piece.data):
        raise ProtocolError(
            host=host, reason=f"{len(piece.data)} bytes of log from {piece.offset} to {piece.next}, asked from {asked}"
        )


def follow(
    link: Link,
    project_id: str,
    job: str,
    *,
    clock: Clock,
    offset: int = 0,
    wait_s: float = 10,
    say: Callable[[str], None],
    on_silence: Callable[[], None] = lambda: None,
) -> Iterator[Piece]:
    """Yield the log from `offset` until the job has ended and all of it was read.

    When nothing comes for wait_s the piece is empty.

    A cut connection is opened again and the reading goes on at the same byte: nothing twice, nothing left out.
    on_silence: called after each try that failed; what it raises ends the following.
    Raises the last RemoteError after RECONNECT_FOR_S without an answer; the job goes on regardless.
    """
    broken_since: float | None = None
    pause_s = 1.0
    while True:
        try:
            if broken_since is not None:
                link.reopen()
            piece = read_log(link, project_id, job, offset=offset, wait_s=wait_s)
        except RemoteError as exc:
            if not exc.retryable:
                raise
            now = clock.monotonic()
            if broken_since is None:
                broken_since = now
                say(f"connection to {link.host} lost; the job goes on, trying again")
            if now - broken_since > RECONNECT_FOR_S:
                raise
            on_silence()
            clock.sleep(pause_s)
            pause_s = min(pause_s * 2, 30)
            continue
        if broken_since is not None:
            say(f"connected to {link.host} again")
            broken_since, pause_s = None, 1.0
        offset = piece.next
        yield piece
        ended = piece.status["state"] != "running"
        if ended and not piece.data:
            return


def gap_notice(gap_bytes: int) -> str:
    return f"[gpu: {format_bytes(gap_bytes)} of log are not kept on the machine]"


def last_lines(data: bytes, count: int) -> list[str]:
    """The last `count` folded lines of some log."""
    folder = LineFolder()
    kept: deque[str] = deque(maxlen=count)
    kept.extend(folder.feed(data))
    kept.extend(folder.finish())
    return list(kept)
