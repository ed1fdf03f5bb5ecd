"""The five registries: arrays of records that an agent may also write by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_skills.clock import Clock, SystemClock, timestamp
from gpu_skills.errors import StateError, UsageError
from gpu_skills.state import files, journal, quick_check, strict_json
from gpu_skills.state.project import ARRAYS, Project

KINDS = ARRAYS
# A host of the user's own is not ours to destroy: its record may come back.
OWN_HOSTS = ("local", "ssh")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a registry: where it stands, what was found, what is allowed, what was probably meant."""

    file: str
    line: int
    pointer: str
    message: str
    found: str | None = None
    allowed: str | None = None
    nearest: str | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


def load(project: Project, kind: str) -> list[dict[str, Any]]:
    """All records of a registry, each as its schema says; StateError names the first that is not."""
    path = _path(project, kind)
    raw = files.read_bytes(path)
    return [] if raw is None else _checked(raw, path, kind)


def show(project: Project, kind: str, identity: str | None = None) -> list[dict[str, Any]]:
    """All records, or the one of an id; UsageError when there is none."""
    records = load(project, kind)
    if identity is None:
        return records
    found = [record for record in records if record["id"] == identity]
    if not found:
        known = ", ".join(record["id"] for record in records[:10]) or "none"
        raise UsageError(f"no {identity} in {kind}.json; there is {known}", next_step=f"gpu registry show {kind}")
    return found


def put(project: Project, kind: str, record: dict[str, Any], *, clock: Clock | None = None) -> dict[str, Any]:
    """Add a record or replace the one of the same id; everything else in the file stays.

    SchemaInvalid for a record that does not fit; UsageError for one that breaks a rule: `ready` without a successful
    test generation, a status that leaves `destroyed`.
    """
    project.require_writable()
    path = _path(project, kind)
    if not quick_check.fits(record, kind):
        from gpu_skills import schemas

        schemas.check(record, kind, file="record", next_step="correct the record and give it again")
    _refuse(_rule_broken(kind, record), kind, record)

    def with_record(before: Any) -> list[Any]:
        records = _array(before, path)
        places = [n for n, r in enumerate(records) if isinstance(r, dict) and r.get("id") == record["id"]]
        if len(places) > 1:
            problem = f"found the id {record['id']} {len(places)} times, allowed is once"
            raise StateError(file=path.name, at=f" /{places[1]}/id", problem=problem)
        if not places:
            return [*records, record]
        _refuse(_transition_broken(kind, records[places[0]], record), kind, record)
        return [record if n == places[0] else r for n, r in enumerate(records)]

    records = files.update(path, with_record, default=[])
    _note_destroyed(project, kind, records, clock or SystemClock())
    return record


def change(
    project: Project,
    kind: str,
    identity: str,
    function: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Change the record of an id as it is on disk now, under the lock of the file; StateError when there is none.

    function has no effects: it may be applied again. The rules are those of `put`.
    """
    project.require_writable()
    path = _path(project, kind)
    changed: list[dict[str, Any]] = []

    def with_change(before: Any) -> list[Any]:
        records = _array(before, path)
        places = [n for n, r in enumerate(records) if isinstance(r, dict) and r.get("id") == identity]
        if len(places) != 1:
            raise StateError(file=path.name, at="", problem=f"found {identity} {len(places)} times, allowed is once")
        record = function(records[places[0]])
        if not quick_check.fits(record, kind):
            from gpu_skills import schemas

            schemas.check(record, kind, file="record", next_step="gpu registry validate")
        _refuse(_rule_broken(kind, record) or _transition_broken(kind, records[places[0]], record), kind, record)
        changed[:] = [record]
        return [record if n == places[0] else r for n, r in enumerate(records)]

    records = files.update(path, with_change, default=[])
    _note_destroyed(project, kind, records, clock or SystemClock())
    return changed[0]


def validate(project: Project, kinds: Collection[str] = KINDS) -> list[Problem]:
    """Everything wrong with these registries, in the order of the files. Reads only."""
    return [problem for kind in kinds for problem in _problems(project, kind)]


def query(project: Project, program: str, kind: str | None = None, *, timeout_s: float = 5.0) -> list[Any]:
    """Results of a jq program over one registry (an array) or over all (an object of arrays)."""
    from gpu_skills.state import query as jq

    if kind is None:
        value: Any = {name: files.read_json(_path(project, name), default=[]) for name in KINDS}
    else:
        value = files.read_json(_path(project, kind), default=[])
    return jq.run(program, value, timeout_s=timeout_s)


def _path(project: Project, kind: str) -> Path:
    if kind not in KINDS:
        raise UsageError(f"no registry {kind!r}; there are {', '.join(KINDS)}", next_step="gpu registry --help")
    return project.path(f"{kind}.json")


def _array(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise StateError(file=path.name, at=":1", problem="found something else, allowed is an array of objects")
    return value


def _checked(raw: bytes, path: Path, kind: str) -> list[dict[str, Any]]:
    records = _array(files.parse(raw, path), path)
    if all(quick_check.fits(record, kind) for record in records) and len({r["id"] for r in records}) == len(records):
        return records
    for problem in _problems_of(raw, records, path, kind, destroyed=set()):
        details = {key: value for key, value in problem.to_dict().items() if key not in ("file", "message")}
        raise StateError(file=path.name, at=f":{problem.line}", problem=problem.message, **details)
    return records


# what is wrong ---------------------------------------------------------------------------------------------------


def _problems(project: Project, kind: str) -> Iterator[Problem]:
    path = _path(project, kind)
    try:
        raw = files.read_bytes(path)
        if raw is None:
            return
        records = files.parse(raw, path)
    except StateError as exc:
        d = exc.details
        yield Problem(
            path.name, d.get("line", 1), d.get("pointer", ""), d["problem"], d.get("found"), d.get("allowed"), None
        )
        return
    if not isinstance(records, list):
        yield Problem(path.name, 1, "", "found something else, allowed: an array of objects")
        return
    yield from _problems_of(raw, records, path, kind, destroyed=_destroyed_ids(project, kind))


def _problems_of(raw: bytes, records: list[Any], path: Path, kind: str, *, destroyed: set[str]) -> Iterator[Problem]:
    from gpu_skills import schemas

    scanner: strict_json.Scanner | None = None

    def problem(pointer: str, message: str, **more: Any) -> Problem:
        nonlocal scanner
        if scanner is None:
            scanner = strict_json.Scanner(raw.decode())
            scanner.run()
        return Problem(path.name, scanner.line_of(pointer), pointer, message, **more)

    seen: dict[str, int] = {}
    for number, record in enumerate(records):
        base = f"/{number}"
        if not quick_check.fits(record, kind):
            found = schemas.problems(record, kind)
            for p in found:
                message = f"{base}{p.message}" if p.message.startswith("/") else f"{base} {p.message}"
                yield problem(base + p.pointer, message, found=p.found, allowed=p.allowed, nearest=p.nearest)
            if found:
                continue
        if record["id"] in seen:
            message = f"{base}/id is {record['id']}, as /{seen[record['id']]}/id is; allowed: each id once"
            yield problem(f"{base}/id", message, found=record["id"], allowed="each id once")
            continue
        seen[record["id"]] = number
        if broken := _rule_broken(kind, record):
            yield problem(f"{base}/status", f"{base}/status {broken}", found=record["status"])
        if record["id"] in destroyed and record.get("status") != "destroyed":
            message = f"{base}/status is {record.get('status')}, but {record['id']} was destroyed; that never changes"
            yield problem(f"{base}/status", message, found=str(record.get("status")), allowed="destroyed")
    for identity in sorted(destroyed - set(seen)):
        yield problem("", f"the destroyed record {identity} has disappeared; history is never deleted", found="nothing")


# rules -----------------------------------------------------------------------------------------------------------


def _rule_broken(kind: str, record: dict[str, Any]) -> str | None:
    if kind == "deployments" and record["status"] == "ready":
        test = record.get("test_generation")
        if not isinstance(test, dict) or test.get("succeeded") is not True:
            return "is ready without a successful test generation; allowed: with test_generation.succeeded true"
    return None


def _transition_broken(kind: str, before: Any, after: dict[str, Any]) -> str | None:
    if not isinstance(before, dict) or kind not in ("machines", "deployments"):
        return None
    if kind == "machines" and before.get("provider") in OWN_HOSTS:
        return None
    final = ("destroyed", "lost") if kind == "machines" else ("destroyed",)
    if before.get("status") in final and after.get("status") != before["status"]:
        return f"is {after.get('status')}, but it was {before['status']}; that never changes"
    return None


def _refuse(broken: str | None, kind: str, record: dict[str, Any]) -> None:
    if broken:
        raise UsageError(f"{record['id']}: status {broken}", next_step=f"gpu registry show {kind} {record['id']}")


def _destroyed_ids(project: Project, kind: str) -> set[str]:
    """Ids that were once seen destroyed: the journal remembers them when the file does not."""
    return {
        str(record.get("record_id"))
        for _offset, _number, record in journal.scan(project.path("journal.jsonl"))
        if isinstance(record, dict) and record.get("what") == "record_destroyed" and record.get("registry") == kind
    }


def _note_destroyed(project: Project, kind: str, records: list[Any], clock: Clock) -> None:
    if kind not in ("machines", "deployments"):
        return
    gone = {r["id"] for r in records if isinstance(r, dict) and r.get("status") == "destroyed" and "id" in r}
    if kind == "machines":
        gone -= {r["id"] for r in records if isinstance(r, dict) and r.get("provider") in OWN_HOSTS}
    fresh = gone - _destroyed_ids(project, kind) if gone else set()
    if not fresh:
        return
    now = timestamp(clock.now())
    events = [
        {"kind": "observation", "ts": now, "what": "record_destroyed", "registry": kind, "record_id": identity}
        for identity in sorted(fresh)
    ]
    journal.append(project.path("journal.jsonl"), events)
