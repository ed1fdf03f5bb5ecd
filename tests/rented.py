"""A machine of ours at a vendor of the sandbox, on record as if provision had made it."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import timestamp
from gpu_skills.lifecycle import intents, labels, machines
from gpu_skills.lifecycle.ending import ownership
from gpu_skills.lifecycle.labels import Label
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.providers.base import MachineSpec, Requirements

NEED = Requirements(gpu="RTX 4090", disk_gb=50)
LETTERS = {"project": "p", "job": "j", "canary": "c"}


def spec(rig: Any, label: str, **changes: Any) -> MachineSpec:
    """For the cheapest offer there is now."""
    offer = rig.reader.offers(NEED)[0]
    given: dict[str, Any] = {
        "offer": offer,
        "label": label,
        "image": "pytorch/pytorch:2.8.0",
        "disk_gb": 50,
        "gpu_count": 1,
        "max_rate_usd_hr": offer.rate_usd_hr,
        "ssh_public_key": "ssh-ed25519 AAAA test",
        **changes,
    }
    return MachineSpec(**given)


def rent(
    rig: Any,
    *,
    machine_class: str = "project",
    hours: float | None = 6,
    age_s: float = 1200,
    number: int = 1,
    label: Label | None = None,
    on_record: bool = True,
    keeps: bool = True,
    **changes: Any,
) -> Machine:
    """One that runs since age_s. on_record False: the provider has it, and no file here knows.

    keeps: its workspace survives a stop; on Vast it always does.
    """
    intent = LETTERS.get(machine_class, "c") + f"{number:016x}"
    now = rig.clock.now()
    deadline = None if hours is None else (now + timedelta(hours=hours)).replace(microsecond=0)
    label = label or Label(rig.project.project_id, intent, deadline)
    wanted = spec(rig, str(label), **({"persistent_gb": 50} if keeps and rig.vendor == "runpod" else {}), **changes)
    common = {"provider": rig.vendor, "machine_id": labels.machine_id(intent), "label": str(label)}
    if on_record:
        intents.begin(rig.project, rig.clock, "create", intent, **common)
    outcome = rig.writer.create(wanted)
    assert outcome.kind == "created" and outcome.problem is None, outcome
    if on_record:
        intents.close(rig.project, rig.clock, intent, "done", instance_id=outcome.instance_id, **common)
    rig.sandbox.advance(age_s)
    machine = Machine(
        id=labels.machine_id(intent),
        provider=rig.vendor,
        host=str(outcome.instance_id),
        status="ready",
        rate_usd_hr=wanted.offer.rate_usd_hr,
        storage_usd_hr=Decimal("0.01"),
        gpu="RTX 4090",
        gpu_count=1,
        label=str(label),
        machine_class=machine_class,
        intent=intent,
        account=ownership.account_of(rig.op, rig.vendor),
        created_at=timestamp(now),
        ready_at=timestamp(now + timedelta(seconds=60)),
        deadline_at=None if deadline is None else timestamp(deadline),
        last_seen_at=timestamp(rig.clock.now()),
    )
    if on_record:
        machines.save(rig.project, machine)
    return machine
