"""Rows that stay at the bottom of a terminal while text scrolls above them, and are gone at the end."""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Callable
from typing import TextIO

TICK_S = 0.5


class BottomRows:
    """Draws `rows()` below what `above` writes, again every half second.

    Each row is cut to the width of the terminal, so that it takes one line and can be erased. While the process is in
    the background (`Ctrl-Z`, `bg`) nothing is drawn: the terminal is somebody else's.
    """

    def __init__(self, screen: TextIO, rows: Callable[[], list[str]], *, style: str = "", tick_s: float = TICK_S):
        self._screen = screen
        self._rows = rows
        self._style = style
        self._tick_s = tick_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, name="bottom-rows", daemon=True)
        self._drawn_cells: list[int] = []

    def __enter__(self) -> BottomRows:
        self._ticking.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._ticking.join(2)
        self.above(lambda: None)

    def above(self, write: Callable[[], object]) -> None:
        """Have whole lines written where the rows are; the rows come again below them."""
        with self._lock:
            self._send(self._erasing())
            write()
            if not self._ended.is_set():
                self._send(self._drawing())

    def _tick(self) -> None:
        try:
            while not self._ended.wait(self._tick_s):
                with self._lock:
                    self._send(self._erasing() + self._drawing())
        except (OSError, ValueError):  # the terminal is gone; whoever writes next will meet that
            return

    def _drawing(self) -> str:
        if not _in_foreground(self._screen):
            return ""
        width = _width(self._screen) - 1  # a full row would leave the cursor in doubt
        shown = [_cut(row.expandtabs(), width) for row in self._rows()]
        self._drawn_cells = [_cells(row) for row in shown]
        if self._style and shown:
            shown[-1] = f"\x1b[{self._style}m{shown[-1]}\x1b[0m"
        return "\r\n".join(shown)

    def _erasing(self) -> str:
        drawn, self._drawn_cells = self._drawn_cells, []
        if not drawn or not _in_foreground(self._screen):
            return ""
        width = _width(self._screen)
        lines = sum(max(1, -(-cells // width)) for cells in drawn)  # a narrower window has folded them
        return "\r" + (f"\x1b[{lines - 1}A" if lines > 1 else "") + "\x1b[J"

    def _send(self, text: str) -> None:
        if text:
            self._screen.write(text)
            self._screen.flush()


def _in_foreground(screen: TextIO) -> bool:
    try:
        return os.tcgetpgrp(screen.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True


def _width(screen: TextIO) -> int:
    try:
        return max(2, os.get_terminal_size(screen.fileno()).columns)
    except (OSError, ValueError):
        return 80


def _cut(text: str, width: int) -> str:
    if _cells(text) <= width:
        return text
    kept, cells = [], 1
    for character in text:
        cells += _cells(character)
        if cells > width:
            break
        kept.append(character)
    return "".join(kept) + "…"


def _cells(text: str) -> int:
    """Columns a terminal gives this text: none for combining marks, two for wide characters."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    without_width = sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)
    return len(text) + wide - without_width
