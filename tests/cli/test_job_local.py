"""Jobs on this machine through the real command line, the real runner and real processes."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import time

import pytest

from gpu_skills import resources, schemas
from gpu_skills.jobs.records import JobFolder
from gpu_skills.state import quick_check

pytestmark = pytest.mark.subprocess


@pytest.fixture
def project(tmp_path, gpu):
    assert gpu("init", "--jobs").exit_code == 0
    return tmp_path


def ledger(project):
    return [json.loads(line) for line in (project / ".pi/gpu/jobs.jsonl").read_text().splitlines()]


def test_a_job_runs_and_its_outputs_come_back_verified_with_a_ledger_line(project, gpu):
    (project / "make.py").write_text(
        "import os\nopen(os.environ['GPU_OUTPUT_DIR'] + '/a.txt', 'w').write('hello')\nprint('made')\n"
    )
    result = gpu("job", "run", "--json", "--", "python3", "make.py")
    assert result.exit_code == 0, result.stderr
    document = result.document
    assert document["state"] == "succeeded" and document["exit_code"] == 0 and document["collected"]
    assert "made" in result.stderr
    local = project / "gpu-outputs" / document["job"] / "a.txt"
    assert local.read_text() == "hello"
    assert document["outputs"] == [{"path": "a.txt", "bytes": 5, "sha256": hashlib.sha256(b"hello").hexdigest()}]
    lines = ledger(project)
    assert [line["status"] for line in lines] == ["running", "completed"]
    assert lines[1]["id"] == document["job"] == "J-000001"
    assert lines[1]["duration_s"] > 0 and lines[1]["cost_usd"] == 0


@pytest.mark.parametrize(("command", "code", "state"), [("exit 7", 7, "failed"), ("kill -9 $$", 137, "failed")])
def test_gpu_job_run_exits_with_the_jobs_own_code(project, gpu, command, code, state):
    result = gpu("job", "run", "--json", "--", command)
    assert (result.exit_code, result.document["state"]) == (code, state)
    assert ledger(project)[-1]["status"] == "failed" and ledger(project)[-1]["error"]


def test_a_job_over_its_timeout_exits_124_and_names_the_limit(project, gpu):
    result = gpu("job", "run", "--json", "--timeout", "1s", "--", "sleep 60")
    assert result.exit_code == 124
    assert result.document["state"] == "timeout" and result.document["reason"] == "timeout"


def test_setup_that_fails_keeps_run_from_starting(project, gpu):
    (project / "gpujob.yaml").write_text("setup: exit 3\nrun: touch $GPU_OUTPUT_DIR/ran\n")
    result = gpu("job", "run", "--json")
    assert result.exit_code == 3 and result.document["reason"] == "setup_failed"
    assert result.document["outputs"] == []


def test_exit_zero_is_not_believed_without_the_expected_outputs(project, gpu):
    (project / "gpujob.yaml").write_text("run: echo done\nexpect: [model.bin]\n")
    result = gpu("job", "run", "--json")
    assert result.exit_code == 1
    assert result.document["state"] == "failed" and result.document["reason"] == "outputs_missing"


def test_a_detached_job_is_followed_cancelled_and_leaves_no_process(project, gpu):
    started = gpu("job", "run", "--detach", "--json", "--", "setsid sleep 300 & echo on; sleep 300")
    assert started.exit_code == 0 and started.document["state"] == "running"
    deadline = time.monotonic() + 10
    while "on" not in gpu("job", "logs").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert gpu("status", "--json").document["running_jobs"] == ["J-000001"]
    cancelled = gpu("job", "cancel", "--json")
    assert cancelled.document["state"] == "cancelled" and cancelled.document["exit_code"] == 130
    nonce = json.loads((project / ".pi/gpu/jobs/J-000001/job.json").read_text())["nonce"]
    assert not carriers(nonce)
    assert ledger(project)[-1]["status"] == "cancelled"


def carriers(nonce):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as stream:
                if nonce.encode() in stream.read():
                    found.append(pid)
        except OSError:
            continue
    return found


def test_pull_works_mid_run_and_moves_only_what_changed(project, gpu):
    wait = "until [ -e $GPU_WORKSPACE/go ]; do sleep 0.05; done"
    run = f"echo one > $GPU_OUTPUT_DIR/one; {wait}; echo two > $GPU_OUTPUT_DIR/two"
    gpu("job", "run", "--detach", "--json", "--", run)
    deadline = time.monotonic() + 10
    while not (first := gpu("job", "pull", "--json").document)["files"]:
        assert time.monotonic() < deadline
    assert first["files"] == 1 and not first["final"]
    workspace = next((project_data()).glob("machine/projects/*/workspace"))
    (workspace / "go").touch()
    while gpu("job", "status", "--json").document["state"] == "running":
        assert time.monotonic() < deadline + 10
        time.sleep(0.1)
    second = gpu("job", "pull", "--json").document
    assert (second["new"], second["unchanged"], second["final"]) == (1, 1, True)
    assert gpu("job", "status", "--json").document["collected"]


def project_data():
    from gpu_skills.userdirs import data_dir

    return data_dir(os.environ)


def test_destroy_is_refused_until_the_outputs_are_collected(project, gpu):
    gpu("job", "run", "--no-pull", "--json", "--", "echo x > $GPU_OUTPUT_DIR/x; echo yy > $GPU_OUTPUT_DIR/y")
    refused = gpu("destroy", "--json")
    assert refused.exit_code == 3 and refused.error["code"] == "not_collected"
    assert "2 files" in refused.error["message"] and refused.error["next_step"] == "gpu job pull J-000001"
    gpu("job", "pull", "--json")
    assert gpu("destroy", "--json").exit_code == 0


def test_outputs_given_up_are_on_record_and_asked_for_no_more(project, gpu):
    gpu("job", "run", "--no-pull", "--json", "--", "echo x > $GPU_OUTPUT_DIR/x")
    assert gpu("status", "--json").document["uncollected_jobs"] == ["J-000001"]
    for nobody in ("J-000009", "../.."):
        refused = gpu("destroy", "--json", "--abandon-outputs", nobody)
        assert (refused.exit_code, refused.error["code"]) == (1, "job_not_found")
    assert gpu("destroy", "--json", "--abandon-outputs", "J-000001").exit_code == 0
    assert json.loads((project / ".pi/gpu/jobs/J-000001/abandoned.json").read_text())["machine_id"].startswith("m_")
    assert gpu("status", "--json").document["uncollected_jobs"] == []


def test_destroy_during_a_pull_waits_for_it_or_is_refused_and_takes_nothing(project, gpu, monkeypatch):
    gpu("job", "run", "--no-pull", "--json", "--", "echo x > $GPU_OUTPUT_DIR/x")
    monkeypatch.setattr(JobFolder, "collecting", functools.partialmethod(JobFolder.collecting, timeout_s=0.2))
    with open(project / ".pi/gpu/jobs/J-000001/collect.lock", "a") as pulling:  # what a pull holds
        fcntl.flock(pulling, fcntl.LOCK_EX)
        refused = gpu("destroy", "--json")
        assert (refused.exit_code, refused.error["code"]) == (3, "state_busy")
    assert gpu("status", "--json").document["machines"][0]["status"] == "ready"


def test_destroy_is_refused_while_a_job_runs(project, gpu):
    gpu("job", "run", "--detach", "--json", "--", "sleep 100")
    refused = gpu("destroy", "--json")
    assert refused.exit_code == 3 and refused.error["code"] == "job_running"
    gpu("job", "cancel", "--json")


def test_a_job_sees_the_whole_environment_and_its_own_copy(project, gpu, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh12345678")
    monkeypatch.setenv("VAST_API_KEY", "vast-credential-value")
    (project / "data.txt").write_text("original")
    (project / "check.sh").write_text(
        """
        for name in GPU_OUTPUT_DIR GPU_JOB_ID GPU_JOB_DIR GPU_WORKSPACE JAMBU_OUTPUT_DIR JAMBU_JOB_ID JAMBU_JOB_DIR \\
            KURA_WORKSPACE KURA_RUN_ID HF_HOME HF_HUB_CACHE PYTHONUNBUFFERED; do
            [ -n "${!name}" ] || exit 9
        done
        [ "$PWD" = "$GPU_JOB_DIR" ] || exit 8
        [ -z "$VAST_API_KEY" ] || exit 7
        [ "$HF_HUB_CACHE" = "$HF_HOME/hub" ] || exit 6
        [ "$HF_TOKEN" = "hf_abcdefgh12345678" ] || exit 5
        [ "${GPU_MODEL_ID-unset}" = "" ] || exit 4
        echo changed > data.txt
        """
    )
    result = gpu("job", "run", "--json", "--", "bash check.sh")
    assert result.exit_code == 0, result.stderr
    assert (project / "data.txt").read_text() == "original"


def test_values_given_on_the_command_line_are_written_nowhere(project, gpu, tmp_path):
    secret = "s3cr3tXYZ-value"
    result = gpu(
        "job", "run", "--json", "--env", f"MY_TOKEN={secret}", "--", "[ ${#MY_TOKEN} = 15 ] && echo token=$MY_TOKEN"
    )
    assert result.exit_code == 0, result.stderr
    assert secret not in result.stdout + result.stderr
    for top in (project / ".pi", project_data()):
        for path in top.rglob("*"):
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path


def test_a_need_this_machine_lacks_is_exit_5_and_names_the_provider_option(project, gpu):
    (project / "gpu.yaml").write_text("provider: local\ncompute: {min_vram_gb: 4000}\n")
    result = gpu("setup", "--json")
    assert result.exit_code == 5 and "--provider" in result.error["next_step"]
    run = gpu("job", "run", "--json", "--", "true")
    assert run.exit_code == 125 and run.error["code"] == "cannot_satisfy"
    assert run.stderr.strip().splitlines()[-1].endswith("[cannot_satisfy]")


def test_every_failure_of_gpu_itself_in_job_run_is_125(project, gpu):
    assert gpu("job", "run", "--json").exit_code == 125
    assert gpu("job", "run", "--no-such-option").exit_code == 125
    (project / "id_rsa").write_text("x")
    assert gpu("job", "run", "--json", "--", "true").exit_code == 125


def test_a_second_upload_of_the_same_directory_sends_nothing(project, gpu):
    (project / "big.bin").write_bytes(os.urandom(300_000))
    gpu("job", "run", "--json", "--", "true")
    second = gpu("job", "run", "--json", "--", "true").document
    assert second["upload"]["bytes_sent"] == 0 and second["upload"]["bytes_total"] >= 300_000


def test_logs_show_the_tail_and_continue_at_an_offset(project, gpu):
    gpu("job", "run", "--json", "--", "for i in 1 2 3 4 5; do echo line $i; done")
    assert gpu("job", "logs", "--tail", "2").stdout == "line 4\nline 5\n"
    whole = gpu("job", "logs", "--json").document
    assert whole["text"].splitlines()[0] == "line 1"
    assert gpu("job", "logs", "--json", "--offset", str(whole["next"])).document["text"] == ""


def test_the_log_never_carries_raw_control_sequences(project, gpu):
    result = gpu("job", "run", "--", r"printf '\033[31mred\033[0m\033]0;owned\007\n'")
    assert "\x1b" not in result.stdout and "red" in result.stdout
    assert "\x1b" not in gpu("job", "logs").stdout


def test_progress_is_shown_with_unit_and_rate(project, gpu):
    (project / "gpujob.yaml").write_text(
        "run: for i in 1 2 3; do echo progress rows=$((i*100)); sleep 0.2; done; sleep 30\n"
        "progress: {unit: rows, stall: 1s, on_stall: cancel}\n"
    )
    result = gpu("job", "run", "--json")
    assert result.exit_code == 130
    assert result.document["state"] == "cancelled" and result.document["reason"] == "no_progress"
    assert result.document["progress"]["unit"] == "rows" and result.document["progress"]["value"] == 300


def test_a_standstill_is_an_event_that_status_shows_while_the_job_runs(project, gpu):
    (project / "gpujob.yaml").write_text("run: echo progress rows=3; sleep 300\nprogress: {unit: rows, stall: 1s}\n")
    gpu("job", "run", "--detach", "--json")
    deadline = time.monotonic() + 20
    while not (events := gpu("job", "status", "--json").document.get("events")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (events[0]["event"], events[0]["unit"], events[0]["value"]) == ("no_progress", "rows", 3)
    assert "event: no_progress (" in gpu("job", "status").stdout
    assert gpu("job", "cancel", "--json").document["state"] == "cancelled"
    assert gpu("job", "status", "--json").document["events"][0] == events[0]


def test_whoever_follows_a_job_is_told_once_that_it_stands_still(project, gpu):
    (project / "gpujob.yaml").write_text("run: echo progress rows=3; sleep 4\nprogress: {unit: rows, stall: 1s}\n")
    result = gpu("job", "run", "--json")
    assert result.exit_code == 0
    assert result.stderr.count("J-000001: no more rows for ") == 1
    assert "next: gpu job status J-000001, or gpu job cancel J-000001" in result.stderr


def test_the_session_budget_ends_a_job_with_124_and_names_the_limit(project, gpu):
    # On this machine the rate is 0, so the deadline of the session is what ends it.
    (project / "gpu.yaml").write_text("provider: local\nlifecycle: {max_lifetime: 3s}\n")
    (project / "gpujob.yaml").write_text("run: sleep 60\ntimeout: 2s\n")
    gpu("setup", "--json")
    deadline = time.monotonic() + 20
    result = gpu("job", "run", "--json", "--timeout", "3s", "--", "sleep 60")
    assert result.exit_code == 124 and time.monotonic() < deadline
    assert result.document["reason"] in ("max_lifetime", "timeout")


def test_commands_without_a_project_name_init(gpu):
    for args in (["job", "ls"], ["status"], ["setup"], ["job", "status"], ["spend"]):
        result = gpu(*args, "--json")
        assert result.exit_code == 2 and result.error["next_step"] == "gpu init", args


def test_reading_commands_run_in_audit_and_others_are_refused(project, gpu, monkeypatch):
    monkeypatch.setenv("GPU_MODE", "audit")
    assert gpu("status", "--json").exit_code == 0
    refused = gpu("setup", "--json")
    assert refused.exit_code == 3 and refused.error["code"] == "mode_forbids"
    assert gpu("setup", "--json", "--mode", "operate").exit_code == 3


def test_copies_start_the_same_job_several_times_with_an_index_each(project, gpu):
    started = gpu("job", "run", "--detach", "--copies", "3", "--json", "--", "echo $GPU_JOB_INDEX of $GPU_JOB_COUNT")
    assert [d["job"] for d in started.documents] == ["J-000001", "J-000002", "J-000003"]
    deadline = time.monotonic() + 20
    while gpu("status", "--json").document["running_jobs"]:
        assert time.monotonic() < deadline
        gpu("job", "ls")
    said = [gpu("job", "logs", job).stdout for job in ("J-000001", "J-000002", "J-000003")]
    assert said == ["0 of 3\n", "1 of 3\n", "2 of 3\n"]
    assert gpu("job", "run", "--copies", "2", "--json", "--", "true").exit_code == 125


def test_options_before_the_command_do_not_change_how_job_run_fails(project, gpu):
    refused = gpu("--mode", "audit", "job", "run", "--json", "--", "true")
    assert refused.exit_code == 125


def test_a_job_the_machine_never_got_is_lost_at_the_first_look(project, gpu):
    gpu("setup", "--json")
    folder = project / ".pi/gpu/jobs/J-000001"
    folder.mkdir(parents=True)
    machine = gpu("machine", "ls", "--json").document["machines"][0]["id"]
    (folder / "job.json").write_text(json.dumps({"id": "J-000001", "nonce": "0" * 16, "machine_id": machine}))
    line = {"id": "J-000001", "status": "running", "machine_id": machine, "provider": "local"}
    line |= {"started_at": "2026-01-01T00:00:00Z", "ts": "2026-01-01T00:00:00Z"}
    (project / ".pi/gpu/jobs.jsonl").write_text(json.dumps(line) + "\n")
    document = gpu("job", "status", "--json").document
    assert document["state"] == "lost" and document["reason"] == "never_started"
    assert gpu("job", "status", "--json").document["state"] == "lost"


def test_real_jobs_leave_only_records_that_fit_their_schemas(project, gpu):
    """One that stands still, is cancelled and given up, and one that is pulled: together they leave every record."""
    (project / "gpujob.yaml").write_text("run: echo progress rows=3; sleep 300\nprogress: {unit: rows, stall: 1s}\n")
    gpu("job", "run", "--detach", "--json")
    deadline = time.monotonic() + 20
    while not gpu("job", "status", "--json").document.get("events"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    gpu("job", "cancel", "--json")
    makes = "echo a > $GPU_OUTPUT_DIR/a; ln -s a $GPU_OUTPUT_DIR/link; mkfifo $GPU_OUTPUT_DIR/fifo"
    assert gpu("job", "run", "--json", "--timeout", "1m", "--label", "two", "--env", "A=b", "--", makes).exit_code == 0
    assert gpu("job", "artifacts", "--json", "--to", f"file://{project}/kept").exit_code == 0
    assert gpu("destroy", "--json", "--abandon-outputs", "J-000001").exit_code == 0

    records = [
        (path.stem, json.loads(text))
        for path in sorted((project / ".pi/gpu/jobs").glob("*/*"))
        if path.suffix in (".json", ".jsonl") and path.name != "verified.json"  # a cache
        for text in (path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()])
    ]
    described = {path.stem for path in (resources.ROOT / "schemas/jobs").glob("*.json")}
    assert {name for name, _ in records} == described - {"request"}  # of a deployment
    for name, record in records:
        assert schemas.problems(record, f"jobs/{name}") == [], (name, record)
        assert quick_check.fits(record, f"jobs/{name}"), (name, record)
        assert record.keys() <= schemas.load(f"jobs/{name}")["properties"].keys(), name
    [skipped] = [record["skipped"] for name, record in records if name == "manifest" and record["skipped"]]
    assert skipped == [{"path": "fifo", "why": "fifo"}]
