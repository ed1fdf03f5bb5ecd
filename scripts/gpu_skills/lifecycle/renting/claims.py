"""Which offer a create of ours is about to take: so that two launches of one account never send for the same one.

A market sells an offer once, and whoever comes second may be accepted all the same and then not start. So whoever
wants an offer writes that down first, in the account's folder of the user's state directory, where every project of
this user looks. A claim ends by itself: what is taken has left the market by then, what is not can be had again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.base import Offer
from gpu_skills.state import budget, files

# Longer than a search and a create take together, with every retry and pause between them.
LASTS = timedelta(minutes=5)


@dataclass(frozen=True)
class Claim:
    """host_key: the physical machine, as memory knows it; None where an offer is a kind of machine, as at RunPod."""

    offer_id: str
    host_key: str | None
    intent: str
    until: datetime


def take(op: Operator, provider: str, offer: Offer, intent: str) -> bool:
    """Claim an offer. False: somebody else has it. An offer that is a kind of machine can be had many times."""
    is_ours = True

    def claimed(before: Any) -> list[dict[str, Any]]:
        nonlocal is_ours
        now = op.clock.now()
        others = [claim for claim in _read(before, now) if claim.intent != intent]
        is_ours = not _is_taken(offer, others)
        mine = [Claim(offer.offer_id, offer.host_key, intent, now + LASTS)] if is_ours else []
        return [_record(claim) for claim in (*others, *mine)]

    path = _path(op, provider)
    files.make_directory(path.parent)
    files.update(path, claimed, default=[])
    return is_ours


def release(op: Operator, provider: str, intent: str) -> None:
    """Give a claim back: nothing was taken, and the offer is as good as before."""

    def without(before: Any) -> list[dict[str, Any]]:
        return [_record(claim) for claim in _read(before, op.clock.now()) if claim.intent != intent]

    files.update(_path(op, provider), without, default=[])


def still_held(op: Operator, provider: str, offer: Offer, intent: str) -> bool:
    """Whether the claim stands: looked at just before the request leaves, since a computer may have slept meanwhile."""
    return any(claim.offer_id == offer.offer_id and claim.intent == intent for claim in current(op, provider))


def current(op: Operator, provider: str) -> list[Claim]:
    """Everybody's claims on this account that hold now."""
    return _read(files.read_json(_path(op, provider), default=[]), op.clock.now())


def apart(offers: list[Offer], claims: list[Claim]) -> list[Offer]:
    """The offers nobody claims, in their order; those of a machine on which another is being rented come last."""
    free = [offer for offer in offers if not _is_taken(offer, claims)]
    busy = {claim.host_key for claim in claims if claim.host_key}
    return sorted(free, key=lambda offer: offer.host_key in busy)


def _is_taken(offer: Offer, claims: list[Claim]) -> bool:
    return offer.host_key is not None and any(claim.offer_id == offer.offer_id for claim in claims)


def _path(op: Operator, provider: str) -> Path:
    return budget.account_directory(provider, op.account(provider), op.environ) / "claims.json"


def _read(content: Any, now: datetime) -> list[Claim]:
    """What holds. An entry that cannot be read claims nothing: this is caution, not the record of anything."""
    found = []
    for entry in content if isinstance(content, list) else []:
        try:
            claim = Claim(
                str(entry["offer_id"]), entry.get("host_key"), str(entry["intent"]), parse_timestamp(entry["until"])
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        # A clock that was set back must not make a claim hold for hours.
        if now < claim.until <= now + LASTS:
            found.append(claim)
    return found


def _record(claim: Claim) -> dict[str, Any]:
    return {
        "offer_id": claim.offer_id,
        "host_key": claim.host_key,
        "intent": claim.intent,
        "until": timestamp(claim.until),
    }
