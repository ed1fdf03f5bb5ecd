"""An approval as a line of `approvals.jsonl`: what it says is hashed to its id, and at level `signature` signed."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.lifecycle.runs import SIGNED_PREFIX
from gpu_skills.state import files, journal, quick_check
from gpu_skills.state.project import Project
from gpu_skills.units import MAX_USD, json_number, usd

APPROVALS = "approvals.jsonl"
MAX_LOOKED_AT = 50  # approvals of one plan, the newest
MAX_TOLD = 5  # lines that are none
_NONCE = re.compile(r"[0-9a-f]{8,64}")
MESSAGE_KEYS = ("action", "expires", "issued", "level", "max_cost_usd", "nonce", "plan", "project", "subject")


@dataclass(frozen=True)
class Approval:
    """statement, source: the words and where they were said, None where it was signed. signer: as the policy has it.

    is_begun: as `find` saw it, this state directory uses it up already: follow that.
    """

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
    is_begun: bool = False

    def content(self) -> bytes:
        """What the id hashes and what is signed: canonical JSON, the same bytes whoever writes them.

        Never the bytes of the signature, of which one yes may have many.
        """
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

    @property
    def own_id(self) -> str:
        """The id that follows from what it says. The prefix says where its use is kept."""
        prefix = SIGNED_PREFIX if self.level == "signature" else "a_"
        return prefix + hashlib.sha256(self.content()).hexdigest()[:24]

    def to_record(self) -> dict[str, Any]:
        """The line, without `ts`."""
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

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Approval:
        """Of a record without a `problem`. Fractions of a second are no part of what was agreed to."""
        return cls(
            id=record["id"],
            plan_sha256=record["plan_sha256"],
            project_id=record["project_id"],
            level=record["level"],
            issued_at=parse_timestamp(record["approved_at"]).replace(microsecond=0),
            expires_at=parse_timestamp(record["expires_at"]).replace(microsecond=0),
            action=record["action"],
            subject=record["subject"],
            max_cost_usd=usd(record["max_cost_usd"]),
            nonce=record["nonce"],
            statement=record.get("statement"),
            source=record.get("source"),
            signer=record.get("signer"),
            signature=record.get("signature"),
        )


def of_message(said: Any, signature: str, now: datetime) -> Approval | None:
    """The approval that a message would be; None when it is no message of ours."""
    if not isinstance(said, dict) or sorted(said) != sorted(MESSAGE_KEYS) or said["level"] != "signature":
        return None
    record = {
        **{name: said[name] for name in ("action", "level", "max_cost_usd", "nonce", "subject")},
        "id": "a_",
        "plan_sha256": said["plan"],
        "project_id": said["project"],
        "approved_at": said["issued"],
        "expires_at": said["expires"],
        "signature": signature,
        "ts": timestamp(now),
    }
    return Approval.from_record(record) if problem(record) is None else None


@dataclass(frozen=True)
class Lines:
    """What approvals.jsonl has of one plan. records: newest first. echoed: ids that a line calls used. passed_over:
    lines that are no approval at all, as `file:line: what is wrong`, the last ones."""

    records: list[dict[str, Any]]
    echoed: set[str]
    passed_over: list[str]


def read(project: Project, plan_sha256: str) -> Lines:
    found: dict[bytes, dict[str, Any]] = {}
    echoed: set[str] = set()
    passed_over: list[str] = []
    for _offset, number, record in journal.scan(project.path(APPROVALS)):
        if isinstance(record, journal.Problem):
            passed_over.append(f"{APPROVALS}{record.at}: {record.message}")
        elif (wrong := problem(record)) is not None:
            passed_over.append(f"{APPROVALS}:{number}: {wrong}")
        elif record["plan_sha256"] == plan_sha256:
            if record.get("used_at") is not None:
                echoed.add(record["id"])
            # By all they say, not by id: a later line with the id of an earlier one may be a forgery of it.
            found[files.dumps_line({**record, "used_at": None, "ts": None})] = record
        del passed_over[:-MAX_TOLD]
    return Lines(list(reversed(found.values()))[:MAX_LOOKED_AT], echoed, passed_over)


def plans_named(project: Project) -> list[str]:
    """Names of the plans that some line is about, newest first, each once. Whether one is allowed, `find` says."""
    found: dict[str, None] = {}
    for _offset, _number, record in journal.scan(project.path(APPROVALS)):
        if not isinstance(record, journal.Problem) and problem(record) is None:
            found.pop(record["plan_sha256"], None)
            found[record["plan_sha256"]] = None
    return list(reversed(found))[:MAX_LOOKED_AT]


def problem(record: dict[str, Any]) -> str | None:
    """What keeps a record from being an approval, None: nothing. Whether it holds is another question."""
    if not quick_check.fits(record, "approvals"):
        from gpu_skills import schemas

        for found in schemas.problems(record, "approvals"):
            return found.message
    if not isinstance(record.get("max_cost_usd"), int | float) or record["max_cost_usd"] > MAX_USD:
        return "found no cost, allowed is the worst case that was agreed to"
    if not isinstance(record.get("nonce"), str) or not _NONCE.fullmatch(record["nonce"]):
        return "found no nonce, allowed are 8 to 64 hexadecimal digits"
    if not isinstance(record.get("subject"), dict) or not isinstance(record.get("action"), str):
        return "found no action and subject, allowed is what the plan says"
    return None
