"""One run per approval, whoever asks and from where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_skills.errors import ApprovalUsed, StateBusy
from gpu_skills.lifecycle import runs
from gpu_skills.lifecycle.runs import Attempt, Run

APPROVAL = "a_0123456789abcdef"


def a_run(op, **changes) -> Run:
    given = {
        "approval_id": APPROVAL,
        "plan_sha256": "0" * 64,
        "project_id": op.project.project_id,
        "provider": "vast",
        "account": "vast-0",
        "owner": runs.owner_of(op),
        "reserved_usd": 3.5,
        "approval_expires_at": "2026-01-01T01:00:00Z",
        "began_at": "2026-01-01T00:00:00Z",
    }
    return Run(**{**given, **changes})


def an_attempt(number: int, **changes) -> Attempt:
    given = {"intent": f"j{number:016x}", "machine_id": f"m_{number}", "label": "l", "deadline_at": None}
    more = {"offer_id": "1", "gpu": "RTX 4090", "rate_usd_hr": 0.5, "began_at": "2026-01-01T00:00:00Z"}
    return Attempt(number=number, **{**given, **more, **changes})


def test_the_same_state_directory_finds_its_run_again(rig):
    op = rig("vast", containers=False).op
    first = runs.create(op, a_run(op))
    runs.update(op, APPROVAL, lambda run: runs.with_attempt(run, an_attempt(1)))
    assert first.attempts == ()
    assert runs.create(op, a_run(op)).attempts == (an_attempt(1),)


def test_another_state_directory_of_the_same_project_cannot_use_the_approval(rig, tmp_path):
    r = rig("vast", containers=False)
    runs.create(r.op, a_run(r.op))
    copy = r.another(tmp_path / "copy", project_id=r.project.project_id)
    with pytest.raises(ApprovalUsed):
        runs.create(copy.op, a_run(copy.op))
    assert runs.own_runs(copy.op) == [] and len(runs.own_runs(r.op)) == 1


def test_an_attempt_takes_the_place_of_its_number(rig):
    op = rig("vast", containers=False).op
    run = runs.with_attempt(runs.with_attempt(a_run(op), an_attempt(2)), an_attempt(1))
    run = runs.with_attempt(run, replace(an_attempt(2), result="refused"))
    assert [(a.number, a.result) for a in run.attempts] == [(1, None), (2, "refused")]


def test_only_one_works_on_a_run_at_a_time(rig):
    op = rig("vast", containers=False).op
    assert not runs.is_worked_on(op, APPROVAL)
    with runs.working_on(op, APPROVAL):
        assert runs.is_worked_on(op, APPROVAL)
        with pytest.raises(StateBusy), runs.working_on(op, APPROVAL):
            pass
    assert not runs.is_worked_on(op, APPROVAL)
