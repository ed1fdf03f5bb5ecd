from datetime import UTC, datetime

import pytest

from gpu_skills.jobs.observe import CLOCK_SKEW_S, _believed, exit_code_of

LINE = {"id": "J-000001", "started_at": "2026-01-01T10:00:00Z", "ts": "2026-01-01T10:00:00Z"}
NOW = datetime(2026, 1, 1, 10, 10, tzinfo=UTC)


def answer(**more):
    return {"job": "J-000001", "state": "succeeded", "exit_code": 0, "reason": None, "duration_s": 60.0, **more}


def test_an_answer_that_can_be_is_taken_as_it_is():
    assert _believed(answer(), LINE, NOW) == answer()


def test_a_job_cannot_have_run_for_longer_than_since_its_start():
    assert _believed(answer(duration_s=3e8), LINE, NOW)["duration_s"] == 600 + CLOCK_SKEW_S


def test_a_success_with_an_exit_code_is_a_failure():
    believed = _believed(answer(exit_code=7), LINE, NOW)
    assert (believed["state"], believed["reason"]) == ("failed", "exit_code")
    assert exit_code_of(believed) == 7


@pytest.mark.parametrize(
    ("state", "code", "exits"),
    [
        ("succeeded", 0, 0),
        ("failed", 3, 3),
        ("failed", 0, 1),
        ("failed", None, 1),
        ("failed", 4096, 1),
        ("failed", -9, 1),
        ("timeout", 124, 124),
        ("cancelled", None, 130),
        ("lost", None, 1),
    ],
)
def test_gpu_job_run_never_exits_0_for_a_job_that_did_not_succeed(state, code, exits):
    assert exit_code_of({"state": state, "exit_code": code}) == exits
