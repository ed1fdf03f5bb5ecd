"""`gpu demo --rent` as a newcomer runs it: a real sandbox process, a real machine in it, the whole life of both."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest

from fake_clock import FakeClock
from gpu_skills.cli.demo_rent import VendorTime
from gpu_skills.sandbox import client


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_newcomer_sees_a_machine_rented_used_and_gone_in_under_two_minutes(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    began = time.monotonic()
    result = gpu("demo", "--rent", "--json", "--seconds", "3", "--dir", str(tmp_path / "demo"))
    assert result.exit_code == 0, result.stderr
    assert time.monotonic() - began < 120
    told = result.document
    assert told["machine_status"] == "destroyed"
    assert told["fuse"]["is_alive"] and told["fuse"]["key"] == "proven"
    assert told["ledger_line"]["status"] == "completed" and told["ledger_line"]["machine_id"] == told["machine"]
    assert told["metrics"]["steps"] > 0
    for step in ("sandbox up", "offers", "sentinel", "plan --freeze", "approve", "job run --plan", "spend", "bill"):
        assert step in result.stderr
    assert "the sandbox has ended, with 0 instances in it" in result.stderr


@pytest.mark.subprocess
def test_long_waits_of_the_demo_move_the_sandbox_and_short_ones_are_waited(gpu, tmp_path):
    assert gpu("sandbox", "up", "--parent", str(os.getpid())).exit_code == 0
    running = client.require(tmp_path / ".pi" / "gpu-sandbox")
    clock = FakeClock()
    began, time_s = clock.now(), VendorTime(clock, running)
    time_s.sleep(5)
    assert clock.now() == began + timedelta(seconds=5) and running.ask("GET", "status")["ahead_s"] == 0
    time_s.sleep(30)
    assert clock.now() == began + timedelta(seconds=5) and running.ask("GET", "status")["ahead_s"] == 30
    assert time_s.now() == began + timedelta(seconds=35)
    assert gpu("sandbox", "down").exit_code == 0
