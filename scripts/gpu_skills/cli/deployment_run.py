"""`gpu deployment run`: one request to a deployment, its outputs here, its job on the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output
from gpu_skills.errors import UsageError

if TYPE_CHECKING:
    from gpu_skills.runtimes.base import Event


@command(
    "run",
    example='gpu deployment run dep_a41c -i prompt="a red fox" -i seed=7 --json',
    exits="0 done · 1 it failed · 2 wrong inputs · 3 not ready · 6 no answer: run the same command again",
)
@click.argument("deployment", metavar="DEPLOYMENT")
@click.option("--workflow", metavar="ID", help="As workflows.json has it; needed where the model has several.")
@click.option(
    "-i", "--input", "given", metavar="NAME=VALUE", multiple=True, help="@FILE sends a file, @@ begins a text."
)
@click.option("--operation", type=click.Choice(["chat", "completion", "image", "embedding"]), help="Of an LLM server.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(1, 86_400), default=3600.0, show_default=True)
def run(
    context: Context,
    deployment: str,
    workflow: str | None,
    given: tuple[str, ...],
    operation: str | None,
    timeout_s: float,
) -> Output:
    """Ask a ready deployment for one result. Uses its machine, rents nothing.

    Inputs are checked before anything is sent. After a lost answer the same command goes on with the same job.
    """
    from gpu_skills.deployments import model_dir, serving, workflows
    from gpu_skills.deployments import run as running
    from gpu_skills.deployments.records import Deployment
    from gpu_skills.runtimes.base import Surroundings, runtime_of
    from gpu_skills.state import registry

    record = registry.show(context.project, "deployments", deployment)[0]
    running.require_ready(record)
    if not record.get("model"):
        raise UsageError(f"{deployment} names no model", next_step=f"gpu deployment show {deployment}")
    model = model_dir.known(context.project, record["model"], cwd=context.project.root).manifest
    runtime = runtime_of(
        record.get("runtime") or model.runtime, Surroundings(clock=context.clock, environ=context.environ)
    )
    chosen = workflows.choose(context.project, model.id, workflow) if runtime.name == "comfyui" else None
    inputs = _inputs(given, context.cwd)
    asked = running.Asked(record, model, inputs, chosen, operation, timeout_s)
    running.checked(runtime, asked)  # before the machine is connected to
    one = Deployment.from_record(record)
    link = None if one.port is None or one.machine_id is None else context.machine_link(one.machine_id)
    with serving.endpoint(context.operator, link, one) as endpoint:
        ran = running.run(
            context.project,
            context.ledger,
            context.clock,
            runtime,
            endpoint,
            asked,
            on_start=lambda job, on: context.say(f"{job} {'goes on' if on else 'starts'} on {deployment}"),
            on_event=lambda event: _tell(context, event),
        )
    outputs = [
        {"name": o.name, "path": str(o.path), "bytes": o.bytes, "sha256": o.sha256, "mime": o.mime}
        for o in ran.result.outputs
    ]
    document = {
        "job": ran.job,
        "deployment": deployment,
        "state": context.ledger.state_of(ran.line),
        "has_gone_on": ran.has_gone_on,
        "duration_s": ran.line.get("duration_s"),
        "cost_usd": ran.line.get("cost_usd"),
        "outputs": outputs,
    }
    return Output(document, "\n".join([f"{ran.job} {document['state']}", *(str(o["path"]) for o in outputs)]))


def _inputs(given: tuple[str, ...], cwd: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name or name in found:
            problem = "given twice" if name in found else "no NAME=VALUE"
            raise UsageError(f"input {name[:60]!r}: {problem}", next_step="-i seed=7 -i image=@photo.png")
        is_file = value.startswith("@") and not value.startswith("@@")
        found[name] = cwd / Path(value[1:]).expanduser() if is_file else value.removeprefix("@")
    return found


def _tell(context: Context, event: Event) -> None:
    if event.name != "text":
        facts = ", ".join(f"{k} {v}" for k, v in event.data.items() if isinstance(v, str | int | float))
        context.say(f"{event.name} {facts}".strip()[:200])
