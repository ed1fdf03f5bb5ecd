"""The bill: exact amounts worked out by hand, no second twice or never, and totals that are the sum of the lines."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_skills.sandbox.meter import Bill, by_kind, per_hour
from sandbox_fixture import Wire
from vast_calls import cheapest, create, running, show

D = Decimal


def test_an_hour_at_a_rate_costs_the_rate_and_a_second_its_3600th():
    bill = Bill()
    bill.set_rate("instance-1", "gpu", D("0.72"), 1000)
    assert bill.total_usd(1000 + 3600) == D("0.72")
    assert bill.total_usd(1001) == D("0.0002")


def test_a_change_of_rate_falls_on_one_second_that_is_neither_lost_nor_charged_twice():
    bill = Bill()
    bill.set_rate("instance-1", "gpu", D("3.6"), 100.9)
    bill.set_rate("instance-1", "gpu", D("7.2"), 110.2)
    bill.set_rate("instance-1", "gpu", D(0), 120.7)
    assert [(e.start, e.end) for e in bill.entries] == [(100, 110), (110, 120)]
    assert bill.total_usd(10_000) == 10 * D("0.001") + 10 * D("0.002")


def test_what_lasts_less_than_a_second_leaves_no_line():
    bill = Bill()
    bill.set_rate("instance-1", "gpu", D(1), 5.1)
    bill.set_rate("instance-1", "gpu", D(0), 5.9)
    assert bill.lines(100) == []


def test_a_kind_that_is_not_named_any_more_ends():
    bill = Bill()
    bill.set_rates("instance-1", {"gpu": D(2), "disk": D(1)}, 0)
    bill.set_rates("instance-1", {"disk": D(1)}, 3600)
    assert bill.burn_usd_hr() == 1
    assert by_kind(bill.entries, 0, 7200) == {"gpu": D(2), "disk": D(2)}


def test_bandwidth_is_a_lump_in_the_second_it_was_made():
    bill = Bill()
    bill.add("instance-1", "bwd", usd_per_gb=D("0.02"), quantity_gb=D("12.5"), now=50)
    assert bill.total_usd(50) == D("0.25")
    assert by_kind(bill.entries, 0, 50) == {"bwd": D(0)}
    assert by_kind(bill.entries, 50, 51) == {"bwd": D("0.25")}


@pytest.mark.parametrize(
    ("usd_per_gb_month", "gigabytes", "usd_hr"),
    [("0.149333", "10", "0.0020740694"), ("0.15", "10.08", "0.0021"), ("0.10", "720", "0.1"), ("0.20", "720", "0.2")],
)
def test_storage_by_the_month_is_720_hours(usd_per_gb_month, gigabytes, usd_hr):
    assert round(per_hour(D(usd_per_gb_month), D(gigabytes)), 10) == D(usd_hr)


_STEPS = st.lists(
    st.tuples(
        st.integers(0, 5000),
        st.sampled_from(["instance-1", "instance-2"]),
        st.sampled_from(["gpu", "disk"]),
        st.decimals(0, 10, places=6),
    ),
    max_size=30,
)


@given(_STEPS, st.lists(st.integers(0, 200_000), min_size=2, max_size=6))
def test_windows_that_touch_add_up_to_the_whole_and_lines_to_the_total(steps, cuts):
    bill, now = Bill(), 0
    for wait_s, resource, kind, rate in steps:
        now += wait_s
        bill.set_rate(resource, kind, rate, now)
    end = now + 1000
    lines = bill.lines(end)
    assert sum((line["amount_usd"] for line in lines), D(0)) == bill.total_usd(end)
    edges = sorted({0, end, *(cut for cut in cuts if cut < end)})
    windows = [sum(by_kind(bill.entries, a, b).values(), D(0)) for a, b in pairwise(edges)]
    # Each window of each entry is rounded to twelve places.
    assert abs(sum(windows, D(0)) - bill.total_usd(end)) <= D("1e-12") * len(edges) * max(len(lines), 1)


def test_a_vast_instance_costs_what_its_offer_said_to_the_second(make_sandbox):
    sandbox = make_sandbox(delays={"provisioning_s": 10, "loading_s": 50, "stopping_s": 0})
    api = Wire(sandbox)
    offer = cheapest(api, inet_down_cost={"gt": 0}, direct_port_count={"gte": 1})
    instance_id = create(api, offer, disk=72)
    host = sandbox.world.instances[instance_id].host
    account = sandbox.world.account("vast")
    sandbox.advance(60 + 3600)  # a minute until it runs, an hour of running
    disk = host.storage_usd_gb_month * 72 / 720
    pull = 4 * host.down_usd_gb
    expected = host.rate_usd_hr * offer["num_gpus"] + disk * 3660 / 3600 + pull
    assert account.bill.total_usd(sandbox.world.now()) == pytest.approx(expected, abs=D("1e-11"))
    api("PUT", f"/api/v0/instances/{instance_id}/", {"state": "stopped"})
    sandbox.advance(1800)
    expected += disk * D("1.2") / 2
    assert account.bill.total_usd(sandbox.world.now()) == pytest.approx(expected, abs=D("1e-11"))
    api("DELETE", f"/api/v0/instances/{instance_id}/")
    sandbox.advance(86400)
    assert account.bill.total_usd(sandbox.world.now()) == pytest.approx(expected, abs=D("1e-11"))
    assert account.balance_usd(sandbox.world.now()) == 100 - account.bill.total_usd(sandbox.world.now())


def test_charges_are_the_bill_by_kind_and_stop_growing_after_destroy(make_sandbox):
    sandbox = make_sandbox()
    api = Wire(sandbox)
    instance_id = running(sandbox, api, label="billed")
    sandbox.advance(7200)

    def row() -> dict:
        day = {"day": {"gte": 0, "lte": int(sandbox.world.now()) + 86400}, "type": {"in": ["instance"]}}
        _, body = api("GET", "/api/v0/charges/", select_filters=day, format="table")
        assert (body["count"], body["total"], body["next_token"]) == (1, 1, None)
        return body["results"][0]

    found = row()
    assert (found["source"], found["metadata"]) == (f"instance-{instance_id}", {"label": "billed"})
    assert found["amount"] == pytest.approx(sum(item["amount"] for item in found["items"]), abs=0.0006)
    assert {"gpu", "disk"} <= {item["type"] for item in found["items"]} <= {"gpu", "disk", "bwd"}
    total = sandbox.world.account("vast").bill.total_usd(sandbox.world.now())
    assert sum(item["amount"] for item in found["items"]) == pytest.approx(float(total), abs=2e-6)
    assert show(api, instance_id) is not None
    api("DELETE", f"/api/v0/instances/{instance_id}/")
    ended = row()
    sandbox.advance(86400)
    assert row() == ended


@pytest.mark.parametrize("filters", [{}, {"day": {"gte": 1}}, {"day": {"lte": 1}}, {"day": 7}])
def test_charges_need_both_ends_of_a_range_and_invoices_say_so_with_200(make_sandbox, filters):
    api = Wire(make_sandbox())
    status, body = api("GET", "/api/v0/charges/", select_filters=filters)
    assert (status, body["success"]) == (400, False)
    when = {"when": filters["day"]} if "day" in filters else {}
    assert api("GET", "/api/v1/invoices/", select_filters=when) == (
        200,
        {"success": False, "error": "Invalid date range"},
    )


def test_a_volume_bills_by_itself_and_outlives_its_machine(make_sandbox):
    sandbox = make_sandbox()
    api = Wire(sandbox)
    volume = {"create_new": True, "size": 72, "mount_path": "/data", "name": "kept"}
    instance_id = create(api, volume_info=volume)
    (found,) = api("GET", "/api/v0/volumes/")[1]["volumes"]
    assert api("DELETE", "/api/v0/volumes/", {"id": found["id"]})[0] == 400, "it is in use"
    api("DELETE", f"/api/v0/instances/{instance_id}/")
    (entry,) = sandbox.world.burning()
    assert (entry["kind"], entry["label"]) == ("volume", "kept")
    assert api("DELETE", "/api/v0/volumes/", {"id": found["id"]})[1] == {"success": True}
    assert sandbox.world.burning() == []


def test_a_deposit_needs_credit(make_sandbox):
    sandbox = make_sandbox()
    api = Wire(sandbox)
    instance_id = running(sandbox, api)
    assert api("PUT", f"/api/v0/instances/prepay/{instance_id}/", {"amount": 1000})[0] == 411
    status, body = api("PUT", f"/api/v0/instances/prepay/{instance_id}/", {"amount": 20})
    assert (status, body["success"]) == (200, True)
    assert api("GET", f"/api/v0/instances/balance/{instance_id}/")[1]["refundable_deposit"] == 20
