"""What a plan can come to at most, and how long a machine may be there for the money there is. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal

from gpu_skills.lifecycle.plans.market import Look
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.plans.wanted import SHORTEST_S, Wish
from gpu_skills.providers.base import Offer, Requirements, Traits
from gpu_skills.state import policy as policies

SETUP_CAP_S = 1800.0
START_GRACE_S = 600.0  # a machine that was stopped and started past its deadline may run so much longer
TRAFFIC_GB = 10.0  # each way, beside image, inputs and weights
# Of a class that nobody offers now, for a GB and an hour. Dearer than any disk that was seen.
_ASSUMED_STORAGE_USD_GB_HR = Decimal("0.0006")
_MICRO = Decimal("0.000001")
_NOT_SHARED = ("storage", "traffic", "start_grace")


@dataclass(frozen=True)
class WorstCase:
    """Rates in USD an hour, rounded up. failures: machines that may fail before one works. why: sets the deadline."""

    max_rate: Decimal
    storage_rate: Decimal
    storage_grace_s: float
    traffic_usd: Decimal
    failures: int
    deadline_s: float
    why: str

    @property
    def setup_cap_s(self) -> float:
        return min(SETUP_CAP_S, self.deadline_s)

    @property
    def parts(self) -> dict[str, Decimal]:
        return {
            "running": rounded_up(self.max_rate * hours(self.deadline_s)),
            "failed_setups": rounded_up(self.max_rate * hours(self.setup_cap_s) * self.failures),
            "storage": rounded_up(self.storage_rate * hours(self.storage_grace_s)),
            "traffic": rounded_up(self.traffic_usd),
            "start_grace": rounded_up(self.max_rate * hours(START_GRACE_S)),
        }

    @property
    def worst_usd(self) -> Decimal:
        return sum(self.parts.values(), Decimal(0))

    def buys_s(self, money_usd: Decimal | None) -> float | None:
        """The longest deadline whose whole worst case this pays for; None: any, or the machine costs nothing."""
        if money_usd is None or self.max_rate <= 0:
            return None
        # The set-up cap ends with the deadline where that is shorter; taking it whole errs on the short side.
        fixed = replace(self, deadline_s=SETUP_CAP_S)
        rest = money_usd - (fixed.worst_usd - fixed.parts["running"]) - _MICRO
        return max(0.0, float(rest / self.max_rate * 3600))


def of(
    wish: Wish,
    looks: Sequence[Look],
    need: Requirements,
    traits: Traits,
    left: Mapping[str, Decimal | None],
    *,
    limit: tuple[float, str],
) -> WorstCase | None:
    """The worst case with the longest deadline up to the limit that the money allows; None: there is no price.

    left: what the policy's ceilings leave. A wish that may not shrink keeps the limit, whatever it comes to.
    """
    tried = [look for look in looks if wish.tries(look)]
    max_rate = _max_rate(wish, tried, need)
    if max_rate is None:
        return None
    is_ephemeral = wish.is_ephemeral(traits)
    failures = max(1, len(tried))
    found = WorstCase(
        max_rate=rounded_up(max_rate),
        storage_rate=Decimal(0)
        if is_ephemeral
        else rounded_up(_storage_rate(looks, tried, need) * traits.stopped_storage_times),
        storage_grace_s=0.0 if is_ephemeral else wish.config.lifecycle.storage_grace_s,
        traffic_usd=_traffic_usd(wish, looks, tried, failures),
        failures=failures,
        deadline_s=limit[0],
        why=limit[1],
    )
    if wish.may_shrink:
        for money_usd, why in ((wish.session_usd, "session_budget"), (money_left(left), "ceiling")):
            buys_s = found.buys_s(money_usd)
            if buys_s is not None and wish.shortest_s <= buys_s < found.deadline_s:
                found = replace(found, deadline_s=float(math.floor(buys_s)), why=why)
    return found


def left_s(plan: Plan, cost_usd: Decimal) -> float:
    """How long the next machine of an approved plan may be there, when earlier ones have cost this much.

    Its storage, traffic and start grace are kept for it whole; of a genuine plan nothing is cut before failed set-ups
    have cost more than it has for them.
    """
    if plan.max_rate_usd_hr <= 0:
        return plan.deadline_s
    kept = sum((Decimal(str(plan.worst_case.get(name) or 0)) for name in _NOT_SHARED), Decimal(0))
    rest = plan.worst_case_usd - kept - cost_usd
    return max(0.0, min(plan.deadline_s, float(rest / plan.max_rate_usd_hr * 3600)))


def useful_s(plan: Plan) -> float:
    """What a machine of this plan has to be there for at least."""
    return min(plan.deadline_s, max(SHORTEST_S, plan.job_timeout_s or 0.0, plan.expected_s or 0.0))


def money_left(left: Mapping[str, Decimal | None]) -> Decimal | None:
    """What the tightest ceiling on money leaves; None: there is none."""
    return min((value for name in policies.MONEY if (value := left[name]) is not None), default=None)


def hours(seconds: float) -> Decimal:
    return Decimal(str(seconds)) / 3600


def rounded_up(value: Decimal | int) -> Decimal:
    """Six places, never less: an offer of exactly the highest rate must still fit."""
    return Decimal(value).quantize(_MICRO, rounding=ROUND_CEILING)


def _max_rate(wish: Wish, tried: Sequence[Look], need: Requirements) -> Decimal | None:
    """The dearest offer shown. Who waits may find others: then what the user wrote, or else all that is known."""
    shown = [e.offer.rate_usd_hr for look in tried for e in look.shown]
    if wish.may_wait and tried and (not shown or wish.config.compute.max_rate_usd_hr is not None):
        return need.max_rate_usd_hr
    return max(shown, default=None)


def _storage_rate(looks: Sequence[Look], tried: Sequence[Look], need: Requirements) -> Decimal:
    assumed = _ASSUMED_STORAGE_USD_GB_HR * Decimal(str(need.disk_gb or 0))
    known = max((offer.storage_usd_hr for offer in _offers(looks, tried)), default=assumed)
    # Of a class of which nothing is there nobody can say what its disks cost.
    return known if all(look.estimates for look in tried) else max(known, assumed)


def _traffic_usd(wish: Wish, looks: Sequence[Look], tried: Sequence[Look], failures: int) -> Decimal:
    sent_gb = wish.needs.size_gb + wish.inputs_bytes / 1e9
    down_gb = Decimal(str(sent_gb * (failures + 1) + wish.weights_gb + TRAFFIC_GB))
    up_gb = Decimal(str(TRAFFIC_GB))
    offers = _offers(looks, tried)
    return max((o.download_usd_gb * down_gb + o.upload_usd_gb * up_gb for o in offers), default=Decimal(0))


def _offers(looks: Sequence[Look], tried: Sequence[Look]) -> list[Offer]:
    """Those the plan shows; where it shows none, all that were seen."""
    shown = [e.offer for look in tried for e in look.shown]
    return shown or [offer for look in looks for offer in look.seen.offers]
