"""Whatever comes over the wire, the emulator answers like a vendor: never 500, never a defect, never a hang."""

from __future__ import annotations

import contextlib
import json
import socket
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_skills.sandbox import Sandbox
from sandbox_fixture import Wire
from vast_calls import create, offers


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    with Sandbox(
        directory=tmp_path_factory.mktemp("sandbox"), containers=False, frozen=True, balance_usd=10**9
    ) as made:
        yield made
        assert list(made.world.crashes) == []


@pytest.fixture(scope="module")
def ids(sandbox):
    """An offer and an instance that exist."""
    api = Wire(sandbox)
    return {"offer": offers(api)[0]["id"], "instance": create(api)}


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(["1", "0.5", "-1", "1e400", "nan", "me", "running", "stopped", "ssh", "RTX 4090", "x" * 300])
)
_FIELDS = """
    image disk label env onstart args args_str price runtype target_state cancel_unavail template_hash_id volume_info
    state ids instance_ids q order type limit allocated_storage select_cols gpu_name num_gpus reliability eq in gte lt
    notin ssh_key command tail filter daemon_logs amount id size create_new mount_path src_id dst_id src_path dst_path
    driver_version geolocation verified rented vm
"""
_NAMES = st.text(max_size=8) | st.sampled_from(sorted(set(_FIELDS.split())))
_ANY = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4))
_BODIES = st.dictionaries(_NAMES, _ANY, max_size=8)
_PATHS = st.sampled_from(
    [
        ("POST", "/api/v0/bundles/"),
        ("PUT", "/api/v0/search/asks/"),
        ("PUT", "/api/v0/asks/{offer}/"),
        ("PUT", "/api/v0/asks/{text}/"),
        ("POST", "/api/v0/asks/bulk/"),
        ("PUT", "/api/v0/launch_instance/"),
        ("PUT", "/api/v0/instances/{instance}/"),
        ("PUT", "/api/v0/instances/{text}/"),
        ("PUT", "/api/v0/instances/"),
        ("DELETE", "/api/v0/instances/"),
        ("DELETE", "/api/v0/instances/{text}/"),
        ("GET", "/api/v0/instances/{text}/"),
        ("PUT", "/api/v0/instances/reboot/{instance}/"),
        ("PUT", "/api/v0/instances/bid_price/{instance}/"),
        ("PUT", "/api/v0/instances/prepay/{instance}/"),
        ("PUT", "/api/v0/instances/update_template/{instance}/"),
        ("PUT", "/api/v0/instances/request_logs/{instance}/"),
        ("PUT", "/api/v0/instances/command/{instance}/"),
        ("PUT", "/api/v0/commands/copy_direct/"),
        ("POST", "/api/v0/instances/{instance}/ssh/"),
        ("DELETE", "/api/v0/instances/{instance}/ssh/{text}/"),
        ("POST", "/api/v0/ssh/"),
        ("PUT", "/api/v0/ssh/{text}/"),
        ("PUT", "/api/v0/volumes/"),
        ("DELETE", "/api/v0/volumes/"),
        ("POST", "/api/v0/template/"),
        ("GET", "/api/v0/sandbox-results/{text}"),
        ("PATCH", "/api/v0/instances/{instance}/"),
        ("GET", "/api/v0/{text}"),
    ]
)
_MANY = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def _is_an_answer(sandbox: Sandbox, status: int, headers: dict[str, str], data: bytes) -> None:
    assert list(sandbox.world.crashes) == []
    assert 200 <= status < 500, data
    if headers.get("content-type") == "application/json":
        json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))


@_MANY
@given(call=_PATHS, body=_BODIES, text=st.text(min_size=1, max_size=12))
def test_random_objects_get_an_answer(sandbox, ids, call, body, text):
    method, path = call
    path = path.format(text=quote(text, safe=""), **ids)
    _is_an_answer(sandbox, *Wire(sandbox).full(method, path, body))


@_MANY
@given(call=_PATHS, raw=st.binary(max_size=60) | _ANY.map(lambda value: json.dumps(value).encode()))
def test_random_bytes_get_an_answer(sandbox, ids, call, raw):
    method, path = call
    _is_an_answer(sandbox, *Wire(sandbox).full(method, path.format(text="1", **ids), raw=raw))


@_MANY
@given(
    path=st.sampled_from(["/api/v1/instances/", "/api/v0/charges/", "/api/v1/invoices/", "/api/v0/users/me/invoices"]),
    query=st.dictionaries(
        st.sampled_from(["limit", "after_token", "order_by", "select_cols", "select_filters", "latest_first", "owner"]),
        _ANY.map(json.dumps) | st.text(max_size=30),
        max_size=4,
    ),
)
def test_random_queries_get_an_answer(sandbox, ids, path, query):
    _is_an_answer(sandbox, *Wire(sandbox).full("GET", path, **query))


@_MANY
@given(body=st.fixed_dictionaries({"image": st.just("x/y"), "cancel_unavail": st.just(False)}), more=_BODIES)
def test_whatever_a_create_does_it_leaves_no_charge_without_an_instance(sandbox, ids, body, more):
    api = Wire(sandbox)
    status, reply = api("PUT", f"/api/v0/asks/{ids['offer']}/", {**more, **body})
    assert list(sandbox.world.crashes) == []
    world = sandbox.world
    alive = {i.resource for i in world.instances.values() if not i.is_destroyed}
    burning = {e["resource"] for e in world.burning() if e["resource"].startswith("instance-")}
    assert burning == alive
    assert status == 200 or reply["success"] is False
    if reply.get("new_contract"):
        api("DELETE", f"/api/v0/instances/{reply['new_contract']}/")


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /api/v0/users/current HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /api/v0/ssh/ HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"PUT /api/v0/ssh/ HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"PUT /api/v0/ssh/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /api/v0/users/current HTTP/1.1\r\nHost: attacker.example\r\n\r\n",
        b"GET " + b"/x" * 40_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /api/v0/users/current HTTP/1.1\r\n" + b"A: b\r\n" * 500 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_request_is_refused_and_the_server_goes_on(sandbox, raw):
    with socket.create_connection(("127.0.0.1", urlsplit(sandbox.url).port), timeout=10) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError, OSError):  # it may hang up before all was said
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
    assert not answer.startswith(b"HTTP/1.1 200")
    assert Wire(sandbox)("GET", "/api/v0/users/current/")[0] == 200
    assert list(sandbox.world.crashes) == []


def test_it_listens_on_loopback_only(sandbox):
    assert sandbox.http.socket.getsockname()[0] == "127.0.0.1"
