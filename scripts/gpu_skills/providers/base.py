"""What a provider is to everything above it: the records it speaks and its interface, reading apart from writing.

Rates are all-in hourly rates for the requested shape. `vram_gb` is the size class on the label, per GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol


@dataclass(frozen=True)
class Requirements:
    """What the work needs. None means: does not matter."""

    gpu: str | None = None
    gpu_count: int = 1
    min_vram_gb: float | None = None
    disk_gb: float | None = None
    max_rate_usd_hr: Decimal | None = None


@dataclass(frozen=True)
class SshEndpoint:
    """How a machine is reached. host: what the user would type after `ssh`. None: left to their SSH configuration."""

    host: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class Offer:
    """Something that can be used now at a rate. It holds nothing."""

    provider: str
    offer_id: str
    rate_usd_hr: Decimal
    gpu: str | None
    gpu_count: int
    vram_gb: float | None
    endpoint: SshEndpoint | None = None
    root: str | None = None


class ProviderReader(Protocol):
    """Reads only. In Audit nothing else exists."""

    name: str

    def offers(self, need: Requirements) -> list[Offer]:
        """Everything that could be used now, cheapest first; what only a look at the machine tells is not filtered."""
        ...
