"""How often this work failed in the same way: the same inputs or the same command, one attempt after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import StateError
from gpu_skills.jobs.diagnose import collect
from gpu_skills.jobs.diagnose.classify import classify
from gpu_skills.jobs.records import JobFolder
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from gpu_skills.units import usd

LOOKED_AT = 50  # jobs of the ledger, the newest first


@dataclass(frozen=True)
class Attempts:
    """Failed attempts at one piece of work that ended in the same class, this one among them, oldest first."""

    jobs: tuple[str, ...]
    cost_usd: Decimal


def failed_alike(project: Project, ledger: Ledger, line: Mapping[str, Any], failure: str) -> Attempts:
    """The failed attempts since the work last succeeded. Of other jobs only what is kept here is read."""
    work = _work(project, line)
    alike = [line]
    for other in ledger.jobs(limit=LOOKED_AT):
        if other["id"] == line["id"] or ledger.is_open(other) or not _same(work, _work(project, other)):
            continue
        if ledger.state_of(other) == "succeeded":
            if _moment(other) < _moment(line):
                break
            continue
        if not _overlap(line, other) and _class_of(project, other) == failure:
            alike.append(other)
    alike.sort(key=lambda one: (_moment(one), one["id"]))  # two may start within one second
    return Attempts(tuple(one["id"] for one in alike), sum((usd(one.get("cost_usd") or 0) for one in alike), usd(0)))


def _work(project: Project, line: Mapping[str, Any]) -> tuple[Any, ...]:
    """(inputs, command, request): what says that two jobs are one piece of work; None for what is not known."""
    try:
        record = JobFolder(project, line["id"]).read("job") or {}
    except StateError:
        record = {}
    request = (line.get("deployment_id"), line.get("workflow"), str(line.get("inputs"))) if not record else None
    return record.get("upload", {}).get("tree"), record.get("spec", {}).get("run"), request


def _same(work: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return any(mine is not None and mine == theirs for mine, theirs in zip(work, other, strict=True))


def _class_of(project: Project, line: Mapping[str, Any]) -> str:
    log = collect.local_log(JobFolder(project, line["id"]))
    texts = [log.text()] if log is not None else []
    return classify([*texts, collect.ending(line, None)])[0].failure.name


def _moment(line: Mapping[str, Any]) -> float:
    return parse_timestamp(line.get("started_at") or line["ts"]).timestamp()


def _overlap(line: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether they ran side by side, as copies do: then neither is another try of the other."""
    ends = [parse_timestamp(one.get("completed_at") or one["ts"]).timestamp() for one in (line, other)]
    return _moment(line) < ends[1] and _moment(other) < ends[0]
