"""`gpu offers` over everything that could be used: own hosts and what can be rented, in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_clock import FakeClock
from gpu_skills.errors import MachineLacks
from gpu_skills.lifecycle import memory
from gpu_skills.state import project as projects
from gpu_skills.wire import Answer, Call, NotSent
from providers.replies import gpu_type, vast_offer
from providers.wires import KEY, answer


class Market:
    """Both vendors behind one wire. What is None answers with an error of that vendor."""

    def __init__(self, vast=None, runpod=None, failure: Answer | Exception | None = None):
        self.vast, self.runpod, self.failure = vast, runpod, failure
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> Answer:
        self.calls.append(call)
        rows = self.vast if "vast.ai" in call.url else self.runpod
        if rows is None:
            if isinstance(self.failure, Exception):
                raise self.failure
            return self.failure or answer(500, "oops")
        return answer(200, {"offers": rows} if "vast.ai" in call.url else {"gpus": rows})


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    root = tmp_path / "work"
    projects.init(root)
    monkeypatch.setenv("VAST_API_KEY", KEY)
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    return root


def nobody(machine):
    raise MachineLacks(host=machine.host, what="python3")


@pytest.fixture
def offers(gpu, place):
    def call(*args: str, market: Market, **world):
        world = {"clock": FakeClock(), "connect": nobody, **world}
        return gpu("offers", *args, cwd=place, wire=market, **world)

    return call


def test_all_providers_stand_in_one_table_sorted_by_total(offers):
    market = Market([vast_offer(id=1, dph_base=0.8, dph_total=0.8), vast_offer(id=2), vast_offer(id=3)], [gpu_type()])
    result = offers("--gpu", "RTX 4090", "--hours", "3", "--json", market=market)
    assert result.exit_code == 0
    rows = [(o["provider"], o["offer_id"]) for o in result.document["offers"] if o["fits"]]
    assert rows == [
        ("vast", "2"), ("vast", "3"), ("runpod", "NVIDIA GeForce RTX 4090"), ("vast", "1"),
    ]  # fmt: skip
    totals = [o["total_usd"] for o in result.document["offers"] if o["fits"]]
    assert totals == sorted(totals)
    cheapest = result.document["offers"][0]
    assert (cheapest["rate_usd_hr"], cheapest["machine_id"], cheapest["down_mbps"]) == (0.35, "4711", 850)
    assert (cheapest["duration_h"], cheapest["location"], cheapest["reliability"]) == (240, "Sweden, SE", 0.992)
    assert result.document["offers"][-1]["why_not"]  # this machine, which does not fit, stands last


def test_the_flags_reach_the_question_and_the_ceiling_is_the_stricter_one(offers, place):
    (place / "gpu.yaml").write_text("provider: vast\ncompute: {max_rate_usd_hr: 0.5, disk_gb: 80, gpu: RTX 4090}\n")
    market = Market([vast_offer()] * 5, [])
    offers("--max-rate", "0.9", "--hours", "12", "--min-down-mbps", "500", "--interruptible", "--json", market=market)
    body = json.loads(next(call.body for call in market.calls if "vast.ai" in call.url))
    assert (body["dph_total"], body["duration"], body["inet_down"]) == ({"lte": 0.5}, {"gte": 43200}, {"gte": 500})
    assert (body["type"], body["allocated_storage"], body["gpu_name"]) == ("bid", 80, {"in": ["RTX 4090"]})
    offers("--max-rate", "0.3", "--disk-gb", "20", "--json", market=market)
    body = json.loads([call.body for call in market.calls if "vast.ai" in call.url][-2])
    assert (body["dph_total"], body["allocated_storage"]) == ({"lte": 0.3}, 20)


def test_nothing_that_fits_is_an_error_with_the_table_of_what_fell(offers):
    market = Market([vast_offer(id=1, inet_down=80), vast_offer(id=2, duration=18000), vast_offer(id=3, dph_base=2)])
    result = offers(
        "--provider", "vast", "--min-down-mbps", "500", "--hours", "12", "--max-rate", "1", "--json", market=market
    )
    assert (result.exit_code, result.error["code"]) == (5, "no_offers")
    told = {row["filter"]: (row["removed"], row["left"]) for row in result.error["details"]["filters"]["vast"]}
    assert (told["min_down_mbps"], told["too_short"], told["max_rate"]) == ((1, 2), (1, 1), (1, 0))
    assert "too_short (12 h or longer) removed 1, 1 left" in result.stderr


def test_few_that_fit_come_with_the_table_too(offers):
    market = Market([vast_offer(id=1), vast_offer(id=2, reliability2=0.5)], [])
    result = offers("--provider", "vast", "--json", market=market)
    assert [o["offer_id"] for o in result.document["offers"]] == ["1"]
    assert "vast, 2 looked at: reliability (0.95 or more) removed 1, 1 left" in result.stderr


def test_the_reliability_floor_holds_whatever_the_order(offers):
    stated = enumerate((0.5, 0.99, 0.98, 0.97), start=1)
    market = Market([vast_offer(id=n, dph_base=0.1 * n, reliability2=reliability) for n, reliability in stated])
    result = offers("--provider", "vast", "--sort", "total", "--json", market=market)
    assert [o["offer_id"] for o in result.document["offers"]] == ["2", "3", "4"]


def test_a_provider_that_fails_hides_no_other_and_is_not_taken_for_empty(offers):
    result = offers("--gpu", "RTX 4090", "--json", market=Market(None, [gpu_type()]))
    assert result.exit_code == 0
    [vast, runpod] = result.document["providers"]
    assert (vast["state"], vast["error"]["code"], runpod["state"]) == ("failed", "unavailable", "searched")
    assert "vast failed" in result.stderr
    result = offers("--gpu", "RTX 4090", "--json", market=Market(None, []))
    assert (result.exit_code, result.error["code"]) == (5, "unavailable")
    result = offers("--provider", "vast", "--json", market=Market(failure=answer(401, {"error": "auth_error"})))
    assert (result.exit_code, result.error["code"]) == (5, "auth_rejected")


def test_a_network_that_is_denied_is_no_outage(offers):
    market = Market(failure=NotSent("Operation not permitted", denied=True))
    result = offers("--provider", "vast", "--json", market=market)
    assert (result.exit_code, result.error["code"]) == (3, "network_denied")
    assert len(market.calls) == 1 and "external-access" in result.stderr


def test_without_a_key_a_provider_is_passed_over_and_asked_for_it_is_usage(offers, monkeypatch):
    monkeypatch.delenv("VAST_API_KEY")
    market = Market([vast_offer()], [gpu_type()])
    result = offers("--gpu", "RTX 4090", "--json", market=market)
    assert [p["state"] for p in result.document["providers"]] == ["no_credential", "searched"]
    assert {call.url.split("/")[2] for call in market.calls} == {"api.runpod.io"}
    result = offers("--provider", "vast", "--json", market=market)
    assert (result.exit_code, result.error["code"]) == (2, "missing_credential")


def test_a_wrong_place_or_provider_is_usage(offers):
    def centers(call: Call) -> Answer:
        return answer(200, {"dataCenters": [{"id": "EU-RO-1"}]})

    result = offers("--provider", "runpod", "--location", "CZ", "--json", market=centers)
    assert (result.exit_code, result.error["details"]["allowed"]) == (2, ["EU-RO-1"])
    assert offers("--provider", "nobody", market=Market()).exit_code == 2


def test_a_machine_that_failed_lately_is_left_alone_and_one_that_is_known_uses_what_was_measured(offers, place):
    project, clock = projects.find(place), FakeClock()
    memory.remember_failure(project, "vast:11", "ssh never answered", clock=clock)
    memory.remember_start(project, "vast:22", clock=clock, time_to_ssh_s=33, down_mbps=700)
    market = Market([vast_offer(id=n, machine_id=m) for n, m in ((1, 11), (2, 22), (3, 33))])
    result = offers("--provider", "vast", "--json", market=market, clock=clock)
    shown = {o["machine_id"]: (o["is_measured"], o["startup_s"]) for o in result.document["offers"]}
    assert shown == {"22": (True, 33), "33": (False, 203)}
    assert result.document["cooling"][0]["reason"] == "ssh never answered"
    filters = result.document["providers"][0]["filters"]
    assert filters[-1] == {"filter": "cooldown", "wanted": "no recent failure of this machine", "removed": 1, "left": 2}


def test_a_provider_that_answered_is_put_on_record_without_its_key_and_not_in_audit(offers, place):
    market = Market([vast_offer()] * 4, [gpu_type()])
    offers("--mode", "audit", "--gpu", "RTX 4090", "--json", market=market)
    assert projects.find(place).path("providers.json").read_text().strip() in ("[]", "")
    offers("--gpu", "RTX 4090", "--json", market=market)
    text = projects.find(place).path("providers.json").read_text()
    assert [(r["id"], r["credential_source"]) for r in json.loads(text)] == [
        ("vast", "VAST_API_KEY"), ("runpod", "RUNPOD_API_KEY"),
    ]  # fmt: skip
    assert KEY not in text
    before = projects.find(place).path("providers.json").stat().st_mtime_ns
    offers("--gpu", "RTX 4090", "--json", market=market)
    assert projects.find(place).path("providers.json").stat().st_mtime_ns == before


def test_the_table_for_people_has_a_line_for_each_offer(offers):
    result = offers("--provider", "vast", market=Market([vast_offer(id=n) for n in (1, 2, 3)]))
    header, *lines = result.stdout.splitlines()
    assert header.split()[:3] == ["PROVIDER", "OFFER", "MACHINE"] and len(lines) == 3
    assert "1 × RTX 4090" in lines[0] and "$0.35" in lines[0]


def test_rows_beyond_the_limit_are_counted(offers):
    market = Market([vast_offer(id=n) for n in range(1, 31)])
    result = offers("--provider", "vast", "--limit", "5", "--json", market=market)
    assert (len(result.document["offers"]), result.document["left_out"]) == (5, 25)


def test_a_hostile_env_file_cannot_redirect_a_key(offers, place, monkeypatch):
    for name in ("VAST_API_KEY", "HTTPS_PROXY", "https_proxy", "all_proxy", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    (place / ".env").write_text(
        f"VAST_API_KEY={KEY}\nVAST_URL=http://127.0.0.1:9\nRUNPOD_API_BASE_URL=https://evil.example\n"
        "HTTPS_PROXY=http://evil.example\nREQUESTS_CA_BUNDLE=evil.pem\n"
    )
    market = Market([vast_offer(id=n) for n in (1, 2, 3)], [gpu_type()])
    assert offers("--json", "--gpu", "RTX 4090", market=market).exit_code == 0
    assert {call.url.split("/")[2] for call in market.calls} == {"console.vast.ai", "api.runpod.io"}
    assert {(call.proxy, call.ca_bundle) for call in market.calls} == {(None, None)}


def test_a_rented_provider_in_gpu_yaml_never_runs_a_job_on_this_machine(gpu, place):
    (place / "gpu.yaml").write_text("provider: vast\n")
    result = gpu("setup", "--json", cwd=place, wire=Market([vast_offer()]))
    assert (result.exit_code, result.error["code"]) == (4, "approval_missing")
    assert gpu("status", "--json", cwd=place).document["machines"] == []


def test_the_scaffold_knows_the_rented_providers(gpu, place):
    assert gpu("init", "--jobs", "--provider", "vast", cwd=place).exit_code == 0
    assert "provider: vast" in (place / "gpu.yaml").read_text()
