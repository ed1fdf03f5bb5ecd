"""A sentinel with a key and a project id: what is past its deadline ends, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from gpu_skills.clock import timestamp
from gpu_skills.lifecycle import intents, labels, machines
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.guard import receipts, sentinel, sentinel_records
from gpu_skills.lifecycle.guard.decisions import decide, gpu_billed_until
from gpu_skills.lifecycle.labels import Label
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.lifecycle.renting import keeping
from gpu_skills.providers.base import Charge
from gpu_skills.providers.base import Machine as Instance
from rented import rent

VENDORS = pytest.mark.parametrize("vendor", ["vast", "runpod"])
HOUR = 3600.0


def a_pass(r, **more):
    given = {"account": "acc", "clock": r.clock, **more}
    return sentinel.run_pass(r.reader, r.writer, r.project.project_id, **given)


def results(done) -> list[tuple[str, str]]:
    return [(row.decision.action, row.result) for row in done.rows]


@VENDORS
def test_a_machine_before_its_deadline_is_left_alone(rig, vendor):
    r = rig(vendor)
    rent(r, hours=6, on_record=False)
    done = a_pass(r)
    assert results(done) == [("none", "none")] and done.complete and done.is_confirmed
    assert r.burning()


@VENDORS
def test_a_running_machine_past_its_deadline_is_stopped_and_its_disk_kept(rig, vendor):
    r = rig(vendor)
    rent(r, hours=1, on_record=False)
    running = sum(e["rate_usd_hr"] for e in r.sandbox.world.burning())
    r.sandbox.advance(HOUR)
    done = a_pass(r)
    assert results(done) == [("stop", "stopped")] and done.is_confirmed
    left = sum(e["rate_usd_hr"] for e in r.sandbox.world.burning())
    assert 0 < left < running / 5
    assert "kept until" in done.rows[0].alarm


def test_one_whose_disk_does_not_survive_a_stop_is_destroyed_at_its_deadline(rig):
    r = rig("runpod")
    rent(r, machine_class="job", hours=1, on_record=False, keeps=False)
    r.sandbox.advance(HOUR)
    done = a_pass(r)
    assert results(done) == [("destroy", "destroyed")] and not r.burning()


@VENDORS
@pytest.mark.parametrize("machine_class", ["project", "job", "canary"])
def test_a_machine_that_a_pass_stopped_is_destroyed_after_the_storage_grace_and_not_before(rig, vendor, machine_class):
    r = rig(vendor)
    rent(r, machine_class=machine_class, hours=1, on_record=False)
    r.sandbox.advance(HOUR)
    first = a_pass(r, storage_grace_s=2 * HOUR)
    r.sandbox.advance(HOUR)
    second = a_pass(r, storage_grace_s=2 * HOUR, earlier=[first.to_record()])
    assert results(second) == [("none", "none")] and "kept until" in second.rows[0].alarm
    r.sandbox.advance(HOUR)
    third = a_pass(r, storage_grace_s=2 * HOUR, earlier=[second.to_record()])
    assert results(third) == [("destroy", "destroyed")] and not r.burning()
    assert a_pass(r, earlier=[third.to_record()]).rows == ()


@VENDORS
def test_one_that_idleness_stopped_long_before_its_deadline_is_kept_and_alarmed(rig, vendor):
    r = rig(vendor)
    machine = rent(r, hours=3, on_record=False)
    r.sandbox.advance(600)
    r.writer.stop(machine.host)
    r.sandbox.advance(40 * HOUR)
    done = a_pass(r)
    assert results(done) == [("keep", "kept")] and r.burning()
    assert "gpu machine destroy" in done.rows[0].alarm


@VENDORS
def test_the_charges_of_its_gpu_show_that_the_deadline_stopped_it(rig, vendor):
    r = rig(vendor)
    machine = rent(r, hours=4, on_record=False)
    deadline = labels.parse(machine.label).deadline_at
    r.sandbox.advance((deadline - r.clock.now()).total_seconds())
    r.writer.stop(machine.host)  # as its own fuse does
    r.sandbox.advance(25 * HOUR)
    done = a_pass(r)
    assert results(done) == [("destroy", "destroyed")] and not r.burning()


@VENDORS
def test_foreign_machines_are_counted_and_never_touched(rig, vendor):
    r = rig(vendor)
    past = r.clock.now() - timedelta(days=30)
    for number, text in enumerate(("somebody's", f"gpu1-other-p{1:016x}-{int(past.timestamp())}", "gpu1-broken"), 1):
        rent(r, number=number, label=text, on_record=False)
    burning = r.burning()
    done = a_pass(r)
    assert done.rows == () and done.foreign == 3 and r.burning() == burning
    assert r.calls("destroy") + r.calls("state") + r.calls("action") == 0


@VENDORS
def test_production_is_never_touched(rig, vendor):
    r = rig(vendor)
    rent(r, machine_class="canary", hours=None, on_record=False)
    r.sandbox.advance(60 * HOUR)
    done = a_pass(r)
    assert results(done) == [("none", "none")] and r.burning()
    assert done.rows[0].label.machine_class == "production"


@VENDORS
def test_a_newer_deadline_that_it_is_told_holds_and_an_older_one_does_not(rig, vendor):
    r = rig(vendor)
    machine = rent(r, hours=1, on_record=False)
    r.sandbox.advance(HOUR)
    later, earlier = r.clock.now() + timedelta(hours=1), r.clock.now() - timedelta(hours=5)
    assert results(a_pass(r, deadlines={machine.intent: later})) == [("none", "none")]
    assert results(a_pass(r, deadlines={machine.host: later})) == [("none", "none")]
    assert results(a_pass(r, deadlines={machine.intent: None})) == [("none", "none")]
    assert results(a_pass(r, deadlines={machine.intent: earlier})) == [("stop", "stopped")]


def test_an_interruptible_one_that_was_outbid_cannot_wake_up_after_its_deadline(rig):
    r = rig("vast")
    offer = next(o for o in r.reader.offers(_interruptible()) if o.min_bid_usd_hr)
    r.fault("outbid", "create", after=300, resume=9000)
    rent(r, hours=1, on_record=False, offer=offer, bid_usd_hr=offer.min_bid_usd_hr + Decimal("0.01"))
    r.sandbox.advance(HOUR)
    done = a_pass(r)
    assert results(done) == [("stop", "stopped")]
    running = [e for e in r.sandbox.world.burning() if e["kind"] == "gpu"]
    r.sandbox.advance(10 * HOUR)
    assert running == [] and [e for e in r.sandbox.world.burning() if e["kind"] == "gpu"] == []


def _interruptible():
    from dataclasses import replace

    from rented import NEED

    return replace(NEED, interruptible=True)


# when something fails -----------------------------------------------------------------------------------------------


@VENDORS
def test_an_account_that_cannot_be_listed_is_an_incomplete_pass(rig, vendor):
    r = rig(vendor)
    rent(r, hours=1, on_record=False)
    r.sandbox.advance(HOUR)
    r.fault("500", "list", times=0)
    done = a_pass(r)
    assert not done.complete and done.problem is not None and done.rows == ()
    assert receipts.why_not(done.to_record(), vendor, "acc", r.project.project_id, r.clock.now())


@pytest.mark.parametrize("status", ["401", "403"])
def test_a_key_that_may_not_destroy_makes_a_pass_that_does_not_count(rig, status):
    r = rig("runpod")
    rent(r, hours=1, on_record=False, keeps=False)
    r.sandbox.advance(HOUR)
    r.fault(status, "destroy", times=0)
    done = a_pass(r, wait_s=90)
    assert results(done) == [("destroy", "failed")] and not done.complete
    assert "could not be ended" in done.rows[0].alarm and "destroyed" not in done.rows[0].alarm
    assert r.calls("destroy") > 2, "it tries again within the pass"


@VENDORS
def test_a_destroy_that_is_said_to_work_and_does_not_is_not_confirmed(rig, vendor):
    r = rig(vendor)
    rent(r, machine_class="job", hours=1, on_record=False)
    r.sandbox.advance(30 * HOUR)
    a_pass(r)
    assert r.burning(), "stopped first"
    r.fault("destroy_again", "destroy", times=0)
    done = a_pass(r, wait_s=100)
    assert results(done) == [("destroy", "terminating")] and done.complete and not done.is_confirmed
    assert r.burning() and "nobody saw" in done.rows[0].alarm


@VENDORS
def test_a_delete_that_fails_for_a_while_is_sent_again(rig, vendor):
    r = rig(vendor)
    rent(r, machine_class="job", hours=1, on_record=False, keeps=False)
    r.sandbox.advance(26 * HOUR)
    a_pass(r)
    r.fault("500", "destroy", times=2)
    assert [row.result for row in a_pass(r).rows] in ([], ["destroyed"])
    assert not r.burning()


def test_a_machine_whose_label_changes_hands_during_the_pass_is_let_go(rig):
    r = rig("vast")
    machine = rent(r, machine_class="job", hours=1, on_record=False)
    r.sandbox.advance(HOUR)
    a_pass(r)
    r.sandbox.advance(30 * HOUR)
    r.fault("500", "destroy", times=1)
    (instance,) = r.sandbox.world.instances.values()
    sleeping = r.clock.sleep

    def relabel(seconds: float) -> None:
        instance.label = "mine now"
        sleeping(seconds)

    r.clock.sleep = relabel
    done = a_pass(r, wait_s=60)
    assert results(done) == [("destroy", "failed")] and r.calls("destroy") == 1
    assert machine.host


# deciding, without a provider ---------------------------------------------------------------------------------------

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)


def an_instance(**changes) -> Instance:
    given = {"provider": "vast", "instance_id": "1", "label": "l", "status": "running", **changes}
    return Instance(**given)


@pytest.mark.parametrize(
    ("status", "letter", "hours_past", "proof", "action"),
    [
        ("running", "p", -1, False, "none"),
        ("running", "p", 0, False, "stop"),
        ("booting", "j", 1, False, "stop"),
        ("unknown", "c", 1, False, "stop"),
        ("stopping", "p", 1, False, "stop"),
        ("terminating", "p", 0.1, False, "none"),
        ("terminating", "p", 100, False, "destroy"),
        ("stopped", "p", 23, True, "none"),
        ("stopped", "p", 24, True, "destroy"),
        ("stopped", "p", 24, False, "keep"),
        ("stopped", "j", 23, False, "none"),
        ("stopped", "j", 24, False, "destroy"),
        ("stopped", "c", 24, False, "destroy"),
    ],
)
def test_what_is_due_follows_from_state_class_and_time(status, letter, hours_past, proof, action):
    deadline = NOW - timedelta(hours=hours_past)
    label = Label("p", letter + "0" * 16, deadline)
    found = decide(an_instance(status=status), label, deadline, NOW, timedelta(hours=24), lambda *about: proof)
    assert found.action == action


def test_a_runpod_pod_without_a_mount_is_not_worth_a_stop():
    deadline = NOW - timedelta(hours=1)
    label = Label("p", "j" + "0" * 16, deadline)
    for storage, action in ((Decimal("0.01"), "stop"), (Decimal(0), "destroy"), (None, "destroy")):
        seen = an_instance(provider="runpod", storage_usd_hr=storage)
        assert decide(seen, label, deadline, NOW, timedelta(hours=24), lambda *about: False).action == action


@pytest.mark.parametrize("how", ["protected", "locked"])
@pytest.mark.parametrize(
    ("seen", "hours_past", "action"),
    [
        ({"status": "running"}, -1, "none"),
        ({"status": "running"}, 0, "stop"),
        ({"status": "running", "provider": "runpod", "storage_usd_hr": Decimal(0)}, 1, "keep"),
        ({"status": "unknown", "provider": "runpod", "dead_end": "x", "storage_usd_hr": Decimal(1)}, 1, "keep"),
        ({"status": "stopped"}, 1, "keep"),
        ({"status": "stopped", "is_interruptible": True}, 1, "stop"),
        ({"status": "stopped"}, 1000, "keep"),
        ({"status": "terminating"}, 1, "none"),
    ],
)
@pytest.mark.parametrize("letter", "pjc")
def test_no_pass_destroys_what_is_protected_or_locked(how, seen, hours_past, action, letter):
    deadline = NOW - timedelta(hours=hours_past)
    label = Label("p", letter + "0" * 16, deadline)
    one = an_instance(**seen, is_locked=how == "locked")
    found = decide(one, label, deadline, NOW, timedelta(hours=24), lambda *about: True, is_protected=how == "protected")
    assert found.action == action
    assert (found.alarm is not None) == (action != "none"), "what bills past its deadline is told at every pass"


def test_a_protected_machine_is_stopped_by_its_deadline_and_its_disk_outlives_the_grace(rig):
    r = rig("vast")
    machine = rent(r, machine_class="job", hours=1)
    machines.update(r.project, machine.id, lambda m: replace(m, conditions=("protected",)))
    known = {"protected": sentinel_records.protected(r.op, "vast"), "note": sentinel_records.recorder(r.op, "vast")}
    r.sandbox.advance(HOUR)
    first = a_pass(r, **known)
    assert results(first) == [("stop", "stopped")] and "protected" in first.rows[0].alarm
    r.sandbox.advance(1000 * HOUR)
    later = a_pass(r, earlier=[first.to_record()], **known)
    assert results(later) == [("keep", "kept")] and "protected" in later.rows[0].alarm
    assert r.burning() and machines.find(r.project, machine.id).status == "stopped"


def test_reconcile_ends_what_is_protected_as_a_sentinel_does(rig):
    r = rig("vast")
    machine = rent(r, machine_class="job", hours=1)
    machines.update(r.project, machine.id, lambda m: replace(m, conditions=("protected",)))
    r.sandbox.advance(HOUR)
    reconcile.run(r.op, ["vast"])
    assert machines.find(r.project, machine.id).status == "stopped"
    r.sandbox.advance(1000 * HOUR)
    reconcile.run(r.op, ["vast"])
    assert machines.find(r.project, machine.id).status == "stopped" and r.burning()


def test_reconcile_says_of_a_protected_machine_that_a_stop_would_empty_that_it_bills_on(rig):
    r = rig("runpod")
    machine = rent(r, machine_class="job", hours=1, keeps=False)
    machines.update(r.project, machine.id, lambda m: replace(m, conditions=("protected",)))
    r.sandbox.advance(HOUR)
    (kept,) = [found for found in reconcile.run(r.op, ["runpod"]).findings if found.what == "kept"]
    assert kept.text.startswith("ready, past its deadline") and "a stop would lose its disk" in kept.text
    assert [event for event, subject, _ in r.notices if subject == machine.id] == ["recovery"]
    assert r.calls("destroy") + r.calls("action") == 0 and r.burning()


def gpu(hour: int, minutes: int, usd: str) -> Charge:
    begun = datetime(2026, 3, 1, hour, 0, tzinfo=UTC)
    return Charge("runpod", "1", "gpu", Decimal(usd), begun, begun + timedelta(minutes=minutes))


@pytest.mark.parametrize(
    ("charges", "until"),
    [
        ([], None),
        ([gpu(8, 60, "0.5")], None),
        ([gpu(8, 60, "0.5"), gpu(9, 60, "0.25")], None),
        ([gpu(8, 60, "0.5"), gpu(9, 60, "0.5"), gpu(10, 60, "0.25")], "2026-03-01T10:30:00Z"),
        ([gpu(8, 60, "0.5"), gpu(9, 60, "0.5")], "2026-03-01T10:00:00Z"),
        ([gpu(8, 47, "0.5")], "2026-03-01T08:47:00Z"),
        ([gpu(8, 60, "0")], None),
    ],
)
def test_the_end_of_a_gpu_is_read_from_charges_only_where_they_tell_it(charges, until):
    found = gpu_billed_until(charges)
    assert (found and timestamp(found)) == until


@pytest.mark.parametrize(
    "receipt",
    [None, [], "x", {"stopped": []}, {"stopped": {"1": {"at": "now", "deadline_at": "then"}}}, {"stopped": {"1": 7}}],
)
def test_a_receipt_that_is_none_proves_nothing(rig, receipt):
    r = rig("vast", containers=False)
    if isinstance(receipt, dict):
        receipt |= {"provider": "vast", "account": "acc", "project_id": r.project.project_id}
    assert a_pass(r, earlier=[receipt]).stopped == {}


# with records -------------------------------------------------------------------------------------------------------


@VENDORS
def test_where_there_are_records_a_pass_is_written_ahead_and_closes_the_books(rig, vendor):
    r = rig(vendor)
    machine = rent(r, machine_class="job", hours=1)
    r.sandbox.advance(HOUR)
    note = sentinel_records.recorder(r.op, vendor)
    a_pass(r, note=note)
    record = machines.find(r.project, machine.id)
    assert record.status == "stopped" and record.extra["stopped_why"] == "deadline_passed"
    assert sentinel_records.stops(r.op, vendor, "acc")["stopped"][machine.host]["deadline_at"] == machine.deadline_at
    r.sandbox.advance(25 * HOUR)
    a_pass(r, note=note)
    assert machines.find(r.project, machine.id).status == "destroyed" and not r.burning()
    written = [(i.action, i.result) for i in intents.read(r.project).values()]
    assert written == [("create", "done"), ("stop", "done"), ("destroy", "done")]


def test_an_extension_in_the_journal_is_a_newer_deadline(rig):
    r = rig("vast")
    machine = rent(r, hours=1)
    plan = keeping.extension_plan(r.op, machine, 8 * HOUR)
    yes, later = approvals.give(r.op, plan.ask(), statement="yes", source="approve"), plan.deadline_at
    approvals.use(r.op, yes, plan.ask())
    common = {"machine_id": machine.id, "approval_id": yes.id}
    intents.begin(r.project, r.clock, "extend", "x1", **common, details={"deadline_at": later})
    assert sentinel_records.deadlines(r.op, "vast") == {}, "begun is not done"
    intents.close(r.project, r.clock, "x1", "done")
    known = sentinel_records.deadlines(r.op, "vast")
    assert {key: timestamp(value) for key, value in known.items()} == {machine.intent: later}
    r.sandbox.advance(2 * HOUR)
    assert results(a_pass(r, deadlines=known)) == [("none", "none")]


def test_a_hand_edit_of_the_registry_moves_no_deadline(rig):
    from dataclasses import replace

    r = rig("vast")
    machine = rent(r, hours=1)
    machines.update(r.project, machine.id, lambda m: replace(m, deadline_at=timestamp(r.clock.now() + timedelta(9))))
    assert sentinel_records.deadlines(r.op, "vast") == {}
