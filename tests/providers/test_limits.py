"""How often a provider is asked: by all processes of a user together, and never at the price of a destroy."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import pytest

from fake_clock import FakeClock
from gpu_skills.clock import SystemClock
from gpu_skills.errors import RateLimited
from gpu_skills.providers.limits import Limit, Limiter, exhausted_for_s
from gpu_skills.providers.vast.client import LIMITS

SLOW = {"create": Limit(1, 4.5, penalty_s=12.0), "search": Limit(3, 60.0), "list": Limit(1, 1.0)}


def limiter(clock, folder: Path | None, account: str = "vast-1") -> Limiter:
    return Limiter("vast", account, SLOW, clock=clock, state_dir=folder)


def test_calls_of_one_kind_keep_their_distance_and_others_do_not_wait(tmp_path):
    clock = FakeClock()
    pace = limiter(clock, tmp_path)
    for endpoint in ("create", "list", "create", "unlimited", "unlimited"):
        pace.wait(endpoint)
    assert clock.slept == [4.5]
    clock.advance(10)
    pace.wait("create")
    assert clock.slept == [4.5]


def test_a_window_allows_a_burst_and_then_waits_for_its_oldest_call(tmp_path):
    clock = FakeClock()
    pace = limiter(clock, tmp_path)
    for _ in range(3):
        pace.wait("search")
        clock.advance(5)
    pace.wait("search")
    assert clock.slept == [45.0]


def test_two_processes_of_one_account_share_the_pace_and_two_accounts_do_not(tmp_path):
    clock = FakeClock()
    limiter(clock, tmp_path).wait("create")
    limiter(clock, tmp_path, "vast-2").wait("create")
    assert clock.slept == []
    limiter(clock, tmp_path).wait("create")
    assert clock.slept == [4.5]
    assert sorted(p.name for p in (tmp_path / "limits").glob("*.json")) == ["vast-1.json", "vast-2.json"]
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in (tmp_path / "limits").glob("*.json"))


def test_callers_at_once_each_get_a_moment_of_their_own(tmp_path):
    """Really at once: the moments are taken under the lock, so no two of them are the same."""
    taken: list[float] = []

    class Recording(SystemClock):
        def sleep(self, seconds: float) -> None:
            taken.append(seconds)

    def work():
        limiter(Recording(), tmp_path).wait("create", is_write=True)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waits = sorted(taken)
    assert len(waits) == 7
    assert all(later - earlier == pytest.approx(4.5, abs=0.6) for earlier, later in itertools.pairwise(waits))


def test_a_read_that_would_queue_too_long_says_so_and_takes_no_place(tmp_path):
    clock = FakeClock()
    stuck = Limiter("vast", "vast-1", {"slow": Limit(1, 100.0)}, clock=clock, state_dir=tmp_path)
    stuck.wait("slow")
    with pytest.raises(RateLimited) as caught:
        stuck.wait("slow")
    assert caught.value.details["retry_after_s"] == 100
    clock.advance(101)
    before = len(clock.slept)
    stuck.wait("slow")
    assert len(clock.slept) == before


def test_a_write_waits_however_long_its_turn_takes(tmp_path):
    clock = FakeClock()
    pace = Limiter("vast", "a", {"destroy": Limit(1, 100.0)}, clock=clock, state_dir=tmp_path)
    pace.wait("destroy", is_write=True)
    pace.wait("destroy", is_write=True)
    assert clock.slept == [100.0]


def test_a_refusal_keeps_that_endpoint_away_for_the_penalty(tmp_path):
    clock = FakeClock()
    pace = limiter(clock, tmp_path)
    pace.learn("create", 429, {})
    pace.wait("list")
    assert clock.slept == []
    pace.wait("create", is_write=True)
    assert clock.slept == [12.0]


def test_a_used_up_quota_stops_reads_and_lets_writes_pass(tmp_path):
    clock = FakeClock()
    pace = limiter(clock, tmp_path)
    pace.learn("list", 200, {"ratelimit": '"minute";r=0;t=12, "hour";r=700;t=800'})
    pace.wait("destroy", is_write=True)
    assert clock.slept == []
    pace.wait("anything")
    assert clock.slept == [12.0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ('"minute";r=12;t=30, "hour";r=2900;t=1800', 0),
        ('"minute";r=0;t=30, "hour";r=0;t=1800', 1800),
        ('"minute"; r=0; t=7', 7),
        ("", 0),
        ("r=0", 0),
        (";r=0;t=99999999999999999999", 0),
        ("\x00,;,=;r=;t=", 0),
    ],
)
def test_the_header_of_a_window_is_read_whatever_it_holds(header, seconds):
    assert exhausted_for_s(header) == seconds


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"create": 3}', b'{"create": {"at": [1e300, "x", null], "until": "y"}}', b"\xff" * 99],
)
def test_a_broken_file_costs_nothing_but_its_memory(tmp_path, content):
    (tmp_path / "limits").mkdir()
    (tmp_path / "limits" / "vast-1.json").write_bytes(content)
    clock = FakeClock()
    pace = limiter(clock, tmp_path)
    pace.wait("create")
    pace.wait("create")
    assert clock.slept == [4.5]


def test_a_clock_that_went_back_does_not_stop_anybody(tmp_path):
    clock = FakeClock()
    limiter(clock, tmp_path).wait("create")
    clock.jump_wall(-86400)
    limiter(clock, tmp_path).wait("create")
    assert clock.slept == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_cannot_be_written_leaves_each_process_its_own_pace(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o500)
    clock = FakeClock()
    pace = limiter(clock, folder)
    pace.wait("create")
    pace.wait("create")
    assert clock.slept == [4.5]


def test_where_the_folder_is_a_file_each_process_keeps_its_own_pace(tmp_path):
    (tmp_path / "limits").write_text("in the way")
    clock = FakeClock()
    pace = limiter(clock, tmp_path)
    pace.wait("create", is_write=True)
    pace.wait("create", is_write=True)
    assert clock.slept == [4.5]


def test_vasts_documented_distances_are_kept():
    documented = {"list": 1, "show": 2, "state": 1, "reboot": 1, "destroy": 3, "create": 4.5, "charges": 1, "ssh": 1}
    assert {name: LIMITS[name].per_s >= seconds for name, seconds in documented.items()} == dict.fromkeys(
        documented, True
    )
    assert all(LIMITS[name].calls == 1 for name in documented)
    assert LIMITS["create"].penalty_s == 12
    assert (LIMITS["search"].calls, LIMITS["search"].per_s >= 60) == (10, True)
