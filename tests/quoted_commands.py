"""Finds every `gpu …` command that a text quotes, and parses it with the real command line without running it.

Quoted are the commands in fenced blocks (sh, bash, console, or no language) and inline code that begins with `gpu ` or
`scripts/gpu `. Words in capitals (JOB, PATH, N) are placeholders; `…` at the end means "and what follows"; inline
`a|b` means either, `[x]` means that x may be left out.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

SHELLS = {"sh", "bash", "shell", "console", ""}
PLACEHOLDERS = {
    "N": "5",
    "JOB": "J-000001",
    "ID": "p-1",
    "TIME": "30m",
    "DATE": "2026-01-01",
    "P": "local",
    "D": ".",
    "PROVIDER": "hf",
    "KIND": "deployments",
    "STATE": "failed",
}
_FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<marks>`{3,}|~{3,})\s*(?P<language>[\w-]*)[ \t]*(?P<info>.*)")
_INLINE = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\(\s*((?:\S*/)?gpu\s[^()]*)\)")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_BEFORE_A_COMMAND = {"if", "then", "else", "elif", "while", "until", "do", "!", "time", "exec", "sudo", "{"}


@dataclass(frozen=True)
class Quoted:
    """One command as it stands in a text. inline: it may only name a command, without its arguments."""

    where: str
    text: str
    inline: bool


@dataclass(frozen=True)
class Fence:
    """A fenced block. info: what stands behind the language, such as the name of the file that it shows."""

    language: str
    line: int
    text: str
    info: str = ""


def fences(text: str) -> list[Fence]:
    """The fenced blocks of a Markdown text."""
    found: list[Fence] = []
    opened: re.Match[str] | None = None
    lines: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line)
        if opened is None:
            if mark:
                opened, lines, start = mark, [], number
        elif mark and mark["marks"].startswith(opened["marks"]) and not line.strip(" >").strip(opened["marks"][0]):
            found.append(Fence(opened["language"].lower(), start, "\n".join(lines), opened["info"].strip()))
            opened = None
        else:
            lines.append(line.removeprefix(opened["indent"]))
    return found


def without_fences(text: str) -> str:
    """The text with its fenced blocks emptied; lines keep their numbers."""
    lines, opened = [], None
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if opened is None and mark:
            opened = mark["marks"]
            lines.append("")
        elif opened is not None:
            if mark and mark["marks"].startswith(opened) and not line.strip(" >").strip(opened[0]):
                opened = None
            lines.append("")
        else:
            lines.append(line)
    return "\n".join(lines)


def code_spans(text: str) -> Iterator[tuple[int, str]]:
    """Line number and content of every inline code of a Markdown text."""
    plain = without_fences(text)
    for match in _INLINE.finditer(plain):
        yield plain.count("\n", 0, match.start()) + 1, " ".join(match[2].split())


def quoted_commands(text: str, name: str) -> list[Quoted]:
    """Every `gpu` command a Markdown text (or another text with code in backticks) quotes."""
    found: list[Quoted] = []
    for fence in fences(text):
        if fence.language in SHELLS:
            for offset, line in _shell_lines(fence):
                where = f"{name}:{fence.line + offset}"
                found += [Quoted(where, command, inline=False) for command in commands_of(line)]
    for number, span in code_spans(text):
        span = span.removeprefix("$ ").replace("\\|", "|")
        if re.match(r"(?:scripts/)?gpu( |$)", span) and span not in ("gpu", "scripts/gpu"):
            for one in _alternatives(span):
                found += [Quoted(f"{name}:{number}", c, inline=True) for c in commands_of(one)]
    return found


def _shell_lines(fence: Fence) -> Iterator[tuple[int, str]]:
    """Lines of a block that are commands: joined at backslashes, without what a here-document holds, without output."""
    lines = fence.text.split("\n")
    prompts = any(re.match(r"\s*\$ ", line) for line in lines)
    waiting_for, joined, start = None, "", 0
    for offset, line in enumerate(lines, start=1):
        if waiting_for is not None:
            if line.strip() == waiting_for:
                waiting_for = None
            continue
        if not joined:
            start = offset
            if prompts:
                if not re.match(r"\s*\$ ", line):
                    continue
                line = line.lstrip()[2:]
            elif fence.language == "" and not re.match(r"\s*(?:\S*/)?gpu\s", line):
                continue
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        heredoc = _HEREDOC.search(joined)
        waiting_for = heredoc[2] if heredoc else None
        yield start, joined
        joined = ""


def commands_of(line: str) -> list[str]:
    """The `gpu` commands of one line of shell, each again as a line: pipes, lists and `$(…)` taken apart."""
    found = [command for inner in _SUBSTITUTION.findall(line) for command in commands_of(inner)]
    words: list[str] = []
    for token in [*_tokens(_SUBSTITUTION.sub("X", line)), ";"]:
        if token and not set(token) - set("();<>|&"):
            if token[0] in "<>":
                words.append(token)
                continue
            found += _one_command(words)
            words = []
        else:
            words.append(token)
    return found


def _tokens(line: str) -> list[str]:
    lexer = shlex.shlex(_without_comment(line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    return list(lexer)


def _without_comment(line: str) -> str:
    quote = ""
    for i, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (i == 0 or line[i - 1].isspace()):
            return line[:i]
    return line


def _one_command(words: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word and word[0] in "<>":
            skip = True
            if kept and kept[-1] in ("1", "2"):
                kept.pop()
        else:
            kept.append(word)
    while kept and (kept[0] in _BEFORE_A_COMMAND or _ASSIGNMENT.match(kept[0])):
        kept.pop(0)
    if not kept or (kept[0] != "gpu" and not kept[0].endswith("scripts/gpu")):
        return []
    return [shlex.join(["gpu", *kept[1:]])]


def _alternatives(span: str) -> list[str]:
    """`gpu job status|logs [JOB]` → each of them, brackets taken off."""
    span = re.sub(r"<([\w-]+)>", lambda m: m[1].upper(), span)
    span = re.sub(r"\[([^\[\]]*)\]", r"\1", span)
    parts = [word.split("|") if re.fullmatch(r"[\w-]+(\|[\w-]+)+", word) else [word] for word in span.split(" ")]
    return [" ".join(choice) for choice in itertools.product(*parts)]


def problem_of(quoted: Quoted) -> str | None:
    """Why the command line refuses it, or None when it takes it. Nothing is run."""
    from gpu_skills.cli.main import gpu

    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(quoted.text)[1:]]
    open_end = bool(words) and words[-1] in ("…", "...")
    words = words[:-1] if open_end else words
    command: click.Command = gpu
    context: click.Context | None = None
    name = "gpu"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            while True:
                context = command.make_context(name, list(words), parent=context)
                if not isinstance(command, click.Group):
                    return None
                # Until click 9 the subcommand's name waits apart from its arguments.
                rest = [*getattr(context, "_protected_args", []), *context.args]
                if not rest:  # only options, as in `gpu --sandbox …`
                    return None if quoted.inline or open_end else f"`{quoted.text}` names a group, not a command"
                name, command, words = command.resolve_command(context, rest)
    except click.exceptions.Exit as exc:
        return None if exc.exit_code == 0 else f"exit {exc.exit_code}"
    except click.exceptions.NoArgsIsHelpError:
        return None if quoted.inline or open_end else f"`{quoted.text}` names a group, not a command"
    except click.MissingParameter as exc:
        return None if open_end or (quoted.inline and not words) else exc.format_message()
    except click.UsageError as exc:
        return exc.format_message()


def problems(quoted: list[Quoted]) -> list[str]:
    return [f"{q.where}: {q.text}: {problem}" for q in quoted if (problem := problem_of(q)) is not None]


def texts(root: Path, *suffixes: str) -> list[Path]:
    """Files of the repository with one of these endings; what is generated, installed or hidden is passed over."""
    skip = {"node_modules", "gpu-outputs", "build", "dist", "__pycache__"}
    return sorted(
        path
        for path in root.rglob("*")
        if path.suffix in suffixes
        and path.is_file()
        and not any(part in skip or part.startswith(".") for part in path.relative_to(root).parts)
    )
