"""From one approval to one machine that is ready, whatever happens on the way; and a stopped one back to work.

    provision()   verify, bind the run (binding.py), then attempt after attempt until one is ready or none is left
    restart()     a stopped machine starts again, on its own host or not at all

One process works on a run at a time. What it was doing is in the run's file, the record and the journal before each
step, so that the same call again, or `gpu reconcile`, goes on from there: it follows, adopts or destroys, and never
sends the same create twice.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import (
    ApprovalExpired,
    ApprovalUsed,
    ArchUnsupported,
    CreatedPriceMismatch,
    DiskUnspecified,
    GpuError,
    NoCapacity,
    NotReady,
    ProviderError,
    RateLimited,
    RemoteError,
    TeardownIncomplete,
    Unreachable,
)
from gpu_skills.lifecycle import machines, memory, runs, states, unrecorded
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.approval.approvals import Approval, ask_of_plan
from gpu_skills.lifecycle.books import accounting
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.guard import receipts
from gpu_skills.lifecycle.guard.fuse import Receipt
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import (
    binding,
    bounds,
    bringup,
    claims,
    creation,
    outcomes,
    shopping,
    specs,
    unanswered,
)
from gpu_skills.lifecycle.renting.bringup import Boot, Ready
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.providers.base import Offer
from gpu_skills.providers.selection import in_words
from gpu_skills.units import counted, format_duration, format_usd

# Creates that one look at the market may come to, all of them refused: more is a sign of something else.
MAX_REFUSED = 12
MAX_LIST_WAITS = 5
# Three absences over a minute, ten for one that no list ever showed; then some for a provider that is slow.
DESTROY_WAIT_S = 900.0
INTERRUPTED_WAIT_S = 20.0


@dataclass(frozen=True)
class Provisioned:
    """attempts: every create of the run, those that were refused or failed with their reason."""

    machine: Machine
    link: Link
    receipt: Receipt
    attempts: tuple[Attempt, ...] = ()


def provision(
    op: Operator,
    name: str,
    plan: Plan,
    approval: Approval,
    *,
    max_lease_s: float | None = None,
    job_id: str | None = None,
) -> Provisioned:
    """A ready machine under this approval: a new one, or the one it has made already.

    max_lease_s: a deadline that is nearer than the plan's; a farther one changes nothing. job_id: the job it is for,
    against whose ceiling its worst case counts.

    StateBusy when another command works on it: follow that. Approval kinds, OverCeiling and Unguarded before anything
    is bound: the approval is then unused. NoCapacity, NotReady and their like when nothing came of it; ProviderSilent
    or TeardownIncomplete (exit 6) when something may be there: `gpu reconcile` goes on.
    """
    with runs.working_on(op, approval.id), runs.renting_by(op, name):
        run = runs.load(op, approval.id)
        if run is not None:
            runs.require_ours(op, run)
        if run is None or run.state != "won":
            approval = approvals.find(op, ask_of_plan(name, plan), approval_id=approval.id)
        with unrecorded.told(op.project, "create", lambda: binding.may_be_there(op, approval.id)):
            run = binding.bound(op, name, plan, approval, run, job_id)
            if run.state == "won":
                link, receipt = bringup.follow(op, binding.machine_of(op, run))
                return Provisioned(link.machine, link, receipt, run.attempts)
            if max_lease_s is not None:
                plan = replace(plan, deadline_s=min(plan.deadline_s, max_lease_s))
            return _Launch(op, plan, run, job_id).go()


class _Launch:
    """One run, while this process works on it."""

    def __init__(self, op: Operator, plan: Plan, run: Run, job_id: str | None):
        self.op = op
        self.plan = plan
        self.job_id = job_id
        self.approval_id = run.approval_id
        self.last_problem: GpuError | None = None
        self.market = shopping.Market(op, plan.provider, run.approval_expires_at)

    @property
    def run(self) -> Run:
        """As its file has it now: whoever ends a machine writes there too."""
        run = runs.load(self.op, self.approval_id)
        assert run is not None
        return run

    def go(self) -> Provisioned:
        """Go on with what was begun, then look at the market as often as the plan says."""
        ready = self._resume()
        looks = int(self.plan.capacity.get("attempts") or 1) if self.plan.capacity.get("mode") == "wait" else 1
        pause_s = float(self.plan.capacity.get("interval_s") or 0)
        for number in range(looks):
            if ready is not None:
                return self._won(ready)
            if number:
                if not self.market.may_wait(pause_s):
                    break
                self.op.say(f"nothing free; look {number + 1} of {looks} in {format_duration(pause_s)}")
                self.op.clock.sleep(pause_s)
                self.market.tried.clear()
            ready = self._one_look()
        if ready is not None:
            return self._won(ready)
        raise self._nothing_left()

    # the attempts -----------------------------------------------------------------------------------------------------

    def _one_look(self) -> Ready | None:
        """Every offer of every class that would do, until one is ready. None: nothing (more) is to be had now."""
        refused = 0
        while refused < MAX_REFUSED:
            self._require_may_go_on()
            offer = self._next_offer()
            if offer is None:
                return None
            outcome = self._attempt(offer)
            if isinstance(outcome, Ready):
                return outcome
            refused += outcome == "refused"
        return None

    def _next_offer(self) -> Offer | None:
        try:
            return self.market.next_offer(self.plan)
        except ProviderError as exc:
            self._ended(exc)
            raise

    def _require_may_go_on(self) -> None:
        """Another create: with a valid approval, all before it confirmed over, a guard, and money for it by now.

        A wait may have gone on for hours, and what guards and bounds a machine may have changed meanwhile.
        """
        run = self.run
        if run.state != "open":
            raise ApprovalUsed(reason=f"approval {run.approval_id} was used: its run is {run.state}")
        if self.op.clock.now() >= parse_timestamp(run.approval_expires_at):
            error = self.last_problem or ApprovalExpired(reason=f"approval {run.approval_id} expired while it was used")
            raise self._ended(error)
        left = [a for a in run.attempts if a.result != "refused" and not a.is_over]
        if left:
            raise TeardownIncomplete(machines=", ".join(a.machine_id for a in left))
        # So many may fail before one does not: what they cost is in the worst case that was approved.
        if sum(a.result == "failed" for a in run.attempts) > self.plan.setup_failures_max:
            raise self._exhausted()
        cost_usd = accounting.cost_of(self.op, run)
        try:
            deadline_s = bounds.deadline_s(self.op, self.plan, self.approval_id, cost_usd)
            self.plan = replace(self.plan, deadline_s=deadline_s)
            runs.require_readable(self.op)
            receipts.require_recent(self.op, self.plan.provider, specs.fuse_action(self.op, self.plan))
            bounds.require_within_ceilings(self.op, self.plan, self.approval_id, cost_usd, job_id=self.job_id)
        except GpuError as exc:
            self._ended(exc)
            raise

    def _attempt(self, offer: Offer) -> Ready | str:
        """One create and what follows from it: a ready machine, or `refused`, `failed` or `taken`."""
        op, run = self.op, self.run
        _, intent = creation.intent_of(run, self.plan)
        if not claims.take(op, self.plan.provider, offer, intent):
            return "taken"
        self._look_before(intent)
        op.say(f"asking {offer.provider} for {offer.gpu} at {format_usd(offer.rate_usd_hr)}/h (offer {offer.offer_id})")
        attempt = creation.freeze(op, run, self.plan, offer)
        try:
            spec = specs.spec_of(op, self.plan, offer, attempt)
        except GpuError as exc:
            outcomes.refused(op, run, attempt, exc)
            return self._after_refusal(attempt, offer, exc)
        if not claims.still_held(op, self.plan.provider, offer, intent):
            outcomes.refused(op, run, attempt, NoCapacity(f"the claim of offer {offer.offer_id} ran out"))
            return "refused"
        try:
            made = creation.send(op, run, attempt, spec)
        except KeyboardInterrupt:
            self._interrupted_while_asking(attempt)
            raise
        if isinstance(made, outcomes.Refused):
            return self._after_refusal(attempt, offer, made.problem)
        if made.problem is not None:
            self._failed(attempt, made.machine, made.problem)
            return "failed"
        boot = Boot(op, self.plan, made.machine, spec=spec)
        return self._bring_up(attempt, boot) or "failed"

    def _look_before(self, intent: str | None) -> None:
        """One complete list before each create, and before it is said that nothing bills.

        What carries the coming intent was rented under this approval by another state directory, or by this one before
        its records were lost: nothing is asked for. What carries the intent of a refused create was made all the same.
        """
        op, run = self.op, self.run
        refused = {a.intent: a for a in run.attempts if a.result == "refused"}
        shown = self._shown([*refused, *([intent] if intent else [])])
        if intent and shown[intent]:
            there = shown[intent][0].instance_id
            raise self._ended(
                ApprovalUsed(
                    reason=f"approval {run.approval_id} has rented instance {there} already, from other records",
                    next_step="gpu reconcile --adopt",
                    instance=there,
                )
            )
        for known, attempt in refused.items():
            for seen in shown[known]:
                op.say(f"{run.provider} refused a create and made {seen.instance_id} all the same: it is destroyed")
                outcomes.note(op, run, attempt, result="failed", is_over=False)
                self._destroy(
                    attempt, unanswered.twin_record(op, run, attempt, seen), "made though refused", DESTROY_WAIT_S
                )

    def _shown(self, wanted: list[str]) -> dict[str, list[Instance]]:
        """By intent; a list that has to wait for its turn is waited for."""
        for _ in range(MAX_LIST_WAITS):
            try:
                return unanswered.find_any(self.op, self.plan.provider, wanted)
            except RateLimited as exc:
                self.op.clock.sleep(shopping.asked_pause_s(exc))
        return unanswered.find_any(self.op, self.plan.provider, wanted)

    def _bring_up(self, attempt: Attempt, boot: Boot) -> Ready | None:
        """Wait for it and try it. None: it was no use, and it is gone."""
        link: Link | None = None
        try:
            link = boot.until_it_answers()
            return boot.ready(link)
        except (NotReady, CreatedPriceMismatch, RemoteError) as exc:
            self._close(link)
            self._failed(attempt, boot.machine, exc)
            return None
        except (KeyboardInterrupt, GpuError) as exc:
            self._close(link)
            self._let_go(attempt, boot.machine, exc.code if isinstance(exc, GpuError) else "interrupted")
            raise

    @staticmethod
    def _close(link: Link | None) -> None:
        if link is not None:
            with contextlib.suppress(GpuError, OSError):
                link.close()

    def _after_refusal(self, attempt: Attempt, offer: Offer, problem: GpuError) -> str:
        """Which refusals another offer may cure; the others end this call, and the approval is not burnt."""
        self.last_problem = problem
        if isinstance(problem, NoCapacity | DiskUnspecified):
            self.op.say(f"{offer.provider}: {problem.message}")
            return "refused"
        if isinstance(problem, RateLimited):
            pause_s = shopping.asked_pause_s(problem)
            self.op.say(f"{offer.provider} wants to be asked less often: going on in {format_duration(pause_s)}")
            self.market.tried.discard(offer.offer_id)
            claims.release(self.op, self.plan.provider, attempt.intent)
            self.op.clock.sleep(pause_s)
            return "refused"
        raise self._ended(problem)

    def _failed(self, attempt: Attempt, machine: Machine, problem: GpuError) -> None:
        """It is there and no use: destroyed, confirmed and booked before anything else is tried."""
        op = self.op
        self.last_problem = problem
        outcomes.note(op, self.run, attempt, result="failed", reason=_short(problem))
        if isinstance(problem, ArchUnsupported):
            self.market.useless.add(attempt.gpu or "")
        elif machine.host_key is not None:
            memory.remember_failure(op.project, machine.host_key, _short(problem), clock=op.clock)
        op.say(f"{machine.id} is no use: {problem.message}")
        self._destroy(attempt, machine, f"{problem.code}: {problem.message}", DESTROY_WAIT_S)

    def _destroy(self, attempt: Attempt, machine: Machine, why: str, wait_s: float) -> None:
        status = release.destroy(self.op, machine, why=why, wait_s=wait_s)
        if status != "destroyed":
            raise TeardownIncomplete(machines=machine.id)
        outcomes.note(self.op, self.run, attempt, is_over=True)
        accounting.close(self.op, machine)

    def _let_go(self, attempt: Attempt, machine: Machine, why: str = "interrupted") -> None:
        """Nobody waits for it any more. Asked to go; what is not confirmed stays on record, with its burn."""
        self.op.say(f"{why}: {machine.id} is destroyed")
        try:
            outcomes.note(self.op, self.run, attempt, result="failed", reason=why)
            self._destroy(attempt, machine, why, INTERRUPTED_WAIT_S)
        except GpuError as exc:
            self.op.say(f"{exc.message}; it costs {format_usd(machine.rate_usd_hr)}/h until then: {exc.next_step}")

    def _interrupted_while_asking(self, attempt: Attempt) -> None:
        """The request may have left. One look tells more often than not; else it is unknown, and says so."""
        op, run = self.op, self.run
        problem = Unreachable(host=self.plan.provider, reason="interrupted while the machine was asked for")
        try:
            found = unanswered.find(op, self.plan.provider, attempt.intent)
        except GpuError:
            found = []
        if found:
            self._let_go(attempt, unanswered.settle_on_one(op, run, attempt, found))
            return
        unknown = unanswered.unknown(op, run, attempt, problem)
        op.say(f"{unknown.message}: {unknown.next_step}")

    # what an earlier process began ------------------------------------------------------------------------------------

    def _resume(self) -> Ready | None:
        """Finish every attempt that is not over, in order: found out, waited for, or ended. None: nothing is ready."""
        for attempt in self.run.attempts:
            if attempt.result == "refused" or attempt.is_over:
                continue
            machine = unanswered.found_out(self.op, self.run, attempt)
            if machine is None:
                continue
            ready = self._go_on_with(attempt, machine)
            if ready is not None:
                return ready
        return None

    def _go_on_with(self, attempt: Attempt, machine: Machine) -> Ready | None:
        """A machine that exists: followed when it is ready, waited for when it boots, ended when it had failed."""
        op = self.op
        if machine.status in states.FINAL:
            outcomes.note(op, self.run, attempt, result=attempt.result or "failed", is_over=True)
            accounting.close(op, machine)
            return None
        if attempt.result == "failed" or machine.status in ("terminating", "stopping", "stopped"):
            outcomes.note(op, self.run, attempt, result="failed")
            self._destroy(attempt, machine, attempt.reason or "its set-up did not end", DESTROY_WAIT_S)
            return None
        if machine.status in ("ready", "busy"):
            with contextlib.suppress(NotReady):  # then it is brought up like one that boots
                link, receipt = bringup.follow(op, machine)
                return Ready(link.machine, link, receipt)
        waited_s = max(0.0, (op.clock.now() - parse_timestamp(attempt.began_at)).total_seconds())
        op.say(f"going on with {machine.id}, asked for {format_duration(waited_s)} ago")
        offer = specs.offer_of(attempt, machine)
        spec = specs.spec_of(op, self.plan, offer, attempt)
        machine = machines.update(op.project, machine.id, lambda m: replace(m, status="booting"), clock=op.clock)
        return self._bring_up(attempt, Boot(op, self.plan, machine, spec=spec, waited_s=waited_s))

    # the end ----------------------------------------------------------------------------------------------------------

    def _won(self, ready: Ready) -> Provisioned:
        won = ready.machine.intent

        def is_won(run: Run) -> Run:
            return replace(run, state="won", won=won) if run.state == "open" else run

        run = runs.update(self.op, self.approval_id, is_won)
        return Provisioned(ready.machine, ready.link, ready.receipt, run.attempts)

    def _nothing_left(self) -> GpuError:
        problem = self.last_problem
        if problem is None or isinstance(problem, RateLimited):
            table = in_words(self.market.search.filters) if self.market.search is not None else "nobody was asked"
            if self.market.offers:
                table = (
                    f"{counted(len(self.market.offers), 'offer')} would do, and other launches of yours are taking them"
                )
            classes = ", ".join(candidate.gpu for candidate in self.plan.tried) or "any GPU"
            problem = NoCapacity(
                f"{self.plan.provider} has no offer of {classes} within the plan now: {table}",
                next_step="gpu plan, or set compute.capacity.mode: wait in gpu.yaml",
            )
        return self._ended(problem)

    def _exhausted(self) -> GpuError:
        """As many set-ups failed as the approved worst case has room for."""
        runs.update(self.op, self.approval_id, lambda run: replace(run, state="exhausted"))
        return self._ended(self.last_problem or NoCapacity("every set-up of this plan failed"))

    def _ended(self, problem: GpuError) -> GpuError:
        """The error of this call, with everything that was tried; what was reserved is free again."""
        is_clear = self._is_clear()
        run = self.run
        accounting.settle_run(self.op, run)
        problem.details["attempts"] = [
            {"offer_id": a.offer_id, "gpu": a.gpu, "rate_usd_hr": a.rate_usd_hr, "result": a.result, "reason": a.reason}
            for a in run.attempts
        ]
        problem.may_be_billing = not (  # type: ignore[misc]
            is_clear and all(a.result == "refused" or a.is_over for a in run.attempts)
        )
        return problem

    def _is_clear(self) -> bool:
        """Whether a list shows that no refused create of this run made a machine; what it did make is ended first."""
        if not any(a.result == "refused" for a in self.run.attempts):
            return True
        try:
            self._look_before(None)
        except GpuError as exc:
            self.op.say(f"whether a refused create made a machine is not known ({exc.message}); next: gpu reconcile")
            return False
        return True


def _short(problem: GpuError) -> str:
    """A reason in a few words: of what a machine lacked the kind of it."""
    what = problem.details.get("what")
    return str(what) if isinstance(problem, NotReady) and isinstance(what, str) else problem.code


def restart(op: Operator, machine: Machine, approval: Approval) -> Provisioned:
    """Start a stopped machine again: see restarting.py."""
    from gpu_skills.lifecycle.renting.restarting import restart as start

    ready: Any = start(op, machine, approval)
    return Provisioned(ready.machine, ready.link, ready.receipt)
