"""The ledger of jobs: one line when a job starts, one when it ends, never rewritten."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.errors import JobNotFound, StateError, UsageError
from gpu_skills.state import chain, files, job_index, job_record, journal, strict_json
from gpu_skills.state.job_record import JOB_ID, STATE, TERMINAL_WORDS, is_terminal
from gpu_skills.state.project import Project
from gpu_skills.units import format_bytes, json_number

if TYPE_CHECKING:
    from gpu_skills.state.ledger_verify import Verification
    from gpu_skills.state.spend import Spend

OUTPUTS_NAME = "gpu-outputs"  # in the project: one folder for each job whose outputs were pulled
_MANY_IDS = 20
_LAST_ID = f"J-{job_record.MAX_JOB_NUMBER + 1}"


class Ledger:
    """The ledger of one project. inputs: `full`, `hash` or `none`, the policy's `ledger_inputs`.

    keeps_caches: False for whoever only reads: what was computed from the lines is then not written beside them.

    Reading takes no lock: lines are only ever added. What is bad in the file is passed over by the readers of jobs,
    counted by `spend` and told by `verify`.
    """

    def __init__(self, project: Project, clock: Clock, *, inputs: str = "full", keeps_caches: bool = True):
        self.project = project
        self.clock = clock
        self.inputs = inputs
        self._keeps_caches = keeps_caches and not project.is_read_only
        self.path = project.path("jobs.jsonl")
        self.head = project.path("jobs.head.jsonl")
        self._cache = project.path("jobs.index.json")
        self.charges = project.path("charges.jsonl")
        self._known: job_index.JobIndex | None = None
        self._sealer = chain.Sealer(self.path, self.head)
        weakref.finalize(self, self._sealer.close)

    # writing ----------------------------------------------------------------------------------------------------

    def new_job_id(self, *, above: int = 0) -> str:
        """An id nobody has: not in the ledger, not in `jobs/`, not in `gpu-outputs/`, and above this number.

        Making its folder is what reserves it. Outputs outlive records; those of two jobs in one folder are nobody's.
        """
        self.project.require_writable()
        folder = self.project.path("jobs")
        files.make_directory(folder)
        outputs = self.project.root / OUTPUTS_NAME
        number = max(above, self._index().max_number, _largest_number(folder), _largest_number(outputs))
        while True:
            number += 1
            if number > job_record.MAX_JOB_NUMBER:
                raise StateError(
                    file=f"{self.path.name}, {folder.name}/ or {outputs.name}/",
                    at="",
                    problem=f"found J-{number - 1:06d}, allowed are ids below it: none is left for the next job",
                    next_step="give that job a lower number there, then: gpu ledger reseal --reason TEXT",
                )
            job = f"J-{number:06d}"
            try:
                (folder / job).mkdir(mode=0o700)
                return job
            except FileExistsError:
                continue  # another process was faster
            except OSError as exc:
                raise files.writing_failed(folder / job, exc) from exc

    def start(self, record: dict[str, Any], *, private: Collection[str] = ()) -> dict[str, Any]:
        """Write the first line of a job and return it. private: names of inputs of which only the hash is kept."""
        return self.append([{**record, "status": "running"}], private=private)[0]

    def finish(self, record: dict[str, Any]) -> bool:
        """Write the terminal line of a job; False, and nothing written, when it already has one.

        What the first line says (provider, inputs, started_at) is carried over. JobNotFound for an id without one.
        """
        self.project.require_writable()
        job = str(record.get("id"))
        ending = {**record, "status": job_record.ledger_word(str(record.get("status")))}
        if ending["status"] not in TERMINAL_WORDS:
            raise UsageError(f"a job cannot end as {ending['status']!r}", next_step="gpu job finish --help")
        with files.lock(self.path):
            offset = self._index().open.get(job)
            if offset is None:
                if self.latest(job) is None:
                    raise JobNotFound(job=job)
                return False
            started = self._record_at(offset) or {}
            published = dict.fromkeys(job_record.FIELDS[:-2]) | {"artifacts": []}
            whole = {**published, **started, "ts": None, **ending}
            lines = [self._completed(whole, not_before=started.get("ts"))]
            self._append_locked(lines, _encoded(lines), chain.stamp_of(self.path))
            return True

    def append(self, records: Sequence[dict[str, Any]], *, private: Collection[str] = ()) -> list[dict[str, Any]]:
        """Add lines, all or none; return them as written. A missing id is made, a missing ts is now.

        SchemaInvalid or UsageError names the first record that cannot be a line: its fields, a second end or start, an
        end before the start.
        """
        self.project.require_writable()
        prepared = [dict(record) for record in records]
        for record in prepared:
            if record.get("id") is None:
                record["id"] = self.new_job_id()
            if isinstance(record.get("status"), str):  # an unknown word is refused with the record's number, below
                record["status"] = job_record.LEDGER_WORD.get(record["status"], record["status"])
            if isinstance(record.get("inputs"), dict) or private or self.inputs != "full":
                record["inputs"] = job_record.shortened_inputs(
                    record.get("inputs"), policy=self.inputs, private=private
                )
        # What takes long comes before the lock: others write meanwhile.
        if self._known is None:
            self._index()
        lines = self._completed_all(prepared, {})
        encoded = _encoded(lines)
        with files.lock(self.path):
            stamp = chain.stamp_of(self.path)
            index = self._index_for({line["id"] for line in lines}, stamp)
            if started := self._starts_of(lines, index):
                lines = self._completed_all(prepared, started)
                encoded = _encoded(lines)
            self._refuse_contradictions(lines, index)
            _refuse_early_ends(lines, started)
            self._append_locked(lines, encoded, stamp)
        return lines

    def reseal(self, reason: str) -> chain.Seal:
        """Accept the ledger as it is now, after an honest change by hand; the reason stays on record."""
        self.project.require_writable()
        if not reason.strip():
            raise UsageError("a reason is needed", next_step='gpu ledger reseal --reason "…"')
        journal_path = self.project.path("journal.jsonl")
        with files.lock(journal_path), files.lock(self.path):
            now = timestamp(self.clock.now())
            before = chain.last_seal(self.head) or chain.Seal()
            event = {
                "kind": "observation",
                "ts": now,
                "what": "ledger_resealed",
                "reason": reason,
                "details": {"chain_before": before.chain, "lines_before": before.lines},
            }
            journal.append_locked(journal_path, files.dumps_line(event))
            self._sealer.seal_locked()
            return chain.reseal(self.path, self.head, reason=reason, ts=now)

    def close(self) -> None:
        """Seal what this object appended. It happens by itself when the object goes or the process ends in order."""
        self._sealer.close()

    # reading ----------------------------------------------------------------------------------------------------

    @staticmethod
    def state_of(line: dict[str, Any]) -> str:
        """The state a user sees for a ledger line: `succeeded` for `completed`."""
        return STATE.get(str(line.get("status")), "lost")

    @staticmethod
    def is_open(line: dict[str, Any]) -> bool:
        return not is_terminal(line)

    def latest(self, job: str) -> dict[str, Any] | None:
        """The last line of an id, which is its state; None when there is none."""
        for record in self._mentions(job):
            if record.get("id") == job:
                return record
        return None

    def last_id(self) -> str | None:
        """The job that started last."""
        newest = self.jobs(limit=1)
        return newest[0]["id"] if newest else None

    def jobs(self, limit: int | None = None, *, status: str | None = None) -> list[dict[str, Any]]:
        """Last lines of jobs, the newest start first. status: a state or a ledger word."""
        word = None if status is None else job_record.ledger_word(status)
        last: dict[str, dict[str, Any]] = {}
        first_at: dict[str, int] = {}
        for offset, block in journal.blocks_backward(self.path, 1 << 20 if limit is None else 1 << 16):
            for position, record in reversed(list(_records(block, offset))):
                last.setdefault(record["id"], record)
                first_at[record["id"]] = position
            # A job whose first line lies further back started before all of these did.
            if limit is not None and offset > 0:
                started_here = [r for r in last.values() if word is None or r["status"] == word]
                if len(started_here) >= 2 * limit + 50:
                    break
        chosen = [r for r in last.values() if word is None or r["status"] == word]
        chosen.sort(key=lambda r: first_at[r["id"]], reverse=True)
        return chosen if limit is None else chosen[:limit]

    def count_jobs(self) -> int:
        return job_index.count(self.path)

    def open_jobs(self) -> list[dict[str, Any]]:
        """Last lines of the jobs that have no end yet, oldest first."""
        found = (self._record_at(offset) for offset in sorted(self._index().open.values()))
        return [record for record in found if record is not None]

    def jobs_on(self, machine_id: str) -> list[str]:
        """Ids of all jobs that ran on a machine, oldest first."""
        found = (r["id"] for r in self._mentions(machine_id) if r.get("machine_id") == machine_id)
        return list(reversed(dict.fromkeys(found)))

    def last_lines_on(self, machine_id: str) -> list[dict[str, Any]]:
        """Last lines of all jobs that ran on a machine, in the order of their last line."""
        last: dict[str, dict[str, Any]] = {}
        for record in self._mentions(machine_id):
            if record.get("machine_id") == machine_id:
                last.setdefault(record["id"], record)
        return list(reversed(last.values()))

    def tail(self, count: int = 10) -> list[dict[str, Any] | journal.Problem]:
        """The last lines as they stand, bad ones as problems, oldest first. Line numbers count from the first shown."""
        kept: list[bytes] = []
        for _offset, block in journal.blocks_backward(self.path):
            kept = [line for line in block.splitlines(keepends=True) if line.strip()] + kept
            if len(kept) >= count:
                break
        chosen = kept[-count:] if count > 0 else []
        return [journal.parse_line(line, number) for number, line in enumerate(chosen, 1)]

    def query(self, program: str, *, timeout_s: float = 5.0) -> list[Any]:
        """Results of a jq program over all good lines as one array, run in a child that sees nothing else.

        UsageError for a ledger that is too large for that, before it is read.
        """
        from gpu_skills.state import query

        stamp = chain.stamp_of(self.path)
        if stamp is not None and stamp.size > query.MAX_INPUT_BYTES:
            raise UsageError(
                f"the ledger has {format_bytes(stamp.size)}; a query takes up to {format_bytes(query.MAX_INPUT_BYTES)}",
                next_step="ask the file itself, line by line: jq -c PROGRAM .pi/gpu/jobs.jsonl",
            )
        lines = [r for _o, _n, r in journal.scan(self.path) if isinstance(r, dict)]
        return query.run(program, lines, timeout_s=timeout_s)

    def verify(self) -> Verification:
        """Check every line against the schema and the chain; no line is changed."""
        from gpu_skills.state import ledger_verify

        self.close()
        return ledger_verify.verify(self.path, self.head)

    def spend(
        self,
        *,
        by: str | None = None,
        status: str | None = None,
        since: str | None = None,
        include_charges: bool = False,
    ) -> Spend:
        """What jobs cost, and with `include_charges` everything else that machines billed. See `spend.Spend`.

        by: provider, model, status, day or kind. since: a UTC day (2026-11-30) or a time with zone.
        """
        from gpu_skills.state import spend

        word = None if status is None else job_record.ledger_word(status)
        return spend.total(
            self.path,
            self.head,
            charges=self.charges if include_charges else None,
            by=by,
            status=word,
            since=since,
            may_save=self._keeps_caches,
        )

    # inside ----------------------------------------------------------------------------------------------------

    def _index(self) -> job_index.JobIndex:
        self._known = job_index.refresh(self._known, self.path, self.head, self._cache, may_save=self._keeps_caches)
        return self._known

    def _index_for(self, jobs: set[str], stamp: chain.Stamp | None) -> job_index.JobIndex:
        """The index with all that the ledger says of these jobs; lines of others may be left undecoded.

        The lock is held; stamp: of the ledger as it is now.
        """
        index = self._known
        if index is not None and index.look(self.path, stamp):
            if not index.unread or index.unread.isdisjoint([job.encode() for job in jobs]):
                return index
        return self._index()

    def _completed_all(self, records: list[dict[str, Any]], started: dict[str, str]) -> list[dict[str, Any]]:
        """The records as lines. started: `ts` of the first line of jobs that are open."""
        known, lines = dict(started), []
        for number, record in enumerate(records, 1):
            line = self._completed(dict(record), number, not_before=known.get(str(record["id"])))
            if line["status"] == "running":
                known.setdefault(line["id"], line["ts"])
            lines.append(line)
        return lines

    def _starts_of(self, records: Sequence[dict[str, Any]], index: job_index.JobIndex) -> dict[str, str]:
        """`ts` of the line with which a job of these records started, where one is open and says so."""
        offsets = index.open
        jobs = {str(record["id"]) for record in records} & offsets.keys()
        found = {job: (self._record_at(offsets[job]) or {}).get("ts") for job in jobs}
        return {job: ts for job, ts in found.items() if ts}

    def _completed(
        self, record: dict[str, Any], number: int | None = None, *, not_before: str | None = None
    ) -> dict[str, Any]:
        """The record as a line: money rounded, time filled in, checked.

        not_before: when the job's first line was written. A clock that was set back since does not end a job before it.
        """
        if record.get("ts") is None:
            now = self.clock.now()
            record["ts"] = not_before if not_before and parse_timestamp(not_before) > now else timestamp(now)
        for key in ("cost_usd", "wasted_usd", "duration_s"):
            value = record.get(key)
            if type(value) is float and abs(value) < 1e15 and value == round(value, 6):  # nothing to round
                record[key] = int(value) if value.is_integer() else value
            elif isinstance(value, Decimal | float) and abs(value) < 1e15:
                record[key] = json_number(Decimal(str(value)))
        line = job_record.ordered(record)
        name = "record" if number is None else f"record {number}"
        if not job_record.is_plainly_valid(line):
            from gpu_skills import schemas

            schemas.check(line, "jobs", file=name, next_step=f"correct {name} and give it again")
        if line["id"] == _LAST_ID:
            raise UsageError(
                f"{name}: {_LAST_ID} would leave no id for the next job",
                next_step="gpu ledger append, without an id in the line",
            )
        return line

    def _append_locked(self, lines: list[dict[str, Any]], encoded: list[bytes], stamp: chain.Stamp | None) -> None:
        """stamp: of the ledger as it is now."""
        offset, _length = journal.append_locked(self.path, b"".join(encoded))
        after = self._sealer.appended(stamp)
        if self._known is not None:
            added = [(line["id"], line["status"], data) for line, data in zip(lines, encoded, strict=True)]
            self._known.add(offset, added, after)

    def _refuse_contradictions(self, lines: list[dict[str, Any]], index: job_index.JobIndex) -> None:
        """An id starts once and ends once, on disk and within the new lines."""
        older = [line["id"] for line in lines if int(line["id"][2:]) <= index.max_number]
        older = {job for job in older if job not in index.open}
        ended = older & index.recent
        if index.recent_from > 0:
            ended |= self._present(older - ended)
        running: set[str] = set()
        for number, line in enumerate(lines, 1):
            job = line["id"]
            if job in ended:
                raise UsageError(
                    f"record {number}: {job} has already ended; the ledger takes one end per id",
                    next_step="gpu ledger append with a new id, or without one",
                )
            if line["status"] != "running":
                ended.add(job)
            elif job in running or job in index.open:
                raise UsageError(f"record {number}: {job} has already started", next_step=f"gpu job status {job}")
            else:
                running.add(job)

    def _present(self, ids: set[str]) -> set[str]:
        """Which of these ids the ledger has."""
        if len(ids) <= _MANY_IDS:
            return {job for job in ids if self.latest(job) is not None}
        return {r["id"] for _o, _n, r in journal.scan(self.path) if isinstance(r, dict) and r.get("id") in ids}

    def _record_at(self, offset: int) -> dict[str, Any] | None:
        for _offset, _number, line in journal.raw_lines(self.path, offset):
            return _record(line)
        return None

    def _mentions(self, text: str) -> Iterator[dict[str, Any]]:
        """Records whose line has this string as a JSON value, newest first."""
        needle = json.dumps(text, ensure_ascii=False).encode()
        for _offset, block in journal.blocks_backward(self.path):
            end = len(block)
            while (found := block.rfind(needle, 0, end)) >= 0:
                start = block.rfind(b"\n", 0, found) + 1
                stop = block.find(b"\n", found)
                record = _record(block[start : stop if stop >= 0 else len(block)])
                if record is not None:
                    yield record
                end = start


def _encoded(lines: list[dict[str, Any]]) -> list[bytes]:
    try:
        encoded = [files.dumps_line(line) for line in lines]
    except (ValueError, TypeError, RecursionError, UnicodeEncodeError) as exc:
        raise UsageError(f"a record is not JSON: {exc}", next_step="gpu ledger append --help") from exc
    if len(max(encoded, key=len, default=b"")) > journal.MAX_LINE_BYTES:
        raise UsageError("a record is larger than 8 MB", next_step="put large inputs into a file and name it")
    return encoded


def _refuse_early_ends(lines: list[dict[str, Any]], started: dict[str, str]) -> None:
    """started: `ts` of the first line of jobs that are open."""
    known = dict(started)
    for number, line in enumerate(lines, 1):
        began = known.setdefault(line["id"], line["ts"])
        for key, value, start in (
            ("ts", line["ts"], began),
            ("completed_at", line.get("completed_at"), line.get("started_at")),
        ):
            if value and start and value != start and parse_timestamp(value) < parse_timestamp(start):
                raise UsageError(
                    f"record {number}: /{key} is {value}, before {line['id']} started at {start}",
                    next_step=f"correct {key} and give it again",
                )


def read_records(data: bytes, name: str) -> list[dict[str, Any]]:
    """The records of a text to append: one JSON object, however it is laid out, or one object a line."""
    try:
        whole = strict_json.loads(data)
        if isinstance(whole, dict):
            return [whole]
    except strict_json.Fault as fault:
        first_line = data.lstrip().split(b"\n", 1)[0]
        try:
            strict_json.loads(first_line)
        except strict_json.Fault:  # not one object a line either: the place in the whole text says most
            raise StateError(
                file=name, at=fault.at, problem=str(fault), next_step=f"correct {name} and give it again"
            ) from fault
    records: list[dict[str, Any]] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        parsed = journal.parse_line(line + b"\n", number)
        if isinstance(parsed, journal.Problem):
            raise StateError(
                file=name, at=parsed.at, problem=parsed.message, next_step=f"correct {name} and give it again"
            )
        records.append(parsed)
    if not records:
        raise UsageError(f"{name} has no records", next_step="gpu ledger append --help")
    return records


def _largest_number(folder: Path) -> int:
    largest = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # not there, or not ours to read
        for entry in entries:
            if JOB_ID.fullmatch(entry.name):
                largest = max(largest, int(entry.name[2:]))
    return largest


def _record(line: bytes) -> dict[str, Any] | None:
    """A usable line: an object with an id and a known status. Others are for `verify` to tell."""
    try:
        record = json.loads(line, parse_constant=strict_json.no_constant, parse_float=strict_json.finite)
        if strict_json.SURROGATE_ESCAPE.search(line):  # half a pair cannot even be printed
            strict_json.loads(line)
    except (ValueError, RecursionError, strict_json.Fault):
        return None
    if not isinstance(record, dict):
        return None
    identity, status = record.get("id"), record.get("status")
    if not isinstance(identity, str) or not JOB_ID.fullmatch(identity):
        return None
    return job_record.readable(record) if isinstance(status, str) and status in STATE else None


def _records(block: bytes, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for line in block.split(b"\n"):
        if (record := _record(line)) is not None:
            yield offset, record
        offset += len(line) + 1
