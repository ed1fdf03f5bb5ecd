from __future__ import annotations

import json
import random
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_skills.economics.batch import BatchOption, BatchPlan, Interruptible, plan_batch
from gpu_skills.economics.machine_cost import MachineCost
from gpu_skills.errors import UsageError

MINUTE = 60
ROUNDING = Decimal("1e-9")

machines = st.builds(
    lambda rate, startup, storage, resume, gone: MachineCost.of(
        rate, startup, storage_usd_hr=storage, resume_s=resume, gone_probability=gone
    ),
    st.decimals("0", "50", places=4),
    st.integers(0, 7200),
    st.decimals("0", "5", places=4),
    st.integers(0, 7200),
    st.decimals("0", "1", places=2),
)
offers = st.builds(
    lambda rate, mean, checkpoint: Interruptible.of(rate, mean, checkpoint_s=checkpoint),
    st.decimals("0", "50", places=4),
    st.integers(60, 1_000_000),
    st.none() | st.integers(1, 100_000),
)


def by_strategy(plan: BatchPlan) -> dict[str, BatchOption]:
    return {option.strategy: option for option in plan.options}


def test_ten_jobs_by_hand() -> None:
    # A cent a minute, stopped a tenth of it. Start-up 10 minutes, waking 2; ten jobs of 6 minutes, gaps of 4.
    machine = MachineCost.of("0.60", 10 * MINUTE, storage_usd_hr="0.06", resume_s=2 * MINUTE)
    plan = plan_batch(machine, jobs=10, job_s=6 * MINUTE, gap_s=4 * MINUTE, machines=3)
    shown = {o.strategy: (o.cost_usd, o.elapsed_s / MINUTE, o.starts) for o in plan.options}
    assert shown == {
        "kept": (Decimal("1.06"), 10 + 60 + 36, 1),  # 10 + 60 + 9 × 4 minutes, all at the full rate
        "stopped_between": (Decimal("0.916"), 10 + 60 + 9 * 2 + 36, 10),  # 88 cents, and 36 minutes of storage
        "destroyed_between": (Decimal("1.60"), 100 + 60 + 36, 10),
    }
    assert plan.cheapest.strategy == "stopped_between"
    assert plan.fastest.strategy == "kept"
    assert dict(plan.left_out)["parallel"].startswith("the jobs arrive one after the other")


def test_in_parallel_each_machine_pays_its_start_up_and_the_longest_share_sets_the_time() -> None:
    plan = plan_batch(MachineCost.of("0.60", 10 * MINUTE), jobs=10, job_s=6 * MINUTE, machines=4)
    parallel = by_strategy(plan)["parallel"]
    assert parallel.cost_usd == Decimal("1.00")  # 4 × 10 + 10 × 6 minutes
    assert parallel.elapsed_s == (10 + 3 * 6) * MINUTE  # ten jobs on four machines: three on the busiest
    assert plan.fastest.strategy == "parallel" and plan.cheapest.strategy == "kept"
    assert by_strategy(plan_batch(MachineCost.of(1, 600), jobs=2, job_s=60, machines=9))["parallel"].machines == 2


def test_the_expected_time_with_interruptions_agrees_with_dice() -> None:
    """30 minutes of work in pieces of 8 (and a rest of 6), taken away every 20 minutes on average, back after 5."""
    offer = Interruptible.of("0.20", 20 * MINUTE, checkpoint_s=8 * MINUTE)
    machine = MachineCost.of("0.60", 5 * MINUTE)
    expected = by_strategy(plan_batch(machine, jobs=4, job_s=30 * MINUTE, interruptible=offer))["interruptible"]

    dice, total, starts, trials = random.Random(11), 0.0, 0, 4000
    for _ in range(trials):
        total, starts = total + 5, starts + 1
        for piece in [8, 8, 8, 6] * 4:
            while (stays := dice.expovariate(1 / 20)) < piece:
                total, starts = total + stays + 5, starts + 1
            total += piece
    assert float(expected.elapsed_s) / MINUTE == pytest.approx(total / trials, rel=0.02)
    assert float(expected.starts) == pytest.approx(starts / trials, rel=0.02)
    assert expected.cost_usd == expected.elapsed_s * Decimal("0.20") / 3600


def test_checkpoints_make_interruptions_cheaper() -> None:
    machine = MachineCost.of("0.60", 5 * MINUTE)

    def cost(checkpoint_s: int | None) -> Decimal:
        offer = Interruptible.of("0.20", 60 * MINUTE, checkpoint_s=checkpoint_s)
        return by_strategy(plan_batch(machine, jobs=2, job_s=120 * MINUTE, interruptible=offer))[
            "interruptible"
        ].cost_usd

    assert cost(600) < cost(3600) < cost(None)


def test_work_that_would_never_end_between_interruptions_is_left_out_with_the_remedy() -> None:
    for mean_s in (60, 3600):  # far beyond what exp() should be asked for, and just too long
        offer = Interruptible.of("0.01", mean_s)
        plan = plan_batch(MachineCost.of("0.60", 600), jobs=2, job_s=14 * 3600, interruptible=offer)
        assert "interruptible" not in by_strategy(plan)
        assert dict(plan.left_out)["interruptible"].endswith("write checkpoints more often")


@given(
    machines, st.integers(1, 60), st.integers(0, 50_000), st.integers(0, 50_000), st.integers(1, 9), st.none() | offers
)
def test_more_jobs_never_cost_less_and_never_take_less(
    machine: MachineCost, jobs: int, job_s: int, gap_s: int, several: int, offer: Interruptible | None
) -> None:
    def plan(n: int) -> dict[str, BatchOption]:
        return by_strategy(plan_batch(machine, jobs=n, job_s=job_s, gap_s=gap_s, machines=several, interruptible=offer))

    fewer, more = plan(jobs), plan(jobs + 1)
    assert fewer.keys() == more.keys()
    for strategy, option in fewer.items():
        assert more[strategy].cost_usd >= option.cost_usd - ROUNDING
        assert more[strategy].elapsed_s >= option.elapsed_s - ROUNDING


@given(machines, st.integers(1, 60), st.integers(0, 50_000), st.integers(2, 9))
def test_several_machines_never_take_longer_and_never_cost_less_than_one(
    machine: MachineCost, jobs: int, job_s: int, several: int
) -> None:
    options = by_strategy(plan_batch(machine, jobs=jobs, job_s=job_s, machines=several))
    assert options["parallel"].elapsed_s <= options["kept"].elapsed_s
    assert options["parallel"].cost_usd >= options["kept"].cost_usd - ROUNDING


@given(
    machines, st.integers(1, 60), st.integers(0, 50_000), st.integers(0, 50_000), st.integers(1, 9), st.none() | offers
)
def test_each_strategy_is_an_option_or_left_out_and_the_record_is_plain_json(
    machine: MachineCost, jobs: int, job_s: int, gap_s: int, several: int, offer: Interruptible | None
) -> None:
    plan = plan_batch(machine, jobs=jobs, job_s=job_s, gap_s=gap_s, machines=several, interruptible=offer)
    record = json.loads(json.dumps(plan.to_record(), allow_nan=False))
    named = [o["strategy"] for o in record["options"]] + [o["strategy"] for o in record["left_out"]]
    assert sorted(named) == ["destroyed_between", "interruptible", "kept", "parallel", "stopped_between"]
    assert all(option.cost_usd >= plan.cheapest.cost_usd for option in plan.options)
    assert all(option.elapsed_s >= plan.fastest.elapsed_s for option in plan.options)


def test_the_gap_between_two_jobs_costs_what_the_keep_alive_rule_says() -> None:
    from gpu_skills.economics.keepalive import known_gap

    machine = MachineCost.of("0.70", 750, storage_usd_hr="0.02", resume_s=200, gone_probability="0.1")
    plan = by_strategy(plan_batch(machine, jobs=5, job_s=333, gap_s=100))
    advice = known_gap(machine, jobs=5, gap_s=400, job_s=333)
    between = {"keep": "kept", "stop": "stopped_between", "destroy": "destroyed_between"}
    for option in advice.options:
        assert option.cost_usd is not None
        whole = machine.usd(machine.startup_s + advice.total_runtime_s) + option.cost_usd
        assert abs(plan[between[option.action]].cost_usd - whole) < ROUNDING


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: plan_batch(m, jobs=0, job_s=1), "jobs is 0"),
        (lambda m: plan_batch(m, jobs=1, job_s=-1), "job_s is -1"),
        (lambda m: plan_batch(m, jobs=1, job_s=1, machines=0), "machines is 0"),
        (lambda m: Interruptible.of("0.1", 0), "between_interruptions_s is 0"),
        (lambda m: Interruptible.of("0.1", 60, checkpoint_s=0), "checkpoint_s is 0"),
    ],
)
def test_wrong_numbers_are_refused_by_name(call, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(MachineCost.of("0.60", 600))
