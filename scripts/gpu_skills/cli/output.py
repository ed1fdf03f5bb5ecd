"""What a command says: one JSON document for programs, text for people, errors for both. Progress goes to stderr."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any, TextIO

from gpu_skills.errors import ApprovalNeeded, Failed, GpuError, one_line

FORMAT = 1
_STEPS = ("next_step", "commands")  # what a document calls the commands that its reader may run
# Everything that moves a terminal but the ends of lines: controls, direction marks, bytes that were no text.
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass
class Output:
    """document: what `--json` prints, described by schemas/cli/<command>.json. text: the same for a person."""

    document: dict[str, Any]
    text: str = ""
    exit_code: int = 0
    hints: list[str] = field(default_factory=list)


def print_json(document: dict[str, Any], *, sandbox: bool = False) -> None:
    """sandbox: mark it, so that nobody takes its machines and money for real ones, and its steps lead there."""
    if sandbox:
        document = {**_steps_in_sandbox(document), "sandbox": True}
    _write(sys.stdout, json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n")


def print_text(text: str) -> None:
    if text:
        _show(sys.stdout, text if text.endswith("\n") else text + "\n")


def say(line: str) -> None:
    """Progress and hints: never on stdout, which belongs to the result. Nobody has to listen to them."""
    try:
        _show(sys.stderr, line + "\n")
    except (ReaderGone, OutputLost):
        _turn_away(sys.stderr)


def _show(stream: TextIO, text: str) -> None:
    """The one way of text to a person. Names, reasons and messages come from machines: no control sequence gets by."""
    if not text.replace("\n", "").isprintable():
        text = _NOT_SHOWN.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
    try:
        _write(stream, text)
    except UnicodeEncodeError:  # a terminal that is not UTF-8
        _write(stream, text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError as exc:
        raise ReaderGone from exc
    except OSError as exc:
        raise OutputLost(reason=exc.strerror or str(exc)) from exc


class ReaderGone(Exception):
    """Whoever read our output went away (`gpu … | head`). No OSError, which click would turn into an exit code."""


class OutputLost(Failed):
    code = "output_lost"
    template = "the output cannot be written: {reason}; a job that was started goes on"
    next_step = "gpu job status"


def turn_away_stdout() -> None:
    """Let nothing else be written there, also not by Python at its end, which would complain once more."""
    _turn_away(sys.stdout)


def _turn_away(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def in_sandbox(text: str) -> str:
    """The text with every command of ours in it leading to the sandbox: followed as it stands it would be real."""
    return _ours().sub("gpu --sandbox ", text)


@functools.cache
def _ours() -> re.Pattern[str]:
    from gpu_skills.cli.main import COMMANDS

    names = "|".join(re.escape(name) for name in COMMANDS if name != "sandbox")
    return re.compile(rf"(?<![\w./-])gpu (?=(?:{names})(?![\w-]))")


def _steps_in_sandbox(value: Any, *, is_step: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: _steps_in_sandbox(one, is_step=key in _STEPS) for key, one in value.items()}
    if isinstance(value, list):
        return [_steps_in_sandbox(one, is_step=is_step) for one in value]
    return in_sandbox(value) if is_step and isinstance(value, str) else value


def print_error(error: GpuError, *, as_json: bool, sandbox: bool = False) -> None:
    """One line: what happened, to what, what to do next, and the class in brackets at the end.

    What a person is asked to agree to comes before it, whole and line by line.
    """
    if as_json:
        print_json({"format": FORMAT, "error": _printable(error.to_dict())}, sandbox=sandbox)
    message, asked = error.message, error.details.get("text")
    if isinstance(error, ApprovalNeeded) and isinstance(asked, str) and asked:
        first = one_line(asked.split("\n", 1)[0], limit=len(asked))
        message = message.split(f": {first[:200]}", 1)[0]
        say(asked)
    line = f"gpu: {message}; next: {error.next_step} [{error.code}]"
    say(in_sandbox(line) if sandbox else line)


def _printable(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def table(rows: list[list[str]], header: list[str]) -> str:
    """Columns wide enough for their content, two spaces between them."""
    cells = [header, *[[one_line(c, limit=200) for c in row] for row in rows]]
    widths = [max(len(r[i]) for r in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in cells)
