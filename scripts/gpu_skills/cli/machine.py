"""`gpu machine …`: machines by id. What is rented can be looked at, stopped, started, extended, guarded, destroyed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli import machine_shown
from gpu_skills.cli.base import LazyGroup, command
from gpu_skills.cli.context import Context
from gpu_skills.cli.durations import DURATION, POSITIVE_DURATION
from gpu_skills.cli.output import Output, say
from gpu_skills.cli.project import ABANDON
from gpu_skills.errors import (
    ApprovalNeeded,
    DestroyNotTaken,
    GpuError,
    Protected,
    Refused,
    TeardownIncomplete,
    UsageError,
)
from gpu_skills.units import format_usd, json_number, usd

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_skills.lifecycle.approval.actions import ActionPlan
    from gpu_skills.lifecycle.approval.approvals import Approval, Ask
    from gpu_skills.lifecycle.machines import Machine

_C = "gpu_skills.cli.machine:"
machine = LazyGroup(
    "machine",
    help="Machines by id.",
    lazy={
        "ls": (_C + "ls", "List the project's machines; reads only."),
        "show": (_C + "show", "One machine, as it is on record and as its provider shows it; reads only."),
        "stop": (_C + "stop", "Stop a rented machine; its storage bills on."),
        "start": (_C + "start", "Start a stopped machine; bills, and needs an approval."),
        "hold": (_C + "hold", "Keep a machine for review; its deadline still ends it."),
        "extend": (_C + "extend", "Move a machine's deadline; bills, and needs an approval."),
        "protect": (_C + "protect", "From now on ending it takes an approval that names it."),
        "destroy": (_C + "destroy", "Destroy a rented machine; refused while something would be lost."),
    },
)
_MACHINE = click.argument("machine_id", metavar="MACHINE")
_YES = click.option("--yes", is_flag=True, help="The person's explicit instruction, given beforehand; asks nothing.")


# looking ------------------------------------------------------------------------------------------------------------


@command("ls", reads_only=True, example="gpu machine ls --json")
def ls(context: Context) -> Output:
    """List the project's machines as last seen, with what they burn now. Reads only."""
    from gpu_skills.lifecycle import machines

    found = [machine_shown.document_of(m) for m in machines.all_machines(context.project)]
    burn = json_number(sum((usd(m["burn_usd_hr"]) for m in found), usd(0)))
    text = f"{machine_shown.machine_table(found)}\nburn: {format_usd(burn)}/h" if found else "no machine yet: gpu setup"
    return Output({"machines": found, "burn_usd_hr": burn}, text)


@command("show", reads_only=True, example="gpu machine show m_4f6c2a --json", exits="0 done · 2 no such machine")
@_MACHINE
def show(context: Context, machine_id: str) -> Output:
    """One machine on record, beside what its provider shows now and what is under way with it. Reads only."""
    from gpu_skills.lifecycle import intents

    one = _on_record(context, machine_id)
    document: dict[str, Any] = {
        "machine": machine_shown.document_of(one),
        "seen": None,
        "not_seen_because": None,
        "leaving": None,
    }
    document["fuse"] = _fuse(one)
    if one.is_rented:
        document["seen"], document["not_seen_because"] = _as_shown(context, one)
        document["leaving"] = _leaving(context, one)
    begun = [i for i in intents.read(context.project).values() if i.machine_id == one.id and i.is_open]
    document["open_intents"] = [{"id": i.id, "action": i.action, "began_at": i.ts, "reason": i.reason} for i in begun]
    return Output(document, machine_shown.shown_text(document))


def _as_shown(context: Context, one: Machine) -> tuple[dict[str, Any] | None, str | None]:
    from gpu_skills.clock import timestamp
    from gpu_skills.lifecycle import labels
    from gpu_skills.lifecycle.ending import witness

    try:
        seen = witness.look(context.operator, one)
    except GpuError as exc:
        return None, exc.message
    if seen is None:
        return None, f"{one.provider} does not show it"
    label = labels.ours(seen.label, context.project.project_id)
    deadline = None if label is None or label.deadline_at is None else timestamp(label.deadline_at)
    burn = None if seen.burn_usd_hr is None else json_number(seen.burn_usd_hr)
    return {
        "status": seen.status,
        "said": seen.said,
        "label": seen.label,
        "is_ours": label is not None and label.intent == one.intent,
        "is_locked": seen.is_locked,
        "deadline_at": deadline,
        "burn_usd_hr": burn,
        "conditions": list(seen.conditions),
        "dead_end": seen.dead_end,
    }, None


def _fuse(one: Machine) -> dict[str, Any] | None:
    """The receipt of the machine's fuse, as it was taken when work on it began or its deadline moved; None: there is
    none on record. That is a file for hands: what is no receipt of this machine is none."""
    from gpu_skills.lifecycle.guard import fuse

    found = one.extra.get(fuse.ON_RECORD)
    receipt = fuse.receipt_on_record(found) if isinstance(found, dict) else None
    return receipt.to_record() if receipt is not None and receipt.intent == one.intent else None


def _leaving(context: Context, one: Machine) -> dict[str, Any] | None:
    """How far the destruction of a machine is; None when nobody asked for it."""
    from gpu_skills.clock import timestamp
    from gpu_skills.lifecycle.ending import witness

    evidence = witness.evidence_of(context.operator, one)
    if evidence.begun_at is None:
        return None
    return {
        "began_at": timestamp(evidence.begun_at),
        "why": evidence.why,
        "taken_at": None if evidence.taken_at is None else timestamp(evidence.taken_at),
        "refused": evidence.refused,
        "absences": len(evidence.absences),
    }


# stopping and starting ----------------------------------------------------------------------------------------------


@command(
    "stop",
    example="gpu machine stop m_4f6c2a",
    exits="0 stopped · 2 no such machine · 3 a job runs, outputs would be lost, or it is protected · "
    "5 the provider refused · 6 it does not show as stopped",
)
@_MACHINE
@click.option("--wait", "wait_s", type=DURATION, default="5m", show_default=True, help="Longest look for the end.")
def stop(context: Context, machine_id: str, wait_s: float) -> Output:
    """Stop a rented machine and see it stopped. Its storage bills on until it is destroyed.

    A protected machine takes an approval that names it.
    """
    from gpu_skills.jobs import release
    from gpu_skills.lifecycle.books import accounting

    one = _rented(context, machine_id)
    stopped = release.stop(context.operator, one, wait_s=wait_s, agree=by_name(context), tell=looks(context))
    accounting.close(context.operator, stopped)
    document = machine_shown.document_of(stopped)
    burn = f"its storage costs {format_usd(document['burn_usd_hr'])}/h"
    return Output({"machine": document}, f"{one.id} is stopped; {burn} until it is destroyed")


@command(
    "start",
    example="gpu machine start m_4f6c2a --for 2h",
    exits="0 ready · 1 failed · 2 no such machine · 3 over a ceiling · 4 a person has to agree · "
    "5 its host is full, or the provider failed · 6 nobody knows whether it started",
)
@_MACHINE
@click.option("--for", "lasts_s", type=POSITIVE_DURATION, help="Its deadline from now; without it that of gpu.yaml.")
@_YES
def start(context: Context, machine_id: str, lasts_s: float | None, yes: bool) -> Output:
    """Start a stopped machine with its disk, under a new deadline. Bills: it is priced, and needs an approval."""
    from gpu_skills.cli.approve import agree
    from gpu_skills.lifecycle.renting import keeping, provision

    one = _rented(context, machine_id)
    op = context.operator
    lifecycle, budget = context.config.lifecycle, context.config.budget
    asked_s = lifecycle.max_lifetime_s if lasts_s is None else lasts_s
    plan = keeping.start_plan(op, one, lasts_s=asked_s, session_usd=budget.session_usd)
    ready = provision.restart(op, one, agree(context, plan.ask(), yes=yes))
    ready.link.close()
    document = machine_shown.document_of(ready.machine)
    return Output({"machine": document}, f"{one.id} is ready until {document['deadline_at']}")


@command(
    "extend",
    example="gpu machine extend m_4f6c2a --by 2h",
    exits="0 extended · 1 the machine did not take it over · 2 no such machine · "
    "3 over a ceiling, or it does not run · 4 a person has to agree · 5 the provider failed",
)
@_MACHINE
@click.option("--by", "more_s", type=POSITIVE_DURATION, help="How much later its deadline is to be.")
@_YES
def extend(context: Context, machine_id: str, more_s: float | None, yes: bool) -> Output:
    """Move the deadline of a running machine: in its label, in its fuse, in its session. Needs an approval."""
    from gpu_skills.cli.approve import agree
    from gpu_skills.lifecycle.renting import keeping

    if more_s is None:
        raise UsageError("say by how much: --by 2h", next_step="gpu machine extend --help")
    one = _rented(context, machine_id)
    op = context.operator
    plan = keeping.extension_plan(op, one, more_s)
    warning = _label_stays(context, plan)
    if warning:
        say(warning)
    extended = keeping.extend(op, plan, agree(context, plan.ask(), yes=yes))
    document = {"machine": machine_shown.document_of(extended.machine), "deadlines": extended.deadlines}
    text = f"{one.id} ends {document['machine']['deadline_at']}"
    if extended.deadlines:
        import json

        text += f"\nfor a sentinel elsewhere, as a file for --deadlines:\n{json.dumps(extended.deadlines)}"
    return Output(document, text)


def _label_stays(context: Context, plan: ActionPlan) -> str | None:
    if context.operator.reader(plan.provider).traits.relabel_is_safe:
        return None
    return (
        f"{plan.provider} may reset a machine whose name is changed while it runs, so its name keeps the old deadline: "
        "a sentinel without the records of this project ends it then, unless it is told with --deadlines"
    )


# keeping ------------------------------------------------------------------------------------------------------------


@command("hold", example="gpu machine hold m_4f6c2a --for 1h", exits="0 held · 2 no such machine · 3 it does not run")
@_MACHINE
@click.option("--for", "lasts_s", type=POSITIVE_DURATION, help="For how long; its deadline still ends it.")
@click.option("--off", is_flag=True, help="End the hold.")
def hold(context: Context, machine_id: str, lasts_s: float | None, off: bool) -> Output:
    """Keep a machine for review: neither idleness nor the end of its job ends it. It bills meanwhile."""
    from datetime import timedelta

    from gpu_skills.lifecycle.renting import keeping

    if (lasts_s is None) is not off:
        raise UsageError("say for how long (--for 1h), or end it (--off)", next_step="gpu machine hold --help")
    one = _rented(context, machine_id)
    op = context.operator
    if lasts_s is None:
        document = machine_shown.document_of(keeping.let_go(op, one))
        return Output({"machine": document}, f"{one.id} is not held any more")
    document = machine_shown.document_of(keeping.hold(op, one, op.clock.now() + timedelta(seconds=lasts_s)))
    burn = format_usd(document["burn_usd_hr"])
    return Output({"machine": document}, f"{one.id} is held until {document['held_until']}, at {burn}/h")


@command(
    "protect",
    example="gpu machine protect m_4f6c2a",
    exits="0 done · 2 no such machine · 3 refused · 4 a person has to agree to --off",
)
@_MACHINE
@click.option("--off", is_flag=True, help="Take the protection away; a person has to agree, --yes there is none.")
def protect(context: Context, machine_id: str, off: bool) -> Output:
    """From now on neither stop nor destroy ends it without an approval that names it. Its fuse still does."""
    from gpu_skills.cli.approve import agree
    from gpu_skills.lifecycle.renting import keeping

    one = _rented(context, machine_id)
    op = context.operator
    if not off:
        return Output({"machine": machine_shown.document_of(keeping.protect(op, one))}, f"{one.id} is protected")
    if "protected" in one.conditions:
        one = keeping.unprotect(op, one, agree(context, keeping.named_plan(op, "unprotect", one).ask(), yes=False))
    return Output({"machine": machine_shown.document_of(one)}, f"{one.id} is not protected")


# destroying ---------------------------------------------------------------------------------------------------------


@command(
    "destroy",
    example="gpu machine destroy m_4f6c2a",
    exits="0 proven gone · 1 no such job · 2 no such machine · 3 a job runs, outputs would be lost, it is protected "
    "or not ours · 5 the provider refused, or did not take it · 6 not proven gone yet: gpu reconcile",
)
@_MACHINE
@ABANDON
@click.option("--wait", "wait_s", type=DURATION, default="4m", show_default=True, help="Longest look for the end.")
@_YES
def destroy(context: Context, machine_id: str, abandon_outputs: tuple[str, ...], wait_s: float, yes: bool) -> Output:
    """Destroy a rented machine and its disk, and see it gone. Refused while a job runs or outputs are not collected.

    A protected machine takes an approval that names it; --yes is none.
    """
    from gpu_skills.jobs import release as jobs_release

    one = _rented(context, machine_id)
    state = jobs_release.destroy(
        context.operator,
        one,
        abandon=abandon_outputs,
        wait_s=wait_s,
        agree=by_name(context, yes=yes),
        tell=looks(context),
    )
    return ended(context, one, state)


def looks(context: Context) -> Callable[[str], None]:
    """Who hears of each look while the end of a machine is waited for: a person, no program."""
    return (lambda line: None) if context.json else say


def by_name(context: Context, *, yes: bool = False) -> Callable[[Ask], Approval]:
    """How a protected machine's end gets its approval: one that names it, or an answer on the terminal. `--yes` names
    none, it only keeps from asking. Protected says what else can be typed."""
    from gpu_skills.cli.approve import agree
    from gpu_skills.lifecycle.approval import approvals

    def named(ask: Ask) -> Approval:
        try:
            return approvals.find(context.operator, ask) if yes else agree(context, ask, yes=False)
        except ApprovalNeeded as exc:
            machine = str(ask.subject["machine"])
            commands = exc.details.get("commands") or []
            how = f"gpu approve {ask.name} --statement TEXT" if len(commands) == 1 else f"gpu approve {ask.name} --show"
            raise Protected(
                machine=machine,
                next_step=f"gpu machine protect {machine} --off; or, for this once: {how}",
                plan=ask.sha256,
                text=ask.text,
                commands=commands,
            ) from exc

    return named


def ended(context: Context, one: Machine, state: str) -> Output:
    """What to say after a destroy: gone, or on its way with the command that goes on."""
    from gpu_skills.lifecycle.ending import witness

    op = context.operator
    now = witness.current(op, one)
    if state == "destroyed":
        return Output({"machine": machine_shown.document_of(now)}, f"{one.id} is destroyed")
    evidence = witness.evidence_of(op, now)
    if evidence.taken_at is None and evidence.refused is not None:
        raise DestroyNotTaken(provider=one.provider, machine=one.id, reason=evidence.refused)
    raise TeardownIncomplete(machines=one.id)


# on record -----------------------------------------------------------------------------------------------------------


def _on_record(context: Context, machine_id: str) -> Machine:
    from gpu_skills.lifecycle import machines

    found = machines.find(context.project, machine_id)
    if found is None:
        known = ", ".join(m.id for m in machines.all_machines(context.project)[:10]) or "none"
        raise UsageError(f"no machine {machine_id[:80]} in this project; there is {known}", next_step="gpu machine ls")
    return found


def _rented(context: Context, machine_id: str) -> Machine:
    found = _on_record(context, machine_id)
    if not found.is_rented:
        raise Refused(f"{machine_id} is a host of your own: nothing of it is rented", next_step="gpu destroy")
    return found
