"""One approval, one machine: from the create to ready, and what is left when it does not get there."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import (
    ApprovalExpired,
    ApprovalUsed,
    ArchUnsupported,
    AuthRejected,
    CreatedPriceMismatch,
    InsufficientBalance,
    NoCapacity,
    NotReady,
    OverCeiling,
    PolicyMissing,
    ProviderSilent,
    StateBusy,
    Unguarded,
)
from gpu_skills.lifecycle import intents, machines, memory, runs
from gpu_skills.lifecycle.books import accounting
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.renting import bringup, claims, provision, specs
from gpu_skills.state import budget
from renting import GPUS, a_plan, alive, approved, guarded, instances, play_machines, rent, roomy

pytestmark = pytest.mark.subprocess


@pytest.fixture(autouse=True)
def short_streams(monkeypatch):
    """A log that stays open is read for a moment only."""
    monkeypatch.setattr("gpu_skills.providers.runpod.reader._LOG_STREAM_S", 0.2)


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_an_approved_plan_becomes_one_machine_that_is_ready(rig, vendor):
    r = rig(vendor, containers=False)
    play_machines(r)
    got = rent(r)
    (instance,) = alive(r)
    assert r.creates == 1 and got.machine.instance_id == str(instance.id) and got.machine.status == "ready"
    assert got.machine.label == instance.label and got.receipt.key == "proven"
    run = runs.load(r.op, got.machine.extra["approval_id"])
    assert run.state == "won" and [a.result for a in run.attempts] == ["done"]


def test_the_same_approval_again_finds_its_machine_and_asks_for_nothing(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    given = approved(r)
    first = provision.provision(r.op, *given)
    again = provision.provision(r.op, *given)
    assert r.creates == 1 and again.machine == first.machine and len(machines.all_machines(r.project)) == 1
    assert len(intents.read(r.project)) == 1


# an answer that does not tell -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
@pytest.mark.parametrize(("fault", "args"), [("lost_reply", {}), ("500", {"done": True}), ("half_body", {})])
def test_a_create_that_was_done_and_not_answered_is_found_by_its_label_and_never_sent_again(rig, vendor, fault, args):
    r = rig(vendor, containers=False)
    play_machines(r)
    r.fault(fault, **args)
    got = rent(r)
    (instance,) = alive(r)
    assert r.creates == 1 and got.machine.instance_id == str(instance.id) and got.machine.status == "ready"


def test_a_create_that_answers_after_we_gave_up_waiting_is_found_by_its_label(rig, monkeypatch):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    given = approved(r)
    monkeypatch.setattr("gpu_skills.wire.READ_TIMEOUT_S", 0.3)
    r.fault("slow", seconds=0.8)
    got = provision.provision(r.op, *given)
    assert r.creates == 1 and len(alive(r)) == 1 and got.machine.status == "ready"


def test_a_list_that_lags_is_looked_at_until_the_machine_shows(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("list_lag", seconds=45)
    r.fault("lost_reply")
    got = rent(r)
    assert r.creates == 1 and got.machine.status == "ready"


def test_a_request_delivered_twice_leaves_the_older_machine_and_the_other_goes(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("duplicate")
    r.fault("lost_reply")
    got = rent(r)
    left = alive(r)
    assert [str(i.id) for i in left] == [got.machine.instance_id]
    twins = [m for m in machines.all_machines(r.project) if m.id != got.machine.id]
    assert len(instances(r)) == 2 and [t.status for t in twins] == ["terminating"]


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_create_of_which_nobody_knows_is_never_sent_again_and_keeps_its_reservation(rig, vendor):
    r = rig(vendor, containers=False)
    play_machines(r)
    guarded(r)
    given = approved(r)
    r.fault("lost_request")
    began = r.clock.monotonic()
    for _ in range(2):
        with pytest.raises(ProviderSilent) as caught:
            provision.provision(r.op, *given)
        assert caught.value.next_step == "gpu reconcile" and caught.value.exit_code == 6
    assert r.clock.monotonic() - began >= 60 and r.creates == 1
    (machine,) = machines.all_machines(r.project)
    assert machine.status == "unknown" and machine.instance_id is None
    assert list(budget.open_reservations(r.project, r.op.environ)) == [given[2].id]


# refusals -------------------------------------------------------------------------------------------------------------


def test_offers_that_refuse_are_passed_over_and_told_and_cost_nothing(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.sandbox.faults.script("vast", "create", "offer_gone, no_capacity, offer_gone, no_capacity")
    began = r.clock.monotonic()
    got = rent(r)
    assert r.creates == 5 and len(alive(r)) == 1
    assert [a.result for a in got.attempts] == ["refused"] * 4 + ["done"]
    assert len({a.offer_id for a in got.attempts}) == 5
    assert r.clock.monotonic() - began < 300
    failed = budget.failed_creates(r.project)
    assert failed.count == 4 and {a.result for a in failed.attempts} == {"refused"}
    statuses = [m.status for m in machines.all_machines(r.project)]
    assert sorted(statuses) == ["lost"] * 4 + ["ready"]
    for machine in machines.all_machines(r.project):
        if machine.status == "lost":
            assert accounting.close(r.op, machine) == [] and accounting.booked_usd(r.op, machine.id) == 0


def test_the_next_class_follows_when_all_offers_of_the_first_refuse(rig):
    r = rig("runpod", containers=False)
    play_machines(r)
    r.sandbox.faults.script("runpod", "create", "no_capacity")
    got = rent(r, gpus=("NVIDIA RTX A5000", "RTX 4090"))
    assert [a.result for a in got.attempts] == ["refused", "done"] and "4090" in got.machine.gpu


@pytest.mark.parametrize(
    ("fault", "error"), [("insufficient_balance", InsufficientBalance), ("401", AuthRejected), ("403", AuthRejected)]
)
def test_a_problem_of_the_account_ends_the_call_and_does_not_burn_the_approval(rig, fault, error):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    given = approved(r)
    r.fault(fault)
    with pytest.raises(error) as caught:
        provision.provision(r.op, *given)
    assert r.creates == 1 and [a["result"] for a in caught.value.details["attempts"]] == ["refused"]
    assert budget.open_reservations(r.project, r.op.environ) == {}
    got = provision.provision(r.op, *given)
    assert r.creates == 2 and got.machine.status == "ready"


def test_a_limit_of_requests_is_waited_for_and_the_same_offer_asked_again(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("429", retry_after=20)
    got = rent(r)
    assert [a.result for a in got.attempts] == ["refused", "done"]
    assert got.attempts[0].offer_id == got.attempts[1].offer_id


def test_nothing_free_says_which_filter_removed_the_offers_and_the_approval_serves_again(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    given = approved(r, a_plan(r, max_rate_usd_hr=Decimal("0.01")))
    for _ in range(2):
        with pytest.raises(NoCapacity) as caught:
            provision.provision(r.op, *given)
        assert "max_rate" in caught.value.message
    assert r.creates == 0 and budget.open_reservations(r.project, r.op.environ) == {}


def test_a_plan_that_waits_looks_again_and_again_in_the_foreground_and_then_gives_up(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("no_capacity", times=0)
    with pytest.raises(NoCapacity):
        rent(r, capacity={"mode": "wait", "attempts": 3, "interval_s": 60})
    looks = [s for s in r.clock.slept if s == 60]
    assert len(looks) == 2 and alive(r) == []
    r.sandbox.faults.clear()


def test_a_plan_that_waits_takes_what_becomes_free(rig):
    r = rig("runpod", containers=False)
    play_machines(r)
    r.sandbox.faults.script("runpod", "create", "no_capacity, no_capacity")
    got = rent(r, capacity={"mode": "wait", "attempts": 5, "interval_s": 60})
    assert [a.result for a in got.attempts] == ["refused", "refused", "done"] and len(alive(r)) == 1


# before anything is bound ---------------------------------------------------------------------------------------------


def test_without_a_guard_nothing_is_asked_and_the_approval_is_unused(rig):
    r = rig("vast", containers=False)
    given = approved(r)
    with pytest.raises(Unguarded):
        provision.provision(r.op, *given)
    assert r.creates == 0 and runs.load(r.op, given[2].id) is None
    play_machines(r)
    guarded(r)
    assert provision.provision(r.op, *given).machine.status == "ready"


def test_over_a_ceiling_nothing_is_bound(rig):
    r = rig("vast", containers=False)
    guarded(r)
    given = approved(r, a_plan(r, worst_case_usd=Decimal("100000")))
    with pytest.raises(OverCeiling):
        provision.provision(r.op, *given)
    assert r.creates == 0 and runs.load(r.op, given[2].id) is None
    assert budget.open_reservations(r.project, r.op.environ) == {}


def test_an_approval_that_expired_rents_nothing(rig):
    r = rig("vast", containers=False)
    guarded(r)
    given = approved(r)
    r.clock.sleep(3601)
    with pytest.raises(ApprovalExpired):
        provision.provision(r.op, *given)
    assert r.creates == 0


def test_a_second_state_directory_of_the_project_rents_nothing_with_the_same_approval(rig, tmp_path):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    given = approved(r)
    provision.provision(r.op, *given)
    copy = r.another(tmp_path / "copy", project_id=r.project.project_id)
    shutil.copytree(r.project.path("plans"), copy.project.path("plans"))
    shutil.copy(r.project.path("approvals.jsonl"), copy.project.path("approvals.jsonl"))
    with pytest.raises(ApprovalUsed):
        provision.provision(copy.op, *given)
    assert r.creates == 1


# a machine that is no use ---------------------------------------------------------------------------------------------


def test_a_machine_that_came_dearer_is_destroyed_at_once(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("price_changed", factor=9)
    with pytest.raises(CreatedPriceMismatch) as caught:
        rent(r, setup_failures_max=0)
    assert caught.value.exit_code == 5 and caught.value.may_be_billing is False
    (instance,) = instances(r)
    assert r.creates == 1 and r.burning() == set()
    assert instance.ended_at - instance.created_at < 30
    assert budget.open_reservations(r.project, r.op.environ) == {}


def test_a_bid_that_was_made_an_ordinary_rental_is_destroyed_at_once(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("created_on_demand")
    with pytest.raises(CreatedPriceMismatch):
        rent(r, interruptible=True, setup_failures_max=0, max_rate_usd_hr=Decimal("0.40"))
    assert r.creates == 1 and r.burning() == set()


def test_a_bid_stands_above_the_floor_and_within_what_was_approved(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    got = rent(r, interruptible=True, max_rate_usd_hr=Decimal("0.40"))
    (instance,) = alive(r)
    assert instance.extra["is_bid"] and instance.extra["min_bid_usd_hr"] < instance.rate_usd_hr <= Decimal("0.40")
    assert got.machine.rate_usd_hr <= Decimal("0.40")


def test_an_offer_whose_floor_rose_above_the_approval_is_passed_over_for_the_next(rig, monkeypatch):
    r = rig("vast", containers=False)
    play_machines(r)
    taken: list[Decimal] = []

    def bid(plan, offer):
        taken.append(offer.min_bid_usd_hr)
        floor = plan.max_rate_usd_hr + 1 if len(taken) == 1 else offer.min_bid_usd_hr
        return reached(plan, replace(offer, min_bid_usd_hr=floor))

    reached = specs.bid
    monkeypatch.setattr(specs, "bid", bid)
    got = rent(r, interruptible=True, max_rate_usd_hr=Decimal("0.40"))
    assert r.creates == 1 and [a.result for a in got.attempts] == ["refused", "done"]
    assert got.attempts[0].reason == "no_capacity"


@pytest.mark.parametrize(
    ("vendor", "fault", "args", "reason"),
    [
        ("vast", "capped_disk", {"disk_gb": 8}, "created_price_mismatch"),
        ("vast", "created_stopped", {}, "dead_end"),
        ("vast", "dead_ssh", {}, "no_progress"),
        ("vast", "stuck_loading", {}, "no_progress"),
        ("vast", "null_status", {}, "no_progress"),
        ("vast", "status_error", {}, "dead_end"),
        ("vast", "exited", {}, "dead_end"),
        ("vast", "offline", {}, "no_progress"),
        ("vast", "missing_gpu", {}, "gpu_missing"),
        ("vast", "error_with_contract", {}, "provider_schema"),
        ("runpod", "stuck_loading", {}, "no_progress"),
        ("runpod", "dead_ssh", {}, "no_progress"),
        ("runpod", "no_gpu_driver", {}, "gpu_missing"),
        ("runpod", "error_with_contract", {}, "dead_end"),
    ],
)
def test_a_machine_that_does_not_become_usable_is_destroyed_and_the_next_one_taken(rig, vendor, fault, args, reason):
    r = rig(vendor, containers=False)
    play_machines(r)
    r.fault(fault, **args)
    got = rent(r, gpus=(*GPUS[vendor], "RTX 3090"))
    assert [a.result for a in got.attempts] == ["failed", "done"] and got.attempts[0].reason == reason
    (left,) = alive(r)
    assert r.creates == 2 and r.burning() == {left.resource} and got.machine.instance_id == str(left.id)
    failed = machines.find(r.project, got.attempts[0].machine_id)
    assert failed.status == "destroyed" and failed.instance_id is not None
    if vendor == "vast":
        assert memory.load(r.project)[failed.host_key].is_cooling(r.clock.now())
        assert failed.host_key != got.machine.host_key


def test_a_machine_lost_while_it_loads_is_noticed_at_the_next_look(rig):
    r = rig("vast", containers=False, delays={"loading_s": 3600})
    play_machines(r)
    r.fault("outbid", after=60)
    with pytest.raises(NotReady) as caught:
        rent(r, interruptible=True, setup_failures_max=0, max_rate_usd_hr=Decimal("0.40"))
    (instance,) = instances(r)
    assert caught.value.details["what"] == "dead_end" and r.burning() == set()
    assert instance.ended_at - instance.created_at < 60 + 2 * bringup.SLOW_POLL_S


def test_a_pull_that_goes_on_is_waited_for_up_to_the_cap_and_a_flat_one_is_not(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("status_error", message="a1: 1MB/90000MB")

    def pull(until_s: float, number: int = 1) -> None:
        world = r.sandbox.world
        with world.lock:
            for instance in instances(r):
                if "status_error" in instance.faults:
                    instance.faults["status_error"]["message"] = f"a1: {number}MB/90000MB"
        if number * 60 < until_s:
            world.clock.call_in(60, lambda: pull(until_s, number + 1))

    pull(10_000)
    with pytest.raises(NotReady) as caught:
        rent(r, setup_cap_s=1800.0, setup_failures_max=0)
    (first,) = instances(r)
    assert caught.value.details["what"] == "setup_cap" and 1800 <= first.ended_at - first.created_at < 1900
    r.fault("status_error", message="a1: 1MB/90000MB")
    with pytest.raises(NotReady) as caught:
        rent(r, setup_cap_s=1800.0, setup_failures_max=0, machine_class="project")
    second = instances(r)[-1]
    assert caught.value.details["what"] in ("no_progress", "setup_cap")
    assert r.burning() == set() and second is not first


def test_a_gpu_for_which_the_image_has_no_code_ends_its_class_and_not_the_run(rig):
    r = rig("vast", containers=False)

    def blackwell(machine) -> None:
        if "5090" in machine.machine.gpu:
            error = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
            machine.gpu = {"how": "torch", "ok": False, "error": error, "version": "2.4.1", "count": 1}
            machine.gpu |= {"capabilities": [12.0], "arch_list": ["sm_80", "sm_86", "sm_90"]}

    play_machines(r, blackwell)
    got = rent(r, gpus=("RTX 5090", "RTX 4090"))
    assert [(a.gpu, a.result) for a in got.attempts] == [("RTX 5090", "failed"), ("RTX 4090", "done")]
    assert got.attempts[0].reason == "arch_unsupported"
    with pytest.raises(ArchUnsupported) as caught:
        rent(r, gpus=("RTX 5090",), setup_failures_max=0)
    assert "cu128" in caught.value.next_step and "sm_120" in caught.value.message
    assert memory.load(r.project)[got.machine.host_key].failures == 0


def test_a_machine_without_a_fuse_is_not_ready(rig, monkeypatch):
    r = rig("vast", containers=False)
    monkeypatch.setattr(bringup, "RECEIPT_S", 0.1)

    def unarmed(machine) -> None:
        machine.deadline = None

    play_machines(r, unarmed)
    with pytest.raises(NotReady) as caught:
        rent(r, setup_failures_max=0)
    assert caught.value.details["what"] == "fuse_missing" and r.burning() == set()


def test_a_fuse_with_another_deadline_is_none(rig):
    r = rig("vast", containers=False)

    def later(machine) -> None:
        machine.deadline += timedelta(hours=1)

    play_machines(r, later)
    with pytest.raises(NotReady):
        rent(r, setup_failures_max=0)
    assert r.burning() == set()


def test_as_many_set_ups_fail_as_the_plan_has_room_for_and_no_more(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    r.fault("exited", times=0)
    given = approved(r, gpus=("RTX 4090", "RTX 3090"), setup_failures_max=1)
    with pytest.raises(NotReady):
        provision.provision(r.op, *given)
    assert r.creates == 2 and r.burning() == set()
    with pytest.raises(ApprovalUsed):
        provision.provision(r.op, *given)
    assert r.creates == 2
    r.sandbox.faults.clear()


def test_a_failed_set_up_is_booked_to_the_cent_of_the_bill(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("dead_ssh")
    with pytest.raises(NotReady):
        rent(r, setup_failures_max=0)
    (machine,) = machines.all_machines(r.project)
    booked = accounting.booked_usd(r.op, machine.id)
    assert booked > 0 and booked >= r.billed_usd() - Decimal("0.05")  # until the provider's own sum corrects it


def in_the_middle(r, change) -> None:
    """Let something happen once, when the first set-up of this rig has failed."""
    say, said = r.op.say, []

    def hear(line: str) -> None:
        say(line)
        if "is no use" in line and not said:
            said.append(line)
            change()

    r.op = replace(r.op, say=hear)


def test_a_policy_that_becomes_stricter_between_two_attempts_ends_the_run(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    r.fault("exited")
    in_the_middle(r, lambda: r.project.path("policy.json").write_text('{"ceilings": {"rate_usd_hr": 0.1}}'))
    given = approved(r)
    with pytest.raises(OverCeiling):
        provision.provision(r.op, *given)
    assert r.creates == 1 and r.burning() == set()
    assert budget.open_reservations(r.project, r.op.environ) == {}


def test_a_policy_that_is_taken_away_between_two_attempts_ends_the_run(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    r.fault("exited")
    in_the_middle(r, lambda: r.project.path("policy.json").unlink())
    with pytest.raises(PolicyMissing):
        provision.provision(r.op, *approved(r))
    assert r.creates == 1 and r.burning() == set()


def test_what_failed_set_ups_cost_is_not_in_the_way_of_the_next_under_a_ceiling_that_just_fits(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("exited")
    r.project.path("policy.json").write_text('{"ceilings": {"job_usd": 4, "session_usd": 4, "day_usd": 4}}')
    assert rent(r, worst_case_usd=Decimal("4.00")).machine.status == "ready" and r.creates == 2


def test_a_later_machine_has_only_the_time_that_the_approved_worst_case_still_pays(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    r.fault("dead_ssh")
    rate, worst = Decimal("1.20"), Decimal("2.40")  # two hours, and nothing for set-ups that fail
    got = rent(r, max_rate_usd_hr=rate, worst_case_usd=worst, deadline_s=7200.0)
    first, second = machines.all_machines(r.project)
    cost = accounting.booked_usd(r.op, first.id)
    ends, begun = parse_timestamp(second.deadline_at), parse_timestamp(second.created_at)
    lasts_h = Decimal((ends - begun).total_seconds()) / 3600
    assert cost > 0 and got.machine.id == second.id and lasts_h < 2
    assert cost + lasts_h * rate <= worst + Decimal("0.001")


def test_what_is_left_of_the_worst_case_and_too_little_to_be_of_use_ends_the_run_and_names_a_new_plan(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    r.fault("dead_ssh")
    given = approved(r, max_rate_usd_hr=Decimal("1.20"), worst_case_usd=Decimal("2.40"), job_timeout_s=7190.0)
    with pytest.raises(ApprovalUsed) as caught:
        provision.provision(r.op, *given)
    assert caught.value.next_step == "gpu plan --freeze" and "1h59m are needed" in caught.value.message
    assert caught.value.exit_code == 4 and r.creates == 1 and r.burning() == set()
    with pytest.raises(ApprovalUsed):
        provision.provision(r.op, *given)
    assert r.creates == 1


# interrupted ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_right_after_the_create_destroys_the_machine(rig):
    r = rig("vast", containers=False)
    guarded(r)
    given = approved(r)

    def interrupt(machine) -> Any:
        raise KeyboardInterrupt

    r.op = replace(r.op, connect=interrupt)
    with pytest.raises(KeyboardInterrupt):
        provision.provision(r.op, *given)
    (machine,) = machines.all_machines(r.project)
    assert alive(r) == [] and r.burning() == set() and machine.status in ("terminating", "destroyed")
    assert machine.instance_id is not None


def test_ctrl_c_while_the_create_is_on_its_way_finds_the_machine_and_destroys_it(rig):
    r = rig("vast", containers=False)
    guarded(r)
    given = approved(r)

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(r.writer, name)

        def create(self, spec) -> Any:
            r.writer.create(spec)
            raise KeyboardInterrupt

    r.op = replace(r.op, writer=lambda name: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        provision.provision(r.op, *given)
    assert r.creates == 1 and alive(r) == [] and intents.read(r.project)[_create(r)].result == "done"


def _create(r) -> str:
    return next(i.id for i in intents.read(r.project).values() if i.action == "create")


def test_what_an_earlier_process_left_booting_is_waited_for_and_not_asked_for_again(rig):
    r = rig("vast", containers=False)
    guarded(r)
    given = approved(r)

    def dies(machine) -> Any:
        raise SystemExit("killed")

    r.op = replace(r.op, connect=dies)
    with pytest.raises(SystemExit):
        provision.provision(r.op, *given)
    assert [m.status for m in machines.all_machines(r.project)] == ["booting"]
    play_machines(r)
    got = provision.provision(r.op, *given)
    assert r.creates == 1 and got.machine.status == "ready" and len(alive(r)) == 1


def test_whoever_comes_while_another_works_on_the_run_is_told_to_follow(rig):
    r = rig("vast", containers=False)
    guarded(r)
    given = approved(r)
    with runs.working_on(r.op, given[2].id), pytest.raises(StateBusy):
        provision.provision(r.op, *given)
    assert r.creates == 0


# several at once ------------------------------------------------------------------------------------------------------


def test_launches_at_once_share_no_offer_and_each_has_its_own_machine(rig, monkeypatch):
    # All twenty move one clock when they wait, so it runs twenty times as fast as for any of them.
    monkeypatch.setattr(claims, "LASTS", 20 * claims.LASTS)
    r = rig("vast", containers=False, limits="off")
    play_machines(r)
    guarded(r)
    roomy(r)
    gpus = ("RTX 4090", "RTX 3090", "RTX A6000", "RTX A5000", "A100 SXM4")
    given = [approved(r, gpus=gpus, worst_case_usd=Decimal("0.10"), deadline_s=300.0) for _ in range(20)]
    with ThreadPoolExecutor(20) as pool:
        got = list(pool.map(lambda one: provision.provision(r.op, *one), given))
    offers = [g.attempts[-1].offer_id for g in got]
    assert len(set(offers)) == 20 and len(alive(r)) == 20
    assert len({g.machine.instance_id for g in got}) == 20
    taken = [call for call in r.sandbox.world.log if call.get("call") == "create"]
    assert len(taken) == r.creates


# for real -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_real_machine_is_logged_into_tried_and_armed_before_it_is_ready(rig, vendor):
    r = rig(vendor, real=True)
    plan = a_plan(r, machine_class="project", idle_timeout_s=900.0)
    got = rent(r, plan)
    try:
        assert got.machine.status == "ready" and got.machine.gpu_count == 1
        assert got.receipt.is_alive and got.receipt.key == "proven"
        assert timestamp(got.receipt.deadline_at) == got.machine.deadline_at
        session = got.link.session.call("session", {"project": r.project.project_id})["session"]
        ends_before_s = (got.receipt.deadline_at - parse_timestamp(session["deadline_at"])).total_seconds()
        assert session["id"] == got.machine.session["id"] and ends_before_s >= 145
        root = got.link.session.greeting.root
        assert root.startswith(str(alive(r)[0].container.root.parent))
        assert ("workspace" in root or "volume" in root) == (vendor == "runpod")
    finally:
        got.link.close()


def test_the_whole_way_to_a_ready_machine_takes_few_calls(rig):
    r = rig("vast", containers=False, delays={"loading_s": 60})
    play_machines(r)
    rent(r)
    calls = sum(count for (vendor, _), count in r.sandbox.world.calls.items() if vendor == "vast")
    assert calls <= 25


# money ----------------------------------------------------------------------------------------------------------------


def with_ceilings(r, **ceilings) -> None:
    path = r.project.path("policy.json")
    policy = json.loads(path.read_text())
    policy["ceilings"] |= ceilings
    path.write_text(json.dumps(policy))


def test_attempts_of_one_job_have_one_ceiling_whatever_plans_they_have(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    guarded(r)
    with_ceilings(r, job_usd=6)
    got = provision.provision(r.op, *approved(r), job_id="J-000001")
    release.destroy(r.op, got.machine, why="asked", wait_s=900)
    runs_of = runs.load(r.op, got.machine.extra["approval_id"])
    accounting.settle_run(r.op, runs_of)
    spent = budget.books(r.project, r.op.ledger, r.clock, r.op.environ, job_id="J-000001").spent.job_usd
    assert 0 < spent < 4
    older = {"job": "J-000001", "step": 1}
    with_ceilings(r, job_usd=float(4 + spent / 2))
    with pytest.raises(OverCeiling, match="job ceiling"):
        provision.provision(r.op, *approved(r, resume_from=older), job_id="J-000002")
    provision.provision(r.op, *approved(r, nonce="b" * 16), job_id="J-000003")


# what other records did -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_an_approval_that_rented_from_other_records_rents_nothing_here(rig, vendor, tmp_path):
    r = rig(vendor, containers=False)
    play_machines(r)
    given = approved(r)
    guarded(r)
    first = provision.provision(r.op, *given)
    # The same user on another computer: a copy of the project, and none of the user's own records.
    shutil.copytree(r.project.root, tmp_path / "copy")
    shutil.rmtree(r.op.user_state / "runs")
    copy = replace(r.op, project=replace(r.project, root=tmp_path / "copy", state=tmp_path / "copy/.pi/gpu"))
    (copy.project.state / "machines.json").write_text("[]\n")
    (copy.project.state / "approvals.jsonl").write_bytes(
        b"".join(line for line in _lines(copy.project.state / "approvals.jsonl") if b'"used_at":"' not in line)
    )
    with pytest.raises(ApprovalUsed) as used:
        provision.provision(copy, *given)
    assert r.creates == 1 and used.value.next_step == "gpu reconcile --adopt"
    assert len(alive(r)) == 1 and machines.find(r.project, first.machine.id).instance_id == str(alive(r)[0].id)
    assert machines.all_machines(copy.project) == []


def lying_once(r: Any) -> None:
    """The first create makes a machine and says that it did not."""
    make, lies = r.writer.create, iter([True])

    def create(spec: Any) -> Any:
        outcome = make(spec)
        return replace(outcome, kind="refused", problem=NoCapacity("none left")) if next(lies, False) else outcome

    r.writer.create = create


def test_a_machine_that_was_made_although_the_create_was_refused_goes_before_another_is_asked_for(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    lying_once(r)
    got = rent(r)
    (instance,) = alive(r)
    assert r.creates == 2 and got.machine.instance_id == str(instance.id)
    assert [a.result for a in got.attempts] == ["failed", "done"]
    assert {m.status for m in machines.all_machines(r.project) if m.id != got.machine.id} <= {"lost", "destroyed"}


def test_nothing_is_said_to_bill_no_more_before_a_list_has_shown_it(rig):
    r = rig("runpod", containers=False)
    play_machines(r)
    lying_once(r)
    with pytest.raises(NoCapacity) as ended:
        rent(r)
    assert r.creates == 1 and alive(r) == [] and not ended.value.may_be_billing


def _lines(path: Any) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)
