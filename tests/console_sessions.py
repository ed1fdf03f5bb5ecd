"""Walkthroughs: the `console` blocks of a page, run as they stand, and what they show compared with what comes.

All blocks of a page are one bash session, in order, in an empty directory, `/home/you/project` on the page. A line that
begins with `$ ` is typed (with its continuation after a backslash, or its here-document); the lines below it are what
it prints, on stdout and stderr together. A command that fails is followed by `$ echo $?`, so that the page shows it.

What changes from run to run (times, ids of projects, machines and sessions, digests, durations) counts as equal to its
like, and so does any amount of blanks. Everything else has to be there to the letter: words, keys, states, codes, sums
of money. `…` stands for any text, alone on a line for any lines. `gpu economics` is arithmetic: there durations are
compared too.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quoted_commands import fences

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_MARK = "\x1e"
_CHANGING = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"), "TIME"),
    (re.compile(r"\b\d{4}-\d\d-\d\d\b"), "DATE"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "SHA256"),
    (re.compile(r"\b(p-[a-z0-9]{10}|[ms]_[0-9a-f]{10})\b"), "ID"),
)
_DURATION = (
    (re.compile(r"\b(\d+h\d\dm|\d+m\d\ds|\d+(\.\d+)?s)\b"), "DURATION"),
    (re.compile(r'("duration_s": ?)\d[\d.]*'), r"\1DURATION"),
)


@dataclass(frozen=True)
class Step:
    """What is typed, at which line of the page, and what the page shows below it."""

    line: int
    command: str
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    status: int
    output: str


def steps(text: str) -> list[Step]:
    """The session of a page; [] when it has no console block."""
    found: list[Step] = []
    for fence in fences(text):
        if fence.language != "console":
            continue
        lines = iter(enumerate(fence.text.split("\n"), start=fence.line + 1))
        for number, line in lines:
            if not line.startswith("$ "):
                assert found and not line.startswith("$"), f"line {number}: output before any command"
                found[-1] = Step(found[-1].line, found[-1].command, (*found[-1].shown, line))
                continue
            command = line.removeprefix("$ ")
            heredoc = _HEREDOC.search(command)
            while command.endswith("\\") or (heredoc and not command.endswith(f"\n{heredoc[2]}")):
                command += "\n" + next(lines)[1]
            found.append(Step(number, command, ()))
    return found


def run(session: Sequence[Step], directory: Path, *, timeout_s: float = 120) -> list[Answer]:
    """Type the commands into one bash. `gpu` is the command line of this checkout."""
    programs = directory.parent / f"{directory.name}-programs"
    programs.mkdir()
    launcher = programs / "gpu"
    launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m gpu_skills "$@"\n')
    launcher.chmod(0o755)
    script = ["exec 2>&1", "(exit 0)"]
    for step in session:
        script.append(f"eval {shlex.quote(step.command)}")
        script.append(f"__status=$?; printf '\\n{_MARK}%s{_MARK}' $__status; (exit $__status)")
    environ = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "scripts"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",  # what goes to stdout and stderr keeps its order, as on a terminal
    }
    try:
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)],
            cwd=directory, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        said = (exc.output or b"").decode("utf-8", "replace")
        step = session[min(said.count(_MARK) // 2, len(session) - 1)]
        last = said.rpartition(_MARK)[2]
        raise AssertionError(f"line {step.line}: `{step.command}` does not end; so far it printed:\n{last}") from exc
    output = done.stdout.decode()
    for here, on_the_page in ((str(directory), "/home/you/project"), (os.environ["HOME"], "/home/you")):
        output = output.replace(here, on_the_page)
    pieces = output.split(_MARK)
    assert len(pieces) == 2 * len(session) + 1, output + done.stderr.decode()
    return [Answer(int(pieces[n + 1]), pieces[n]) for n in range(0, len(pieces) - 1, 2)]


def differences(session: Sequence[Step], answers: Sequence[Answer]) -> list[str]:
    """What the page shows otherwise than it came, one text for each command."""
    found = []
    for number, (step, answer) in enumerate(zip(session, answers, strict=True)):
        said_after = session[number + 1].command if number + 1 < len(session) else ""
        if answer.status != 0 and said_after != "echo $?":
            found.append(f"line {step.line}: `{step.command}` ends with {answer.status}:\n{answer.output}")
        elif (problem := difference(step, answer.output)) is not None:
            found.append(f"line {step.line}: `{step.command}` prints something else:\n{problem}")
    return found


def difference(step: Step, output: str) -> str | None:
    is_arithmetic = step.command.startswith("gpu economics ")
    shown = [_masked(line, durations=not is_arithmetic) for line in step.shown]
    came = [_masked(line, durations=not is_arithmetic) for line in output.strip("\n").split("\n")]
    shown, came = _without_blank_ends(shown), _without_blank_ends(came)
    pattern = "".join("(.*\n)*" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n" for line in shown)
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in came)):
        return None
    return "\n".join(difflib.unified_diff(shown, came, "the page", "the command", lineterm=""))


def _masked(line: str, *, durations: bool) -> str:
    for pattern, word in (*_CHANGING, *(_DURATION if durations else ())):
        line = pattern.sub(word, line)
    return " ".join(line.split())


def _without_blank_ends(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines
