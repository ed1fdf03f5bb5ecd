"""`gpu demo`: the whole of it for nothing: a project, a job, its live log, verified outputs, the ledger, the bill."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

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
@click.option("--seconds", type=click.IntRange(1, 600), help="How long to train. Default: 20, with --rent 10.")
@click.option("--rent", is_flag=True, help="On a machine rented for it, in the sandbox: offers, plan, fuse, bill.")
def demo(context: Context, directory: Path | None, seconds: int | None, rent: bool) -> Output:
    """Train a small character-level language model as a job. Needs no account, costs nothing.

    On this machine; with --rent through the whole life of a rented one, in the sandbox, where no money is real: about a
    minute. The very first gpu command on a computer takes longer: it builds its environment.
    """
    with contextlib.redirect_stdout(sys.stderr) if context.json else contextlib.nullcontext():
        if rent:
            from gpu_skills.cli.demo_rent import rent_a_machine

            return rent_a_machine(context, Demo.prepared(context, directory, "demo-rent", seconds or 10))
        return _here(Demo.prepared(context, directory, "demo", seconds or 20))


class Demo:
    """A project of the demo's own with the example beside it, and its steps: each a command as a user types it."""

    def __init__(self, context: Context, home: Path):
        self.context = context
        self.home = home
        self.clock = context.clock
        self.source = home / "train-charlm"

    @classmethod
    def prepared(cls, context: Context, directory: Path | None, name: str, seconds: int) -> Demo:
        from gpu_skills import resources
        from gpu_skills.userdirs import data_dir

        home = directory or data_dir(context.environ) / name
        demo = cls(context, home if home.is_absolute() else context.cwd / home)
        try:
            demo.home.mkdir(parents=True, exist_ok=True)
            shutil.copytree(resources.example("train-charlm"), demo.source, dirs_exist_ok=True)
            settings = demo.source / "gpujob.yaml"
            settings.write_text(settings.read_text().replace('TRAIN_SECONDS: "20"', f'TRAIN_SECONDS: "{seconds}"'))
        except (OSError, shutil.Error) as exc:  # the latter lists what of a tree could not be copied
            reason = getattr(exc, "strerror", None) or "not all of the example could be copied there"
            raise NotWritable(path=str(home), reason=reason, next_step="gpu demo --dir DIR") from exc
        return demo

    def inner(self) -> Context:
        """A command's world, as it is when a user types one in the demo's directory."""
        return Context(cwd=self.home, environ=self.context.environ, clock=self.clock)

    def title(self, text: str) -> None:
        print(f"\n── {text}", flush=True)

    def step(self, title: str, *args: str) -> None:
        """Say what comes, show the command, run it. DemoFailed with any exit code but 0."""
        from gpu_skills.cli import main

        self.title(title)
        print("$ gpu " + " ".join(a if " " not in a else f"'{a}'" for a in args), flush=True)
        code = main.run(list(args), obj=self.inner())
        if code != 0:
            raise DemoFailed(step="gpu " + " ".join(args), exit=code)

    def result(self, inner: Context) -> dict[str, Any]:
        """What became of the latest job, as the document says it."""
        from gpu_skills.state import journal

        job = inner.ledger.last_id()
        outputs = inner.project.root / "gpu-outputs" / str(job)
        say(f"\nopen {outputs / 'loss.svg'} to see it learn")
        return {
            "project": str(self.home),
            "job": job,
            "outputs_dir": str(outputs),
            "metrics": json.loads((outputs / "metrics.json").read_text(encoding="utf-8")),
            "ledger_line": inner.ledger.latest(str(job)) or {},
            "ledger_lines": sum(1 for _ in journal.scan(inner.project.state / "jobs.jsonl")),
        }


def _here(demo: Demo) -> Output:
    """On the machine one sits at."""
    demo.step("make a project", "init", "--jobs", "--provider", "local")
    demo.step(
        "run the example as a job: what is sent, the live log, the verified outputs",
        *("job", "run", "--dir", str(demo.source)),
    )
    demo.step("what became of it", "job", "status")
    inner = demo.inner()
    demo.title("the ledger has one line at its start and one at its end; this is the last of .pi/gpu/jobs.jsonl")
    print(json.dumps(inner.ledger.latest(str(inner.ledger.last_id())) or {}), flush=True)
    demo.step("what it cost", "spend")
    return Output(demo.result(inner), "")
