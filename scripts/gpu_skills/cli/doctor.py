"""`gpu doctor`: a look at everything that could be wrong; changes nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output

if TYPE_CHECKING:
    from gpu_skills.jobs.checkup import Finding
    from gpu_skills.lifecycle.channels import Told


@command(
    "doctor",
    reads_only=True,
    example="gpu doctor",
    exits="0 nothing wrong · 1 something is; every problem names its next step",
)
@click.option("--config", "show_config", is_flag=True, help="Every setting, its value and where it comes from.")
@click.option("--notify", "tries_notify", is_flag=True, help="Send a test message to every target of the policy.")
def doctor(context: Context, show_config: bool, tries_notify: bool) -> Output:
    """Check this computer, the project's files and its machine. Changes nothing, costs nothing."""
    from gpu_skills.errors import GpuError
    from gpu_skills.jobs import checkup

    if show_config:
        rows = context.config.describe()
        lines = [f"{r['key']}: {_as_yaml(r['value'])}    ({r['where']})" for r in rows]
        return Output({"config": rows}, "\n".join(lines))
    if tries_notify:
        return _report([_as_finding(told) for told in context.notifier.test()] or [_nobody()])
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
