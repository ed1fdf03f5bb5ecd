"""What the tests of death in process share."""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("aftermath", "crash.deaths", "dying")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computer itself does not go down here, so nothing has to reach the disk. A log that stays open is read for a
    moment only."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("gpu_skills.providers.runpod.reader._LOG_STREAM_S", 0.05)
