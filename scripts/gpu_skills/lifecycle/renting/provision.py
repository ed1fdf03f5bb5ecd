"""From one approval to one machine that is ready, whatever happens on the way; and a stopped one back to work.

    provision()   verify, reserve, bind the run, then attempt after attempt until one is ready or none is left
    restart()     a stopped machine starts again, on its own host or not at all
    adopt()       a machine that was found by its label becomes the record's (see creation.py)

One process works on a run at a time. What it was doing is in the run's file, the record and the journal before each
step, so that the same call again, or `gpu reconcile`, goes on from there: it follows, adopts or destroys, and never
sends the same create twice.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import parse_timestamp, timestamp
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
    StateError,
    TeardownIncomplete,
    Unreachable,
)
from gpu_skills.lifecycle import intents, machines, memory, runs, states, unrecorded
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.approval.approvals import Approval, ask_of_plan
from gpu_skills.lifecycle.books import accounting
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.guard import receipts
from gpu_skills.lifecycle.guard.fuse import Receipt
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import market, worst_case
from gpu_skills.lifecycle.plans import offers as ranking
from gpu_skills.lifecycle.plans.offers import Use
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import bringup, claims, creation, outcomes, specs, unanswered
from gpu_skills.lifecycle.renting.bringup import Boot, Ready
from gpu_skills.lifecycle.renting.unanswered import adopt
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.providers.base import Offer, Requirements, Search
from gpu_skills.providers.selection import in_words
from gpu_skills.state import budget
from gpu_skills.state import policy as policies
from gpu_skills.units import counted, format_duration, format_usd, json_number

__all__ = ["Provisioned", "adopt", "provision", "restart"]

# Creates that one look at the market may come to, all of them refused: more is a sign of something else.
MAX_REFUSED = 12
# Offers older than this are asked for again before one of them is taken.
FRESH_S = 30.0
MAX_LIST_WAITS = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 120.0
SEARCH_ATTEMPTS = 8
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
        with unrecorded.told(op.project, "create", lambda: _may_be_there(op, approval.id)):
            run = _bound(op, name, plan, approval, run, job_id)
            if run.state == "won":
                return _follow(op, run)
            if max_lease_s is not None:
                plan = replace(plan, deadline_s=min(plan.deadline_s, max_lease_s))
            return _Launch(op, plan, run, job_id).go()


def _may_be_there(op: Operator, approval_id: str) -> list[str]:
    """The machines that this run asked for and that are not known to be gone."""
    run = runs.load(op, approval_id)
    return [a.machine_id for a in run.attempts if a.result != "refused" and not a.is_over] if run is not None else []


def _bound(op: Operator, name: str, plan: Plan, approval: Approval, run: Run | None, job_id: str | None) -> Run:
    """The run of this approval with its money reserved. What refuses here leaves the approval unused."""
    if run is not None and run.state not in ("open", "won"):
        raise ApprovalUsed(reason=f"approval {run.approval_id} was used: its run is {run.state}")
    if run is not None and (run.state == "won" or not run.is_settled):
        return run
    runs.require_readable(op)
    receipts.require_recent(op, plan.provider, specs.fuse_action(op, plan))
    account = op.account(plan.provider)
    budget.reserve(
        op.project,
        op.ledger,
        op.clock,
        op.policy(),
        intent=approval.id,
        account=account,
        provider=plan.provider,
        cost_usd=plan.worst_case_usd,
        rate_usd_hr=plan.max_rate_usd_hr,
        deadline_h=plan.deadline_h,
        job_id=job_id,
        resumes=(plan.resume_from or {}).get("job"),
        environ=op.environ,
    )
    if run is not None:
        return runs.update(op, approval.id, lambda run: replace(run, is_settled=False))
    # From here on the approval is used. Whoever dies before it leaves money reserved and nothing bound: the same call
    # reserves it again, and reconcile frees what has no run.
    run = runs.create(
        op,
        Run(
            approval_id=approval.id,
            plan_sha256=name,
            project_id=op.project.project_id,
            provider=plan.provider,
            account=budget.account_directory(plan.provider, account, op.environ).name,
            owner=runs.owner_of(op),
            reserved_usd=json_number(plan.worst_case_usd),
            approval_expires_at=timestamp(approval.expires_at),
            began_at=timestamp(op.clock.now()),
        ),
    )
    approvals.note_used(op, approval)
    return run


def _follow(op: Operator, run: Run) -> Provisioned:
    """The machine that this run has won. Nothing is rented or started."""
    attempt = next((a for a in run.attempts if a.intent == run.won), None)
    machine = machines.find(op.project, attempt.machine_id) if attempt is not None else None
    if machine is None:
        raise StateError(file="machines.json", at="", problem=f"found no machine of approval {run.approval_id}")
    if machine.status in states.FINAL or machine.status == "terminating":
        raise ApprovalUsed(
            reason=f"approval {run.approval_id} was used: its machine {machine.id} is {machine.status}",
            machine=machine.id,
        )
    if machine.status in ("stopped", "stopping"):
        raise ApprovalUsed(
            reason=f"approval {run.approval_id} was used: its machine {machine.id} is {machine.status}",
            next_step=f"gpu machine start {machine.id}",
            machine=machine.id,
        )
    link, receipt = bringup.follow(op, machine)
    return Provisioned(link.machine, link, receipt, run.attempts)


class _Launch:
    """One run, while this process works on it."""

    def __init__(self, op: Operator, plan: Plan, run: Run, job_id: str | None):
        self.op = op
        self.plan = plan
        self.job_id = job_id
        self.approval_id = run.approval_id
        self.last_problem: GpuError | None = None
        self.search: Search | None = None
        self._offers: list[Offer] = []
        self._searched_s: float | None = None
        self._tried: set[str] = set()
        self._useless: set[str] = set()  # GPU classes that the image has no code for

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
                if not self._may_wait(pause_s):
                    break
                self.op.say(f"nothing free; look {number + 1} of {looks} in {format_duration(pause_s)}")
                self.op.clock.sleep(pause_s)
                self._tried.clear()
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
        self.plan = replace(self.plan, deadline_s=self._deadline_s(cost_usd))
        try:
            runs.require_readable(self.op)
            receipts.require_recent(self.op, self.plan.provider, specs.fuse_action(self.op, self.plan))
            self._require_within_ceilings(cost_usd)
        except GpuError as exc:
            self._ended(exc)
            raise

    def _deadline_s(self, cost_usd: Decimal) -> float:
        """What was approved bounds all machines of the run together: the next one has what earlier ones left."""
        left_s, useful_s = worst_case.left_s(self.plan, cost_usd), worst_case.useful_s(self.plan)
        if left_s >= useful_s:
            return left_s
        runs.update(self.op, self.approval_id, lambda run: replace(run, state="exhausted"))
        raise self._ended(
            ApprovalUsed(
                reason=f"of the {format_usd(self.plan.worst_case_usd)} of approval {self.approval_id} earlier set-ups "
                f"took {format_usd(cost_usd)}: the rest pays {format_duration(left_s)}, "
                f"{format_duration(useful_s)} are needed",
                next_step="gpu plan --freeze",
            )
        )

    def _require_within_ceilings(self, cost_usd: Decimal) -> None:
        """The policy as it is now, asked for what this run may still cost."""
        op, plan = self.op, self.plan
        books = budget.books(
            op.project,
            op.ledger,
            op.clock,
            op.environ,
            job_id=self.job_id,
            resumes=(plan.resume_from or {}).get("job"),
            without_intent=self.approval_id,
        )
        spent = books.spent  # for day and month the books of earlier set-ups count already
        policies.require(
            op.policy(),
            cost_usd=max(Decimal(0), plan.worst_case_usd - cost_usd),
            rate_usd_hr=plan.max_rate_usd_hr,
            deadline_h=plan.deadline_h,
            provider=plan.provider,
            spent=replace(spent, job_usd=spent.job_usd + cost_usd, session_usd=spent.session_usd + cost_usd),
            reserved_usd=books.reserved_usd,
        )

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
                self.op.clock.sleep(_asked_pause_s(exc))
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
            pause_s = _asked_pause_s(problem)
            self.op.say(f"{offer.provider} wants to be asked less often: going on in {format_duration(pause_s)}")
            self._tried.discard(offer.offer_id)
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
            self._useless.add(attempt.gpu or "")
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

    # the market -------------------------------------------------------------------------------------------------------

    def _next_offer(self) -> Offer | None:
        """The best offer not tried yet, class by class in the plan's order; asked for again when it is not fresh."""
        now_s = self.op.clock.monotonic()
        if self._searched_s is None or now_s - self._searched_s > FRESH_S:
            self._offers = self._look()
            self._searched_s = now_s
        held = claims.current(self.op, self.plan.provider)
        for candidate in self.plan.tried:
            of_class = [o for o in self._offers if market.is_of(candidate.gpu, o) and o.gpu not in self._useless]
            for offer in claims.apart(of_class, held):
                if offer.offer_id not in self._tried:
                    self._tried.add(offer.offer_id)
                    return offer
        return None

    def _look(self) -> list[Offer]:
        """What fits the plan now, cheapest in total first, without machines on cooldown."""
        search = self._search(market.need_of(self.plan))
        use = Use(hours=(self.plan.expected_s or self.plan.deadline_s) / 3600)
        known = memory.load(self.op.project)
        ranked = ranking.rank({self.plan.provider: search}, use, known, now=self.op.clock.now())
        self.search = replace(search, filters=ranked.filters[self.plan.provider])
        return [estimate.offer for estimate in ranked.estimates]

    def _search(self, need: Requirements) -> Search:
        """Searches are few a minute for everybody on this computer: waited for, as long as the approval holds."""
        for attempt in range(1, SEARCH_ATTEMPTS + 1):
            try:
                return self.op.reader(self.plan.provider).search(need)
            except RateLimited as exc:
                pause_s = _asked_pause_s(exc)
                if attempt == SEARCH_ATTEMPTS or not self._may_wait(pause_s):
                    raise self._ended(exc) from exc
                self.op.say(f"{self.plan.provider} may be asked for offers again in {format_duration(pause_s)}")
                self.op.clock.sleep(pause_s)
            except ProviderError as exc:
                raise self._ended(exc) from exc
        raise AssertionError("the last attempt raises or returns")

    def _may_wait(self, pause_s: float) -> bool:
        """A wait is within the approval, or it is none."""
        ends = self.op.clock.now() + timedelta(seconds=pause_s)
        return ends < parse_timestamp(self.run.approval_expires_at)

    # what an earlier process began ------------------------------------------------------------------------------------

    def _resume(self) -> Ready | None:
        """Finish every attempt that is not over, in order: found out, waited for, or ended. None: nothing is ready."""
        for attempt in self.run.attempts:
            if attempt.result == "refused" or attempt.is_over:
                continue
            machine = self._found_out(attempt)
            if machine is None:
                continue
            ready = self._go_on_with(attempt, machine)
            if ready is not None:
                return ready
        return None

    def _found_out(self, attempt: Attempt) -> Machine | None:
        """The machine of an attempt, None when it is clear that there is none. Raises when nobody knows."""
        op, run = self.op, self.run
        intent = intents.read(op.project).get(attempt.intent)
        machine = machines.find(op.project, attempt.machine_id)
        if intent is None:
            outcomes.refused(op, run, attempt, NoCapacity("it was written down and never sent"))
            return None
        if intent.result == "refused":
            outcomes.end_refused(op, run, attempt, intent.reason or "refused", intent.details.get("code"))
            return None
        if machine is not None and machine.instance_id is not None:
            return machine
        if intent.result == "done" and intent.instance_id is not None:
            return outcomes.record_created(op, run, attempt, intent.instance_id)
        found = unanswered.find(op, run.provider, attempt.intent)
        if found:
            return unanswered.settle_on_one(op, run, attempt, found)
        raise unanswered.unknown(op, run, attempt, Unreachable(host=run.provider, reason="no list shows it so far"))

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
        offer = _offer_of(attempt, machine)
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
            table = in_words(self.search.filters) if self.search is not None else "nobody was asked"
            if self._offers:
                table = f"{counted(len(self._offers), 'offer')} would do, and other launches of yours are taking them"
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


def _asked_pause_s(problem: RateLimited) -> float:
    """As long as the provider, or our own pace, asks for, within reason; a little uneven, so that many do not march."""
    asked = problem.details.get("retry_after_s")
    wanted_s = min(float(asked), LONGEST_PAUSE_S) if isinstance(asked, int | float) else FIRST_PAUSE_S
    return wanted_s + 4 * random.random()


def _short(problem: GpuError) -> str:
    """A reason in a few words: of what a machine lacked the kind of it."""
    what = problem.details.get("what")
    return str(what) if isinstance(problem, NotReady) and isinstance(what, str) else problem.code


def _offer_of(attempt: Attempt, machine: Machine) -> Offer:
    """What was taken, as far as the record still has it: enough to compare what came with what was asked for."""
    return Offer(
        provider=machine.provider,
        offer_id=attempt.offer_id,
        rate_usd_hr=machine.rate_usd_hr,
        gpu=attempt.gpu,
        gpu_count=machine.gpu_count,
        vram_gb=machine.vram_gb,
        storage_usd_hr=machine.storage_usd_hr or machine.rate_usd_hr * 0,
    )


def restart(op: Operator, machine: Machine, approval: Approval) -> Provisioned:
    """Start a stopped machine again: see restarting.py."""
    from gpu_skills.lifecycle.renting.restarting import restart as start

    ready: Any = start(op, machine, approval)
    return Provisioned(ready.machine, ready.link, ready.receipt)
