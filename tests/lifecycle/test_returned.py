"""Records lost while a job runs: the machine is taken back with its jobs, and nothing ends it before they are here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpu_skills.errors import JobRunning, NotCollected, NotReady, Refused, RemoteError
from gpu_skills.jobs import collect, observe
from gpu_skills.jobs import release as jobs_release
from gpu_skills.jobs.pack import pack
from gpu_skills.jobs.records import JobFolder
from gpu_skills.jobs.spec import JobSpec
from gpu_skills.jobs.submit import send, start
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.ending import stops
from gpu_skills.lifecycle.recovery import reconcile, returned
from gpu_skills.lifecycle.renting import keeping
from lifecycle.test_adoption import lose_everything, words
from renting import rent
from run_by_hand import ByHand
from sandbox_fixture import eventually

both = pytest.mark.parametrize("vendor", ["vast", "runpod"])


def a_job(r, link, run: str) -> str:
    """Submit it as `gpu job run` does, to a machine of this project."""
    (r.project.root / "input.txt").write_text("x")
    packed = pack(r.project.root)
    spec = JobSpec(run=run, directory=r.project.root)
    report = send(r.project, link, packed, None)
    return start(r.project, r.op.ledger, r.clock, link, spec, packed, report, env_values={}).job


def lose(r, *names: str):
    """These files of the state directory are gone; everything else is as it was."""
    for name in names:
        path = r.project.state / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return r.another(r.project.root)


RECORDS = ["machines.json", "jobs.jsonl", "jobs.head.jsonl", "jobs.index.json", "jobs"]


@pytest.fixture
def at_work(rig):
    """`at_work("vast")`: (rig, machine, the job that runs on it until `release.txt` is in its workspace)."""
    opened = []

    def make(vendor: str, run: str = "echo x > $GPU_OUTPUT_DIR/x; sleep 600", **changes):
        r = rig(vendor, real=True)
        got = rent(r, **{"machine_class": "project", **changes})
        opened.append(got.link)
        return r, got.machine, a_job(r, got.link, run)

    yield make
    for link in opened:
        link.close()


@both
@pytest.mark.parametrize(
    "lost", [["machines.json"], ["jobs.jsonl", "jobs.head.jsonl"], RECORDS], ids=["registry", "ledger", "all"]
)
def test_lost_records_of_a_job_that_runs_are_never_all_clear_and_come_back_by_adopting(at_work, vendor, lost):
    r, machine, job = at_work(vendor)
    r = lose(r, *lost)
    report = reconcile.run(r.op, [vendor])
    if lost == ["machines.json"]:  # the ledger still names its job
        assert words(report) == ["record_lost"]
    else:
        (named,) = [f for f in report.findings if f.is_uncertain]
        assert named.what == "jobs_unrecorded" and job in named.text
        assert named.next_step == f"gpu reconcile --provider {vendor} --adopt"
    report = reconcile.run(r.op, [vendor], adopt=True)
    assert report.is_clear, report.findings
    after = machines.find(r.project, machine.id)
    assert after.status == "ready" and not after.has_unknown_past
    assert r.op.running_jobs(machine.id) == [job]
    with pytest.raises(JobRunning):
        stops.stop(r.op, after)
    with pytest.raises(JobRunning):
        jobs_release.destroy(r.op, after)
    assert reconcile.run(r.op, [vendor]).findings == ()


@both
def test_a_lost_state_directory_gets_machine_and_job_back_and_the_outputs_can_be_pulled(at_work, vendor):
    r, machine, job = at_work(
        vendor, "echo x > $GPU_OUTPUT_DIR/x; while [ ! -e $GPU_WORKSPACE/go ]; do sleep 0.1; done"
    )
    r = lose_everything(r)
    assert not reconcile.run(r.op, [vendor]).is_clear
    report = reconcile.run(r.op, [vendor], adopt=True)
    assert report.is_clear and words(report) == ["adopted", "jobs_read_back"]
    after = machines.find(r.project, machine.id)
    assert after.status == "ready" and not after.has_unknown_past and r.op.running_jobs(machine.id) == [job]
    link = r.op.connect(after)
    try:
        root = Path(link.session.greeting.root) / "projects" / r.project.project_id
        (root / "workspace" / "go").touch()
        eventually(lambda: observe.settle(r.project, r.op.ledger, r.clock, link)[job]["state"] == "succeeded")
        assert r.op.unverified(machine.id) == [job]
        with pytest.raises(NotCollected):
            jobs_release.destroy(r.op, after)
        collect.pull(r.project, r.clock, link, job)
    finally:
        link.close()
    assert JobFolder(r.project, job).outputs.joinpath("x").read_text() == "x\n"
    line = r.op.ledger.latest(job)
    assert line["status"] == "completed" and line["machine_id"] == machine.id and line["cost_usd"] > 0
    assert jobs_release.destroy(r.op, after, wait_s=900) == "destroyed" and not r.burning()


def test_a_new_job_gets_no_number_that_the_machine_or_the_outputs_here_have(at_work):
    r, machine, job = at_work("vast")
    assert job == "J-000001"
    r = lose(r, *RECORDS[1:])
    link = r.op.connect(machine)
    try:
        assert a_job(r, link, "true") == "J-000002"  # the machine is asked
    finally:
        link.close()
    r = lose(r, *RECORDS[1:])
    (r.project.root / "gpu-outputs" / "J-000007").mkdir(parents=True)
    assert r.op.ledger.new_job_id() == "J-000008"
    reconcile.run(r.op, ["vast"], adopt=True)
    assert {line["id"] for line in r.op.ledger.jobs()} == {"J-000001", "J-000002"}
    assert r.op.ledger.new_job_id() == "J-000009"


def test_a_number_that_another_job_has_here_by_now_is_not_mixed_with_it(at_work):
    r, machine, job = at_work("vast")
    r = lose(r, *RECORDS[1:])
    now = "2026-01-01T00:00:00Z"
    r.op.ledger.start({"id": job, "machine_id": "m_other", "provider": "vast", "inputs": {}, "started_at": now})
    report = reconcile.run(r.op, ["vast"], adopt=True)
    (named,) = report.findings
    assert named.what == "jobs_unrecorded" and job in named.text and not report.is_clear
    assert r.op.ledger.latest(job)["machine_id"] == "m_other" and JobFolder(r.project, job).read("job") is None
    with pytest.raises(JobRunning):
        jobs_release.destroy(r.op, machines.find(r.project, machine.id))


def test_one_that_cannot_be_asked_is_uncertain_and_says_how_it_is_given_up(at_work, monkeypatch):
    r, machine, _ = at_work("vast")
    r = lose_everything(r)
    (r.op.user_state / "ssh" / "id_ed25519").unlink()  # nobody can log in any more
    (r.op.user_state / "ssh" / "id_ed25519.pub").unlink()
    report = reconcile.run(r.op, ["vast"], adopt=True)
    (unread,) = [f for f in report.findings if f.is_uncertain]
    assert unread.what == "jobs_unread" and not report.is_clear
    assert f"gpu machine destroy {machine.id} --abandon-outputs {machine.id}" in unread.next_step
    with pytest.raises((RemoteError, NotReady)) as refused:
        returned.bring_up(r.op, machines.find(r.project, machine.id))
    assert "--abandon-outputs" in refused.value.next_step


@both
def test_a_machine_whose_job_no_record_names_is_not_stopped_under_it(at_work, vendor):
    r, machine, job = at_work(vendor)
    r = lose(r, "jobs.jsonl", "jobs.head.jsonl", "jobs.index.json", "jobs")
    assert r.op.running_jobs(machine.id) == []
    with pytest.raises(JobRunning, match=job) as refused:
        jobs_release.stop(r.op, machines.find(r.project, machine.id))
    assert f"gpu reconcile --provider {vendor} --adopt" in refused.value.next_step
    assert len(r.burning()) == 1 and machines.find(r.project, machine.id).status in ("ready", "busy")


def test_a_machine_that_was_taken_back_and_does_not_answer_is_not_stopped(rig):
    r = rig("vast", containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r = lose_everything(r)
    reconcile.run(r.op, ["vast"], adopt=True)
    machine = machines.find(r.project, hand.machine_id)
    with pytest.raises((RemoteError, NotReady)) as refused:
        jobs_release.stop(r.op, machine)
    assert f"--abandon-outputs {machine.id}" in refused.value.next_step and r.calls("state") == 0


@both
def test_a_stopped_machine_that_was_taken_back_without_its_plan_says_what_works_instead_of_a_start(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r.writer.stop(hand.machine.instance_id)
    r.clock.sleep(10)
    r = lose_everything(r)
    reconcile.run(r.op, [vendor], adopt=True)
    machine = machines.find(r.project, hand.machine_id)
    gives_up = f"gpu machine destroy {machine.id} --abandon-outputs {machine.id}"
    with pytest.raises(Refused, match="not on record") as refused:
        keeping.start_plan(r.op, machine, lasts_s=3600, session_usd=None)
    assert refused.value.next_step == gives_up
    (named,) = reconcile.run(r.op, [vendor]).findings
    assert named.what == "stopped" and named.next_step == gives_up
    with pytest.raises(NotCollected) as refused:
        jobs_release.destroy(r.op, machine)
    assert refused.value.next_step == gives_up
    assert jobs_release.destroy(r.op, machine, abandon=[machine.id]) == "destroyed"
