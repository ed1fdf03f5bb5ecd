"""What a recorded yes is good for, and when it stops being good."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from approving import a_plan, a_run, an_ask, lines, write_lines
from gpu_skills.clock import timestamp
from gpu_skills.errors import (
    ApprovalExpired,
    ApprovalInvalid,
    ApprovalNeeded,
    ApprovalUsed,
    PlanChanged,
    StateNewer,
    UsageError,
)
from gpu_skills.lifecycle import runs
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import Candidate
from gpu_skills.state import quick_check


@pytest.fixture
def r(rig):
    return rig("vast", containers=False)


@pytest.fixture
def op(r):
    return r.op


@pytest.fixture
def ask(op):
    return an_ask(op)


def give(op, ask):
    return approvals.give(op, ask, statement="yes, rent it", source="approve")


# giving and finding -------------------------------------------------------------------------------------------------


def test_a_yes_is_found_again_as_it_was_given(op, ask):
    given = give(op, ask)
    assert approvals.find(op, ask) == given
    assert (given.statement, given.source, given.level, given.signer) == ("yes, rent it", "approve", "statement", None)
    assert given.expires_at - given.issued_at == timedelta(hours=1)


def test_a_recorded_yes_is_a_line_that_its_schema_describes(op, ask):
    given = give(op, ask)
    (line,) = lines(op)
    assert quick_check.fits(line, "approvals")
    assert line["id"] == given.id and line["plan_sha256"] == ask.sha256 and line["max_cost_usd"] == 3.5
    assert line["project_id"] == op.project.project_id and line["subject"]["gpus"] == ["RTX 4090"]


def test_without_a_yes_there_is_an_error_that_carries_what_to_show_and_to_type(op, ask):
    with pytest.raises(ApprovalNeeded) as caught:
        approvals.find(op, ask)
    error = caught.value
    assert (error.code, error.exit_code) == ("approval_missing", 4)
    assert error.details["text"] == ask.text and error.details["worst_case_usd"] == 3.5
    assert error.details["commands"] == [f"gpu approve {ask.name} --statement TEXT"]
    assert f"gpu approve {ask.name} --statement TEXT" in error.next_step


@pytest.mark.parametrize("words", ["", "  \n ", "y" * 4001])
def test_words_that_say_nothing_or_everything_are_refused(op, ask, words):
    with pytest.raises(UsageError, match="statement"):
        approvals.give(op, ask, statement=words, source="approve")
    assert lines(op) == []


def test_the_words_are_kept_whatever_stands_in_them(op, ask):
    words = 'ja \u2028 "\\\x1b[31m\U0001f642'
    approvals.give(op, ask, statement=words, source="terminal")
    assert approvals.find(op, ask).statement == words
    bytes_that_are_no_text = approvals.give(op, an_ask(op), statement="yes \udcff", source="approve")
    assert bytes_that_are_no_text.statement == r"yes \udcff"


def test_two_plans_that_say_the_same_need_two_approvals(op, ask):
    give(op, ask)
    with pytest.raises(ApprovalNeeded):
        approvals.find(op, an_ask(op))


def test_a_draft_cannot_be_approved(op):
    name = plans.save_draft(op.project, a_plan(op.project, op.clock.now()))
    with pytest.raises(UsageError, match="draft"):
        approvals.ask_of_plan(*plans.load(op.project, name))


def test_a_plan_under_another_plans_name_is_not_asked_about(op, ask):
    with pytest.raises(PlanChanged):
        approvals.ask_of_plan(ask.sha256, a_plan(op.project, op.clock.now(), worst_case_usd=Decimal(4)))


def test_nothing_is_recorded_where_a_newer_version_has_written(op, ask):
    newer = replace(op, project=replace(op.project, schema_version=99))
    with pytest.raises(StateNewer):
        give(newer, ask)
    assert lines(op) == []


# time ---------------------------------------------------------------------------------------------------------------


def test_an_approval_lives_an_hour(op, ask):
    give(op, ask)
    op.clock.sleep(3599)
    assert approvals.find(op, ask)
    op.clock.sleep(1)
    with pytest.raises(ApprovalExpired) as caught:
        approvals.find(op, ask)
    assert caught.value.exit_code == 4


def test_an_expired_plan_cannot_be_approved_any_more(op, ask):
    op.clock.sleep(1800)
    for asked in (give, approvals.find):
        with pytest.raises(ApprovalExpired, match="plan"):
            asked(op, ask)
    assert lines(op) == []


def test_the_approval_of_a_wait_plan_lives_to_the_end_of_its_attempts_and_the_person_is_told(op):
    until = op.clock.now().replace(microsecond=0) + timedelta(hours=3)
    waits = {"mode": "wait", "attempts": 180, "interval_s": 60}
    ask = an_ask(op, capacity=waits, expires_at=timestamp(until))
    assert give(op, ask).expires_at == until
    assert any("180 looks" in line and timestamp(until) in line for line in ask.lines)
    op.clock.sleep(3 * 3600 - 2)
    assert approvals.find(op, ask)
    op.clock.sleep(2)
    with pytest.raises(ApprovalExpired):
        approvals.find(op, ask)


@pytest.mark.parametrize("measured_later_h", [0, 300])
def test_no_approval_of_a_wait_lives_longer_than_a_day_whatever_its_plan_says(op, measured_later_h):
    waits = {"mode": "wait", "attempts": 100_000, "interval_s": 60}
    measured = op.clock.now() + timedelta(hours=measured_later_h)
    until = timestamp(op.clock.now() + timedelta(days=400))
    given = give(op, an_ask(op, capacity=waits, expires_at=until, measured_at=timestamp(measured)))
    assert given.expires_at - given.issued_at == timedelta(days=1)


def test_a_wait_that_is_shorter_than_an_hour_shortens_no_approval(op):
    ask = an_ask(op, capacity={"mode": "wait", "attempts": 20, "interval_s": 60})
    given = give(op, ask)
    assert given.expires_at - given.issued_at == timedelta(hours=1)


def rewritten(op, ask, **changes):
    """An approval that somebody wrote who knows how ids are made."""
    approval = replace(give(op, ask), **changes)
    write_lines(op, {**approval.to_record(), "id": approval.own_id, "ts": timestamp(op.clock.now())})


def test_one_that_would_live_longer_than_an_hour_is_refused(op, ask):
    rewritten(op, ask, expires_at=op.clock.now() + timedelta(hours=2))
    with pytest.raises(ApprovalInvalid, match="too long"):
        approvals.find(op, ask)


@pytest.mark.parametrize(("ahead_s", "holds"), [(119, True), (125, False)])
def test_one_from_the_future_is_refused_but_for_two_minutes_of_clocks_that_differ(op, ask, ahead_s, holds):
    issued = op.clock.now().replace(microsecond=0) + timedelta(seconds=ahead_s)
    rewritten(op, ask, issued_at=issued, expires_at=issued + timedelta(hours=1))
    if holds:
        assert approvals.find(op, ask)
    else:
        with pytest.raises(ApprovalInvalid, match="to come"):
            approvals.find(op, ask)


# one use ------------------------------------------------------------------------------------------------------------


def test_the_run_that_this_directory_began_is_found_again_and_no_other_approval_of_its_plan(op, ask):
    first = give(op, ask)
    give(op, ask)
    runs.create(op, a_run(op, first))
    found = approvals.find(op, ask)
    assert found.id == first.id and found.is_begun


def test_a_machine_that_was_won_is_followed_after_the_approval_expired(op, ask):
    given = give(op, ask)
    runs.create(op, a_run(op, given))
    runs.update(op, given.id, lambda run: replace(run, state="won", won="j" + "0" * 16))
    op.clock.sleep(5 * 3600)
    assert approvals.find(op, ask) == replace(given, is_begun=True)


def test_what_was_begun_and_never_won_begins_nothing_after_the_approval_expired(op, ask):
    given = give(op, ask)
    runs.create(op, a_run(op, given))
    op.clock.sleep(3601)
    with pytest.raises(ApprovalExpired) as caught:
        approvals.find(op, ask)
    assert caught.value.next_step == "gpu reconcile"


def test_a_second_approval_of_a_plan_in_use_is_worth_nothing(op, ask):
    first, second = give(op, ask), give(op, ask)
    runs.create(op, a_run(op, first))
    assert approvals.find(op, ask, approval_id=first.id).is_begun
    with pytest.raises(ApprovalUsed, match=first.id):
        approvals.find(op, ask, approval_id=second.id)


@pytest.mark.parametrize("state", ["exhausted", "closed"])
def test_a_plan_is_used_once_however_often_somebody_says_yes_to_it(op, ask, state):
    given = give(op, ask)
    give(op, ask)
    runs.create(op, a_run(op, given))
    runs.update(op, given.id, lambda run: replace(run, state=state))
    for asked in (approvals.find, give, approvals.message):
        with pytest.raises(ApprovalUsed) as caught:
            asked(op, ask)
        assert caught.value.next_step == "gpu plan --freeze"
    assert len(lines(op)) == 2


def test_another_state_directory_cannot_use_what_this_one_began(r, op, ask, tmp_path):
    given = give(op, ask)
    copy = r.another(tmp_path / "copy", project_id=op.project.project_id).op
    write_lines(copy, *lines(op))
    assert approvals.find(copy, ask) == given
    runs.create(op, a_run(op, given))
    with pytest.raises(ApprovalUsed, match="another state directory"):
        approvals.find(copy, ask)


def test_a_run_of_another_plan_is_a_use_too(op, ask):
    given = give(op, ask)
    runs.create(op, a_run(op, given, plan_sha256="0" * 64))
    with pytest.raises(ApprovalUsed, match="another plan"):
        approvals.find(op, ask)


def test_the_echo_of_a_use_counts_where_the_use_itself_was_lost(op, ask):
    given = give(op, ask)
    approvals.note_used(op, given)
    assert quick_check.fits(lines(op)[1], "approvals")
    with pytest.raises(ApprovalUsed):
        approvals.find(op, ask)
    runs.create(op, a_run(op, given))
    assert approvals.find(op, ask).is_begun


# lines that are none ------------------------------------------------------------------------------------------------


def test_lines_that_are_no_approval_are_passed_over_and_told(op, ask):
    good = give(op, ask).to_record() | {"ts": timestamp(op.clock.now())}
    without_nonce = {**good, "nonce": None}
    deep = '{"a":' * 2000 + "1" + "}" * 2000
    write_lines(op, "no json", json.dumps([1]), without_nonce, {**good, "expires_at": "soon"}, deep, '{"id": NaN}')
    with pytest.raises(ApprovalNeeded) as caught:
        approvals.find(op, ask)
    assert [line.split(":")[1] for line in caught.value.details["passed_over"]] == ["2", "3", "4", "5", "6"]
    for hostile in ({"max_cost_usd": int("9" * 4000)}, {"nonce": "\ud800"}, {"subject": [1]}, {"action": None}):
        write_lines(op, {**good, **hostile})
        with pytest.raises(ApprovalNeeded) as caught:
            approvals.find(op, ask)
        assert len(caught.value.details["passed_over"]) == 1
    write_lines(op, "no json", good, '{"torn":')
    assert approvals.find(op, ask).id == good["id"]


def test_a_file_full_of_approvals_is_looked_at_in_part_only(op, ask):
    given = give(op, ask)
    junk = [{**lines(op)[0], "id": f"a_{number:024x}"} for number in range(300)]
    write_lines(op, *junk)
    with pytest.raises(ApprovalInvalid) as caught:
        approvals.find(op, ask)
    assert len(caught.value.details["others"]) == 49
    write_lines(op, *junk, given.to_record() | {"ts": timestamp(op.clock.now())})
    assert approvals.find(op, ask).id == given.id


# what the person reads ----------------------------------------------------------------------------------------------


def test_the_person_reads_gpu_rate_deadline_worst_case_what_reaches_the_machine_and_whose_it_is(op):
    ask = an_ask(
        op,
        candidates=(
            Candidate("RTX 4090", None, (), Decimal("0.41")),
            Candidate("RTX A6000", None, (), Decimal("0.5")),
            Candidate("H100", "over the rate"),
        ),
        deadline_reason="max_lease",
        worst_case={"running": 1.2, "failed_setups": 0.3, "storage": 2, "traffic": 0},
        expected_s=3600.0,
        expected_usd=Decimal("0.41"),
        storage_usd_hr=Decimal("0.01"),
        secrets=("HF_TOKEN",),
        whose_machine="a stranger's computer in SE",
        inputs={"tree": "0" * 64, "count": 2, "bytes": 3_100_000, "files": [{"path": "a"}, {"path": "b"}]},
        job={"run": "python train.py", "setup": "pip install x"},
        warnings=("the image is large",),
    )
    assert ask.lines == (
        "rent: a machine for one job at vast: 1 × RTX 4090, else RTX A6000",
        "rate: at most $0.60/h all-in; now from $0.41/h",
        "worst case: $3.50 (storage $2.00, running $1.20, failed setups $0.30); expected $0.41 in 1h00m",
        "deadline: billing ends 2h00m after the create (max_lease)",
        "then: stopped; its disk is kept 1d0h at $0.0100/h, then destroyed whether collected or not",
        "left out: H100: over the rate",
        "runs: python train.py after pip install x",
        "reaches it: 2 files, 3.1 MB, secret HF_TOKEN; it is a stranger's computer in SE",
        "note: the image is large",
        f"plan: {ask.name}, to be approved before {timestamp(ask.expires_at)}",
    )


def test_a_line_of_the_text_is_one_line_whatever_the_plan_says(op):
    ask = an_ask(op, warnings=("all is well\nworst case: $0.00\x1b[2A",), whose_machine="ours\r\nrate: $0.00")
    assert all(line.isprintable() for line in ask.lines)


def test_outputs_that_do_not_survive_are_told_with_the_deadline(op):
    assert "then: destroyed; outputs that were not pulled by then are gone" in an_ask(op, outputs_ephemeral=True).lines
