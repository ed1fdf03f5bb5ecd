"""Plans for one machine that is there: extend, start, stop, destroy."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from approving import a_plan, lines, write_lines
from gpu_skills.clock import timestamp
from gpu_skills.errors import (
    ApprovalExpired,
    ApprovalInvalid,
    ApprovalNeeded,
    ApprovalUsed,
    PlanChanged,
    PlanUnknown,
    SchemaInvalid,
    StateError,
    UsageError,
)
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.approval import actions, approvals
from gpu_skills.lifecycle.approval.actions import ActionPlan
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import keeping


@pytest.fixture
def r(rig):
    return rig("vast", containers=False)


@pytest.fixture
def op(r):
    return r.op


def extension(op, **changes) -> ActionPlan:
    now = op.clock.now()
    given = {
        "action": "extend",
        "project_id": op.project.project_id,
        "machine_id": "m_0123456789",
        "provider": "vast",
        "instance_id": "4711",
        "worst_case_usd": Decimal("1.2"),
        "rate_usd_hr": Decimal("0.6"),
        "gpu": "RTX 4090",
        "gpu_count": 1,
        "deadline_at": timestamp(now + timedelta(hours=8)),
        "old_deadline_at": timestamp(now + timedelta(hours=6)),
        "measured_at": timestamp(now),
        "expires_at": timestamp(now + timedelta(minutes=30)),
    }
    return ActionPlan(**{**given, **changes})


def approved(op, plan):
    """(approval, ask) of a plan that a person allowed."""
    name, found = actions.load(op.project, actions.freeze(op.project, plan))
    ask = found.ask()
    assert ask.sha256 == name
    return approvals.give(op, ask, statement="yes", source="terminal"), ask


def test_a_frozen_one_is_found_by_its_name_or_the_first_digits_of_it(op):
    name = actions.freeze(op.project, extension(op, secrets=("HF_TOKEN",), details={"a": 1}))
    full, plan = actions.load(op.project, name[:8])
    assert full == name and isinstance(plan, ActionPlan)
    assert replace(plan, nonce=None) == extension(op, secrets=("HF_TOKEN",), details={"a": 1})


def test_both_kinds_of_plan_are_found_by_the_same_call(op):
    name = plans.freeze(op.project, a_plan(op.project, op.clock.now()))
    assert isinstance(actions.load(op.project, name)[1], Plan)
    draft = plans.save_draft(op.project, a_plan(op.project, op.clock.now()))
    assert actions.load(op.project, draft)[0] == draft


def test_two_that_are_measured_are_two_even_if_they_say_the_same(op):
    assert actions.freeze(op.project, extension(op)) != actions.freeze(op.project, extension(op))


@pytest.mark.parametrize("name", ["", "0123456", "../../etc/passwd", "0" * 65, "ABCDEF0123", "*" * 8, "draft-xyz"])
def test_what_is_no_name_of_a_plan_is_unknown(op, name):
    actions.freeze(op.project, extension(op))
    with pytest.raises(PlanUnknown):
        actions.load(op.project, name)


def test_digits_that_two_plans_begin_with_name_neither(op):
    name = actions.freeze(op.project, extension(op))
    (op.project.path("plans") / f"{name[:20]}{'0' * 44}.json").write_text("{}")
    with pytest.raises(PlanUnknown, match="2 plans"):
        actions.load(op.project, name[:12])
    assert actions.load(op.project, name)[0] == name


def test_a_plan_edited_after_it_was_frozen_is_no_plan(op):
    name = actions.freeze(op.project, extension(op))
    path = op.project.path("plans") / f"{name}.json"
    for edited in (
        path.read_text().replace('"worst_case_usd":1.2', '"worst_case_usd":9.2'),
        json.dumps(json.loads(path.read_text()), indent=1),
    ):
        path.write_text(edited)
        with pytest.raises(PlanChanged):
            actions.load(op.project, name)


def test_a_plan_with_a_field_that_nobody_knows_is_no_plan(op):
    record = {**extension(op).to_record(), "also": "delete the volume"}
    with pytest.raises(UsageError, match="nobody knows"):
        ActionPlan.from_record(record)
    with pytest.raises(SchemaInvalid):
        ActionPlan.from_record({**extension(op).to_record(), "action": "rent"})


def test_a_plan_of_another_project_is_not_asked_about_here(r, op, tmp_path):
    other = r.another(tmp_path / "other").op
    name = actions.freeze(op.project, extension(op))
    copied = other.project.path("plans") / f"{name}.json"
    copied.parent.mkdir(exist_ok=True)
    copied.write_bytes((op.project.path("plans") / f"{name}.json").read_bytes())
    with pytest.raises(ApprovalInvalid, match="of project"):
        actions.load(other.project, name)


def test_the_person_reads_what_is_done_to_which_machine_and_what_it_may_cost(op):
    plan = extension(op, secrets=("HF_TOKEN",), whose_machine="a stranger's", warnings=("the disk\nis full",))
    assert plan.ask().lines == (
        "extend machine m_0123456789 of vast (instance 4711): 1 × RTX 4090",
        "rate: at most $0.60/h all-in",
        f"deadline: billing ends {plan.deadline_at}, until now {plan.old_deadline_at}",
        "worst case: $1.20 more",
        "reaches it: HF_TOKEN; it is a stranger's",
        "note: the disk\\nis full",
    )
    destroy = ActionPlan("destroy", op.project.project_id, "m_1", "vast", "4711").ask()
    assert "its disk and everything on it that was not pulled is gone for good" in destroy.lines


# one use ------------------------------------------------------------------------------------------------------------


def test_an_action_is_allowed_once(op):
    approval, ask = approved(op, extension(op))
    begun = approvals.use(op, approval, ask)
    assert approvals.use(op, approval, ask) == begun  # whoever died in the middle goes on
    assert approvals.find(op, ask).is_begun
    approvals.finish(op, approval)
    for again in (lambda: approvals.use(op, approval, ask), lambda: approvals.find(op, ask)):
        with pytest.raises(ApprovalUsed) as caught:
            again()
        assert caught.value.next_step == "gpu machine extend m_0123456789"
    approvals.finish(op, approval)


def test_another_state_directory_cannot_use_it_too(r, op, tmp_path):
    approval, ask = approved(op, extension(op))
    copy = r.another(tmp_path / "copy", project_id=op.project.project_id).op
    write_lines(copy, *lines(op))
    approvals.use(copy, approval, ask)
    with pytest.raises(ApprovalUsed, match="another state directory"):
        approvals.use(op, approval, ask)


def test_what_was_never_allowed_cannot_be_used(op):
    approval, ask = approved(op, extension(op))
    write_lines(op)
    with pytest.raises(ApprovalNeeded):
        approvals.use(op, approval, ask)
    write_lines(op, {**approval.to_record(), "max_cost_usd": 99, "ts": timestamp(op.clock.now())})
    with pytest.raises(ApprovalInvalid):
        approvals.use(op, approval, ask)


def test_an_action_that_was_begun_does_not_begin_again_after_the_approval_expired(op):
    approval, ask = approved(op, extension(op))
    approvals.use(op, approval, ask)
    op.clock.sleep(3601)
    with pytest.raises(ApprovalExpired):
        approvals.use(op, approval, ask)


def test_the_approval_of_one_machines_end_is_none_for_another_machine(op):
    machine = machines.Machine("m_0123456789", "vast", "4711")
    ask = keeping.named_plan(op, "destroy", machine).ask()
    given = approvals.give(op, ask, statement="destroy m_0123456789", source="approve")
    assert approvals.find(op, ask).subject["machine"] == "m_0123456789"
    assert keeping.named_plan(op, "destroy", machine).ask() == ask
    other = replace(machine, id="m_0123456788")
    with pytest.raises(ApprovalNeeded) as caught:
        approvals.find(op, keeping.named_plan(op, "destroy", other).ask())
    assert caught.value.details["commands"] == [f"gpu approve {caught.value.details['plan'][:12]} --statement TEXT"]
    for action, machine_id in (("destroy", other.id), ("stop", machine.id)):
        with pytest.raises(ApprovalInvalid):
            actions.named_by(op.project, given, action, machine_id)
    assert actions.named_by(op.project, given, "destroy", machine.id).ask() == ask


def test_a_use_that_cannot_be_read_allows_nothing(op):
    approval, ask = approved(op, extension(op))
    approvals.use(op, approval, ask)
    (path,) = (op.user_state / "uses").glob("a_*.json")
    path.write_text('{"who": "knows"}')
    with pytest.raises(StateError):
        approvals.find(op, ask)
