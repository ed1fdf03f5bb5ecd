"""What is looked at while a job runs on a machine of its own: the time it takes, its standstill, its machine.

As long as the machine answers, nothing is asked of the provider. When it falls silent, one list call at a time tells
whether it is still there; three of them that say no, and the machine is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import GpuError, RemoteError, one_line
from gpu_skills.jobs import disposable, observe
from gpu_skills.jobs.launch import Launch
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plan import Plan
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.state import journal
from gpu_skills.units import format_duration

POLL_S = 15.0
LOOKS = 3
RESUMES_WITHIN_S = 600.0  # an outbid machine may come back by itself
TIMES_EXPECTED = 2.0
NEAR_DEADLINE = timedelta(minutes=5)
LAST_PULL = timedelta(minutes=5)
EXPECTED_EXCEEDED = "expected_exceeded"
_HERE = ("booting", "running")


class MachineLost(RemoteError):
    """The machine of a job is not there any more, or stands still. reason: the word for the ledger."""

    code = "machine_lost"
    template = "{host} is lost to {job}: {reason}"
    next_step = "gpu job status {job}"


class Preempted(MachineLost):
    """It was taken away, as an interruptible machine may be. Another machine is another plan."""

    code = "preempted"
    template = "{host} was taken away from {job} ({reason}); another machine needs a plan and an approval of its own"
    next_step = "gpu plan --freeze"


class Watch:
    """One job's. `piece` gets what the machine says of the job, `silence` is called while it says nothing."""

    def __init__(
        self, op: Operator, launched: Launch, found: Plan, link: Link, *, last_pull: Callable[[], None] = lambda: None
    ):
        self._op = op
        self._launched = launched
        self._plan = found
        self._link = link
        self._machine = link.machine
        self._last_pull: Callable[[], None] | None = last_pull
        self._folder = JobFolder(op.project, launched.job)
        self._stall_s = ((found.job or {}).get("progress") or {}).get("stall_s")
        self._told_of_time = any(e.get("event") == EXPECTED_EXCEEDED for e in _events(self._folder))
        self._told_of_standstill = False
        self._heard_at_s = op.clock.monotonic()
        self._heard_at = op.clock.now()
        self._began_at = self._heard_at
        self._asked_at_s: float | None = None
        self._away = 0

    def piece(self, status: dict[str, Any]) -> None:
        self._heard_at_s, self._heard_at = self._op.clock.monotonic(), self._op.clock.now()
        self._away, self._asked_at_s = 0, None
        self._look_at_the_time(status)
        self._look_at_progress(status)
        self._look_at_the_end(status)

    def silence(self) -> None:
        """Raises MachineLost or Preempted once the provider has said so often enough, CancelRequested on a cancel."""
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
            return
        self._away += 1
        if self._away < LOOKS or self._may_come_back(seen, now_s):
            return
        self._lost(seen)

    # while it answers -----------------------------------------------------------------------------------------------

    def _look_at_the_time(self, status: dict[str, Any]) -> None:
        """More than twice the expected time is told once. It goes on: the approval holds until the deadline."""
        expected_s, took_s = self._plan.expected_s, status.get("duration_s")
        if self._told_of_time or not expected_s or not isinstance(took_s, int | float):
            return
        if took_s <= TIMES_EXPECTED * expected_s:
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

    def _look_at_progress(self, status: dict[str, Any]) -> None:
        progress = status.get("progress")
        if self._stall_s is None or not progress or status["state"] != "running":
            return
        is_still = progress["stalled_s"] >= self._stall_s
        if is_still and not self._told_of_standstill:
            facts = {"unit": one_line(str(progress["unit"]), limit=80), "stalled_s": progress["stalled_s"]}
            self._op.notify("job_stalled", self._launched.job, **facts, rate_usd_hr=self._machine.rate_usd_hr)
            try:
                observe.sync_events(self._op.project, self._link, self._launched.job)
            except RemoteError:
                pass  # the next look brings them
        self._told_of_standstill = is_still

    def _look_at_the_end(self, status: dict[str, Any]) -> None:
        """Shortly before its machine ends a running job is collected once: afterwards there may be nothing to ask."""
        ends = (self._machine.session or {}).get("deadline_at")
        if self._last_pull is None or ends is None or status["state"] != "running":
            return
        margin = min(LAST_PULL, (parse_timestamp(ends) - self._began_at) / 4)
        if self._op.clock.now() >= parse_timestamp(ends) - margin:
            pull, self._last_pull = self._last_pull, None
            pull()

    # when it does not -----------------------------------------------------------------------------------------------

    def _may_come_back(self, seen: Instance | None, now_s: float) -> bool:
        is_paused = seen is not None and seen.status == "stopped" and "outbid" in seen.conditions
        return is_paused and not self._is_past_deadline() and now_s - self._heard_at_s < RESUMES_WITHIN_S

    def _is_past_deadline(self) -> bool:
        ends = self._machine.deadline_at
        return ends is not None and self._op.clock.now() >= parse_timestamp(ends) - NEAR_DEADLINE

    def _lost(self, seen: Instance | None) -> None:
        """Write down what was found, end the job by it, and say so."""
        reason = self._reason(seen)
        machine = note_loss(self._op, self._machine, reason)
        self._op.settle_jobs(machine.id, reason, at=self._heard_at)
        kind = Preempted if reason in ("outbid", "preempted") else MachineLost
        raise kind(host=machine.host, job=self._launched.job, reason=reason, machine=machine.id)

    def _reason(self, seen: Instance | None) -> str:
        if self._is_past_deadline():
            return "deadline_passed"
        if seen is not None and "outbid" in seen.conditions:
            return "outbid"
        if self._plan.interruptible or (seen is not None and seen.is_interruptible):
            return "preempted"
        return "machine_gone" if seen is None else "machine_stopped"


def note_loss(op: Operator, machine: Machine, reason: str) -> Machine:
    """Put the condition on record and let `reconcile` write what the machine is now, and book it."""
    from gpu_skills.lifecycle import reconcile

    if reason in ("outbid", "preempted"):

        def marked(found: Machine) -> Machine:
            return replace(found, conditions=tuple(dict.fromkeys((*found.conditions, reason))))

        machine = machines.update(op.project, machine.id, marked, clock=op.clock)
    try:
        reconcile.run(op, [machine.provider])
    except GpuError as exc:
        op.say(f"what became of {machine.id} is not settled: {exc.message}; next: gpu reconcile")
    return machines.find(op.project, machine.id) or machine


def _events(folder: JobFolder) -> list[dict[str, Any]]:
    return [event for _, _, event in journal.scan(folder.events) if isinstance(event, dict)]
