"""Vast as one account sees it, built from a key and the user's environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpu_skills.clock import Clock
from gpu_skills.credentials import Credential
from gpu_skills.providers.http import Http, origin_for
from gpu_skills.providers.limits import Limiter
from gpu_skills.providers.vast.client import LIMITS, NAME, URL_VARIABLE, VENDOR, VastClient
from gpu_skills.wire import Wire


def connect_vast(
    key: Credential,
    *,
    environ: Mapping[str, str],
    clock: Clock,
    state_dir: Path | None,
    wire: Wire | None = None,
) -> VastClient:
    """A client; nothing is sent yet. Raises DestinationRefused for a key that does not belong where it would go."""
    origin = origin_for(NAME, VENDOR, URL_VARIABLE, key, environ)
    limiter = Limiter(NAME, key.account, LIMITS, clock=clock, state_dir=state_dir)
    return VastClient(Http(NAME, origin, key, clock=clock, limiter=limiter, environ=environ, wire=wire))
