"""The classes of failure, their signs and their remedies, as `failures.yaml` has them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from gpu_skills import resources, strict_yaml

SAME, ELSEWHERE, CHANGED = "same", "elsewhere", "changed"


@dataclass(frozen=True)
class Sign:
    """What a line says when a class of failure is there. `has` and `excluded` are in small letters."""

    failure: str
    has: str
    match: re.Pattern[str] | None = None
    excluded: tuple[str, ...] = ()
    after: re.Pattern[str] | None = None
    is_weak: bool = False


@dataclass(frozen=True)
class FailureClass:
    """rank: 1 is nearest to the root. retry: same, elsewhere or changed (only with the remedy applied)."""

    name: str
    title: str
    rank: int
    retry: str
    remedy: tuple[str, ...]
    signs: tuple[Sign, ...]


UNKNOWN = FailureClass(
    "unknown",
    "no known class of failure",
    99,
    CHANGED,
    (
        "Read the first error of the log, not the last; say what it says, and do not guess a class.",
        "Ask the user before you spend on experiments.",
    ),
    (),
)


@dataclass(frozen=True)
class Catalogue:
    classes: dict[str, FailureClass]
    handled: tuple[str, ...]

    @functools.cached_property
    def signs(self) -> tuple[Sign, ...]:
        return tuple(sign for failure in self.classes.values() for sign in failure.signs)


@functools.cache
def catalogue() -> Catalogue:
    document = strict_yaml.read(resources.failures())
    assert document is not None, "failures.yaml is part of the package"
    found = (_failure(entry) for entry in document.data["classes"])
    return Catalogue({failure.name: failure for failure in found}, tuple(document.data["handled"]))


def _failure(entry: dict[str, Any]) -> FailureClass:
    signs = tuple(_sign(entry["name"], sign) for sign in entry["signs"])
    return FailureClass(entry["name"], entry["title"], entry["rank"], entry["retry"], tuple(entry["remedy"]), signs)


def _sign(failure: str, entry: dict[str, Any]) -> Sign:
    return Sign(
        failure,
        entry["has"].lower(),
        _expression(entry.get("match")),
        tuple(text.lower() for text in entry.get("not", ())),
        _expression(entry.get("after")),
        entry.get("weak", False),
    )


def _expression(text: str | None) -> re.Pattern[str] | None:
    return None if text is None else re.compile(text, re.IGNORECASE)
