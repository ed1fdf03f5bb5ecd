"""A stream of server-sent events, cut into its data as it comes. Pure, bounded, and indifferent to how it is cut."""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 4 * 1024 * 1024


class SseReader:
    """Feed it pieces; it gives the data of each event that is whole. ValueError for an event without an end."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False

    def feed(self, piece: bytes) -> Iterator[str]:
        # A line ends with \r\n, \r or \n, and \r\n may come in two pieces.
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
        if piece:
            self._after_cr = piece.endswith(b"\r")
        *lines, rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            whole, self._line = self._line + line, b""
            yield from self._take(whole)
        self._line += rest
        if len(self._line) + self._size > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def _take(self, line: bytes) -> Iterator[str]:
        if not line:
            if self._data:
                data, self._data, self._size = b"\n".join(self._data), [], 0
                yield data.decode("utf-8", "replace")
            return
        name, _, value = line.partition(b":")
        if name in (b"data", b"error"):  # llama.cpp once sent failures as `error:`
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
