"""The offers that would do for a plan now, the best first, each of them once."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import RateLimited
from gpu_skills.lifecycle import memory
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import market
from gpu_skills.lifecycle.plans import offers as ranking
from gpu_skills.lifecycle.plans.offers import Use
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import claims
from gpu_skills.providers.base import Offer, Requirements, Search
from gpu_skills.units import format_duration

# Offers older than this are asked for again before one of them is taken.
FRESH_S = 30.0
SEARCH_ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 120.0


class Market:
    """What one run asks the market for. useless: GPU classes that the image has no code for.

    offers, search: as they were seen last. tried: ids of offers that were given out already.
    """

    def __init__(self, op: Operator, provider: str, approval_expires_at: str):
        self.op = op
        self.provider = provider
        self.approval_expires_at = approval_expires_at
        self.search: Search | None = None
        self.offers: list[Offer] = []
        self.tried: set[str] = set()
        self.useless: set[str] = set()
        self._searched_s: float | None = None

    def next_offer(self, plan: Plan) -> Offer | None:
        """The best offer not tried yet, class by class in the plan's order; asked for again when it is not fresh."""
        now_s = self.op.clock.monotonic()
        if self._searched_s is None or now_s - self._searched_s > FRESH_S:
            self.offers = self._look(plan)
            self._searched_s = now_s
        held = claims.current(self.op, self.provider)
        for candidate in plan.tried:
            of_class = [o for o in self.offers if market.is_of(candidate.gpu, o) and o.gpu not in self.useless]
            for offer in claims.apart(of_class, held):
                if offer.offer_id not in self.tried:
                    self.tried.add(offer.offer_id)
                    return offer
        return None

    def _look(self, plan: Plan) -> list[Offer]:
        """What fits the plan now, cheapest in total first, without machines on cooldown."""
        search = self._search(market.need_of(plan))
        use = Use(hours=(plan.expected_s or plan.deadline_s) / 3600)
        known = memory.load(self.op.project)
        ranked = ranking.rank({self.provider: search}, use, known, now=self.op.clock.now())
        self.search = replace(search, filters=ranked.filters[self.provider])
        return [estimate.offer for estimate in ranked.estimates]

    def _search(self, need: Requirements) -> Search:
        """Searches are few a minute for everybody on this computer: waited for, as long as the approval holds."""
        for attempt in range(1, SEARCH_ATTEMPTS + 1):
            try:
                return self.op.reader(self.provider).search(need)
            except RateLimited as exc:
                pause_s = asked_pause_s(exc)
                if attempt == SEARCH_ATTEMPTS or not self.may_wait(pause_s):
                    raise
                self.op.say(f"{self.provider} may be asked for offers again in {format_duration(pause_s)}")
                self.op.clock.sleep(pause_s)
        raise AssertionError("the last attempt raises or returns")

    def may_wait(self, pause_s: float) -> bool:
        """A wait is within the approval, or it is none."""
        ends = self.op.clock.now() + timedelta(seconds=pause_s)
        return ends < parse_timestamp(self.approval_expires_at)


def asked_pause_s(problem: RateLimited) -> float:
    """As long as the provider, or our own pace, asks for, within reason; a little uneven, so that many do not march."""
    asked = problem.details.get("retry_after_s")
    wanted_s = min(float(asked), LONGEST_PAUSE_S) if isinstance(asked, int | float) else FIRST_PAUSE_S
    return wanted_s + 4 * random.random()
