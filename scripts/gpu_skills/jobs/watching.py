"""What is looked at while a job runs on a machine of its own: the time it takes, its standstill, its machine.

As long as the machine answers, nothing is asked of the provider. When it falls silent, one list call at a time tells
whether it is still there; three of them that say no, and the machine is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import GpuError, RemoteError, one_line
from gpu_skills.jobs import disposable, observe
from gpu_skills.jobs.collect import awake
from gpu_skills.jobs.follow import RECONNECT_FOR_S
from gpu_skills.jobs.launch import Launch
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import machines, notify
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans.plan import EXPECTED_TIMES, Plan
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.state import journal
from gpu_skills.units import format_duration

POLL_S = 15.0
DUE_EVERY_S = 300.0
LOOKS = 3
RESUMES_WITHIN_S = 480.0  # an outbid machine may come back by itself; less than following a broken connection lasts
NEAR_DEADLINE = timedelta(minutes=5)
LAST_PULL = timedelta(minutes=5)
EXPECTED_EXCEEDED = "expected_exceeded"
_HERE = ("booting", "running")
TAKEN_AWAY = ("outbid", "preempted")


class MachineLost(RemoteError):
    """The machine of a job is not there any more, or stands still. reason: the word for the ledger."""

    code = "machine_lost"
    template = "{host} is lost to {job}: {reason}"
    next_step = "gpu job status {job}"


class Preempted(RemoteError):
    """It was taken away, as an interruptible machine may be. Another machine is another plan."""

    code = "preempted"
    template = "{host} was taken away from {job} ({reason}); another machine needs a plan and an approval of its own"
    next_step = "gpu plan --freeze"


LOST = (MachineLost, Preempted)


class Moved(Exception):
    """The machine is back at another address: connect again, with the record as it is now."""


class Watch:
    """One job's. `piece` gets what the machine says of the job, `silence` is called while it says nothing.

    offset: how much of the log was seen. last_pull: called once, shortly before the machine's end.
    """

    def __init__(
        self,
        op: Operator,
        launched: Launch,
        found: Plan,
        machine: Machine,
        *,
        last_pull: Callable[[Link], None] = lambda link: None,
    ):
        self._op = op
        self._launched = launched
        self._plan = found
        self._machine = machine
        self._link: Link | None = None
        self.offset = 0
        self._last_pull: Callable[[Link], None] | None = last_pull
        self._folder = JobFolder(op.project, launched.job)
        self._stall_s = ((found.job or {}).get("progress") or {}).get("stall_s")
        self._told_of_time = any(e.get("event") == EXPECTED_EXCEEDED for e in _events(self._folder))
        self._told_of_standstill = False
        self._told_due_at_s: float | None = None
        self._heard_at_s = op.clock.monotonic()
        self._heard_at = op.clock.now()
        self._began_at = self._heard_at
        self._asked_at_s: float | None = None
        self._away = 0

    def connect(self) -> Link:
        """A link to the machine, with as much patience as a broken connection gets later on."""
        ends_s, pause_s = self._op.clock.monotonic() + RECONNECT_FOR_S, 1.0
        while True:
            machine = machines.find(self._op.project, self._machine.id) or self._machine
            self._machine = machine
            try:
                self._link = self._op.connect(awake(machine, self._launched.job))
                return self._link
            except RemoteError as exc:
                if not exc.retryable or self._op.clock.monotonic() >= ends_s:
                    raise
            with contextlib.suppress(Moved):
                self.silence()
            self._op.clock.sleep(pause_s)
            pause_s = min(pause_s * 2, 30.0)

    def joins(self, link: Link) -> Link:
        """Watch over a link that is there already."""
        self._link = link
        return link

    def piece(self, status: dict[str, Any], offset: int) -> None:
        self.offset = offset
        self._heard_at_s, self._heard_at = self._op.clock.monotonic(), self._op.clock.now()
        self._away, self._asked_at_s = 0, None
        self._look_at_the_time(status)
        self._look_at_what_is_due()
        self._look_at_progress(status)
        self._look_at_the_end(status)

    def silence(self) -> None:
        """Raises MachineLost or Preempted once the provider has said so often enough, CancelRequested on a cancel.

        Moved when it is to be reached elsewhere now.
        """
        disposable.require_wanted(self._op, self._launched)
        now_s = self._op.clock.monotonic()
        if self._asked_at_s is not None and now_s - self._asked_at_s < POLL_S:
            return
        self._asked_at_s = now_s
        try:
            listed = self._op.reader(self._machine.provider).machines()
        except GpuError as exc:  # no answer is no observation
            self._op.say(f"{self._machine.provider} cannot be asked about {self._machine.id}: {exc.message}")
            return
        seen = next((one for one in listed if one.instance_id == self._machine.instance_id), None)
        if seen is not None and seen.status in _HERE:
            self._away = 0
            self._follow_address(seen)
            return
        self._away += 1
        self._note_condition(seen)
        if self._away < LOOKS or self._may_come_back(seen, now_s):
            return
        self._lost(seen)

    # while it answers -----------------------------------------------------------------------------------------------

    def _look_at_the_time(self, status: dict[str, Any]) -> None:
        """More than twice the expected time is told once. It goes on until the deadline, which is soon then, unless
        the plan was frozen with a later one."""
        expected_s, took_s = self._plan.expected_s, status.get("duration_s")
        if self._told_of_time or not expected_s or not isinstance(took_s, int | float):
            return
        if took_s <= EXPECTED_TIMES * expected_s:
            return
        self._told_of_time = True
        facts = {"duration_s": round(float(took_s), 1), "expected_s": expected_s}
        event = {"event": EXPECTED_EXCEEDED, "ts": timestamp(self._op.clock.now()), **facts}
        journal.append(self._folder.events, [event])
        job, until = self._launched.job, self._machine.deadline_at
        self._op.say(
            f"{job} runs for {format_duration(took_s)}, expected were {format_duration(expected_s)}; its machine may "
            f"bill until {until}; next: gpu job logs --tail 50 {job}, or gpu job cancel {job}"
        )
        self._op.notify(EXPECTED_EXCEEDED, job, **facts, deadline_at=until)

    def _look_at_what_is_due(self) -> None:
        now_s = self._op.clock.monotonic()
        if self._told_due_at_s is None or now_s - self._told_due_at_s >= DUE_EVERY_S:
            self._told_due_at_s = now_s
            notify.tell_due(self._op, job=self._launched.job)

    def _look_at_progress(self, status: dict[str, Any]) -> None:
        progress = status.get("progress")
        if self._stall_s is None or not progress or status["state"] != "running":
            return
        is_still = progress["stalled_s"] >= self._stall_s
        if is_still and not self._told_of_standstill:
            facts = {"unit": one_line(str(progress["unit"]), limit=80), "stalled_s": progress["stalled_s"]}
            self._op.notify("job_stalled", self._launched.job, **facts, rate_usd_hr=self._machine.rate_usd_hr)
            if self._link is not None:
                with contextlib.suppress(RemoteError):  # the next look brings them
                    observe.sync_events(self._op.project, self._link, self._launched.job)
        self._told_of_standstill = is_still

    def _look_at_the_end(self, status: dict[str, Any]) -> None:
        """Shortly before its machine ends a running job is collected once: afterwards there may be nothing to ask."""
        ends = (self._machine.session or {}).get("deadline_at")
        if self._last_pull is None or self._link is None or ends is None or status["state"] != "running":
            return
        margin = min(LAST_PULL, (parse_timestamp(ends) - self._began_at) / 4)
        if self._op.clock.now() >= parse_timestamp(ends) - margin:
            pull, self._last_pull = self._last_pull, None
            pull(self._link)

    # when it does not -----------------------------------------------------------------------------------------------

    def _follow_address(self, seen: Instance) -> None:
        """After a stop and a start a machine may have another port."""
        known = self._machine.endpoint
        ways = [way.endpoint for way in seen.ways if way.carries_commands]
        if seen.status != "running" or not ways or known is None:
            return
        if any((way.host, way.port) == (known.host, known.port) for way in ways):
            return
        there = replace(ways[0], identity_file=known.identity_file)
        self._machine = machines.update(
            self._op.project, self._machine.id, lambda found: replace(found, endpoint=there), clock=self._op.clock
        )
        raise Moved

    def _note_condition(self, seen: Instance | None) -> None:
        """That it was taken away, also when it comes back: what ran on it then has gone down with it."""
        why = self._reason(seen)
        if why in TAKEN_AWAY and why not in self._machine.conditions:

            def marked(found: Machine) -> Machine:
                return replace(found, conditions=tuple(dict.fromkeys((*found.conditions, why))))

            self._machine = machines.update(self._op.project, self._machine.id, marked, clock=self._op.clock)

    def _may_come_back(self, seen: Instance | None, now_s: float) -> bool:
        """An interruptible machine whose bid is the highest again starts by itself; `outbid` is not always said."""
        is_paused = seen is not None and seen.status in ("stopping", "stopped", "unknown")
        is_paused = is_paused and self._reason(seen) in TAKEN_AWAY
        return is_paused and not self._is_past_deadline() and now_s - self._heard_at_s < RESUMES_WITHIN_S

    def _is_past_deadline(self) -> bool:
        ends = self._machine.deadline_at
        return ends is not None and self._op.clock.now() >= parse_timestamp(ends) - NEAR_DEADLINE

    def _lost(self, seen: Instance | None) -> None:
        """Write down what was found, end the job by it, and say so."""
        reason = self._reason(seen)
        machine = note_loss(self._op, self._machine)
        self._op.settle_jobs(machine.id, reason, at=self._heard_at)
        kind = Preempted if reason in TAKEN_AWAY else MachineLost
        raise kind(host=machine.host, job=self._launched.job, reason=reason, machine=machine.id)

    def _reason(self, seen: Instance | None) -> str:
        if self._is_past_deadline():
            return "deadline_passed"
        if seen is not None and "outbid" in seen.conditions:
            return "outbid"
        if self._plan.interruptible or (seen is not None and seen.is_interruptible):
            return "preempted"
        return "machine_gone" if seen is None else "machine_stopped"


def note_loss(op: Operator, machine: Machine) -> Machine:
    """Let `reconcile` write down what the machine is now, and book it."""
    from gpu_skills.lifecycle.recovery import reconcile

    try:
        reconcile.run(op, [machine.provider])
    except GpuError as exc:
        op.say(f"what became of {machine.id} is not settled: {exc.message}; next: gpu reconcile")
    return machines.find(op.project, machine.id) or machine


def _events(folder: JobFolder) -> list[dict[str, Any]]:
    return [event for _, _, event in journal.scan(folder.events) if isinstance(event, dict)]
