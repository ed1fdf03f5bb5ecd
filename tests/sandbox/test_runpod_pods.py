"""RunPod's pods over REST v2: what a create must look like, the states, the ports, and what each action may do."""

from __future__ import annotations

import pytest

from gpu_skills.sandbox.containers import USER
from sandbox.runpod_calls import GPU, RunpodCalls

PERSISTENT = {"persistent": {"size": 20, "path": "/workspace"}}


@pytest.fixture
def api(make_sandbox):
    return RunpodCalls(make_sandbox())


# creating ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"gpuTypeIds": [GPU]}, "$: additional properties 'gpuTypeIds' not allowed"),
        ({"imageName": "x", "bogus": 1}, "$: additional properties 'imageName', 'bogus' not allowed"),
        ({"gpu": {"id": GPU, "count": 1, "spot": True}}, "$.gpu: additional properties 'spot' not allowed"),
        ({"gpu": {"count": 1}}, "$.gpu: missing properties 'id'"),
        ({"gpu": {"id": GPU, "count": 0}}, "$.gpu.count: minimum: got 0, want 1"),
        ({"gpu": {"id": GPU, "count": 1, "minCudaVersion": "12"}}, r"$.gpu.minCudaVersion: '12' does not match"),
        ({"name": ""}, "$.name: minLength: got 0, want 1"),
        ({"name": None}, "$: missing properties 'name'"),
        ({"image": None}, "$: missing properties 'image'"),
        ({"image": "Not An Image"}, "$.image: 'Not An Image' is not a valid image reference"),
        ({"disk": "20"}, "$.disk: got string, want integer"),
        ({"disk": 0}, "$.disk: minimum: got 0, want 1"),
        ({"env": {"A": 1}}, "$.env.A: got integer, want string"),
        ({"env": [{"key": "A", "value": "b"}]}, "$.env: got array, want object"),
        ({"ports": "22/tcp"}, "$.ports: got string, want array"),
        ({"cloud": "ALL"}, "$.cloud: value must be one of 'SECURE', 'COMMUNITY'"),
        ({"mounts": {"persistent": {"size": 20}}}, "$.mounts.persistent: missing properties 'path'"),
        ({"mounts": {"persistent": {"size": 9, "path": "/w"}}}, "$.mounts.persistent.size: minimum: got 9, want 10"),
        ({"mounts": {"objectMounts": []}}, "$.mounts: additional properties 'objectMounts' not allowed"),
    ],
)
def test_a_body_of_another_shape_is_422_and_each_violation_is_named(api, changes, complaint):
    answer = api.post("/v2/pods", api.body(**changes), 422)
    assert (answer["title"], answer["status"]) == ("Unprocessable Entity", 422)
    assert any(error.startswith(complaint) for error in answer["errors"]), answer["errors"]
    assert api.sandbox.world.burning() == []


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"gpu": None}, "exactly one of gpu or cpu"),
        ({"cpu": {"id": "cpu3c", "vcpuCount": 2}}, "exactly one of gpu or cpu"),
        ({"gpu": None, "cpu": {"id": "cpu3c", "vcpuCount": 6}}, "power of two"),
        ({"gpu": None, "cpu": {"id": "cpu9z", "vcpuCount": 2}}, "not found"),
        ({"gpu": None, "cpu": {"id": "cpu3c", "vcpuCount": 2}, "mounts": PERSISTENT}, "not supported on CPU pods"),
        ({"mounts": {**PERSISTENT, "network": [{"volumeId": "v", "path": "/n"}]}}, "mutually exclusive"),
        ({"mounts": {"network": [{"volumeId": "v", "path": "/n"}]}}, "not found"),
        ({"gpu": {"id": GPU, "count": 1, "minCudaVersion": "12.1", "allowedCudaVersions": ["12.8"]}}, "exclusive"),
        ({"gpu": {"id": "NVIDIA Imaginary", "count": 1}}, "not found"),
        ({"ports": ["22/udp"]}, "invalid port"),
        ({"ports": [f"{port}/http" for port in range(8000, 8011)]}, "at most 10 HTTP ports"),
        ({"env": {f"V{n}": "x" for n in range(51)}}, "at most 50"),
        ({"registry": "nobody's"}, "not found"),
        ({"mounts": {"persistent": {"size": 20, "path": "/../etc"}}}, "invalid mount path"),
    ],
)
def test_a_broken_rule_is_400_with_prose(api, changes, detail):
    answer = api.post("/v2/pods", api.body(**changes), 400)
    assert detail in answer["detail"]
    assert api.sandbox.world.burning() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": {"id": GPU}},  # the documents say that the count defaults to 1
        {"gpu": {"id": GPU, "count": 64}},
        {"dataCenterIds": ["XX-NO-1"]},
        {"gpu": {"id": GPU, "count": 1, "allowedCudaVersions": ["11.8"]}},
        {"gpu": {"id": GPU, "count": 1, "minCudaVersion": "13.9"}},
        {"gpu": None, "cpu": {"id": "cpu3c", "vcpuCount": 2}, "dataCenterIds": ["XX-NO-1"]},
    ],
)
def test_no_capacity_is_a_400_that_only_its_prose_tells_apart(api, changes):
    answer = api.post("/v2/pods", api.body(**changes), 400)
    assert "no longer any instances available" in answer["detail"]
    assert "errors" not in answer


def test_a_missing_gpu_count_can_be_configured_to_mean_one(api):
    api.face.settings.count_is_required = False
    assert api.create(gpu={"id": GPU})["gpu"] == {"id": GPU, "count": 1}


def test_cuda_floors_compare_as_numbers_and_sets_exactly(api):
    pod = api.create(gpu={"id": GPU, "count": 1, "minCudaVersion": "12.6"})
    assert tuple(map(int, pod["cudaVersion"].split("."))) >= (12, 6)
    exact = api.create(gpu={"id": GPU, "count": 1, "allowedCudaVersions": [pod["cudaVersion"]]})
    assert exact["cudaVersion"] == pod["cudaVersion"]


def test_data_centers_are_enforced_not_preferred(api):
    stock = api.get("/v2/catalog/gpus/NVIDIA%20GeForce%20RTX%204090?include=AVAILABILITY&product=POD")
    for center in stock["dataCenters"]:
        assert api.create(dataCenterIds=[center["id"]])["dataCenterId"] == center["id"]


def test_a_host_runs_out_and_the_catalogue_says_so(api):
    path = "/v2/catalog/gpus/NVIDIA%20H200?include=AVAILABILITY&product=POD&count=8"
    api.sandbox.world.set_balance(api.sandbox.world.account("runpod"), 10_000)
    api.face.settings.spend_limit_usd_hr = 1000
    level = api.get(path)["availability"]
    made = 0
    while level != "NONE":
        api.create(gpu={"id": "NVIDIA H200", "count": 8})
        made, level = made + 1, api.get(path)["availability"]
    assert made > 0
    api.post("/v2/pods", api.body(gpu={"id": "NVIDIA H200", "count": 8}), 400)


def test_creating_needs_an_hour_of_credit_and_respects_the_spend_limit(api):
    world = api.sandbox.world
    world.set_balance(world.account("runpod"), "0.5")
    assert "insufficient balance" in api.post("/v2/pods", api.body(), 402)["detail"]
    world.set_balance(world.account("runpod"), 10_000)
    api.face.settings.spend_limit_usd_hr = 1
    api.create()
    assert "spend limit" in api.post("/v2/pods", api.body(), 400)["detail"]


def test_names_are_not_unique(api):
    assert api.create(name="same")["id"] != api.create(name="same")["id"]


def test_a_template_gives_what_the_body_leaves_out_and_env_is_merged(api):
    template = api.post(
        "/v2/templates",
        {"name": "t", "image": "runpod/base:1", "disk": 33, "ports": ["1/http"], "env": {"A": "t", "B": "t"}},
        201,
    )
    pod = api.create(image=None, disk=None, ports=None, env={"B": "b"}, templateId=template["id"])
    assert (pod["image"], pod["disk"], pod["ports"]) == ("runpod/base:1", 33, ["1/http"])
    assert pod["env"] == {"A": "t", "B": "b"}
    assert pod["template"] is None
    api.post("/v2/pods", api.body(templateId="unknown"), 404)
    serverless = api.post("/v2/templates", {"name": "s", "image": "x", "serverless": True}, 201)
    api.post("/v2/pods", api.body(templateId=serverless["id"]), 422)


# states --------------------------------------------------------------------------------------------------------------


def test_a_pod_is_provisioned_started_and_running_and_tells_of_itself_last(api):
    pod = api.create(mounts=PERSISTENT)
    assert (pod["status"], pod["actions"]) == ("PROVISIONING", ["stop", "terminate"])
    assert pod["ssh"] == {"proxy": None, "direct": None}
    assert (pod["runtime"], pod["startedAt"], pod["template"]) == (None, None, None)
    api.sandbox.advance(0.5)
    starting = api.pod(pod["id"])
    assert (starting["status"], starting["actions"]) == ("STARTING", ["stop", "terminate"])
    assert starting["ssh"]["proxy"]["username"].startswith(pod["id"] + "-")
    api.sandbox.advance(0.8)
    early = api.pod(pod["id"])
    assert (early["status"], early["runtime"], early["ssh"]["direct"]) == ("RUNNING", None, None)
    api.sandbox.advance(1)
    running = api.pod(pod["id"])
    direct = running["ssh"]["direct"]
    assert (direct["host"], direct["username"]) == ("127.0.0.1", USER)
    assert {"private": 22, "public": direct["port"], "type": "tcp", "ip": "127.0.0.1"} in running["runtime"]["ports"]
    assert running["actions"] == ["stop", "restart", "terminate"]
    assert running["mounts"] == PERSISTENT


def test_a_pod_without_22_tcp_has_no_direct_ssh(api):
    assert api.running(ports=["8888/http"])["ssh"]["direct"] is None
    http = api.running(ports=["8888/http"])["runtime"]["ports"][0]
    assert http["type"] == "http" and http["ip"].startswith("100.65.")


def test_a_community_host_may_have_no_public_address(api):
    for host in api.sandbox.world.catalogue.hosts:
        host.port_count = 0
    pod = api.running()
    assert pod["ssh"]["direct"] is None
    assert pod["runtime"]["ports"][0]["public"] is None


def test_a_port_above_70000_asks_for_the_same_number_inside_and_outside(api):
    mapping = api.running(ports=["70001/tcp"])["runtime"]["ports"][0]
    assert mapping["private"] == mapping["public"] < 65536


def test_a_stopped_pod_shows_cost_0_while_its_disk_bills(api):
    pod = api.running(mounts=PERSISTENT)
    assert pod["cost"] == 0.69
    assert api.act(pod["id"], "stop")["status"] == "EXITED"
    api.sandbox.advance(5)
    stopped = api.pod(pod["id"])
    assert (stopped["cost"], stopped["runtime"], stopped["ssh"]["direct"]) == (0.0, None, None)
    assert stopped["cudaVersion"] == pod["cudaVersion"]
    assert [entry["kind"] for entry in api.sandbox.world.burning()] == ["volume"]


def test_ports_change_at_each_start_and_an_old_one_may_be_shown_once(api):
    pod = api.running(ports=["22/tcp", "8000/tcp"])
    before = {row["private"]: row["public"] for row in pod["runtime"]["ports"]}
    api.sandbox.world.apply_faults([{"match": {"instance": pod["id"]}, "fault": "old_port"}])
    api.act(pod["id"], "stop")
    api.sandbox.advance(5)
    assert api.act(pod["id"], "start")["status"] == "STARTING"
    api.sandbox.advance(5)
    first, second = api.pod(pod["id"]), api.pod(pod["id"])
    assert first["ssh"]["direct"]["port"] == before[22] != second["ssh"]["direct"]["port"]
    assert {row["private"]: row["public"] for row in second["runtime"]["ports"]}[8000] != before[8000]


@pytest.mark.parametrize(
    ("status", "illegal"),
    [("PROVISIONING", ["start", "restart"]), ("RUNNING", ["start"]), ("EXITED", ["stop", "restart"])],
)
def test_an_action_that_the_status_does_not_allow_is_409(api, status, illegal):
    pod = api.create()
    if status != "PROVISIONING":
        api.sandbox.advance(5)
    if status == "EXITED":
        api.act(pod["id"], "stop")
    for action in illegal:
        assert status in api.act(pod["id"], action, 409)["detail"]
    api.act(pod["id"], "reset", 422)
    assert api.pod(pod["id"])["status"] == status


def test_terminate_answers_204_without_a_body_and_then_404(api):
    first, second = api.running(), api.running()
    for response in (
        api.call("DELETE", f"/v2/pods/{first['id']}"),
        api.call("POST", f"/v2/pods/{second['id']}/action", {"action": "terminate"}),
    ):
        assert (response.status_code, response.content) == (204, b"")
    api.get(f"/v2/pods/{first['id']}", 404)
    api.delete(f"/v2/pods/{first['id']}", 404)
    assert api.get("/v2/pods") == {"pods": []}
    assert api.sandbox.world.burning() == []


def test_a_full_host_refuses_the_start_and_the_pod_stays_stopped(api):
    pod = api.running(mounts=PERSISTENT)
    api.act(pod["id"], "stop")
    api.sandbox.advance(5)
    host = api.sandbox.world.instances[pod["id"]].host
    host.used["somebody else"] = host.gpu_count
    assert "not enough free GPUs on the host machine" in api.act(pod["id"], "start", 400)["detail"]
    assert api.pod(pod["id"])["status"] == "EXITED"
    del host.used["somebody else"]
    api.act(pod["id"], "start")


def test_a_start_can_be_refused_by_a_fault_and_come_up_without_gpus_by_another(api):
    pod = api.running()
    api.act(pod["id"], "stop")
    rules = [{"match": {"instance": pod["id"]}, "fault": fault} for fault in ("host_full", "zero_gpu_start")]
    api.sandbox.world.apply_faults(rules)
    api.act(pod["id"], "start", 400)
    api.act(pod["id"], "start")
    instance = api.sandbox.world.instances[pod["id"]]
    assert api.face.pods.environment(instance, 22)["RUNPOD_GPU_COUNT"] == "0"
    assert api.pod(pod["id"])["gpu"]["count"] == 1  # the API goes on saying what was asked for


def test_a_locked_pod_cannot_be_stopped_restarted_or_edited(api):
    pod = api.running()
    assert api.patch(f"/v2/pods/{pod['id']}", {"locked": True})["locked"] is True
    for action in ("stop", "restart"):
        assert "locked" in api.act(pod["id"], action, 409)["detail"]
    api.patch(f"/v2/pods/{pod['id']}", {"args": "x"}, 409)
    api.patch(f"/v2/pods/{pod['id']}", {"locked": False})
    api.act(pod["id"], "stop")


# editing -------------------------------------------------------------------------------------------------------------


def test_an_edit_replaces_env_and_resets_the_container(api):
    pod = api.running(env={"A": "1", "B": "2"})
    edited = api.patch(f"/v2/pods/{pod['id']}", {"env": {"C": "3"}})
    assert edited["env"] == {"C": "3"}
    assert edited["status"] == "STARTING"
    api.sandbox.advance(5)
    assert api.pod(pod["id"])["ssh"]["direct"]["port"] != pod["ssh"]["direct"]["port"]


def test_a_new_name_resets_too_unless_configured_otherwise(api):
    pod = api.running()
    assert api.patch(f"/v2/pods/{pod['id']}", {"name": "n"})["status"] == "STARTING"
    api.sandbox.advance(5)
    api.face.settings.edit_resets = False
    assert api.patch(f"/v2/pods/{pod['id']}", {"name": "m"})["status"] == "RUNNING"


@pytest.mark.parametrize(
    ("mounts", "status"),
    [
        ({}, 200),
        ({"persistent": {"size": 30, "path": "/data"}}, 200),
        ({"persistent": {"size": 10, "path": "/data"}}, 400),
        ({"persistent": {"size": 30}}, 422),
        ({"network": []}, 400),
        ({"network": [{"volumeId": "v", "path": "/n"}]}, 400),
    ],
)
def test_the_kind_of_mount_is_fixed_at_create(api, mounts, status):
    pod = api.create(mounts=PERSISTENT)
    changed = api.patch(f"/v2/pods/{pod['id']}", {"mounts": mounts}, status)
    if status == 200:
        assert changed["mounts"] == (mounts or PERSISTENT)


def test_a_cpu_pod_has_memory_by_its_flavour_and_bills_as_cpu(api):
    pod = api.running(gpu=None, cpu={"id": "cpu5g", "vcpuCount": 4})
    assert pod["cpu"] == {"id": "cpu5g", "vcpuCount": 4, "memory": 16}
    assert "gpu" not in pod and pod["cudaVersion"] is None
    assert {entry["kind"] for entry in api.sandbox.world.burning()} == {"cpu", "disk"}
