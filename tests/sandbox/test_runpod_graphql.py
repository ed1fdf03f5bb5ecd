"""RunPod's old GraphQL: what a real parser makes of documents, and what the vendor's clients read from the answers."""

from __future__ import annotations

import pytest

from sandbox.runpod_calls import GPU, RunpodCalls

DEPLOY = """mutation Deploy($input: PodFindAndDeployOnDemandInput!) {
  podFindAndDeployOnDemand(input: $input) {
    id name imageName desiredStatus costPerHr containerDiskInGb volumeInGb volumeMountPath gpuCount memoryInGb vcpuCount
    ports lastStatusChange env machine { gpuDisplayName location podHostId }
  }
}"""
INPUT = {
    "cloudType": "SECURE",
    "containerDiskInGb": 20,
    "gpuCount": 1,
    "gpuTypeId": GPU,
    "imageName": "runpod/pytorch:2.8",
    "name": "old",
    "volumeInGb": 20,
    "volumeMountPath": "/workspace",
    "startSsh": True,
    "ports": "22/tcp,8888/http",
    "env": [{"key": "A", "value": "b=c"}],
}


@pytest.fixture
def api(make_sandbox):
    return RunpodCalls(make_sandbox())


def deploy(api, **changes):
    answer = api.graphql(DEPLOY, {"input": {**INPUT, **changes}})
    assert "errors" not in answer, answer
    return answer["data"]["podFindAndDeployOnDemand"]


@pytest.mark.parametrize(
    ("query", "variables", "message"),
    [
        ("{", None, "Syntax Error"),
        ('mutation { podStop(input: {podId: "a"b"}) { id } }', None, "Syntax Error"),
        ("{ nothing }", None, "Cannot query field 'nothing'"),
        ("{ myself }", None, "must have a selection of subfields"),
        ("mutation { podStop(input: {}) { id } }", None, "podId"),
        ('mutation { podResume(input: {podId: "a", gpuCount: "one"}) { id } }', None, "Int cannot represent"),
        (DEPLOY, {"input": {**INPUT, "cloudType": "PRIVATE"}}, "CloudTypeEnum"),
        (DEPLOY, {"input": {**INPUT, "bidPerGpu": 1}}, "bidPerGpu"),
        (DEPLOY, {}, "PodFindAndDeployOnDemandInput!"),
        ("{ __schema { types { name } } }", None, "introspection has been disabled"),
        ("{" + " a {" * 5000, None, "Syntax Error"),
    ],
)
def test_documents_that_do_not_parse_or_fit_are_400(api, query, variables, message):
    errors = api.graphql(query, variables, 400)["errors"]
    assert message in errors[0]["message"]
    assert api.sandbox.world.burning() == []


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"query": 5}', b'{"query": "{a}", "variables": []}', b"\xff"])
def test_bodies_that_hold_no_query_are_400(api, body):
    response = api.call("POST", "/graphql", data=body)
    assert response.status_code == 400 and response.json()["errors"]


def test_business_failures_are_200_with_errors_and_null(api):
    answer = api.graphql(DEPLOY, {"input": {**INPUT, "gpuCount": 8, "dataCenterId": "XX"}})
    assert answer["data"] == {"podFindAndDeployOnDemand": None}
    assert "no longer any instances available" in answer["errors"][0]["message"]
    assert answer["errors"][0]["extensions"] == {"code": "RUNPOD"}


def test_no_key_is_401_and_a_key_in_the_query_string_is_taken(api):
    api.session.headers.pop("Authorization")
    api.graphql("{ myself { id } }", expect=401)
    response = api.call("POST", f"/graphql?api_key={api.key}", {"query": "{ myself { id } }"})
    assert response.json()["data"]["myself"]["id"]
    assert api.key not in str(list(api.sandbox.world.log))


def test_a_deployed_pod_is_the_same_one_over_both_apis(api):
    pod = deploy(api)
    assert pod["desiredStatus"] == "RUNNING"  # what is intended, long before it runs
    assert pod["env"] == ["A=b=c"]
    assert pod["ports"] == "22/tcp,8888/http"
    newer = api.pod(pod["id"])
    assert newer["status"] == "PROVISIONING"
    assert newer["mounts"] == {"persistent": {"size": 20, "path": "/workspace"}}
    assert pod["machine"]["podHostId"].startswith(pod["id"] + "-")


def test_runtime_is_null_until_the_container_reports(api):
    pod = deploy(api)
    ports = "ports { ip isIpPublic privatePort publicPort type }"
    query = f'{{ pod(input: {{podId: "{pod["id"]}"}}) {{ uptimeSeconds runtime {{ {ports} }} }} }}'
    assert api.graphql(query)["data"]["pod"]["runtime"] is None
    api.sandbox.advance(60)
    shown = api.graphql(query)["data"]["pod"]
    assert shown["uptimeSeconds"] == 0  # a constant there too
    ports = {row["privatePort"]: row for row in shown["runtime"]["ports"]}
    assert ports[22]["isIpPublic"] is True and ports[8888]["isIpPublic"] is False
    assert ports[22]["publicPort"] == api.pod(pod["id"])["ssh"]["direct"]["port"]


def test_timers_are_accepted_and_never_fire(api):
    pod = deploy(api, stopAfter="2020-01-01T00:00:00Z", terminateAfter="2020-01-01T00:00:00Z")
    api.sandbox.advance(3600)
    assert api.pod(pod["id"])["status"] == "RUNNING"


def test_stop_resume_and_terminate(api):
    pod = deploy(api)
    api.sandbox.advance(5)
    stop = f'mutation {{ podStop(input: {{podId: "{pod["id"]}"}}) {{ id desiredStatus }} }}'
    assert api.graphql(stop)["data"]["podStop"] == {"id": pod["id"], "desiredStatus": "EXITED"}
    api.sandbox.advance(5)
    resume = (
        f'mutation {{ podResume(input: {{podId: "{pod["id"]}", gpuCount: 2}}) {{ desiredStatus gpuCount costPerHr }} }}'
    )
    resumed = api.graphql(resume)["data"]["podResume"]
    assert resumed == {"desiredStatus": "RUNNING", "gpuCount": 2, "costPerHr": 1.38}
    end = f'mutation {{ podTerminate(input: {{podId: "{pod["id"]}"}}) }}'
    assert api.graphql(end) == {"data": {"podTerminate": None}}
    assert "not found" in api.graphql(end)["errors"][0]["message"]
    assert api.graphql(f'{{ pod(input: {{podId: "{pod["id"]}"}}) {{ id }} }}')["data"] == {"pod": None}
    assert api.sandbox.world.burning() == []


def test_resuming_on_a_full_host_fails_or_comes_up_without_gpus_when_asked_for_none(api):
    pod = deploy(api)
    api.sandbox.advance(5)
    api.act(pod["id"], "stop")
    api.sandbox.advance(5)
    host = api.sandbox.world.instances[pod["id"]].host
    host.used["somebody else"] = host.gpu_count
    resume = 'mutation { podResume(input: {podId: "%s", gpuCount: %d}) { desiredStatus costPerHr } }'
    assert "not enough free GPUs" in api.graphql(resume % (pod["id"], 1))["errors"][0]["message"]
    assert api.graphql(resume % (pod["id"], 0))["data"]["podResume"] == {"desiredStatus": "RUNNING", "costPerHr": 0.0}


def test_a_price_ceiling_is_respected(api):
    answer = api.graphql(DEPLOY, {"input": {**INPUT, "deployCost": 0.1}})
    assert "no longer any instances" in answer["errors"][0]["message"]
    assert deploy(api, deployCost=0.7)["costPerHr"] == 0.69


def test_a_cpu_pod_is_deployed_from_its_default_template(api):
    query = """mutation { deployCpuPod(input: {name: "c", imageName: "", cloudType: ALL, instanceId: "cpu5c-4-8",
        dataCenterId: null, containerDiskInGb: 10, templateId: "runpod-ubuntu"}) { id imageName vcpuCount } }"""
    pod = api.graphql(query)["data"]["deployCpuPod"]
    assert pod["imageName"].startswith("runpod/base:") and pod["vcpuCount"] == 4
    assert api.pod(pod["id"])["cpu"]["id"] == "cpu5c"


def test_the_balance_falls_with_what_is_spent(api):
    query = "{ myself { id email pubKey clientBalance currentSpendPerHr spendLimit networkVolumes { id } } }"
    before = api.graphql(query)["data"]["myself"]
    assert (before["clientBalance"], before["currentSpendPerHr"], before["pubKey"]) == (100, 0, None)
    deploy(api)
    api.sandbox.advance(3600)
    after = api.graphql(query)["data"]["myself"]
    assert after["currentSpendPerHr"] > 0.69
    assert after["clientBalance"] == pytest.approx(100 - after["currentSpendPerHr"])


def test_user_settings_replace_the_keys_of_both_apis(api):
    query = 'mutation { updateUserSettings(input: {pubKey: "ssh-rsa AAAA a\\nssh-rsa BBBB b"}) { id pubKey } }'
    assert api.graphql(query)["data"]["updateUserSettings"]["pubKey"] == "ssh-rsa AAAA a\nssh-rsa BBBB b"
    assert api.get("/v2/account/ssh-keys")["keys"] == ["ssh-rsa AAAA a", "ssh-rsa BBBB b"]


def test_stock_is_spelt_with_a_capital_and_none_in_lower_case_for_data_centers(api):
    for host in api.sandbox.world.catalogue.hosts:
        if host.gpu.entry.get("runpod_id") == "NVIDIA H200":
            host.used["all"] = host.gpu_count
    query = (
        "{ gpuTypes { id lowestPrice(input: {gpuCount: 1, secureCloud: true}) { stockStatus uninterruptablePrice } } }"
    )
    stocks = {row["id"]: row["lowestPrice"] for row in api.graphql(query)["data"]["gpuTypes"]}
    assert stocks[GPU] == {"stockStatus": "High", "uninterruptablePrice": 0.69}
    assert stocks["NVIDIA H200"] == {"stockStatus": None, "uninterruptablePrice": None}
    centers = api.graphql("{ dataCenters { id gpuAvailability { gpuTypeId stockStatus } } }")["data"]["dataCenters"]
    shown = {row["stockStatus"] for c in centers for row in c["gpuAvailability"] if row["gpuTypeId"] == "NVIDIA H200"}
    assert shown == {"none"}
