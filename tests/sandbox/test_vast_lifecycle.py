"""The life of a Vast instance: states, what each of them bills, keys, bids, pages, and how it ends or does not."""

from __future__ import annotations

import http.client
import time
from itertools import pairwise

import pytest

from sandbox_fixture import Wire
from vast_calls import cheapest, create, listed, offers, running, show


@pytest.fixture
def sandbox(make_sandbox):
    return make_sandbox(seed=2, delays={"provisioning_s": 5, "loading_s": 40, "stopping_s": 3, "reboot_s": 2})


@pytest.fixture
def api(sandbox):
    return Wire(sandbox)


def kinds(sandbox) -> set[str]:
    return {entry["kind"] for entry in sandbox.world.burning()}


def put(api: Wire, path: str, body: dict | None = None) -> tuple[int, dict]:
    return api("PUT", f"/api/v0/instances/{path}/", body or {})


def test_it_goes_from_null_over_loading_to_running_and_pays_for_the_gpu_only_then(sandbox, api):
    instance_id = create(api)
    seen = []
    for wait_s in (0, 6, 30, 15):
        sandbox.advance(wait_s)
        found = show(api, instance_id)
        seen.append((found["actual_status"], "ports" in found, kinds(sandbox)))
    assert seen == [
        (None, False, {"disk"}),
        ("loading", False, {"disk"}),
        ("loading", False, {"disk"}),
        ("running", True, {"disk", "gpu"}),
    ]


@pytest.mark.parametrize(
    ("act", "then", "status", "billed"),
    [
        (("state", {"state": "stopped"}), 1, "running", {"disk", "gpu"}),
        (("state", {"state": "stopped"}), 4, "stopped", {"disk"}),
        (("reboot", {}), 1, "rebooting", {"disk"}),
        (("reboot", {}), 60, "running", {"disk", "gpu"}),
        (("recycle", {}), 60, "running", {"disk", "gpu"}),
        (("destroy", {}), 0, None, set()),
    ],
)
def test_what_is_done_to_a_running_one(sandbox, api, act, then, status, billed):
    instance_id = running(sandbox, api)
    what, body = act
    if what == "destroy":
        assert api("DELETE", f"/api/v0/instances/{instance_id}/")[1]["success"] is True
    else:
        path = str(instance_id) if what == "state" else f"{what}/{instance_id}"
        assert put(api, path, body) == (200, {"success": True})
    sandbox.advance(then)
    found = show(api, instance_id)
    assert (found and found["actual_status"]) == status
    assert kinds(sandbox) == billed


def test_a_stopped_one_bills_its_disk_at_the_higher_rate_and_shows_it(sandbox, api):
    instance_id = running(sandbox, api)
    before = show(api, instance_id)
    put(api, str(instance_id), {"state": "stopped"})
    sandbox.advance(10)
    after = show(api, instance_id)
    assert after["instance"]["gpuCostPerHour"] == 0
    assert after["instance"]["totalHour"] == pytest.approx(1.2 * before["instance"]["diskHour"])
    assert after["search"]["totalHour"] == before["search"]["totalHour"]


def test_a_start_waits_without_end_for_gpus_that_somebody_else_has(sandbox, api):
    whole = cheapest(api, gpu_frac={"eq": 1}, num_gpus={"eq": 1})
    first = create(api, whole)
    sandbox.advance(60)
    put(api, str(first), {"state": "stopped"})
    sandbox.advance(10)
    second = create(api, cheapest(api, machine_id={"eq": whole["machine_id"]}, rented={"eq": True}))
    status, reply = put(api, str(first), {"state": "running"})
    assert (status, reply["success"]) == (200, True)
    sandbox.advance(86400)
    found = show(api, first)
    assert (found["actual_status"], found["intended_status"], found["cur_state"]) == ("stopped", "running", "stopped")
    api("DELETE", f"/api/v0/instances/{second}/")
    sandbox.advance(60)
    assert show(api, first)["actual_status"] == "running"


def test_stop_cancels_a_start_that_waits(sandbox, api):
    instance_id = running(sandbox, api)
    put(api, str(instance_id), {"state": "stopped"})
    sandbox.advance(10)
    sandbox.world.apply_faults([{"match": {"instance": instance_id}, "fault": "host_full"}])
    put(api, str(instance_id), {"state": "running"})
    put(api, str(instance_id), {"state": "stopped"})
    sandbox.advance(3600)
    assert show(api, instance_id)["intended_status"] == "stopped"
    assert kinds(sandbox) == {"disk"}


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({}, 400, "invalid_args"),
        ({"state": "frozen"}, 400, "invalid_args"),
        ({"label": 7}, 400, "invalid_args"),
        ({"label": "l" * 1025}, 400, "label_too_long"),
    ],
)
def test_a_change_that_is_none_is_refused(sandbox, api, body, status, error):
    instance_id = create(api)
    found, reply = put(api, str(instance_id), body)
    assert (found, reply["error"]) == (status, error)


def test_several_are_changed_and_destroyed_in_one_call(sandbox, api):
    ids = [create(api), create(api)]
    status, reply = api("PUT", "/api/v0/instances/", {"state": "stopped", "ids": [ids[0], str(ids[1])]})
    assert (status, reply["success"]) == (200, True)
    sandbox.advance(10)
    assert [i["actual_status"] for i in listed(api)] == ["stopped", "stopped"]
    assert api("DELETE", "/api/v0/instances/", {"instance_ids": ids})[1]["success"] is True
    assert listed(api) == []


@pytest.mark.parametrize("ids", [None, [], "1", [None], [1.5], [{}], list(range(65))])
def test_what_is_no_list_of_ids_is_refused(api, ids):
    assert api("PUT", "/api/v0/instances/", {"state": "stopped", "ids": ids})[1]["error"] == "invalid_args"
    assert api("DELETE", "/api/v0/instances/", {"instance_ids": ids})[1]["error"] == "invalid_args"


def test_a_label_can_be_changed_to_a_long_one(sandbox, api):
    instance_id = create(api, label="short")
    assert put(api, str(instance_id), {"label": "l" * 1024})[0] == 200
    assert [i["label"] for i in listed(api, select_filters={"label": {"eq": "l" * 1024}})] == ["l" * 1024]


@pytest.mark.parametrize("path", ["reboot/{}", "recycle/{}", "{}", "bid_price/{}", "request_logs/{}"])
def test_what_is_not_there_is_no_such_instance(api, path):
    status, reply = put(api, path.format(12), {"state": "stopped"})
    assert (status, reply["error"]) == (404, "no_such_instance")


def test_somebody_elses_instance_is_not_there(sandbox, api):
    instance_id = create(api)
    other = Wire(sandbox, key=sandbox.world.add_account("vast").value)
    assert show(other, instance_id) is None
    assert listed(other) == []
    assert other("DELETE", f"/api/v0/instances/{instance_id}/")[0] == 404
    assert show(api, instance_id) is not None


def test_the_old_list_is_gone_and_says_so(api):
    status, reply = api("GET", "/api/v0/instances/", owner="me")
    assert (status, reply["error"]) == (410, "deprecated_endpoint")


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_slash_at_the_end_makes_no_difference(api, slash):
    assert api("GET", f"/api/v1/instances{slash}")[0] == 200
    assert api("GET", f"/api/v0/users/current{slash}")[0] == 200


# pages --------------------------------------------------------------------------------------------------------------


def test_a_page_holds_at_most_25_and_the_tokens_lead_tooffers(make_sandbox):
    sandbox = make_sandbox(balance_usd=10_000)
    api = Wire(sandbox)
    made = [create(api, label=f"job-{number % 2}") for number in range(31)]
    pages, token = [], None
    while True:
        query = {"limit": 100, **({"after_token": token} if token else {})}
        _, body = api("GET", "/api/v1/instances/", **query)
        pages.append([i["id"] for i in body["instances"]])
        assert (body["instances_found"], body["total_instances"]) == (len(pages[-1]), 31)
        assert body["label_counts"] == {"job-0": 16, "job-1": 15}
        token = body["next_token"]
        if token is None:
            break
    assert [len(page) for page in pages] == [25, 6]
    assert sorted(instance_id for page in pages for instance_id in page) == made
    assert len(listed(api, limit=0)) == 5
    assert len(listed(api, select_filters={"label": {"eq": "job-1"}})) == 15


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"after_token": "rubbish"}, "invalid_token"),
        ({"select_filters": {"dph_total": {"lt": 1}}}, "invalid_request"),
        ({"select_filters": {"num_gpus": {"eq": 1}}}, "invalid_request"),
        ({"select_filters": {"label": {"like": "x"}}}, "invalid_request"),
        ({"select_filters": [1]}, "invalid_request"),
        ({"select_filters": "{"}, "invalid_request"),
        ({"order_by": [{"col": "dph_total", "dir": "asc"}]}, "invalid_request"),
        ({"limit": "many"}, "invalid_request"),
    ],
)
def test_a_list_that_cannot_be_is_400(api, query, error):
    create(api)
    status, reply = api("GET", "/api/v1/instances/", **query)
    assert (status, reply["error"]) == (400, error)


def test_a_list_can_be_ordered_and_columns_chosen_unknown_ones_as_null(api):
    ids = [create(api), create(api)]
    query = {"order_by": [{"col": "id", "dir": "desc"}], "select_cols": ["id", "nothing"]}
    assert listed(api, **query) == [{"id": ids[1], "nothing": None}, {"id": ids[0], "nothing": None}]


# keys ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "status"),
    [(None, 403), ("a" * 64, 401), ("sbx_vast_account_unknown", 404)],
)
def test_a_key_that_is_none_is_refused_the_way_the_vendor_does(sandbox, key, status):
    found, reply = Wire(sandbox, key=key)("GET", "/api/v1/instances/")
    assert (found, reply["error"]) == (status, "auth_error")


def test_a_real_looking_key_is_kept_nowhere(sandbox):
    Wire(sandbox, key="c0ffee" * 10)("GET", "/api/v1/instances/", api_key="c0ffee" * 10)
    assert "c0ffee" not in repr(list(sandbox.world.log)) + repr(sandbox.world.keys)


def machine_key(sandbox, instance_id: int) -> Wire:
    return Wire(sandbox, key=sandbox.world.instances[instance_id].key.value)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/api/v0/instances/{own}/", {"state": "stopped"}, 200),
        ("PUT", "/api/v0/instances/{own}/", {"state": "running"}, 200),
        ("DELETE", "/api/v0/instances/{own}/", {}, 200),
        ("PUT", "/api/v0/instances/{own}/", {"label": "x"}, 403),
        ("PUT", "/api/v0/instances/{other}/", {"state": "stopped"}, 403),
        ("DELETE", "/api/v0/instances/{other}/", {}, 403),
        ("GET", "/api/v1/instances/", None, 403),
        ("GET", "/api/v0/users/current/", None, 403),
        ("POST", "/api/v0/bundles/", {}, 403),
        ("PUT", "/api/v0/asks/1/", {"image": "x"}, 403),
        ("POST", "/api/v0/ssh/", {"ssh_key": "ssh-ed25519 AAAA"}, 403),
    ],
)
def test_a_machines_key_may_start_stop_and_destroy_itself_and_nothing_else(sandbox, api, method, path, body, status):
    own, other = create(api), create(api)
    assert machine_key(sandbox, own)(method, path.format(own=own, other=other), body)[0] == status


def test_a_machines_key_can_be_denied_and_ends_with_the_machine(sandbox, api):
    instance_id = create(api)
    wire = machine_key(sandbox, instance_id)
    sandbox.world.apply_faults([{"match": {"instance": str(instance_id)}, "fault": "key_denied"}])
    assert wire("PUT", f"/api/v0/instances/{instance_id}/", {"state": "stopped"})[0] == 403
    api("DELETE", f"/api/v0/instances/{instance_id}/")
    status, reply = wire("DELETE", f"/api/v0/instances/{instance_id}/")
    assert (status, reply["error"]) == (404, "auth_error")


def test_account_keys_reach_only_instances_made_afterwards_and_attached_ones_at_once(sandbox, api):
    def keys(instance_id):
        return [k["public_key"] for k in _json(api("GET", f"/api/v0/instances/{instance_id}/ssh/")[1]["ssh_keys"])]

    before = create(api)
    _, made = api("POST", "/api/v0/ssh/", {"ssh_key": "ssh-ed25519 AAAA one"})
    after = create(api)
    assert (keys(before), keys(after)) == ([], ["ssh-ed25519 AAAA one"])
    api("POST", f"/api/v0/instances/{before}/ssh/", {"ssh_key": "ssh-ed25519 BBBB two"})
    assert keys(before) == ["ssh-ed25519 BBBB two"]
    assert [k["id"] for k in api("GET", "/api/v0/ssh/")[1]] == [made["key"]["id"]]
    assert api("DELETE", f"/api/v0/instances/{after}/ssh/{made['key']['id']}/")[1]["success"]
    assert keys(after) == []
    assert api("DELETE", f"/api/v0/ssh/{made['key']['id']}/")[1] == {"success": True}
    assert api("POST", "/api/v0/ssh/", {"ssh_key": " "})[1]["error"] == "no_ssh_key"


def _json(text: str) -> list:
    import json

    return json.loads(text)


# bids ---------------------------------------------------------------------------------------------------------------


def test_an_outbid_one_stops_keeps_paying_for_its_disk_and_comes_back_by_itself(sandbox, api):
    offer = cheapest(api)
    instance_id = running(sandbox, api, offer=offer, price=offer["min_bid"] * 1.1)
    rule = {"match": {"instance": instance_id}, "fault": "outbid", "args": {"after": 100, "resume": 600}}
    sandbox.world.apply_faults([rule])
    sandbox.advance(110)
    found = show(api, instance_id)
    assert (found["actual_status"], found["intended_status"]) == ("stopped", "stopped")
    assert kinds(sandbox) == {"disk"}
    sandbox.advance(700)
    assert show(api, instance_id)["actual_status"] == "running"
    assert kinds(sandbox) == {"disk", "gpu"}


def test_a_higher_bid_wins_it_back_and_one_below_the_floor_stops_it(sandbox, api):
    offer = cheapest(api)
    instance_id = running(sandbox, api, offer=offer, price=offer["min_bid"] * 1.1)
    sandbox.world.apply_faults([{"match": {"instance": instance_id}, "fault": "outbid"}])
    sandbox.advance(10)
    assert show(api, instance_id)["actual_status"] == "stopped"
    assert put(api, f"bid_price/{instance_id}", {"client_id": "me", "price": offer["min_bid"] * 1.2})[0] == 200
    sandbox.advance(60)
    assert show(api, instance_id)["actual_status"] == "stopped"
    put(api, f"bid_price/{instance_id}", {"client_id": "me", "price": None})
    sandbox.advance(60)
    assert show(api, instance_id)["actual_status"] == "running"
    put(api, f"bid_price/{instance_id}", {"price": offer["min_bid"] * 0.9})
    sandbox.advance(10)
    assert show(api, instance_id)["actual_status"] == "stopped"
    assert put(api, f"bid_price/{instance_id}", {"price": "0"})[0] == 400


# how it ends, or does not -------------------------------------------------------------------------------------------


def test_a_destroy_may_have_to_be_repeated(sandbox, api):
    instance_id = running(sandbox, api)
    sandbox.world.apply_faults([{"match": {"instance": instance_id}, "fault": "destroy_repeats", "args": {"times": 2}}])
    for expected in (True, True, False):
        assert api("DELETE", f"/api/v0/instances/{instance_id}/")[0] == 200
        assert (show(api, instance_id) is not None) is expected
    assert api("DELETE", f"/api/v0/instances/{instance_id}/")[1]["error"] == "no_such_instance"
    assert sandbox.world.burning() == []


def test_an_absence_may_not_last_and_billing_goes_on_all_the_while(sandbox, api):
    instance_id = running(sandbox, api)
    sandbox.world.apply_faults([{"match": {"instance": instance_id}, "fault": "comes_back", "args": {"seconds": 90}}])
    assert api("DELETE", f"/api/v0/instances/{instance_id}/")[1]["success"] is True
    assert show(api, instance_id) is None
    assert listed(api) == []
    assert kinds(sandbox) == {"disk", "gpu"}
    sandbox.advance(100)
    assert show(api, instance_id)["actual_status"] == "running"
    api("DELETE", f"/api/v0/instances/{instance_id}/")
    sandbox.advance(200)
    assert show(api, instance_id) is None
    assert sandbox.world.burning() == []


def test_a_new_one_may_lag_in_lists_or_be_hidden_altogether(sandbox, api):
    sandbox.faults.add([{"match": {"call": "create", "nth": 1}, "fault": "list_lag", "args": {"seconds": 50}}])
    sandbox.faults.add([{"match": {"call": "create", "nth": 2}, "fault": "hidden_at_first", "args": {"seconds": 50}}])
    lags, hidden = create(api), create(api)
    assert listed(api) == []
    assert show(api, lags) is not None
    assert show(api, hidden) is None
    sandbox.advance(60)
    assert [i["id"] for i in listed(api)] == [lags, hidden]


def test_a_lease_ends_stops_the_instance_and_deletes_it_two_days_later(sandbox, api):
    offer = min(offers(api), key=lambda o: o["duration"])
    instance_id = running(sandbox, api, offer=offer)
    sandbox.world.account("vast").deposited_usd *= 1000
    sandbox.advance(offer["duration"])
    assert show(api, instance_id)["actual_status"] == "stopped"
    status, reply = put(api, str(instance_id), {"state": "running"})
    assert (status, reply["success"]) == (200, False)
    sandbox.advance(49 * 3600)
    assert show(api, instance_id) is None


def test_at_zero_credit_everything_stops_and_the_disk_goes_into_debt(make_sandbox):
    sandbox = make_sandbox(balance_usd="0.50")
    api = Wire(sandbox)
    instance_id = running(sandbox, api)
    sandbox.advance(48 * 3600)
    assert show(api, instance_id)["actual_status"] == "stopped"
    _, user = api("GET", "/api/v0/users/current/")
    assert user["credit"] < 0
    assert kinds(sandbox) == {"disk"}
    assert put(api, str(instance_id), {"state": "running"})[1]["success"] is False


def test_zero_balance_can_be_brought_about_at_once(sandbox, api):
    instance_id = running(sandbox, api)
    sandbox.world.apply_faults([{"match": {"provider": "vast"}, "fault": "zero_balance"}])
    sandbox.advance(10)
    assert show(api, instance_id)["actual_status"] == "stopped"


def strike(sandbox, instance_id: int, fault: str) -> None:
    sandbox.world.apply_faults([{"match": {"instance": instance_id}, "fault": fault}])


def test_an_offline_host_bills_nothing_until_it_is_back(sandbox, api):
    instance_id = running(sandbox, api)
    strike(sandbox, instance_id, "offline")
    assert show(api, instance_id)["actual_status"] == "offline"
    assert kinds(sandbox) == set()
    strike(sandbox, instance_id, "well")
    sandbox.advance(60)
    assert show(api, instance_id)["actual_status"] == "running"
    assert kinds(sandbox) == {"disk", "gpu"}


@pytest.mark.parametrize("fault", ["stuck_loading", "null_status", "status_error", "unknown"])
def test_what_hangs_can_be_made_well_and_goes_on(sandbox, api, fault):
    sandbox.faults.add([{"match": {"call": "create"}, "fault": fault}])
    instance_id = create(api)
    sandbox.advance(3600)
    assert show(api, instance_id)["actual_status"] != "running"
    strike(sandbox, instance_id, "well")
    sandbox.advance(120)
    assert show(api, instance_id)["actual_status"] == "running"


def test_other_people_rent_and_leave_while_the_vendors_clock_runs(make_sandbox):
    sandbox = make_sandbox(seed=3)
    api = Wire(sandbox)

    def free() -> dict[int, int]:
        largest: dict[int, int] = {}
        for offer in offers(api, verified={}):
            largest[offer["machine_id"]] = max(largest.get(offer["machine_id"], 0), offer["num_gpus"])
        return largest

    seen = [free()]
    for _ in range(3):
        sandbox.advance(6 * 3600)
        seen.append(free())
    for before, after in pairwise(seen):
        assert before != after
    assert all(later.get(machine, 0) <= seen[0][machine] for later in seen for machine in seen[0])


def test_a_slow_answer_is_late_and_complete(sandbox, api):
    sandbox.faults.add([{"match": {"call": "user"}, "fault": "slow", "args": {"seconds": 0.3}}])
    began = time.monotonic()
    assert api("GET", "/api/v0/users/current/")[0] == 200
    assert time.monotonic() - began >= 0.3


# calls that go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lost_reply", "lost_request", "half_body"])
def test_a_connection_that_ends_early_is_no_answer_though_the_work_may_be_done(sandbox, api, fault):
    offer = cheapest(api)
    sandbox.faults.script("vast", "create", fault)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        api("PUT", f"/api/v0/asks/{offer['id']}/", {"image": "x", "label": "unsure"})
    assert len(listed(api)) == (0 if fault == "lost_request" else 1)


def test_a_request_delivered_twice_rents_twice(sandbox, api):
    offer = cheapest(api, gpu_frac={"lte": 0.5}, num_gpus={"eq": 1})
    sandbox.faults.script("vast", "create", "duplicate")
    second = create(api, offer, label="twice")
    assert [i["label"] for i in listed(api)] == ["twice", "twice"]
    assert second == max(i["id"] for i in listed(api)), "the answer names the second one only"


def test_a_machine_one_rents_on_is_left_out_of_searches_unless_asked(sandbox, api):
    offer = cheapest(api, gpu_frac={"lte": 0.5}, num_gpus={"eq": 1})
    create(api, offer)
    own = {"machine_id": {"eq": offer["machine_id"]}}
    assert not offers(api, **own)
    assert all(found["rented"] for found in offers(api, **own, rented={"eq": True}))


@pytest.mark.parametrize(
    ("fault", "args", "status", "content_type"),
    [
        ("html", {}, 502, "text/html; charset=UTF-8"),
        ("html", {"status": 403}, 403, "text/html; charset=UTF-8"),
        ("failure_200", {}, 200, "application/json"),
        ("429", {}, 429, "text/plain"),
        ("429", {"style": "json", "retry_after": 7}, 429, "application/json"),
        ("429", {"style": "quota"}, 429, "application/json"),
        ("504", {}, 504, "application/json"),
        ("garbage", {}, 200, "application/json"),
        ("not_found", {}, 404, "application/json"),
    ],
)
def test_a_spoilt_list_looks_like_the_vendors(sandbox, api, fault, args, status, content_type):
    sandbox.faults.add([{"match": {"call": "list"}, "fault": fault, "args": args}])
    found, headers, data = api.full("GET", "/api/v1/instances/")
    assert (found, headers["content-type"]) == (status, content_type)
    assert ("retry-after" in headers) == ("retry_after" in args)
    if fault == "failure_200":
        assert b'"success": false' in data


def test_a_5xx_may_have_done_the_work(sandbox, api):
    offer = cheapest(api)
    sandbox.faults.add([{"match": {"call": "create"}, "fault": "502", "args": {"done": True}}])
    assert api("PUT", f"/api/v0/asks/{offer['id']}/", {"image": "x"})[0] == 502
    assert len(listed(api)) == 1


def test_an_empty_list_is_no_proof(sandbox, api):
    create(api)
    sandbox.faults.script("vast", "list", "list_empty, ok")
    assert [len(listed(api)) for _ in range(2)] == [0, 1]


def test_calls_are_counted_and_changing_ones_apart(sandbox, api):
    instance_id = create(api)
    for _ in range(3):
        listed(api)
    api("DELETE", f"/api/v0/instances/{instance_id}/")
    assert sandbox.world.calls["vast", "list"] == 3
    assert dict(sandbox.world.mutating_calls) == {("vast", "create"): 1, ("vast", "destroy"): 1}
    assert [entry["call"] for entry in sandbox.world.log][-1] == "destroy"


@pytest.mark.parametrize(("mode", "statuses"), [("count", [200, 200, 200]), ("virtual", [200, 429, 200])])
def test_calls_that_come_too_soon_are_counted_and_refused_when_asked(make_sandbox, mode, statuses):
    sandbox = make_sandbox(limits=mode)
    api = Wire(sandbox)
    found = []
    for wait_s in (0, 0.2, 1.5):
        sandbox.advance(wait_s)
        found.append(api.full("GET", "/api/v1/instances/")[0])
    assert found == statuses
    assert sandbox.world.too_frequent["vast", "list"] == 1


def test_a_machines_own_key_is_not_limited_by_what_the_account_or_another_machine_asks(make_sandbox):
    sandbox = make_sandbox(limits="virtual")
    api = Wire(sandbox)
    ids = []
    for _ in range(2):
        ids.append(create(api))
        sandbox.advance(20)
    callers = [(api, ids[0])] + [(Wire(sandbox, key=sandbox.world.instances[id_].key.value), id_) for id_ in ids]
    asked = [wire.full("PUT", f"/api/v0/instances/{id_}/", {"state": "running"})[0] for wire, id_ in callers * 2]
    assert asked == [200] * 3 + [429] * 3


def test_searches_have_a_budget_of_ten_a_minute(make_sandbox):
    sandbox = make_sandbox(limits="virtual")
    api = Wire(sandbox)
    assert [api.full("POST", "/api/v0/bundles/", {})[0] for _ in range(12)] == [200] * 10 + [429] * 2
    sandbox.advance(61)
    assert api.full("POST", "/api/v0/bundles/", {})[0] == 200


def test_a_create_that_comes_too_soon_is_punished(make_sandbox):
    sandbox = make_sandbox(limits="virtual")
    api = Wire(sandbox)
    offer = cheapest(api)

    def status() -> int:
        return api.full("PUT", f"/api/v0/asks/{offer['id']}/", {"image": ""})[0]

    assert [status(), status()] == [400, 429]
    sandbox.advance(5)
    assert status() == 429
    sandbox.advance(13)
    assert status() == 400
