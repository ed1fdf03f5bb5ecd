"""What Vast's answers mean: offers and their real price, instances and their states, and what is not there."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from urllib.parse import parse_qs, urlsplit

import pytest

from fake_clock import FakeClock
from gpu_skills.errors import (
    AuthRejected,
    InsufficientBalance,
    ProviderSchema,
    RateLimited,
    Unavailable,
    UnexpectedReply,
)
from gpu_skills.providers.base import Requirements
from gpu_skills.providers.vast import VastReader
from gpu_skills.providers.vast.machines import read_machine
from gpu_skills.providers.vast.offers import question, read_offer
from gpu_skills.wire import Unanswered
from providers.replies import vast_instance, vast_offer, vast_page
from providers.wires import Script, answer, vast


def reader(*answers, clock=None) -> tuple[VastReader, Script]:
    script = Script(answers)
    clock = clock or FakeClock()
    return VastReader(vast(script, clock), clock=clock), script


# offers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "need", "rate"),
    [
        (
            {"dph_total": 0.31, "storage_cost": 0.612},
            {"disk_gb": 200},
            "0.47",
        ),  # the disk makes it dearer than it looked
        ({"dph_total": 0.325}, {"disk_gb": 50}, "0.325"),
        ({"dph_total": 0.40}, {"disk_gb": 50}, "0.40"),  # two prices of one thing: the dearer
        ({}, {"disk_gb": 10, "interruptible": True}, "0.125"),  # the floor of a bid, and its disk
        ({"dph_total": None}, {"disk_gb": 1}, "0.304"),  # 8 GB at least
        ({"dph_base": "0.30", "storage_cost": "0.36", "dph_total": "0.30"}, {"disk_gb": 50}, "0.325"),
    ],
)
def test_the_rate_is_all_in_for_the_disk_that_is_wanted(changes, need, rate):
    offer = read_offer(vast_offer(**changes), Requirements(**need))
    assert offer.rate_usd_hr == Decimal(rate)


def test_a_cheap_offer_with_a_dear_disk_is_over_the_cap():
    cheap, dear_disk = vast_offer(id=1, dph_base=0.30, storage_cost=0.36), vast_offer(id=2, storage_cost=0.612)
    for row in (cheap, dear_disk):
        row["dph_total"] = 0.31
    source, _ = reader(answer(200, {"offers": [cheap, dear_disk]}))
    found = source.search(Requirements(disk_gb=200, max_rate_usd_hr=Decimal("0.40")))
    assert [(o.offer_id, o.rate_usd_hr) for o in found.offers] == [("1", Decimal("0.40"))]


@pytest.mark.parametrize(
    "changes",
    [
        {"id": None, "ask_contract_id": None},
        {"gpu_name": None},
        {"num_gpus": 0},
        {"dph_base": None},
        {"dph_base": -1},
        {"storage_cost": None},
        {"storage_cost": "free"},
        {"rentable": False},
    ],
)
def test_an_offer_whose_price_or_name_cannot_be_told_is_none(changes):
    assert read_offer(vast_offer(**changes), Requirements(disk_gb=50)) is None


def test_everything_of_an_offer_comes_in_our_units():
    offer = read_offer(vast_offer(), Requirements(disk_gb=50))
    assert (offer.vram_gb, offer.down_mbps, offer.up_mbps) == (24, 850, 700)
    assert (offer.duration_h, offer.machine_id, offer.host_key) == (240, "4711", "vast:4711")
    assert (offer.reliability, offer.location, offer.cuda, offer.max_disk_gb) == (0.992, "Sweden, SE", 12.8, 640)
    assert offer.storage_usd_hr == Decimal("0.025")


def test_a_place_without_a_region_is_its_country():
    assert read_offer(vast_offer(geolocation=", PL"), Requirements()).location == "PL"
    assert read_offer(vast_offer(geolocation=None), Requirements()).location is None


def test_the_question_names_the_disk_the_kind_and_the_order():
    need = Requirements(gpu="RTX 4090", disk_gb=200, min_down_mbps=500, hours=12, max_rate_usd_hr=Decimal("0.5"))
    asked = question(need, is_narrow=True)
    assert (asked["allocated_storage"], asked["type"], asked["order"]) == (200, "on-demand", [["dph_total", "asc"]])
    assert asked["gpu_name"] == {"in": ["RTX 4090"]}  # a space, as in the API, not the underscore of the command line
    assert (asked["duration"], asked["inet_down"]) == ({"gte": 43200}, {"gte": 500})
    assert question(Requirements(interruptible=True), is_narrow=True)["type"] == "bid"
    assert "gpu_name" not in question(Requirements(gpu="RTX 9999"), is_narrow=True)
    assert question(Requirements(min_vram_gb=24), is_narrow=True)["gpu_ram"]["gte"] < 23034


def test_filters_that_the_server_ignores_are_applied_here():
    rows = [vast_offer(id=n, gpu_name=name) for n, name in enumerate(["RTX 3060", "RTX 4090", "H100 SXM"], start=1)]
    source, script = reader(answer(200, {"offers": rows}))
    found = source.search(Requirements(gpu="RTX 4090"))
    assert [offer.offer_id for offer in found.offers] == ["2"]
    assert len(script.calls) == 2  # the second asks for everything, to say what fell


def test_a_plentiful_answer_takes_one_request():
    source, script = reader(answer(200, {"offers": [vast_offer(id=n) for n in range(1, 5)]}))
    assert len(source.offers(Requirements())) == 4
    assert script.lines == ["POST api/v0/bundles/"]


def test_a_short_answer_is_explained_by_the_whole_market():
    some = [vast_offer(id=1)]
    market = [
        vast_offer(id=1),
        vast_offer(id=2, inet_down=80),
        vast_offer(id=3, duration=3600),
        vast_offer(id=4, dph_base=9),
    ]
    source, script = reader(answer(200, {"offers": some}), answer(200, {"offers": market}))
    found = source.search(Requirements(min_down_mbps=500, hours=5, max_rate_usd_hr=Decimal(1)))
    assert [o.offer_id for o in found.offers] == ["1"]
    removed = {row.filter: row.removed for row in found.filters if row.removed}
    assert removed == {"min_down_mbps": 1, "too_short": 1, "max_rate": 1}
    assert set(script.bodies[1]) == {
        "rentable", "verified", "num_gpus", "type", "order", "limit", "allocated_storage",
    }  # fmt: skip


@pytest.mark.parametrize(
    "come",
    [
        answer(200, {}),
        answer(200, {"offers": None}),
        answer(200, {"offers": {}}),
        answer(200, []),
        answer(200, "<html>"),
        answer(200, ""),
        answer(200, {"success": False, "msg": "something"}),
        answer(200, {"offers": [{"id": 1}, {"id": 2}]}),
    ],
)
def test_a_malformed_answer_to_a_search_is_never_nothing_found(come):
    with pytest.raises(UnexpectedReply):
        reader(come)[0].search(Requirements())


def test_an_empty_market_is_an_empty_market():
    assert reader(answer(200, {"offers": []}))[0].search(Requirements()).offers == []


# instances ------------------------------------------------------------------------------------------------------------


def test_all_pages_are_read_and_the_token_is_passed_on():
    pages = [
        answer(200, vast_page(*[vast_instance(id=n) for n in range(1, 26)], token="t1", total_instances=27)),
        answer(200, vast_page(*[vast_instance(id=n) for n in (26, 27)], total_instances=27)),
    ]
    source, script = reader(*pages)
    assert [m.instance_id for m in source.machines()] == [str(n) for n in range(1, 28)]
    queries = [parse_qs(urlsplit(call.url).query) for call in script.calls]
    assert (queries[0].get("after_token"), queries[1]["after_token"]) == (None, ["t1"])
    assert json.loads(queries[0]["order_by"][0]) == [{"col": "id", "dir": "asc"}]


def test_a_list_shorter_than_announced_is_read_again_and_then_an_error():
    short = answer(200, vast_page(vast_instance(), total_instances=2))
    whole = answer(200, vast_page(vast_instance(id=1), vast_instance(id=2)))
    assert len(reader(short, whole)[0].machines()) == 2
    with pytest.raises(UnexpectedReply, match="1 instances on its pages, 2 announced"):
        reader(short)[0].machines()


@pytest.mark.parametrize(
    "come",
    [
        answer(200, {}),
        answer(200, {"success": True}),
        answer(200, {"success": True, "instances": None}),
        answer(200, {"success": True, "instances": {}}),
        answer(200, {"success": True, "instances": ["x"]}),
        answer(200, vast_page({"label": "no id"})),
        answer(200, vast_page(vast_instance(id="../1"))),
        answer(200, vast_page(vast_instance(), token=7)),
        answer(200, vast_page(vast_instance(), token="always the same")),
        answer(200, {"success": False, "error": "x", "msg": "y"}),
        answer(200, "[]"),
        answer(200, b"\xff"),
        answer(410, {"error": "deprecated_endpoint", "msg": "use v1"}),
        answer(404, "not here"),
        answer(418, "teapot"),
    ],
)
def test_a_list_that_is_not_clearly_one_is_never_no_machines(come):
    with pytest.raises(UnexpectedReply):
        reader(come)[0].machines()


def test_no_machines_is_said_by_an_empty_page_that_succeeded():
    assert reader(answer(200, vast_page()))[0].machines() == []


@pytest.mark.parametrize(
    ("come", "error"),
    [
        (answer(401, {"error": "auth_error", "msg": "Invalid key"}), AuthRejected),
        (answer(403, {"error": "not_authorized"}), AuthRejected),
        (answer(404, {"success": False, "error": "auth_error", "msg": "Invalid user key"}), AuthRejected),
        (answer(400, {"error": "missing_billing", "msg": "no credit"}), InsufficientBalance),
        (answer(400, {"error": "invalid_request", "msg": "bad column"}), ProviderSchema),
        (answer(429, "API requests too frequent: endpoint threshold=1.0"), RateLimited),
        (answer(500, "oops"), Unavailable),
        (Unanswered("connection reset"), Unavailable),
    ],
)
def test_each_failure_has_its_own_class_for_lists_and_for_one(come, error):
    for ask in (lambda r: r.machines(), lambda r: r.machine("20517"), lambda r: r.check_key()):
        with pytest.raises(error):
            ask(reader(come)[0])


@pytest.mark.parametrize(
    "come",
    [
        answer(200, {"instances": None}),
        answer(404, {"success": False, "error": "no_such_instance", "msg": "gone"}),
        answer(404, {"success": False, "error": "not_found"}),
        answer(200, {"success": False, "error": "no_such_instance"}),
    ],
)
def test_absent_is_what_an_answer_clearly_says(come):
    assert reader(come)[0].machine("20517") is None


@pytest.mark.parametrize(
    "come",
    [
        answer(404, "<html>nginx</html>"),
        answer(404, {}),
        answer(404, {"error": "no_such_user"}),
        answer(200, {}),
        answer(200, {"instances": {}}),
        answer(200, {"instances": []}),
        answer(200, {"instances": vast_instance(id=1)}),
        answer(200, "null"),
        answer(200, ""),
    ],
)
def test_anything_else_is_not_absent(come):
    with pytest.raises(UnexpectedReply):
        reader(come)[0].machine("20517")


@pytest.mark.parametrize(
    ("changes", "status", "dead_end"),
    [
        ({}, "running", None),
        ({"actual_status": None, "cur_state": "running"}, "booting", None),
        ({"actual_status": "created", "status_msg": None}, "booting", None),
        ({"actual_status": "loading", "status_msg": "Pulling fs layer"}, "booting", None),
        ({"actual_status": "loading", "status_msg": "0 terrors"}, "booting", None),
        (
            {"actual_status": "created", "status_msg": "Error response from daemon: OCI runtime"},
            "booting",
            "does not start",
        ),
        ({"actual_status": "loading", "status_msg": "manifest unknown"}, "booting", "does not start"),
        ({"actual_status": "exited"}, "unknown", "exited"),
        ({"actual_status": "unknown"}, "unknown", "no sign of life"),
        ({"actual_status": "offline"}, "unknown", "offline"),
        ({"actual_status": "frozen"}, "unknown", None),
        ({"actual_status": "a word of tomorrow"}, "unknown", None),
        ({"actual_status": 7}, "unknown", None),
        ({"intended_status": "stopped"}, "stopping", None),
        ({"actual_status": "exited", "intended_status": "stopped"}, "stopped", "unless started"),
        ({"actual_status": "stopped"}, "stopped", "unless started"),
        (
            {"actual_status": None, "intended_status": "stopped", "cur_state": "stopped", "next_state": "stopped"},
            "stopped",
            "unless started",
        ),
        ({"actual_status": "stopped", "is_bid": True, "dph_base": 0.10, "min_bid": 0.15}, "stopped", "outbid"),
        ({"next_state": "unloaded"}, "terminating", None),
    ],
)
def test_a_state_and_its_dead_end(changes, status, dead_end):
    machine = read_machine(vast_instance(**changes))
    assert machine.status == status
    assert (dead_end is None) == (machine.dead_end is None)
    assert dead_end is None or dead_end in machine.dead_end


def test_hosts_that_may_come_back_are_told_apart():
    assert [read_machine(vast_instance(actual_status=s)).may_recover for s in ("offline", "unknown", "exited")] == [
        True,
        True,
        False,
    ]
    outbid = read_machine(vast_instance(actual_status="stopped", is_bid=True, dph_base=0.10, min_bid=0.15))
    assert outbid.conditions == ("outbid",)


def test_a_stopped_machine_burns_its_disk_by_the_dearer_reading():
    stopped = read_machine(
        vast_instance(
            actual_status="stopped", intended_status="stopped", instance={"totalHour": 0.05}, storage_total_cost=0.02
        )
    )
    assert (stopped.burn_usd_hr, stopped.rate_usd_hr) == (Decimal("0.05"), Decimal("0.325"))
    assert read_machine(vast_instance()).burn_usd_hr == Decimal("0.325")
    assert read_machine(vast_instance(dph_base=0.9)).burn_usd_hr == Decimal("0.925")


def test_both_ways_in_are_told_and_the_address_is_clean():
    ways = read_machine(vast_instance()).ways
    assert [(w.kind, w.endpoint.host, w.endpoint.port, w.endpoint.user) for w in ways] == [
        ("direct", "203.0.113.9", 41022, "root"),
        ("proxy", "ssh4.vast.ai", 20516, "root"),
    ]
    jupyter = read_machine(vast_instance(image_runtype="jupyter_direc ssh_direc ssh_proxy")).ways
    assert [w.endpoint.port for w in jupyter] == [41022, 20516, 20517]


@pytest.mark.parametrize(
    "changes",
    [
        {"ports": None},
        {"ports": {}},
        {"ports": {"22/tcp": None}},
        {"ports": {"22/tcp": [None]}},
        {"ports": [22]},
        {"ports": {"22/tcp": [{"HostPort": "0"}]}},
        {"ports": {"22/tcp": [{"HostPort": "99999"}]}},
        {"ports": {"22/tcp": [{"HostPort": "41022; rm"}]}},
        {"public_ipaddr": "-oProxyCommand=evil"},
        {"public_ipaddr": "a b"},
        {"public_ipaddr": ""},
        {"public_ipaddr": None},
    ],
)
def test_a_direct_way_that_cannot_be_used_is_left_out_and_the_proxy_stays(changes):
    assert [w.kind for w in read_machine(vast_instance(**changes)).ways] == ["proxy"]


def test_a_machine_that_does_not_run_has_no_way_in():
    assert read_machine(vast_instance(actual_status="stopped", intended_status="stopped")).ways == ()


def test_the_environment_of_an_instance_is_not_taken_along():
    assert "made-up-secret" not in repr(read_machine(vast_instance()))


# money and logs -------------------------------------------------------------------------------------------------------


def charge(**changes):
    return {
        "start": 1767300000,
        "end": 1767303600,
        "type": "instance",
        "source": "instance-20517",
        "amount": 0.331,
        "metadata": {"label": "x"},
        "items": [
            {"type": "gpu", "amount": 0.30},
            {"type": "disk", "amount": 0.025},
            {"type": "bwd", "amount": 0.006},
        ],
        **changes,
    }


WHEN = (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC))


def test_charges_are_told_by_kind_over_all_pages():
    source, script = reader(
        answer(200, {"success": True, "results": [charge()], "next_token": "n"}),
        answer(200, {"success": True, "results": [charge(source="instance-7", items=[])], "next_token": None}),
    )
    charges = source.charges(*WHEN)
    assert [(c.instance_id, c.kind, c.amount_usd) for c in charges] == [
        ("20517", "gpu", Decimal("0.3")),
        ("20517", "disk", Decimal("0.025")),
        ("20517", "download", Decimal("0.006")),
        ("7", "other", Decimal("0.331")),
    ]
    filters = json.loads(parse_qs(urlsplit(script.calls[0].url).query)["select_filters"][0])
    assert filters["day"] == {"gte": 1767225600, "lte": 1767312000}


def test_money_whose_kind_is_not_told_is_not_lost():
    charges = reader(answer(200, {"results": [charge(amount=0.5)]}))[0].charges(*WHEN)
    assert sum(c.amount_usd for c in charges) == Decimal("0.5")
    assert charges[-1].kind == "other"


@pytest.mark.parametrize(
    "body", [{"success": False, "msg": "missing range"}, {}, {"results": None}, {"results": [charge(source="x")]},
             {"results": [charge(amount=None)]}]
)  # fmt: skip
def test_charges_that_cannot_be_read_are_an_error(body):
    with pytest.raises(UnexpectedReply):
        reader(answer(200, body))[0].charges(*WHEN)


def test_the_balance_is_the_credit_that_can_be_spent():
    assert reader(answer(200, {"credit": 12.5, "balance": 3}))[0].balance().credit_usd == Decimal("12.5")
    assert reader(answer(200, {"credit": None}))[0].balance().credit_usd is None


def test_a_log_is_fetched_without_the_key_from_where_it_is_said_to_be():
    clock = FakeClock()
    source, script = reader(
        answer(200, {"success": True, "result_url": "https://logs.example.com/20517?sig=x"}),
        answer(404, "not yet"),
        answer(200, "one\ntwo\nthree\n"),
        clock=clock,
    )
    assert source.log_lines("20517", lines=2) == ["two", "three"]
    assert [call.key is None for call in script.calls] == [False, True, True]
    assert clock.slept == [0.5]
