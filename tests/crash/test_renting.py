"""Death at every door of renting a machine, whatever the provider makes of it."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from crash.deaths import RECOVERIES, Stage, each_death, made_good
from dying import SIDES
from gpu_skills.clock import timestamp
from gpu_skills.lifecycle import actions, approvals, machines, provision, release
from gpu_skills.lifecycle.actions import ActionPlan
from lifecycle.conftest import make_sandbox, rig
from renting import approved, guarded, play_machines, rent

__all__ = ["make_sandbox", "rig"]
pytestmark = pytest.mark.subprocess
both = pytest.mark.parametrize("vendor", ["vast", "runpod"])
sides = pytest.mark.parametrize("side", SIDES)
PARTS = 2
# How the first create goes, and what all of the run may come to.
FAULTS = {
    "useless": ({"fault": "dead_ssh"}, 2),
    "refused": ({"fault": "no_capacity"}, 2),
    "unanswered": ({"fault": "lost_reply"}, 1),
    "never arrived": ({"fault": "lost_request"}, 1),
}


def renting(rig: Any, vendor: str, home: Path, fault: str | None = None) -> Stage:
    r = rig(vendor, home=home, containers=False)
    play_machines(r)
    guarded(r)
    classes = {"gpus": ("NVIDIA RTX A5000", "RTX 4090")} if vendor == "runpod" else {}
    name, plan, approval = approved(r, **classes)
    rule, creates = FAULTS[fault] if fault else ({}, 1)
    if rule:
        r.fault(**rule)
    return Stage(r, lambda: provision.provision(r.op, name, plan, approval), creates=creates)


@both
@sides
@pytest.mark.parametrize("part", range(PARTS))
def test_death_anywhere_while_a_machine_is_rented_is_made_good(rig, tmp_path, vendor, side, part):
    deaths = each_death(lambda home: renting(rig, vendor, home), tmp_path, side=side, part=part, parts=PARTS)
    for crossing, stage in deaths:
        made_good(stage, RECOVERIES[(crossing // PARTS) % 3])


@pytest.mark.slow
@both
@sides
@pytest.mark.parametrize("number", range(3))
def test_whatever_comes_after_the_death_makes_it_good(rig, tmp_path, vendor, side, number):
    for crossing, stage in each_death(lambda home: renting(rig, vendor, home), tmp_path, side=side):
        made_good(stage, RECOVERIES[(crossing // PARTS + 1 + number) % 3])


@pytest.mark.slow
@both
@sides
@pytest.mark.parametrize("fault", FAULTS)
def test_death_anywhere_when_the_first_create_does_not_go_well_is_made_good(rig, tmp_path, vendor, side, fault):
    for crossing, stage in each_death(lambda home: renting(rig, vendor, home, fault), tmp_path, side=side):
        made_good(stage, RECOVERIES[crossing % 3])


def starting(rig: Any, vendor: str, home: Path) -> Stage:
    """A machine that sleeps is told to start, under an approval of its own."""
    r = rig(vendor, home=home, containers=False)
    play_machines(r)
    machine = release.stop(r.op, rent(r, machine_class="project").machine, why="idle")
    r.clock.sleep(600)
    plan = ActionPlan(
        "start",
        r.project.project_id,
        machine.id,
        vendor,
        instance_id=machine.instance_id,
        worst_case_usd=Decimal("2.00"),
        rate_usd_hr=machine.rate_usd_hr,
        storage_usd_hr=machine.storage_usd_hr,
        deadline_at=timestamp(r.clock.now() + timedelta(hours=2)),
        old_deadline_at=machine.deadline_at,
        measured_at=timestamp(r.clock.now()),
    )
    _, plan = actions.load(r.project, actions.freeze(r.project, plan))
    approval = approvals.give(r.op, plan.ask(), statement="yes", source="approve")

    def start() -> Any:
        return provision.restart(r.op, machines.find(r.project, machine.id), approval)

    return Stage(r, start)


@both
@sides
@pytest.mark.parametrize("part", range(PARTS))
def test_death_anywhere_while_a_stopped_machine_starts_is_made_good(rig, tmp_path, vendor, side, part):
    deaths = each_death(lambda home: starting(rig, vendor, home), tmp_path, side=side, part=part, parts=PARTS)
    for crossing, stage in deaths:
        made_good(stage, RECOVERIES[(crossing // PARTS) % 3])
