"""`gpu deployment …`: the stable handle of a machine that serves a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import LazyGroup, command
from gpu_skills.cli.context import Context
from gpu_skills.cli.durations import DURATION
from gpu_skills.cli.output import Output
from gpu_skills.errors import UsageError

if TYPE_CHECKING:
    from gpu_skills.deployments.records import Deployment

_C = "gpu_skills.cli."
deployment = LazyGroup(
    "deployment",
    help="Deployments: machines that serve a model, by the id that jobs name.",
    lazy={
        "register": (_C + "deployment:register", "Serve a model on a machine and prove it; rents nothing."),
        "run": (_C + "deployment_run:run", "Ask a ready one for a result; rents nothing."),
        "ls": (_C + "deployment:ls", "List them."),
        "show": (_C + "deployment:show", "One of them, with its proof."),
        "logs": (_C + "deployment:logs", "What its service has printed last."),
        "error": (_C + "deployment:error", "Say that it does not work."),
        "destroy": (_C + "deployment:destroy", "End its service, then a rented machine that serves nothing else."),
    },
)
_ID = click.argument("deployment_id", metavar="DEPLOYMENT")
_LOG_BYTES = 256 << 10


@command(
    "register",
    example="gpu deployment register examples/tiny-llm --machine m_a41c --json",
    exits="0 ready · 1 it does not serve (it is on record as error) · 2 no such model · 3 the machine is not ready",
)
@click.argument("model", metavar="MODEL")
@click.option("--machine", "machine_id", metavar="ID", help="Where; the project's machine if it is not said.")
@click.option("--status", type=click.Choice(["ready", "error"]), default="ready", help="error: only put on record.")
@click.option("--reason", metavar="TEXT", help="With --status error: what is wrong.")
def register(context: Context, model: str, machine_id: str | None, status: str, reason: str | None) -> Output:
    """Start the model's service on a machine, wait for it and prove it with a test generation: only then it is ready.

    MODEL is a model directory or the id of one on record. The same command again goes on where an earlier one stopped.
    """
    from gpu_skills.deployments import model_dir
    from gpu_skills.deployments import register as registering

    if (status == "error") != (reason is not None):
        raise UsageError("--status error and --reason go together", next_step="gpu deployment register --help")
    known = model_dir.known(context.project, model, cwd=context.cwd)
    link = link_to(context, machine_id)
    if reason is not None:
        return _output(registering.register_error(context.operator, known, link.machine, reason))
    return _output(registering.register(context.operator, known, link))


@command("ls", example="gpu deployment ls --json", exits="0 also when there is none")
def ls(context: Context) -> Output:
    """List the deployments of this project, those that are over included."""
    from gpu_skills.deployments import records

    found = records.all_deployments(context.project)
    lines = [_line(one) for one in found] or ["no deployment; next: gpu deployment register MODEL"]
    return Output({"deployments": [one.to_record() for one in found]}, "\n".join(lines))


@command("show", example="gpu deployment show dep_a41c --json", exits="0 shown · 2 no such deployment")
@_ID
def show(context: Context, deployment_id: str) -> Output:
    """One deployment: where it is, what proved it, what is wrong with it."""
    from gpu_skills.deployments import records

    return _output(records.find(context.project, deployment_id))


@command("logs", example="gpu deployment logs dep_a41c", exits="0 shown · 2 no such deployment · 5 no connection")
@_ID
def logs(context: Context, deployment_id: str) -> Output:
    """What the service of a deployment has printed last, from its machine."""
    from gpu_skills.deployments import records
    from gpu_skills.jobs import follow

    one = records.find(context.project, deployment_id)
    if one.machine_id is None or one.is_over:
        raise UsageError(f"{one.id} has no service to ask", next_step=f"gpu deployment show {one.id}")
    link = context.machine_link(one.machine_id)
    piece = follow.read_log(link, context.project.project_id, one.id, tail_bytes=_LOG_BYTES)
    text = "\n".join(follow.safe_text(line) for line in piece.data.decode("utf-8", "replace").splitlines())
    return Output(
        {"id": one.id, "state": piece.status.get("state"), "service": piece.status.get("service"), "log": text}, text
    )


@command("error", example='gpu deployment error dep_a41c --reason "black images"', exits="0 on record · 2 no such one")
@_ID
@click.option("--reason", metavar="TEXT", required=True, help="What is wrong, in one line.")
def error(context: Context, deployment_id: str, reason: str) -> Output:
    """Put on record that a deployment does not work; jobs no longer use it. Its machine goes on."""
    from gpu_skills.deployments import records

    records.find(context.project, deployment_id)
    return _output(records.mark_error(context.operator, deployment_id, reason))


@command(
    "destroy",
    example="gpu deployment destroy dep_a41c --json",
    exits="0 destroyed · 3 refused: outputs, a running job, protected · 4 needs approval · 6 not proven gone yet",
)
@_ID
@click.option("--keep-machine", is_flag=True, help="End the service only.")
@click.option("--abandon-outputs", metavar="JOB", multiple=True, help="A job whose outputs may be lost, or a machine.")
@click.option("--wait", "wait_s", type=DURATION, default="4m", show_default=True, help="Longest look for the end.")
def destroy(
    context: Context, deployment_id: str, keep_machine: bool, abandon_outputs: tuple[str, ...], wait_s: float
) -> Output:
    """End the service of a deployment, then a rented machine that serves nothing else, as gpu machine destroy does."""
    from gpu_skills.cli.machine import by_name, looks
    from gpu_skills.deployments import register as registering

    ended = registering.destroy(
        context.operator,
        deployment_id,
        keeps_machine=keep_machine,
        abandon=abandon_outputs,
        wait_s=wait_s,
        agree=by_name(context),
        tell=looks(context),
    )
    return _output(ended, exit_code=0 if ended.is_over else 6)


def link_to(context: Context, machine_id: str | None) -> Any:
    from gpu_skills.lifecycle import machines

    if machine_id is None:
        return context.ready_machine()
    link = context.machine_link(machine_id)
    if not link.machine.is_rented:
        machines.open_session(context.project, context.config, link, clock=context.clock)
    return link


def _line(one: Deployment) -> str:
    what = one.error if one.status == "error" else one.endpoint
    return f"{one.id}  {one.status:<12} {one.model or '-'}  {one.provider}  {what or ''}".rstrip()


def _output(one: Deployment, *, exit_code: int = 0) -> Output:
    return Output({"deployment": one.to_record()}, _line(one), exit_code=exit_code)
