"""`setup.sh` and `verify.sh` of a model on a machine. Each run is a job: sent by hash, detached, booked, found again.

The same call while the script runs follows it. Setup goes through the runner's `setup` phase, in which a download that
stands still is started once more over plain HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from gpu_skills.deployments.model_dir import SCRIPTS, ModelDir
from gpu_skills.errors import JobRunning, UsageError
from gpu_skills.jobs import collect, follow, observe, pack, submit
from gpu_skills.jobs.pack import Packed
from gpu_skills.jobs.records import JobFolder
from gpu_skills.jobs.spec import JobSpec
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.state import files, quick_check
from gpu_skills.state.project import Project

Which = Literal["setup", "verify"]
TIMEOUT_S = {"setup": 7200.0, "verify": 1800.0}


@dataclass(frozen=True)
class ScriptResult:
    """log_path: the script's log here, as it was when it ended."""

    job_id: str
    script: str
    script_sha256: str
    exit_code: int
    state: str
    reason: str | None
    duration_s: float | None
    log_path: Path | None

    @property
    def succeeded(self) -> bool:
        return self.state == "succeeded"


def run_script(
    op: Operator,
    which: Which,
    model: ModelDir,
    link: Link,
    *,
    on_line: Callable[[str], None],
    secret_env: Mapping[str, str] | None = None,
    hf_token: str | None = None,
    timeout_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ScriptResult:
    """Run a script of a model on a machine to its end, or follow the run of it that is under way there.

    secret_env: as `--env` of jobs, written nowhere. Its output reaches on_line a line at a time, also across a lost
    connection. Raises JobRunning while the script of another state of the directory runs there, UsageError without the
    script, and the errors of jobs; a script that failed is a result.
    """
    packed = packed_model(op, model)
    sha256 = _require(model, which)
    spec = _spec(model, which, dict(secret_env or {}), timeout_s or TIMEOUT_S[which])
    report = submit.send(op.project, link, packed, progress)
    place = record_path(op.project, link.machine.id, model.id, which)
    files.make_directory(place.parent)
    with files.lock(place):
        job = _under_way(op, link, spec.label, report.tree)
        submitted = submit.start(
            op.project,
            op.ledger,
            op.clock,
            link,
            spec,
            packed,
            report,
            env_values=spec.env_values(),
            hf_token=hf_token,
            job=job,
            model=model.id,
        )
    record = {
        "script": which,
        "model": model.id,
        "model_version": model.manifest.version,
        "script_sha256": sha256,
        "machine_id": link.machine.id,
        "job_id": submitted.job,
    }
    files.commit(place, files.dumps_pretty(record))
    op.say(f"{submitted.job} {'goes on' if job else 'runs'}: {SCRIPTS[which]} of {model.id} on {link.host}")
    status = _followed(op, link, submitted.job, on_line)
    return _ended(op, link, submitted.job, record, status)


def record_path(project: Project, machine_id: str, model: str, which: str) -> Path:
    return project.path("deployments") / f"{machine_id}.{quote(model, safe='')}.{which}.json"


def last_run(project: Project, machine_id: str, model: str, which: str) -> dict[str, Any] | None:
    """How the script went there when it ran last (schemas/script.json); without `exit_code` its end was not seen."""
    found = files.read_json(record_path(project, machine_id, model, which))
    return found if quick_check.fits(found, "script") else None


def packed_model(op: Operator, model: ModelDir) -> Packed:
    if model.path is None:
        raise UsageError(f"where the directory of {model.id} lies is not on record", next_step="name the directory")
    return pack.pack(model.path, cache_path=pack.cache_path(op.project.state, model.path))


def _require(model: ModelDir, which: Which) -> str:
    sha256 = model.script(which)
    if sha256 is None:
        where = model.path.name if model.path else model.id
        raise UsageError(f"{where} has no {SCRIPTS[which]}", next_step=f"write {SCRIPTS[which]}")
    return sha256


def _spec(model: ModelDir, which: Which, secret_env: dict[str, str], timeout_s: float) -> JobSpec:
    assert model.path is not None
    command = f"bash {SCRIPTS[which]}"
    lines = {"setup": command, "run": "true"} if which == "setup" else {"run": command}
    label = f"{which}:{model.id}"
    return JobSpec(directory=model.path, secret_env=secret_env, timeout_s=timeout_s, label=label, **lines)


def _under_way(op: Operator, link: Link, label: str | None, tree: str) -> str | None:
    """The job without an end that runs this script of this very directory there.

    A start that died half-way counts: it is given again with its own id, and starts once.
    """
    for line in observe.open_jobs(op.ledger, link.machine.id):
        if (line.get("inputs") or {}).get("label") != label:
            continue
        if line["inputs"].get("tree") != tree:
            raise JobRunning(job=line["id"])
        return str(line["id"])
    return None


def _followed(op: Operator, link: Link, job: str, on_line: Callable[[str], None]) -> dict[str, Any]:
    folder, status = follow.LineFolder(), {}
    for piece in follow.follow(link, op.project.project_id, job, clock=op.clock, say=op.say):
        if piece.gap_bytes:
            on_line(follow.gap_notice(piece.gap_bytes))
        for line in folder.feed(piece.data):
            on_line(line)
        status = piece.status
    for line in folder.finish():
        on_line(line)
    return status


def _ended(op: Operator, link: Link, job: str, record: dict[str, Any], status: dict[str, Any]) -> ScriptResult:
    collect.pull(op.project, op.clock, link, job)
    answer = observe.settle(op.project, op.ledger, op.clock, link, notify=op.notify).get(job, status)
    folder = JobFolder(op.project, job)
    code = observe.exit_code_of(answer)
    succeeded = answer["state"] == "succeeded"
    reason = None if succeeded else observe.reason_text(answer)
    record = record | {"exit_code": code, "reason": reason, "duration_s": answer["duration_s"]}
    place = record_path(op.project, link.machine.id, record["model"], record["script"])
    files.commit(place, files.dumps_pretty(record))
    return ScriptResult(
        job_id=job,
        script=record["script"],
        script_sha256=record["script_sha256"],
        exit_code=code,
        state=answer["state"],
        reason=reason,
        duration_s=answer["duration_s"],
        log_path=folder.log if folder.log.exists() else None,
    )
