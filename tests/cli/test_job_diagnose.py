"""`gpu job diagnose` on jobs that really failed on this machine, and on records alone."""

from __future__ import annotations

import json
import shutil

import pytest


@pytest.fixture
def project(tmp_path, gpu):
    assert gpu("init", "--jobs").exit_code == 0
    return tmp_path


def failing(gpu, *lines):
    script = "; ".join(f"echo '{line}'" for line in lines) + "; exit 1"
    assert gpu("job", "run", "--json", "--", script).exit_code == 1


@pytest.mark.subprocess
def test_a_failed_job_is_explained_with_its_line_and_its_machine(project, gpu):
    failing(gpu, "step 1", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB")
    said = gpu("job", "diagnose", "--json")
    assert said.exit_code == 3
    document = said.document
    assert (document["class"], document["may_retry"], document["exit_code"]) == ("cuda_oom", False, 1)
    assert document["findings"][0]["evidence"][0]["line"] == 2
    assert document["machine"]["facts"]["python"] and document["log"]["kept"] == "local"
    text = gpu("job", "diagnose", "J-000001").stdout
    assert "cuda_oom" in text and "log:2:" in text and "--lowvram" in text


@pytest.mark.subprocess
def test_a_passing_failure_may_be_tried_once_and_then_it_is_for_the_user(project, gpu):
    line = "curl: (6) Could not resolve host: models.example.org"
    failing(gpu, line)
    first = gpu("job", "diagnose", "--json")
    assert (first.exit_code, first.document["may_retry"]) == (0, True)
    assert "policy check" in first.document["next_step"]
    failing(gpu, line)
    second = gpu("job", "diagnose", "--json")
    assert (second.exit_code, second.document["may_retry"]) == (3, False)
    assert "J-000001, J-000002" in second.document["report"]
    assert second.document["attempts"]["failed"] == 2


@pytest.mark.subprocess
def test_secrets_in_the_log_do_not_come_out(project, gpu, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "orchid-5417-violet")
    failing(gpu, "key orchid-5417-violet hf_abcdefgh12345678 password=hunter2two GPU is lost")
    for said in (gpu("job", "diagnose", "--json").stdout, gpu("job", "diagnose").stdout):
        assert "GPU is lost" in said
        assert not [secret for secret in ("orchid", "abcdefgh1234", "hunter2") if secret in said]


@pytest.mark.subprocess
def test_the_kept_log_serves_when_the_machine_is_not_there_any_more(project, gpu):
    failing(gpu, "OSError: [Errno 28] No space left on device")
    (project / ".pi/gpu/machines.json").write_text("[]")
    said = gpu("job", "diagnose", "--json")
    assert said.document["class"] == "disk_full" and said.document["machine"]["why_not"]
    shutil.rmtree(project / ".pi/gpu/jobs/J-000001")
    said = gpu("job", "diagnose", "--json")
    assert (said.document["class"], said.document["log"]["kept"]) == ("unknown", "none")
    assert "no log of it is kept here" in said.stderr


@pytest.mark.subprocess
def test_a_job_that_runs_is_looked_at_on_its_machine(project, gpu):
    command = "echo 'OSError: [Errno 98] Address already in use'; exec sleep 60"
    assert gpu("job", "run", "--detach", "--json", "--", command).exit_code == 0
    try:
        for _ in range(50):
            said = gpu("job", "diagnose", "--json")
            if said.document["findings"]:
                break
        assert (said.exit_code, said.document["state"], said.document["class"]) == (0, "running", "port_held")
        assert said.document["log"]["kept"] == "machine" and said.document["machine"]["facts"]["gpu_works"] is None
    finally:
        gpu("job", "cancel")


@pytest.mark.subprocess
def test_a_job_that_succeeded_has_nothing_to_explain(project, gpu):
    assert gpu("job", "run", "--json", "--", "true").exit_code == 0
    said = gpu("job", "diagnose", "--json")
    assert (said.exit_code, said.document["class"], said.document["findings"]) == (0, None, [])


def test_a_request_against_a_deployment_is_classed_by_its_ledger_line(project, gpu):
    line = {"status": "running", "provider": "ssh", "deployment_id": "dep_1", "inputs": {"prompt": "x"}}
    gpu("ledger", "append", stdin=json.dumps(line).encode())
    gpu("job", "finish", "J-000001", "--status", "failed", "--error", "CUDA out of memory in KSampler")
    said = gpu("job", "diagnose", "--json", "--mode", "audit")
    assert (said.exit_code, said.document["class"]) == (3, "cuda_oom")
    assert said.document["findings"][0]["evidence"][0]["source"] == "end"


def test_without_a_policy_nothing_may_be_tried_again_but_it_is_explained(project, gpu):
    gpu("ledger", "append", stdin=b'{"status": "running", "provider": "ssh"}')
    gpu("job", "finish", "J-000001", "--status", "failed", "--error", "Temporary failure in name resolution")
    assert gpu("job", "diagnose", "--json").document["may_retry"] is True
    (project / ".pi/gpu/policy.json").unlink()
    said = gpu("job", "diagnose", "--json")
    assert (said.exit_code, said.document["class"], said.document["may_retry"]) == (3, "network_stall", False)


def test_without_any_job_it_says_so(project, gpu):
    said = gpu("job", "diagnose", "--json")
    assert (said.exit_code, said.error["code"]) == (1, "no_jobs")
    assert gpu("job", "diagnose", "J-000009", "--json").error["code"] == "job_not_found"
