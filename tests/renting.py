"""What tests of renting share: a frozen plan, a yes to it, an account whose machine keys are proven, a machine that is
played where there are no containers."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills import resources
from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import Unreachable
from gpu_skills.lifecycle import labels, machines
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.guard import keyproof
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import Candidate, Plan
from gpu_skills.lifecycle.renting import provision, specs

GPUS = {"vast": ("RTX 4090",), "runpod": ("NVIDIA RTX A5000",)}


def a_plan(r, **changes: Any) -> Plan:
    now = r.clock.now()
    gpus = changes.pop("gpus", GPUS[r.vendor])
    given: dict[str, Any] = {
        "project_id": r.project.project_id,
        "machine_class": "job",
        "provider": r.vendor,
        "image": "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
        "disk_gb": 50,
        "gpu_count": 1,
        "candidates": tuple(Candidate(gpu) for gpu in gpus),
        "max_rate_usd_hr": Decimal("1.20"),
        "deadline_s": 2 * 3600.0,
        "deadline_reason": "max_lease",
        "storage_grace_s": 24 * 3600.0,
        "worst_case_usd": Decimal("4.00"),
        "measured_at": timestamp(now),
        "expires_at": timestamp(now + timedelta(hours=1)),
    }
    return Plan(**{**given, **changes})


def by_plan(r, machine: Machine) -> Machine:
    """The machine with a plan on record that it was rented by: without one it cannot start again."""
    name = plans.freeze(r.project, a_plan(r))
    return machines.update(r.project, machine.id, lambda found: replace(found, plan=name))


def approved(r, plan: Plan | None = None, **changes: Any):
    """(name, plan, approval) of a plan that a person said yes to."""
    name = plans.freeze(r.project, plan or a_plan(r, **changes))
    name, frozen = plans.load(r.project, name)
    return name, frozen, approvals.give(r.op, approvals.ask_of_plan(name, frozen), statement="yes", source="approve")


def guarded(r, *rights: str) -> None:
    """Machines of this account have shown that their key may do this to them (stop, if it is not said), and no more."""
    for right in rights or ("stop",):
        keyproof.note(r.op, r.vendor, r.op.account(r.vendor), "proven", right)


def rent(r, plan: Plan | None = None, **changes: Any) -> provision.Provisioned:
    name, frozen, approval = approved(r, plan, **changes)
    guarded(r, specs.fuse_action(r.op, frozen))
    return provision.provision(r.op, name, frozen, approval)


def roomy(r, machines: int = 100) -> None:
    """A policy under which many may be rented at once."""
    path = r.project.path("policy.json")
    policy = json.loads(path.read_text())
    policy["ceilings"]["machines"] = machines
    path.write_text(json.dumps(policy))


class PlayedMachine:
    """The far end of a connection where the sandbox has no containers: it is what the vendor says it is.

    gpu: what the check of its GPU tells. fuse: None has no receipt.
    """

    def __init__(self, r, instance: Any, machine: Any, sessions: dict[str, Any]):
        self.sessions = sessions
        self.instance, self.machine, self.r = instance, machine, r
        self.gpu: dict[str, Any] = {"how": "torch", "ok": True, "count": instance.gpu_count}
        self.deadline = labels.parse(instance.label).deadline_at
        self.session: dict[str, Any] | None = None
        self.greeting = self
        self.root = "/home/.gpu-skills"

    def call(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, f"_{verb}")(args)

    def run_program(self, source: str, asked: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert source == resources.checkup().read_text()
        host = self.instance.host
        return {"gpu": self.gpu, "cuda": float(host.cuda), "shm_mib": 4096, "disk_free_gb": 40.0, "reaches": True}

    def close(self) -> None: ...

    def _probe(self, args: dict[str, Any]) -> dict[str, Any]:
        report = self.r.sandbox.world.gpu_report(self.instance)
        if report["failed"]:
            error = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
            return {"python": "3.11.7", "bash": True, "rsync": None, "gpus": [], "gpu_error": error}
        gpus = [
            {"index": n, "name": g["name"], "vram_mib": g["memory_mib"], "driver": report["driver_version"]}
            for n, g in enumerate(report["gpus"])
        ]
        return {"python": "3.11.7", "bash": True, "rsync": None, "gpus": gpus, "gpu_error": None}

    def _jobs(self, args: dict[str, Any]) -> dict[str, Any]:
        return {"jobs": [], "left_out": 0}

    def _fuse(self, args: dict[str, Any]) -> dict[str, Any]:
        if self.deadline is None:
            return {"receipt": None, "alive": False, "acknowledged": False}
        if "deadline" in args:
            self.deadline = parse_timestamp(
                timestamp(self.deadline.fromtimestamp(args["deadline"]["epoch_s"]).astimezone())
            )
        receipt = {
            "intent": args["intent"],
            "deadline": str(int(self.deadline.timestamp())),
            "armed_at": int(self.r.clock.now().timestamp()),
            "key": "proven",
            "on_expiry": "stop",
            "boot": "b1",
        }
        return {"receipt": receipt, "alive": True, "acknowledged": True}

    def _session(self, args: dict[str, Any]) -> dict[str, Any]:
        if "session" in args:
            self.session = self.sessions[self.machine.host] = {**args["session"], "expired_at": None}
        return {"session": self.sessions.get(self.machine.host), "watcher": True, "events": []}


def play_machines(r, change: Any = None) -> list[PlayedMachine]:
    """Let every instance of this rig that runs answer. change: called with each machine before it does."""
    played: list[PlayedMachine] = []
    sessions: dict[str, Any] = {}

    def connect(machine: Any) -> Link:
        world = r.sandbox.world
        with world.lock:
            instance = next(i for i in world.instances.values() if str(i.id) == machine.host)
            is_up = instance.phase == "running" and not {"dead_ssh", "offline"} & set(instance.faults)
            if not is_up or (machine.endpoint and machine.endpoint.port != instance.port):
                raise Unreachable(host=machine.host, reason="Connection refused")
        found = PlayedMachine(r, instance, machine, sessions)
        if change is not None:
            change(found)
        played.append(found)
        return Link(machine, found)  # type: ignore[arg-type]

    r.op = replace(r.op, connect=connect)
    return played


def instances(r) -> list[Any]:
    return list(r.sandbox.world.instances.values())


def alive(r) -> list[Any]:
    return [instance for instance in instances(r) if not instance.is_destroyed]


def key_file(r) -> Path:
    return r.op.user_state / "ssh" / "id_ed25519"
