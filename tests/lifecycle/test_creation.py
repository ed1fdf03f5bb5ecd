"""What a create asks for, what is written down before it, and what a machine found later has to satisfy."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import NoCapacity, ProviderSilent
from gpu_skills.lifecycle import intents, labels, machines, runs
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.lifecycle.renting import bringup, creation, outcomes, specs, unanswered
from gpu_skills.lifecycle.runs import Run
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.providers.base import Offer, Volume
from gpu_skills.state import budget
from rented import spec
from renting import a_plan, alive, guarded, instances, play_machines, rent

pytestmark = pytest.mark.subprocess
both = pytest.mark.parametrize("vendor", ["vast", "runpod"])
OFFER = Offer("vast", "77", Decimal("0.40"), "RTX 4090", 1, 24.0, storage_usd_hr=Decimal("0.01"), machine_id="4711")


def begun(r, **changes: Any) -> Run:
    """A run as provisioning binds it."""
    guarded(r)
    account = budget.account_directory(r.vendor, r.op.account(r.vendor), r.op.environ).name
    given: dict[str, Any] = {
        "approval_id": "a_0123456789abcdef",
        "plan_sha256": "0" * 64,
        "project_id": r.project.project_id,
        "provider": r.vendor,
        "account": account,
        "owner": runs.owner_of(r.op),
        "reserved_usd": 4,
        "approval_expires_at": timestamp(r.clock.now() + timedelta(hours=1)),
        "began_at": timestamp(r.clock.now()),
    }
    return runs.create(r.op, Run(**{**given, **changes}))


def test_everything_by_which_a_create_is_found_again_is_on_disk_before_it_is_sent(rig):
    r = rig("vast", containers=False)
    run = begun(r)
    attempt = creation.freeze(r.op, run, a_plan(r), OFFER)
    label = labels.parse(attempt.label)
    assert label.intent == attempt.intent and timestamp(label.deadline_at) == attempt.deadline_at
    assert label.deadline_at - r.clock.now() <= timedelta(hours=2)
    assert runs.load(r.op, run.approval_id).attempts == (attempt,)
    machine = machines.find(r.project, attempt.machine_id)
    assert (machine.status, machine.instance_id, machine.label) == ("requested", None, attempt.label)
    assert (machine.deadline_at, machine.host_key, machine.rate_usd_hr) == (
        attempt.deadline_at,
        "vast:4711",
        Decimal("0.4"),
    )
    assert intents.read(r.project)[attempt.intent].is_open and r.creates == 0


def test_the_ids_of_creates_follow_from_the_approval(rig):
    r = rig("vast", containers=False)
    run, plan = begun(r), a_plan(r)
    first = creation.freeze(r.op, run, plan, OFFER)
    second = creation.freeze(r.op, runs.load(r.op, run.approval_id), plan, OFFER)
    assert first.intent == labels.create_intent("job", run.approval_id, 1) != second.intent
    assert second.intent == labels.create_intent("job", run.approval_id, 2)


@pytest.mark.parametrize(
    ("vendor", "plan", "expected"),
    [
        ("vast", {}, ("~", None, "stop")),
        ("vast", {"storage_grace_s": 0.0}, ("~", None, "stop")),
        ("runpod", {"machine_class": "project"}, ("/workspace", 50, "stop")),
        ("runpod", {"outputs_ephemeral": True}, ("~", None, "destroy")),
        ("runpod", {"outputs_ephemeral": True, "volume_id": "v1"}, ("/workspace", None, "stop")),
    ],
)
def test_what_survives_a_stop_decides_where_the_work_stands_and_how_the_fuse_ends_it(
    rig, monkeypatch, vendor, plan, expected
):
    r = rig(vendor, containers=False)
    monkeypatch.setattr(r.reader, "volumes", lambda: [Volume("v1", "v", 50, "EU-RO-1")], raising=False)
    plan = a_plan(r, **plan)
    attempt = creation.freeze(r.op, begun(r), plan, replace(OFFER, provider=vendor))
    spec = specs.spec_of(r.op, plan, replace(OFFER, provider=vendor), attempt)
    keeps, persistent_gb, on_expiry = expected
    root = machines.find(r.project, attempt.machine_id).root
    assert (root, spec.persistent_gb) == (f"{keeps}/.gpu-skills", persistent_gb)
    assert f"W={on_expiry} " in spec.bootstrap and attempt.intent in spec.bootstrap
    assert r.sandbox.url in spec.bootstrap and len(spec.bootstrap) <= 4000
    assert spec.data_centers == (("EU-RO-1",) if plan.volume_id else ())


def test_places_of_the_plan_become_the_data_centres_that_have_some(rig):
    r = rig("runpod", containers=False)
    offer = replace(OFFER, location="EU-RO-1, EU-SE-1, US-TX-3")
    assert specs.data_centers(r.op, a_plan(r, locations=("eu",)), offer) == ("EU-RO-1", "EU-SE-1")
    assert specs.data_centers(r.op, a_plan(r, locations=("US-TX-3",)), offer) == ("US-TX-3",)
    assert specs.data_centers(r.op, a_plan(r), offer) == ()


@pytest.mark.parametrize(
    ("floor", "most", "expected"), [("0.20", "0.60", "0.2500"), ("0.20", "0.23", "0.22"), ("0.20", "0.21", "0.20")]
)
def test_a_bid_is_above_the_floor_as_far_as_the_approved_rate_allows(rig, floor, most, expected):
    r = rig("vast", containers=False)
    offer = replace(OFFER, min_bid_usd_hr=Decimal(floor))
    assert specs.bid(a_plan(r, max_rate_usd_hr=Decimal(most)), offer) == Decimal(expected)


def test_a_floor_above_what_was_approved_is_no_offer_and_never_a_bid(rig):
    r = rig("vast", containers=False)
    offer = replace(OFFER, min_bid_usd_hr=Decimal("0.20"))
    with pytest.raises(NoCapacity, match="takes bids from"):
        specs.bid(a_plan(r, max_rate_usd_hr=Decimal("0.20")), offer)


def found(r, **changes: Any) -> Instance:
    given: dict[str, Any] = {"provider": "vast", "instance_id": "1", "label": "l", "status": "running"}
    return Instance(**{**given, "rate_usd_hr": Decimal("0.40"), **changes})


@pytest.mark.parametrize(
    ("run", "instance", "later_s", "reason"),
    [
        ({}, {}, 0, None),
        ({}, {"rate_usd_hr": None}, 0, None),
        ({"state": "won"}, {}, 0, "its run is won"),
        ({}, {}, 3601, "its approval has expired"),
        ({"approval_expires_at": "2999-01-01T00:00:00Z"}, {}, 7201, "its deadline has passed"),
        ({}, {"rate_usd_hr": Decimal("1.21")}, 0, "it costs $1.2100/h, approved are at most $1.2000/h"),
    ],
)
def test_a_machine_that_turns_up_late_is_used_only_while_its_plan_holds(rig, run, instance, later_s, reason):
    r = rig("vast", containers=False)
    plan = a_plan(r)
    bound = begun(r, **run)
    attempt = creation.freeze(r.op, bound, plan, OFFER)
    r.clock.sleep(later_s)
    bound = runs.load(r.op, bound.approval_id)
    assert unanswered.unwanted(r.op, bound, attempt, found(r, **instance), plan) == reason


def test_one_that_turns_up_beside_another_machine_of_its_run_is_not_wanted(rig):
    r = rig("vast", containers=False)
    plan = a_plan(r)
    run = begun(r)
    late = creation.freeze(r.op, run, plan, OFFER)
    second = creation.freeze(r.op, runs.load(r.op, run.approval_id), plan, OFFER)
    outcomes.note(r.op, run, second, result="done")
    run = runs.load(r.op, run.approval_id)
    assert unanswered.unwanted(r.op, run, late, found(r), plan) == "another machine of its run is there"
    assert unanswered.unwanted(r.op, run, second, found(r), None) == "its plan is not there any more"


def test_an_adopted_machine_is_on_record_with_what_the_provider_shows(rig):
    r = rig("vast", containers=False)
    plan = a_plan(r)
    run = begun(r)
    attempt = creation.freeze(r.op, run, plan, OFFER)
    machine = unanswered.adopt(
        r.op, run, attempt, found(r, instance_id="991", rate_usd_hr=Decimal("0.39"), machine_id="5")
    )
    assert (machine.status, machine.instance_id, machine.rate_usd_hr) == ("booting", "991", Decimal("0.39"))
    closed = intents.read(r.project)[attempt.intent]
    assert (closed.result, closed.instance_id) == ("done", "991")
    assert runs.load(r.op, run.approval_id).attempts[0].result == "done"


def test_the_label_alone_finds_a_machine_whose_deadline_was_moved(rig):
    r = rig("vast", containers=False)
    play_machines(r)
    got = rent(r)
    (instance,) = alive(r)
    instance.label = str(labels.parse(instance.label).with_deadline(parse_timestamp("2030-01-01T00:00:00Z")))
    assert [seen.instance_id for seen in unanswered.find(r.op, "vast", got.machine.intent)] == [got.machine.instance_id]


KEY = "SHA256:" + "a1B2" * 10 + "xyz"
OTHER = "SHA256:" + "b" * 43


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([f"256 {KEY} root@c1 (ED25519)"], KEY),
        ([f"3072 {OTHER} root@c1 (RSA)", f"  256 {KEY} no comment (ED25519)  "], KEY),
        ([f"256 {OTHER} root@c1 (ED25519)", f"256 {KEY} root@c1 (ED25519)"], KEY),
        ([f"Accepted publickey for root from 1.2.3.4 port 5 ssh2: ED25519 {KEY}"], None),
        ([f"256 {KEY} root@c1 (ED25519) and more"], None),
        ([f"256 {KEY[:-1]} root@c1 (ED25519)"], None),
        ([], None),
    ],
)
def test_a_host_key_is_read_where_a_start_script_prints_it_and_nowhere_else(lines, expected):
    assert bringup.fingerprint(lines) == expected


def somebody_elses(r, label: str) -> Any:
    """An instance of the same account that this project did not make."""
    outcome = r.writer.create(spec(r, label))
    r.sandbox.advance(600)
    return next(i for i in instances(r) if str(i.id) == outcome.instance_id)


@both
@pytest.mark.parametrize("named", ["nothing", "foreign", "unlabelled"])
def test_an_answer_that_names_another_machine_makes_no_machine_of_it_and_the_one_with_our_label_is_used(
    rig, vendor, named
):
    r = rig(vendor, containers=False)
    play_machines(r)
    other, args = None, {}
    if named != "nothing":
        other = somebody_elses(r, "gpu1-p-other-p0123456789abcdef-1999999999" if named == "foreign" else "mine")
        args = {"instance": other.id}
    writes = r.calls("state") + r.calls("attach_ssh") + r.calls("action") + r.calls("destroy")
    before = (other.phase, dict(other.ssh_keys)) if other else None
    r.fault("wrong_id", **args)
    machine = rent(r).machine
    (made,) = [i for i in alive(r) if i is not other]
    assert machine.instance_id == str(made.id) and made.label == machine.label
    assert [m.instance_id for m in machines.all_machines(r.project)] == [str(made.id)]
    if other is not None:
        assert not other.is_destroyed and (other.phase, dict(other.ssh_keys)) == before
    assert r.calls("state") + r.calls("action") + r.calls("destroy") <= writes


@both
def test_a_machine_that_never_shows_with_our_label_is_unknown_and_never_booked(rig, vendor):
    """The answer names somebody else's instance, and nothing carries our label: nobody knows what was made."""
    r = rig(vendor, containers=False)
    other = somebody_elses(r, "mine")
    r.fault("wrong_id", instance=other.id)
    r.fault("list_lag", seconds=3600)
    r.fault("hidden_at_first", seconds=3600)
    with pytest.raises(ProviderSilent) as caught:
        rent(r)
    (machine,) = machines.all_machines(r.project)
    assert (machine.status, machine.instance_id) == ("unknown", None)
    assert caught.value.next_step == "gpu reconcile" and caught.value.details["label"] == machine.label
    assert not other.is_destroyed
    r.clock.sleep(3600)
    reconcile.run(r.op, [vendor])
    (found,) = machines.all_machines(r.project)
    assert found.instance_id in {str(i.id) for i in instances(r) if i is not other}
    assert not other.is_destroyed and other.phase == "running"
