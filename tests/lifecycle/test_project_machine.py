"""The machine a project keeps: rented once, used again, started again, and never replaced without a yes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_skills.config import GpuConfig, load_gpu_yaml
from gpu_skills.errors import ApprovalNeeded, CannotSatisfy, MachinePending, NotReady, PlanRefused
from gpu_skills.lifecycle import machines, project_machine
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.ending import stops
from gpu_skills.lifecycle.recovery import reconcile, returned
from renting import alive, guarded, play_machines, roomy

pytestmark = pytest.mark.subprocess
VENDORS = pytest.mark.parametrize("vendor", ["vast", "runpod"])


@pytest.fixture(autouse=True)
def short_streams(monkeypatch):
    monkeypatch.setattr("gpu_skills.providers.runpod.reader._LOG_STREAM_S", 0.2)


class Human:
    """Says yes or no, and counts what it was asked."""

    def __init__(self, r: Any, *, says: bool = True):
        self.r, self.says = r, says
        self.asked: list[Any] = []

    def __call__(self, ask: Any) -> Any:
        try:
            return approvals.find(self.r.op, ask)
        except ApprovalNeeded:
            self.asked.append(ask)
        if not self.says:
            raise approvals.needed(self.r.op, ask)
        return approvals.give(self.r.op, ask, statement="yes", source="terminal")


def config(vendor: str, **flags: Any) -> GpuConfig:
    return load_gpu_yaml(GPU_YAML_FREE, flags={"provider": vendor, "compute.min_vram_gb": "24", **flags}, environ={})


@pytest.fixture(autouse=True)
def no_gpu_yaml(tmp_path):
    global GPU_YAML_FREE
    GPU_YAML_FREE = tmp_path / "no gpu.yaml here"
    GPU_YAML_FREE.mkdir()


def prepared(rig, vendor: str) -> tuple[Any, Human]:
    r = rig(vendor, containers=False)
    play_machines(r)
    guarded(r)
    roomy(r)
    return r, Human(r)


@VENDORS
def test_the_first_use_asks_once_and_rents_the_second_asks_nothing_and_rents_nothing(rig, vendor):
    r, human = prepared(rig, vendor)
    first = project_machine.ready(r.op, config(vendor), agree=human)
    again = project_machine.ready(r.op, config(vendor), agree=human)
    assert [ask.action for ask in human.asked] == ["rent"] and r.creates == 1
    assert first.machine.id == again.machine.id and again.machine.status == "ready"
    assert again.machine.machine_class == "project" and again.machine.session["idle_timeout_s"] == 900


def test_without_a_yes_nothing_is_rented_and_a_later_yes_to_that_very_plan_is_enough(rig):
    r, human = prepared(rig, "vast")
    human.says = False
    with pytest.raises(ApprovalNeeded) as refused:
        project_machine.ready(r.op, config("vast"), agree=human)
    assert r.creates == 0 and refused.value.exit_code == 4
    (ask,) = human.asked
    approvals.give(r.op, ask, statement="yes, rent it", source="approve")
    link = project_machine.ready(r.op, config("vast"), agree=human)
    assert r.creates == 1 and len(human.asked) == 1 and link.machine.plan == ask.sha256


def test_a_yes_to_a_plan_for_something_else_is_not_used(rig):
    r, human = prepared(rig, "vast")
    human.says = False
    with pytest.raises(ApprovalNeeded):
        project_machine.ready(r.op, config("vast"), agree=human)
    approvals.give(r.op, human.asked[0], statement="yes", source="approve")
    with pytest.raises(ApprovalNeeded):
        project_machine.ready(r.op, config("vast", **{"compute.disk_gb": "100"}), agree=human)
    assert r.creates == 0 and human.asked[0].sha256 != human.asked[1].sha256


@VENDORS
def test_a_stopped_one_is_started_again_with_a_yes_of_its_own(rig, vendor):
    r, human = prepared(rig, vendor)
    machine = project_machine.ready(r.op, config(vendor), agree=human).machine
    stops.stop(r.op, machine, why="idle")
    r.clock.sleep(600)
    link = project_machine.ready(r.op, config(vendor), agree=human)
    assert [ask.action for ask in human.asked] == ["rent", "start"] and r.creates == 1
    assert link.machine.id == machine.id and link.machine.status == "ready" and len(alive(r)) == 1


def test_one_that_its_fuse_stopped_unseen_is_found_stopped_and_asked_for(rig):
    r, human = prepared(rig, "vast")
    machine = project_machine.ready(r.op, config("vast"), agree=human).machine
    r.writer.stop(machine.instance_id)  # as the machine's own fuse does, with nobody looking
    r.clock.sleep(60)
    human.says = False
    with pytest.raises(ApprovalNeeded):
        project_machine.ready(r.op, config("vast"), agree=human)
    assert human.asked[-1].action == "start"
    assert machines.find(r.project, machine.id).status == "stopped"


def test_more_than_what_was_rented_is_refused_and_says_how_to_get_it(rig):
    r, human = prepared(rig, "vast")
    project_machine.ready(r.op, config("vast"), agree=human)
    with pytest.raises(CannotSatisfy) as refused:
        project_machine.ready(r.op, config("vast", **{"compute.min_vram_gb": "80"}), agree=human)
    assert r.creates == 1 and "gpu destroy" in refused.value.next_step


def test_while_nobody_knows_what_became_of_a_create_no_second_one_is_sent(rig):
    r, human = prepared(rig, "vast")
    r.fault("lost_reply")
    r.fault("list_empty", "list", times=0)
    with pytest.raises(Exception, match="vast"):
        project_machine.ready(r.op, config("vast"), agree=human)
    (machine,) = machines.all_machines(r.project)
    assert machine.status == "unknown"
    with pytest.raises(MachinePending) as pending:
        project_machine.ready(r.op, config("vast"), agree=human)
    assert r.creates == 1 and pending.value.exit_code == 6 and pending.value.next_step == "gpu reconcile"


def test_machines_made_for_one_job_are_not_the_projects(rig):
    r, human = prepared(rig, "vast")
    machine = project_machine.ready(r.op, config("vast"), agree=human).machine
    machines.update(r.project, machine.id, lambda found: replace(found, machine_class="job"))
    assert project_machine.current(r.project, "vast") is None


@VENDORS
@pytest.mark.parametrize("has_plan", [True, False], ids=["plan", "no plan"])
def test_one_whose_record_was_lost_is_brought_up_again_and_nothing_is_rented(rig, vendor, has_plan):
    r, human = prepared(rig, vendor)
    machine = project_machine.ready(r.op, config(vendor), agree=human).machine
    r.project.path("machines.json").unlink()
    if not has_plan:
        (r.project.path("plans") / f"{machine.plan}.json").unlink()
    link = project_machine.ready(r.op, config(vendor), agree=human)
    assert [ask.action for ask in human.asked] == ["rent"] and r.creates == 1
    assert link.machine.id == machine.id and link.machine.status == "ready" and link.machine.session is not None
    assert link.machine.extra["fuse"]["deadline_at"] == machine.deadline_at
    assert not link.machine.has_unknown_past
    assert reconcile.run(r.op, [vendor]).is_clear


def test_one_taken_back_that_cannot_be_worked_on_says_what_ends_it(rig, monkeypatch):
    r, human = prepared(rig, "vast")
    machine = project_machine.ready(r.op, config("vast"), agree=human).machine
    r.project.path("machines.json").unlink()
    played = r.op.connect

    def without_fuse(known):
        link = played(known)
        link.session.deadline = None
        return link

    monkeypatch.setattr(returned, "RECEIPT_WAIT_S", 0.05)
    r = replace(r, op=replace(r.op, connect=without_fuse))
    with pytest.raises(NotReady) as refused:
        project_machine.ready(r.op, config("vast"), agree=human)
    assert f"gpu machine destroy {machine.id} --abandon-outputs {machine.id}" in refused.value.next_step
    assert r.creates == 1 and len(human.asked) == 1


@VENDORS
def test_a_plan_that_is_refused_here_says_to_change_the_file_and_to_set_up_again(rig, vendor):
    r, human = prepared(rig, vendor)
    with pytest.raises(PlanRefused) as refused:
        project_machine.ready(r.op, config(vendor, **{"compute.min_vram_gb": "5000"}), agree=human)
    steps = [refused.value.next_step, *(one.get("next_step", "") for one in refused.value.details["reasons"])]
    assert "gpu setup" in steps[0] and not any("gpu plan again" in step for step in steps), steps
    assert not human.asked and r.creates == 0
