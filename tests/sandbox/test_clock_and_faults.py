"""The vendor's clock, and faults as data."""

from __future__ import annotations

import http.client
import threading

import pytest

from gpu_skills.sandbox.clock import VirtualClock
from gpu_skills.sandbox.faults import KINDS, Faults, UnknownFault, of_instances
from sandbox_fixture import Wire


def test_a_frozen_clock_moves_by_advance_only_and_timers_run_at_their_own_time():
    clock = VirtualClock(start=1000, frozen=True)
    seen = []
    clock.call_at(1030, lambda: seen.append(("late", clock.now())))
    clock.call_at(1010, lambda: seen.append(("early", clock.now())))
    clock.advance(5)
    assert (seen, clock.now()) == ([], 1005)
    clock.advance(100)
    assert seen == [("early", 1010), ("late", 1030)]
    assert clock.now() == 1105


def test_a_timer_set_by_a_timer_runs_in_the_same_advance_when_it_falls_due():
    clock = VirtualClock(start=0, frozen=True)
    seen = []
    clock.call_at(10, lambda: clock.call_in(10, lambda: seen.append(clock.now())))
    clock.advance(30)
    assert seen == [20]


def test_a_cancelled_timer_does_not_run():
    clock = VirtualClock(start=0, frozen=True)
    seen = []
    clock.call_at(10, lambda: seen.append(1)).cancel()
    clock.advance(30)
    assert seen == []


def test_a_running_clock_runs_with_real_time_and_fires_by_itself():
    clock = VirtualClock()
    fired = threading.Event()
    clock.start()
    clock.call_in(0.05, fired.set)
    assert fired.wait(10)
    clock.stop()


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e12])
def test_the_clock_is_never_turned_back_nor_into_the_absurd(seconds):
    with pytest.raises(ValueError):
        VirtualClock(frozen=True).advance(seconds)


def test_a_failing_timer_is_reported_and_the_others_run():
    clock = VirtualClock(start=0, frozen=True)
    failures, seen = [], []
    clock.on_failure = failures.append
    clock.call_at(1, lambda: 1 / 0)
    clock.call_at(2, lambda: seen.append(2))
    clock.advance(5)
    assert [type(failure) for failure in failures] == [ZeroDivisionError]
    assert seen == [2]


def test_nobody_goes_on_talking_to_a_sandbox_that_has_ended(make_sandbox):
    sandbox = make_sandbox()
    api = Wire(sandbox)
    assert api("GET", "/api/v0/users/current/")[0] == 200
    sandbox.stop()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        api("GET", "/api/v0/users/current/")


def test_a_script_gives_one_fault_per_call_and_then_none():
    faults = Faults()
    faults.script("vast", "create", "ok, lost_reply, 429, ok")
    taken = [set(faults.take("vast", "create")) for _ in range(6)]
    assert taken == [set(), {"lost_reply"}, {"429"}, set(), set(), set()]
    assert faults.take("vast", "list") == {}


@pytest.mark.parametrize(
    ("match", "times", "calls", "expected"),
    [
        ({}, 1, ["create", "list"], [True, False]),
        ({"call": "list"}, 1, ["create", "list", "list"], [False, True, False]),
        ({"call": "list", "nth": 2}, 1, ["list", "list", "list"], [False, True, False]),
        ({"call": "list"}, 2, ["list", "list", "list"], [True, True, False]),
        ({"call": "list"}, 0, ["list"] * 4, [True] * 4),
        ({"provider": "runpod"}, 1, ["list"], [False]),
        ({"instance": "job-1"}, 1, ["destroy"], [True]),
        ({"instance": 7}, 1, ["destroy"], [True]),
        ({"instance": 8}, 1, ["destroy"], [False]),
    ],
)
def test_a_rule_acts_where_it_matches_and_as_often_as_it_says(match, times, calls, expected):
    faults = Faults([{"match": match, "fault": "slow", "times": times}])
    assert ["slow" in faults.take("vast", call, ["7", "job-1"]) for call in calls] == expected


@pytest.mark.parametrize(
    "rules",
    [
        {},
        [1],
        [{"match": [], "fault": "slow"}],
        [{"fault": "explode"}],
        [{"match": {"color": 1}, "fault": "slow"}],
        [{"fault": "slow", "arg": {}}],
        [{"fault": "slow", "args": 3}],
        [{"fault": "slow", "times": -1}],
        [{"match": {"nth": 0}, "fault": "slow"}],
        [{"match": {"nth": True}, "fault": "slow"}],
    ],
)
def test_what_is_no_rule_is_refused_with_the_rules_number_or_the_allowed_names(rules):
    with pytest.raises(UnknownFault):
        Faults().add(rules)


def test_an_unknown_word_in_a_script_is_refused_and_nothing_is_set():
    faults = Faults()
    with pytest.raises(UnknownFault, match="boom"):
        faults.script("vast", "create", "ok, boom")
    assert faults.to_list() == []


def test_faults_of_instances_go_along_with_the_instance_and_those_of_calls_do_not():
    assert of_instances({"slow": {}, "stuck_loading": {"a": 1}, "offer_gone": {}}) == {"stuck_loading": {"a": 1}}
    assert {where for where, _ in KINDS.values()} == {"call", "work", "instance", "account"}
