"""What RunPod's answers mean, what is sent to it, and what its answers to a create mean."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from urllib.parse import parse_qs, urlsplit

import pytest

from gpu_skills.errors import (
    AuthRejected,
    Bug,
    ConflictingState,
    DiskUnspecified,
    HostFull,
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
from gpu_skills.providers.runpod import RunpodReader, RunpodWriter
from gpu_skills.providers.runpod.machines import read_machine
from gpu_skills.providers.runpod.offers import read_offer
from gpu_skills.providers.runpod.pricing import network_usd_hr, running_usd_hr, stopped_usd_hr, volume_gb
from gpu_skills.wire import NotSent, Unanswered
from providers.replies import gpu_type, pod
from providers.wires import KEY, Script, answer, runpod

POD = "k3x9abcd01"


def reader(*answers) -> tuple[RunpodReader, Script]:
    script = Script(answers)
    return RunpodReader(runpod(script)), script


def writer(*answers) -> tuple[RunpodWriter, Script]:
    script = Script(answers)
    return RunpodWriter(runpod(script)), script


def problem(status: int, detail: str, **more):
    return answer(status, {"title": "x", "status": status, "detail": detail, **more})


def catalog(*rows):
    return answer(200, {"gpus": list(rows)})


# offers ---------------------------------------------------------------------------------------------------------------


def test_the_rate_is_all_gpus_and_the_disks_that_will_be_made():
    offer = read_offer(gpu_type(), Requirements(gpu_count=2, disk_gb=114))
    assert offer.rate_usd_hr == Decimal("1.40")  # 2 × 0.69 + (30 + 114) GB × 0.10 / 720 h
    assert (offer.gpu_count, offer.vram_gb, offer.gpu, offer.offer_id) == (2, 24, "RTX 4090", "NVIDIA GeForce RTX 4090")
    assert (offer.location, offer.stock, offer.cuda, offer.reliability) == ("EU-RO-1", "HIGH", 12.8, None)


def test_what_is_out_of_stock_too_small_or_a_place_holder_is_no_offer():
    rows = [
        gpu_type(id="unknown"),
        gpu_type(id="a", availability="NONE"),
        gpu_type(id="b", maxCount={"secure": 1, "community": 8}),
        gpu_type(id="c", secure=False),
        gpu_type(id="d", price={"secure": None, "community": 0.2}),
        gpu_type(id="e"),
    ]
    found = reader(catalog(*rows))[0].search(Requirements(gpu_count=2))
    assert [offer.offer_id for offer in found.offers] == ["e"]
    assert {row.filter: row.removed for row in found.filters if row.removed} == {
        "readable": 2, "gpu_count": 1, "stock": 1,
    }  # fmt: skip


def test_availability_is_asked_for_with_the_product_it_needs():
    _, script = found = reader(catalog(gpu_type()))
    found[0].search(Requirements(gpu_count=4, min_cuda=12.0))
    query = parse_qs(urlsplit(script.calls[0].url).query)
    assert query == {
        "include": ["AVAILABILITY"], "product": ["POD"], "count": ["4"], "cloud": ["SECURE"],
        "minCudaVersion": ["12.0"],
    }  # fmt: skip


def test_interruptible_machines_are_not_to_be_had_and_nothing_is_asked():
    source, script = reader(catalog(gpu_type()))
    assert source.search(Requirements(interruptible=True)).offers == []
    assert script.calls == []


CENTERS = answer(200, {"dataCenters": [{"id": "EU-RO-1"}, {"id": "EU-CZ-1"}, {"id": "US-TX-3"}]})


def test_a_region_that_does_not_exist_names_those_that_do():
    source, script = reader(CENTERS)
    with pytest.raises(UsageError, match="EU-CZ-1, EU-RO-1, US-TX-3") as caught:
        source.search(Requirements(locations=("CZ",)))
    assert caught.value.exit_code == 2 and len(script.calls) == 1
    found = reader(CENTERS, catalog(gpu_type()))[0].search(Requirements(locations=("eu",)))
    assert len(found.offers) == 1


def test_a_volume_decides_the_data_centre_and_costs_no_second_disk():
    volumes = answer(200, {"networkVolumes": [{"id": "v1", "name": "data", "size": 100, "dataCenter": "EU-RO-1"}]})
    elsewhere = gpu_type(id="x", dataCenters=[{"id": "US-TX-3", "availability": "HIGH"}])
    found = reader(volumes, catalog(gpu_type(), elsewhere))[0].search(Requirements(volume_id="v1", disk_gb=500))
    assert [o.rate_usd_hr for o in found.offers] == [Decimal("0.69") + running_usd_hr(30, 0)]
    with pytest.raises(UsageError, match=r"there are v1 \(data, EU-RO-1\)"):
        reader(volumes)[0].search(Requirements(volume_id="v2"))


@pytest.mark.parametrize("body", [{}, {"gpus": None}, {"gpus": {}}, {"gpus": ["x"]}, [], "", {"gpus": [{}, {"id": 3}]}])
def test_a_malformed_catalogue_is_never_nothing_found(body):
    with pytest.raises(UnexpectedReply):
        reader(answer(200, body))[0].search(Requirements())


# pods -----------------------------------------------------------------------------------------------------------------


def test_every_pod_is_listed_and_cursors_are_followed_where_they_appear():
    source, script = reader(
        answer(200, {"pods": [pod(id="a")], "nextCursor": "c1"}),
        answer(200, {"pods": [pod(id="b")], "nextCursor": None}),
    )
    assert [m.instance_id for m in source.machines()] == ["a", "b"]
    assert script.lines == ["GET v2/pods", "GET v2/pods?cursor=c1"]


@pytest.mark.parametrize(
    "come",
    [
        answer(200, {}),
        answer(200, []),
        answer(200, {"pods": None}),
        answer(200, {"pods": ["x"]}),
        answer(200, {"pods": [{"name": "no id"}]}),
        answer(200, {"pods": [pod()], "nextCursor": "the server ignores it"}),
        answer(200, {"pods": [pod()], "nextCursor": 7}),
        answer(200, "<html>"),
        answer(204, ""),
        answer(403, "<html><title>Error 1010</title></html>"),
        answer(410, {"detail": "retired"}),
    ],
)
def test_a_list_that_is_not_clearly_one_is_never_no_machines(come):
    with pytest.raises(UnexpectedReply):
        reader(come)[0].machines()
    assert reader(answer(200, {"pods": []}))[0].machines() == []


def test_absent_is_what_the_api_itself_says():
    assert reader(problem(404, "pod not found"))[0].machine(POD) is None
    for come in (answer(404, "<html>"), answer(404, ""), answer(200, pod(id="other")), answer(200, "")):
        with pytest.raises(UnexpectedReply):
            reader(come)[0].machine(POD)


@pytest.mark.parametrize(
    ("come", "error"),
    [
        (problem(401, "bad token"), AuthRejected),
        (problem(403, "key lacks the right"), AuthRejected),
        (problem(402, "balance"), InsufficientBalance),
        (answer(429, {"detail": "minute window"}, retry_after="99"), RateLimited),
        (problem(503, "busy"), Unavailable),
        (Unanswered("reset"), Unavailable),
        (NotSent("not permitted", denied=True), NetworkDenied),
    ],
)
def test_each_failure_has_its_own_class(come, error):
    for ask in (lambda r: r.machines(), lambda r: r.machine(POD), lambda r: r.check_key(), lambda r: r.volumes()):
        with pytest.raises(error):
            ask(reader(come)[0])


@pytest.mark.parametrize(
    ("changes", "status", "is_dead"),
    [
        ({}, "running", False),
        ({"status": "PROVISIONING", "runtime": {}, "ssh": {"proxy": None, "direct": None}}, "booting", False),
        ({"status": "STARTING", "runtime": None}, "booting", False),
        ({"status": "EXITED", "cost": 0.0}, "stopped", True),
        ({"status": "ERROR"}, "unknown", True),
        ({"status": "TERMINATED", "cost": 0.0}, "terminating", True),
        ({"status": "a word of tomorrow"}, "unknown", False),
        ({"status": None}, "unknown", False),
    ],
)
def test_a_state_and_its_dead_end(changes, status, is_dead):
    machine = read_machine(pod(**changes))
    assert (machine.status, machine.dead_end is not None) == (status, is_dead)


def test_a_stopped_pod_burns_its_volume_although_its_cost_is_zero():
    stopped = read_machine(pod(status="EXITED", cost=0.0))
    assert stopped.burn_usd_hr == Decimal(50) * Decimal("0.20") / 720
    assert stopped.rate_usd_hr is None
    running = read_machine(pod())
    assert running.rate_usd_hr == running.burn_usd_hr == Decimal("0.69") + Decimal(80) * Decimal("0.10") / 720


def test_a_running_pod_without_a_cost_is_not_free():
    assert read_machine(pod(cost=0)).rate_usd_hr is None
    assert read_machine(pod(cost=None)).burn_usd_hr is None


def test_both_ports_are_told_when_they_differ_and_the_proxy_carries_no_commands():
    old = read_machine(pod(runtime={"ports": [{"private": 22, "public": 10999, "type": "tcp", "ip": "203.0.113.40"}]}))
    assert [(w.kind, w.endpoint.port, w.carries_commands) for w in old.ways] == [
        ("direct", 10341, True),
        ("direct", 10999, True),
        ("proxy", 22, False),
    ]
    assert [w.endpoint.port for w in read_machine(pod()).ways] == [10341, 22]
    assert read_machine(pod(status="EXITED")).ways == ()


@pytest.mark.parametrize(
    "direct", [None, {}, {"host": "-oX", "port": 1}, {"host": "a", "port": 0}, {"host": "a", "port": "x"}, [], "a:1"]
)
def test_a_way_that_cannot_be_used_is_left_out(direct):
    assert read_machine(pod(ssh={"direct": direct, "proxy": None}, runtime=None)).ways == ()


def test_the_environment_of_a_pod_is_not_taken_along():
    assert "made-up-secret" not in repr(read_machine(pod()))


def test_a_log_is_what_the_stream_brought_in_time():
    frames = (
        'id: 1/1\ndata: {"source":"system","line":"create container","ts":"x"}\n\ndata: {"line":"start"}\n\ndata: {"li'
    )
    source, script = reader(answer(200, frames))
    assert source.log_lines(POD, source="system", lines=10) == ["create container", "start"]
    assert script.calls[0].stop_after_s is not None
    with pytest.raises(InstanceAbsent):
        reader(problem(404, "x"))[0].log_lines(POD)
    assert reader(answer(200, ""))[0].log_lines(POD) == []
    for page in ("<html>Welcome</html>", {"error": "internal"}):
        with pytest.raises(UnexpectedReply):
            reader(answer(200, page))[0].log_lines(POD)


WHEN = (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC))


def test_charges_are_told_by_kind_and_their_sum_is_the_whole():
    record = {
        "startTime": "2026-01-01T00:00:00Z",
        "endTime": "2026-01-01T01:00:00Z",
        "podId": POD,
        "totalAmount": 0.75,
        "gpuAmount": 0.69,
        "cpuAmount": 0,
        "diskAmount": 0.04,
    }
    charges = reader(answer(200, {"records": [record]}))[0].charges(*WHEN)
    assert [(c.kind, c.amount_usd) for c in charges] == [
        ("gpu", Decimal("0.69")), ("disk", Decimal("0.04")), ("other", Decimal("0.02")),
    ]  # fmt: skip
    with pytest.raises(UnexpectedReply):
        reader(answer(200, {"records": [{**record, "podId": None}]}))[0].charges(*WHEN)
    with pytest.raises(UsageError):
        reader(answer(200, {}))[0].charges(WHEN[0], WHEN[0] + timedelta(days=60))


@pytest.mark.parametrize(
    ("come", "credit"),
    [
        (answer(200, {"data": {"myself": {"clientBalance": 41.5, "currentSpendPerHr": 0.69}}}), Decimal("41.5")),
        (answer(200, {"errors": [{"message": "x"}], "data": None}), None),
        (answer(410, {"title": "retired"}), None),
        (answer(200, "<html>"), None),
    ],
)
def test_the_balance_is_told_or_unknown(come, credit):
    assert reader(come)[0].balance().credit_usd == credit


@pytest.mark.parametrize(("wanted", "made"), [(None, 10), (3, 10), (50, 50), (50.2, 51)])
def test_a_wanted_disk_becomes_a_volume_of_whole_gigabytes(wanted, made):
    assert volume_gb(wanted) == made


def test_the_published_storage_prices():
    assert (running_usd_hr(30, 42), stopped_usd_hr(72)) == (Decimal("0.01"), Decimal("0.02"))
    assert network_usd_hr(2000) == Decimal(120) / 720


# writes ---------------------------------------------------------------------------------------------------------------

SPEC = MachineSpec(
    offer=read_offer(gpu_type(), Requirements(disk_gb=50)),
    label="gpu1-abc-int-1-1767330000",
    image="pytorch/pytorch:2.8.0",
    disk_gb=50,
    persistent_gb=50,
    gpu_count=1,
    max_rate_usd_hr=Decimal("0.80"),
    bootstrap="bash -c 'echo armed'",
    env={"A": "1"},
    ssh_public_key="ssh-ed25519 AAAA me\n",
)


def test_a_create_is_one_request_with_count_disk_key_and_port():
    out, script = writer(answer(201, pod(status="PROVISIONING")))
    outcome = out.create(SPEC)
    assert (outcome.kind, outcome.instance_id) == ("created", POD)
    assert script.lines == ["POST v2/pods"]
    assert script.bodies == [
        {
            "name": "gpu1-abc-int-1-1767330000",
            "image": "pytorch/pytorch:2.8.0",
            "gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 1},
            "cloud": "SECURE",
            "disk": 30,
            "ports": ["22/tcp"],
            "mounts": {"persistent": {"size": 50, "path": "/workspace"}},
            "env": {"A": "1", "PUBLIC_KEY": "ssh-ed25519 AAAA me"},
            "args": "bash -c 'echo armed'",
        }
    ]


def test_optional_things_are_absent_rather_than_null():
    out, script = writer(answer(201, pod()))
    out.create(replace(SPEC, env={}, bootstrap="", ssh_public_key=None))
    assert script.bodies[0].keys() == {"name", "image", "gpu", "cloud", "disk", "ports", "mounts"}


def test_where_nothing_has_to_survive_a_stop_the_container_has_the_whole_disk_and_there_is_no_volume():
    out, script = writer(answer(201, pod()), answer(201, pod()))
    out.create(replace(SPEC, persistent_gb=None))
    out.create(replace(SPEC, persistent_gb=None, disk_gb=10))
    assert [body["disk"] for body in script.bodies] == [50, 30]
    assert all("mounts" not in body for body in script.bodies)


def test_a_network_volume_takes_the_place_of_the_disk_in_its_data_centre():
    out, script = writer(answer(201, pod()))
    out.create(
        replace(SPEC, volume_id="v1", data_centers=("EU-RO-1",), ports=(8000,), registry=RegistryLogin(stored_id="r"))
    )
    body = script.bodies[0]
    assert body["mounts"] == {"network": [{"volumeId": "v1", "path": "/workspace"}]}
    assert (body["dataCenterIds"], body["ports"], body["registry"]) == (["EU-RO-1"], ["22/tcp", "8000/http"], "r")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"bid_usd_hr": Decimal("0.1")}, UsageError),
        ({"label": "x" * 192}, UsageError),
        ({"bootstrap": "x" * 4001}, UsageError),
        ({"volume_id": "v1"}, UsageError),
        ({"registry": RegistryLogin(username="me", password="made-up")}, UsageError),
        ({"env": {"RUNPOD_API_KEY": KEY}}, Bug),
        ({"image": f"x/{KEY}"}, Bug),
    ],
)
def test_what_cannot_be_sent_is_said_before_anything_is(changes, error):
    out, script = writer(answer(201, pod()))
    with pytest.raises(error):
        out.create(replace(SPEC, **changes))
    assert script.calls == []


@pytest.mark.parametrize(
    ("come", "error"),
    [
        (problem(400, "There are no longer any instances available with the requested specifications."), NoCapacity),
        (problem(400, "no host in EU-RO-1"), NoCapacity),
        (problem(400, "no longer any instances available with enough disk space"), DiskUnspecified),
        (problem(400, "exactly one of gpu, cpu", errors=[{"message": "gpu"}]), ProviderSchema),
        (problem(422, "validation", errors=[{"location": "body.objectMounts", "message": "unknown"}]), ProviderSchema),
        (problem(404, "unknown template"), ProviderSchema),
        (problem(401, "x"), AuthRejected),
        (problem(402, "insufficient balance"), InsufficientBalance),
        (problem(400, "Insufficient funds: add credit"), InsufficientBalance),
        (problem(403, "not this pool"), AuthRejected),
        (answer(403, "<html><title>1010</title></html>"), UnexpectedReply),
        (problem(429, "minute", ), RateLimited),
        (NotSent("refused"), Unavailable),
        (NotSent("not permitted", denied=True), NetworkDenied),
    ],
)  # fmt: skip
def test_a_clear_refusal_made_nothing(come, error):
    out, script = writer(come)
    outcome = out.create(SPEC)
    assert (outcome.kind, type(outcome.problem), len(script.calls)) == ("refused", error, 1)


def test_the_fault_in_a_request_is_named():
    come = problem(
        422, "validation failed", errors=[{"location": "body.objectMounts", "message": "unexpected property"}]
    )
    assert "body.objectMounts unexpected property" in str(writer(come)[0].create(SPEC).problem)


@pytest.mark.parametrize(
    "come",
    [
        Unanswered("reset"),
        problem(500, "Something went wrong"),
        answer(502, "<html>"),
        answer(504, ""),
        answer(201, ""),
        answer(201, "[]"),
        answer(201, {}),
        answer(201, {"id": None}),
        answer(201, {"id": "../x"}),
        answer(200, "<html>"),
        answer(204, ""),
        answer(307, "", location="https://elsewhere.example"),
        answer(408, ""),
    ],
)
def test_whatever_is_neither_is_unknown_and_sent_only_once(come):
    out, script = writer(come)
    assert out.create(SPEC).kind == "unknown"
    assert len(script.calls) == 1


WRITES = {
    "stop": (lambda w: w.stop(POD), f"POST v2/pods/{POD}/action", {"action": "stop"}),
    "start": (lambda w: w.start(POD), f"POST v2/pods/{POD}/action", {"action": "start"}),
    "restart": (lambda w: w.restart(POD), f"POST v2/pods/{POD}/action", {"action": "restart"}),
    "label": (lambda w: w.set_label(POD, "gpu1-y"), f"PATCH v2/pods/{POD}", {"name": "gpu1-y"}),
    "destroy": (lambda w: w.destroy(POD), f"DELETE v2/pods/{POD}", None),
}


@pytest.mark.parametrize("name", WRITES)
def test_each_write_is_its_one_request(name):
    act, line, body = WRITES[name]
    out, script = writer(answer(204, ""))
    act(out)
    assert (script.lines, script.bodies) == ([line], [body])


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    ("come", "error"),
    [
        (problem(409, "not legal now"), ConflictingState),
        (problem(500, "x"), ProviderSilent),
        (answer(200, {"error": "internal"}), ProviderSilent),
        (answer(200, "<html>Welcome</html>"), ProviderSilent),
        (answer(200, '{"id": "k3'), ProviderSilent),
        (Unanswered("reset"), ProviderSilent),
        (problem(401, "x"), AuthRejected),
        (problem(429, "x"), RateLimited),
        (answer(404, "<html>"), UnexpectedReply),
        (NotSent("refused"), Unavailable),
    ],
)
def test_a_write_that_did_not_work_is_an_error(name, come, error):
    out, script = writer(come)
    with pytest.raises(error):
        WRITES[name][0](out)
    assert len(script.calls) == 1


def test_destroying_what_is_not_there_is_told_apart_from_success():
    assert writer(answer(204, ""))[0].destroy(POD) == "accepted"
    assert writer(problem(404, "not found"))[0].destroy(POD) == "absent"
    with pytest.raises(InstanceAbsent):
        writer(problem(404, "not found"))[0].stop(POD)


@pytest.mark.parametrize("status", [400, 409, 500])
def test_a_full_host_at_a_start_has_its_own_name(status):
    full = problem(status, "There are not enough free GPUs on the host machine to start this pod.")
    with pytest.raises(HostFull, match="no free GPU") as caught:
        writer(full)[0].start(POD)
    assert "nothing is rented by itself" in caught.value.next_step


def test_the_key_needs_no_call_because_it_came_with_the_create():
    out, script = writer(answer(500, ""))
    out.attach_key(POD, "ssh-ed25519 AAAA")
    assert script.calls == []


def test_a_volume_is_made_only_where_there_is_a_data_centre():
    out, script = writer(CENTERS, answer(201, {"id": "v9"}))
    assert out.create_volume("data", 100, "eu-ro-1").volume_id == "v9"
    assert script.bodies[1] == {"name": "data", "size": 100, "dataCenter": "EU-RO-1"}
    out, script = writer(CENTERS)
    with pytest.raises(UsageError, match="it has EU-CZ-1, EU-RO-1, US-TX-3"):
        out.create_volume("data", 100, "CZ")
    assert len(script.calls) == 1


@pytest.mark.parametrize("id", ["", "..", "a/b", "a?b", "a" * 65])
def test_only_an_id_becomes_part_of_a_path(id):
    out, script = writer(answer(204, ""))
    for act in (out.destroy, out.stop, out.start, out.restart):
        with pytest.raises(UsageError):
            act(id)
    assert script.calls == []
