"""Our clock set by the vendor of a sandbox."""

from __future__ import annotations

from datetime import UTC, datetime

from gpu_skills.sandbox import Sandbox


class VendorClock:
    """Waiting moves the vendor's time, so pauses and limits are kept without lasting."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox
        self.slept: list[float] = []

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._sandbox.world.now(), UTC)

    def monotonic(self) -> float:
        return self._sandbox.world.now()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._sandbox.advance(seconds)
