"""`gpu reconcile`: journal, registry and provider are brought to say the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import RENTED_PROVIDERS, Context
from gpu_skills.cli.output import Output
from gpu_skills.errors import MissingCredential, NoProject, UsageError
from gpu_skills.units import counted, format_usd, json_number

if TYPE_CHECKING:
    from gpu_skills.lifecycle.recovery.findings import Account, Finding, Report


@command(
    "reconcile",
    example="gpu reconcile --json",
    exits="0 all clear · 2 usage or no project · 3 refused · 6 something stays uncertain: listed with what to run",
)
@click.option("--provider", "providers", multiple=True, metavar="P", help="Only this account: vast or runpod.")
@click.option("--adopt", is_flag=True, help="Put what carries our label and is not on record back on record.")
@click.option("--project-id", metavar="ID", help="With --adopt: the id that labels carry, where project.json was lost.")
def reconcile(context: Context, providers: tuple[str, ...], adopt: bool, project_id: str | None) -> Output:
    """Finish what was half-done, record what vanished, book what ended. Rents nothing; may destroy what is overdue.

    Run it after any error that says so, or when a command was killed. It lists each account once, concludes nothing
    from an answer that fails, and does not touch what is not this project's. Running it again is harmless.
    """
    from gpu_skills.lifecycle.recovery import reconcile as passes

    if project_id is not None and not adopt:
        raise UsageError("--project-id takes machines back: say --adopt too", next_step="gpu reconcile --help")
    for provider in providers:
        require_rented(provider)
    _project_with(context, project_id)
    report = passes.run(
        context.operator, providers or known_providers(context), adopt=adopt, project_id=project_id if adopt else None
    )
    context.tell_what_is_due()
    return Output(_document(report), _text(report), exit_code=0 if report.is_clear else 6)


def require_rented(provider: str, *, used_by: str = "gpu reconcile", option: str = "--provider") -> None:
    """UsageError names the provider that was meant, where one is spelled much like it."""
    import difflib

    if provider not in RENTED_PROVIDERS:
        meant = difflib.get_close_matches(provider.lower(), RENTED_PROVIDERS, n=1)
        raise UsageError(
            f"nothing is rented at {provider[:80]!r}: there are {', '.join(RENTED_PROVIDERS)}",
            next_step=" ".join(word for word in (used_by, option, meant[0]) if word) if meant else f"{used_by} --help",
        )


def known_providers(context: Context) -> list[str]:
    """The rented providers that there is a key for, or something on record of."""
    from gpu_skills.lifecycle import machines, runs, states

    op = context.operator
    used = {m.provider for m in machines.all_machines(op.project) if m.status not in states.FINAL}
    used |= {run.provider for run in runs.own_runs(op) if not run.is_settled}
    return [name for name in RENTED_PROVIDERS if name in used or has_key(context, name)]


def has_key(context: Context, provider: str) -> bool:
    try:
        return context.provider_key(provider) is not None
    except MissingCredential:
        return False


def _project_with(context: Context, project_id: str | None) -> None:
    """The project here; where there is none at all and its id is told, a new state directory for it."""
    from gpu_skills.state import project as projects

    try:
        _ = context.project
    except NoProject:
        if project_id is None:
            raise
        projects.init(context.cwd, project_id=project_id, name=context.state_name)


def _document(report: Report) -> dict[str, Any]:
    steps = [f.next_step for f in report.findings if f.is_uncertain and f.next_step]
    return {
        "is_clear": report.is_clear,
        "accounts": [_account(account) for account in report.accounts],
        "findings": [_finding(finding) for finding in report.findings],
        "booked_lines": report.booked,
        "next_step": steps[0] if steps else None,
    }


def _account(account: Account) -> dict[str, Any]:
    return {
        "provider": account.provider,
        "listed": account.problem is None,
        "ours": account.ours,
        "foreign": account.foreign,
        "project_ids": [{"project_id": name, "instances": n} for name, n in account.project_ids.items()],
        "problem": None if account.problem is None else account.problem.to_dict(),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    burn = finding.burn_usd_hr
    return {**vars(finding), "burn_usd_hr": None if burn is None else json_number(burn)}


def _text(report: Report) -> str:
    lines = []
    for account in report.accounts:
        if account.problem is None:
            lines.append(f"{account.provider}: {counted(account.ours, 'machine')} of ours, {account.foreign} of others")
        for project_id, count in account.project_ids.items():
            lines.append(
                f"  {counted(count, 'instance')} of project {project_id}"
                f" (a lost id is taken back with: gpu reconcile --adopt --project-id {project_id})"
            )
    lines += finding_lines(report.findings)
    if not report.accounts:
        lines.append("no rented provider is used here")
    lines.append("all clear" if report.is_clear else "something stays uncertain")
    return "\n".join(lines)


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        subject = finding.machine_id or finding.instance_id
        line = f"{subject or finding.provider}: {finding.text}"
        if finding.is_uncertain and finding.burn_usd_hr:
            line += f"; may burn {format_usd(finding.burn_usd_hr)}/h"
        lines.append(line + (f"; next: {finding.next_step}" if finding.next_step else ""))
    return lines
