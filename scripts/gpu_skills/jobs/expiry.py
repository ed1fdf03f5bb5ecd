"""What a rented machine sends to the job's durable home when its session ends before anybody came for the outputs.

At the start the machine gets signed addresses, each for one object below `<home>/.gpu-expiry`, that live until a while
after its deadline. With its session's end it fills them: the outputs as one stream, and last the manifest, whose being
there says that the stream is whole. `fetch` takes the stream apart again, each file verified.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_skills.artifacts.base import OWN_PREFIX
from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.errors import ArtifactMissing, GpuError, HashMismatch, TransferIncomplete
from gpu_skills.jobs import durable, observe
from gpu_skills.jobs.collect import make_folder
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle.connect import Link
from gpu_skills.remote.tree import Entry, parse_manifest
from gpu_skills.state.project import Project

if TYPE_CHECKING:
    from gpu_skills.artifacts.base import Store
    from gpu_skills.remote.destination import Destination

FOLDER = f"{OWN_PREFIX}expiry"
MANIFEST = "manifest.jsonl"
SLOTS = 64
LONGER_S = 3600  # than the deadline: the end of a session takes its time
MAX_MANIFEST_BYTES = 64 << 20
WEEK_S = 7 * 24 * 3600


def hand_over(project: Project, clock: Clock, link: Link, job: str, uri: str) -> int:
    """Give the machine its addresses; how many. 0: the store is none that can sign some."""
    from gpu_skills.artifacts.s3 import S3Store

    store, folder = _place(project, job, uri)
    if not isinstance(store, S3Store):
        return 0
    lives_s = WEEK_S
    if link.machine.deadline_at is not None:
        left = parse_timestamp(link.machine.deadline_at) - clock.now()
        lives_s = max(0, int(left.total_seconds())) + LONGER_S
    lines = []
    for name in (*(f"{number:05}" for number in range(SLOTS)), MANIFEST):
        signed = store.presign(f"{folder}/{name}", "PUT", expires_in_s=lives_s)
        lines.append(json.dumps({"url": signed.url, "headers": signed.headers}) + "\n")
    asked = {"project": project.project_id, "job": job}
    return link.session.call("home", asked, body="".join(lines).encode())["slots"]


def withdraw(project: Project, link: Link, job: str) -> None:
    """Take the addresses back: everything is where it belongs."""
    link.session.call("home", {"project": project.project_id, "job": job}, body=b"")


def fetch(project: Project, clock: Clock, job: str, uri: str, *, destination: Path | None = None) -> int:
    """Bring what a machine sent at its end to where a pull would have; how many files. It then counts as collected.

    Raises ArtifactMissing when it did not send all of it.
    """
    from gpu_skills.remote.destination import Destination

    folder = JobFolder(project, job)
    store, place = _place(project, job, uri)
    with folder.collecting():
        found = store.get(f"{place}/{MANIFEST}", max_bytes=MAX_MANIFEST_BYTES)
        if found is None:
            raise ArtifactMissing(f"its machine left nothing of {job} in {uri}", next_step=f"gpu job status {job}")
        entries = parse_manifest([found[0]], host=uri, job=job)
        destination = destination or folder.outputs
        make_folder(destination)
        stream = _Stream(store, place)
        with Destination(destination) as here:
            for entry in entries:
                if entry.is_dir:
                    here.make_folder(entry.path)
                elif entry.is_file:
                    _bring(here, stream, entry)
            here.publish(sync=[entry.path for entry in entries if entry.is_file])
            here.remove_staging()
        brought = [entry for entry in entries if not entry.is_dir]
        observe.record_manifest(folder, entries, {"final": True, "skipped": []})
        folder.write(
            "collected",
            {
                "at": timestamp(clock.now()),
                "final": True,
                "files": len(brought),
                "bytes": sum(entry.size for entry in brought),
                "destination": str(destination),
            },
        )
    return len(brought)


def offer(project: Project, clock: Clock, link: Link, job: str) -> str | None:
    """`hand_over` for a job with a home on a rented machine. Says what went wrong, if it did: the job runs anyway."""
    uri = durable.wanted_home(project, job)
    if uri is None or not link.machine.is_rented:
        return None
    try:
        hand_over(project, clock, link, job, uri)
    except GpuError as exc:
        return f"at its end the machine will not send the outputs to {uri}: {exc.message}"
    return None


def _place(project: Project, job: str, uri: str) -> tuple[Store, str]:
    from gpu_skills.artifacts.base import join, open_store

    store, prefix = open_store(uri, base=project.root)
    return store, join(prefix, durable.home_name(JobFolder(project, job)), FOLDER)


class _Stream:
    """The slots one behind the other, in ranges."""

    def __init__(self, store: Store, place: str):
        self._blocks = self._read(store, place)
        self._rest = b""

    def take(self, size: int) -> Iterator[bytes]:
        while size:
            data = self._rest or next(self._blocks, b"")
            if not data:
                raise TransferIncomplete(reason="what the machine sent ends before its manifest does")
            piece, self._rest = data[:size], data[size:]
            size -= len(piece)
            yield piece

    @staticmethod
    def _read(store: Store, place: str) -> Iterator[bytes]:
        for number in range(SLOTS):
            yield from store.blocks(f"{place}/{number:05}")


def _bring(here: Destination, stream: _Stream, entry: Entry) -> None:
    """One file, put together out of sight and placed when it is right."""
    from gpu_skills.remote.destination import write_all, writing

    digest, name = sha256(), "arriving"
    descriptor = here.open_staged(name, entry.mode)
    try:
        with writing(here.path):
            for data in stream.take(entry.size):
                digest.update(data)
                write_all(descriptor, data)
    finally:
        os.close(descriptor)
    if digest.hexdigest() != entry.sha256:
        here.discard(name)
        raise HashMismatch(path=entry.display, found=digest.hexdigest(), expected=entry.sha256)
    here.place(name, entry.path)
