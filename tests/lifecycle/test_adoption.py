"""Records lost, machines not: what the label, the provider and the user's own state directory bring back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from decimal import Decimal

import pytest

from gpu_skills.errors import Refused, UsageError
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.recovery import adoption, reconcile
from gpu_skills.state import budget, files
from gpu_skills.state import project as projects
from gpu_skills.state.ledger import Ledger
from renting import play_machines, rent
from run_by_hand import ByHand, job

both = pytest.mark.parametrize("vendor", ["vast", "runpod"])


@pytest.fixture
def rig(rig):
    """Machines without containers answer as the vendor shows them: one that is taken back is asked for its jobs."""

    def make(vendor: str, **options):
        r = rig(vendor, **options)
        if options.get("containers") is False:
            play_machines(r)
        return r

    return make


def lose_everything(r, *, same_inode: bool = False):
    """The state directory is gone, then `gpu init --project-id`: the same id in another directory."""
    if same_inode:  # a file system may give the new directory the number of the old one
        for path in r.project.state.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        r.project.state.rename(r.project.root / "moved-away")
    return r.another(r.project.root, project_id=r.project.project_id)


def words(report) -> list[str]:
    return [finding.what for finding in report.findings]


@both
def test_a_lost_state_directory_is_rebuilt_from_labels_with_the_rates_of_the_provider(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    before = hand.ready()
    r = lose_everything(r)
    assert machines.all_machines(r.project) == []
    report = reconcile.run(r.op, [vendor])
    assert words(report) == ["unrecorded"] and not report.is_clear
    assert report.findings[0].next_step == f"gpu reconcile --provider {vendor} --adopt"
    assert machines.all_machines(r.project) == []
    report = reconcile.run(r.op, [vendor], adopt=True)
    assert words(report) == ["adopted"] and report.is_clear
    after = machines.find(r.project, hand.machine_id)
    seen = r.reader.machine(before.instance_id)
    assert after.rate_usd_hr == pytest.approx(seen.rate_usd_hr, abs=Decimal("0.000001"))
    for name in ("instance_id", "label", "intent", "machine_class", "deadline_at", "status", "plan"):
        assert getattr(after, name) == getattr(before, name), name
    assert runs.load(r.op, hand.approval).owner == runs.owner_of(r.op)
    assert words(reconcile.run(r.op, [vendor], adopt=True)) == []


@pytest.mark.parametrize("has_plan", [True, False], ids=["plan", "no plan"])
@pytest.mark.parametrize("machine_class", ["project", "job"])
@both
def test_an_adopted_machine_is_talked_to_in_the_folder_it_has(rig, vendor, machine_class, has_plan):
    """A project's machine keeps its runner in the workspace, a job's one that keeps nothing has it in its home."""
    r = rig(vendor, real=True)
    got = rent(r, machine_class=machine_class, outputs_ephemeral=machine_class == "job" and vendor == "runpod")
    root = got.link.session.greeting.root
    got.link.close()
    plan = r.project.path("plans") / f"{got.machine.plan}.json"
    kept = plan.read_bytes()
    r = lose_everything(r)
    if has_plan:
        files.make_directory(r.project.path("plans"))
        (r.project.path("plans") / plan.name).write_bytes(kept)
    reconcile.run(r.op, [vendor], adopt=True)
    link = r.op.connect(machines.find(r.project, got.machine.id))
    try:
        assert link.session.greeting.root == root
        assert link.session.call("fuse", {"intent": got.machine.intent})["receipt"] is not None
    finally:
        link.close()


@both
def test_what_was_adopted_is_booked_settled_and_corrected_like_any_other(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    job(r, hand.ready(), 600)
    r = lose_everything(r)
    reconcile.run(r.op, [vendor], adopt=True)
    r.clock.sleep(900)
    release.destroy(r.op, machines.find(r.project, hand.machine_id), why="asked")
    assert budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd == 0
    r.clock.sleep(1200)
    reconcile.run(r.op, [vendor])
    assert abs(r.op.ledger.spend(include_charges=True).total_usd - r.billed_usd()) < Decimal("0.00001")


@both
def test_a_reservation_of_a_lost_state_directory_comes_free(rig, vendor):
    r = rig(vendor, containers=False)
    ByHand(r).upto("reserve")
    r = lose_everything(r)
    report = reconcile.run(r.op, [vendor])
    assert words(report) == ["owner_gone"] and not report.is_clear
    assert report.findings[0].next_step == f"gpu reconcile --provider {vendor} --adopt"
    assert budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd == 5
    assert words(reconcile.run(r.op, [vendor], adopt=True)) == ["settled"]
    assert budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd == 0


def moved(r, where):
    """The project under another name, found there by the next command."""
    r.project.root.rename(where)
    project = projects.find(where)
    return replace(r, op=replace(r.op, project=project, ledger=Ledger(project, r.clock)))


@both
def test_a_project_that_was_renamed_goes_on_booking_and_settles_what_it_reserved(rig, vendor, tmp_path):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r = moved(r, tmp_path / "renamed")
    assert reconcile.run(r.op, [vendor]).is_clear
    assert runs.load(r.op, hand.approval).owner == runs.owner_of(r.op)
    r.clock.sleep(900)
    release.destroy(r.op, machines.find(r.project, hand.machine_id), why="asked", wait_s=900)
    assert not r.burning() and r.op.ledger.spend(include_charges=True).total_usd > 0
    assert budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd == 0


@both
def test_a_machine_of_a_renamed_project_is_destroyed_and_booked_without_a_reconcile(rig, vendor, tmp_path):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    r = moved(r, tmp_path / "renamed")
    r.clock.sleep(900)
    release.destroy(r.op, machines.find(r.project, hand.machine_id), why="asked", wait_s=900)
    assert r.op.ledger.spend(include_charges=True).total_usd > 0
    assert budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd == 0


def test_of_two_copies_of_a_project_that_is_gone_one_takes_its_runs_over(rig, tmp_path):
    r = rig("vast", containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    shutil.copytree(r.project.root, tmp_path / "second")
    project = projects.find(tmp_path / "second")
    second = replace(r.op, project=project, ledger=Ledger(project, r.clock))
    assert runs.take_moved(second) == []  # the first one is there
    first = moved(r, tmp_path / "renamed").op
    assert [run.approval_id for run in runs.take_moved(second)] == [hand.approval]
    assert runs.take_moved(first) == [] and runs.own_runs(first) == []


@both
def test_a_create_that_the_lost_journal_knew_is_looked_for_a_day(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("begin")
    r = lose_everything(r)
    assert words(reconcile.run(r.op, [vendor], adopt=True)) == ["create_unknown"]
    assert intents.read(r.project)[hand.intent].is_open
    r.clock.sleep(25 * 3600)
    assert set(words(reconcile.run(r.op, [vendor]))) == {"never_seen", "settled"}


@both
@pytest.mark.parametrize("last", ["attempt", "record", "begin", "create", "close"])
def test_files_lost_from_a_directory_that_stayed_lose_no_machine(rig, vendor, last):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto(last)
    r = lose_everything(r, same_inode=True)
    report = reconcile.run(r.op, [vendor])
    alive = {m.instance_id for m in machines.all_machines(r.project) if m.status not in states.FINAL}
    assert {b.removeprefix("instance-") for b in r.burning()} <= alive
    if last == "begin":
        assert words(report) == ["create_unknown"] and intents.read(r.project)[hand.intent].is_open
    money = budget.books(r.project, r.op.ledger, r.clock, r.op.environ).reserved_usd
    assert money == (0 if last == "attempt" else 5)


@both
def test_a_machine_of_another_state_directory_is_listed_and_never_taken_while_that_is_there(rig, vendor, tmp_path):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    other = r.another(tmp_path / "clone", project_id=r.project.project_id)
    report = reconcile.run(other.op, [vendor], adopt=True)
    assert words(report) == ["elsewhere"] and report.is_clear
    assert str(r.project.state) in report.findings[0].text and machines.all_machines(other.project) == []
    (one,) = adoption.unrecorded(other.op, vendor, r.reader.machines())
    with pytest.raises(Refused):
        adoption.take(other.op, one)
    assert runs.load(r.op, hand.approval).owner == runs.owner_of(r.op)


@both
def test_a_machine_of_a_run_that_nobody_has_is_rebuilt_from_label_and_provider_alone(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    shutil.rmtree(runs.folder(r.op))
    r = lose_everything(r)
    reconcile.run(r.op, [vendor], adopt=True)
    (machine,) = machines.all_machines(r.project)
    assert machine.intent == hand.intent and machine.status == "ready" and machine.rate_usd_hr > 0
    release.destroy(r.op, machine, why="asked", wait_s=900)
    assert machines.find(r.project, machine.id).status == "destroyed" and not r.burning()
    assert r.op.ledger.spend(include_charges=True).total_usd > 0


@both
def test_a_stopped_machine_is_taken_back_as_stopped(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    rate = hand.ready().rate_usd_hr
    r.writer.stop(hand.machine.instance_id)
    r.clock.sleep(10)
    r = lose_everything(r)
    reconcile.run(r.op, [vendor], adopt=True)
    machine = machines.find(r.project, hand.machine_id)
    assert machine.status == "stopped" and machine.storage_usd_hr > 0 and machine.rate_usd_hr == pytest.approx(rate)


@both
def test_instances_of_other_projects_are_foreign_and_named_by_their_project(rig, vendor):
    r = rig(vendor, containers=False)
    hand = ByHand(r)
    hand.label = str(labels.Label("p-other", hand.intent, hand.deadline_at))
    hand.make_unrecorded()
    report = reconcile.run(r.op, [vendor], adopt=True)
    assert words(report) == [] and report.accounts[0].foreign == 1
    assert report.accounts[0].project_ids == {"p-other": 1} and machines.all_machines(r.project) == []


@both
def test_a_lost_project_id_is_taken_back_with_its_machines(rig, vendor, tmp_path):
    r = rig(vendor, containers=False)
    hand = ByHand(r).upto("close")
    hand.ready()
    lost = r.project.project_id
    r.project.state.rename(tmp_path / "moved-away")
    r = r.another(tmp_path / "project")
    assert r.project.project_id != lost
    assert words(reconcile.run(r.op, [vendor], adopt=True)) == []
    report = reconcile.run(r.op, [vendor], adopt=True, project_id=lost)
    assert words(report) == ["adopted"]
    project = projects.load(r.project.root)
    assert project.project_id == lost and [m.intent for m in machines.all_machines(project)] == [hand.intent]


@both
def test_only_an_id_that_was_seen_is_taken_and_only_by_a_project_without_machines(rig, vendor):
    r = rig(vendor, containers=False)
    ByHand(r).upto("close")
    for wrong, error in (("p-never", Refused), ("../x", UsageError)):
        with pytest.raises(error):
            adoption.take_project_id(r.project, wrong, ["p-seen"])
    with pytest.raises(Refused, match="has machines"):
        adoption.take_project_id(r.project, "p-seen", ["p-seen"])
    assert projects.load(r.project.root).project_id == r.project.project_id


@both
def test_everything_that_burns_under_our_label_is_on_record_after_adopting(rig, vendor):
    r = rig(vendor, containers=False)
    for number, approval in enumerate(("a_1111", "a_2222", "a_3333"), 1):
        ByHand(r, approval=approval, number=number).upto("create")
        r.clock.sleep(30)
    r = lose_everything(r)
    reconcile.run(r.op, [vendor], adopt=True)
    alive = {m.instance_id for m in machines.all_machines(r.project) if m.status not in states.FINAL}
    assert {b.removeprefix("instance-") for b in r.burning()} == alive and len(alive) == 3
