"""Durations, sizes and money, parsed and shown one way everywhere. Names carry the unit: `timeout_s`, `cost_usd`."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Context, Decimal

MAX_DURATION_S = 366 * 24 * 3600
MAX_USD = 1_000_000_000  # more in one record is a slip of the hand
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": Decimal("0.001"), "s": 1, "m": 60, "h": 3600, "d": 86400}
_MICRO = Decimal("0.000001")
_ANY_FLOAT = Context(prec=400)  # the usual 28 digits end at 1e22, a float at 1e308


def parse_duration(value: str | int | float) -> float:
    """`90`, `"90s"`, `"15m"`, `"1h30m"`, `"2d"` → seconds. ValueError says what was wrong and what is allowed.

    Bare numbers are seconds. Zero is allowed; negative, unit-less text and more than a year are not.
    """
    allowed = 'write it like "90s", "15m", "1h30m" or "2d"'
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a duration: {allowed}")
    if isinstance(value, int | float):
        total = Decimal(str(value))
    else:
        text = value.strip().lower()
        if re.fullmatch(r"\d+(\.\d+)?", text):
            total = Decimal(text)
        else:
            parts = _PART.findall(text)
            if not parts or "".join(n + u for n, u in parts) != text:
                raise ValueError(f"{value!r} is not a duration: {allowed}")
            total = sum((Decimal(n) * _SECONDS[u] for n, u in parts), Decimal(0))
    if not total.is_finite() or total < 0:
        raise ValueError(f"{value!r} is not a duration: it must not be negative")
    if total > MAX_DURATION_S:
        raise ValueError(f"{value!r} is longer than a year")
    return float(total)


def format_duration(seconds: float) -> str:
    """`42s`, `3m10s`, `2h05m`, `3d4h`: two units at most, for people."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600}h"


def format_bytes(count: float) -> str:
    """`812 B`, `1.4 MB`, `2.0 GB`: decimal units, as disks and networks are sold."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def counted(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def usd(value: Decimal | int | float | str) -> Decimal:
    """Money rounded to the six places that records hold."""
    return Decimal(str(value)).quantize(_MICRO, rounding=ROUND_HALF_EVEN, context=_ANY_FLOAT)


def json_number(value: Decimal) -> int | float:
    """A Decimal as a JSON number with at most six places."""
    value = usd(value)
    return int(value) if value == value.to_integral_value() else float(value)


def format_usd(value: Decimal | float | int) -> str:
    """`$0.0042`, `$1.50`: cents unless the amount is below ten cents; `<$0.0001` is not nothing."""
    amount = usd(value)
    if 0 < amount < Decimal("0.0001"):
        return "<$0.0001"
    return f"${amount:.4f}" if 0 < abs(amount) < Decimal("0.1") else f"${amount:.2f}"
