"""One request to a deployment, as a job of the ledger: checked, written down, sent once, its outputs brought here.

The request's id at the service is written down before anything is sent. A command that died or got no answer leaves
the job running in the ledger; the same request given again goes on with that job, and the service, which knows the id,
does not do it twice. A service that cannot be asked by an id (an OpenAI one) leaves `lost` instead, and a repeat is a
new job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.deployments.workflows import Workflow
from gpu_skills.economics.sharing import shared_seconds
from gpu_skills.errors import (
    DeploymentNotReady,
    DiskFull,
    GenerationFailed,
    GenerationInterrupted,
    GenerationLost,
    GenerationTimeout,
    GenerationUnknown,
    GpuError,
    NotWritable,
    OutputTooLarge,
    StateBusy,
    UsageError,
)
from gpu_skills.jobs.collect import make_folder
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import machines
from gpu_skills.runtimes.base import RUN_TIMEOUT_S, Endpoint, Event, OnEvent, Request, Result, Runtime, ignore
from gpu_skills.runtimes.inputs import check
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.runtimes.outputs import FolderSink
from gpu_skills.state import registry
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from gpu_skills.units import json_number, usd

FINDS_BY_ID = frozenset({"comfyui", "http"})  # engines whose service is asked for a run before it does it again
ENDS = {GenerationTimeout: "timeout", GenerationInterrupted: "cancelled", GenerationLost: "lost"}


@dataclass(frozen=True)
class Asked:
    """What is wanted of a deployment. deployment: its record. inputs: as given; a `Path` is a file to be sent."""

    deployment: Mapping[str, Any]
    model: ModelManifest
    inputs: Mapping[str, Any]
    workflow: Workflow | None = None
    operation: str | None = None
    timeout_s: float = RUN_TIMEOUT_S


@dataclass(frozen=True)
class Ran:
    """line: the last one of the job. has_gone_on: an earlier command had asked, and this one took its place."""

    job: str
    line: dict[str, Any]
    result: Result
    has_gone_on: bool


def run(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    runtime: Runtime,
    endpoint: Endpoint,
    asked: Asked,
    *,
    on_start: Callable[[str, bool], None] = lambda job, has_gone_on: None,
    on_event: OnEvent = ignore,
) -> Ran:
    """Ask once and wait. on_start: the job's id, before anything is sent.

    Raises InputInvalid with everything that is wrong and DeploymentNotReady, both before there is a job; the kinds of
    `Runtime.run`, with the job's end in the ledger; GenerationUnknown with the job still running there.
    """
    project.require_writable()
    require_ready(asked.deployment)
    values = checked(runtime, asked)
    digest = _digest(asked, values)
    with _job(project, ledger, clock, runtime, asked, values, digest) as (folder, request_id, has_gone_on):
        on_start(folder.job, has_gone_on)
        request = _request(asked, values, request_id, is_new=not has_gone_on)
        sending = _Sending(project, ledger, clock, runtime, endpoint, asked, folder, has_gone_on)
        result = sending.go(request, on_event)
        return Ran(folder.job, ledger.latest(folder.job) or {}, result, has_gone_on)


def require_ready(deployment: Mapping[str, Any]) -> None:
    if deployment.get("status") != "ready":
        raise DeploymentNotReady(deployment=deployment["id"], status=deployment.get("status"))


def checked(runtime: Runtime, asked: Asked) -> dict[str, Any]:
    """The values to send, defaults included. InputInvalid names everything that is wrong. Nothing is sent."""
    if runtime.job(_request(asked, asked.inputs, "check", is_new=True)) is not None:
        raise UsageError(
            f"{asked.model.id} is run as a job on the machine, not asked over HTTP", next_step="gpu job run"
        )
    if runtime.name == "comfyui":
        if asked.workflow is None or asked.workflow.content is None:
            raise UsageError("a run on ComfyUI needs a workflow with its file", next_step="gpu model add-workflow FILE")
        return check(asked.workflow.manifest.inputs, asked.inputs, what=asked.workflow.id)
    if runtime.name == "http":
        return check(asked.model.inputs, asked.inputs, what=asked.model.id)
    if runtime.name in ("openai", "vllm"):
        from gpu_skills.runtimes.openai import body_of

        body_of(_request(asked, asked.inputs, "check", is_new=True), asked.operation or "chat")
    return dict(asked.inputs)


# the job --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _job(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    runtime: Runtime,
    asked: Asked,
    values: dict[str, Any],
    digest: str,
) -> Iterator[tuple[JobFolder, str, bool]]:
    """The job of this request, held by its lock: one that was left without an answer, else a new one."""
    for line in ledger.open_jobs():
        if line.get("deployment_id") != asked.deployment["id"]:
            continue
        folder = JobFolder(project, line["id"])
        record = folder.read("request")
        if record is None or record["digest"] != digest:
            continue
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(folder.submitting(timeout_s=0))
            except StateBusy:
                continue  # another command waits for it
            if not ledger.is_open(ledger.latest(folder.job) or {}):
                continue
            if runtime.name not in FINDS_BY_ID:
                _lose(ledger, clock, line)
                continue
            yield folder, record["request_id"], True
            return
    folder = JobFolder(project, ledger.new_job_id())
    with folder.submitting():
        request_id = f"{folder.job}-{secrets.token_hex(8)}"
        now = timestamp(clock.now())
        folder.write(
            "request",
            {
                "request_id": request_id,
                "deployment_id": asked.deployment["id"],
                "digest": digest,
                "created_at": now,
            },
        )
        ledger.start(_first_line(folder.job, asked, values, now), private=_private(asked))
        yield folder, request_id, False


def _first_line(job: str, asked: Asked, values: Mapping[str, Any], now: str) -> dict[str, Any]:
    deployment, workflow = asked.deployment, asked.workflow
    return {
        "id": job,
        "deployment_id": deployment["id"],
        "machine_id": deployment.get("machine_id"),
        "provider": deployment["provider"],
        "model": asked.model.id,
        "workflow": workflow.id if workflow else None,
        "workflow_version": workflow.record.get("version") if workflow else None,
        "inputs": {name: _recorded(value) for name, value in values.items()},
        "gpu": deployment.get("gpu"),
        "started_at": now,
    }


def _private(asked: Asked) -> frozenset[str]:
    of_workflow = (asked.workflow.record.get("private_inputs") or ()) if asked.workflow else ()
    return frozenset((*asked.model.private_inputs, *of_workflow))


def _lose(ledger: Ledger, clock: Clock, line: Mapping[str, Any]) -> None:
    """The command that waited is gone, and the service cannot be asked what became of it."""
    ledger.finish(
        {
            "id": line["id"],
            "status": "lost",
            "completed_at": timestamp(clock.now()),
            "duration_s": 0,
            "cost_usd": 0,
            "artifacts": [],
            "error": "never_answered: the command that asked ended before the answer",
            "reason": "never_answered",
        }
    )


# sending and the end --------------------------------------------------------------------------------------------------


@dataclass
class _Sending:
    project: Project
    ledger: Ledger
    clock: Clock
    runtime: Runtime
    endpoint: Endpoint
    asked: Asked
    folder: JobFolder
    was_taken: bool  # the service has it, as far as we know

    def go(self, request: Request, on_event: OnEvent) -> Result:
        has_gone_on = self.was_taken

        def noted(event: Event) -> None:
            self.was_taken = self.was_taken or event.name in ("queued", "found")
            on_event(event)

        make_folder(self.folder.outputs.parent)
        try:
            result = self.runtime.run(self.endpoint, request, FolderSink(self.folder.outputs), noted)
        except KeyboardInterrupt:
            said = self._interrupt(request.id)
            self._end("cancelled", reason="user", error=f"user: interrupted; the service says {said}")
            raise
        except GpuError as exc:
            self._failed(request.id, exc)
            raise
        seconds = result.facts.get("duration_s") if has_gone_on else None
        self._end("succeeded", result=result, duration_s=seconds if isinstance(seconds, int | float) else None)
        return result

    def _failed(self, request_id: str, exc: GpuError) -> None:
        """Write the end where there is one; what may still be done at the service has none yet."""
        if isinstance(exc, DiskFull | NotWritable) and self.was_taken:
            return  # the result waits there
        is_end = isinstance(exc, (GenerationFailed, OutputTooLarge, *ENDS))
        if isinstance(exc, GenerationUnknown) or (self.was_taken and not is_end):
            if self.runtime.name not in FINDS_BY_ID:
                self._end("lost", reason="never_answered", error=f"never_answered: {exc.message}")
            if isinstance(exc, GenerationUnknown):
                return
            raise GenerationUnknown(
                what=f"job {self.folder.job}", service=self.runtime.name, reason=exc.message, job=self.folder.job
            ) from exc
        if isinstance(exc, GenerationTimeout):
            self._interrupt(request_id)
        status = next((word for kind, word in ENDS.items() if isinstance(exc, kind)), "failed")
        self._end(status, reason=exc.code, error=f"{exc.code}: {exc.message}")

    def _interrupt(self, request_id: str) -> str:
        try:
            return self.runtime.interrupt(self.endpoint, request_id)
        except GpuError as exc:
            return exc.message

    def _end(
        self,
        status: str,
        *,
        result: Result | None = None,
        reason: str | None = None,
        error: str | None = None,
        duration_s: float | None = None,
    ) -> None:
        """Write the end; the duration is from the start to now unless the service measured it."""
        now = self.clock.now()
        line = self.ledger.latest(self.folder.job) or {}
        start = parse_timestamp(line["started_at"])
        lasted_s = max(0.0, (now - start).total_seconds())
        duration_s = lasted_s if duration_s is None else min(max(0.0, duration_s), lasted_s)
        end_s = start.timestamp() + duration_s
        ended = {"state": status, "reason": reason, "started_epoch_s": start.timestamp(), "duration_s": duration_s}
        self.folder.write("ended", ended)
        ending: dict[str, Any] = {
            "id": self.folder.job,
            "status": status,
            "completed_at": timestamp(now),
            "duration_s": round(duration_s, 3),
            "cost_usd": self._cost_usd(start.timestamp(), end_s),
            "artifacts": [
                {"name": output.name, "uri": str(output.path.relative_to(self.project.root))}
                for output in (result.outputs if result else ())
            ],
        }
        if status != "succeeded":
            ending |= {"error": error, "reason": reason}
        self.ledger.finish(ending)
        self._note_use(timestamp(now))

    def _cost_usd(self, start_s: float, end_s: float) -> float | int:
        """This run's share of the machine's time at its rate: runs and jobs that overlap share equally."""
        machine_id = self.asked.deployment.get("machine_id")
        machine = machines.find(self.project, machine_id) if machine_id else None
        if machine is None or not machine.rate_usd_hr:
            return 0
        others = []
        for job in self.ledger.jobs_on(machine.id):
            told = {} if job == self.folder.job else JobFolder(self.project, job).read("ended") or {}
            began, lasted = told.get("started_epoch_s"), told.get("duration_s")
            if began is not None and lasted is not None:
                others.append((float(began), float(began) + float(lasted)))
            elif job != self.folder.job and self.ledger.is_open(line := self.ledger.latest(job) or {}):
                others.append((parse_timestamp(line.get("started_at") or line["ts"]).timestamp(), float("inf")))
        return json_number(usd(usd(shared_seconds(start_s, end_s, others)) * machine.rate_usd_hr / 3600))

    def _note_use(self, now: str) -> None:
        """Idle time counts from the end of the last run."""
        identity = self.asked.deployment["id"]
        if any(record["id"] == identity for record in registry.load(self.project, "deployments")):
            registry.change(
                self.project, "deployments", identity, lambda r: {**r, "last_used_at": now}, clock=self.clock
            )


# pure -----------------------------------------------------------------------------------------------------------------


def _request(asked: Asked, values: Mapping[str, Any], request_id: str, *, is_new: bool) -> Request:
    workflow = asked.workflow
    return Request(
        request_id,
        asked.model,
        values,
        workflow=workflow.content if workflow else None,
        manifest=workflow.manifest if workflow else None,
        operation=asked.operation,
        timeout_s=asked.timeout_s,
        is_new=is_new,
    )


def _recorded(value: Any) -> Any:
    """A file by what it contains: the ledger never has the file itself."""
    if not isinstance(value, Path):
        return value
    with value.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sha256": digest, "bytes": value.stat().st_size, "name": value.name}


def _digest(asked: Asked, values: Mapping[str, Any]) -> str:
    said = {
        "deployment": asked.deployment["id"],
        "model": [asked.model.id, asked.model.version],
        "workflow": [asked.workflow.id, asked.workflow.manifest.sha256] if asked.workflow else None,
        "operation": asked.operation,
        "inputs": {name: _recorded(value) for name, value in values.items()},
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
