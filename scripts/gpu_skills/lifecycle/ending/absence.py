"""When is a machine gone? What was seen of it, one look after the other, and what that proves. Pure.

A list may lag, a new machine may be unknown to its own provider for a while, a 404 may come and go, and a machine that
no list shows may bill on. So gone means: not there in look after look, over some time, and nothing charged meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

LOOKS = 3
SPAN = timedelta(seconds=60)
# Nobody ever saw it: it may be missing because it is new. Or nobody can read its charges: there is less to go by.
DOUBTFUL_SPAN = timedelta(minutes=10)


@dataclass(frozen=True)
class Look:
    """One look at everything the account has. charged_usd: all that was charged for it by then; None: not readable."""

    at: datetime
    is_present: bool
    charged_usd: Decimal | None = None


def quiet(looks: Sequence[Look]) -> list[Look]:
    """The last looks in which it was absent and its charges stood still, oldest first."""
    found: list[Look] = []
    for look in reversed(looks):
        if look.is_present or (found and look.charged_usd != found[-1].charged_usd):
            break
        found.append(look)
    return found[::-1]


def is_gone(looks: Sequence[Look], *, asked_at: datetime | None, was_seen: bool = False) -> bool:
    """Whether these looks, oldest first, prove it gone. asked_at: when our delete was taken, None: it never was.

    Only looks after that count. was_seen: it was seen present before, whatever these looks say.
    """
    run = [look for look in quiet(looks) if asked_at is None or look.at >= asked_at]
    if len(run) < LOOKS:
        return False
    is_doubtful = run[-1].charged_usd is None or not (was_seen or any(look.is_present for look in looks))
    return run[-1].at - run[0].at >= (DOUBTFUL_SPAN if is_doubtful else SPAN)
