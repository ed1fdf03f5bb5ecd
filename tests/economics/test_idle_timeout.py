from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_skills.economics.idle_timeout import break_even_timeout_s, cheapest_timeout, gaps_between, replay_usd
from gpu_skills.economics.machine_cost import MachineCost, typical_startup_s
from gpu_skills.errors import UsageError

MINUTE = 60
ROUNDING = Decimal("1e-12")

machines = st.builds(
    lambda rate, startup, storage, resume: MachineCost.of(rate, startup, storage_usd_hr=storage, resume_s=resume),
    st.decimals("0.01", "50", places=4),
    st.integers(0, 7200),
    st.decimals("0", "5", places=4),
    st.integers(0, 7200),
)
pasts = st.lists(st.integers(0, 20_000), min_size=1, max_size=15)
actions = st.sampled_from(["stop", "destroy"])


def test_the_example_by_hand() -> None:
    # 0.60 USD/h is a cent a minute; start-up 10 minutes. Kept through 3, 4 and 6, gone in the 60 and the 200:
    # 3 + 4 + 6 + (6 + 10) + (6 + 10) = 45 cents. 30 minutes: 13 + 2 × 40 = 93. Break-even, 10: 13 + 2 × 20 = 53.
    # At once: 5 × 10 = 50. Who knew the gaps paid 3 + 4 + 6 + 10 + 10 = 33.
    machine = MachineCost.of("0.60", 10 * MINUTE)
    advice = cheapest_timeout(machine, [minutes * MINUTE for minutes in (60, 3, 6, 200, 4)])
    assert (advice.timeout_s, advice.gaps_kept) == (6 * MINUTE, 3)
    assert advice.cost_usd == Decimal("0.45")
    assert advice.best_possible_usd == Decimal("0.33")
    usual, break_even = advice.compared
    assert (usual.name, usual.timeout_s, usual.regret_usd) == ("usual", 30 * MINUTE, Decimal("0.48"))
    assert (break_even.name, break_even.timeout_s, break_even.regret_usd) == ("break-even", 600, Decimal("0.08"))
    assert "destroyed after 6m00s would have cost $0.45" in advice.reason


@given(machines, pasts, st.integers(0, 25_000), actions)
def test_no_other_timeout_would_have_been_cheaper(
    machine: MachineCost, past: list[int], other_s: int, action: str
) -> None:
    advice = cheapest_timeout(machine, past, action=action)
    assert advice.cost_usd <= replay_usd(machine, past, other_s, action) + ROUNDING
    assert advice.cost_usd <= replay_usd(machine, past, None, action) + ROUNDING
    assert abs(advice.cost_usd - replay_usd(machine, past, advice.timeout_s, action)) < ROUNDING


@given(machines, pasts, actions)
def test_the_regret_is_never_negative_and_nobody_beats_the_one_who_knew(
    machine: MachineCost, past: list[int], action: str
) -> None:
    advice = cheapest_timeout(machine, past, action=action)
    assert advice.best_possible_usd <= advice.cost_usd + ROUNDING
    for other in advice.compared:
        assert other.regret_usd >= -ROUNDING
        assert abs(other.cost_usd - advice.cost_usd - other.regret_usd) < ROUNDING


@given(machines, pasts)
def test_the_break_even_timeout_costs_at_most_twice_what_the_one_who_knew_paid(
    machine: MachineCost, past: list[int]
) -> None:
    advice = cheapest_timeout(machine, past)
    assert advice.compared[1].cost_usd <= 2 * advice.best_possible_usd + ROUNDING


@given(st.decimals("0.01", "50", places=4), st.integers(0, 7200), pasts)
def test_the_price_does_not_move_the_timeout(rate: Decimal, startup_s: int, past: list[int]) -> None:
    assert (
        cheapest_timeout(MachineCost.of(rate, startup_s), past).timeout_s
        == cheapest_timeout(MachineCost.of(1, startup_s), past).timeout_s
    )


def test_of_equally_cheap_timeouts_the_shortest_is_named() -> None:
    # A gap of exactly one start-up: kept or destroyed at once, it costs the same.
    assert cheapest_timeout(MachineCost.of("0.60", 600), [600]).timeout_s == 0


def test_stopping_never_pays_where_the_disk_costs_as_much_as_the_machine() -> None:
    machine = MachineCost.of("0.10", 600, storage_usd_hr="0.10", resume_s=60)
    assert break_even_timeout_s(machine, "stop") is None
    advice = cheapest_timeout(machine, [60, 6000], action="stop")
    assert advice.compared[1].to_record()["timeout_s"] is None
    assert "break-even (never)" in advice.reason


def test_gaps_are_what_lies_between_jobs_that_do_not_overlap() -> None:
    jobs = [(100.0, 160.0), (0.0, 50.0), (10.0, 80.0), (160.0, 170.0), (400.0, None), (500.0, 510.0)]
    assert gaps_between(jobs) == [20.0, 230.0]
    assert gaps_between([]) == []
    assert gaps_between([(5.0, 9.0)]) == []


def test_one_start_up_of_an_hour_does_not_move_the_typical_one() -> None:
    assert typical_startup_s([600, 640, 3600, 610, 590]) == 610
    assert typical_startup_s([600, 640]) == 620
    assert typical_startup_s([]) is None


@pytest.mark.parametrize(
    ("past", "action", "words"),
    [([], "destroy", "no gaps"), ([-1], "destroy", "gap_s is -1"), ([5], "stop", "cannot be stopped")],
)
def test_what_cannot_be_answered_is_refused(past: list[int], action: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cheapest_timeout(MachineCost.of("0.60", 600), past, action=action)  # type: ignore[arg-type]


@given(machines, pasts, actions)
def test_the_record_is_plain_json(machine: MachineCost, past: list[int], action: str) -> None:
    record = json.loads(json.dumps(cheapest_timeout(machine, past, action=action).to_record(), allow_nan=False))
    assert record["rule"] == "history" and record["gaps"] == len(past)
