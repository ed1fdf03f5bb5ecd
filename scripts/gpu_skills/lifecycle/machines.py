"""The machines of a project as `machines.json` holds them, and what setting one of the user's own up means.

A machine id is derived from provider and host, so two set-ups at once agree on it and it outlives every session.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import Clock, timestamp
from gpu_skills.config import GpuConfig
from gpu_skills.errors import CannotSatisfy, MachineLacks, NoCapacity, RemoteError, one_line
from gpu_skills.lifecycle import states
from gpu_skills.providers.base import Offer, SshEndpoint
from gpu_skills.providers.gpus import same_model, size_class_gb
from gpu_skills.state import registry
from gpu_skills.state.project import Project
from gpu_skills.units import json_number

if TYPE_CHECKING:
    from gpu_skills.lifecycle.connect import Link

# A card reports less than its label: a T4 of "16 GB" shows 15,360 MiB or less, an L4 of "24 GB" 23,034.
VRAM_TOLERANCE = 0.9
# In the session on record: when it ends by our own clock. What else stands there is the machine's word.
TOLD_UNTIL = "told_until"
# Where the record of a machine that is gone keeps why its session had the deadline it had.
DEADLINE_REASON = "deadline_reason"


@dataclass(frozen=True)
class Machine:
    """vram_gb: the size class of one GPU. endpoint None: this machine. session: what the machine was last told.

    Of a rented one beside that: `host` is the provider's own id of the instance, or the machine's id before there is
    one. intent: the create that made it. deadline_at None: no fuse. plan: SHA-256 of what was approved. host_key: the
    physical machine, as memory knows it. conditions: preempted, outbid, stop_failed, suspect, protected, foreign.
    """

    id: str
    provider: str
    host: str
    status: str = "requested"
    rate_usd_hr: Decimal = Decimal(0)
    gpu: str | None = None
    gpu_count: int = 0
    vram_gb: float | None = None
    endpoint: SshEndpoint | None = None
    root: str | None = None
    session: dict[str, Any] | None = None
    label: str | None = None
    machine_class: str | None = None
    intent: str | None = None
    plan: str | None = None
    account: str | None = None
    host_key: str | None = None
    disk_gb: float | None = None
    storage_usd_hr: Decimal | None = None
    conditions: tuple[str, ...] = ()
    created_at: str | None = None
    ready_at: str | None = None
    deadline_at: str | None = None
    last_seen_at: str | None = None
    destroyed_at: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def rate_json(self) -> int | float:
        return json_number(self.rate_usd_hr)

    @property
    def burn_usd_hr(self) -> Decimal:
        """What it costs now, as its state says: one that may bill counts in full."""
        bills = states.BILLS.get(self.status, "assume")
        if bills in ("yes", "assume"):
            return self.rate_usd_hr
        return self.storage_usd_hr or Decimal(0) if bills == "storage" else Decimal(0)

    @property
    def is_rented(self) -> bool:
        """It bills at a provider, and is ours to destroy."""
        return self.provider not in registry.OWN_HOSTS

    @property
    def instance_id(self) -> str | None:
        """The provider's id of a rented machine; None while nobody knows whether there is one."""
        return self.host if self.is_rented and self.host != self.id else None

    @property
    def has_unknown_past(self) -> bool:
        """Which jobs ran on it is not on record: it was taken back from its label, and has not told them yet."""
        return self.extra.get("adopted_at") is not None and self.extra.get("jobs_read_at") is None

    def to_record(self) -> dict[str, Any]:
        endpoint = None
        if self.endpoint is not None:
            endpoint = {k: v for k, v in vars(self.endpoint).items() if v is not None}
        record = {
            **self.extra,
            "id": self.id,
            "provider": self.provider,
            "instance_id": self.instance_id if self.is_rented else self.host,
            "status": self.status,
            "rate_usd_hr": self.rate_json,
            "gpu": self.gpu,
            "gpu_count": self.gpu_count,
            "vram_gb": self.vram_gb,
            "ssh": endpoint,
            "root": self.root,
            "session": self.session,
        }
        for key, name in _RENTED.items():
            value = getattr(self, name)
            if value is not None and value != ():
                record[key] = list(value) if isinstance(value, tuple) else value
        if self.storage_usd_hr is not None:
            record["storage_usd_hr"] = json_number(self.storage_usd_hr)
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Machine:
        ssh = record.get("ssh")
        storage = record.get("storage_usd_hr")
        rented = {name: record.get(key) for key, name in _RENTED.items()}
        return cls(
            id=record["id"],
            provider=record["provider"],
            host=str(record.get("instance_id") or record["id"]),
            status=record["status"],
            rate_usd_hr=Decimal(str(record.get("rate_usd_hr") or 0)),
            gpu=record.get("gpu"),
            gpu_count=int(record.get("gpu_count") or 0),
            vram_gb=record.get("vram_gb"),
            endpoint=_endpoint(ssh) if isinstance(ssh, dict) else None,
            root=record.get("root"),
            session=record.get("session"),
            **{**rented, "conditions": tuple(rented["conditions"] or ())},
            storage_usd_hr=None if storage is None else Decimal(str(storage)),
            extra={k: v for k, v in record.items() if k not in _KNOWN},
        )


# Key of the record → field. Written where there is something to say; a host of the user's own has none of it.
_RENTED = {
    "label": "label",
    "class": "machine_class",
    "intent": "intent",
    "plan": "plan",
    "account": "account",
    "host_key": "host_key",
    "disk_gb": "disk_gb",
    "conditions": "conditions",
    "created_at": "created_at",
    "ready_at": "ready_at",
    "deadline_at": "deadline_at",
    "last_seen_at": "last_seen_at",
    "destroyed_at": "destroyed_at",
}
_KNOWN = {
    "id", "provider", "instance_id", "status", "rate_usd_hr", "gpu", "gpu_count", "vram_gb", "ssh", "root", "session",
    "storage_usd_hr", *_RENTED,
}  # fmt: skip


def _endpoint(ssh: dict[str, Any]) -> SshEndpoint:
    """What a record says of it, whatever else stands there."""
    return SshEndpoint(ssh["host"], ssh.get("user"), ssh.get("port"), ssh.get("identity_file"))


def machine_id(provider: str, host: str) -> str:
    return "m_" + hashlib.sha256(f"{provider}\0{host}".encode()).hexdigest()[:10]


def all_machines(project: Project) -> list[Machine]:
    return [Machine.from_record(r) for r in registry.load(project, "machines")]


def find(project: Project, id: str) -> Machine | None:
    return next((m for m in all_machines(project) if m.id == id), None)


def save(project: Project, machine: Machine) -> None:
    registry.put(project, "machines", machine.to_record())


def update(project: Project, id: str, change: Callable[[Machine], Machine], *, clock: Clock | None = None) -> Machine:
    """Change a machine as it is on record now, under the lock of the file; StateError when there is none.

    The one way to change a rented one: a record saved whole would bring back what another process changed meanwhile.
    change has no effects, it may be applied again. `destroyed` and `lost` never change.
    """
    record = registry.change(
        project, "machines", id, lambda record: change(Machine.from_record(record)).to_record(), clock=clock
    )
    return Machine.from_record(record)


def set_status(project: Project, id: str, status: str, *, clock: Clock | None = None) -> Machine:
    """Unless it has come to its end meanwhile."""

    def changed(machine: Machine) -> Machine:
        return machine if machine.status in states.FINAL else replace(machine, status=status)

    return update(project, id, changed, clock=clock)


def machine_of(offer: Offer) -> Machine:
    return Machine(
        id=machine_id(offer.provider, offer.offer_id),
        provider=offer.provider,
        host=offer.offer_id,
        rate_usd_hr=offer.rate_usd_hr,
        gpu=offer.gpu,
        gpu_count=offer.gpu_count,
        vram_gb=offer.vram_gb,
        endpoint=offer.endpoint,
        root=offer.root,
    )


# finding and setting up the project's machine ----------------------------------------------------------------------


def set_up(
    project: Project,
    config: GpuConfig,
    offers: list[Offer],
    *,
    connect: Callable[[Machine], Link],
    clock: Clock,
    say: Callable[[str], None] = lambda line: None,
) -> Link:
    """A link to a machine of the user's own that satisfies gpu.yaml, with an open session on it.

    Tried in order; with one candidate its own error is raised, with several one that lists them all.
    """
    problems: list[tuple[str, Exception]] = []
    for offer in offers:
        machine = machine_of(offer)
        try:
            link = connect(machine)
        except RemoteError as exc:
            problems.append((machine.host, exc))
            continue
        try:
            link.machine = measured(machine, link.session.call("probe", {}), config)
            say(f"machine {link.machine.id} ({link.machine.host}): {describe_gpus(link.machine)}")
            open_session(project, config, link, clock=clock)
        except (RemoteError, CannotSatisfy) as exc:
            link.close()
            problems.append((machine.host, exc))
            continue
        except BaseException:
            link.close()
            raise
        return link
    if len(problems) == 1:
        raise problems[0][1]
    raise NoCapacity(
        "no host of ours fits: " + "; ".join(f"{host}: {exc}" for host, exc in problems), next_step="gpu offers"
    )


def open_session(project: Project, config: GpuConfig, link: Link, *, clock: Clock) -> None:
    """Make sure a session is open there: one start of work, bounded by deadline and budget, ended by idleness.

    The deadline is the earlier of `max_lifetime` and what `session_usd` buys at this rate; the machine enforces it.
    """
    current = link.session.call("session", {"project": project.project_id})["session"]
    if current is None or current.get("expired_at") is not None:
        deadline_in_s, reason = session_deadline(config, link.machine.rate_usd_hr)
        wanted = {
            "id": "s_" + secrets.token_hex(5),
            "deadline_in_s": deadline_in_s,
            "deadline_reason": reason,
            "idle_timeout_s": config.lifecycle.idle_timeout_s,
            "on_expiry": "record",
            "only_if_none": True,
        }
        current = link.session.call("session", {"project": project.project_id, "session": wanted})["session"]
    machine = replace(
        link.machine,
        status="ready",
        session=current,
        last_seen_at=timestamp(clock.now()),
    )
    save(project, machine)
    link.machine = machine


def open_rented_session(
    project: Project,
    link: Link,
    *,
    clock: Clock,
    deadline_at: datetime | None,
    reason: str,
    idle_timeout_s: float | None = None,
    held_s: float | None = None,
    is_moved: bool = False,
) -> None:
    """Make sure a session is open on a rented machine. At its end the machine's own fuse ends the billing.

    is_moved: one that is open gets this deadline, and one that has ended stays so; otherwise an open one keeps its own,
    so that two commands agree. held_s: so long idleness ends nothing, None: as it is. No idle_timeout_s holds where the
    fuse would destroy: outputs would go with it.
    """
    current = link.session.call("session", {"project": project.project_id})["session"]
    is_open = current is not None and current.get("expired_at") is None
    if is_open is is_moved:
        left_s = None if deadline_at is None else max(1.0, (deadline_at - clock.now()).total_seconds())
        wanted = {
            "id": current["id"] if is_open else "s_" + secrets.token_hex(5),
            "deadline_in_s": left_s,
            "deadline_reason": reason,
            "idle_timeout_s": idle_timeout_s if idle_timeout_s is not None and _fuse_stops(link) else None,
            "held_s": held_s,
            "on_expiry": "fuse",
            "fuse": link.machine.intent,
            "only_if_none": not is_moved,
        }
        current = link.session.call("session", {"project": project.project_id, "session": wanted})["session"]
        if current is not None and deadline_at is not None:
            current = {**current, TOLD_UNTIL: timestamp(deadline_at)}
    now = timestamp(clock.now())

    def told(found: Machine) -> Machine:
        """A machine that is on its way out stays so."""
        status = "ready" if found.status in ("requested", "booting", "ready", "busy") else found.status
        session, before = current, found.session or {}
        if session is not None and TOLD_UNTIL not in session and session.get("id") == before.get("id"):
            session = {**session, **{name: before[name] for name in (TOLD_UNTIL,) if name in before}}
        return replace(found, status=status, session=session, last_seen_at=now)

    link.machine = update(project, link.machine.id, told, clock=clock)


def _fuse_stops(link: Link) -> bool:
    """Whether the fuse there says that it stops the machine. One that says nothing is taken to destroy it."""
    from gpu_skills.lifecycle.guard import fuse

    receipt = fuse.read_receipt(link, link.machine)
    return receipt is not None and receipt.on_expiry == "stop"


def session_deadline(config: GpuConfig, rate_usd_hr: Decimal) -> tuple[float | None, str | None]:
    """Seconds until billing must end and which limit says so: `max_lifetime` or `session_budget`: the earlier."""
    limits: list[tuple[float, str]] = []
    if config.lifecycle.max_lifetime_s is not None:
        limits.append((config.lifecycle.max_lifetime_s, "max_lifetime"))
    if config.budget.session_usd is not None and rate_usd_hr > 0:
        limits.append((float(config.budget.session_usd / rate_usd_hr * 3600), "session_budget"))
    return min(limits) if limits else (None, None)


def measured(machine: Machine, probe: dict[str, Any], config: GpuConfig) -> Machine:
    """The machine with the GPUs it really has. Raises MachineLacks or CannotSatisfy."""
    if not probe.get("bash"):
        raise MachineLacks(host=machine.host, what="bash")
    gpus = [g for g in probe.get("gpus") or [] if isinstance(g, dict)]
    need = config.compute
    if need.min_vram_gb is not None or need.gpu is not None:
        fitting = [
            g
            for g in gpus
            if float(g.get("vram_mib") or 0) >= (need.min_vram_gb or 0) * 1024 * VRAM_TOLERANCE
            and (need.gpu is None or same_model(need.gpu, str(g.get("name"))))
        ]
        if len(fitting) < need.gpu_count:
            found = ", ".join(f"{one_line(str(g.get('name')), limit=80)} {_size_gb(g):g} GB" for g in gpus)
            wanted = f"{need.gpu_count} × {need.gpu or 'GPU'}"
            if need.min_vram_gb is not None:
                wanted += f" with {need.min_vram_gb:g} GB"
            raise CannotSatisfy(provider=f"{machine.provider} ({machine.host})", found=found or "no GPU", wanted=wanted)
        gpus = fitting
    return with_gpus(machine, gpus)


def with_gpus(machine: Machine, gpus: list[Any]) -> Machine:
    """The machine with the GPUs that its probe names."""
    gpus = [g for g in gpus if isinstance(g, dict)]
    if not gpus:
        return replace(machine, gpu_count=0)
    return replace(
        machine, gpu=one_line(str(gpus[0].get("name")), limit=80), gpu_count=len(gpus), vram_gb=_size_gb(gpus[0])
    )


def _size_gb(gpu: dict[str, Any]) -> float:
    return size_class_gb(float(gpu.get("vram_mib") or 0))


def describe_gpus(machine: Machine) -> str:
    if not machine.gpu_count:
        return "no GPU"
    size = f" {machine.vram_gb:g} GB" if machine.vram_gb else ""
    return f"{machine.gpu_count} × {machine.gpu}{size}"
