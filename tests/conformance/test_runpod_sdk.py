"""The vendor's Python SDK, as it comes from PyPI, cannot tell the sandbox from the vendor."""

from __future__ import annotations

import pytest

from conformance.runpod_clients import Raised, Sdk, ended, sdk_python
from sandbox.runpod_calls import GPU, RunpodCalls
from sandbox_fixture import make_sandbox

__all__ = ["make_sandbox"]

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]


@pytest.fixture(scope="module")
def python(real_environment):
    return sdk_python(real_environment)


@pytest.fixture
def sandbox(make_sandbox):
    return make_sandbox()


@pytest.fixture
def sdk(python, sandbox, home):
    with ended(Sdk(python, sandbox.url, sandbox.key("runpod"), home)) as client:
        yield client


@pytest.fixture
def api(sandbox):
    return RunpodCalls(sandbox)


def test_gpu_types_and_one_of_them(sdk):
    assert {"id": GPU, "displayName": "RTX 4090", "memoryInGb": 24} in sdk("get_gpus")
    one = sdk("get_gpu", gpu_id=GPU, gpu_quantity=2)
    assert (one["id"], one["securePrice"], one["lowestPrice"]["uninterruptablePrice"]) == (GPU, 0.69, 0.68)
    with pytest.raises(Raised, match="No GPU found"):
        sdk("get_gpu", gpu_id="NVIDIA Imaginary")


def test_a_pod_from_creation_to_termination(sdk, sandbox, api):
    made = sdk(
        "create_pod",
        name="from the sdk",
        image_name="runpod/pytorch:2.8",
        gpu_type_id=GPU,
        cloud_type="SECURE",
        volume_in_gb=20,
        volume_mount_path="/workspace",
        ports="22/tcp, 8888/http",
        env={"A": "b"},
        docker_args="bash -c 'sleep 600'",
    )
    assert set(made) == {"id", "imageName", "env", "machineId", "machine"}
    pod_id = made["id"]
    assert sdk("get_pod", pod_id=pod_id)["runtime"] is None
    sandbox.advance(5)
    (pod,) = sdk("get_pods")
    assert (pod["desiredStatus"], pod["name"], pod["costPerHr"]) == ("RUNNING", "from the sdk", 0.69)
    assert pod["dockerArgs"] == "bash -c 'sleep 600'"
    ports = {row["privatePort"]: row for row in pod["runtime"]["ports"]}
    assert ports[22]["isIpPublic"] and ports[22]["publicPort"] == api.pod(pod_id)["ssh"]["direct"]["port"]

    assert sdk("stop_pod", pod_id=pod_id) == {"id": pod_id, "desiredStatus": "EXITED"}
    sandbox.advance(5)
    assert sdk("resume_pod", pod_id=pod_id, gpu_count=1)["desiredStatus"] == "RUNNING"
    assert sdk("terminate_pod", pod_id=pod_id) is None
    assert sdk("get_pod", pod_id=pod_id) is None
    assert sdk("get_pods") == []
    assert sandbox.world.burning() == []


def test_a_cpu_pod(sdk, api):
    made = sdk("create_pod", name="cpu", image_name="runpod/base:1", instance_id="cpu3c-2-4", container_disk_in_gb=10)
    assert api.pod(made["id"])["cpu"] == {"id": "cpu3c", "vcpuCount": 2, "memory": 4}


def test_a_network_volume_takes_its_data_center_from_the_account(sdk, api, sandbox):
    for host in sandbox.world.catalogue.hosts:
        if host.vendor == "runpod":
            host.location = {**host.location, "data_center": "EU-RO-1"}
    volume = api.post("/v2/network-volumes", {"name": "v", "size": 10, "dataCenter": "EU-RO-1"}, 201)
    made = sdk(
        "create_pod",
        name="n",
        image_name="runpod/base:1",
        gpu_type_id=GPU,
        cloud_type="SECURE",
        network_volume_id=volume["id"],
    )
    assert api.pod(made["id"])["mounts"]["network"] == [{"volumeId": volume["id"], "path": "/runpod-volume"}]


def test_the_keys_of_the_account(sdk, api):
    assert sdk("get_user")["pubKey"] is None
    changed = sdk("update_user_settings", pubkey="ssh-rsa AAAA a\nssh-rsa BBBB b")
    assert changed["pubKey"] == "ssh-rsa AAAA a\nssh-rsa BBBB b"
    made = sdk("create_pod", name="k", image_name="runpod/base:1", gpu_type_id=GPU)
    instance = api.sandbox.world.instances[made["id"]]
    assert api.face.pods.environment(instance, 22)["PUBLIC_KEY"] == "ssh-rsa AAAA a\nssh-rsa BBBB b"


def test_its_own_errors_come_up_for_what_goes_wrong(sdk, sandbox, api):
    wanted = {"name": "x", "image_name": "runpod/base:1", "gpu_type_id": GPU}
    with pytest.raises(Raised, match="no longer any instances available") as full:
        sdk("create_pod", **wanted, gpu_count=8, data_center_id="XX-NO-1")
    assert full.value.kind == "QueryError"
    with pytest.raises(Raised) as quoted:
        sdk("create_pod", **{**wanted, "name": 'a"b'})
    assert quoted.value.kind == "QueryError"  # the text is pasted, the document does not parse
    with pytest.raises(Raised, match="not found"):
        sdk("stop_pod", pod_id="nobody")
    sandbox.world.apply_faults([{"match": {"provider": "runpod", "call": "graphql"}, "fault": "html"}])
    with pytest.raises(Raised) as page:
        sdk("get_pods")
    assert page.value.kind == "JSONDecodeError"
    assert api.get("/v2/pods")["pods"] == []


def test_a_wrong_key_is_an_authentication_error(python, sandbox, home):
    with ended(Sdk(python, sandbox.url, "sbx_wrong", home)) as sdk, pytest.raises(Raised) as refused:
        sdk("get_pods")
    assert refused.value.kind == "AuthenticationError"
