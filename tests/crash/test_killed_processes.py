"""Whole commands killed with SIGKILL at doors picked by chance, on machines that can be logged into."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from aftermath import holds, reconciled, scheduled, wound_up
from crash.customers import Answer, SomeShop
from crash.killed import Victim
from dying import SIDES
from gpu_skills.lifecycle import machines
from lifecycle.conftest import login_key, make_sandbox
from lifecycle.conftest import rig as plain_rig
from races.conftest import rig
from renting import guarded

__all__ = ["login_key", "make_sandbox", "plain_rig", "rig"]
pytestmark = [pytest.mark.subprocess, pytest.mark.slow]
RUN = "cat input.txt > $GPU_OUTPUT_DIR/x"
# How many of each, and how many doors each passes at least.
COMMANDS = {"job run": (10, 80), "setup": (5, 34), "destroy": (5, 22)}


def sample() -> list[tuple[str, str, int, str]]:
    """Twenty of (command, vendor, crossing, side), the same ones each time."""
    chance = random.Random(20)
    picked = []
    for command, (count, crossings) in COMMANDS.items():
        for number in range(count):
            vendor = ("vast", "runpod")[number % 2]
            picked.append((command, vendor, chance.randint(1, crossings), chance.choice(SIDES)))
    return picked


def prepared(rig: Any, vendor: str, command: str) -> tuple[SomeShop, list[str]]:
    """A shop and the command as its user calls it."""
    shop = SomeShop(rig(vendor, real=True, containers=True), real=True)
    guarded(shop, "stop", "destroy")
    done(shop.gpu("init", "--jobs", "--provider", vendor))
    (shop.root / "input.txt").write_text("x")
    if command == "job run":
        plan = done(shop.gpu("plan", "--freeze", "--", RUN)).document["name"]
        return shop, ["job", "run", "--plan", plan, "--yes", "--hold-for", "0"]
    if command == "setup":
        return shop, ["setup", "--yes"]
    done(shop.gpu("setup", "--yes"))
    done(shop.gpu("job", "run", "--", RUN))
    return shop, ["destroy"]


def done(answer: Answer) -> Answer:
    assert answer.exit_code == 0, (answer.document, answer.said)
    return answer


@pytest.mark.parametrize(("command", "vendor", "crossing", "side"), sample())
def test_a_killed_command_is_made_good(rig, tmp_path: Path, command, vendor, crossing, side):
    shop, args = prepared(rig, vendor, command)
    victim = Victim([*args, "--json"], str(shop.root), shop.sandbox.url, crossing, side)
    assert victim.dies(shop.environ), "it got to its end before that door"
    report = scheduled(shop)
    holds(shop, is_clear=report.is_clear)
    answer = shop.gpu(*args)
    if answer.exit_code == 0:
        assert command == "setup" or not shop.burning()
        assert command == "setup" or (shop.root / "gpu-outputs/J-000001/x").read_text() == "x"
    else:
        assert answer.error is not None and answer.error["next_step"], (answer.document, answer.said)
        assert answer.error["code"] in ("provider_silent", "machine_pending"), answer.error
        assert any(m.status == "unknown" for m in machines.all_machines(shop.project)), "only that is a reason"
    reconciled(shop)
    holds(shop)
    wound_up(shop)
