"""A sandbox as a process of its own: `python -m gpu_skills.sandbox DIRECTORY`.

It writes `sandbox.json` (0600: where it listens, the keys, its pid, the admin token) when it is ready and removes it at
its end. It ends by `gpu sandbox down`, by TERM or INT, when nobody asked anything for the idle limit, when the process
it was started for is gone, or when its `sandbox.json` is; each way ends every process of every instance, and after a
KILL keeper.py does. Nothing is kept: the next start is a new world.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hmac
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills.sandbox import catalogue, faults, keeper, processes
from gpu_skills.sandbox.face import Reply, Request
from gpu_skills.sandbox.http import Limits
from gpu_skills.sandbox.sandbox import Sandbox
from gpu_skills.sandbox.world import Account, Instance

INFO_NAME = "sandbox.json"
DEFAULT_IDLE_S = 2 * 3600
CLEANING_S = 5.0
MAX_BILL_LINES = 500
ADMIN_HEADER = "x-sandbox-token"


class Admin:
    """The calls that `gpu sandbox …` makes: below /_sandbox/, with the admin token."""

    def __init__(self, token: str):
        self._token = token
        self.sandbox: Sandbox | None = None
        self.stop = threading.Event()
        self.started_at = time.time()

    def __call__(self, request: Request) -> Reply:
        if not hmac.compare_digest(request.headers.get(ADMIN_HEADER, "").encode(), self._token.encode()):
            return Reply(401, {"error": "the admin token is in sandbox.json"})
        calls = {
            ("GET", "status"): self._status,
            ("GET", "bill"): self._bill,
            ("POST", "clock"): self._clock,
            ("POST", "chaos"): self._chaos,
            ("POST", "down"): self._down,
        }
        call = calls.get((request.method, request.path.removeprefix("/_sandbox/").strip("/")))
        if call is None:
            return Reply(404, {"error": "no such call"})
        try:
            body = request.json()
            return Reply(200, call(body if isinstance(body, dict) else {}))
        except (ValueError, TypeError) as exc:
            return Reply(400, {"error": str(exc)})

    def _world(self) -> Any:
        assert self.sandbox is not None
        return self.sandbox.world

    def _status(self, body: dict[str, Any]) -> dict[str, Any]:
        world = self._world()
        with world.lock:
            now = world.now()
            return {
                "url": world.url,
                "seed": world.seed,
                "now": _stamp(now),
                "ahead_s": round(max(now - time.time(), 0)),
                "up_s": round(time.time() - self.started_at),
                "accounts": [_account(account, now) for account in world.accounts.values()],
                "instances": [_instance(i) for i in world.instances.values() if not i.is_destroyed],
                "volumes": [
                    {"provider": v.vendor, "id": v.id, "name": v.name, "size_gb": float(v.size_gb)}
                    for v in world.volumes.values()
                ],
                "calls": _counted(world.calls),
                "mutating_calls": _counted(world.mutating_calls),
                "too_frequent": _counted(world.too_frequent),
                "faults": world.faults.to_list(),
                "defects": len(world.crashes),
                "last_defect": world.crashes[-1] if world.crashes else None,
            }

    def _bill(self, body: dict[str, Any]) -> dict[str, Any]:
        world = self._world()
        with world.lock:
            now = world.now()
            return {
                "now": _stamp(now),
                "accounts": [
                    {
                        **_account(account, now),
                        "lines": [_line(line) for line in account.bill.lines(now)[-MAX_BILL_LINES:]],
                        "lines_left_out": max(len(account.bill.entries) - MAX_BILL_LINES, 0),
                    }
                    for account in world.accounts.values()
                ],
                "burning": [{**entry, "rate_usd_hr": float(entry["rate_usd_hr"])} for entry in world.burning()],
            }

    def _clock(self, body: dict[str, Any]) -> dict[str, Any]:
        seconds = body.get("advance_s", 0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ValueError("advance_s is a number of seconds")
        assert self.sandbox is not None
        if seconds:
            self.sandbox.advance(seconds)
        now = self._world().now()
        return {"now": _stamp(now), "ahead_s": round(max(now - time.time(), 0))}

    def _chaos(self, body: dict[str, Any]) -> dict[str, Any]:
        world = self._world()
        if body.get("clear"):
            world.faults.clear()
        added = world.apply_faults(body.get("rules", []))
        for entry in body.get("scripts", []):
            world.faults.script(str(entry["provider"]), str(entry["call"]), str(entry["script"]))
        return {"added": len(added) + len(body.get("scripts", [])), "faults": world.faults.to_list()}

    def _down(self, body: dict[str, Any]) -> dict[str, Any]:
        world = self._world()
        with world.lock:
            left = {
                "burning": len(world.burning()),
                "instances": sum(not i.is_destroyed for i in world.instances.values()),
            }
        self.stop.set()
        return left


def _stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _account(account: Account, now: float) -> dict[str, Any]:
    return {
        "provider": account.vendor,
        "account": account.id,
        "balance_usd": round(float(account.balance_usd(now)), 6),
        "spent_usd": round(float(account.bill.total_usd(now)), 6),
        "burn_usd_hr": round(float(account.bill.burn_usd_hr()), 6),
    }


def _instance(instance: Instance) -> dict[str, Any]:
    return {
        "provider": instance.vendor,
        "id": str(instance.id),
        "label": instance.label,
        "phase": instance.phase,
        "gpu": instance.host.gpu.name,
        "gpu_count": instance.gpu_count,
        "rate_usd_hr": round(float(instance.rate_usd_hr), 6),
        "ssh_port": instance.port or None,
        "faults": sorted(instance.faults),
    }


def _line(line: dict[str, Any]) -> dict[str, Any]:
    return {
        **line,
        "start": _stamp(line["start"]),
        "end": None if line["end"] is None else _stamp(line["end"]),
        **{name: round(float(line[name]), 12) for name in ("rate_usd_hr", "quantity_gb", "amount_usd")},
    }


def _counted(counter: dict[tuple[str, str], int]) -> dict[str, int]:
    return {f"{vendor} {call}": count for (vendor, call), count in sorted(counter.items())}


# the process --------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    options = _parse(argv)
    directory: Path = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    info = directory / INFO_NAME
    if not _lock(directory / "sandbox.lock", info):
        print("another sandbox runs in this directory", file=sys.stderr)
        return 3
    processes.sweep(directory)
    release = keeper.keep(directory, info)
    try:
        return _run(options, directory, info)
    finally:
        release()


def _lock(path: Path, info: Path) -> bool:
    """Take the lock for as long as this process lives. It is waited for while a killed sandbox is cleaned up."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ends = time.monotonic() + CLEANING_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if info.exists() or time.monotonic() > ends:
                return False
        time.sleep(0.02)


def _run(options: argparse.Namespace, directory: Path, info: Path) -> int:
    token = secrets.token_hex(16)
    admin = Admin(token)
    try:
        rules = faults.load(options.faults) if options.faults else []
        admin.sandbox = sandbox = Sandbox(
            seed=options.seed,
            directory=directory,
            catalogue_file=options.catalogue or catalogue.DEFAULT,
            delays=json.loads(options.delays),
            faults=rules,
            limits=options.limits,
            balance_usd=Decimal(options.balance_usd),
            port=options.port,
            admin=admin,
        )
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as exc:
        print(f"the sandbox does not start: {exc}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: admin.stop.set())
    processes.become_subreaper()
    with sandbox:
        _publish(info, sandbox, token)
        published = _inode(info)
        try:
            _serve(sandbox, admin, lambda: _inode(info) == published, idle_s=options.idle_s, parent=options.parent)
        finally:
            if _inode(info) == published:
                info.unlink(missing_ok=True)
    return 0


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpu_skills.sandbox")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--catalogue", type=Path)
    parser.add_argument("--faults", help="a file of rules")
    parser.add_argument("--delays", default="{}", help="JSON object of seconds")
    parser.add_argument("--limits", choices=Limits.MODES, default="real")
    parser.add_argument("--balance-usd", default="100")
    parser.add_argument("--idle-s", type=float, default=DEFAULT_IDLE_S)
    parser.add_argument("--parent", type=int, help="end when this process does")
    return parser.parse_args(argv)


def _publish(path: Path, sandbox: Sandbox, token: str) -> None:
    """What a client needs, readable for this user only, there all at once."""
    world = sandbox.world
    content = {
        "url": sandbox.url,
        "pid": os.getpid(),
        "token": token,
        "keys": {vendor: sandbox.key(vendor) for vendor in world.faces},
        "ssh_user": world.ssh_user,
        "seed": world.seed,
        "started_at": _stamp(time.time()),
    }
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2)
    new.replace(path)


def _serve(
    sandbox: Sandbox, admin: Admin, can_be_found: Callable[[], bool], *, idle_s: float, parent: int | None
) -> None:
    """Wait for a reason to end, and collect orphans meanwhile."""
    began_with = None if parent is None else processes.start_time(parent)
    if parent is not None and began_with is None:
        return
    while not admin.stop.wait(0.5):
        if not can_be_found():  # its directory was removed: no `down` would ever reach it
            return
        with sandbox.world.lock:
            containers = [i.container for i in sandbox.world.instances.values() if i.container is not None]
        own = {pid for container in containers for pid in container.own_pids()}
        processes.reap_orphans(own)
        if parent is not None and processes.start_time(parent) != began_with:
            return
        if time.monotonic() - sandbox.service.served_at > idle_s and not processes.have_children(own):
            return


def run() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
