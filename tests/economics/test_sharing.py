import math

import pytest

from gpu_skills.economics.sharing import shared_seconds


@pytest.mark.parametrize(
    ("start", "end", "others", "paid"),
    [
        (0, 10, [], 10),
        (0, 10, [(0, 10)], 5),
        (0, 10, [(5, 15)], 7.5),
        (5, 15, [(0, 10)], 7.5),
        (0, 10, [(2, 4), (6, 8)], 8),
        (0, 12, [(0, 12), (0, 12)], 4),
        (0, 10, [(4, math.inf)], 7),
        (0, 10, [(10, 20), (-5, 0)], 10),
        (3, 3, [(0, 10)], 0),
        (5, 3, [], 0),
    ],
)
def test_each_instant_is_divided_by_the_jobs_running_then(start, end, others, paid):
    assert shared_seconds(start, end, others) == pytest.approx(paid)


def test_the_shares_of_all_jobs_sum_to_the_time_the_machine_was_busy():
    jobs = [(0.0, 10.0), (2.0, 7.0), (5.0, 20.0), (20.0, 21.5)]
    shares = [shared_seconds(*job, [o for o in jobs if o is not job]) for job in jobs]
    assert sum(shares) == pytest.approx(21.5)
