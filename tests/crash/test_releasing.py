"""Death at every door of giving a machine back, or of putting it to sleep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crash.deaths import RECOVERIES, Stage, each_death, made_good
from dying import SIDES
from gpu_skills.clock import timestamp
from gpu_skills.errors import Unreachable
from gpu_skills.jobs import release as jobs_release
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.ending import stops
from lifecycle.conftest import make_sandbox, rig
from renting import play_machines, rent
from run_by_hand import job

__all__ = ["make_sandbox", "rig"]
pytestmark = pytest.mark.subprocess
both = pytest.mark.parametrize("vendor", ["vast", "runpod"])
sides = pytest.mark.parametrize("side", SIDES)
PARTS = 3
OUTPUTS = [{"path": "model.bin", "bytes": 5, "sha256": "0" * 64}]


def worked(rig: Any, vendor: str, home: Path) -> tuple[Any, Any, str]:
    """(rig, machine, job): a machine on which one job ran whose outputs nobody has collected, and nobody can now."""
    r = rig(vendor, home=home, containers=False)
    play_machines(r)
    machine = rent(r, machine_class="project").machine

    def nobody(machine: Any) -> Any:
        raise Unreachable(host=machine.host, reason="no route")

    r.op = replace(r.op, connect=nobody)
    r.clock.sleep(60)
    name = job(r, machine, 600)
    folder = JobFolder(r.project, name)
    folder.write("accepted", {"at": timestamp(r.clock.now()), "state": "running"})
    folder.write("manifest", {"final": True, "files": OUTPUTS, "skipped": []})
    r.clock.sleep(60)
    return r, machine, name


def destroying(rig: Any, vendor: str, home: Path) -> Stage:
    """Its outputs may be lost: a person said so."""
    r, machine, name = worked(rig, vendor, home)

    def destroy() -> Any:
        now = machines.find(r.project, machine.id)
        return jobs_release.destroy(r.op, now, abandon=[name], wait_s=600)

    return Stage(r, destroy)


@both
@sides
@pytest.mark.parametrize("part", range(PARTS))
def test_death_anywhere_in_a_destroy_is_made_good(rig, tmp_path, vendor, side, part):
    deaths = each_death(lambda home: destroying(rig, vendor, home), tmp_path, side=side, part=part, parts=PARTS)
    for crossing, stage in deaths:
        made_good(stage, RECOVERIES[(crossing // PARTS) % 3])


def stopping(rig: Any, vendor: str, home: Path) -> Stage:
    """Its disk stays, and with it what the job left."""
    r, machine, _ = worked(rig, vendor, home)
    return Stage(r, lambda: stops.stop(r.op, machines.find(r.project, machine.id), why="idle"))


@both
@sides
def test_death_anywhere_in_a_stop_is_made_good(rig, tmp_path, vendor, side):
    for crossing, stage in each_death(lambda home: stopping(rig, vendor, home), tmp_path, side=side):
        made_good(stage, RECOVERIES[crossing % 3])
