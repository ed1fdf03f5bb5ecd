"""Bring a job's outputs home: only what differs, every file verified, renamed into place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_skills.clock import Clock, timestamp
from gpu_skills.errors import NotWritable, Refused
from gpu_skills.jobs import checkpoints
from gpu_skills.jobs.follow import gap_notice, read_log
from gpu_skills.jobs.observe import fetch_manifest, skipped_outputs
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import states
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.remote.transfer import DownloadReport, download
from gpu_skills.remote.tree import Entry
from gpu_skills.state import files
from gpu_skills.state.project import Project

LOG_KEPT_BYTES = 64 << 20


class MachineStopped(Refused):
    code = "machine_stopped"
    template = "{machine} is stopped: nothing of {job} can be had from it before it is started again"
    next_step = "gpu setup"


class MachineGone(Refused):
    code = "machine_gone"
    template = "the machine of {job} ({machine}) is gone; what was pulled of it is here"
    next_step = "gpu job status {job}"


@dataclass(frozen=True)
class Collected:
    job: str
    destination: Path
    report: DownloadReport
    files: int
    bytes: int
    final: bool
    skipped: list[dict[str, Any]]


def pull(
    project: Project,
    clock: Clock,
    link: Link,
    job: str,
    *,
    destination: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    force: bool = False,
    since_step: int | None = None,
) -> Collected:
    """Download what changed and record what was verified. While the job runs, files that move are left for next time.

    force: do not trust what earlier pulls verified; hash everything here again. since_step: only checkpoints of a
    later step (`checkpoints`); such a pull says nothing of the rest.
    """
    folder = JobFolder(project, job)
    destination = destination or folder.outputs
    with folder.collecting():
        entries, summary = fetch_manifest(project, link, job)
        final = bool(summary.get("final"))
        wanted = entries if since_step is None else _checkpoints_since(entries, since_step)
        make_folder(destination)
        report = download(
            link.session,
            link.bulk,
            project.project_id,
            job,
            wanted,
            destination,
            progress=progress,
            still_running=not final,
            cache_path=folder.path / "verified.json",
            trust_cache=not force,
        )
        listed = [e for e in entries if not e.is_dir]
        here = [e for e in wanted if not e.is_dir]
        is_whole = final and not report.changing and since_step is None
        skipped = skipped_outputs(summary)
        folder.write(
            "manifest",
            {
                "final": final,
                "files": [{"path": e.display, "bytes": e.size, "sha256": e.sha256} for e in listed],
                "skipped": skipped,
            },
        )
        if final:
            _keep_log(project, link, folder)
        before = folder.read("collected")
        if is_whole or not (before and before.get("final")):  # what was all here before still is
            folder.write(
                "collected",
                {
                    "at": timestamp(clock.now()),
                    "final": is_whole,
                    "files": len(here) - len(report.changing),
                    "bytes": sum(e.size for e in here),
                    "destination": os.fsencode(destination).decode("utf-8", "replace"),
                },
            )
    return Collected(job, destination, report, len(here), sum(e.size for e in here), is_whole, skipped)


def awake(machine: Machine, job: str) -> Machine:
    """The machine, if it can answer. MachineStopped and MachineGone say what to do otherwise."""
    if not machine.is_rented:
        return machine
    if machine.status in states.FINAL:
        raise MachineGone(machine=machine.id, job=job)
    if machine.status in ("stopped", "stopping"):
        is_projects = machine.machine_class == "project"
        raise MachineStopped(
            machine=machine.id, job=job, next_step="gpu setup" if is_projects else f"gpu machine start {machine.id}"
        )
    return machine


def _checkpoints_since(entries: Sequence[Entry], step: int) -> list[Entry]:
    found = ((entry, checkpoints.step_of(entry.path.decode("utf-8", "replace"))) for entry in entries)
    return [entry for entry, at in found if at is not None and at > step]


def _keep_log(project: Project, link: Link, folder: JobFolder) -> None:
    if folder.log.exists():
        return
    data, offset = bytearray(), 0
    while len(data) < LOG_KEPT_BYTES:
        piece = read_log(link, project.project_id, folder.job, offset=offset)
        if piece.gap_bytes:
            data += f"\n{gap_notice(piece.gap_bytes)}\n".encode()
        if not piece.data:
            break
        data += piece.data
        offset = piece.next
    files.commit(folder.log, bytes(data))


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as exc:
        raise NotWritable(path=str(path), reason="a file of that name is in the way") from exc
    except OSError as exc:
        raise files.writing_failed(path, exc) from exc
