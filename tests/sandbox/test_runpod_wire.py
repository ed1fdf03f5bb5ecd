"""What every RunPod answer has, who may call, quotas, and the account's other things."""

from __future__ import annotations

import re

import pytest

from sandbox.runpod_calls import GPU, RunpodCalls

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILXGDN me@example.com"


@pytest.fixture
def api(make_sandbox):
    return RunpodCalls(make_sandbox())


@pytest.mark.parametrize("header", [None, "Basic abc", "Bearer", "Bearer wrong", "Bearer sbx_vast_account_0"])
def test_a_call_without_a_valid_key_is_401_as_a_problem(api, header):
    headers = {"Authorization": header} if header else {}
    api.session.headers.pop("Authorization")
    response = api.call("GET", "/v2/pods", headers=headers)
    assert response.status_code == 401
    assert response.headers["Content-Type"] == "application/problem+json"
    assert set(response.json()) == {"title", "status", "detail"}
    assert "RateLimit" not in response.headers


def test_a_key_of_another_vendor_opens_nothing(api):
    other = RunpodCalls(api.sandbox, api.sandbox.key("vast"))
    other.get("/v2/pods", 401)


@pytest.mark.parametrize("agent", ["Python-urllib/3.11", ""])
def test_the_edge_refuses_agents_without_a_name_with_a_page(api, agent):
    response = api.call("GET", "/graphql".replace("graphql", "v2/account/ssh-keys"), headers={"User-Agent": "tests/1"})
    assert response.status_code == 200
    response = api.session.get(api.sandbox.url + "/v2/pods", headers={"User-Agent": agent or None})
    if agent:
        assert response.status_code == 403
        assert response.headers["Content-Type"].startswith("text/html")
        assert "1010" in response.text
        api.face.settings.refuses_urllib = False
        assert api.session.get(api.sandbox.url + "/v2/pods", headers={"User-Agent": agent}).status_code == 200


def test_every_answer_carries_quotas_and_an_id(api):
    first, second = api.call("GET", "/v2/pods"), api.call("GET", "/v2/pods")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    left = [int(re.search(r'"minute";r=(\d+);t=\d+', r.headers["RateLimit"])[1]) for r in (first, second)]
    assert left[0] - left[1] == 1
    assert second.headers["RateLimit-Policy"] == '"minute";q=200;w=60, "hour";q=7200;w=3600, "day";q=50000;w=86400'


def test_quotas_are_counted_and_refused_only_when_asked_to(make_sandbox):
    counting, refusing = RunpodCalls(make_sandbox()), RunpodCalls(make_sandbox(limits="virtual"))
    for api in (counting, refusing):
        api.face.settings.quotas["minute"] = 2
        api.get("/v2/pods")
        api.get("/v2/pods")
    counting.get("/v2/pods")
    assert counting.sandbox.world.too_frequent["runpod", "minute"] == 1
    response = refusing.call("GET", "/v2/pods")
    assert response.status_code == 429
    assert "minute window" in response.json()["detail"]
    assert '"minute";r=0' in response.headers["RateLimit"]
    refusing.sandbox.advance(int(response.headers["Retry-After"]))
    refusing.get("/v2/pods")


def test_the_quota_belongs_to_the_account_not_to_the_key(make_sandbox):
    sandbox = make_sandbox(limits="virtual")
    api = RunpodCalls(sandbox)
    second = RunpodCalls(sandbox, sandbox.world.add_key(sandbox.world.account("runpod")).value)
    api.face.settings.quotas["minute"] = 1
    api.get("/v2/pods")
    second.get("/v2/pods", 429)


def test_unknown_query_parameters_are_ignored_and_everything_comes(api):
    api.create(name="one")
    api.create(name="two")
    assert len(api.get("/v2/pods?name=one&desiredStatus=EXITED")["pods"]) == 2
    api.get("/v2/pods?includeClusterPods=perhaps", 422)


def test_the_first_version_of_the_api_is_gone(api):
    assert "retired" in api.get("/v1/pods", 410)["detail"]


def test_an_unknown_path_is_404_and_a_wrong_method_405_with_allow(api):
    api.get("/v2/networkvolumes", 404)
    response = api.call("PUT", "/v2/pods")
    assert (response.status_code, response.headers["Allow"]) == (405, "GET, POST")


@pytest.mark.parametrize("raw", [b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"name": NaN}'])
def test_bodies_that_are_no_object_are_refused(api, raw):
    response = api.call("POST", "/v2/pods", data=raw)
    assert response.status_code in (400, 422)
    assert response.json()["status"] == response.status_code


# the key that a pod has of its own -----------------------------------------------------------------------------------


def test_a_pods_own_key_acts_on_that_pod_alone(api):
    mine, other = api.running(), api.running()
    inside = RunpodCalls(api.sandbox, api.sandbox.world.instances[mine["id"]].key.value)
    inside.get("/v2/pods", 403)
    inside.post("/v2/pods", inside.body(), 403)
    inside.get(f"/v2/pods/{other['id']}", 403)
    inside.delete(f"/v2/pods/{other['id']}", 403)
    inside.get("/v2/billing", 403)
    assert inside.graphql("{ myself { id } }")["errors"][0]["message"] == "not authorized"
    assert inside.pod(mine["id"])["status"] == "RUNNING"
    inside.act(mine["id"], "stop")
    inside.delete(f"/v2/pods/{mine['id']}")
    inside.get(f"/v2/pods/{mine['id']}", 401)
    assert api.pod(other["id"])["status"] == "RUNNING"


def test_the_rights_of_a_pods_own_key_can_be_taken(api):
    pod = api.running()
    inside = RunpodCalls(api.sandbox, api.sandbox.world.instances[pod["id"]].key.value)
    api.face.settings.pod_key_may = frozenset({"show"})
    inside.delete(f"/v2/pods/{pod['id']}", 403)
    api.sandbox.world.apply_faults([{"match": {"instance": pod["id"]}, "fault": "key_denied"}])
    inside.get(f"/v2/pods/{pod['id']}", 403)


# the account ---------------------------------------------------------------------------------------------------------


def test_putting_ssh_keys_replaces_all_of_them_and_reaches_later_pods_only(api):
    before = api.create(startSsh=True)
    assert api._document(api.call("PUT", "/v2/account/ssh-keys", {"keys": [KEY]}), 200) == {"keys": [KEY]}
    after = api.create(startSsh=True)
    environments = [api.face.pods.environment(api.sandbox.world.instances[pod["id"]], 22) for pod in (before, after)]
    assert [environment.get("PUBLIC_KEY") for environment in environments] == [None, KEY]
    assert "PUBLIC_KEY" not in after["env"]
    api._document(api.call("PUT", "/v2/account/ssh-keys", {"keys": ["no key"]}), 422)
    api._document(api.call("PUT", "/v2/account/ssh-keys", {"keys": []}), 200)
    assert api.get("/v2/account/ssh-keys") == {"keys": []}


def test_a_registry_credential_is_write_only_and_cannot_go_while_a_pod_uses_it(api):
    made = api.post("/v2/registries", {"name": "hub", "username": "u", "password": "CANARY"}, 201)
    assert set(made) == {"id", "name"}
    pod = api.create(registry=made["id"])
    assert "CANARY" not in api.call("GET", "/v2/registries").text + api.call("GET", f"/v2/pods/{pod['id']}").text
    api.delete(f"/v2/registries/{made['id']}", 400)
    api.delete(f"/v2/pods/{pod['id']}")
    api.delete(f"/v2/registries/{made['id']}")
    assert api.get("/v2/registries") == {"registries": []}


def test_a_network_volume_grows_only_and_stays_when_its_pod_goes(api):
    center = api.get("/v2/catalog/gpus/NVIDIA%20GeForce%20RTX%204090?include=AVAILABILITY&product=POD")["dataCenters"]
    able = {c["id"] for c in api.get("/v2/catalog/datacenters?networkVolumeTypes=STANDARD")["dataCenters"]}
    where = next(c["id"] for c in center if c["id"] in able)
    volume = api.post("/v2/network-volumes", {"name": "v", "size": 10, "dataCenter": where}, 201)
    path = f"/v2/network-volumes/{volume['id']}"
    api.patch(path, {}, 422)
    api.patch(path, {"size": 9}, 422)
    assert api.patch(path, {"size": 20})["size"] == 20
    api.patch(path, {"size": 15}, 400)
    mounts = {"network": [{"volumeId": volume["id"], "path": "/workspace"}]}
    pod = api.create(mounts=mounts, dataCenterIds=[where])
    assert pod["mounts"] == mounts
    assert "in use" in api.delete(path, 400)["detail"]
    api.delete(f"/v2/pods/{pod['id']}")
    assert api.get(path)["size"] == 20
    api.delete(path)
    assert api.sandbox.world.burning() == []


def test_volume_and_pod_must_share_a_data_center_which_the_pod_has_to_name(api):
    api.post("/v2/network-volumes", {"name": "v", "size": 10, "dataCenter": "US-KS-2"}, 400)
    for center in api.get("/v2/catalog/datacenters?networkVolumeTypes=STANDARD")["dataCenters"]:
        volume = api.post("/v2/network-volumes", {"name": "v", "size": 10, "dataCenter": center["id"]}, 201)
        mounts = {"network": [{"volumeId": volume["id"], "path": "/w"}]}
        response = api.call("POST", "/v2/pods", api.body(mounts=mounts))
        if response.status_code == 201:
            assert response.json()["dataCenterId"] == center["id"]
        else:
            assert "share a data center" in response.json()["detail"]
        community = api.body(mounts=mounts, cloud="COMMUNITY", dataCenterIds=[center["id"]])
        assert api.call("POST", "/v2/pods", community).status_code == 400


# the catalogue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 200),
        ("?include=AVAILABILITY", 400),
        ("?product=POD", 400),
        ("?count=2", 400),
        ("?include=AVAILABILITY&product=POD,SERVERLESS", 200),
        ("?include=STOCK&product=POD", 422),
        ("?include=AVAILABILITY&product=POD&count=0", 422),
        ("?include=AVAILABILITY&product=POD&countryCodes=fr", 422),
        ("?include=AVAILABILITY&product=POD&cudaVersions=12", 422),
        ("?include=AVAILABILITY&product=POD&minCudaVersion=12", 200),
        ("?include=AVAILABILITY&product=POD&minCudaVersion=12.1&cudaVersions=12.4", 400),
    ],
)
def test_availability_is_asked_for_by_the_rules(api, query, status):
    answer = api.get(f"/v2/catalog/gpus{query}", status)
    if status == 200:
        assert all(("availability" in gpu) == bool(query) for gpu in answer["gpus"])


def test_countries_narrow_the_list_and_a_single_type_says_none(api):
    api.sandbox.world.catalogue.hosts = [
        host for host in api.sandbox.world.catalogue.hosts if host.location.get("country") != "RO"
    ]
    assert api.get("/v2/catalog/gpus?include=AVAILABILITY&product=POD&countryCodes=RO")["gpus"] == []
    one = api.get("/v2/catalog/gpus/NVIDIA%20H200?include=AVAILABILITY&product=POD&countryCodes=RO")
    assert one["availability"] == "NONE" and "dataCenters" not in one
    api.get("/v2/catalog/gpus/nothing", 404)


def test_the_list_holds_a_place_holder_that_is_no_gpu(api):
    ids = [gpu["id"] for gpu in api.get("/v2/catalog/gpus")["gpus"]]
    assert "unknown" in ids and GPU in ids


def test_filters_of_data_centers_combine(api):
    everything = api.get("/v2/catalog/datacenters?include=GPU_AVAILABILITY,CPU_AVAILABILITY")["dataCenters"]
    assert all("cpuAvailability" in center for center in everything)
    europe = api.get("/v2/catalog/datacenters?regions=EUROPE&networkVolumeTypes=STANDARD,HIGH_PERFORMANCE")
    assert {center["id"] for center in europe["dataCenters"]} == {"EU-RO-1"}
    assert api.get("/v2/catalog/datacenters/EU-RO-1")["region"] == "EUROPE"
    assert api.get("/v2/catalog/cpus/cpu3c")["vcpu"]["min"] == 2
    assert len(api.get("/v2/catalog/cpus")["cpus"]) == 6
