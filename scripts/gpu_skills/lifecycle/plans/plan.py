"""A plan: everything a human has to know before money moves, and everything that is fixed once they said yes.

Frozen, it is canonical JSON (sorted keys, no spaces, ASCII) in `plans/<sha256>.json`, and that SHA-256 is its name. A
file that does not hash to its name is no plan.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from gpu_skills import schemas
from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import GpuError, PlanChanged, PlanUnknown, UsageError, one_line
from gpu_skills.state import files
from gpu_skills.state.project import Project
from gpu_skills.units import json_number

SCHEMA_VERSION = 1
SHOWN_CHARS = 12  # of a name, where a person reads it
MAX_PLAN_BYTES = 64 << 20
EXPECTED_TIMES = 2  # so many times the expected time are still the same undertaking; more is a new plan
_NAME = re.compile(r"[0-9a-f]{8,64}")
_DRAFT = re.compile(r"draft-[0-9a-f]{8}")
MOST_NAMED = 5
_MONEY = ("max_rate_usd_hr", "storage_usd_hr", "worst_case_usd", "expected_usd")


@dataclass(frozen=True)
class Candidate:
    """One GPU class. left_out: why it cannot do, None: it is tried. offers: what was seen of it, cheapest first."""

    gpu: str
    left_out: str | None = None
    offers: tuple[dict[str, Any], ...] = ()
    rate_usd_hr: Decimal | None = None

    def to_record(self) -> dict[str, Any]:
        rate = None if self.rate_usd_hr is None else json_number(self.rate_usd_hr)
        return {"gpu": self.gpu, "left_out": self.left_out, "offers": list(self.offers), "rate_usd_hr": rate}


@dataclass(frozen=True)
class Plan:
    """Fields as in schemas/plans.json, where each is described. Durations in seconds, money in Decimal."""

    project_id: str
    machine_class: str
    provider: str
    image: str
    disk_gb: int
    gpu_count: int
    candidates: tuple[Candidate, ...]
    max_rate_usd_hr: Decimal
    deadline_s: float
    storage_grace_s: float
    worst_case_usd: Decimal
    measured_at: str
    expires_at: str
    storage_usd_hr: Decimal = Decimal(0)
    min_vram_gb: float | None = None
    min_cuda: float | None = None
    min_driver: str | None = None
    interruptible: bool = False
    volume_id: str | None = None
    locations: tuple[str, ...] = ()
    deadline_reason: str | None = None
    idle_timeout_s: float | None = None
    hold_for_s: float | None = None
    job_timeout_s: float | None = None
    setup_cap_s: float = 1800.0
    setup_failures_max: int = 1
    image_gb: float | None = None
    capacity: dict[str, Any] = field(default_factory=lambda: {"mode": "immediate", "attempts": 1, "interval_s": 0})
    worst_case: dict[str, Any] = field(default_factory=dict)
    expected_s: float | None = None
    expected_usd: Decimal | None = None
    ceilings_left: dict[str, Any] | None = None
    outputs_ephemeral: bool = False
    secrets: tuple[str, ...] = ()
    whose_machine: str | None = None
    warnings: tuple[str, ...] = ()
    job: dict[str, Any] | None = None
    inputs: dict[str, Any] | None = None
    resume_from: dict[str, Any] | None = None
    nonce: str | None = None

    @property
    def tried(self) -> tuple[Candidate, ...]:
        """The GPU classes that may be rented, in order."""
        return tuple(c for c in self.candidates if c.left_out is None)

    @property
    def deadline_h(self) -> float:
        return self.deadline_s / 3600

    def is_expired(self, now: datetime) -> bool:
        return now >= parse_timestamp(self.expires_at)

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Decimal):
                value = json_number(value)
            elif one.name == "candidates":
                value = [candidate.to_record() for candidate in value]
            elif isinstance(value, tuple):
                value = list(value)
            record["class" if one.name == "machine_class" else one.name] = value
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Plan:
        """SchemaInvalid for what is no plan. Fields nobody knows are refused: they would be approved unseen."""
        schemas.check(record, "plans", file="plan", next_step="gpu plan")
        names = {one.name for one in fields(cls)}
        given = {key: value for key, value in record.items() if key not in ("schema_version", "class")}
        if unknown := sorted(set(given) - names):
            raise UsageError(f"the plan has fields nobody knows: {', '.join(unknown)[:200]}", next_step="gpu plan")
        for name in _MONEY:
            if given.get(name) is not None:
                given[name] = Decimal(str(given[name]))
        for name in ("locations", "secrets", "warnings"):
            given[name] = tuple(given.get(name) or ())
        given["candidates"] = tuple(
            Candidate(
                c["gpu"],
                c.get("left_out"),
                tuple(c.get("offers") or ()),
                None if c.get("rate_usd_hr") is None else Decimal(str(c["rate_usd_hr"])),
            )
            for c in record["candidates"]
        )
        return cls(machine_class=record["class"], **given)


class Frozen(Protocol):
    """A plan of either kind: to rent a machine, or to do something to one."""

    def to_record(self) -> dict[str, Any]: ...


def canonical(plan: Frozen) -> bytes:
    """The bytes that are hashed. The same content gives the same bytes, whoever writes them."""
    return json.dumps(
        plan.to_record(), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def sha256(plan: Frozen) -> str:
    return hashlib.sha256(canonical(plan)).hexdigest()


def save_draft(project: Project, plan: Plan, *, name: str | None = None) -> str:
    """Write a draft, or the one of that name anew, and return its name. Nothing can be approved by it."""
    project.require_writable()
    name = name if name is not None and is_draft(name) else f"draft-{secrets.token_hex(4)}"
    _write(_folder(project) / f"{name}.json", files.dumps_pretty(plan.to_record()))
    return name


def freeze(project: Project, plan: Plan) -> str:
    """Write the plan under its hash and return that."""
    project.require_writable()
    frozen = replace(plan, nonce=plan.nonce or secrets.token_hex(8))
    name = sha256(frozen)
    _write(_folder(project) / f"{name}.json", canonical(frozen))
    return name


def load(project: Project, name: str) -> tuple[str, Plan]:
    """(full name, plan) by its name, eight or more digits of it, or a draft's name. PlanUnknown, PlanChanged."""
    folder = _folder(project)
    if _DRAFT.fullmatch(name):
        content = files.read_json(folder / f"{name}.json", max_bytes=MAX_PLAN_BYTES, default=None)
        if content is None:
            raise unknown(project, name)
        return name, Plan.from_record(content)
    full = full_name(project, name)
    path = folder / f"{full}.json"
    raw = files.read_bytes(path, max_bytes=MAX_PLAN_BYTES) or b""
    if hashlib.sha256(raw).hexdigest() != full:  # before anything is read from it
        raise PlanChanged(plan=full[:SHOWN_CHARS])
    plan = Plan.from_record(files.parse(raw, path))
    if sha256(plan) != full:
        raise PlanChanged(plan=full[:SHOWN_CHARS])
    return full, plan


def full_name(project: Project, name: str) -> str:
    """The whole name of a frozen plan of either kind, by eight or more digits of it. PlanUnknown."""
    if not _NAME.fullmatch(name):
        raise unknown(project, name)
    found = sorted(path.stem for path in _folder(project).glob(f"{name}*.json"))
    if len(found) > 1:
        raise PlanUnknown(f"{len(found)} plans begin with {name}", plan=name)
    if not found:
        raise unknown(project, name)
    return found[0]


def find(project: Project, name: str | None) -> Plan | None:
    """The plan of that name; None for one that is lost, or is no plan any more."""
    try:
        return load(project, name)[1] if name else None
    except GpuError:
        return None


def is_draft(name: str) -> bool:
    return _DRAFT.fullmatch(name) is not None


def looks_like_name(word: str) -> bool:
    """Whether a word can only be meant as a plan: `draft-…`, or eight or more digits of a frozen one."""
    return word.startswith("draft-") or _NAME.fullmatch(word) is not None


def unknown(project: Project, name: str) -> PlanUnknown:
    """The error for a name that none has: it names those there are, the most similar one first."""
    known = sorted(_shown_names(project), key=lambda shown: _likeness(name, shown), reverse=True)
    name = one_line(name, limit=80)
    if not known:
        return PlanUnknown(plan=name)
    more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    there = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known[:MOST_NAMED])}{more}"
    text, step = f"there is no plan {name}; {there}", f"gpu approve {known[0]} --show"
    return PlanUnknown(text, plan=name, known=known[:MOST_NAMED], next_step=step)


def require_no_plan(project: Project, word: str) -> None:
    """PlanUnknown for a word that somebody took for the name of a plan, where a command is expected."""
    if len(word) >= 6 and word.isalnum() and any(_likeness(word, shown) > 0.8 for shown in _shown_names(project)):
        raise unknown(project, word)


def _shown_names(project: Project) -> list[str]:
    stems = sorted(path.stem for path in _folder(project).glob("*.json"))
    return [stem if is_draft(stem) else stem[:SHOWN_CHARS] for stem in stems]


def _likeness(word: str, shown: str) -> float:
    """Of 1: a name may be shorter than it is shown, or longer."""
    import difflib

    return difflib.SequenceMatcher(None, word[: len(shown)], shown[: max(len(word), 6)], autojunk=False).ratio()


def _folder(project: Project) -> Path:
    return project.path("plans")


def _write(path: Path, content: bytes) -> None:
    files.make_directory(path.parent)
    with files.lock(path):
        files.commit(path, content, expected=files.read_bytes(path, max_bytes=MAX_PLAN_BYTES))
