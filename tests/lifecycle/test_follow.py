"""A machine that was made ready before is used again only while its fuse lives and holds the deadline on record."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpu_skills.clock import parse_timestamp
from gpu_skills.config import load_gpu_yaml
from gpu_skills.errors import NotReady
from gpu_skills.jobs import disposable, launch
from gpu_skills.jobs.launch import Limits
from gpu_skills.lifecycle import machines, project_machine, runs
from gpu_skills.lifecycle.approval import actions, approvals
from gpu_skills.lifecycle.approval.actions import ActionPlan
from gpu_skills.lifecycle.ending import stops
from gpu_skills.lifecycle.guard import fuse
from gpu_skills.lifecycle.renting import bringup, provision
from renting import alive, approved, guarded, play_machines, roomy

pytestmark = pytest.mark.subprocess

DEFECTS = pytest.mark.parametrize("defect", ["no receipt", "dead", "another deadline"])


class Fuses:
    """What the fuses of played machines say; `defect` is what is wrong with them from now on."""

    def __init__(self, r: Any):
        self.r = r
        self.defect: str | None = None
        self.links: list[Any] = []
        play_machines(r, self.arrange)

    def arrange(self, played: Any) -> None:
        says = played._fuse
        on_record = machines.find(self.r.project, played.machine.id)
        if on_record is not None and on_record.deadline_at is not None:
            played.deadline = parse_timestamp(on_record.deadline_at)

        def answer(args: dict[str, Any]) -> dict[str, Any]:
            if self.defect == "another deadline":
                played.deadline += timedelta(hours=1)
            found = says(args)
            if self.defect == "no receipt":
                return {"receipt": None, "alive": False}
            return {**found, "alive": self.defect != "dead"}

        played._fuse = answer
        played.is_open = True
        played.close = lambda: setattr(played, "is_open", False)
        self.links.append(played)


@pytest.fixture
def shop(rig, monkeypatch):
    monkeypatch.setattr(bringup, "RECEIPT_S", 0.1)
    monkeypatch.setattr(bringup, "RECEIPT_PAUSE_S", 0.01)
    r = rig("vast", containers=False)
    fuses = Fuses(r)
    guarded(r)
    roomy(r)
    return r, fuses


def refused(fuses: Fuses, use_again: Any) -> None:
    """The same call again: refused for its fuse, with no connection left, and fine once the fuse is."""
    with pytest.raises(NotReady) as caught:
        use_again()
    assert caught.value.details["what"] == "fuse_missing"
    assert not fuses.links[-1].is_open
    fuses.defect = None
    use_again()
    assert fuses.links[-1].is_open


@DEFECTS
def test_an_approval_that_won_does_not_give_out_a_machine_without_its_fuse(shop, defect):
    r, fuses = shop
    given = approved(r)
    provision.provision(r.op, *given)
    fuses.defect = defect
    refused(fuses, lambda: provision.provision(r.op, *given))
    assert r.creates == 1


@DEFECTS
def test_a_machine_that_was_ready_before_its_approval_was_told_is_brought_up_like_a_new_one(shop, defect):
    r, fuses = shop
    given = approved(r, setup_failures_max=0)
    got = provision.provision(r.op, *given)
    # As left by a command that died between the two: the machine is ready, its run is still open.
    runs.update(r.op, given[2].id, lambda run: runs.replace(run, state="open", won=None))
    fuses.defect = defect
    with pytest.raises(NotReady) as caught:
        provision.provision(r.op, *given)
    assert caught.value.details["what"] == "fuse_missing"
    assert not alive(r) and machines.find(r.project, got.machine.id).status == "destroyed"


@DEFECTS
def test_a_start_that_was_over_does_not_give_out_a_machine_without_its_fuse(shop, monkeypatch, defect):
    r, fuses = shop
    machine = stops.stop(r.op, provision.provision(r.op, *approved(r, machine_class="project")).machine, why="idle")
    now = r.clock.now()
    plan = ActionPlan(
        "start", r.project.project_id, machine.id, machine.provider, instance_id=machine.instance_id,
        worst_case_usd=2 * machine.rate_usd_hr, rate_usd_hr=machine.rate_usd_hr, measured_at=bringup.timestamp(now),
        deadline_at=bringup.timestamp(now + timedelta(hours=2)), old_deadline_at=machine.deadline_at,
    )  # fmt: skip
    _, plan = actions.load(r.project, actions.freeze(r.project, plan))
    approval = approvals.give(r.op, plan.ask(), statement="yes", source="approve")

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(approvals, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            provision.restart(r.op, machine, approval)
    fuses.defect = defect
    refused(fuses, lambda: provision.restart(r.op, machine, approval))


@DEFECTS
def test_a_launch_that_is_gone_on_with_submits_nothing_to_a_machine_without_its_fuse(shop, defect):
    r, fuses = shop
    name, plan, approval = approved(r)
    launched = launch.begin(r.project, r.op.ledger, r.clock, name, Limits(0.0, plan.deadline_s, None), approval.id)
    disposable.rent(r.op, launched, plan, approval)
    fuses.defect = defect
    refused(fuses, lambda: disposable.rent(r.op, launched, plan, approval))


@DEFECTS
def test_the_projects_machine_takes_no_work_without_its_fuse(shop, defect, tmp_path):
    r, fuses = shop
    config = load_gpu_yaml(tmp_path, flags={"provider": "vast", "compute.min_vram_gb": "24"}, environ={})

    def use() -> Any:
        return project_machine.ready(
            r.op, config, agree=lambda ask: approvals.give(r.op, ask, statement="yes", source="terminal")
        )

    use()
    fuses.defect = defect
    refused(fuses, use)
    assert r.creates == 1


def test_a_deadline_that_is_being_extended_is_read_again_with_the_record(shop, monkeypatch):
    """Another command moves both: the fuse first, the record a moment later."""
    r, _ = shop
    given = approved(r)
    machine = provision.provision(r.op, *given).machine
    later = parse_timestamp(machine.deadline_at) + timedelta(hours=1)
    reads = []

    def moving(link: Any, machine: Any) -> Any:
        found = fuse.Receipt(str(machine.intent), later, r.clock.now(), "proven", True, "stop", "b1")
        if reads:
            text = bringup.timestamp(later)
            machines.update(r.project, machine.id, lambda m: bringup.replace(m, deadline_at=text))
        reads.append(found)
        return found

    monkeypatch.setattr(fuse, "read_receipt", moving)
    monkeypatch.setattr(bringup, "RECEIPT_S", 5.0)
    got = provision.provision(r.op, *given)
    assert got.receipt.deadline_at == later == parse_timestamp(got.machine.deadline_at)
