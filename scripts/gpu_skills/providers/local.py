"""This machine as a provider: the embedded default. No account, no network, no bill."""

from __future__ import annotations

from decimal import Decimal

from gpu_skills.providers.base import Offer, Requirements


class LocalProvider:
    name = "local"

    def offers(self, need: Requirements) -> list[Offer]:
        return [Offer("local", "local", Decimal(0), gpu=None, gpu_count=0, vram_gb=None)]
