"""Who allowed which plan: recorded once, verified again each time, good for one use.

An approval is a line of `approvals.jsonl`. What it says is hashed to its id, so an edited line names itself no more;
at level `signature` the same bytes were signed with SSH by somebody the policy names. `statement` records a person's
words: it stops mistakes, not somebody who writes the line themselves.

Whether one is used up is kept outside the project, by the id: a run (`runs`) for what rents, a use for what is done to
one machine. `used_at` on a line is an echo of that.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import (
    ApprovalExpired,
    ApprovalInvalid,
    ApprovalNeeded,
    ApprovalUsed,
    UsageError,
    one_line,
)
from gpu_skills.lifecycle import runs, signatures
from gpu_skills.lifecycle.asks import Ask, ask_of_plan
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.state import files, journal, quick_check, strict_json
from gpu_skills.state.policy import Policy
from gpu_skills.units import json_number, usd

__all__ = [
    "Approval", "Ask", "Use", "ask_of_plan", "find", "finish", "give", "give_signed", "message", "needed", "note_used",
    "signing_commands", "use",
]  # fmt: skip

APPROVALS = "approvals.jsonl"
LIFE = timedelta(hours=1)
CLOCK_SKEW = timedelta(minutes=2)
MAX_WORDS = 4000
MAX_LOOKED_AT = 50  # approvals of one plan, the newest
_SIGNED = ("action", "expires", "issued", "level", "max_cost_usd", "nonce", "plan", "project", "subject")


@dataclass(frozen=True)
class Approval:
    """statement, source: the words and where they were said, None where it was signed. signer: as the policy has it."""

    id: str
    plan_sha256: str
    project_id: str
    level: str
    issued_at: datetime
    expires_at: datetime
    action: str
    subject: dict[str, Any]
    max_cost_usd: Decimal
    nonce: str
    statement: str | None = None
    source: str | None = None
    signer: str | None = None
    signature: str | None = None

    def content(self) -> bytes:
        """What the id hashes, and what is signed: canonical JSON, the same bytes whoever writes them."""
        said: dict[str, Any] = {
            "action": self.action,
            "expires": timestamp(self.expires_at),
            "issued": timestamp(self.issued_at),
            "level": self.level,
            "max_cost_usd": json_number(self.max_cost_usd),
            "nonce": self.nonce,
            "plan": self.plan_sha256,
            "project": self.project_id,
            "subject": self.subject,
        }
        if self.level == "statement":
            said |= {"words": self.statement, "source": self.source}
        return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()

    def to_record(self) -> dict[str, Any]:
        """As a line of approvals.jsonl holds it, without `ts`."""
        return {
            "id": self.id,
            "plan_sha256": self.plan_sha256,
            "project_id": self.project_id,
            "level": self.level,
            "action": self.action,
            "subject": self.subject,
            "max_cost_usd": json_number(self.max_cost_usd),
            "statement": self.statement,
            "source": self.source,
            "signer": self.signer,
            "signature": self.signature,
            "nonce": self.nonce,
            "approved_at": timestamp(self.issued_at),
            "expires_at": timestamp(self.expires_at),
        }


@dataclass(frozen=True)
class Use:
    """That an approval is used up by one action on one machine. finished_at None: it goes on, or died."""

    approval_id: str
    plan_sha256: str
    project_id: str
    action: str
    owner: str
    used_at: str
    finished_at: str | None = None


# giving one ---------------------------------------------------------------------------------------------------------


def give(op: Operator, ask: Ask, *, statement: str, source: str) -> Approval:
    """Record a person's yes in their words. source: `--yes`, `terminal` or `approve`.

    ApprovalNeeded where the policy wants a signature.
    """
    policy = op.policy()
    _require_open(op, ask)
    if policy.approval_level != "statement":
        raise needed(op, ask, "words are not enough here: the policy wants a signature")
    words = statement.strip()
    if not words or len(words) > MAX_WORDS:
        raise UsageError(
            f"a statement has 1 to {MAX_WORDS} characters, this one {len(words)}",
            next_step=f"gpu approve {ask.name} --statement TEXT",
        )
    approval = replace(_draft(op, ask, "statement"), statement=words, source=source)
    return _record(op, replace(approval, id=_id(approval)))


def message(op: Operator, ask: Ask) -> bytes:
    """What is to be signed to allow this: good for an hour from now, and for one use."""
    _require_open(op, ask)
    return _draft(op, ask, "signature").content()


def give_signed(op: Operator, ask: Ask, message: bytes, signature: bytes | str) -> Approval:
    """Record a signed yes. ApprovalInvalid when it is not what was asked, or not signed by one who may."""
    _require_open(op, ask)
    text = signature if isinstance(signature, str) else signature.decode("ascii", "replace")
    try:
        said = strict_json.loads(message, max_depth=8)
    except strict_json.Fault as fault:
        raise _invalid(ask, f"the message that was signed is not the one that was shown: {fault}") from fault
    if not isinstance(said, dict) or sorted(said) != sorted(_SIGNED):
        raise _invalid(ask, "the message that was signed is not the one that was shown")
    record = {
        **{name: said[name] for name in ("action", "level", "max_cost_usd", "nonce", "subject")},
        "plan_sha256": said["plan"],
        "project_id": said["project"],
        "approved_at": said["issued"],
        "expires_at": said["expires"],
        "signature": text,
        "ts": timestamp(op.clock.now()),
    }
    if said["level"] != "signature" or _problem_of({**record, "id": "a_"}) is not None:
        raise _invalid(ask, "the message that was signed is not the one that was shown")
    approval = _approval(record)
    if approval.content() != message:
        raise _invalid(ask, "the message that was signed is not the one that was shown, byte by byte")
    approval = _verified(op, ask, replace(approval, id=_id(approval)), op.policy())
    _require_fresh(op, ask, approval)
    _standing(op, ask, approval, is_echoed=False)
    return _record(op, approval)


def signing_commands(op: Operator, ask: Ask) -> list[str]:
    """What the person types: message into a file, sign it, hand it in."""
    file = f"approval-{ask.name}.txt"
    namespace = op.policy().approval_namespace
    made, signed = signatures.signing_commands(message(op, ask), namespace=namespace, file=file)
    return [made, signed, f"gpu approve {_argument(ask)} --signature {file}.sig"]


def needed(op: Operator, ask: Ask, why: str = "") -> ApprovalNeeded:
    """The error that carries the text to show; at level `signature` also what to type."""
    level = op.policy().approval_level
    details: dict[str, Any] = {
        "plan": ask.sha256,
        "action": ask.action,
        "level": level,
        "worst_case_usd": json_number(ask.worst_case_usd),
        "text": ask.text,
    }
    if level == "signature":
        if not op.policy().approval_signers:
            why = why or "the policy wants a signature, and names nobody who may sign"
        details["commands"] = signing_commands(op, ask)
        step = f"show it to the person who pays: gpu approve {_argument(ask)} --show"
    else:
        step = f"ask the person who pays, then: gpu approve {_argument(ask)} --statement TEXT"
    first = f"{why}; " if why else "a person has to agree: "
    return ApprovalNeeded(first + "; ".join(ask.lines), next_step=step, **details)


# finding one --------------------------------------------------------------------------------------------------------


def find(op: Operator, ask: Ask, *, approval_id: str | None = None) -> Approval:
    """The approval that allows this now. Everything about it is verified again, each time.

    One that this state directory has begun to use comes first, whatever others there are: the same plan again follows
    what was begun. It may have expired when its machine was won. ApprovalNeeded, -Expired, -Used, -Invalid.
    """
    if ask.project_id != op.project.project_id:
        raise _invalid(ask, f"the plan is of project {ask.project_id}, not of {op.project.project_id}")
    policy = op.policy()
    records, echoed, passed_over = _lines_about(op, ask)
    free: list[Approval] = []
    failures: list[ApprovalNeeded] = []
    for record in records:
        if approval_id is not None and record["id"] != approval_id:
            continue
        try:
            approval = _approval(record)
            if approval.id != _id(approval):
                raise _invalid(ask, f"approval {approval.id} does not say what it said when it was given")
            standing = _standing(op, ask, approval, is_echoed=approval.id in echoed)
            if standing != "won":
                _require_fresh(op, ask, approval)
            approval = _verified(op, ask, approval, policy)
        except ApprovalNeeded as exc:
            failures.append(exc)
            continue
        if standing != "free":
            return approval
        free.append(approval)
    if free:
        return free[0]
    error = failures[0] if failures else needed(op, ask)
    error.details |= {
        "text": ask.text,
        "others": [failure.message for failure in failures[1:]],
        "passed_over": [f"{APPROVALS}{problem.at}: {problem.message}" for problem in passed_over],
    }
    raise error


def use(op: Operator, approval: Approval, ask: Ask) -> Use:
    """Use an approval up for an action on a machine, whole or not at all. For what rents, `runs.create` does this.

    ApprovalUsed when it was. Whoever began and died may go on from the same state directory, until `finish`: hold
    `runs.working_on(op, approval.id)` meanwhile.
    """
    find(op, ask, approval_id=approval.id)
    path = _use_path(op, approval.id)
    files.make_directory(path.parent)
    with files.lock(path):
        found = _load_use(op, approval.id)
        if found is None:
            begun = Use(
                approval.id,
                ask.sha256,
                ask.project_id,
                ask.action,
                runs.owner_of(op),
                timestamp(op.clock.now()),
            )
            files.commit(path, files.dumps_pretty(asdict(begun)), expected=None)
            return begun
    _require_ours(op, ask, found)
    return found


def finish(op: Operator, approval: Approval) -> None:
    """Say that the action of a used approval is over. Repeating it changes nothing."""
    path = _use_path(op, approval.id)
    if _load_use(op, approval.id) is None:
        return
    now = timestamp(op.clock.now())
    files.update(path, lambda record: {**record, "finished_at": record.get("finished_at") or now})


def note_used(op: Operator, approval: Approval) -> None:
    """Echo in approvals.jsonl that it is used up."""
    now = timestamp(op.clock.now())
    op.project.require_writable()
    journal.append(op.project.path(APPROVALS), [{**approval.to_record(), "used_at": now, "ts": now}])


# what holds ---------------------------------------------------------------------------------------------------------


def _verified(op: Operator, ask: Ask, approval: Approval, policy: Policy) -> Approval:
    """The approval with its signer, if it is one of this ask, at the level that is demanded now."""
    if approval.project_id != ask.project_id:
        raise _invalid(ask, f"approval {approval.id} was given for project {approval.project_id}")
    if approval.plan_sha256 != ask.sha256:
        raise _invalid(ask, f"approval {approval.id} was given for plan {approval.plan_sha256[:12]}, not {ask.name}")
    if approval.action != ask.action or approval.subject != ask.subject:
        raise _invalid(ask, f"approval {approval.id} was given for something else than this plan says")
    if approval.max_cost_usd < usd(ask.worst_case_usd):
        raise _invalid(
            ask, f"approval {approval.id} allows {approval.max_cost_usd} USD, the worst case is {ask.worst_case_usd}"
        )
    if approval.level != "signature":
        if policy.approval_level == "signature":
            raise _invalid(ask, f"approval {approval.id} is a statement, the policy wants a signature")
        if not approval.statement or not approval.source:
            raise _invalid(ask, f"approval {approval.id} has no words of a person")
        return approval
    try:
        signer = signatures.verify(
            approval.content(),
            approval.signature or "",
            signers=policy.approval_signers,
            namespace=policy.approval_namespace,
        )
    except signatures.BadSignature as exc:
        raise _invalid(ask, f"the signature of approval {approval.id} does not hold: {exc}") from exc
    return replace(approval, signer=signer)


def _require_fresh(op: Operator, ask: Ask, approval: Approval) -> None:
    now = op.clock.now()
    if approval.issued_at > now + CLOCK_SKEW:
        raise _invalid(ask, f"approval {approval.id} was given at {timestamp(approval.issued_at)}, which is to come")
    longest = _end_of_life(ask, approval.issued_at)
    if approval.expires_at > longest:
        raise _invalid(
            ask, f"approval {approval.id} would hold until {timestamp(approval.expires_at)}, longer than any"
        )
    if now >= approval.expires_at:
        raise ApprovalExpired(
            reason=f"approval {approval.id} expired {timestamp(approval.expires_at)}",
            next_step=f"gpu approve {_argument(ask)} --show",
            plan=ask.sha256,
        )


def _standing(op: Operator, ask: Ask, approval: Approval, *, is_echoed: bool) -> str:
    """free: nobody used it. begun, won: this state directory did, for this very plan. ApprovalUsed otherwise."""
    run = runs.load(op, approval.id)
    if run is not None:
        if run.plan_sha256 != ask.sha256 or run.owner != runs.owner_of(op):
            raise _used(ask, f"approval {approval.id} was used in another state directory or for another plan")
        if run.state not in ("open", "won"):
            raise _used(ask, f"approval {approval.id} was used: its attempts are over ({run.state})")
        return "won" if run.state == "won" else "begun"
    if (found := _load_use(op, approval.id)) is not None:
        _require_ours(op, ask, found)
        return "begun"
    if is_echoed:
        raise _used(ask, f"approval {approval.id} was used")
    return "free"


def _require_ours(op: Operator, ask: Ask, found: Use) -> None:
    if found.plan_sha256 != ask.sha256 or found.owner != runs.owner_of(op):
        raise _used(ask, f"approval {found.approval_id} was used in another state directory or for another plan")
    if found.finished_at is not None:
        raise _used(ask, f"approval {found.approval_id} was used {found.used_at}")


def _require_open(op: Operator, ask: Ask) -> None:
    """That somebody may still say yes to this, here."""
    op.project.require_writable()
    if ask.project_id != op.project.project_id:
        raise _invalid(ask, f"the plan is of project {ask.project_id}, not of {op.project.project_id}")
    if ask.expires_at is not None and op.clock.now() >= ask.expires_at:
        raise ApprovalExpired(
            reason=f"plan {ask.name} expired {timestamp(ask.expires_at)}: prices have to be read again",
            next_step=_measure_again(ask),
            plan=ask.sha256,
        )


# reading and writing lines ------------------------------------------------------------------------------------------


def _lines_about(op: Operator, ask: Ask) -> tuple[list[dict[str, Any]], set[str], list[journal.Problem]]:
    """(lines of this plan, newest first, one of each id; ids that a line calls used; lines that are no approval)."""
    found: dict[str, dict[str, Any]] = {}
    echoed: set[str] = set()
    passed_over: list[journal.Problem] = []
    for _offset, number, record in journal.scan(op.project.path(APPROVALS)):
        problem = record if isinstance(record, journal.Problem) else _problem_of(record, number)
        if problem is not None:
            passed_over = [*passed_over, problem][-5:]
            continue
        assert isinstance(record, dict)
        if record["plan_sha256"] != ask.sha256:
            continue
        if record.get("used_at") is not None:
            echoed.add(record["id"])
        # A later line of the same id may be a forgery of it: both are looked at unless they say the same.
        found[files.dumps_line({**record, "used_at": None, "ts": None}).decode()] = record
    return list(reversed(found.values()))[:MAX_LOOKED_AT], echoed, passed_over


def _problem_of(record: dict[str, Any], number: int = 0) -> journal.Problem | None:
    """What keeps a line from being an approval."""
    if not quick_check.fits(record, "approvals"):
        from gpu_skills import schemas

        for problem in schemas.problems(record, "approvals"):
            return journal.Problem(f":{number}", problem.message)
    if record.get("max_cost_usd") is None or not record.get("nonce") or not isinstance(record.get("subject"), dict):
        return journal.Problem(
            f":{number}", "found no cost, nonce or subject, allowed is an approval as this tool writes it"
        )
    return None


def _approval(record: dict[str, Any]) -> Approval:
    """Of a line that fits its schema."""
    return Approval(
        id=record.get("id", ""),
        plan_sha256=record["plan_sha256"],
        project_id=record["project_id"],
        level=record["level"],
        issued_at=parse_timestamp(record["approved_at"]),
        expires_at=parse_timestamp(record["expires_at"]),
        action=str(record.get("action")),
        subject=record["subject"],
        max_cost_usd=usd(record["max_cost_usd"]),
        nonce=record["nonce"],
        statement=record.get("statement"),
        source=record.get("source"),
        signer=record.get("signer"),
        signature=record.get("signature"),
    )


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
    return (ask.approval_until or issued + LIFE).replace(microsecond=0)


def _id(approval: Approval) -> str:
    """The letter says where its use is kept: `s` is no hex digit."""
    mark = runs.SIGNED_PREFIX if approval.level == "signature" else "a_"
    return mark + hashlib.sha256(approval.content()).hexdigest()[:24]


def _record(op: Operator, approval: Approval) -> Approval:
    journal.append(op.project.path(APPROVALS), [{**approval.to_record(), "ts": timestamp(op.clock.now())}])
    return approval


def _use_path(op: Operator, approval_id: str) -> Path:
    return runs.folder(op, approval_id).parent / "uses" / f"{approval_id}.json"


def _load_use(op: Operator, approval_id: str) -> Use | None:
    record = files.read_json(_use_path(op, approval_id), default=None)
    return None if record is None else Use(**record)


def _invalid(ask: Ask, reason: str) -> ApprovalInvalid:
    return ApprovalInvalid(reason=reason, next_step=f"gpu approve {_argument(ask)} --show", plan=ask.sha256)


def _used(ask: Ask, reason: str) -> ApprovalUsed:
    return ApprovalUsed(reason=reason, next_step=_measure_again(ask), plan=ask.sha256)


def _measure_again(ask: Ask) -> str:
    machine = one_line(str(ask.subject.get("machine")), limit=80)
    if ask.action == "destroy":
        return f"gpu approve --machine {machine} --show"
    return "gpu plan --freeze" if ask.action == "rent" else f"gpu machine {ask.action} {machine}"


def _argument(ask: Ask) -> str:
    """How `gpu approve` is told which: a protected machine's end is asked for by its name."""
    return f"--machine {ask.subject['machine']}" if ask.action == "destroy" else ask.name
