"""Giving a machine back: refused while a job runs on it or outputs would be lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from typing import Any

from gpu_skills.clock import Clock, timestamp
from gpu_skills.errors import JobNotFound, JobRunning, NotCollected
from gpu_skills.jobs import observe
from gpu_skills.jobs.records import JobFolder, is_collected
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from gpu_skills.units import counted, format_bytes


def give_back(
    project: Project,
    ledger: Ledger,
    clock: Clock,
    connect: Callable[[Machine], Link],
    machine: Machine,
    abandon: Collection[str] = (),
) -> str:
    """End the session on a host of the user's own and record the machine as stopped. Its workspace stays there.

    abandon: jobs whose outputs the user said may be lost; recorded. Raises JobRunning or NotCollected.
    """
    for job in abandon:
        if ledger.latest(job) is None:
            raise JobNotFound(job=job)
    with closing(connect(machine)) as link:
        observe.settle(project, ledger, clock, link)
        running = observe.open_jobs(ledger, machine.id)
        if running:
            raise JobRunning(job=running[0]["id"])
        lost = _uncollected(project, ledger, link, abandon)
        if lost:
            raise NotCollected(
                jobs="; ".join(
                    f"{job}: {counted(len(files), 'file')}, {format_bytes(sum(f['bytes'] for f in files))}"
                    for job, files in lost.items()
                ),
                next_step=f"gpu job pull {next(iter(lost))}",
                outputs={job: files[:20] for job, files in lost.items()},
            )
        for job in set(abandon) & set(ledger.jobs_on(machine.id)):
            JobFolder(project, job).write("abandoned", {"at": timestamp(clock.now()), "machine_id": machine.id})
        link.session.call("session", {"project": project.project_id, "session": None, "end": True})
    machines.save(project, replace(machine, status="stopped", session=None))
    return machine.id


def _uncollected(
    project: Project, ledger: Ledger, link: Link, abandon: Collection[str]
) -> dict[str, list[dict[str, Any]]]:
    lost: dict[str, list[dict[str, Any]]] = {}
    for job in ledger.jobs_on(link.machine.id):
        if job in abandon or is_collected(project, job):
            continue
        folder = JobFolder(project, job)
        if folder.read("accepted") is None:
            continue
        with folder.collecting():  # a pull that is under way ends first
            if is_collected(project, job):
                continue
            try:
                files = observe.outputs_now(project, link, job)["files"]
            except JobNotFound:  # the machine has no trace of it any more: there is nothing left to protect
                continue
        if files:
            lost[job] = files
    return lost
