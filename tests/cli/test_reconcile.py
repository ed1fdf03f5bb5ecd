"""`gpu reconcile`: exit 0 when everything is known, 6 with the next command when it is not."""

from __future__ import annotations

import json

import pytest

from gpu_skills.lifecycle import machines
from lifecycle.conftest import make_sandbox, rig
from rented_cli import customer
from renting import play_machines
from run_by_hand import ByHand

__all__ = ["make_sandbox", "rig"]

both = pytest.mark.parametrize("vendor", ["vast", "runpod"])


@pytest.fixture
def world(gpu, rig, monkeypatch):
    def make(vendor: str = "vast"):
        r = rig(vendor, containers=False)
        return r, customer(gpu, r, monkeypatch)

    return make


def test_without_a_rented_provider_there_is_nothing_to_do(gpu):
    gpu("init")
    result = gpu("reconcile", "--json")
    assert result.exit_code == 0 and result.document["is_clear"] and result.document["accounts"] == []
    assert "no rented provider" in gpu("reconcile").stdout


@both
def test_a_machine_on_record_that_is_well_is_all_clear(world, vendor):
    r, call = world(vendor)
    hand = ByHand(r).upto("close")
    hand.ready()
    result = call("reconcile", "--json")
    assert result.exit_code == 0 and result.document["findings"] == []
    assert result.document["accounts"][0]["ours"] == 1
    assert "all clear" in call("reconcile").stdout


@both
def test_a_create_of_which_nobody_knows_is_exit_6_with_its_next_command(world, vendor):
    r, call = world(vendor)
    ByHand(r).upto("begin")
    result = call("reconcile", "--json")
    assert result.exit_code == 6 and result.document["next_step"] == f"gpu reconcile --provider {vendor}"
    assert result.document["findings"][0]["what"] == "create_unknown"
    text = call("reconcile")
    assert text.exit_code == 6 and "may burn" in text.stdout and "something stays uncertain" in text.stdout


@both
@pytest.mark.parametrize("fault", ["garbage", "500"])
def test_a_list_that_cannot_be_read_is_exit_6_and_marks_nothing_as_gone(world, vendor, fault):
    r, call = world(vendor)
    hand = ByHand(r).upto("close")
    hand.ready()
    r.fault(fault, call="list", times=100)
    result = call("reconcile", "--json")
    assert result.exit_code == 6
    (account,) = result.document["accounts"]
    assert account["listed"] is False and account["problem"]["code"] in ("unexpected_reply", "unavailable")
    assert hand.machine.status == "ready"


def test_a_machine_on_record_at_a_provider_without_a_key_stays_uncertain(world, monkeypatch):
    r, call = world()
    ByHand(r).upto("close")
    monkeypatch.delenv("VAST_API_KEY")
    result = call("reconcile", "--json")
    assert result.exit_code == 6 and result.document["findings"][0]["next_step"] == "gpu login vast"


def test_in_audit_it_is_refused(world):
    r, call = world()
    ByHand(r).upto("begin")
    result = call("reconcile", "--mode", "audit", "--json")
    assert result.exit_code == 3 and result.error["code"] == "mode_forbids"


@both
def test_a_directory_without_any_state_takes_its_machines_back_by_the_project_id(world, vendor):
    r, call = world(vendor)
    hand = ByHand(r).upto("close")
    hand.ready()
    lost = r.project.project_id
    r.project.state.rename(r.project.root / "moved-away")
    assert call("reconcile", "--json").error["code"] == "no_project"
    call("init")
    found = call("reconcile", "--json").document["accounts"][0]
    assert found["project_ids"] == [{"project_id": lost, "instances": 1}]
    assert "--adopt --project-id" in call("reconcile").stdout
    play_machines(r)
    result = call("reconcile", "--adopt", "--project-id", lost, "--json", connect=r.op.connect)
    assert result.exit_code == 0 and [f["what"] for f in result.document["findings"]] == ["adopted"]
    assert json.loads(r.project.path("project.json").read_text())["project_id"] == lost
    assert machines.find(r.project, hand.machine_id).instance_id == hand.outcome.instance_id


def test_a_project_id_without_adopt_or_that_nobody_saw_is_refused(world):
    r, call = world()
    assert call("reconcile", "--project-id", "p-x", "--json").exit_code == 2
    assert call("reconcile", "--adopt", "--project-id", "p-x", "--json").exit_code == 3
    assert json.loads(r.project.path("project.json").read_text())["project_id"] == r.project.project_id
