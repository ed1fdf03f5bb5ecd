"""Who allowed which plan: recorded once, verified again each time, good for one use.

At level `signature` an approval was signed with SSH by somebody whom the policy names. `statement` records a person's
words: it stops mistakes, not somebody who writes the line themselves.

Whether one is used up is kept outside the project, by its id: a run (`runs`) for what rents, a use for what is done to
one machine. `used_at` on a line is an echo of that.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta

from gpu_skills.clock import timestamp
from gpu_skills.config import LONGEST_WAIT_S
from gpu_skills.errors import (
    ApprovalExpired,
    ApprovalInvalid,
    ApprovalNeeded,
    ApprovalUsed,
    UsageError,
)
from gpu_skills.lifecycle import runs
from gpu_skills.lifecycle.approval import approval_record, signatures, uses
from gpu_skills.lifecycle.approval.approval_record import APPROVALS, Approval
from gpu_skills.lifecycle.approval.asks import Ask, ask_of_plan
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.state import files, journal, strict_json
from gpu_skills.state.policy import Policy
from gpu_skills.units import format_usd, json_number, usd

__all__ = [
    "Approval", "Ask", "ask_of_plan", "commands", "find", "finish", "give", "give_signed", "message",
    "needed", "note_used", "use", "used_by",
]  # fmt: skip

LIFE = timedelta(hours=1)
CLOCK_SKEW = timedelta(minutes=2)
MAX_WORDS = 4000


# giving one ---------------------------------------------------------------------------------------------------------


def give(op: Operator, ask: Ask, *, statement: str, source: str) -> Approval:
    """Record a person's yes in their words. source: `--yes`, `terminal` or `approve`.

    ApprovalNeeded where the policy wants a signature; ApprovalExpired, ApprovalUsed when the plan is over.
    """
    op.project.require_writable()
    _require_open(op, ask)
    if op.policy().approval_level != "statement":
        raise needed(op, ask, "words are not enough, the policy wants a signature")
    words = statement.strip().encode("utf-8", "backslashreplace").decode()
    if not words or len(words) > MAX_WORDS:
        raise UsageError(
            f"a statement has 1 to {MAX_WORDS} characters, this one {len(words)}",
            next_step=f"gpu approve {ask.name} --statement TEXT",
        )
    return _record(op, replace(_draft(op, ask, "statement"), statement=words, source=source))


def message(op: Operator, ask: Ask) -> bytes:
    """What is to be signed to allow this: good for an hour from now, and for one use."""
    _require_open(op, ask)
    return _draft(op, ask, "signature").content()


def give_signed(op: Operator, ask: Ask, message: bytes, signature: bytes | str) -> Approval:
    """Record a signed yes. ApprovalInvalid when it is not what was asked, or not signed by one who may."""
    op.project.require_writable()
    _require_open(op, ask)
    text = signature if isinstance(signature, str) else signature.decode("ascii", "replace")
    try:
        said = strict_json.loads(message, max_depth=8)
    except strict_json.Fault as fault:
        raise _invalid(ask, f"what was signed is not the message that was shown: {fault}") from fault
    approval = approval_record.of_message(said, text, op.clock.now())
    if approval is None or approval.content() != message:
        raise _invalid(ask, "what was signed is not the message that was shown, byte by byte")
    approval = _verified(ask, replace(approval, id=approval.own_id), op.policy())
    _require_fresh(op, ask, approval)
    return _record(op, approval)


def commands(op: Operator, ask: Ask) -> list[str]:
    """What is typed to allow this. At level `signature`: message into a file, sign it, hand it in.

    ApprovalExpired or ApprovalUsed when nothing typed would allow it any more.
    """
    policy = op.policy()
    if policy.approval_level == "statement":
        _require_open(op, ask)
        return [f"gpu approve {ask.name} --statement TEXT"]
    file = f"approval-{ask.name}.txt"
    signing = signatures.signing_commands(message(op, ask), namespace=policy.approval_namespace, file=file)
    return [*signing, f"gpu approve {ask.name} --signature {file}.sig"]


def needed(op: Operator, ask: Ask, why: str = "a person has to agree") -> ApprovalNeeded:
    """The error that carries the text to show, and what to type. Raises as `commands` when it is too late for a yes."""
    policy = op.policy()
    step = f"show it to the person who pays: gpu approve {ask.name} --show"
    if policy.approval_level == "statement":
        step = f"ask the person who pays, then: gpu approve {ask.name} --statement TEXT"
    elif not policy.approval_signers:
        why += ", with a signature, and the policy names nobody who may sign"
    return ApprovalNeeded(
        f"{why}: {'; '.join(ask.lines)}",
        next_step=step,
        plan=ask.sha256,
        action=ask.action,
        level=policy.approval_level,
        worst_case_usd=json_number(ask.worst_case_usd),
        text=ask.text,
        commands=commands(op, ask),
    )


# finding one --------------------------------------------------------------------------------------------------------


def find(op: Operator, ask: Ask, *, approval_id: str | None = None) -> Approval:
    """The approval that allows this now. Everything about it is verified again, each time.

    One that this state directory has begun to use comes first, whatever others there are: the same plan again follows
    what was begun. It may have expired when its machine was won. A plan is used once: when that is over, no other
    approval of it holds. approval_id: that one only. ApprovalNeeded, -Expired, -Used, -Invalid.
    """
    _require_same_project(op, ask)
    seen = _look(op, ask)
    chosen = [found for found in (*seen.begun, *seen.free) if approval_id in (None, found.id)]
    if chosen and (chosen[0].is_begun or not (seen.begun or seen.over)):
        return chosen[0]
    if seen.begun:
        raise _used(ask, f"plan {ask.name} is used under approval {seen.begun[0].id}")
    error = next(iter([*seen.over, *seen.failures]), None)
    if error is None:
        error = needed(op, ask)
    error.details |= {
        "text": ask.text,
        "others": [failure.message for failure in seen.failures if failure is not error],
        "passed_over": seen.passed_over,
    }
    raise error


@dataclass
class _Seen:
    """The approvals of one plan, each verified, newest first. begun: in use by this state directory. failures: what is
    wrong with the others. over: those of them that were used, and with them the plan."""

    begun: list[Approval] = field(default_factory=list)
    free: list[Approval] = field(default_factory=list)
    failures: list[ApprovalNeeded] = field(default_factory=list)
    over: list[ApprovalNeeded] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


def _look(op: Operator, ask: Ask) -> _Seen:
    lines = approval_record.read(op.project, ask.sha256)
    policy = op.policy()
    seen = _Seen(passed_over=lines.passed_over)
    for record in lines.records:
        standing = "free"
        try:
            approval = Approval.from_record(record)
            if approval.id != approval.own_id:
                raise _invalid(ask, f"approval {approval.id} does not say what it said when it was given")
            approval = _verified(ask, approval, policy)
            standing = _standing(op, ask, approval, is_echoed=approval.id in lines.echoed)
            if standing != "won":
                _require_fresh(op, ask, approval)
        except ApprovalNeeded as exc:
            seen.failures.append(exc)
            if standing == "begun":  # and expired: what was begun may still come, so nothing else may begin
                exc.next_step = "gpu reconcile"
            if standing == "begun" or isinstance(exc, ApprovalUsed):
                seen.over.append(exc)
            continue
        if standing == "free":
            seen.free.append(approval)
        else:
            seen.begun.append(replace(approval, is_begun=True))
    return seen


# using it -----------------------------------------------------------------------------------------------------------


def use(op: Operator, approval: Approval, ask: Ask) -> uses.Use:
    """Use an approval up for an action on a machine, whole or not at all. For what rents, `runs.create` does this.

    ApprovalUsed when it was. Whoever began and died may go on from the same state directory, until `finish`: hold
    `runs.working_on(op, approval.id)` meanwhile.
    """
    find(op, ask, approval_id=approval.id)
    path = uses.path_of(op, approval.id)
    files.make_directory(path.parent)
    with files.lock(path):
        found = uses.load(op, approval.id)
        if found is None:
            now = timestamp(op.clock.now())
            begun = uses.Use(approval.id, ask.sha256, ask.project_id, ask.action, runs.owner_of(op), now)
            files.commit(path, files.dumps_pretty(asdict(begun)), expected=None)
            return begun
    _require_ours(op, ask, found)
    return found


def finish(op: Operator, approval: Approval) -> None:
    """Say that the action of a used approval is over. Repeating it changes nothing."""
    if uses.load(op, approval.id) is None:
        return
    now = timestamp(op.clock.now())
    files.update(
        uses.path_of(op, approval.id), lambda record: {**record, "finished_at": record.get("finished_at") or now}
    )


def note_used(op: Operator, approval: Approval) -> None:
    """Echo in approvals.jsonl that it is used up."""
    now = timestamp(op.clock.now())
    op.project.require_writable()
    journal.append(op.project.path(APPROVALS), [{**approval.to_record(), "used_at": now, "ts": now}])


def used_by(op: Operator, ask: Ask, approval: Approval) -> dict[str, str] | None:
    """Who uses an approval that `find` says is begun, since when, and what goes on with it; None: nobody does."""
    run = runs.load(op, approval.id)
    if run is not None:
        made = [attempt.machine_id for attempt in run.attempts]
        by = f"run {run.approval_id}" + (f" (machine {made[-1]})" if made else "")
        return {"by": by, "at": run.began_at, "next_step": _follow(op, ask)}
    found = uses.load(op, approval.id)
    if found is None:
        return None
    by = f"the {found.action} of machine {ask.subject.get('machine')}"
    return {"by": by, "at": found.used_at, "next_step": ask.plan_again}


def _follow(op: Operator, ask: Ask) -> str:
    """The command that goes on with what was rented by a plan."""
    plan = plans.find(op.project, ask.sha256)
    kind = None if plan is None else plan.machine_class
    return {"job": f"gpu job run --plan {ask.name}", "project": "gpu setup"}.get(kind or "", "gpu status")


# what holds ---------------------------------------------------------------------------------------------------------


def _verified(ask: Ask, approval: Approval, policy: Policy) -> Approval:
    """The approval with its signer, if it is one of this ask, at the level that is demanded now."""
    named = f"approval {approval.id}"
    if approval.project_id != ask.project_id:
        raise _invalid(ask, f"{named} was given for project {approval.project_id}")
    if approval.plan_sha256 != ask.sha256:
        raise _invalid(ask, f"{named} was given for another plan, {approval.plan_sha256[:12]}")
    if approval.action != ask.action or approval.subject != ask.subject:
        raise _invalid(ask, f"{named} was given for something else than the plan says")
    if approval.max_cost_usd < usd(ask.worst_case_usd):
        allowed, worst = format_usd(approval.max_cost_usd), format_usd(ask.worst_case_usd)
        raise _invalid(ask, f"{named} allows {allowed}, the worst case is {worst}")
    if approval.level == "signature":
        return replace(approval, signer=_signer(ask, approval, policy))
    if policy.approval_level == "signature":
        raise _invalid(ask, f"{named} is a statement, the policy wants a signature")
    if not approval.statement or not approval.source:
        raise _invalid(ask, f"{named} has no words of a person")
    return approval


def _signer(ask: Ask, approval: Approval, policy: Policy) -> str:
    try:
        return signatures.verify(
            approval.content(),
            approval.signature or "",
            signers=policy.approval_signers,
            namespace=policy.approval_namespace,
        )
    except signatures.BadSignature as exc:
        raise _invalid(ask, f"the signature of approval {approval.id} does not hold: {exc}") from exc


def _require_fresh(op: Operator, ask: Ask, approval: Approval) -> None:
    now = op.clock.now()
    if approval.issued_at > now + CLOCK_SKEW:
        raise _invalid(ask, f"approval {approval.id} was given at {timestamp(approval.issued_at)}, which is to come")
    if approval.expires_at > _end_of_life(ask, approval.issued_at):
        raise _invalid(ask, f"approval {approval.id} would hold until {timestamp(approval.expires_at)}, too long")
    if now >= approval.expires_at:
        raise ApprovalExpired(
            reason=f"approval {approval.id} expired {timestamp(approval.expires_at)}",
            next_step=f"gpu approve {ask.name} --show",
            plan=ask.sha256,
        )


def _standing(op: Operator, ask: Ask, approval: Approval, *, is_echoed: bool) -> str:
    """free: nobody used it. begun, won: this state directory did, for this very plan. ApprovalUsed otherwise."""
    run = runs.load(op, approval.id)
    if run is not None:
        if run.plan_sha256 != ask.sha256 or run.owner != runs.owner_of(op):
            raise _used(ask, f"approval {approval.id} was used in another state directory or for another plan")
        if run.state not in ("open", "won"):
            by = f"run {run.approval_id} at {run.began_at}"
            raise _used(ask, f"approval {approval.id} was used by {by}: its attempts are over ({run.state})")
        return "won" if run.state == "won" else "begun"
    if (found := uses.load(op, approval.id)) is not None:
        _require_ours(op, ask, found)
        return "begun"
    if is_echoed:
        raise _used(ask, f"approval {approval.id} was used")
    return "free"


def _require_ours(op: Operator, ask: Ask, found: uses.Use) -> None:
    if found.plan_sha256 != ask.sha256 or found.owner != runs.owner_of(op):
        raise _used(ask, f"approval {found.approval_id} was used in another state directory or for another plan")
    if found.finished_at is not None:
        by = f"the {found.action} of machine {ask.subject.get('machine')} at {found.used_at}"
        raise _used(ask, f"approval {found.approval_id} was used by {by}")


def _require_same_project(op: Operator, ask: Ask) -> None:
    if ask.project_id != op.project.project_id:
        raise _invalid(ask, f"the plan is of project {ask.project_id}, not of {op.project.project_id}")


def _require_open(op: Operator, ask: Ask) -> None:
    """That somebody may still say yes to this, here: else ApprovalExpired or ApprovalUsed."""
    _require_same_project(op, ask)
    if ask.expires_at is not None and op.clock.now() >= ask.expires_at:
        raise ApprovalExpired(
            reason=f"plan {ask.name} expired {timestamp(ask.expires_at)}: prices have to be read again",
            next_step=ask.plan_again,
            plan=ask.sha256,
        )
    for over in _look(op, ask).over:
        raise over


# making one ---------------------------------------------------------------------------------------------------------


def _draft(op: Operator, ask: Ask, level: str) -> Approval:
    issued = op.clock.now().replace(microsecond=0)
    return Approval(
        id="",
        plan_sha256=ask.sha256,
        project_id=ask.project_id,
        level=level,
        issued_at=issued,
        expires_at=_end_of_life(ask, issued),
        action=ask.action,
        subject=ask.subject,
        max_cost_usd=usd(ask.worst_case_usd),
        nonce=secrets.token_hex(8),
    )


def _end_of_life(ask: Ask, issued: datetime) -> datetime:
    hour, day = issued + LIFE, issued + timedelta(seconds=LONGEST_WAIT_S)
    return max(hour, min(ask.approval_until or hour, day)).replace(microsecond=0)


def _record(op: Operator, approval: Approval) -> Approval:
    approval = replace(approval, id=approval.own_id)
    journal.append(op.project.path(APPROVALS), [{**approval.to_record(), "ts": timestamp(op.clock.now())}])
    return approval


# words --------------------------------------------------------------------------------------------------------------


def _invalid(ask: Ask, reason: str) -> ApprovalInvalid:
    return ApprovalInvalid(reason=reason, next_step=f"gpu approve {ask.name} --show", plan=ask.sha256)


def _used(ask: Ask, reason: str) -> ApprovalUsed:
    return ApprovalUsed(reason=reason, next_step=ask.plan_again, plan=ask.sha256)
