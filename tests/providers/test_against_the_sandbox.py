"""Both adapters against vendors that bill, lag, lie and lose replies; the world knows what was really rented."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpu_skills.errors import (
    AuthRejected,
    CreatedPriceMismatch,
    GpuError,
    HostFull,
    InsufficientBalance,
    NoCapacity,
    ProviderSilent,
    Unavailable,
    UnexpectedReply,
    UsageError,
)
from gpu_skills.providers.base import Requirements, find_by_label
from gpu_skills.providers.created import compare

BOTH = pytest.mark.parametrize("vendor", ["vast", "runpod"])


# a machine's life -----------------------------------------------------------------------------------------------------


@BOTH
def test_a_machine_is_what_was_asked_for_from_create_to_destroy(shop, vendor):
    place = shop(vendor)
    spec = place.spec()
    outcome = place.writer.create(spec)
    first = place.reader.machine(outcome.instance_id)
    assert (first.status, first.label, compare(spec, first).problems) == ("booting", spec.label, ())
    place.sandbox.advance(60)
    running = place.reader.machine(outcome.instance_id)
    assert (running.status, running.dead_end) == ("running", None)
    assert compare(spec, running) == compare(spec, running).__class__((), ())
    place.writer.stop(outcome.instance_id)
    place.sandbox.advance(30)
    stopped = place.reader.machine(outcome.instance_id)
    assert stopped.status == "stopped" and 0 < stopped.burn_usd_hr < running.burn_usd_hr
    assert stopped.ways == ()
    place.writer.start(outcome.instance_id)
    place.sandbox.advance(60)
    assert place.reader.machine(outcome.instance_id).status == "running"
    assert place.writer.destroy(outcome.instance_id) == "accepted"
    place.sandbox.advance(30)
    assert place.reader.machine(outcome.instance_id) is None
    assert place.reader.machines() == []
    assert place.writer.destroy(outcome.instance_id) == "absent"
    assert place.burning() == set()


@BOTH
def test_all_machines_are_listed_however_many_with_a_call_for_each_page(shop, vendor):
    place = shop(vendor, balance_usd=1000)
    need = replace(place.need, gpu=None)
    offers = place.reader.offers(need)
    for number in range(27):
        outcome = None
        while outcome is None or outcome.kind != "created":
            offer = offers[number % len(offers)] if vendor == "runpod" else offers.pop(0)
            outcome = place.writer.create(place.spec(f"gpu1-abc-{number}", offer=offer))
    before = place.calls("list")
    machines = place.reader.machines()
    assert {m.label for m in machines} == {f"gpu1-abc-{number}" for number in range(27)}
    assert place.calls("list") - before == (2 if vendor == "vast" else 1)


@BOTH
def test_the_charges_are_the_vendors_bill(shop, vendor):
    place = shop(vendor)
    machine = place.rent(wait_s=7200)
    place.writer.destroy(machine.instance_id)
    place.sandbox.advance(7200)
    now = place.clock.now()
    charges = place.reader.charges(now - timedelta(hours=12), now)
    billed = sum(entry.amount(0, now.timestamp()) for entry in place.sandbox.world.account(vendor).bill.entries)
    assert {c.instance_id for c in charges} == {machine.instance_id}
    assert float(sum(c.amount_usd for c in charges)) == pytest.approx(float(billed), abs=0.01)
    assert {"gpu", "disk"} <= {c.kind for c in charges}
    per_hour = float(billed) / ((7200 + 5) / 3600)
    assert float(machine.rate_usd_hr) == pytest.approx(per_hour, rel=0.02), "the all-in rate is what is billed"


@BOTH
def test_the_rate_of_an_offer_is_the_rate_of_the_machine(shop, vendor):
    place = shop(vendor)
    for disk_gb in (20, 200):
        need = replace(place.need, disk_gb=disk_gb)
        offer = place.reader.offers(need)[0]
        machine = place.rent(f"gpu1-abc-{disk_gb}", offer=offer, disk_gb=disk_gb)
        assert float(machine.rate_usd_hr) == pytest.approx(float(offer.rate_usd_hr), abs=1e-6)


@BOTH
def test_without_a_disk_that_survives_a_stop_the_rate_of_an_offer_is_that_of_the_machine_too(shop, vendor):
    place = shop(vendor)
    offer = place.reader.offers(replace(place.need, persistent=False))[0]
    machine = place.rent("gpu1-abc-1", offer=offer, persistent_gb=None)
    assert float(machine.rate_usd_hr) == pytest.approx(float(offer.rate_usd_hr), abs=1e-6)


@BOTH
def test_balance_and_key_are_told(shop, vendor):
    place = shop(vendor, balance_usd=42)
    place.reader.check_key()
    assert place.reader.balance().credit_usd == 42
    with pytest.raises(AuthRejected):
        shop(vendor, key="sbx_made-up-and-wrong").reader.machines()


@BOTH
def test_a_log_can_be_read(shop, vendor):
    place = shop(vendor)
    machine = place.rent()
    lines = place.reader.log_lines(machine.instance_id, source="system", lines=20)
    assert len(lines) <= 20 and all(isinstance(line, str) for line in lines)


# a create that goes wrong ---------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("fault", ["lost_reply", "half_body"])
def test_a_create_whose_answer_is_lost_is_found_by_its_label(shop, vendor, fault):
    place = shop(vendor)
    spec = place.spec("gpu1-abc-lost")
    place.fault(fault)
    outcome = place.writer.create(spec)
    assert (outcome.kind, type(outcome.problem)) == ("unknown", ProviderSilent)
    assert place.calls("create") == 1
    [machine] = find_by_label(place.reader.machines(), "gpu1-abc-lost")
    assert compare(spec, machine).problems == ()


@BOTH
def test_a_create_that_never_arrived_leaves_nothing_to_find(shop, vendor):
    place = shop(vendor)
    place.fault("lost_request")
    assert place.writer.create(place.spec()).kind == "unknown"
    assert place.reader.machines() == [] and place.burning() == set()


@BOTH
@pytest.mark.parametrize("fault", ["500", "502", "503", "504", "html", "garbage", "failure_200"])
@pytest.mark.parametrize("done", [True, False])
def test_a_failure_says_nothing_about_the_machine(shop, vendor, fault, done):
    """The same answer comes with a machine and without one, so it is unknown both times."""
    place = shop(vendor)
    place.fault(fault, **({} if fault == "garbage" else {"done": done}))
    outcome = place.writer.create(place.spec())
    assert outcome.kind == "unknown" or (outcome.kind == "refused" and not place.burning()), outcome
    exists = bool(place.burning())
    assert len(find_by_label(place.reader.machines(), "gpu1-abc-int-1")) == (1 if exists else 0)
    assert place.calls("create") == 1


@BOTH
def test_a_request_delivered_twice_shows_as_two_of_one_label(shop, vendor):
    place = shop(vendor)
    place.fault("duplicate")
    outcome = place.writer.create(place.spec())
    found = find_by_label(place.reader.machines(), "gpu1-abc-int-1")
    assert len(found) == len(place.burning())
    assert outcome.kind in ("created", "refused", "unknown") and found


@pytest.mark.parametrize(
    ("vendor", "fault", "args", "error"),
    [
        ("vast", "offer_gone", {"status": 404}, NoCapacity),
        ("vast", "offer_gone", {"status": 410}, NoCapacity),
        ("vast", "no_capacity", {}, NoCapacity),
        ("runpod", "no_capacity", {}, NoCapacity),
        ("vast", "insufficient_balance", {}, InsufficientBalance),
        ("runpod", "insufficient_balance", {}, InsufficientBalance),
        ("vast", "401", {}, AuthRejected),
        ("runpod", "401", {}, AuthRejected),
        ("runpod", "403", {"html": True}, UnexpectedReply),
    ],
)
def test_a_refusal_is_a_refusal_and_nothing_runs(shop, vendor, fault, args, error):
    place = shop(vendor)
    place.fault(fault, **args)
    outcome = place.writer.create(place.spec())
    assert (outcome.kind, type(outcome.problem)) == ("refused", error)
    assert place.burning() == set()


def test_offers_that_cannot_be_rented_are_passed_over_one_by_one(shop):
    place = shop("vast")
    place.sandbox.faults.script("vast", "create", "offer_gone, offer_gone, no_capacity, offer_gone, ok")
    kinds = []
    for offer in place.reader.offers(place.need)[:6]:
        kinds.append(place.writer.create(place.spec(offer=offer)).kind)
        if kinds[-1] == "created":
            break
    assert kinds == ["refused"] * 4 + ["created"]
    assert (place.calls("create"), len(place.reader.machines())) == (5, 1)


def test_an_error_that_made_a_machine_says_which_and_it_can_be_destroyed(shop):
    place = shop("vast")
    place.fault("error_with_contract")
    outcome = place.writer.create(place.spec())
    assert outcome.kind == "created" and isinstance(outcome.problem, GpuError)
    assert len(place.burning()) == 1
    place.writer.destroy(outcome.instance_id)
    assert place.burning() == set()


def test_a_bid_below_the_floor_is_such_an_error(shop):
    place = shop("vast")
    offer = place.reader.offers(replace(place.need, interruptible=True))[0]
    outcome = place.writer.create(place.spec(offer=offer, bid_usd_hr=offer.min_bid_usd_hr / 2))
    assert outcome.kind == "created" and outcome.problem is not None
    place.writer.destroy(outcome.instance_id)
    assert place.burning() == set()


@pytest.mark.parametrize(
    ("vendor", "fault", "args", "difference"),
    [
        ("vast", "price_changed", {"factor": 1.5}, "it costs"),
        ("runpod", "price_changed", {"factor": 1.5}, "it costs"),
        ("vast", "capped_disk", {"disk_gb": 8}, "it has 8 GB of disk, asked for were 50 GB"),
    ],
)
def test_what_came_dearer_or_smaller_is_found_and_destroyed(shop, vendor, fault, args, difference):
    place = shop(vendor)
    place.fault(fault, **args)
    spec = place.spec()
    outcome = place.writer.create(spec)
    place.sandbox.advance(30)
    machine = place.reader.machine(outcome.instance_id)
    verdict = compare(spec, machine)
    assert difference in str(verdict.error(machine))
    place.writer.destroy(outcome.instance_id)
    assert place.burning() == set()


def test_an_interruptible_machine_made_at_the_full_rate_is_found_and_destroyed(shop):
    place = shop("vast")
    offer = place.reader.offers(replace(place.need, interruptible=True))[0]
    spec = place.spec(offer=offer, bid_usd_hr=offer.min_bid_usd_hr)
    place.fault("created_on_demand")
    outcome = place.writer.create(spec)
    machine = place.reader.machine(outcome.instance_id)
    with pytest.raises(CreatedPriceMismatch, match="it is on-demand, asked for was interruptible"):
        raise compare(spec, machine).error(machine)
    place.writer.destroy(outcome.instance_id)
    assert place.burning() == set()


def test_an_interruptible_machine_at_its_bid_is_what_was_asked_for(shop):
    place = shop("vast")
    offer = place.reader.offers(replace(place.need, interruptible=True))[0]
    spec = place.spec(offer=offer, bid_usd_hr=offer.min_bid_usd_hr)
    machine = place.rent(offer=offer, bid_usd_hr=offer.min_bid_usd_hr)
    assert machine.is_interruptible and compare(spec, machine).problems == ()


# reads that go wrong --------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("fault", ["lost_reply", "lost_request", "half_body", "html", "500", "503", "429"])
def test_a_list_that_fails_once_is_asked_again(shop, vendor, fault):
    place = shop(vendor)
    place.rent()
    place.fault(fault, "list")
    assert len(place.reader.machines()) == 1


@BOTH
@pytest.mark.parametrize("fault", ["lost_reply", "html", "500", "garbage", "failure_200", "403", "not_found"])
def test_a_list_that_fails_always_is_never_no_machines(shop, vendor, fault):
    place = shop(vendor)
    place.rent()
    place.fault(fault, "list", times=0)
    with pytest.raises((Unavailable, UnexpectedReply, AuthRejected)):
        place.reader.machines()


@BOTH
def test_a_machine_that_is_not_shown_is_an_observation_and_burns_on(shop, vendor):
    place = shop(vendor)
    machine = place.rent()
    place.fault("not_found", "show")
    assert place.reader.machine(machine.instance_id) is None
    assert place.reader.machine(machine.instance_id) is not None
    assert len(place.burning()) == 1


@BOTH
def test_a_destroy_without_an_answer_is_not_taken_for_one(shop, vendor):
    place = shop(vendor)
    machine = place.rent()
    place.fault("lost_request", "destroy")
    with pytest.raises(ProviderSilent):
        place.writer.destroy(machine.instance_id)
    assert len(place.burning()) == 1
    place.fault("destroy_again", "destroy")
    assert place.writer.destroy(machine.instance_id) == "accepted"
    assert place.reader.machine(machine.instance_id) is not None, "accepted is no proof"


@BOTH
@pytest.mark.parametrize("fault", ["garbage", "failure_200", "html", "500", "lost_request", "half_body"])
@pytest.mark.parametrize("act", ["stop", "destroy"])
def test_a_write_is_done_only_when_the_vendor_says_so(shop, vendor, fault, act):
    place = shop(vendor)
    machine = place.rent()
    place.fault(fault, "destroy" if act == "destroy" else "state" if vendor == "vast" else "action")
    before = dict(place.sandbox.world.mutating_calls)
    with pytest.raises((ProviderSilent, UnexpectedReply)):
        getattr(place.writer, act)(machine.instance_id)
    assert sum(place.sandbox.world.mutating_calls.values()) == sum(before.values()) + 1


# dead ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "status", "dead_end", "may_recover"),
    [
        ("stuck_loading", "booting", None, False),
        ("null_status", "booting", None, False),
        ("exited", "unknown", "exited", False),
        ("unknown", "unknown", "no sign of life", True),
        ("offline", "unknown", "offline", True),
        ("status_error", "booting", "does not start", False),
        ("created_stopped", "stopped", "unless started", False),
    ],
)
def test_a_machine_that_will_not_come_says_why(shop, fault, status, dead_end, may_recover):
    place = shop("vast")
    place.fault(fault)
    machine = place.rent(wait_s=120)
    assert (machine.status, machine.may_recover) == (status, may_recover)
    assert (machine.dead_end is None) == (dead_end is None)
    assert dead_end is None or dead_end in machine.dead_end


def test_an_outbid_machine_says_so(shop):
    place = shop("vast")
    offer = place.reader.offers(replace(place.need, interruptible=True))[0]
    place.fault("outbid", after=30)
    machine = place.rent(offer=offer, bid_usd_hr=offer.min_bid_usd_hr, wait_s=90)
    assert machine.status == "stopped" and machine.is_interruptible
    assert machine.burn_usd_hr > 0


def test_a_full_host_at_a_start_has_its_own_name(shop):
    place = shop("runpod")
    machine = place.rent()
    place.writer.stop(machine.instance_id)
    place.sandbox.advance(30)
    place.sandbox.world.apply_faults([{"match": {"instance": machine.instance_id}, "fault": "host_full"}])
    with pytest.raises(HostFull):
        place.writer.start(machine.instance_id)


@BOTH
def test_a_port_that_changes_with_a_start_is_told_as_it_is_now(shop, vendor):
    place = shop(vendor)
    machine = place.rent()
    before = [way.endpoint.port for way in machine.ways if way.kind == "direct"]
    place.writer.stop(machine.instance_id)
    place.sandbox.advance(30)
    place.writer.start(machine.instance_id)
    place.sandbox.advance(60)
    after = [way.endpoint.port for way in place.reader.machine(machine.instance_id).ways if way.kind == "direct"]
    assert before and after and before != after


# labels, keys, volumes ------------------------------------------------------------------------------------------------


@BOTH
def test_a_label_is_changed_and_read_back(shop, vendor):
    place = shop(vendor)
    machine = place.rent()
    place.writer.set_label(machine.instance_id, "gpu1-abc-int-1-never")
    place.sandbox.advance(60)
    assert place.reader.machine(machine.instance_id).label == "gpu1-abc-int-1-never"


def test_a_key_is_attached_to_the_one_machine(shop):
    place = shop("vast")
    machine = place.rent()
    place.writer.attach_key(
        machine.instance_id, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMadeUpMadeUpMadeUpMadeUpMadeUpMadeUp me"
    )
    assert place.calls("attach_ssh") == 1 and place.calls("create_ssh") == 0


def test_a_network_volume_is_made_found_and_mounted_in_its_data_centre(shop):
    place = shop("runpod")
    with pytest.raises(UsageError, match="EU-RO-1"):
        place.writer.create_volume("data", 50, "CZ")
    volume = place.writer.create_volume("data", 50, "EU-RO-1")
    assert [v.volume_id for v in place.reader.volumes()] == [volume.volume_id]
    need = Requirements(volume_id=volume.volume_id)
    offer = place.reader.offers(need)[0]
    spec = place.spec(offer=offer, volume_id=volume.volume_id, data_centers=("EU-RO-1",), disk_gb=20)
    outcome = place.writer.create(spec)
    assert place.reader.machine(outcome.instance_id).location == "EU-RO-1"
    place.writer.destroy(outcome.instance_id)
    place.sandbox.advance(30)
    assert place.writer.delete_volume(volume.volume_id) == "accepted"
    assert place.reader.volumes() == []
    assert place.burning() == set()


@BOTH
def test_a_busy_customer_is_never_too_fast(shop, vendor):
    """The limits are enforced by the vendor's clock, which our waiting moves."""
    place = shop(vendor)
    for number in range(3):
        place.rent(f"gpu1-abc-{number}", wait_s=0, need=replace(place.need, gpu=None))
    for _ in range(12):
        place.reader.machines()
        place.reader.offers(place.need)
    for machine in place.reader.machines():
        place.reader.machine(machine.instance_id)
        place.writer.destroy(machine.instance_id)
    assert place.burning() == set()
    assert Decimal(0) < sum((Decimal(str(s)) for s in place.clock.slept), Decimal(0))
