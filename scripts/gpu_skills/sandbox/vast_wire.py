"""Vast's manners on the wire: its error bodies, how it reads numbers, filters and page tokens."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from gpu_skills.sandbox.face import Reply, Request, WireError

ENDINGS = {"eq", "neq", "gt", "gte", "lt", "lte", "in", "notin", "nin", "not"}


def error(status: int, code: str, msg: str, **more: Any) -> WireError:
    return WireError(Reply(status, {"success": False, "error": code, "msg": msg, **more}))


def body_of(request: Request, *, status: int = 400, code: str = "invalid_request") -> dict[str, Any]:
    """The body as an object; an empty one is `{}`."""
    try:
        body = request.json()
    except ValueError:
        raise error(status, code, "Invalid json body") from None
    if not isinstance(body, dict):
        raise error(status, code, "Invalid json body")
    return body


def number(value: Any) -> float | None:
    """A number however it came: `1`, `"1"`, `"0.98"`. None for everything else; NaN and infinities are nothing."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, int | float):
        try:
            as_float = float(value)
        except OverflowError:
            return None
        return as_float if math.isfinite(as_float) else None
    return None


def decimal(value: Any) -> Decimal | None:
    as_number = number(value)
    return None if as_number is None else Decimal(str(as_number))


def instance_id(text: Any) -> int | None:
    """An id from a path or a body, where it may be a string."""
    if isinstance(text, bool):
        return None
    if isinstance(text, int):
        return text
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 19 else None


def rounded(value: Decimal | float, places: int = 10) -> float:
    return round(float(value), places)


# filters ------------------------------------------------------------------------------------------------------------


def passes(found: Any, conditions: dict[str, Any], *, unknown: Callable[[str], Exception]) -> bool:
    """Whether a value meets every condition, like `{"gte": "24000", "lt": 50000}`."""
    return all(_passes(found, ending, wanted, unknown) for ending, wanted in conditions.items())


def _passes(found: Any, ending: str, wanted: Any, unknown: Callable[[str], Exception]) -> bool:
    if ending not in ENDINGS:
        raise unknown(ending)
    if ending in ("in", "notin", "nin"):
        choices = wanted if isinstance(wanted, list) else [wanted]
        return any(_equal(found, choice) for choice in choices) == (ending == "in")
    if ending in ("eq", "neq", "not"):
        return _equal(found, wanted) == (ending == "eq")
    have, limit = number(found), number(wanted)
    if have is None or limit is None:
        if not isinstance(found, str) or not isinstance(wanted, str):
            return False
        have, limit = found, wanted  # type: ignore[assignment]
    return {"gt": have > limit, "gte": have >= limit, "lt": have < limit, "lte": have <= limit}[ending]  # type: ignore[operator]


def _equal(found: Any, wanted: Any) -> bool:
    if isinstance(found, bool):
        return {"true": True, "false": False}.get(str(wanted).lower(), wanted) == found
    if isinstance(found, int | float) and (as_number := number(wanted)) is not None:
        return math.isclose(found, as_number, rel_tol=1e-9)
    return found == wanted


# pages --------------------------------------------------------------------------------------------------------------


def token_for(place: int) -> str:
    return base64.b64encode(json.dumps({"values": {"id": place}}).encode()).decode()


def place_of(token: str) -> int:
    """Where a page goes on. Raises WireError 400 invalid_token."""
    try:
        place = json.loads(base64.b64decode(token, validate=True))["values"]["id"]
        if isinstance(place, int) and not isinstance(place, bool):
            return place
    except (binascii.Error, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise error(400, "invalid_token", "Invalid pagination token")


def json_parameter(request: Request, name: str, default: Any, kind: type) -> Any:
    """A query parameter that holds JSON text. Raises WireError 400 invalid_request."""
    text = request.query.get(name)
    if not text:
        return default
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise error(400, "invalid_request", f"Error in query parameters: {name} is not valid")
    return value


def pairs(items: dict[str, Any]) -> list[list[str]]:
    return [[name, str(value)] for name, value in items.items()]


def first(values: Iterable[Any]) -> Any:
    return next(iter(values), None)
