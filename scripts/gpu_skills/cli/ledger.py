"""`gpu ledger …`: the append-only record of jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gpu_skills.cli.base import LazyGroup, command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output
from gpu_skills.units import counted

_HERE = "gpu_skills.cli.ledger:"
ledger = LazyGroup(
    "ledger",
    help="The ledger of jobs (.pi/gpu/jobs.jsonl): appended to, never rewritten.",
    lazy={
        "append": (_HERE + "append", "Add lines, all or none; id and ts are filled in."),
        "verify": (_HERE + "verify", "Every line against the schema and the hash chain; reads only."),
        "query": (_HERE + "query", "Ask with a jq program; reads only."),
        "tail": (_HERE + "tail", "The last lines as they stand; reads only."),
        "reseal": (_HERE + "reseal", "Accept an honest change by hand, with a reason."),
    },
)
SHOWN = 100


@command(
    "append",
    example='echo \'{"status": "completed", "model": "sdxl", "cost_usd": 0.12}\' | gpu ledger append',
    exits="0 written · 2 a record is wrong, nothing written · 3 refused",
)
@click.option("--file", type=click.Path(path_type=Path), help="Read from this file instead of stdin.")
@click.option("--private", multiple=True, metavar="NAME", help="Keep only the hash of this input.")
def append(context: Context, file: Path | None, private: tuple[str, ...]) -> Output:
    """Add one object, or one a line, all or none. Missing id and ts are filled in. Writes only our records, no cost.

    The first line of an id says `running`, the second how it ended; a job that is known at its end needs only that.
    Inputs are kept as the policy's ledger_inputs says.
    """
    from gpu_skills.cli import given
    from gpu_skills.state.ledger import read_records

    _ = context.policy  # what may be kept of inputs is the user's word, not a guess
    data, name = given.read(context, file, command="gpu ledger append")
    lines = context.ledger.append(read_records(data, name), private=private)
    document = {
        "appended": len(lines),
        "lines": [{"job": line["id"], "status": line["status"], "ts": line["ts"]} for line in lines[:SHOWN]],
        "left_out": max(0, len(lines) - SHOWN),
    }
    shown = ", ".join(f"{line['id']} {line['status']}" for line in lines[:10])
    return Output(document, f"appended {len(lines)}: {shown}" + (" …" if len(lines) > 10 else ""))


@command(
    "verify",
    reads_only=True,
    example="gpu ledger verify",
    exits="0 all is well · 2 lines are wrong or were changed",
)
def verify(context: Context) -> Output:
    """Check every line: schema, one start and one end per id, and the hash chain. Reads only; nothing is mended.

    Found are lines that were rewritten, removed or reordered, and a torn last line. Lines appended by hand are well:
    they count as not sealed yet, and the next append seals them.
    """
    result = context.ledger.verify()
    lines = [f"jobs.jsonl:{f.line} (byte {f.offset}): {f.message}" for f in result.problems]
    lines += [f"jobs.jsonl:{f.line} (byte {f.offset}): warning: {f.message}" for f in result.warnings[:20]]
    hidden = result.problem_count - len(result.problems) + result.warning_count - len(result.warnings[:20])
    if hidden:
        lines.append(f"… and {hidden} more")
    lines += [f"accepted {a.get('ts')}: {a.get('reason')}" for a in result.accepted]
    state = "all is well" if result.ok else counted(result.problem_count, "problem")
    unsealed = f", {result.unsealed_lines} not sealed yet" if result.unsealed_lines else ""
    lines.append(f"{counted(result.lines, 'line')}{unsealed}: {state}")
    hints = [] if result.ok else ["an honest change by hand is accepted with: gpu ledger reseal --reason TEXT"]
    return Output(result.to_dict(), "\n".join(lines), exit_code=0 if result.ok else 2, hints=hints)


@command("query", reads_only=True, example="gpu ledger query 'map(select(.status == \"failed\")) | length'")
@click.argument("program")
def query(context: Context, program: str) -> Output:
    """Run a jq program over all good lines as one array. It sees nothing else and has 5 s. Reads only."""
    from gpu_skills.cli.registry import results

    return results(context.ledger.query(program))


@command("tail", reads_only=True, example="gpu ledger tail -n 5")
@click.option("-n", "--lines", "count", type=click.IntRange(1, 1000), default=10, show_default=True)
def tail(context: Context, count: int) -> Output:
    """The last lines as they stand, oldest first; one that cannot be read is shown as a problem. Reads only."""
    from gpu_skills.state import journal

    documents: list[dict[str, Any]] = []
    text: list[str] = []
    for found in context.ledger.tail(count):
        if isinstance(found, journal.Problem):
            documents.append({"problem": {"at": found.at, "message": found.message, "torn": found.torn}})
            text.append(f"cannot be read{' (torn)' if found.torn else ''}: {found.message}")
        else:
            documents.append({"record": found})
            text.append(json.dumps(found, ensure_ascii=True))
    return Output({"lines": documents}, "\n".join(text) or "no lines yet")


@command(
    "reseal",
    example='gpu ledger reseal --reason "merged the ledgers of two clones"',
    exits="0 done · 2 no reason · 3 refused",
)
@click.option("--reason", required=True, metavar="TEXT", help="Why the change is right; it stays on record.")
def reseal(context: Context, reason: str) -> Output:
    """Accept the ledger as it is now, after a change by hand. The lines stay; the reason is kept. Costs nothing."""
    seal = context.ledger.reseal(reason)
    document = {"lines": seal.lines, "chain": seal.chain, "reason": reason}
    return Output(document, f"sealed {seal.lines} lines as they are")
