"""A failure of the device, not of the code: told by the log, remembered of the host, tried elsewhere once."""

from __future__ import annotations

import re

from gpu_skills.jobs import launch
from gpu_skills.jobs.launch import Launch
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import memory
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator

TAIL_BYTES = 1 << 20
# Of the host. A device-side assert, an illegal address and a lack of memory are the code's, and are not here.
_HOSTS = re.compile(
    rb"uncorrectable (?:ECC|NVLink) error|GPU has fallen off the bus|GPU is lost"
    rb"|\bXid\b[^\n]{0,40}\b(?:48|62|63|64|74|79|94|95|119|120)\b"
    rb"|CUDA(?: driver)? initialization[^\n]{0,60}(?:unknown error|initialization error)|CUDA error: unknown error"
    rb"|no CUDA-capable device is detected|CUDA error: (?:all CUDA-capable devices are busy|system not yet initialized)"
    rb"|CUDA_ERROR_(?:ECC_UNCORRECTABLE|NO_DEVICE|SYSTEM_NOT_READY|HARDWARE_STACK_ERROR|NVLINK_UNCORRECTABLE)"
    rb"|Unable to determine the device handle for GPU|Failed to initialize NVML: (?:Unknown Error|Driver/library)"
)


def in_log(folder: JobFolder) -> str | None:
    """The first words of a device's failure in the end of a job's kept log."""
    try:
        with folder.log.open("rb") as log:
            log.seek(max(0, folder.log.stat().st_size - TAIL_BYTES))
            found = _HOSTS.search(log.read(TAIL_BYTES))
    except OSError:
        return None
    return None if found is None else found.group().decode("utf-8", "replace")[:120]


def advice(op: Operator, launched: Launch, machine: Machine) -> str | None:
    """After a failed job: a line for the user when its device is to blame; the host is then left alone for a while.

    The same work met one on another host before: it is not tried a third time, the cause moves with it.
    """
    what = in_log(JobFolder(op.project, launched.job))
    if what is None:
        return None
    if machine.host_key:
        memory.remember_failure(op.project, machine.host_key, f"device error: {what}", clock=op.clock)
    job = launched.job
    if _met_before(op, launched):
        return f"{job}: {what}, and the same inputs met a device error on another host: look at image and code"
    return (
        f"{job}: {what}: the device of {machine.host_key or machine.host} is to blame and is left out for a while; "
        "once more elsewhere: gpu plan --freeze"
    )


def _met_before(op: Operator, launched: Launch) -> bool:
    tree = _tree(op, launched)
    return tree is not None and any(
        _tree(op, other) == tree and in_log(JobFolder(op.project, other.job)) is not None
        for other in launch.all_launches(op.project)
        if other.plan != launched.plan
    )


def _tree(op: Operator, launched: Launch) -> str | None:
    record = JobFolder(op.project, launched.job).read("job")
    return (record or {}).get("upload", {}).get("tree")
