"""JSON as records hold it, and where exactly a text leaves it.

The usual parser answers first. Only what it cannot vouch for (a duplicate key, NaN, a lone surrogate, deep nesting) is
read again by a slow scanner that knows line, column and JSON pointer of everything.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 100
_MAX_DIGITS = 300
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[^\s,:\[\]{}\"]{1,40}")
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass
class Fault(Exception):
    """The first place where a text is not strict JSON. `pointer` is the value being read, `found` what stands there."""

    line: int
    column: int
    pointer: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"found {self.found}, allowed is {self.allowed}"

    @property
    def at(self) -> str:
        return f":{self.line}:{self.column}" + (f" {self.pointer}" if self.pointer else "")


def loads(data: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse UTF-8 bytes of one document. Raises Fault, never anything else, for what is not strict JSON."""
    if data.startswith(b"\xef\xbb\xbf"):
        raise Fault(1, 1, "", "a byte order mark", "UTF-8 without one")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        before = data[: exc.start]
        line_start = before.rfind(b"\n") + 1
        column = len(before[line_start:].decode("utf-8", "replace")) + 1
        raise Fault(before.count(b"\n") + 1, column, "", f"byte 0x{data[exc.start]:02x}", "UTF-8") from exc
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=no_constant, parse_float=finite, parse_int=_short
        )
    except (ValueError, RecursionError) as exc:
        Scanner(text, max_depth).run()  # raises the fault with its place
        raise Fault(1, 1, "", "a text that no JSON reader takes", "JSON") from exc
    if _needs_a_closer_look(data, max_depth):
        Scanner(text, max_depth).run()
    return value


def _needs_a_closer_look(data: bytes, max_depth: int) -> bool:
    if data.count(b"[") + data.count(b"{") > max_depth and _depth(data) > max_depth:
        return True
    return b"\\u" in data and SURROGATE_ESCAPE.search(data) is not None


def _depth(data: bytes) -> int:
    """Upper bound of the nesting: brackets inside strings count too, which only costs a closer look."""
    deepest = depth = 0
    for match in re.finditer(rb"[\[{\]}]", data):
        depth += 1 if match[0] in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("duplicate key")
    return made


def finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("too large")
    return value


def _short(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("too large")
    return int(digits)


def no_constant(name: str) -> Any:
    raise ValueError(name)


def escape_pointer(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


class Scanner:
    """Reads a whole text without recursion, checks it strictly and remembers where each value starts."""

    def __init__(self, text: str, max_depth: int = MAX_DEPTH):
        self.text = text
        self.max_depth = max_depth
        self.starts: dict[str, int] = {}
        self._lines = [0] + [m.end() for m in re.finditer("\n", text)]

    def run(self) -> dict[str, int]:
        """Offsets of all values by JSON pointer ("" is the document). Raises Fault at the first problem."""
        # One entry per open container: [pointer, kind, keys seen or next index].
        stack: list[list[Any]] = []
        position = self._skip(0)
        pointer = ""
        while True:
            position, opened = self._value(position, pointer, len(stack))
            if opened:
                stack.append([pointer, opened, set() if opened == "{" else 0])
                closing = "}" if opened == "{" else "]"
                position = self._skip(position)
                if self._peek(position) == closing:
                    stack.pop()
                    position += 1
                else:
                    position, pointer = self._enter(position, stack[-1])
                    continue
            # A value has ended: close containers until one goes on.
            while stack:
                position = self._skip(position)
                closing = "}" if stack[-1][1] == "{" else "]"
                char = self._peek(position)
                if char == closing:
                    stack.pop()
                    position += 1
                    continue
                if char != ",":
                    self._fail(position, stack[-1][0], f'"," or "{closing}"')
                after = self._skip(position + 1)
                if self._peek(after) == closing:
                    self._fail(
                        position, stack[-1][0], f'a value after it, or no comma before "{closing}"', "a trailing comma"
                    )
                position, pointer = self._enter(after, stack[-1])
                break
            else:
                end = self._skip(position)
                if end < len(self.text):
                    self._fail(end, "", "nothing after the document")
                return self.starts

    def line_of(self, pointer: str) -> int:
        """Line of a value; of its nearest known parent when the pointer is not there."""
        while pointer and pointer not in self.starts:
            pointer = pointer.rpartition("/")[0]
        return self._place(self.starts.get(pointer, 0))[0]

    def _enter(self, position: int, container: list[Any]) -> tuple[int, str]:
        """Read a key, or take the next index, and return where the value starts and its pointer."""
        base, kind, seen = container
        if kind == "[":
            container[2] += 1
            return position, f"{base}/{seen}"
        match = _STRING.match(self.text, position)
        if not match:
            self._fail(position, base, "a key in double quotes")
        key = self._string(match, base)
        pointer = f"{base}/{escape_pointer(key)}"
        if key in seen:
            self._fail(position, pointer, "each key once", f"the key {json.dumps(key)} again")
        seen.add(key)
        position = self._skip(match.end())
        if self._peek(position) != ":":
            self._fail(position, pointer, '":"')
        return self._skip(position + 1), pointer

    def _value(self, position: int, pointer: str, depth: int) -> tuple[int, str]:
        """Consume a scalar, or the opening bracket of a container (which is returned)."""
        self.starts[pointer] = position
        char = self._peek(position)
        if char in ("{", "["):
            if depth >= self.max_depth:
                shown = pointer if len(pointer) < 60 else pointer[:57] + "..."
                self._fail(position, shown, f"at most {self.max_depth} levels", f"level {depth + 1} of nesting")
            return position + 1, char
        if char == '"':
            match = _STRING.match(self.text, position)
            if not match:
                self._fail(position, pointer, "a string that ends, with control characters escaped", "a broken string")
            self._string(match, pointer)
            return match.end(), ""
        for word in ("true", "false", "null"):
            if self.text.startswith(word, position):
                return position + len(word), ""
        match = _NUMBER.match(self.text, position)
        if not match:
            self._fail(position, pointer, "a JSON value")
        # 0123 and 1.2.3 are caught by what must follow a value.
        if len(match[0]) > _MAX_DIGITS or float(match[0]) in (float("inf"), float("-inf")):
            self._fail(position, pointer, "a number below 1e308", "a number too large")
        return match.end(), ""

    def _string(self, match: re.Match[str], pointer: str) -> str:
        value: str = json.loads(match[0])
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            found = f"a lone surrogate \\u{ord(value[exc.start]):04x}"
            self._fail(match.start(), pointer, "a character, or both halves of a pair", found)
        return value

    def _skip(self, position: int) -> int:
        match = _SPACE.match(self.text, position)
        return match.end() if match else position

    def _peek(self, position: int) -> str:
        return self.text[position : position + 1]

    def _place(self, position: int) -> tuple[int, int]:
        line = bisect_right(self._lines, position)
        return line, position - self._lines[line - 1] + 1

    def _fail(self, position: int, pointer: str, allowed: str, found: str | None = None) -> Any:
        if found is None:
            word = _WORD.match(self.text, position)
            shown = word[0] if word else self._peek(position)
            found = json.dumps(shown) if shown else "the end of the file"
        line, column = self._place(position)
        raise Fault(line, column, pointer, found, allowed)
