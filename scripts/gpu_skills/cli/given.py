"""What a command is given to read: a file by name, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_skills.cli.context import Context
from gpu_skills.errors import UsageError
from gpu_skills.units import format_bytes

MAX_BYTES = 256 * 1024 * 1024


def read(context: Context, file: Path | None, *, command: str) -> tuple[bytes, str]:
    """(content, name for messages) of `--file FILE`, or of standard input without it. Never waits for a terminal."""
    name = "stdin" if file is None or str(file) == "-" else str(file)
    try:
        if name == "stdin":
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError(
                    "nothing to read: give it on standard input or with --file", next_step=f"{command} --help"
                )
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(context.cwd / name, "rb") as stream:
                data = stream.read(MAX_BYTES + 1)
    except OSError as exc:
        raise UsageError(f"{name} cannot be read: {exc.strerror or exc}", next_step=f"{command} --help") from exc
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name} is larger than {format_bytes(MAX_BYTES)}", next_step="give it in parts")
    if not data.strip():
        raise UsageError(f"{name} is empty", next_step=f"{command} --help")
    return data, name
