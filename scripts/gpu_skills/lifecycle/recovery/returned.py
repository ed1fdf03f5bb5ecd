"""A machine that was taken back, until it can be worked on again: its fuse is read back, and it tells its jobs.

The records of both are lost; the machine has them. Nothing here spends, and what cannot be read is no reason to end it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from gpu_skills.clock import timestamp
from gpu_skills.errors import NotReady, RemoteError
from gpu_skills.lifecycle import machines, states
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.guard.fuse import Receipt
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.recovery import adoption
from gpu_skills.lifecycle.renting import bringup

RECEIPT_WAIT_S = 5.0  # real time; its fuse was armed long ago


@dataclass(frozen=True)
class Told:
    """What a machine said of its jobs. taken: on record from now on; unknown: on no record still."""

    machine: Machine
    taken: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def is_doubtful(op: Operator, machine: Machine) -> bool:
    """Whether a machine that is up may have jobs that no record names: its past is lost, or the ledger knows none."""
    if machine.has_unknown_past:
        return machine.status in ("booting", "ready", "busy", "unknown")
    return machine.status in ("ready", "busy") and not op.ledger.jobs_on(machine.id)


def ask(op: Operator, machine: Machine, *, adopt: bool) -> Told:
    """Bring it up, if it was taken back, and ask it for its jobs. adopt: put them on record.

    Raises RemoteError or NotReady; of a machine that was taken back with what to do then.
    """
    link = bring_up(op, machine) if machine.has_unknown_past else op.connect(machine)
    with closing(link):
        taken, unknown = op.jobs_there(link, write=adopt)
    machine = link.machine
    if machine.has_unknown_past and not unknown:
        machine = _with_extra(op, machine, "jobs_read_at")
    return Told(machine, tuple(taken), tuple(unknown))


def bring_up(op: Operator, machine: Machine) -> Link:
    """A conversation with a machine that was taken back; `ready` on record once its fuse was read back.

    It was tried when it was rented; its fuse has to run and to hold the deadline that is on record. RemoteError or
    NotReady when that cannot be, with the command that gives it up.
    """
    problem: RemoteError | NotReady | None = None
    for candidate in _ways_to(op, machine):
        try:
            link, receipt = bringup.follow(op, candidate, wait_s=RECEIPT_WAIT_S)
        except (RemoteError, NotReady) as exc:
            problem = problem or exc
            continue
        try:
            gpus = [] if candidate.gpu_count else link.session.call("probe", {})["gpus"]
            link.machine = _is_back(op, candidate, receipt, gpus)
        except BaseException:
            link.close()
            raise
        return link
    problem = problem or NotReady(machine=machine.id, what="no_way_in", reason=f"{machine.provider} shows none")
    problem.next_step = give_up_step(machine)
    raise problem


def _is_back(op: Operator, machine: Machine, receipt: Receipt, gpus: list[Any]) -> Machine:
    now = timestamp(op.clock.now())

    def changed(found: Machine) -> Machine:
        if found.status not in ("requested", "booting", "ready", "busy", "unknown"):
            return found
        found = machines.with_gpus(found, gpus) if gpus else found
        return replace(
            found,
            status="busy" if found.status == "busy" else "ready",
            endpoint=machine.endpoint,
            ready_at=found.ready_at or now,
            last_seen_at=now,
            extra={**found.extra, "fuse": receipt.to_record()},
        )

    return machines.update(op.project, machine.id, changed, clock=op.clock)


def give_up_step(machine: Machine) -> str:
    return (
        f"gpu reconcile --provider {machine.provider} --adopt; or, to lose what it has: "
        f"gpu machine destroy {machine.id} --abandon-outputs {machine.id}"
    )


def _ways_to(op: Operator, machine: Machine) -> Iterator[Machine]:
    """The record with each way in that the provider shows now: the one on record may be of before."""
    seen = op.reader(machine.provider).machine(str(machine.instance_id))
    if seen is None or seen.status not in ("running", "booting", "unknown") or machine.status in states.FINAL:
        return
    for endpoint in adoption.endpoints_of(op, seen):
        changed = machines.update(op.project, machine.id, lambda m, endpoint=endpoint: replace(m, endpoint=endpoint))
        yield changed


def _with_extra(op: Operator, machine: Machine, name: str) -> Machine:
    now = timestamp(op.clock.now())
    return machines.update(op.project, machine.id, lambda m: replace(m, extra={**m.extra, name: now}), clock=op.clock)
