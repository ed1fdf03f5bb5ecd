"""One create: written down before it is sent, sent once, and what it came to found out whatever the answer was.

freeze()   the attempt in the run's file, the record `requested`, the intent in the journal: all before anything leaves
send()     one request; Created, or Refused with why, or an error that says that nobody knows
find()     what carries the intent in its label: the only handle on a create that was not answered
adopt()    a machine that was found becomes the record's
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import ROUND_UP, Decimal

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import GpuError, NoCapacity, ProviderError, ProviderSilent, UnexpectedReply, UsageError, one_line
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.connect import WORKSPACE
from gpu_skills.lifecycle.guard import fuse
from gpu_skills.lifecycle.guard.fuse import OnExpiry
from gpu_skills.lifecycle.labels import Label
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import sshkeys
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.providers.base import MachineSpec, Offer, Traits
from gpu_skills.state import budget
from gpu_skills.units import format_usd, json_number

# Looks for a create that was not answered. Providers' lists lag, so it goes on for a minute at least.
LOOK_PAUSES_S = (2, 3, 5, 8, 12, 15, 20)
# An interruptible machine at its floor is the first to go when somebody bids more.
BID_ABOVE_FLOOR = Decimal("1.25")
_BID_STEP = Decimal("0.0001")


@dataclass(frozen=True)
class Created:
    """It exists and is on record. problem: the provider reported an error all the same, so it has to go again."""

    machine: Machine
    problem: GpuError | None = None


@dataclass(frozen=True)
class Refused:
    """It does not exist: that is clear."""

    problem: GpuError


# before it is sent ----------------------------------------------------------------------------------------------------


def intent_of(run: Run, plan: Plan) -> tuple[int, str]:
    """Number and intent of the run's next create."""
    number = max((attempt.number for attempt in run.attempts), default=0) + 1
    return number, labels.create_intent(plan.machine_class, run.approval_id, number)  # type: ignore[arg-type]


def freeze(op: Operator, run: Run, plan: Plan, offer: Offer) -> Attempt:
    """Write everything down by which this create can be found again, whatever happens to us. Nothing is sent."""
    number, intent = intent_of(run, plan)
    now = op.clock.now()
    # Whole seconds, as every record and label holds them.
    deadline = parse_timestamp(timestamp(now + timedelta(seconds=plan.deadline_s)))
    attempt = Attempt(
        number=number,
        intent=intent,
        machine_id=labels.machine_id(intent),
        label=labels.written(Label(op.project.project_id, intent, deadline)),
        deadline_at=timestamp(deadline),
        offer_id=offer.offer_id,
        gpu=offer.gpu,
        rate_usd_hr=json_number(offer.rate_usd_hr),
        began_at=timestamp(now),
    )
    runs.update(op, run.approval_id, lambda run: runs.with_attempt(run, attempt))
    machines.save(op.project, _requested(op, run, plan, offer, attempt))
    budget.note_attempt(
        op.project,
        op.clock,
        intent=run.approval_id,
        directory=run.account,
        machine_id=attempt.machine_id,
        environ=op.environ,
    )
    intents.begin(
        op.project,
        op.clock,
        "create",
        intent,
        provider=plan.provider,
        account=run.account,
        machine_id=attempt.machine_id,
        label=attempt.label,
        approval_id=run.approval_id,
        details={"offer_id": offer.offer_id, "gpu": offer.gpu, "rate_usd_hr": attempt.rate_usd_hr},
    )
    return attempt


def _requested(op: Operator, run: Run, plan: Plan, offer: Offer, attempt: Attempt) -> Machine:
    return Machine(
        id=attempt.machine_id,
        provider=plan.provider,
        host=attempt.machine_id,
        status="requested",
        rate_usd_hr=offer.rate_usd_hr,
        gpu=offer.gpu,
        gpu_count=plan.gpu_count,
        vram_gb=offer.vram_gb,
        root=fuse.runner_root(keeps(op, plan)),
        label=attempt.label,
        machine_class=plan.machine_class,
        intent=attempt.intent,
        plan=run.plan_sha256,
        account=run.account,
        host_key=offer.host_key,
        disk_gb=float(plan.disk_gb),
        storage_usd_hr=offer.storage_usd_hr,
        created_at=attempt.began_at,
        deadline_at=attempt.deadline_at,
        extra={"approval_id": run.approval_id, "offer_id": offer.offer_id},
    )


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


# the one request ------------------------------------------------------------------------------------------------------


def send(op: Operator, run: Run, attempt: Attempt, spec: MachineSpec) -> Created | Refused:
    """Ask for the machine, once. Raises ProviderSilent when it is not to be found out whether there is one."""
    try:
        outcome = op.writer(run.provider).create(spec)
    except GpuError as exc:  # a spec that this provider cannot express: nothing was sent
        return refused(op, run, attempt, exc)
    if outcome.kind == "created" and outcome.instance_id is not None:
        return Created(_shown_as_ours(op, run, attempt, outcome.instance_id), outcome.problem)
    problem = outcome.problem or ProviderSilent(provider=run.provider, what="create", reason="no reason given")
    if outcome.kind == "refused":
        return refused(op, run, attempt, problem)
    op.say(f"{run.provider} did not say whether it made the machine: looking for it by its label")
    return _search_for(op, run, attempt, problem)


def _shown_as_ours(op: Operator, run: Run, attempt: Attempt, named: str) -> Machine:
    """On record once the provider shows it with our label. An answer alone proves nothing: what it names may never have
    been, or be somebody else's, and the machine that was made another one.
    """
    for pause_s in (0, *LOOK_PAUSES_S):
        if pause_s:
            op.clock.sleep(pause_s)
        try:
            shown = [seen for seen in find(op, run.provider, attempt.intent) if is_of(attempt, seen)]
            if not shown:  # lists lag
                by_id = op.reader(run.provider).machine(named)
                shown = [by_id] if by_id is not None and is_of(attempt, by_id) else []
        except (ProviderError, UsageError):  # no look, or an id that can be none
            continue
        if named in (ids := [seen.instance_id for seen in shown]):
            if len(ids) > 1:  # the request arrived twice: the others are ended by whoever looks next
                op.say(f"{run.provider} made {len(ids)} machines of one create; next: gpu reconcile")
            return record_created(op, run, attempt, named)
        if shown:
            return settle_on_one(op, run, attempt, shown)
    reason = f"it named instance {named}, and no instance shows with the label {attempt.label}"
    raise unknown(op, run, attempt, UnexpectedReply(provider=run.provider, what="create", reason=reason))


def refused(op: Operator, run: Run, attempt: Attempt, problem: GpuError) -> Refused:
    """It certainly does not exist: the intent is closed, the record ends, nothing was billed."""
    reason = one_line(problem.message, limit=300)
    intents.close(op.project, op.clock, attempt.intent, "refused", reason=reason, details={"code": problem.code})
    end_refused(op, run, attempt, reason, problem.code)
    return Refused(problem)


def end_refused(op: Operator, run: Run, attempt: Attempt, reason: str, code: str | None) -> None:
    """What follows from a create that the journal has as refused. Repeating is harmless."""
    _end_record(op, attempt, reason)
    note(op, run, attempt, result="refused", reason=code, is_over=True)


def _end_record(op: Operator, attempt: Attempt, reason: str) -> None:
    if machines.find(op.project, attempt.machine_id) is None:
        return

    def ended(machine: Machine) -> Machine:
        if machine.status in states.FINAL or machine.instance_id is not None:
            return machine
        return replace(machine, status="lost", extra={**machine.extra, "why_lost": reason})

    machines.update(op.project, attempt.machine_id, ended, clock=op.clock)


def note(op: Operator, run: Run, attempt: Attempt, **changes: object) -> Attempt:
    """Change the attempt as the run's file has it now: whoever ended its machine has written there too."""

    def noted(run: Run) -> Run:
        known = next((a for a in run.attempts if a.number == attempt.number), attempt)
        return runs.with_attempt(run, replace(known, **changes))  # type: ignore[arg-type]

    changed = runs.update(op, run.approval_id, noted)
    return next(a for a in changed.attempts if a.number == attempt.number)


def record_created(op: Operator, run: Run, attempt: Attempt, instance_id: str, seen: Instance | None = None) -> Machine:
    """The provider's id goes into journal and record at once: before any wait, and before anything can fail."""
    intents.close(op.project, op.clock, attempt.intent, "done", instance_id=instance_id, machine_id=attempt.machine_id)
    if machines.find(op.project, attempt.machine_id) is None:  # died between run file and record, or a lost registry
        machines.save(op.project, _from_attempt(op, run, attempt))

    def created(machine: Machine) -> Machine:
        status = "booting" if machine.status in ("requested", "unknown") else machine.status
        machine = replace(machine, host=instance_id, status=status)
        return machine if seen is None else with_seen(machine, seen, op.clock.now())

    machine = machines.update(op.project, attempt.machine_id, created, clock=op.clock)
    note(op, run, attempt, result="done")
    return machine


def _from_attempt(op: Operator, run: Run, attempt: Attempt) -> Machine:
    label = labels.parse(attempt.label)
    return Machine(
        id=attempt.machine_id,
        provider=run.provider,
        host=attempt.machine_id,
        rate_usd_hr=Decimal(str(attempt.rate_usd_hr)),
        gpu=attempt.gpu,
        label=attempt.label,
        machine_class=label.machine_class if label is not None else None,
        intent=attempt.intent,
        plan=run.plan_sha256,
        account=run.account,
        root=root_of(op, run.plan_sha256),
        created_at=attempt.began_at,
        deadline_at=attempt.deadline_at,
        extra={"approval_id": run.approval_id, "offer_id": attempt.offer_id},
    )


def root_of(op: Operator, plan_sha256: str | None) -> str | None:
    """Where the runner is, by the plan; None where that is not there any more: then the machine is asked."""
    plan = plans.find(op.project, plan_sha256)
    return None if plan is None else fuse.runner_root(keeps(op, plan))


def with_seen(machine: Machine, seen: Instance, now: datetime) -> Machine:
    """The record with what the provider shows: the rate really billed, the physical machine, the label as it is."""
    return replace(
        machine,
        rate_usd_hr=machine.rate_usd_hr if seen.rate_usd_hr is None else seen.rate_usd_hr,
        storage_usd_hr=machine.storage_usd_hr if seen.storage_usd_hr is None else seen.storage_usd_hr,
        gpu=machine.gpu or seen.gpu,
        disk_gb=machine.disk_gb if seen.disk_gb is None else seen.disk_gb,
        host_key=machine.host_key or (f"{seen.provider}:{seen.machine_id}" if seen.machine_id else None),
        last_seen_at=timestamp(now),
    )


# an answer that never came --------------------------------------------------------------------------------------------


def find(op: Operator, provider: str, intent: str) -> list[Instance]:
    """All instances that carry the intent in their label, the oldest first. Raises what a list raises.

    Never by the whole label: its deadline may have been moved since.
    """
    return find_any(op, provider, [intent])[intent]


def find_any(op: Operator, provider: str, wanted: Iterable[str]) -> dict[str, list[Instance]]:
    """As `find`, for several intents in one list."""
    found: dict[str, list[Instance]] = {intent: [] for intent in wanted}
    for seen in op.reader(provider).machines():
        intent = labels.intent_of(seen.label, op.project.project_id)
        if intent in found:
            found[intent].append(seen)
    now = op.clock.now()
    for same in found.values():
        same.sort(key=lambda seen: (seen.created_at is None, seen.created_at or now, seen.instance_id))
    return found


def _search_for(op: Operator, run: Run, attempt: Attempt, problem: GpuError) -> Created:
    """Look at complete lists for a minute. Found: adopted. Not found: nobody knows, and it is never sent again."""
    for pause_s in LOOK_PAUSES_S:
        op.clock.sleep(pause_s)
        try:
            found = find(op, run.provider, attempt.intent)
        except ProviderError:
            continue  # no list is no observation
        if found:
            return Created(settle_on_one(op, run, attempt, found))
    raise unknown(op, run, attempt, problem)


def unknown(op: Operator, run: Run, attempt: Attempt, problem: GpuError) -> ProviderSilent:
    """Say so on record: it counts as burning and keeps its reservation until reconcile has found out."""
    reason = one_line(problem.message, limit=300)
    intents.close(op.project, op.clock, attempt.intent, "unknown", reason=reason)
    if machines.find(op.project, attempt.machine_id) is not None:
        machines.update(
            op.project,
            attempt.machine_id,
            lambda machine: machine if machine.status in states.FINAL else replace(machine, status="unknown"),
            clock=op.clock,
        )
    note(op, run, attempt, result="unknown", reason=problem.code)
    return ProviderSilent(
        provider=run.provider,
        what=f"the create of {attempt.label}",
        reason=reason,
        machine=attempt.machine_id,
        label=attempt.label,
        next_step="gpu reconcile",
    )


def settle_on_one(op: Operator, run: Run, attempt: Attempt, found: Sequence[Instance]) -> Machine:
    """The oldest becomes ours; what else one request made goes: it has the very same label.

    Another deadline in it is another request, of a state directory that used the approval too: left alone.
    """
    first, *others = sorted(found, key=lambda seen: not is_of(attempt, seen))
    machine = adopt(op, run, attempt, first)
    for other in others:
        if is_of(attempt, other):
            destroy_twin(op, run, attempt, other)
    return machine


def is_of(attempt: Attempt, seen: Instance) -> bool:
    """Whether this very attempt made it, as far as a label tells."""
    return seen.label == attempt.label


def adopt(op: Operator, run: Run, attempt: Attempt, found: Instance) -> Machine:
    """The machine of an attempt was found by its label: it is on record from now on. Whether it is wanted: `unwanted`.

    The caller works on the run. The record's status is `booting`: whoever goes on looks at it anew.
    """
    return record_created(op, run, attempt, found.instance_id, found)


def unwanted(op: Operator, run: Run, attempt: Attempt, found: Instance, plan: Plan | None) -> str | None:
    """Why a machine that turned up late has to go again; None: its plan still holds and it may be used."""
    now = op.clock.now()
    if run.state != "open":
        return f"its run is {run.state}"
    if now >= parse_timestamp(run.approval_expires_at):
        return "its approval has expired"
    if attempt.deadline_at is not None and now >= parse_timestamp(attempt.deadline_at):
        return "its deadline has passed"
    if any(a.number != attempt.number and a.result == "done" and not a.is_over for a in run.attempts):
        return "another machine of its run is there"
    if plan is None:
        return "its plan is not there any more"
    if found.rate_usd_hr is not None and found.rate_usd_hr > plan.max_rate_usd_hr:
        return f"it costs ${found.rate_usd_hr:.4f}/h, approved are at most ${plan.max_rate_usd_hr:.4f}/h"
    return None


def destroy_twin(op: Operator, run: Run, attempt: Attempt, twin: Instance) -> Machine:
    """A second machine of the same intent gets a record of its own and goes at once. Its end is confirmed later."""
    machine = twin_record(op, run, attempt, twin)
    op.say(f"{twin.provider} made a second machine ({twin.instance_id}): it is destroyed")
    try:
        from gpu_skills.lifecycle.ending import release

        release.destroy(op, machine, why="a second machine of one create", wait_s=0)
    except GpuError as exc:  # it is on record: reconcile and sentinel end it
        op.say(f"{machine.id} is still there: {exc.message}")
    return machine


def twin_record(op: Operator, run: Run, attempt: Attempt, twin: Instance) -> Machine:
    if twin.instance_id == "":
        raise UsageError("an instance without id")
    identity = labels.machine_id(f"{attempt.intent}\0{twin.instance_id}")
    known = machines.find(op.project, identity)
    if known is not None:
        return known
    base = replace(_from_attempt(op, run, attempt), id=identity, host=twin.instance_id, status="unknown")
    machine = with_seen(base, twin, op.clock.now())
    machines.save(op.project, machine)
    return machine
