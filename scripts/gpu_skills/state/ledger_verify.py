"""Every line of the ledger against its schema, its neighbours and the chain. Reads only; nothing is mended."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from gpu_skills.clock import parse_timestamp
from gpu_skills.state import chain, journal, strict_json
from gpu_skills.state.job_record import JOB_ID, TERMINAL_WORDS, is_plainly_valid
from gpu_skills.units import MAX_USD

MAX_SHOWN = 100

_Number = Annotated[int, msgspec.Meta(ge=0)] | Annotated[float, msgspec.Meta(ge=0)] | None
_Money = Annotated[int, msgspec.Meta(ge=0, le=MAX_USD)] | Annotated[float, msgspec.Meta(ge=0, le=MAX_USD)] | None
_Time = Annotated[datetime, msgspec.Meta(tz=True)]
_UNSET, _Unset = msgspec.UNSET, msgspec.UnsetType


class _Artifact(msgspec.Struct, gc=False):
    name: str
    uri: str | None


class _Line(msgspec.Struct, gc=False):
    """A line as we write it. Encoded again it gives the same bytes, or it is looked at more slowly."""

    id: str
    deployment_id: str | _Unset | None = _UNSET
    provider: str | _Unset | None = _UNSET
    model: str | _Unset | None = _UNSET
    workflow: str | _Unset | None = _UNSET
    workflow_version: str | int | _Unset | None = _UNSET
    inputs: dict[str, Any] | _Unset | None = _UNSET
    status: Literal["running", "completed", "failed", "timeout", "cancelled", "lost"] | _Unset = _UNSET
    started_at: _Time | _Unset | None = _UNSET
    completed_at: _Time | _Unset | None = _UNSET
    duration_s: _Number | _Unset = _UNSET
    cost_usd: _Money | _Unset = _UNSET
    gpu: str | _Unset | None = _UNSET
    artifacts: list[_Artifact] | _Unset | None = _UNSET
    error: str | _Unset | None = _UNSET
    ts: _Time | _Unset = _UNSET
    machine_id: str | _Unset | None = _UNSET
    exit_code: int | _Unset | None = _UNSET
    reason: str | _Unset | None = _UNSET


_decode = msgspec.json.Decoder(_Line).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Finding:
    """line and offset of the ledger; for a break of the chain the first line that may be meant."""

    line: int
    offset: int
    pointer: str
    message: str

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Verification:
    """ok: no problems. Of many problems and warnings the first are kept; the counts are of all.

    unsealed_lines: added by someone else and not covered by the chain yet; the next append seals them.
    """

    lines: int = 0
    sealed_lines: int = 0
    unsealed_lines: int = 0
    torn_tail: bool = False
    problem_count: int = 0
    warning_count: int = 0
    problems: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    accepted: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.problem_count == 0

    def problem(self, line: int, offset: int, pointer: str, message: str) -> None:
        self.problem_count += 1
        if len(self.problems) < MAX_SHOWN:
            self.problems.append(Finding(line, offset, pointer, message))

    def warning(self, line: int, offset: int, pointer: str, template: str, *values: object) -> None:
        self.warning_count += 1
        if len(self.warnings) < MAX_SHOWN:
            self.warnings.append(Finding(line, offset, pointer, template.format(*values)))

    def to_dict(self) -> dict[str, Any]:
        found = {"problems": [f.to_dict() for f in self.problems], "warnings": [f.to_dict() for f in self.warnings]}
        return {"ok": self.ok, **vars(self), **found}


def verify(ledger: Path, head: Path) -> Verification:
    """Read the whole ledger once. Lines appended meanwhile may or may not be seen."""
    result = Verification()
    marks = _ChainMarks(head, result)
    lives = _Lives(result)
    value, number, line_start, parts = bytes.fromhex(chain.ZERO), 0, 0, b""
    extend = chain.extend
    for offset, piece in chain.pieces(ledger):
        if not piece.endswith(b"\n"):
            value = extend(value, piece)
            parts = parts or piece  # of a very long line the first part is enough to call it too long
            continue
        value = extend(value, piece)
        number += 1
        line = parts + piece if parts else piece
        _check_line(line, number, line_start, lives, result)
        line_start, parts = offset + len(piece), b""
        if number == marks.next_line:
            marks.reached(number, line_start, value.hex())
    if parts:
        number += 1
        result.torn_tail = True
        result.problem(number, line_start, "", "the last line is torn: it has no newline at its end")
    result.lines = number
    marks.ended(number, line_start)
    return result


class _ChainMarks:
    """The seals of the head in order of their lines, compared as the ledger is read."""

    def __init__(self, head: Path, result: Verification):
        found = chain.seals(head)
        result.accepted = [{"reason": s.reason, "ts": s.ts} for s in found if s.reason is not None]
        start = max((n for n, s in enumerate(found) if s.reason is not None), default=-1)
        self._seals = sorted((s for s in found[start + 1 :] if s.lines > 0), key=lambda s: s.lines)
        self._position = 0
        self._good_lines = 0
        self._broken = False
        self._result = result
        result.sealed_lines = self._seals[-1].lines if self._seals else 0
        if not found and head.exists() and head.stat().st_size:
            result.problem(1, 0, "", f"{head.name} has no readable seal")

    @property
    def next_line(self) -> int:
        return self._seals[self._position].lines if self._position < len(self._seals) else -1

    def reached(self, number: int, end: int, value: str) -> None:
        while self.next_line == number:
            seal = self._seals[self._position]
            self._position += 1
            if not self._broken and (seal.chain != value or seal.offset != end):
                self._break(number, end)
        if not self._broken:
            self._good_lines = number

    def ended(self, lines: int, end: int) -> None:
        if self._position < len(self._seals) and not self._broken:
            missing = self._seals[-1].lines - lines
            where = f"the ledger ends after line {lines}, sealed were {self._seals[-1].lines}"
            if missing > 0:
                self._result.problem(lines, end, "", f"{where}: lines were removed")
            self._broken = True
        if not self._broken:
            self._result.unsealed_lines = lines - self._good_lines

    def _break(self, number: int, end: int) -> None:
        self._broken = True
        first = self._good_lines + 1
        which = f"line {number} is" if first == number else f"among lines {first} to {number} one is"
        message = f"{which} not what was sealed: rewritten, removed or reordered"
        self._result.problem(first, end, "", message)


class _Lives:
    """What lines say about each id: it starts once, ends once, and not before it started."""

    def __init__(self, result: Verification):
        self.result = result
        self.ended: set[int] = set()
        self.started: dict[int, datetime] = {}
        self.latest = datetime.min.replace(tzinfo=UTC)

    def see(self, identity: str, status: str, ts: datetime, line: int, offset: int) -> None:
        number = int(identity[2:])
        if number in self.ended:
            again = "starts" if status == "running" else "ends"
            self.result.problem(line, offset, "/id", f"{identity} {again} again after its end; allowed: one end per id")
        elif status == "running":
            if number in self.started:
                self.result.problem(line, offset, "/id", f"{identity} starts twice; allowed: once")
            self.started[number] = ts
        else:
            began = self.started.pop(number, None)
            if began is not None and ts < began:
                self.result.problem(line, offset, "/ts", f"{identity} ends at {ts:%FT%TZ}, before it started")
            self.ended.add(number)
        if ts < self.latest:
            self.result.warning(line, offset, "/ts", "the time goes back by {}", self.latest - ts)
        else:
            self.latest = ts


def _check_line(line: bytes, number: int, offset: int, lives: _Lives, result: Verification) -> None:
    try:
        row = _decode(line)
    except (ValueError, RecursionError):
        row = None
    if row is not None and JOB_ID.fullmatch(row.id) and row.status and row.ts and _is_strict(line, row):
        lives.see(row.id, row.status, row.ts, number, offset)
        if row.completed_at and row.started_at and row.completed_at < row.started_at:
            _ends_early(number, offset, result)
        return
    _check_slowly(line, number, offset, lives, result)


def _is_strict(line: bytes, row: _Line) -> bool:
    """Whether the bytes hold exactly what was decoded: no key twice, no half of a surrogate pair, no deep nesting.

    True at once for a line as we write it, soon for any compact one, after a careful parse for others.
    """
    if len(line) > journal.MAX_LINE_BYTES:
        return False
    body = line[:-1]
    try:
        if body.count(b"[") + body.count(b"{") > strict_json.MAX_DEPTH:
            strict_json.loads(body)
        if _encode(row) == body or _encode(_decode_any(body)) == body:
            return True
        strict_json.loads(body)
        return True
    except (ValueError, RecursionError, strict_json.Fault):
        return False


def _check_slowly(line: bytes, number: int, offset: int, lives: _Lives, result: Verification) -> None:
    if not line.strip():
        return
    record = journal.parse_line(line, number)
    if isinstance(record, journal.Problem):
        place = record.at.split(" ", 1)
        result.problem(number, offset, place[1] if len(place) > 1 else "", record.message)
        return
    if not is_plainly_valid(record):
        from gpu_skills import schemas

        found = schemas.problems(record, "jobs")
        for p in found:
            result.problem(number, offset, p.pointer, p.message)
        if found:
            return
    lives.see(record["id"], record["status"], parse_timestamp(record["ts"]), number, offset)
    began, ended = record.get("started_at"), record.get("completed_at")
    if began and ended and parse_timestamp(ended) < parse_timestamp(began):
        _ends_early(number, offset, result)
    if record["status"] in TERMINAL_WORDS and isinstance(record.get("cost_usd"), float):
        if round(record["cost_usd"], 6) != record["cost_usd"]:
            result.warning(number, offset, "/cost_usd", "{} has more than six places", record["cost_usd"])


def _ends_early(number: int, offset: int, result: Verification) -> None:
    result.problem(number, offset, "/completed_at", "completed_at is before started_at")
