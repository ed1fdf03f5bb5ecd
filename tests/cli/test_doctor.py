from __future__ import annotations

import json

import pytest

from fake_clock import FakeClock

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


def test_every_target_gets_a_test_message_and_is_reported(project, gpu):
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
    policy = project / ".pi/gpu/policy.json"
    targets = [
        {"url": f"json://127.0.0.1:{server.server_address[1]}/in", "name": "hook", "events": ["recovery"]},
        {"url": "json://127.0.0.1:9/in", "name": "dead"},
        {"url": "ntfys://${NTFY_TOKEN}@127.0.0.1/lab", "name": "phone"},
    ]
    policy.write_text(json.dumps({**json.loads(policy.read_text()), "notify": targets}))
    try:
        results = [gpu("doctor", "--notify", "--json") for _ in range(2)]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [body["title"] for body in bodies] == ["gpu: a test"] * 2, "a test may be repeated"
    assert [(f["what"], f["verdict"]) for f in results[0].document["findings"]] == [
        ("notify hook", "ok"),
        ("notify dead", "problem"),
        ("notify phone", "problem"),
    ]
    assert results[0].exit_code == 1
    assert "NTFY_TOKEN is neither in the environment" in finding(results[0], "notify phone")["text"]
