"""A deployment as `deployments.json` has it: the stable handle of a service on a machine."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_skills.clock import timestamp
from gpu_skills.errors import JobError, UsageError
from gpu_skills.lifecycle import machines, states
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.state import registry
from gpu_skills.state.project import Project

MAX_REASON = 2000


class DeploymentFailed(JobError):
    """It is on record as `error`, with this reason."""

    code = "deployment_failed"
    template = "{deployment} does not serve: {reason}"
    next_step = "gpu deployment logs {deployment}"


@dataclass(frozen=True)
class Deployment:
    """port None: `endpoint` says where it takes requests; else that port of the machine's loopback does.

    nonce: what the machine knows the service by, so that a start that is repeated starts once.
    """

    id: str
    provider: str
    status: str
    instance_id: str | int | None = None
    machine_id: str | None = None
    gpu: str | None = None
    runtime: str | None = None
    model: str | None = None
    model_version: str | int | None = None
    endpoint: str | None = None
    ssh: Any = None
    cost_hr: float | None = None
    port: int | None = None
    nonce: str | None = None
    test_generation: dict[str, Any] | None = None
    error: str | None = None
    created_at: str | None = None
    last_used_at: str | None = None
    destroyed_at: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.status == "destroyed"

    def to_record(self) -> dict[str, Any]:
        record = {name: value for name, value in vars(self).items() if name != "extra" and value is not None}
        return {**self.extra, **record}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Deployment:
        known = {name: record[name] for name in cls.__dataclass_fields__ if name in record and name != "extra"}
        return cls(**known, extra={name: value for name, value in record.items() if name not in known})


def all_deployments(project: Project) -> list[Deployment]:
    return [Deployment.from_record(record) for record in registry.load(project, "deployments")]


def find(project: Project, id: str) -> Deployment:
    """UsageError when there is none of this id."""
    found = all_deployments(project)
    for one in found:
        if one.id == id:
            return one
    known = ", ".join(one.id for one in found if not one.is_over) or "none"
    raise UsageError(f"no deployment {id}; there is {known}", next_step="gpu deployment ls")


def of_model(project: Project, model: str, machine_id: str) -> Deployment | None:
    """The one that serves, or is to serve, this model on this machine."""
    found = [d for d in all_deployments(project) if (d.model, d.machine_id, d.is_over) == (model, machine_id, False)]
    return found[-1] if found else None


def on_machine(project: Project, machine: Machine) -> list[Deployment]:
    """Those that are not destroyed, whoever wrote their records."""
    return [d for d in all_deployments(project) if not d.is_over and machine_of(project, d) == machine]


def machine_of(project: Project, deployment: Deployment) -> Machine | None:
    for machine in machines.all_machines(project):
        if deployment.machine_id is not None:
            if machine.id == deployment.machine_id:
                return machine
        elif machine.provider == deployment.provider and machine.instance_id == str(deployment.instance_id):
            return machine
    return None


def begun(op: Operator, model: Any, machine: Machine, *, status: str = "verifying") -> Deployment:
    """A new record of a model on a machine, written down."""
    made = Deployment(
        id=f"dep_{secrets.token_hex(4)}",
        provider=machine.provider,
        status=status,
        instance_id=machine.instance_id if machine.is_rented else machine.host,
        machine_id=machine.id,
        gpu=machine.gpu,
        runtime=model.manifest.runtime,
        model=model.id,
        model_version=model.manifest.version,
        ssh=machine.to_record()["ssh"],
        cost_hr=machine.rate_json,
        nonce=secrets.token_hex(8),
        created_at=timestamp(op.clock.now()),
    )
    registry.put(op.project, "deployments", made.to_record(), clock=op.clock)
    return made


def change(op: Operator, id: str, function: Callable[[Deployment], Deployment]) -> Deployment:
    """Change a record as it is on disk now. function has no effects: it may be applied again."""
    record = registry.change(
        op.project,
        "deployments",
        id,
        lambda record: function(Deployment.from_record(record)).to_record(),
        clock=op.clock,
    )
    return Deployment.from_record(record)


def mark_error(op: Operator, id: str, reason: str) -> Deployment:
    """`error`, and why. One that is destroyed stays so."""
    return change(op, id, lambda d: d if d.is_over else replace(d, status="error", error=reason[:MAX_REASON]))


def mark_ready(op: Operator, id: str, proof: dict[str, Any]) -> Deployment:
    """proof: of a test generation that succeeded; the registry takes no `ready` without one."""
    return change(op, id, lambda d: replace(d, status="ready", error=None, test_generation=proof))


def mark_used(op: Operator, id: str) -> Deployment:
    return change(op, id, lambda d: replace(d, last_used_at=timestamp(op.clock.now())))


def is_machine_gone(machine: Machine | None) -> bool:
    return machine is None or machine.status in states.FINAL
