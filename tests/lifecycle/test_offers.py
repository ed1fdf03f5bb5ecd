"""What a machine costs in the end, in which order machines are tried, and what is remembered of them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_clock import FakeClock
from gpu_skills import schemas
from gpu_skills.lifecycle import memory
from gpu_skills.lifecycle.memory import FIRST_COOLDOWN, HALF_LIFE, LONGEST_COOLDOWN, HostMemory
from gpu_skills.lifecycle.plans.offers import BOOT_S, IMAGE_GB, Use, cooling, estimate, rank, row
from gpu_skills.providers.base import FilterCount, Offer, Search
from gpu_skills.state import project as projects

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
OFFER = Offer("vast", "1", Decimal("0.36"), "RTX 4090", 1, 24, down_mbps=960, reliability=0.99, machine_id="11")


# totals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offer", "use", "known", "startup_s", "download_s", "total"),
    [
        # 6 GB of image at 480 Mb/s are 100 s, after 90 s: 190 s of start-up
        ({}, Use(1), None, 190, 0, "0.379"),
        ({}, Use(10), None, 190, 0, "3.619"),
        # 54 GB more at 480 Mb/s: 900 s
        ({}, Use(1, 54), None, 190, 900, "0.469"),
        # traffic at a cent a GB: 60 GB
        ({"download_usd_gb": Decimal("0.01")}, Use(1, 54), None, 190, 900, "1.069"),
        # measured before: 60 s until SSH, 1,200 Mb/s
        ({}, Use(1, 54), HostMemory(time_to_ssh_s=60, down_mbps=1200), 60, 360, "0.402"),
        # no speed stated: 200 Mb/s
        ({"down_mbps": None}, Use(1), None, 330, 0, "0.393"),
        ({"rate_usd_hr": Decimal(0)}, Use(1), None, 190, 0, "0"),
    ],
)
def test_the_total_holds_start_up_download_and_traffic(offer, use, known, startup_s, download_s, total):
    assert (BOOT_S, IMAGE_GB) == (90, 6)
    made = estimate(replace(OFFER, **offer), use, known)
    assert (made.startup_s, made.download_s) == (startup_s, download_s)
    assert round(made.total_usd, 6) == Decimal(total)


def test_a_cheap_rate_with_a_slow_net_can_be_the_dearer_choice():
    slow = replace(OFFER, offer_id="slow", rate_usd_hr=Decimal("0.30"), down_mbps=80, machine_id="22")
    searches = {"vast": Search([slow, OFFER], 2)}
    by_total = rank(searches, Use(0.5, 20), {}, now=NOW)
    by_rate = rank(searches, Use(0.5, 20), {}, now=NOW, by="rate")
    assert [e.offer.offer_id for e in by_total.estimates] == ["1", "slow"]
    assert [e.offer.offer_id for e in by_rate.estimates] == ["slow", "1"]


def test_all_providers_stand_in_one_order_and_equal_prices_in_a_steady_one():
    offers = [
        replace(OFFER, offer_id="b", machine_id=None, reliability=0.96),
        replace(OFFER, offer_id="a", machine_id=None, reliability=0.96),
        replace(OFFER, offer_id="z", machine_id=None, reliability=0.999),
    ]
    other = replace(OFFER, provider="runpod", offer_id="p", rate_usd_hr=Decimal("0.35"))
    ranking = rank({"vast": Search(offers, 3), "runpod": Search([other], 1)}, Use(1), {}, now=NOW)
    assert [e.offer.offer_id for e in ranking.estimates] == ["p", "z", "a", "b"]


def test_a_machine_on_cooldown_falls_and_is_counted():
    bad = HostMemory().struck("ssh never answered", NOW)
    table = [FilterCount("gpu", "RTX 4090", 3, 2)]
    searches = {"vast": Search([OFFER, replace(OFFER, offer_id="2", machine_id="22")], 5, table)}
    ranking = rank(searches, Use(1), {"vast:11": bad}, now=NOW + timedelta(hours=1))
    assert [e.offer.offer_id for e in ranking.estimates] == ["2"]
    assert [(f.filter, f.removed, f.left) for f in ranking.filters["vast"]] == [("gpu", 3, 2), ("cooldown", 1, 1)]
    later = rank(searches, Use(1), {"vast:11": bad}, now=NOW + FIRST_COOLDOWN + timedelta(seconds=1))
    assert len(later.estimates) == 2
    assert cooling({"vast:11": bad}, NOW) == [
        {"machine_id": "vast:11", "reason": "ssh never answered", "until": "2026-01-02T09:04:05Z"}
    ]


@given(
    hours=st.floats(0.01, 1000),
    download=st.floats(0, 1000),
    mbps=st.one_of(st.none(), st.floats(0, 100_000)),
    rate=st.decimals(0, 100, places=4),
    known=st.one_of(
        st.none(),
        st.builds(
            HostMemory,
            down_mbps=st.floats(0, allow_nan=False, allow_infinity=False),
            time_to_ssh_s=st.floats(0, allow_nan=False, allow_infinity=False),
        ),
    ),
)
def test_a_total_is_a_number_and_never_less_than_the_hours_alone(hours, download, mbps, rate, known):
    made = estimate(replace(OFFER, rate_usd_hr=rate, down_mbps=mbps), Use(hours, download), known)
    json.dumps(row(made, Use(hours, download)), allow_nan=False)
    assert made.total_usd >= rate * Decimal(str(hours)) and made.total_usd.is_finite()


# memory ---------------------------------------------------------------------------------------------------------------


def test_the_pause_doubles_with_each_failure_and_is_forgiven_with_time():
    once = HostMemory().struck("a", NOW)
    assert once.cooldown_until - NOW == FIRST_COOLDOWN
    twice = once.struck("b", NOW)
    assert twice.cooldown_until - NOW == 2 * FIRST_COOLDOWN
    assert (twice.failures, twice.last_failure) == (2, "b")
    much_later = twice.struck("c", NOW + 10 * HALF_LIFE)
    assert much_later.cooldown_until - (NOW + 10 * HALF_LIFE) < 1.01 * FIRST_COOLDOWN
    many = HostMemory()
    for _ in range(40):
        many = many.struck("x", NOW)
    assert many.cooldown_until - NOW == LONGEST_COOLDOWN


def test_a_clock_that_went_back_makes_no_failure_weigh_more():
    assert HostMemory().struck("a", NOW).strikes_at(NOW - timedelta(days=400)) == 1


def test_measurements_are_blended_and_a_failure_keeps_them():
    known = HostMemory().started(NOW, down_mbps=400, time_to_ssh_s=100)
    assert (known.down_mbps, known.time_to_ssh_s, known.successes) == (400, 100, 1)
    known = known.started(NOW, down_mbps=800, time_to_ssh_s=None)
    assert (known.down_mbps, known.time_to_ssh_s) == (600, 100)
    assert known.struck("x", NOW).down_mbps == 600
    assert known.started(NOW, down_mbps=0, time_to_ssh_s=-5).down_mbps == 600


@pytest.fixture
def project(tmp_path: Path):
    return projects.init(tmp_path)


def test_what_is_remembered_is_found_again_and_fits_its_schema(project):
    clock = FakeClock()
    memory.remember_failure(project, "vast:11", "stuck in loading\x1b[2J", clock=clock)
    memory.remember_start(project, "vast:22", clock=clock, down_mbps=512.25, time_to_ssh_s=44)
    known = memory.load(project)
    assert known["vast:11"].is_cooling(clock.now()) and known["vast:11"].strikes == 1
    assert (known["vast:22"].down_mbps, known["vast:22"].time_to_ssh_s) == (512.25, 44)
    record = json.loads(project.path("memory.json").read_text())
    assert schemas.problems(record, "memory") == []


def test_what_others_wrote_beside_it_stays(project):
    project.path("memory.json").write_text('{"note": "mine", "hosts": {"vast:11": {"colour": "red", "failures": 2}}}')
    memory.remember_failure(project, "vast:11", "again", clock=FakeClock())
    record = json.loads(project.path("memory.json").read_text())
    assert record["note"] == "mine" and record["hosts"]["vast:11"]["colour"] == "red"
    assert record["hosts"]["vast:11"]["failures"] == 3


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", '{"hosts": []}', '{"hosts": {"a": 3}}', '{"hosts": {"a": {"strikes": "x", "struck_at": "yesterday"}}}',
     '{"hosts": {"a": {"cooldown_until": "2026-01-02", "down_mbps": -1, "failures": true}}}'],
)  # fmt: skip
def test_entries_that_cannot_be_read_are_as_if_they_were_not_there(project, content):
    project.path("memory.json").write_text(content)
    assert all(known == HostMemory() for known in memory.load(project).values())


def test_the_memory_does_not_grow_for_ever(project, monkeypatch):
    monkeypatch.setattr(memory, "MAX_HOSTS", 3)
    clock = FakeClock()
    for number in range(5):
        clock.advance(60)
        memory.remember_failure(project, f"vast:{number}", "x", clock=clock)
    assert set(memory.load(project)) == {"vast:2", "vast:3", "vast:4"}
