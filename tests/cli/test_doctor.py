from __future__ import annotations

import json

import pytest

from fake_clock import FakeClock
from gpu_skills.lifecycle import labels
from lifecycle.conftest import make_sandbox, rig
from rented_cli import customer
from renting import play_machines
from run_by_hand import ByHand

__all__ = ["make_sandbox", "rig"]

both = pytest.mark.parametrize("vendor", ["vast", "runpod"])

pytestmark = pytest.mark.subprocess


@pytest.fixture
def project(tmp_path, gpu):
    gpu("init", "--jobs")
    return tmp_path


def deployment(project, **more):
    record = {"id": "dep_a", "provider": "ssh", "status": "ready", "cost_hr": 0.7}
    record |= {"test_generation": {"succeeded": True, "at": "2026-01-01T10:00:00Z"}, **more}
    (project / ".pi/gpu/deployments.json").write_text(json.dumps([record]))


def finding(result, what):
    return next((f for f in result.document["findings"] if f["what"] == what), None)


def at(text):
    from gpu_skills.clock import parse_timestamp

    return FakeClock(parse_timestamp(text))


def test_a_fresh_project_has_nothing_to_mend(project, gpu):
    assert gpu("doctor", "--json").document["problems"] == 0


def test_a_ready_deployment_idle_past_the_limit_is_shown_with_its_burn_and_only_proposed(project, gpu):
    deployment(project)
    result = gpu("doctor", "--json", clock=at("2026-01-01T12:00:00Z"))
    found = finding(result, "dep_a")
    assert found["verdict"] == "note" and result.exit_code == 0
    assert "2h00m" in found["text"] and "$0.70/h" in found["text"] and "$1.40 so far" in found["text"]
    assert "unless a batch" in found["next_step"]


def test_a_deployment_within_the_limit_or_with_a_recent_or_running_job_is_left_in_peace(project, gpu):
    deployment(project)
    assert finding(gpu("doctor", "--json", clock=at("2026-01-01T10:29:00Z")), "dep_a") is None
    line = {"id": "J-000001", "deployment_id": "dep_a", "provider": "ssh", "status": "running"}
    line |= {"started_at": "2026-01-01T11:50:00Z", "ts": "2026-01-01T11:50:00Z"}
    ledger = project / ".pi/gpu/jobs.jsonl"
    ledger.write_text(json.dumps(line) + "\n")
    assert finding(gpu("doctor", "--json", clock=at("2026-01-01T15:00:00Z")), "dep_a") is None
    ended = {**line, "status": "completed", "completed_at": "2026-01-01T14:45:00Z", "duration_s": 10500, "cost_usd": 2}
    with open(ledger, "a") as stream:
        stream.write(json.dumps({**ended, "artifacts": []}) + "\n")
    assert finding(gpu("doctor", "--json", clock=at("2026-01-01T15:00:00Z")), "dep_a") is None
    assert finding(gpu("doctor", "--json", clock=at("2026-01-01T15:30:00Z")), "dep_a") is not None


def test_records_that_break_a_rule_are_problems_with_their_place(project, gpu):
    deployment(project, status="ready", test_generation=None)
    result = gpu("doctor", "--json")
    assert result.exit_code == 1
    assert "deployments.json:1" in finding(result, "deployments.json")["text"]
    (project / ".pi/gpu/jobs.jsonl").write_text("{not json\n")
    assert finding(gpu("doctor", "--json"), "jobs.jsonl")["next_step"] == "gpu ledger verify"


def test_everything_else_is_still_looked_at_when_one_record_is_damaged(project, gpu):
    assert gpu("job", "run", "--", "echo x > $GPU_OUTPUT_DIR/a").exit_code == 0
    job = project / ".pi/gpu/jobs/J-000001"
    (job / "collected.json").write_text("[]")
    assert finding(gpu("doctor", "--json"), "J-000001")["verdict"] == "problem"
    (project / ".pi/gpu/machines.json").write_text("{")
    result = gpu("doctor", "--json")
    assert result.exit_code == 1 and result.document["problems"] == 2
    assert finding(result, "machines.json") and finding(result, "J-000001")


def test_jobs_of_a_machine_whose_record_is_gone_are_shown_as_last_seen_until_it_is_back(project, gpu):
    assert gpu("job", "run", "--detach", "--", "sleep 60").exit_code == 0
    path = project / ".pi/gpu/machines.json"
    path.write_text("[]")
    listed = gpu("job", "ls", "--json")
    assert listed.document["jobs"][0]["state"] == "running" and "shown as last seen" in listed.stderr
    assert gpu("job", "cancel", "--json").error["next_step"] == "gpu setup"
    assert gpu("setup").exit_code == 0
    assert gpu("job", "cancel", "--json").document["state"] == "cancelled"


# gpu doctor --notify -----------------------------------------------------------------------------------------------


def test_without_targets_it_says_that_nobody_is_told(project, gpu):
    result = gpu("doctor", "--notify", "--json")
    assert (result.exit_code, finding(result, "notify")["verdict"]) == (0, "note")


@pytest.fixture
def inbox():
    """(port, bodies) of a channel that takes messages."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_address[1], bodies
    server.shutdown()
    thread.join()
    server.server_close()


def notify(project, *targets):
    policy = project / ".pi/gpu/policy.json"
    policy.write_text(json.dumps({**json.loads(policy.read_text()), "notify": list(targets)}))


def test_every_target_gets_a_test_message_and_is_reported(project, gpu, inbox):
    port, bodies = inbox
    notify(
        project,
        {"url": f"json://127.0.0.1:{port}/in", "name": "hook", "events": ["recovery"]},
        {"url": "json://127.0.0.1:9/in", "name": "dead"},
        {"url": "ntfys://${NTFY_TOKEN}@127.0.0.1/lab", "name": "phone"},
    )
    results = [gpu("doctor", "--notify", "--json") for _ in range(2)]
    assert [body["title"] for body in bodies] == ["gpu: a test"] * 2, "a test may be repeated"
    assert [(f["what"], f["verdict"]) for f in results[0].document["findings"]] == [
        ("notify hook", "ok"),
        ("notify dead", "problem"),
        ("notify phone", "problem"),
    ]
    assert results[0].exit_code == 1
    assert "NTFY_TOKEN is neither in the environment" in finding(results[0], "notify phone")["text"]


def test_whoever_looks_tells_of_a_deadline_that_is_near_once_and_in_audit_nobody(project, gpu, inbox):
    port, bodies = inbox
    notify(project, {"url": f"json://127.0.0.1:{port}/in"})
    record = {"id": "m_0123456789", "provider": "vast", "instance_id": "7", "status": "ready", "rate_usd_hr": 0.5}
    record |= {"created_at": "2026-01-01T10:00:00Z", "deadline_at": "2026-01-01T12:00:00Z"}
    (project / ".pi/gpu/machines.json").write_text(json.dumps([record]))
    near = at("2026-01-01T11:40:00Z")
    assert gpu("--mode", "audit", "status", clock=near).exit_code == 0
    assert bodies == []
    for _ in range(2):
        assert gpu("status", clock=near).exit_code == 0
    assert [body["title"] for body in bodies] == ["gpu: m_0123456789 has used 80 % of its time"]
    assert "left: 20m00s" in bodies[0]["message"]


# accounts -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def world(gpu, rig, monkeypatch):
    def make(vendor: str = "vast"):
        r = rig(vendor, containers=False)
        return r, customer(gpu, r, monkeypatch)

    return make


def everything_written(r):
    # The pace at which a provider is asked is kept for all commands; it is no record.
    places = (r.project.state, r.op.user_state / "accounts", r.op.user_state / "runs")
    return {path: path.read_bytes() for place in places for path in place.rglob("*.json*") if path.is_file()}


@both
def test_an_account_is_shown_beside_the_records_and_nothing_is_changed(world, vendor):
    r, call = world(vendor)
    hand = ByHand(r).upto("close")
    hand.ready()
    before = everything_written(r)
    result = call("doctor", vendor, "--json")
    assert result.exit_code == 0, result.stdout
    assert "lasts" in finding(result, f"{vendor} credit")["text"]
    assert "1 machine of this project" in finding(result, f"{vendor} machines")["text"]
    assert finding(result, hand.machine_id)["verdict"] == "ok"
    assert finding(result, f"{vendor} fuse")["next_step"] == f"gpu sentinel --provider {vendor}"
    assert call("doctor", vendor, "--mode", "audit", "--json").exit_code == 0
    assert everything_written(r) == before


@both
def test_what_reconcile_would_mend_is_a_problem_with_that_command(world, vendor):
    r, call = world(vendor)
    hand = ByHand(r).upto("create")
    result = call("doctor", vendor, "--json")
    assert result.exit_code == 1
    assert finding(result, hand.machine_id)["next_step"] == f"gpu reconcile --provider {vendor}"
    assert call("reconcile").exit_code == 0
    assert call("doctor", vendor, "--json").exit_code == 0
    r.writer.stop(hand.machine.instance_id)
    r.clock.sleep(60)
    assert "on record as booting" in finding(call("doctor", vendor, "--json"), hand.machine_id)["text"]


@both
@pytest.mark.parametrize("lost", ["registry", "journal and registry"])
def test_a_machine_of_this_project_that_is_on_no_record_is_a_problem_with_the_command_that_takes_it_back(
    world, vendor, lost
):
    r, call = world(vendor)
    hand = ByHand(r).upto("close")
    hand.ready()
    instance = hand.machine.instance_id
    for name in ["machines.json", *(["journal.jsonl"] if "journal" in lost else [])]:
        r.project.path(name).unlink()
    result = call("doctor", vendor, "--json")
    seen = finding(result, f"{vendor} {instance}")
    assert result.exit_code == 1 and seen["verdict"] == "problem"
    assert seen["next_step"] == f"gpu reconcile --provider {vendor} --adopt"
    play_machines(r)
    assert call("reconcile", "--provider", vendor, "--adopt", connect=r.op.connect).exit_code == 0
    assert call("doctor", vendor, "--json").exit_code == 0


@both
def test_machines_of_others_on_the_account_are_told_as_theirs_and_left_alone(world, vendor):
    r, call = world(vendor)
    hand = ByHand(r)
    hand.label = str(labels.Label("p-other", hand.intent, hand.deadline_at))
    hand.make_unrecorded()
    before = dict(r.sandbox.world.mutating_calls)
    result = call("doctor", vendor, "--json")
    assert result.exit_code == 0 and finding(result, f"{vendor} others")["verdict"] == "note"
    assert "1 instance of project p-other" in finding(result, f"{vendor} others")["text"]
    assert call("reconcile", "--adopt").exit_code == 0 and dict(r.sandbox.world.mutating_calls) == before


@both
def test_an_account_that_cannot_be_listed_is_a_problem(world, vendor):
    r, call = world(vendor)
    r.fault("garbage", call="list", times=50)
    result = call("doctor", vendor, "--json")
    assert result.exit_code == 1 and finding(result, vendor)["verdict"] == "problem"


@both
def test_leaving_lists_what_still_bills_and_is_clear_when_nothing_does(world, vendor):
    r, call = world(vendor)
    result = call("doctor", "--leaving", "--json")
    assert result.exit_code == 0 and result.document["leaving"] == []
    hand = ByHand(r).upto("close")
    hand.ready()
    rows = call("doctor", "--leaving", "--json").document["leaving"]
    assert [(row["what"], row["next_step"]) for row in rows] == [
        ("machine", f"gpu machine destroy {hand.machine_id}"),
        ("reservation", "gpu reconcile"),
    ]
    r.writer.stop(hand.machine.instance_id)
    r.clock.sleep(60)
    call("reconcile")
    result = call("doctor", "--leaving", "--json")
    assert result.exit_code == 1 and result.document["leaving"][0]["what"] == "stopped"
    assert 0 < result.document["usd_hr"] < 0.1
    assert f"gpu machine destroy {hand.machine_id}" in call("doctor", "--leaving").stdout


def test_leaving_says_so_when_an_account_cannot_be_listed(world):
    r, call = world()
    hand = ByHand(r).upto("close")
    r.fault("500", call="list", times=50)
    result = call("doctor", "--leaving", "--json")
    assert result.exit_code == 1
    assert [row["what"] for row in result.document["leaving"]][:2] == ["account", "machine"]
    assert hand.machine_id in result.document["leaving"][1]["text"]
