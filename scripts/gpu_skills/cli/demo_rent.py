"""`gpu demo --rent`: the life of a rented machine from offer to bill, in a sandbox that ends with the demo."""

from __future__ import annotations

import contextlib
import json
import os
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from gpu_skills.cli.context import Context
from gpu_skills.cli.demo import Demo, DemoFailed
from gpu_skills.cli.output import Output
from gpu_skills.clock import Clock
from gpu_skills.units import format_usd

if TYPE_CHECKING:
    from gpu_skills.sandbox.client import Running

PROVIDER = "vast"
# Shorter waits are for something real, such as a machine's SSH server.
LONG_WAIT_S = 20.0


def rent_a_machine(context: Context, demo: Demo) -> Output:
    """Every step a command that would do the same for real, but for `--sandbox`."""
    demo.step(
        "a sandbox: the provider's API on this computer, with prices and a bill, and machines that really run jobs",
        *("sandbox", "up", "--parent", str(os.getpid())),
    )
    try:
        return _story(demo)
    finally:
        with contextlib.suppress(DemoFailed):
            demo.step("end of the sandbox", "sandbox", "down")


class VendorTime:
    """Real time, but for long waits: nothing real happens in them, so the sandbox's clock is moved through them."""

    def __init__(self, clock: Clock, sandbox: Running):
        self._clock, self._sandbox = clock, sandbox
        self._ahead_s = 0.0

    def now(self) -> datetime:
        return self._clock.now() + timedelta(seconds=self._ahead_s)

    def monotonic(self) -> float:
        return self._clock.monotonic() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        if seconds < LONG_WAIT_S:
            self._clock.sleep(seconds)
            return
        self._sandbox.ask("POST", "clock", {"advance_s": seconds})
        self._ahead_s += seconds


def _story(demo: Demo) -> Output:
    from gpu_skills.cli.sandbox import directory_of
    from gpu_skills.sandbox import client

    sandbox = "--sandbox"
    demo.clock = VendorTime(demo.clock, client.require(directory_of(demo.home)))
    demo.step("make a project", sandbox, "init", "--jobs", "--provider", PROVIDER, "--min-vram-gb", "24")
    demo.step("what is for rent, and what it would really cost", sandbox, "offers", "--provider", PROVIDER)
    demo.step(
        "a pass of the sentinel: nothing is rented before something can end it when this computer cannot",
        *(sandbox, "sentinel", "--provider", PROVIDER),
    )
    demo.step(
        "a plan: candidates, highest rate, deadline, worst case; what speaks against it is told before money moves",
        *(sandbox, "plan", "--freeze", "--dir", str(demo.source), "--hold-for", "0", "--max-lease", "1h"),
    )
    name = _newest_plan(demo)
    demo.step(
        "one yes to this one plan, good for an hour and one use",
        *(sandbox, "approve", name, "--statement", "the demo may rent in the sandbox"),
    )
    demo.step(
        "rent, arm the fuse, send, run, collect and verify, destroy, and watch until it is proven gone: that takes a"
        " minute or more, and here the sandbox's clock is moved through it",
        *(sandbox, "job", "run", "--plan", name),
    )
    inner = demo.inner()
    inner.enter_sandbox()
    machine = _machine(inner)
    demo.title("the receipt of its fuse, read from the machine before the job began")
    print(json.dumps(machine["fuse"]), flush=True)
    demo.step("what became of the machine", sandbox, "machine", "show", machine["id"])
    demo.step("what the ledger says it cost", sandbox, "spend", "--all")
    demo.step("what the provider billed; by the hour and the gigabyte, so traffic comes on top", "sandbox", "bill")
    document = demo.result(inner) | {
        "plan": name,
        "machine": machine["id"],
        "machine_status": machine["status"],
        "fuse": machine["fuse"],
    }
    cost = format_usd((document["ledger_line"] or {}).get("cost_usd") or 0)
    return Output(document, f"the job cost {cost}; {machine['id']} is {machine['status']}")


def _newest_plan(demo: Demo) -> str:
    inner = demo.inner()
    inner.enter_sandbox()
    frozen = [path for path in inner.project.path("plans").glob("*.json") if not path.stem.startswith("draft-")]
    return max(frozen, key=lambda path: path.stat().st_mtime_ns).stem[:12]


def _machine(inner: Context) -> dict[str, Any]:
    from gpu_skills.lifecycle import machines

    newest = max(machines.all_machines(inner.project), key=lambda machine: machine.created_at or "")
    return {"id": newest.id, "status": newest.status, "fuse": newest.extra.get("fuse")}
