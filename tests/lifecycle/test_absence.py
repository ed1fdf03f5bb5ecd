"""What proves that a machine is gone, as tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from gpu_skills.lifecycle.ending.absence import Look, is_gone, quiet

T0 = datetime(2026, 3, 1, tzinfo=UTC)


def looks(text: str) -> list[Look]:
    """`P0 A30:1.5 A60:1.5`: present or absent, at how many seconds, with what charged in USD; `?` is not readable."""
    found = []
    for word in text.split():
        when, _, charged = word[1:].partition(":")
        usd = None if charged == "?" else Decimal(charged or 1)
        found.append(Look(T0 + timedelta(seconds=int(when)), word[0] == "P", None if word[0] == "P" else usd))
    return found


@pytest.mark.parametrize(
    ("seen", "gone"),
    [
        ("", False),
        ("P0 A30 A60", False),
        ("P0 A10 A20 A30", False),
        ("P0 A10 A40 A70", True),
        ("P0 A10 A40 P55 A70", False),
        ("P0 A10 A40 P55 A70 A100 A130", True),
        ("P0 A10:1 A40:1 A70:1.1", False),
        ("P0 A10:1 A40:1.1 A70:1.1 A100:1.1", True),
        ("A10 A40 A70 A130", False),
        ("A0 A300 A600", True),
        ("P0 A10:? A40:? A70:?", False),
        ("P0 A10:? A300:? A610:?", True),
        ("P0 A70 A40 A10", False),
    ],
)
def test_three_absences_over_a_minute_with_still_charges(seen, gone):
    assert is_gone(looks(seen), asked_at=None) is gone


def test_only_looks_after_the_delete_was_taken_count():
    seen = looks("P0 A10 A40 A70 A100")
    assert is_gone(seen, asked_at=T0 + timedelta(seconds=40))
    assert not is_gone(seen, asked_at=T0 + timedelta(seconds=41))


def test_the_quiet_end_begins_after_the_last_sight_and_the_last_charge():
    assert quiet(looks("A0 P10 A20:1 A30:2 A40:2")) == looks("A30:2 A40:2")
    assert quiet(looks("A0 P10")) == []
