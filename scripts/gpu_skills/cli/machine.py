"""`gpu machine …`: machines by id."""

from __future__ import annotations

from gpu_skills.cli.base import LazyGroup, command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output
from gpu_skills.cli.project import machine_document, machine_table

machine = LazyGroup(
    "machine",
    help="The project's machines.",
    lazy={"ls": ("gpu_skills.cli.machine:ls", "List the project's machines; reads only.")},
)


@command("ls", reads_only=True, example="gpu machine ls --json")
def ls(context: Context) -> Output:
    """List the project's machines as last seen. Reads only."""
    from gpu_skills.lifecycle import machines

    found = [machine_document(m) for m in machines.all_machines(context.project)]
    return Output({"machines": found}, machine_table(found) if found else "no machine yet: gpu setup")
