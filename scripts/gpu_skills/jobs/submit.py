"""Send a packed directory to a machine and start it there as a job.

The order is the safety: everything that can fail without a trace (upload) comes before the id; then job.json, then the
ledger's start line, then the one request that starts it. A start may be repeated: the machine knows it by id and nonce.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_skills.clock import Clock, timestamp
from gpu_skills.errors import GpuError, JobError, OutcomeUnknown, ProtocolError, TransferIncomplete, Unreachable
from gpu_skills.jobs.pack import Packed
from gpu_skills.jobs.readback import highest_there
from gpu_skills.jobs.records import START_REFUSED, JobFolder
from gpu_skills.jobs.spec import JobSpec
from gpu_skills.lifecycle import intents
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.remote.environment import job_environment
from gpu_skills.remote.transfer import UploadReport, upload
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project


@dataclass(frozen=True)
class Submitted:
    job: str
    upload: UploadReport
    status: dict[str, Any]


class StartRefused(JobError):
    code = "start_refused"
    template = "{host} did not start {job}: {reason}"
    next_step = "gpu doctor"


def send(project: Project, link: Link, packed: Packed, progress: Callable[[int, int], None] | None) -> UploadReport:
    return upload(link.session, link.bulk, project.project_id, packed.tree, progress=progress)


def start(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    link: Link,
    spec: JobSpec,
    packed: Packed,
    report: UploadReport,
    *,
    env_values: Mapping[str, str],
    hf_token: str | None = None,
    copy: tuple[int, int] | None = None,
    job: str | None = None,
    plan: str | None = None,
    resume: str | None = None,
    model: str | None = None,
) -> Submitted:
    """Take an id, write what is sent, then start. env_values: the whole user environment, secret values included.

    copy: (index, count) when the same job is submitted several times. job: an id that was taken before; one that has
    been written down already is started again as it is, which starts it once. plan: what it was approved by. resume:
    where in its directory the checkpoint lies that it goes on from. model: whose set-up or check it is.
    Raises OutcomeUnknown when the machine may have started it: `gpu job status` tells.
    """
    job = job or _new_id(project, ledger, link)
    folder = JobFolder(project, job)
    machine = link.machine
    intents.require_staying(project, machine.id)
    secret_names = sorted({*spec.secret_names, *(["HF_TOKEN"] if hf_token else [])})
    with folder.submitting():
        now = timestamp(clock.now())
        nonce = (folder.read("job") or {}).get("nonce") or secrets.token_hex(8)
        marks = {"plan": plan} if plan else {}
        folder.write("job", _submission(job, nonce, machine, spec, packed, report, now) | marks)
        if ledger.latest(job) is None:
            ledger.start(_first_line(job, machine, spec, report, now) | marks | {"model": model})
        environment = job_environment(
            link.session.greeting.root,
            project.project_id,
            job,
            model_id=model,
            user_env=env_values,
            hf_token=hf_token,
            copy=copy,
            resume=resume,
        )
        request = {
            "project": project.project_id,
            "job": _wire_spec(job, nonce, report.tree, spec, secret_names),
            "env": environment,
        }
        try:
            status = link.session.call("start", request)
        except (Unreachable, TransferIncomplete, ProtocolError) as exc:
            raise OutcomeUnknown(what=f"the start of {job}", host=link.host, job=job) from exc
        except GpuError as exc:  # the machine said no: nothing runs there
            ledger.finish(_refused_line(job, exc, timestamp(clock.now())))
            raise StartRefused(
                host=link.host, job=job, reason=exc.message, next_step=exc.next_step, cause=exc.code
            ) from exc
        folder.write("accepted", {"at": timestamp(clock.now()), "state": status["state"]})
    return Submitted(job, report, status)


def _new_id(project: Project, ledger: Ledger, link: Link) -> str:
    """An id that neither the records have nor the machine: it may have jobs of before the records were lost."""
    is_known = bool(ledger.jobs_on(link.machine.id))
    return ledger.new_job_id(above=0 if is_known else highest_there(project, link))


def _submission(
    job: str, nonce: str, machine: Machine, spec: JobSpec, packed: Packed, report: UploadReport, now: str
) -> dict[str, Any]:
    """What was sent, as `jobs/<id>/job.json` keeps it."""
    return {
        "id": job,
        "nonce": nonce,
        "machine_id": machine.id,
        "provider": machine.provider,
        "gpu": machine.gpu,
        "rate_usd_hr": machine.rate_json,
        "created_at": now,
        "spec": spec.to_record(),
        "upload": {
            "tree": report.tree,
            "bytes_total": report.bytes_total,
            "bytes_sent": report.bytes_sent,
            "files_sent": report.files_sent,
            "left_out": [{"path": o.path, "bytes": o.bytes, "why": o.why} for o in packed.left_out[:200]],
        },
    }


def _first_line(job: str, machine: Machine, spec: JobSpec, report: UploadReport, now: str) -> dict[str, Any]:
    """The ledger's line at the start."""
    return {
        "id": job,
        "deployment_id": None,
        "machine_id": machine.id,
        "provider": machine.provider,
        "model": None,
        "workflow": None,
        "workflow_version": None,
        "inputs": {"run": spec.run, "tree": report.tree, **({"label": spec.label} if spec.label else {})},
        "gpu": machine.gpu,
        "started_at": now,
    }


def _refused_line(job: str, problem: GpuError, now: str) -> dict[str, Any]:
    """The ledger's line at the end of a job that the machine did not take."""
    return {
        "id": job,
        "status": "failed",
        "completed_at": now,
        "duration_s": 0,
        "cost_usd": 0,
        "artifacts": [],
        "error": problem.message,
        "reason": START_REFUSED,
    }


def _wire_spec(job: str, nonce: str, tree: str, spec: JobSpec, secret_names: list[str]) -> dict[str, Any]:
    progress = None
    if spec.progress is not None:
        progress = {
            "unit": spec.progress.unit,
            "stall_s": spec.progress.stall_s,
            "on_stall": spec.progress.on_stall,
        }
    return {
        "id": job,
        "nonce": nonce,
        "tree": tree,
        "run": spec.run,
        "setup": spec.setup,
        "timeout_s": spec.timeout_s,
        "expect": list(spec.expect),
        "progress": progress,
        "label": spec.label,
        "secret": secret_names,
    }
