"""What a machine has and nobody else is not given up for want of records: not by reconcile, not by destroy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import JobNotFound, JobRunning, NotCollected, Unreachable
from gpu_skills.jobs import gone, launch, parting
from gpu_skills.jobs import release as jobs_release
from gpu_skills.jobs.pack import pack
from gpu_skills.jobs.records import START_REFUSED, JobFolder
from gpu_skills.jobs.submit import send
from gpu_skills.lifecycle import intents, machines, runs, states
from gpu_skills.lifecycle.ending import stops, witness
from gpu_skills.lifecycle.recovery import overview, reconcile
from gpu_skills.lifecycle.renting import provision
from gpu_skills.state import budget
from remote.runner_client import eventually
from rented import rent
from renting import approved, guarded, play_machines
from renting import rent as rent_planned
from run_by_hand import ByHand

both = pytest.mark.parametrize("vendor", ["vast", "runpod"])
pytestmark = pytest.mark.subprocess


def a_job(r: Any, machine: Any, *, sent: bool = True, ended: bool = True, **end: Any) -> str:
    """One whose start was written down and of which no answer of the machine is on record."""
    job = r.op.ledger.new_job_id()
    if sent:
        JobFolder(r.project, job).write("job", {"id": job, "nonce": "00"})
    now = timestamp(r.clock.now())
    r.op.ledger.start({"id": job, "provider": r.vendor, "machine_id": machine.id, "started_at": now})
    if ended:
        r.op.ledger.finish({"id": job, "status": "failed", "completed_at": now, "duration_s": 1, **end})
    return job


def asleep_past_everything(r: Any, machine: Any) -> None:
    """Idleness stopped it, then its deadline and the time its disk is kept went by."""
    r.writer.stop(machine.instance_id)
    r.clock.sleep(10)
    reconcile.run(r.op, [r.vendor])
    r.clock.sleep(72 * 3600)


@both
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "no end"])
def test_a_job_that_was_sent_and_never_answered_for_keeps_the_disk_of_its_machine(rig, vendor, ended):
    r = rig(vendor, containers=False)
    hand = ByHand(r, deadline_h=6).upto("close")
    hand.ready()
    job = a_job(r, hand.machine, ended=ended)
    asleep_past_everything(r, hand.machine)
    (kept,) = reconcile.run(r.op, [vendor]).findings
    assert kept.what == "kept" and kept.next_step == f"gpu job pull {job}" and job in kept.text
    assert r.notices[-1][:2] == ("idle_stop", hand.machine_id) and job in r.notices[-1][2]["uncollected"]
    now = timestamp(r.clock.now())
    JobFolder(r.project, job).write("collected", {"final": True, "at": now, "destination": "x", "files": 0})
    if not ended:
        assert [f.what for f in reconcile.run(r.op, [vendor]).findings] == ["kept"], "for all we know it goes on"
        r.op.ledger.finish({"id": job, "status": "lost", "completed_at": now, "duration_s": 1})
    assert [f.what for f in reconcile.run(r.op, [vendor]).findings] == ["ended"]


def test_a_job_with_no_end_keeps_the_machine_even_where_its_folder_is_lost(rig):
    r = rig("vast", containers=False)
    hand = ByHand(r, deadline_h=6).upto("close")
    hand.ready()
    asleep_past_everything(r, hand.machine)
    job = a_job(r, hand.machine, sent=False, ended=False)
    assert [f.what for f in reconcile.run(r.op, ["vast"]).findings] == ["kept"]
    r.op.ledger.finish({"id": job, "status": "failed", "completed_at": timestamp(r.clock.now()), "duration_s": 1})
    assert [f.what for f in reconcile.run(r.op, ["vast"]).findings] == ["ended"]


def test_only_what_a_machine_may_have_counts(rig):
    r = rig("vast", containers=False)
    machine = rent(r)
    sent = a_job(r, machine)
    a_job(r, machine, sent=False)
    a_job(r, machine, reason=START_REFUSED)
    a_job(r, machine, reason="never_started")
    assert gone.unverified_on(r.project, r.op.ledger, machine.id) == [sent]
    machines.save(r.project, replace(machine, id="m_later", extra={"was": machine.id}))
    assert gone.unverified_on(r.project, r.op.ledger, "m_later") == [sent], "it is the same disk"


def test_a_stopped_machine_may_go_once_what_its_job_left_was_read_back_from_elsewhere(rig):
    r = rig("vast", containers=False)
    machine = rent(r)
    job = a_job(r, machine)
    folder = JobFolder(r.project, job)
    output = {"path": "a", "sha256": "ab" * 32}
    folder.write("manifest", {"final": True, "files": [output | {"bytes": 3}]})
    r.writer.stop(machine.instance_id)
    r.clock.sleep(60)
    machine = witness.current(r.op, machine)

    def read_back(seconds_ago: float) -> None:
        at = timestamp(r.clock.now() - timedelta(seconds=seconds_ago))
        line = output | {"size": 3, "uri": "s3://b/k/a", "verified_at": at}
        folder.write("artifacts", {"uri": "s3://b/k", "files": [line]})

    asked = lambda: gone.unverified_on(r.project, r.op.ledger, machine.id, now=r.clock.now())  # noqa: E731
    assert [type(o) for o in jobs_release.gate(r.op, machine)] == [NotCollected] and asked() == [job]
    read_back(25 * 3600)
    assert [type(o) for o in jobs_release.gate(r.op, machine)] == [NotCollected] and asked() == [job]
    read_back(3600)
    assert jobs_release.gate(r.op, machine) == [] and asked() == []


@both
def test_a_machine_taken_back_from_its_label_is_kept_and_given_up_by_its_name_only(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r, deadline_h=6).upto("close")
    hand.ready()
    r.project.state.rename(r.project.root / "moved-away")
    notices = r.notices
    r = r.another(r.project.root, project_id=r.project.project_id)
    reconcile.run(r.op, [vendor], adopt=True)
    machine = machines.find(r.project, hand.machine_id)
    asleep_past_everything(r, machine)
    (kept,) = reconcile.run(r.op, [vendor]).findings
    assert kept.what == "kept" and "not on record" in kept.text
    assert notices[-1][:2] == ("idle_stop", machine.id) and r.burning()
    with pytest.raises(NotCollected) as refused:
        jobs_release.destroy(r.op, machine)
    assert "gpu machine start" not in refused.value.next_step, "its plan is lost too"
    assert f"--abandon-outputs {machine.id}" in refused.value.next_step
    with pytest.raises(JobNotFound):
        jobs_release.destroy(r.op, machine, abandon=["J-000009"])
    assert r.calls("destroy") + r.calls("terminate") == 0
    assert jobs_release.destroy(r.op, machine, abandon=[machine.id]) == "destroyed" and not r.burning()
    (told,) = intents.observations(r.project, "outputs_abandoned", machine_id=machine.id)
    assert told["details"]["names"] == [machine.id]


def test_a_machine_taken_back_is_not_stopped_where_that_wipes_it(rig):
    r = rig("runpod", containers=False)
    machine = rent(r, keeps=False)
    machines.save(r.project, replace(machine, extra={"adopted_at": timestamp(r.clock.now())}))
    with pytest.raises(NotCollected, match="not on record"):
        stops.stop(r.op, machine)
    assert r.burning()


def test_a_machine_that_answers_is_asked_for_jobs_that_no_record_names(rig):
    r = rig("vast", real=True)
    got = rent_planned(r, machine_class="project")
    link, machine = got.link, got.machine
    (r.project.root / "input.txt").write_text("x")
    tree = send(r.project, link, pack(r.project.root), None).tree
    for job, run in (("J-000001", "echo x > $GPU_OUTPUT_DIR/x"), ("J-000002", "sleep 600"), ("J-000003", "true")):
        spec = {"id": job, "nonce": job.lower(), "tree": tree, "run": run}
        link.session.call("start", {"project": r.project.project_id, "job": spec, "env": {}})

    def states() -> dict[str, str]:
        told = link.session.call("jobs", {"project": r.project.project_id})["jobs"]
        return {status["job"]: status["state"] for status in told}

    ends = {"J-000001": "succeeded", "J-000002": "running", "J-000003": "succeeded"}
    assert eventually(lambda: states() == ends, 20)
    assert r.op.ledger.jobs_on(machine.id) == []
    (loses,) = jobs_release.gate(r.op, machine)
    assert isinstance(loses, NotCollected) and "J-000001" in loses.message and "1 file" in loses.message
    (runs,) = jobs_release.gate(r.op, machine, ["J-000001"])
    assert isinstance(runs, JobRunning) and "J-000002" in runs.message
    with pytest.raises(JobNotFound):
        jobs_release.gate(r.op, machine, ["J-000009"])
    assert jobs_release.gate(r.op, machine, ["J-000001", "J-000002"]) == [], "the third left nothing"
    assert jobs_release.gate(r.op, machine, [machine.id]) == []

    taken_back = {"adopted_at": "2026-01-01T00:00:00Z"}
    machines.update(r.project, machine.id, lambda m: replace(m, extra={**m.extra, **taken_back}))

    def silent(machine: Any) -> Any:
        raise Unreachable(host="h", reason="nobody there")

    (unknown,) = jobs_release.gate(replace(r.op, connect=silent), machines.find(r.project, machine.id))
    assert isinstance(unknown, NotCollected)
    link.session.call("cancel", {"project": r.project.project_id, "job": "J-000002", "why": "user", "wait_s": 5})
    link.close()


def a_launch(r: Any) -> tuple[launch.Launch, Any]:
    """A job's own machine, rented by its plan."""
    play_machines(r)
    guarded(r)
    name, plan, approval = approved(r)
    begun = launch.begin(r.project, r.op.ledger, r.clock, name, launch.Limits(0.0, plan.deadline_s, None), approval.id)
    return begun, provision.provision(r.op, name, plan, approval).machine


def without_record(r: Any, machine: Any) -> None:
    """Somebody took its line out of machines.json."""
    path = r.project.path("machines.json")
    path.write_text(json.dumps([one for one in json.loads(path.read_text()) if one["id"] != machine.id]))


@both
def test_a_launch_whose_machine_lost_its_record_is_not_over_while_it_bills(rig, vendor, monkeypatch):
    r = rig(vendor, containers=False)
    begun, machine = a_launch(r)
    without_record(r, machine)
    with monkeypatch.context() as blind:  # no look, or one that shows nothing
        blind.setattr(reconcile, "run", lambda *args, **more: None)
        assert parting.end_machines(r.op, begun, why="cancelled") == "terminating"
    assert r.burning() and launch.find(r.project, begun.plan).ended_at is None
    assert parting.end_machines(r.op, begun, why="cancelled") == "destroyed"
    assert not r.burning() and launch.find(r.project, begun.plan).ended_at


def test_a_machine_that_is_gone_with_its_record_is_ended_like_any_other(rig):
    r = rig("vast", containers=False)
    begun, machine = a_launch(r)
    without_record(r, machine)
    r.writer.destroy(machine.instance_id)
    r.clock.sleep(30)
    while parting.end_machines(r.op, begun, why="cancelled") != "destroyed":
        assert r.clock.now() < parse_timestamp(machine.deadline_at)
        r.clock.sleep(60)
    assert machines.find(r.project, machine.id).status in states.FINAL and launch.find(r.project, begun.plan).ended_at


def test_a_launch_whose_run_is_lost_names_the_machine_that_it_made(rig):
    r = rig("vast", containers=False)
    begun, machine = a_launch(r)
    (runs.folder(r.op, begun.approval_id) / f"{begun.approval_id}.json").unlink()
    with pytest.raises(parting.MachineUnconfirmed) as caught:
        parting.end_machines(r.op, begun, why="cancelled")
    assert caught.value.next_step == f"gpu machine destroy {machine.id}"
    assert launch.find(r.project, begun.plan).ended_at is None


def with_all_records_lost(r: Any, *, run_too: bool) -> tuple[Any, ByHand]:
    """A machine was rented, ended itself, and what the project knew of it is gone; the account's journal is not."""
    hand = ByHand(r).upto("close")
    instance_id = hand.ready().instance_id
    r.clock.sleep(1800)
    r.writer.destroy(instance_id)
    for path in r.project.state.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if run_too:
        (runs.folder(r.op) / f"{hand.approval}.json").unlink()
    return r.another(r.project.root, project_id=r.project.project_id), hand


def reserved_usd(r: Any) -> Any:
    return budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd


@both
@pytest.mark.parametrize("run_too", [True, False], ids=["run lost", "run there"])
def test_money_reserved_for_a_machine_that_is_gone_with_all_its_records_comes_free(rig, vendor, run_too):
    r, hand = with_all_records_lost(rig(vendor, containers=False), run_too=run_too)
    first = reconcile.run(r.op, [vendor])
    (found,) = first.findings
    assert found.what == "reservation_open" and found.machine_id == hand.machine_id and not first.is_clear
    assert found.next_step == f"gpu reconcile --provider {vendor}" and reserved_usd(r) == 5
    told = {seen.what: seen for seen in overview.view(r.op, vendor) if seen.verdict == "problem"}
    assert told[hand.machine_id].next_step == found.next_step, "doctor says what reconcile says"
    r.clock.sleep(30)
    assert not reconcile.run(r.op, [vendor]).is_clear, "half a minute proves nothing"
    r.clock.sleep(1800)
    last = reconcile.run(r.op, [vendor])
    assert [f.what for f in last.findings] == ["settled"] and last.is_clear and reserved_usd(r) == 0
    assert abs(r.op.ledger.spend(include_charges=True).total_usd - r.billed_usd()) < Decimal("0.00001")
    again = reconcile.run(r.op, [vendor])
    assert again.is_clear and not again.findings and not again.booked


def test_where_charges_cannot_be_read_a_machine_without_records_has_cost_all_that_was_reserved(rig):
    r, _ = with_all_records_lost(rig("vast", containers=False), run_too=True)
    r.fault("403", "charges", times=0)
    for wait_s in (0, 30, 1800):
        r.clock.sleep(wait_s)
        last = reconcile.run(r.op, ["vast"])
    assert last.is_clear and reserved_usd(r) == 0
    assert r.op.ledger.spend(include_charges=True).total_usd == 5
