"""A stopped machine goes back to work: on its own host, with its own disk, under a deadline of its own approval.

Order: what it may cost is reserved, the start is in the journal, the new deadline is in its label while it still
stands (a running RunPod machine may not be renamed), then the one request. Up again, the deadline goes into the file
of its fuse and is read back, and a session is opened. Where the host has no GPU for it, it stays `stopped` as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import (
    AlreadyGone,
    ApprovalInvalid,
    ConflictingState,
    GpuError,
    HostFull,
    NotReady,
    ProviderError,
    ProviderSilent,
    RemoteError,
)
from gpu_skills.lifecycle import intents, labels, machines, runs, states, unrecorded
from gpu_skills.lifecycle.approval import actions, approvals, changes
from gpu_skills.lifecycle.approval.actions import ActionPlan
from gpu_skills.lifecycle.approval.approvals import Approval
from gpu_skills.lifecycle.books import lives
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.ending import ownership, stops, witness
from gpu_skills.lifecycle.guard import fuse, receipts
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.renting import bringup, specs
from gpu_skills.lifecycle.renting.bringup import Boot, Ready
from gpu_skills.state import budget
from gpu_skills.units import format_usd, json_number


def restart(op: Operator, machine: Machine, approval: Approval) -> Ready:
    """The machine at work again. HostFull when its host has no free GPU: it stays stopped, and nothing is rented.

    ProviderSilent when the start was not answered and the machine does not tell either. The same approval goes on with
    what it began, and serves again after HostFull, while it lasts.
    """
    with runs.working_on(op, approval.id):
        _, action = actions.load(op.project, approval.plan_sha256)
        if not isinstance(action, ActionPlan) or action.action != "start" or action.machine_id != machine.id:
            raise ApprovalInvalid(reason=f"approval {approval.id} is not for a start of {machine.id}", plan=machine.id)
        with unrecorded.told(op.project, "start", lambda: [machine.id]):
            approvals.use(op, approval, action.ask())
            return _Start(op, machine, approval, action).go()


def resume(op: Operator, machine: Machine) -> Ready:
    """The machine at work again after a start that was not ours: outbid and back, or by hand. Its deadline stays.

    It bills already, so nothing is asked for; one that is no use is stopped again, as after a start.
    """
    _, plan = plans.load(op.project, machine.plan or "")
    boot = Boot(op, plan, witness.current(op, machine), spec=None, is_start=True)
    link: Link | None = None
    try:
        link = boot.until_it_answers()
        return boot.ready(link)
    except (NotReady, RemoteError, HostFull) as exc:
        if link is not None:
            link.close()
        _asleep(op, machine, exc, why=f"it is no use: {exc.code}")
        raise


def intent_of(approval_id: str, machine_id: str, number: int = 1) -> str:
    """The n-th start of a machine under an approval: the same for whoever goes on with it."""
    return labels.action_intent(approval_id, "start", machine_id, number)


class _Start:
    """One start, while this process works on it."""

    def __init__(self, op: Operator, machine: Machine, approval: Approval, action: ActionPlan):
        self.op = op
        self.machine = witness.current(op, machine)
        self.approval = approval
        self.action = action
        self.plan = changes.plan_of(op, self.machine)

    def go(self) -> Ready:
        """Begin, or go on with what was begun and not ended."""
        op = self.op
        if self.machine.status in states.FINAL:
            raise AlreadyGone(machine=self.machine.id, status=self.machine.status)
        intent, has_begun = self._intent()
        if has_begun and self.machine.status in ("ready", "busy"):
            return self._follow()
        shown = witness.look(op, self.machine)
        if shown is None:
            raise AlreadyGone(f"{self.machine.provider} does not show {self.machine.id} now", next_step="gpu reconcile")
        ownership.require_ours(op, self.machine, shown)
        if not has_begun and shown.status != "stopped":
            raise ApprovalInvalid(reason=f"{self.machine.id} is {shown.status}, not stopped: it needs no start")
        runs.require_readable(op)
        receipts.require_recent(op, self.machine.provider, specs.fuse_action(op, self.plan))
        self._reserve()
        before = self._before()
        if shown.status == "stopped":
            if not has_begun:
                self._begin(intent)
            self._relabel(shown.label)
            self._send(intent, before)
        return self._bring_up(intent, before)

    # before it leaves -------------------------------------------------------------------------------------------------

    def _intent(self) -> tuple[str, bool]:
        """The start to go on with, or the next one; whether it was begun."""
        known = intents.read(self.op.project)
        number = 1
        while (found := known.get(intent_of(self.approval.id, self.machine.id, number))) is not None:
            if found.is_open or found.result == "done":
                return found.id, True
            number += 1
        return intent_of(self.approval.id, self.machine.id, number), False

    def _reserve(self) -> None:
        op, machine = self.op, self.machine
        budget.reserve(
            op.project,
            op.ledger,
            op.clock,
            op.policy(),
            intent=self.approval.id,
            account=op.account(machine.provider),
            provider=machine.provider,
            cost_usd=self.action.worst_case_usd,
            rate_usd_hr=self.action.rate_usd_hr if self.action.rate_usd_hr is not None else machine.rate_usd_hr,
            deadline_h=None if self.deadline is None else self._left_h(),
            job_id=budget.job_on(op.project, machine.id, op.environ),
            machine_id=machine.id,
            environ=op.environ,
        )

    @property
    def deadline(self) -> datetime | None:
        text = self.action.deadline_at or self.machine.deadline_at
        return None if text is None else parse_timestamp(text)

    def _left_h(self) -> float:
        assert self.deadline is not None
        return max(0.0, (self.deadline - self.op.clock.now()).total_seconds() / 3600)

    def _before(self) -> Machine:
        """What to go back to: the record says the new deadline already when somebody died in the middle."""
        label, old = labels.parse(self.machine.label), self.action.old_deadline_at
        if label is None or old is None:
            return self.machine
        return replace(self.machine, label=str(label.with_deadline(parse_timestamp(old))), deadline_at=old)

    def _begin(self, intent: str) -> None:
        machine = self.machine
        intents.begin(
            self.op.project,
            self.op.clock,
            "start",
            intent,
            provider=machine.provider,
            account=machine.account,
            machine_id=machine.id,
            instance_id=machine.instance_id,
            label=self._label(),
            approval_id=self.approval.id,
            details={"deadline_at": self.action.deadline_at, "rate_usd_hr": json_number(machine.rate_usd_hr)},
        )

    def _label(self) -> str | None:
        label = labels.parse(self.machine.label)
        return str(label.with_deadline(self.deadline)) if label is not None else None

    def _relabel(self, shown: str | None) -> None:
        """The deadline that a sentinel elsewhere reads, before the machine bills by it."""
        label = self._label()
        if label is not None and label != shown:
            self.op.writer(self.machine.provider).set_label(str(self.machine.instance_id), label)
        deadline = None if self.deadline is None else timestamp(self.deadline)
        self.machine = self._update(lambda m: replace(m, label=label or m.label, deadline_at=deadline))

    # the one request --------------------------------------------------------------------------------------------------

    def _send(self, intent: str, before: Machine) -> None:
        op = self.op
        try:
            op.writer(self.machine.provider).start(str(self.machine.instance_id))
        except (ProviderSilent, ConflictingState):
            # Not answered, or it is on its way already: the request may have arrived twice. Looked at before all else.
            op.say(f"{self.machine.provider} did not say whether {self.machine.id} starts: looking at it")
        except HostFull as exc:
            raise self._host_full(intent, before, exc.details.get("reason") or exc.message) from exc
        except ProviderError as exc:
            self._undo(intent, before, exc)
            raise
        self.machine = self._update(lambda m: replace(m, status="booting", conditions=_without_stop(m)))

    def _host_full(self, intent: str, before: Machine, reason: object) -> HostFull:
        """Stopped as before, its disk bills on: what it costs and what can be done about it."""
        storage = self.machine.storage_usd_hr
        error = HostFull(
            machine=self.machine.id,
            reason=str(reason),
            storage_usd_hr=None if storage is None else json_number(storage),
            proposal="a replacement by a new plan, and a copy of the data: nothing is rented by itself",
        )
        if storage is not None:
            error.message += f"; it stays stopped, its disk costs {format_usd(storage)}/h"
        self._undo(intent, before, error)
        return error

    def _undo(self, intent: str, before: Machine, problem: GpuError) -> None:
        """Nothing started: deadline, label and money are as they were."""
        op, provider = self.op, self.machine.provider
        with contextlib.suppress(GpuError):  # a label with a later deadline is mended by reconcile
            if before.label is not None and before.label != self.machine.label:
                op.writer(provider).set_label(str(self.machine.instance_id), before.label)

        def stopped(machine: Machine) -> Machine:
            return replace(machine, status="stopped", label=before.label, deadline_at=before.deadline_at)

        self.machine = self._update(stopped)
        intents.close(op.project, op.clock, intent, "refused", reason=problem.message, details={"code": problem.code})
        budget.settle(
            op.project,
            op.clock,
            intent=self.approval.id,
            account=op.account(provider),
            provider=provider,
            settled_usd=0,
            environ=op.environ,
        )

    # up again ---------------------------------------------------------------------------------------------------------

    def _bring_up(self, intent: str, before: Machine) -> Ready:
        op = self.op
        boot = Boot(op, self.plan, self.machine, spec=None, is_start=True)
        link: Link | None = None
        try:
            link = boot.until_it_answers()
            self._arm(link, boot)
            ready = boot.ready(link)
        except KeyboardInterrupt:
            if link is not None:
                link.close()
            burn = f"{self.machine.id} starts and bills {format_usd(self.machine.rate_usd_hr)}/h"
            op.say(f"{burn}; gpu setup goes on, gpu machine stop {self.machine.id} stops it")
            raise
        except (NotReady, RemoteError, HostFull) as exc:
            if link is not None:
                link.close()
            self._sleep_again(boot, exc)
            if isinstance(exc, HostFull) or (isinstance(exc, NotReady) and exc.details.get("what") == "gpu_missing"):
                raise self._host_full(intent, before, exc.details.get("reason")) from exc
            intents.close(op.project, op.clock, intent, "failed", reason=exc.message)
            raise
        intents.close(op.project, op.clock, intent, "done", machine_id=self.machine.id)
        approvals.finish(op, self.approval)
        self.machine = ready.machine
        return ready

    def _arm(self, link: Link, boot: Boot) -> None:
        """The new deadline into the fuse's file, and read back: until then the old one and its grace hold."""
        held = fuse.set_deadline(link, self.machine, self.deadline, clock=self.op.clock)
        if held != self.deadline:
            raise NotReady(machine=self.machine.id, what="fuse_silent", reason="its fuse did not take the deadline")
        boot.machine = witness.current(self.op, self.machine)

    def _sleep_again(self, boot: Boot, problem: GpuError) -> None:
        """No use now, and its disk is somebody's work: stopped, never destroyed. What does not stop says so itself."""
        if boot.watch.status not in (None, "stopped"):  # it ran, and that is paid for
            intents.observe(self.op.project, self.op.clock, lives.RUNNING, machine_id=self.machine.id)
        self.machine = _asleep(self.op, self.machine, problem, why=f"its start failed: {problem.code}")

    def _follow(self) -> Ready:
        """It was started under this approval already."""
        link, receipt = bringup.follow(self.op, self.machine)
        return Ready(link.machine, link, receipt)

    def _update(self, change: Callable[[Machine], Machine]) -> Machine:
        return machines.update(self.op.project, self.machine.id, change, clock=self.op.clock)


def _asleep(op: Operator, machine: Machine, problem: GpuError, *, why: str) -> Machine:
    """Stopped again. Where that cannot be, the problem says what can: nothing here destroys a disk."""
    op.say(f"{machine.id} is stopped again: {problem.message}")
    try:
        return stops.stop(op, machine, why=why, despite_jobs=True)
    except ConflictingState as exc:
        op.say(f"{exc.message}; it goes on billing: {exc.next_step}")
        problem.next_step = exc.next_step
        problem.may_be_billing = True  # type: ignore[misc]
        return witness.current(op, machine)


def _without_stop(machine: Machine) -> tuple[str, ...]:
    return tuple(c for c in machine.conditions if c not in ("stop_failed", "preempted", "outbid"))
