"""`gpu model …`: what a deployment serves, and the workflows that run on it."""

from __future__ import annotations

from typing import Literal

import click

from gpu_skills.cli.base import LazyGroup, command
from gpu_skills.cli.context import Context
from gpu_skills.cli.durations import DURATION
from gpu_skills.cli.output import Output

_C = "gpu_skills.cli."
model = LazyGroup(
    "model",
    help="Models and the workflows that run on them.",
    lazy={
        "setup": (_C + "model:setup", "Run a model's setup.sh on a machine; rents nothing."),
        "verify": (_C + "model:verify", "Run a model's verify.sh on a machine; rents nothing."),
        "add-workflow": (_C + "add_workflow:add_workflow", "Put a ComfyUI workflow on record; spends nothing."),
    },
)
_EXITS = "0 it succeeded · 1 it failed · 2 no such model or script · 3 the machine is not ready"
_MODEL = click.argument("model_name", metavar="MODEL")
_MACHINE = click.option("--machine", "machine_id", metavar="ID", help="The project's machine if it is not said.")
_TIMEOUT = click.option("--timeout", "timeout_s", type=DURATION, help="How long the script may take.")


@command("setup", example="gpu model setup examples/tiny-llm --machine m_a41c --json", exits=_EXITS)
@_MODEL
@_MACHINE
@_TIMEOUT
def setup(context: Context, model_name: str, machine_id: str | None, timeout_s: float | None) -> Output:
    """Run setup.sh of a model directory on a machine, as a job: it may be run twice, and an open one is followed."""
    return _run(context, "setup", model_name, machine_id, timeout_s)


@command("verify", example="gpu model verify tiny-llm --machine m_a41c --json", exits=_EXITS)
@_MODEL
@_MACHINE
@_TIMEOUT
def verify(context: Context, model_name: str, machine_id: str | None, timeout_s: float | None) -> Output:
    """Run verify.sh of a model directory on a machine, as a job."""
    return _run(context, "verify", model_name, machine_id, timeout_s)


def _run(
    context: Context, which: Literal["setup", "verify"], name: str, machine_id: str | None, timeout_s: float | None
) -> Output:
    from gpu_skills import credentials
    from gpu_skills.cli.deployment import link_to
    from gpu_skills.deployments import model_dir, scripts

    known = model_dir.put_on_record(
        context.project, model_dir.known(context.project, name, cwd=context.cwd), context.clock
    )
    for finding in known.findings:
        context.say(finding)
    result = scripts.run_script(
        context.operator,
        which,
        known,
        link_to(context, machine_id),
        on_line=context.say,
        hf_token=credentials.hf_token(context.project.root, context.environ),
        timeout_s=timeout_s,
    )
    document = {
        "model": known.id,
        "script": result.script,
        "script_sha256": result.script_sha256,
        "job": result.job_id,
        "state": result.state,
        "reason": result.reason,
        "exit_code": result.exit_code,
        "duration_s": result.duration_s,
        "findings": list(known.findings),
        "log": None if result.log_path is None else str(result.log_path),
    }
    text = f"{which} of {known.id}: {result.state} in {result.job_id}"
    return Output(document, text, exit_code=0 if result.succeeded else 1)
