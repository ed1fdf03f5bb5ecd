"""A stopped machine goes back to work on its own host, or stays stopped: nothing else is rented."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpu_skills.clock import timestamp
from gpu_skills.errors import ApprovalInvalid, ApprovalNeeded, HostFull, NotReady, Unguarded
from gpu_skills.lifecycle import intents, labels, machines
from gpu_skills.lifecycle.approval import actions, approvals
from gpu_skills.lifecycle.approval.actions import ActionPlan
from gpu_skills.lifecycle.ending import stops
from gpu_skills.lifecycle.guard import keyproof
from gpu_skills.lifecycle.renting import provision, restarting
from gpu_skills.state import budget
from renting import alive, guarded, instances, play_machines, rent

pytestmark = pytest.mark.subprocess


@pytest.fixture(autouse=True)
def short_streams(monkeypatch):
    monkeypatch.setattr("gpu_skills.providers.runpod.reader._LOG_STREAM_S", 0.2)


def stopped(rig, vendor: str = "vast", **plan: Any) -> Any:
    """(rig, machine) of a project whose machine is asleep."""
    r = rig(vendor, containers=False)
    play_machines(r)
    got = rent(r, machine_class="project", **plan)
    machine = stops.stop(r.op, got.machine, why="idle")
    r.clock.sleep(5)
    return r, machine


def allowed(r, machine, **changes: Any):
    """A yes to a start with a deadline two hours from now."""
    given: dict[str, Any] = {
        "instance_id": machine.instance_id,
        "worst_case_usd": Decimal("2.00"),
        "rate_usd_hr": machine.rate_usd_hr,
        "storage_usd_hr": machine.storage_usd_hr,
        "deadline_at": timestamp(r.clock.now() + timedelta(hours=2)),
        "old_deadline_at": machine.deadline_at,
        "measured_at": timestamp(r.clock.now()),
    }
    plan = ActionPlan("start", r.project.project_id, machine.id, machine.provider, **{**given, **changes})
    _, plan = actions.load(r.project, actions.freeze(r.project, plan))
    return approvals.give(r.op, plan.ask(), statement="yes", source="approve"), plan


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_stopped_machine_is_ready_again_under_the_deadline_of_its_start(rig, vendor):
    r, machine = stopped(rig, vendor)
    r.clock.sleep(3600)
    approval, plan = allowed(r, machine)
    got = provision.restart(r.op, machine, approval)
    (instance,) = alive(r)
    assert r.creates == 1 and got.machine.id == machine.id and got.machine.status == "ready"
    assert got.machine.deadline_at == plan.deadline_at == timestamp(got.receipt.deadline_at)
    assert timestamp(labels.parse(instance.label).deadline_at) == plan.deadline_at
    assert machines.find(r.project, machine.id) == got.machine and got.machine.session["id"] != machine.session
    start = next(i for i in intents.read(r.project).values() if i.action == "start")
    assert (start.result, start.approval_id) == ("done", approval.id)
    assert approval.id in budget.open_reservations(r.project, r.op.environ)


def test_the_same_approval_again_follows_and_starts_nothing(rig):
    r, machine = stopped(rig)
    approval, _ = allowed(r, machine)
    first = provision.restart(r.op, machine, approval)
    with pytest.raises(ApprovalNeeded):
        provision.restart(r.op, first.machine, approval)
    assert r.calls("state") == 3  # stop, label, start


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_full_host_leaves_the_machine_stopped_as_it_was_with_what_its_disk_costs(rig, vendor):
    r, machine = stopped(rig, vendor)
    (instance,) = alive(r)
    r.sandbox.world.apply_faults([{"match": {"instance": str(instance.id)}, "fault": "host_full"}])
    instance.host.others = instance.host.gpu_count  # and nothing becomes free
    approval, _ = allowed(r, machine)
    with pytest.raises(HostFull) as caught:
        provision.restart(r.op, machine, approval)
    error = caught.value
    assert (error.code, error.exit_code) == ("host_full", 5) and error.details["storage_usd_hr"] > 0
    assert "replacement" in error.details["proposal"] and "stays stopped" in error.message
    now = machines.find(r.project, machine.id)
    assert (now.status, now.deadline_at, now.label) == ("stopped", machine.deadline_at, machine.label)
    assert instance.phase == "stopped" and instance.label == machine.label and not instance.is_waiting
    assert r.creates == 1 and approval.id not in budget.open_reservations(r.project, r.op.environ)
    instance.host.others = 0
    assert provision.restart(r.op, now, approval).machine.status == "ready"


def test_a_start_that_comes_up_without_its_gpu_is_a_full_host(rig):
    r, machine = stopped(rig, "runpod")
    (instance,) = alive(r)
    instance.faults["missing_gpu"] = {"count": 1}
    approval, _ = allowed(r, machine)
    with pytest.raises(HostFull):
        provision.restart(r.op, machine, approval)
    r.clock.sleep(5)
    assert machines.find(r.project, machine.id).status == "stopped" and instance.phase == "stopped"


def test_a_host_that_came_back_with_an_older_driver_is_not_ready_and_sleeps_again(rig):
    r, machine = stopped(rig, min_cuda=12.0)
    (instance,) = alive(r)
    instance.host.cuda = "11.8"
    approval, _ = allowed(r, machine)
    with pytest.raises(NotReady) as caught:
        provision.restart(r.op, machine, approval)
    assert caught.value.details["what"] == "cuda_too_old"
    assert machines.find(r.project, machine.id).status == "stopped" and len(alive(r)) == 1


def test_after_a_start_the_port_of_before_is_not_taken_for_the_machine(rig):
    r, machine = stopped(rig)
    (instance,) = alive(r)
    instance.faults["old_port"] = {}
    approval, _ = allowed(r, machine)
    got = provision.restart(r.op, machine, approval)
    assert got.machine.endpoint.port == instance.port


@pytest.mark.parametrize("fault", ["lost_reply", "500"])
def test_a_start_that_was_not_answered_is_looked_at_before_anything_else(rig, fault):
    r, machine = stopped(rig)
    approval, _ = allowed(r, machine)
    r.sandbox.world.apply_faults(
        [{"match": {"provider": "vast", "call": "state", "nth": 2}, "fault": fault, "args": {"done": True}}]
    )
    got = provision.restart(r.op, machine, approval)
    assert got.machine.status == "ready" and r.creates == 1


def test_what_an_earlier_process_started_is_waited_for(rig):
    r, machine = stopped(rig)
    approval, plan = allowed(r, machine)
    connect = r.op.connect

    def dies(machine: Any) -> Any:
        raise SystemExit("killed")

    object.__setattr__(r.op, "connect", dies)
    with pytest.raises(SystemExit):
        provision.restart(r.op, machine, approval)
    assert machines.find(r.project, machine.id).status == "booting"
    object.__setattr__(r.op, "connect", connect)
    got = provision.restart(r.op, machine, approval)
    assert got.machine.status == "ready" and got.machine.deadline_at == plan.deadline_at
    assert r.calls("state") == 3


def test_an_approval_for_another_machine_or_another_action_starts_nothing(rig):
    r, machine = stopped(rig)
    approval, _ = allowed(r, machine)
    other = machines.Machine(id="m_other", provider="vast", host="1", status="stopped")
    with pytest.raises(ApprovalInvalid):
        restarting.restart(r.op, other, approval)
    assert r.calls("state") == 1


def test_without_a_guard_nothing_is_started(rig):
    r, machine = stopped(rig)
    approval, _ = allowed(r, machine)
    keyproof.note(r.op, "vast", r.op.account("vast"), "denied", "stop")
    with pytest.raises(Unguarded):
        provision.restart(r.op, machine, approval)
    (instance,) = instances(r)
    assert instance.phase == "stopped" and instance.label == machine.label
    guarded(r)
    assert provision.restart(r.op, machine, approval).machine.status == "ready"
