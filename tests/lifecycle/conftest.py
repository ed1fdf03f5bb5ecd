"""The lifecycle on a vendor of the sandbox: an Operator whose clock is the vendor's.

def test_something(rig):
    r = rig("vast")                 # a frozen clock: r.clock.sleep moves the vendor, nothing waits
    r = rig("vast", real=True)      # machines that can be logged into; the vendor's clock still moves by sleep
    r.op, r.sandbox, r.clock, r.reader, r.writer, r.project
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpu_skills.credentials import Credential
from gpu_skills.errors import Unreachable
from gpu_skills.jobs import gone, readback
from gpu_skills.lifecycle.connect import Link, connect
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.runpod import RunpodReader, RunpodWriter, connect_runpod
from gpu_skills.providers.vast import VastReader, VastWriter, connect_vast
from gpu_skills.sandbox import Sandbox
from gpu_skills.state import policy as policies
from gpu_skills.state import project as projects
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from sandbox_fixture import login_key, make_sandbox
from vendor_clock import VendorClock

__all__ = ["login_key", "make_sandbox"]


@dataclass
class Rig:
    """One project as a customer of one vendor. notices: what was notified, as (event, subject, facts)."""

    vendor: str
    sandbox: Sandbox
    clock: VendorClock
    reader: Any
    writer: Any
    op: Operator
    notices: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    @property
    def project(self) -> Project:
        return self.op.project

    def burning(self) -> set[str]:
        """What costs money now, by the vendor's own meter."""
        return {entry["resource"] for entry in self.sandbox.world.burning()}

    def billed_usd(self) -> Decimal:
        """The vendor's own bill, all resources."""
        world = self.sandbox.world
        return world.account(self.vendor).bill.total_usd(world.now())

    def calls(self, call: str) -> int:
        return self.sandbox.world.calls[self.vendor, call]

    @property
    def creates(self) -> int:
        return self.calls("create")

    def fault(self, fault: str, call: str = "create", **args: Any) -> None:
        times = args.pop("times", 1)
        rule = {"match": {"provider": self.vendor, "call": call}, "fault": fault, "args": args, "times": times}
        self.sandbox.world.apply_faults([rule])

    def another(self, root: Path, *, project_id: str | None = None) -> Rig:
        """A second project, or a second state directory of the same id, on the same account of the same user."""
        project = projects.init(root, project_id=project_id)
        ledger = Ledger(project, self.clock)
        op = replace(
            self.op,
            project=project,
            ledger=ledger,
            policy=lambda: _policy(project, root),
            **of_jobs(project, ledger, self.clock),
        )
        return replace(self, op=op, notices=[])


def of_jobs(project: Project, ledger: Ledger, clock: Any) -> dict[str, Callable[..., Any]]:
    """What an operator is told of jobs, as the command line tells it."""
    return {
        "running_jobs": lambda machine: gone.running_on(ledger, machine),
        "unverified": lambda machine: gone.unverified_on(project, ledger, machine, now=clock.now()),
        "settle_jobs": lambda machine, why, at=None: gone.end_jobs(project, ledger, clock, machine, why, at=at),
        "jobs_there": lambda link, *, write: readback.jobs_there(project, ledger, clock, link, write=write),
    }


@pytest.fixture
def rig(make_sandbox: Callable[..., Sandbox], tmp_path: Path) -> Callable[..., Rig]:
    """`rig("vast", **options of Sandbox)`. The user's own files are below home / "user"; a test with several rigs, each
    of another user, names another home for each."""

    def make(vendor: str = "vast", *, home: Path = tmp_path, **options: Any) -> Rig:
        begin = {}
        if not options.get("real") and options.get("frozen", True):
            # What a day has cost is asked here and there: no test begins in the evening.
            begin["starts_at"] = (time.time() // 86_400 + 1) * 86_400 + 1
        sandbox = make_sandbox(**{"limits": "virtual", "seed": 3, **begin, **options})
        clock = VendorClock(sandbox)
        user = home / "user"
        environ = {
            "HOME": str(user),
            "XDG_STATE_HOME": str(user / "state"),
            "XDG_CONFIG_HOME": str(user / "config"),
            "PATH": os.environ["PATH"],
            "VAST_URL": sandbox.url,
            "RUNPOD_API_BASE_URL": sandbox.url,
        }
        key = Credential(vendor, sandbox.key(vendor), "test")
        common: dict[str, Any] = {"clock": clock, "environ": environ, "state_dir": home / "pace"}
        if vendor == "vast":
            reader: Any = VastReader(connect_vast(key, **common), clock=clock)
            writer: Any = VastWriter(reader.client)
        else:
            reader = RunpodReader(connect_runpod(key, **common))
            writer = RunpodWriter(reader.client)
        root = home / "project"
        root.mkdir(parents=True, exist_ok=True)
        project = projects.init(root)

        def link_to(machine: Any) -> Link:
            if options.get("containers") is False:
                raise Unreachable(host=machine.host, reason="nothing answers where there are no containers")
            return connect(machine, known_hosts=project.state / "known_hosts", environ=environ)

        notices: list[tuple[str, str, dict[str, Any]]] = []
        ledger = Ledger(project, clock)
        # As the command line names it: by the vendor's word where it has one.
        account = str(sandbox.world.account(vendor).id) if vendor == "vast" else key.account
        op = Operator(
            project=project,
            ledger=ledger,
            clock=clock,
            policy=lambda: _policy(project, root),
            environ=environ,
            reader=lambda name: reader,
            writer=lambda name: writer,
            account=lambda name: account,
            connect=link_to,
            **of_jobs(project, ledger, clock),
            notify=lambda event, subject, **facts: notices.append((event, subject, facts)),
            account_home=user,
        )
        return Rig(vendor, sandbox, clock, reader, writer, op, notices)

    return make


def _policy(project: Project, root: Path) -> policies.Policy:
    environ = {"HOME": str(root), "XDG_CONFIG_HOME": str(root / "config")}
    return policies.load(project, environ, system=root / "no-system-policy.json")
