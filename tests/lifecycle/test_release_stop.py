"""A machine sleeps when the provider shows it asleep; until then it counts as burning, whatever was asked of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_skills.errors import AlreadyGone, ApprovalUsed, AuthRejected, JobRunning, NotCollected, Protected, StopFailed
from gpu_skills.lifecycle import intents, machines
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.ending import release, stops
from gpu_skills.lifecycle.renting import keeping
from gpu_skills.state import budget
from rented import rent

VENDORS = pytest.mark.parametrize("vendor", ["vast", "runpod"])


def the_call(vendor: str) -> str:
    return "state" if vendor == "vast" else "action"


@VENDORS
def test_a_stopped_machine_costs_its_storage_and_the_record_says_so(rig, vendor):
    r = rig(vendor)
    machine = rent(r, keeps=True)
    before = sum(e["rate_usd_hr"] for e in r.sandbox.world.burning())
    stopped = stops.stop(r.op, machine, why="asked")
    assert stopped == machines.find(r.project, machine.id)
    assert stopped.status == "stopped" and stopped.session is None
    burn = sum(e["rate_usd_hr"] for e in r.sandbox.world.burning())
    assert 0 < burn < before / 5
    assert abs(float(stopped.storage_usd_hr) - float(burn)) < 1e-4
    (intent,) = [i for i in intents.read(r.project).values() if i.action == "stop"]
    assert intent.result == "done" and intent.details["why"] == "asked"


@VENDORS
def test_a_stop_that_the_provider_refuses_leaves_it_stopping_and_burning(rig, vendor):
    r = rig(vendor)
    machine = rent(r, keeps=True)
    r.fault("500", the_call(vendor), times=0)
    with pytest.raises(StopFailed):
        stops.stop(r.op, machine, wait_s=120)
    record = machines.find(r.project, machine.id)
    assert record.status == "stopping" and record.conditions == ("stop_failed",)
    assert record.status in budget.BILLING and r.burning()
    assert [(event, facts["what"]) for event, _, facts in r.notices] == [("recovery", "stop_failed")]


def test_a_stop_that_works_at_the_second_try_leaves_no_condition(rig):
    r = rig("vast")
    machine = rent(r)
    r.fault("500", "state", times=1)
    assert stops.stop(r.op, machine).conditions == ()


def test_a_stop_that_failed_is_over_once_a_later_one_worked(rig):
    r = rig("vast")
    machine = rent(r)
    r.fault("500", "state", times=4)
    with pytest.raises(StopFailed):
        stops.stop(r.op, machine, wait_s=60)
    assert stops.stop(r.op, machine).conditions == ()


def test_a_key_that_may_not_stop_is_named_as_such(rig):
    r = rig("vast")
    machine = rent(r)
    r.fault("403", "state", times=0)
    with pytest.raises(AuthRejected):
        stops.stop(r.op, machine, wait_s=60)
    assert machines.find(r.project, machine.id).conditions == ("stop_failed",)


def test_a_running_job_is_in_the_way_unless_its_deadline_has_come(rig):
    r = rig("vast")
    machine = rent(r)
    op = replace(r.op, running_jobs=lambda id: ["J-000007"])
    with pytest.raises(JobRunning):
        stops.stop(op, machine)
    assert r.calls("state") == 0
    assert stops.stop(op, machine, why="deadline_passed", despite_jobs=True).status == "stopped"


def test_outputs_that_are_nowhere_else_are_in_the_way_where_a_stop_wipes_the_disk(rig):
    r = rig("runpod")
    machine = rent(r, keeps=False)
    op = replace(r.op, unverified=lambda id: ["J-000003", "J-000004"])
    with pytest.raises(NotCollected, match="J-000003") as caught:
        stops.stop(op, machine)
    assert caught.value.next_step == "gpu job pull J-000003" and r.burning()
    assert stops.stop(r.op, machine).status == "stopped"


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_outputs_stay_where_the_disk_survives(rig, vendor):
    r = rig(vendor)
    machine = rent(r, keeps=True)
    op = replace(r.op, unverified=lambda id: ["J-000003"])
    assert stops.stop(op, machine).status == "stopped"


def test_a_protected_machine_is_not_stopped_without_an_approval_that_names_it(rig):
    r = rig("vast")
    machine = rent(r)
    machines.update(r.project, machine.id, lambda found: replace(found, conditions=("protected",)))
    with pytest.raises(Protected):
        stops.stop(r.op, machine)
    ask = keeping.named_plan(r.op, "stop", machine).ask()
    approval = approvals.give(r.op, ask, statement="stop it", source="approve")
    assert stops.stop(r.op, machine, approval=approval).status == "stopped"
    with pytest.raises(ApprovalUsed):
        stops.stop(r.op, machine, approval=approval)


def test_a_stop_that_was_allowed_and_is_not_seen_goes_on_without_a_second_yes(rig):
    r = rig("vast")
    machine = rent(r)
    machines.update(r.project, machine.id, lambda found: replace(found, conditions=("protected",)))
    ask = keeping.named_plan(r.op, "stop", machine).ask()
    approval = approvals.give(r.op, ask, statement="stop it", source="approve")
    r.fault("500", "state", times=4)
    with pytest.raises(StopFailed):
        stops.stop(r.op, machine, wait_s=30, approval=approval)
    assert stops.stop(r.op, machine).status == "stopped"
    assert [i.result for i in intents.read(r.project).values() if i.action == "stop"] == ["done"]


def test_its_deadline_stops_a_protected_machine_like_any_other(rig):
    r = rig("vast")
    machine = rent(r)
    machines.update(r.project, machine.id, lambda found: replace(found, conditions=("protected",)))
    assert stops.stop(r.op, machine, why="deadline_passed", despite_jobs=True).status == "stopped"


def test_what_is_gone_is_not_stopped(rig):
    r = rig("vast")
    machine = rent(r)
    release.destroy(r.op, machine, why="asked", wait_s=600)
    with pytest.raises(AlreadyGone):
        stops.stop(r.op, machine)


@VENDORS
def test_a_stopped_machine_is_destroyed_like_any_other(rig, vendor):
    r = rig(vendor)
    machine = rent(r, keeps=True)
    stops.stop(r.op, machine)
    assert release.destroy(r.op, machine, why="asked", wait_s=900) == "destroyed"
    assert not r.burning()
