"""`gpu doctor`: a look at everything that could be wrong; changes nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output
from gpu_skills.units import format_usd, json_number, usd

if TYPE_CHECKING:
    from gpu_skills.jobs.checkup import Finding
    from gpu_skills.lifecycle.channels import Told


@command(
    "doctor",
    reads_only=True,
    example="gpu doctor runpod",
    exits="0 nothing wrong · 1 something is, or with --leaving still bills; its next step is named · 2 usage",
)
@click.argument("provider", required=False, metavar="[PROVIDER]")
@click.option("--config", "show_config", is_flag=True, help="Every setting, its value and where it comes from.")
@click.option("--notify", "tries_notify", is_flag=True, help="Send a test message to every target of the policy.")
@click.option("--leaving", is_flag=True, help="List everything that still bills, with the command that ends it.")
def doctor(context: Context, provider: str | None, show_config: bool, tries_notify: bool, leaving: bool) -> Output:
    """Check this computer, the project's files and its machine. Changes nothing, costs nothing.

    With a provider's name: its account beside the records, as gpu reconcile would find them, and nothing of it changed.
    """
    from gpu_skills.cli.reconcile import require_rented
    from gpu_skills.errors import GpuError
    from gpu_skills.jobs import checkup

    if show_config:
        rows = context.config.describe()
        lines = [f"{r['key']}: {_as_yaml(r['value'])}    ({r['where']})" for r in rows]
        return Output({"config": rows}, "\n".join(lines))
    if tries_notify:
        return _report([_as_finding(told) for told in context.notifier.test()] or [_nobody()])
    if provider is not None:
        require_rented(provider, used_by="gpu doctor", option="")
    if leaving:
        return _leaving(context, provider)
    if provider is not None:
        from gpu_skills.lifecycle.recovery import overview

        return _report([checkup.Finding(**vars(seen)) for seen in overview.view(context.operator, provider)])
    findings = checkup.computer(context.environ)
    try:
        project = context.project
    except GpuError as exc:
        findings.append(checkup.Finding("project", "problem", exc.message, exc.next_step))
    else:
        findings += checkup.records(project)
        findings += checkup.settings(lambda: context.config, lambda: context.policy)
        findings += checkup.ledger_reads(context.ledger)
        findings += checkup.machines_answer(project, context.connect)
        findings += checkup.jobs_home(project, context.ledger)
        if not any(f.what == "policy.json" and f.verdict == "problem" for f in findings):
            findings += checkup.idle_deployments(project, context.ledger, context.policy, context.clock.now())
    return _report(findings)


def _report(findings: list[Finding]) -> Output:
    bad = [f for f in findings if f.verdict == "problem"]
    marks = {"ok": "ok  ", "note": "note", "problem": "BAD "}
    lines = [
        f"{marks[f.verdict]}  {f.what}: {f.text}" + (f"; next: {f.next_step}" if f.next_step else "") for f in findings
    ]
    lines.append("nothing wrong" if not bad else f"{len(bad)} to mend")
    return Output(
        {"findings": [vars(f) for f in findings], "problems": len(bad)}, "\n".join(lines), exit_code=1 if bad else 0
    )


def _leaving(context: Context, provider: str | None) -> Output:
    """What bills on after this tool is gone."""
    from gpu_skills.cli.reconcile import known_providers
    from gpu_skills.lifecycle.recovery import overview

    providers = [provider] if provider is not None else known_providers(context)
    found = overview.leaving(context.operator, providers)
    rows = [{**vars(b), "usd_hr": None if b.usd_hr is None else json_number(b.usd_hr)} for b in found]
    total = sum((b.usd_hr for b in found if b.usd_hr is not None), usd(0))
    lines = [
        f"{b.provider + ' ' if b.provider else ''}{b.what}: {b.text}"
        + (f", {format_usd(b.usd_hr)}/h" if b.usd_hr else ", cost unknown" if b.usd_hr is None else "")
        + f"; {b.next_step}"
        for b in found
    ]
    lines.append(f"{format_usd(total)}/h still bill" if found else "nothing bills any more")
    document = {"leaving": rows, "usd_hr": json_number(total), "next_step": found[0].next_step if found else None}
    return Output(document, "\n".join(lines), exit_code=1 if found else 0)


def _as_finding(told: Told) -> Finding:
    from gpu_skills.jobs.checkup import Finding

    what = f"notify {told.target.shown}"
    if told.delivered:
        return Finding(what, "ok", "took the test message; look whether it arrived")
    return Finding(what, "problem", f"was not told: {told.reason}", "edit the notify part of policy.json")


def _nobody() -> Finding:
    from gpu_skills.jobs.checkup import Finding

    return Finding("notify", "note", "no policy names anybody to tell", "see notify in docs/state-files.md")


def _as_yaml(value: Any) -> str:
    """As one would write it in gpu.yaml: null and true, not Python's words for them."""
    return value if isinstance(value, str) else json.dumps(value)
