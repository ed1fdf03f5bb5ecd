"""What is sent to Vast when something is to change, once each, and what its answers to a create mean."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from gpu_skills.errors import (
    AuthRejected,
    Bug,
    GpuError,
    InstanceAbsent,
    InsufficientBalance,
    NetworkDenied,
    NoCapacity,
    ProviderSchema,
    ProviderSilent,
    RateLimited,
    Unavailable,
    UnexpectedReply,
    UsageError,
)
from gpu_skills.providers.base import MachineSpec, RegistryLogin, Requirements
from gpu_skills.providers.vast import VastWriter
from gpu_skills.providers.vast.offers import read_offer
from gpu_skills.wire import NotSent, Unanswered
from providers.replies import vast_offer
from providers.wires import KEY, Script, answer, vast

OFFER = read_offer(vast_offer(), Requirements(disk_gb=50))
SPEC = MachineSpec(
    offer=OFFER,
    label="gpu1-abc-int-1-1767330000",
    image="pytorch/pytorch:2.8.0",
    disk_gb=50,
    gpu_count=1,
    max_rate_usd_hr=Decimal("0.40"),
    bootstrap="echo armed",
    env={"A": "1"},
)
CREATED = {"success": True, "new_contract": 20517, "instance_api_key": "machine-key-made-up"}


def writer(*answers) -> tuple[VastWriter, Script]:
    script = Script(answers)
    return VastWriter(vast(script)), script


# the request ----------------------------------------------------------------------------------------------------------


def test_a_create_is_one_request_that_says_everything_and_nothing_unset():
    out, script = writer(answer(200, CREATED))
    assert out.create(SPEC).kind == "created"
    assert script.lines == ["PUT api/v0/asks/31001/"]
    assert script.bodies == [
        {
            "client_id": "me",
            "image": "pytorch/pytorch:2.8.0",
            "disk": 50,
            "label": "gpu1-abc-int-1-1767330000",
            "runtype": "ssh_direc ssh_proxy",
            "cancel_unavail": True,
            "target_state": "running",
            "env": {"A": "1"},
            "onstart": "echo armed",
        }
    ]


def test_optional_things_are_absent_rather_than_null():
    out, script = writer(answer(200, CREATED))
    out.create(replace(SPEC, env={}, bootstrap="", disk_gb=4))
    assert script.bodies[0].keys() == {
        "client_id", "image", "disk", "label", "runtype", "cancel_unavail", "target_state",
    }  # fmt: skip
    assert script.bodies[0]["disk"] == 8


def test_a_price_is_sent_only_for_an_interruptible_machine():
    out, script = writer(answer(200, CREATED))
    out.create(replace(SPEC, bid_usd_hr=Decimal("0.125"), ports=(8000, 22)))
    assert (script.bodies[0]["price"], script.bodies[0]["env"]) == (0.125, {"A": "1", "-p 8000:8000": "1"})
    assert script.bodies[0]["cancel_unavail"] is True


def test_a_registry_login_travels_in_its_field_and_nowhere_else():
    login = RegistryLogin("ghcr.io", "me", "registry-password-made-up")
    out, script = writer(
        answer(400, {"error": "invalid_args", "msg": "bad login -p registry-password-made-up ghcr.io"})
    )
    outcome = out.create(replace(SPEC, registry=login))
    assert script.bodies[0]["image_login"] == "-u me -p registry-password-made-up ghcr.io"
    assert "registry-password-made-up" not in repr(outcome) + str(outcome.problem) + repr(login) + repr(script.calls)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"label": ""}, UsageError),
        ({"label": "x" * 257}, UsageError),
        ({"bootstrap": "x" * 4001}, UsageError),
        ({"env": {"A": "x" * 257}}, UsageError),
        ({"env": {"A B": "x"}}, UsageError),
        ({"env": {f"A{n}": "x" for n in range(51)}}, UsageError),
        ({"disk_gb": 0}, UsageError),
        ({"bid_usd_hr": Decimal(0)}, UsageError),
        ({"volume_id": "v"}, UsageError),
        ({"registry": RegistryLogin(username="me", password="a b")}, UsageError),
        ({"registry": RegistryLogin(stored_id="x")}, UsageError),
        ({"env": {"VAST_API_KEY": KEY}}, Bug),
        ({"bootstrap": f"curl -H 'Authorization: Bearer {KEY}'"}, Bug),
        ({"label": f"x{KEY}"}, Bug),
    ],
)
def test_what_cannot_be_sent_is_said_before_anything_is(changes, error):
    out, script = writer(answer(200, CREATED))
    with pytest.raises(error) as caught:
        out.create(replace(SPEC, **changes))
    assert script.calls == [] and KEY not in str(caught.value)


# the answer -----------------------------------------------------------------------------------------------------------


def test_a_created_machine_comes_with_its_own_key_which_is_in_no_repr():
    outcome = writer(answer(200, CREATED))[0].create(SPEC)
    assert (outcome.kind, outcome.instance_id, outcome.machine_key) == ("created", "20517", "machine-key-made-up")
    assert "machine-key-made-up" not in repr(outcome)


@pytest.mark.parametrize(
    ("come", "error"),
    [
        (
            answer(400, {"success": False, "error": "invalid_price", "msg": "bid too low", "new_contract": 9}),
            ProviderSchema,
        ),
        (answer(410, {"error": "no_such_ask", "msg": "no_such_ask", "new_contract": "9"}), NoCapacity),
        (answer(500, {"msg": "oops", "new_contract": 9}), Unavailable),
        (answer(200, {"success": False, "msg": "could not start", "new_contract": 9}), UnexpectedReply),
    ],
)
def test_an_error_that_names_a_contract_made_a_machine_all_the_same(come, error):
    outcome = writer(come)[0].create(SPEC)
    assert (outcome.kind, outcome.instance_id, type(outcome.problem)) == ("created", "9", error)


@pytest.mark.parametrize(
    ("come", "error"),
    [
        (
            answer(404, {"error": "invalid_args", "msg": "error 404/3603: no_such_ask Instance type by id 1"}),
            NoCapacity,
        ),
        (answer(410, {"error": "no_such_ask", "msg": "error 410/3907: no_such_ask"}), NoCapacity),
        (answer(400, {"error": "invalid_args", "msg": "unknown field objectMounts"}), ProviderSchema),
        (answer(400, {"error": "invalid_price", "msg": "between 0.001 and 128"}), ProviderSchema),
        (answer(400, {"error": "missing_billing", "msg": "Your account lacks credit"}), InsufficientBalance),
        (answer(401, {"error": "auth_error"}), AuthRejected),
        (answer(404, {"error": "auth_error", "msg": "Invalid user key"}), AuthRejected),
        (answer(403, {"error": "invalid_args", "msg": "your own machines only"}), AuthRejected),
        (answer(429, "API requests too frequent: endpoint threshold=4.5"), RateLimited),
        (answer(200, {"success": False, "error": "invalid_args", "msg": "x"}), ProviderSchema),
        (NotSent("connection refused"), Unavailable),
        (NotSent("Operation not permitted", denied=True), NetworkDenied),
    ],
)
def test_a_clear_refusal_made_nothing(come, error):
    outcome = writer(come)[0].create(SPEC)
    assert (outcome.kind, outcome.instance_id, type(outcome.problem)) == ("refused", None, error)


@pytest.mark.parametrize(
    "come",
    [
        Unanswered("connection reset"),
        Unanswered("the answer broke off", status=200),
        answer(500, {"success": False, "msg": "oops"}),
        answer(502, "<html>Bad gateway</html>"),
        answer(503, ""),
        answer(408, ""),
        answer(499, ""),
        answer(200, ""),
        answer(200, "<html>"),
        answer(200, "[]"),
        answer(200, "null"),
        answer(200, {}),
        answer(200, {"success": True}),
        answer(200, {"success": True, "new_contract": None}),
        answer(200, {"success": True, "new_contract": True}),
        answer(200, {"success": True, "new_contract": -1}),
        answer(200, {"success": True, "new_contract": "../../1"}),
        answer(200, {"success": False}),
        answer(200, {"success": False, "error": "a word of tomorrow"}),
        answer(204, ""),
        answer(302, "", location="https://elsewhere.example"),
        answer(599, "x"),
        answer(400, {"error": "invalid_price", "new_contract": 9.0}),
        answer(410, {"error": "no_such_ask", "new_contract": [9]}),
        answer(200, {"success": False, "error": "invalid_args", "new_contract": "../9"}),
    ],
)
def test_whatever_is_neither_is_unknown_and_sent_only_once(come):
    out, script = writer(come)
    outcome = out.create(SPEC)
    assert (outcome.kind, outcome.instance_id) == ("unknown", None)
    assert isinstance(outcome.problem, GpuError)
    assert len(script.calls) == 1


# the other writes -----------------------------------------------------------------------------------------------------

WRITES = {
    "stop": (lambda w: w.stop("20517"), "PUT api/v0/instances/20517/", {"state": "stopped"}),
    "start": (lambda w: w.start("20517"), "PUT api/v0/instances/20517/", {"state": "running"}),
    "restart": (lambda w: w.restart("20517"), "PUT api/v0/instances/reboot/20517/", {}),
    "label": (lambda w: w.set_label("20517", "gpu1-x"), "PUT api/v0/instances/20517/", {"label": "gpu1-x"}),
    "key": (
        lambda w: w.attach_key("20517", "ssh-ed25519 AAAA me\n"),
        "POST api/v0/instances/20517/ssh/",
        {"ssh_key": "ssh-ed25519 AAAA me"},
    ),
    "destroy": (lambda w: w.destroy("20517"), "DELETE api/v0/instances/20517/", {}),
}


@pytest.mark.parametrize("name", WRITES)
def test_each_write_is_its_one_request(name):
    act, line, body = WRITES[name]
    out, script = writer(answer(200, {"success": True}))
    act(out)
    assert (script.lines, script.bodies) == ([line], [body])


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    ("come", "error"),
    [
        (answer(200, {"success": False, "msg": "no"}), UnexpectedReply),
        (answer(200, {}), ProviderSilent),
        (answer(200, ""), ProviderSilent),
        (answer(200, "[]"), ProviderSilent),
        (answer(500, "x"), ProviderSilent),
        (Unanswered("reset"), ProviderSilent),
        (answer(401, {"error": "auth_error", "msg": "2FA session expired"}), AuthRejected),
        (answer(401, '"Unauthorized"'), AuthRejected),
        (answer(429, "too frequent"), RateLimited),
        (answer(429, '"too frequent"'), RateLimited),
        (answer(404, "<html>"), UnexpectedReply),
        (NotSent("refused"), Unavailable),
    ],
)
def test_a_write_that_is_not_said_to_have_worked_is_an_error(name, come, error):
    out, script = writer(come)
    with pytest.raises(error):
        WRITES[name][0](out)
    assert len(script.calls) == 1


def test_destroying_what_is_not_there_is_told_apart_from_success():
    gone = answer(404, {"success": False, "error": "no_such_instance"})
    assert writer(answer(200, {"success": True}))[0].destroy("20517") == "accepted"
    assert writer(gone)[0].destroy("20517") == "absent"
    with pytest.raises(InstanceAbsent):
        writer(gone)[0].stop("20517")


@pytest.mark.parametrize("id", ["", "../users", "1/2", "1?x", "٣", "-1"])
def test_only_an_id_becomes_part_of_a_path(id):
    out, script = writer(answer(200, {"success": True}))
    for act in (out.destroy, out.stop, out.start, out.restart):
        with pytest.raises(UsageError):
            act(id)
    assert script.calls == []
