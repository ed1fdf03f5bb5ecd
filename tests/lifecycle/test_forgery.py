"""At level `signature`, under a policy outside the project: whatever is tried, nothing is allowed and nothing rented.

The owner's key is out of the agent's reach; the project's files, its own keys and its environment are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from approving import Owner, a_plan, a_run, an_ask, lines, sign, signer_line, write_lines
from gpu_skills import userdirs
from gpu_skills.clock import timestamp
from gpu_skills.errors import ApprovalExpired, ApprovalInvalid, ApprovalNeeded, ApprovalUsed, GpuError, PlanChanged
from gpu_skills.lifecycle import machines, runs
from gpu_skills.lifecycle.approval import actions, approvals
from gpu_skills.lifecycle.approval.approvals import Approval
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.renting import keeping, provision
from sshd import make_key

pytestmark = pytest.mark.usefixtures("allow_subprocess")


@pytest.fixture
def owner(tmp_path):
    return Owner(tmp_path / "owner")


@pytest.fixture
def r(rig, owner):
    made = rig("vast", containers=False)
    return replace(made, op=owner.rules(made.op))


@pytest.fixture
def op(r):
    return r.op


@pytest.fixture
def ask(op):
    return an_ask(op)


@pytest.fixture
def refused(r, op, ask) -> Callable[..., GpuError]:
    """refused(kind, because, op=…, ask=…): nothing is allowed, with exit 3 or 4, and nothing was rented."""

    def check(kind: type[GpuError], because: str, *, op: Any = op, ask: Any = ask) -> GpuError:
        with pytest.raises(GpuError) as caught:
            approvals.find(op, ask)
        assert type(caught.value) is kind and because in caught.value.message, caught.value.message
        assert caught.value.exit_code in (3, 4)
        assert r.creates == 0 and r.burning() == set()
        return caught.value

    return check


def as_line(op, approval: Approval, **changes: Any) -> dict[str, Any]:
    """The line of an approval, its id as it should be."""
    approval = replace(approval, **changes)
    return {**approval.to_record(), "id": approval.own_id, "ts": timestamp(op.clock.now())}


# the honest way -----------------------------------------------------------------------------------------------------


def test_what_the_owner_signed_is_allowed_once(op, owner, ask, refused):
    given = owner.approve(op, ask)
    assert approvals.find(op, ask) == given and given.signer == "owner@example.org" and given.level == "signature"
    runs.create(op, a_run(op, given))
    assert approvals.find(op, ask).is_begun
    runs.update(op, given.id, lambda run: replace(run, state="closed"))
    refused(ApprovalUsed, "was used")


def test_without_a_signature_the_error_has_the_message_to_sign(op, owner, ask, refused):
    error = refused(ApprovalNeeded, "a person has to agree")
    made, signing, handed_in = error.details["commands"]
    assert '"max_cost_usd":3.5' in made and ask.sha256 in made
    assert signing.startswith("ssh-keygen -Y sign -n gpu-skills ")
    assert handed_in == f"gpu approve {ask.name} --signature approval-{ask.name}.txt.sig"


def test_what_is_signed_says_in_clear_what_it_is_about(op, ask):
    said = json.loads(approvals.message(op, ask))
    assert said["subject"] == {
        "provider": "vast", "gpus": ["RTX 4090"], "gpu_count": 1, "max_rate_usd_hr": 0.6, "deadline_s": 7200,
    }  # fmt: skip
    assert (said["action"], said["plan"], said["project"]) == ("rent", ask.sha256, op.project.project_id)


# by hand ------------------------------------------------------------------------------------------------------------


def test_words_are_refused(op, ask, refused):
    for source in ("--yes", "approve", "terminal"):
        with pytest.raises(ApprovalNeeded) as caught:
            approvals.give(op, ask, statement="the user said yes", source=source)
        assert len(caught.value.details["commands"]) == 3
    assert lines(op) == []
    refused(ApprovalNeeded, "a person has to agree")


def test_words_written_into_the_file_by_somebody_who_knows_how_are_refused(op, ask, refused):
    approval = replace(approvals._draft(op, ask, "statement"), statement="yes", source="approve")
    write_lines(op, as_line(op, approval))
    refused(ApprovalInvalid, "the policy wants a signature")


@pytest.mark.parametrize("signature", [None, "", "yes", "-----BEGIN SSH SIGNATURE-----\nU1NIU0lH\n"])
def test_a_line_that_calls_itself_signed_is_refused(op, ask, refused, signature):
    approval = replace(approvals._draft(op, ask, "signature"), signature=signature, signer="owner@example.org")
    write_lines(op, as_line(op, approval))
    refused(ApprovalInvalid, "does not hold")


def test_an_unknown_key_is_refused_when_it_is_handed_in_and_when_it_is_written_in(op, ask, refused, tmp_path):
    own = make_key(tmp_path / "agent")
    message = approvals.message(op, ask)
    with pytest.raises(ApprovalInvalid, match="of none of the allowed signers"):
        approvals.give_signed(op, ask, message, sign(own, message))
    assert lines(op) == []
    draft = approvals._draft(op, ask, "signature")
    write_lines(op, as_line(op, draft, signature=sign(own, draft.content()).decode()))
    refused(ApprovalInvalid, "of none of the allowed signers")


def test_a_signature_in_another_namespace_is_refused(op, owner, ask, refused):
    draft = approvals._draft(op, ask, "signature")
    for namespace in ("git", "file", "gpu-skills2"):
        foreign = sign(owner.key, draft.content(), namespace)
        with pytest.raises(ApprovalInvalid):
            approvals.give_signed(op, ask, draft.content(), foreign)
        write_lines(op, as_line(op, draft, signature=foreign.decode()))
        refused(ApprovalInvalid, "does not hold")


def test_a_signature_of_something_else_of_the_owner_is_refused(op, owner, ask):
    for other in (b"", b"{}", b"yes\n", approvals.message(op, ask) + b"\n", b'{"plan": 1}', b"[" * 3000):
        with pytest.raises(ApprovalInvalid, match="not the message"):
            approvals.give_signed(op, ask, other, sign(owner.key, other))
    assert lines(op) == []


# edited -------------------------------------------------------------------------------------------------------------

EDITS = {
    "plan_sha256": None,  # to that of another plan
    "max_cost_usd": 350,
    "expires_at": "2036-01-01T00:00:00Z",
    "approved_at": "2036-01-01T00:00:00Z",
    "subject": {"provider": "vast"},
    "nonce": "0123456789abcdef",
    "action": "extend",
    "project_id": "p-other",
    "level": "statement",
}


@pytest.mark.parametrize("field", sorted(EDITS))
def test_an_edited_line_is_refused_with_its_old_id_and_with_one_that_fits(op, owner, ask, field):
    approval = owner.approve(op, ask)
    (line,) = lines(op)
    other = an_ask(op, worst_case_usd=Decimal("3.0"))
    asked = other if field == "plan_sha256" else ask
    edited = {**line, field: other.sha256 if field == "plan_sha256" else EDITS[field]}
    fitting = {**edited, "id": Approval.from_record(edited).own_id}
    assert fitting["id"] != approval.id
    for written in (edited, fitting):
        write_lines(op, written)
        with pytest.raises(ApprovalNeeded) as caught:
            approvals.find(op, asked)
        assert caught.value.exit_code == 4


def test_another_name_for_what_was_signed_is_no_second_approval(op, owner, ask, refused):
    """Names are what uses are kept by: a second name would be a second machine."""
    approval = owner.approve(op, ask)
    runs.create(op, a_run(op, approval))
    runs.update(op, approval.id, lambda run: replace(run, state="closed"))
    (line,) = lines(op)
    for name in ("a_s" + "0" * 24, "a_" + approval.id[3:], approval.id.upper(), approval.id + " ", "../" + approval.id):
        write_lines(op, {**line, "id": name})
        refused(ApprovalInvalid, "does not say what it said")


def test_another_signature_of_the_same_message_is_no_second_approval(op, owner, ask, refused):
    """One message can be signed many times, and one signature be written in many ways."""
    approval = owner.approve(op, ask)
    runs.create(op, a_run(op, approval, state="closed"))
    (line,) = lines(op)
    again = sign(owner.key, approval.content()).decode()
    head, *middle, foot = line["signature"].splitlines()
    on_one_line = "\n".join([head, "".join(middle), foot, ""])
    for signature in (again, line["signature"] + "\n\n", on_one_line):
        write_lines(op, {**line, "signature": signature})
        refused(ApprovalUsed, "was used")


# other plans, projects, times ---------------------------------------------------------------------------------------


def test_what_was_signed_for_one_plan_is_refused_for_another(op, owner, ask, refused):
    other = an_ask(op, max_rate_usd_hr=Decimal("0.59"))
    message = approvals.message(op, other)
    with pytest.raises(ApprovalInvalid, match="another plan"):
        approvals.give_signed(op, ask, message, sign(owner.key, message))
    owner.approve(op, other)
    refused(ApprovalNeeded, "a person has to agree")


def test_what_was_signed_in_another_project_is_refused_here(r, op, owner, ask, refused, tmp_path):
    other = owner.rules(r.another(tmp_path / "other").op)
    same_but_project = plans.freeze(other.project, a_plan(other.project, other.clock.now()))
    theirs = approvals.ask_of_plan(*plans.load(other.project, same_but_project))
    owner.approve(other, theirs)
    write_lines(op, *lines(other))
    refused(ApprovalNeeded, "a person has to agree")
    with pytest.raises(ApprovalInvalid, match="of project"):  # the plan copied along
        approvals.find(op, theirs)
    refused(ApprovalInvalid, "of project", op=op, ask=theirs)


def test_an_expired_signature_is_refused_and_cannot_be_handed_in_late(op, owner, ask, refused):
    late = approvals.message(op, ask)
    owner.approve(op, ask)
    op.clock.sleep(3600)
    refused(ApprovalExpired, "expired")
    fresh_plan = an_ask(op)
    message = approvals.message(op, fresh_plan)
    op.clock.sleep(1799)
    assert approvals.give_signed(op, fresh_plan, message, sign(owner.key, message))
    with pytest.raises(ApprovalExpired):
        approvals.give_signed(op, ask, late, sign(owner.key, late))


def test_a_message_made_for_the_future_or_for_a_year_is_refused_although_it_was_signed(op, owner, ask, refused):
    draft = approvals._draft(op, ask, "signature")
    year = replace(draft, expires_at=draft.issued_at + timedelta(days=365))
    hour_from_now = draft.issued_at + timedelta(hours=1)
    to_come = replace(draft, issued_at=hour_from_now, expires_at=hour_from_now + timedelta(hours=1))
    for approval, because in ((year, "too long"), (to_come, "to come")):
        signature = sign(owner.key, approval.content())
        with pytest.raises(ApprovalInvalid, match=because):
            approvals.give_signed(op, ask, approval.content(), signature)
        write_lines(op, as_line(op, approval, signature=signature.decode()))
        refused(ApprovalInvalid, because)


def test_what_was_signed_for_an_older_plan_is_named_by_that_plan_and_allows_no_other(op, owner, ask):
    older = an_ask(op)
    files = [approvals.commands(op, one)[-1].split()[-1] for one in (older, ask)]
    assert files == [f"approval-{one.sha256[:12]}.txt.sig" for one in (older, ask)]
    message = approvals.message(op, older)
    with pytest.raises(ApprovalInvalid, match="given for another plan"):
        approvals.give_signed(op, ask, message, sign(owner.key, message))
    assert lines(op) == []


def test_a_message_that_allows_less_than_the_worst_case_is_refused(op, owner, ask, refused):
    less = replace(approvals._draft(op, ask, "signature"), max_cost_usd=Decimal("3.49"))
    write_lines(op, as_line(op, less, signature=sign(owner.key, less.content()).decode()))
    refused(ApprovalInvalid, "allows $3.49, the worst case is $3.50")


def test_the_end_of_one_machine_is_not_signed_for_by_the_end_of_another(op, owner):
    machine = machines.Machine("m_0123456789", "vast", "4711")
    ask = keeping.named_plan(op, "destroy", machine).ask()
    owner.approve(op, ask)
    assert approvals.find(op, ask).signer
    other = keeping.named_plan(op, "destroy", replace(machine, id="m_0123456788")).ask()
    write_lines(op, {**lines(op)[0], "plan_sha256": other.sha256, "subject": other.subject})
    with pytest.raises(ApprovalInvalid):
        approvals.find(op, other)


# plans --------------------------------------------------------------------------------------------------------------


def test_a_plan_edited_after_it_was_signed_is_no_plan(op, owner, ask):
    owner.approve(op, ask)
    path = op.project.path("plans") / f"{ask.sha256}.json"
    path.write_text(path.read_text().replace('"max_rate_usd_hr":0.6', '"max_rate_usd_hr":6'))
    for load in (plans.load, actions.load):
        with pytest.raises(PlanChanged) as caught:
            load(op.project, ask.name)
        assert caught.value.exit_code == 4


def test_another_plan_under_a_name_that_looks_the_same_is_not_what_was_signed(op, owner, ask, refused):
    owner.approve(op, ask)
    dear = a_plan(op.project, op.clock.now(), max_rate_usd_hr=Decimal(6), nonce="0")
    for name in (ask.sha256[:12] + "0" * 52, ask.sha256[:-1] + ("0" if ask.sha256[-1] != "0" else "1")):
        path = op.project.path("plans") / f"{name}.json"
        path.write_bytes(plans.canonical(dear))
        with pytest.raises(PlanChanged):
            plans.load(op.project, name)
        with pytest.raises(PlanChanged):
            approvals.ask_of_plan(name, dear)
        with pytest.raises(GpuError, match="2 plans begin"):
            plans.load(op.project, ask.name)
        path.unlink()
    (line,) = lines(op)
    for look_alike in (ask.sha256[:12], ask.sha256.upper(), ask.sha256 + "\n", ask.sha256.replace("0", "O")):
        write_lines(op, {**line, "plan_sha256": look_alike})
        if look_alike != ask.sha256:
            refused(ApprovalNeeded, "a person has to agree")


# the policy and the environment -------------------------------------------------------------------------------------


def test_a_project_policy_that_loosens_changes_nothing(op, owner, ask, refused, tmp_path):
    own = make_key(tmp_path / "agent")
    path = op.project.path("policy.json")
    path.write_text(
        json.dumps(
            {
                "ceilings": {},
                "approval": {"level": "statement", "signers": [signer_line(own)], "namespace": "anything"},
            }
        )
    )
    with pytest.raises(ApprovalNeeded):
        approvals.give(op, ask, statement="yes", source="approve")
    draft = approvals._draft(op, ask, "signature")
    for namespace in ("gpu-skills", "anything"):
        signature = sign(own, draft.content(), namespace)
        with pytest.raises(ApprovalInvalid):
            approvals.give_signed(op, ask, draft.content(), signature)
        write_lines(op, as_line(op, draft, signature=signature.decode()))
        refused(ApprovalInvalid, "does not hold")


def test_a_project_cannot_fill_the_gap_of_a_policy_that_names_nobody(op, owner, ask, refused, tmp_path):
    owner.write_policy(signers=[])
    own = make_key(tmp_path / "agent")
    path: Path = op.project.path("policy.json")
    path.write_text(json.dumps({"ceilings": {}, "approval": {"signers": [signer_line(own)]}}))
    draft = approvals._draft(op, ask, "signature")
    write_lines(op, as_line(op, draft, signature=sign(own, draft.content()).decode()))
    refused(ApprovalInvalid, "names nobody who may sign")


def test_a_signer_who_was_taken_out_of_the_policy_has_signed_nothing(op, owner, ask, refused, tmp_path):
    owner.approve(op, ask)
    owner.write_policy(signers=[signer_line(make_key(tmp_path / "successor"))])
    refused(ApprovalInvalid, "of none of the allowed signers")


def test_words_given_before_the_policy_was_tightened_are_worth_nothing_after(op, owner, ask, refused):
    owner.write_policy(level="statement", signers=[])
    approvals.give(op, ask, statement="yes", source="approve")
    assert approvals.find(op, ask)
    owner.write_policy(signers=[signer_line(owner.key)])
    refused(ApprovalInvalid, "the policy wants a signature")


def test_a_second_state_directory_gets_nothing_from_a_signature_that_was_used(r, op, owner, ask, refused, tmp_path):
    given = owner.approve(op, ask)
    runs.create(op, a_run(op, given))
    copy = owner.rules(r.another(tmp_path / "copy", project_id=op.project.project_id).op)
    write_lines(copy, *lines(op))
    refused(ApprovalUsed, "another state directory", op=copy)
    with pytest.raises(ApprovalUsed):
        runs.create(copy, a_run(copy, given))


def test_another_environment_does_not_forget_that_a_signature_was_used(op, owner, ask, refused, tmp_path):
    given = owner.approve(op, ask)
    runs.create(op, a_run(op, given, state="closed"))
    for number, variable in enumerate(("XDG_STATE_HOME", "HOME")):
        moved = {**op.environ, variable: str(tmp_path / f"elsewhere{number}")}
        refused(ApprovalUsed, "was used", op=replace(op, environ=moved))
    machine = machines.Machine("m_0123456789", "vast", "4711")
    end = keeping.named_plan(op, "destroy", machine).ask()
    approvals.use(op, owner.approve(op, end), end)
    approvals.finish(op, approvals.find(op, end))
    moved = {"HOME": str(tmp_path / "nowhere")}
    refused(ApprovalUsed, "was used", op=replace(op, environ=moved), ask=end)


def test_uses_of_signatures_are_kept_where_the_system_says_this_account_lives(op, monkeypatch, tmp_path):
    import pwd

    account = pwd.struct_passwd(("me", "x", 1000, 1000, "", str(tmp_path / "account"), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: account)
    for variable in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    real = replace(op, account_home=None)
    assert runs.folder(real, "a_s0") == tmp_path / "account/.local/state/gpu/runs"
    assert runs.folder(real, "a_0") == userdirs.state_dir(real.environ) / "runs"


def test_every_place_of_runs_is_seen_by_who_settles_them(op, owner, ask):
    signed = owner.approve(op, ask)
    runs.create(op, a_run(op, signed))
    owner.write_policy(level="statement", signers=[])
    other = an_ask(op)
    said = approvals.give(op, other, statement="yes", source="approve")
    runs.create(op, a_run(op, said))
    assert {run.approval_id for run in runs.own_runs(op)} == {signed.id, said.id}


# and nothing is rented ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forged", ["handed over", "statement", "stranger", "edited", "expired", "used"])
def test_provisioning_rents_nothing_under_an_approval_that_does_not_hold(r, op, owner, tmp_path, forged):
    name = plans.freeze(op.project, a_plan(op.project, op.clock.now()))
    plan = plans.load(op.project, name)[1]
    ask = approvals.ask_of_plan(name, plan)
    approval = approvals._draft(op, ask, "statement" if forged == "statement" else "signature")
    approval = replace(approval, statement="yes", source="approve", signer="owner@example.org")
    if forged == "stranger":
        key = make_key(tmp_path / "agent")
        approval = replace(approval, signature=sign(key, approval.content()).decode())
    if forged in ("edited", "expired", "used"):
        approval = owner.approve(op, ask)
    if forged == "edited":
        write_lines(op, {**lines(op)[0], "max_cost_usd": 1000})
    elif forged == "expired":
        op.clock.sleep(3600)
    elif forged == "used":
        runs.create(op, a_run(op, approval, owner="elsewhere:1"))
    elif forged != "handed over":
        write_lines(op, as_line(op, approval))
    with pytest.raises(ApprovalNeeded) as caught:
        provision.provision(op, name, plan, replace(approval, id=approval.own_id))
    assert caught.value.exit_code == 4
    assert r.creates == 0 and r.burning() == set()


def test_of_many_state_directories_at_once_one_uses_an_approval(r, op, owner, tmp_path):
    machine = machines.Machine("m_0123456789", "vast", "4711")
    ask = keeping.named_plan(op, "destroy", machine).ask()
    approval = owner.approve(op, ask)
    rivals = [op]
    for number in range(5):
        rivals.append(owner.rules(r.another(tmp_path / f"copy{number}", project_id=op.project.project_id).op))
        write_lines(rivals[-1], *lines(op))

    def attempt(rival) -> bool:
        try:
            approvals.use(rival, approval, ask)
        except ApprovalUsed:
            return False
        return True

    with ThreadPoolExecutor(len(rivals)) as pool:
        assert sum(pool.map(attempt, rivals)) == 1


# at level statement: mistakes ---------------------------------------------------------------------------------------


def test_mistakes_with_words_are_refused_too(op, owner, refused):
    owner.write_policy(level="statement", signers=[])
    expired, used, edited, other = (an_ask(op) for _ in range(4))
    for ask in (expired, used, edited):
        approvals.give(op, ask, statement="yes", source="approve")
    refused(ApprovalNeeded, "a person has to agree", ask=other)
    runs.create(op, a_run(op, approvals.find(op, used), state="exhausted"))
    refused(ApprovalUsed, "was used", ask=used)
    first, second, third = lines(op)
    write_lines(op, first, second, {**third, "max_cost_usd": 100})
    refused(ApprovalInvalid, "does not say what it said", ask=edited)
    op.clock.sleep(3601)
    refused(ApprovalExpired, "expired", ask=expired)
