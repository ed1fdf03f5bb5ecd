"""The user's own hosts: named in `hosts.yaml`, or any name their SSH configuration knows."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from gpu_skills.config import HostConfig
from gpu_skills.errors import ConfigError
from gpu_skills.providers.base import Offer, Requirements, Search, SshEndpoint


class SshProvider:
    """hosts: what `hosts.yaml` says. host: the one that `gpu.yaml` names, or None to try them all."""

    name = "ssh"

    def __init__(self, hosts: Mapping[str, HostConfig], host: str | None = None):
        self._hosts = hosts
        self._host = host

    def search(self, need: Requirements) -> Search:
        """What the hosts have, only a look at them tells: nothing is filtered here."""
        offers = self.offers(need)
        return Search(offers, len(offers))

    def offers(self, need: Requirements) -> list[Offer]:
        if self._host is None and not self._hosts:
            raise ConfigError(
                file="gpu.yaml",
                problem="provider ssh needs a host",
                next_step="gpu init --provider ssh --host NAME, NAME as in `ssh NAME` or hosts.yaml",
            )
        names = [self._host] if self._host is not None else list(self._hosts)
        offers = [self._offer(name) for name in names]
        return sorted(offers, key=lambda offer: offer.rate_usd_hr)

    def _offer(self, name: str) -> Offer:
        known = self._hosts.get(name)
        if known is None:  # a name of ~/.ssh/config, or an address
            return Offer("ssh", name, Decimal(0), None, 0, None, SshEndpoint(name))
        return Offer(
            "ssh",
            name,
            known.rate_usd_hr,
            gpu=known.gpu,
            gpu_count=1 if known.gpu else 0,
            vram_gb=known.vram_gb,
            endpoint=SshEndpoint(known.address, known.user, known.port, known.identity_file),
            root=known.root,
        )
