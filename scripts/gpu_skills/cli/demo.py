"""`gpu demo`: the whole of it on this machine, for nothing: init, job, live log, verified outputs, ledger, spend."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, say
from gpu_skills.errors import Failed, NotWritable


class DemoFailed(Failed):
    code = "demo_failed"
    template = "the step `{step}` ended with exit code {exit}"
    next_step = "gpu doctor"


@command("demo", example="gpu demo", exits="0 it worked · 1 a step failed")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Where to make the demo's project; default: your data directory.",
)
@click.option("--seconds", type=click.IntRange(1, 600), default=20, show_default=True, help="How long to train.")
def demo(context: Context, directory: Path | None, seconds: int) -> Output:
    """Train a small character-level language model as a job on this machine. Needs no account, costs nothing."""
    from gpu_skills import resources
    from gpu_skills.state import journal
    from gpu_skills.userdirs import data_dir

    home = directory or data_dir(context.environ) / "demo"
    home = home if home.is_absolute() else context.cwd / home
    source = home / "train-charlm"
    try:
        home.mkdir(parents=True, exist_ok=True)
        shutil.copytree(resources.example("train-charlm"), source, dirs_exist_ok=True)
    except (OSError, shutil.Error) as exc:  # the latter lists what of a tree could not be copied
        reason = getattr(exc, "strerror", None) or "not all of the example could be copied there"
        raise NotWritable(path=str(home), reason=reason, next_step="gpu demo --dir DIR") from exc
    with contextlib.redirect_stdout(sys.stderr) if context.json else contextlib.nullcontext():
        _step(context, home, "make a project", ["init", "--jobs", "--provider", "local"])
        _step(
            context,
            home,
            "run the example as a job: what is sent, the live log, the verified outputs",
            ["job", "run", "--dir", str(source), "--env", f"TRAIN_SECONDS={seconds}"],
        )
        _step(context, home, "what became of it", ["job", "status"])
        inner = Context(cwd=home, environ=context.environ, clock=context.clock)
        job = inner.ledger.last_id()
        line = inner.ledger.latest(job) or {}
        _title("the ledger has one line at its start and one at its end; this is the last of .pi/gpu/jobs.jsonl")
        print(json.dumps(line), flush=True)
        _step(context, home, "what it cost", ["spend"])
    outputs = inner.project.root / "gpu-outputs" / str(job)
    metrics = json.loads((outputs / "metrics.json").read_text(encoding="utf-8"))
    lines = sum(1 for _ in journal.scan(inner.project.state / "jobs.jsonl"))
    say(f"\nopen {outputs / 'loss.svg'} to see it learn")
    document = {
        "project": str(home),
        "job": job,
        "outputs_dir": str(outputs),
        "metrics": metrics,
        "ledger_line": line,
        "ledger_lines": lines,
    }
    return Output(document, "")


def _title(text: str) -> None:
    print(f"\n── {text}", flush=True)


def _step(context: Context, home: Path, title: str, args: list[str]) -> None:
    from gpu_skills.cli import main

    _title(title)
    print("$ gpu " + " ".join(a if " " not in a else f"'{a}'" for a in args), flush=True)
    code = main.run(args, obj=Context(cwd=home, environ=context.environ, clock=context.clock))
    if code != 0:
        raise DemoFailed(step="gpu " + " ".join(args), exit=code)
