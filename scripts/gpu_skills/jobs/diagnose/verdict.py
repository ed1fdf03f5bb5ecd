"""What follows from the findings: which class it is, what helps, and whether the work may be tried again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_skills.jobs.diagnose.attempts import Attempts
from gpu_skills.jobs.diagnose.classify import Finding
from gpu_skills.jobs.diagnose.failures import CHANGED, ELSEWHERE, SAME
from gpu_skills.units import format_usd

FAILED_STATES = ("failed", "lost")
_WITHOUT_A_NAME = {"module": "what is missing", "node": "the node", "wheel": "the torch that has code for this GPU"}


@dataclass(frozen=True)
class Verdict:
    """may_retry: once more, unchanged (`retry` says where). report: for the user; then nothing is tried again."""

    cause: Finding | None
    may_retry: bool
    retry: str | None
    remedy: tuple[str, ...]
    report: str | None
    why: str


def judge(
    job: str,
    state: str,
    findings: Sequence[Finding],
    attempts: Attempts | None,
    retry_limit: int,
    facts: Mapping[str, Any],
) -> Verdict:
    """state: of the job. attempts: None when it did not fail. retry_limit: of the policy; never more than one."""
    cause = findings[0] if findings else None
    if cause is None or state not in (*FAILED_STATES, "running"):
        return Verdict(None, False, None, (), None, _not_failed(state))
    remedy = tuple(_filled(line, _details(cause, facts)) for line in cause.failure.remedy)
    if state == "running" or attempts is None:
        return Verdict(cause, False, cause.failure.retry, remedy, None, "it still runs: nothing is to be tried again")
    tries, allowed = len(attempts.jobs), 1 + min(1, retry_limit)
    if tries >= allowed:
        report = _report(job, cause, attempts)
        return Verdict(cause, False, cause.failure.retry, remedy, report, _enough(tries, retry_limit))
    may_retry = cause.failure.retry in (SAME, ELSEWHERE)
    return Verdict(cause, may_retry, cause.failure.retry, remedy, None, _WHY[cause.failure.retry])


_WHY = {
    SAME: "it may be tried once more as it is",
    ELSEWHERE: "it may be tried once more, on another machine",
    CHANGED: "not as it is: it would fail again and cost again; once more with the remedy applied",
}


def _not_failed(state: str) -> str:
    if state in ("timeout", "cancelled"):
        return f"it ended as {state}, which is no failure of a class; what was found is shown"
    return f"it is {state}; what was found is shown"


def _enough(tries: int, retry_limit: int) -> str:
    if tries == 1:
        return f"it is not tried again: retry_limit of the policy is {retry_limit}"
    return f"it is not tried again: {tries} attempts failed in the same way; report it to the user"


def _report(job: str, cause: Finding, attempts: Attempts) -> str:
    """What to tell the user: what failed, by which words, what was tried, what that cost."""
    jobs = ", ".join(attempts.jobs[-10:])
    lines = [
        f"{job} failed: {cause.failure.title} ({cause.failure.name}).",
        *(f"  {evidence.source}:{evidence.line}: {evidence.text}" for evidence in cause.evidence[:1]),
        f"Tried: {len(attempts.jobs)} times ({jobs}), {format_usd(attempts.cost_usd)} in all.",
        "Not tried again without your word: say what to change, or what less would do.",
    ]
    return "\n".join(lines)


def _details(cause: Finding, facts: Mapping[str, Any]) -> dict[str, str]:
    """What the lines named, and for an architecture the build of torch that has code for it."""
    details = dict(cause.details)
    if cause.failure.name == "arch_unsupported":
        from gpu_skills.lifecycle.renting.health import wheel_for

        number = details.get("sm", "").removeprefix("sm_")
        capability = int(number) / 10 if number.isdigit() else facts.get("capability")
        if capability:
            details["wheel"] = wheel_for(capability)
            details["sm"] = f"sm_{capability * 10:.0f}"
        cause.details = details
    return details


def _filled(text: str, details: Mapping[str, str]) -> str:
    for name, without in _WITHOUT_A_NAME.items():
        text = text.replace("{" + name + "}", details.get(name) or without)
    return text
