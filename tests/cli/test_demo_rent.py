"""`gpu demo --rent` as a newcomer runs it: a real sandbox process, a real machine in it, the whole life of both."""

from __future__ import annotations

import time

import pytest


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
