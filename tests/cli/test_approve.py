"""`gpu approve`: what a person reads, says or signs; and what happens where nobody can answer."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from approving import Owner, a_plan, a_run, sign, signer_line
from fake_clock import FakeClock
from gpu_skills import userdirs
from gpu_skills.cli import approve as command
from gpu_skills.cli.context import Context
from gpu_skills.clock import timestamp
from gpu_skills.errors import ApprovalNeeded, ApprovalUsed
from gpu_skills.lifecycle import runs
from gpu_skills.lifecycle.approval import actions, approvals
from gpu_skills.lifecycle.approval.actions import ActionPlan
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.state import project as projects


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def gpu(gpu, clock):
    """Under a clock that stands still."""

    def call(*args: str, **world: Any):
        return gpu(*args, clock=clock, **world)

    return call


@pytest.fixture
def project(tmp_path):
    return projects.init(tmp_path)


@pytest.fixture
def plan(project, clock):
    """The name of a frozen plan."""
    return plans.freeze(project, a_plan(project, clock.now()))


@pytest.fixture
def owner(tmp_path_factory, allow_subprocess, home):
    """Of the computer: their policy is the user's."""
    owner = Owner(tmp_path_factory.mktemp("owner"))
    policy = userdirs.config_dir(os.environ) / "policy.json"
    policy.parent.mkdir(parents=True, exist_ok=True)
    policy.write_bytes((owner.folder / "config/gpu/policy.json").read_bytes())
    return owner


def recorded(project) -> list[dict]:
    path = project.path("approvals.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def files_of(project) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(project.state.rglob("*")) if path.is_file()}


# words --------------------------------------------------------------------------------------------------------------


def test_the_persons_words_are_recorded_once(project, gpu, plan):
    done = gpu("approve", plan[:12], "--statement", "yes, rent it", "--json")
    assert done.exit_code == 0
    approval = done.document["approval"]
    assert (approval["statement"], approval["source"], approval["level"]) == ("yes, rent it", "approve", "statement")
    again = gpu("approve", plan, "--statement", "yes, rent it", "--json")
    assert again.document["approval"]["id"] == approval["id"] and len(recorded(project)) == 1
    text = gpu("approve", plan).stdout
    assert "rate: at most $0.60/h" in text and f"was approved already: {approval['id']}" in text


def test_without_a_terminal_and_without_words_it_ends_at_once_with_the_text_to_show(project, gpu, plan):
    refused = gpu("approve", plan, "--json")
    assert (refused.exit_code, refused.error["code"]) == (4, "approval_missing")
    details = refused.error["details"]
    assert "worst case: $3.50" in details["text"] and details["plan"] == plan
    assert details["commands"] == [f"gpu approve {plan[:12]} --statement TEXT"]
    spoken = gpu("approve", plan)
    assert spoken.exit_code == 4 and "worst case: $3.50" in spoken.stderr and spoken.stdout == ""
    assert recorded(project) == []


@pytest.fixture
def on_terminal(monkeypatch):
    monkeypatch.setattr("gpu_skills.cli.context.Context.is_interactive", True)


@pytest.mark.parametrize(("answer", "exit_code"), [("y\n", 0), ("yes\n", 0), ("n\n", 4), ("\n", 4), ("", 130)])
def test_on_a_terminal_it_shows_and_asks(project, gpu, plan, on_terminal, answer, exit_code):
    done = gpu("approve", plan, stdin=answer.encode())
    assert done.exit_code == exit_code
    assert "worst case: $3.50" in done.stderr and "Do you allow this? [y/N]" in done.stderr
    sources = [(record["source"], record["statement"]) for record in recorded(project)]
    assert sources == ([("terminal", "yes")] if exit_code == 0 else [])


def test_show_reads_only_in_every_mode(project, gpu, plan):
    before = files_of(project)
    for mode in ("audit", "operate"):
        shown = gpu("approve", plan, "--show", "--mode", mode, "--json")
        assert shown.exit_code == 0 and shown.document["approval"] is None
        assert shown.document["code"] == "approval_missing"
        assert shown.document["commands"] == [f"gpu approve {plan[:12]} --statement TEXT"]
    assert files_of(project) == before
    assert gpu("approve", plan, "--statement", "yes", "--mode", "audit").exit_code == 3
    assert files_of(project) == before


def test_show_says_what_holds_and_what_was_passed_over(project, gpu, plan):
    project.path("approvals.jsonl").write_text('{"torn\n')
    shown = gpu("approve", plan, "--show")
    assert (
        "to allow it, the person who pays types:" in shown.stdout and "passed over: approvals.jsonl:1" in shown.stderr
    )
    approval = gpu("approve", plan, "--statement", "yes", "--json").document["approval"]
    assert f"approved until {approval['expires_at']}: {approval['id']}" in gpu("approve", plan, "--show").stdout


def test_an_expired_plan_is_shown_as_such_and_not_approved(project, gpu, plan, clock):
    clock.advance(1800)
    shown = gpu("approve", plan, "--show", "--json")
    assert (shown.document["code"], shown.document["commands"]) == ("approval_expired", [])
    refused = gpu("approve", plan, "--statement", "yes", "--json")
    assert (refused.exit_code, refused.error["next_step"]) == (4, "gpu plan --freeze")


@pytest.mark.parametrize(
    "args",
    [[], ["0123456"], ["0123456789ab"], ["PLAN", "--show", "--statement", "x"],
     ["PLAN", "--signature", "gone.sig"], ["PLAN", "--signature", "no-ending"], ["PLAN", "--message", "x"],
     ["PLAN", "--statement", " "]],
)  # fmt: skip
def test_a_wrong_call_is_exit_2(project, gpu, plan, args):
    wrong = gpu("approve", *[plan if arg == "PLAN" else arg for arg in args], "--json")
    assert wrong.exit_code == 2 and recorded(project) == []


# machines -----------------------------------------------------------------------------------------------------------


def test_an_action_plan_is_approved_like_a_plan(project, gpu, clock):
    extend = ActionPlan(
        "extend", project.project_id, "m_0123456789", "vast", "4711", Decimal("1.2"), measured_at=timestamp(clock.now())
    )
    name = actions.freeze(project, extend)
    done = gpu("approve", name[:8], "--statement", "two hours more", "--json")
    assert (done.document["action"], done.document["worst_case_usd"]) == ("extend", 1.2)


# one that is in use ---------------------------------------------------------------------------------------------------


def test_a_yes_that_is_in_use_names_what_uses_it_since_when_and_what_goes_on_with_it(context, project, gpu, plan, ask):
    op = context.operator
    given = command.agree(context, ask, yes=True)
    begun = runs.create(op, a_run(op, given))
    for words in (("--show",), ("--statement", "yes, again"), ()):
        shown = gpu("approve", plan, *words, "--json", account_home=context._account_home)
        assert shown.exit_code == 0 and shown.document["used"] == {
            "by": f"run {begun.approval_id}", "at": begun.began_at, "next_step": f"gpu job run --plan {plan[:12]}",
        }  # fmt: skip
        text = gpu("approve", plan, *words, account_home=context._account_home)
        assert f"used by run {begun.approval_id} at {begun.began_at}" in text.stdout
        assert f"next: gpu job run --plan {plan[:12]}" in text.stderr
        assert "approved already" not in text.stdout and "approved until" not in text.stdout
    runs.update(op, given.id, lambda run: type(run)(**{**vars(run), "state": "closed"}))
    refused = gpu("approve", plan, "--statement", "yes", "--json", account_home=context._account_home)
    assert refused.exit_code == 4 and refused.error["code"] == "approval_used"
    assert f"used by run {given.id} at {begun.began_at}" in refused.error["message"]
    assert refused.error["next_step"] == "gpu plan --freeze"
    assert len(recorded(project)) == 1


# signatures ---------------------------------------------------------------------------------------------------------


def test_words_are_refused_where_a_signature_is_wanted_and_what_to_sign_is_told(project, gpu, plan, owner):
    for args in (["--statement", "yes"], []):
        refused = gpu("approve", plan, *args, "--json")
        assert (refused.exit_code, refused.error["code"]) == (4, "approval_missing")
        assert refused.error["details"]["commands"][1].startswith("ssh-keygen -Y sign -n gpu-skills ")
    assert recorded(project) == []


def test_on_a_terminal_too_words_are_no_signature(project, gpu, plan, owner, on_terminal):
    assert gpu("approve", plan, stdin=b"y\n").exit_code == 4
    assert recorded(project) == []


def test_what_show_prints_is_typed_signed_and_handed_in(project, gpu, plan, owner, home, tmp_path):
    (home / ".ssh").mkdir(mode=0o700)
    for ending in ("", ".pub"):
        (home / f".ssh/id_ed25519{ending}").write_bytes(Path(f"{owner.key}{ending}").read_bytes())
        (home / f".ssh/id_ed25519{ending}").chmod(0o600)
    shown = gpu("approve", plan, "--show", "--json")
    *typed, handed_in = shown.document["commands"]
    for line in typed:
        environ = {"HOME": str(home), "PATH": os.environ["PATH"]}
        subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environ, check=True, capture_output=True)
    done = gpu(*handed_in.split()[1:], "--json")
    assert done.exit_code == 0 and done.document["approval"]["signer"] == "owner@example.org"
    assert gpu("approve", plan, "--show", "--json").document["approval"]["id"] == done.document["approval"]["id"]


def test_a_signature_that_is_not_the_owners_is_refused(project, gpu, plan, owner, tmp_path):
    stranger = Owner(tmp_path / "stranger")
    made, *_ = gpu("approve", plan, "--show", "--json").document["commands"]
    subprocess.run(["sh", "-c", made], cwd=tmp_path, check=True)
    file = tmp_path / f"approval-{plan[:12]}.txt"
    (tmp_path / "other.sig").write_bytes(sign(stranger.key, file.read_bytes()))
    args = ("approve", plan, "--signature", "other.sig", "--message", file.name, "--json")
    refused = gpu(*args)
    assert (refused.exit_code, refused.error["code"]) == (4, "approval_invalid")
    (tmp_path / "other.sig").write_bytes(sign(owner.key, file.read_bytes(), "git"))
    assert gpu(*args).exit_code == 4
    (tmp_path / "other.sig").write_bytes(b"\xff" * 100_000)
    assert gpu(*args).exit_code == 2
    assert recorded(project) == []


def test_a_project_policy_that_loosens_or_names_a_key_of_its_own_changes_nothing(project, gpu, plan, owner, tmp_path):
    stranger = Owner(tmp_path / "stranger")
    loose = {"level": "statement", "signers": [signer_line(stranger.key)], "namespace": "x"}
    project.path("policy.json").write_text(json.dumps({"ceilings": {}, "approval": loose}))
    assert gpu("approve", plan, "--statement", "yes").exit_code == 4
    assert "names nobody" in gpu("approve", plan, "--json").error["message"]


# how other commands get their yes -----------------------------------------------------------------------------------


@pytest.fixture
def context(tmp_path, clock, project, home):
    return Context(cwd=tmp_path, clock=clock, system_policy=tmp_path / "none.json", account_home=home)


@pytest.fixture
def ask(project, plan):
    return approvals.ask_of_plan(*plans.load(project, plan))


def test_yes_leaves_out_the_question_and_nothing_else(context, project, ask, capsys):
    given = command.agree(context, ask, yes=True)
    assert (given.statement, given.source) == ("--yes", "--yes")
    assert "rate: at most $0.60/h" in capsys.readouterr().err
    assert command.agree(context, ask, yes=True).id == given.id and len(recorded(project)) == 1


def test_with_neither_yes_nor_terminal_it_raises_at_once_with_the_text(context, project, ask):
    context.json = True
    with pytest.raises(ApprovalNeeded) as caught:
        command.agree(context, ask, yes=False)
    assert caught.value.details["text"] == ask.text and recorded(project) == []


def test_a_plan_that_was_used_is_not_allowed_again_by_yes(context, project, ask):
    op = context.operator
    given = command.agree(context, ask, yes=True)
    runs.create(op, a_run(op, given))
    assert command.agree(context, ask, yes=True).is_begun
    runs.update(op, given.id, lambda run: type(run)(**{**vars(run), "state": "closed"}))
    with pytest.raises(ApprovalUsed):
        command.agree(context, ask, yes=True)
    assert len(recorded(project)) == 1


def test_yes_is_no_signature(context, project, ask, owner, monkeypatch):
    said = []
    monkeypatch.setattr(command, "say", said.append)
    with pytest.raises(ApprovalNeeded) as caught:
        command.agree(context, ask, yes=True)
    assert len(caught.value.details["commands"]) == 3 and recorded(project) == []
    assert caught.value.details["text"] == ask.text and said == [], "the refusal shows it, once"


def test_an_expired_yes_can_be_given_again_where_somebody_asks_for_it(context, project, clock):
    later = a_plan(project, clock.now(), expires_at=timestamp(clock.now() + timedelta(hours=3)))
    ask = approvals.ask_of_plan(*plans.load(project, plans.freeze(project, later)))
    first = command.agree(context, ask, yes=True)
    clock.advance(3601)
    with pytest.raises(ApprovalNeeded, match="expired"):
        command.agree(context, ask, yes=False)
    assert command.agree(context, ask, yes=True).id != first.id
