"""The disk is full from some write on: whatever may bill is named with its way out, and nothing is lost by it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aftermath import holds, reborn, scheduled, wound_up
from crash.deaths import Stage
from crash.test_releasing import stopping
from crash.test_renting import extending, renting, starting
from gpu_skills import doors
from gpu_skills.errors import GpuError
from gpu_skills.lifecycle import machines, states
from gpu_skills.lifecycle.ending import release
from lifecycle.conftest import make_sandbox, rig
from renting import play_machines, rent

__all__ = ["make_sandbox", "rig"]
pytestmark = pytest.mark.subprocess
OF_STATE = ("state.files.commit", "state.journal.append")


class Disk:
    """Full while is_full: no byte of this thread gets on it. The vendor's own threads have another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.is_full = False
        self.sent = 0
        here, write = threading.get_ident(), os.write

        def writing(descriptor: int, data: Any) -> int:
            if self.is_full and threading.get_ident() == here:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", writing)

    def full_from(self, crossing: int, act: Callable[[], Any], *, lasts: bool) -> tuple[GpuError | None, bool]:
        """(what the action raised, whether it got as far as that write). lasts: or it is that one write only."""
        seen, here = 0, threading.get_ident()

        def watcher(name: str, now: str) -> None:
            nonlocal seen
            if threading.get_ident() != here or name not in OF_STATE:
                return
            seen += now == "before"
            self.is_full = seen >= crossing and (lasts or seen == crossing)

        doors.watch(watcher)
        try:
            act()
        except GpuError as error:
            return error, seen >= crossing
        finally:
            doors.watch(None)
            self.is_full = False
        return None, seen >= crossing


def each_write(make: Callable[[Path], Stage], home: Path, disk: Disk, *, lasts: bool) -> Iterator[tuple[Stage, Any]]:
    crossing = 1
    while True:
        stage = make(home / str(crossing))
        error, was_met = disk.full_from(crossing, stage.act, lasts=lasts)
        if was_met:
            yield stage, error
        stage.r.sandbox.stop()
        if not was_met:
            break
        crossing += 1
    assert crossing > 4, f"only {crossing} writes"


def destroying(rig: Any, vendor: str, home: Path) -> Stage:
    r = rig(vendor, home=home, containers=False)
    play_machines(r)
    machine = rent(r, machine_class="project").machine
    r.clock.sleep(60)
    return Stage(r, lambda: release.destroy(r.op, machines.find(r.project, machine.id), why="asked", wait_s=600))


STAGES = {"create": renting, "start": starting, "extend": extending, "destroy": destroying, "stop": stopping}


@pytest.mark.slow
@pytest.mark.parametrize("vendor", ["vast", "runpod"])
@pytest.mark.parametrize("lasts", [True, False], ids=["from then on", "once"])
@pytest.mark.parametrize("what", STAGES)
def test_a_write_that_fails_between_a_request_and_its_outcome_never_reads_as_if_nothing_bills(
    rig, tmp_path, monkeypatch, what, lasts, vendor
):
    disk = Disk(monkeypatch)
    for stage, error in each_write(lambda home: STAGES[what](rig, vendor, home), tmp_path, disk, lasts=lasts):
        r = stage.r
        if error is not None and r.burning():
            on_record = {m.id: m for m in machines.all_machines(r.project) if m.status not in states.FINAL}
            assert error.may_be_billing, (error.code, error.message)
            named = [m for m in on_record.values() if m.id in str(error.details.get("machine"))]
            assert named, (error.code, error.message, error.details)
            if error.exit_code == 6:
                assert error.next_step == "gpu reconcile"
        reborn(r)
        report = scheduled(r)
        holds(r, creates=stage.creates, is_clear=report.is_clear)
        wound_up(r, creates=stage.creates)
