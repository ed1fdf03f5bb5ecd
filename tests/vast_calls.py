"""Short words for Vast's calls in tests."""

from __future__ import annotations

from typing import Any

from gpu_skills.sandbox import Sandbox
from sandbox_fixture import Wire


def offers(api: Wire, **query: Any) -> list[dict[str, Any]]:
    status, body = api("POST", "/api/v0/bundles/", {"type": "on-demand", "limit": 1000, **query})
    assert status == 200, body
    return body["offers"]


def cheapest(api: Wire, **query: Any) -> dict[str, Any]:
    return min(offers(api, **query), key=lambda offer: (offer["dph_total"], offer["id"]))


def create(api: Wire, offer: dict[str, Any] | None = None, **body: Any) -> int:
    """The id of a new instance."""
    offer = offer or cheapest(api, direct_port_count={"gte": 1})
    request = {"client_id": "me", "image": "pytorch/pytorch:2.8.0", "disk": 20, "runtype": "ssh_direc ssh_proxy"}
    status, reply = api("PUT", f"/api/v0/asks/{offer['id']}/", {**request, "cancel_unavail": True, **body})
    assert status == 200, reply
    return reply["new_contract"]


def show(api: Wire, instance_id: int) -> dict[str, Any] | None:
    status, body = api("GET", f"/api/v0/instances/{instance_id}/", owner="me")
    assert status == 200, body
    return body["instances"]


def listed(api: Wire, **query: Any) -> list[dict[str, Any]]:
    status, body = api("GET", "/api/v1/instances/", **query)
    assert status == 200, body
    return body["instances"]


def running(sandbox: Sandbox, api: Wire, **body: Any) -> int:
    """The id of an instance that runs."""
    instance_id = create(api, body.pop("offer", None), **body)
    sandbox.advance(60)
    found = show(api, instance_id)
    assert found is not None and found["actual_status"] == "running", found
    return instance_id
