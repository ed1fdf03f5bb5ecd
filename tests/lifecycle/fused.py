"""Machines with a fuse: real ones of a sandbox on a clock that runs, and the text alone beside a machine that is a row.

Deadlines are a few real seconds ahead; nothing moves a clock but the folder's own words.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_skills.errors import RemoteError
from gpu_skills.lifecycle import labels
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.guard import fuse
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.providers.base import MachineSpec, Requirements
from gpu_skills.sandbox import processes
from sandbox_fixture import eventually

NO_DELAY = {"provisioning_s": 0, "loading_s": 0, "stopping_s": 0, "reboot_s": 0}
INTENT = "p0123456789abcdef"
FOREIGN = "p00000000000000ff"
OVER = ("stopping", "stopped", "destroyed")


def soon(seconds: float) -> datetime:
    """A whole second: what a fuse can hold."""
    return datetime.fromtimestamp(int(time.time() + seconds), UTC)


def text_of(provider: str, base_url: str | None, deadline_at: datetime, **changes: Any) -> str:
    given: dict[str, Any] = {"longest_s": 3600, "on_expiry": "stop", "keeps": "~", "intent": INTENT, **changes}
    return fuse.bootstrap(provider=provider, base_url=base_url, deadline_at=deadline_at, **given)


@dataclass
class Fused:
    """One rented machine as the vendor has it, and its fuse's folder as it lies on the disk."""

    rig: Any
    instance_id: str
    deadline_at: datetime
    keeps: str
    identity: Path | None

    @property
    def instance(self) -> Any:
        return next(i for i in self.rig.sandbox.world.instances.values() if str(i.id) == self.instance_id)

    @property
    def key(self) -> str:
        return str(self.instance.key.value)

    @property
    def folder(self) -> Path:
        container = self.instance.container
        base = container.home if self.keeps == "~" else Path(f"{container.root}{self.keeps}")
        return base / ".gpu-fuse" / INTENT

    @property
    def log(self) -> str:
        return str(self.instance.container.read_log())

    @property
    def is_over(self) -> bool:
        """The vendor has ended it: no GPU bills any more."""
        return self.instance.phase in OVER and self.instance.intended != "running"  # a restart is stopping, too

    def burning(self) -> set[str]:
        return {entry["kind"] for entry in self.rig.sandbox.world.burning()}

    @property
    def machine(self) -> Machine:
        """As the registry would have it, once the vendor shows a way in."""
        eventually(lambda: any(way.carries_commands for way in self.rig.reader.machine(self.instance_id).ways))
        way = next(way.endpoint for way in self.rig.reader.machine(self.instance_id).ways if way.carries_commands)
        return Machine(
            id=labels.machine_id(INTENT),
            provider=self.rig.vendor,
            host=self.instance_id,
            intent=INTENT,
            endpoint=replace(way, identity_file=str(self.identity)),
            root=fuse.runner_root(self.keeps),
        )

    def link(self) -> Link:
        """A conversation with its runner, once SSH answers."""
        until = time.monotonic() + 20
        while True:
            try:
                return self.rig.op.connect(self.machine)  # type: ignore[no-any-return]
            except RemoteError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def receipt(self, **wanted: Any) -> dict[str, Any]:
        """The receipt on the disk, once its fields are these."""

        def look() -> dict[str, Any] | None:
            try:
                found: dict[str, Any] = json.loads((self.folder / "receipt.json").read_text())
            except FileNotFoundError:
                return None
            return found if all(found[name] == value for name, value in wanted.items()) else None

        return eventually(look, within_s=15)  # type: ignore[no-any-return]

    def late_s(self, *, within_s: float = 20.0) -> float:
        """How long after its deadline the vendor ended it."""
        eventually(lambda: self.is_over, within_s=within_s)
        return time.time() - self.deadline_at.timestamp()

    def command_lines(self) -> list[str]:
        container = self.instance.container
        found = []
        for pid in processes.instance_processes(container.mark, container.directory, container.own_pids()):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


def rent(
    rig: Any,
    *,
    in_s: float,
    on_expiry: str = "stop",
    persistent: bool = True,
    identity: Path | None = None,
    change: Callable[[str], str] = lambda text: text,
    **of_the_text: Any,
) -> Fused:
    """A machine whose billing ends `in_s` seconds from now, running. change: what becomes of the text first."""
    deadline_at = soon(in_s)
    is_mounted = rig.vendor == "runpod" and persistent
    keeps = "/workspace" if is_mounted else "~"
    text = text_of(
        rig.vendor, rig.sandbox.url, deadline_at, on_expiry=on_expiry, keeps=keeps, **of_the_text
    )  # fmt: skip
    public_key = Path(f"{identity}.pub").read_text().strip() if identity else "ssh-ed25519 AAAA nobody"
    offer = rig.reader.offers(Requirements(gpu="RTX 4090", disk_gb=20))[0]
    spec = MachineSpec(
        offer=offer,
        label=str(labels.Label(rig.project.project_id, INTENT, deadline_at)),
        image="pytorch/pytorch:2.8.0",
        disk_gb=20,
        gpu_count=1,
        max_rate_usd_hr=offer.rate_usd_hr,
        bootstrap=change(text),
        ssh_public_key=public_key,
        persistent_gb=20 if is_mounted else None,
    )
    outcome = rig.writer.create(spec)
    assert outcome.kind == "created", outcome
    fused = Fused(rig, outcome.instance_id, deadline_at, keeps, identity)
    if identity and rig.vendor == "vast":
        rig.writer.attach_key(outcome.instance_id, public_key)
    eventually(lambda: fused.instance.phase == "running" or fused.is_over, within_s=15)
    return fused


class Loop:
    """The text alone, run here with a home of its own, beside a machine of a sandbox that is only a row.

    folder is there before the first start, so that a test can leave in it what an earlier life would have.
    """

    def __init__(self, rig: Any, home: Path, **options: Any):
        self.rig, self.home = rig, home
        self.folder = home / ".gpu-fuse" / INTENT
        self.folder.mkdir(parents=True, exist_ok=True)
        outcome = rig.writer.create(_row(rig))
        rig.sandbox.advance(60)
        self.instance = next(i for i in rig.sandbox.world.instances.values() if str(i.id) == outcome.instance_id)
        assert self.instance.phase == "running"
        self.options = options

    def write(self, name: str, *words: Any, intent: str = INTENT) -> None:
        (self.folder / name).write_text(" ".join(map(str, (intent, *words))) + "\n")

    def words(self, name: str) -> list[str]:
        try:
            return (self.folder / name).read_text().split()[1:]
        except FileNotFoundError:
            return []

    def start(self, *, in_s: float = 3600, path: str | None = None, **changes: Any) -> None:
        """One start of the container: the text ends at once and leaves its loop behind."""
        text = text_of(self.rig.vendor, self.rig.sandbox.url, soon(in_s), **{**self.options, **changes, "then": ":"})
        ids = {"vast": ("CONTAINER_ID", "CONTAINER_API_KEY"), "runpod": ("RUNPOD_POD_ID", "RUNPOD_API_KEY")}
        name, key = ids[self.rig.vendor]
        environment = {"HOME": str(self.home), "PATH": path or os.environ["PATH"], name: str(self.instance.id)}
        environment[key] = self.instance.key.value
        command = shlex.split(text) if self.rig.vendor == "runpod" else ["bash", "-c", text]
        command[0] = "/bin/bash"
        with open(self.home / "log", "ab") as log:
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    @property
    def boot(self) -> str:
        receipt = json.loads((self.folder / "receipt.json").read_text())
        return str(receipt["boot"])

    @property
    def is_over(self) -> bool:
        return self.instance.phase in OVER and self.instance.intended != "running"  # a restart is stopping, too

    def armed(self, times: int = 1) -> Loop:
        """Once the loop has gone round (for the how-manieth time it was started)."""
        eventually(lambda: self.log.count("armed") == times and (self.folder / "receipt.json").exists(), within_s=10)
        return self

    def pids(self) -> list[int]:
        marked = f"HOME={self.home}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and marked in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """As the end of a container does it: everything, at once."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _row(rig: Any) -> MachineSpec:
    offer = rig.reader.offers(Requirements(gpu="RTX 4090", disk_gb=20))[0]
    return MachineSpec(
        offer=offer,
        label=str(labels.Label(rig.project.project_id, INTENT, soon(3600))),
        image="pytorch/pytorch:2.8.0",
        disk_gb=20,
        gpu_count=1,
        max_rate_usd_hr=offer.rate_usd_hr,
        persistent_gb=20 if rig.vendor == "runpod" else None,
    )
