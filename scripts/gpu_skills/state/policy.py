"""What may be spent and done without asking again: up to three files, combined by the strictest.

`/etc/gpu/policy.json` (system), `~/.config/gpu/policy.json` (user) and `.pi/gpu/policy.json` (project). A file that is
there but cannot be read or understood is refused, never passed over: it may be the one that says no.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_skills.errors import OverCeiling, PolicyMissing, StateError, StateNewer, UsageError
from gpu_skills.state import files, quick_check, strict_json
from gpu_skills.state.project import SCHEMA_VERSION, Project
from gpu_skills.units import MAX_USD, format_usd, json_number, usd
from gpu_skills.userdirs import account_home, config_dir

SYSTEM_POLICY = Path("/etc/gpu/policy.json")
MONEY = ("job_usd", "session_usd", "day_usd", "month_usd")
CEILINGS = (*MONEY, "rate_usd_hr", "machines", "deadline_h")
MAX_FILE_BYTES = 1 << 20
_LEVELS = ("statement", "signature")  # the later the stricter, as in the next
_INPUTS = ("full", "hash", "none")
_FILE_KEYS = (
    "ceilings", "idle_shutdown_after_min", "approval", "fuse_layers", "protected_files", "allowed_providers",
    "retry_limit", "notify", "sentinel_receipts", "ledger_inputs", "schema_version", "$schema",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One of the three files. content is None where there is none."""

    origin: str
    path: Path
    content: dict[str, Any] | None


@dataclass(frozen=True)
class Policy:
    """The strictest of all files. A ceiling of None is no limit.

    origins: value ("ceilings.day_usd", "approval.level", "notify") → the files it came from, or `default`.
    unknown: keys nobody knows, as (origin, key): kept, without effect, and shown, for one may be a misspelt limit.
    """

    ceilings: dict[str, Decimal | None]
    idle_shutdown_after_min: Decimal | None
    approval_level: str
    approval_signers: tuple[str, ...]
    approval_namespace: str
    fuse_layers: tuple[str, ...]
    protected_files: tuple[str, ...]
    allowed_providers: tuple[str, ...]
    retry_limit: int
    notify: tuple[dict[str, Any], ...]
    sentinel_receipts: tuple[str, ...]
    ledger_inputs: str
    origins: dict[str, tuple[str, ...]]
    sources: tuple[Source, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()

    def values(self) -> dict[str, Any]:
        """Every value under the name that `origins` has for it, as JSON holds it."""
        ceilings = {f"ceilings.{name}": _json(value) for name, value in self.ceilings.items()}
        return ceilings | {
            "idle_shutdown_after_min": _json(self.idle_shutdown_after_min),
            "approval.level": self.approval_level,
            "approval.signers": list(self.approval_signers),
            "approval.namespace": self.approval_namespace,
            "fuse_layers": list(self.fuse_layers),
            "protected_files": list(self.protected_files),
            "allowed_providers": list(self.allowed_providers),
            "retry_limit": self.retry_limit,
            "notify": list(self.notify),
            "sentinel_receipts": list(self.sentinel_receipts),
            "ledger_inputs": self.ledger_inputs,
        }


# reading ---------------------------------------------------------------------------------------------------------


def load(project: Project, environ: Mapping[str, str] = os.environ, *, system: Path = SYSTEM_POLICY) -> Policy:
    """What holds for this project. PolicyMissing or StateNewer (exit 3) when one of the files leaves it unknown.

    system: for tests. No environment variable moves that file: an agent could set it.
    """
    sources = tuple(Source(o, path, _read(o, path)) for o, path in paths(project, environ, system=system))
    return combine([(s.origin, s.content) for s in sources if s.content is not None], sources=sources)


def signature(project: Project, environ: Mapping[str, str] = os.environ, *, system: Path = SYSTEM_POLICY) -> Any:
    """What changes when one of the files does; cheap enough to be asked before each use of a policy."""
    return tuple(_mark(path) for _, path in paths(project, environ, system=system))


def _mark(path: Path) -> tuple[Any, ...]:
    try:
        found = os.stat(path)
    except OSError as exc:
        return str(path), exc.errno, path.is_symlink()
    return str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def paths(
    project: Project, environ: Mapping[str, str] = os.environ, *, system: Path = SYSTEM_POLICY
) -> list[tuple[str, Path]]:
    """(origin, file), the strongest first.

    The user's file is looked for where the environment says, and in the home that the system has for this user: an
    agent that points HOME or XDG_CONFIG_HOME elsewhere does not leave it behind.
    """
    chosen = config_dir(environ) / "policy.json"
    home = account_home()
    fixed = home / ".config/gpu/policy.json" if home is not None else chosen
    users = [("user", path) for path in dict.fromkeys((fixed, chosen))]
    return [("system", system), *users, ("project", project.path("policy.json"))]


def ledger_inputs(project: Project, environ: Mapping[str, str] = os.environ, *, system: Path = SYSTEM_POLICY) -> str:
    """What the ledger may keep of inputs, without the cost of a whole `load`. Never fails.

    A file that cannot be read does not allow content: it counts as `hash`, which keeps the evidence.
    """
    try:
        found = paths(project, environ, system=system)
    except UsageError:  # no home: nobody knows what this user allows
        return "hash"
    words = []
    for origin, path in found:
        try:
            content = files.read_json(path, max_bytes=MAX_FILE_BYTES, default={} if origin != "project" else None)
        except StateError:
            content = None
        word = content.get("ledger_inputs", "full") if isinstance(content, dict) else "hash"
        words.append(word if word in _INPUTS else "hash")
    return max(words, key=_INPUTS.index)


def _read(origin: str, path: Path) -> dict[str, Any] | None:
    shown = ".pi/" + "/".join(path.parts[-2:]) if origin == "project" else str(path)
    mend = f"edit {shown}" + (", or move it away and run: gpu init" if origin == "project" else "")

    def refused(at: str, problem: str, **details: Any) -> PolicyMissing:
        return PolicyMissing(
            f"{shown}{at}: {problem}", next_step=mend, file=shown, origin=origin, problem=problem, **details
        )

    try:
        raw = files.read_bytes(path, max_bytes=MAX_FILE_BYTES)
        content = None if raw is None else files.parse(raw, path)
    except StateError as exc:
        raise refused(exc.details["at"], exc.details["problem"]) from exc
    if raw is None:
        if path.is_symlink():  # somebody's policy, on a disk that is not there today
            raise refused("", "found a link to nothing, allowed is a file")
        if origin != "project":
            return None
        raise PolicyMissing(file=shown, reason="there is no such file", origin=origin)
    if not isinstance(content, dict):
        raise refused(":1", "found something else, allowed is an object")
    version = content.get("schema_version", SCHEMA_VERSION)
    if type(version) is int and version > SCHEMA_VERSION:
        raise StateNewer(file=shown, found=version, known=SCHEMA_VERSION)
    if quick_check.fits(content, "policy"):
        return content
    from gpu_skills import schemas

    for problem in schemas.problems(content, "policy"):
        scanner = strict_json.Scanner(raw.decode())
        scanner.run()
        line = scanner.line_of(problem.pointer)
        raise refused(f":{line}", problem.message, line=line, pointer=problem.pointer)
    return content


# combining -------------------------------------------------------------------------------------------------------


def combine(given: Sequence[tuple[str, dict[str, Any]]], *, sources: Sequence[Source] = ()) -> Policy:
    """The strictest of valid contents, each with its origin, in the order system, user, project."""
    default = _defaults()
    origins: dict[str, tuple[str, ...]] = {}

    def strictest(name: str, pick: Callable[[list[Any]], Any], *, none_is_no_limit: bool = False) -> Any:
        mentioned = _mentioned(given, *name.split("."))
        values = [value for _, value in mentioned if value is not None]
        if not mentioned or (not values and not none_is_no_limit):
            origins[name] = ("default",)
            return _at(default, *name.split("."))
        chosen = pick(values) if values else None
        origins[name] = tuple(origin for origin, value in mentioned if value == chosen)
        return chosen

    def united(name: str) -> tuple[Any, ...]:
        mentioned = _mentioned(given, name)
        lists = [value for _, value in mentioned] or [default[name]]
        origins[name] = tuple(origin for origin, _ in mentioned) or ("default",)
        return _distinct(item for items in lists for item in items)

    def decided_outside(name: str) -> Any:
        """A word that cannot be tightened: the system's holds, else the user's, else the project's."""
        origin, value = next(iter(_mentioned(given, *name.split("."))), ("default", _at(default, *name.split("."))))
        origins[name] = (origin,)
        return value

    ceilings = {name: _decimal(strictest(f"ceilings.{name}", min, none_is_no_limit=True)) for name in CEILINGS}
    idle = _decimal(strictest("idle_shutdown_after_min", min, none_is_no_limit=True))
    signers, origins["approval.signers"] = _signers(given)
    providers = _mentioned(given, "allowed_providers") or [("default", default["allowed_providers"])]
    origins["allowed_providers"] = tuple(origin for origin, _ in providers)
    return Policy(
        ceilings=ceilings,
        idle_shutdown_after_min=idle,
        approval_level=strictest("approval.level", lambda words: max(words, key=_LEVELS.index)),
        approval_signers=signers,
        approval_namespace=decided_outside("approval.namespace"),
        fuse_layers=united("fuse_layers"),
        protected_files=united("protected_files"),
        allowed_providers=tuple(p for p in _distinct(providers[0][1]) if all(p in names for _, names in providers)),
        retry_limit=strictest("retry_limit", min),
        notify=united("notify"),
        sentinel_receipts=united("sentinel_receipts"),
        ledger_inputs=strictest("ledger_inputs", lambda words: max(words, key=_INPUTS.index)),
        origins=origins,
        sources=tuple(sources),
        unknown=tuple((origin, key) for origin, content in given for key in content if key not in _FILE_KEYS),
    )


def _signers(given: Sequence[tuple[str, dict[str, Any]]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Who may sign, and which files say so.

    An empty list says nothing. The lines of the first file that names somebody hold, with their options, as far as
    every later file names the same key. Where a file above the project's wants signatures but names nobody, nobody can
    sign: a project that is an agent's to write must not fill that gap with a key of its own.
    """
    named = [(origin, lines) for origin, lines in _mentioned(given, "approval", "signers") if lines]
    wants_signatures = any(
        origin != "project" and level == "signature" for origin, level in _mentioned(given, "approval", "level")
    )
    if wants_signatures and all(origin == "project" for origin, _ in named):
        return (), tuple(o for o, level in _mentioned(given, "approval", "level") if level == "signature")
    if not named:
        return (), ("default",)
    later = [{_public_key(line) for line in lines} for _, lines in named[1:]]
    kept = (line for line in named[0][1] if all(_public_key(line) in keys for keys in later))
    return _distinct(kept), tuple(origin for origin, _ in named)


def _public_key(line: str) -> str:
    """Type and key of an allowed_signers line, whatever principals, options and comment stand around them."""
    words = line.split()
    for word, following in pairwise(words):
        if word.startswith(("ssh-", "ecdsa-", "sk-")) and following.startswith("AAAA"):
            return f"{word} {following}"
    return " ".join(words)


def _mentioned(given: Iterable[tuple[str, dict[str, Any]]], *path: str) -> list[tuple[str, Any]]:
    """(origin, value) of each file that has this key, null included."""
    found = []
    for origin, content in given:
        parent = _at(content, *path[:-1], missing={})
        if path[-1] in parent:
            found.append((origin, parent[path[-1]]))
    return found


def _at(content: Any, *path: str, missing: Any = None) -> Any:
    for key in path:
        content = content.get(key, missing)
    return content


def _defaults() -> dict[str, Any]:
    """What `gpu init` writes is also what holds where no file says anything."""
    from gpu_skills import resources

    return files.read_json(resources.template("policy.json"))


def _distinct(items: Iterable[Any]) -> tuple[Any, ...]:
    kept: list[Any] = []
    for item in items:
        if item not in kept:
            kept.append(item)
    return tuple(kept)


def _decimal(value: Any) -> Decimal | None:
    return None if value is None else Decimal(str(value))


def _json(value: Decimal | None) -> int | float | None:
    return None if value is None else json_number(value)


# what is left ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """What counts against the ceilings already. budget.books fills it in.

    day_usd, month_usd: booked. session_usd, job_usd: booked or reserved for the very session or job that the money is
    for. machines: rented ones that may bill. incomplete: a line could not be read, so it may be more.
    """

    day_usd: Decimal = Decimal(0)
    month_usd: Decimal = Decimal(0)
    session_usd: Decimal = Decimal(0)
    machines: int = 0
    job_usd: Decimal = Decimal(0)
    incomplete: bool = False

    def to_record(self) -> dict[str, Any]:
        money = {name: json_number(getattr(self, name)) for name in MONEY}
        return {**money, "machines": self.machines, "incomplete": self.incomplete}


@dataclass(frozen=True)
class Violation:
    """One ceiling that is in the way. left: what it would still allow. origins: the files that set it."""

    ceiling: str
    asked: Any
    limit: Any
    left: Any
    origins: tuple[str, ...]

    def __str__(self) -> str:
        origin = " and ".join(self.origins)
        if self.ceiling == "allowed_providers":
            return f"provider {self.asked} is not among the allowed ones ({', '.join(self.limit) or 'none'}; {origin})"
        name = self.ceiling.rpartition("_")[0] if self.ceiling in MONEY else self.ceiling
        values = (self.limit, self.left, self.asked)
        limit, left, asked = (_shown(self.ceiling, value) for value in values)
        if asked == left and "usd" in self.ceiling:  # more by less than a cent
            limit, left, asked = (f"${value.normalize():f}" for value in values)
        kept = "" if self.left == self.limit else f", of which {left} is left"
        return f"{asked} exceeds the {name} ceiling of {limit}{kept} ({origin})"

    def to_dict(self) -> dict[str, Any]:
        values = {"asked": self.asked, "limit": self.limit, "left": self.left}
        plain = {k: json_number(v) if isinstance(v, Decimal) and v.is_finite() else v for k, v in values.items()}
        plain["asked"] = None if plain["asked"] == Decimal("inf") else plain["asked"]
        return {"ceiling": self.ceiling, **plain, "from": list(self.origins), "message": str(self)}


def what_is_left(policy: Policy, spent: Spent, reserved_usd: Decimal) -> dict[str, Decimal | None]:
    """What each ceiling still allows, never below zero; None is no limit. Pure.

    reserved_usd: all that is reserved and not settled; it counts against day and month like money that is gone. What is
    reserved for one session or job counts against theirs, in `spent`.
    """
    used: dict[str, Decimal | int] = {
        "job_usd": spent.job_usd,
        "session_usd": spent.session_usd,
        "day_usd": spent.day_usd + reserved_usd,
        "month_usd": spent.month_usd + reserved_usd,
        "machines": spent.machines,
    }
    return {
        name: None if limit is None else max(Decimal(0), limit - used.get(name, 0))
        for name, limit in policy.ceilings.items()
    }


def check(
    policy: Policy,
    *,
    cost_usd: Decimal | float | int | str,
    rate_usd_hr: Decimal | float | int | str,
    deadline_h: Decimal | float | int | str | None,
    provider: str | None,
    spent: Spent,
    reserved_usd: Decimal,
    machines: int = 1,
) -> list[Violation]:
    """Every ceiling that forbids this. The one function that all money paths ask; `require` raises what it finds. Pure.

    cost_usd: the worst case. deadline_h: infinity for no end, None where the question has no deadline; provider None
    likewise. machines: how many more would run. What costs nothing is never in the way of a money ceiling.
    """
    cost, rate = amount("cost_usd", cost_usd), amount("rate_usd_hr", rate_usd_hr)
    asked: dict[str, Any] = dict.fromkeys(MONEY, cost) | {"rate_usd_hr": rate, "machines": Decimal(machines)}
    if deadline_h is not None:
        endless = str(deadline_h).lower() in ("inf", "infinity")
        asked["deadline_h"] = Decimal("inf") if endless else amount("deadline_h", deadline_h)
    found = []
    for name, left in what_is_left(policy, spent, reserved_usd).items():
        wanted = asked.get(name)
        if left is not None and wanted is not None and wanted > 0 and wanted > left:
            limit = policy.ceilings[name]
            found.append(Violation(name, wanted, limit, left, policy.origins[f"ceilings.{name}"]))
    if provider is not None and provider not in policy.allowed_providers:
        allowed = list(policy.allowed_providers)
        found.append(Violation("allowed_providers", provider, allowed, allowed, policy.origins["allowed_providers"]))
    return found


def require(policy: Policy, **question: Any) -> None:
    """`check`, with OverCeiling (exit 3) that lists everything in the way."""
    found = check(policy, **question)
    if found:
        raise OverCeiling("; ".join(map(str, found)), violations=[v.to_dict() for v in found])


def amount(name: str, value: Decimal | float | int | str) -> Decimal:
    """A finite amount that is not negative, or UsageError. Money is rounded to the six places of records."""
    try:
        if isinstance(value, bool):
            raise ValueError
        found = Decimal(str(value))
        good = found.is_finite() and 0 <= found <= MAX_USD
    except (InvalidOperation, ValueError):
        good = False
    if not good:
        raise UsageError(f"{name} is {value}; it must be a number from 0 to 1000000000", next_step="gpu policy --help")
    return usd(found)


def _shown(ceiling: str, value: Any) -> str:
    if ceiling in MONEY:
        return format_usd(value)
    if ceiling == "rate_usd_hr":
        return f"{format_usd(value)}/h"
    if ceiling == "deadline_h":
        return "no deadline" if value == Decimal("inf") else f"{value.normalize():f} h"
    return f"{value}"
