"""Faults of RunPod's calls and pods: what a client meets, and what is true in the world all the same."""

from __future__ import annotations

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_skills.sandbox import Sandbox
from sandbox.runpod_calls import GPU, RunpodCalls


@pytest.fixture
def api(make_sandbox):
    return RunpodCalls(make_sandbox())


def rule(fault, call="create", **args):
    return [{"match": {"provider": "runpod", "call": call}, "fault": fault, "args": args}]


@pytest.mark.parametrize(("fault", "args"), [("500", {"done": True}), ("504", {"done": True}), ("lost_reply", {})])
def test_a_create_that_failed_may_have_made_a_pod_that_bills(api, fault, args):
    api.sandbox.world.apply_faults(rule(fault, **args))
    if fault == "lost_reply":
        with pytest.raises(requests.ConnectionError):
            api.create(name="lost")
    else:
        api.post("/v2/pods", api.body(name="lost"), int(fault))
    (pod,) = api.get("/v2/pods")["pods"]
    assert pod["name"] == "lost"
    assert api.sandbox.world.burning() != []


@pytest.mark.parametrize(("fault", "status"), [("no_capacity", 400), ("insufficient_balance", 402), ("500", 500)])
def test_a_create_that_was_refused_made_nothing(api, fault, status):
    api.sandbox.world.apply_faults(rule(fault))
    api.post("/v2/pods", api.body(), status)
    assert api.get("/v2/pods")["pods"] == []
    api.create()


def test_a_create_delivered_twice_makes_two_pods_of_one_name(api):
    api.sandbox.world.apply_faults(rule("duplicate"))
    api.create(name="twice")
    assert [pod["name"] for pod in api.get("/v2/pods")["pods"]] == ["twice", "twice"]


def test_a_fresh_pod_may_be_missing_from_the_list_or_from_everything(api):
    api.sandbox.world.apply_faults(rule("list_lag", seconds=30))
    lagging = api.create()
    api.sandbox.world.apply_faults(rule("hidden_at_first", seconds=30))
    hidden = api.create()
    assert api.get("/v2/pods")["pods"] == []
    api.pod(lagging["id"])
    api.get(f"/v2/pods/{hidden['id']}", 404)
    api.delete(f"/v2/pods/{hidden['id']}", 404)
    api.sandbox.advance(31)
    assert {pod["id"] for pod in api.get("/v2/pods")["pods"]} == {lagging["id"], hidden["id"]}


def test_a_terminated_pod_may_come_back_and_bill(api):
    pod = api.running()
    api.sandbox.world.apply_faults([{"match": {"instance": pod["id"]}, "fault": "comes_back", "args": {"seconds": 20}}])
    api.delete(f"/v2/pods/{pod['id']}")
    api.get(f"/v2/pods/{pod['id']}", 404)
    assert api.sandbox.world.burning() != []
    api.sandbox.advance(21)
    assert api.pod(pod["id"])["status"] == "RUNNING"
    api.delete(f"/v2/pods/{pod['id']}")
    assert api.sandbox.world.burning() == []


def test_a_terminate_may_say_204_and_do_nothing(api):
    pod = api.running()
    api.sandbox.world.apply_faults(rule("destroy_again", call="destroy"))
    api.delete(f"/v2/pods/{pod['id']}")
    assert api.pod(pod["id"])["status"] == "RUNNING"
    api.delete(f"/v2/pods/{pod['id']}")
    api.get(f"/v2/pods/{pod['id']}", 404)


@pytest.mark.parametrize(
    ("fault", "status", "bills"),
    [
        ("null_status", "PROVISIONING", True),
        ("stuck_loading", "STARTING", True),
        ("status_error", "ERROR", True),
        ("exited", "ERROR", True),
        ("created_stopped", "EXITED", False),
        ("unknown", "RUNNING", True),
    ],
)
def test_dead_ends_stay_where_they_are(api, fault, status, bills):
    api.sandbox.world.apply_faults(rule(fault))
    pod = api.create()
    api.sandbox.advance(3600)
    shown = api.pod(pod["id"])
    assert (shown["status"], shown["ssh"]["direct"], shown["runtime"]) == (status, None, None)
    assert bool(api.sandbox.world.burning()) == bills
    assert (shown["cost"] == 0) == (not bills)


def test_a_host_that_is_offline_bills_nothing_and_tells_nothing(api):
    pod = api.running()
    api.sandbox.world.apply_faults([{"match": {"instance": pod["id"]}, "fault": "offline"}])
    assert api.pod(pod["id"])["runtime"] is None
    assert api.sandbox.world.burning() == []


def test_a_disk_that_was_capped_shows_in_the_pod(api):
    api.sandbox.world.apply_faults(rule("capped_disk", disk_gb=8))
    assert api.create(disk=50)["disk"] == 8


@pytest.mark.parametrize("path", ["/v2/pods", "/graphql"])
def test_broken_answers_of_the_edge(api, path):
    method, call = ("GET", "list") if path == "/v2/pods" else ("POST", "graphql")
    for fault in ("html", "403", "429", "garbage"):
        args = {"html": True} if fault == "403" else {}
        api.sandbox.world.apply_faults(rule(fault, call=call, **args))
    seen = [api.session.request(method, api.sandbox.url + path, json={"query": "{ myself { id } }"}) for _ in range(2)]
    assert seen[0].status_code in (403, 429, 502)
    assert seen[1].status_code == 200


def test_too_many_requests_tells_when_to_come_back(api):
    api.sandbox.world.apply_faults(rule("429", call="list", retry_after=7, window="hour"))
    response = api.call("GET", "/v2/pods")
    assert (response.status_code, response.headers["Retry-After"]) == (429, "7")
    assert "hour window" in response.json()["detail"]


def test_a_list_may_be_empty_and_half_of_a_body_may_arrive(api):
    api.create()
    api.sandbox.world.apply_faults(rule("list_empty", call="list"))
    assert api.get("/v2/pods") == {"pods": []}
    api.sandbox.world.apply_faults(rule("half_body", call="list"))
    with pytest.raises(requests.RequestException):
        api.get("/v2/pods")
    assert len(api.get("/v2/pods")["pods"]) == 1


# anything at all -----------------------------------------------------------------------------------------------------

_ANY_TEXT = st.text(st.characters(), max_size=20)  # half surrogate pairs too
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
_MAYBE = {
    "image": st.sampled_from(["runpod/base:1", "x", ""]) | st.text(max_size=20),
    "gpu": st.fixed_dictionaries(
        {"id": st.sampled_from([GPU, "x"])},
        optional={
            "count": st.integers(0, 10**30),
            "allowedCudaVersions": _JSON,
            "minCudaVersion": st.text(),
        },
    ),
    "cpu": st.fixed_dictionaries({"id": st.sampled_from(["cpu3c", "x"]), "vcpuCount": st.integers(0, 2**80)}),
    "disk": st.integers(-1, 10**40),
    "env": st.dictionaries(_ANY_TEXT, _ANY_TEXT, max_size=3),
    "ports": st.lists(st.sampled_from(["22/tcp", "0/tcp", "99999/tcp", "1/http"]) | st.text(max_size=12), max_size=3),
    "args": _ANY_TEXT,
    "mounts": _JSON,
    "dataCenterIds": _JSON,
}
_BODY = _JSON | st.fixed_dictionaries({"name": st.text(min_size=1, max_size=9)}, optional=_MAYBE)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Sandbox(frozen=True, containers=False, directory=tmp_path_factory.mktemp("any"), balance_usd=10**9) as sandbox:
        yield RunpodCalls(sandbox)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=_BODY, where=st.sampled_from(["/v2/pods", "/v2/network-volumes", "/v2/templates", "/v2/registries"]))
def test_any_body_gets_an_answer_of_the_documented_kinds(shared, body, where):
    response = shared.call("POST", where, body)
    assert response.status_code in (201, 400, 402, 422), response.text
    if response.status_code != 201:
        assert response.json()["detail"]
    for pod in shared.get("/v2/pods")["pods"]:
        shared.patch_any(pod["id"], body)
        shared.delete(f"/v2/pods/{pod['id']}")
    assert list(shared.sandbox.world.crashes) == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=_ANY_TEXT, variables=_JSON)
def test_any_document_gets_an_answer_and_never_a_crash(shared, text, variables):
    stop = f'mutation {{ podStop(input: {{podId: "{text}"}}) {{ id }} }}'
    for query in (text, f"{{ myself {{ id {text} }} }}", stop):
        response = shared.call("POST", "/graphql", {"query": query, "variables": variables})
        assert response.status_code in (200, 400)
        assert set(response.json()) <= {"data", "errors"}
    assert list(shared.sandbox.world.crashes) == []
