"""The one world behind all faces: accounts, hosts, instances, volumes, their state machine, and who pays for them.

Everything is read and changed with `world.lock` held. The state machine knows these phases of an instance:

    created → loading → running ⇄ (reboot) · running → stopping → stopped → created → … · running → exited
    any → destroyed

A vendor's words for them are its face's business. Delays between phases are on the vendor's clock (`Delays`); the real
container is started when loading ends, and the instance is `running` when its SSH server listens. Each command raises
`instance.turn`, so that a timer of an earlier command finds it changed and does nothing.
"""

from __future__ import annotations

import itertools
import random
import secrets
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills.sandbox import catalogue, faults, processes
from gpu_skills.sandbox.clock import Timer, VirtualClock
from gpu_skills.sandbox.containers import USER, CannotStart, Container
from gpu_skills.sandbox.face import Face, build_faces
from gpu_skills.sandbox.meter import Bill
from gpu_skills.sandbox.room import MachineRoom

KEY_PREFIX = "sbx_"


@dataclass
class Delays:
    """Seconds on the vendor's clock."""

    provisioning_s: float = 0.3
    loading_s: float = 1.0
    stopping_s: float = 0.2
    reboot_s: float = 0.2
    result_s: float = 0.3  # until a requested log or command output can be fetched


@dataclass
class Account:
    vendor: str
    id: int
    name: str
    deposited_usd: Decimal
    opened_at: float = 0.0  # when the money came
    bill: Bill = field(default_factory=Bill)
    ssh_keys: dict[int, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    zero_timer: Timer | None = None
    is_broke: bool = False

    def balance_usd(self, now: float) -> Decimal:
        return self.deposited_usd - self.bill.total_usd(now)


@dataclass
class Key:
    """What a caller shows. instance_id: a machine's own key, which may only stop, start and destroy that machine."""

    value: str
    account: Account
    instance_id: Any = None


@dataclass(eq=False)
class Instance:
    """A rental: Vast's contract, RunPod's pod. `extra` holds what only its vendor knows."""

    id: Any
    vendor: str
    account: Account
    host: catalogue.Host
    gpu_count: int
    disk_gb: Decimal
    label: str | None
    image: str
    created_at: float
    rate_usd_hr: Decimal  # for the GPUs of the whole instance
    volume_gb: Decimal = Decimal(0)
    env: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    ssh_keys: dict[int, str] = field(default_factory=dict)
    key: Key | None = None
    phase: str = "created"
    intended: str = "running"  # running, stopped, destroyed
    reason: str = ""  # why it is stopped or exited, in words
    is_waiting: bool = False  # wants to run and finds no free GPU on its host
    is_offline: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    port: int = 0
    old_port: int = 0
    boots: int = 0
    held_gpus: int = 0
    visible_from: float = 0.0
    absent_until: float | None = None
    turn: int = 0
    container: Container | None = None

    @property
    def resource(self) -> str:
        return f"instance-{self.id}"

    @property
    def is_destroyed(self) -> bool:
        return self.phase == "destroyed"


@dataclass
class Volume:
    """A disk of its own that outlives machines."""

    id: Any
    vendor: str
    account: Account
    name: str
    size_gb: Decimal
    location: str
    directory: Path
    created_at: float
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def resource(self) -> str:
        return f"volume-{self.id}"


class World:
    """directory: where containers live. containers: False makes instances without a real machine behind them."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 1,
        clock: VirtualClock | None = None,
        catalogue_file: Path = catalogue.DEFAULT,
        delays: Delays | None = None,
        fault_rules: Any = (),
        balance_usd: Decimal = Decimal(100),
        containers: bool = True,
    ):
        self.directory = directory
        self.seed = seed
        self.clock = clock or VirtualClock()
        self.delays = delays or Delays()
        self.faults = faults.Faults()
        self.lock = threading.RLock()
        self.dice = random.Random(f"{seed} world")
        self.catalogue = catalogue.load(seed, catalogue_file)
        self.accounts: dict[int, Account] = {}
        self.keys: dict[str, Key] = {}
        self.instances: dict[Any, Instance] = {}
        self.volumes: dict[Any, Volume] = {}
        self.calls: Counter[tuple[str, str]] = Counter()  # (vendor, call) → how often
        self.mutating_calls: Counter[tuple[str, str]] = Counter()
        self.too_frequent: Counter[tuple[str, str]] = Counter()
        self.log: deque[dict[str, Any]] = deque(maxlen=100_000)
        self.crashes: deque[str] = deque(maxlen=100)  # defects of the sandbox itself; a test asserts there are none
        self.url = ""
        self.ssh_user = USER  # a vendor's is root; without root the SSH servers let in their own user only
        self.limit_mode = "count"  # see http.Limits; for limits that only the vendor's own face can count
        self._has_containers = containers
        self._numbers = itertools.count(20_000_000 + self.dice.randrange(1_000_000))
        self._mark = f"{processes.mark_of(directory.parent)}-{secrets.token_hex(4)}"
        self.room = MachineRoom(on_failure=self._crashed)
        self.clock.settle = self.room.settle
        self.clock.on_failure = self._crashed
        self.faces: dict[str, Face] = {face.vendor: face for face in build_faces(self)}
        for vendor in self.faces:
            self.add_account(vendor, balance_usd=balance_usd)
        self.apply_faults(list(fault_rules))

    def now(self) -> float:
        return self.clock.now()

    def new_id(self) -> int:
        return next(self._numbers)

    # accounts and keys ---------------------------------------------------------------------------------------------

    def add_account(self, vendor: str, *, balance_usd: Decimal = Decimal(100), name: str = "") -> Key:
        """A new account and its full key."""
        name = name or f"{vendor} sandbox"
        account = Account(vendor, self.new_id(), name, Decimal(balance_usd), opened_at=self.now())
        self.accounts[account.id] = account
        return self.add_key(account)

    def add_key(self, account: Account, *, instance_id: Any = None) -> Key:
        kind = "machine" if instance_id is not None else "account"
        key = Key(f"{KEY_PREFIX}{account.vendor}_{kind}_{secrets.token_hex(16)}", account, instance_id)
        self.keys[key.value] = key
        return key

    def account(self, vendor: str) -> Account:
        """The first account there."""
        return next(account for account in self.accounts.values() if account.vendor == vendor)

    def set_balance(self, account: Account, balance_usd: Decimal) -> None:
        account.deposited_usd = Decimal(balance_usd) + account.bill.total_usd(self.now())
        account.is_broke = False
        self._watch_balance(account)

    # who pays ------------------------------------------------------------------------------------------------------

    def burning(self) -> list[dict[str, Any]]:
        """Everything that costs money at this moment: did we leak? An empty list means no."""
        with self.lock:
            return [
                {
                    "provider": account.vendor,
                    "resource": entry.resource,
                    "kind": entry.kind,
                    "rate_usd_hr": entry.rate_usd_hr,
                    "label": self._label_of(entry.resource),
                }
                for account in self.accounts.values()
                for entry in account.bill.running()
            ]

    def _label_of(self, resource: str) -> str | None:
        named = [*self.instances.values(), *self.volumes.values()]
        return next(
            (getattr(r, "label", None) or getattr(r, "name", None) for r in named if r.resource == resource), None
        )

    def rebill(self, instance: Instance) -> None:
        """Put what the face says it costs now on the meter."""
        now = self.now()
        face = self.faces[instance.vendor]
        rates = {} if instance.is_destroyed or instance.is_offline else face.tariff(instance)
        instance.account.bill.set_rates(instance.resource, rates, now)
        self._watch_balance(instance.account)

    def transfer(self, instance: Instance, *, up_gb: Decimal = Decimal(0), down_gb: Decimal = Decimal(0)) -> None:
        """Bandwidth, at the host's price per gigabyte."""
        bill, host, now = instance.account.bill, instance.host, self.now()
        for kind, price, quantity in (("bwu", host.up_usd_gb, up_gb), ("bwd", host.down_usd_gb, down_gb)):
            if price and quantity:
                bill.add(instance.resource, kind, usd_per_gb=price, quantity_gb=Decimal(quantity), now=now)
        self._watch_balance(instance.account)

    def _watch_balance(self, account: Account) -> None:
        if account.zero_timer is not None:
            account.zero_timer.cancel()
        burn, balance = account.bill.burn_usd_hr(), account.balance_usd(self.now())
        if account.is_broke or (burn <= 0 and balance > 0):
            return
        # One second more than the arithmetic, since the meter counts whole seconds.
        left_s = float(max(balance, Decimal(0)) / burn * 3600) + 1 if burn > 0 else 0.0
        if left_s < 10 * 366 * 86400:
            account.zero_timer = self.clock.call_in(left_s, lambda: self._check_balance(account))

    def _check_balance(self, account: Account) -> None:
        with self.lock:
            if account.is_broke:
                return
            if account.balance_usd(self.now()) > 0:
                self._watch_balance(account)
                return
            account.is_broke = True
            self.faces[account.vendor].balance_is_zero(account)

    # looking -------------------------------------------------------------------------------------------------------

    def living(self, account: Account) -> Iterator[Instance]:
        """Every instance of the account that is not destroyed, seen or not."""
        return (i for i in self.instances.values() if i.account is account and not i.is_destroyed)

    def listed(self, account: Account) -> list[Instance]:
        """Those that a list shows now."""
        return [i for i in self.living(account) if self._is_visible(i) and not self._lags(i)]

    def find(self, account: Account, instance_id: Any) -> Instance | None:
        """One instance as the vendor shows it: None when absent, foreign, or hidden for a while."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.account is not account or instance.is_destroyed:
            return None
        return instance if self._is_visible(instance) else None

    def _is_visible(self, instance: Instance) -> bool:
        return instance.absent_until is None and self.now() >= instance.visible_from

    def _lags(self, instance: Instance) -> bool:
        lag = instance.faults.get("list_lag")
        return lag is not None and self.now() < instance.created_at + _seconds(lag, "seconds", 60)

    # renting -------------------------------------------------------------------------------------------------------

    def rent(self, instance: Instance, *, run: bool = True) -> Instance:
        """Take it into the world: GPUs held, key made, meter on, boot begun. Instance faults must be set before."""
        self.instances[instance.id] = instance
        instance.key = self.add_key(instance.account, instance_id=instance.id)
        instance.is_offline = "offline" in instance.faults
        if (hidden := instance.faults.get("hidden_at_first")) is not None:
            instance.visible_from = self.now() + _seconds(hidden, "seconds", 60)
        if (dearer := instance.faults.get("price_changed")) is not None:
            instance.rate_usd_hr *= Decimal(str(dearer.get("factor", 1.5)))
        if (capped := instance.faults.get("capped_disk")) is not None:
            instance.disk_gb = min(instance.disk_gb, Decimal(str(capped.get("disk_gb", 8))))
        if run and "created_stopped" not in instance.faults:
            self._hold_gpus(instance)
            self._boot(instance)
        else:
            instance.phase = instance.intended = "stopped"
        self.rebill(instance)
        self.faces[instance.vendor].rented(instance)
        if (outbid := instance.faults.get("outbid")) is not None:
            self._plan_outbid(instance, outbid)
        return instance

    def start(self, instance: Instance) -> bool:
        """Start a stopped one. False: its host has no free GPU; it then waits for one (`is_waiting`)."""
        instance.turn += 1
        instance.intended = "running"
        if instance.phase in ("created", "loading", "running"):
            return True
        if instance.faults.pop("host_full", None) is not None or not self._hold_gpus(instance):
            instance.is_waiting = True
            return False
        self._boot(instance)
        self.rebill(instance)
        return True

    def stop(
        self,
        instance: Instance,
        *,
        reason: str = "stopped by its owner",
        keep_gpus: bool = False,
        wipe: bool = False,
    ) -> None:
        """Stop it. Its GPUs become free for others unless `keep_gpus`. wipe: its container disk does not survive."""
        instance.turn += 1
        instance.intended, instance.is_waiting, instance.reason = "stopped", False, reason
        if instance.phase in ("stopped", "destroyed"):
            self.rebill(instance)
            return
        instance.phase = "stopping"
        self._halt_container(instance, wipe=wipe)

        def stopped() -> None:
            instance.phase = "stopped"
            instance.old_port, instance.port = instance.port, 0
            if not keep_gpus:
                self._free_gpus(instance)
            self.rebill(instance)

        self._after(instance, self.delays.stopping_s, stopped)
        self.rebill(instance)

    def reboot(self, instance: Instance, *, wipe: bool = False, delay_s: float | None = None) -> None:
        """Stop and start the container on the same GPUs. wipe: a fresh container disk and possibly a new port."""
        instance.turn += 1
        instance.phase = "stopping"
        keep_port = 0 if wipe else instance.port
        instance.old_port = instance.port
        self._halt_container(instance, wipe=wipe)
        delay_s = self.delays.reboot_s if delay_s is None else delay_s
        self._after(instance, delay_s, lambda: self._boot(instance, port=keep_port))
        self.rebill(instance)

    def destroy(self, instance: Instance) -> bool:
        """End it for good. False: a fault made this destroy change nothing."""
        if (again := instance.faults.get("destroy_repeats")) is not None:
            left = int(again.setdefault("left", again.get("times", 2)))
            if left > 0:
                again["left"] = left - 1
                return False
        if (back := instance.faults.pop("comes_back", None)) is not None:
            self._vanish_for_a_while(instance, _seconds(back, "seconds", 30))
            return True
        instance.turn += 1
        instance.phase = instance.intended = "destroyed"
        instance.ended_at = self.now()
        self._free_gpus(instance)
        self.rebill(instance)
        self._drop_key(instance)
        if instance.container is not None:
            self.room.submit(instance.id, instance.container.remove)
        return True

    def _drop_key(self, instance: Instance) -> None:
        if instance.key is not None:
            self.keys.pop(instance.key.value, None)

    def _vanish_for_a_while(self, instance: Instance, seconds: float) -> None:
        """Absent from every answer, yet billing all the time: the 404 that comes back."""
        instance.absent_until = self.now() + seconds

        def back() -> None:
            with self.lock:
                instance.absent_until = None

        self.clock.call_in(seconds, back)

    # the way to running ----------------------------------------------------------------------------------------------

    def _boot(self, instance: Instance, *, port: int = 0) -> None:
        instance.turn += 1
        instance.phase, instance.intended, instance.reason = "created", "running", ""
        instance.is_waiting = False
        if "status_error" in instance.faults or "null_status" in instance.faults:
            return
        self._after(instance, self.delays.provisioning_s, lambda: self._load(instance, port))

    def _load(self, instance: Instance, port: int) -> None:
        instance.phase = "loading"
        self.rebill(instance)
        if "stuck_loading" not in instance.faults:
            self._after(instance, self.delays.loading_s, lambda: self._bring_up(instance, port))

    def _bring_up(self, instance: Instance, port: int) -> None:
        """Start the real container; running is what it is once that is up."""
        if not self._has_containers:
            self._is_up(instance, port or self.dice.randrange(20000, 32000))
            return
        if instance.container is None:
            name = f"{instance.vendor}-{instance.id}"
            instance.container = Container(self.directory / name, f"{self._mark}-{name}")
        container, turn = instance.container, instance.turn
        boot = self.faces[instance.vendor].boot(instance)
        boot.gpus = self.gpu_report(instance)
        boot.on_exit = lambda code: self._command_ended(instance, turn, code)
        if "dead_ssh" in instance.faults:
            boot.sshd = False
        renew = instance.boots > 0 and instance.faults.pop("changed_host_key", None) is not None

        def work() -> None:
            try:
                if renew:
                    container.new_host_key()
                opened = container.start(boot, port)
            except (CannotStart, OSError) as exc:
                with self.lock:
                    if instance.turn == turn:
                        instance.phase, instance.reason = "created", f"Error: OCI runtime create failed: {exc}"
                        self.rebill(instance)
                self._crashed(exc)
                return
            with self.lock:
                if instance.turn == turn and instance.phase == "loading":
                    self._is_up(instance, opened)

        self.room.submit(instance.id, work)

    def _is_up(self, instance: Instance, port: int) -> None:
        instance.phase = "running"
        instance.port = port
        instance.started_at = self.now()
        instance.boots += 1
        instance.faults.pop("zero_gpu_start", None)
        if "exited" in instance.faults:
            self.container_exited(instance, 1)
        self.rebill(instance)
        self.faces[instance.vendor].came_up(instance)

    def container_exited(self, instance: Instance, code: int) -> None:
        """Its container ended; the vendor keeps what it keeps billing."""
        instance.turn += 1
        instance.phase, instance.reason = "exited", f"container exited with code {code}"
        self._halt_container(instance)
        self.rebill(instance)

    def restart_container(self, instance: Instance, *, wipe: bool = False, delay_s: float | None = None) -> None:
        """As a vendor does when the main process ended: the same GPUs, billing goes on."""
        self.reboot(instance, wipe=wipe, delay_s=delay_s)

    def _command_ended(self, instance: Instance, turn: int, code: int) -> None:
        with self.lock:
            if instance.turn == turn and instance.phase in ("loading", "running"):
                self.faces[instance.vendor].command_ended(instance, code)

    def _halt_container(self, instance: Instance, *, wipe: bool = False) -> None:
        container = instance.container
        if container is None:
            return

        def work() -> None:
            container.stop()
            if wipe:
                container.wipe()

        self.room.submit(instance.id, work)

    def gpu_report(self, instance: Instance) -> dict[str, Any]:
        """What nvidia-smi shows inside."""
        gpu, count = instance.host.gpu, instance.gpu_count
        if (missing := instance.faults.get("missing_gpu")) is not None:
            count = max(count - int(missing.get("count", 1)), 0)
        if "zero_gpu_start" in instance.faults and instance.boots > 0:
            count = 0
        dice = random.Random(f"{instance.host.machine_id}")
        uuids = [f"GPU-{dice.getrandbits(32):08x}-{dice.getrandbits(16):04x}-4{dice.getrandbits(12):03x}-"
                 f"a{dice.getrandbits(12):03x}-{dice.getrandbits(48):012x}" for _ in range(count)]  # fmt: skip
        return {
            "driver_version": instance.host.driver_version,
            "cuda_version": instance.host.cuda,
            "failed": "no_gpu_driver" in instance.faults,
            "gpus": [
                {
                    "name": gpu.product_name,
                    "uuid": uuid,
                    "memory_mib": gpu.vram_mib,
                    "compute_cap": f"{gpu.compute_cap // 100}.{gpu.compute_cap // 10 % 10}",
                    "power_limit_w": f"{gpu.power_w:.2f}",
                }
                for uuid in uuids
            ],
        }

    def authorize(self, instance: Instance, keys: list[str]) -> None:
        """Let these keys into the running container, in place of the ones before."""
        container = instance.container
        if container is not None and instance.phase in ("loading", "running"):
            self.room.submit(instance.id, lambda: container.authorize(keys))

    def shown_port(self, instance: Instance) -> int:
        """The SSH port as the vendor reports it now; with `old_port` the first look shows the one of before."""
        stale = instance.faults.get("old_port")
        if stale is not None and instance.old_port and instance.old_port != instance.port:
            del instance.faults["old_port"]
            return instance.old_port
        return instance.port

    # GPUs of a host ------------------------------------------------------------------------------------------------

    def _hold_gpus(self, instance: Instance) -> bool:
        host = instance.host
        if instance.held_gpus:
            return True
        if host.free_gpus < instance.gpu_count:
            return False
        host.used[instance.id] = instance.held_gpus = instance.gpu_count
        host.generation += 1
        return True

    def _free_gpus(self, instance: Instance) -> None:
        if instance.held_gpus:
            instance.host.used.pop(instance.id, None)
            instance.held_gpus = 0
            instance.host.generation += 1
            self.wake_waiting(instance.host)

    def wake_waiting(self, host: catalogue.Host) -> None:
        """GPUs of this host may have become free for those who wait for them."""
        for waiting in [i for i in self.instances.values() if i.host is host and i.is_waiting and not i.is_destroyed]:
            self.start(waiting)

    # faults that act on what is there ------------------------------------------------------------------------------

    def apply_faults(self, rules: Any) -> list[faults.Rule]:
        """Add rules; those that name an existing instance or an account act at once. Raises UnknownFault."""
        with self.lock:
            added = self.faults.add(rules)
            for rule in added:
                if rule.where == faults.ACCOUNT:
                    self.faults.discard(rule)
                    for account in self.accounts.values():
                        if rule.provider in (None, account.vendor):
                            self.set_balance(account, Decimal(0))
                elif rule.where == faults.INSTANCE and rule.instance is not None and rule.call is None:
                    named = [i for i in self.instances.values() if rule.instance in (str(i.id), i.label)]
                    for instance in named:
                        self._strike(instance, rule.fault, dict(rule.args))
                    if named:
                        self.faults.discard(rule)
            return added

    def _strike(self, instance: Instance, fault: str, args: dict[str, Any]) -> None:
        """A fault meets an instance that exists."""
        if instance.is_destroyed:
            return
        if fault == "well":
            self._mend(instance)
            return
        instance.faults[fault] = args
        if fault == "outbid":
            self._plan_outbid(instance, args)
        elif fault in ("exited", "crash_loop") and instance.phase == "running":
            self.container_exited(instance, 1)
        elif fault == "offline":
            instance.is_offline = True
            self._halt_container(instance)
            self.rebill(instance)
        elif fault == "price_changed":
            instance.rate_usd_hr *= Decimal(str(args.get("factor", 1.5)))
            self.rebill(instance)
        elif fault in ("missing_gpu", "no_gpu_driver") and instance.container is not None:
            container, report = instance.container, self.gpu_report(instance)
            self.room.submit(instance.id, lambda: container.set_gpus(report))
        elif fault in ("dead_ssh", "changed_host_key") and instance.phase == "running":
            self.reboot(instance)

    def _mend(self, instance: Instance) -> None:
        """Take its faults away and let it go on from where they held it."""
        was, instance.faults = instance.faults, {}
        if instance.is_offline:
            instance.is_offline = False
            if instance.phase == "running":
                self.reboot(instance)
        elif instance.phase == "created" and {"null_status", "status_error"} & set(was):
            self._boot(instance)
        elif instance.phase == "loading" and "stuck_loading" in was:
            self._load(instance, 0)
        self.rebill(instance)

    def _plan_outbid(self, instance: Instance, args: dict[str, Any]) -> None:
        resume_s = args.get("resume")

        def outbid() -> None:
            if instance.phase in ("created", "loading", "running"):
                self.faces[instance.vendor].outbid(instance)
                self.stop(instance, reason="outbid")
                if resume_s is not None:
                    self._after(instance, _seconds(args, "resume", 60) + self.delays.stopping_s, resume)

        def resume() -> None:
            if instance.phase == "stopped":
                self.start(instance)

        self.clock.call_in(_seconds(args, "after", 0), self.guarded(outbid))

    # timers --------------------------------------------------------------------------------------------------------

    def _after(self, instance: Instance, delay_s: float, action: Callable[[], Any]) -> None:
        """Do it later, unless the instance has taken another turn by then."""
        turn = instance.turn

        def act() -> None:
            if instance.turn == turn and not instance.is_destroyed:
                action()

        self.clock.call_in(delay_s, self.guarded(act))

    def guarded(self, action: Callable[[], Any]) -> Callable[[], None]:
        """The action with the lock held, for timers."""

        def act() -> None:
            with self.lock:
                action()

        return act

    # volumes -------------------------------------------------------------------------------------------------------

    def add_volume(self, volume: Volume, rate_usd_hr: Decimal) -> Volume:
        self.volumes[volume.id] = volume
        volume.directory.mkdir(parents=True, exist_ok=True)
        self.rate_volume(volume, rate_usd_hr)
        return volume

    def rate_volume(self, volume: Volume, rate_usd_hr: Decimal) -> None:
        volume.account.bill.set_rate(volume.resource, "volume", rate_usd_hr, self.now())
        self._watch_balance(volume.account)

    def delete_volume(self, volume: Volume) -> None:
        import shutil

        self.rate_volume(volume, Decimal(0))
        self.volumes.pop(volume.id, None)
        self.room.submit(volume.resource, lambda: shutil.rmtree(volume.directory, ignore_errors=True))

    # the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the clock and end every process of every instance."""
        self.clock.stop()
        with self.lock:
            for instance in self.instances.values():
                instance.turn += 1
                if instance.container is not None:
                    self.room.submit(instance.id, instance.container.remove)
        self.room.close()

    def _crashed(self, exc: Exception) -> None:
        self.crashes.append("".join(traceback.format_exception(exc)))

    def delays_dict(self) -> dict[str, float]:
        return asdict(self.delays)


def _seconds(args: dict[str, Any], name: str, default: float) -> float:
    value = args.get(name, default)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float(default)
