"""Upload a tree by content: ask what the machine lacks, send that, have it verified there, seal the tree.

What was received stays on the machine when a connection breaks, so a round begins with the question again and goes on
from the byte where the last one stopped.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from gpu_skills.errors import ChangedMeanwhile, GpuError, HashMismatch, NotWritable, ProtocolError, RemoteError
from gpu_skills.remote.answers import parse_header
from gpu_skills.remote.bulk import Bulk, RsyncUnfit
from gpu_skills.remote.pace import Attempts, Meter, Progress, ways_for
from gpu_skills.remote.session import Frame, Session
from gpu_skills.remote.tree import Entry, Tree

FRAME_BYTES = 1 << 20
SMALL_FILE_BYTES = 256 << 10
BATCH_FILES = 700  # as many as a header of 64 KiB can name
WHOLE_FRAME_BYTES = 4 << 20  # a file up to this size is one frame, which the machine verifies in memory
FOLLOWED_FILES = 256
SLOWEST_HASHING_BYTES_S = 20 << 20


@dataclass(frozen=True)
class UploadReport:
    """tree: its digest, by which `start` names it. method: the fastest way used, of `control`, `stream` and `rsync`;
    `none` when nothing was missing."""

    tree: str
    files_sent: int
    bytes_sent: int
    bytes_total: int
    method: str


@dataclass(frozen=True)
class _Missing:
    entry: Entry
    have_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.entry.size - self.have_bytes


def upload(
    session: Session, bulk: Bulk | None, project_id: str, tree: Tree, *, progress: Progress | None = None
) -> UploadReport:
    """Bring a tree to the machine and seal it. bulk None: everything goes through the session.

    Raises ChangedMeanwhile naming the file that changed while it was sent, TransferIncomplete when the connection
    breaks again and again, MachineDiskFull. In each case the tree is not sealed, so no job can start from it.
    """
    return _Upload(session, bulk, project_id, tree, progress).run()


class _Upload:
    def __init__(self, session: Session, bulk: Bulk | None, project_id: str, tree: Tree, progress: Progress | None):
        self.session = session
        self.bulk = bulk
        self.project = {"project": project_id}
        self.tree = tree
        self.by_digest = {entry.sha256: entry for entry in reversed(tree.entries) if entry.is_file}
        self.meter = Meter(progress, 0)
        self.rsync_unfit = False
        self.sent_bytes = 0
        self.methods: set[str] = set()

    def run(self) -> UploadReport:
        named = {**self.project, "tree": self.tree.digest}
        if self.session.call("have", named)["known"]:
            return UploadReport(self.tree.digest, 0, 0, self.tree.total_bytes, "none")
        attempts = Attempts(self.session.host)
        files_sent: set[str] = set()
        first_round = True
        while True:
            missing = self._offer()
            left_bytes = sum(item.left_bytes for item in missing)
            if first_round:
                self.meter.total, first_round = left_bytes, False
            self.meter.set(self.meter.total - left_bytes)
            attempts.begin(left_bytes)
            files_sent.update(item.entry.sha256 for item in missing)
            try:
                self._send(missing)
                self.session.call("seal", named)
                break
            except RemoteError as exc:
                self._blame_changed_file(exc)
                attempts.failed(exc)
        self.meter.finish()
        method = next((m for m in ("rsync", "stream", "control") if m in self.methods), "none")
        return UploadReport(self.tree.digest, len(files_sent), self.sent_bytes, self.tree.total_bytes, method)

    def _offer(self) -> list[_Missing]:
        chunks: list[bytes] = []
        self.session.call(
            "offer",
            {**self.project, "tree": self.tree.digest},
            body=self.tree.manifest,
            on_data=lambda header, data: chunks.append(data),
        )
        try:
            return [self._missing(parse_header(line)) for line in b"".join(chunks).splitlines()]
        except (ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(host=self.session.host, reason="it asks for what was never offered") from exc

    def _missing(self, value: dict) -> _Missing:
        entry, have_bytes = self.by_digest[value["sha256"]], value["have_bytes"]
        if value["size"] != entry.size or type(have_bytes) is not int or not 0 <= have_bytes <= entry.size:
            raise ValueError("sizes that cannot be")
        return _Missing(entry, have_bytes)

    def _send(self, missing: list[_Missing]) -> None:
        ways = ways_for([item.left_bytes for item in missing], self.bulk, rsync_unfit=self.rsync_unfit)
        stream, by_rsync = ways.stream, ways.rsync
        if len(by_rsync) == 1:
            # The machine hashes a stream as it comes. With rsync it reads the file a second time, which for a single
            # large file is the difference between 1.1 and 1.2 times a plain `rsync -a` (benchmarks/transfer.py).
            stream, by_rsync = [*stream, *by_rsync], []
        if by_rsync:
            try:
                self._send_by_rsync([missing[at] for at in by_rsync])
            except RsyncUnfit:
                self.rsync_unfit = True
                stream = [*stream, *by_rsync]
        if ways.control:
            self._put(self.session, [missing[at] for at in ways.control], "control")
        if stream:
            assert self.bulk is not None
            session = Session.open(self.bulk.stream(), root=self.session.root)
            try:
                self._put(session, [missing[at] for at in stream], "stream")
            finally:
                session.close()

    # one stream of frames -------------------------------------------------------------------------------------------

    def _put(self, session: Session, items: Iterable[_Missing], method: str) -> None:
        self.methods.add(method)
        session.call("put", self.project, body=self._frames(items), timeout_s=120)

    def _frames(self, items: Iterable[_Missing]) -> Iterator[Frame]:
        """Small files share frames, larger ones have one each, the largest come in pieces."""
        batch: list[tuple[Entry, bytes]] = []
        held = 0
        for item in items:
            entry = item.entry
            if entry.size > WHOLE_FRAME_BYTES:
                yield from self._pieces(entry, item.have_bytes)
                continue
            data = entry.data if entry.data is not None else _read_whole(self.tree, entry)
            if entry.size > SMALL_FILE_BYTES:
                yield self._frame(entry, 0, data)
                continue
            batch.append((entry, data))
            held += len(data)
            if held >= FRAME_BYTES or len(batch) == BATCH_FILES:
                yield self._batch(batch, held)
                batch, held = [], 0
        if batch:
            yield self._batch(batch, held)

    def _batch(self, batch: list[tuple[Entry, bytes]], held: int) -> Frame:
        self.sent_bytes += held
        self.meter.add(held)
        blobs = ",".join([f'["{entry.sha256}",{entry.size}]' for entry, _ in batch])
        return Frame(f'"blobs":[{blobs}]', b"".join([data for _, data in batch]))

    def _pieces(self, entry: Entry, offset: int) -> Iterator[Frame]:
        if offset == entry.size:  # all of it is there and only has to be verified
            yield self._frame(entry, offset, b"")
            return
        descriptor = _open(self.tree, entry)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            while offset < entry.size:
                data = os.read(descriptor, min(FRAME_BYTES, entry.size - offset))
                if not data:
                    raise ChangedMeanwhile(file=entry.display)
                yield self._frame(entry, offset, data)
                offset += len(data)
        finally:
            os.close(descriptor)

    def _frame(self, entry: Entry, offset: int, data: bytes) -> Frame:
        self.sent_bytes += len(data)
        self.meter.add(len(data))
        return Frame(f'"offset":{offset},"sha256":"{entry.sha256}","size":{entry.size}', data)

    # rsync ----------------------------------------------------------------------------------------------------------

    def _send_by_rsync(self, items: list[_Missing]) -> None:
        """Links named by digest, sent as files into the machine's folder for what comes in, then verified there."""
        assert self.bulk is not None
        # Hashing there while rsync writes here takes it off the end; the list has to fit into a header.
        follow = [item.entry.sha256 for item in items[:FOLLOWED_FILES]]
        remote = self.session.call("incoming", {**self.project, "follow": follow})["path"]
        begun = [item for item in items if item.have_bytes]
        fresh = [item for item in items if not item.have_bytes]
        for group, resume in ((begun, True), (fresh, False)):
            if not group:
                continue
            before = self.meter.done
            with _links(self.tree, group) as folder:
                self.bulk.rsync_up(
                    Path(folder), remote, resume=resume, on_bytes=lambda n, before=before: self.meter.set(before + n)
                )
            self.methods.add("rsync")
            moved = sum(item.left_bytes for item in group)
            self.sent_bytes += moved
            self.meter.set(before + moved)
        lines = [f'{{"sha256":"{item.entry.sha256}","size":{item.entry.size}}}\n' for item in items]
        hashing_s = sum(item.entry.size for item in items) / SLOWEST_HASHING_BYTES_S
        answer = self.session.call("admit", self.project, body="".join(lines).encode(), timeout_s=60 + hashing_s)
        for failure in answer["failed"]:
            entry = self.by_digest.get(failure["sha256"])
            if entry is not None:
                raise HashMismatch(
                    path=entry.display, found=str(failure.get("found")), expected=entry.sha256, sha256=entry.sha256
                )

    def _blame_changed_file(self, exc: GpuError) -> None:
        """When a file arrived with another hash, look whether it is the file here that changed."""
        if not isinstance(exc, HashMismatch):
            return
        entry = self.by_digest.get(exc.details.get("expected"))
        if entry is not None and entry.data is None and _hash_now(self.tree, entry) != entry.sha256:
            raise ChangedMeanwhile(file=entry.display) from exc


def _open(tree: Tree, entry: Entry) -> int:
    try:
        return os.open(tree.local_path(entry), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:  # it was there when it was hashed
        raise ChangedMeanwhile(file=entry.display, reason=exc.strerror) from exc


def _read_whole(tree: Tree, entry: Entry) -> bytes:
    """As much as was hashed: a file that only grew since then is sent as it was."""
    descriptor = _open(tree, entry)
    try:
        data = os.read(descriptor, entry.size)
        while len(data) < entry.size and (more := os.read(descriptor, entry.size - len(data))):
            data += more
    finally:
        os.close(descriptor)
    if len(data) != entry.size:
        raise ChangedMeanwhile(file=entry.display)
    return data


def _hash_now(tree: Tree, entry: Entry) -> str:
    digest = sha256()
    descriptor = _open(tree, entry)
    try:
        while data := os.read(descriptor, FRAME_BYTES):
            digest.update(data)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _links(tree: Tree, items: list[_Missing]) -> tempfile.TemporaryDirectory[str]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="gpu-upload-")
        for item in items:
            target = os.path.abspath(tree.local_path(item.entry))
            os.symlink(target, os.path.join(os.fsencode(folder.name), item.entry.sha256.encode()))
    except OSError as exc:
        raise NotWritable(path=tempfile.gettempdir(), reason=exc.strerror or str(exc)) from exc
    return folder
