"""The machine to ask for: what a plan and an offer come to in one create, what its fuse does and where that lives."""

from __future__ import annotations

from decimal import ROUND_UP, Decimal

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import NoCapacity
from gpu_skills.lifecycle.connect import WORKSPACE
from gpu_skills.lifecycle.guard import fuse
from gpu_skills.lifecycle.guard.fuse import OnExpiry
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import sshkeys
from gpu_skills.lifecycle.runs import Attempt
from gpu_skills.providers.base import MachineSpec, Offer, Traits
from gpu_skills.units import format_usd

# An interruptible machine at its floor is the first to go when somebody bids more.
BID_ABOVE_FLOOR = Decimal("1.25")
_BID_STEP = Decimal("0.0001")


def keeps_workspace(op: Operator, plan: Plan) -> bool:
    """Whether what stands in the workspace survives a stop."""
    if op.reader(plan.provider).traits.stop_keeps == "disk" or plan.volume_id is not None:
        return True
    return not plan.outputs_ephemeral


def fuse_action(op: Operator, plan: Plan) -> OnExpiry:
    """How the machine of a plan ends its own billing: what its key has to be allowed.

    Whoever finds a stopped one destroys it once its outputs are elsewhere; the fuse cannot know of them.
    """
    return "stop" if keeps_workspace(op, plan) else "destroy"


def fuse_actions(traits: Traits) -> tuple[OnExpiry, ...]:
    """What fuses at a provider do, the one plan or the other."""
    return ("stop",) if traits.stop_keeps == "disk" else ("stop", "destroy")


def keeps(op: Operator, plan: Plan) -> str:
    """The folder on the machine that survives a stop, as far as anything there does: what is mounted, else the home."""
    is_mounted = op.reader(plan.provider).traits.stop_keeps == "workspace" and keeps_workspace(op, plan)
    return WORKSPACE if is_mounted else "~"


def spec_of(op: Operator, plan: Plan, offer: Offer, attempt: Attempt) -> MachineSpec:
    """The machine to ask for, born with its fuse."""
    reader = op.reader(plan.provider)
    is_kept = reader.traits.stop_keeps == "workspace" and keeps_workspace(op, plan) and plan.volume_id is None
    assert attempt.deadline_at is not None
    bootstrap = fuse.bootstrap(
        provider=plan.provider,
        base_url=reader.base_url,
        intent=attempt.intent,
        deadline_at=parse_timestamp(attempt.deadline_at),
        longest_s=plan.deadline_s,
        on_expiry=fuse_action(op, plan),
        keeps=keeps(op, plan),
    )
    return MachineSpec(
        offer=offer,
        label=attempt.label,
        image=plan.image,
        disk_gb=plan.disk_gb,
        gpu_count=plan.gpu_count,
        max_rate_usd_hr=plan.max_rate_usd_hr,
        bootstrap=bootstrap,
        ssh_public_key=sshkeys.ensure(op).public,
        workspace=WORKSPACE,
        bid_usd_hr=bid(plan, offer) if plan.interruptible else None,
        persistent_gb=plan.disk_gb if is_kept else None,
        volume_id=plan.volume_id,
        data_centers=data_centers(op, plan, offer),
        min_cuda=plan.min_cuda,
    )


def data_centers(op: Operator, plan: Plan, offer: Offer) -> tuple[str, ...]:
    """Where it may stand, as the create has to say it: the volume's place, else those of the plan that have some."""
    reader = op.reader(plan.provider)
    if not reader.traits.mounts_volumes:
        return ()
    if plan.volume_id is not None:
        volumes = reader.volumes()  # type: ignore[attr-defined]
        return tuple(volume.location for volume in volumes if volume.volume_id == plan.volume_id)
    wanted = [place.upper() for place in plan.locations]
    codes = [code.strip() for code in (offer.location or "").split(",") if code.strip()]
    return tuple(code for code in codes if any(code == place or code.startswith(f"{place}-") for place in wanted))


def bid(plan: Plan, offer: Offer) -> Decimal:
    """Above the floor, so that the next bidder does not take it at once, and within what was approved.

    NoCapacity where what was approved does not reach the floor.
    """
    floor = offer.min_bid_usd_hr or Decimal(0)
    most = plan.max_rate_usd_hr - offer.storage_usd_hr
    if floor > most:
        raise NoCapacity(
            f"offer {offer.offer_id} takes bids from ${floor.normalize():f}/h, its disk costs "
            f"${offer.storage_usd_hr.normalize():f}/h, approved are at most {format_usd(plan.max_rate_usd_hr)}/h"
        )
    wanted = (floor * BID_ABOVE_FLOOR).quantize(_BID_STEP, rounding=ROUND_UP)
    return min(wanted, most)


def offer_of(attempt: Attempt, machine: Machine) -> Offer:
    """What was taken, as far as the record still has it: enough to compare what came with what was asked for."""
    return Offer(
        provider=machine.provider,
        offer_id=attempt.offer_id,
        rate_usd_hr=machine.rate_usd_hr,
        gpu=attempt.gpu,
        gpu_count=machine.gpu_count,
        vram_gb=machine.vram_gb,
        storage_usd_hr=machine.storage_usd_hr or machine.rate_usd_hr * 0,
    )
