"""`gpu init`, `status`, `setup`, `destroy`: the project and its machine."""

from __future__ import annotations

from typing import Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.durations import DURATION
from gpu_skills.cli.output import Output, say
from gpu_skills.clock import timestamp
from gpu_skills.units import format_usd, json_number, usd

ABANDON = click.option(
    "--abandon-outputs",
    multiple=True,
    metavar="JOB",
    help="The user's explicit instruction to lose this job's outputs. A machine's id stands for what jobs left there "
    "that no record names.",
)


@command(
    "init",
    example="gpu init --jobs --min-vram-gb 24 --provider ssh --host mybox",
    exits="0 done · 2 usage or an invalid file",
)
@click.option("--jobs", is_flag=True, help="Write gpu.yaml for jobs: runtime.engine none and the default image.")
@click.option(
    "--min-vram-gb", type=click.FloatRange(min=0, max=10_000), help="Memory each GPU needs; 0: none is needed."
)
@click.option("--provider", metavar="P", help="local (this machine), ssh (a host of yours), vast or runpod.")
@click.option("--host", metavar="NAME", help="With ssh: a name from hosts.yaml or your SSH configuration.")
@click.option("--project-id", metavar="ID", help="Use this id, so that every clone has the same.")
def init(
    context: Context,
    jobs: bool,
    min_vram_gb: float | None,
    provider: str | None,
    host: str | None,
    project_id: str | None,
) -> Output:
    """Make this directory a project: .pi/gpu, gpu.yaml, a .gitignore line. Costs nothing; repeating is safe."""
    from gpu_skills.state import project as projects
    from gpu_skills.state import scaffold

    made = projects.init(context.cwd, project_id=project_id, name=context.state_name)
    changed = scaffold.write_gpu_yaml(
        made.root, jobs=jobs, min_vram_gb=min_vram_gb, provider=provider, host=host, environ=context.environ
    )
    document = {
        "project_id": made.project_id,
        "root": str(made.root),
        "state": str(made.state),
        "gpu_yaml": changed,
        "next_step": "gpu setup",
    }
    return Output(
        document,
        f"project {made.project_id} in {made.root}\ngpu.yaml: {changed}\nnext: gpu setup, then gpu job run -- CMD",
    )


@command(
    "setup",
    example="gpu setup",
    exits="0 ready · 1 failed · 2 usage · 3 refused · 4 a person has to agree · 5 no machine fits · 6 uncertain",
)
@click.option(
    "--yes", is_flag=True, help="The user's explicit instruction to rent; GPU, rate and deadline are printed."
)
def setup(context: Context, yes: bool) -> Output:
    """Make the project's machine ready; repeating is safe. Costs nothing on local and ssh; on vast and runpod it bills.

    There it plans from gpu.yaml, says GPU, rate, deadline and worst case, and needs one approval for each start: a yes
    on the terminal, --yes, or `gpu approve`. A machine that is ready needs none.
    """
    from gpu_skills.cli.progress import spinner

    with spinner(context, "set-up") as step:
        link = context.ready_machine(progress=step, yes=yes)
    document = machine_document(link.machine)
    return Output({"machine": document}, "ready: " + machine_line(document))


@command("status", reads_only=True, example="gpu status --json")
def status(context: Context) -> Output:
    """What is alive in this project: machines, running jobs, outputs not collected. Reads only."""
    from gpu_skills.jobs.records import is_collected, uncollected
    from gpu_skills.lifecycle import machines

    on_record = machines.all_machines(context.project)
    found = [machine_document(m) for m in on_record]
    running = [line["id"] for line in context.ledger.open_jobs()]
    waiting = [
        line["id"]
        for line in context.ledger.jobs(limit=50)
        if line["id"] not in running
        and not is_collected(context.project, line["id"])
        and uncollected(context.project, line["id"])
    ]
    context.tell_what_is_due()
    burn = json_number(sum((m.burn_usd_hr for m in on_record), usd(0)))
    document = {
        "project_id": context.project.project_id,
        "root": str(context.project.root),
        "machines": found,
        "running_jobs": running,
        "uncollected_jobs": waiting,
        "burn_usd_hr": burn,
        "next_step": _next_step(running, waiting, found),
    }
    lines = [f"project {document['project_id']} in {document['root']}"]
    lines += [f"machine {machine_line(m)}" for m in found] or ["no machine yet: gpu setup"]
    if running:
        lines.append(f"running: {', '.join(running[:10])}")
    if waiting:
        lines.append(f"outputs not collected: {', '.join(waiting[:10])} (gpu job pull JOB)")
    lines.append(f"burn: {format_usd(burn)}/h")
    return Output(document, "\n".join(lines))


@command(
    "destroy",
    example="gpu destroy",
    exits="0 done · 1 failed · 3 a job runs, outputs are not collected, or it is protected · 5 provider · "
    "6 not proven gone yet",
)
@ABANDON
@click.option("--wait", type=DURATION, metavar="TIME", help="Wait so long for the proof that a rented one is gone.")
def destroy(context: Context, abandon_outputs: tuple[str, ...], wait: float | None) -> Output:
    """End the project's machine: a rented one is destroyed, a host of yours stays up. Spends nothing.

    Refused while a job runs on it or outputs are not collected. Machines made for one job end with their job.
    """
    from gpu_skills.cli.machine import by_name, ended, looks
    from gpu_skills.jobs import release
    from gpu_skills.lifecycle import machines, states
    from gpu_skills.lifecycle.renting import keeping

    released: list[str] = []
    left = []
    for machine in machines.all_machines(context.project):
        if machine.status in states.FINAL:
            continue
        if not machine.is_rented:
            release.give_back(context.project, context.ledger, context.clock, context.connect, machine, abandon_outputs)
            released.append(machine.id)
        elif machine.machine_class == "project":
            if (until := keeping.held_until(machine, context.clock.now())) is not None:
                say(f"{machine.id} is held until {timestamp(until)}: it is destroyed all the same")
            status = release.destroy(
                context.operator,
                machine,
                abandon=abandon_outputs,
                wait_s=wait,
                agree=by_name(context),
                tell=looks(context),
            )
            released += [machine.id] if status == "destroyed" else []
            left += [] if status == "destroyed" else [machine]
    for machine in left:
        ended(context, machine, "terminating")  # says why it is not proven gone
    return Output({"released": released}, "\n".join(f"{m} given back" for m in released) or "nothing to give back")


def machine_document(machine: Any) -> dict[str, Any]:
    session = machine.session or {}
    return {
        "id": machine.id,
        "provider": machine.provider,
        "host": machine.host,
        "status": machine.status,
        "gpu": machine.gpu,
        "gpu_count": machine.gpu_count,
        "vram_gb": machine.vram_gb,
        "rate_usd_hr": machine.rate_json,
        "session": {
            "id": session.get("id"),
            "deadline_at": session.get("deadline_at"),
            "deadline_reason": session.get("deadline_reason"),
            "idle_timeout_s": session.get("idle_timeout_s"),
            "expired_why": session.get("expired_why"),
        }
        if session
        else None,
    }


def machine_line(document: dict[str, Any]) -> str:
    gpu = f"{document['gpu_count']} × {document['gpu']}" if document["gpu_count"] else "no GPU"
    where = f"{document['provider']} {document['host']}"
    return f"{document['id']}  {where}  {document['status']}  {gpu}  {format_usd(document['rate_usd_hr'])}/h"


def _next_step(running: list[str], waiting: list[str], found: list[dict[str, Any]]) -> str:
    if running:
        return f"gpu job status {running[-1]}"
    if waiting:
        return f"gpu job pull {waiting[-1]}"
    return "gpu job run -- CMD" if found else "gpu setup"
