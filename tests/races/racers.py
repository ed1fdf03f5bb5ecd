"""Several processes at once, each a customer of its own: only files and the vendor are shared.

    outcomes = race(r, 20, lambda mine, number: …)

Each racer is a fork with connections of its own; it waits in the vendor's time, which it moves over HTTP: two that wait
at once wait together. What it returns has to be JSON; an error of ours comes back as its code.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from gpu_skills.credentials import Credential
from gpu_skills.errors import GpuError, Unreachable
from gpu_skills.lifecycle.connect import Link
from gpu_skills.providers.runpod import RunpodReader, RunpodWriter, connect_runpod
from gpu_skills.providers.vast import VastReader, VastWriter, connect_vast
from gpu_skills.sandbox.face import Reply, Request
from gpu_skills.state.ledger import Ledger
from renting import PlayedMachine

TIMEOUT_S = 120.0


class SharedTime:
    """The vendor's clock as a service of the sandbox: `{"until": T}` moves it there, unless it is past that."""

    def __init__(self) -> None:
        self.sandbox: Any = None

    def __call__(self, request: Request) -> Reply:
        asked = request.json()
        world = self.sandbox.world
        left_s = float(asked.get("until", 0)) - world.now()
        if left_s > 0:
            self.sandbox.advance(left_s)
        return Reply(200, {"now": world.now()})


class FarClock:
    """Our clock, set by a vendor in another process."""

    def __init__(self, url: str):
        self._url = f"{url}/_sandbox/time"

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._ask(0), UTC)

    def monotonic(self) -> float:
        return self._ask(0)

    def sleep(self, seconds: float) -> None:
        self._ask(self._ask(0) + seconds)

    def _ask(self, until: float) -> float:
        request = urllib.request.Request(self._url, json.dumps({"until": until}).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return float(json.load(answer)["now"])


def own(r: Any) -> Any:
    """The rig of a process of its own: the same files, and nothing shared with the one it was forked from."""
    clock = FarClock(r.sandbox.url)
    key = Credential(r.vendor, r.op.environ["RACERS_KEY"], "test")
    common: dict[str, Any] = {"clock": clock, "environ": r.op.environ, "state_dir": None}
    if r.vendor == "vast":
        reader: Any = VastReader(connect_vast(key, **common), clock=clock)
        writer: Any = VastWriter(reader.client)
    else:
        reader = RunpodReader(connect_runpod(key, **common))
        writer = RunpodWriter(reader.client)
    op = replace(
        r.op,
        clock=clock,
        ledger=Ledger(r.project, clock),
        reader=lambda name: reader,
        writer=lambda name: writer,
        connect=lambda machine: _played(reader, clock, machine),
    )
    return replace(r, clock=clock, reader=reader, writer=writer, op=op)


def _played(reader: Any, clock: FarClock, machine: Any) -> Link:
    """The far end of a machine as its vendor shows it: there are no containers to log into."""
    shown = reader.machine(machine.instance_id)
    if shown is None or shown.status != "running":
        raise Unreachable(host=machine.host, reason="Connection refused")
    gpu = {"name": shown.gpu, "memory_mib": int((machine.vram_gb or 24) * 1024)}
    report = {"failed": False, "driver_version": "570.86", "gpus": [gpu] * (shown.gpu_count or 1)}
    world = SimpleNamespace(gpu_report=lambda instance: report)
    there = SimpleNamespace(gpu_count=shown.gpu_count, label=shown.label, host=SimpleNamespace(cuda="12.8"))
    r = SimpleNamespace(clock=clock, sandbox=SimpleNamespace(world=world))
    return Link(machine, PlayedMachine(r, there, machine, {}))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """value: what was returned. code: of the error in its place."""

    value: Any = None
    code: str | None = None


def race(r: Any, count: int, action: Callable[[Any, int], Any], *, among: list[Any] | None = None) -> list[Outcome]:
    """Outcomes by number. among: rigs of several projects, taken in turn. All begin when the last one is ready."""
    rigs = among or [r]
    for one in rigs:
        one.op.environ["RACERS_KEY"] = r.sandbox.key(r.vendor)
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(count)

    def run(number: int, pipe: Any) -> None:
        mine = own(rigs[number % len(rigs)])
        barrier.wait(TIMEOUT_S)
        try:
            told = {"value": action(mine, number)}
        except GpuError as exc:
            told = {"code": exc.code}
        except BaseException as exc:
            told = {"code": f"{type(exc).__name__}: {exc}"}
        pipe.send(told)

    pipes, racers = [], []
    for number in range(count):
        here, there = fork.Pipe(duplex=False)
        racers.append(fork.Process(target=run, args=(number, there)))
        racers[-1].start()
        there.close()
        pipes.append(here)
    try:
        found = []
        for pipe in pipes:
            assert pipe.poll(TIMEOUT_S), "a racer does not arrive"
            with contextlib.suppress(EOFError):
                found.append(Outcome(**pipe.recv()))
        assert len(found) == count, "a racer died"
        return found
    finally:
        for racer in racers:
            racer.join(5)
            if racer.is_alive():
                racer.kill()
                racer.join()
