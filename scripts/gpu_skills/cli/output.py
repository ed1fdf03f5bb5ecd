"""What a command says: one JSON document for programs, text for people, errors for both. Progress goes to stderr."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from gpu_skills.errors import GpuError

FORMAT = 1


@dataclass
class Output:
    """document: what `--json` prints, described by schemas/cli/<command>.json. text: the same for a person."""

    document: dict[str, Any]
    text: str = ""
    exit_code: int = 0
    hints: list[str] = field(default_factory=list)


def print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_text(text: str) -> None:
    if text:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()


def say(line: str) -> None:
    """Progress and hints: never on stdout, which belongs to the result."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def print_error(error: GpuError, *, as_json: bool) -> None:
    """One line: what happened, to what, what to do next, and the class in brackets at the end."""
    if as_json:
        print_json({"format": FORMAT, "error": _printable(error.to_dict())})
    say(f"gpu: {error.message}; next: {error.next_step} [{error.code}]")


def _printable(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def table(rows: list[list[str]], header: list[str]) -> str:
    """Columns wide enough for their content, two spaces between them."""
    from gpu_skills.errors import one_line

    cells = [header, *[[one_line(c, limit=200) for c in row] for row in rows]]
    widths = [max(len(r[i]) for r in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in cells)
