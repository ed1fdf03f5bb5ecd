"""A machine is destroyed when that is proven, and not a moment earlier; what bills is never called gone."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import (
    ApprovalInvalid,
    ApprovalNeeded,
    ApprovalUsed,
    AuthRejected,
    JobRunning,
    NetworkDenied,
    NotOwned,
    Protected,
)
from gpu_skills.lifecycle import intents, labels, machines
from gpu_skills.lifecycle.approval import actions, approvals
from gpu_skills.lifecycle.ending import release, stops, witness
from gpu_skills.lifecycle.renting import keeping
from rented import rent

VENDORS = pytest.mark.parametrize("vendor", ["vast", "runpod"])


def looks(rig, machine) -> list[str]:
    return [e["what"] for e in intents.observations(rig.project, "present", "absent", machine_id=machine.id)]


@VENDORS
def test_a_destroyed_machine_was_absent_three_times_over_a_minute_and_costs_nothing(rig, vendor):
    r = rig(vendor)
    machine = rent(r)
    assert r.burning()
    before = r.clock.now()
    assert release.destroy(r.op, machine, why="asked", wait_s=600) == "destroyed"
    assert not r.burning() and r.calls("destroy") == 1
    assert r.clock.now() - before >= timedelta(seconds=60)
    assert looks(r, machine)[-3:] == ["absent"] * 3
    record = machines.find(r.project, machine.id)
    assert record.status == "destroyed" and record.destroyed_at is not None
    assert witness.open_destroy(r.op, machine.id) is None


@VENDORS
def test_a_delete_that_fails_three_times_is_sent_a_fourth_time_and_no_more(rig, vendor):
    r = rig(vendor)
    machine = rent(r)
    r.fault("500", "destroy", times=3)
    assert release.destroy(r.op, machine, why="asked", wait_s=900) == "destroyed"
    assert r.calls("destroy") == 4 and not r.burning()


def test_a_provider_that_asks_for_patience_gets_it(rig):
    r = rig("vast")
    machine = rent(r)
    r.fault("429", "destroy", retry_after=45)
    slept = len(r.clock.slept)
    assert release.destroy(r.op, machine, why="asked", wait_s=900) == "destroyed"
    assert r.clock.slept[slept:][0] >= 10 and r.calls("destroy") == 2


def test_a_delete_that_fails_for_twenty_minutes_stays_terminating_and_alarms_again_and_again(rig):
    r = rig("vast")
    machine = rent(r)
    r.fault("500", "destroy", times=0)
    assert release.destroy(r.op, machine, why="asked", wait_s=1200) == "terminating"
    assert machines.find(r.project, machine.id).status == "terminating" and r.burning()
    alarms = [n for n in r.notices if n[0] == "destroy_unconfirmed"]
    assert 2 <= len(alarms) <= 4
    assert r.calls("destroy") >= 15, "it goes on trying"
    # Days later any command goes on, and it ends well.
    r.sandbox.world.faults.clear()
    r.sandbox.advance(3600)
    for _ in range(4):
        status = release.confirm(r.op, machine)
        r.sandbox.advance(40)
    assert status == "destroyed" and not r.burning()


@pytest.mark.parametrize("status", ["401", "403"])
def test_a_key_that_may_not_destroy_is_an_error_an_alarm_and_an_open_wish(rig, status):
    r = rig("vast")
    machine = rent(r)
    r.fault(status, "destroy", times=0)
    with pytest.raises(AuthRejected):
        release.destroy(r.op, machine, why="asked", wait_s=600)
    assert r.calls("destroy") == 3
    assert machines.find(r.project, machine.id).status == "terminating"
    assert [n[0] for n in r.notices] == ["destroy_unconfirmed"]
    assert witness.open_destroy(r.op, machine.id) is not None


@VENDORS
def test_a_machine_that_comes_back_from_the_dead_is_found_and_destroyed(rig, vendor):
    r = rig(vendor)
    machine = rent(r)
    r.fault("comes_back", "list", seconds=45)
    r.sandbox.world.apply_faults(
        [{"match": {"instance": machine.host}, "fault": "comes_back", "args": {"seconds": 45}}]
    )
    assert release.destroy(r.op, machine, why="asked", wait_s=900) == "destroyed"
    assert not r.burning() and r.calls("destroy") == 2
    seen = looks(r, machine)
    assert "present" in seen[seen.index("absent") :], "it was seen again, and that counted"


def test_absences_do_not_count_while_the_charges_grow(rig):
    r = rig("vast")
    machine = rent(r)
    r.sandbox.world.apply_faults(
        [{"match": {"instance": machine.host}, "fault": "comes_back", "args": {"seconds": 3600}}]
    )
    assert release.destroy(r.op, machine, why="asked", wait_s=1200) == "terminating"
    assert r.burning(), "no list shows it, and it bills"
    assert looks(r, machine).count("absent") > 10


def test_a_list_that_cannot_be_read_is_no_absence(rig):
    r = rig("vast")
    machine = rent(r)
    release.destroy(r.op, machine, why="asked", wait_s=0)
    r.fault("500", "list", times=0)
    for _ in range(3):
        with pytest.raises(Exception, match="list"):
            release.confirm(r.op, machine)
        r.sandbox.advance(60)
    assert "absent" not in looks(r, machine)
    assert machines.find(r.project, machine.id).status == "terminating"


def test_an_empty_list_is_no_absence_while_the_machine_answers_by_its_id(rig):
    r = rig("vast")
    machine = rent(r)
    r.fault("list_empty", "list", times=0)
    r.fault("destroy_again", "destroy", times=0)
    assert release.destroy(r.op, machine, why="asked", wait_s=300) == "terminating"
    assert "absent" not in looks(r, machine) and r.burning()


@VENDORS
def test_a_machine_that_was_listed_is_looked_for_a_minute(rig, vendor):
    r = rig(vendor)
    machine = rent(r, age_s=60)
    before = r.clock.now()
    assert release.destroy(r.op, machine, why="set-up failed", wait_s=900) == "destroyed"
    assert timedelta(minutes=1) <= r.clock.now() - before < timedelta(minutes=3)


def test_one_that_nobody_ever_saw_is_unknown_until_it_shows_and_is_then_destroyed(rig):
    r = rig("vast")
    r.fault("hidden_at_first", "create", seconds=200)
    machine = rent(r, age_s=0)
    machines.update(r.project, machine.id, lambda found: replace(found, status="unknown", last_seen_at=None))
    assert release.destroy(r.op, machine, why="asked", wait_s=1200) == "destroyed"
    assert not r.burning() and "present" in looks(r, machine)


def test_one_that_never_shows_is_not_asked_to_go_and_is_given_ten_minutes(rig):
    r = rig("vast")
    machine = rent(r, age_s=0)
    r.sandbox.world.destroy(next(iter(r.sandbox.world.instances.values())))
    machines.update(r.project, machine.id, lambda found: replace(found, status="unknown", last_seen_at=None))
    before = r.clock.now()
    assert release.destroy(r.op, machine, why="asked", wait_s=1800) == "destroyed"
    assert r.calls("destroy") == 0 and r.clock.now() - before >= timedelta(minutes=10)


@pytest.mark.parametrize(
    "label",
    ["somebody else's", "", "gpu1-another-p0000000000000001-1900000000", "gpu1-{project}-p0000000000000009-1900000000"],
)
@VENDORS
def test_what_does_not_carry_our_label_is_never_asked_to_go(rig, vendor, label):
    r = rig(vendor)
    machine = rent(r)
    (instance,) = r.sandbox.world.instances.values()
    instance.label = label.format(project=r.project.project_id)
    with pytest.raises(NotOwned):
        release.destroy(r.op, machine, why="asked", wait_s=60)
    with pytest.raises(NotOwned):
        stops.stop(r.op, machine)
    assert r.calls("destroy") == 0 and r.calls("state") + r.calls("stop") == 0 and r.burning()


def test_a_label_with_a_newer_deadline_is_still_ours(rig):
    r = rig("vast")
    machine = rent(r)
    label = labels.parse(machine.label)
    r.writer.set_label(machine.host, str(label.with_deadline(label.deadline_at + timedelta(hours=3))))
    assert release.destroy(r.op, machine, why="asked", wait_s=600) == "destroyed"


@pytest.mark.parametrize("how", ["protected", "production"])
def test_a_protected_machine_takes_an_approval_that_names_it(rig, how):
    r = rig("vast")
    machine = rent(r)
    change = {"conditions": ("protected",)} if how == "protected" else {"machine_class": "production"}
    machines.update(r.project, machine.id, lambda found: replace(found, **change))
    with pytest.raises(Protected):
        release.destroy(r.op, machine, why="asked")
    assert r.calls("destroy") == 0 and r.burning()
    for wrong in ("stop", "unprotect"):
        with pytest.raises(ApprovalInvalid):
            release.destroy(r.op, machine, why="asked", approval=agreed(r, wrong, machine))
    forged = replace(agreed(r, "destroy", machine), id="a_0123456789abcdef")
    with pytest.raises(ApprovalNeeded):
        release.destroy(r.op, machine, why="asked", approval=forged)
    assert r.calls("destroy") == 0 and r.burning()
    approval = agreed(r, "destroy", machine)
    assert release.destroy(r.op, machine, why="asked", wait_s=600, approval=approval) == "destroyed"
    with pytest.raises(ApprovalUsed):
        approvals.find(r.op, actions.named_by(r.project, approval, "destroy", machine.id).ask())


def agreed(r, action, machine):
    """A person's yes to this."""
    ask = keeping.named_plan(r.op, action, machine).ask()
    return approvals.give(r.op, ask, statement=f"{action} it", source="approve")


def test_what_stands_in_the_way_is_raised_before_anything_is_written(rig):
    r = rig("vast")
    machine = rent(r)
    with pytest.raises(JobRunning):
        release.destroy(r.op, machine, why="asked", gate=[JobRunning(job="J-000001")])
    assert r.calls("destroy") == 0 and machines.find(r.project, machine.id).status == "ready"
    assert witness.open_destroy(r.op, machine.id) is None


def test_destroying_it_again_changes_nothing(rig):
    r = rig("vast")
    machine = rent(r)
    release.destroy(r.op, machine, why="asked", wait_s=600)
    sent = r.calls("destroy")
    assert release.destroy(r.op, machine, why="asked") == "destroyed"
    assert release.confirm(r.op, machine) == "destroyed" and r.calls("destroy") == sent


def test_waiting_no_time_sends_the_delete_once_and_leaves_the_rest_to_whoever_comes_next(rig):
    r = rig("vast")
    machine = rent(r)
    assert release.destroy(r.op, machine, why="asked", wait_s=0) == "terminating"
    assert r.calls("destroy") == 1
    statuses = []
    for _ in range(3):
        r.sandbox.advance(31)
        statuses.append(release.confirm(r.op, machine))
    assert statuses == ["terminating", "terminating", "destroyed"]


def test_a_machine_that_vanished_is_unknown_first_and_lost_when_that_is_proven(rig):
    r = rig("vast")
    machine = rent(r)
    r.sandbox.world.destroy(next(iter(r.sandbox.world.instances.values())))
    statuses = []
    for _ in range(3):
        statuses.append(release.confirm(r.op, machine))
        r.sandbox.advance(40)
    assert statuses == ["unknown", "unknown", "lost"] and r.calls("destroy") == 0


def test_one_that_vanished_after_its_deadline_met_the_end_that_was_planned(rig):
    r = rig("vast")
    machine = rent(r, hours=1)
    r.sandbox.advance(3600)
    r.sandbox.world.destroy(next(iter(r.sandbox.world.instances.values())))
    for _ in range(3):
        status = release.confirm(r.op, machine)
        r.sandbox.advance(40)
    assert status == "destroyed"


def test_one_whose_session_ended_it_before_the_fuse_met_the_end_that_was_planned(rig):
    r = rig("runpod")
    machine = rent(r, hours=1)
    left_s = (parse_timestamp(machine.deadline_at) - r.clock.now()).total_seconds()
    r.sandbox.advance(left_s - 170)
    r.sandbox.world.destroy(next(iter(r.sandbox.world.instances.values())))
    for _ in range(3):
        status = release.confirm(r.op, machine)
        r.sandbox.advance(31)
    assert r.clock.now() < parse_timestamp(machine.deadline_at) and status == "destroyed"


def test_a_machine_that_only_lagged_is_what_it_was_again(rig):
    r = rig("vast")
    machine = rent(r)
    (instance,) = r.sandbox.world.instances.values()
    instance.absent_until = r.clock.now().timestamp() + 60
    assert release.confirm(r.op, machine) == "unknown"
    instance.absent_until = None
    assert release.confirm(r.op, machine) == "ready"


def test_no_network_is_a_refusal_and_nothing_is_written(rig):
    r = rig("vast")
    machine = rent(r)

    class NoNetwork:
        def machines(self):
            raise NetworkDenied(reason="Operation not permitted")

    op = replace(r.op, reader=lambda name: NoNetwork())
    with pytest.raises(NetworkDenied):
        release.destroy(op, machine, why="asked")
    assert witness.open_destroy(r.op, machine.id) is None
