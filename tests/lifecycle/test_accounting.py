"""The books of a machine: each second once, and in the end what the vendor's own meter says."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpu_skills.clock import timestamp
from gpu_skills.errors import UnexpectedReply
from gpu_skills.lifecycle import intents, machines, runs
from gpu_skills.lifecycle.books import accounting, charged, lives
from gpu_skills.lifecycle.ending import release, witness
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.providers.base import Charge
from gpu_skills.state import budget, journal
from run_by_hand import ByHand, changed, job

pytestmark = pytest.mark.parametrize("vendor", ["vast", "runpod"])


def lines(r) -> list[dict]:
    return [line for _o, _n, line in journal.scan(r.op.ledger.charges)]


def kinds(r) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in lines(r):
        found[line["kind"]] = round(found.get(line["kind"], 0) + line["cost_usd"], 6)
    return found


def booked(r) -> Decimal:
    return r.op.ledger.spend(include_charges=True).total_usd


def stop(r, hand) -> None:
    intents.begin(r.project, r.clock, "stop", "x1" + timestamp(r.clock.now()), machine_id=hand.machine_id)
    r.writer.stop(hand.machine.instance_id)
    r.clock.sleep(10)
    intents.close(r.project, r.clock, list(intents.read(r.project))[-1], "done")
    changed(r, hand, status="stopped")


def start(r, hand) -> None:
    intents.begin(r.project, r.clock, "start", "x2" + timestamp(r.clock.now()), machine_id=hand.machine_id)
    r.writer.start(hand.machine.instance_id)
    intents.close(r.project, r.clock, list(intents.read(r.project))[-1], "done")
    changed(r, hand, status="booting")
    r.clock.sleep(60)
    changed(r, hand, status="ready", ready_at=timestamp(r.clock.now()))


def destroy(r, hand, wait_s: float = 90) -> None:
    r.writer.destroy(hand.machine.instance_id)
    for _ in range(3):
        intents.observe(r.project, r.clock, witness.ABSENT, machine_id=hand.machine_id)
        r.clock.sleep(wait_s / 3)
    changed(r, hand, status="destroyed", destroyed_at=timestamp(r.clock.now()))


def test_a_whole_life_is_what_the_vendor_bills_to_the_cent(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready(after_s=150)
    accounting.close(r.op, hand.machine)
    assert set(kinds(r)) == {"setup"}
    job(r, hand.machine, 1200)
    r.clock.sleep(900)
    stop(r, hand)
    accounting.close(r.op, hand.machine)
    r.clock.sleep(36_000)
    start(r, hand)
    job(r, hand.machine, 600, status="failed")
    destroy(r, hand)
    accounting.close(r.op, hand.machine)
    assert set(kinds(r)) == {"setup", "idle", "storage"}
    assert abs(booked(r) - r.billed_usd()) < Decimal("0.05"), "an estimate, and no bad one"
    assert charged.correct(r.op, hand.machine) == [], "the vendor may still write charges"
    r.clock.sleep(1200)
    charged.correct(r.op, hand.machine)
    assert abs(booked(r) - r.billed_usd()) < Decimal("0.00001")
    assert charged.correct(r.op, hand.machine) == accounting.close(r.op, hand.machine) == []


def test_booking_again_at_any_time_adds_nothing(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r.clock.sleep(600)
    destroy(r, hand)
    assert {line["kind"] for line in accounting.close(r.op, hand.machine)} == {"setup", "idle"}
    r.clock.sleep(5000)
    before = r.op.ledger.charges.read_bytes()
    assert accounting.close(r.op, hand.machine) == []
    assert r.op.ledger.charges.read_bytes() == before


def test_ten_hours_of_standing_still_cost_storage(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    stop(r, hand)
    storage = r.reader.machine(hand.machine.instance_id).storage_usd_hr
    changed(r, hand, storage_usd_hr=storage)
    accounting.close(r.op, hand.machine)
    before = r.billed_usd()
    assert "storage" not in kinds(r)
    r.clock.sleep(36_000)
    accounting.close(r.op, hand.machine)
    assert storage > 0 and Decimal(str(kinds(r)["storage"])) == pytest.approx(storage * 10, rel=Decimal("0.001"))
    assert r.billed_usd() - before == pytest.approx(storage * 10, rel=Decimal("0.001"))
    r.clock.sleep(1800)
    assert accounting.close(r.op, hand.machine) == [], "less than a slice"
    r.clock.sleep(1800)
    (more,) = accounting.close(r.op, hand.machine)
    assert more["duration_s"] == 3600 and more["started_at"] == lines(r)[-2]["completed_at"]


def test_a_machine_that_never_came_up_is_a_failed_set_up(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    r.clock.sleep(300)
    destroy(r, hand)
    accounting.close(r.op, hand.machine)
    assert set(kinds(r)) == {"setup_failed"}
    assert lines(r)[0]["duration_s"] == pytest.approx(300, abs=30)


def test_a_lost_machine_is_closed_at_its_last_sight_and_marked_estimated(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r.clock.sleep(600)
    seen = timestamp(r.clock.now())
    changed(r, hand, last_seen_at=seen)
    r.clock.sleep(7200)
    changed(r, hand, status="lost")
    accounting.close(r.op, hand.machine)
    last = lines(r)[-1]
    assert last["completed_at"] == seen and last["estimated"] is True and "last sight" in last["note"]


@pytest.mark.parametrize("reason", ["max_lease", "ceiling", "session_budget", "max_lifetime", "made up"])
def test_jobs_whose_machine_met_its_planned_end_ended_in_time_for_its_reason(rig, vendor, reason):
    from gpu_skills.jobs import gone

    r = rig(vendor, containers=False)

    def end_jobs(machine, why, at=None):
        return gone.end_jobs(r.project, r.op.ledger, r.clock, machine, why, at=at)

    r.op = replace(r.op, settle_jobs=end_jobs)
    hand = ByHand(r).upto("close")
    running = job(r, hand.ready(), 0, end=False)
    r.clock.sleep(1800)
    changed(r, hand, session={"id": "s_1", "deadline_reason": reason})
    changed(r, hand, deadline_at=timestamp(r.clock.now() + timedelta(seconds=170)))
    release.note_gone(r.op, hand.machine)
    line = r.op.ledger.latest(running)
    assert line["status"] == "timeout"
    assert line["reason"] == ("deadline_passed" if reason == "made up" else reason)


def test_jobs_that_were_running_end_when_the_machine_went(rig, vendor):
    from dataclasses import replace

    from gpu_skills.jobs import gone

    r = rig(vendor, containers=False)

    def end_jobs(machine, why, at=None):
        return gone.end_jobs(r.project, r.op.ledger, r.clock, machine, why, at=at)

    r.op = replace(r.op, settle_jobs=end_jobs)
    hand = ByHand(r).upto("close")
    machine = hand.ready()
    running = job(r, machine, 0, end=False)
    r.clock.sleep(1800)
    destroy(r, hand)
    r.clock.sleep(9000)
    accounting.close(r.op, hand.machine)
    line = r.op.ledger.latest(running)
    assert line["status"] == "lost" and line["duration_s"] == pytest.approx(1800, abs=10)
    assert kinds(r)["idle"] < 0.01


def test_idle_time_waits_for_a_job_that_nobody_has_asked_about(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    machine = hand.ready()
    running = job(r, machine, 0, end=False)
    r.clock.sleep(1800)
    stop(r, hand)
    accounting.close(r.op, hand.machine)
    assert set(kinds(r)) == {"setup"}
    r.op.ledger.finish(
        {"id": running, "status": "succeeded", "completed_at": timestamp(r.clock.now() - timedelta(seconds=910)),
         "duration_s": 900, "cost_usd": machine.rate_usd_hr / 4, "artifacts": []}
    )  # fmt: skip
    accounting.close(r.op, hand.machine)
    assert set(kinds(r)) == {"setup", "idle"}
    total = Decimal(str(kinds(r)["idle"])) + machine.rate_usd_hr / 4
    assert total == pytest.approx(machine.rate_usd_hr * 1810 / 3600, rel=Decimal("0.01"))


def test_traffic_that_only_the_provider_knows_becomes_bandwidth(rig, vendor):
    if vendor == "runpod":
        pytest.skip("RunPod takes nothing for traffic")
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    instance = r.sandbox.world.instances[int(hand.machine.instance_id)]
    instance.host.up_usd_gb = Decimal("0.02")
    r.sandbox.world.transfer(instance, up_gb=Decimal(25))
    destroy(r, hand)
    accounting.close(r.op, hand.machine)
    r.clock.sleep(1200)
    rows = charged.compare(r.op, vendor, r.clock.now() - timedelta(hours=2), r.clock.now())
    assert {(row.kind, row.is_complete) for row in rows} == {("time", True), ("traffic", True)}
    charged.correct(r.op, hand.machine)
    assert kinds(r)["bandwidth"] == pytest.approx(0.5, abs=0.01)
    assert abs(booked(r) - r.billed_usd()) < Decimal("0.00001")


def test_a_provider_that_shows_no_charge_at_all_corrects_nothing(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    destroy(r, hand)
    accounting.close(r.op, hand.machine)
    r.clock.sleep(1200)
    before = booked(r)
    assert before > 0 and charged.correct(r.op, hand.machine, charges=[]) == [] and booked(r) == before


def test_a_run_is_settled_at_what_it_came_to_and_its_money_is_free(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    assert accounting.settle_run(r.op, runs.load(r.op, hand.approval)) is False, "it still bills"
    r.clock.sleep(600)
    destroy(r, hand)
    assert accounting.settle_run(r.op, runs.load(r.op, hand.approval)) is True
    run = runs.load(r.op, hand.approval)
    assert run.is_settled and run.state == "closed"
    books = budget.books(r.project, r.op.ledger, r.clock, r.op.environ)
    assert books.reserved_usd == 0 and books.spent.machines == 0 and books.spent.day_usd == booked(r) > 0
    other = r.another(r.project.root.parent / "other")
    seen = budget.books(other.project, other.op.ledger, r.clock, r.op.environ)
    assert seen.spent.day_usd == booked(r)
    r.clock.sleep(1200)
    charged.correct(r.op, hand.machine)
    seen = budget.books(other.project, other.op.ledger, r.clock, r.op.environ)
    assert seen.spent.day_usd == booked(r), "what was corrected is settled anew"


def test_a_run_that_rented_nothing_costs_nothing_and_its_approval_still_holds(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("record")
    hand.refused()
    assert accounting.settle_run(r.op, runs.load(r.op, hand.approval))
    assert runs.load(r.op, hand.approval).state == "open"
    assert budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd == 0
    hand.reserve()
    assert budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd == 5
    r.clock.sleep(7200)
    assert accounting.settle_run(r.op, runs.load(r.op, hand.approval))
    assert runs.load(r.op, hand.approval).state == "closed" and lines(r) == []


def test_a_create_that_nobody_knows_the_end_of_keeps_its_money(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("begin")
    assert accounting.settle_run(r.op, runs.load(r.op, hand.approval)) is False
    assert budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd == 5


def test_a_copy_of_the_state_directory_books_nothing(rig, vendor, tmp_path):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    copy = r.another(tmp_path / "copy", project_id=r.project.project_id)
    for name in ("machines.json", "journal.jsonl"):
        copy.project.path(name).write_bytes(r.project.path(name).read_bytes())
    changed(copy, hand, status="destroyed", destroyed_at=timestamp(r.clock.now()))
    assert accounting.close(copy.op, machines.find(copy.project, hand.machine_id)) == []
    assert accounting.settle_run(copy.op, runs.load(r.op, hand.approval)) is False
    assert not copy.op.ledger.charges.exists()


def test_two_processes_that_book_at_once_book_once(rig, vendor, allow_subprocess):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r.clock.sleep(600)
    destroy(r, hand)
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(4)

    def book() -> None:
        barrier.wait(20)
        accounting.close(r.op, hand.machine)

    racers = [fork.Process(target=book) for _ in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(30)
    assert [racer.exitcode for racer in racers] == [0] * 4
    assert sorted(line["kind"] for line in lines(r)) == ["idle", "setup"]


def test_every_line_is_what_the_schema_allows(rig, vendor):
    from gpu_skills import schemas

    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    stop(r, hand)
    r.clock.sleep(7200)
    destroy(r, hand)
    accounting.close(r.op, hand.machine)
    r.clock.sleep(1200)
    charged.correct(r.op, hand.machine)
    found = [json.loads(line) for line in r.op.ledger.charges.read_text().splitlines()]
    assert len(found) >= 3 and [schemas.problems(line, "charges") for line in found] == [[]] * len(found)
    assert len({line["id"] for line in found}) == len(found)


def test_a_hand_edit_in_the_charges_stops_no_booking(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    accounting.close(r.op, hand.machine)
    text = r.op.ledger.charges.read_text().replace('"completed_at":"', '"completed_at":"x')
    r.op.ledger.charges.write_text(text + "not json\n" + '{"kind": 3, "cost_usd": "much"}\n')
    r.clock.sleep(600)
    destroy(r, hand)
    assert [line["kind"] for line in accounting.close(r.op, hand.machine)] == ["idle"]


def gone(r, lived_s: float = 1200) -> ByHand:
    """A machine that is gone and booked, and whose charges are all written."""
    hand = ByHand(r).upto("close")
    hand.ready()
    r.clock.sleep(lived_s)
    destroy(r, hand)
    accounting.settle_run(r.op, runs.load(r.op, hand.approval))
    r.clock.sleep(1200)
    return hand


def charges_of(r, hand, change) -> list[Charge]:
    begun = charged.began(r.op, hand.machine)
    return change(charged.charges_between(r.op, r.vendor, begun, r.clock.now()))


def times(factor: str):
    return lambda charges: [replace(c, amount_usd=c.amount_usd * Decimal(factor)) for c in charges]


def with_a_negative_line(charges: list[Charge]) -> list[Charge]:
    return [*charges, replace(charges[0], amount_usd=Decimal("-0.05"))]


def with_traffic(charges: list[Charge]) -> list[Charge]:
    return [*charges, replace(charges[0], kind="upload", amount_usd=Decimal(4000))]


@pytest.mark.parametrize(
    ("lie", "what"),
    [(times("40"), "more than it could have cost"), (times("1e12"), "more than it could have cost"),
     (times("-1"), "less than nothing"), (with_a_negative_line, "less than nothing"),
     (with_traffic, "more than it could have cost")],
)  # fmt: skip
def test_charges_that_cannot_be_true_are_not_booked_and_asked_for_again(rig, vendor, lie, what):
    r = rig(vendor, containers=False)
    hand = gone(r)
    before = booked(r)
    with pytest.raises(UnexpectedReply, match=what):
        charged.correct(r.op, hand.machine, charges_of(r, hand, lie))
    assert booked(r) == before and charged.is_due(r.op, hand.machine)
    charged.correct(r.op, hand.machine)
    assert abs(booked(r) - r.billed_usd()) < Decimal("0.00001")
    assert not charged.is_due(r.op, hand.machine)


def test_charges_that_cannot_be_true_are_a_finding_of_reconcile(rig, vendor, monkeypatch):
    r = rig(vendor, containers=False)
    gone(r)
    before, honest = booked(r), r.reader.charges
    monkeypatch.setattr(r.reader, "charges", lambda since, until: times("100")(honest(since, until)))
    found = [one.what for one in reconcile.run(r.op, [vendor]).findings]
    assert "charges_doubtful" in found and booked(r) == before
    monkeypatch.undo()
    reconcile.run(r.op, [vendor])
    assert abs(booked(r) - r.billed_usd()) < Decimal("0.00001")


def test_a_correction_whose_writer_died_before_the_run_was_settled_reaches_the_ceilings_of_others(
    rig, vendor, tmp_path, monkeypatch
):
    r = rig(vendor, containers=False)
    hand = gone(r)
    dearer = charges_of(r, hand, times("3"))
    with monkeypatch.context() as dying:
        dying.setattr(accounting, "settle_anew", lambda op, machine: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            charged.correct(r.op, hand.machine, dearer)
    other = r.another(tmp_path / "other")

    def seen_by_others() -> Decimal:
        return budget.books(other.project, other.op.ledger, r.clock, r.op.environ).spent.day_usd

    assert seen_by_others() < booked(r)
    assert charged.correct(r.op, hand.machine, dearer) == []
    assert seen_by_others() == booked(r)


def test_a_line_whose_writer_died_before_the_run_was_settled_is_settled_by_the_next_pass(rig, vendor, tmp_path):
    r = rig(vendor, containers=False)
    hand = gone(r)
    line = {**lines(r)[0], "id": f"{hand.machine_id}/late", "cost_usd": 0.75}
    journal.append(r.op.ledger.charges, [line])
    r.fault("500", "charges", times=0)
    reconcile.run(r.op, [vendor])
    assert budget.settled_usd(r.project, hand.approval, r.op.environ) == booked(r)


def test_what_is_settled_already_is_not_settled_again(rig, vendor):
    r = rig(vendor, containers=False)
    hand = gone(r)
    (path,) = (r.op.user_state / "accounts").glob("*/journal.jsonl")
    before = path.read_bytes()
    accounting.settle_anew(r.op, hand.machine)
    assert path.read_bytes() == before


def test_the_words_for_what_was_seen_are_those_of_a_release(vendor):
    assert (lives.PRESENT, lives.ABSENT) == (witness.PRESENT, witness.ABSENT)
