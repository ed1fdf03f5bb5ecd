"""The inputs that a workflow or a request takes, and whether those that were given are right. Pure.

Everything is checked, and everything that is wrong is told at once, before anything is sent anywhere.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills.errors import ConfigError, InputInvalid, one_line

TYPES = ("text", "integer", "number", "boolean", "choice", "image", "audio", "video", "model")
FILES = ("image", "audio", "video")
MAX_TEXT_CHARACTERS = 100_000
_NUMBER = (int, float, Decimal)
_KINDS: dict[str, Any] = {
    "node": str, "field": str, "required": bool, "min": _NUMBER, "max": _NUMBER, "choices": list, "description": str,
}  # fmt: skip
_RECORDED = ("type", "node", "field", "default", "required", "min", "max", "choices", "description")


@dataclass(frozen=True)
class Input:
    """One input. node and field: where a workflow takes it. An image, audio or video is a file here or a name there."""

    type: str = "text"
    node: str | None = None
    field: str | None = None
    default: Any = None
    required: bool = False
    min: int | float | None = None
    max: int | float | None = None
    choices: tuple[str, ...] | None = None
    description: str | None = None

    def to_record(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in _RECORDED}
        if self.choices is not None:
            found["choices"] = list(self.choices)
        return {name: value for name, value in found.items() if value is not None and value is not False}


def inputs_of(record: Mapping[str, Any]) -> dict[str, Input]:
    """Inputs as manifests hold them: name to a description, or by hand to a default alone."""
    return {name: _input_of(name, value) for name, value in record.items()}


def check(inputs: Mapping[str, Input], given: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """The values to use, defaults included. InputInvalid names everything that is wrong."""
    problems = [*_unknown(inputs, given)]
    values: dict[str, Any] = {}
    for name, wanted in inputs.items():
        if given.get(name) is None:
            if wanted.required:
                problems.append(f"{name} is missing ({_allowed(wanted)})")
            elif wanted.default is not None:
                values[name] = wanted.default
            continue
        try:
            values[name] = _value(wanted, given[name])
        except ValueError as exc:
            problems.append(f"{name}: {exc}")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise InputInvalid(what=what, problem="; ".join(problems[:3]) + more, problems=problems)
    return values


def _input_of(name: str, value: Any) -> Input:
    if isinstance(value, Mapping):
        kind = value.get("type", "text")
        if kind not in TYPES:
            raise ConfigError(file=f"input {name}", problem=f"type {kind!r} is none of {', '.join(TYPES)}")
        known = {key: value[key] for key in _RECORDED if value.get(key) is not None}
        for key, wanted in _KINDS.items():
            if key in known and (
                not isinstance(known[key], wanted) or (isinstance(known[key], bool) and wanted is not bool)
            ):
                raise ConfigError(file=f"input {name}", problem=f"{key} cannot be {_shown(known[key])}")
        if "choices" in known:
            known["choices"] = tuple(str(choice) for choice in known["choices"])
        return Input(**known)
    if isinstance(value, bool):
        return Input("boolean", default=value)
    if isinstance(value, int):
        return Input("integer", default=value)
    if isinstance(value, float | Decimal):
        return Input("number", default=value)
    return Input("text", default=value)


def _unknown(inputs: Mapping[str, Input], given: Mapping[str, Any]) -> Iterator[str]:
    for name in given:
        if name not in inputs:
            near = difflib.get_close_matches(str(name), inputs, n=1)
            shown = one_line(str(name), limit=140)
            yield f"there is no input {shown}" + (f"; did you mean {near[0]}?" if near else f" ({', '.join(inputs)})")


def _value(wanted: Input, value: Any) -> Any:
    """The value in the type that is wanted; from a command line everything comes as text. ValueError says what is."""
    if wanted.type == "boolean":
        words = {"true": True, "false": False, "yes": True, "no": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if isinstance(value, bool):
            return value
        raise ValueError(f"{_shown(value)} is not true or false")
    if wanted.type in ("integer", "number"):
        return _number(wanted, value)
    if wanted.type in FILES and isinstance(value, Path):
        if not value.is_file():
            raise ValueError(f"there is no file {_shown(value)}")
        if not os.access(value, os.R_OK):
            raise ValueError(f"{_shown(value)} cannot be read")
        if value.stat().st_size == 0:
            raise ValueError(f"{_shown(value)} is empty")
        return value
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not text")
    return _text(wanted, value)


def _number(wanted: Input, value: Any) -> int | float:
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise ValueError(f"{_shown(value)} is not a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise ValueError(f"{_shown(value)} is not a number")
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number to work with")
    if wanted.type == "integer":
        if value != int(value):
            raise ValueError(f"{value} is not a whole number")
        value = int(value)
    elif isinstance(value, Decimal):
        value = float(value)
    if (wanted.min is not None and value < wanted.min) or (wanted.max is not None and value > wanted.max):
        raise ValueError(f"{_shown(value)} is out of range ({_allowed(wanted)})")
    return value


def _text(wanted: Input, value: str) -> str:
    if wanted.choices is not None and value not in wanted.choices:
        near = difflib.get_close_matches(value, wanted.choices, n=1)
        raise ValueError(f"{_shown(value)} is no choice" + (f"; did you mean {near[0]}?" if near else ""))
    if len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"{len(value)} characters, at most {MAX_TEXT_CHARACTERS}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a character") from None
    if wanted.type in ("model", *FILES) and (not value or not value.isprintable() or ".." in value.split("/")):
        raise ValueError(f"{_shown(value)} is no file name")
    return value


def _allowed(wanted: Input) -> str:
    if wanted.min is not None and wanted.max is not None:
        return f"{wanted.type} from {wanted.min} to {wanted.max}"
    if wanted.min is not None or wanted.max is not None:
        return f"{wanted.type} of at " + (f"least {wanted.min}" if wanted.min is not None else f"most {wanted.max}")
    return "a file: name=@PATH" if wanted.type in FILES else wanted.type


def _shown(value: Any) -> str:
    return one_line(str(value), limit=160)
