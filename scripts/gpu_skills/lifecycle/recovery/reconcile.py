"""Journal, registry and provider are brought to say the same: half-done things are finished or found out.

    run()   one list per provider, then in this order: creates nobody knows the end of, every machine on record, what
            carries our label and is not on record, machines that are gone and not booked, runs that are not settled

An answer that fails or cannot be read concludes nothing. Whatever stays open is in the report with its next command.
Killed anywhere and run again it goes on; run once more it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

from gpu_skills.errors import AuthRejected, GpuError, StateError, UsageError
from gpu_skills.lifecycle import machines, runs, states
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.recovery import adoption, creates, settling, standing
from gpu_skills.lifecycle.recovery.findings import Account, Finding, Listing, Pass, Report


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
        here = Pass(replace(op, reader=listing.instead_of(op)), provider, listing)
        try:
            _go(here, adopt=adopt)
        except StateError as exc:
            here.say(
                "record_damaged",
                f"{exc.message}; {provider} is not gone through to its end",
                next_step=exc.next_step,
                is_uncertain=True,
            )
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


def _go(here: Pass, *, adopt: bool) -> None:
    """One provider, in the order in which each step can rely on the one before."""
    here.adopts = adopt
    if adopt:
        _take_back(here)
    for run in [r for r in runs.own_runs(here.op) if r.provider == here.provider and here.is_ours(r)]:
        creates.finish(here, run)
    for machine in here.machines():
        if machine.status in states.FINAL:
            standing.reappeared(here, machine)
    for machine in here.machines():
        if machine.status not in states.FINAL and machine.id not in here.held:
            standing.look_at(here, machine)
    _name_unrecorded(here)
    _name_orphaned(here)
    settling.close_books(here)
    settling.settle_runs(here)


def _take_back(here: Pass) -> None:
    for one in adoption.unrecorded(here.op, here.provider, here.shown):
        if one.elsewhere is None:
            machine = adoption.take(here.op, one)
            here.say("adopted", "taken back from its label", machine=machine, next_step="gpu status")
    for run in adoption.orphaned(here.op):
        if run.provider == here.provider:
            adoption.take_run(here.op, run)


def _name_unrecorded(here: Pass) -> None:
    for one in adoption.unrecorded(here.op, here.provider, here.shown):
        burn, id = one.seen.burn_usd_hr, one.seen.instance_id
        if one.elsewhere is not None:
            place = one.elsewhere.rpartition(":")[0]
            text = f"{id} is ours and on record in {place}"
            here.say("elsewhere", text, instance_id=id, burn_usd_hr=burn)
        else:
            here.say(
                "unrecorded",
                f"{id} carries our label and is not on record",
                instance_id=id,
                next_step=f"gpu reconcile --provider {here.provider} --adopt",
                is_uncertain=True,
                burn_usd_hr=burn,
            )


def _name_orphaned(here: Pass) -> None:
    """Money that a state directory reserved which is not there any more, and nothing here tells what came of it."""
    for run in adoption.orphaned(here.op):
        is_shown = any(here.with_intent(attempt.intent) for attempt in run.attempts)  # named by its machine
        if run.provider == here.provider and not is_shown:
            text = f"approval {run.approval_id} was used in {run.owner.rpartition(':')[0]}, which is gone"
            here.say(
                "owner_gone",
                f"{text}; what it reserved stays reserved until it is adopted",
                next_step=f"gpu reconcile --provider {here.provider} --adopt",
                is_uncertain=True,
            )
