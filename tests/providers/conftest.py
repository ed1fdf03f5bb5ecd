"""A vendor of the sandbox with the real adapter in front of it, on the vendor's clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_skills.credentials import Credential
from gpu_skills.providers.base import Machine, MachineSpec, Requirements
from gpu_skills.providers.runpod import RunpodReader, RunpodWriter, connect_runpod
from gpu_skills.providers.vast import VastReader, VastWriter, connect_vast
from gpu_skills.sandbox import Sandbox
from sandbox_fixture import login_key, make_sandbox
from vendor_clock import VendorClock

__all__ = ["login_key", "make_sandbox"]


@dataclass
class Shop:
    """One vendor, and us as its customer."""

    vendor: str
    sandbox: Sandbox
    clock: VendorClock
    reader: Any
    writer: Any
    need: Requirements

    def spec(self, label: str = "gpu1-abc-int-1", **changes: Any) -> MachineSpec:
        """For the cheapest offer there is now."""
        offer = changes.pop("offer", None) or self.reader.offers(changes.pop("need", self.need))[0]
        given: dict[str, Any] = {
            "offer": offer,
            "label": label,
            "image": "pytorch/pytorch:2.8.0",
            "disk_gb": 50,
            "persistent_gb": changes.get("disk_gb", 50),
            "gpu_count": 1,
            "max_rate_usd_hr": offer.rate_usd_hr,
            "ssh_public_key": "ssh-ed25519 AAAA test",
            **changes,
        }
        return MachineSpec(**given)

    def rent(self, label: str = "gpu1-abc-int-1", *, wait_s: float = 60, **changes: Any) -> Machine:
        outcome = self.writer.create(self.spec(label, **changes))
        assert outcome.kind == "created" and outcome.problem is None, outcome
        self.sandbox.advance(wait_s)
        machine = self.reader.machine(outcome.instance_id)
        assert machine is not None
        return machine

    def burning(self) -> set[str]:
        """What costs money now, by the vendor's own meter."""
        return {entry["resource"] for entry in self.sandbox.world.burning()}

    def calls(self, call: str) -> int:
        return self.sandbox.world.calls[self.vendor, call]

    def fault(self, fault: str, call: str = "create", **args: Any) -> None:
        times = args.pop("times", 1)
        rule = {"match": {"provider": self.vendor, "call": call}, "fault": fault, "args": args, "times": times}
        self.sandbox.world.apply_faults([rule])


@pytest.fixture
def shop(make_sandbox: Callable[..., Sandbox], tmp_path: Path) -> Callable[..., Shop]:
    """`shop("vast")`: limits are enforced by the vendor's clock, and a call that comes too soon fails the test."""

    def make(vendor: str, *, key: str | None = None, **options: Any) -> Shop:
        sandbox = make_sandbox(**{"limits": "virtual", "seed": 3, **options})
        clock = VendorClock(sandbox)
        credential = Credential(vendor, key or sandbox.key(vendor), "test")
        common: dict[str, Any] = {"clock": clock, "state_dir": tmp_path / "state"}
        if vendor == "vast":
            client: Any = connect_vast(credential, environ={"VAST_URL": sandbox.url}, **common)
            reader: Any = VastReader(client, clock=clock)
            writer: Any = VastWriter(client)
        else:
            client = connect_runpod(credential, environ={"RUNPOD_API_BASE_URL": sandbox.url}, **common)
            reader, writer = RunpodReader(client), RunpodWriter(client)
        made.append(sandbox)
        return Shop(vendor, sandbox, clock, reader, writer, Requirements(gpu="RTX 4090", disk_gb=50))

    made: list[Sandbox] = []
    yield make
    for sandbox in made:
        assert dict(sandbox.world.too_frequent) == {}, "asked more often than the vendor documents"
