"""Outputs from the machine straight to a bucket, without passing here: the machine gets signed addresses and no key.

An address opens one object (or one part of one) for one size and some hours, and replaces nothing. It goes to the
machine in the body of a request and is written down nowhere. What arrived is known by the store's own answers; what it
is worth is known after `durable.read_back`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import Clock
from gpu_skills.errors import ArtifactChanged, JobRunning, TransferIncomplete, UsageError
from gpu_skills.jobs import durable, observe
from gpu_skills.jobs.durable import NAMED, Progress, Pushed
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle.connect import Link
from gpu_skills.remote.tree import Entry, path_members
from gpu_skills.state.project import Project

if TYPE_CHECKING:
    from gpu_skills.artifacts.s3 import S3Store

PART_BYTES = 64 << 20
PIECES_AT_ONCE = 16  # of one request: the addresses of the next are made when it is their turn
ADDRESS_LIVES_S = 4 * 3600
SILENCE_S = 900.0  # of the machine, while one piece is on its way


@dataclass(frozen=True)
class _Piece:
    """Some bytes of an output. number 0: the whole of it; else that part of an upload."""

    entry: Entry
    offset: int
    size: int
    number: int = 0
    upload_id: str = ""


def push(project: Project, clock: Clock, link: Link, job: str, uri: str, *, progress: Progress | None = None) -> Pushed:
    """Let the machine send the outputs of a job that has ended to a bucket. May be repeated and goes on.

    Raises JobRunning before its end, and TransferIncomplete when some did not arrive, with what did on record.
    """
    from gpu_skills.artifacts.base import join, open_store
    from gpu_skills.artifacts.s3 import S3Store

    folder = JobFolder(project, job)
    with folder.collecting():
        entries, summary = observe.fetch_manifest(project, link, job)
        if not summary.get("final"):
            raise JobRunning(job=job)
        observe.record_manifest(folder, entries, summary)
        store, prefix = open_store(uri, base=project.root, notes=folder.path / "uploads.json")
        if not isinstance(store, S3Store):
            raise UsageError(
                "a machine can send to a bucket only; a folder of yours is reached by pulling",
                next_step=f"gpu job pull {job}",
            )
        home = join(prefix, durable.home_name(folder))
        outputs, left_out = _outputs(entries)
        before = durable.recorded(folder, store.uri_of(home))
        if any(before.get(e.display, {}).get("sha256") != e.sha256 for e in outputs):
            store.probe(prefix)
        sending = _Sending(project, link, job, store, home, progress)
        sending.go(outputs)
        durable.record(
            folder, clock, store.uri_of(home), [e for e in map(sending.line, outputs) if e], left_out, before
        )
    if sending.wrong:
        raise ArtifactChanged(
            what=f"{', '.join(sending.wrong[:NAMED])} of {job}",
            reason="another object is there, or the file changed",
            next_step="use another prefix, or pull it: gpu job pull",
        )
    if sending.failed:
        raise TransferIncomplete(reason=f"{len(sending.failed)} outputs of {job} did not arrive: {sending.why}")
    return Pushed(store.uri_of(home), len(outputs), sending.kept, sending.sent_bytes, left_out)


class _Sending:
    """What was asked of the machine, and what came of it."""

    def __init__(self, project: Project, link: Link, job: str, store: S3Store, home: str, progress: Progress | None):
        self._project, self._link, self._job = project, link, job
        self._store, self._home, self._progress = store, home, progress
        self.kept = self.sent_bytes = self._done = self._total = 0
        self.there: set[str] = set()
        self.failed: set[str] = set()
        self.wrong: list[str] = []
        self.why = ""

    def go(self, outputs: list[Entry]) -> None:
        self._total = sum(entry.size for entry in outputs)
        pieces = self._pieces(outputs)
        while batch := list(itertools.islice(pieces, PIECES_AT_ONCE)):
            self._send(batch)
        for entry in outputs:
            if entry.display not in self.there | self.failed and entry.display not in self.wrong:
                self._complete(entry)

    def line(self, entry: Entry) -> dict[str, Any] | None:
        if entry.display not in self.there:
            return None
        key = self._key(entry)
        return {"path": entry.display, "size": entry.size, "sha256": entry.sha256, "uri": self._store.uri_of(key)}

    def _key(self, entry: Entry) -> str:
        from gpu_skills.artifacts.base import join

        return join(self._home, entry.display)

    def _pieces(self, outputs: list[Entry]) -> Iterator[_Piece]:
        """What is still to be sent, looked up as the sending comes to it."""
        for entry in outputs:
            found = self._store.head(self._key(entry))
            if found is not None:
                is_same = (found.bytes, found.sha256) == (entry.size, entry.sha256)
                (self.there.add if is_same else self.wrong.append)(entry.display)
                self.kept += is_same
                self._moved(entry.size)
            elif entry.size <= PART_BYTES:
                yield _Piece(entry, 0, entry.size)
            else:
                upload, arrived = self._store.upload_under_way(self._key(entry), entry.size, entry.sha256)
                for number, offset in enumerate(range(0, entry.size, upload.part_bytes), 1):
                    size = min(upload.part_bytes, entry.size - offset)
                    if arrived.get(number, ("", -1))[1] == size:
                        self._moved(size)
                    else:
                        yield _Piece(entry, offset, size, number, upload.upload_id)

    def _send(self, batch: list[_Piece]) -> None:
        told: dict[int, dict[str, Any]] = {}

        def hear(header: dict[str, Any], data: bytes) -> None:
            number = header.get("i")
            if type(number) is int and 0 <= number < len(batch) and number not in told:
                told[number] = header
                if isinstance(header.get("etag"), str):
                    self.sent_bytes += batch[number].size
                    self._moved(batch[number].size)

        body = "".join(self._request(number, piece) for number, piece in enumerate(batch)).encode()
        asked = {"project": self._project.project_id, "job": self._job}
        self._link.session.call("export", asked, body=body, on_data=hear, timeout_s=SILENCE_S)
        for number, piece in enumerate(batch):
            self._judge(piece, told.get(number, {}))

    def _judge(self, piece: _Piece, told: dict[str, Any]) -> None:
        name = piece.entry.display
        if isinstance(told.get("etag"), str):
            if not piece.number:
                self.there.add(name)
        elif told.get("error") in ("vanished", "changed") or told.get("status") in (409, 412):
            self.wrong.append(name)
        else:
            self.failed.add(name)
            facts = [str(told.get(fact) or "")[:60] for fact in ("error", "status", "reason")]
            self.why = " ".join(fact for fact in facts if fact) or "no answer"

    def _request(self, number: int, piece: _Piece) -> str:
        """The line of one piece: the only text that holds its address."""
        signed = self._store.presign(
            self._key(piece.entry),
            "PUT",
            expires_in_s=ADDRESS_LIVES_S,
            size=piece.size,
            sha256=None if piece.number else piece.entry.sha256,
            part=(piece.upload_id, piece.number) if piece.number else None,
        )
        facts = {"i": number, "offset": piece.offset, "bytes": piece.size, "url": signed.url, "headers": signed.headers}
        return f"{{{path_members('path', piece.entry.path)},{json.dumps(facts)[1:]}\n"

    def _complete(self, entry: Entry) -> None:
        """Put an output together whose parts are all there."""
        key = self._key(entry)
        upload, arrived = self._store.upload_under_way(key, entry.size, entry.sha256)
        if sum(size for _, size in arrived.values()) != entry.size:
            self.failed.add(entry.display)
            self.why = self.why or "some parts did not arrive"
            return
        self._store.complete_upload(key, upload.upload_id)
        found = self._store.head(key)
        is_same = found is not None and (found.bytes, found.sha256) == (entry.size, entry.sha256)
        self.there.add(entry.display) if is_same else self.wrong.append(entry.display)

    def _moved(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _outputs(entries: list[Entry]) -> tuple[list[Entry], list[dict[str, str]]]:
    """What is to be sent, and what cannot be."""
    outputs: dict[str, Entry] = {}
    left_out = []
    for entry in entries:
        if entry.link is not None:
            left_out.append({"path": entry.display, "why": "a link"})
        elif entry.is_file and entry.display in outputs:
            left_out.append({"path": entry.display, "why": "another file's name is written the same"})
        elif entry.is_file:
            outputs[entry.display] = entry
    return list(outputs.values()), left_out
