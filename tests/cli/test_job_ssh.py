"""Jobs on a host reached over a real OpenSSH server, through the real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.subprocess


@pytest.fixture
def project(tmp_path, gpu, sshd, home):
    """A project whose host `box` is the test's own server, named in hosts.yaml."""
    root = tmp_path / "project"
    root.mkdir()
    assert gpu("init", "--jobs", "--provider", "ssh", "--host", "box", cwd=root).exit_code == 0
    hosts = f"""
hosts:
  box:
    address: 127.0.0.1
    port: {sshd.port}
    user: {sshd.user}
    identity_file: {sshd.identity}
    root: {tmp_path / "machine"}
    rate_usd_hr: 3.6
"""
    (root / "hosts.yaml").write_text(hosts)
    return root


def test_a_job_runs_on_an_ssh_host_and_its_cost_is_booked_at_the_hosts_rate(project, gpu):
    (project / "train.py").write_text(
        "import os, time\nprint('on it')\ntime.sleep(1)\n"
        "open(os.environ['GPU_OUTPUT_DIR'] + '/m', 'wb').write(b'1' * 5000)\n"
    )
    result = gpu("job", "run", "--json", "--", "python3 train.py", cwd=project)
    assert result.exit_code == 0, result.stderr
    document = result.document
    assert document["collected"] and document["outputs"][0]["bytes"] == 5000
    assert (project / "gpu-outputs/J-000001/m").stat().st_size == 5000
    last = json.loads((project / ".pi/gpu/jobs.jsonl").read_text().splitlines()[-1])
    assert last["cost_usd"] == pytest.approx(last["duration_s"] * 3.6 / 3600, abs=2e-6) and last["cost_usd"] > 0.001
    assert last["artifacts"] == [{"name": "m", "uri": "gpu-outputs/J-000001/m"}]
    spend = gpu("spend", "--json", cwd=project).document
    assert spend["total_usd"] == last["cost_usd"]


def test_a_failed_job_is_costed_too(project, gpu):
    assert gpu("job", "run", "--json", "--", "sleep 1; exit 9", cwd=project).exit_code == 9
    assert gpu("spend", "--json", cwd=project).document["total_usd"] > 0


def test_the_session_budget_is_a_deadline_that_the_machine_keeps(project, gpu):
    # 3.6 USD/h is a tenth of a cent a second: 0.003 USD buy three seconds.
    (project / "gpu.yaml").write_text("provider: ssh\nhost: box\nbudget: {session_usd: 0.003}\n")
    began = time.monotonic()
    result = gpu("job", "run", "--json", "--", "sleep 60", cwd=project)
    assert result.exit_code == 124, result.stderr
    assert result.document["state"] == "timeout" and result.document["reason"] == "session_budget"
    assert time.monotonic() - began < 30


def test_the_job_goes_on_when_the_connection_and_the_controller_die(project, gpu, sshd):
    started = gpu(
        "job", "run", "--detach", "--json", "--", "for i in $(seq 40); do echo line $i; sleep 0.1; done", cwd=project
    )
    assert started.exit_code == 0
    sshd.disconnect_all()
    deadline = time.monotonic() + 30
    while gpu("job", "status", "--json", cwd=project).document["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.3)
    text = gpu("job", "logs", "--json", cwd=project).document["text"]
    assert text.splitlines() == [f"line {i}" for i in range(1, 41)]


def test_a_detached_start_returns_within_three_seconds(project, gpu):
    gpu("setup", cwd=project)
    began = time.monotonic()
    gpu("job", "run", "--detach", "--json", "--", "sleep 30", cwd=project)
    assert time.monotonic() - began < 3
    gpu("job", "cancel", "--json", cwd=project)


def test_a_changed_host_key_stops_everything_and_names_both_keys(project, gpu, sshd):
    assert gpu("setup", "--json", cwd=project).exit_code == 0
    sshd.restart(new_host_key=True)
    refused = gpu("job", "run", "--json", "--", "true", cwd=project)
    assert refused.exit_code == 125 and refused.error["code"] == "host_key_mismatch"
    assert refused.error["message"].count("SHA256:") == 2


def test_a_host_that_is_down_is_one_line_with_the_next_step(project, gpu, sshd):
    sshd.stop()
    result = gpu("job", "run", "--json", "--", "true", cwd=project)
    assert result.exit_code == 125 and result.error["code"] == "unreachable" and "ssh" in result.error["next_step"]
    assert gpu("setup", "--json", cwd=project).exit_code == 1


def test_status_of_a_running_job_on_a_host_that_is_down_says_so_and_loses_nothing(project, gpu, sshd):
    gpu("job", "run", "--detach", "--json", "--", "sleep 1; echo hi > $GPU_OUTPUT_DIR/hi", cwd=project)
    sshd.stop()
    assert gpu("job", "status", "--json", cwd=project).error["code"] == "unreachable"
    assert gpu("job", "ls", "--json", cwd=project).document["jobs"][0]["state"] == "running"
    sshd.restart()
    deadline = time.monotonic() + 20
    while gpu("job", "status", "--json", cwd=project).document["state"] == "running":
        assert time.monotonic() < deadline
    assert gpu("job", "pull", "--json", cwd=project).document["final"]


def test_the_users_ssh_configuration_is_never_written(project, gpu, home):
    ssh = home / ".ssh"
    ssh.mkdir(mode=0o700)
    (ssh / "config").write_text("Host *\n  ServerAliveInterval 7\n")
    before = (ssh / "config").read_bytes()
    assert gpu("job", "run", "--json", "--", "true", cwd=project).exit_code == 0
    assert (ssh / "config").read_bytes() == before
    assert sorted(p.name for p in ssh.iterdir()) == ["config"]


def test_killing_the_controller_right_after_the_start_loses_no_job(project, gpu):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    gpu("setup", cwd=project)
    process = subprocess.Popen(
        [sys.executable, "-m", "gpu_skills", "job", "run", "--", "sleep 2; echo x > $GPU_OUTPUT_DIR/x"],
        cwd=project, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ledger = project / ".pi/gpu/jobs.jsonl"
    deadline = time.monotonic() + 20
    while not ledger.exists() or not ledger.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    while (document := gpu("job", "status", "--json", cwd=project).document)["state"] == "running":
        assert time.monotonic() < deadline + 20
        time.sleep(0.2)
    assert document["state"] in ("succeeded", "lost")
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["J-000001", "J-000001"]


def test_jobs_that_overlap_share_the_machines_time(project, gpu):
    started = gpu("job", "run", "--detach", "--copies", "3", "--json", "--", "sleep 1.5", cwd=project)
    assert started.exit_code == 0, started.stderr
    deadline = time.monotonic() + 30
    while gpu("status", "--json", cwd=project).document["running_jobs"]:
        assert time.monotonic() < deadline
        gpu("job", "ls", cwd=project)
    lines = [json.loads(line) for line in (project / ".pi/gpu/jobs.jsonl").read_text().splitlines()]
    ends = [line for line in lines if line["status"] == "completed"]
    alone = sum(line["duration_s"] for line in ends) * 3.6 / 3600
    assert 0.3 * alone < sum(line["cost_usd"] for line in ends) < 0.75 * alone
