"""A failure of the device, not of the code: told by the log, remembered of the host, tried elsewhere once."""

from __future__ import annotations

from gpu_skills.jobs import launch
from gpu_skills.jobs.diagnose import collect
from gpu_skills.jobs.diagnose.classify import classify
from gpu_skills.jobs.launch import Launch
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import memory
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator


def in_log(folder: JobFolder) -> str | None:
    """What a job's kept log says of a device's failure.

    A device-side assert, an illegal address and a lack of memory are the code's, and are not meant.
    """
    log = collect.local_log(folder)
    found = [] if log is None else classify([log.text()], only={"host_fault"}, has_failed=False)
    return found[0].evidence[0].text[:120] if found else None


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
