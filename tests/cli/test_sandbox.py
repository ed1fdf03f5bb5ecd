"""`gpu --sandbox`: what it records is the sandbox's own, and real money knows nothing of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from gpu_skills import userdirs
from gpu_skills.cli.context import Context
from gpu_skills.lifecycle.guard import keyproof
from gpu_skills.sandbox import client
from gpu_skills.state import budget
from gpu_skills.state import project as projects

pytestmark = pytest.mark.subprocess


@pytest.fixture
def customer(gpu, tmp_path: Path, monkeypatch):
    """`customer("one")`: a command's world in the sandbox of a project of that name; all are one user's."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    made: list[Path] = []

    def enter(name: str) -> Context:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        made.append(root)
        up = gpu("sandbox", "up", "--parent", str(os.getpid()), "--json", cwd=root)
        assert up.exit_code == 0, up.stderr
        context = Context(cwd=root, environ=dict(os.environ), system_policy=tmp_path / "none.json")
        context.enter_sandbox()
        return context

    yield enter
    for root in made:
        gpu("sandbox", "down", cwd=root)


def reserve(context: Context, usd: int) -> None:
    budget.reserve(
        context.project,
        context.ledger,
        context.clock,
        context.policy,
        intent="a_1",
        account=context.account("vast"),
        provider="vast",
        cost_usd=usd,
        rate_usd_hr=1,
        deadline_h=1,
        environ=context.environ,
    )


def reserved_usd(context: Context):
    return budget.books(context.project, context.ledger, context.clock, context.environ).reserved_usd


def test_what_is_reserved_in_a_sandbox_counts_there_and_against_no_real_ceiling(customer, tmp_path):
    sandbox = customer("one")
    reserve(sandbox, 5)
    assert reserved_usd(sandbox) == 5
    real = Context(cwd=tmp_path / "real", environ=dict(os.environ), system_policy=tmp_path / "none.json")
    projects.init(tmp_path / "real")
    assert reserved_usd(real) == 0
    own = userdirs.state_dir(real.environ)
    assert not own.exists() or not [path for path in own.rglob("*") if path.is_file()]


def test_one_sandbox_knows_nothing_of_what_was_reserved_or_proven_in_another(customer):
    one, other = customer("one"), customer("two")
    reserve(one, 5)
    keyproof.note(one.operator, "vast", one.account("vast"), "proven", "stop")
    assert keyproof.last(one.operator, "vast", one.account("vast"), "stop") == "proven"
    assert keyproof.last(other.operator, "vast", other.account("vast"), "stop") == "unknown"
    assert reserved_usd(other) == 0 and one.operator.account_state != other.operator.account_state


def test_what_a_sandbox_recorded_of_its_user_goes_with_it(customer, gpu):
    before = customer("one")
    reserve(before, 5)
    keyproof.note(before.operator, "vast", before.account("vast"), "proven", "stop")
    kept = userdirs.state_dir(before.environ)
    assert kept.is_dir()
    assert gpu("sandbox", "down", cwd=before.cwd).exit_code == 0
    assert not kept.exists()
    again = customer("one")
    assert reserved_usd(again) == 0
    assert keyproof.last(again.operator, "vast", again.account("vast"), "stop") == "unknown"


def test_what_a_killed_sandbox_left_of_its_user_is_nobodys_and_goes_with_the_next(customer):
    before = customer("one")
    reserve(before, 5)
    running = client.require(before.project.state)
    os.kill(running.pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while client.find(before.project.state) is not None and time.monotonic() < until:
        time.sleep(0.02)
    again = customer("one")
    assert reserved_usd(again) == 0 and not running.user_home.exists()
