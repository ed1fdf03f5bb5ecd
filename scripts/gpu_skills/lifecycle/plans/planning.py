"""Measure a plan: stock and price of each GPU class now, the deadline they allow, the worst case they can come to.

Nothing is rented and nothing written here. What speaks against the plan is raised together, as PlanRefused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from gpu_skills import credentials
from gpu_skills.config import GpuConfig
from gpu_skills.errors import RateLimited, Unavailable, UnexpectedReply, UsageError
from gpu_skills.lifecycle import memory
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import images, plan_document, preflight, worst_case
from gpu_skills.lifecycle.plans.market import Look, Seen, judge, look
from gpu_skills.lifecycle.plans.offers import Use
from gpu_skills.lifecycle.plans.plan import EXPECTED_TIMES, Plan
from gpu_skills.lifecycle.plans.preflight import Reason
from gpu_skills.lifecycle.plans.wanted import SHORTEST_S, Wish
from gpu_skills.lifecycle.plans.worst_case import WorstCase
from gpu_skills.providers.base import RentedReader, Requirements, Traits
from gpu_skills.providers.known import traits_of
from gpu_skills.state import budget
from gpu_skills.state import policy as policies
from gpu_skills.state.budget import Books
from gpu_skills.state.policy import Policy
from gpu_skills.state.registry import OWN_HOSTS
from gpu_skills.units import format_duration, format_usd, json_number

DEFAULT_MAX_LEASE_S = 12 * 3600.0
SETUP_S = 1800.0  # the longest set-up of most machines, and time for inputs and outputs


def plan_project(op: Operator, config: GpuConfig, *, interruptible: bool = False) -> Plan:
    """The machine the project keeps for a while: ended by idleness, `max_lifetime`, and what `session_usd` buys.

    The budget bounds the whole worst case, so the machine's own deadline comes a little earlier than it alone would.
    """
    policy = op.policy()
    limits = [(config.lifecycle.max_lifetime_s, "max_lifetime"), _ceiling_s(policy)]
    idle = [config.lifecycle.idle_timeout_s]
    if policy.idle_shutdown_after_min is not None:
        idle.append(float(policy.idle_shutdown_after_min) * 60)
    wish = Wish(
        "project",
        config,
        images.needs(config.compute.image, size_gb=config.compute.image_gb),
        limits=tuple((seconds, why) for seconds, why in limits if seconds is not None),
        may_shrink=True,
        session_usd=config.budget.session_usd,
        idle_timeout_s=min((seconds for seconds in idle if seconds is not None), default=None),
        interruptible=interruptible,
        secrets=_secrets(op, {}),
    )
    return _planned(op, wish, policy)


def plan_job(
    op: Operator,
    config: GpuConfig,
    *,
    job: dict[str, Any],
    inputs: dict[str, Any] | None,
    hold_for_s: float | None = None,
    max_lease_s: float | None = None,
    job_timeout_s: float | None = None,
    expected_s: float | None = None,
    volume_id: str | None = None,
    resume_from: dict[str, Any] | None = None,
    interruptible: bool = False,
    weights_gb: float = 0.0,
    texts: Mapping[str, str] | None = None,
    reasons: Sequence[Reason] = (),
) -> Plan:
    """A machine made for one job, destroyed once the job is collected and reviewed.

    max_lease_s None: `usual_lease_s`, or less where the ceilings do not reach so far. texts: what installs packages, by
    where it stands (`setup`, `requirements.txt`). weights_gb: what the job downloads. reasons: what was found against
    it here.
    """
    policy = op.policy()
    held_s = config.lifecycle.hold_for_s if hold_for_s is None else hold_for_s
    if max_lease_s is None:
        limits = ((usual_lease_s(expected_s, held_s, job_timeout_s), "max_lease"), _ceiling_s(policy))
    else:
        limits = ((max_lease_s, "max_lease"),)
    wish = Wish(
        "job",
        config,
        images.needs(config.compute.image, texts, size_gb=config.compute.image_gb),
        limits=tuple((seconds, why) for seconds, why in limits if seconds is not None),
        may_shrink=max_lease_s is None,
        hold_for_s=held_s,
        job_timeout_s=job_timeout_s or 0.0,
        expected_s=expected_s,
        weights_gb=weights_gb,
        volume_id=volume_id,
        interruptible=interruptible,
        job=job,
        inputs=inputs,
        resume_from=resume_from,
        secrets=_secrets(op, job),
        reasons=tuple(reasons),
    )
    return _planned(op, wish, policy)


def usual_lease_s(expected_s: float | None, hold_for_s: float | None, job_timeout_s: float | None) -> float:
    """When billing ends where nobody says when: what runs longer than twice the expected time needs a new plan.

    A longer timeout of the job says that it may; the set-up and the review come on top.
    """
    if expected_s is None:
        return DEFAULT_MAX_LEASE_S
    work_s = max(EXPECTED_TIMES * expected_s, job_timeout_s or 0.0)
    return min(DEFAULT_MAX_LEASE_S, max(SHORTEST_S, work_s + (hold_for_s or 0.0) + SETUP_S))


def candidates_of(config: GpuConfig, traits: Traits) -> tuple[str, ...]:
    """The GPU classes in the order in which they are tried; empty: the smallest that do."""
    written = tuple(dict.fromkeys(name for name in (config.compute.gpu, *config.compute.candidates) if name))
    return written or traits.default_candidates


# the steps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Money:
    """What there is to spend. left: of each ceiling, None is no limit."""

    policy: Policy
    books: Books

    @property
    def left(self) -> dict[str, Decimal | None]:
        return policies.what_is_left(self.policy, self.books.spent, self.books.reserved_usd)


def _planned(op: Operator, wish: Wish, policy: Policy) -> Plan:
    provider = wish.config.provider
    if provider in OWN_HOSTS:
        raise UsageError(
            f"provider {provider} rents nothing, so there is nothing to plan", next_step="gpu plan --provider vast"
        )
    reasons = [*wish.reasons, *_before_the_market(wish)]
    if not wish.limits:
        step = "write lifecycle.max_lifetime in gpu.yaml, then run gpu plan again"
        preflight.refuse([*reasons, Reason("no_deadline", "nothing bounds this machine", step)])
    reader = op.reader(provider)
    if wish.interruptible and not reader.traits.has_interruptible:
        reasons.append(Reason("no_interruptible", f"{provider} has no interruptible machines", "plan without it"))
        wish = replace(wish, interruptible=False)
    older_job = (wish.resume_from or {}).get("job")  # its money and this one's have one ceiling
    money = _Money(policy, budget.books(op.project, op.ledger, op.clock, op.environ, job_id=older_job))
    need, looks, worst = _measured(op, wish, reader, money)
    reasons += _against_the_money(wish, money, worst)
    warnings: list[str] = []
    if worst is None:
        nothing = preflight.nothing_to_try(looks, need, wish.needs, provider)
        reasons += [_no_price(wish)] if any(map(wish.tries, looks)) else nothing
    else:
        credit_usd, warnings = _credit(reader)
        reasons += preflight.balance(provider, credit_usd, worst.worst_usd)
    if reasons or worst is None:
        preflight.refuse(reasons, looks)
    plan = plan_document.document(op, wish, need, reader, looks, worst, money.left)
    warnings += plan_document.warnings(wish, plan, looks, is_incomplete=money.books.spent.incomplete)
    return replace(plan, warnings=tuple(warnings))


def _before_the_market(wish: Wish) -> list[Reason]:
    compute = wish.config.compute
    reasons = preflight.disk(compute.disk_gb, wish.needs, weights_gb=wish.weights_gb, inputs_bytes=wish.inputs_bytes)
    if wish.volume_id is not None and not traits_of(wish.config.provider).mounts_volumes:
        reasons.append(
            Reason("volume_location", f"{wish.config.provider} has no network volumes", "plan without --volume")
        )
    limit_s, why = wish.limit
    if wish.job_timeout_s and wish.job_timeout_s > limit_s:
        text = (
            f"the job may run {format_duration(wish.job_timeout_s)}, its machine ends after {format_duration(limit_s)}"
        )
        reasons.append(Reason("timeout_too_long", f"{text} ({why})", "raise --max-lease or lower --job-timeout"))
    return reasons


def _measured(
    op: Operator, wish: Wish, reader: RentedReader, money: _Money
) -> tuple[Requirements, list[Look], WorstCase | None]:
    """The need until the deadline that the money allows, each class as it meets that, and what it comes to."""
    config = wish.config
    need = _need(wish, reader, money.policy)
    is_written = bool(config.compute.gpu or config.compute.candidates)
    found = _classes(reader, need, candidates_of(config, reader.traits), is_written=is_written)
    known, now = memory.load(op.project), op.clock.now()
    use = Use(((wish.expected_s or 3600) + (wish.hold_for_s or 0)) / 3600, wish.weights_gb)

    def judged(need: Requirements) -> list[Look]:
        return [judge(seen, need, known, use=use, provider=config.provider, now=now) for seen in found]

    def priced(looks: Sequence[Look], limit: tuple[float, str]) -> WorstCase | None:
        return worst_case.of(wish, looks, need, reader.traits, money.left, limit=limit)

    limit = wish.limit
    # How long money reaches decides which machines last long enough, so it is asked before that.
    if wish.may_shrink and (first := priced(judged(need), limit)) is not None:
        limit = first.deadline_s, first.why
    need = replace(need, hours=limit[0] / 3600)
    looks = judged(need)
    return need, looks, priced(looks, limit)


def _need(wish: Wish, reader: RentedReader, policy: Policy) -> Requirements:
    compute = wish.config.compute
    rates = [rate for rate in (compute.max_rate_usd_hr, policy.ceilings["rate_usd_hr"]) if rate is not None]
    return Requirements(
        gpu_count=compute.gpu_count,
        min_vram_gb=compute.min_vram_gb,
        disk_gb=math.ceil(compute.disk_gb),
        max_rate_usd_hr=min(rates, default=None),
        min_cuda=wish.needs.cuda,
        volume_id=wish.volume_id if reader.traits.mounts_volumes else None,
        interruptible=wish.interruptible,
        persistent=not wish.is_ephemeral(reader.traits),
    )


def _classes(reader: RentedReader, need: Requirements, names: Sequence[str], *, is_written: bool) -> list[Seen]:
    """What there is of each class. Where only the provider's defaults were named and none is large enough: smallest."""
    found = look(reader, need, names)
    if is_written or not names or need.min_vram_gb is None:
        return found
    sizes = [o.vram_gb for seen in found for o in seen.offers if o.vram_gb is not None]
    if sizes and max(sizes) < need.min_vram_gb:
        found += [seen for seen in look(reader, need, ()) if seen.gpu not in names]
    return found


def _against_the_money(wish: Wish, money: _Money, worst: WorstCase | None) -> list[Reason]:
    """What the policy forbids and what the budget of gpu.yaml does not reach; without a price, what can be told so."""
    deadline_s = wish.limit[0] if worst is None else worst.deadline_s
    violations = policies.check(
        money.policy,
        cost_usd=0 if worst is None else worst.worst_usd,
        rate_usd_hr=0 if worst is None else worst.max_rate,
        deadline_h=json_number(Decimal(str(deadline_s / 3600))),
        provider=wish.config.provider,
        spent=money.books.spent,
        reserved_usd=money.books.reserved_usd,
    )
    # What fits has to fit them all: the money, and the ceiling on the deadline itself.
    bounds = [_ceiling_s(money.policy)[0], None if worst is None else worst.buys_s(worst_case.money_left(money.left))]
    longest_s = 0.0 if worst is None else min((seconds for seconds in bounds if seconds is not None), default=0.0)
    reasons = preflight.ceilings(violations, longest_s=longest_s if longest_s >= SHORTEST_S else None)
    if worst is None or wish.session_usd is None or worst.worst_usd <= wish.session_usd:
        return reasons
    buys = format_duration(worst.buys_s(wish.session_usd) or 0.0)
    text = (
        f"budget.session_usd of {format_usd(wish.session_usd)} buys {buys} at {format_usd(worst.max_rate)}/h, "
        f"at least {format_duration(wish.shortest_s)} are needed"
    )
    return [*reasons, Reason("over_ceiling", text, "raise budget.session_usd, or name a cheaper compute.gpu")]


def _no_price(wish: Wish) -> Reason:
    return Reason(
        "no_price",
        f"{wish.config.provider} has nothing that fits now, so only a ceiling says what it may cost",
        "write compute.max_rate_usd_hr in gpu.yaml, then run gpu plan again",
    )


def _credit(reader: RentedReader) -> tuple[Decimal | None, list[str]]:
    if not reader.traits.shows_balance:
        return None, []
    try:
        return reader.balance().credit_usd, []
    except (Unavailable, UnexpectedReply, RateLimited) as exc:
        return None, [f"the balance of the account is not known: {exc.message}"]


def _secrets(op: Operator, job: Mapping[str, Any]) -> tuple[str, ...]:
    names = {str(name) for name in job.get("secret") or ()}
    if credentials.hf_token(op.project.root, op.environ):
        names.add("HF_TOKEN")
    return tuple(sorted(names))


def _ceiling_s(policy: Policy) -> tuple[float | None, str]:
    limit = policy.ceilings["deadline_h"]
    return (None if limit is None else float(limit) * 3600, "ceiling")
