"""`gpu machine …` at both vendors: what it shows, what it refuses, what it says when something is not certain."""

from __future__ import annotations

import json
import shlex
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import intents, labels, machines
from gpu_skills.lifecycle.guard import fuse
from lifecycle.conftest import make_sandbox, rig
from rented import rent
from rented_cli import customer
from renting import by_plan

__all__ = ["make_sandbox", "rig"]

VENDORS = pytest.mark.parametrize("vendor", ["vast", "runpod"])
HOUR = 3600


@pytest.fixture
def world(gpu, rig, monkeypatch):
    def make(vendor: str = "vast", **options):
        r = rig(vendor, **options)
        return r, customer(gpu, r, monkeypatch)

    return make


def a_job(r, machine, *, running: bool = False, files: list | None = None, collected: bool = False) -> str:
    """One of the machine, as the ledger and its folder have it."""
    ledger = r.op.ledger
    job = ledger.new_job_id()
    ledger.start({"id": job, "provider": r.vendor, "machine_id": machine.id, "started_at": timestamp(r.clock.now())})
    folder = JobFolder(r.project, job)
    folder.write("accepted", {"at": timestamp(r.clock.now()), "machine_id": machine.id})
    if files is not None:
        folder.write("manifest", {"final": True, "files": files, "skipped": [], "at": timestamp(r.clock.now())})
    if collected:
        folder.write("collected", {"final": True, "at": timestamp(r.clock.now()), "destination": "x", "files": 1})
    if not running:
        ledger.finish({"id": job, "status": "succeeded", "completed_at": timestamp(r.clock.now()), "duration_s": 1})
    return job


# looking ------------------------------------------------------------------------------------------------------------


@VENDORS
def test_ls_adds_up_what_burns_now_storage_of_stopped_ones_included(world, vendor):
    r, call = world(vendor)
    one, two = rent(r, number=1), rent(r, number=2)
    document = call("machine", "ls", "--json").document
    assert document["burn_usd_hr"] == pytest.approx(float(one.rate_usd_hr + two.rate_usd_hr), abs=1e-6)
    call("machine", "stop", two.id)
    rows = {m["id"]: m for m in call("machine", "ls", "--json").document["machines"]}
    assert rows[two.id]["status"] == "stopped"
    assert 0 < rows[two.id]["burn_usd_hr"] == rows[two.id]["storage_usd_hr"] < rows[one.id]["burn_usd_hr"]
    assert rows[one.id]["deadline_at"] == one.deadline_at
    text = call("machine", "ls").stdout
    assert one.deadline_at in text and "BURN/H" in text


@VENDORS
def test_show_puts_the_record_beside_what_the_provider_says(world, vendor):
    r, call = world(vendor)
    machine = rent(r)
    document = call("machine", "show", machine.id, "--json").document
    assert document["seen"]["status"] == "running" and document["seen"]["is_ours"]
    assert document["seen"]["deadline_at"] == machine.deadline_at and document["leaving"] is None
    call("machine", "destroy", machine.id, "--wait", "0s")
    document = call("machine", "show", machine.id, "--json").document
    assert document["leaving"]["taken_at"] and [i["action"] for i in document["open_intents"]] == ["destroy"]


def test_show_has_the_receipt_of_the_fuse(world):
    r, call = world()
    machine = rent(r)
    assert call("machine", "show", machine.id, "--json").document["fuse"] is None
    assert "fuse: no receipt on record" in call("machine", "show", machine.id).stdout
    ends, armed = parse_timestamp(machine.deadline_at), parse_timestamp(machine.ready_at)
    receipt = fuse.Receipt(machine.intent, ends, armed, "proven", True, "stop", "boot").to_record()
    machines.update(r.project, machine.id, lambda m: replace(m, extra={**m.extra, "fuse": receipt}))
    assert call("machine", "show", machine.id, "--json").document["fuse"] == receipt
    text = call("machine", "show", machine.id).stdout
    assert f"fuse of {machine.intent}: armed {machine.ready_at}, stops it {machine.deadline_at}" in text
    assert "its key to do so is proven" in text


@pytest.mark.parametrize(
    "edit",
    [{"intent": "p" + "9" * 16}, {"key": "\x1b[31m"}, {"armed_at": 5}, {"deadline_at": "soon"}, {"on_expiry": []}],
)
def test_what_is_no_receipt_of_this_machine_is_shown_as_none(world, edit):
    r, call = world()
    machine = rent(r)
    now = r.clock.now()
    receipt = fuse.Receipt(machine.intent, now, now, "proven", True, "stop", "boot").to_record() | edit
    machines.update(r.project, machine.id, lambda m: replace(m, extra={"fuse": receipt}))
    assert call("machine", "show", machine.id, "--json").document["fuse"] is None


def test_show_works_while_the_provider_does_not(world):
    r, call = world()
    machine = rent(r)
    r.fault("500", "list", times=0)
    result = call("machine", "show", machine.id, "--json")
    assert result.exit_code == 0 and result.document["seen"] is None and result.document["not_seen_because"]


def test_show_says_that_a_machine_is_not_ours_any_more(world):
    r, call = world()
    machine = rent(r)
    (instance,) = r.sandbox.world.instances.values()
    instance.label = "somebody's"
    assert "does not carry our label but somebody's" in call("machine", "show", machine.id).stdout


@pytest.mark.parametrize("verb", ["show", "stop", "start", "destroy", "protect"])
def test_a_machine_that_is_not_on_record_is_a_usage_error_that_lists_those_that_are(world, verb):
    r, call = world()
    machine = rent(r)
    result = call("machine", verb, "m_nothere", "--json")
    assert result.exit_code == 2 and machine.id in result.error["message"]


def test_a_host_of_ones_own_is_not_for_these_verbs(world):
    r, call = world()
    machines.save(r.project, machines.Machine(id="m_own", provider="ssh", host="box", status="ready"))
    for words in (("stop",), ("destroy",), ("protect",), ("extend", "--by", "1h"), ("hold", "--for", "1h")):
        verb, *more = words
        assert call("machine", verb, "m_own", *more, "--json").exit_code == 3


def test_reading_verbs_work_in_audit_and_the_others_do_not(world):
    r, call = world()
    machine = rent(r)
    assert call("machine", "show", machine.id, "--mode", "audit").exit_code == 0
    assert call("machine", "ls", "--mode", "audit").exit_code == 0
    for words in (("stop",), ("destroy",), ("start",), ("protect",), ("extend", "--by", "1h"), ("hold", "--off")):
        verb, *more = words
        assert call("machine", verb, machine.id, *more, "--mode", "audit", "--json").exit_code == 3
    assert r.calls("destroy") + r.calls("state") == 0


# stopping -----------------------------------------------------------------------------------------------------------


@VENDORS
def test_stop_says_what_the_disk_costs_from_now_on(world, vendor):
    r, call = world(vendor)
    machine = rent(r)
    result = call("machine", "stop", machine.id)
    assert result.exit_code == 0 and "its storage costs $" in result.stdout
    assert not [e for e in r.sandbox.world.burning() if e["kind"] in ("gpu", "compute")]


def test_a_stop_that_is_not_seen_is_exit_6_and_burns_on(world):
    r, call = world()
    machine = rent(r)
    r.fault("500", "state", times=0)
    result = call("machine", "stop", machine.id, "--wait", "1m", "--json")
    assert result.exit_code == 6 and result.error["may_be_billing"]
    (row,) = call("machine", "ls", "--json").document["machines"]
    assert row["status"] == "stopping" and row["burn_usd_hr"] > 0.1 and row["conditions"] == ["stop_failed"]


def test_stop_is_refused_while_a_job_runs(world):
    r, call = world()
    machine = rent(r)
    job = a_job(r, machine, running=True)
    result = call("machine", "stop", machine.id, "--json")
    assert result.exit_code == 3 and result.error["code"] == "job_running" and job in result.error["message"]


def test_stop_without_a_pull_is_refused_where_the_disk_does_not_survive(world):
    r, call = world("runpod")
    machine = rent(r, keeps=False)
    job = a_job(r, machine, files=[{"path": "out.bin", "bytes": 7, "sha256": "0" * 64}])
    result = call("machine", "stop", machine.id, "--json")
    assert result.exit_code == 3 and result.error["code"] == "not_collected" and job in result.error["message"]
    assert r.burning()


# destroying ---------------------------------------------------------------------------------------------------------


@VENDORS
def test_destroy_is_done_when_the_machine_is_proven_gone(world, vendor):
    r, call = world(vendor)
    machine = rent(r)
    result = call("machine", "destroy", machine.id, "--json")
    assert result.exit_code == 0 and result.document["machine"]["status"] == "destroyed"
    assert result.document["machine"]["burn_usd_hr"] == 0 and not r.burning()
    assert call("machine", "destroy", machine.id).exit_code == 0, "again is safe"


@pytest.mark.parametrize("command", ["gpu machine destroy {}", "gpu destroy"])
def test_who_waits_for_the_end_hears_of_each_look_and_a_program_does_not(world, command):
    r, call = world()
    machine = rent(r)
    r.fault("500", "destroy", times=1)
    spoken = [line for line in typed(call, command.format(machine.id)).stderr.splitlines() if "so far)" in line]
    assert all(line.startswith(f"{machine.id}: ") for line in spoken) and len(spoken) >= 4, spoken
    assert "500" in spoken[0] and "took the delete" in spoken[1]
    assert "does not show it any more, 1 look in a row" in spoken[2]
    two = rent(r, number=2)
    assert "so far" not in typed(call, command.format(two.id), "--json").stderr


def test_the_end_of_a_held_machine_says_that_it_was_held(world):
    r, call = world()
    machine = rent(r)
    until = timestamp(r.clock.now() + timedelta(hours=1))
    machines.save(r.project, replace(machine, extra={**machine.extra, "held_until": until}))
    done = typed(call, "gpu destroy")
    assert done.exit_code == 0 and not r.burning()
    assert len([line for line in done.stderr.splitlines() if f"{machine.id} is held until " in line]) == 1


def test_not_yet_proven_is_exit_6_and_reads_terminating(world):
    r, call = world()
    machine = rent(r)
    result = call("machine", "destroy", machine.id, "--wait", "0s", "--json")
    assert result.exit_code == 6 and result.error["code"] == "teardown_incomplete"
    assert machines.find(r.project, machine.id).status == "terminating"


@pytest.mark.parametrize("fault", ["500", "failure_200", "html"])
def test_a_delete_that_is_not_taken_is_exit_5_and_never_called_done(world, fault):
    r, call = world()
    machine = rent(r)
    r.fault(fault, "destroy", times=0)
    for words in ((), ("--json",)):
        result = call("machine", "destroy", machine.id, "--wait", "1m", *words)
        assert result.exit_code == 5, result
        assert "destroyed" not in result.stdout + result.stderr
    assert r.burning()


@pytest.mark.parametrize("status", ["401", "403"])
@VENDORS
def test_a_key_that_may_not_destroy_is_exit_5_and_never_called_done(world, vendor, status):
    r, call = world(vendor)
    machine = rent(r)
    r.fault(status, "destroy", times=0)
    result = call("machine", "destroy", machine.id)
    assert result.exit_code == 5 and "destroyed" not in result.stdout + result.stderr
    assert "auth_rejected" in result.stderr and r.burning()


def test_uncollected_outputs_are_named_with_files_bytes_and_the_command(world):
    r, call = world()
    machine = rent(r)
    files = [{"path": f"part{n}.bin", "bytes": 1000, "sha256": "0" * 64} for n in range(3)]
    job = a_job(r, machine, files=files)
    result = call("machine", "destroy", machine.id, "--yes", "--json")
    assert result.exit_code == 3 and result.error["code"] == "not_collected"
    assert f"{job}: 3 files, 3.0 kB" in result.error["message"] and result.error["next_step"] == f"gpu job pull {job}"
    assert [f["path"] for f in result.error["details"]["outputs"][job]] == ["part0.bin", "part1.bin", "part2.bin"]
    assert r.calls("destroy") == 0 and JobFolder(r.project, job).read("abandoned") is None


def test_outputs_are_given_up_by_naming_their_job_and_that_is_recorded(world):
    r, call = world()
    machine = rent(r)
    one = a_job(r, machine, files=[{"path": "a", "bytes": 1, "sha256": "0" * 64}])
    two = a_job(r, machine, files=[{"path": "b", "bytes": 1, "sha256": "0" * 64}])
    assert call("machine", "destroy", machine.id, "--abandon-outputs", one, "--json").exit_code == 3
    assert JobFolder(r.project, one).read("abandoned") is None, "nothing was done"
    result = call("machine", "destroy", machine.id, "--abandon-outputs", one, "--abandon-outputs", two)
    assert result.exit_code == 0 and not r.burning()
    assert JobFolder(r.project, one).read("abandoned")["machine_id"] == machine.id


@pytest.mark.parametrize("command", ["gpu machine destroy {}", "gpu destroy"])
def test_a_machines_id_gives_up_what_no_record_names_and_no_job_that_one_does(world, command):
    r, call = world()
    machine, other = rent(r), rent(r, number=2, machine_class="job")
    machines.update(r.project, machine.id, lambda m: replace(m, extra={**m.extra, "adopted_at": m.created_at}))
    refused = typed(call, command.format(machine.id), "--json")
    assert refused.exit_code == 3 and refused.error["code"] == "not_collected"
    assert typed(call, command.format(machine.id), "--json", "--abandon-outputs", "m_nothere").exit_code == 1
    job = a_job(r, machine, files=[{"path": "a", "bytes": 1, "sha256": "0" * 64}])
    still = typed(call, command.format(machine.id), "--json", "--abandon-outputs", machine.id)
    assert still.exit_code == 3 and job in still.error["message"], "a job on record is named itself"
    both = ("--abandon-outputs", machine.id, "--abandon-outputs", job)
    assert typed(call, command.format(machine.id), "--json", *both).exit_code == 0
    assert machines.find(r.project, machine.id).status == "destroyed"
    assert machines.find(r.project, other.id).status == "ready"


def test_a_job_nobody_knows_cannot_be_given_up(world):
    r, call = world()
    machine = rent(r)
    assert call("machine", "destroy", machine.id, "--abandon-outputs", "J-999999", "--json").exit_code == 1
    assert r.calls("destroy") == 0


def test_a_job_that_runs_on_a_machine_that_does_not_answer_has_to_be_given_up_by_name(world):
    r, call = world()
    machine = rent(r)
    job = a_job(r, machine, running=True)
    result = call("machine", "destroy", machine.id, "--json")
    assert result.exit_code == 3 and job in result.error["message"]
    assert call("machine", "destroy", machine.id, "--abandon-outputs", job).exit_code == 0


def test_destroy_waits_for_a_pull_that_is_under_way(world):
    r, call = world()
    machine = rent(r)
    job = a_job(r, machine, files=[{"path": "a", "bytes": 1, "sha256": "0" * 64}])
    folder = JobFolder(r.project, job)
    begun = threading.Event()

    def pull() -> None:
        with folder.collecting():
            begun.set()
            time.sleep(0.3)
            assert r.calls("destroy") == 0
            folder.write("collected", {"final": True, "destination": "x"})

    pulling = threading.Thread(target=pull)
    pulling.start()
    begun.wait(5)
    assert call("machine", "destroy", machine.id).exit_code == 0 and not r.burning()
    pulling.join()


@pytest.mark.parametrize("words", [("destroy", "M"), ("stop", "M")], ids=" ".join)
def test_a_protected_machine_is_not_ended_by_a_command_alone_but_by_an_approval_that_names_it(world, words):
    r, call = world()
    one, two = rent(r, number=1), rent(r, number=2)
    for machine in (one, two):
        assert call("machine", "protect", machine.id).exit_code == 0
    verb = words[0]
    asked = call("machine", verb, two.id, "--json")
    assert asked.exit_code == 3 and asked.error["code"] == "machine_protected"
    plan = asked.error["details"]["plan"]
    assert call("approve", plan, "--statement", "yes, two").exit_code == 0
    assert call("machine", verb, one.id, "--json").exit_code == 3, "another one was named"
    assert r.calls("destroy") + r.calls("state") == 0
    assert call("machine", verb, two.id, "--json").exit_code == 0
    assert machines.find(r.project, one.id).status == "ready"


def test_yes_names_no_machine(world):
    r, call = world()
    machine = rent(r)
    call("machine", "protect", machine.id)
    result = call("machine", "destroy", machine.id, "--yes", "--json")
    assert result.exit_code == 3 and result.error["code"] == "machine_protected" and r.calls("destroy") == 0


def typed(call, line: str, *more: str):
    """A command as a message names it."""
    program, *words = shlex.split(line)
    assert program == "gpu"
    return call(*words, *more)


ENDS = pytest.mark.parametrize("command", ["gpu machine destroy {}", "gpu machine stop {}", "gpu destroy"])


@ENDS
def test_what_a_refusal_to_end_a_protected_machine_names_first_works_as_typed(world, command):
    r, call = world()
    machine = rent(r)
    call("machine", "protect", machine.id)
    refused = typed(call, command.format(machine.id), "--json")
    assert refused.exit_code == 3 and refused.error["code"] == "machine_protected"
    off, _ = refused.error["next_step"].split("; or, for this once: ")
    assert off == f"gpu machine protect {machine.id} --off"
    needs_a_yes = typed(call, off, "--json")
    assert needs_a_yes.exit_code == 4
    (approve,) = needs_a_yes.error["details"]["commands"]
    assert typed(call, approve).exit_code == 0 and typed(call, off).exit_code == 0
    assert typed(call, command.format(machine.id), "--json").exit_code == 0


@ENDS
def test_what_a_refusal_to_end_a_protected_machine_names_for_once_works_as_typed_once(world, command):
    r, call = world()
    machine = rent(r)
    call("machine", "protect", machine.id)
    refused = typed(call, command.format(machine.id), "--json")
    _, approve = refused.error["next_step"].split("; or, for this once: ")
    assert typed(call, approve).exit_code == 0
    result = typed(call, command.format(machine.id), "--json")
    assert result.exit_code == 0 and machines.find(r.project, machine.id).status in ("destroyed", "stopped")
    if "stop" in command:
        machines.update(r.project, machine.id, lambda m: replace(m, status="ready"))
        assert typed(call, command.format(machine.id), "--json").error["code"] == "machine_protected"


@pytest.mark.parametrize("verb", ["destroy", "stop"])
def test_what_else_stands_in_the_way_of_a_protected_end_is_told_first_and_uses_no_approval_up(world, verb):
    r, call = world("runpod")
    machine = rent(r, keeps=False)
    call("machine", "protect", machine.id)
    plan = call("machine", verb, machine.id, "--json").error["details"]["plan"]
    assert call("approve", plan, "--statement", "yes").exit_code == 0
    job = a_job(r, machine, files=[{"path": "out.bin", "bytes": 7, "sha256": "0" * 64}])
    for _ in range(2):
        refused = call("machine", verb, machine.id, "--json")
        assert refused.exit_code == 3 and refused.error["code"] == "not_collected"
    shown = call("approve", plan, "--show", "--json").document
    assert shown["approval"] is not None and shown["used"] is None
    JobFolder(r.project, job).write("collected", {"final": True, "destination": "x"})
    assert call("machine", verb, machine.id, "--json").exit_code == 0


def test_a_protected_machine_can_be_asked_for_again_when_the_first_yes_is_over(world):
    r, call = world()
    machine = rent(r)
    call("machine", "protect", machine.id)
    first = call("machine", "destroy", machine.id, "--json").error["details"]["plan"]
    call("approve", first, "--statement", "yes")
    r.clock.sleep(HOUR + 60)
    second = call("machine", "destroy", machine.id, "--json").error["details"]["plan"]
    assert second != first
    assert call("approve", second, "--statement", "yes, still").exit_code == 0
    assert call("machine", "destroy", machine.id).exit_code == 0 and not r.burning()


@pytest.mark.parametrize("later", [60, HOUR + 60])
def test_a_command_that_died_between_using_the_yes_and_the_end_stands_in_nobodys_way(world, monkeypatch, later):
    r, call = world()
    machine = rent(r)
    call("machine", "protect", machine.id)
    plan = call("machine", "destroy", machine.id, "--json").error["details"]["plan"]
    call("approve", plan, "--statement", "yes")

    class Died(BaseException):
        pass

    def die(*args, **more):
        raise Died

    with monkeypatch.context() as dying:
        dying.setattr(intents, "begin", die)
        with pytest.raises(Died):
            call("machine", "destroy", machine.id)
    assert list((r.op.user_state / "uses").glob("a_*.json")), "it was used"
    r.clock.sleep(later)
    if later > HOUR:
        refused = call("machine", "destroy", machine.id, "--json")
        assert refused.error["code"] == "machine_protected"
        assert call("approve", refused.error["details"]["plan"], "--statement", "yes").exit_code == 0
    assert call("machine", "destroy", machine.id).exit_code == 0 and not r.burning()


def test_an_end_that_began_with_a_yes_goes_on_without_another(world):
    r, call = world()
    machine = rent(r)
    call("machine", "protect", machine.id)
    plan = call("machine", "destroy", machine.id, "--json").error["details"]["plan"]
    call("approve", plan, "--statement", "yes")
    assert call("machine", "destroy", machine.id, "--wait", "0s").exit_code == 6
    r.clock.sleep(2 * HOUR)
    assert call("machine", "destroy", machine.id).exit_code == 0 and not r.burning()


def test_protection_goes_with_an_approval_only(world):
    r, call = world()
    machine = rent(r)
    call("machine", "protect", machine.id)
    refused = call("machine", "protect", machine.id, "--off", "--json")
    assert refused.exit_code == 4
    name = refused.error["details"]["plan"]
    assert call("approve", name, "--statement", "it may go", "--json").exit_code == 0
    result = call("machine", "protect", machine.id, "--off", "--json")
    assert result.exit_code == 0 and result.document["machine"]["conditions"] == []
    call("machine", "protect", machine.id)
    assert call("machine", "protect", machine.id, "--off", "--json").exit_code == 4, "one yes, one use"


def test_what_is_not_ours_is_never_destroyed_or_stopped(world):
    r, call = world()
    machine = rent(r)
    (instance,) = r.sandbox.world.instances.values()
    instance.label = "somebody's"
    for verb in ("destroy", "stop"):
        result = call("machine", verb, machine.id, "--json")
        assert result.exit_code == 3 and result.error["code"] == "not_owned"
    assert r.calls("destroy") + r.calls("state") == 0


# starting and extending: the price and the yes ------------------------------------------------------------------------


def test_start_and_extend_without_a_yes_end_at_once_with_what_to_show(world):
    r, call = world()
    one, two = by_plan(r, rent(r, number=1)), rent(r, number=2)
    call("machine", "stop", one.id)
    for words in (("start", one.id, "--for", "2h"), ("extend", two.id, "--by", "2h")):
        result = call("machine", *words, "--json")
        assert result.exit_code == 4 and result.error["code"] == "approval_missing"
        text = result.error["details"]["text"]
        assert "worst case: $" in text and "rate: at most $" in text and "deadline: billing ends" in text
    assert len([i for i in intents.read(r.project).values() if i.action in ("start", "extend")]) == 0


def test_extend_of_what_does_not_run_and_start_of_what_does_are_refused_unpriced(world):
    r, call = world()
    machine = rent(r)
    assert call("machine", "start", machine.id, "--for", "2h", "--yes", "--json").exit_code == 3
    call("machine", "stop", machine.id)
    result = call("machine", "extend", machine.id, "--by", "1h", "--yes", "--json")
    assert result.exit_code == 3 and result.error["next_step"] == f"gpu machine start {machine.id}"


def test_an_extension_beyond_a_ceiling_is_refused(world):
    r, call = world()
    machine = rent(r)
    result = call("machine", "extend", machine.id, "--by", "40h", "--yes", "--json")
    assert result.exit_code == 3 and not approvals_of(r)
    words = result.error["next_step"].split()
    assert words[:-1] == ["gpu", "machine", "extend", machine.id, "--by"]
    assert call(*words[1:], "--json").error["code"] == "approval_missing", "what is named is not too long"


def approvals_of(r) -> list[dict]:
    path = r.project.path("approvals.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# holding ------------------------------------------------------------------------------------------------------------


def test_a_hold_needs_to_know_for_how_long(world):
    r, call = world()
    machine = rent(r)
    assert call("machine", "hold", machine.id, "--json").exit_code == 2
    assert call("machine", "hold", machine.id, "--for", "1h", "--off", "--json").exit_code == 2


def test_the_end_of_a_hold_is_on_record(world):
    r, call = world()
    machine = rent(r)
    until = timestamp(r.clock.now() + timedelta(hours=1))
    machines.update(r.project, machine.id, lambda m: replace(m, extra={**m.extra, "held_until": until}))
    assert call("machine", "ls", "--json").document["machines"][0]["held_until"] == until
    assert call("machine", "hold", machine.id, "--off", "--json").document["machine"]["held_until"] is None
    assert labels.parse(machine.label) is not None and parse_timestamp(until)
