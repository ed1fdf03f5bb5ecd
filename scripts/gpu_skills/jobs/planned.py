"""Plan a job with a machine of its own: what it runs and sends is looked at here, machine and money below.

Everything that speaks against the plan comes in one refusal, whether it lies in the files or in the market.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_skills.config import Capacity, GpuConfig
from gpu_skills.errors import (
    InputMissing,
    InputUnreadable,
    SecretShaped,
    UnsafeLink,
    UploadTooLarge,
    UsageError,
)
from gpu_skills.jobs import checkpoints, pack
from gpu_skills.jobs.pack import Packed
from gpu_skills.jobs.spec import JobSpec
from gpu_skills.jobs.staging import directory_of, inputs_record
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import images, planning, preflight
from gpu_skills.lifecycle.plans.market import ANY_GPU
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.plans.preflight import Reason

MAX_REQUIREMENTS_BYTES = 256 << 10
MAX_REQUIREMENTS_FILES = 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Wish:
    """What is wanted of the machine of a job, in the words of `planning.plan_job`. None: the default.

    require_inputs, allow_secret_files: paths below the job's directory. resume_from: an older job.
    """

    hold_for_s: float | None = None
    max_lease_s: float | None = None
    job_timeout_s: float | None = None
    expected_s: float | None = None
    volume_id: str | None = None
    interruptible: bool = False
    download_gb: float = 0.0
    require_inputs: tuple[str, ...] = ()
    allow_secret_files: tuple[str, ...] = ()
    resume_from: str | None = None


def plan(op: Operator, config: GpuConfig, spec: JobSpec, wish: Wish, *, progress: Progress | None = None) -> Plan:
    """Measure a plan for this job. PlanRefused with all reasons; UsageError for a command that repeats a secret."""
    timeout_s = spec.timeout_s if wish.job_timeout_s is None else wish.job_timeout_s
    job = _job_record(op, replace(spec, timeout_s=timeout_s or None), wish)
    resume = None if wish.resume_from is None else checkpoints.latest(op.project, wish.resume_from).to_record()
    return _measured(op, config, job, replace(wish, job_timeout_s=timeout_s), resume, progress)


def again(op: Operator, config: GpuConfig, old: Plan, *, progress: Progress | None = None) -> Plan:
    """The same plan with the stock, prices and files of now. What gpu.yaml bounds today bounds it."""
    config = _config_of(config, old)
    if old.machine_class == "project":
        return planning.plan_project(op, config, interruptible=old.interruptible)
    if old.job is None:
        raise UsageError("this plan has no job, so it cannot be measured again here", next_step="gpu plan")
    usual_s = planning.usual_lease_s(old.expected_s, old.hold_for_s, old.job_timeout_s)
    was_chosen = old.deadline_reason == "max_lease" and old.deadline_s != int(usual_s)
    wish = Wish(
        hold_for_s=old.hold_for_s,
        max_lease_s=old.deadline_s if was_chosen else None,
        job_timeout_s=old.job_timeout_s,
        expected_s=old.expected_s,
        volume_id=old.volume_id,
        interruptible=old.interruptible,
        download_gb=float(old.job.get("download_gb") or 0),
        require_inputs=tuple(old.job.get("require_inputs") or ()),
        allow_secret_files=tuple(old.job.get("allow_secret_files") or ()),
    )
    return _measured(op, config, dict(old.job), wish, old.resume_from, progress)


def _measured(
    op: Operator,
    config: GpuConfig,
    job: dict[str, Any],
    wish: Wish,
    resume_from: dict[str, Any] | None,
    progress: Progress | None,
) -> Plan:
    packed, reasons = _packed(op, job, wish, progress)
    texts = _installs(directory_of(op.project, job), job, packed)
    return planning.plan_job(
        op,
        config,
        job=job,
        inputs=None if packed is None else inputs_record(packed),
        hold_for_s=wish.hold_for_s,
        max_lease_s=wish.max_lease_s,
        job_timeout_s=wish.job_timeout_s,
        expected_s=wish.expected_s,
        volume_id=wish.volume_id,
        interruptible=wish.interruptible,
        weights_gb=wish.download_gb,
        resume_from=resume_from,
        texts=texts,
        reasons=reasons,
    )


def _job_record(op: Operator, spec: JobSpec, wish: Wish) -> dict[str, Any]:
    """What the plan says of the job. Names of secrets only; a command that holds one could not be run from it."""
    record = spec.to_record()
    if (record["run"], record["setup"], record["env"]) != (spec.run, spec.setup, dict(spec.env)):
        raise UsageError(
            "the command repeats the value of a secret, and a plan holds no values",
            next_step="write $NAME in the command in place of the value",
        )
    directory, root = spec.directory, op.project.root.resolve()
    if directory.is_relative_to(root):
        record["directory"] = directory.relative_to(root).as_posix()
    record["require_inputs"] = list(wish.require_inputs)
    record["allow_secret_files"] = list(wish.allow_secret_files)
    record["download_gb"] = wish.download_gb
    return record


def _config_of(config: GpuConfig, old: Plan) -> GpuConfig:
    names = [candidate.gpu for candidate in old.candidates if candidate.gpu != ANY_GPU]
    capacity = Capacity(old.capacity["mode"], int(old.capacity["attempts"]), float(old.capacity["interval_s"]))
    compute = replace(
        config.compute,
        image=old.image,
        image_gb=config.compute.image_gb if config.compute.image == old.image else None,
        gpu=names[0] if names else None,
        candidates=tuple(names[1:]),
        gpu_count=old.gpu_count,
        min_vram_gb=old.min_vram_gb,
        disk_gb=old.disk_gb,
        capacity=capacity,
    )
    return replace(config, provider=old.provider, compute=compute)


# the files --------------------------------------------------------------------------------------------------------


def _packed(
    op: Operator, job: dict[str, Any], wish: Wish, progress: Progress | None
) -> tuple[Packed | None, list[Reason]]:
    """The selected files, hashed, or why they cannot be sent; and every file the job names that would not be there."""
    directory = directory_of(op.project, job)

    def packed(required: Sequence[str]) -> Packed:
        return pack.pack(
            directory,
            exclude=job.get("exclude") or (),
            require_inputs=required,
            allow_secret_files=wish.allow_secret_files,
            cache_path=pack.cache_path(op.project.state, directory),
            progress=progress,
        )

    required = list(dict.fromkeys((*wish.require_inputs, *_named_files(job))))
    reasons: list[Reason] = []
    for names in (required, []):
        try:
            return packed(names), reasons
        except InputMissing as exc:
            step = "create it, or take it out of exclude, then run gpu plan again"
            reasons += [
                Reason("missing_file", f"{one['path']} would not be on the machine: {one['why']}", step)
                for one in exc.details["inputs"]
            ]
        except (SecretShaped, UploadTooLarge, UnsafeLink, InputUnreadable) as exc:
            reasons.append(preflight.of_error(exc))
            if names:  # it was refused before the missing ones were looked for
                gone = [name for name in names if not os.path.lexists(directory / name)]
                told = {reason.message for reason in reasons}
                texts = (f"{name} would not be on the machine: is not there" for name in gone)
                reasons += [Reason("missing_file", text) for text in texts if text not in told]
            return None, reasons
    return None, reasons


def _named_files(job: dict[str, Any]) -> list[str]:
    """What `setup` and `run` read by name from the job's directory, as far as that can be seen."""
    setup, run = job.get("setup"), job.get("run")
    named = [*images.requirement_files(setup), *images.scripts(setup)]
    if not images.makes_files(setup):
        named += [*images.requirement_files(run), *images.scripts(run)]
    return [name for name in named if not os.path.isabs(name)]


def _installs(directory: Path, job: dict[str, Any], packed: Packed | None) -> dict[str, str]:
    """What installs packages, by where it stands: the commands, and the requirements files they name."""
    texts = {name: str(job[name]) for name in ("setup", "run") if job.get(name)}
    waiting = [name for text in texts.values() for name in images.requirement_files(text)]
    if not images.makes_files(job.get("setup")):
        waiting.append("requirements.txt")  # a script of the job may install it
    sent = None if packed is None else {entry.display for entry in packed.tree.files}
    while waiting and len(texts) < MAX_REQUIREMENTS_FILES:
        name = os.path.normpath(waiting.pop(0))
        if name in texts or name.startswith(("..", "/")) or (sent is not None and name not in sent):
            continue
        text = _text(directory / name)
        if text is not None:
            texts[name] = text
            folder = os.path.dirname(name)
            waiting += [os.path.join(folder, other) for other in images.nested_files(text)]
    return texts


def _text(path: Path) -> str | None:
    """The beginning of a plain file; None for anything else."""
    try:
        if not path.is_file():
            return None
        with open(path, "rb") as stream:
            return stream.read(MAX_REQUIREMENTS_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
