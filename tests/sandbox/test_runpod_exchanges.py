"""Whole requests and whole answers of RunPod's face, recorded: a field that goes, comes or changes its type shows here.

`SANDBOX_RECORD=1` writes the file anew; read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from sandbox.runpod_calls import GPU, RunpodCalls

RECORDED = Path(__file__).with_name("runpod_exchanges.json")
POD, VOLUME, REGISTRY, TEMPLATE = "{pod}", "{volume}", "{registry}", "{template}"
CREATE = {
    "name": "gpu1-project-intent",
    "image": "runpod/pytorch:2.8",
    "gpu": {"id": GPU, "count": 1, "minCudaVersion": "12.4"},
    "cloud": "SECURE",
    "disk": 20,
    "ports": ["22/tcp", "8888/http"],
    "mounts": {"persistent": {"size": 40, "path": "/workspace"}},
    "env": {"A": "b"},
    "args": "bash -c 'exec /start.sh'",
}
# Method, path, body, and seconds that pass first. `{pod}` and the like stand for the id that the create before gave.
CALLS: list[tuple[str, str, Any, float]] = [
    ("GET", "/v2/catalog/gpus?include=AVAILABILITY&product=POD", None, 0),
    ("GET", "/v2/catalog/datacenters?include=GPU_AVAILABILITY,CPU_AVAILABILITY", None, 0),
    ("GET", "/v2/catalog/cpus", None, 0),
    ("POST", "/v2/pods", {**CREATE, "imageName": "x", "gpu": {"id": GPU, "count": 0}}, 0),
    ("POST", "/v2/pods", {**CREATE, "gpu": {"id": GPU}}, 0),
    ("POST", "/v2/pods", CREATE, 0),
    ("GET", f"/v2/pods/{POD}", None, 0.5),
    ("GET", "/v2/pods", None, 5),
    ("POST", f"/v2/pods/{POD}/action", {"action": "start"}, 0),
    ("PATCH", f"/v2/pods/{POD}", {"locked": True}, 0),
    ("PATCH", f"/v2/pods/{POD}", {"locked": False}, 0),
    ("POST", f"/v2/pods/{POD}/action", {"action": "stop"}, 3600),
    ("POST", f"/v2/pods/{POD}/action", {"action": "start"}, 3600),
    ("DELETE", f"/v2/pods/{POD}", None, 5),
    ("GET", f"/v2/pods/{POD}", None, 0),
    ("POST", "/v2/network-volumes", {"name": "v", "size": 10, "dataCenter": "EU-RO-1"}, 0),
    ("GET", "/v2/network-volumes", None, 0),
    ("DELETE", f"/v2/network-volumes/{VOLUME}", None, 3600),
    ("POST", "/v2/registries", {"name": "r", "username": "u", "password": "p"}, 0),
    ("GET", "/v2/registries", None, 0),
    ("POST", "/v2/templates", {"name": "t", "image": "runpod/base:1"}, 0),
    ("GET", "/v2/account/ssh-keys", None, 0),
    ("GET", "/v2/billing/pods?bucketSize=year&lastN=1", None, 3600),
    ("GET", "/v2/billing/network-volumes?bucketSize=year&lastN=1", None, 0),
    ("GET", "/v2/billing?bucketSize=year&lastN=1", None, 0),
    ("GET", "/v1/pods", None, 0),
    ("POST", "/graphql", {"query": "{ myself { id clientBalance currentSpendPerHr spendLimit pods { id } } }"}, 0),
]
_MADE = {"/v2/pods": POD, "/v2/network-volumes": VOLUME, "/v2/registries": REGISTRY, "/v2/templates": TEMPLATE}


def exchanges(api: RunpodCalls) -> list[dict[str, Any]]:
    ids: dict[str, str] = {}
    found = []
    for method, path, body, passes_s in CALLS:
        api.sandbox.advance(passes_s)
        actual = path
        for name, id in ids.items():
            actual = actual.replace(name, id)
        response = api.call(method, actual, body)
        answer = response.json() if response.content else None
        if response.status_code == 201:
            ids[_MADE[path]] = answer["id"]
        request = {"method": method, "path": path, **({"body": body} if body is not None else {})}
        content = response.headers.get("Content-Type", "")
        found.append(
            {"request": request, "status": response.status_code, "type": content, "answer": plain(answer, ids)}
        )
    return found


def plain(value: Any, ids: dict[str, str]) -> Any:
    """Without what differs from one run to the next: times, ports, and the name of the user."""
    text = json.dumps(value)
    for name, id in ids.items():
        text = text.replace(id, name)
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", text)
    text = re.sub(r'("public": |"port": |-p )\d{4,5}', r"\g<1>10000", text)
    text = re.sub(r'("username": "|ssh )[a-z_][a-z0-9_-]*("|@127)', r"\1root\2", text)
    return json.loads(re.sub(r'"(?:Resumed|Exited|Rented) by [^"]*"', '"CHANGE"', text))


@pytest.fixture
def api(make_sandbox):
    sandbox = make_sandbox(seed=1)
    sandbox.advance(-sandbox.world.now() % 86400)  # a midnight: the bill must not fall into two years
    return RunpodCalls(sandbox)


def test_the_answers_are_those_that_were_recorded(api):
    found = exchanges(api)
    if os.environ.get("SANDBOX_RECORD"):
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    recorded = json.loads(RECORDED.read_text())
    assert [exchange["request"] for exchange in found] == [exchange["request"] for exchange in recorded]
    for now, before in zip(found, recorded, strict=True):
        assert now == before
