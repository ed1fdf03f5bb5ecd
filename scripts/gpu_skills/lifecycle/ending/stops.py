"""Putting a rented machine to sleep, and never believing that it sleeps until it shows.

stop()        asks a few times, reads back; what does not stop stays `stopping`, which counts as burning
stoppable()   what stands in the way, before anything is asked
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_skills.clock import timestamp
from gpu_skills.errors import (
    AlreadyGone,
    AuthRejected,
    ConflictingState,
    GpuError,
    JobRunning,
    NotCollected,
    ProviderError,
    ProviderSilent,
    StopFailed,
)
from gpu_skills.lifecycle import intents, machines, states, unrecorded
from gpu_skills.lifecycle.ending import asking, ownership, witness
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.units import format_duration

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval

STOP_WAIT_S = 300.0
_STOP_ATTEMPTS = 4
_STOP_POLL_S = 10.0


@unrecorded.tells("stop")
def stop(
    op: Operator,
    machine: Machine,
    *,
    why: str = "asked",
    wait_s: float = STOP_WAIT_S,
    despite_jobs: bool = False,
    approval: Approval | None = None,
    tell: asking.Tell = asking.untold,
) -> Machine:
    """Stop a machine and read it back; the record of a stopped one. Its storage bills on.

    Refused while a job runs and, where the disk does not survive a stop, while outputs are nowhere else.
    despite_jobs: its deadline has come, or its start came to nothing; neither jobs nor protection keep it up then.
    approval: as for `destroy`. ConflictingState for one that can only be destroyed. StopFailed (exit 6) when it does
    not show as stopped: it stays `stopping`, and stopping it again goes on.
    """
    machine, seen = stoppable(op, machine, despite_jobs=despite_jobs)
    begun = witness.under_way(op, "stop", machine.id)
    if begun is not None:
        intent = begun.id
    else:
        used = None if despite_jobs else asking.used_for("stop", op, machine, seen, approval)
        intent = asking.begin(op, "stop", machine, why, used)
    if seen.status != "stopped":
        witness.set_status(op, machine, "stopping")
    problem = _ask_to_stop(op, machine)
    shown = _until_stopped(op, machine, wait_s, tell)
    if shown is None:
        return _stop_failed(op, machine, intent, problem)
    machine = note_stopped(op, machine, shown, why)
    intents.close(op.project, op.clock, intent, "done", machine_id=machine.id)
    return machine


def stoppable(op: Operator, machine: Machine, *, despite_jobs: bool = False) -> tuple[Machine, Instance]:
    """(record, instance) of a machine that may be stopped, protected or not; raises what stands in the way."""
    machine = witness.current(op, machine)
    if machine.status in states.FINAL:
        raise AlreadyGone(machine=machine.id, status=machine.status)
    seen = witness.look(op, machine)
    if seen is None:
        raise AlreadyGone(f"{machine.provider} does not show {machine.id} now", next_step="gpu reconcile")
    machine = witness.with_instance(op, machine, seen)
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
            op.clock.sleep(asking.pause_after(problem, attempt))
    return problem


def _until_stopped(op: Operator, machine: Machine, wait_s: float, tell: asking.Tell) -> Instance | None:
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
