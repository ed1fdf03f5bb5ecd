"""Holding a machine for review: how it ends, and what is said meanwhile."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest

from fake_clock import FakeClock
from gpu_skills.jobs import hold


def review(clock, seconds, **more):
    told = []
    until = clock.now() + timedelta(seconds=seconds)
    return hold.review(clock, lambda: until, tell=told.append, **more), told


def test_it_is_over_when_the_time_is_up_and_tells_what_is_left_on_the_way():
    clock = FakeClock()
    before = clock.monotonic()
    ending, told = review(clock, 1800)
    assert ending == "over" and clock.monotonic() - before == pytest.approx(1800)
    assert [round(left) for left in told] == [1800, 1500, 1200, 900, 600, 300, 60]


def test_what_somebody_ended_elsewhere_is_not_held_any_longer():
    clock = FakeClock()
    gone = []
    clock.at(100, lambda: gone.append(True))
    ending, _ = review(clock, 1800, is_ended=lambda: bool(gone))
    assert ending == "ended" and clock.monotonic() <= 1000 + 100 + hold.LOOK_S


def test_somebody_may_hold_it_for_longer_meanwhile():
    clock = FakeClock()
    until = [clock.now() + timedelta(seconds=100)]
    clock.at(50, lambda: until.append(clock.now() + timedelta(seconds=500)))
    assert hold.review(clock, lambda: until[-1], tell=lambda left_s: None) == "over"
    assert clock.monotonic() == pytest.approx(1000 + 550)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_asks_politely_interrupts_it_and_later_ones_do_what_they_did_before(number):
    clock = FakeClock()
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    clock.at(100, lambda: os.kill(os.getpid(), number))
    ending, _ = review(clock, 1800)
    assert ending == "interrupted"
    assert {one: signal.getsignal(one) for one in before} == before


def test_the_end_that_was_asked_for_is_not_broken_off_by_one_more_ctrl_c():
    steps = []
    with hold.unhurried():
        os.kill(os.getpid(), signal.SIGINT)
        steps.append("went on")
    assert steps == ["went on"]
    with pytest.raises(KeyboardInterrupt), hold.unhurried():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
