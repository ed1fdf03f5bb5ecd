"""Death at every door of a reconcile that has all kinds of things to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.deaths import RECOVERIES, Stage, each_death, made_good
from gpu_skills.lifecycle import intents
from gpu_skills.lifecycle.recovery import reconcile
from lifecycle.conftest import make_sandbox, rig
from renting import play_machines
from run_by_hand import ByHand, job

__all__ = ["make_sandbox", "rig"]
pytestmark = pytest.mark.subprocess
PARTS = 3
both = pytest.mark.parametrize("vendor", ["vast", "runpod"])


def asked_for(r: Any) -> ByHand:
    """The create was accepted, and whoever sent it died."""
    return ByHand(r).upto("create")


def never_sent(r: Any) -> ByHand:
    """It was written down, and perhaps sent."""
    return ByHand(r).upto("begin")


def going(r: Any) -> ByHand:
    """A job ran on it, and whoever sent it away died."""
    hand = working(r)
    job(r, hand.machine, 300)
    intents.begin(r.project, r.clock, "destroy", "x1", machine_id=hand.machine_id, details={"why": "asked"})
    return hand


def vanished(r: Any) -> ByHand:
    """A job runs on it, and somebody destroyed it behind our back."""
    hand = working(r)
    job(r, hand.machine, 300, end=False)
    r.clock.sleep(900)
    r.writer.destroy(hand.machine.instance_id)
    return hand


def overdue(r: Any) -> ByHand:
    """It runs past its deadline; its disk is kept for a day."""
    hand = working(r, deadline_h=1)
    r.clock.sleep(4000)
    return hand


def put_to_sleep(r: Any) -> ByHand:
    """Whoever stopped it died."""
    hand = working(r)
    intents.begin(r.project, r.clock, "stop", "x1", machine_id=hand.machine_id, details={"why": "asked"})
    return hand


def missing(r: Any) -> ByHand:
    """Its record is gone from the registry."""
    hand = working(r)
    r.project.path("machines.json").write_text("[]\n")
    return hand


def working(r: Any, **options: Any) -> ByHand:
    hand = ByHand(r, **options).upto("close")
    hand.ready()
    return hand


FOUND = (asked_for, never_sent, going, vanished, overdue, put_to_sleep, missing)
# Seconds before each pass: until nobody looks for it any more.
AFTER = {never_sent: (0, 25 * 3600)}


def reconciling(rig: Any, vendor: str, home: Path, find: Callable[[Any], ByHand]) -> Stage:
    r = rig(vendor, home=home, containers=False)
    if find is missing:  # what it has of jobs is asked of the machine itself
        play_machines(r)
    find(r)
    r.clock.sleep(5)

    def passes() -> None:
        for pause_s in AFTER.get(find, (0, 61, 61, 1200)):
            r.clock.sleep(pause_s)
            reconcile.run(r.op, [vendor])

    return Stage(r, passes, lambda: reconcile.run(r.op, [vendor]))


@both
@pytest.mark.parametrize("find", FOUND)
@pytest.mark.parametrize("part", range(PARTS))
def test_death_anywhere_in_a_reconcile_is_made_good(rig, tmp_path, vendor, find, part):
    def make(home: Path) -> Stage:
        return reconciling(rig, vendor, home, find)

    for crossing, stage in each_death(make, tmp_path, side=vendor, part=part, parts=PARTS, least=4):
        made_good(stage, RECOVERIES[(crossing // PARTS) % 3])
