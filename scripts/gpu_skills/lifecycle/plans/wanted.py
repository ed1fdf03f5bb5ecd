"""What a plan is wanted for: the machine's class, its need, and how long it may be there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpu_skills.config import GpuConfig
from gpu_skills.lifecycle.plans.images import Needs
from gpu_skills.lifecycle.plans.market import ANY_GPU, Look
from gpu_skills.lifecycle.plans.preflight import Reason
from gpu_skills.providers.base import Traits

SHORTEST_S = 900.0  # a budget that buys less than this buys nothing
# A class that fails one of these does so tomorrow as well: waiting for it is no use.
_LASTING = ("min_vram_gb", "kind")


@dataclass(frozen=True)
class Wish:
    """What a plan is wanted for. limits: (seconds, why) for the deadline; the least holds.

    session_usd: what the whole may come to. may_shrink: a shorter deadline will do where money does not reach.
    """

    machine_class: str
    config: GpuConfig
    needs: Needs
    limits: tuple[tuple[float, str], ...]
    may_shrink: bool
    session_usd: Decimal | None = None
    idle_timeout_s: float | None = None
    hold_for_s: float | None = None
    job_timeout_s: float | None = None
    expected_s: float | None = None
    weights_gb: float = 0.0
    volume_id: str | None = None
    interruptible: bool = False
    job: dict[str, Any] | None = None
    inputs: dict[str, Any] | None = None
    resume_from: dict[str, Any] | None = None
    secrets: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()

    @property
    def inputs_bytes(self) -> int:
        """What is sent to the machine: the job's files, and the checkpoint it goes on from."""
        checkpoint = (self.resume_from or {}).get("files") or ()
        return int((self.inputs or {}).get("bytes") or 0) + sum(int(one["bytes"]) for one in checkpoint)

    @property
    def shortest_s(self) -> float:
        """What the work itself is known to take."""
        return max(SHORTEST_S, self.job_timeout_s or 0, (self.expected_s or 0) + (self.hold_for_s or 0))

    @property
    def limit(self) -> tuple[float, str]:
        """(seconds, why) of the least limit; infinite when there is none. Of equal ones the first written counts."""
        return min(self.limits, key=lambda limit: limit[0], default=(math.inf, ""))

    @property
    def may_wait(self) -> bool:
        return self.config.compute.capacity.mode == "wait"

    def is_ephemeral(self, traits: Traits) -> bool:
        """Whether nothing of the disk is there once the machine stops."""
        return self.machine_class != "project" and traits.stop_keeps == "workspace" and self.volume_id is None

    def tries(self, look: Look) -> bool:
        """Whether a class may be rented: something of it fits, or it is waited for and some day something could."""
        if look.estimates:
            return True
        return self.may_wait and look.gpu != ANY_GPU and not any(name in look.fails for name in _LASTING)
