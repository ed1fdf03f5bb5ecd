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
from gpu_skills.errors import InsufficientBalance
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.approval import actions, approvals
from gpu_skills.lifecycle.approval.actions import ActionPlan
from gpu_skills.lifecycle.approval.approvals import Approval
from gpu_skills.lifecycle.ending import stops
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.renting import keeping, provision
from lifecycle.conftest import make_sandbox, rig
from renting import PlayedMachine, approved, guarded, play_machines, rent

__all__ = ["make_sandbox", "rig"]
pytestmark = pytest.mark.subprocess
BOTH = ["vast", "runpod"]
both = pytest.mark.parametrize("vendor", BOTH)
sides = pytest.mark.parametrize("side", SIDES)
PARTS = 2
USELESS = {"vast": "exited", "runpod": "error_with_contract"}
# How the first create goes, and what all of the run may come to.
FAULTS: dict[str, tuple[tuple[str, ...], int]] = {
    "useless": (("dead",), 2),
    "refused": (("no_capacity",), 2),
    "unanswered": (("lost_reply",), 1),
    "twins": (("duplicate", "lost_reply"), 1),
    "never arrived": (("lost_request",), 1),
}


def renting(rig: Any, vendor: str, home: Path, fault: str | None = None) -> Stage:
    r = rig(vendor, home=home, containers=False)
    play_machines(r)
    guarded(r)
    classes = {"gpus": ("NVIDIA RTX A5000", "RTX 4090")} if vendor == "runpod" else {}
    name, plan, approval = approved(r, **classes)
    faults, creates = FAULTS[fault] if fault else ((), 1)
    for name_of_fault in faults:
        r.fault({"dead": USELESS[vendor]}.get(name_of_fault, name_of_fault))
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
@pytest.mark.parametrize("recovery", RECOVERIES)
def test_whatever_comes_after_the_death_makes_it_good(rig, tmp_path, vendor, recovery):
    deaths = each_death(
        lambda home: renting(rig, vendor, home), tmp_path, side=vendor, part=BOTH.index(vendor), parts=2
    )
    for _crossing, stage in deaths:
        made_good(stage, recovery)


@pytest.mark.slow
@both
@pytest.mark.parametrize("fault", FAULTS)
def test_death_anywhere_when_the_first_create_does_not_go_well_is_made_good(rig, tmp_path, vendor, fault):
    part, parts = (BOTH.index(vendor), 4) if fault == "useless" else (0, 1)  # a long way, most of it a destroy
    deaths = each_death(lambda home: renting(rig, vendor, home, fault), tmp_path, side=vendor, part=part, parts=parts)
    for crossing, stage in deaths:
        made_good(stage, RECOVERIES[(crossing // parts) % 3])


def once_more(rig: Any, vendor: str, home: Path) -> Stage:
    """The account had no money; now it has, and the same approval serves."""
    r = rig(vendor, home=home, containers=False)
    play_machines(r)
    guarded(r)
    given = approved(r)
    r.fault("insufficient_balance")
    with pytest.raises(InsufficientBalance):
        provision.provision(r.op, *given)
    return Stage(r, lambda: provision.provision(r.op, *given), creates=2)


@pytest.mark.slow
@both
def test_death_anywhere_in_a_second_try_with_the_same_approval_is_made_good(rig, tmp_path, vendor):
    for crossing, stage in each_death(lambda home: once_more(rig, vendor, home), tmp_path, side=vendor):
        made_good(stage, RECOVERIES[crossing % 3])


def allowed(r: Any, action: str, machine: Machine) -> tuple[ActionPlan, Approval]:
    """A yes to a start, or to more time: until three hours from now."""
    plan = ActionPlan(
        action,  # type: ignore[arg-type]
        r.project.project_id,
        machine.id,
        machine.provider,
        instance_id=machine.instance_id,
        worst_case_usd=Decimal("2.00"),
        rate_usd_hr=machine.rate_usd_hr,
        storage_usd_hr=machine.storage_usd_hr,
        deadline_at=timestamp(r.clock.now() + timedelta(hours=3)),
        old_deadline_at=machine.deadline_at,
        measured_at=timestamp(r.clock.now()),
    )
    _, plan = actions.load(r.project, actions.freeze(r.project, plan))
    return plan, approvals.give(r.op, plan.ask(), statement="yes", source="approve")


def starting(rig: Any, vendor: str, home: Path) -> Stage:
    """A machine that sleeps is told to start, under an approval of its own."""
    r = rig(vendor, home=home, containers=False)
    play_machines(r)
    machine = stops.stop(r.op, rent(r, machine_class="project").machine, why="idle")
    r.clock.sleep(600)
    _, approval = allowed(r, "start", machine)

    def start() -> Any:
        return provision.restart(r.op, machines.find(r.project, machine.id), approval)

    return Stage(r, start)


@both
@pytest.mark.parametrize("part", range(PARTS))
def test_death_anywhere_while_a_stopped_machine_starts_is_made_good(rig, tmp_path, vendor, part):
    deaths = each_death(lambda home: starting(rig, vendor, home), tmp_path, side=vendor, part=part, parts=PARTS)
    for crossing, stage in deaths:
        made_good(stage, RECOVERIES[(crossing // PARTS) % 3])


def extending(rig: Any, vendor: str, home: Path) -> Stage:
    """A machine that works gets more time. What its fuse was told it keeps, whoever asks it then."""
    r = rig(vendor, home=home, containers=False)
    told: dict[str, Any] = {}

    def remembers(played: PlayedMachine) -> None:
        played.deadline = told.get("deadline", played.deadline)
        listen = played._fuse

        def fuse(args: dict[str, Any]) -> dict[str, Any]:
            answer = listen(args)
            told["deadline"] = played.deadline
            return answer

        played._fuse = fuse  # type: ignore[method-assign]

    play_machines(r, remembers)
    machine = rent(r, machine_class="project").machine
    r.clock.sleep(600)
    plan, approval = allowed(r, "extend", machine)
    return Stage(r, lambda: keeping.extend(r.op, plan, approval))


@both
def test_death_anywhere_while_a_machine_gets_more_time_is_made_good(rig, tmp_path, vendor):
    for crossing, stage in each_death(lambda home: extending(rig, vendor, home), tmp_path, side=vendor):
        made_good(stage, RECOVERIES[crossing % 3])
