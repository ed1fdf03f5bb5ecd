"""The sandbox answers as the vendors' own OpenAPI files say, but for what is known to be wrong there.

The files are the vendors' and not part of this repository: name one in SANDBOX_OPENAPI_VAST or SANDBOX_OPENAPI_RUNPOD,
and every answer of every sandbox in every test is checked (openapi_check.py). Here: that the check finds what it
should, that the known contradictions are real, and one tour over all of Vast's calls.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_skills.sandbox import Sandbox
from openapi_check import ANY, KNOWN, Known, OpenApi, openapi_of, variable_of
from sandbox_fixture import Wire
from vast_calls import cheapest, create

SMALL_FILE = {
    "paths": {
        "/api/things": {"get": {"responses": {"200": {"$ref": "#/components/responses/Things"}}}},
        "/api/things/{id}": {
            "get": {
                "responses": {
                    "200": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}},
                    "404": {"description": "no body described"},
                }
            }
        },
        "/api/things/special": {"put": {"responses": {"200": {"description": "nothing said of its body"}}}},
    },
    "components": {
        "schemas": {
            "Thing": {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}},
            "Things": {"type": "array", "items": {"$ref": "#/components/schemas/Thing"}},
        },
        "responses": {
            "Things": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Things"}}}},
        },
    },
}


@pytest.mark.parametrize(
    ("method", "path", "status", "content_type", "body", "said"),
    [
        ("GET", "/api/things", 200, "application/json", [{"id": 1}], None),
        ("GET", "/api/things/", 200, "application/json; charset=utf-8", [], None),
        ("GET", "/api/things/7", 200, "application/json", {"id": 7}, None),
        ("GET", "/api/things/7", 500, "text/html", "<html>", None),
        ("GET", "/api/things/7", 404, "application/json", None, None),
        ("GET", "/api/things", 200, "application/json", [{"id": 1}, {"id": "2"}], "$[].id: '2' is not of type"),
        ("GET", "/api/things/7", 200, "application/json", {}, "'id' is a required property"),
        ("GET", "/api/things/7", 200, "text/plain", {"id": 7}, "content_type: text/plain"),
        ("GET", "/api/things/7", 404, "application/json", {}, "content_type: application/json, described are none"),
        ("GET", "/api/things/7", 410, "application/json", {}, "410: this status is not listed"),
        ("GET", "/api/other", 200, "application/json", {}, "is not in the file"),
        ("DELETE", "/api/things/7", 200, "application/json", {}, "is not in the file"),
        ("PUT", "/api/things/special", 200, "application/json", None, None),
    ],
)
def test_an_answer_fits_the_file_or_is_told_with_its_place(method, path, status, content_type, body, said):
    data = body.encode() if isinstance(body, str) else b"" if body is None else json.dumps(body).encode()
    complaint = OpenApi(SMALL_FILE).complaint(method, path, status, content_type, data)
    assert complaint is None if said is None else said in str(complaint)


def test_a_known_contradiction_is_let_through_where_it_was_named_and_nowhere_else():
    known = [
        Known(0, "GET", "/api/more/{id}", "an operation"),
        Known(410, "GET", ANY, "a status"),
        Known(200, "GET", "/api/things/{id}", "a field", "$.id"),
    ]
    api = OpenApi(SMALL_FILE, known)
    assert api.complaint("GET", "/api/more/3", 200, "application/json", b"{}") is None
    assert api.complaint("GET", "/api/things/7", 410, "application/json", b"{}") is None
    assert api.met == set(known[:2])
    assert api.complaint("GET", "/api/things/7", 200, "application/json", b'{"id": null}') is None
    assert api.met == set(known)
    assert api.complaint("PUT", "/api/more/3", 200, "application/json", b"{}")
    assert api.complaint("GET", "/api/things", 200, "application/json", b'[{"id": null}]')
    assert api.complaint("GET", "/api/things/7", 200, "application/json", b"[]")


def named_file(vendor: str) -> OpenApi:
    api = openapi_of(vendor)
    if api is None:
        pytest.skip(f"the vendor's OpenAPI file is not part of this repository; {variable_of(vendor)} names none")
    return api


@pytest.mark.parametrize("vendor", sorted(KNOWN))
def test_a_known_contradiction_is_really_missing_in_the_file(vendor):
    paths = named_file(vendor).document["paths"]
    for known in KNOWN[vendor]:
        if known.where or ANY in (known.method, known.path):
            continue
        operation = paths.get(known.path, {}).get(known.method.lower())
        if known.status == 0:
            assert operation is None, f"{known} is described by now"
        else:
            assert operation is not None and str(known.status) not in operation["responses"], f"{known} is listed"


def answered(api: Wire, method: str, path: str, body: Any = None, **query: Any) -> Any:
    status, reply = api(method, path, body, **query)
    assert status == 200, (method, path, reply)
    return reply


def tour(sandbox: Sandbox, api: Wire) -> None:
    """Every call of Vast once with success, and the refusals whose fields the file has."""
    v0 = "/api/v0"
    answered(api, "GET", f"{v0}/gpu_names/unique/")
    offer = cheapest(api, direct_port_count={"gte": 1}, num_gpus={"eq": 1})
    answered(api, "PUT", f"{v0}/search/asks/", {"select_cols": ["*"], "q": {"num_gpus": {"eq": 1}, "limit": 2}})
    key = answered(api, "POST", f"{v0}/ssh/", {"ssh_key": "ssh-ed25519 AAAA me"})["key"]["id"]
    answered(api, "PUT", f"{v0}/ssh/{key}/", {"id": key, "ssh_key": "ssh-ed25519 BBBB me"})
    answered(api, "GET", f"{v0}/ssh/")
    one = create(api, offer, price=offer["min_bid"] * 2, env={"A": "1", "-p 8000:8000": "1"}, label="toured")
    bare = create(api, onstart=None)
    other = answered(api, "PUT", f"{v0}/launch_instance/", {"image": "a/b", "disk": 16, "q": {"num_gpus": {"eq": 1}}})
    many = answered(api, "POST", f"{v0}/asks/bulk/", {"ids": [cheapest(api)["id"]], "image": "a/b", "disk": 16})
    assert api("PUT", f"{v0}/asks/{offer['id']}/", {"image": "a/b", "label": "x" * 300})[0] == 400
    sandbox.advance(60)
    answered(api, "GET", f"{v0}/instances/{one}/")
    answered(api, "GET", "/api/v1/instances/")
    answered(api, "GET", f"{v0}/instances/filters/")
    assert api("GET", f"{v0}/instances/")[0] == 410

    attached = answered(api, "POST", f"{v0}/instances/{one}/ssh/", {"ssh_key": "ssh-ed25519 CCCC you"})
    assert attached["success"]
    keys = json.loads(answered(api, "GET", f"{v0}/instances/{one}/ssh/")["ssh_keys"])
    answered(api, "DELETE", f"{v0}/instances/{one}/ssh/{keys[-1]['id']}/")
    answered(api, "PUT", f"{v0}/instances/{one}/", {"label": "again"})
    answered(api, "PUT", f"{v0}/instances/update_template/{one}/", {"id": one, "image": "a/c"})
    result = answered(api, "PUT", f"{v0}/instances/request_logs/{one}/", {"tail": "5"})["result_url"]
    path = result.removeprefix(sandbox.url)
    assert [api.full("GET", path)[0] for _ in range(2)] == [404, 200]
    answered(api, "PUT", f"{v0}/instances/command/{one}/", {"command": "ls"})
    ends = {"client_id": "me", "src_id": str(one), "dst_id": str(bare), "src_path": "starts", "dst_path": "starts"}
    answered(api, "PUT", f"{v0}/commands/copy_direct/", ends)
    answered(api, "DELETE", f"{v0}/commands/copy_direct/", {"client_id": "me", "dst_id": str(bare)})
    answered(api, "PUT", f"{v0}/commands/rsync/", {**ends, "src_id": None})
    answered(api, "PUT", f"{v0}/instances/bid_price/{one}/", {"client_id": "me", "price": offer["min_bid"] * 3})
    answered(api, "PUT", f"{v0}/instances/prepay/{bare}/", {"amount": 5})
    answered(api, "GET", f"{v0}/instances/balance/{bare}/")
    answered(api, "PUT", f"{v0}/instances/reboot/{one}/", {})
    sandbox.advance(60)
    answered(api, "PUT", f"{v0}/instances/recycle/{one}/", {})
    sandbox.advance(60)
    answered(api, "PUT", f"{v0}/instances/", {"state": "stopped", "ids": [one]})
    sandbox.advance(60)
    answered(api, "PUT", f"{v0}/instances/{one}/", {"state": "running"})

    answered(api, "GET", f"{v0}/users/current/")
    answered(api, "GET", f"{v0}/users/me/invoices", owner="me", inc_charges="true")
    since, until = int(sandbox.world.now()) - 86_400, int(sandbox.world.now())
    answered(api, "GET", f"{v0}/charges/", select_filters={"day": {"gte": since, "lte": until}})
    assert api("GET", f"{v0}/charges/")[0] == 400
    answered(api, "GET", "/api/v1/invoices/", select_filters={"when": {"gte": since, "lte": until}})
    answered(api, "PUT", f"{v0}/volumes/", {"id": offer["avail_vol_ask_id"], "size": 20, "name": "data"})
    (volume,) = answered(api, "GET", f"{v0}/volumes/")["volumes"]
    answered(api, "DELETE", f"{v0}/volumes/", {"id": volume["id"]})
    answered(api, "POST", f"{v0}/template/", {"name": "t", "image": "a/b"})
    answered(api, "GET", f"{v0}/template/")
    answered(api, "DELETE", f"{v0}/ssh/{key}/")

    answered(api, "DELETE", f"{v0}/instances/{one}/")
    assert answered(api, "GET", f"{v0}/instances/{one}/") == {"instances": None}
    rest = [bare, other["new_contract"], many["results"][0]["new_contract"]]
    answered(api, "DELETE", f"{v0}/instances/", {"instance_ids": rest})
    assert api("DELETE", f"{v0}/instances/{one}/")[0] == 404
    assert api("PUT", f"{v0}/instances/reboot/{one}/", {})[0] == 404
    assert api("PUT", f"{v0}/instances/request_logs/{one}/", raw=b"[]")[0] == 400
    assert Wire(sandbox, key=None)("GET", f"{v0}/users/current/")[0] == 403
    sandbox.service.limits.mode = "virtual"
    searches = [api.full("POST", f"{v0}/bundles/", {"limit": 1})[0] for _ in range(11)]
    assert searches == [200] * 10 + [429], "ten in a minute"
    lists = [api.full("GET", "/api/v1/instances/")[0] for _ in range(2)]
    assert lists == [200, 429], "one in a second"


@pytest.mark.subprocess
def test_a_tour_over_every_call_of_vast_meets_every_known_contradiction(make_sandbox):
    sandbox = make_sandbox(seed=1, real=True, limits="off")
    tour(sandbox, Wire(sandbox))
    seen = [(entry["method"], entry["path"]) for entry in sandbox.world.log]
    left_out = [
        f"{route.method} {route.pattern.pattern}"
        for route in sandbox.world.faces["vast"].routes
        if not any(method == route.method and route.pattern.fullmatch(path) for method, path in seen)
    ]
    assert left_out == []
    if (api := openapi_of("vast")) is not None:
        assert set(KNOWN["vast"]) - api.met == set(), "no longer needed"
