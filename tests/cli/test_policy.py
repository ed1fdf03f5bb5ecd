"""`gpu policy …`: what holds, where it comes from, and what is left."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fake_clock import FakeClock
from gpu_skills import userdirs
from gpu_skills.cli.context import Context
from gpu_skills.errors import PolicyMissing
from gpu_skills.state import budget, project

ASK = ("policy", "check", "--cost", "3", "--rate", "0.70", "--json")


@pytest.fixture
def state(tmp_path, gpu):
    assert gpu("init").exit_code == 0
    return tmp_path / ".pi/gpu"


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def user_policy() -> Path:
    return userdirs.config_dir(os.environ) / "policy.json"


def left(document: dict) -> dict:
    return {c["ceiling"]: c["left"] for c in document["ceilings"]}


def test_show_names_every_value_and_the_file_it_comes_from(state, gpu, tmp_path):
    write(user_policy(), {"ceilings": {"day_usd": 7}, "notify": [{"kind": "mail", "target": "me"}]})
    system = write(tmp_path / "system.json", {"ceilings": {"rate_usd_hr": 1.5}, "ledger_inputs": "none"})
    document = gpu("policy", "show", "--json", system_policy=system).document
    values = {v["name"]: (v["value"], v["from"]) for v in document["values"]}
    assert values["ceilings.day_usd"] == (7, ["user"])
    assert values["ceilings.rate_usd_hr"] == (1.5, ["system"])
    assert values["ceilings.month_usd"] == (100, ["project"])
    assert values["ledger_inputs"] == ("none", ["system"])
    assert values["notify"] == ([{"kind": "mail", "target": "me"}], ["user", "project"])
    assert [(f["from"], f["exists"]) for f in document["files"]] == [
        ("system", True), ("user", True), ("project", True),
    ]  # fmt: skip
    text = gpu("policy", "show", system_policy=system).stdout
    assert "ceilings.day_usd" in text and "spent today $0.00" in text


def test_a_misspelt_key_is_shown_with_what_was_probably_meant(state, gpu):
    write(user_policy(), {"ceilings": {}, "allowed_provider": ["local"]})
    shown = gpu("policy", "show", "--json")
    assert shown.document["unknown"] == [{"from": "user", "key": "allowed_provider", "nearest": "allowed_providers"}]
    assert "did you mean allowed_providers?" in shown.stderr


def test_check_says_yes_and_what_is_left_under_each_ceiling(state, gpu):
    asked = gpu(*ASK, "--deadline", "4h", "--provider", "ssh")
    assert asked.exit_code == 0 and asked.document["allowed"] and asked.document["violations"] == []
    assert left(asked.document) == {
        "job_usd": 5, "session_usd": 10, "day_usd": 20, "month_usd": 100, "rate_usd_hr": 2, "machines": 2,
        "deadline_h": 12,
    }  # fmt: skip
    assert asked.document["deadline_h"] == 4


def test_check_says_no_with_exit_3_and_everything_that_is_in_the_way(state, gpu):
    refused = gpu("policy", "check", "--cost", "30", "--rate", "3", "--deadline", "20h", "--provider", "x", "--json")
    assert refused.exit_code == 3 and refused.document["code"] == "over_ceiling"
    assert [v["ceiling"] for v in refused.document["violations"]] == [
        "job_usd", "session_usd", "day_usd", "rate_usd_hr", "deadline_h", "allowed_providers",
    ]  # fmt: skip
    text = gpu("policy", "check", "--cost", "30", "--rate", "3").stdout
    assert "no: $30.00 exceeds the job ceiling of $5.00 (project)" in text and "LEFT" in text


def test_what_jobs_charges_and_reservations_took_is_not_left(state, gpu, tmp_path):
    clock = FakeClock(datetime(2026, 3, 10, 12, 0, tzinfo=UTC))
    line = b'{"status":"completed","cost_usd":4,"completed_at":"2026-03-10T11:00:00Z"}'
    assert gpu("ledger", "append", stdin=line, clock=clock).exit_code == 0
    (state / "charges.jsonl").write_text('{"kind":"idle","cost_usd":1.5,"ts":"2026-03-09T10:00:00Z"}\n')
    event = {"kind": "reservation", "ts": "2026-03-10T11:59:00Z", "intent": "i1", "reserved_usd": 8}
    write(budget.account_journal("vast", "acct"), event)
    document = gpu(*ASK, clock=clock).document
    assert (left(document)["day_usd"], left(document)["month_usd"], left(document)["machines"]) == (8, 86.5, 1)
    assert (document["spent"]["day_usd"], document["reserved_usd"]) == (4, 8)
    other = project.init(tmp_path / "other")
    assert left(gpu(*ASK, clock=clock, cwd=other.root).document)["day_usd"] == 12


def test_attempts_of_the_named_job_count_against_its_ceiling(state, gpu):
    event = {"kind": "reservation", "ts": "2026-03-10T11:59:00Z", "intent": "i1", "reserved_usd": 4}
    write(budget.account_journal("vast", "acct"), {**event, "job_id": "J-000001"})
    refused = gpu(*ASK, "--job", "J-000001")
    assert refused.exit_code == 3 and [v["ceiling"] for v in refused.document["violations"]] == ["job_usd"]
    assert gpu(*ASK, "--job", "J-000002").exit_code == 0


def test_the_ledger_line_of_the_named_job_counts_against_its_ceiling(state, gpu):
    line = {"id": "J-000001", "status": "failed", "cost_usd": 2.5, "ts": "2026-03-10T12:00:00Z"}
    (state / "jobs.jsonl").write_text(json.dumps(line) + "\n")
    refused = gpu(*ASK, "--job", "J-000001")
    assert refused.exit_code == 3 and [v["ceiling"] for v in refused.document["violations"]] == ["job_usd"]
    assert refused.document["spent"]["job_usd"] == 2.5
    assert gpu(*ASK, "--job", "J-000002").exit_code == 0


def test_a_damaged_ledger_makes_the_answer_incomplete_and_says_so(state, gpu):
    (state / "jobs.jsonl").write_text('{"id":"J-000001","status":"completed","cost_usd":"many"}\n')
    assert gpu(*ASK).document["spent"]["incomplete"] is True
    assert "incomplete" in gpu("policy", "show").stdout


@pytest.mark.parametrize("where", ["user", "project"])
@pytest.mark.parametrize("verb", [("show", "--json"), ASK[1:]])
def test_a_policy_that_cannot_be_read_is_exit_3_and_names_file_and_line(state, gpu, where, verb):
    path = user_policy() if where == "user" else state / "policy.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"ceilings": {\n "day_usd": -5}}')
    refused = gpu("policy", *verb)
    assert refused.exit_code == 3 and refused.error["code"] == "policy_missing"
    assert "policy.json:2: /ceilings/day_usd is -5, allowed: 0 or more" in refused.error["message"]


def test_a_missing_policy_is_exit_3_and_names_gpu_init_which_brings_it_back(state, gpu):
    (state / "policy.json").unlink()
    refused = gpu(*ASK)
    assert (refused.exit_code, refused.error["next_step"]) == (3, "gpu init")
    assert gpu("init").exit_code == 0
    assert gpu(*ASK).exit_code == 0


def test_gpu_init_again_keeps_a_policy_that_was_edited(state, gpu):
    edited = (state / "policy.json").read_text().replace('"day_usd": 20', '"day_usd": 1')
    (state / "policy.json").write_text(edited)
    assert gpu("init").exit_code == 0
    assert (state / "policy.json").read_text() == edited


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--cost", "nan", "--rate", "1"), "--cost is nan"),
        (("--cost", "-1", "--rate", "1"), "--cost is -1"),
        (("--cost", "1", "--rate", "inf"), "--rate is inf"),
        (("--cost", "1", "--rate", "1", "--deadline", "soon"), "--deadline"),
        (("--cost", "1"), "--rate"),
        (("--cost", "1", "--rate", "1", "--job", "J-0001"), "not a job id"),
    ],
)
def test_what_is_no_number_or_no_job_id_is_a_usage_error(state, gpu, flags, what):
    refused = gpu("policy", "check", *flags, "--json")
    assert refused.exit_code == 2 and what in refused.error["message"]


def test_both_run_in_audit(state, gpu):
    assert gpu("policy", "show", "--mode", "audit").exit_code == 0
    assert gpu(*ASK, "--mode", "audit").exit_code == 0


# while a command goes on ---------------------------------------------------------------------------------------------


def test_a_policy_that_becomes_stricter_or_goes_while_a_command_runs_counts(state, tmp_path):
    context = Context(cwd=tmp_path, environ=dict(os.environ), clock=FakeClock(), system_policy=tmp_path / "none.json")
    op = context.operator
    assert op.policy().ceilings["day_usd"] == 20
    assert op.policy() is op.policy()
    write(user_policy(), {"ceilings": {"day_usd": 7}})
    assert op.policy().ceilings["day_usd"] == 7
    write(user_policy(), {"ceilings": {"day_usd": 6}})  # as long as the one before
    assert op.policy().ceilings["day_usd"] == 6
    user_policy().unlink()
    assert op.policy().ceilings["day_usd"] == 20
    (state / "policy.json").unlink()
    with pytest.raises(PolicyMissing):
        op.policy()
