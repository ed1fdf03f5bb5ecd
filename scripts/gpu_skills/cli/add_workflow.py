"""`gpu model add-workflow`: a ComfyUI workflow becomes a versioned manifest in workflows.json."""

from __future__ import annotations

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table


@command(
    "add-workflow",
    example="gpu model add-workflow portrait.json --model sdxl",
    exits="0 on record · 2 it is no workflow in API format",
)
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("--id", "identity", metavar="ID", help="The name by which jobs mean it; else the file's name.")
@click.option("--model", metavar="MODEL", help="Id of the model it runs on.")
def add_workflow(context: Context, file: str, identity: str | None, model: str | None) -> Output:
    """Read a ComfyUI workflow in API format and put its inputs and outputs on record. Spends nothing.

    Other content under the same id is the next version. Runs use the copy that is kept here.
    """
    from gpu_skills.deployments import workflows

    found = workflows.add(context.project, context.cwd / file, context.clock, identity=identity, model=model)
    record = found.record
    inputs = record.get("inputs") or {}
    rows = [[name, one.get("type", "text"), _said(one)] for name, one in inputs.items() if isinstance(one, dict)]
    text = f"{found.id} version {record.get('version')} {'is on record' if found.is_new else 'was on record already'}\n"
    text += table(rows, ["input", "type", "default"]) if rows else "no inputs were found"
    text += f"\noutputs: {', '.join(record.get('outputs') or ()) or 'none'}"
    document = {"workflow": record, "is_new": found.is_new, "notes": list(found.manifest.notes)}
    return Output(document, text, hints=list(found.manifest.notes))


def _said(one: dict) -> str:
    default = "required" if one.get("required") else one.get("default", "")
    return str(default)[:60]
