"""`gpu job artifacts`, and `outputs.uri` of a job, through the real command line and a server that speaks S3."""

from __future__ import annotations

import json

import pytest

from s3_server import s3, s3_application

__all__ = ["s3", "s3_application"]
pytestmark = pytest.mark.subprocess


@pytest.fixture
def project(tmp_path, gpu):
    assert gpu("init", "--jobs").exit_code == 0
    return tmp_path


MAKES = "printf hello > $GPU_OUTPUT_DIR/a.txt; mkdir $GPU_OUTPUT_DIR/d; printf x > $GPU_OUTPUT_DIR/d/b.txt"


def last_line(project):
    return json.loads((project / ".pi/gpu/jobs.jsonl").read_text().splitlines()[-1])


def test_what_a_job_left_is_listed_pushed_and_read_back(project, gpu, s3):
    assert gpu("job", "run", "--json", "--", MAKES).exit_code == 0
    listed = gpu("job", "artifacts", "--json").document
    assert [f["path"] for f in listed["files"]] == ["a.txt", "d/b.txt"] and listed["uri"] is None
    assert all(f["local"] and f["uri"] is None for f in listed["files"])
    assert [a["uri"] for a in listed["ledger"]] == ["gpu-outputs/J-000001/a.txt", "gpu-outputs/J-000001/d/b.txt"]

    result = gpu("job", "artifacts", "J-000001", "--to", f"{s3.uri}/runs", "--verify", "--json")
    assert result.exit_code == 0, result.stderr
    document = result.document
    assert (document["pushed"]["files"], document["pushed"]["kept"], document["verified"]) == (2, 0, 2)
    assert document["kept"] and all(f["verified_at"] for f in document["files"])
    assert sorted(s3.keys()) == [f["uri"].removeprefix(f"{s3.uri}/") for f in document["files"]]
    again = gpu("job", "artifacts", "--to", f"{s3.uri}/runs", "--json").document["pushed"]
    assert (again["kept"], again["bytes"]) == (2, 0)


def test_an_object_that_was_tampered_with_fails_the_verification(project, gpu, s3):
    assert gpu("job", "run", "--", MAKES).exit_code == 0
    assert gpu("job", "artifacts", "--to", s3.uri).exit_code == 0
    s3.client.put_object(Bucket=s3.bucket, Key=s3.keys()[0], Body=b"hellO")
    result = gpu("job", "artifacts", "--verify", "--json")
    assert result.exit_code == 1 and result.error["code"] == "artifact_changed" and "a.txt" in result.error["message"]


def test_outputs_go_to_their_durable_home_by_themselves_and_the_ledger_names_it(project, gpu, s3):
    (project / "gpujob.yaml").write_text(f"run: '{MAKES}'\noutputs: {{uri: '{s3.uri}/runs'}}\n")
    result = gpu("job", "run", "--json")
    assert result.exit_code == 0, result.stderr
    home = result.document["pulled"]["home"]
    assert home["files"] == 2 and home["uri"].startswith(f"{s3.uri}/runs/J-000001-")
    assert [a["uri"] for a in last_line(project)["artifacts"]] == [f"{home['uri']}/a.txt", f"{home['uri']}/d/b.txt"]
    assert (project / "gpu-outputs/J-000001/a.txt").read_text() == "hello"


def test_a_home_that_cannot_be_used_is_said_before_the_job_starts(project, gpu, s3):
    (project / "gpujob.yaml").write_text(f"run: '{MAKES}'\noutputs: {{uri: 's3://no-such-bucket-here/runs'}}\n")
    result = gpu("job", "run", "--json")
    assert result.exit_code == 125 and result.error["code"] == "bucket_missing"
    s3.application.ignores_conditions = True
    (project / "gpujob.yaml").write_text(f"run: '{MAKES}'\noutputs: {{uri: '{s3.uri}/runs'}}\n")
    assert gpu("job", "run", "--json").error["code"] == "store_ignores_conditions"
    assert not (project / ".pi/gpu/jobs.jsonl").exists() or not (project / ".pi/gpu/jobs.jsonl").read_text()


def test_a_home_that_fails_at_the_end_does_not_fail_the_job_and_names_the_command(project, gpu, s3):
    (project / "gpujob.yaml").write_text(f"run: '{MAKES}'\noutputs: {{uri: '{s3.uri}/runs'}}\n")
    s3.application.fault = lambda request: 403 if request.path.endswith(".txt") else None
    result = gpu("job", "run", "--json")
    assert result.exit_code == 0
    assert result.document["pulled"]["home"]["error"]["code"] == "auth_rejected"
    assert f"gpu job artifacts J-000001 --to {s3.uri}/runs" in result.stderr
    assert last_line(project)["artifacts"][0]["uri"] == "gpu-outputs/J-000001/a.txt"
    s3.application.fault = None
    assert gpu("job", "artifacts", "--to", f"{s3.uri}/runs", "--json").document["pushed"]["files"] == 2


def test_audit_lists_and_pushes_nothing(project, gpu, s3):
    assert gpu("job", "run", "--", MAKES).exit_code == 0
    assert gpu("job", "artifacts", "--mode", "audit", "--json").exit_code == 0
    refused = gpu("job", "artifacts", "--to", s3.uri, "--mode", "audit", "--json")
    assert refused.exit_code == 3 and refused.error["code"] == "mode_forbids" and s3.keys() == []


def test_no_key_of_the_store_reaches_the_job_or_a_record(project, gpu, s3):
    (project / "gpujob.yaml").write_text(f"run: 'env > $GPU_OUTPUT_DIR/env.txt'\noutputs: {{uri: '{s3.uri}/runs'}}\n")
    assert gpu("job", "run", "--json").exit_code == 0
    secret = "made-up-secret-of-the-tests"
    assert secret.encode() not in s3.content(s3.keys()[0])
    for path in (project / ".pi").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()


# from the machine straight to the bucket ------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch):
    """Of 5 MiB, the smallest that S3 takes."""
    from gpu_skills.artifacts.s3 import S3Store
    from gpu_skills.jobs import direct

    monkeypatch.setattr(direct, "PART_BYTES", 6 << 20)
    monkeypatch.setattr(S3Store.__init__, "__kwdefaults__", {"notes": None, "part_bytes": 5 << 20})


def test_a_machine_sends_its_outputs_itself_and_read_back_they_count_as_collected(project, gpu, s3, small_parts):
    makes = MAKES + "; head -c 12000000 /dev/urandom > $GPU_OUTPUT_DIR/large; : > $GPU_OUTPUT_DIR/empty"
    assert gpu("job", "run", "--no-pull", "--", makes).exit_code == 0
    refused = gpu("destroy", "--json")
    assert refused.exit_code == 3 and refused.error["code"] == "not_collected"

    s3.application.requests.clear()
    result = gpu("job", "artifacts", "--to", f"{s3.uri}/runs", "--direct", "--json")
    assert result.exit_code == 0, result.stderr
    document = result.document
    assert (document["pushed"]["files"], document["kept"], document["collected"]) == (4, False, False)
    assert [f["local"] for f in document["files"]] == [None] * 4 and not (project / "gpu-outputs").exists()
    assert gpu("destroy", "--json").exit_code == 3, "nobody has read it back yet"

    result = gpu("job", "artifacts", "--verify", "--json")
    assert result.document["verified"] == 4 and result.document["kept"]
    assert gpu("destroy", "--json").exit_code == 0
    for path in (project / ".pi").rglob("*"):
        assert not path.is_file() or b"X-Amz-Signature" not in path.read_bytes(), path


def test_a_machine_that_was_cut_off_goes_on_with_the_parts_that_are_there(project, gpu, s3, small_parts):
    assert gpu("job", "run", "--no-pull", "--", "head -c 12000000 /dev/urandom > $GPU_OUTPUT_DIR/large").exit_code == 0
    s3.application.fault = lambda request: 403 if request.query.get("partNumber") == "2" else None
    result = gpu("job", "artifacts", "--to", s3.uri, "--direct", "--json")
    assert result.exit_code == 1 and result.error["code"] == "transfer_incomplete" and "403" in result.error["message"]
    assert "X-Amz" not in result.stdout + result.stderr
    s3.application.fault = None
    s3.application.requests.clear()
    assert gpu("job", "artifacts", "--to", s3.uri, "--direct", "--verify", "--json").document["kept"]
    assert [r.query["partNumber"] for r in s3.application.requests if r.is_part] == ["2"]


def test_a_job_that_runs_or_a_store_that_is_no_bucket_is_refused(project, gpu, s3, tmp_path):
    assert gpu("job", "run", "--detach", "--", "sleep 300").exit_code == 0
    assert gpu("job", "artifacts", "--to", s3.uri, "--direct", "--json").error["code"] == "job_running"
    assert gpu("job", "cancel").exit_code == 0
    assert gpu("job", "artifacts", "--to", "file:///tmp/x", "--direct", "--json").exit_code == 2
    assert gpu("job", "artifacts", "--direct", "--json").exit_code == 2


def test_what_a_machine_sent_at_its_end_is_pulled_from_there_when_it_is_gone(project, gpu, s3, home):
    from gpu_skills.state import registry
    from gpu_skills.state.project import find

    (project / "gpujob.yaml").write_text(f"run: '{MAKES}'\noutputs: {{uri: '{s3.uri}/runs'}}\n")
    assert gpu("job", "run", "--no-pull", "--json").exit_code == 0
    place = "runs/J-000001-" + json.loads((project / ".pi/gpu/jobs/J-000001/job.json").read_text())["nonce"][:8]
    (listed,) = home.rglob("jobs/J-000001/manifest.jsonl")
    manifest = listed.read_bytes()
    s3.client.put_object(Bucket=s3.bucket, Key=f"{place}/.gpu-expiry/00000", Body=b"hellox")
    s3.client.put_object(Bucket=s3.bucket, Key=f"{place}/.gpu-expiry/manifest.jsonl", Body=manifest)
    state = find(project)
    (machine,) = registry.load(state, "machines")
    registry.put(state, "machines", {**machine, "provider": "vast", "status": "destroyed", "instance_id": "1"})
    result = gpu("job", "pull", "--json")
    assert result.exit_code == 0, result.stderr
    assert (project / "gpu-outputs/J-000001/a.txt").read_text() == "hello" and result.document["final"]
    assert gpu("job", "artifacts", "--json").document["collected"]
    assert gpu("job", "pull", "--json").error["code"] == "machine_gone"
