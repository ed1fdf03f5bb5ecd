"""This machine as a provider: the embedded default. No account, no network, no bill."""

from __future__ import annotations

from decimal import Decimal

from gpu_skills.providers.base import Offer, Requirements, Search


class LocalProvider:
    name = "local"

    def search(self, need: Requirements) -> Search:
        """What it has, only a look at it tells: nothing is filtered here."""
        return Search(self.offers(need), 1)

    def offers(self, need: Requirements) -> list[Offer]:
        return [Offer("local", "local", Decimal(0), gpu=None, gpu_count=0, vram_gb=None)]
