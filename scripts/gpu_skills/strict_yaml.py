"""YAML files a person writes, read so that nothing in them means something else than it looks.

Plain words follow YAML 1.2: only `true` and `false` are booleans, so `off` and `no` stay words and `1:30` stays text.
What YAML would repair or guess silently (a duplicate key, an alias, a tag, a second document) is an error with a line.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_skills.errors import ConfigError
from gpu_skills.units import format_bytes

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 50
MAX_INTEGER_DIGITS = 18

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOLEAN = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_A_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class Document:
    """What a file says, and where: `lines` and `texts` (a plain value exactly as written) by JSON pointer.

    shown: the name errors use.
    """

    shown: str
    data: Any
    lines: dict[str, int] = field(default_factory=dict, repr=False)
    texts: dict[str, str] = field(default_factory=dict, repr=False)

    def line_of(self, pointer: str) -> int:
        """Line of a value; of its nearest parent when the value is missing."""
        while pointer and pointer not in self.lines:
            pointer = pointer.rpartition("/")[0]
        return self.lines.get(pointer, 1)

    def error(self, problem: str, pointer: str = "", **details: Any) -> ConfigError:
        return fault(self.shown, self.line_of(pointer), problem, pointer=pointer, **details)


def fault(shown: str, line: int | None, problem: str, **details: Any) -> ConfigError:
    """The one shape of an error in a file a person wrote: `gpu.yaml:4: …`, next step `edit gpu.yaml`."""
    where = f"{shown}:{line}" if line is not None else shown
    return ConfigError(f"{where}: {problem}", file=shown, line=line, problem=problem, **details)


def read(path: Path, *, shown: str | None = None) -> Document | None:
    """Read a file strictly; None when there is none. ConfigError for everything that is wrong with it."""
    shown = shown or path.name
    text = read_text(path, shown=shown)
    return None if text is None else parse(text, shown=shown)


def read_text(path: Path, *, shown: str | None = None, max_bytes: int = MAX_BYTES) -> str | None:
    """UTF-8 text of a regular file, without its byte order mark; None when there is no file."""
    shown = shown or path.name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as exc:
        raise fault(shown, None, f"cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise fault(shown, None, "is a directory, a file is expected")
        if not stat.S_ISREG(mode):
            raise fault(shown, None, "is not a regular file")
        with open(descriptor, "rb", closefd=False) as stream:
            data = stream.read(max_bytes + 1)
    except OSError as exc:
        raise fault(shown, None, f"cannot be read: {exc.strerror}") from exc
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise fault(shown, None, f"is larger than {format_bytes(max_bytes)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise fault(shown, line, f"byte 0x{data[exc.start]:02x} is not UTF-8: save the file as UTF-8") from exc


def parse(text: str, *, shown: str) -> Document:
    """Text to a Document. An empty text is an empty mapping."""
    import yaml

    control = _CONTROL.search(text)
    if control:
        line = text.count("\n", 0, control.start()) + 1
        raise fault(shown, line, f"control character U+{ord(control[0]):04X}: delete it")
    builder = _Builder(shown)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        # Events, not nodes: the loop keeps no stack of calls, so depth is ours to limit.
        for event in yaml.parse(text, Loader=loader):
            builder.take(event, yaml)
    except yaml.YAMLError as exc:
        raise _not_yaml(shown, text, exc) from exc
    return builder.document()


class _Builder:
    """Turns parse events into plain values, one open container per stack entry."""

    def __init__(self, shown: str):
        self._shown = shown
        self._root: Any = {}
        self._documents = 0
        self._lines: dict[str, int] = {}
        self._texts: dict[str, str] = {}
        # [container, its pointer, the key that waits for its value (mappings)]
        self._stack: list[list[Any]] = []

    def document(self) -> Document:
        data = {} if self._root is None else self._root
        return Document(self._shown, data, self._lines, self._texts)

    def take(self, event: Any, yaml: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise self._fault(line, "a second document starts here (---): one per file is allowed")
        elif isinstance(event, yaml.AliasEvent):
            raise self._fault(line, f"the alias *{event.anchor} is not allowed here: write the value out")
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._refuse_tag(event, line)
            self._open({} if isinstance(event, yaml.MappingStartEvent) else [], line)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._stack.pop()

    def _open(self, container: Any, line: int) -> None:
        if self._wants_key():
            raise self._fault(line, "a key must be a word, found a list or mapping")
        if len(self._stack) >= MAX_DEPTH:
            raise self._fault(line, f"nested deeper than {MAX_DEPTH} levels")
        pointer = self._place(container, line)
        self._stack.append([container, pointer, None])

    def _scalar(self, event: Any, line: int) -> None:
        plain = event.implicit[0]
        if _SURROGATE.search(event.value):  # "\ud800": the parser in C refuses it, the one in Python does not
            raise self._fault(line, "an escaped half of a character pair is not text")
        if self._wants_key():
            self._refuse_tag(event, line)
            self._key(event.value, plain, line)
            return
        if not plain:
            self._refuse_tag(event, line)
        value = self._plain_value(event.value, line) if plain else event.value
        pointer = self._place(value, line)
        self._texts[pointer] = event.value

    def _wants_key(self) -> bool:
        return bool(self._stack) and isinstance(self._stack[-1][0], dict) and self._stack[-1][2] is None

    def _key(self, text: str, plain: bool, line: int) -> None:
        container = self._stack[-1][0]
        value = self._plain_value(text, line) if plain else text
        if not isinstance(value, str):
            raise self._fault(line, f"the key {text or '(nothing)'} is not a word: write it in quotes")
        if text in container:
            raise self._fault(line, f"the key {text} is there twice")
        container[text] = None
        self._stack[-1][2] = text

    def _place(self, value: Any, line: int) -> str:
        """Put a value where the open container wants it; return its pointer."""
        if not self._stack:
            self._root, pointer = value, ""
        else:
            container, base, key = self._stack[-1]
            if isinstance(container, dict):
                container[key] = value
                self._stack[-1][2] = None
                pointer = f"{base}/{escape(key)}"
            else:
                container.append(value)
                pointer = f"{base}/{len(container) - 1}"
        self._lines[pointer] = line
        return pointer

    def _plain_value(self, text: str, line: int) -> Any:
        value = plain_value(text)
        if isinstance(value, ValueError):
            raise self._fault(line, str(value))
        return value

    def _refuse_tag(self, event: Any, line: int) -> None:
        if event.tag is not None:
            raise self._fault(line, "a tag (!) is not allowed here: write the plain value")

    def _fault(self, line: int, problem: str) -> ConfigError:
        return fault(self._shown, line, problem)


def plain_value(text: str) -> Any:
    """What an unquoted word means. A ValueError is returned, not raised, for a number nobody should write."""
    if text in _NULL:
        return None
    if text in _BOOLEAN:
        return _BOOLEAN[text]
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > MAX_INTEGER_DIGITS:
            return ValueError(f"a number of {len(digits)} digits is too large: if it is text, write it in quotes")
        if len(digits) > 1 and digits.startswith("0"):
            return ValueError(f"{text} starts with 0, which some readers take as octal: write it in quotes")
        return int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value in (float("inf"), float("-inf")):
            return ValueError(f"{text} is too large for a number")
        return value
    if _NOT_A_NUMBER.fullmatch(text):
        return ValueError(f"{text} is not a number that can be used here")
    return text


def escape(part: str) -> str:
    """One part of a JSON pointer (RFC 6901)."""
    return part.replace("~", "~0").replace("/", "~1")


def _not_yaml(shown: str, text: str, exc: Exception) -> ConfigError:
    mark = getattr(exc, "problem_mark", None) or getattr(exc, "context_mark", None)
    if mark is None:  # a character YAML does not allow
        return fault(shown, None, "holds a character that YAML does not allow")
    lines = text.split("\n")
    written = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())]:
        return fault(shown, mark.line + 1, "is indented with a tab: use spaces")
    problem = getattr(exc, "problem", None) or "it cannot be read"
    hint = ""
    if problem.startswith("mapping values are not allowed"):
        hint = " (a value with ': ' in it needs quotes)"
    return fault(shown, mark.line + 1, f"not valid YAML: {problem}{hint}")
