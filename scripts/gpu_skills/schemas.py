"""What a record may hold: JSON Schema 2020-12, with problems told in our own words.

Schemas lie in `schemas/`; their `$id` is their path below it, and one may refer to another by its relative name
(`{"$ref": "machine.json"}`, from `cli/`: `"../machine.json"`) without any network. The `examples` of a schema are what
a message offers when a text does not fit its pattern.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpu_skills import resources
from gpu_skills.errors import Bug, GpuError, SchemaInvalid

BASE = "https://gpu-skills.invalid/schemas/"  # never fetched: `.invalid` exists nowhere
MAX_DEPTH = 100
MAX_PROBLEMS = 20

_TYPE_WORDS = {
    "object": "a mapping",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. pointer: JSON pointer of the value. nearest: the allowed key or value most like it."""

    pointer: str
    found: str
    allowed: str
    nearest: str | None
    message: str

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v is not None}


def problems(record: Any, name: str) -> list[Problem]:
    """Everything (up to MAX_PROBLEMS) that keeps a record from being what the schema `name` says; [] when it fits."""
    deep = _too_deep(record)
    if deep is not None:
        return [_problem(deep, "more levels of nesting", f"at most {MAX_DEPTH}")]
    validator = _validator(name)
    told: list[Problem] = []
    try:
        for error in validator.iter_errors(record):
            for problem in _tell(error):
                if problem not in told:
                    told.append(problem)
            if len(told) >= MAX_PROBLEMS:
                break
    except RecursionError:
        return [_problem("", "a structure that refers too deep", f"at most {MAX_DEPTH} levels")]
    return told[:MAX_PROBLEMS]


def check(
    record: Any,
    name: str,
    *,
    file: str,
    line: int | Callable[[str], int] | None = None,
    error: type[GpuError] = SchemaInvalid,
    next_step: str | None = None,
) -> None:
    """Raise `error` for the first problem, the others in its details.

    line: of the record, or a function from pointer to line. error: SchemaInvalid, ConfigError or StateError. next_step:
    where the record stands in no file that could be edited.
    """
    found = problems(record, name)
    if not found:
        return
    first = found[0]
    where = line(first.pointer) if callable(line) else line
    at = f":{where}" if where is not None else ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise error(
        f"{file}{at}: {first.message}{more}",
        next_step=next_step,
        file=file,
        at=at,
        line=where,
        problem=first.message,
        pointer=first.pointer,
        found=first.found,
        allowed=first.allowed,
        nearest=first.nearest,
        problems=[p.to_dict() for p in found],
    )


def load(name: str) -> dict[str, Any]:
    """The schema itself. name: `job`, `gpu.yaml` or `cli/job_status`."""
    path = resources.schema_path(name)
    try:
        schema = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise Bug(message=f"schema {name} cannot be read: {exc}") from exc
    if not isinstance(schema, dict):
        raise Bug(message=f"schema {name} is not an object")
    return schema


@functools.cache
def _validator(name: str) -> Any:
    from referencing import Registry

    registry: Any = Registry(retrieve=_retrieve)
    return _validator_class()({"$ref": f"{BASE}{name}.json"}, registry=registry, format_checker=_format_checker())


@functools.cache
def _validator_class() -> Any:
    """Draft 2020-12, in which NaN and the infinities are no numbers and `$` does not pass over a last newline."""
    from jsonschema import Draft202012Validator, ValidationError, validators

    plain = Draft202012Validator.TYPE_CHECKER

    def is_number(checker: Any, value: object) -> bool:
        return plain.is_type(value, "number") and (isinstance(value, int) or math.isfinite(value))  # type: ignore[arg-type]

    def pattern(validator: Any, wanted: str, value: object, schema: Any) -> Iterator[Any]:
        if isinstance(value, str) and not _compiled(wanted).search(value):
            yield ValidationError("pattern")

    finite = plain.redefine("number", is_number)
    return validators.extend(Draft202012Validator, validators={"pattern": pattern}, type_checker=finite)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """JSON Schema's `$` is the end of the text; Python's also matches before a newline there."""
    return re.compile(re.sub(r"(?<!\\)\$$", r"\\Z", pattern))


@functools.cache
def _format_checker() -> Any:
    from jsonschema import FormatChecker

    from gpu_skills.clock import parse_timestamp

    checker = FormatChecker(formats=())

    @checker.checks("date-time", raises=(ValueError, OverflowError))
    def _is_timestamp(value: object) -> bool:
        if isinstance(value, str):
            parse_timestamp(value)
        return True

    return checker


@functools.cache
def _retrieve(uri: str) -> Any:
    from referencing import Resource
    from referencing.exceptions import NoSuchResource
    from referencing.jsonschema import DRAFT202012

    if not uri.startswith(BASE) or not uri.endswith(".json"):
        raise NoSuchResource(ref=uri)
    schema = load(uri[len(BASE) : -len(".json")])
    # The place a schema was found at is its base, whatever its $id says: relative references then follow the folders.
    schema["$id"] = uri
    # jsonschema would change to its own validator class at every $schema it meets, and lose our extensions.
    schema.pop("$schema", None)
    return Resource.from_contents(schema, default_specification=DRAFT202012)


# from a validator's error to our words --------------------------------------------------------------------------------


def _tell(error: Any) -> Iterator[Problem]:
    """An error as problems: an unknown key is a problem of its own, a choice is told by its likeliest branch."""
    pointer = _pointer(error.absolute_path)
    keyword, rule, value, schema = error.validator, error.validator_value, error.instance, error.schema
    if keyword == "additionalProperties":
        yield from _unknown_keys(pointer, value, schema)
    elif keyword == "required":
        for key in rule:
            if key not in value:
                yield _problem(f"{pointer}/{_escape(key)}", "nothing", f"the key {key}", nearest=_nearest(key, value))
    elif keyword == "dependentRequired":
        for key, needed in rule.items():
            for missing in needed if key in value else ():
                if missing not in value:
                    yield _problem(f"{pointer}/{_escape(missing)}", "nothing", f"the key {missing} beside {key}")
    elif keyword in ("anyOf", "oneOf") and error.context:
        yield from _likeliest_branch(error, pointer, value)
    elif keyword == "propertyNames":
        yield _problem(pointer, f"the key {_shown(value)}", _allowed_by(error.parent.schema["propertyNames"]))
    else:
        yield _simple(pointer, keyword, rule, value, schema)


def _simple(pointer: str, keyword: str, rule: Any, value: Any, schema: Any) -> Problem:
    found = _shown(value)
    match keyword:
        case "type":
            words = [rule] if isinstance(rule, str) else rule
            quotable = isinstance(value, int | float) and "string" in words
            allowed = _either(_TYPE_WORDS.get(w, w) for w in words)
            return _problem(pointer, found, allowed.replace("text", "text (in quotes)") if quotable else allowed)
        case "enum":
            return _problem(pointer, found, _either(_shown(v) for v in rule), nearest=_nearest(value, rule))
        case "const":
            return _problem(pointer, found, _shown(rule))
        case "pattern" | "format":
            return _problem(pointer, found, _allowed_by(schema))
        case "minimum":
            return _problem(pointer, found, f"{rule} or more")
        case "maximum":
            return _problem(pointer, found, f"{rule} or less")
        case "exclusiveMinimum":
            return _problem(pointer, found, f"more than {rule}")
        case "exclusiveMaximum":
            return _problem(pointer, found, f"less than {rule}")
        case "multipleOf":
            return _problem(pointer, found, f"a multiple of {rule}")
        case "minLength":
            return _problem(pointer, found, "text that is not empty" if rule == 1 else f"at least {rule} characters")
        case "maxLength":
            return _problem(pointer, f"{len(value)} characters", f"at most {rule} characters")
        case "minItems" | "minProperties":
            return _problem(pointer, f"{len(value)} entries", f"at least {rule}")
        case "maxItems" | "maxProperties":
            return _problem(pointer, f"{len(value)} entries", f"at most {rule}")
        case "uniqueItems":
            return _problem(pointer, "an entry that is there twice", "each entry once")
        case _:
            return _problem(pointer, found, _allowed_by(schema) if isinstance(schema, dict) else "nothing here")


def _unknown_keys(pointer: str, value: dict[str, Any], schema: dict[str, Any]) -> Iterator[Problem]:
    known = list(schema.get("properties", {}))
    patterns = list(schema.get("patternProperties", {}))
    for key in value:
        if key not in known and not any(re.search(p, key) for p in patterns):
            at = f"{pointer}/{_escape(key)}"
            nearest = _nearest(key, known)
            allowed = ", ".join(known) or "no key"
            hint = f"nearest is {nearest}" if nearest else f"allowed: {_cut(allowed, 200)}"
            yield Problem(
                at, f"the key {_cut(key, 60)}", allowed, nearest, f"{_cut(at, 80)} is not a known key, {hint}"
            )


def _likeliest_branch(error: Any, pointer: str, value: Any) -> Iterator[Problem]:
    """Of several shapes tell what the nearest one lacks: the one of the right type with the fewest errors.

    When every branch already refuses the value itself, all of them together are what is allowed.
    """
    branches: dict[int, list[Any]] = {}
    for child in error.context:
        branches.setdefault(child.relative_schema_path[0], []).append(child)
    at_root = {
        i
        for i, errors in branches.items()
        if any(not e.relative_path and e.validator in ("type", "const", "enum") for e in errors)
    }
    inside = {i: errors for i, errors in branches.items() if i not in at_root}
    if inside:
        best = min(inside.values(), key=len)
        for child in best:
            yield from _tell(child)
        return
    allowed: list[str] = []
    for errors in branches.values():
        allowed += [p.allowed for e in errors[:1] for p in _tell(e)]
    choices = [c for e in error.context if e.validator == "enum" for c in e.validator_value]
    yield _problem(pointer, _shown(value), _either(dict.fromkeys(allowed)), nearest=_nearest(value, choices))


def _problem(pointer: str, found: str, allowed: str, *, nearest: str | None = None) -> Problem:
    if found == "nothing":
        message = f"{_cut(pointer, 80)} is missing"
        if nearest:
            message += f" (there is {nearest})"
    else:
        subject = f"{_cut(pointer, 80)} is " if pointer else "found "
        message = f"{subject}{found}, allowed: {_cut(allowed, 200)}"
        if nearest:
            message += f"; nearest is {nearest}"
    return Problem(pointer, found, allowed, nearest, message)


def _allowed_by(schema: Any) -> str:
    """What a pattern or format wants: its examples, else its format's or description's words."""
    if not isinstance(schema, dict):
        return "nothing here"
    if schema.get("examples"):
        return "text like " + _either(_shown(e) for e in schema["examples"])
    if schema.get("format") == "date-time":
        return "a time with its zone like 2026-11-30T18:08:00Z"
    return schema.get("description") or f"text that matches {schema.get('pattern', 'the schema')}"


def _nearest(value: Any, known: Iterable[Any]) -> str | None:
    import difflib

    if not isinstance(value, str):
        return None
    words = [k for k in known if isinstance(k, str)]
    lower = {w.lower(): w for w in words}
    close = difflib.get_close_matches(value.lower()[:100], list(lower), n=1, cutoff=0.6)
    return lower[close[0]] if close else None


def _either(words: Iterable[str]) -> str:
    listed = list(words)
    return listed[0] if len(listed) == 1 else ", ".join(listed[:-1]) + " or " + listed[-1]


def _shown(value: Any) -> str:
    """A value for one line; a large one by its kind."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return json.dumps(_cut(value, 60), ensure_ascii=False)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _cut(str(value), 60)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _pointer(path: Iterable[Any]) -> str:
    return "".join("/" + _escape(str(part)) for part in path)


def _escape(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


def _too_deep(record: Any) -> str | None:
    """Pointer of the first container below MAX_DEPTH levels. Without recursion; a record that holds itself ends too."""
    stack: list[tuple[Any, int, str]] = [(record, 1, "")]
    while stack:
        value, depth, pointer = stack.pop()
        if depth > MAX_DEPTH:
            return pointer
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in items:
            if isinstance(child, dict | list):
                stack.append((child, depth + 1, f"{pointer}/{_escape(str(key))}"))
    return None
