"""`gpu spend --reconcile`: our books beside the provider's, and what stands idle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_skills.clock import timestamp
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.books import accounting
from gpu_skills.lifecycle.ending import release
from lifecycle.conftest import make_sandbox, rig
from rented_cli import customer
from run_by_hand import ByHand, job

__all__ = ["make_sandbox", "rig"]

both = pytest.mark.parametrize("vendor", ["vast", "runpod"])


@pytest.fixture
def world(gpu, rig, monkeypatch):
    def make(vendor: str = "vast"):
        r = rig(vendor, containers=False)
        return r, customer(gpu, r, monkeypatch)

    return make


def a_life(r) -> ByHand:
    hand = ByHand(r).upto("close")
    job(r, hand.ready(after_s=300), 1800)
    r.clock.sleep(1200)
    release.destroy(r.op, hand.machine, why="asked")
    return hand


@both
def test_each_machine_stands_beside_what_was_charged_and_nothing_is_written(world, vendor):
    r, call = world(vendor)
    hand = a_life(r)
    r.clock.sleep(1200)
    before = r.op.ledger.charges.read_bytes()
    compared = call("spend", "--reconcile", "--json").document["reconcile"]
    rows = {row["kind"]: row for row in compared["rows"]}
    assert rows["time"]["machine_id"] == hand.machine_id and rows["time"]["is_complete"]
    assert sum(row["theirs_usd"] for row in rows.values()) == pytest.approx(float(r.billed_usd()), abs=1e-5)
    assert set(rows["time"]["ours"]) == {"job", "setup", "idle"} and "gpu" in rows["time"]["theirs"]
    assert rows["time"]["difference_usd"] != 0 and compared["corrected"] == 0
    assert r.op.ledger.charges.read_bytes() == before
    assert "gpu spend --reconcile --correct" in call("spend", "--reconcile").stdout


@both
def test_correct_writes_the_difference_once(world, vendor):
    r, call = world(vendor)
    a_life(r)
    r.clock.sleep(1200)
    compared = call("spend", "--reconcile", "--correct", "--json").document["reconcile"]
    assert compared["corrected"] == len(compared["rows"])
    assert all(row["is_even"] for row in compared["rows"]), compared["rows"]
    again = call("spend", "--reconcile", "--correct", "--json").document
    assert again["reconcile"]["corrected"] == 0
    assert again["total_usd"] == pytest.approx(float(r.billed_usd()), abs=1e-5)


@both
def test_a_machine_that_is_just_gone_is_not_corrected_yet(world, vendor):
    r, call = world(vendor)
    a_life(r)
    compared = call("spend", "--reconcile", "--correct", "--json").document["reconcile"]
    assert compared["corrected"] == 0 and not compared["rows"][0]["is_complete"]
    assert "not complete yet" in call("spend", "--reconcile").stdout


def test_in_audit_it_compares_and_corrects_nothing(world):
    r, call = world()
    a_life(r)
    r.clock.sleep(1200)
    before = r.op.ledger.charges.read_bytes()
    assert call("spend", "--reconcile", "--mode", "audit", "--json").exit_code == 0
    refused = call("spend", "--reconcile", "--correct", "--mode", "audit", "--json")
    assert refused.exit_code == 3 and r.op.ledger.charges.read_bytes() == before
    assert call("spend", "--correct", "--json").exit_code == 2


@both
def test_charges_that_cannot_be_read_are_an_error_and_no_comparison(world, vendor):
    r, call = world(vendor)
    a_life(r)
    r.clock.sleep(1200)
    r.fault("garbage", call="charges", times=50)
    result = call("spend", "--reconcile", "--correct", "--json")
    assert result.exit_code == 5 and result.error["code"] == "unexpected_reply"


def test_instances_of_others_are_summed_beside(world, tmp_path):
    r, call = world()
    hand = ByHand(r)
    hand.make_unrecorded()
    r.clock.sleep(3600)
    compared = call("spend", "--reconcile", "--json").document["reconcile"]
    assert compared["rows"] == [] and compared["not_on_record"]["instances"] == 1
    assert compared["not_on_record"]["theirs_usd"] > 0


@both
def test_duty_and_long_idle_gaps_are_seen_before_anything_of_them_is_booked(world, vendor):
    r, call = world(vendor)
    hand = ByHand(r).upto("close")
    machine = hand.ready(after_s=60)
    accounting.close(r.op, machine)
    job(r, machine, 6 * 3600)
    gap = timestamp(r.clock.now())
    r.clock.sleep(2 * 3600)
    job(r, machine, 3600)
    r.clock.sleep(3600)
    (row,) = call("spend", "--reconcile", "--json").document["machines"]
    assert row["duty_pct"] == pytest.approx(70, abs=0.5)
    assert row["idle_gaps"][0]["started_at"] == gap
    assert [g["duration_s"] for g in row["idle_gaps"]] == [pytest.approx(7200, abs=5), pytest.approx(3600, abs=5)]
    assert machines.find(r.project, machine.id).status == "ready"


def test_traffic_that_is_not_booked_yet_is_said_until_it_is(world):
    r, call = world("vast")
    assert call("spend", "--json").document["traffic_not_booked_machines"] == 0
    hand = a_life(r)
    document = call("spend", "--json").document
    assert document["traffic_not_booked"] == [hand.machine_id]
    assert "traffic of 1 machine bills by the GB" in call("spend").stdout
    assert call("spend", "--since", "2100-01-01", "--json").document["traffic_not_booked"] == []
    r.clock.sleep(1200)
    call("spend", "--reconcile", "--correct")
    assert call("spend", "--json").document["traffic_not_booked"] == [] and "by the GB" not in call("spend").stdout


def test_where_traffic_costs_nothing_nothing_is_said_of_it(world):
    r, call = world("runpod")
    a_life(r)
    assert call("spend", "--json").document["traffic_not_booked_machines"] == 0


@both
def test_charges_that_cannot_be_true_are_shown_as_such_and_not_written(world, vendor, monkeypatch):
    r, call = world(vendor)
    a_life(r)
    r.clock.sleep(1200)
    before = r.op.ledger.charges.read_bytes()
    of_reader = type(r.reader).charges
    monkeypatch.setattr(
        type(r.reader),
        "charges",
        lambda reader, *span: [replace(c, amount_usd=-c.amount_usd) for c in of_reader(reader, *span)],
    )
    result = call("spend", "--reconcile", "--correct", "--json")
    assert result.exit_code == 0 and "less than nothing" in result.document["reconcile"]["rows"][0]["doubt"]
    assert r.op.ledger.charges.read_bytes() == before
    assert "not booked: a charge of" in call("spend", "--reconcile").stdout
