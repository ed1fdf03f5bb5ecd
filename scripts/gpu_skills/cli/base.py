"""The manners all commands share: `--json`, modes, one error line, exit codes, no prompt without a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import click

from gpu_skills.cli.output import FORMAT, Output, in_sandbox, print_json, print_text, say
from gpu_skills.errors import EXIT_GPU_FAILED, ModeForbids, UsageError

# From least to most: what a mode allows. A flag and the environment can only take rights away.
MODES = ("audit", "prepare", "promote", "operate")


def effective_mode(flag: str | None, environ: Mapping[str, str]) -> str:
    """The more restrictive of `--mode` and GPU_MODE; `operate` when neither is given."""
    asked = [m for m in (flag, environ.get("GPU_MODE")) if m]
    for mode in asked:
        if mode not in MODES:
            raise UsageError(f"unknown mode {mode!r}", next_step=f"use one of {', '.join(MODES)}", found=mode)
    return min(asked, key=MODES.index, default="operate")


class GpuCommand(click.Command):
    """A leaf command. Its function takes the Context first and returns an Output or None

    reads_only: it may run in every mode. failure_exit: what a failure of gpu itself exits with, if not its own code.
    """

    reads_only = False
    failure_exit: int | None = None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write_paragraph()
            for line in self.epilog.splitlines():
                formatter.write(f"  {line}\n" if line else "\n")


def command(
    name: str,
    *,
    reads_only: bool = False,
    in_job_run: bool = False,
    example: str,
    exits: str = "0 done · 1 failed · 2 usage · 3 refused",
    **settings: Any,
) -> Callable[[Callable[..., Output | None]], GpuCommand]:
    """Declare a command. The docstring's first line says effect and cost class; `example` is one line to copy."""

    def declare(function: Callable[..., Output | None]) -> GpuCommand:
        @click.pass_context
        def run(click_context: click.Context, /, **options: Any) -> None:
            from gpu_skills.cli.context import Context

            as_json = options.pop("as_json")
            flag_mode = options.pop("mode")
            context: Context = click_context.obj
            context.json = context.json or as_json
            context.mode = effective_mode(flag_mode or context.mode_flag, context.environ)
            if not reads_only and context.mode != "operate":
                raise ModeForbids(command=click_context.command_path, mode=context.mode, needed="operate")
            try:
                output = function(context, **options)
            finally:
                context.close()
            if output is not None:
                emit(output, as_json=context.json, sandbox=context.sandbox)
                click_context.exit(output.exit_code)

        # options declared below this decorator arrive on the function itself
        run.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
        made = click.command(
            name,
            cls=GpuCommand,
            help=function.__doc__,
            epilog=f"Example:\n  {example}\n\nExit codes: {exits}",
            **settings,
        )(run)
        made.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."))
        made.params.append(click.Option(["--mode"], metavar="MODE", help=f"Take rights away: {', '.join(MODES)}."))
        made.params.append(
            click.Option(
                ["--debug"],
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=_debug,
                help="Write a redacted log.",
            )
        )
        made.reads_only = reads_only
        made.failure_exit = EXIT_GPU_FAILED if in_job_run else None
        return made

    return declare


def emit(output: Output, *, as_json: bool, sandbox: bool = False) -> None:
    if as_json:
        print_json({"format": FORMAT, **output.document}, sandbox=sandbox)
    else:
        print_text(in_sandbox(output.text) if sandbox else output.text)
    for hint in output.hints:
        say(in_sandbox(hint) if sandbox else hint)


def _debug(click_context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from gpu_skills.cli import debuglog

        debuglog.start(os.environ)


class LazyGroup(click.Group):
    """A group that imports a command's module when it is used; `--help` needs only the lines given here."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lazy = lazy  # name → ("module:attribute", one line of help)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        import importlib

        module, attribute = self.lazy[cmd_name][0].split(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]):
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            import difflib

            near = difflib.get_close_matches(args[0], self.lazy, n=1) if args else []
            if near:
                exc.message += f" Did you mean {near[0]!r}?"
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy.items()])
