"""Pods: how one is deployed, started, stopped and ended, what each costs, and what its container is given.

The rules are those of both APIs; REST v2 and GraphQL bring their own words and defaults (runpod_rest, runpod_graphql).
"""

from __future__ import annotations

import random
import re
import secrets
import shlex
import string
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gpu_skills.sandbox import faults as fault_kinds
from gpu_skills.sandbox import meter
from gpu_skills.sandbox.containers import Boot, free_port
from gpu_skills.sandbox.runpod_placement import CPU_FLAVOURS, NO_DISK, NO_INSTANCES, Wish, cpu_host, place
from gpu_skills.sandbox.runpod_wire import Problem, stamp
from gpu_skills.sandbox.world import Account, Instance, Volume, World

if TYPE_CHECKING:
    from gpu_skills.sandbox.runpod_logs import Logs
    from gpu_skills.sandbox.runpod_wire import Settings

DISK_USD_GB_MONTH = Decimal("0.10")  # container disk and volume disk of a pod that is not stopped
STOPPED_VOLUME_USD_GB_MONTH = Decimal("0.20")
DEFAULT_DISK_GB = 20  # of a create that names none; the documents give no number
SYMMETRIC_ABOVE = 70_000  # asking for such a TCP port means: the same number inside and outside
LONGEST_RESTART_DELAY_S = 300.0
RESTART_FORGIVEN_AFTER_S = 600.0

# A start script as the official images have it: an SSH server if there is a key, and then it stays.
START_SCRIPT = """#!/bin/bash
if [ -n "$PUBLIC_KEY" ]; then
  {sshd} &
fi
exec sleep infinity
"""
WITHOUT_SSHD = START_SCRIPT.replace("{sshd}", "sleep infinity")

_IMAGE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9.-]*(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_PORT = re.compile(r"(\d{1,5})/(http|tcp)")


@dataclass
class PodSpec:
    """A create, in the words of neither API."""

    name: str
    image: str
    wish: Wish | None = None
    cpu: tuple[str, int] | None = None  # flavour, vCPUs
    data_centers: tuple[str, ...] = ()
    disk_gb: int = DEFAULT_DISK_GB
    persistent: dict[str, Any] | None = None  # size, path
    network: dict[str, Any] | None = None  # volumeId, path
    ports: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    args: str = ""
    registry: str | None = None
    start_ssh: bool = False
    start_jupyter: bool = False
    global_networking: bool = False


@dataclass
class Pod:
    """What only RunPod knows about an instance; kept as `instance.extra["pod"]`."""

    image: str
    args: str
    ports: list[str]
    persistent: dict[str, Any] | None
    network: dict[str, Any] | None
    registry: str | None
    gpu_id: str | None
    cpu: tuple[str, int] | None
    rate_usd_hr_each: Decimal
    injected: dict[str, str]
    has_global_networking: bool
    is_locked: bool = False
    is_restarting: bool = False  # its command ended and the host starts it again: RUNNING all the time
    restarts: int = 0
    ssh_port: int = 0  # promised to its SSH server, which may not listen yet
    last_change: str = ""

    @property
    def kind(self) -> str:
        return "gpu" if self.cpu is None else "cpu"


def pod_of(instance: Instance) -> Pod:
    pod: Pod = instance.extra["pod"]
    return pod


class Pods:
    def __init__(self, world: World, settings: Settings, logs: Logs):
        self.world = world
        self.settings = settings
        self.logs = logs

    # deploying -----------------------------------------------------------------------------------------------------

    def deploy(self, account: Account, spec: PodSpec, faults: Mapping[str, dict[str, Any]]) -> Instance:
        """Make the pod, or raise Problem: 400 a rule or no capacity, 402 no money, 422 a bad image."""
        self._check(account, spec)
        if "insufficient_balance" in faults:
            raise Problem(402, "insufficient balance to create this pod")
        if "no_capacity" in faults or "offer_gone" in faults:
            raise Problem(400, NO_INSTANCES)
        instance = self._instance(account, spec)
        instance.faults.update(fault_kinds.of_instances(faults))
        self._check_money(account, instance.rate_usd_hr)
        self.world.rent(instance)
        if "error_with_contract" in faults:
            self.stop(instance)
            raise Problem(500, f"pod {instance.id} was created but could not be started")
        return instance

    def _check(self, account: Account, spec: PodSpec) -> None:
        check_container(spec.image, spec.args, spec.ports, spec.env)
        if spec.registry is not None and spec.registry not in account.extra.get("registries", {}):
            raise Problem(400, f"container registry credential {spec.registry[:60]!r} not found")
        for mount in (spec.persistent, spec.network):
            if mount is not None:
                check_path(mount["path"])
        if spec.network is not None and self._network_volume(account, spec) is None:
            raise Problem(400, f"network volume {spec.network['volumeId'][:60]!r} not found")

    def _network_volume(self, account: Account, spec: PodSpec | Pod) -> Volume | None:
        volume = self.world.volumes.get(spec.network["volumeId"]) if spec.network else None
        return volume if volume is not None and volume.account is account else None

    def _instance(self, account: Account, spec: PodSpec) -> Instance:
        host, rate_each, count = self._place(account, spec)
        injected: dict[str, str] = {}
        keys = list(account.ssh_keys.values())
        if spec.start_ssh and keys and "PUBLIC_KEY" not in spec.env:
            injected["PUBLIC_KEY"] = "\n".join(keys)
        if spec.start_jupyter and "JUPYTER_PASSWORD" not in spec.env:
            injected["JUPYTER_PASSWORD"] = secrets.token_hex(10)
        pod = Pod(
            spec.image,
            spec.args,
            list(spec.ports),
            spec.persistent,
            spec.network,
            spec.registry,
            spec.wish.gpu_id if spec.wish else None,
            spec.cpu,
            rate_each,
            injected,
            spec.global_networking,
            last_change=f"Rented by User: {stamp(self.world.now())}",
        )
        return Instance(
            id=self.new_id(14),
            vendor="runpod",
            account=account,
            host=host,
            gpu_count=count if spec.wish else 0,
            disk_gb=Decimal(spec.disk_gb),
            label=spec.name,
            image=spec.image,
            created_at=self.world.now(),
            rate_usd_hr=rate_each * count,
            volume_gb=Decimal(spec.persistent["size"]) if spec.persistent else Decimal(0),
            env=dict(spec.env),
            extra={"pod": pod},
        )

    def new_id(self, length: int) -> str:
        """Opaque, lower-case, alphanumeric, and the same for the same seed and history."""
        return "".join(self.world.dice.choices(string.ascii_lowercase + string.digits, k=length))

    def _place(self, account: Account, spec: PodSpec) -> tuple[Any, Decimal, int]:
        """Host, rate of one unit, number of units."""
        volume = self._network_volume(account, spec)
        centers = spec.data_centers
        if volume is not None and self.settings.volume_places_pod:
            centers = (volume.location,)
        if spec.cpu is not None:
            flavour = CPU_FLAVOURS[spec.cpu[0]]
            host, rate, count = cpu_host(self.world.catalogue, centers), flavour.usd_hr_per_vcpu, spec.cpu[1]
        else:
            assert spec.wish is not None
            wish = Wish(**{**vars(spec.wish), "data_centers": centers})
            if volume is not None and "SECURE" not in wish.clouds:
                raise Problem(400, "network volumes are available in Secure Cloud only")
            host, count = place(self.world.catalogue, wish), wish.count
            rate = host.rate_usd_hr if host is not None else Decimal(0)
        if host is None:
            raise Problem(400, NO_INSTANCES)
        if spec.disk_gb + (spec.persistent["size"] if spec.persistent else 0) > host.disk_gb:
            raise Problem(400, NO_DISK)
        if volume is not None and host.location["data_center"] != volume.location:
            raise Problem(400, f"the network volume is in {volume.location}: pod and volume must share a data center")
        if spec.global_networking and not host.location.get("global_network"):
            raise Problem(400, "global networking is not available in this data center")
        return host, rate, count

    def _check_money(self, account: Account, rate_usd_hr: Decimal) -> None:
        """One hour of credit, and the account's limit of spending."""
        balance = account.balance_usd(self.world.now())
        if balance < rate_usd_hr or balance <= 0:
            raise Problem(402, "insufficient balance: creating this pod needs at least one hour of credit")
        if account.bill.burn_usd_hr() + rate_usd_hr > self.settings.spend_limit_usd_hr:
            raise Problem(400, f"this would exceed your spend limit of ${self.settings.spend_limit_usd_hr}/hr")

    # its life ------------------------------------------------------------------------------------------------------

    def status(self, instance: Instance) -> str:
        phase, pod = instance.phase, pod_of(instance)
        if instance.is_destroyed:
            return "TERMINATED"
        if "status_error" in instance.faults and phase == "created":
            return "ERROR"
        if phase == "stopped" or (phase == "stopping" and instance.intended == "stopped"):
            return "EXITED"
        if phase == "running" or pod.is_restarting:
            return "RUNNING"
        if phase == "exited":
            return "RUNNING" if "crash_loop" in instance.faults else "ERROR"
        return "PROVISIONING" if phase == "created" and not instance.boots else "STARTING"

    def actions(self, instance: Instance) -> list[str]:
        return {
            "RUNNING": ["stop", "restart", "terminate"],
            "EXITED": ["start", "terminate"],
            "ERROR": ["start", "terminate"],
            "TERMINATED": [],
        }.get(self.status(instance), ["stop", "terminate"])

    def is_reported(self, instance: Instance) -> bool:
        """Whether its container has told of itself: ports, runtime and utilization are known."""
        return (
            self.status(instance) == "RUNNING"
            and not instance.is_offline
            and "unknown" not in instance.faults
            and instance.started_at is not None
            and self.world.now() >= instance.started_at + self.settings.report_delay_s
        )

    def start(self, instance: Instance, gpu_count: int | None = None) -> None:
        """Onto its own host again. Raises Problem when that is full."""
        pod = pod_of(instance)
        count = instance.gpu_count if gpu_count is None or pod.cpu else gpu_count
        if instance.account.balance_usd(self.world.now()) <= 0:
            raise Problem(402, "insufficient balance to start this pod")
        full = instance.faults.pop("host_full", None) is not None
        if count and (full or (not instance.held_gpus and instance.host.free_gpus < count)):
            raise Problem(400, "There are not enough free GPUs on the host machine to start this pod.")
        if pod.cpu is None and count != instance.gpu_count:
            instance.gpu_count, instance.rate_usd_hr = count, pod.rate_usd_hr_each * count
        pod.is_restarting, pod.restarts = False, 0
        pod.last_change = f"Resumed by User: {stamp(self.world.now())}"
        self.world.start(instance)

    def stop(self, instance: Instance, who: str = "User") -> None:
        pod = pod_of(instance)
        pod.is_restarting = False
        pod.last_change = f"Exited by {who}: {stamp(self.world.now())}"
        self.logs.keep_up(instance)
        self.world.stop(instance, reason=f"stopped by {who.lower()}", wipe=True)

    def restart(self, instance: Instance) -> None:
        """A fresh container on the same host: its disk is wiped, its ports change."""
        pod = pod_of(instance)
        pod.is_restarting, pod.restarts = False, 0
        self.logs.keep_up(instance)
        self.world.reboot(instance, wipe=True)

    def terminate(self, instance: Instance, faults: Mapping[str, Any] = {}) -> None:
        if "destroy_again" not in faults:
            self.world.destroy(instance)
            self.logs.note_phase(instance)

    def command_ended(self, instance: Instance, code: int) -> None:
        """The host starts the container again, on the same disk and ports, and bills on."""
        pod, now = pod_of(instance), self.world.now()
        if instance.started_at is not None and now - instance.started_at > RESTART_FORGIVEN_AFTER_S:
            pod.restarts = 0
        delay_s = min(self.settings.restart_delay_s * 2 ** min(pod.restarts, 20), LONGEST_RESTART_DELAY_S)
        pod.restarts += 1
        pod.is_restarting = True
        self.logs.keep_up(instance)
        self.logs.note(instance, f"container exited with code {code}")
        self.world.restart_container(instance, delay_s=delay_s)

    # what it costs ---------------------------------------------------------------------------------------------------

    def tariff(self, instance: Instance) -> dict[str, Decimal]:
        """Compute and container disk while it is not stopped, the volume disk always, and dearer when it is."""
        is_stopped = self.status(instance) == "EXITED"
        volume_price = STOPPED_VOLUME_USD_GB_MONTH if is_stopped else DISK_USD_GB_MONTH
        rates = {"volume": meter.per_hour(volume_price, instance.volume_gb)}
        if not is_stopped:
            rates[pod_of(instance).kind] = instance.rate_usd_hr
            rates["disk"] = meter.per_hour(DISK_USD_GB_MONTH, instance.disk_gb)
        return rates

    # how to reach it -------------------------------------------------------------------------------------------------

    def has_public_ip(self, instance: Instance) -> bool:
        return instance.host.port_count > 0

    def public_port(self, instance: Instance, private: int, boot: int) -> int:
        """Outside port of a TCP port other than 22: another one after each start, as the vendor's change too."""
        return 10_000 + zlib.crc32(f"{instance.id} {private} {boot}".encode()) % 50_000

    def port_mappings(self, instance: Instance) -> list[dict[str, Any]]:
        """Private, public, type and address of each port. Takes a look: an old SSH port is shown once only."""
        rows = []
        for port in pod_of(instance).ports:
            private, kind = parse_port(port)
            if kind == "http":
                rows.append({"private": private, "public": self.public_port(instance, private, 0), "type": "http",
                             "ip": f"100.65.{private % 250}.{instance.host.machine_id % 250}"})  # fmt: skip
                continue
            public = self.world.shown_port(instance) if private == 22 else None
            if public is None:
                public = self.public_port(instance, private, instance.boots)
            inside = public if private > SYMMETRIC_ABOVE else private
            reachable = self.has_public_ip(instance)
            rows.append({"private": inside, "public": public if reachable else None, "type": "tcp",
                         "ip": "127.0.0.1" if reachable else None})  # fmt: skip
        return rows

    def proxy_user(self, instance: Instance) -> str:
        return f"{instance.id}-{zlib.crc32(str(instance.host.machine_id).encode()):08x}"

    def machine_name(self, instance: Instance) -> str:
        dice = random.Random(instance.host.machine_id)
        return "".join(dice.choices(string.ascii_lowercase + string.digits, k=12))

    # what its container is given -------------------------------------------------------------------------------------

    def boot(self, instance: Instance) -> Boot:
        pod = pod_of(instance)
        port = pod.ssh_port = instance.port if pod.is_restarting and instance.port else self._unpromised_port()
        environment = self.environment(instance, port)
        keys = [line.strip() for line in environment.get("PUBLIC_KEY", "").splitlines() if line.strip()]
        return Boot(
            environment=environment,
            session_environment={n: v for n, v in environment.items() if n.isidentifier()}
            if self.settings.session_sees_env
            else {},
            command=self._command(instance),
            authorized_keys=keys,
            mounts=self._mounts(instance),
            sshd=False,
            start_script=WITHOUT_SSHD if "dead_ssh" in instance.faults else START_SCRIPT,
            port=port,
        )

    def _unpromised_port(self) -> int:
        """Free, and not one that another pod was given a moment ago: nothing tries again when two get the same."""
        promised = {i.extra["pod"].ssh_port for i in self.world.instances.values() if "pod" in i.extra}
        while (port := free_port()) in promised:
            pass
        return port

    def environment(self, instance: Instance, ssh_port: int) -> dict[str, str]:
        pod = pod_of(instance)
        gpus = self.world.gpu_report(instance)["gpus"]
        given = {
            "RUNPOD_POD_ID": str(instance.id),
            "RUNPOD_API_KEY": instance.key.value if instance.key else "",
            "RUNPOD_DC_ID": instance.host.location["data_center"],
            "RUNPOD_POD_HOSTNAME": self.proxy_user(instance),
            "RUNPOD_GPU_COUNT": str(len(gpus)),
            "RUNPOD_CPU_COUNT": str(vcpus(instance)),
            "CUDA_VERSION": "12.8.1",
            "PYTORCH_VERSION": "2.8.0",
            # Only here: where this vendor is. The vendor's own clients read the same variable.
            "RUNPOD_API_BASE_URL": self.world.url,
        }
        if self.has_public_ip(instance):
            given["RUNPOD_PUBLIC_IP"] = "127.0.0.1"
            for text in pod.ports:
                private, kind = parse_port(text)
                if kind == "tcp":
                    public = ssh_port if private == 22 else self.public_port(instance, private, instance.boots + 1)
                    given[f"RUNPOD_TCP_PORT_{private}"] = str(public)
        if pod.network is not None:
            given["RUNPOD_VOLUME_ID"] = pod.network["volumeId"]
        return {**given, **pod.injected, **instance.env}

    def _command(self, instance: Instance) -> str:
        """`args` takes the place of the image's own command and is executed without a shell in between.

        `/start.sh` in it means that of the image, which here lies below the container's own root.
        """
        if "crash_loop" in instance.faults:
            return "exit 1"
        assert instance.container is not None
        script = str(instance.container.root / "start.sh")
        words = split_args(pod_of(instance).args)
        if not words:
            return f"exec {shlex.quote(script)}"
        return "exec " + shlex.join(re.sub(r"(?<![\w./-])/start\.sh\b", lambda _: script, word) for word in words)

    def _mounts(self, instance: Instance) -> dict[str, Any]:
        pod = pod_of(instance)
        if pod.persistent is not None:
            return {pod.persistent["path"]: None}
        volume = self._network_volume(instance.account, pod)
        return {pod.network["path"]: volume.directory} if pod.network is not None and volume is not None else {}


def vcpus(instance: Instance) -> int:
    cpu = pod_of(instance).cpu
    return cpu[1] if cpu is not None else 8 * max(instance.gpu_count, 1)


def memory_gb(instance: Instance) -> int:
    cpu = pod_of(instance).cpu
    return cpu[1] * CPU_FLAVOURS[cpu[0]].ram_gb_per_vcpu if cpu is not None else 32 * max(instance.gpu_count, 1)


def split_args(args: str) -> list[str]:
    try:
        return shlex.split(args)
    except ValueError:  # a quote without its end
        return args.split()


def parse_port(text: str) -> tuple[int, str]:
    number, _, kind = text.partition("/")
    return int(number), kind


def check_container(image: str, args: str, ports: Any, env: Mapping[str, str]) -> None:
    """The rules that no schema tells. Raises Problem."""
    if _IMAGE.fullmatch(image) is None or len(image) > 400:
        raise Problem(422, "Request validation failed.", [f"$.image: {image[:60]!r} is not a valid image reference"])
    if "\0" in args:
        raise Problem(400, "args must not contain NUL")
    for port in ports:
        match = _PORT.fullmatch(port)
        if match is None or not (
            1 <= int(match[1]) <= 65535 or (match[2] == "tcp" and int(match[1]) > SYMMETRIC_ABOVE)
        ):
            raise Problem(400, f"invalid port {port[:40]!r}: use port/http or port/tcp")
    if sum(port.endswith("/http") for port in ports) > 10:
        raise Problem(400, "at most 10 HTTP ports may be exposed")
    if len(env) > 50:
        raise Problem(400, "at most 50 environment variables may be set")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise Problem(400, f"invalid environment variable {name[:40]!r}")


def check_path(path: str) -> None:
    if not path.startswith("/") or path.strip("/") in ("", ".", "..") or "\0" in path or ".." in path.split("/"):
        raise Problem(400, f"invalid mount path {path[:60]!r}: an absolute path below / is needed")
