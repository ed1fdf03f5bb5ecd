"""`gpu`: the entry point. Finds the command, runs it, and turns every outcome into text or JSON and an exit code."""

from __future__ import annotations

import os
import sys

import click

from gpu_skills import __version__
from gpu_skills.cli.base import LazyGroup
from gpu_skills.cli.output import OutputLost, ReaderGone, print_error, say, turn_away_stdout
from gpu_skills.errors import EXIT_CANCELLED, Bug, GpuError, UsageError

_C = "gpu_skills.cli."
COMMANDS = {
    "init": (_C + "project:init", "Make this directory a project (.pi/gpu, gpu.yaml)."),
    "login": (_C + "login:login", "Store a credential, read from stdin or a hidden prompt."),
    "doctor": (_C + "doctor:doctor", "Check this computer, the project and its machine; changes nothing."),
    "status": (_C + "project:status", "What is alive in this project; reads only."),
    "offers": (_C + "offers:offers", "What could be used, at which rate; reads only."),
    "approve": (_C + "approve:approve", "Record a person's yes to one plan; --show reads only."),
    "plan": (_C + "plan:plan", "What a machine of its own would cost at most; measures, spends nothing."),
    "setup": (_C + "project:setup", "Make the project's machine ready."),
    "destroy": (_C + "project:destroy", "Give the project's machine back; refused while outputs are uncollected."),
    "reconcile": (_C + "reconcile:reconcile", "Finish what was half-done, record what vanished, book what ended."),
    "sentinel": (_C + "sentinel:sentinel", "Stop or destroy what is past its deadline, once; for schedulers."),
    "spend": (_C + "spend:spend", "What was spent, from the ledger; reads only."),
    "demo": (_C + "demo:demo", "Train a small model as a job on this machine, start to end, for nothing."),
    "job": (_C + "job:job", "Run your own code as a job: run ls status logs pull cancel diagnose finish."),
    "machine": (_C + "machine:machine", "Machines by id: ls show stop start hold extend protect destroy."),
    "model": (_C + "model:model", "Models and their workflows: setup, verify, add-workflow."),
    "deployment": (
        _C + "deployment:deployment",
        "Machines that serve a model: register run ls show logs error destroy.",
    ),
    "registry": (_C + "registry:registry", "The project's records: validate show put query."),
    "ledger": (_C + "ledger:ledger", "The ledger of jobs: append verify query tail reseal."),
    "policy": (_C + "policy:policy", "What may be spent, and what is left: show check; reads only."),
    "economics": (_C + "economics:economics", "Arithmetic of machine time: keepalive batch idle-timeout; reads only."),
    "sandbox": (
        _C + "sandbox:sandbox",
        "Vast and RunPod on this computer, for nothing: up down status bill clock chaos.",
    ),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nStart with: gpu init --jobs, then gpu job run -- CMD\n"
    "Every command takes --json; exit codes stand in its --help.",
)
@click.version_option(__version__, prog_name="gpu")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document (also after any command).")
@click.option("--mode", metavar="MODE", help="Take rights away: audit, prepare, promote, operate.")
@click.option("--sandbox", is_flag=True, help="Work in the sandbox of this project (gpu sandbox up), not for real.")
@click.pass_context
def gpu(click_context: click.Context, as_json: bool, mode: str | None, sandbox: bool) -> None:
    """GPU operations for coding agents: run code on GPUs with bounded cost and verified outputs."""
    from gpu_skills.cli.context import Context

    if click_context.obj is None:
        click_context.obj = Context()
    click_context.obj.json = as_json
    click_context.obj.mode_flag = mode
    if sandbox and click_context.invoked_subcommand != "sandbox":
        click_context.obj.enter_sandbox()
        say("SANDBOX: no machine and no money here is real")


def run(args: list[str], obj: object | None = None) -> int:
    """Run one command line and return its exit code. Nothing escapes: errors are printed here."""
    own_args = args[: args.index("--")] if "--" in args else args
    as_json, sandbox = "--json" in own_args, "--sandbox" in own_args
    leaf: click.Command | None = _named(args)
    failure_exit = getattr(leaf, "failure_exit", None)
    try:
        result = gpu.main(args=args, prog_name="gpu", standalone_mode=False, obj=obj)
        return result if isinstance(result, int) else 0
    except ReaderGone:
        turn_away_stdout()
        if failure_exit is None:
            return 0
        error = OutputLost(reason="nobody reads it any more")
    except OutputLost as exc:
        turn_away_stdout()
        error = exc
    except GpuError as exc:
        error = exc
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.ctx.get_help() if exc.ctx else str(exc))
        return 0
    except click.UsageError as exc:
        # The arguments themselves are not repeated: one of them may be `--env NAME=SECRET`.
        error = UsageError(_complaint(exc), next_step=f"{exc.ctx.command_path if exc.ctx else _path(args)} --help")
    except click.ClickException as exc:
        error = UsageError(exc.format_message())
    except (click.Abort, KeyboardInterrupt):
        say("gpu: interrupted")
        return EXIT_CANCELLED
    except Exception as exc:
        from gpu_skills.cli import debuglog

        where = debuglog.record(exc)
        said = debuglog.redact(f"{type(exc).__name__}: {exc}", debuglog.secrets_of(os.environ))
        error = Bug(message=said, log=where)
    _tell_what_bills(error, obj, sandbox=sandbox, leaf=leaf)
    print_error(error, as_json=as_json, sandbox=sandbox)
    return error.exit_code if failure_exit is None else failure_exit


def _tell_what_bills(error: GpuError, obj: object | None, *, sandbox: bool, leaf: click.Command | None) -> None:
    """Before an error is shown: what else is true while this command is of no use. A failure here changes nothing."""
    from gpu_skills.cli import at_stake
    from gpu_skills.cli.context import Context

    try:
        context = obj if isinstance(obj, Context) else Context()
        if sandbox and not context.sandbox:
            context.enter_sandbox()
        at_stake.tell(error, context, needs_records=getattr(leaf, "name", None) != "sentinel")
    except GpuError:
        return


def _complaint(exc: click.UsageError) -> str:
    """What is wrong with the call, in words that hold no secret that stood at the wrong place."""
    message = exc.format_message()
    if message.startswith("Got unexpected extra argument"):
        return "there are more arguments than this command takes"
    return message


def _path(args: list[str]) -> str:
    """The words that name the command, as the parser of options does not tell them."""
    names, found = ["gpu"], gpu
    for arg in args:
        if not isinstance(found, LazyGroup):
            break
        if arg in found.lazy:
            names.append(arg)
            found = found.get_command(click.Context(found), arg)
    return " ".join(names)


def _named(args: list[str]) -> click.Command | None:
    """The command these arguments name, found without running anything: it decides how failures exit."""
    found: click.Command | None = gpu
    takes_value = {name for p in gpu.params if not getattr(p, "is_flag", True) for name in p.opts}
    words = iter(args)
    for arg in words:
        if arg in takes_value:
            next(words, None)
        if arg.startswith("-"):
            continue
        if not isinstance(found, LazyGroup) or arg not in found.lazy:
            break
        found = found.get_command(click.Context(found), arg)
    return found


def main() -> None:
    # Closed by whoever started us: the first file we open would take its place, and get what is meant for a person.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    sys.exit(run(sys.argv[1:]))
