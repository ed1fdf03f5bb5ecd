from __future__ import annotations

import random

import pytest

from gpu_skills.economics.duty import LONG_GAP_S, duty

H = 3600.0


def test_ten_hours_billed_with_six_and_a_half_of_work_are_a_duty_of_66_percent_with_each_long_gap():
    jobs = [(0, 3 * H), (3 * H + 600, 5 * H), (7 * H, 8 * H + 26 * 60)]
    found = duty([*jobs, (9.65 * H, 10 * H)], [], [(0, 10 * H)])
    assert found.billed_s == 10 * H
    assert found.pct == pytest.approx(66, abs=0.5)
    assert found.long_gaps == ((5 * H, 7 * H), (8 * H + 26 * 60, 9.65 * H))  # ten minutes are no long gap


def test_overlapping_jobs_are_one_stretch_of_work_and_a_setup_bills_without_being_a_gap():
    found = duty([(H, 3 * H), (2 * H, 4 * H)], [(0, H)], [])
    assert (found.billed_s, found.busy_s, found.pct, found.long_gaps) == (4 * H, 3 * H, 75.0, ())


def test_a_machine_that_never_billed_has_no_duty():
    assert duty([], [], []).pct is None
    assert duty([(5, 5), (7, 3)], [], []).pct is None


@pytest.mark.parametrize("seed", range(5))
def test_work_and_gaps_never_exceed_what_was_billed(seed):
    rng = random.Random(seed)

    def some():
        return [(a, a + rng.uniform(0, 3 * H)) for a in (rng.uniform(0, 40 * H) for _ in range(rng.randint(0, 9)))]

    jobs, setups, idle = some(), some(), some()
    found = duty(jobs, setups, idle)
    gaps_s = sum(end - start for start, end in found.long_gaps)
    assert found.busy_s + gaps_s <= found.billed_s + 1e-6
    assert all(end - start > LONG_GAP_S for start, end in found.long_gaps)
    instants = [rng.uniform(0, 43 * H) for _ in range(200)]
    for t in instants:
        in_gap = any(start <= t < end for start, end in found.long_gaps)
        assert not in_gap or not any(start <= t < end for start, end in [*jobs, *setups])
