"""What became of each create of a run that nobody knows the end of; nothing of a run that a process works on."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import OtherAccount, Refused, StateBusy
from gpu_skills.lifecycle import intents, machines, runs, states
from gpu_skills.lifecycle.ending import ownership
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.recovery import adoption
from gpu_skills.lifecycle.recovery.findings import Pass
from gpu_skills.lifecycle.renting import outcomes, unanswered
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.state import budget

# So long a create that was not answered is looked for.
LOOKED_FOR = timedelta(hours=24)


def finish(here: Pass, run: Run) -> None:
    """What became of each attempt of a run; nothing of a run that some process works on."""
    try:
        with runs.working_on(here.op, run.approval_id):
            run = runs.load(here.op, run.approval_id) or run
            for attempt in run.attempts:
                _finish_create(here, run, attempt)
    except StateBusy:
        ids = {attempt.machine_id for attempt in run.attempts}
        here.held |= ids | {m.id for m in here.machines() if m.intent in {a.intent for a in run.attempts}}
        here.say("worked_on", f"approval {run.approval_id}: another gpu command works on it", next_step="gpu status")


def _finish_create(here: Pass, run: Run, attempt: Attempt) -> None:
    for twin in _twins(here, attempt):
        here.end(twin, "a second machine of one create")
    found = here.with_intent(attempt.intent)
    on_record = {m.instance_id: m for m in here.machines() if m.intent == attempt.intent and m.instance_id}
    fresh = [seen for seen in found if seen.instance_id not in on_record]
    intent = intents.read(here.op.project).get(attempt.intent)
    is_open = attempt.result in (None, "unknown") and not attempt.is_over
    is_unrecorded = attempt.result == "done" and not attempt.is_over and not on_record
    if fresh and is_open and not on_record:
        _late(here, run, attempt, fresh)
    elif fresh and attempt.result == "done" and not on_record:
        _missing_record(here, run, attempt, fresh)
    elif fresh:  # the record has its machine, or the create was said to be refused: these are one too many
        for seen in fresh:
            if not unanswered.is_of(attempt, seen):
                _made_elsewhere(here, run, attempt, seen)
                continue
            twin = unanswered.destroy_twin(here.op, run, attempt, seen)
            here.held.add(twin.id)
            text, step = (
                "a second machine of one create: it is destroyed",
                f"gpu reconcile --provider {here.provider}",
            )
            here.say("twin", text, machine=twin, next_step=step, is_uncertain=True)
    elif is_open and on_record:
        _catch_up(here, run, attempt, next(iter(on_record.values())))
    elif (is_open or is_unrecorded) and intent is not None and intent.result == "done" and intent.instance_id:
        outcomes.record_created(here.op, run, attempt, intent.instance_id)
    elif is_open and intent is not None and intent.result == "refused":
        reason, code = intent.reason or "refused", intent.details.get("code")
        outcomes.end_refused(here.op, run, attempt, reason, code)
    elif is_open:
        if intent is None and _journal_is_lost(here, run, attempt):
            adoption.remember_create(here.op, run, attempt)
            intent = intents.read(here.op.project).get(attempt.intent)
        _not_found(here, run, attempt, was_sent=intent is not None)
    elif attempt.result == "failed" and not attempt.is_over:
        for machine in on_record.values():
            here.end(machine, "it failed, and the command that destroyed it died")


def _made_elsewhere(here: Pass, run: Run, attempt: Attempt, seen: Instance) -> None:
    """Its label has our intent and another deadline: another state directory used the approval. Not ours to end."""
    text = f"instance {seen.instance_id} carries {attempt.intent}, and this directory did not make it"
    here.say(
        "made_elsewhere",
        f"{text}: a copy of the project used approval {run.approval_id} too; it ends at its deadline or there",
        machine_id=attempt.machine_id,
        instance_id=seen.instance_id,
        next_step=f"gpu sentinel --provider {here.provider}",
        is_uncertain=True,
        burn_usd_hr=seen.burn_usd_hr,
    )


def _twins(here: Pass, attempt: Attempt) -> list[Machine]:
    """Second machines of one create that are on record, and that nobody has sent away."""
    first = machines.find(here.op.project, attempt.machine_id)
    if first is None or first.instance_id is None:
        return []
    mine = [m for m in here.machines() if m.intent == attempt.intent and m.instance_id is not None]
    is_going = (*states.FINAL, "terminating")
    return [m for m in mine if m.instance_id != first.instance_id and m.status not in is_going]


def _late(here: Pass, run: Run, attempt: Attempt, found: list[Instance]) -> None:
    """A create whose end nobody knew, and there it is."""
    reason = unanswered.unwanted(here.op, run, attempt, found[0], here.plan(run.plan_sha256))
    machine = unanswered.settle_on_one(here.op, run, attempt, found)
    if reason is None:
        text = f"{machine.id} was made after all and is on record; its plan still holds"
        here.say("adopted", text, machine=machine, next_step="gpu setup")
    else:
        here.end(machine, reason)


def _missing_record(here: Pass, run: Run, attempt: Attempt, found: list[Instance]) -> None:
    """Somebody took the machine's record away; its run still knows it."""
    machine = adoption.note_lost(here.op, run, unanswered.settle_on_one(here.op, run, attempt, found))
    here.say("record_lost", "its record was missing and is there again", machine=machine, next_step="gpu status")


def _catch_up(here: Pass, run: Run, attempt: Attempt, machine: Machine) -> None:
    """Journal and registry know the machine, the run's file does not: a command died between the two."""
    outcomes.record_created(here.op, run, attempt, str(machine.instance_id))


def _not_found(here: Pass, run: Run, attempt: Attempt, *, was_sent: bool) -> None:
    if run.account != ownership.account_of(here.op, here.provider):
        problem = OtherAccount(what=attempt.machine_id, provider=here.provider)
        here.say(
            problem.code,
            problem.message,
            machine_id=attempt.machine_id,
            next_step=problem.next_step,
            is_uncertain=True,
            burn_usd_hr=Decimal(str(attempt.rate_usd_hr)),
        )
        return
    age = here.op.clock.now() - parse_timestamp(attempt.began_at)
    if was_sent and age < LOOKED_FOR:
        if machines.find(here.op.project, attempt.machine_id) is not None:
            machines.set_status(here.op.project, attempt.machine_id, "unknown", clock=here.op.clock)
        text = f"nobody knows whether the create of {attempt.label} made a machine; {here.provider} shows none"
        here.say(
            "create_unknown",
            text + f"; it is looked for until {timestamp(parse_timestamp(attempt.began_at) + LOOKED_FOR)}",
            machine_id=attempt.machine_id,
            next_step=f"gpu reconcile --provider {here.provider}",
            is_uncertain=True,
            burn_usd_hr=Decimal(str(attempt.rate_usd_hr)),
        )
        return
    outcomes.refused(here.op, run, attempt, _NeverSeen() if was_sent else _NeverSent())
    here.say("never_seen" if was_sent else "never_sent", f"the create of {attempt.label} made no machine")


def _journal_is_lost(here: Pass, run: Run, attempt: Attempt) -> bool:
    """The account's journal names the machine and the registry does not: between these two nothing is sent."""
    reserved = budget.open_reservations(here.op.project, here.op.environ).get(run.approval_id)
    is_named = reserved is not None and attempt.machine_id in reserved.machine_ids
    return is_named and machines.find(here.op.project, attempt.machine_id) is None


class _NeverSent(Refused):
    code = "never_sent"
    template = "it was written down and never sent"


class _NeverSeen(Refused):
    code = "never_seen"
    template = "it was not answered, and no machine of it was seen for 24 h"
