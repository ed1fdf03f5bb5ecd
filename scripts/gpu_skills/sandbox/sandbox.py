"""A whole sandbox in one object: the world, its clock, and the HTTP server in front of it. For tests and the server."""

from __future__ import annotations

import shutil
import tempfile
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any

from gpu_skills.sandbox import catalogue
from gpu_skills.sandbox.clock import VirtualClock
from gpu_skills.sandbox.faults import Faults
from gpu_skills.sandbox.http import Service
from gpu_skills.sandbox.listener import HttpServer
from gpu_skills.sandbox.world import Delays, World


class Sandbox:
    """Starts with `with` (or `start`) and leaves no process behind at its end.

    directory: for the containers; a temporary one that is removed when none is given. starts_at: Unix seconds that
    the vendor's clock shows at first, now by default. frozen: it moves by `advance` only. limits: off, count, real,
    virtual (see http.Limits). containers: False makes instances without a real machine, for tests of the API alone.
    delays: seconds by name (see world.Delays). faults: rules as in faults.py.
    """

    def __init__(
        self,
        *,
        seed: int = 1,
        directory: Path | None = None,
        catalogue_file: Path = catalogue.DEFAULT,
        delays: dict[str, float] | None = None,
        faults: Any = (),
        limits: str = "count",
        starts_at: float | None = None,
        frozen: bool = False,
        balance_usd: Decimal | int | str = 100,
        containers: bool = True,
        port: int = 0,
        admin: Any = None,
    ):
        self._temporary = directory is None
        self._stopped = False
        self.directory = directory or Path(tempfile.mkdtemp(prefix="gpu-sandbox-"))
        self.world = World(
            self.directory / "containers",
            seed=seed,
            clock=VirtualClock(start=starts_at, frozen=frozen),
            catalogue_file=catalogue_file,
            delays=Delays(**(delays or {})),
            fault_rules=faults,
            balance_usd=Decimal(str(balance_usd)),
            containers=containers,
        )
        self.service = Service(self.world, limits=limits, admin=admin)
        self.http = HttpServer(self.service, port)
        self.world.url = self.http.url

    @property
    def url(self) -> str:
        return self.http.url

    @property
    def faults(self) -> Faults:
        return self.world.faults

    def key(self, vendor: str) -> str:
        """The full key of the vendor's first account."""
        account = self.world.account(vendor)
        return next(key.value for key in self.world.keys.values() if key.account is account and key.instance_id is None)

    def advance(self, seconds: float) -> None:
        """Move the vendor's clock; what falls due happens on the way, real starts and stops included."""
        self.world.clock.advance(seconds)
        self.world.room.settle()

    def settle(self) -> bool:
        """Wait until the real work that is under way is done."""
        return self.world.room.settle()

    def start(self) -> Sandbox:
        self.world.clock.start()
        self.http.start()
        return self

    def stop(self) -> None:
        """End it; a second time does nothing."""
        if self._stopped:
            return
        self._stopped = True
        self.http.stop()
        self.world.close()
        shutil.rmtree(self.directory if self._temporary else self.directory / "containers", ignore_errors=True)

    def __enter__(self) -> Sandbox:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
