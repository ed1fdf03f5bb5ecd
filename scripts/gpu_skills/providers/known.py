"""What is known of a provider by its name alone: without a key, without a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_skills.providers.base import Traits

RENTED_PROVIDERS = ("vast", "runpod")


def traits_of(provider: str) -> Traits:
    """Of one of RENTED_PROVIDERS."""
    if provider == "vast":
        from gpu_skills.providers.vast.reader import TRAITS
    elif provider == "runpod":
        from gpu_skills.providers.runpod.reader import TRAITS
    else:
        raise ValueError(f"nothing is rented at {provider!r}")
    return TRAITS
