"""Reading somebody else's JSON object field by field: what is not of the kind that was expected reads as None."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMERAL = re.compile(r"[+-]?\d{1,30}(\.\d{1,30})?([eE][+-]?\d{1,2})?")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62})(\.[A-Za-z0-9][A-Za-z0-9-]{0,62})*")


def number(row: Mapping[str, Any], *names: str) -> Decimal | None:
    """The first of these fields that holds a finite number, also one written as text."""
    for name in names:
        value = row.get(name)
        if isinstance(value, bool):
            continue
        if isinstance(value, str) and _NUMERAL.fullmatch(value.strip()):
            value = value.strip()
        elif isinstance(value, float):
            value = str(value)
        elif not isinstance(value, int | Decimal):
            continue
        try:
            found = Decimal(value)
        except InvalidOperation:
            continue
        if found.is_finite() and abs(found) < Decimal("1e12"):
            return found
    return None


def amount(row: Mapping[str, Any], *names: str) -> Decimal | None:
    """A number that is not negative: money, sizes, speeds."""
    found = number(row, *names)
    return found if found is not None and found >= 0 else None


def real(row: Mapping[str, Any], *names: str) -> float | None:
    """An amount as a float, for what is no money."""
    found = amount(row, *names)
    return None if found is None else float(found)


def integer(row: Mapping[str, Any], *names: str) -> int | None:
    found = number(row, *names)
    return int(found) if found is not None and found == found.to_integral_value() else None


def text(row: Mapping[str, Any], *names: str, limit: int = 1024) -> str | None:
    """The first of these fields that holds text with something in it, stripped, cut at `limit`."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()[:limit]
    return None


def flag(row: Mapping[str, Any], name: str) -> bool | None:
    value = row.get(name)
    return value if isinstance(value, bool) else None


def identity(row: Mapping[str, Any], *names: str) -> str | None:
    """An id as the provider writes it: a whole number or a word, safe in a path."""
    for name in names:
        value = row.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return str(value)
        if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value):
            return value
    return None


def child(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside; empty when there is none."""
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; anything else in it, or instead of it, is left out."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def moment(row: Mapping[str, Any], *names: str) -> datetime | None:
    """Epoch seconds, or RFC 3339 with its zone."""
    seconds = amount(row, *names)
    try:
        if seconds is not None:
            return datetime.fromtimestamp(float(seconds), UTC)
        written = text(row, *names, limit=64)
        found = datetime.fromisoformat(written) if written else None
        return found.astimezone(UTC) if found is not None and found.tzinfo is not None else None
    except (ValueError, OverflowError, OSError):
        return None


def host(value: object) -> str | None:
    """A name or address that can be given to ssh; never something that reads as an option."""
    if not isinstance(value, str):
        return None
    shown = value.strip()
    try:
        return str(ipaddress.ip_address(shown))
    except ValueError:
        return shown if len(shown) <= 253 and _HOST_NAME.fullmatch(shown) else None


def port(value: object) -> int | None:
    found = integer({"port": value}, "port")
    return found if found is not None and 1 <= found <= 65535 else None
