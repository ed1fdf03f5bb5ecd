"""A record that fits its schema beyond doubt, found out without loading a validator (60 ms and more).

True means that the schema holds. False means only that the full validator has to be asked, which also has the words for
what is wrong.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

from gpu_skills.clock import parse_timestamp

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
    return _fits(value, _schema(name))


@functools.cache
def _schema(name: str) -> dict[str, Any]:
    from gpu_skills import schemas

    return schemas.load(name)


def _fits(value: Any, schema: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    if schema.get("additionalProperties") is False and isinstance(value, dict):
        if not value.keys() <= schema.get("properties", {}).keys():
            return False
    return all(_holds(keyword, rule, value) for keyword, rule in schema.items() if keyword not in _SAYS_NOTHING)


def _holds(keyword: str, rule: Any, value: Any) -> bool:
    match keyword:
        case "type":
            return any(_is(value, name) for name in ([rule] if isinstance(rule, str) else rule))
        case "enum":
            return any(type(value) is type(allowed) and value == allowed for allowed in rule)
        case "const":
            return type(value) is type(rule) and value == rule
        case "required":
            return not isinstance(value, dict) or all(key in value for key in rule)
        case "properties":
            return not isinstance(value, dict) or all(_fits(value[k], s) for k, s in rule.items() if k in value)
        case "additionalProperties":
            return not isinstance(rule, dict)  # `false` is asked in `_fits`, which knows the properties
        case "items":
            return not isinstance(value, list) or all(_fits(item, rule) for item in value)
        case "pattern":
            return not isinstance(value, str) or re.search(rule, value) is not None
        case "minLength":
            return not isinstance(value, str) or len(value) >= rule
        case "minimum":
            return not _is(value, "number") or value >= rule
        case "exclusiveMinimum":
            return not _is(value, "number") or value > rule
        case "format" if rule == "date-time":
            return not isinstance(value, str) or _is_time(value)
        case _:
            return False


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name]) and not (isinstance(value, float) and not math.isfinite(value))


def _is_time(value: str) -> bool:
    try:
        parse_timestamp(value)
    except (ValueError, OverflowError):
        return False
    return True
