"""Whole commands of one user, in process or each in one of its own, against machines that can be logged into."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_skills.cli import main
from gpu_skills.cli.context import Context
from gpu_skills.lifecycle.guard import keyproof
from races.racers import FarClock, race

TRAIN = """
import os
for n in range(20):
    open(os.environ["GPU_OUTPUT_DIR"] + f"/part-{n}", "wb").write(bytes([n]) * 50_000)
"""


class Terminals:
    """One project at one vendor. `gpu(...)` is (exit code, its JSON document)."""

    def __init__(self, r: Any, root: Path, keys: dict[str, str]):
        self.r, self.root, self.environ = r, root, {**os.environ, **keys}

    def context(self) -> Context:
        clock = FarClock(self.r.sandbox.url)
        policy = self.root / "no-policy.json"
        return Context(
            cwd=self.root,
            environ=self.environ,
            clock=clock,
            system_policy=policy,
            account_home=self.root.parent / "home",
        )

    def gpu(self, *args: str) -> tuple[int, dict[str, Any]]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(sys.stderr):
            code = main.run(_with_json(list(args)), obj=self.context())
        return code, json.loads(out.getvalue().splitlines()[-1])

    def at_once(self, *commands: list[str]) -> list[tuple[int, dict[str, Any]]]:
        outcomes = race(self.r, len(commands), lambda mine, number: self.gpu(*commands[number]))
        assert {outcome.code for outcome in outcomes} == {None}, outcomes
        return [tuple(outcome.value) for outcome in outcomes]


def _with_json(args: list[str]) -> list[str]:
    end = args.index("--") if "--" in args else len(args)
    return [*args[:end], "--json", *args[end:]]


@pytest.fixture
def terminals(rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(vendor: str = "vast", **options: Any) -> Terminals:
        r = rig(vendor, real=True, containers=True, **options)
        root = tmp_path / "work"
        root.mkdir()
        keys = {
            "VAST_URL": r.sandbox.url,
            "RUNPOD_API_BASE_URL": r.sandbox.url,
            f"{vendor.upper()}_API_KEY": r.sandbox.key(vendor),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        here = Terminals(r, root, keys)
        assert here.gpu("init", "--jobs", "--provider", vendor)[0] == 0
        (root / "train.py").write_text(TRAIN)
        op = here.context().operator
        for rights in ("destroy", "stop"):
            keyproof.note(op, vendor, op.account(vendor), "proven", rights)
        return here

    return make


def frozen(here: Terminals, run: str = "python3 train.py") -> str:
    code, document = here.gpu("plan", "--freeze", "--", run)
    assert code == 0, document
    return str(document["name"])
