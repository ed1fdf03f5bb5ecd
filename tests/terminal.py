"""A terminal for tests: a pseudo-terminal that a program runs on, and what a person would see there."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PIECE = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|(\x1b.)|(\r+\n|\r)|([^\x1b\r\n]+)")


class Screen:
    """Lines from the first on, as if the window were endless: enough of a terminal for what `gpu` sends to one."""

    def __init__(self, width: int):
        self.width = width
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0

    @property
    def text(self) -> list[str]:
        shown = ["".join(cells).rstrip() for cells in self.lines]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def feed(self, data: str) -> Screen:
        for number, code, other, move, text in _PIECE.findall(data):
            assert not other, f"unknown sequence {other!r}"
            if code:
                self._control(code, int(number.split(";")[0] or 0))
            elif move:
                self.column = 0
                if move.endswith("\n"):
                    self._down()
            else:
                for character in text:
                    self._put(character)
        return self

    def _control(self, code: str, number: int) -> None:
        match code:
            case "A":
                self.row = max(0, self.row - max(1, number))
            case "J":
                assert number == 0
                del self.lines[self.row][self.column :]
                del self.lines[self.row + 1 :]
            case "K":
                del self.lines[self.row][0 if number == 2 else self.column :]
            case "m" | "h" | "l":
                pass
            case _:
                raise AssertionError(f"unknown sequence {code!r}")

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def _put(self, character: str) -> None:
        if unicodedata.combining(character):
            return
        wide = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if self.column + wide > self.width:
            self._down()
            self.column = 0
        line = self.lines[self.row]
        line.extend(" " * (self.column - len(line)))
        line[self.column : self.column + wide] = [character] + [""] * (wide - 1)
        self.column += wide


class OnTerminal:
    """`gpu` with these arguments on a pseudo-terminal of its own."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        cwd: Path,
        environ: Mapping[str, str],
        width: int = 80,
        stdout: int | None = None,
        stderr: int | None = None,
    ):
        self.width = width
        self.received = b""
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from gpu_skills.cli.main import main; main()", *args],
            cwd=cwd,
            env=dict(environ),
            stdin=theirs,
            stdout=theirs if stdout is None else stdout,
            stderr=theirs if stderr is None else stderr,
            start_new_session=True,
        )
        os.close(theirs)

    def read_until(self, seen: Callable[[str], bool], *, limit_s: float = 30) -> None:
        deadline = time.monotonic() + limit_s
        while not seen(self.sent):
            assert time.monotonic() < deadline, f"never seen; there was {self.sent!r}"
            if not self._read(0.2):
                assert seen(self.sent), f"ended without it; there was {self.sent!r}"
                return

    def end(self, *, limit_s: float = 60) -> int:
        """The exit code, once everything it sent was read."""
        deadline = time.monotonic() + limit_s
        while self._read(0.2):
            assert time.monotonic() < deadline, f"it does not end; there was {self.sent!r}"
        return self.process.wait(10)

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)

    @property
    def sent(self) -> str:
        return self.received.decode(errors="replace")

    @property
    def screen(self) -> list[str]:
        return Screen(self.width).feed(self.sent).text

    def _read(self, wait_s: float) -> bool:
        """False once the program has gone and everything was read."""
        if select.select([self._ours], [], [], wait_s)[0]:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # Linux: nobody has the other end open any more
                return False
            self.received += data
            return bool(data)
        return self.process.poll() is None
