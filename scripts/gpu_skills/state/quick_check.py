"""A record that fits its schema beyond doubt, found out without loading a validator (60 ms and more).

True means that the schema holds. False means only that the full validator has to be asked, which also has the words for
what is wrong.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

from gpu_skills import resources
from gpu_skills.clock import parse_timestamp

Check = Callable[[Any], bool]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SAYS_NOTHING = {"$schema", "$id", "title", "description", "examples", "default"}


def fits(value: Any, name: str) -> bool:
    """Whether a record plainly fits `schemas/<name>.json`."""
    return _check_of(name)(value)


@functools.cache
def _check_of(name: str) -> Check:
    """Reads the schema itself: `gpu_skills.schemas` takes 4 ms to import. What cannot be read is for it to tell."""
    try:
        return _compiled(json.loads(resources.schema_path(name).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return lambda value: False


def _compiled(schema: Any) -> Check:
    """A schema as one function: a list of a hundred thousand files is not to be looked up keyword by keyword."""
    if isinstance(schema, bool):
        return lambda value: schema
    checks = [_check(keyword, rule, schema) for keyword, rule in schema.items() if keyword not in _SAYS_NOTHING]
    if len(checks) == 1:
        return checks[0]

    def all_hold(value: Any) -> bool:
        for check in checks:  # noqa: SIM110 -- twice as fast as all()
            if not check(value):
                return False
        return True

    return all_hold


def _check(keyword: str, rule: Any, schema: dict[str, Any]) -> Check:
    match keyword:
        case "type":
            return _type_check([rule] if isinstance(rule, str) else rule)
        case "enum":
            return lambda value: any(type(value) is type(allowed) and value == allowed for allowed in rule)
        case "const":
            return lambda value: type(value) is type(rule) and value == rule
        case "required":
            needed = frozenset(rule)
            return lambda value: not isinstance(value, dict) or needed <= value.keys()
        case "properties":
            return _properties_check({key: _compiled(inner) for key, inner in rule.items()})
        case "additionalProperties" if rule is False:
            known = schema.get("properties", {}).keys()
            return lambda value: not isinstance(value, dict) or value.keys() <= known
        case "additionalProperties":
            return lambda value: rule is True
        case "items":
            item = _compiled(rule)
            return lambda value: not isinstance(value, list) or all(map(item, value))
        case "anyOf":
            ways = [_compiled(way) for way in rule]
            return lambda value: any(way(value) for way in ways)
        case "pattern":
            return lambda value: not isinstance(value, str) or _pattern(rule).search(value) is not None
        case "minItems":
            return lambda value: not isinstance(value, list) or len(value) >= rule
        case "minLength":
            return lambda value: not isinstance(value, str) or len(value) >= rule
        case "minimum":
            return lambda value: not _is_number(value) or value >= rule
        case "maximum":
            return lambda value: not _is_number(value) or value <= rule
        case "exclusiveMinimum":
            return lambda value: not _is_number(value) or value > rule
        case "format" if rule == "date-time":
            return lambda value: not isinstance(value, str) or _is_time(value)
        case _:
            return lambda value: False


def _type_check(names: list[str]) -> Check:
    allowed = frozenset(kind for name in names for kind in _TYPES[name])
    if float in allowed:
        return lambda value: type(value) in allowed and (type(value) is not float or math.isfinite(value))
    return lambda value: type(value) in allowed


def _properties_check(checks: dict[str, Check]) -> Check:
    def hold(value: Any) -> bool:
        if isinstance(value, dict):
            for key, check in checks.items():
                if key in value and not check(value[key]):
                    return False
        return True

    return hold


@functools.cache
def _pattern(rule: str) -> re.Pattern[str]:
    """JSON Schema's `$` is the end of the text; Python's also matches before a newline there."""
    return re.compile(re.sub(r"(?<!\\)\$$", r"\\Z", rule))


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_time(value: str) -> bool:
    try:
        parse_timestamp(value)
    except (ValueError, OverflowError):
        return False
    return True
