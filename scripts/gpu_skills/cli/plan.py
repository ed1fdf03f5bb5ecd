"""`gpu plan`: what a machine of its own would be, cost at most and see, before anybody says yes to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import RENTED_PROVIDERS, Context
from gpu_skills.cli.output import Output, table
from gpu_skills.errors import UsageError
from gpu_skills.units import counted, format_bytes, format_duration, format_usd

if TYPE_CHECKING:
    from gpu_skills.config import GpuConfig
    from gpu_skills.lifecycle.plans.plan import Plan

MAX_LISTED_FILES = 50


@command(
    "plan",
    example="gpu plan --freeze --gpu 'RTX 4090' --max-lease 3h --expected 1h -- python train.py --epochs 3",
    exits="0 planned · 1 failed · 2 usage · 3 refused, with all reasons · 5 the provider failed",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[NAME] [-- CMD]")
@click.option("--freeze", is_flag=True, help="Write it under its hash, so that it can be approved. Else: a draft.")
@click.option("--session", is_flag=True, help="The project's machine, not one for a job.")
@click.option("--provider", type=click.Choice(RENTED_PROVIDERS), help="Default: gpu.yaml.")
@click.option("--gpu", metavar="NAME", multiple=True, help="To try first; again for the next. Default: gpu.yaml.")
@click.option("--disk-gb", type=click.IntRange(1, 100_000), help="Default: gpu.yaml.")
@click.option("--hold-for", metavar="TIME", help="How long a finished job's machine is kept for review. Default: 30m.")
@click.option("--max-lease", metavar="TIME", help="When billing ends. Default: from twice --expected, else 12h.")
@click.option("--job-timeout", metavar="TIME", help="Default: timeout of gpujob.yaml, else 0: wait for the exit.")
@click.option("--expected", metavar="TIME", help="How long the job will take, as far as you know.")
@click.option("--capacity", type=click.Choice(["immediate", "wait"]), help="What to do when nothing is free.")
@click.option("--volume", "volume_id", metavar="ID", help="Network volume to mount (runpod).")
@click.option("--interruptible", is_flag=True, help="A machine that may be taken away, for less (vast).")
@click.option("--download-gb", type=click.IntRange(0, 100_000), default=0, help="Models and data the job fetches.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Directory to send. Default: the project's.")
@click.option("--setup", "setup_command", metavar="CMD", help="Run first, as in gpujob.yaml.")
@click.option("--label", metavar="TEXT", help="A name for people.")
@click.option("--env", multiple=True, metavar="NAME", help="Secret the job gets. Only its name goes into the plan.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out (gitignore pattern).")
@click.option("--expect", multiple=True, metavar="PATTERN", help="An output without which exit 0 is not believed.")
@click.option("--require-input", multiple=True, metavar="PATH", help="Refuse when this would not be on the machine.")
@click.option("--allow-secret-file", multiple=True, metavar="PATH", help="Send it although it looks like a credential.")
@click.option("--resume-from", metavar="JOB", help="Start from the newest verified checkpoint of an older job.")
@click.pass_context
def plan(
    click_context: click.Context, context: Context, args: tuple[str, ...], freeze: bool, session: bool, **flags: Any
) -> Output:
    """Measure stock and price and work out the worst case of a machine for one job. Writes a plan; spends nothing.

    With NAME a draft is measured again. What speaks against the plan is listed at once, before any money moves.
    """
    from gpu_skills.lifecycle.plans import plan as plans

    name, cmd = _name_and_command(context, args)
    if name is not None:
        _refuse_more(click_context, session, cmd)
        made = _again(context, name)
    elif session:
        made = _session(context, flags, cmd)
    else:
        made = _job(context, flags, cmd)
    context.note_provider(made.provider)
    if freeze:
        saved = plans.freeze(context.project, made)
        _, made = plans.load(context.project, saved)
    else:
        saved = plans.save_draft(context.project, made, name=name)
    return _output(context, saved, made, is_frozen=freeze)


def _name_and_command(context: Context, args: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """A single word that is the name of a plan is one; everything else is the job's command."""
    from gpu_skills.lifecycle.plans import plan as plans

    if len(args) == 1 and plans.looks_like_name(args[0]):
        return args[0], ()
    if len(args) == 1:
        plans.require_no_plan(context.project, args[0])
    return None, args


def _refuse_more(click_context: click.Context, session: bool, cmd: tuple[str, ...]) -> None:
    given = [
        parameter.opts[0]
        for parameter in click_context.command.params
        if parameter.name not in ("args", "freeze", "as_json", "mode", "debug")
        and click_context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(
            f"a plan is measured again as it is; {', '.join(given)} make another one",
            next_step="gpu plan with the flags and without NAME",
        )


def _again(context: Context, name: str) -> Plan:
    from gpu_skills.cli.progress import byte_bar
    from gpu_skills.jobs import planned
    from gpu_skills.lifecycle.plans import plan as plans

    _, old = plans.load(context.project, name)
    with byte_bar(context, "plan", before="looking at the files") as progress:
        return planned.again(context.operator, context.config, old, progress=progress)


def _session(context: Context, flags: dict[str, Any], cmd: tuple[str, ...]) -> Plan:
    from gpu_skills.lifecycle.plans import planning

    if cmd:
        raise UsageError("--session plans the project's machine, which runs no command of its own")
    return planning.plan_project(context.operator, _config(context, flags), interruptible=flags["interruptible"])


def _job(context: Context, flags: dict[str, Any], cmd: tuple[str, ...]) -> Plan:
    from gpu_skills.cli.progress import byte_bar
    from gpu_skills.jobs import planned
    from gpu_skills.jobs.spec import load_spec

    directory = flags["directory"]
    spec = load_spec(
        context.project.root if directory is None else context.cwd / directory,
        used_by="gpu plan",
        command=cmd,
        setup=flags["setup_command"],
        label=flags["label"],
        env=flags["env"],
        exclude=flags["exclude"],
        expect=flags["expect"],
        environ=context.environ,
        dotenv_root=context.project.root,
    )
    wish = planned.Wish(
        hold_for_s=_seconds("--hold-for", flags["hold_for"]),
        max_lease_s=_seconds("--max-lease", flags["max_lease"], is_positive=True),
        job_timeout_s=_seconds("--job-timeout", flags["job_timeout"]),
        expected_s=_seconds("--expected", flags["expected"], is_positive=True),
        volume_id=flags["volume_id"],
        interruptible=flags["interruptible"],
        download_gb=flags["download_gb"],
        require_inputs=flags["require_input"],
        allow_secret_files=flags["allow_secret_file"],
        resume_from=flags["resume_from"],
    )
    with byte_bar(context, "plan", before="looking at the files") as progress:
        return planned.plan(context.operator, _config(context, flags), spec, wish, progress=progress)


def _config(context: Context, flags: dict[str, Any]) -> GpuConfig:
    from gpu_skills.config import load_gpu_yaml

    gpus = flags["gpu"]
    return load_gpu_yaml(
        context.project.root,
        flags={
            "provider": flags["provider"],
            "compute.gpu": gpus[0] if gpus else None,
            "compute.candidates": gpus[1:] if gpus else None,
            "compute.disk_gb": flags["disk_gb"],
            "compute.capacity.mode": flags["capacity"],
        },
        environ=context.environ,
    )


def _seconds(flag: str, text: str | None, *, is_positive: bool = False) -> float | None:
    from gpu_skills.units import parse_duration

    if text is None:
        return None
    try:
        seconds = parse_duration(text)
    except ValueError as exc:
        raise UsageError(f"{flag}: {exc}", next_step="gpu plan --help") from exc
    if is_positive and seconds <= 0:
        raise UsageError(f"{flag} must be more than 0", next_step="gpu plan --help")
    return seconds


# showing it -------------------------------------------------------------------------------------------------------


def _output(context: Context, name: str, made: Plan, *, is_frozen: bool) -> Output:
    from gpu_skills.lifecycle.plans.plan import SHOWN_CHARS

    shown = name[:SHOWN_CHARS] if is_frozen else name
    gpu = "gpu --sandbox" if context.sandbox else "gpu"
    step = f"{gpu} approve {shown}" if is_frozen else f"{gpu} plan --freeze {shown}"
    record = made.to_record()
    if made.inputs is not None:
        files = made.inputs["files"]
        left_out = max(0, len(files) - MAX_LISTED_FILES)
        record["inputs"] = {**made.inputs, "files": files[:MAX_LISTED_FILES], "left_out": left_out}
    waits_until = made.expires_at if made.capacity["mode"] == "wait" else None
    document = {"name": name, "frozen": is_frozen, "plan": record, "waits_until": waits_until, "next_step": step}
    return Output(document, _text(shown, made), hints=[f"next: {step}"])


def _text(shown: str, made: Plan) -> str:
    rows = [
        [
            str(number),
            candidate.gpu,
            "-" if candidate.rate_usd_hr is None else format_usd(candidate.rate_usd_hr),
            str(len(candidate.offers)),
            candidate.left_out or "tried",
        ]
        for number, candidate in enumerate(made.candidates, start=1)
    ]
    what = {"project": "the project's machine", "job": "a machine for one job", "canary": "a canary"}
    facts = [
        ("plan", f"{shown}: {what[made.machine_class]} at {made.provider}, {counted(made.gpu_count, 'GPU')}"),
        ("rate", f"{format_usd(made.max_rate_usd_hr)}/h at most, with {made.disk_gb} GB of disk"),
        ("deadline", f"{format_duration(made.deadline_s)} after the create ({made.deadline_reason})"),
        ("worst case", f"{format_usd(made.worst_case_usd)} ({_parts(made)})"),
        ("expected", _expected(made)),
        ("after it", _afterwards(made)),
        ("runs", _runs(made)),
        ("outputs to", (made.job or {}).get("outputs_uri")),
        ("sends", _sends(made)),
        ("secrets", ", ".join(made.secrets) or "none"),
        ("whose", made.whose_machine or "-"),
        ("expires", made.expires_at),
    ]
    lines = [table(rows, ["#", "GPU", "USD/H", "OFFERS", ""]), ""]
    lines += [f"{label:<11} {text}" for label, text in facts if text]
    lines += [f"note        {warning}" for warning in made.warnings]
    return "\n".join(lines)


def _parts(made: Plan) -> str:
    parts = [f"{name.replace('_', ' ')} {format_usd(value)}" for name, value in made.worst_case.items() if value]
    return ", ".join(parts)


def _expected(made: Plan) -> str:
    if made.expected_s is None:
        return ""
    cost = "" if made.expected_usd is None else f", {format_usd(made.expected_usd)}"
    return f"{format_duration(made.expected_s)}{cost}"


def _afterwards(made: Plan) -> str:
    hold = f"{format_duration(made.hold_for_s)} for review, then destroyed; " if made.hold_for_s is not None else ""
    idle = f"stops after {format_duration(made.idle_timeout_s)} idle; " if made.idle_timeout_s is not None else ""
    if made.outputs_ephemeral:
        return f"{hold}{idle}at the deadline destroyed, with what was not pulled"
    grace = format_duration(made.storage_grace_s)
    return f"{hold}{idle}at the deadline stopped, {grace} later destroyed, collected or not"


def _runs(made: Plan) -> str:
    if made.job is None:
        return ""
    return f"{made.job['run']}" + (f", after {made.job['setup']}" if made.job.get("setup") else "")


def _sends(made: Plan) -> str:
    if made.inputs is None:
        return ""
    return f"{counted(made.inputs['count'], 'file')}, {format_bytes(made.inputs['bytes'])}"
