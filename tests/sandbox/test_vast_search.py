"""Vast's search: which filters it takes in which form, what it passes over in silence, and how it prices disks."""

from __future__ import annotations

import math

import pytest

from sandbox_fixture import Wire
from vast_calls import offers


@pytest.fixture
def api(make_sandbox):
    return Wire(make_sandbox(seed=5))


@pytest.mark.parametrize(
    ("filters", "holds"),
    [
        ({"num_gpus": {"eq": "1"}}, lambda o: o["num_gpus"] == 1),
        ({"num_gpus": {"eq": 2}}, lambda o: o["num_gpus"] == 2),
        ({"num_gpus": {"in": ["2", 4]}}, lambda o: o["num_gpus"] in (2, 4)),
        ({"num_gpus": {"notin": [1]}}, lambda o: o["num_gpus"] != 1),
        ({"reliability": {"gt": "0.98"}}, lambda o: o["reliability"] > 0.98),
        ({"gpu_ram": {"gte": 24000, "lt": "30000"}}, lambda o: 24000 <= o["gpu_ram"] < 30000),
        ({"gpu_name": {"eq": "RTX 4090"}}, lambda o: o["gpu_name"] == "RTX 4090"),
        ({"gpu_name": {"in": ["RTX 3090", "H200"]}}, lambda o: o["gpu_name"] in ("RTX 3090", "H200")),
        ({"geolocation": {"in": ["SE", "US"]}}, lambda o: o["geolocation"][-2:] in ("SE", "US")),
        ({"cuda_max_good": {"gte": "12.6"}}, lambda o: o["cuda_max_good"] >= 12.6),
        ({"driver_version": {"gte": "560.35.03"}}, lambda o: o["driver_vers"] >= 560035003),
        ({"driver_version": {"gte": 560035003}}, lambda o: o["driver_vers"] >= 560035003),
        ({"datacenter": {"eq": True}}, lambda o: o["hosting_type"] == 1),
        ({"static_ip": {"eq": "true"}}, lambda o: o["static_ip"] is True),
        ({"verified": {"eq": False}}, lambda o: o["verification"] != "verified"),
        ({"verification": {"eq": "verified"}}, lambda o: o["verification"] == "verified"),
        ({"dph_total": {"lte": "0.3"}}, lambda o: o["dph_total"] <= 0.3),
        ({"direct_port_count": {"gte": 1}}, lambda o: o["direct_port_count"] >= 1),
        ({"compute_cap": {"gte": 900}}, lambda o: o["compute_cap"] >= 900),
    ],
)
def test_a_filter_removes_exactly_what_does_not_meet_it(api, filters, holds):
    every = offers(api, **({"verified": {}} if "verified" in filters else {}))
    found = offers(api, **filters)
    assert found, "a filter that leaves nothing proves nothing"
    assert {o["id"] for o in found} == {o["id"] for o in every if holds(o)}


@pytest.mark.parametrize(
    "filters",
    [{"gpu_name": {"eq": "RTX_4090"}}, {"gpu_ram": {"eq": "24000"}}, {"num_gpus": {"eq": "many"}}],
)
def test_the_wrong_spelling_finds_nothing_and_says_nothing(api, filters):
    assert offers(api, **filters) == []


@pytest.mark.parametrize("filters", [{"gpu_nmae": {"eq": "RTX 4090"}}, {"gpu_name": "RTX 4090"}, {"num_gpus": 1}])
def test_what_is_no_filter_is_passed_over_so_that_other_gpus_come_back(api, filters):
    assert {o["gpu_name"] for o in offers(api, **filters)} == {o["gpu_name"] for o in offers(api)}


def test_only_verified_offers_come_unless_asked_otherwise(api):
    assert {o["verification"] for o in offers(api)} == {"verified"}
    assert {"unverified"} < {o["verification"] for o in offers(api, verified={})}


def test_without_a_limit_at_most_64_offers_come(api):
    status, body = api("POST", "/api/v0/bundles/", {"verified": {}})
    assert (status, len(body["offers"])) == (200, 64)


@pytest.mark.parametrize("disk_gb", [5, 50, "200"])
def test_the_total_is_the_gpus_and_the_disk_asked_for_at_720_hours_a_month(api, disk_gb):
    for offer in offers(api, allocated_storage=disk_gb):
        expected = offer["dph_base"] + offer["storage_cost"] * float(disk_gb) / 720
        assert math.isclose(offer["dph_total"], expected, abs_tol=1e-9)
        assert math.isclose(offer["search"]["totalHour"], offer["dph_total"], abs_tol=1e-9)


def test_the_default_disk_is_8_gb(api):
    offer = offers(api)[0]
    assert math.isclose(offer["storage_total_cost"], offer["storage_cost"] * 8 / 720, abs_tol=1e-9)


@pytest.mark.parametrize("spelling", ["bid", "interruptible"])
def test_a_bid_search_is_priced_at_the_floor(api, spelling):
    for offer in offers(api, type=spelling):
        assert offer["is_bid"] is True
        assert offer["dph_base"] == offer["min_bid"]


@pytest.mark.parametrize("spelling", ["on-demand", "ondemand", "reserved"])
def test_both_spellings_of_on_demand_are_taken(api, spelling):
    assert all(offer["is_bid"] is False for offer in offers(api, type=spelling))


@pytest.mark.parametrize(
    ("order", "key", "reverse"),
    [
        ([["dph_total", "asc"]], "dph_total", False),
        ([["reliability", "desc"]], "reliability", True),
        (None, "score", 1),
    ],
)
def test_offers_come_in_the_order_asked_for(api, order, key, reverse):
    found = [offer[key] for offer in offers(api, **({"order": order} if order else {}))]
    assert found == sorted(found, reverse=bool(reverse))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"[1]", "invalid_request"),
        (b"{", "invalid_request"),
        (b'{"num_gpus": {"about": 1}}', "invalid_request"),
        (b'{"type": "stolen"}', "invalid_request"),
        (b'{"order": [["score"]]}', "invalid_request"),
        (b'{"num_gpus": {"eq": NaN}}', "invalid_request"),
        (b"[" * 100_000, "invalid_request"),
    ],
)
def test_a_malformed_search_is_400(api, body, error):
    status, reply = api("POST", "/api/v0/bundles/", raw=body)
    assert (status, reply["error"]) == (400, error)


def test_the_content_type_is_what_the_official_client_insists_on(api):
    _, headers, _ = api.full("POST", "/api/v0/bundles/", {})
    assert headers["content-type"] == "application/json"


def test_the_new_search_selects_columns(api):
    status, body = api(
        "PUT", "/api/v0/search/asks/", {"select_cols": ["id", "gpu_name", "nothing"], "q": {"num_gpus": {"eq": 1}}}
    )
    assert status == 200
    assert all(set(offer) == {"id", "gpu_name", "nothing"} and offer["nothing"] is None for offer in body["offers"])


def test_the_same_seed_gives_the_same_offers_and_another_seed_others(make_sandbox):
    first, again, other = (offers(Wire(make_sandbox(seed=seed))) for seed in (7, 7, 8))
    price = [(o["id"], o["machine_id"], o["dph_base"]) for o in first]
    assert price == [(o["id"], o["machine_id"], o["dph_base"]) for o in again]
    assert price != [(o["id"], o["machine_id"], o["dph_base"]) for o in other]


def test_offer_ids_expire_and_machine_ids_stay(make_sandbox):
    sandbox = make_sandbox()
    api = Wire(sandbox)
    before = offers(api)
    sandbox.advance(7 * 3600)
    after = offers(api)
    assert {o["machine_id"] for o in after} <= {o["machine_id"] for o in before}
    assert not {o["id"] for o in before} & {o["id"] for o in after}
    status, reply = api("PUT", f"/api/v0/asks/{before[0]['id']}/", {"image": "x", "cancel_unavail": True})
    assert (status, reply["ask_id"]) == (404, before[0]["id"])
    assert "no_such_ask" in reply["msg"]


def test_rented_gpus_are_not_offered_and_come_back_after_destroy(make_sandbox):
    sandbox = make_sandbox()
    api = Wire(sandbox)
    offer = next(o for o in offers(api) if o["gpu_frac"] == 1)
    own = {"machine_id": {"eq": offer["machine_id"]}}
    _, made = api("PUT", f"/api/v0/asks/{offer['id']}/", {"image": "x", "disk": 10})
    assert offers(api, **own) == []
    api("DELETE", f"/api/v0/instances/{made['new_contract']}/")
    assert max(o["num_gpus"] for o in offers(api, **own)) == offer["num_gpus"]


def test_gpu_names_need_no_key(make_sandbox):
    status, body = Wire(make_sandbox(), key=None)("GET", "/api/v0/gpu_names/unique/")
    assert status == 200
    assert "RTX 4090" in body["gpu_names"]
