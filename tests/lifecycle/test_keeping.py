"""A deadline moves in the label, in the fuse and in the session, and counts as moved when all have told so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from approving import a_plan
from gpu_skills.clock import SystemClock, parse_timestamp, timestamp
from gpu_skills.errors import ApprovalNeeded, CommandFailed, FuseMissing, OverCeiling, Refused
from gpu_skills.lifecycle import intents, labels, machines, notify
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.approval.approvals import Approval
from gpu_skills.lifecycle.ending import stops
from gpu_skills.lifecycle.guard import fuse, sentinel_records
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.renting import keeping
from gpu_skills.state import budget
from lifecycle import fused
from rented import rent
from renting import by_plan

pytestmark = pytest.mark.subprocess


@pytest.fixture
def real(rig: Callable[..., Any], login_key: Path) -> Callable[..., Any]:
    """(rig, fused machine, record) of one that runs, is on record, and has its fuse and a session."""

    def make(vendor: str, **of_the_fuse: Any) -> Any:
        r = rig(vendor, real=True, frozen=False, limits="off", delays=fused.NO_DELAY)
        r.op = replace(r.op, clock=SystemClock())
        one = fused.rent(r, in_s=3600, identity=login_key, **of_the_fuse)
        one.link().close()  # once it answers, its address is known too
        now = r.op.clock.now()
        machine = replace(
            one.machine,
            status="ready",
            rate_usd_hr=Decimal("0.4"),
            storage_usd_hr=Decimal("0.01"),
            machine_class="project",
            label=str(labels.Label(r.project.project_id, fused.INTENT, one.deadline_at)),
            account=r.op.account(vendor),
            created_at=timestamp(now),
            ready_at=timestamp(now),
            last_seen_at=timestamp(now),
            deadline_at=timestamp(one.deadline_at),
        )
        machines.save(r.project, machine)
        with closing(one.link()) as link:
            link.machine = machine
            machines.open_rented_session(
                r.project,
                link,
                clock=r.op.clock,
                deadline_at=fuse.session_deadline(one.deadline_at),
                reason="max_lifetime",
                idle_timeout_s=900,
            )
        return r, one, machines.find(r.project, machine.id)

    return make


def say_yes(r: Any, plan: Any) -> Approval:
    return approvals.give(r.op, plan.ask(), statement="yes, two hours more", source="approve")


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_an_extension_is_read_back_from_label_fuse_and_session(real, vendor):
    r, one, machine = real(vendor)
    plan = keeping.extension_plan(r.op, machine, 7200)
    later = one.deadline_at + timedelta(hours=2)
    assert plan.deadline_at == timestamp(later) and plan.worst_case_usd >= Decimal("0.8")
    extended = keeping.extend(r.op, plan, say_yes(r, plan))

    shown = labels.parse(r.reader.machine(one.instance_id).label)
    with closing(one.link()) as link:
        assert fuse.read_receipt(link, machine).deadline_at == later
        session = link.session.call("session", {"project": r.project.project_id})["session"]
    told = parse_timestamp(session["deadline_at"])
    assert abs(told - fuse.session_deadline(later)) < timedelta(seconds=5)
    assert session["idle_timeout_s"] == 900
    record = machines.find(r.project, machine.id)
    assert record.deadline_at == timestamp(later) and record == extended.machine
    receipt = fuse.receipt_on_record(record.extra["fuse"])
    assert (receipt.intent, receipt.deadline_at, receipt.is_alive) == (machine.intent, later, True)
    (intent,) = [i for i in intents.read(r.project).values() if i.action == "extend"]
    assert intent.result == "done" and intent.details["deadline_at"] == timestamp(later)
    reserved = budget.open_reservations(r.project, r.op.environ)[intent.id].reservation.reserved_usd
    assert reserved == plan.worst_case_usd
    if vendor == "vast":
        assert shown.deadline_at == later and extended.deadlines == {}
    else:  # a running pod is not renamed: what a sentinel elsewhere has to be told
        assert shown.deadline_at == one.deadline_at and r.calls("patch") == 0
        assert extended.deadlines == {machine.intent: timestamp(later)}

    again = keeping.extension_plan(r.op, record, 7200)
    assert again.ask().sha256 != plan.ask().sha256
    with pytest.raises(ApprovalNeeded):
        approvals.find(r.op, again.ask())


def test_a_machine_that_does_not_take_it_over_keeps_its_deadline_on_record_and_the_yes_goes_on(real):
    r, one, machine = real("vast")
    plan = keeping.extension_plan(r.op, machine, 3600)
    approval = say_yes(r, plan)
    hidden = one.folder.with_name("hidden")
    one.folder.rename(hidden)
    with pytest.raises((FuseMissing, CommandFailed)):
        keeping.extend(r.op, plan, approval)
    assert machines.find(r.project, machine.id).deadline_at == machine.deadline_at
    (intent,) = [i for i in intents.read(r.project).values() if i.action == "extend"]
    assert intent.is_open
    if one.folder.exists():  # the fuse made itself a new one meanwhile
        one.folder.rename(one.folder.with_name("second"))
    hidden.rename(one.folder)
    same = keeping.extension_plan(r.op, machine, 3600)
    assert same.ask().sha256 == plan.ask().sha256
    keeping.extend(r.op, same, approvals.find(r.op, same.ask()))
    assert machines.find(r.project, machine.id).deadline_at == plan.deadline_at


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_hold_lets_no_idleness_end_it_and_moves_no_deadline(real, vendor):
    r, one, machine = real(vendor)
    held = keeping.hold(r.op, machine, r.op.clock.now() + timedelta(minutes=40))
    assert keeping.held_until(held, r.op.clock.now()) is not None
    session = session_of(r, one)
    left_s = (parse_timestamp(session["held_until"]) - r.op.clock.now()).total_seconds()
    assert 2300 < left_s <= 2400 and session["idle_timeout_s"] == 900, "its own idleness is there again afterwards"
    assert abs(parse_timestamp(session["deadline_at"]) - fuse.session_deadline(one.deadline_at)) < timedelta(seconds=5)
    assert keeping.held_until(keeping.let_go(r.op, held), r.op.clock.now()) is None
    session = session_of(r, one)
    assert session["held_until"] is None and session["idle_timeout_s"] == 900


def session_of(r: Any, one: Any) -> dict[str, Any]:
    """As the machine tells it."""
    with closing(one.link()) as link:
        return link.session.call("session", {"project": r.project.project_id})["session"]


def test_a_hold_that_is_shorter_than_the_review_of_a_job_ends_no_review(real):
    r, one, machine = real("vast")
    review = r.op.clock.now() + timedelta(minutes=30)
    with closing(one.link()) as link:
        link.machine = machine
        machines.open_rented_session(
            r.project, link, clock=r.op.clock, deadline_at=review, reason="hold_for", is_moved=True
        )
    keeping.hold(r.op, machine, r.op.clock.now() + timedelta(minutes=10))
    assert abs(parse_timestamp(session_of(r, one)["deadline_at"]) - review) < timedelta(seconds=5)


def test_an_extension_of_a_machine_whose_record_was_rebuilt_keeps_its_idle_stop(real):
    r, one, machine = real("vast")
    machine = machines.update(r.project, machine.id, lambda m: replace(m, session=None))
    plan = keeping.extension_plan(r.op, machine, 3600)
    keeping.extend(r.op, plan, say_yes(r, plan))
    session = session_of(r, one)
    assert session["idle_timeout_s"] == 900 == machines.find(r.project, machine.id).session["idle_timeout_s"]


def test_an_extension_arms_the_idle_stop_that_the_plan_of_a_machine_asks_for(real):
    r, one, machine = real("vast")
    wanted = a_plan(r.project, r.op.clock.now(), machine_class="project", idle_timeout_s=600.0)
    name = plans.freeze(r.project, wanted)
    machine = machines.update(r.project, machine.id, lambda m: replace(m, session=None, plan=name))
    with closing(one.link()) as link:
        link.machine = machine
        machines.open_rented_session(
            r.project, link, clock=r.op.clock, deadline_at=one.deadline_at, reason="max_lifetime", is_moved=True
        )
    assert session_of(r, one)["idle_timeout_s"] is None
    plan = keeping.extension_plan(r.op, machine, 3600)
    keeping.extend(r.op, plan, say_yes(r, plan))
    assert session_of(r, one)["idle_timeout_s"] == 600


def test_where_the_fuse_destroys_no_idleness_ends_anything(real):
    r, one, machine = real("vast", on_expiry="destroy")
    assert machine.session["idle_timeout_s"] is None
    keeping.hold(r.op, machine, r.op.clock.now() + timedelta(minutes=40))
    with closing(one.link()) as link:
        session = link.session.call("session", {"project": r.project.project_id})["session"]
    assert session["idle_timeout_s"] is None and session["expired_at"] is None


def test_a_hold_ends_with_the_deadline(real):
    r, one, machine = real("vast")
    held = keeping.hold(r.op, machine, r.op.clock.now() + timedelta(hours=9))
    assert keeping.held_until(held, r.op.clock.now()) == one.deadline_at
    assert keeping.held_until(held, one.deadline_at) is None


# what is refused, without a real machine ------------------------------------------------------------------------------


def test_what_was_allowed_is_found_again_and_what_got_dearer_is_not(rig):
    r = rig("vast")
    machine = rent(r, hours=2)
    plan = keeping.extension_plan(r.op, machine, 3600)
    assert keeping.extension_plan(r.op, machine, 3600).ask().sha256 != plan.ask().sha256, "nobody said yes"
    say_yes(r, plan)
    assert keeping.extension_plan(r.op, machine, 3600).ask().sha256 == plan.ask().sha256
    assert keeping.extension_plan(r.op, machine, 1800).ask().sha256 != plan.ask().sha256
    machines.update(r.project, machine.id, lambda m: replace(m, rate_usd_hr=m.rate_usd_hr * 2))
    assert keeping.extension_plan(r.op, machine, 3600).ask().sha256 != plan.ask().sha256


@pytest.mark.parametrize("slip", [timedelta(hours=7), -timedelta(hours=1)])
def test_a_deadline_edited_on_record_makes_no_extension_cheap(rig, slip):
    r = rig("vast")
    machine = rent(r, hours=2)
    told = parse_timestamp(machine.deadline_at)
    honest = keeping.extension_plan(r.op, machine, 8 * 3600)
    machines.update(r.project, machine.id, lambda m: replace(m, deadline_at=timestamp(told + slip)))
    plan = keeping.extension_plan(r.op, machines.find(r.project, machine.id), 8 * 3600)
    assert (plan.old_deadline_at, plan.deadline_at) == (honest.old_deadline_at, timestamp(told + timedelta(hours=8)))
    assert plan.worst_case_usd == honest.worst_case_usd >= 8 * machine.rate_usd_hr


def test_a_deadline_edited_on_record_is_not_what_a_start_goes_back_to(rig):
    r = rig("vast")
    machine = stops.stop(r.op, by_plan(r, rent(r, hours=2)))
    machines.update(r.project, machine.id, lambda m: replace(m, deadline_at="2036-01-01T00:00:00Z"))
    assert keeping.start_plan(r.op, machine, lasts_s=3600, session_usd=None).old_deadline_at == machine.deadline_at


def test_an_extension_that_was_done_is_what_the_next_one_is_counted_from_where_no_label_tells(rig):
    r = rig("runpod")
    machine = rent(r, hours=2)
    plan = keeping.extension_plan(r.op, machine, 3600)
    done = extended_by_hand(r, plan, say_yes(r, plan))
    assert keeping.extension_plan(r.op, machine, 3600).old_deadline_at == done


def extended_by_hand(r: Any, plan: Any, approval: Approval, **told: Any) -> str:
    """What the journal says of an extension that was done; the deadline it moved to."""
    details = {"deadline_at": plan.deadline_at, **told}
    common = {"machine_id": plan.machine_id, "approval_id": approval.id}
    approvals.use(r.op, approval, plan.ask())
    intents.begin(r.project, r.clock, "extend", "x1", **common, details=details)
    intents.close(r.project, r.clock, "x1", "done")
    return details["deadline_at"]


def test_an_extension_written_into_the_journal_by_hand_makes_the_next_one_no_cheaper(rig):
    r = rig("runpod")
    machine = rent(r, hours=2)
    far = timestamp(parse_timestamp(machine.deadline_at) + timedelta(hours=8))
    intents.begin(r.project, r.clock, "extend", "x0", machine_id=machine.id, details={"deadline_at": far})
    intents.close(r.project, r.clock, "x0", "done")
    plan = keeping.extension_plan(r.op, machine, 3600)
    assert plan.old_deadline_at == machine.deadline_at
    extended_by_hand(r, plan, say_yes(r, plan), deadline_at=far)  # a use that is real, of another deadline
    assert sentinel_records.deadlines(r.op, "runpod") == {}


def test_an_extension_is_not_priced_from_a_later_deadline_than_the_fuse_has(real):
    r, one, machine = real("vast")
    far = labels.Label(r.project.project_id, fused.INTENT, one.deadline_at + timedelta(hours=8))
    r.writer.set_label(one.instance_id, str(far))
    plan = keeping.extension_plan(r.op, machine, 3600)
    approval = say_yes(r, plan)
    with pytest.raises(Refused, match="its fuse acts at"):
        keeping.extend(r.op, plan, approval)
    with closing(one.link()) as link:
        assert fuse.read_receipt(link, machine).deadline_at == one.deadline_at
    assert not approvals.find(r.op, plan.ask()).is_begun


def test_an_extension_over_a_ceiling_changes_nothing(rig):
    r = rig("vast")
    machine = rent(r, hours=2)
    plan = keeping.extension_plan(r.op, machine, 3600)
    approval = say_yes(r, plan)
    policy = r.op.policy()
    poor = replace(r.op, policy=lambda: replace(policy, ceilings={**policy.ceilings, "day_usd": Decimal("0.01")}))
    poor = replace(poor, connect=lambda machine: _NoLink())
    with pytest.raises(OverCeiling):
        keeping.extend(poor, plan, approval)
    assert r.reader.machine(machine.host).label == machine.label
    assert [i.action for i in intents.read(r.project).values()] == ["create"]


def test_an_extension_counts_with_the_start_it_prolongs_against_the_ceiling_of_a_session(rig):
    r = rig("vast")
    machine = rent(r, hours=2)
    start = "a_0123456789abcdef"
    machine = machines.update(r.project, machine.id, lambda m: replace(m, extra={"approval_id": start}))
    plan = keeping.extension_plan(r.op, machine, 3600)
    policy, worst = r.op.policy(), plan.worst_case_usd
    wide = replace(policy, ceilings={**policy.ceilings, "session_usd": worst + 2}, notify=({"url": "json://x"},))
    budget.reserve(
        r.project, r.op.ledger, r.clock, wide, intent=start, account=r.op.account("vast"), provider="vast", cost_usd=2,
        rate_usd_hr=1, deadline_h=2, machine_id=machine.id, environ=r.op.environ,
    )  # fmt: skip
    tight = replace(wide, ceilings={**policy.ceilings, "session_usd": worst + Decimal("1.99")})
    op = replace(r.op, connect=lambda machine: _NoLink())
    approval = say_yes(r, plan)
    with pytest.raises(OverCeiling, match="session ceiling"):
        keeping.extend(replace(op, policy=lambda: tight), plan, approval)
    with pytest.raises(ConnectionResetError):  # it was allowed, and there is no machine behind this link
        keeping.extend(replace(op, policy=lambda: wide), plan, approval)
    notify.tell_due(replace(r.op, policy=lambda: wide))
    told = {who: facts["used_usd"] for _, who, facts in r.notices}
    assert told[f"session_usd {machine.id} {start}"] == worst + 2


class _NoLink:
    """A machine whose fuse told nothing yet, and that goes away when it is to take something over."""

    def __init__(self) -> None:
        self.session: Any = self

    def call(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        if "deadline" in args:
            raise ConnectionResetError
        return {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("status", ["stopped", "terminating", "destroyed", "unknown"])
def test_only_what_runs_is_extended_or_held(rig, status):
    r = rig("vast")
    machine = rent(r)
    machines.update(r.project, machine.id, lambda m: replace(m, status=status))
    with pytest.raises(Refused):
        keeping.extension_plan(r.op, machine, 3600)
    with pytest.raises(Refused):
        keeping.hold(r.op, machine, r.clock.now() + timedelta(hours=1))


@pytest.mark.parametrize("text", ["soon", 5, None, "2026-01-01T00:00:00"])
def test_a_hold_that_is_no_time_is_none(rig, text):
    r = rig("vast", containers=False)
    machine = replace(rent(r), extra={"held_until": text})
    assert keeping.held_until(machine, r.clock.now()) is None
