"""A connection that is opened while something else goes on."""

from __future__ import annotations

import threading

import pytest

from gpu_skills.errors import Unreachable
from gpu_skills.lifecycle.ahead import Ahead
from sandbox_fixture import eventually


class Opened:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_it_is_opened_before_anybody_takes_it():
    at_work = threading.Event()

    def open_it() -> Opened:
        at_work.set()
        return Opened()

    ahead = Ahead(open_it)
    assert at_work.wait(10)
    assert not ahead.take().closed


def test_the_error_of_opening_belongs_to_who_takes_it():
    def fails() -> Opened:
        raise Unreachable(host="box", reason="nobody there")

    with pytest.raises(Unreachable, match="nobody there"):
        Ahead(fails).take()


def test_what_nobody_takes_is_closed_even_when_it_comes_late():
    go, opened = threading.Event(), Opened()

    def slow() -> Opened:
        assert go.wait(10)
        return opened

    ahead = Ahead(slow)
    ahead.drop()
    go.set()
    assert eventually(lambda: opened.closed)
