"""A job with a machine of its own, through the real command line and machines of the sandbox that really run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpu_skills.cli.context import Context
from gpu_skills.lifecycle import keyproof
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.sandbox import Sandbox
from sandbox_fixture import make_sandbox
from vendor_clock import VendorClock

__all__ = ["make_sandbox"]

pytestmark = pytest.mark.subprocess

TRAIN = """
import os, time
out = os.environ["GPU_OUTPUT_DIR"]
print("progress steps=1", flush=True)
os.makedirs(out + "/checkpoint-10")
open(out + "/checkpoint-10/weights", "wb").write(b"w" * 5000)
open(out + "/result.txt", "w").write("done")
"""


@dataclass
class Shop:
    """A project whose jobs are rented for at one vendor of a sandbox. `gpu(...)` is a command of its user."""

    vendor: str
    sandbox: Sandbox
    clock: VendorClock
    root: Path
    call: Callable[..., Any]
    world: dict[str, Any] = field(default_factory=dict)

    def gpu(self, *args: str, **more: Any) -> Any:
        return self.call(*args, cwd=self.root, clock=self.clock, **{**self.world, **more})

    def operator(self) -> Operator:
        """What its commands work with."""
        world = {**self.world, "system_policy": self.root / "no-policy.json"}
        return Context(cwd=self.root, environ=dict(os.environ), clock=self.clock, **world).operator

    def plan(self, *args: str, run: str = "python3 train.py") -> str:
        """Freeze a plan for a job; its name."""
        result = self.gpu("plan", "--json", "--freeze", *args, "--", run)
        assert result.exit_code == 0, result.stderr
        return result.document["name"]

    def run(self, plan: str, *args: str, **more: Any) -> Any:
        return self.gpu("job", "run", "--plan", plan, "--json", *args, **more)

    def ledger(self) -> list[dict[str, Any]]:
        path = self.root / ".pi/gpu/jobs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def machines(self) -> list[dict[str, Any]]:
        return json.loads((self.root / ".pi/gpu/machines.json").read_text())

    def burning(self) -> list[str]:
        return [entry["resource"] for entry in self.sandbox.world.burning()]

    @property
    def creates(self) -> int:
        return self.sandbox.world.calls[self.vendor, "create"]


@pytest.fixture
def shop(make_sandbox, gpu, tmp_path: Path, monkeypatch, home) -> Callable[..., Shop]:
    def make(vendor: str = "vast", *, real: bool = True, **options: Any) -> Shop:
        sandbox = make_sandbox(real=real, **{"seed": 3, "limits": "off", **options})
        monkeypatch.setenv("VAST_URL", sandbox.url)
        monkeypatch.setenv("RUNPOD_API_BASE_URL", sandbox.url)
        monkeypatch.setenv(f"{vendor.upper()}_API_KEY", sandbox.key(vendor))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
        root = tmp_path / "project"
        root.mkdir()
        made = Shop(vendor, sandbox, VendorClock(sandbox), root, gpu, {"account_home": tmp_path / "account"})
        assert made.gpu("init", "--jobs", "--provider", vendor).exit_code == 0
        (root / "train.py").write_text(TRAIN)
        op = made.operator()
        for rights in ("destroy", "stop"):
            keyproof.note(op, vendor, op.account(vendor), "proven", rights)
        return made

    return make


def test_a_job_gets_a_machine_of_its_own_and_leaves_nothing_behind(shop):
    s = shop()
    plan = s.plan("--expect", "result.txt")
    assert s.creates == 0
    result = s.run(plan, "--yes", "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    document = result.document
    assert (document["state"], document["collected"], document["machine_state"]) == ("succeeded", True, "destroyed")
    assert (s.root / "gpu-outputs/J-000001/result.txt").read_text() == "done"
    assert s.creates == 1 and s.burning() == []
    first, last = s.ledger()
    assert first["plan"] == last["plan"] == plan and last["machine_id"] == document["machine"]
    again = s.run(plan)
    assert again.exit_code == 0 and again.document["job"] == "J-000001" and s.creates == 1
