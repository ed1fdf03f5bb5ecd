"""One run per approval, whoever asks and from where."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest

from gpu_skills.errors import ApprovalUsed, NotWritable, StateBusy, StateError
from gpu_skills.lifecycle import machines, runs
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.state import budget
from renting import play_machines, rent

pytestmark = pytest.mark.subprocess

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


def spoilt(op, change, *, name: str = APPROVAL):
    """The file of a run, changed by hand."""
    path = runs.folder(op, name) / f"{name}.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))
    return path


def in_attempt(**wrong):
    return lambda content: content["attempts"][0].update(wrong)


WRONG = {
    "attempts is no array": lambda content: content.update(attempts="none"),
    "an attempt is no object": lambda content: content.update(attempts=[1]),
    "the number is a word": in_attempt(number="one"),
    "over is a word": in_attempt(is_over="false"),
    "a result that is none": in_attempt(result="perhaps"),
    "a rate below zero": in_attempt(rate_usd_hr=-1),
    "an intent that leads out": in_attempt(intent="../../x"),
    "a machine that leads out": in_attempt(machine_id="../m"),
    "a deadline that is none": in_attempt(deadline_at="tomorrow"),
    "a state that is none": lambda content: content.update(state="paused"),
    "settled is a number": lambda content: content.update(is_settled=1),
    "money as text": lambda content: content.update(reserved_usd="3.5"),
    "another approval": lambda content: content.update(approval_id="a_other"),
    "no provider": lambda content: {k: v for k, v in content.items() if k != "provider"},
    "a list": lambda content: [content],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_run_that_is_not_what_it_was_is_named_with_its_file_and_keeps_no_other_from_being_read(rig, wrong):
    op = rig("vast", containers=False).op
    runs.create(op, a_run(op, attempts=(an_attempt(1),)))
    other = runs.create(op, a_run(op, approval_id="a_fedcba9876543210"))
    path = spoilt(op, WRONG[wrong])
    assert runs.all_runs(op) == [other] == runs.own_runs(op)
    (problem,) = runs.damaged(op)
    for asked in (
        runs.load,
        lambda op, id: runs.update(op, id, lambda run: run),
        lambda op, _: runs.require_readable(op),
    ):
        with pytest.raises(StateError) as caught:
            asked(op, APPROVAL)
        assert path.name in caught.value.message
    assert problem.next_step == f"restore {path}, or move it away, then: gpu reconcile --adopt"


def test_fields_that_a_newer_version_wrote_into_a_run_are_passed_over(rig):
    op = rig("vast", containers=False).op
    run = runs.create(op, a_run(op, attempts=(an_attempt(1),)))
    spoilt(op, lambda content: content.update(colour="blue"))
    spoilt(op, in_attempt(colour="blue"))
    assert runs.load(op, APPROVAL) == run


def test_with_a_damaged_run_reconcile_goes_on_and_says_so_and_nothing_more_is_rented(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    machine = rent(r).machine
    runs.create(r.op, a_run(r.op, project_id="another"))
    path = spoilt(r.op, lambda content: content.update(attempts=7))
    report = reconcile.run(r.op, ["vast"])
    (finding,) = [f for f in report.findings if f.what == "run_damaged"]
    assert path.name in finding.text and str(path) in finding.next_step and not report.is_clear
    with pytest.raises(StateError, match=path.name):
        rent(r, disk_gb=60)
    assert r.creates == 1
    release.destroy(r.op, machine, why="asked", wait_s=600)
    assert machines.find(r.project, machine.id).status == "destroyed" and not r.burning()


def test_a_run_that_is_damaged_while_a_plan_waits_ends_the_wait_before_the_next_create(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("no_capacity", times=0)
    runs.create(r.op, a_run(r.op, project_id="another"))
    sleep = r.clock.sleep

    def sleeping(seconds: float) -> None:
        sleep(seconds)
        if seconds == 60 and len([s for s in r.clock.slept if s == 60]) == 1:
            spoilt(r.op, lambda content: content.update(attempts=7))
            r.sandbox.faults.clear()  # from now on there is something to be had

    r.clock.sleep = sleeping
    with pytest.raises(StateError, match=APPROVAL):
        rent(r, capacity={"mode": "wait", "attempts": 3, "interval_s": 60})
    assert not r.burning() and budget.open_reservations(r.project, r.op.environ) == {}


@pytest.mark.parametrize("fails", ["open", "flock"])
def test_a_lock_that_cannot_be_had_is_told_as_what_cannot_be_written(rig, monkeypatch, fails):
    op = rig("vast", containers=False).op
    runs.create(op, a_run(op))

    def refuse(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if fails == "flock":
        monkeypatch.setattr(runs.fcntl, "flock", refuse)
    else:
        (runs.folder(op, APPROVAL) / f"{APPROVAL}.work").mkdir()
    with pytest.raises(NotWritable, match=f"{APPROVAL}.work"), runs.working_on(op, APPROVAL):
        pass
