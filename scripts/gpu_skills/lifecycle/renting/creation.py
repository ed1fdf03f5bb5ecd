"""One create: written down before it is sent, sent once, and what it came to found out whatever the answer was.

    freeze()   the attempt in the run's file, the record `requested`, the intent in the journal: before anything leaves
    send()     one request; Created, or Refused with why, or an error that says that nobody knows

What is asked for is in specs.py, what is written down afterwards in outcomes.py, what a missing answer takes in
unanswered.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import GpuError, ProviderError, ProviderSilent, UnexpectedReply, UsageError
from gpu_skills.lifecycle import intents, labels, machines, runs
from gpu_skills.lifecycle.guard import fuse
from gpu_skills.lifecycle.labels import Label
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import outcomes, specs, unanswered
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import MachineSpec, Offer
from gpu_skills.state import budget
from gpu_skills.units import json_number

# Looks for a create that was not answered. Providers' lists lag, so it goes on for a minute at least.
LOOK_PAUSES_S = (2, 3, 5, 8, 12, 15, 20)


@dataclass(frozen=True)
class Created:
    """It exists and is on record. problem: the provider reported an error all the same, so it has to go again."""

    machine: Machine
    problem: GpuError | None = None


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
        root=fuse.runner_root(specs.keeps(op, plan)),
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


# the one request ------------------------------------------------------------------------------------------------------


def send(op: Operator, run: Run, attempt: Attempt, spec: MachineSpec) -> Created | outcomes.Refused:
    """Ask for the machine, once. Raises ProviderSilent when it is not to be found out whether there is one."""
    try:
        outcome = op.writer(run.provider).create(spec)
    except GpuError as exc:  # a spec that this provider cannot express: nothing was sent
        return outcomes.refused(op, run, attempt, exc)
    if outcome.kind == "created" and outcome.instance_id is not None:
        return Created(_shown_as_ours(op, run, attempt, outcome.instance_id), outcome.problem)
    problem = outcome.problem or ProviderSilent(provider=run.provider, what="create", reason="no reason given")
    if outcome.kind == "refused":
        return outcomes.refused(op, run, attempt, problem)
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
            shown = [
                seen for seen in unanswered.find(op, run.provider, attempt.intent) if unanswered.is_of(attempt, seen)
            ]
            if not shown:  # lists lag
                by_id = op.reader(run.provider).machine(named)
                shown = [by_id] if by_id is not None and unanswered.is_of(attempt, by_id) else []
        except (ProviderError, UsageError):  # no look, or an id that can be none
            continue
        if named in (ids := [seen.instance_id for seen in shown]):
            if len(ids) > 1:  # the request arrived twice: the others are ended by whoever looks next
                op.say(f"{run.provider} made {len(ids)} machines of one create; next: gpu reconcile")
            return outcomes.record_created(op, run, attempt, named)
        if shown:
            return unanswered.settle_on_one(op, run, attempt, shown)
    reason = f"it named instance {named}, and no instance shows with the label {attempt.label}"
    raise unanswered.unknown(op, run, attempt, UnexpectedReply(provider=run.provider, what="create", reason=reason))


def _search_for(op: Operator, run: Run, attempt: Attempt, problem: GpuError) -> Created:
    """Look at complete lists for a minute. Found: adopted. Not found: nobody knows, and it is never sent again."""
    for pause_s in LOOK_PAUSES_S:
        op.clock.sleep(pause_s)
        try:
            found = unanswered.find(op, run.provider, attempt.intent)
        except ProviderError:
            continue  # no list is no observation
        if found:
            return Created(unanswered.settle_on_one(op, run, attempt, found))
    raise unanswered.unknown(op, run, attempt, problem)
