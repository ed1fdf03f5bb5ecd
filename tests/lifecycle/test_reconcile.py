"""Killed anywhere and reconciled: everything that bills is recorded, nothing is concluded from a bad answer."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from datetime import timedelta

import pytest

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.books import accounting
from gpu_skills.lifecycle.ending import release, stops
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.state import budget, journal
from gpu_skills.state.ledger import Ledger
from gpu_skills.units import usd
from run_by_hand import LIMITS, STEPS, ByHand, changed, job

VENDORS = ["vast", "runpod"]
both = pytest.mark.parametrize("vendor", VENDORS)


def go(r, **options):
    return reconcile.run(r.op, [r.vendor], **options)


def words(report) -> list[str]:
    return [finding.what for finding in report.findings]


def open_money(r) -> float:
    return float(budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd)


def until_clear(r, passes: int = 12) -> reconcile.Report:
    for _ in range(passes):
        report = go(r)
        if report.is_clear:
            return report
        r.clock.sleep(60)
    raise AssertionError(words(report))


def snapshot(r) -> dict[str, str]:
    """Every record, but for when a machine was last seen."""
    files = [*r.project.state.rglob("*.json*"), *r.op.user_state.rglob("*.json*")]
    found = {str(path): path.read_text() for path in files if path.is_file() and path.suffix != ".lock"}
    return {name: re.sub(r'"last_seen_at": ".*?"', "", text) for name, text in found.items()}


def everything_that_burns_is_on_record(r) -> None:
    alive = {m.instance_id for m in machines.all_machines(r.project) if m.status not in states.FINAL}
    burning = {resource.removeprefix("instance-") for resource in r.burning()}
    assert burning <= alive


@both
def test_a_machine_that_a_list_lacks_and_its_own_id_finds_is_one_that_is_there(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    before = hand.ready()
    r.sandbox.world.apply_faults(
        [{"match": {"instance": before.instance_id}, "fault": "list_lag", "args": {"seconds": 3600}}]
    )
    assert before.instance_id not in {seen.instance_id for seen in r.reader.machines()}
    report = go(r)
    assert words(report) == [] and report.is_clear and hand.machine.status == before.status
    r.clock.sleep((parse_timestamp(before.deadline_at) - r.clock.now()).total_seconds())
    assert "deadline_passed" in words(go(r)) and hand.machine.status == "stopped"


# creates that died on their way ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("last", STEPS)
def test_death_after_any_step_of_a_create_leaves_nothing_unrecorded(rig, vendor, last):
    r = rig(vendor, containers=False)
    ByHand(r).upto(last)
    report = go(r)
    everything_that_burns_is_on_record(r)
    assert r.creates == (1 if STEPS.index(last) >= STEPS.index("create") else 0)
    if r.creates:
        (machine,) = machines.all_machines(r.project)
        assert machine.instance_id and machine.status not in states.FINAL and open_money(r) == 5
    elif last == "begin":
        assert words(report) == ["create_unknown"] and not report.is_clear and open_money(r) == 5
        assert report.findings[0].next_step == f"gpu reconcile --provider {vendor}"
    else:
        assert report.is_clear and open_money(r) == 0
    before = snapshot(r)
    again = go(r)
    assert snapshot(r) == before and set(words(again)) <= {"create_unknown"}


@both
def test_a_late_arrival_whose_plan_still_holds_is_adopted(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("create")
    r.clock.sleep(300)
    report = go(r)
    assert words(report) == ["adopted"] and report.is_clear and report.findings[0].next_step == "gpu setup"
    assert hand.machine.status == "booting" and hand.machine.instance_id == hand.outcome.instance_id
    assert runs.load(r.op, hand.approval).attempts[0].result == "done" and open_money(r) == 5


@both
def test_a_late_arrival_after_its_approval_has_expired_is_destroyed_and_booked(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("create")
    r.clock.sleep(3700)
    report = go(r)
    assert words(report) == ["ended"] and not report.is_clear
    assert hand.machine.status == "terminating" and not r.burning()
    until_clear(r)
    assert hand.machine.status == "destroyed" and open_money(r) == 0
    (line,) = [line for _o, _n, line in journal.scan(r.op.ledger.charges)]
    assert line["kind"] == "setup_failed"
    r.clock.sleep(1200)
    go(r)
    assert abs(r.op.ledger.spend(include_charges=True).total_usd - r.billed_usd()) < 0.00001


@both
def test_of_two_machines_of_one_create_one_stays_on_record_and_the_other_goes(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("create")
    r.clock.sleep(30)
    hand.create()
    assert len(r.reader.machines()) == 2
    go(r)
    assert len(r.burning()) == 1
    until_clear(r)
    found = machines.all_machines(r.project)
    assert sorted(m.status in states.FINAL for m in found) == [False, True]
    assert next(m for m in found if m.status not in states.FINAL).id == hand.machine_id
    everything_that_burns_is_on_record(r)


@both
def test_an_unknown_create_is_looked_for_a_day_and_then_given_up(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("begin")
    for _ in range(3):
        assert words(go(r)) == ["create_unknown"]
        r.clock.sleep(7 * 3600)
    assert hand.machine.status == "unknown" and open_money(r) == 5
    r.clock.sleep(4 * 3600)
    report = go(r)
    assert report.is_clear and set(words(report)) == {"never_seen", "settled"}
    assert hand.machine.status == "lost" and open_money(r) == 0
    assert intents.read(r.project)[hand.intent].result == "refused"
    assert r.op.ledger.spend(include_charges=True).total_usd == 0


@both
def test_a_run_that_another_process_works_on_is_left_alone(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("create")
    with runs.working_on(r.op, hand.approval):
        before = snapshot(r)
        assert words(go(r)) == ["worked_on"]
        assert snapshot(r) == before and hand.machine.status == "requested"
    go(r)
    assert hand.machine.instance_id


# bad answers ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("fault", ["half_body", "garbage", "html", "500", "403"])
def test_a_list_that_cannot_be_read_marks_nothing_as_gone(rig, vendor, fault):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r.fault(fault, call="list", times=100)
    before = snapshot(r)
    report = go(r)
    assert not report.is_clear and report.accounts[0].problem is not None
    assert words(report) == ["not_listed"] and report.findings[0].burn_usd_hr == hand.machine.rate_usd_hr
    assert snapshot(r) == before and hand.machine.status == "ready"


# machines on record ---------------------------------------------------------------------------------------------------


@both
def test_a_machine_that_vanished_is_believed_lost_only_after_several_looks(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready(after_s=1200)
    go(r)
    seen = hand.machine.last_seen_at
    r.writer.destroy(hand.machine.instance_id)
    r.clock.sleep(5)
    assert words(go(r)) == ["absent"] and hand.machine.status == "unknown"
    until_clear(r)
    assert hand.machine.status == "lost" and open_money(r) == 0
    last = [line for _o, _n, line in journal.scan(r.op.ledger.charges)][-1]
    assert last["completed_at"] >= seen and last["estimated"]


@both
def test_a_machine_that_was_stopped_behind_our_back_is_recorded_and_booked(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r.clock.sleep(600)
    r.writer.stop(hand.machine.instance_id)
    r.clock.sleep(10)
    assert go(r).is_clear
    machine = hand.machine
    assert machine.status == "stopped" and machine.extra["stopped_why"] == "stopped_by_itself"
    assert [n[0] for n in r.notices] == ["idle_stop"]
    assert {line["kind"] for _o, _n, line in journal.scan(r.op.ledger.charges)} == {"setup", "idle"}
    before = snapshot(r)
    assert go(r).is_clear and len(r.notices) == 1
    assert snapshot(r) == before


def test_an_outbid_machine_is_recorded_as_that_and_again_when_it_runs_on(rig):
    r = rig("vast", containers=False)
    hand = ByHand(r, bid=True).upto("close")
    hand.ready()
    instance = r.sandbox.world.instances[int(hand.machine.instance_id)]
    rule = {"match": {"provider": "vast", "instance": str(instance.id)}, "fault": "outbid", "args": {"resume": 3600}}
    r.sandbox.world.apply_faults([rule])
    r.clock.sleep(60)
    go(r)
    assert hand.machine.status == "stopped"
    r.clock.sleep(3700)
    go(r)
    assert hand.machine.status == "booting"
    kinds = [s.kind for s in accounting.life_of(r.op, hand.machine)]
    assert kinds == ["running", "stopped", "running"]


@both
def test_a_machine_that_ended_at_its_deadline_is_recorded_as_that(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r, deadline_h=1).upto("close")
    hand.ready()
    r.clock.sleep(3540)
    r.writer.stop(hand.machine.instance_id)  # as the fuse on the machine does
    r.clock.sleep(4000)
    go(r)
    assert hand.machine.status == "stopped" and hand.machine.extra["stopped_why"] == "deadline_passed"
    assert intents.observations(r.project, "deadline_passed", machine_id=hand.machine_id)


@both
def test_a_machine_that_still_runs_past_its_deadline_is_stopped(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r, deadline_h=1).upto("close")
    hand.ready()
    r.clock.sleep(4000)
    report = go(r)
    assert words(report) == ["deadline_passed"] and hand.machine.status == "stopped"
    assert r.sandbox.world.account(vendor).bill.burn_usd_hr() < hand.machine.rate_usd_hr / 10


@both
def test_what_its_deadline_stopped_goes_after_its_grace_whether_collected_or_not(rig, vendor):
    r = rig(vendor, containers=False)
    r.op = replace(r.op, unverified=lambda machine: ["J-000001"])
    hand = ByHand(r, deadline_h=1).upto("close")
    hand.ready()
    r.clock.sleep(4000)
    go(r)
    r.clock.sleep(23 * 3600)
    assert go(r).is_clear and hand.machine.status == "stopped"
    r.clock.sleep(2 * 3600)
    assert words(go(r)) == ["ended"]
    until_clear(r)
    assert hand.machine.status == "destroyed" and not r.burning()


@both
def test_what_idleness_stopped_is_kept_while_its_outputs_are_nowhere_else(rig, vendor):
    r = rig(vendor, containers=False)
    waiting = ["J-000001"]
    r.op = replace(r.op, unverified=lambda machine: list(waiting))
    hand = ByHand(r, deadline_h=6).upto("close")
    hand.ready()
    r.clock.sleep(1800)
    r.writer.stop(hand.machine.instance_id)
    r.clock.sleep(10)
    go(r)
    r.clock.sleep(48 * 3600)
    report = go(r)
    assert words(report) == ["kept"] and report.findings[0].next_step == "gpu job pull J-000001"
    assert report.findings[0].burn_usd_hr > 0 and hand.machine.status == "stopped"
    assert r.notices[-1][:2] == ("idle_stop", hand.machine_id) and r.notices[-1][2]["uncollected"] == "J-000001"
    waiting.clear()
    assert words(go(r)) == ["ended"]


@both
def test_a_destroy_that_died_is_finished(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    intents.begin(r.project, r.clock, "destroy", "x1", machine_id=hand.machine_id, reason="asked")
    until_clear(r)
    assert hand.machine.status == "destroyed" and not r.burning() and open_money(r) == 0
    assert not intents.read(r.project)["x1"].is_open


@both
def test_a_stop_that_died_is_finished_and_a_start_is_only_read_back(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    intents.begin(r.project, r.clock, "stop", "x1", machine_id=hand.machine_id)
    go(r)
    assert hand.machine.status == "stopped" and not intents.read(r.project)["x1"].is_open
    intents.begin(r.project, r.clock, "start", "x2", machine_id=hand.machine_id)
    starts = r.calls("start")
    go(r)
    assert intents.read(r.project)["x2"].is_open and r.calls("start") == starts
    r.clock.sleep(700)
    go(r)
    assert intents.read(r.project)["x2"].result == "failed" and hand.machine.status == "stopped"
    intents.begin(r.project, r.clock, "start", "x3", machine_id=hand.machine_id)
    r.writer.start(hand.machine.instance_id)
    r.clock.sleep(30)
    go(r)
    assert intents.read(r.project)["x3"].result == "done" and hand.machine.status == "booting"


@both
def test_an_extension_that_died_halfway_is_taken_back_and_its_money_is_free(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    true = hand.ready()
    later = hand.deadline_at + timedelta(hours=4)
    label = labels.parse(true.label).with_deadline(later)
    common = {"provider": vendor, "machine_id": hand.machine_id, "approval_id": "a_77"}
    intents.begin(r.project, r.clock, "extend", "x9", **common, details={"deadline_at": timestamp(later)})
    budget.reserve(
        r.project, r.op.ledger, r.clock, LIMITS, intent="x9", account=r.op.account(vendor), provider=vendor,
        cost_usd=2, rate_usd_hr=1, deadline_h=10, machine_id=hand.machine_id, environ=r.op.environ,
    )  # fmt: skip
    r.writer.set_label(true.instance_id, str(label))
    go(r)
    assert intents.read(r.project)["x9"].is_open and open_money(r) == 7
    r.clock.sleep(700)
    go(r)
    assert intents.read(r.project)["x9"].result == "failed" and open_money(r) == 5
    words(go(r))
    assert hand.machine.deadline_at == true.deadline_at
    if vendor == "vast":  # RunPod may reset a machine that runs when its name changes
        assert r.reader.machine(true.instance_id).label == hand.machine.label == true.label
    r.clock.sleep(7 * 3600)
    assert "deadline_passed" in words(go(r))


@both
def test_a_start_that_came_to_nothing_frees_its_money(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    stops.stop(r.op, hand.machine)
    common = {"provider": vendor, "machine_id": hand.machine_id, "approval_id": "a_77"}
    intents.begin(r.project, r.clock, "start", "x9", **common)
    budget.reserve(
        r.project, r.op.ledger, r.clock, LIMITS, intent="a_77", account=r.op.account(vendor), provider=vendor,
        cost_usd=2, rate_usd_hr=1, deadline_h=10, machine_id=hand.machine_id, environ=r.op.environ,
    )  # fmt: skip
    with runs.working_on(r.op, "a_77"):
        assert words(go(r)) == ["worked_on"]
    r.clock.sleep(700)
    booked = float(accounting.booked_usd(r.op, hand.machine_id))
    with runs.working_on(r.op, "a_77"):
        assert words(go(r)) == ["worked_on"] and open_money(r) == pytest.approx(7 - booked)
    go(r)
    booked = float(accounting.booked_usd(r.op, hand.machine_id))
    assert intents.read(r.project)["x9"].result == "failed" and open_money(r) == pytest.approx(5 - booked)


@both
def test_hand_edits_are_told_and_the_dearer_reading_counts(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    true = hand.ready()
    text = r.project.path("machines.json").read_text()
    (record,) = json.loads(text)
    later = timestamp(r.clock.now() + timedelta(days=40))
    r.project.path("machines.json").write_text(
        json.dumps([{**record, "rate_usd_hr": 0.001, "deadline_at": later, "class": "production"}])
    )
    report = go(r)
    assert set(words(report)) == {"rate_differs", "deadline_differs", "class_differs"}
    assert hand.machine.rate_usd_hr == usd(r.reader.machine(true.instance_id).rate_usd_hr)
    assert hand.machine.deadline_at == true.deadline_at and hand.machine.machine_class == "project"
    assert words(go(r)) == []


@both
def test_a_machine_that_a_hand_called_destroyed_and_that_is_there_is_ended_under_a_new_record(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    changed(r, hand, status="destroyed", destroyed_at=timestamp(r.clock.now()))
    r.clock.sleep(60)
    assert words(go(r))[:1] == ["reappeared"]
    assert not r.burning()
    until_clear(r)
    assert len(machines.all_machines(r.project)) == 2 and open_money(r) == 0
    r.clock.sleep(1200)
    go(r)
    assert abs(r.op.ledger.spend(include_charges=True).total_usd - r.billed_usd()) < 0.00001


@both
def test_a_machine_missing_from_the_registry_is_put_back_and_not_destroyed(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r.project.path("machines.json").write_text("[]\n")
    report = go(r)
    assert words(report) == ["record_lost", "jobs_unread"] and not report.is_clear and r.burning()
    assert hand.machine.instance_id and hand.machine.has_unknown_past


@both
def test_a_foreign_instance_is_counted_and_never_touched_whatever_our_record_says(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r)
    hand.label = str(labels.Label("p-somebody", hand.intent, hand.deadline_at))
    hand.upto("close")
    r.clock.sleep(60)
    calls = dict(r.sandbox.world.calls)
    report = go(r)
    assert words(report) == ["not_ours"] and not report.is_clear
    assert report.accounts[0].foreign == 1 and report.accounts[0].project_ids == {"p-somebody": 1}
    made = {call for (_v, call), n in r.sandbox.world.calls.items() if n != calls.get((_v, call))}
    assert made == {"list"}, "nothing but the list was asked"


@both
def test_fifty_machines_cost_one_list(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    machine = hand.ready()
    for n in range(2, 51):
        machines.save(r.project, replace(machine, id=f"m_{n}", intent=f"p{n:016x}", host=f"{n}", status="destroyed"))
        intents.observe(r.project, r.clock, "machine_booked", machine_id=f"m_{n}")
    before = r.calls("list")
    assert go(r).is_clear
    assert r.calls("list") == before + 1


@both
def test_two_reconciles_at_once_book_once(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    job(r, hand.machine, 600)
    release.destroy(r.op, hand.machine, why="asked", wait_s=0)
    r.clock.sleep(5)
    for _ in range(2):
        go(r)
        r.clock.sleep(61)
    problems: list[BaseException] = []

    def reconciled(barrier=threading.Barrier(2)) -> None:
        try:
            op = replace(r.op, ledger=Ledger(r.project, r.clock))
            barrier.wait(20)
            reconcile.run(op, [vendor])
        except BaseException as exc:
            problems.append(exc)

    racers = [threading.Thread(target=reconciled) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert problems == [] and not any(racer.is_alive() for racer in racers)
    until_clear(r)
    kinds = sorted(line["kind"] for _o, _n, line in journal.scan(r.op.ledger.charges))
    assert kinds == ["idle", "setup"] and hand.machine.status == "destroyed"
    assert runs.load(r.op, hand.approval).is_settled


@pytest.mark.parametrize("odd", [{"project_id": ["x"]}, {"account": 5}, {"ts": 5}])
def test_a_line_of_reserved_money_that_means_nothing_is_a_finding_and_the_other_provider_is_gone_through(rig, odd):
    r = rig("vast", containers=False)
    ByHand(r).upto("close").ready()
    line = {"kind": "reservation", "ts": "2026-12-01T00:00:00Z", "intent": "a_ff", "reserved_usd": 1}
    journal.append(r.project.path("journal.jsonl"), [{**line, "project_id": r.project.project_id, **odd}])
    report = reconcile.run(r.op, ["vast", "runpod"])
    assert {account.provider for account in report.accounts} == {"vast", "runpod"} and not report.is_clear
    assert "journal.jsonl:" in next(f.text for f in report.findings if f.what == "record_damaged")
