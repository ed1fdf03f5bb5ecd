"""`gpu sentinel`: with a key and a project id, from anywhere; its receipt, its exit codes, what it never does."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from gpu_skills.clock import timestamp
from gpu_skills.errors import StateError
from gpu_skills.lifecycle import intents, machines
from gpu_skills.lifecycle.guard import decisions, receipts
from lifecycle.conftest import make_sandbox, rig
from rented import rent
from rented_cli import customer

__all__ = ["make_sandbox", "rig"]

HOUR = 3600


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory of no project."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    return place


@pytest.fixture
def world(gpu, rig, monkeypatch):
    def make(vendor: str = "vast"):
        r = rig(vendor)
        return r, customer(gpu, r, monkeypatch)

    return make


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_key_and_a_project_id_are_enough(world, elsewhere, vendor):
    r, call = world(vendor)
    rent(r, machine_class="job", hours=1, on_record=False)
    r.sandbox.advance(HOUR)
    words = ("sentinel", "--provider", vendor, "--project-id", r.project.project_id, "--json")
    result = call(*words, cwd=elsewhere)
    assert result.exit_code == 0, result.stderr
    done = result.document["pass"]
    assert [(m["action"], m["result"]) for m in done["machines"]] == [("stop", "stopped")] and done["complete"]
    r.sandbox.advance(25 * HOUR)
    done = call(*words, cwd=elsewhere).document["pass"]
    assert [m["result"] for m in done["machines"]] == ["destroyed"] and not r.burning()


def test_without_project_and_id_it_says_what_is_missing(world, elsewhere):
    _, call = world()
    result = call("sentinel", "--provider", "vast", "--json", cwd=elsewhere)
    assert result.exit_code == 2 and "--project-id" in result.error["message"]


def test_the_receipt_stands_with_the_user_and_where_it_was_asked_for(world, elsewhere):
    r, call = world()
    words = ("sentinel", "--provider", "vast", "--project-id", r.project.project_id, "--json")
    result = call(*words, "--receipt", str(elsewhere / "r.json"), cwd=elsewhere)
    own, asked = result.document["receipts"]
    assert Path(own).stat().st_mode & 0o777 == 0o600
    assert json.loads(Path(own).read_bytes()) == json.loads(Path(asked).read_bytes()) == result.document["pass"]
    account = result.document["pass"]["account"]
    assert receipts.why_not(receipts.read(own), "vast", account, r.project.project_id, r.clock.now()) is None


def test_a_receipt_that_cannot_be_written_fails_after_the_work_is_done(world, elsewhere):
    r, call = world()
    rent(r, hours=1, on_record=False)
    r.sandbox.advance(HOUR)
    words = ("sentinel", "--provider", "vast", "--project-id", r.project.project_id, "--json")
    result = call(*words, "--receipt", str(elsewhere / "no" / "r.json"), cwd=elsewhere)
    assert result.exit_code == 1 and result.error["code"] == "not_writable"
    assert not [e for e in r.sandbox.world.burning() if e["kind"] == "gpu"]


def test_audit_forbids_it_and_nothing_is_asked(world):
    r, call = world()
    result = call("sentinel", "--provider", "vast", "--mode", "audit", "--json")
    assert result.exit_code == 3 and r.calls("list") == 0


def test_an_account_that_cannot_be_listed_is_exit_5_and_a_receipt_that_says_so(world):
    r, call = world()
    assert call("sentinel", "--provider", "vast", "--json").exit_code == 0
    r.fault("500", "list", times=0)
    result = call("sentinel", "--provider", "vast", "--json")
    assert result.exit_code == 5
    account = str(r.reader.check_key())
    own = receipts.own_path(r.op.user_state, "vast", account, r.project.project_id)
    assert json.loads(own.read_bytes())["complete"] is False


@pytest.mark.parametrize("status", ["401", "403"])
def test_a_key_that_may_not_end_machines_is_exit_5_and_never_says_destroyed(world, status):
    r, call = world("runpod")
    rent(r, hours=1, on_record=False, keeps=False)
    r.sandbox.advance(HOUR)
    r.fault(status, "destroy", times=0)
    for words in ((), ("--json",)):
        result = call("sentinel", "--provider", "runpod", "--wait", "1m", *words)
        assert result.exit_code == 5
        assert "destroyed" not in result.stdout + result.stderr


def test_what_is_told_to_end_and_not_seen_to_is_exit_6(world):
    r, call = world()
    rent(r, machine_class="job", hours=1, on_record=False)
    r.sandbox.advance(HOUR)
    call("sentinel", "--provider", "vast")
    r.sandbox.advance(25 * HOUR)
    r.fault("destroy_again", "destroy", times=0)
    result = call("sentinel", "--provider", "vast", "--wait", "1m", "--json")
    assert result.exit_code == 6 and result.document["pass"]["machines"][0]["result"] == "terminating"


def test_newer_deadlines_come_from_a_file(world, tmp_path):
    r, call = world()
    machine = rent(r, hours=1, on_record=False)
    r.sandbox.advance(HOUR)
    file = tmp_path / "deadlines.json"
    file.write_text(json.dumps({machine.intent: timestamp(r.clock.now() + timedelta(hours=2))}))
    done = call("sentinel", "--provider", "vast", "--deadlines", str(file), "--json").document["pass"]
    assert done["machines"][0]["result"] == "none"
    r.sandbox.advance(2 * HOUR)
    done = call("sentinel", "--provider", "vast", "--deadlines", str(file), "--json").document["pass"]
    assert done["machines"][0]["result"] == "stopped"


@pytest.mark.parametrize("content", ["[]", '{"x": "tomorrow"}', '{"x": 5}', "{", '{"x": "2026-01-01T00:00:00"}'])
def test_a_file_of_deadlines_that_is_none_is_refused_before_anything_is_asked(world, tmp_path, content):
    r, call = world()
    file = tmp_path / "deadlines.json"
    file.write_text(content)
    result = call("sentinel", "--provider", "vast", "--deadlines", str(file), "--json")
    assert result.exit_code == 2 and r.calls("list") == 0


def test_in_the_project_its_records_follow(world):
    r, call = world()
    machine = rent(r, hours=1)
    r.sandbox.advance(HOUR)
    assert call("sentinel", "--provider", "vast").exit_code == 0
    assert machines.find(r.project, machine.id).status == "stopped"
    r.sandbox.advance(25 * HOUR)
    assert call("sentinel", "--provider", "vast").exit_code == 0
    assert machines.find(r.project, machine.id).status == "destroyed" and not r.burning()


def test_broken_records_do_not_keep_it_from_ending_what_is_due(world):
    r, call = world()
    rent(r, hours=1)
    r.sandbox.advance(HOUR)
    r.project.path("machines.json").write_text("{ not json")
    result = call("sentinel", "--provider", "vast", "--json")
    assert result.exit_code == 0 and "without the records" in result.stderr
    assert result.document["pass"]["machines"][0]["result"] == "stopped"


def test_a_shorter_storage_grace_is_taken_at_its_word(world):
    r, call = world()
    rent(r, machine_class="job", hours=1)
    r.sandbox.advance(HOUR)
    call("sentinel", "--provider", "vast", "--storage-grace", "1h")
    r.sandbox.advance(HOUR)
    assert call("sentinel", "--provider", "vast", "--storage-grace", "1h").exit_code == 0 and not r.burning()


def test_people_read_what_was_done_and_what_to_do_before_a_disk_goes(world):
    r, call = world()
    machine = rent(r, hours=1)
    r.sandbox.advance(HOUR)
    result = call("sentinel", "--provider", "vast")
    assert machine.host in result.stdout and "pull what is needed before" in result.stdout


def test_a_journal_that_breaks_in_the_middle_keeps_no_pass_from_its_end_and_its_receipt(world, monkeypatch):
    r, call = world()
    rent(r, hours=1)
    r.sandbox.advance(HOUR)
    begin = intents.begin

    def broken(*args, **more):
        raise StateError(file="journal.jsonl", at="", problem="found no space left")

    monkeypatch.setattr(intents, "begin", broken)
    result = call("sentinel", "--provider", "vast", "--json")
    monkeypatch.setattr(intents, "begin", begin)
    assert result.exit_code == 0, result.stderr
    assert [(m["action"], m["result"]) for m in result.document["pass"]["machines"]] == [("stop", "stopped")]
    assert json.loads(Path(result.document["receipts"][0]).read_bytes())["complete"] is True
    assert "not on record" in result.stderr


@pytest.mark.parametrize("death", [KeyboardInterrupt, ValueError])
def test_a_pass_that_breaks_off_leaves_a_receipt_that_counts_for_nothing(world, monkeypatch, death):
    r, call = world()
    machine = rent(r, hours=1)
    r.sandbox.advance(HOUR)
    assert call("sentinel", "--provider", "vast", "--json").exit_code == 0
    own = receipts.own_path(r.op.user_state, "vast", str(r.reader.check_key()), r.project.project_id)
    stopped = json.loads(own.read_bytes())["stopped"]
    assert list(stopped) == [machine.instance_id]
    r.clock.sleep(60)

    def breaks(*args, **more):
        raise death

    monkeypatch.setattr(decisions, "decide", breaks)
    result = call("sentinel", "--provider", "vast", "--json")
    assert result.exit_code in (1, 130)
    left = json.loads(own.read_bytes())
    assert left["complete"] is False and left["ended_at"] == timestamp(r.clock.now()) and left["stopped"] == stopped
