"""What was spent, summed from the ledger and the charges: fast over a million lines, exact about what it left out."""

from __future__ import annotations

import math
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import UsageError
from gpu_skills.state import chain, journal, prefix_cache, strict_json
from gpu_skills.state.job_record import TERMINAL_WORDS
from gpu_skills.units import MAX_USD, json_number, usd

BY = ("provider", "model", "status", "day", "kind")
JOB = "job"
_BLOCK = 256 * 1024
_SAVE_AFTER_BYTES = 4 << 20
_SMALL_BYTES = 1 << 20
_SPLIT_AFTER_BYTES = 32 << 20
# Up to here every line is known to be strict JSON. In a longer range only what changes the total is looked for: each
# further key costs a sixth of the total, the rest twice as much, and `ledger verify` has it.
_STRICT_BYTES = 32 << 20
_BRACKETS = b"{}[]"
_ALL_BUT_BRACKETS = bytes(sorted(set(range(256)) - set(_BRACKETS)))
_PAIRS_TRIED = 20
_SHOWN_OFFSETS = 20
_MAX_CACHED_GROUPS = 50_000
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")

# (kind, status, provider, model, day) → [cost_usd, lines]
Key = tuple[str, str, str | None, str | None, str]


@dataclass(frozen=True)
class Row:
    key: str | None
    cost_usd: Decimal
    jobs: int


@dataclass(frozen=True)
class Spend:
    """total_usd over `jobs` ended jobs (failed ones too) and `charges` lines; rows when it was asked `by` something.

    incomplete: some lines could not be read; bad_lines says how many, bad_offsets where the first of them begin.
    """

    total_usd: Decimal
    jobs: int
    charges: int
    by: str | None
    rows: list[Row]
    incomplete: bool
    bad_lines: int
    bad_offsets: dict[str, list[int]]

    def to_dict(self) -> dict[str, Any]:
        rows = [{"key": r.key, "cost_usd": json_number(r.cost_usd), "jobs": r.jobs} for r in self.rows]
        return {**vars(self), "total_usd": json_number(self.total_usd), "rows": rows}


@dataclass
class Sums:
    """Sums of a part of a file. crc: (start, end, CRC-32) of the parts that were read."""

    groups: dict[Key, list[Any]] = field(default_factory=dict)
    bad_lines: int = 0
    bad_offsets: list[int] = field(default_factory=list)
    crc: list[tuple[int, int, int]] = field(default_factory=list)
    end: int = 0  # just behind the last whole line

    def add(self, other: Sums) -> None:
        for key, (cost, lines) in other.groups.items():
            mine = self.groups.setdefault(key, [0.0, 0])
            mine[0] += cost
            mine[1] += lines
        self.bad_lines += other.bad_lines
        self.bad_offsets = (self.bad_offsets + other.bad_offsets)[:_SHOWN_OFFSETS]
        self.crc += other.crc
        self.end = max(self.end, other.end)


def total(
    ledger: Path,
    head: Path,
    *,
    charges: Path | None = None,
    by: str | None = None,
    status: str | None = None,
    since: str | None = None,
    may_save: bool = True,
) -> Spend:
    """Sum the ledger, and `charges` when given. status: a ledger word. since: a UTC day or a time with zone.

    What has no readable time is in every period: better shown twice than lost.
    """
    if by is not None and by not in BY:
        raise UsageError(f"cannot group spend by {by!r}; allowed are {', '.join(BY)}", next_step="gpu spend --help")
    day, moment = _since(since)
    jobs = _scan(ledger, JOB, moment=moment) if moment else _cached(ledger, head, may_save=may_save)
    others = _scan(charges, None, moment=moment) if charges else Sums()
    chosen: list[tuple[Key, float, int]] = []
    for key, (cost, lines) in [*jobs.groups.items(), *others.groups.items()]:
        kind, word, _provider, _model, on = key
        if (kind == JOB and word not in TERMINAL_WORDS and not cost) or "" < on < day:
            continue
        if status is not None and word != status:
            continue
        chosen.append((key, cost, lines))
    offsets = {"jobs.jsonl": jobs.bad_offsets, "charges.jsonl": others.bad_offsets}
    bad = jobs.bad_lines + others.bad_lines
    return Spend(
        total_usd=usd(math.fsum(cost for _key, cost, _lines in chosen)),
        jobs=sum(lines for key, _cost, lines in chosen if key[0] == JOB),
        charges=sum(lines for key, _cost, lines in chosen if key[0] != JOB),
        by=by,
        rows=_rows(chosen, by) if by else [],
        incomplete=bad > 0,
        bad_lines=bad,
        bad_offsets={name: found for name, found in offsets.items() if found},
    )


def _rows(chosen: Iterable[tuple[Key, float, int]], by: str) -> list[Row]:
    position = {"kind": 0, "status": 1, "provider": 2, "model": 3, "day": 4}[by]
    sums: dict[str | None, list[Any]] = {}
    for key, cost, lines in chosen:
        mine = sums.setdefault(key[position] or None, [[], 0])
        mine[0].append(cost)
        mine[1] += lines
    rows = [Row(key, usd(math.fsum(costs)), lines) for key, (costs, lines) in sums.items()]
    if by == "day":
        return sorted(rows, key=lambda r: r.key or "")
    return sorted(rows, key=lambda r: (-r.cost_usd, r.key or ""))


def _since(text: str | None) -> tuple[str, datetime | None]:
    """(first day, exact moment when it is not a midnight)."""
    if text is None:
        return "", None
    try:
        moment = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) if len(text) == 10 else parse_timestamp(text)
    except (ValueError, OverflowError) as exc:
        allowed = "a day like 2026-11-30 or a time with its zone like 2026-11-30T18:08:00Z"
        raise UsageError(f"since {text!r} is not {allowed}", next_step="gpu spend --help") from exc
    is_midnight = (moment.hour, moment.minute, moment.second, moment.microsecond) == (0, 0, 0, 0)
    return moment.strftime("%Y-%m-%d"), None if is_midnight else moment


# the ledger, from where the cache ends -------------------------------------------------------------------------------


def _cached(ledger: Path, head: Path, *, may_save: bool) -> Sums:
    stamp = chain.stamp_of(ledger)
    if stamp is None:
        return Sums()
    cache, seal = ledger.with_name("jobs.spend.json"), chain.last_seal(head)
    sums = _from_prefix(prefix_cache.load(cache, ledger, seal, may_save=may_save))
    began = sums.end
    sums.add(_scan(ledger, JOB, start=began, end=stamp.size))
    worthwhile = stamp.size >= prefix_cache.WORTHWHILE_BYTES and sums.end - began > _SAVE_AFTER_BYTES
    if may_save and worthwhile and len(sums.groups) <= _MAX_CACHED_GROUPS and sums.end == stamp.size:
        data = {
            "groups": [[*key, *value] for key, value in sums.groups.items()],
            "bad_lines": sums.bad_lines,
            "bad_offsets": sums.bad_offsets,
        }
        prefix_cache.save(cache, prefix_cache.Prefix(sums.end, sums.crc, data), stamp=stamp, seal=seal)
    return sums


def _from_prefix(prefix: prefix_cache.Prefix | None) -> Sums:
    if prefix is None:
        return Sums()
    try:
        groups = {(g[0], g[1], g[2], g[3], g[4]): [g[5], g[6]] for g in prefix.data["groups"]}
        return Sums(groups, prefix.data["bad_lines"], prefix.data["bad_offsets"], list(prefix.sums), prefix.offset)
    except (KeyError, TypeError, IndexError):
        return Sums()


def _scan(
    path: Path, kind: str | None, *, start: int = 0, end: int | None = None, moment: datetime | None = None
) -> Sums:
    """Sums of a range of lines; a large range is shared among the processors."""
    stamp = chain.stamp_of(path)
    if stamp is None:
        return Sums()
    end = stamp.size if end is None else end
    if end - start < _SMALL_BYTES:
        return _sum_small(path, kind, start, end, moment)
    workers = min(os.cpu_count() or 1, 4, (end - start) // _SPLIT_AFTER_BYTES + 1)
    bounds = _line_bounds(path, start, end, workers)
    strict = end - start <= _STRICT_BYTES
    parts = _in_processes([lambda a=a, b=b: _sum_range(path, kind, a, b, moment, strict) for a, b in bounds])
    sums = Sums()
    for part in parts:
        sums.add(part)
    return sums


def _line_bounds(path: Path, start: int, end: int, parts: int) -> list[tuple[int, int]]:
    cuts = [start]
    with open(path, "rb") as stream:
        for n in range(1, parts):
            stream.seek(start + (end - start) * n // parts)
            stream.readline()
            cuts.append(min(stream.tell(), end))
    cuts.append(end)
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def _in_processes(tasks: list[Callable[[], Sums]]) -> list[Sums]:
    """The first task here, each other one in a fork of this process, which sends back its sums and ends."""
    import msgspec  # noqa: F401 - once, before the forks

    children: list[tuple[int, int, Callable[[], Sums]]] = []
    for task in tasks[1:]:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # no more processes allowed
            os.close(reader)
            os.close(writer)
            children.append((0, -1, task))
            continue
        if pid == 0:
            status = 1
            try:
                os.close(reader)
                with open(writer, "wb") as stream:
                    pickle.dump(task(), stream)
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        children.append((pid, reader, task))
    results = [tasks[0]()] if tasks else []
    for pid, reader, task in children:
        data = b""
        if pid:
            with open(reader, "rb") as stream:
                data = stream.read()
            if os.waitpid(pid, 0)[1] != 0:
                data = b""
        results.append(pickle.loads(data) if data else task())
    return results


# one range of lines ----------------------------------------------------------------------------------------------


def _sum_small(path: Path, kind: str | None, start: int, end: int, moment: datetime | None) -> Sums:
    """As `_sum_range`, without the fast decoder, whose import costs more than a small file."""
    sums = Sums()
    for offset, _number, line in journal.raw_lines(path, start, stop=end):
        if line.endswith(b"\n"):
            sums.end = offset + len(line)
        _add_carefully(sums, kind, offset, line, moment)
    return sums


def _sum_range(
    path: Path, kind: str | None, start: int, end: int, moment: datetime | None, strict: bool = True
) -> Sums:
    """Sums of whole blocks with a decoder that takes the last of two equal keys and any depth.

    A block that is not plainly free of both is read line by line, as a small file is. strict=False looks only for a
    second `cost_usd` in a line.
    """
    import gc
    from typing import Annotated, Literal

    import msgspec

    # The words of `status` as a Literal are one object each: nothing to allocate, cheap to compare.
    status_type: Any = Literal["completed", "failed", "running", "timeout", "cancelled", "lost"] if kind == JOB else str
    money: Any = Annotated[float, msgspec.Meta(ge=0 if kind == JOB else -MAX_USD, le=MAX_USD)]

    line_type = msgspec.defstruct(
        "Line",
        [
            *([("status", status_type)] if kind == JOB else [("kind", str)]),
            ("cost_usd", money | None, None) if kind == JOB else ("cost_usd", float),
            ("provider", str | None, None),
            ("model", str | None, None),
            ("completed_at", str | None, None),
            ("ts", str, ""),
        ],
        gc=False,
    )
    decoder = msgspec.json.Decoder(line_type)
    sums = Sums(end=start)
    groups = sums.groups
    crc, position, rest = 0, start, b""
    first_day = "" if moment is None else moment.strftime("%Y-%m-%d")
    gc_was_on = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and there are millions of it
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while position < end:
            block = os.pread(descriptor, min(_BLOCK, end - position), position)
            if not block:
                break
            crc = zlib.crc32(block, crc)
            position += len(block)
            cut = block.rfind(b"\n") + 1
            if not cut:
                rest += block
                continue
            whole, rest = rest + block[:cut], block[cut:]
            sums.end = position - len(rest)
            try:
                rows = decoder.decode_lines(whole)
            except (msgspec.DecodeError, RecursionError):
                _add_one_by_one(sums, kind, sums.end - len(whole), whole, moment)
                continue
            is_plain = _is_strict(whole) if strict else _money_stands_once(whole, len(rows))
            if kind != JOB or not is_plain:
                _add_one_by_one(sums, kind, sums.end - len(whole), whole, moment)
                continue
            if moment is not None:
                rows = [row for row in rows if not _is_before(row.completed_at or row.ts, moment, first_day)]
            for row in rows:
                when = row.completed_at or row.ts
                key = (kind, row.status, row.provider, row.model, when[:10] if when[-1:] == "Z" else _utc_day(when))
                group = groups.get(key)
                if group is None:
                    group = groups.setdefault((*key[:4], _utc_day(when)), [0.0, 0])
                    group[0] += row.cost_usd or 0.0
                    group[1] += 1
                else:
                    group[0] += row.cost_usd or 0.0
                    group[1] += 1
    finally:
        os.close(descriptor)
        if gc_was_on:
            gc.enable()
    if rest:  # a torn last line
        _add_carefully(sums, kind, sums.end, rest, moment)
    sums.crc = [(start, sums.end, crc if not rest else prefix_cache.checksum(path, start, sums.end))]
    return sums


def _is_strict(block: bytes) -> bool:
    """True when lines are strict JSON beyond doubt: written again they are the same, so no key stood there twice."""
    import msgspec

    if _may_be_deep(block):
        return False
    try:
        lines = msgspec.json.Decoder().decode_lines(block)
        return msgspec.json.Encoder().encode_lines(lines) == block
    except ValueError:  # in a field that the sums do not read
        return False


def _may_be_deep(block: bytes) -> bool:
    """Whether a line may nest deeper than strict JSON does. Brackets in strings count too: that costs a closer look."""
    left = block.translate(None, _ALL_BUT_BRACKETS)
    for _ in range(_PAIRS_TRIED):  # each takes the innermost level away
        less = left.replace(b"{}", b"").replace(b"[]", b"")
        if len(less) == len(left):
            break
        left = less
    return _PAIRS_TRIED + len(left) > strict_json.MAX_DEPTH


def _money_stands_once(block: bytes, lines: int) -> bool:
    # An escape may spell a key: "cost\u005fusd" is cost_usd again. One character is found ten times faster than four.
    if b"\\" in block and b"\\u00" in block and _ESCAPED_LETTER.search(block):
        return False
    return block.count(b'"cost_usd":') <= lines


def _add_one_by_one(sums: Sums, kind: str | None, offset: int, block: bytes, moment: datetime | None) -> None:
    for line in block.split(b"\n"):
        _add_carefully(sums, kind, offset, line + b"\n", moment)
        offset += len(line) + 1


def _add_carefully(sums: Sums, kind: str | None, offset: int, line: bytes, moment: datetime | None) -> None:
    """Add one line, or note it as bad: what money it stands for is then not known."""
    if not line.strip():
        return
    record = journal.parse_line(line if line.endswith(b"\n") else line + b"\n", 1)
    added = None if isinstance(record, journal.Problem) else _key_and_cost(record, kind)
    if added is None:
        sums.bad_lines += 1
        if len(sums.bad_offsets) < _SHOWN_OFFSETS:
            sums.bad_offsets.append(offset)
        return
    key, cost, when = added
    if moment is not None and _is_before(when, moment, moment.strftime("%Y-%m-%d")):
        return
    group = sums.groups.setdefault(key, [0.0, 0])
    group[0] += cost
    group[1] += 1


def _key_and_cost(record: dict[str, Any], kind: str | None) -> tuple[Key, float, str] | None:
    cost, status = record.get("cost_usd"), record.get("status")
    if kind == JOB:
        cost = 0 if cost is None else cost
        if status not in (*TERMINAL_WORDS, "running") or not _is_money(cost) or cost < 0:
            return None
        found_kind, word = JOB, status
    else:
        found_kind, word = record.get("kind"), ""
        if not isinstance(found_kind, str) or not _is_money(cost):
            return None
    provider, model = record.get("provider"), record.get("model")
    when = record.get("completed_at") or record.get("ts") or ""
    if not isinstance(when, str) or not isinstance(provider, str | None) or not isinstance(model, str | None):
        return None
    return (found_kind, word, provider, model, _utc_day(when)), float(cost), when


def _is_before(when: str, moment: datetime, first_day: str) -> bool:
    """Whether a time is before `moment` on its day, `first_day`; the days before it are left out by `total`.

    What is no time is not before: better shown twice than lost.
    """
    if (when[:10] if when[-1:] == "Z" else _utc_day(when)) != first_day:
        return False
    try:
        return parse_timestamp(when) < moment
    except (ValueError, OverflowError):
        return False


def _is_money(value: Any) -> bool:
    return type(value) in (int, float) and -MAX_USD <= value <= MAX_USD


def _utc_day(when: str) -> str:
    """The day that a time falls on; "" for what is no time: money without a date is in every period."""
    if when[-1:] == "Z" and _DAY.fullmatch(when[:10]):
        return when[:10]
    try:
        return parse_timestamp(when).astimezone(UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError):
        return ""
