"""Measure a plan: stock and price of each GPU class now, the deadline they allow, the worst case they can come to.

Nothing is rented and nothing written here. What speaks against the plan is raised together, as PlanRefused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import ROUND_CEILING, Decimal
from typing import Any

from gpu_skills import credentials
from gpu_skills.clock import timestamp
from gpu_skills.config import GpuConfig
from gpu_skills.errors import RateLimited, Unavailable, UnexpectedReply, UsageError
from gpu_skills.lifecycle import images, memory, preflight
from gpu_skills.lifecycle.images import Needs
from gpu_skills.lifecycle.market import ANY_GPU, Look, Seen, judge, look, offer_record
from gpu_skills.lifecycle.offers import Use
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plan import Candidate, Plan
from gpu_skills.lifecycle.preflight import Reason
from gpu_skills.providers.base import RentedReader, Requirements
from gpu_skills.state import budget
from gpu_skills.state import policy as policies
from gpu_skills.state.policy import Policy
from gpu_skills.state.registry import OWN_HOSTS
from gpu_skills.units import format_duration, format_usd, json_number, usd

DEFAULT_MAX_LEASE_S = 12 * 3600.0
VALID_FOR = timedelta(hours=1)
SETUP_CAP_S = 1800.0
START_GRACE_S = 600.0  # a machine that was stopped and started past its deadline may run so much longer
SHORTEST_S = 900.0  # a budget that buys less than this buys nothing
TRAFFIC_GB = 10.0  # each way, beside image, inputs and weights
# Of a class that nobody offers now, for a GB and an hour. Dearer than any disk that was seen.
_ASSUMED_STORAGE_USD_GB_HR = Decimal("0.0006")
_MICRO = Decimal("0.000001")

DEFAULT_CANDIDATES = {"runpod": ("NVIDIA RTX A5000", "NVIDIA A40")}
_WHOSE = {
    "vast": "somebody's machine in Vast's market, whose owner could read what is on it",
    "runpod": "a machine in RunPod's secure cloud",
}
# A class that fails one of these does so tomorrow as well: waiting for it is no use.
_LASTING = ("min_vram_gb", "kind")


@dataclass(frozen=True)
class _Wish:
    """What a plan is wanted for. limits: (seconds, why) for the deadline; the least holds.

    session_usd: what the whole may come to. may_shrink: a shorter deadline will do where money does not reach.
    """

    machine_class: str
    config: GpuConfig
    needs: Needs
    limits: tuple[tuple[float, str], ...]
    may_shrink: bool
    session_usd: Decimal | None = None
    idle_timeout_s: float | None = None
    hold_for_s: float | None = None
    job_timeout_s: float | None = None
    expected_s: float | None = None
    weights_gb: float = 0.0
    volume_id: str | None = None
    interruptible: bool = False
    job: dict[str, Any] | None = None
    inputs: dict[str, Any] | None = None
    resume_from: dict[str, Any] | None = None
    secrets: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()

    @property
    def inputs_bytes(self) -> int:
        return int((self.inputs or {}).get("bytes") or 0)

    @property
    def shortest_s(self) -> float:
        """What the work itself is known to take."""
        return max(SHORTEST_S, self.job_timeout_s or 0, (self.expected_s or 0) + (self.hold_for_s or 0))


def plan_project(op: Operator, config: GpuConfig, *, interruptible: bool = False) -> Plan:
    """The machine the project keeps for a while: ended by idleness, `max_lifetime`, and what `session_usd` buys.

    The budget bounds the whole worst case, so the machine's own deadline comes a little earlier than it alone would.
    """
    policy = op.policy()
    limits = [(config.lifecycle.max_lifetime_s, "max_lifetime"), _ceiling_s(policy)]
    idle = [config.lifecycle.idle_timeout_s]
    if policy.idle_shutdown_after_min is not None:
        idle.append(float(policy.idle_shutdown_after_min) * 60)
    wish = _Wish(
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

    max_lease_s None: 12 h, or less where the ceilings do not reach so far. texts: what installs packages, by where it
    stands (`setup`, `requirements.txt`). weights_gb: what the job downloads. reasons: what was found against it here.
    """
    policy = op.policy()
    if max_lease_s is None:
        limits = ((DEFAULT_MAX_LEASE_S, "max_lease"), _ceiling_s(policy))
    else:
        limits = ((max_lease_s, "max_lease"),)
    wish = _Wish(
        "job",
        config,
        images.needs(config.compute.image, texts, size_gb=config.compute.image_gb),
        limits=tuple((seconds, why) for seconds, why in limits if seconds is not None),
        may_shrink=max_lease_s is None,
        hold_for_s=config.lifecycle.hold_for_s if hold_for_s is None else hold_for_s,
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


def candidates_of(config: GpuConfig) -> tuple[str, ...]:
    """The GPU classes in the order in which they are tried; empty: the smallest that do."""
    written = tuple(dict.fromkeys(name for name in (config.compute.gpu, *config.compute.candidates) if name))
    return written or DEFAULT_CANDIDATES.get(config.provider, ())


# the steps --------------------------------------------------------------------------------------------------------


def _planned(op: Operator, wish: _Wish, policy: Policy) -> Plan:
    config, provider = wish.config, wish.config.provider
    if provider in OWN_HOSTS:
        raise UsageError(
            f"provider {provider} rents nothing, so there is nothing to plan", next_step="gpu plan --provider vast"
        )
    reasons = [*wish.reasons, *_before_the_market(wish)]
    books = budget.books(op.project, op.ledger, op.clock, op.environ)
    left = policies.what_is_left(policy, books.spent, books.reserved_usd)
    limit_s, _why = min(wish.limits, key=_seconds, default=(None, None))
    if limit_s is None:
        reasons.append(
            Reason("no_deadline", "nothing bounds this machine", "write lifecycle.max_lifetime in gpu.yaml, then plan")
        )
        preflight.refuse(reasons)
    reader = op.reader(provider)
    if wish.interruptible and not reader.traits.has_interruptible:
        reasons.append(Reason("no_interruptible", f"{provider} has no interruptible machines", "plan without it"))
        wish = replace(wish, interruptible=False)
    need = _need(wish, reader, policy, hours=limit_s / 3600)
    found = _classes(
        reader, need, candidates_of(config), is_written=bool(config.compute.gpu or config.compute.candidates)
    )
    known = memory.load(op.project)
    now = op.clock.now()

    def looked(hours: float | None) -> list[Look]:
        use = Use(((wish.expected_s or 3600) + (wish.hold_for_s or 0)) / 3600, wish.weights_gb)
        at = replace(need, hours=hours)
        return [judge(seen, at, known, use=use, provider=provider, now=now) for seen in found]

    deadline_s, why = limit_s, None
    if wish.may_shrink:
        # How long money reaches decides which machines last long enough, so it is asked first.
        first = _money(wish, looked(None), need, reader, left, limit_s)
        if first is not None:
            deadline_s, why = first.deadline_s, first.why
    looks = looked(deadline_s / 3600)
    money = _money(wish, looks, need, reader, left, deadline_s, why=why)
    at_deadline = replace(need, hours=deadline_s / 3600)
    tried = [one for one in looks if _is_tried(one, wish)]
    if money is None:
        reasons += (
            preflight.nothing_to_try(looks, at_deadline, wish.needs, provider) if not tried else [_no_price(wish)]
        )
    violations = policies.check(
        policy,
        cost_usd=0 if money is None else money.worst_usd,
        rate_usd_hr=0 if money is None else money.max_rate,
        deadline_h=json_number(Decimal(str((limit_s if money is None else money.deadline_s) / 3600))),
        provider=provider,
        spent=books.spent,
        reserved_usd=books.reserved_usd,
    )
    longest_s = None if money is None else money.buys_s(_money_left(left))
    reasons += preflight.ceilings(violations, longest_s=longest_s if longest_s and longest_s >= SHORTEST_S else None)
    if money is not None:
        reasons += _over_budget(wish, money)
    warnings = []
    if money is not None:
        credit, warning = _credit(reader)
        reasons += preflight.balance(provider, credit, money.worst_usd)
        warnings += warning
    if reasons or money is None:
        preflight.refuse(reasons, looks)
    plan = _document(op, wish, need, reader, looks, money, left)
    return replace(plan, warnings=(*warnings, *_warnings(wish, plan, looks, money, books.spent.incomplete)))


def _before_the_market(wish: _Wish) -> list[Reason]:
    compute = wish.config.compute
    reasons = preflight.disk(compute.disk_gb, wish.needs, weights_gb=wish.weights_gb, inputs_bytes=wish.inputs_bytes)
    if wish.volume_id is not None and wish.config.provider != "runpod":
        reasons.append(
            Reason("volume_location", f"{wish.config.provider} has no network volumes", "plan without --volume")
        )
    limit_s, why = min(wish.limits, key=_seconds, default=(math.inf, ""))
    if wish.job_timeout_s and wish.job_timeout_s > limit_s:
        text = (
            f"the job may run {format_duration(wish.job_timeout_s)}, its machine ends after {format_duration(limit_s)}"
        )
        reasons.append(Reason("timeout_too_long", f"{text} ({why})", "raise --max-lease or lower --job-timeout"))
    return reasons


def _need(wish: _Wish, reader: RentedReader, policy: Policy, *, hours: float) -> Requirements:
    compute = wish.config.compute
    rates = [rate for rate in (compute.max_rate_usd_hr, policy.ceilings["rate_usd_hr"]) if rate is not None]
    return Requirements(
        gpu_count=compute.gpu_count,
        min_vram_gb=compute.min_vram_gb,
        disk_gb=math.ceil(compute.disk_gb),
        max_rate_usd_hr=min(rates, default=None),
        hours=hours,
        min_cuda=wish.needs.cuda,
        volume_id=wish.volume_id if wish.config.provider == "runpod" else None,
        interruptible=wish.interruptible,
        persistent=not _is_ephemeral(wish, reader),
    )


def _is_ephemeral(wish: _Wish, reader: RentedReader) -> bool:
    """Whether nothing of the disk is there once the machine stops."""
    return wish.machine_class != "project" and reader.traits.stop_keeps == "workspace" and wish.volume_id is None


def _classes(reader: RentedReader, need: Requirements, names: Sequence[str], *, is_written: bool) -> list[Seen]:
    """What there is of each class. Where only the provider's defaults were named and none is large enough: smallest."""
    found = look(reader, need, names)
    if is_written or not names or need.min_vram_gb is None:
        return found
    sizes = [o.vram_gb for seen in found for o in seen.offers if o.vram_gb is not None]
    if sizes and max(sizes) < need.min_vram_gb:
        found += [seen for seen in look(reader, need, ()) if seen.gpu not in names]
    return found


def _is_tried(one: Look, wish: _Wish) -> bool:
    if one.estimates:
        return True
    if one.gpu == ANY_GPU:
        return False
    return wish.config.compute.capacity.mode == "wait" and not any(name in one.fails for name in _LASTING)


# money ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Money:
    """The worst case of a plan, and what it is made of. Rates in USD an hour, rounded up."""

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
            "running": _up(self.max_rate * _hours(self.deadline_s)),
            "failed_setups": _up(self.max_rate * _hours(self.setup_cap_s) * self.failures),
            "storage": _up(self.storage_rate * _hours(self.storage_grace_s)),
            "traffic": _up(self.traffic_usd),
            "start_grace": _up(self.max_rate * _hours(START_GRACE_S)),
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


def _money(
    wish: _Wish,
    looks: Sequence[Look],
    need: Requirements,
    reader: RentedReader,
    left: Mapping[str, Decimal | None],
    limit_s: float,
    *,
    why: str | None = None,
) -> _Money | None:
    """None: there is no price to plan with."""
    tried = [one for one in looks if _is_tried(one, wish)]
    shown = [e.offer for one in tried for e in one.shown]
    max_rate = max((offer.rate_usd_hr for offer in shown), default=None)
    if wish.config.compute.capacity.mode == "wait" and tried and (not shown or wish.config.compute.max_rate_usd_hr):
        max_rate = need.max_rate_usd_hr  # stated by the user, or all that is known
    if max_rate is None:
        return None
    seen = shown or [offer for one in looks for offer in one.seen.offers]
    assumed = _ASSUMED_STORAGE_USD_GB_HR * Decimal(str(need.disk_gb or 0))
    storage = max((o.storage_usd_hr for o in seen), default=assumed)
    if len(shown) < len(tried):  # a class of which nothing is there to be asked
        storage = max(storage, assumed)
    is_ephemeral = _is_ephemeral(wish, reader)
    image_gb = wish.needs.size_gb + wish.inputs_bytes / 1e9
    failures = max(1, len(tried))
    down_gb = Decimal(str(image_gb * (failures + 1) + wish.weights_gb + TRAFFIC_GB))
    traffic = max((o.download_usd_gb * down_gb + o.upload_usd_gb * Decimal(str(TRAFFIC_GB)) for o in seen), default=0)
    money = _Money(
        max_rate=_up(max_rate),
        storage_rate=Decimal(0) if is_ephemeral else _up(storage),
        storage_grace_s=0.0 if is_ephemeral else wish.config.lifecycle.storage_grace_s,
        traffic_usd=Decimal(traffic),
        failures=failures,
        deadline_s=limit_s,
        why=why or min(wish.limits, key=_seconds)[1],
    )
    if wish.may_shrink:
        for pays, why in ((wish.session_usd, "session_budget"), (_money_left(left), "ceiling")):
            buys_s = money.buys_s(pays)
            if buys_s is not None and wish.shortest_s <= buys_s < money.deadline_s:
                money = replace(money, deadline_s=float(math.floor(buys_s)), why=why)
    return money


def _money_left(left: Mapping[str, Decimal | None]) -> Decimal | None:
    return min((value for name in policies.MONEY if (value := left[name]) is not None), default=None)


def _over_budget(wish: _Wish, money: _Money) -> list[Reason]:
    if wish.session_usd is None or money.worst_usd <= wish.session_usd:
        return []
    buys = money.buys_s(wish.session_usd) or 0.0
    return [
        Reason(
            "over_ceiling",
            f"budget.session_usd of {format_usd(wish.session_usd)} buys {format_duration(buys)} at "
            f"{format_usd(money.max_rate)}/h, at least {format_duration(wish.shortest_s)} are needed",
            "raise budget.session_usd, or name a cheaper compute.gpu",
        )
    ]


def _no_price(wish: _Wish) -> Reason:
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


# the document -----------------------------------------------------------------------------------------------------


def _document(
    op: Operator,
    wish: _Wish,
    need: Requirements,
    reader: RentedReader,
    looks: Sequence[Look],
    money: _Money,
    left: Mapping[str, Decimal | None],
) -> Plan:
    config, now = wish.config, op.clock.now()
    capacity = config.compute.capacity
    waits = capacity.mode == "wait"
    sequence = timedelta(seconds=capacity.attempts * capacity.interval_s) if waits else timedelta(0)
    need = replace(need, hours=money.deadline_s / 3600)
    best = next((one.estimates[0] for one in looks if one.estimates), None)
    expected_usd = None
    if wish.expected_s is not None and best is not None:
        hours = _hours(wish.expected_s + (wish.hold_for_s or 0) + best.startup_s + best.download_s)
        expected_usd = usd(best.offer.rate_usd_hr * hours + best.traffic_usd)
    return Plan(
        project_id=op.project.project_id,
        machine_class=wish.machine_class,
        provider=config.provider,
        image=config.compute.image,
        disk_gb=math.ceil(config.compute.disk_gb),
        gpu_count=config.compute.gpu_count,
        candidates=tuple(_candidate(one, wish, need) for one in looks),
        max_rate_usd_hr=money.max_rate,
        deadline_s=money.deadline_s,
        deadline_reason=money.why,
        storage_grace_s=money.storage_grace_s,
        storage_usd_hr=money.storage_rate,
        worst_case_usd=money.worst_usd,
        worst_case={name: json_number(value) for name, value in money.parts.items()},
        setup_cap_s=money.setup_cap_s,
        setup_failures_max=money.failures,
        image_gb=wish.needs.size_gb,
        measured_at=timestamp(now),
        expires_at=timestamp(now + max(VALID_FOR, sequence)),
        min_vram_gb=config.compute.min_vram_gb,
        min_cuda=wish.needs.cuda,
        min_driver=wish.needs.driver,
        interruptible=wish.interruptible,
        volume_id=need.volume_id,
        locations=_locations(need, reader),
        idle_timeout_s=wish.idle_timeout_s,
        hold_for_s=wish.hold_for_s,
        job_timeout_s=wish.job_timeout_s,
        capacity={
            "mode": capacity.mode,
            "attempts": capacity.attempts if waits else 1,
            "interval_s": json_number(Decimal(str(capacity.interval_s))) if waits else 0,
        },
        expected_s=wish.expected_s,
        expected_usd=expected_usd,
        ceilings_left={name: None if value is None else json_number(value) for name, value in left.items()},
        outputs_ephemeral=not need.persistent,
        secrets=wish.secrets,
        whose_machine=_WHOSE.get(config.provider),
        job=wish.job,
        inputs=wish.inputs,
        resume_from=wish.resume_from,
    )


def _candidate(one: Look, wish: _Wish, need: Requirements) -> Candidate:
    left_out = None
    if not _is_tried(one, wish):
        reasons = preflight.class_reasons(one, need, wish.needs, wish.config.provider)
        left_out = "; ".join(reason.message for reason in reasons)
    rate = one.estimates[0].offer.rate_usd_hr if one.estimates else None
    shown = tuple(offer_record(e) for e in one.shown)
    return Candidate(one.gpu, left_out, shown, None if rate is None else usd(rate))


def _warnings(wish: _Wish, plan: Plan, looks: Sequence[Look], money: _Money, is_incomplete: bool) -> list[str]:
    found = wish.needs.assumptions()
    if plan.outputs_ephemeral:
        found.append("outputs_ephemeral: no disk of it survives a stop; what is not pulled by then is gone")
    if plan.capacity["mode"] == "wait":
        attempts, interval_s = plan.capacity["attempts"], plan.capacity["interval_s"]
        found.append(
            f"it waits in the foreground, {format_duration(attempts * interval_s)} at most, and takes whatever fits "
            f"then: the price may change up to {format_usd(plan.max_rate_usd_hr)}/h"
        )
    if plan.interruptible:
        found.append("interruptible: the machine may be taken away at any time, and with it what was not pulled")
    limit_s, _why = min(wish.limits, key=_seconds)
    if money.deadline_s < math.floor(limit_s):
        what = "budget.session_usd" if money.why == "session_budget" else "what the policy's ceilings leave"
        found.append(
            f"the deadline is {format_duration(plan.deadline_s)}, not {format_duration(limit_s)}: {what} pays no more"
        )
    ends = (plan.job_timeout_s or plan.expected_s or 0) + (plan.hold_for_s or 0)
    if plan.job is not None and not plan.job_timeout_s:
        found.append(f"the job has no timeout: the deadline of {format_duration(plan.deadline_s)} ends it")
    if ends > plan.deadline_s:
        found.append(f"the job and its review may take {format_duration(ends)}: the deadline ends them before that")
    if plan.worst_case.get("traffic"):
        gb = TRAFFIC_GB + wish.weights_gb
        found.append(
            f"traffic is billed by the GB: image, inputs and {gb:g} GB more are counted, the rest comes on top"
        )
    if plan.volume_id is not None:
        found.append(f"network volume {plan.volume_id} bills until it is deleted, whatever becomes of the machine")
    tried = {candidate.gpu for candidate in plan.tried}
    nothing = [one.gpu for one in looks if one.gpu in tried and not one.estimates]
    if nothing:
        found.append(f"none to be had now: {', '.join(nothing)}")
    if is_incomplete:
        found.append("a record of what was spent cannot be read, so less may be left: gpu ledger verify")
    return found


def _locations(need: Requirements, reader: Any) -> tuple[str, ...]:
    """The one data centre in which a network volume stands: a create has to name it."""
    if need.volume_id is None:
        return ()
    return tuple(v.location for v in reader.volumes() if v.volume_id == need.volume_id)


def _secrets(op: Operator, job: Mapping[str, Any]) -> tuple[str, ...]:
    names = {str(name) for name in job.get("secret") or ()}
    if credentials.hf_token(op.project.root, op.environ):
        names.add("HF_TOKEN")
    return tuple(sorted(names))


def _ceiling_s(policy: Policy) -> tuple[float | None, str]:
    limit = policy.ceilings["deadline_h"]
    return (None if limit is None else float(limit) * 3600, "ceiling")


def _seconds(limit: tuple[float, str]) -> float:
    """Of two that end at once the first one written says why."""
    return limit[0]


def _hours(seconds: float) -> Decimal:
    return Decimal(str(seconds)) / 3600


def _up(value: Decimal | int) -> Decimal:
    """Six places, never less: an offer of exactly the highest rate must still fit."""
    return Decimal(value).quantize(_MICRO, rounding=ROUND_CEILING)
