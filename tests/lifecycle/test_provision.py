"""One approval, one machine: from the create to ready, and what is left when it does not get there."""

from __future__ import annotations

import pytest

from gpu_skills.lifecycle import intents, machines, provision, runs
from renting import alive, approved, guarded, play_machines, rent

pytestmark = pytest.mark.subprocess


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_an_approved_plan_becomes_one_machine_that_is_ready(rig, vendor):
    r = rig(vendor, containers=False)
    play_machines(r)
    got = rent(r)
    (instance,) = alive(r)
    assert r.creates == 1 and got.machine.instance_id == str(instance.id) and got.machine.status == "ready"
    assert got.machine.label == instance.label and got.receipt.key == "proven"
    run = runs.load(r.op, got.machine.extra["approval_id"])
    assert run.state == "won" and [a.result for a in run.attempts] == ["done"]


def test_the_same_approval_again_finds_its_machine_and_asks_for_nothing(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    given = approved(r)
    first = provision.provision(r.op, *given)
    again = provision.provision(r.op, *given)
    assert r.creates == 1 and again.machine == first.machine and len(machines.all_machines(r.project)) == 1
    assert len(intents.read(r.project)) == 1
