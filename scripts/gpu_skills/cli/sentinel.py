"""`gpu sentinel`: one bounded pass that ends what is past its deadline. For any scheduler, on any host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import RENTED_PROVIDERS, Context
from gpu_skills.cli.durations import DURATION
from gpu_skills.cli.output import Output, say, table
from gpu_skills.errors import GpuError, NoProject, UsageError
from gpu_skills.units import counted, format_usd

if TYPE_CHECKING:
    from datetime import datetime

    from gpu_skills.lifecycle.guard.sentinel import Note, Pass
    from gpu_skills.lifecycle.operator import Operator


@command(
    "sentinel",
    example="gpu sentinel --provider vast --project-id my-fleet --receipt s3://ours/sentinel.json",
    exits="0 done · 1 the receipt cannot be written · 2 usage · 3 refused · "
    "5 the provider refused or cannot be reached · 6 something told to end was not seen to end: run it again",
)
@click.option("--provider", required=True, metavar="P", help="Whose account: vast or runpod.")
@click.option("--project-id", metavar="ID", help="Whose machines; without it those of the project in this directory.")
@click.option("--receipt", metavar="PLACE", help="Also leave the receipt here: a file, or s3://BUCKET/KEY.")
@click.option("--deadlines", metavar="FILE", help="Deadlines newer than the labels': {intent or instance id: time}.")
@click.option("--storage-grace", type=DURATION, default="24h", show_default=True, help="How long a disk is kept.")
@click.option("--wait", "wait_s", type=DURATION, default="4m", show_default=True, help="Longest look for the end.")
def sentinel(
    context: Context,
    provider: str,
    project_id: str | None,
    receipt: str | None,
    deadlines: str | None,
    storage_grace: float,
    wait_s: float,
) -> Output:
    """Stop or destroy this project's machines that are past their deadline; nothing else is touched. One pass.

    It needs a provider's key and the project's id, no project directory: the deadline stands in each label. A machine
    whose disk survives is stopped and destroyed after --storage-grace, another one destroyed; a protected one is
    stopped at most. Run it every ten minutes from cron, a CI schedule or another host.
    """
    from gpu_skills.lifecycle.guard import sentinel as passes
    from gpu_skills.lifecycle.guard import sentinel_records

    if provider not in RENTED_PROVIDERS:
        raise UsageError(f"nothing is rented at {provider[:80]!r}: there are {', '.join(RENTED_PROVIDERS)}")
    op = _local(context, project_id)
    project_id = project_id or (op.project.project_id if op is not None else None)
    if project_id is None:
        raise UsageError("no project here: name its id with --project-id", next_step="gpu sentinel --help")
    reader, writer, account = context.provider(provider), context.provider_writer(provider), context.account(provider)
    own = _own_receipt(context, provider, account, project_id)
    told = sentinel_records.read_deadlines(deadlines) if deadlines is not None else {}
    known, earlier, protected, note = _from_records(op, provider, account)
    earlier += [found for place in (own, receipt) if place and (found := _read(place)) is not None]
    began = context.clock.now()
    try:
        done = passes.run_pass(
            reader,
            writer,
            project_id,
            account=account,
            clock=context.clock,
            deadlines=_later(known, told),
            earlier=earlier,
            storage_grace_s=storage_grace,
            wait_s=wait_s,
            protected=protected,
            note=note,
        )
    except BaseException:  # the receipt of the pass before says nothing of what this one left undone
        broken = passes.broken_off(provider, account, project_id, began=began, clock=context.clock, earlier=earlier)
        _leave(broken, own, receipt)
        raise
    written, failure = _leave(done, own, receipt)
    if op is not None:
        sentinel_records.tell(op, done)
        context.tell_what_is_due()
    if done.problem is not None:
        raise done.problem
    if failure is not None and done.is_confirmed:
        raise failure
    return _shown(done, written)


def _local(context: Context, project_id: str | None) -> Operator | None:
    """The records of this very project, where there are some."""
    try:
        if project_id is not None and context.project.project_id != project_id:
            return None
        return context.operator
    except NoProject:
        return None


def _from_records(
    op: Operator | None, provider: str, account: str
) -> tuple[dict[str, datetime | None], list[Any], set[str], Note]:
    """What the records know beside the labels. A broken record does not keep a pass from ending what is due."""
    from gpu_skills.lifecycle.guard import sentinel_records

    if op is None:
        return {}, [], set(), lambda action, seen, why, result: None
    record = sentinel_records.recorder(op, provider)

    def note(action: str, seen: Any, why: str, result: str | None) -> None:
        try:
            record(action, seen, why, result)
        except (GpuError, OSError) as exc:
            said = exc.message if isinstance(exc, GpuError) else str(exc)
            say(f"not on record: {action} {provider} {seen.instance_id}: {said}")

    try:
        known = sentinel_records.deadlines(op, provider)
        stopped = [sentinel_records.stops(op, provider, account)]
        protected = sentinel_records.protected(op, provider)
    except GpuError as exc:
        say(f"without the records of this project: {exc.message}")
        known, stopped, protected = {}, [], set()
    return known, stopped, protected, note


def _later(known: dict[str, datetime | None], told: dict[str, datetime | None]) -> dict[str, datetime | None]:
    """Of two deadlines the later one; none at all, which is production, is the latest."""
    found = dict(known)
    for key, moment in told.items():
        before = found.get(key)
        found[key] = moment if key not in found or moment is None or before is None else max(before, moment)
    return found


def _own_receipt(context: Context, provider: str, account: str, project_id: str) -> str | None:
    from gpu_skills import userdirs
    from gpu_skills.lifecycle.guard import receipts

    try:
        return str(receipts.own_path(userdirs.state_dir(context.environ), provider, account, project_id))
    except userdirs.NoHome as exc:
        say(f"no receipt of this user: {exc.message}")
        return None


def _read(place: str) -> Any:
    from gpu_skills.lifecycle.guard import receipts

    try:
        return receipts.read(place)
    except GpuError as exc:
        say(f"without the receipt of the pass before: {exc.message}")
        return None


def _leave(done: Pass, own: str | None, receipt: str | None) -> tuple[list[str], GpuError | None]:
    """Where the receipt stands now, and why it does not stand where it should."""
    from pathlib import Path

    from gpu_skills.lifecycle.guard import receipts
    from gpu_skills.state import files

    written: list[str] = []
    failure: GpuError | None = None
    for place in (own, receipt):
        if place is None:
            continue
        try:
            if place == own:
                files.make_directory(Path(place).parent)
            receipts.write(place, done.to_record())
            written.append(place)
        except GpuError as exc:
            say(f"no receipt at {place}: {exc.message}")
            failure = exc
    return written, failure


def _shown(done: Pass, written: list[str]) -> Output:
    document = {"pass": done.to_record(), "receipts": written}
    lines = []
    if done.rows:
        rows = []
        for row in done.rows:
            record = row.to_record()
            burn = "?" if record["burn_usd_hr"] is None else f"{format_usd(record['burn_usd_hr'])}/h"
            deadline = record["deadline_at"] or "never"
            rows.append([record["instance_id"], record["class"], record["status"], burn, deadline, record["result"]])
        lines.append(table(rows, ["INSTANCE", "CLASS", "WAS", "BURN", "DEADLINE", "RESULT"]))
        lines += [f"{row.seen.instance_id}: {row.alarm}" for row in done.rows if row.alarm is not None]
    lines.append(
        f"{counted(len(done.rows), 'machine')} of {done.project_id} on {done.provider}, {done.foreign} foreign"
    )
    lines += [f"receipt: {place}" for place in written]
    code = 0 if done.is_confirmed else 6 if done.complete else 5
    if code:
        lines.append("not everything that is due is seen to have ended: run it again")
    return Output(document, "\n".join(lines), exit_code=code)
