"""`gpu job finish`: the end of a job that no machine of ours reports."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from fake_clock import FakeClock

STARTED = "2026-03-10T12:00:00Z"


@pytest.fixture
def state(tmp_path, gpu):
    assert gpu("init").exit_code == 0
    return tmp_path / ".pi/gpu"


@pytest.fixture
def clock():
    return FakeClock(datetime(2026, 3, 10, 12, 0, tzinfo=UTC))


@pytest.fixture
def finish(gpu, clock):
    return lambda *args: gpu("job", "finish", *args, "--json", clock=clock)


def start(gpu, clock, **more):
    line = {"status": "running", "started_at": STARTED, "provider": "vast", **more}
    return gpu("ledger", "append", "--json", stdin=json.dumps(line).encode(), clock=clock).document["lines"][0]["job"]


def deployment(state, cost_hr=1.2):
    record = {"id": "dep_a", "provider": "vast", "status": "error", "cost_hr": cost_hr}
    (state / "deployments.json").write_text(json.dumps([record]))


def test_duration_and_cost_are_computed_from_start_clock_and_the_rate_on_record(state, gpu, clock, finish):
    deployment(state)
    job = start(gpu, clock, deployment_id="dep_a", model="sdxl", inputs={"prompt": "x"})
    clock.advance(600)
    done = finish(job, "--status", "succeeded", "--artifact", "clip.mp4=s3://b/clip.mp4?v=1").document
    line = done["line"]
    assert (done["state"], line["status"], line["completed_at"]) == ("succeeded", "completed", "2026-03-10T12:10:00Z")
    assert (line["duration_s"], line["cost_usd"]) == (600, 0.2)
    assert line["artifacts"] == [{"name": "clip.mp4", "uri": "s3://b/clip.mp4?v=1"}]
    assert (line["model"], line["inputs"]) == ("sdxl", {"prompt": "x"})


def test_jobs_that_overlap_on_one_machine_share_its_time(state, gpu, clock, finish):
    machine = {"id": "m_1", "provider": "ssh", "status": "ready", "rate_usd_hr": 3.6}
    (state / "machines.json").write_text(json.dumps([machine]))
    first = start(gpu, clock, machine_id="m_1")
    second = start(gpu, clock, machine_id="m_1", started_at="2026-03-10T12:05:00Z")
    clock.advance(600)
    assert finish(first, "--status", "completed").document["line"]["cost_usd"] == pytest.approx(0.3 + 0.15)
    clock.advance(300)
    assert finish(second, "--status", "completed").document["line"]["cost_usd"] == pytest.approx(0.15 + 0.3)


def test_what_is_given_is_taken_as_it_is(state, gpu, clock, finish):
    job = start(gpu, clock)
    clock.advance(600)
    line = finish(job, "--status", "timeout", "--duration", "4m10s", "--cost-usd", "0.33").document["line"]
    assert (line["duration_s"], line["cost_usd"], line["completed_at"]) == (250, 0.33, "2026-03-10T12:04:10Z")
    assert line["error"] == "timeout"


def test_a_start_nobody_gave_is_when_the_first_line_was_written(state, gpu, clock, finish):
    job = start(gpu, clock, started_at=None)
    clock.advance(600)
    line = finish(job, "--status", "succeeded").document["line"]
    assert (line["started_at"], line["completed_at"], line["duration_s"]) == (STARTED, "2026-03-10T12:10:00Z", 600)


def test_a_job_written_down_after_it_ran_began_its_duration_ago(state, gpu, clock, finish):
    job = start(gpu, clock, started_at=None)
    clock.advance(5)
    line = finish(job, "--status", "succeeded", "--duration", "3m").document["line"]
    times = (line["started_at"], line["completed_at"], line["duration_s"])
    assert times == ("2026-03-10T11:57:05Z", "2026-03-10T12:00:05Z", 180)


def test_no_job_ends_in_the_future(state, gpu, clock, finish):
    job = start(gpu, clock)
    clock.advance(60)
    before = (state / "jobs.jsonl").read_bytes()
    refused = finish(job, "--status", "succeeded", "--duration", "3m")
    assert refused.exit_code == 2 and "cannot have run 3m00s" in refused.error["message"]
    assert "--duration" in refused.error["next_step"]
    assert (state / "jobs.jsonl").read_bytes() == before


def test_a_pasted_traceback_becomes_the_one_line_that_error_is(state, gpu, clock, finish):
    line = finish(start(gpu, clock), "--status", "failed", "--error", "x.py, line 3:\n\n  OOM\n").document["line"]
    assert line["error"] == "x.py, line 3: OOM"


def test_a_cost_nobody_knows_stays_null_and_says_so(state, gpu, clock, finish):
    done = finish(start(gpu, clock), "--status", "lost")
    assert done.document["line"]["cost_usd"] is None and "--cost-usd" in done.stderr
    assert "cost unknown" in gpu("job", "finish", start(gpu, clock), "--status", "lost", clock=clock).stdout


@pytest.mark.parametrize(
    ("word", "ledger", "state_name"),
    [
        ("succeeded", "completed", "succeeded"), ("completed", "completed", "succeeded"),
        ("failed", "failed", "failed"), ("cancelled", "cancelled", "cancelled"), ("lost", "lost", "lost"),
    ],
)  # fmt: skip
def test_job_states_and_ledger_words_are_both_taken(state, gpu, clock, finish, word, ledger, state_name):
    done = finish(start(gpu, clock), "--status", word).document
    assert (done["line"]["status"], done["state"]) == (ledger, state_name)
    assert ("error" in done["line"] and done["line"]["error"] is not None) is (ledger != "completed")


def test_a_job_ends_once(state, gpu, clock, finish):
    job = start(gpu, clock)
    assert finish(job, "--status", "failed", "--error", "CUDA out of memory").exit_code == 0
    before = (state / "jobs.jsonl").read_bytes()
    refused = finish(job, "--status", "succeeded")
    assert refused.exit_code == 3 and refused.error["code"] == "already_ended"
    assert "failed" in refused.error["message"]
    assert (state / "jobs.jsonl").read_bytes() == before


def test_a_clock_that_was_set_back_is_named_and_the_duration_asked_for(state, gpu, clock, finish):
    job = start(gpu, clock)
    clock.jump_wall(-3600)
    refused = finish(job, "--status", "succeeded")
    assert refused.exit_code == 2
    assert "the clock says 2026-03-10T11:00:00Z" in refused.error["message"] and STARTED in refused.error["message"]
    assert "--duration" in refused.error["next_step"]
    assert finish(job, "--status", "succeeded", "--duration", "5m").document["line"]["duration_s"] == 300


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("J-000099", "--status", "failed"), 1, "no job J-000099"),
        (("../../x", "--status", "failed"), 2, "not a job id"),
        (("J-000001", "--status", "running"), 2, "--status"),
        (("J-000001",), 2, "--status"),
        (("J-000001", "--status", "succeeded", "--error", "x"), 2, "--error"),
        (("J-000001", "--status", "failed", "--artifact", "clip.mp4"), 2, "NAME=URI"),
        (("J-000001", "--status", "failed", "--duration", "soon"), 2, "--duration"),
        (("J-000001", "--status", "failed", "--cost-usd", "-1"), 2, "--cost-usd is -1"),
        (("J-000001", "--status", "failed", "--cost-usd", "nan"), 2, "--cost-usd is nan"),
    ],
)
def test_a_wrong_call_is_named_and_writes_nothing(state, gpu, clock, finish, arguments, code, what):
    start(gpu, clock)
    before = (state / "jobs.jsonl").read_bytes()
    refused = finish(*arguments)
    assert refused.exit_code == code and what in refused.error["message"]
    assert (state / "jobs.jsonl").read_bytes() == before


@pytest.mark.subprocess
def test_a_job_that_still_runs_on_its_machine_is_not_declared_ended(state, gpu):
    job = gpu("job", "run", "--detach", "--json", "--", "sleep 300").document["job"]
    try:
        refused = gpu("job", "finish", job, "--status", "succeeded", "--json")
        assert refused.exit_code == 3 and refused.error["code"] == "job_running"
        assert gpu("status", "--json").document["running_jobs"] == [job]
    finally:
        assert gpu("job", "cancel", job, "--json").document["state"] == "cancelled"
    assert gpu("job", "finish", job, "--status", "succeeded", "--json").error["code"] == "already_ended"


def test_a_machine_that_does_not_answer_leaves_the_word_to_the_user(state, gpu, clock):
    from gpu_skills.errors import Unreachable

    def no_answer(machine):
        raise Unreachable(host=machine.host, reason="timed out")

    (state / "machines.json").write_text('[{"id": "m_1", "provider": "ssh", "status": "ready", "rate_usd_hr": 0}]')
    job = start(gpu, clock, machine_id="m_1")
    folder = state / "jobs" / job
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"id": job, "machine_id": "m_1"}))
    done = gpu("job", "finish", job, "--status", "lost", "--json", clock=clock, connect=no_answer)
    assert done.exit_code == 0 and done.document["state"] == "lost"
    assert "timed out" in done.stderr
