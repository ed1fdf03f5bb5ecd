"""Vast's create: what it accepts and refuses, and each way it can cost money that the reply does not tell."""

from __future__ import annotations

from decimal import Decimal

import pytest

from sandbox_fixture import Wire
from vast_calls import cheapest, create, listed, offers, show


@pytest.fixture
def sandbox(make_sandbox):
    return make_sandbox(seed=2)


@pytest.fixture
def api(sandbox):
    return Wire(sandbox)


def put(api: Wire, offer_id: object, body: dict) -> tuple[int, dict]:
    return api("PUT", f"/api/v0/asks/{offer_id}/", body)


def test_a_create_answers_with_the_id_and_a_key_of_the_machine(api, sandbox):
    status, reply = put(api, cheapest(api)["id"], {"image": "x/y", "disk": 10, "label": "mine"})
    assert (status, reply["success"]) == (200, True)
    assert reply["instance_api_key"].startswith("sbx_")
    assert [(i["id"], i["label"]) for i in listed(api)] == [(reply["new_contract"], "mine")]
    assert sandbox.world.burning()


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({}, 400, "invalid_args"),
        ({"image": ""}, 400, "invalid_args"),
        ({"image": "x" * 1025}, 400, "invalid_args"),
        ({"image": "x", "disk": 4}, 400, "invalid_args"),
        ({"image": "x", "disk": "much"}, 400, "invalid_args"),
        ({"image": "x", "label": "l" * 257}, 400, "label_too_long"),
        ({"image": "x", "env": "-e A=1"}, 400, "invalid_args"),
        ({"image": "x", "env": {"A": "v" * 257}}, 400, "invalid_args"),
        ({"image": "x", "env": {"A": ["v"]}}, 400, "invalid_args"),
        ({"image": "x", "onstart": "x" * 4049}, 400, "invalid_args"),
        ({"image": "x", "runtype": "telnet"}, 400, "invalid_args"),
        ({"image": "x", "price": 0}, 400, "invalid_price"),
        ({"image": "x", "price": 129}, 400, "invalid_price"),
        ({"image": "x", "price": True}, 400, "invalid_price"),
        ({"image": "x", "target_state": "asleep"}, 400, "invalid_args"),
        ({"image": "x", "cancel_unavail": "yes"}, 400, "invalid_args"),
        ({"image": "x", "template_hash_id": "nothing"}, 400, "invalid_args"),
        ({"image": "x", "vm": True}, 400, "no_ssh_key_for_vm"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_and_rents_nothing(api, sandbox, body, status, error):
    answer = put(api, cheapest(api)["id"], body)
    assert (answer[0], answer[1]["error"]) == (status, error)
    assert "ask_id" in answer[1]
    assert sandbox.world.burning() == []


@pytest.mark.parametrize("offer_id", ["1", "abc", "99999999999999999999", "-5", "%00"])
def test_an_offer_that_never_was_is_404_or_400(api, offer_id):
    status, reply = put(api, offer_id, {"image": "x"})
    assert status in (400, 404)
    assert reply["success"] is False


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (None, "ssh"),
        ("ssh", "ssh"),
        ("ssh_proxy", "ssh_proxy"),
        ("ssh_direct", "ssh_direc ssh_proxy"),
        ("ssh_direc ssh_proxy", "ssh_direc ssh_proxy"),
        ("jupyter_proxy ssh_proxy", "jupyter_proxy ssh_proxy"),
        ("jupyter_direc ssh_direc ssh_proxy", "jupyter_direc ssh_direc ssh_proxy"),
        ("args", "args"),
    ],
)
def test_every_spelling_of_the_run_type_is_taken(api, sent, kept):
    body = {"runtype": sent} if sent is not None else {"runtype": None}
    assert show(api, create(api, **body))["image_runtype"] == kept


def test_null_fields_of_the_official_client_mean_nothing(api):
    nulls = dict.fromkeys(["price", "extra", "onstart", "image_login", "template_hash_id", "user", "env", "label"])
    found = show(api, create(api, **nulls, force=False, python_utf8=False))
    assert (found["is_bid"], found["label"], found["extra_env"]) == (False, None, [])


def test_env_goes_in_as_an_object_and_comes_out_as_pairs(api):
    found = show(api, create(api, env={"A": "1", "-p 8000:8000": "1"}))
    assert found["extra_env"] == [["A", "1"], ["-p 8000:8000", "1"]]


def test_a_disk_larger_than_the_offer_has_is_capped_in_silence(api):
    offer = min(offers(api), key=lambda o: o["disk_space"])
    found = show(api, create(api, offer, disk=offer["disk_space"] + 500))
    assert found["disk_space"] == offer["disk_space"]


def test_a_price_makes_it_interruptible_and_no_price_does_not(api):
    offer = cheapest(api, direct_port_count={"gte": 1})
    found = show(api, create(api, offer, price=offer["min_bid"] * 1.1))
    assert found["is_bid"] is True
    assert found["dph_base"] == pytest.approx(offer["min_bid"] * 1.1)
    found = show(api, create(api))
    assert found["is_bid"] is False


def test_a_bid_below_the_floor_is_an_error_that_leaves_a_stopped_instance_paying_for_its_disk(api, sandbox):
    offer = cheapest(api)
    status, reply = put(api, offer["id"], {"image": "x", "disk": 10, "price": offer["min_bid"] * 0.5})
    assert (status, reply["success"], reply["error"]) == (400, False, "invalid_price")
    found = show(api, reply["new_contract"])
    states = (found["actual_status"], found["cur_state"], found["next_state"], found["intended_status"])
    assert states == ("stopped",) * 4
    assert [entry["kind"] for entry in sandbox.world.burning()] == ["disk"]


def rent_all(api: Wire) -> dict:
    """An offer whose GPUs somebody else has meanwhile taken, one by one."""
    whole = next(o for o in offers(api) if o["gpu_frac"] == 1 and o["num_gpus"] == 1)
    create(api, whole)
    return whole


def test_an_offer_taken_meanwhile_is_410_with_cancel_unavail(api):
    status, reply = put(api, rent_all(api)["id"], {"image": "x", "cancel_unavail": True})
    assert (status, reply["error"]) == (410, "no_such_ask")


def test_on_demand_cancels_by_default_when_the_gpus_are_gone(api):
    assert put(api, rent_all(api)["id"], {"image": "x"})[0] == 410


def test_without_cancel_unavail_it_is_created_stopped_waits_and_pays_for_its_disk(api, sandbox):
    whole = rent_all(api)
    (first,) = listed(api)
    status, reply = put(api, whole["id"], {"image": "x", "cancel_unavail": False})
    assert status == 200
    found = show(api, reply["new_contract"])
    assert (found["actual_status"], found["intended_status"]) == ("stopped", "running")
    assert {"disk"} == {e["kind"] for e in sandbox.world.burning() if str(reply["new_contract"]) in e["resource"]}
    api("DELETE", f"/api/v0/instances/{first['id']}/")
    sandbox.advance(60)
    assert show(api, reply["new_contract"])["actual_status"] == "running", "it starts when the GPUs are free again"


def test_target_state_stopped_is_created_stopped(api):
    found = show(api, create(api, target_state="stopped", cancel_unavail=False))
    assert (found["actual_status"], found["intended_status"]) == ("stopped", "stopped")


@pytest.mark.parametrize(
    ("fault", "args", "status", "error"),
    [
        ("offer_gone", {"status": 404}, 404, "invalid_args"),
        ("offer_gone", {"status": 410}, 410, "no_such_ask"),
        ("no_capacity", {}, 404, "invalid_args"),
        ("insufficient_balance", {}, 400, "missing_billing"),
        ("429", {}, 429, None),
        ("500", {}, 500, "server_error"),
        ("503", {}, 503, "server_error"),
        ("401", {}, 401, "auth_error"),
    ],
)
def test_faults_that_refuse_a_create_rent_nothing(api, sandbox, fault, args, status, error):
    offer = cheapest(api)
    sandbox.faults.add([{"match": {"call": "create"}, "fault": fault, "args": args}])
    found, _, data = api.full("PUT", f"/api/v0/asks/{offer['id']}/", {"image": "x"})
    assert found == status
    assert error is None or f'"{error}"'.encode() in data
    assert sandbox.world.burning() == []
    assert put(api, offer["id"], {"image": "x"})[0] == 200, "a fault acts once"


def test_an_error_reply_can_carry_the_id_of_an_instance_that_bills(api, sandbox):
    sandbox.faults.script("vast", "create", "error_with_contract")
    status, reply = put(api, cheapest(api)["id"], {"image": "x", "label": "orphan"})
    assert (status, reply["success"]) == (400, False)
    assert [(i["id"], i["label"]) for i in listed(api)] == [(reply["new_contract"], "orphan")]


@pytest.mark.parametrize(
    ("fault", "field", "value"),
    [
        ({"fault": "capped_disk", "args": {"disk_gb": 9}}, "disk_space", 9.0),
        ({"fault": "created_stopped"}, "actual_status", "stopped"),
        ({"fault": "created_on_demand"}, "is_bid", False),
        ({"fault": "null_status"}, "actual_status", None),
        ({"fault": "stuck_loading"}, "actual_status", "loading"),
        ({"fault": "exited"}, "actual_status", "exited"),
        ({"fault": "unknown"}, "actual_status", "unknown"),
        ({"fault": "offline"}, "actual_status", "offline"),
        ({"fault": "status_error"}, "actual_status", "created"),
    ],
)
def test_an_instance_can_be_born_other_than_asked(api, sandbox, fault, field, value):
    offer = cheapest(api, direct_port_count={"gte": 1})
    sandbox.faults.add([{"match": {"call": "create"}, **fault}])
    instance_id = create(api, offer, price=offer["min_bid"] * 1.2, cancel_unavail=False)
    sandbox.advance(3600)
    assert show(api, instance_id)[field] == value


def test_a_changed_price_shows_on_the_instance_and_on_the_meter(api, sandbox):
    offer = cheapest(api)
    sandbox.faults.add([{"match": {"call": "create"}, "fault": "price_changed", "args": {"factor": 2}}])
    instance_id = create(api, offer)
    sandbox.advance(60)
    assert show(api, instance_id)["dph_base"] == pytest.approx(2 * offer["dph_base"])
    (gpu,) = (e for e in sandbox.world.burning() if e["kind"] == "gpu")
    assert gpu["rate_usd_hr"] == 2 * Decimal(str(offer["dph_base"]))


def test_bulk_creates_succeed_and_fail_one_by_one(api):
    good = offers(api, num_gpus={"eq": 1})[:2]
    status, reply = api("POST", "/api/v0/asks/bulk/", {"ids": [good[0]["id"], 1, good[1]["id"]], "image": "x"})
    assert status == 200
    assert [result["success"] for result in reply["results"]] == [True, False, True]
    assert len(listed(api)) == 2


def test_launch_searches_and_rents_in_one_call(api):
    query = {"gpu_name": {"eq": "H200"}, "num_gpus": {"eq": "1"}, "order": [["dph_total", "asc"]]}
    status, reply = api("PUT", "/api/v0/launch_instance/", {"image": "x", "disk": 10, "q": query})
    assert status == 200
    assert show(api, reply["new_contract"])["gpu_name"] == "H200"
    status, reply = api("PUT", "/api/v0/launch_instance/", {"image": "x", "q": {"gpu_name": {"eq": "B300"}}})
    assert (status, reply["error"]) == (404, "no_such_ask")


def test_a_template_fills_what_the_request_leaves_out_and_env_merges(api):
    _, made = api("POST", "/api/v0/template/", {"image": "from/template", "env": {"A": "t", "B": "t"}, "disk": 33})
    found = show(api, create(api, image=None, disk=None, env={"A": "r"}, template_hash_id=made["template"]["hash_id"]))
    assert (found["image_uuid"], found["disk_space"]) == ("from/template", 33.0)
    assert dict(map(tuple, found["extra_env"])) == {"A": "r", "B": "t"}
    assert found["template_hash_id"] == made["template"]["hash_id"]


def test_without_credit_nothing_is_rented(make_sandbox):
    sandbox = make_sandbox(balance_usd=0)
    api = Wire(sandbox)
    status, reply = put(api, cheapest(api)["id"], {"image": "x"})
    assert (status, reply["error"]) == (400, "missing_billing")
