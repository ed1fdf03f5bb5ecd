"""Journal, registry and provider are brought to say the same: half-done things are finished or found out.

    run()   one list per provider, then in this order: creates nobody knows the end of, every machine on record, what
            carries our label and is not on record, machines that are gone and not booked, runs that are not settled

An answer that fails or cannot be read concludes nothing. Whatever stays open is in the report with its next command.
Killed anywhere and run again it goes on; run once more it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import (
    AuthRejected,
    GpuError,
    NotReady,
    Refused,
    RemoteError,
    StateBusy,
    UnexpectedReply,
    UsageError,
)
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.approval import changes
from gpu_skills.lifecycle.books import accounting, charged
from gpu_skills.lifecycle.ending import ownership, release, stops, witness
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.recovery import adoption, leftovers, readback, returned
from gpu_skills.lifecycle.renting import keeping, outcomes, unanswered
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import Charge, RentedReader
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.state import budget
from gpu_skills.units import format_usd

# So long a create that was not answered is looked for.
LOOKED_FOR = timedelta(hours=24)


@dataclass(frozen=True)
class Finding:
    """what: a word to branch on. is_uncertain: it may bill, or go on billing, and nothing here can change that now.

    burn_usd_hr: what it costs as far as anybody can tell.
    """

    what: str
    text: str
    provider: str
    machine_id: str | None = None
    instance_id: str | None = None
    next_step: str | None = None
    is_uncertain: bool = False
    burn_usd_hr: Decimal | None = None


@dataclass(frozen=True)
class Account:
    """What one provider showed. problem: why it could not be listed; then nothing was concluded about its machines."""

    provider: str
    ours: int = 0
    foreign: int = 0
    project_ids: dict[str, int] = field(default_factory=dict)
    problem: GpuError | None = None


@dataclass(frozen=True)
class Report:
    accounts: tuple[Account, ...]
    findings: tuple[Finding, ...]
    booked: int = 0

    @property
    def is_clear(self) -> bool:
        """Nothing is uncertain, and every provider was listed."""
        return not any(f.is_uncertain for f in self.findings) and all(a.problem is None for a in self.accounts)


def run(op: Operator, providers: Sequence[str], *, adopt: bool = False, project_id: str | None = None) -> Report:
    """Go through these providers. adopt: take what carries our label and is not on record back into it.

    project_id: the project's lost id, seen in labels; it is taken back first.
    """
    listings: dict[str, Listing | GpuError] = {}
    for provider in providers:
        try:
            listings[provider] = Listing(op.reader(provider))
        except GpuError as exc:
            listings[provider] = exc
    if project_id is not None:
        shown = [s for listing in listings.values() if isinstance(listing, Listing) for s in listing.machines()]
        project = adoption.take_project_id(op.project, project_id, adoption.project_ids(shown))
        op = replace(op, project=project)
    runs.take_moved(op)
    accounts: list[Account] = []
    findings: list[Finding] = []
    booked = 0
    for provider, listing in listings.items():
        if isinstance(listing, GpuError):
            accounts.append(Account(provider, problem=listing))
            findings.append(_unlisted(op, provider, listing))
            continue
        here = _Pass(replace(op, reader=listing.instead_of(op)), provider, listing)
        here.go(adopt=adopt)
        findings += here.findings
        booked += here.booked
        accounts.append(here.account())
    findings += [_damaged(problem) for problem in runs.damaged(op)]
    return Report(tuple(accounts), tuple(findings), booked)


def _damaged(problem: GpuError) -> Finding:
    """A run whose file cannot be read: whose it is, and what it made, is not known."""
    text = f"{problem.message}; what this run rented is not known, and nothing more is rented until it is mended"
    return Finding("run_damaged", text, "any", next_step=problem.next_step, is_uncertain=True)


def _unlisted(op: Operator, provider: str, problem: GpuError) -> Finding:
    alive = [m for m in machines.all_machines(op.project) if m.provider == provider and m.status not in states.FINAL]
    burn = sum((m.rate_usd_hr for m in alive), Decimal(0)) or None
    text = f"{provider} could not be listed ({problem.message}): nothing is concluded about {len(alive)} on record"
    step = (
        problem.next_step if isinstance(problem, UsageError | AuthRejected) else f"gpu reconcile --provider {provider}"
    )
    return Finding("not_listed", text, provider, next_step=step, is_uncertain=True, burn_usd_hr=burn)


class Listing:
    """A reader that lists an account once for the whole pass. Single instances and everything else are asked anew."""

    def __init__(self, reader: RentedReader):
        self._reader = reader
        self._shown = reader.machines()
        self._charges: dict[datetime, list[Charge]] = {}

    def machines(self) -> list[Instance]:
        return list(self._shown)

    def charges(self, since: datetime, until: datetime) -> list[Charge]:
        """Of one beginning asked once: a pass that takes a while sees the charges as they were in it."""
        if since not in self._charges:
            self._charges[since] = self._reader.charges(since, until)
        return self._charges[since]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def instead_of(self, op: Operator) -> Any:
        return lambda name: self if name == self._reader.name else op.reader(name)


class _Pass:
    """One provider, once."""

    def __init__(self, op: Operator, provider: str, listing: Listing):
        self.op, self.provider = op, provider
        self.shown = listing.machines()
        self.findings: list[Finding] = []
        self.booked = 0
        self.held: set[str] = set()  # machines that another process works on, or that were dealt with here
        self.adopts = False

    def go(self, *, adopt: bool) -> None:
        self.adopts = adopt
        if adopt:
            self._take_back()
        for run in [r for r in runs.own_runs(self.op) if r.provider == self.provider and self._is_ours(r)]:
            self._finish_creates(run)
        for machine in self._machines():
            if machine.status in states.FINAL:
                self._reappeared(machine)
        for machine in self._machines():
            if machine.status not in states.FINAL and machine.id not in self.held:
                self._look_at(machine)
        self._name_unrecorded()
        self._name_orphaned()
        self._close_books()
        self._settle_runs()

    def account(self) -> Account:
        ours = sum(1 for seen in self.shown if labels.ours(seen.label, self.op.project.project_id))
        ids = adoption.project_ids(self.shown)
        ids.pop(self.op.project.project_id, None)
        return Account(self.provider, ours, len(self.shown) - ours, ids)

    # creates ----------------------------------------------------------------------------------------------------------

    def _finish_creates(self, run: Run) -> None:
        """What became of each attempt of a run; nothing of a run that some process works on."""
        try:
            with runs.working_on(self.op, run.approval_id):
                run = runs.load(self.op, run.approval_id) or run
                for attempt in run.attempts:
                    self._finish_create(run, attempt)
        except StateBusy:
            ids = {attempt.machine_id for attempt in run.attempts}
            self.held |= ids | {m.id for m in self._machines() if m.intent in {a.intent for a in run.attempts}}
            self._say(
                "worked_on", f"approval {run.approval_id}: another gpu command works on it", next_step="gpu status"
            )

    def _finish_create(self, run: Run, attempt: Attempt) -> None:
        for twin in self._twins(attempt):
            self._end(twin, "a second machine of one create")
        found = self._with_intent(attempt.intent)
        on_record = {m.instance_id: m for m in self._machines() if m.intent == attempt.intent and m.instance_id}
        fresh = [seen for seen in found if seen.instance_id not in on_record]
        intent = intents.read(self.op.project).get(attempt.intent)
        is_open = attempt.result in (None, "unknown") and not attempt.is_over
        is_unrecorded = attempt.result == "done" and not attempt.is_over and not on_record
        if fresh and is_open and not on_record:
            self._late(run, attempt, fresh)
        elif fresh and attempt.result == "done" and not on_record:
            self._missing_record(run, attempt, fresh)
        elif fresh:  # the record has its machine, or the create was said to be refused: these are one too many
            for seen in fresh:
                if not unanswered.is_of(attempt, seen):
                    self._made_elsewhere(run, attempt, seen)
                    continue
                twin = unanswered.destroy_twin(self.op, run, attempt, seen)
                self.held.add(twin.id)
                text, step = (
                    "a second machine of one create: it is destroyed",
                    f"gpu reconcile --provider {self.provider}",
                )
                self._say("twin", text, machine=twin, next_step=step, is_uncertain=True)
        elif is_open and on_record:
            self._catch_up(run, attempt, next(iter(on_record.values())))
        elif (is_open or is_unrecorded) and intent is not None and intent.result == "done" and intent.instance_id:
            outcomes.record_created(self.op, run, attempt, intent.instance_id)
        elif is_open and intent is not None and intent.result == "refused":
            reason, code = intent.reason or "refused", intent.details.get("code")
            outcomes.end_refused(self.op, run, attempt, reason, code)
        elif is_open:
            if intent is None and self._journal_is_lost(run, attempt):
                adoption.remember_create(self.op, run, attempt)
                intent = intents.read(self.op.project).get(attempt.intent)
            self._not_found(run, attempt, was_sent=intent is not None)
        elif attempt.result == "failed" and not attempt.is_over:
            for machine in on_record.values():
                self._end(machine, "it failed, and the command that destroyed it died")

    def _made_elsewhere(self, run: Run, attempt: Attempt, seen: Instance) -> None:
        """Its label has our intent and another deadline: another state directory used the approval. Not ours to end."""
        text = f"instance {seen.instance_id} carries {attempt.intent}, and this directory did not make it"
        self._say(
            "made_elsewhere",
            f"{text}: a copy of the project used approval {run.approval_id} too; it ends at its deadline or there",
            machine_id=attempt.machine_id,
            instance_id=seen.instance_id,
            next_step=f"gpu sentinel --provider {self.provider}",
            is_uncertain=True,
            burn_usd_hr=seen.burn_usd_hr,
        )

    def _twins(self, attempt: Attempt) -> list[Machine]:
        """Second machines of one create that are on record, and that nobody has sent away."""
        first = machines.find(self.op.project, attempt.machine_id)
        if first is None or first.instance_id is None:
            return []
        mine = [m for m in self._machines() if m.intent == attempt.intent and m.instance_id is not None]
        is_going = (*states.FINAL, "terminating")
        return [m for m in mine if m.instance_id != first.instance_id and m.status not in is_going]

    def _late(self, run: Run, attempt: Attempt, found: list[Instance]) -> None:
        """A create whose end nobody knew, and there it is."""
        reason = unanswered.unwanted(self.op, run, attempt, found[0], self._plan(run.plan_sha256))
        machine = unanswered.settle_on_one(self.op, run, attempt, found)
        if reason is None:
            text = f"{machine.id} was made after all and is on record; its plan still holds"
            self._say("adopted", text, machine=machine, next_step="gpu setup")
        else:
            self._end(machine, reason)

    def _missing_record(self, run: Run, attempt: Attempt, found: list[Instance]) -> None:
        """Somebody took the machine's record away; its run still knows it."""
        machine = adoption.note_lost(self.op, run, unanswered.settle_on_one(self.op, run, attempt, found))
        self._say("record_lost", "its record was missing and is there again", machine=machine, next_step="gpu status")

    def _catch_up(self, run: Run, attempt: Attempt, machine: Machine) -> None:
        """Journal and registry know the machine, the run's file does not: a command died between the two."""
        outcomes.record_created(self.op, run, attempt, str(machine.instance_id))

    def _not_found(self, run: Run, attempt: Attempt, *, was_sent: bool) -> None:
        age = self.op.clock.now() - parse_timestamp(attempt.began_at)
        if was_sent and age < LOOKED_FOR:
            if machines.find(self.op.project, attempt.machine_id) is not None:
                machines.set_status(self.op.project, attempt.machine_id, "unknown", clock=self.op.clock)
            text = f"nobody knows whether the create of {attempt.label} made a machine; {self.provider} shows none"
            self._say(
                "create_unknown",
                text + f"; it is looked for until {timestamp(parse_timestamp(attempt.began_at) + LOOKED_FOR)}",
                machine_id=attempt.machine_id,
                next_step=f"gpu reconcile --provider {self.provider}",
                is_uncertain=True,
                burn_usd_hr=Decimal(str(attempt.rate_usd_hr)),
            )
            return
        outcomes.refused(self.op, run, attempt, _NeverSeen() if was_sent else _NeverSent())
        self._say("never_seen" if was_sent else "never_sent", f"the create of {attempt.label} made no machine")

    def _journal_is_lost(self, run: Run, attempt: Attempt) -> bool:
        """The account's journal names the machine and the registry does not: between these two nothing is sent."""
        reserved = budget.open_reservations(self.op.project, self.op.environ).get(run.approval_id)
        is_named = reserved is not None and attempt.machine_id in reserved.machine_ids
        return is_named and machines.find(self.op.project, attempt.machine_id) is None

    def _with_intent(self, intent: str) -> list[Instance]:
        """All that carry it, the oldest first."""
        found = []
        for seen in self.shown:
            if labels.intent_of(seen.label, self.op.project.project_id) == intent:
                found.append(seen)
        now = self.op.clock.now()
        return sorted(found, key=lambda seen: (seen.created_at is None, seen.created_at or now, seen.instance_id))

    # machines on record -----------------------------------------------------------------------------------------------

    def _look_at(self, machine: Machine) -> None:
        try:
            if machine.instance_id is None:
                self._look_for(machine)
                return
            if approval := readback.worked_on(self.op, machine):
                text = f"another gpu command works on approval {approval}"
                self._say("worked_on", text, machine=machine, next_step="gpu status")
                return
            seen = next((s for s in self.shown if s.instance_id == machine.instance_id), None)
            if seen is None:  # lists lag: one that its own id finds is there
                seen = self.op.reader(self.provider).machine(machine.instance_id)
            if seen is None:
                self._absent(machine)
                return
            for note in readback.compare(self.op, machine, seen):
                self._say(
                    note.what, note.text, machine=machine, next_step=note.next_step, is_uncertain=note.is_uncertain
                )
                if note.is_not_ours:
                    return
            self._expire(readback.follow(self.op, machine, seen), seen)
            self._ask_for_jobs(witness.current(self.op, machine), seen)
        except GpuError as exc:  # one machine that cannot be changed keeps no other from being looked at
            self._say("failed", exc.message, machine=machine, next_step=exc.next_step, is_uncertain=True)

    def _reappeared(self, machine: Machine) -> None:
        """What was believed gone and is there has a new record; what was sent away is sent away again."""
        seen = next((s for s in self.shown if s.instance_id == machine.instance_id is not None), None)
        alive = [m for m in self._machines() if m.instance_id == machine.instance_id and m.status not in states.FINAL]
        if seen is None or alive or labels.ours(seen.label, self.op.project.project_id) is None:
            return
        again = readback.reappeared(self.op, machine, seen)
        self._say(
            "reappeared",
            f"{machine.id} was {machine.status} and {seen.instance_id} is there again, as {again.id}",
            machine=again,
            next_step=f"gpu reconcile --provider {self.provider}",
            is_uncertain=True,
        )
        if machine.status == "destroyed":
            self._end(again, f"{machine.id} was destroyed and came back")

    def _look_for(self, machine: Machine) -> None:
        """A record without an instance and without a run that made it."""
        known = {a.intent for run in runs.all_runs(self.op) for a in run.attempts}
        if machine.intent in known:
            return  # its run was looked at, or belongs to another state directory
        found = self._with_intent(machine.intent or "")
        if found:
            machines.update(
                self.op.project, machine.id, lambda m: replace(m, host=found[0].instance_id, status="unknown")
            )
            return
        made = machine.created_at and parse_timestamp(machine.created_at)
        if made and self.op.clock.now() - made < LOOKED_FOR:
            step = f"gpu reconcile --provider {self.provider}"
            text = "nobody knows whether it was made"
            self._say("create_unknown", text, machine=machine, next_step=step, is_uncertain=True)
            return
        machines.set_status(self.op.project, machine.id, "lost", clock=self.op.clock)
        self._say("never_seen", "it was never seen", machine=machine)

    def _absent(self, machine: Machine) -> None:
        status = release.confirm(self.op, machine)
        if status == "destroyed":
            self._say("destroyed", "it is gone", machine=machine)
        elif status == "lost":
            self._say("lost", "it vanished without anybody's order; booked to its last sight", machine=machine)
        elif status not in ("unknown", "terminating"):
            self._say("late", f"it is there again, {status}", machine=machine, next_step="gpu status")
        else:
            text = f"{self.provider} does not show it; it takes several looks over a minute or more to believe that"
            step = f"gpu reconcile --provider {self.provider}"
            self._say("absent", text, machine=machine, next_step=step, is_uncertain=True)

    def _expire(self, machine: Machine, seen: Instance) -> None:
        """What its state asks for, and its deadline."""
        if machine.status == "terminating":
            status = release.confirm(self.op, machine)
            if status not in states.FINAL:
                step = f"gpu reconcile --provider {self.provider}"
                text = "it was told to go and is still there"
                self._say("terminating", text, machine=machine, next_step=step, is_uncertain=True)
            return
        due = readback.due(self.op, machine, seen)
        if due.action == "destroy":
            self._end(machine, due.why)
        elif due.action == "stop":
            machine = stops.stop(self.op, machine, why="deadline_passed", despite_jobs=True)
            self._say("deadline_passed", "its deadline has passed: it was stopped", machine=machine)
        elif due.action == "keep":
            self._keep(machine, due.why)
        elif machine.status in ("unknown", "stopping"):
            is_stoppable = ownership.may_be_stopped(seen)
            step = f"gpu reconcile --provider {self.provider}" if is_stoppable else f"gpu machine destroy {machine.id}"
            text = f"{self.provider} says {seen.said or seen.status}"
            self._say(machine.status, text, machine=machine, next_step=step, is_uncertain=True)
        if machine.status == "stopped":
            self.booked += len(accounting.close(self.op, machine))
        if due.action == "none":
            self._left_standing(machine, seen)

    def _left_standing(self, machine: Machine, seen: Instance) -> None:
        """What bills without being of use: a stopped disk, a job's own machine after its job.

        A job's machine that has stopped with nothing left on it is what a review leaves that nobody was left to end: it
        ends as an interrupted one does. One that was stopped on purpose, or was taken away and may come back, is kept;
        so is one that somebody holds, until the hold is over.
        """
        is_over = self._is_over(machine, seen)
        step = f"gpu machine destroy {machine.id}"
        held_until = keeping.held_until(machine, self.op.clock.now())
        if is_over and held_until is not None and machine.status in ("stopped", "ready", "busy"):
            text = f"{machine.status}, its job is over and collected, and it is held until {timestamp(held_until)}"
            self._say("held", text, machine=machine, next_step=f"gpu machine hold {machine.id} --off, or {step}")
            return
        if machine.status == "stopped":
            if is_over and machine.extra.get("stopped_why") not in ("asked", "outbid", "preempted"):
                self._end(machine, "its job is over and collected, and it has stopped")
                return
            cost = "" if machine.storage_usd_hr is None else f", its disk costs {format_usd(machine.storage_usd_hr)}/h"
            can_start = self._plan(machine.plan) is not None
            step = f"gpu machine start {machine.id}, or {step}" if can_start else changes.give_up(machine)
            self._say("stopped", f"it is stopped{cost}", machine=machine, next_step=step)
        elif is_over and machine.status in ("ready", "busy"):
            text = "its job is over and collected, and it goes on billing"
            self._say("job_over", text, machine=machine, next_step=step)

    def _is_over(self, machine: Machine, seen: Instance) -> bool:
        """Whether it was made for one job, and that has ended with nothing left on it."""
        if machine.machine_class != "job" or machine.has_unknown_past or not self.op.ledger.jobs_on(machine.id):
            return False
        has_more = self.op.running_jobs(machine.id) or self.op.unverified(machine.id)
        return not has_more and not ownership.needs_named_approval(machine, seen)

    def _ask_for_jobs(self, machine: Machine, seen: Instance) -> None:
        """A machine may have jobs that no record names: nothing may be concluded from records that are not whole."""
        if seen.status != "running" or machine.id in self.held or not returned.is_doubtful(self.op, machine):
            return
        try:
            told = returned.ask(self.op, machine, adopt=self.adopts)
        except (RemoteError, NotReady) as exc:
            if machine.has_unknown_past:
                text = f"which jobs it has is not on record, and it cannot be asked: {exc.message}"
                self._say("jobs_unread", text, machine=machine, next_step=exc.next_step, is_uncertain=True)
            return
        if told.taken:
            text = f"jobs read back from it: {', '.join(told.taken[:20])}"
            self._say("jobs_read_back", text, machine=told.machine, next_step=f"gpu job status {told.taken[-1]}")
        if told.unknown:
            step = f"gpu reconcile --provider {self.provider} --adopt"
            text = f"it has jobs that no record names: {', '.join(told.unknown[:20])}"
            if self.adopts:
                step = f"gpu machine destroy {machine.id} --abandon-outputs {machine.id}"
                text += "; other jobs have these numbers here, so they stay there until they are given up"
            self._say("jobs_unrecorded", text, machine=told.machine, next_step=step, is_uncertain=True)

    def _keep(self, machine: Machine, why: str) -> None:
        jobs = list(dict.fromkeys([*self.op.running_jobs(machine.id), *self.op.unverified(machine.id)]))
        step = f"gpu job pull {jobs[0]}" if jobs else f"gpu machine destroy {machine.id}"
        facts = {"uncollected": ", ".join(jobs[:20]), "burn_usd_hr": machine.burn_usd_hr, "steps": step}
        if machine.status == "stopped":
            self.op.notify("idle_stop", machine.id, **facts)
        else:  # protected, and a stop would take its disk
            self.op.notify("recovery", machine.id, what=why, **facts)
        what = f"outputs that are nowhere else ({', '.join(jobs[:5])})" if jobs else "whatever its jobs left"
        text = f"{machine.status}, past its deadline, with {what}: {why}"
        self._say("kept", text, machine=machine, next_step=step)

    def _end(self, machine: Machine, why: str) -> None:
        self.held.add(machine.id)
        state = release.destroy(self.op, machine, why=why, wait_s=0)
        step = None if state == "destroyed" else f"gpu reconcile --provider {self.provider}"
        self._say("ended", f"{why}: destroyed", machine=machine, next_step=step, is_uncertain=step is not None)

    # what is not on record --------------------------------------------------------------------------------------------

    def _take_back(self) -> None:
        for one in adoption.unrecorded(self.op, self.provider, self.shown):
            if one.elsewhere is None:
                machine = adoption.take(self.op, one)
                self._say("adopted", "taken back from its label", machine=machine, next_step="gpu status")
        for run in adoption.orphaned(self.op):
            if run.provider == self.provider:
                adoption.take_run(self.op, run)

    def _name_unrecorded(self) -> None:
        for one in adoption.unrecorded(self.op, self.provider, self.shown):
            burn, id = one.seen.burn_usd_hr, one.seen.instance_id
            if one.elsewhere is not None:
                place = one.elsewhere.rpartition(":")[0]
                text = f"{id} is ours and on record in {place}"
                self._say("elsewhere", text, instance_id=id, burn_usd_hr=burn)
            else:
                self._say(
                    "unrecorded",
                    f"{id} carries our label and is not on record",
                    instance_id=id,
                    next_step=f"gpu reconcile --provider {self.provider} --adopt",
                    is_uncertain=True,
                    burn_usd_hr=burn,
                )

    def _name_orphaned(self) -> None:
        """Money that a state directory reserved which is not there any more, and nothing here tells what came of it."""
        for run in adoption.orphaned(self.op):
            is_shown = any(self._with_intent(attempt.intent) for attempt in run.attempts)  # named by its machine
            if run.provider == self.provider and not is_shown:
                text = f"approval {run.approval_id} was used in {run.owner.rpartition(':')[0]}, which is gone"
                self._say(
                    "owner_gone",
                    f"{text}; what it reserved stays reserved until it is adopted",
                    next_step=f"gpu reconcile --provider {self.provider} --adopt",
                    is_uncertain=True,
                )

    # the books --------------------------------------------------------------------------------------------------------

    def _close_books(self) -> None:
        """Of machines that are gone: their time, and later what the provider says it was."""
        due = []
        for machine in self._machines():
            if machine.id in self.held or machine.status not in states.FINAL or machine.instance_id is None:
                continue
            before = len(accounting.lines_of(self.op, machine.id))
            release.finish_books(self.op, machine)
            accounting.close(self.op, machine)
            self.booked += len(accounting.lines_of(self.op, machine.id)) - before
            if not charged.is_corrected(self.op, machine):  # also what a pass that died has booked
                accounting.settle_anew(self.op, machine)
            if charged.is_due(self.op, machine):
                due.append(machine)
        if due:
            self._correct(due)

    def _correct(self, due: list[Machine]) -> None:
        since = min(charged.began(self.op, machine) for machine in due)
        try:
            charges = charged.charges_between(self.op, self.provider, since, self.op.clock.now())
        except GpuError as exc:  # a key may not be allowed to read them: the books stay estimates
            self._say("charges_unread", f"the charges of {self.provider} cannot be read: {exc.message}")
            return
        for machine in due:
            try:
                written = charged.correct(self.op, machine, charges)
            except UnexpectedReply as exc:
                self._say("charges_doubtful", f"{exc.message}; not booked, and asked again", machine=machine)
                continue
            for line in written:
                self.booked += 1
                self._say("corrected", f"{line['kind']} {line['cost_usd']:+.6f} USD: {line['note']}", machine=machine)

    def _settle_runs(self) -> None:
        reserved = budget.open_reservations(self.op.project, self.op.environ)
        for run in runs.own_runs(self.op):
            # One that was settled and has money reserved was to go on, and the command that wanted it died.
            is_over = run.is_settled and run.approval_id not in reserved
            if run.provider != self.provider or is_over or not self._is_ours(run):
                continue
            try:
                with runs.working_on(self.op, run.approval_id):
                    if accounting.settle_run(self.op, run):
                        self._say("settled", f"the reservation of approval {run.approval_id} is free again")
            except StateBusy:
                continue
        for name in leftovers.free_unbound(self.op, self.provider):
            self._say("settled", f"what was reserved for {name} came to nothing: it is free again")

    # helpers ----------------------------------------------------------------------------------------------------------

    def _machines(self) -> list[Machine]:
        return [m for m in machines.all_machines(self.op.project) if m.provider == self.provider and m.is_rented]

    def _is_ours(self, run: Run) -> bool:
        return run.project_id == self.op.project.project_id

    def _plan(self, sha256: str | None) -> Any:
        return plans.find(self.op.project, sha256)

    def _say(
        self, what: str, text: str, *, machine: Machine | None = None, machine_id: str | None = None, **more: Any
    ) -> None:
        if machine is not None:
            machine_id = machine.id
            more.setdefault("instance_id", machine.instance_id)
            stopped = machine.status == "stopped"
            if machine.status not in states.FINAL:
                more.setdefault("burn_usd_hr", machine.storage_usd_hr if stopped else machine.rate_usd_hr)
        self.findings.append(Finding(what, text, self.provider, machine_id, **more))


class _NeverSent(Refused):
    code = "never_sent"
    template = "it was written down and never sent"


class _NeverSeen(Refused):
    code = "never_seen"
    template = "it was not answered, and no machine of it was seen for 24 h"
