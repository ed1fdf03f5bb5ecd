"""Giving a rented machine back, or putting it to sleep, and never believing that it worked until it shows.

    destroy()   asks the provider until it takes the delete, then looks until the machine is proven gone
    confirm()   one step of that: one look, one more delete if it is still there; any command may go on with it
    stop()      asks once, reads back; what does not stop stays `stopping`, which counts as burning

What was seen and said is in the journal, so that another command, days later, goes on where this one ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from gpu_skills.clock import time_of, timestamp
from gpu_skills.errors import (
    AlreadyGone,
    AuthRejected,
    ConflictingState,
    GpuError,
    JobRunning,
    NotCollected,
    NotOwned,
    Protected,
    ProviderError,
    ProviderSilent,
    RateLimited,
    Refused,
    StopFailed,
)
from gpu_skills.lifecycle import intents, labels, machines, runs, states, unrecorded
from gpu_skills.lifecycle.ending import absence, ownership
from gpu_skills.lifecycle.ending.absence import Look
from gpu_skills.lifecycle.intents import Intent
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.units import counted, format_duration, json_number

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval

DEFAULT_WAIT_S = 240.0
PAUSE_BETWEEN_LOOKS_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0
_AUTH_ATTEMPTS = 3
# From when on, and how often, people hear of a delete that does not come true.
ALARM_AFTER = timedelta(minutes=5)
ALARM_EVERY = timedelta(minutes=10)
STOP_WAIT_S = 300.0
_STOP_ATTEMPTS = 4
_STOP_POLL_S = 10.0

# Observations in the journal.
PRESENT, ABSENT = "present", "absent"
TAKEN, NOT_TAKEN, ALARM = "destroy_taken", "destroy_not_taken", "destroy_unconfirmed"
_OF_A_RELEASE = (PRESENT, ABSENT, TAKEN, NOT_TAKEN, ALARM)

# One line for each look, for a person who waits for it.
Tell = Callable[[str], None]


def _untold(line: str) -> None:
    return None


# destroying ---------------------------------------------------------------------------------------------------------


@unrecorded.tells("destroy")
def destroy(
    op: Operator,
    machine: Machine,
    *,
    why: str,
    wait_s: float = DEFAULT_WAIT_S,
    gate: Sequence[Refused] = (),
    approval: Approval | None = None,
    tell: Tell = _untold,
) -> Literal["destroyed", "terminating"]:
    """End a machine of ours for good; `terminating` when that is not proven within wait_s.

    gate: what stands in the way, as the layers above see it (jobs, outputs): the first is raised and nothing happens.
    approval: of a plan to destroy this machine, for a protected one: it is verified, and used up once nothing stands
    in the way any more. What was begun goes on without another. Raises NotOwned, Protected, what is wrong with the
    approval, and whatever keeps the provider from being asked at all; AuthRejected when it does not let us: the wish
    stays in the journal.
    """
    machine = current(op, machine)
    if machine.status in states.FINAL:
        finish_books(op, machine)
        return "destroyed"
    for obstacle in gate:
        raise obstacle
    seen = look(op, machine)
    if seen is not None:
        machine = _with_instance(op, machine, seen)
        ownership.require_ours(op, machine, seen)
    if open_destroy(op, machine.id) is None:
        _begin(op, "destroy", machine, why, _used_for("destroy", op, machine, seen, approval))
    # One that no one ever saw is not known to be there: it is looked for, and sent away when it turns up.
    set_status(op, machine, "unknown" if machine.instance_id is None else "terminating")
    return _until_gone(op, machine, seen, wait_s, tell)


def _used_for(
    action: Literal["stop", "destroy"], op: Operator, machine: Machine, seen: Instance | None, approval: Approval | None
) -> Approval | None:
    """The approval that ending a protected machine takes, used up; None for a machine that takes none.

    The same command again goes on with what was used and not begun: a process died in between.
    """
    from gpu_skills.lifecycle.approval import actions, approvals

    if not ownership.needs_named_approval(machine, seen):
        return None
    if approval is None:
        raise Protected(machine=machine.id)
    approvals.use(op, approval, actions.named_by(op.project, approval, action, machine.id).ask())
    return approval


def _begin(op: Operator, action: Literal["stop", "destroy"], machine: Machine, why: str, used: Approval | None) -> str:
    """The id of the intent. From here on it goes on by itself, so the approval has done its work."""
    from gpu_skills.lifecycle.approval import approvals

    intent = intents.new_id()
    intents.begin(
        op.project,
        op.clock,
        action,
        intent,
        provider=machine.provider,
        account=machine.account,
        machine_id=machine.id,
        instance_id=machine.instance_id,
        label=machine.label,
        approval_id=None if used is None else used.id,
        details={"why": why},
    )
    if used is not None:
        approvals.finish(op, used)
        approvals.note_used(op, used)
    return intent


def _until_gone(
    op: Operator, machine: Machine, seen: Instance | None, wait_s: float, tell: Tell
) -> Literal["destroyed", "terminating"]:
    """Steps with growing pauses while the provider does not take it, with even ones while we watch it stay away."""
    began = op.clock.monotonic()
    ends = began + wait_s
    failures = refusals = looks = 0
    while True:
        pause_s = PAUSE_BETWEEN_LOOKS_S
        try:
            step = _act_on(op, machine, seen if not looks else look(op, machine))
        except AuthRejected:
            refusals += 1
            if refusals >= _AUTH_ATTEMPTS:
                alarm(op, machine, at_once=True)
                raise
            pause_s = _FIRST_PAUSE_S * 2**refusals
            told = f"{machine.provider} does not let this key destroy it"
        except (ProviderError, ProviderSilent) as exc:
            failures += 1
            pause_s = _pause_after(exc, failures)
            alarm(op, machine)
            told = exc.message
        else:
            if step in states.FINAL:
                return "destroyed"
            if step == "taken":  # a moment, so that the first look is not at what is just going
                pause_s = _FIRST_PAUSE_S
                failures = 0
            told = _progress(op, machine, step)
        if op.clock.monotonic() + pause_s > ends:
            return "terminating"
        waited = format_duration(op.clock.monotonic() - began)
        tell(f"{machine.id}: {told}; looking again in {format_duration(pause_s)} ({waited} so far)")
        op.clock.sleep(pause_s)
        looks += 1


def _progress(op: Operator, machine: Machine, step: str) -> str:
    if step == "taken":
        return f"{machine.provider} took the delete"
    absences = counted(len(evidence_of(op, machine).absences), "look")
    return f"{machine.provider} does not show it any more, {absences} in a row; it takes several over a minute"


@unrecorded.tells("destroy")
def confirm(op: Operator, machine: Machine) -> str:
    """One look at a machine and what follows from it; its state on record afterwards. Callable from anywhere.

    One that should be gone and is there is asked to go once more. One that nobody sent away and that is absent is
    `unknown`, and `lost` when that is proven; past its deadline it is `destroyed`, for that was its end. Raises what
    the provider raises: no answer is no observation.
    """
    machine = current(op, machine)
    if machine.status in states.FINAL:
        finish_books(op, machine)
        return machine.status
    alarm(op, machine)
    _act_on(op, machine, look(op, machine))
    return current(op, machine).status


def _act_on(op: Operator, machine: Machine, seen: Instance | None) -> str:
    """What follows from one look: one delete if it is there and should not be.

    A final state, `taken`, `present` or `absent`.
    """
    machine = current(op, machine)
    intent = open_destroy(op, machine.id)
    if seen is None:
        return _absent(op, machine, intent)
    machine = _with_instance(op, machine, seen)
    try:
        ownership.require_ours(op, machine, seen)
    except NotOwned as exc:
        if intent is not None:
            intents.close(op.project, op.clock, intent.id, "refused", reason=exc.message)
        raise
    _observe(op, machine, PRESENT, status=seen.status)
    if intent is None:
        set_status(op, machine, states.AS_SHOWN.get(seen.status, "unknown") if machine.status == "unknown" else None)
        return "present"
    _send_delete(op, machine)
    return "taken"


def _send_delete(op: Operator, machine: Machine) -> None:
    try:
        answer = op.writer(machine.provider).destroy(str(machine.instance_id))
    except (ProviderError, ProviderSilent) as exc:
        _observe(op, machine, NOT_TAKEN, reason=exc.message, code=exc.code)
        raise
    _observe(op, machine, TAKEN, answer=answer)


def _absent(op: Operator, machine: Machine, intent: Intent | None) -> str:
    since = _charges_since(op, machine, intent)
    _observe(op, machine, ABSENT, charged_usd=_charged(op, machine, since))
    if machine.instance_id is None:
        return "absent"  # a create that nobody knows the end of: looked for by its intent, given up by reconcile
    evidence = evidence_of(op, machine)
    if intent is not None and evidence.taken_at is None and any(seen.is_present for seen in evidence.looks):
        # It went without an answer to our delete: ask again, for an answer. Never for what was not seen to be ours.
        _send_delete(op, machine)
        return "taken"
    is_gone = absence.is_gone(
        evidence.looks,
        asked_at=evidence.taken_at,
        was_seen=machine.last_seen_at is not None,
    )
    if not is_gone:
        if intent is None:
            set_status(op, machine, "unknown")
        return "absent"
    deadline = time_of(machine.deadline_at)
    was_its_end = intent is not None or (deadline is not None and op.clock.now() >= deadline)
    return note_gone(op, machine, "destroyed" if was_its_end else "lost")


def note_gone(op: Operator, machine: Machine, status: str = "destroyed") -> str:
    """A machine is proven gone: its record ends, its books are closed."""
    now = timestamp(op.clock.now())

    def ended(found: Machine) -> Machine:
        if found.status in states.FINAL:  # another command saw the same
            return found
        kept = tuple(c for c in found.conditions if c != "stop_failed")
        return replace(found, status=status, destroyed_at=now, session=None, conditions=kept)

    machine = machines.update(op.project, machine.id, ended, clock=op.clock)
    finish_books(op, machine)
    return machine.status


def finish_books(op: Operator, machine: Machine) -> None:
    """What follows the end of a machine: its jobs end, its time is booked, its run is settled. Repeating is harmless.

    A destroy that is still open in the journal says that a command died in between.
    """
    from gpu_skills.lifecycle.books import accounting

    intent = open_destroy(op, machine.id)
    if intent is None and is_booked(op, machine):
        return
    runs.take_moved(op)
    accounting.close(op, machine)
    for run in runs.own_runs(op):
        if any(a.machine_id == machine.id for a in run.attempts):
            _settle(op, run.approval_id, machine.id)
    while intent is not None:  # several commands may have asked at once
        intents.close(op.project, op.clock, intent.id, "done")
        intent = open_destroy(op, machine.id)
    intents.observe(op.project, op.clock, "machine_booked", machine_id=machine.id)


def _settle(op: Operator, approval_id: str, machine_id: str) -> None:
    from gpu_skills.lifecycle.books import accounting

    def over(run: runs.Run) -> runs.Run:
        attempts = tuple(replace(a, is_over=True) if a.machine_id == machine_id else a for a in run.attempts)
        return replace(run, attempts=attempts)

    run = runs.update(op, approval_id, over)
    # An open run may still make its next attempt: the money for that stays reserved.
    if run.state != "open" and all(a.is_over or a.result == "refused" for a in run.attempts):
        accounting.settle_run(op, run)


def is_booked(op: Operator, machine: Machine) -> bool:
    """Whether nothing is left to do about a machine that is gone."""
    return bool(intents.observations(op.project, "machine_booked", machine_id=machine.id))


def _pause_after(exc: GpuError, failures: int) -> float:
    pause_s = min(_FIRST_PAUSE_S * 2 ** min(failures - 1, 8), _LONGEST_PAUSE_S)
    asked = exc.details.get("retry_after_s") if isinstance(exc, RateLimited) else None
    return max(pause_s, float(asked)) if isinstance(asked, int | float) else pause_s


# what is known of a release -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What the journal holds of the end of a machine.

    begun_at, why: of the destroy that is open. taken_at: when the provider first took the delete of it. refused: why
    it did not, the last time it did not, while none was taken since.
    """

    begun_at: datetime | None
    why: str | None
    looks: tuple[Look, ...]
    taken_at: datetime | None
    refused: str | None
    refused_code: str | None
    alarmed_at: datetime | None

    @property
    def absences(self) -> tuple[Look, ...]:
        """The last looks that found nothing, while nothing more was charged."""
        return tuple(absence.quiet(self.looks))


def evidence_of(op: Operator, machine: Machine) -> Evidence:
    """Folded from the journal, of the destroy that is open if there is one."""
    intent = open_destroy(op, machine.id)
    begun_at = time_of(intent.ts) if intent is not None else None
    looks: list[Look] = []
    taken_at = alarmed_at = None
    refused = code = None
    for event in intents.observations(op.project, *_OF_A_RELEASE, machine_id=machine.id):
        at, what = time_of(event.get("ts")), event.get("what")
        details = event.get("details") if isinstance(event.get("details"), dict) else {}
        if at is None:
            continue
        if what in (PRESENT, ABSENT):
            looks.append(Look(at, what == PRESENT, _usd(details.get("charged_usd"))))
        elif begun_at is None or at < begun_at:
            continue
        elif what == TAKEN:
            taken_at, refused, code = taken_at or at, None, None
        elif what == NOT_TAKEN:
            refused, code = str(event.get("reason") or ""), str(details.get("code") or "")
        else:
            alarmed_at = at
    why = intent.details.get("why") if intent is not None else None
    return Evidence(begun_at, why, tuple(looks), taken_at, refused, code, alarmed_at)


def open_destroy(op: Operator, machine_id: str) -> Intent | None:
    """The destroy of a machine that has begun and not ended."""
    return under_way(op, "destroy", machine_id)


def under_way(op: Operator, action: str, machine_id: str) -> Intent | None:
    """What has begun with a machine and not ended."""
    for intent in intents.read(op.project).values():
        if intent.action == action and intent.machine_id == machine_id and intent.is_open:
            return intent
    return None


def alarm(op: Operator, machine: Machine, *, at_once: bool = False) -> None:
    """Tell people of a destroy that is not confirmed: after a while, then again and again, but not at every look."""
    evidence, now = evidence_of(op, machine), op.clock.now()
    if evidence.begun_at is None:
        return
    is_late = at_once or now - evidence.begun_at >= ALARM_AFTER
    if not is_late or (evidence.alarmed_at is not None and now - evidence.alarmed_at < ALARM_EVERY):
        return
    _observe(op, machine, ALARM)
    op.notify(
        "destroy_unconfirmed",
        machine.id,
        provider=machine.provider,
        instance_id=machine.instance_id,
        since=timestamp(evidence.begun_at),
        burn_usd_hr=json_number(machine.rate_usd_hr),
        reason=evidence.refused or "it is not proven gone",
    )


def look(op: Operator, machine: Machine) -> Instance | None:
    """The instance as the provider shows it now: in the complete list, or, as a list may lag, by its own id.

    One whose id is not known is found by the intent in its label; of two, the older one. None: both are sure that it
    is not there. Everything else raises.
    """
    reader = op.reader(machine.provider)
    listed = reader.machines()
    if machine.instance_id is not None:
        found = next((seen for seen in listed if seen.instance_id == machine.instance_id), None)
        return found if found is not None else reader.machine(machine.instance_id)
    same = [seen for seen in listed if _is_named_by(op, machine, seen)]
    return min(same, key=lambda seen: (seen.created_at is None, seen.created_at, seen.instance_id), default=None)


def _is_named_by(op: Operator, machine: Machine, seen: Instance) -> bool:
    """Whether the label of an instance names the create of this record."""
    return machine.intent is not None and labels.intent_of(seen.label, op.project.project_id) == machine.intent


def _charges_since(op: Operator, machine: Machine, intent: Intent | None) -> datetime:
    """A fixed begin, the same for all looks of one release: their sums are compared."""
    anchor = time_of(intent.ts) if intent is not None else time_of(machine.last_seen_at) or time_of(machine.created_at)
    return (anchor or op.clock.now()).replace(minute=0, second=0, microsecond=0) - timedelta(hours=2)


def _charged(op: Operator, machine: Machine, since: datetime) -> int | float | None:
    """None: this key may not read charges, or they cannot be read now; more looks are needed then."""
    now = op.clock.now()
    try:
        charges = op.reader(machine.provider).charges(max(since, now - timedelta(days=30)), now)
    except GpuError:
        return None
    return json_number(sum((c.amount_usd for c in charges if c.instance_id == machine.instance_id), Decimal(0)))


# stopping -----------------------------------------------------------------------------------------------------------


@unrecorded.tells("stop")
def stop(
    op: Operator,
    machine: Machine,
    *,
    why: str = "asked",
    wait_s: float = STOP_WAIT_S,
    despite_jobs: bool = False,
    approval: Approval | None = None,
    tell: Tell = _untold,
) -> Machine:
    """Stop a machine and read it back; the record of a stopped one. Its storage bills on.

    Refused while a job runs and, where the disk does not survive a stop, while outputs are nowhere else.
    despite_jobs: its deadline has come, or its start came to nothing; neither jobs nor protection keep it up then.
    approval: as for `destroy`. ConflictingState for one that can only be destroyed. StopFailed (exit 6) when it does
    not show as stopped: it stays `stopping`, and stopping it again goes on.
    """
    machine, seen = stoppable(op, machine, despite_jobs=despite_jobs)
    begun = under_way(op, "stop", machine.id)
    if begun is not None:
        intent = begun.id
    else:
        used = None if despite_jobs else _used_for("stop", op, machine, seen, approval)
        intent = _begin(op, "stop", machine, why, used)
    if seen.status != "stopped":
        set_status(op, machine, "stopping")
    problem = _ask_to_stop(op, machine)
    shown = _until_stopped(op, machine, wait_s, tell)
    if shown is None:
        return _stop_failed(op, machine, intent, problem)
    machine = note_stopped(op, machine, shown, why)
    intents.close(op.project, op.clock, intent, "done", machine_id=machine.id)
    return machine


def stoppable(op: Operator, machine: Machine, *, despite_jobs: bool = False) -> tuple[Machine, Instance]:
    """(record, instance) of a machine that may be stopped, protected or not; raises what stands in the way."""
    machine = current(op, machine)
    if machine.status in states.FINAL:
        raise AlreadyGone(machine=machine.id, status=machine.status)
    seen = look(op, machine)
    if seen is None:
        raise AlreadyGone(f"{machine.provider} does not show {machine.id} now", next_step="gpu reconcile")
    machine = _with_instance(op, machine, seen)
    ownership.require_ours(op, machine, seen)
    if not ownership.may_be_stopped(seen):
        raise ConflictingState(
            provider=machine.provider,
            what="stop",
            instance_id=machine.instance_id,
            reason=seen.dead_end,
            next_step=f"gpu machine destroy {machine.id}",
        )
    running = op.running_jobs(machine.id)
    if running and not despite_jobs:
        raise JobRunning(job=running[0])
    unverified = op.unverified(machine.id)
    if not ownership.workspace_survives(seen):
        if unverified:
            raise NotCollected(jobs=", ".join(unverified[:20]), next_step=f"gpu job pull {unverified[0]}")
        if machine.has_unknown_past:
            step = f"gpu machine destroy {machine.id}"
            raise NotCollected(jobs=f"which jobs {machine.id} has is not on record", next_step=step)
    return machine, seen


def _ask_to_stop(op: Operator, machine: Machine) -> GpuError | None:
    """Sent until the provider takes it, a few times; the last problem, None when it was taken.

    Asking again is harmless: a stop of what is stopped changes nothing.
    """
    problem: GpuError | None = None
    for attempt in range(1, _STOP_ATTEMPTS + 1):
        try:
            op.writer(machine.provider).stop(str(machine.instance_id))
            return None
        except ConflictingState as exc:  # on its way already, or not yet up: reading back tells
            return exc
        except (ProviderError, ProviderSilent) as exc:
            problem = exc
            if isinstance(exc, AuthRejected):
                break
        if attempt < _STOP_ATTEMPTS:
            op.clock.sleep(_pause_after(problem, attempt))
    return problem


def _until_stopped(op: Operator, machine: Machine, wait_s: float, tell: Tell) -> Instance | None:
    """The instance once it shows as stopped; None when it does not in time, or nothing can be read."""
    began = op.clock.monotonic()
    ends = began + wait_s
    while True:
        try:
            seen = op.reader(machine.provider).machine(str(machine.instance_id))
        except GpuError:
            seen = None
        if seen is not None and seen.status == "stopped":
            return seen
        if op.clock.monotonic() + _STOP_POLL_S > ends:
            return None
        shown = "nothing yet" if seen is None else seen.status
        waited = format_duration(op.clock.monotonic() - began)
        tell(f"{machine.id}: {machine.provider} shows {shown} ({waited} so far)")
        op.clock.sleep(_STOP_POLL_S)


def note_stopped(op: Operator, machine: Machine, seen: Instance, why: str) -> Machine:
    """A machine shows as stopped: only its storage bills from here on. seen: as it shows now, or showed before."""
    now = timestamp(op.clock.now())
    burn = seen.burn_usd_hr if seen.status == "stopped" else seen.storage_usd_hr

    def asleep(found: Machine) -> Machine:
        if found.status in states.FINAL:
            return found
        return replace(
            found,
            status="stopped",
            storage_usd_hr=burn if burn is not None else found.storage_usd_hr,
            conditions=tuple(c for c in found.conditions if c != "stop_failed"),
            session=None,
            endpoint=None,
            last_seen_at=now,
            extra={**found.extra, "stopped_at": now, "stopped_why": why},
        )

    return machines.update(op.project, machine.id, asleep, clock=op.clock)


def _stop_failed(op: Operator, machine: Machine, intent: str, problem: GpuError | None) -> Machine:
    def failed(found: Machine) -> Machine:
        return replace(found, conditions=tuple(dict.fromkeys((*found.conditions, "stop_failed"))))

    machine = machines.update(op.project, machine.id, failed, clock=op.clock)
    reason = problem.message if problem is not None else "it does not show as stopped"
    intents.close(op.project, op.clock, intent, "unknown", reason=reason)
    op.notify("recovery", machine.id, what="stop_failed", reason=reason, intent=intent, provider=machine.provider)
    if isinstance(problem, AuthRejected):
        raise problem
    raise StopFailed(machine=machine.id, reason=reason)


# records ------------------------------------------------------------------------------------------------------------


def current(op: Operator, machine: Machine) -> Machine:
    """The machine as it is on record now; as given when it is not on record."""
    return machines.find(op.project, machine.id) or machine


def _with_instance(op: Operator, machine: Machine, seen: Instance) -> Machine:
    """The machine with the provider's id of it, learned from a label, and with when it was seen."""
    now = timestamp(op.clock.now())

    def known(found: Machine) -> Machine:
        host = seen.instance_id if found.instance_id is None and _is_named_by(op, found, seen) else found.host
        return replace(found, host=host, last_seen_at=now)

    return machines.update(op.project, machine.id, known, clock=op.clock)


def set_status(op: Operator, machine: Machine, status: str | None) -> None:
    """Unless it has come to its end meanwhile. None: as it is."""
    if status is None or status == machine.status:
        return

    machines.set_status(op.project, machine.id, status, clock=op.clock)


def _observe(op: Operator, machine: Machine, what: str, *, reason: str | None = None, **details: Any) -> None:
    intents.observe(
        op.project,
        op.clock,
        what,
        provider=machine.provider,
        account=machine.account,
        machine_id=machine.id,
        instance_id=machine.instance_id,
        reason=reason,
        details={key: value for key, value in details.items() if value is not None} or None,
    )


def _usd(value: Any) -> Decimal | None:
    return Decimal(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None
