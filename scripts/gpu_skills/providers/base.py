"""What a provider is to everything above it: the records it speaks and its interface, reading apart from writing.

Rates are all-in hourly rates for the requested shape: GPUs and disk, in USD. `vram_gb` is the size class on the label,
per GPU. Network speeds are megabits per second. A provider's own words stop in its adapter.

What every adapter owes:
- A failed, malformed or incomplete answer is an error, never an empty list and never "gone".
- One create call is one request. Whatever is not a clear yes or a clear no is `unknown`, and never repeated here.
- A write that was sent and not clearly answered raises ProviderSilent (a create says so in its outcome).
- Errors are classes of errors.py; texts of the provider pass through with every secret masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Literal, Protocol

from gpu_skills.errors import GpuError

MAX_BOOTSTRAP_CHARS = 4000
DEFAULT_MIN_RELIABILITY = 0.95


# what is wanted -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requirements:
    """What the work needs. None means: does not matter.

    gpu and candidates: any of these models will do. hours: how long the machine must be there. min_reliability: holds
    where a provider states one. locations: two-letter countries, or data centres where the provider has them.
    volume_id: a network volume that must be mountable. interruptible: a machine that may be taken away, for less.
    persistent: the disk has to survive a stop; False: it need not, where the provider charges for that.
    """

    gpu: str | None = None
    gpu_count: int = 1
    min_vram_gb: float | None = None
    disk_gb: float | None = None
    max_rate_usd_hr: Decimal | None = None
    candidates: tuple[str, ...] = ()
    hours: float | None = None
    min_down_mbps: float | None = None
    min_reliability: float = DEFAULT_MIN_RELIABILITY
    min_cuda: float | None = None
    locations: tuple[str, ...] = ()
    volume_id: str | None = None
    interruptible: bool = False
    persistent: bool = True

    @property
    def gpus(self) -> tuple[str, ...]:
        """All models that will do; empty: any."""
        first = (self.gpu,) if self.gpu else ()
        return tuple(dict.fromkeys((*first, *self.candidates)))


@dataclass(frozen=True)
class SshEndpoint:
    """How a machine is reached. host: what the user would type after `ssh`. None: left to their SSH configuration."""

    host: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class SshWay:
    """One of the ways a provider names. Which one works, only a banner tells: probe them in this order.

    carries_commands False: an interactive shell and nothing else; no use to us but for a person.
    """

    kind: Literal["direct", "proxy"]
    endpoint: SshEndpoint
    carries_commands: bool = True


@dataclass(frozen=True)
class Offer:
    """Something that can be used now at a rate. It holds nothing, and its id may be gone in a minute.

    gpu_count 0 and gpu None: only a look at the machine tells. machine_id: the physical machine where the provider
    shows it, for what is remembered about it. storage_usd_hr: what it costs an hour while it is stopped.
    duration_h: how long it can be had. min_bid_usd_hr: of an interruptible one, without disk. stock: NONE, LOW,
    MEDIUM or HIGH where the provider says so; no reservation.
    """

    provider: str
    offer_id: str
    rate_usd_hr: Decimal
    gpu: str | None
    gpu_count: int
    vram_gb: float | None
    endpoint: SshEndpoint | None = None
    root: str | None = None
    disk_gb: float | None = None
    max_disk_gb: float | None = None
    storage_usd_hr: Decimal = Decimal(0)
    download_usd_gb: Decimal = Decimal(0)
    upload_usd_gb: Decimal = Decimal(0)
    machine_id: str | None = None
    reliability: float | None = None
    down_mbps: float | None = None
    up_mbps: float | None = None
    location: str | None = None
    duration_h: float | None = None
    cuda: float | None = None
    is_interruptible: bool = False
    min_bid_usd_hr: Decimal | None = None
    has_direct_ssh: bool = True
    is_verified: bool | None = None
    stock: str | None = None

    @property
    def host_key(self) -> str | None:
        """Under which this machine is remembered: `vast:4711`."""
        return f"{self.provider}:{self.machine_id}" if self.machine_id else None


@dataclass(frozen=True)
class FilterCount:
    """One line of the table that explains a short answer: what was wanted, how many fell, how many were left."""

    filter: str
    wanted: str
    removed: int
    left: int


@dataclass(frozen=True)
class Search:
    """The offers that fit, cheapest first, and what became of the others.

    considered: how many the provider showed. is_cut: there were more than it shows at once.
    """

    offers: list[Offer]
    considered: int
    filters: list[FilterCount] = field(default_factory=list)
    is_cut: bool = False


# what is created ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegistryLogin:
    """For a private image. Vast takes user and password with each create; RunPod an id it was given before."""

    server: str = "docker.io"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    stored_id: str | None = None


@dataclass(frozen=True)
class MachineSpec:
    """One machine to create. Everything is decided: the adapter adds nothing that costs.

    label: unique, and the only handle on a create that was not answered. max_rate_usd_hr: all-in, what was approved.
    bid_usd_hr: makes it interruptible, at this rate without disk. bootstrap: run at every start of the container; at
    most 4,000 characters. env: never a provider's key. workspace: where the disk that survives a stop is mounted.
    persistent_gb, volume_id and data_centers: RunPod only. persistent_gb: of `disk_gb`, what survives a stop; None:
    nothing does. A volume stands in exactly one data centre.
    """

    offer: Offer
    label: str
    image: str
    disk_gb: int
    gpu_count: int
    max_rate_usd_hr: Decimal
    bootstrap: str = ""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    ssh_public_key: str | None = None
    ports: tuple[int, ...] = ()
    workspace: str = "/workspace"
    bid_usd_hr: Decimal | None = None
    registry: RegistryLogin | None = None
    persistent_gb: int | None = None
    volume_id: str | None = None
    data_centers: tuple[str, ...] = ()
    min_cuda: float | None = None


@dataclass(frozen=True)
class CreateOutcome:
    """What one create request came to.

    created   it exists and is ours to use, or with `problem` set: it exists although the provider reported an error
              (a bid too low, no capacity): destroy it
    refused   it does not exist; `problem` says why
    unknown   it may exist: look for the label before anything else
    """

    kind: Literal["created", "refused", "unknown"]
    instance_id: str | None = None
    machine_key: str | None = field(default=None, repr=False)
    problem: GpuError | None = None


# what there is --------------------------------------------------------------------------------------------------------

MachineStatus = Literal["booting", "running", "stopping", "stopped", "terminating", "unknown"]


@dataclass(frozen=True)
class Machine:
    """An instance as the provider shows it now. None: the provider does not say, or not readably.

    status: ours; `running` is a started container, not a machine that answers. said: the provider's own words.
    rate_usd_hr: all-in while it runs. burn_usd_hr: what it costs in this state, by the dearer reading. storage_usd_hr:
    what it costs while it is stopped.
    dead_end: why it will not become `running` by itself. may_recover: waiting, with a deadline, could still help.
    ends_at: when the provider takes it away. label: exactly as it stands there; what is not ours is foreign.
    """

    provider: str
    instance_id: str
    label: str | None
    status: MachineStatus
    said: str = ""
    rate_usd_hr: Decimal | None = None
    burn_usd_hr: Decimal | None = None
    storage_usd_hr: Decimal | None = None
    gpu: str | None = None
    gpu_count: int | None = None
    vram_gb: float | None = None
    disk_gb: float | None = None
    is_interruptible: bool | None = None
    is_locked: bool = False
    ways: tuple[SshWay, ...] = ()
    machine_id: str | None = None
    location: str | None = None
    image: str | None = None
    dead_end: str | None = None
    may_recover: bool = False
    conditions: tuple[str, ...] = ()
    created_at: datetime | None = None
    ends_at: datetime | None = None

    @property
    def may_bill(self) -> bool:
        """Everything the provider still shows may cost something."""
        return True


@dataclass(frozen=True)
class Charge:
    """Money the provider took. kind: gpu, cpu, disk, download, upload, volume or other."""

    provider: str
    instance_id: str
    kind: str
    amount_usd: Decimal
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True)
class Balance:
    """credit_usd: what is left to spend; None where the provider does not say."""

    credit_usd: Decimal | None
    spend_usd_hr: Decimal | None = None


@dataclass(frozen=True)
class Volume:
    """A network volume: it bills until it is deleted, whatever is mounted."""

    volume_id: str
    name: str
    size_gb: float
    location: str
    storage_usd_hr: Decimal | None = None


@dataclass(frozen=True)
class Traits:
    """What a provider can and cannot do, for decisions above it.

    relabel_is_safe: changing the label does not touch a running machine. stop_keeps: what survives a stop.
    stopped_storage_times: how much dearer than in an offer its disk may be while the machine stands still, at most.
    key_reaches_instance: how the SSH public key gets in, `at_create` or `attach`. whose_machine: what a person who is
    asked to agree should know of where their data goes. default_candidates: GPU models to try where nobody named any.
    mounts_volumes: it has network volumes, and a create names the data centres it may stand in. bills_traffic: by the
    GB, told only by its charges. stops_what_is_lost: a machine beyond recovery takes a stop; where not, it bills until
    it is destroyed.
    """

    name: str
    has_interruptible: bool
    relabel_is_safe: bool
    stop_keeps: Literal["disk", "workspace"]
    key_reaches_instance: Literal["at_create", "attach"]
    shows_host_log: bool
    shows_balance: bool
    states_reliability: bool
    max_label_chars: int
    whose_machine: str
    mounts_volumes: bool
    bills_traffic: bool
    stops_what_is_lost: bool
    default_candidates: tuple[str, ...] = ()
    stopped_storage_times: Decimal = Decimal(1)


class ProviderReader(Protocol):
    """Reads only. In Audit nothing else exists."""

    name: str

    def search(self, need: Requirements) -> Search:
        """What can be had now, our own filters applied to whatever the provider sent."""
        ...

    def offers(self, need: Requirements) -> list[Offer]:
        """The offers of `search`, cheapest first."""
        ...


class RentedReader(ProviderReader, Protocol):
    """A provider with an account."""

    traits: Traits

    @property
    def base_url(self) -> str:
        """Scheme, host and port of its API: where a machine of it ends its own billing."""
        ...

    def check_key(self) -> str | None:
        """Prove that the key is accepted; the account it belongs to where the provider says. Raises AuthRejected."""
        ...

    def machines(self) -> list[Machine]:
        """Every instance of the account, all pages of it: complete or an error."""
        ...

    def machine(self, instance_id: str) -> Machine | None:
        """One instance. None: the provider said clearly that it is not there: one observation, no proof.

        An answer that says neither raises.
        """
        ...

    def charges(self, since: datetime, until: datetime) -> list[Charge]:
        """What was billed in that time, per instance and kind; complete or an error."""
        ...

    def balance(self) -> Balance: ...

    def log_lines(self, instance_id: str, *, source: Literal["container", "system"], lines: int = 100) -> list[str]:
        """The newest lines of a machine's log, oldest first, bounded in size and time."""
        ...


class RentedWriter(Protocol):
    """Every method is one request. None of them decides whether it should be sent: the lifecycle does."""

    name: str

    def create(self, spec: MachineSpec) -> CreateOutcome:
        """Ask for one machine. UsageError for a spec this provider cannot express; nothing is sent then."""
        ...

    def destroy(self, instance_id: str) -> Literal["accepted", "absent"]:
        """`accepted` is a promise, no proof; `absent`: it said it knows no such instance."""
        ...

    def stop(self, instance_id: str) -> None: ...

    def start(self, instance_id: str) -> None:
        """Raises HostFull where the host has no free GPU."""
        ...

    def restart(self, instance_id: str) -> None: ...

    def set_label(self, instance_id: str, label: str) -> None:
        """Look at `traits.relabel_is_safe` first."""
        ...

    def attach_key(self, instance_id: str, public_key: str) -> None:
        """Let this SSH key in. Does nothing where keys are given at create."""
        ...


def find_by_label(machines: Iterable[Machine], label: str) -> list[Machine]:
    """All that carry exactly this label: after an unanswered create there may be none, one, or two."""
    return [machine for machine in machines if machine.label == label]
