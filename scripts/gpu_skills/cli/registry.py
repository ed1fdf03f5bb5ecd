"""`gpu registry …`: the records of providers, machines, deployments, models and workflows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gpu_skills.cli.base import LazyGroup, command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table

_HERE = "gpu_skills.cli.registry:"
KINDS = ("providers", "machines", "deployments", "models", "workflows")
registry = LazyGroup(
    "registry",
    help=f"The project's records: {', '.join(KINDS)}. Plain arrays in .pi/gpu that may be read and edited by hand.",
    lazy={
        "validate": (_HERE + "validate", "Everything wrong with the records, by file and line; reads only."),
        "show": (_HERE + "show", "All records of a kind, or one; reads only."),
        "put": (_HERE + "put", "Add a record, or replace the one of the same id."),
        "query": (_HERE + "query", "Ask with a jq program; reads only."),
    },
)
# What a person wants to see of a record first, where it has it.
_COLUMNS = ("id", "provider", "instance_id", "gpu", "model", "version", "endpoint", "status")


@command(
    "validate",
    reads_only=True,
    example="gpu registry validate",
    exits="0 all is well · 2 a record is wrong or no project",
)
@click.argument("kinds", metavar="[KIND]...", nargs=-1, type=click.Choice(KINDS))
def validate(context: Context, kinds: tuple[str, ...]) -> Output:
    """Check the records against their schemas and rules: file, line, pointer, found, allowed, nearest. Reads only."""
    from gpu_skills.state import registry as records

    checked = tuple(dict.fromkeys(kinds)) or KINDS
    found = records.validate(context.project, checked)
    document = {"ok": not found, "checked": list(checked), "problems": [p.to_dict() for p in found]}
    text = "\n".join(map(str, found)) if found else f"{', '.join(checked)}: all is well"
    return Output(document, text, exit_code=2 if found else 0)


@command(
    "show", reads_only=True, example="gpu registry show deployments", exits="0 done · 2 no such record, or a wrong one"
)
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("identity", metavar="[ID]", required=False)
@click.option("--limit", type=click.IntRange(1, 10_000), default=200, show_default=True)
def show(context: Context, kind: str, identity: str | None, limit: int) -> Output:
    """All records of a kind, the newest last, or the one of an ID. Reads only."""
    from gpu_skills.state import registry as records

    found = records.show(context.project, kind, identity)
    shown = found[-limit:]
    document = {"kind": kind, "records": shown, "left_out": len(found) - len(shown)}
    if identity is not None:
        return Output(document, _pretty(shown[0]))
    if not shown:
        return Output(document, f"no {kind} yet")
    columns = [name for name in _COLUMNS if any(record.get(name) is not None for record in shown)]
    rows = [[_cell(record.get(name)) for name in columns] for record in shown]
    text = table(rows, [name.upper() for name in columns])
    if document["left_out"]:
        text += f"\n… and {document['left_out']} older ones (--limit)"
    return Output(document, text)


@command(
    "put",
    example='echo \'{"id": "dep_a41c", "provider": "ssh", "status": "installing"}\' | gpu registry put deployments',
    exits="0 done · 2 the record is wrong · 3 refused",
)
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--file", type=click.Path(path_type=Path), help="Read the object from this file instead of stdin.")
def put(context: Context, kind: str, file: Path | None) -> Output:
    """Add one record, or replace the one of the same id; the rest of the file stays. Writes only our records, no cost.

    A JSON object comes on stdin. `ready` needs a successful test_generation; what is destroyed stays destroyed.
    """
    from gpu_skills.cli import given
    from gpu_skills.errors import StateError, UsageError
    from gpu_skills.state import registry as records
    from gpu_skills.state import strict_json

    data, name = given.read(context, file, command="gpu registry put")
    try:
        record = strict_json.loads(data)
    except strict_json.Fault as fault:
        raise StateError(
            file=name, at=fault.at, problem=str(fault), next_step=f"correct {name} and give it again"
        ) from fault
    if not isinstance(record, dict):
        raise UsageError(f"{name} is not one JSON object", next_step="gpu registry put --help")
    written = records.put(context.project, kind, record, clock=context.clock)
    return Output({"kind": kind, "record": written}, f"{kind}.json has {written['id']}")


@command("query", reads_only=True, example="gpu registry query '.deployments[] | select(.status == \"ready\") | .id'")
@click.argument("program")
@click.option("--kind", type=click.Choice(KINDS), help="Ask about this array alone, not the object of all five.")
def query(context: Context, program: str, kind: str | None) -> Output:
    """Run a jq program over the records, one result a line. It sees nothing else and has 5 s. Reads only."""
    from gpu_skills.state import registry as records

    return results(records.query(context.project, program, kind))


def results(found: list[Any]) -> Output:
    """What a jq program gave."""
    return Output({"results": found}, "\n".join(json.dumps(value, ensure_ascii=True) for value in found))


def _pretty(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=True)


def _cell(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
