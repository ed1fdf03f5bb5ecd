"""A project that rents for its jobs, used through the real command line, on machines that are quick to have.

`SomeShop(rig("vast"))` is a rig whose commands are called with `gpu(...)`. Its machines are those of the vendor; in
each runs the real runner, as a process here instead of behind SSH, and jobs, outputs and sessions are real. What the
runner would learn from a container, its GPU and its fuse, is played (renting.PlayedMachine). With real=True nothing is
played: the machines are the sandbox's containers, reached over SSH.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills.cli import main
from gpu_skills.cli.context import Context
from gpu_skills.errors import Unreachable
from gpu_skills.lifecycle.connect import Link
from gpu_skills.remote.session import Session
from gpu_skills.remote.transport import LocalTransport
from gpu_skills.state.project import Project
from rented_cli import KEY_NAMES
from renting import PlayedMachine

_PLAYED = ("fuse", "probe")


class RunnerHere:
    """The far end: the runner of one instance, whose disk goes with the instance."""

    def __init__(self, played: PlayedMachine, session: Session):
        self._played, self._session = played, session

    def call(self, verb: str, args: dict[str, Any] | None = None, *more: Any, **options: Any) -> dict[str, Any]:
        if verb in _PLAYED:
            return self._played.call(verb, dict(args or {}))
        return self._session.call(verb, args, *more, **options)

    def run_program(self, source: str, asked: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        return self._played.run_program(source, asked, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@dataclass(frozen=True)
class Answer:
    """documents: what a command printed; error: of the last one, None when it has none."""

    exit_code: int
    documents: tuple[dict[str, Any], ...]
    said: str

    @property
    def document(self) -> dict[str, Any]:
        return self.documents[-1] if self.documents else {}

    @property
    def error(self) -> dict[str, Any] | None:
        return self.document.get("error")


@dataclass
class SomeShop:
    """What aftermath asks of a rig, and the commands of its user."""

    rig: Any
    real: bool = False
    op: Any = None
    notices: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        r = self.rig
        self.vendor, self.sandbox, self.clock, self.root = r.vendor, r.sandbox, r.clock, r.project.root
        self.environ: dict[str, str] = {**r.op.environ, KEY_NAMES[r.vendor]: r.sandbox.key(r.vendor)}
        Path(self.environ["HOME"]).mkdir(parents=True, exist_ok=True)
        self.disks = self.root.parent / "disks"
        self.op = self._context().operator

    @property
    def project(self) -> Project:
        return self.op.project

    @property
    def creates(self) -> int:
        return self.rig.creates

    def burning(self) -> set[str]:
        return self.rig.burning()

    def billed_usd(self) -> Decimal:
        return self.rig.billed_usd()

    def reborn(self) -> None:
        self.op = self._context().operator

    def gpu(self, *args: str) -> Answer:
        """One command, as a program calls it; it ends with the process that it stands for."""
        context = self._context()
        out, err, before = io.StringIO(), io.StringIO(), sys.stdin
        sys.stdin = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main.run([*args, "--json"] if "--" not in args else _with_json(args), obj=context)
        finally:
            sys.stdin = before
            context.close()
        assert "Traceback" not in err.getvalue(), err.getvalue()
        return Answer(code, tuple(json.loads(line) for line in out.getvalue().splitlines()), err.getvalue())

    def connect(self, machine: Any) -> Link:
        world = self.sandbox.world
        with world.lock:
            instance = next((i for i in world.instances.values() if str(i.id) == machine.host), None)
            if instance is None or instance.phase != "running":
                raise Unreachable(host=machine.host, reason="Connection refused")
        root = self.disks / str(instance.id) / ".gpu-skills"
        session = Session.open(LocalTransport(), root=str(root))
        return Link(machine, RunnerHere(PlayedMachine(self.rig, instance, machine, {}), session))  # type: ignore[arg-type]

    def _context(self) -> Context:
        nowhere = self.root / "no-system-policy.json"
        home = Path(self.environ["HOME"])
        return Context(
            cwd=self.root,
            environ=self.environ,
            clock=self.clock,
            connect=None if self.real else self.connect,
            system_policy=nowhere,
            account_home=home,
        )


def _with_json(args: tuple[str, ...]) -> list[str]:
    at = args.index("--")
    return [*args[:at], "--json", *args[at:]]
