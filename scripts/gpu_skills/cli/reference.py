"""The reference pages docs/cli.md, docs/errors.md and docs/state-files.md, written from what they describe.

python -m gpu_skills.cli.reference cli|errors|state-files     prints one; docs/generate writes all
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator

import click

import gpu_skills
from gpu_skills.cli.base import LazyGroup
from gpu_skills.errors import GpuError, all_errors

_NOTE = "Written by `docs/generate`; a test fails when it is not current."
_SHARED = {"as_json", "mode", "debug", "help"}
_EXITS = {
    1: "it was tried and did not work",
    2: "the call or a file is wrong: mend it and call again",
    3: "refused by a policy, a mode or a safety rule; nothing was done",
    4: "a human has to agree; the text to show is in the output",
    5: "the provider refused, has no capacity, or is unreachable",
    6: "it may have happened: run the printed command",
}


def cli_reference() -> str:
    """Every command with its options, an example and its exit codes."""
    from gpu_skills import resources

    parts = [
        f"# Commands\n\n{_NOTE}\n",
        "Every command takes `--json` (one document on stdout, described by the schema named below; failures by\n"
        "[error.json](../schemas/cli/error.json)), `--mode MODE` and `--debug`. `gpu --version` prints the version.\n",
    ]
    for path, command in leaves():
        name = " ".join(path)
        context = click.Context(command, info_name=name)
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        parts.append(f"## {name}\n\n```text\n{usage}\n```\n")
        parts.append(_paragraphs(command.help or ""))
        rows = [_option(p, context) for p in command.params if isinstance(p, click.Option) and p.name not in _SHARED]
        if rows:
            parts.append("| option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
        example, exits = _epilog(command.epilog or "")
        parts.append(f"```sh\n{example}\n```\n\nExit codes: {exits}.")
        schema = "cli/" + "_".join(path[1:])
        if resources.schema_path(schema).exists():
            parts[-1] += f" JSON: [{schema}.json](../schemas/{schema}.json)."
        parts[-1] += "\n"
    return "\n".join(parts)


def error_reference() -> str:
    """Every error code, by the exit code it belongs to."""
    import_everything()
    parts = [
        f"# Errors\n\n{_NOTE}\n",
        "An error is one line on stderr: what happened, to what, what to do next, and its code in brackets at the\n"
        "end. With `--json` stdout has\n"
        '`{"error": {"code", "message", "next_step", "retryable", "may_be_billing", "details"}}`. Branch on the code\n'
        "or on the exit code; messages may change. A code belongs to one exit code and never gets a second meaning.\n",
        "`gpu job run` exits with the job's own code, 124 when the job met a time limit, 130 when it was cancelled or\n"
        "watching was interrupted, and 125 for every error below.\n",
    ]
    for exit_code, meaning in _EXITS.items():
        classes = [c for c in coded_errors() if c.exit_code == exit_code]
        rows = sorted(f"| `{c.code}` | {_sentence(c)} | {_step(c)} | {'yes' if c.retryable else ''} |" for c in classes)
        parts.append(f"## Exit {exit_code}: {meaning}\n")
        parts.append(
            "| code | what happened | next | same command again |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


def state_reference() -> str:
    """Every record and setting, field by field."""
    from gpu_skills.cli.state_reference import state_files_reference

    return state_files_reference(_NOTE)


def leaves() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with the words that name it, in the order of the help."""
    from gpu_skills.cli.main import gpu

    def below(path: tuple[str, ...], command: click.Command) -> Iterator[tuple[tuple[str, ...], click.Command]]:
        if not isinstance(command, LazyGroup):
            yield path, command
            return
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from below((*path, name), found)

    yield from below(("gpu",), gpu)


def import_everything() -> None:
    """Error classes stand where they are raised: all modules are imported so that all of them are known."""
    for module in pkgutil.walk_packages(gpu_skills.__path__, "gpu_skills."):
        if module.name.rpartition(".")[2] not in ("__main__", "runner", "bootstrap"):
            importlib.import_module(module.name)


def coded_errors() -> list[type[GpuError]]:
    """The classes with a code of their own; the others only group them."""
    return [c for c in all_errors() if "code" in vars(c) and c is not GpuError]


def placeholders(template: str) -> str:
    """`{host} did not answer` → `HOST did not answer`."""
    return re.sub(r"\{(\w+)[^{}]*\}", lambda m: m[1].upper(), template.replace("{at}", ":LINE"))


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(p.split()) for p in text.strip().split("\n\n")) + "\n"


def _epilog(text: str) -> tuple[str, str]:
    example = re.search(r"Example:\n\s*(.+)", text)
    exits = re.search(r"Exit codes: (.+)", text)
    return example[1] if example else "", exits[1] if exits else ""


def _option(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    names, meaning = record if record else (option.opts[0], "")
    return f"| `{_cell(names)}` | {_cell(' '.join(meaning.split()))} |"


def _sentence(error: type[GpuError]) -> str:
    text = placeholders(error.template)
    if text == "MESSAGE":
        doc = vars(error).get("__doc__")
        text = doc.strip().splitlines()[0] if doc else "the message says it"
    return _cell(text)


def _step(error: type[GpuError]) -> str:
    text = placeholders(error.next_step)
    return _cell(f"`{text}`" if text.startswith("gpu ") and "," not in text else text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGES = {"cli": cli_reference, "errors": error_reference, "state-files": state_reference}

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]]())
