"""`gpu sandbox …`: the vendors' APIs on this computer, with offers, a bill and real instances, for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gpu_skills.cli.base import LazyGroup, command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, table
from gpu_skills.errors import NoProject, UsageError
from gpu_skills.units import format_duration, format_usd, parse_duration

_HERE = "gpu_skills.cli.sandbox:"
sandbox = LazyGroup(
    "sandbox",
    help="Vast and RunPod on loopback, to try everything for nothing. Use it with: gpu --sandbox …",
    lazy={
        "up": (_HERE + "up", "Start it, or find the one that runs."),
        "down": (_HERE + "down", "End it with everything in it."),
        "status": (_HERE + "status", "What is in it: accounts, instances, calls, faults; reads only."),
        "bill": (_HERE + "bill", "What was charged, line by line, and what is being charged; reads only."),
        "clock": (_HERE + "clock", "The vendors' clock; --advance moves it forward."),
        "chaos": (_HERE + "chaos", "Faults: list, add, script or clear them."),
    },
)
_EXITS = "0 done · 1 it does not start · 2 usage, or no sandbox runs"
_LIMITS = click.Choice(["off", "count", "real", "virtual"])


def directory_of(cwd: Path) -> Path:
    """`.pi/gpu-sandbox` of the project of `cwd`. Raises NoSandbox when there is none."""
    from gpu_skills.sandbox.client import NoSandbox
    from gpu_skills.state import project

    try:
        return project.find(cwd, name=project.SANDBOX_NAME).state
    except NoProject as exc:
        raise NoSandbox(directory=str(cwd)) from exc


def _made_directory(context: Context) -> Path:
    """The same, made when it is missing: beside `.pi/gpu` where there is one."""
    from gpu_skills.state import project

    try:
        root = project.find(context.cwd).root
    except NoProject:
        root = context.cwd
    return project.init(root, name=project.SANDBOX_NAME).state


@command("up", example="gpu sandbox up --seed 7", exits=_EXITS)
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same offers and prices.")
@click.option("--catalogue", type=click.Path(path_type=Path), help="GPU types, prices, places: a file of your own.")
@click.option("--faults", type=click.Path(path_type=Path), help="Rules for what goes wrong: a JSON file.")
@click.option("--limits", type=_LIMITS, default="real", show_default=True, help="How the vendors' rate limits act.")
@click.option("--balance-usd", type=float, default=100, show_default=True, help="What each account has.")
@click.option(
    "--delay", "delays", multiple=True, metavar="NAME=SECONDS", help="provisioning, loading, stopping, reboot."
)
@click.option("--idle", default="2h", show_default=True, metavar="DURATION", help="It ends after that long unused.")
@click.option("--parent", type=int, metavar="PID", help="It ends with this process.")
def up(
    context: Context,
    seed: int,
    catalogue: Path | None,
    faults: Path | None,
    limits: str,
    balance_usd: float,
    delays: tuple[str, ...],
    idle: str,
    parent: int | None,
) -> Output:
    """Start the sandbox of this project on loopback. Costs nothing; nothing of it survives its end."""
    from gpu_skills.sandbox import client

    options = ["--seed", str(seed), "--limits", limits, "--balance-usd", str(balance_usd)]
    options += ["--idle-s", str(_duration("--idle", idle)), "--delays", json.dumps(_delays(delays))]
    for name, path in (("--catalogue", catalogue), ("--faults", faults)):
        if path is not None:
            options += [name, str(path if path.is_absolute() else context.cwd / path)]
    if parent is not None:
        options += ["--parent", str(parent)]
    running, is_new = client.start(_made_directory(context), options)
    document = {
        "url": running.url,
        "pid": running.pid,
        "seed": running.seed,
        "is_new": is_new,
        "keys": running.keys,
        "ssh_user": running.ssh_user,
        "directory": str(running.directory),
    }
    lines = [f"sandbox at {running.url}" + ("" if is_new else " (it was running already)")]
    lines += [f"  {name:<8} {key}" for name, key in running.keys.items()]
    return Output(document, "\n".join(lines), hints=["use it: gpu --sandbox offers", "end it: gpu sandbox down"])


def _delays(words: tuple[str, ...]) -> dict[str, float]:
    delays = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("provisioning", "loading", "stopping", "reboot"):
            raise UsageError(f"--delay {word!r}: write it like loading=30s", next_step="gpu sandbox up --help")
        delays[f"{name}_s"] = _duration("--delay", value)
    return delays


def _duration(option: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise UsageError(f"{option}: {exc}", next_step="gpu sandbox --help") from exc


@command("down", example="gpu sandbox down", exits=_EXITS)
def down(context: Context) -> Output:
    """End the sandbox, its instances and every process in them. Its world is gone; the project's records stay."""
    from gpu_skills.sandbox import client

    try:
        left = client.stop(directory_of(context.cwd))
    except client.NoSandbox:
        left = None
    if left is None:
        return Output({"was_running": False, "instances": 0, "burning": 0}, "no sandbox was running")
    document = {"was_running": True, "instances": left["instances"], "burning": left["burning"]}
    return Output(document, f"the sandbox has ended, with {left['instances']} instances in it")


@command("status", reads_only=True, example="gpu sandbox status", exits=_EXITS)
def status(context: Context) -> Output:
    """What the sandbox holds. Reads only."""
    from gpu_skills.sandbox import client

    found = client.require(directory_of(context.cwd)).ask("GET", "status")
    rows = [
        [
            i["provider"],
            i["id"],
            i["phase"],
            f"{i['gpu_count']}x {i['gpu']}",
            f"{i['rate_usd_hr']:.4f}",
            i["label"] or "",
        ]
        for i in found["instances"]
    ]
    text = [f"{found['url']}, up {format_duration(found['up_s'])}, clock {_ahead(found['ahead_s'])}", *_balances(found)]
    if rows:
        text.append(table(rows, ["provider", "id", "phase", "gpu", "usd/h", "label"]))
    if found["defects"]:
        text.append(f"{found['defects']} defects of the sandbox itself; the last is in the JSON")
    return Output(found, "\n".join(text))


def _balances(found: dict[str, Any]) -> list[str]:
    return [
        f"{a['provider']:<8} balance {format_usd(a['balance_usd'])}, spent {format_usd(a['spent_usd'])}, "
        f"now {a['burn_usd_hr']:.4f} usd/h"
        for a in found["accounts"]
    ]


def _ahead(seconds: int) -> str:
    return f"{format_duration(seconds)} ahead" if seconds else "on real time"


@command("bill", reads_only=True, example="gpu sandbox bill", exits=_EXITS)
def bill(context: Context) -> Output:
    """Every charge of every account in the sandbox, by resource and kind. Reads only."""
    from gpu_skills.sandbox import client

    found = client.require(directory_of(context.cwd)).ask("GET", "bill")
    rows = [
        [a["provider"], line["resource"], line["kind"], str(line["seconds"]), f"{line['amount_usd']:.6f}"]
        for a in found["accounts"]
        for line in a["lines"]
    ]
    text = _balances(found)
    if rows:
        text.append(table(rows, ["provider", "resource", "kind", "seconds", "usd"]))
    return Output(found, "\n".join(text))


@command("clock", example="gpu sandbox clock --advance 2h", exits=_EXITS)
@click.option("--advance", metavar="DURATION", help="Move the vendors' clock forward by that much.")
def clock(context: Context, advance: str | None) -> Output:
    """Show or advance the vendors' clock: meter, stock and offers follow, real processes do not."""
    from gpu_skills.sandbox import client

    body = {"advance_s": _duration("--advance", advance) if advance else 0}
    found = client.require(directory_of(context.cwd)).ask("POST", "clock", body)
    return Output(found, f"{found['now']}, {_ahead(found['ahead_s'])}")


@command("chaos", example="gpu sandbox chaos --fault lost_reply --provider vast --call create", exits=_EXITS)
@click.option("--fault", metavar="NAME", help="What goes wrong; --list-kinds shows the names.")
@click.option("--provider", metavar="NAME", help="Only at this one.")
@click.option("--call", metavar="NAME", help="Only in this call: create, list, show, state, destroy, search, …")
@click.option("--instance", metavar="ID|LABEL", help="Only about this instance; without --call it strikes at once.")
@click.option("--nth", type=click.IntRange(1), help="Only the n-th such call.")
@click.option("--times", type=click.IntRange(0), default=1, show_default=True, help="How often; 0 is always.")
@click.option("--args", "arguments", metavar="JSON", help="Arguments of the fault, an object.")
@click.option("--script", metavar="TEXT", help='For the next calls, with --provider and --call: "ok, lost_reply, 429".')
@click.option("--file", "path", type=click.Path(path_type=Path), help="A JSON file of rules.")
@click.option("--clear", is_flag=True, help="Forget all rules and scripts first.")
@click.option("--list-kinds", is_flag=True, help="Show every fault there is.")
def chaos(
    context: Context,
    fault: str | None,
    provider: str | None,
    call: str | None,
    instance: str | None,
    nth: int | None,
    times: int,
    arguments: str | None,
    script: str | None,
    path: Path | None,
    clear: bool,
    list_kinds: bool,
) -> Output:
    """Make things go wrong in the sandbox, as data: which fault, in which call, about which instance, how often."""
    from gpu_skills.sandbox import client
    from gpu_skills.sandbox.faults import KINDS

    if list_kinds:
        kinds = [{"fault": name, "of": where, "effect": text} for name, (where, text) in KINDS.items()]
        shown = table([[k["fault"], k["of"], k["effect"]] for k in kinds], ["fault", "of", "effect"])
        return Output({"added": 0, "faults": [], "kinds": kinds}, shown)
    rules = _read_rules(context, path)
    if fault is not None:
        wanted = {"provider": provider, "call": call, "instance": instance, "nth": nth}
        match = {name: value for name, value in wanted.items() if value is not None}
        rules.append({"match": match, "fault": fault, "times": times, "args": _object(arguments)})
    scripts = []
    if script is not None:
        if provider is None or call is None:
            raise UsageError("--script needs --provider and --call", next_step="gpu sandbox chaos --help")
        scripts.append({"provider": provider, "call": call, "script": script})
    body = {"clear": clear, "rules": rules, "scripts": scripts}
    found = client.require(directory_of(context.cwd)).ask("POST", "chaos", body)
    return Output(
        {**found, "kinds": []}, "\n".join(_fault_line(rule) for rule in found["faults"]) or "no faults are set"
    )


def _fault_line(rule: dict[str, Any]) -> str:
    where = " ".join(f"{name}={value}" for name, value in rule["match"].items()) or "any call"
    if "script" in rule:
        return f"{where}: {rule['script']}"
    often = f"{rule['used']} of {rule['times']}" if rule["times"] else f"{rule['used']}, always"
    return f"{rule['fault']} ({where}): {often}"


def _read_rules(context: Context, path: Path | None) -> list[Any]:
    if path is None:
        return []
    from gpu_skills.errors import ConfigError

    try:
        content = json.loads((path if path.is_absolute() else context.cwd / path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(file=str(path), problem=f"no JSON list of rules: {exc}") from exc
    if not isinstance(content, list):
        raise ConfigError(file=str(path), problem="found no list, allowed is a list of rules")
    return content


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"--args {text!r} is no JSON object", next_step="gpu sandbox chaos --help")
    return value
