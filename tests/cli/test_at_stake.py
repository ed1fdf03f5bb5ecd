"""A command that fails for a reason of this computer never reads as if nothing were billing meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from typing import Any

import pytest

from gpu_skills.clock import timestamp
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.ending import release
from lifecycle.conftest import make_sandbox, rig
from rented import rent
from rented_cli import customer

__all__ = ["make_sandbox", "rig"]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Full while `is_full`, for this thread: the vendor's own have another disk."""
    disk = {"is_full": False}
    here, write = threading.get_ident(), os.write

    def writing(descriptor: int, data: Any) -> int:
        if disk["is_full"] and threading.get_ident() == here:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", writing)
    return disk


@pytest.fixture
def world(gpu, rig, monkeypatch):
    r = rig("vast", containers=False)
    return r, customer(gpu, r, monkeypatch)


COMMANDS = {
    "destroy": ["machine", "destroy", "MACHINE", "--abandon-outputs", "MACHINE", "--wait", "0s"],
    "stop": ["machine", "stop", "MACHINE", "--wait", "0s"],
    "sentinel": ["sentinel", "--provider", "vast"],
}


@pytest.mark.parametrize("what", COMMANDS)
def test_on_a_full_disk_a_machine_that_bills_is_named_with_the_way_out(world, full_disk, what):
    r, call = world
    machine = rent(r, hours=1)
    r.sandbox.advance(2 * 3600)
    full_disk["is_full"] = True
    result = call(*(machine.id if word == "MACHINE" else word for word in COMMANDS[what]), "--json")
    full_disk["is_full"] = False
    error = result.error
    assert error["may_be_billing"] is True and "gpu reconcile" in error["next_step"], error
    assert machine.id in str(error["details"])


def test_what_reconcile_cannot_write_down_is_told_with_the_machines_that_bill_meanwhile(world, full_disk):
    r, call = world
    rent(r)
    gone = rent(r, number=2)
    r.writer.destroy(gone.instance_id)
    machines.save(r.project, replace(gone, status="destroyed", destroyed_at=timestamp(r.clock.now())))
    here = machines.find(r.project, rent(r, number=3).id)
    full_disk["is_full"] = True
    result = call("reconcile", "--provider", "vast", "--json")
    full_disk["is_full"] = False
    assert result.error["code"] == "disk_full" and result.error["may_be_billing"] is True, result.document
    assert here.id in result.error["details"]["machines"] and gone.id not in result.error["details"]["machines"]
    assert result.error["next_step"].endswith("; then: gpu reconcile")


def test_of_a_project_with_nothing_rented_a_full_disk_says_that_nothing_bills(world, full_disk):
    r, call = world
    machine = rent(r)
    release.destroy(r.op, machine, why="asked", wait_s=600)
    full_disk["is_full"] = True
    result = call("plan", "--provider", "vast", "--freeze", "--gpu", "RTX 4090", "--json", "--", "true")
    full_disk["is_full"] = False
    assert result.error["code"] == "disk_full", result.error
    assert result.error["may_be_billing"] is False and not r.burning()


def test_a_sentinel_without_records_that_cannot_leave_its_receipt_does_not_say_that_nothing_bills(world, tmp_path):
    r, call = world
    rent(r, on_record=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ("sentinel", "--provider", "vast", "--project-id", r.project.project_id, "--json")
    result = call(*words, "--receipt", str(elsewhere / "no" / "r.json"), cwd=elsewhere)
    assert result.error["code"] == "not_writable" and result.error["may_be_billing"] is True


def test_records_that_cannot_be_read_may_name_machines(world):
    r, call = world
    rent(r)
    (r.project.state / "machines.json").write_text("[{")
    error = call("machine", "ls", "--json").error
    assert error["code"] == "state_invalid" and error["may_be_billing"] is True


def test_an_error_that_knows_what_is_wrong_with_the_call_is_left_as_it_is(world):
    r, call = world
    rent(r)
    error = call("machine", "show", "m_unknown", "--json").error
    assert error["code"] == "usage" and error["may_be_billing"] is False
