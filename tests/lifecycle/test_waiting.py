"""Waiting for a machine that boots: what counts as progress, and when it is no use to go on. No machine is needed."""

from __future__ import annotations

import pytest

from gpu_skills.lifecycle.renting.waiting import FLAT_S, QUIET_S, START_S, GaveUp, Seen, Watch, look, pulled_bytes

CAP_S = 3600.0


def after(*looks: Seen, is_start: bool = False, cap_s: float = CAP_S) -> GaveUp | None:
    """The first verdict that ends it, None while waiting is still right."""
    watch = Watch(0.0, cap_s, is_start)
    for seen in looks:
        watch, gave_up = look(watch, seen)
        if gave_up is not None:
            return gave_up
    return None


def booting(at_s: float, said: str = "loading", **more) -> Seen:
    return Seen(at_s, "booting", said, **more)


def test_a_machine_of_which_nothing_is_heard_is_given_up_at_the_limit_and_not_before():
    assert after(booting(0), booting(QUIET_S - 1)) is None
    gave_up = after(booting(0), booting(QUIET_S))
    assert gave_up is not None and gave_up.code == "no_progress" and "loading" in gave_up.reason


def test_a_machine_that_no_list_ever_shows_is_given_up_too():
    gave_up = after(Seen(5, None), Seen(QUIET_S, None))
    assert gave_up is not None and gave_up.code == "no_progress" and "not shown" in gave_up.reason


@pytest.mark.parametrize(
    "moving",
    [
        [booting(n * 500.0, f"step {n}") for n in range(7)],
        [booting(n * 500.0, log=(f"line {n}",)) for n in range(7)],
        [booting(n * 170.0, f"layer: {n + 1}MB/900MB") for n in range(20)],
    ],
)
def test_whatever_moves_is_waited_for_until_the_cap_and_no_longer(moving):
    assert after(*moving) is None
    last = moving[-1]
    gave_up = after(*moving, Seen(CAP_S, last.status, last.said + " and on"))
    assert gave_up is not None and gave_up.code == "setup_cap"


def test_a_pull_whose_bytes_stand_still_is_given_up_after_minutes():
    looks = [booting(0, "a1: 100MB/900MB"), booting(60, "a1: 200MB/900MB")]
    assert after(*looks, booting(60 + FLAT_S - 1, "a1: 200MB/900MB")) is None
    gave_up = after(*looks, booting(60 + FLAT_S, "a1: 200MB/900MB"))
    assert gave_up is not None and gave_up.code == "no_progress"


def test_a_log_that_repeats_the_same_number_of_bytes_is_no_progress():
    looks = [booting(0, log=("a1: 200MB/900MB",)), booting(100, log=("a1: 200MB/900MB", "a1: 200MB/900MB"))]
    gave_up = after(*looks, booting(FLAT_S, log=("a1: 200MB/900MB",) * 3))
    assert gave_up is not None and gave_up.code == "no_progress"


def test_a_running_machine_without_a_banner_has_the_long_limit_even_after_a_pull():
    pulled = [booting(0, "a1: 900MB/900MB"), Seen(10, "running", "up")]
    assert after(*pulled, Seen(10 + FLAT_S + 1, "running", "up")) is None
    gave_up = after(*pulled, Seen(10 + QUIET_S, "running", "up"))
    assert gave_up is not None and gave_up.code == "no_progress"


def test_a_dead_end_ends_it_at_the_very_next_look():
    gave_up = after(booting(0), Seen(5, "stopped", "outbid", dead_end="it is stopped"))
    assert gave_up == GaveUp("dead_end", "it is stopped")
    assert after(booting(0), Seen(5, "terminating")).code == "dead_end"  # type: ignore[union-attr]


def test_what_may_recover_is_waited_for_within_the_limits():
    offline = {"dead_end": "the host is offline", "may_recover": True}
    assert after(booting(0), Seen(5, "unknown", **offline), Seen(300, "booting", "back")) is None
    gave_up = after(booting(0), Seen(5, "unknown", **offline), Seen(5 + QUIET_S, "unknown", **offline))
    assert gave_up is not None and gave_up.code == "no_progress" and "offline" in gave_up.reason


def test_a_stopped_machine_that_was_told_to_start_may_be_stopped_for_a_while():
    stopped = {"status": "stopped", "dead_end": "it is stopped"}
    assert after(Seen(0, **stopped), Seen(START_S - 1, **stopped), is_start=True) is None
    assert after(Seen(0, **stopped), Seen(START_S, **stopped), is_start=True).code == "host_full"  # type: ignore[union-attr]
    gave_up = after(Seen(0, **stopped), booting(5), Seen(10, **stopped), is_start=True)
    assert gave_up is not None and gave_up.code == "dead_end"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["nothing of a pull"], None),
        (["6f28: Downloading [==>   ]  12.5MB/45.6MB"], 12_500_000),
        (["6f28: 12MB/45MB", "9ab1: 1 GB / 2 GB", "6f28: 40MB/45MB"], 1_040_000_000),
        (["a: 512kB/1MB b 3MiB/4MiB"], 3_512_000),
        (["9" * 400 + "MB/" + "9" * 400 + "MB"], None),
        (["1/2 layers", "50% of 3"], None),
    ],
)
def test_the_bytes_of_a_pull_are_read_layer_by_layer(lines, expected):
    assert pulled_bytes(lines) == expected
