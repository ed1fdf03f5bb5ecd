"""`gpu approve`: a person's yes to one plan. And how any command that bills gets one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, say
from gpu_skills.errors import ApprovalNeeded, ApprovalUsed, GpuError, ModeForbids, UsageError

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval, Ask

MAX_FILE_BYTES = 64 << 10


@command(
    "approve",
    reads_only=True,  # --show is; the others ask for the mode themselves
    example='gpu approve 3f2a9c81d004 --statement "rent it for 4 dollars at most"',
    exits="0 approved, or shown · 2 usage, no such plan · 3 refused · 4 a person has to agree, or the yes is void",
)
@click.argument("plan")
@click.option("--show", is_flag=True, help="Print what a person has to read, and what to type; reads only.")
@click.option("--statement", metavar="TEXT", help="The person's own words, where the policy asks for no signature.")
@click.option("--signature", type=click.Path(path_type=Path), metavar="FILE", help="The signature: FILE.sig.")
@click.option("--message", type=click.Path(path_type=Path), metavar="FILE", help="What was signed, if not FILE.")
def approve(
    context: Context,
    plan: str,
    show: bool,
    statement: str | None,
    signature: Path | None,
    message: Path | None,
) -> Output:
    """Record a person's yes to one frozen plan, good for one hour and one use. Spends nothing; --show reads only.

    Without --statement it asks on a terminal. Never give words that nobody said: at level `signature` of the policy
    they are refused, and --show prints what the person signs.
    """
    from gpu_skills.lifecycle.approval import approvals

    if sum((show, statement is not None, signature is not None)) > 1:
        raise UsageError("--show, --statement and --signature exclude each other", next_step="gpu approve --help")
    if message is not None and signature is None:
        raise UsageError("--message goes with --signature", next_step="gpu approve --help")
    ask = _asked_for(context, plan)
    if show:
        return _shown(context, ask)
    _require_operate(context)
    op = context.operator
    if signature is not None:
        signed = _content(context, message if message is not None else _unsigned(signature))
        return _given(context, ask, approvals.give_signed(op, ask, signed, _content(context, signature)))
    standing = _standing(context, ask)
    if isinstance(standing, ApprovalUsed):
        raise standing
    if not isinstance(standing, GpuError):
        return _given(context, ask, standing, "was approved already: {id}, until {until}")
    if statement is not None:
        return _given(context, ask, approvals.give(op, ask, statement=statement, source="approve"))
    return _given(context, ask, _asked(context, ask))


def agree(context: Context, ask: Ask, *, yes: bool) -> Approval:
    """The approval for something that is about to be billed: the one there is, `--yes`, or an answer on the terminal.

    Unless it is followed only, what it is about is always said; `yes` leaves out the question. Where nobody can answer
    it raises at once: ApprovalNeeded with the text to show, or what is wrong with the approval there is.
    """
    from gpu_skills.lifecycle.approval import approvals

    standing = _standing(context, ask)
    if isinstance(standing, ApprovalUsed):
        raise standing
    if not isinstance(standing, GpuError):
        if not standing.is_begun:
            say(ask.text)
        return standing
    if yes:
        if context.operator.policy().approval_level != "signature":  # there the refusal shows what it is about
            say(ask.text)
        return approvals.give(context.operator, ask, statement="--yes", source="--yes")
    if type(standing) is not ApprovalNeeded and not context.is_interactive:
        raise standing
    return _asked(context, ask)


def _asked(context: Context, ask: Ask) -> Approval:
    """A yes on the terminal, or ApprovalNeeded."""
    from gpu_skills.lifecycle.approval import approvals

    op = context.operator
    if not context.is_interactive or op.policy().approval_level != "statement":
        raise approvals.needed(op, ask)
    say(ask.text)
    if not click.confirm("Do you allow this?", default=False, err=True):
        raise approvals.needed(op, ask, "the answer was no, nothing was done")
    return approvals.give(op, ask, statement="yes", source="terminal")


def _asked_for(context: Context, plan: str) -> Ask:
    from gpu_skills.lifecycle.approval import actions, approvals

    name, found = actions.load(context.project, plan)
    return found.ask() if isinstance(found, actions.ActionPlan) else approvals.ask_of_plan(name, found)


def _standing(context: Context, ask: Ask) -> Approval | ApprovalNeeded:
    """The approval that holds now, or why there is none."""
    from gpu_skills.lifecycle.approval import approvals

    try:
        return approvals.find(context.operator, ask)
    except ApprovalNeeded as exc:
        return exc


def _shown(context: Context, ask: Ask) -> Output:
    from gpu_skills.lifecycle.approval import approvals

    op = context.operator
    standing = _standing(context, ask)
    document = _document(ask, op.policy().approval_level)
    if not isinstance(standing, GpuError):
        return _given(context, ask, standing, "approved until {until}: {id}")
    passed_over = standing.details.get("passed_over", [])
    try:
        commands = approvals.commands(op, ask)
    except ApprovalNeeded as exc:
        standing, commands = exc, []
    document |= {"code": standing.code, "reason": standing.message, "commands": commands, "passed_over": passed_over}
    text = ask.text
    if commands:
        text += "\n\nto allow it, the person who pays types:\n" + "\n".join(f"  {line}" for line in commands)
    hints = [f"passed over: {line}" for line in passed_over]
    if type(standing) is not ApprovalNeeded:
        hints.append(f"{standing.message}; next: {standing.next_step}")
    return Output(document, text, hints=hints)


def _given(context: Context, ask: Ask, approval: Approval, said: str = "approved: {id}, until {until}") -> Output:
    """A yes that there is. One that is in use serves for nothing but what uses it."""
    from gpu_skills.lifecycle.approval import approvals

    used = approvals.used_by(context.operator, ask, approval) if approval.is_begun else None
    document = {**_document(ask, approval.level), "approval": _record(approval), "used": used}
    if used is not None:
        said = f"used by {used['by']} at {used['at']}: {approval.id}"
        return Output(document, f"{ask.text}\n\n{said}", hints=[f"next: {used['next_step']} goes on with it"])
    said = said.format(id=approval.id, until=document["approval"]["expires_at"])
    return Output(document, f"{ask.text}\n\n{said}")


def _document(ask: Ask, level: str) -> dict[str, Any]:
    from gpu_skills.clock import timestamp
    from gpu_skills.units import json_number

    return {
        "plan": ask.sha256,
        "action": ask.action,
        "subject": ask.subject,
        "level": level,
        "worst_case_usd": json_number(ask.worst_case_usd),
        "text": ask.text,
        "expires_at": None if ask.expires_at is None else timestamp(ask.expires_at),
        "approval": None,
        "used": None,
        "code": None,
        "reason": None,
        "commands": [],
        "passed_over": [],
    }


def _record(approval: Approval) -> dict[str, Any]:
    record = approval.to_record()
    return {
        name: record[name] for name in ("id", "level", "statement", "source", "signer", "approved_at", "expires_at")
    }


def _require_operate(context: Context) -> None:
    if not context.may_write:
        raise ModeForbids(command="gpu approve without --show", mode=context.mode, needed="operate")


def _unsigned(signature: Path) -> Path:
    """`ssh-keygen -Y sign FILE` writes FILE.sig."""
    if signature.suffix != ".sig":
        raise UsageError(
            f"{signature} does not end in .sig, so the message that was signed is not known",
            next_step="name it with --message FILE",
        )
    return signature.with_suffix("")


def _content(context: Context, path: Path) -> bytes:
    try:
        with open(context.cwd / path, "rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror or exc}", next_step="gpu approve --help") from exc
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is too large for a message or signature", next_step="gpu approve --help")
    return content
