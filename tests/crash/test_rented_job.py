"""Death at every door of a job with a machine of its own: from the first request to the proven end of its machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from aftermath import holds, reconciled, scheduled, wound_up
from crash.customers import Answer, SomeShop
from crash.deaths import RECOVERIES, Stage, each_death
from dying import SIDES
from lifecycle.conftest import make_sandbox, rig
from renting import guarded

__all__ = ["make_sandbox", "rig"]
pytestmark = pytest.mark.subprocess
both = pytest.mark.parametrize("vendor", ["vast", "runpod"])
PARTS = 8
# What a second call may say where it cannot go on by itself; each names the command that does.
STANDS = {
    "again": {"provider_silent"},
    "reconcile": {"provider_silent"},
    "late": {"provider_silent", "approval_used", "approval_expired"},
}


class Job:
    """A shop with one frozen plan. It counts how often the job's command really ran."""

    def __init__(self, rig: Any, vendor: str, home: Path, *, seconds: float = 0):
        r = rig(vendor, home=home, containers=False)
        self.shop = SomeShop(r)
        guarded(self.shop, "stop", "destroy")
        self.ran = home / "ran"
        self.gpu("init", "--jobs", "--provider", vendor)
        (self.shop.root / "input.txt").write_text("x")
        command = f"echo ran >> {self.ran}; cat input.txt > $GPU_OUTPUT_DIR/x; sleep {seconds}"
        self.plan = self.gpu("plan", "--freeze", "--", command).document["name"]

    def gpu(self, *args: str) -> Answer:
        answer = self.shop.gpu(*args)
        assert answer.exit_code == 0, (answer.document, answer.said)
        return answer

    def run(self, *args: str) -> Answer:
        return self.shop.gpu("job", "run", "--plan", self.plan, "--yes", "--hold-for", "0", *args)

    def started(self) -> Job:
        """It is on its machine, and nobody watches it."""
        self.gpu("job", "run", "--plan", self.plan, "--yes", "--hold-for", "0", "--detach")
        deadline = time.monotonic() + 20
        while not self.ran.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self

    @property
    def times_run(self) -> int:
        return len(self.ran.read_text().splitlines()) if self.ran.exists() else 0

    def stage(self, act: Any = None) -> Stage:
        stage = Stage(self.shop, act or self.run)
        stage.job = self  # type: ignore[attr-defined]
        return stage


def made_good(stage: Stage, recovery: str) -> None:
    """The same call brings it to its end; or it says what does, and that is well, too."""
    job: Job = stage.job  # type: ignore[attr-defined]
    shop = job.shop
    if recovery == "late":
        shop.clock.sleep(2 * 3600)
    if recovery != "again":
        report = scheduled(shop)
        holds(shop, is_clear=report.is_clear)
    answer = job.run()
    if answer.exit_code == 0:
        assert answer.document["collected"] and answer.document["machine_state"] == "destroyed"
        assert (Path(answer.document["outputs_dir"]) / "x").read_text() == "x"
        assert job.times_run == 1 and not shop.burning()
    else:
        assert answer.error is not None, (answer.document, answer.said)
        assert answer.error["code"] in STANDS[recovery] and answer.error["next_step"], answer.error
    assert job.times_run <= 1
    reconciled(shop)
    holds(shop)
    wound_up(shop)
    assert shop.gpu("status").document["running_jobs"] == []
    assert shop.gpu("ledger", "verify").exit_code == 0


@both
def test_death_at_some_doors_of_a_rented_job_is_made_good(rig, tmp_path, vendor):
    """Every sixteenth; the slow test has all of them."""
    deaths = each_death(lambda home: Job(rig, vendor, home).stage(), tmp_path, side=vendor, part=7, parts=16)
    for crossing, stage in deaths:
        made_good(stage, RECOVERIES[(crossing // 16) % 3])


@pytest.mark.slow
@both
@pytest.mark.parametrize("part", range(PARTS))
def test_death_at_every_door_of_a_rented_job_is_made_good(rig, tmp_path, vendor, part):
    deaths = each_death(lambda home: Job(rig, vendor, home).stage(), tmp_path, side=vendor, part=part, parts=PARTS)
    for crossing, stage in deaths:
        made_good(stage, RECOVERIES[(crossing // PARTS) % 3])


@pytest.mark.slow
@both
def test_death_anywhere_while_outputs_are_collected_is_made_good(rig, tmp_path, vendor):
    def collecting(home: Path) -> Stage:
        job = Job(rig, vendor, home).started()
        return job.stage(lambda: job.shop.gpu("job", "pull", "J-000001"))

    for crossing, stage in each_death(collecting, tmp_path, side=vendor):
        made_good(stage, RECOVERIES[crossing % 3])


@pytest.mark.slow
@both
def test_death_anywhere_in_a_cancel_is_made_good(rig, tmp_path, vendor):
    """The cancelled job stays cancelled, its outputs are here and its machine is gone."""

    def cancelling(home: Path) -> Stage:
        job = Job(rig, vendor, home, seconds=600).started()
        return job.stage(lambda: job.shop.gpu("job", "cancel", "J-000001"))

    part = ["vast", "runpod"].index(vendor)
    for crossing, stage in each_death(cancelling, tmp_path, side=SIDES[part], part=part, parts=5):
        shop = stage.r
        if crossing % 2:
            scheduled(shop)
        answer = shop.gpu("job", "cancel", "J-000001")
        assert answer.exit_code == 0, (answer.document, answer.said)
        assert not shop.burning() and answer.document["state"] == "cancelled"
        assert (shop.root / "gpu-outputs/J-000001/x").read_text() == "x"
        holds(shop)
        wound_up(shop)
