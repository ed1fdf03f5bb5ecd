"""The vendor's MCP server, as it comes from npm, speaks REST v2 with the sandbox."""

from __future__ import annotations

import pytest

from conformance.runpod_clients import Mcp, Raised, ended, mcp_server
from sandbox.runpod_calls import GPU, RunpodCalls
from sandbox_fixture import make_sandbox

__all__ = ["make_sandbox"]

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]


@pytest.fixture(scope="module")
def program(real_environment):
    return mcp_server(real_environment)


@pytest.fixture
def sandbox(make_sandbox):
    return make_sandbox()


@pytest.fixture
def mcp(program, sandbox, home):
    with ended(Mcp(program, sandbox.url, sandbox.key("runpod"), home)) as client:
        yield client


def body(**changes):
    return {
        "name": "from mcp",
        "image": "runpod/pytorch:2.8",
        "gpu": {"id": GPU, "count": 1},
        "disk": 20,
        "ports": ["22/tcp"],
        "mounts": {"persistent": {"size": 20, "path": "/workspace"}},
        "env": {"A": "b"},
        **changes,
    }


def rows(answer, name):
    """The rows of a list, which the server may show whole or compacted."""
    return answer[name] if name in answer else answer["items"]


def test_a_pod_from_creation_to_deletion(mcp, sandbox):
    made = mcp("create-pod", body=body())
    assert made["status"] == "PROVISIONING"
    sandbox.advance(5)
    assert [pod["id"] for pod in rows(mcp("list-pods"), "pods")] == [made["id"]]
    assert mcp("get-pod", id=made["id"])["ssh"]["direct"]["host"] == "127.0.0.1"
    assert mcp("pod-action", id=made["id"], body={"action": "stop"})["status"] == "EXITED"
    sandbox.advance(5)
    assert mcp("pod-action", id=made["id"], body={"action": "start"})["status"] == "STARTING"
    sandbox.advance(5)
    assert mcp("update-pod", id=made["id"], body={"name": "renamed"})["name"] == "renamed"
    mcp("delete-pod", id=made["id"])
    assert rows(mcp("list-pods"), "pods") == []
    with pytest.raises(Raised, match="not found"):
        mcp("get-pod", id=made["id"])
    assert sandbox.world.burning() == []


def test_gpu_types_with_stock(mcp):
    types = rows(mcp("list-gpu-types", include=["AVAILABILITY"], product=["POD"]), "gpus")
    assert GPU in {gpu["id"] for gpu in types}
    one = mcp("get-gpu-type", id=GPU, include=["AVAILABILITY"], product=["POD"], count=2)
    assert one["availability"] in ("LOW", "MEDIUM", "HIGH")
    with pytest.raises(Raised, match="product is required"):
        mcp("get-gpu-type", id=GPU, include=["AVAILABILITY"])


def test_logs_keys_volumes_and_bills(mcp, sandbox):
    made = mcp("create-pod", body=body())
    sandbox.advance(5)
    shown = str(mcp("stream-pod-logs", podId=made["id"], maxWaitMs=1500))
    assert "create container" in shown and "start container" in shown
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILXGDN me"
    assert mcp("update-ssh-keys", body={"keys": [key]}) == {"keys": [key]} == mcp("get-ssh-keys")
    volume = mcp("create-network-volume", body={"name": "v", "size": 10, "dataCenter": "EU-RO-1"})
    assert [row["id"] for row in rows(mcp("list-network-volumes"), "networkVolumes")] == [volume["id"]]
    mcp("delete-network-volume", id=volume["id"])
    sandbox.advance(3600)
    assert mcp("list-pod-billing")["metadata"]["uniquePodCount"] == 1
    assert "EU-RO-1" in str(mcp("list-data-centers"))


def test_refusals_reach_the_caller_with_their_words(mcp, sandbox):
    with pytest.raises(Raised, match="no longer any instances available"):
        mcp("create-pod", body=body(gpu={"id": GPU}))
    with pytest.raises(Raised, match="additional properties 'bogus' not allowed"):
        mcp("create-pod", body=body(bogus=1))
    sandbox.world.apply_faults([{"match": {"provider": "runpod", "call": "list"}, "fault": "429"}])
    with pytest.raises(Raised, match=r"(?i)rate limit"):
        mcp("list-pods")
    assert RunpodCalls(sandbox).get("/v2/pods") == {"pods": []}
