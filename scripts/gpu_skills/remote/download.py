"""Bring a job's outputs home: find what differs, fetch it into a private staging folder, verify it, move it into place.

A file is replaced only by one whose SHA-256 is the manifest's. What a cut connection left in the staging folder is
gone on with, and hashed from its first byte before it counts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from gpu_skills.errors import HashMismatch, ProtocolError, RemoteError, TransferIncomplete, UnsafeManifest
from gpu_skills.remote.bulk import RSYNC_PARTIAL, Bulk, RsyncUnfit
from gpu_skills.remote.destination import BLOCK_BYTES, Destination, Verified, hash_path, write_all, writing_failed
from gpu_skills.remote.pace import Attempts, Meter, Progress, ways_for
from gpu_skills.remote.session import Session
from gpu_skills.remote.tree import Entry, path_members

GROWN_BYTES = 16 << 20  # how much more than the manifest says a file may send before we hang up


@dataclass(frozen=True)
class DownloadReport:
    """new: files that were fetched, of `bytes` together. changing: files whose content moved on while the job runs;
    what was here of them before is still here."""

    new: int
    unchanged: int
    changing: tuple[str, ...]
    bytes: int


def download(
    session: Session,
    bulk: Bulk | None,
    project_id: str,
    job: str,
    entries: Sequence[Entry],
    destination: Path,
    *,
    progress: Progress | None = None,
    still_running: bool = False,
    cache_path: Path | None = None,
    trust_cache: bool = True,
) -> DownloadReport:
    """Make `destination`, an existing folder, hold what the manifest lists. Other files there are left alone.

    cache_path: where hashes of files here are remembered; trust_cache False hashes every file again. Raises
    HashMismatch when a file of an ended job arrives changed twice, TransferIncomplete when the connection breaks
    again and again, NotWritable where something stands in the way.
    """
    for entry in entries:
        if entry.link is not None:
            raise UnsafeManifest(host=session.host, job=job, reason=f"{entry.display} is a link")
    verified = Verified(cache_path, trust=trust_cache)
    with Destination(destination) as here:
        work = _Download(session, bulk, project_id, job, here, verified, progress, still_running)
        try:
            return work.run(entries)
        finally:
            verified.save()


class _Download:
    def __init__(
        self,
        session: Session,
        bulk: Bulk | None,
        project_id: str,
        job: str,
        here: Destination,
        verified: Verified,
        progress: Progress | None,
        still_running: bool,
    ):
        self.session = session
        self.bulk = bulk
        self.args = {"project": project_id, "job": job}
        self.here = here
        self.verified = verified
        self.progress = progress
        self.still_running = still_running
        self.rsync_unfit = False
        self.placed: list[bytes] = []
        self.changing: list[str] = []
        self._changing_paths: list[bytes] = []
        self.wrong_once: set[bytes] = set()

    def run(self, entries: Sequence[Entry]) -> DownloadReport:
        wanted: dict[str, list[Entry]] = {}
        unchanged = 0
        for entry in entries:
            if entry.is_dir:
                self.here.make_folder(entry.path)
            elif not self.here.is_empty and self._is_here(entry):
                unchanged += 1
            else:
                wanted.setdefault(entry.sha256, []).append(entry)
        fetched = [same[0] for same in wanted.values()]
        self.meter = Meter(self.progress, sum(entry.size for entry in fetched))
        if fetched:
            self._fetch_all(fetched)
            self._copy_the_same(wanted)
        self.here.publish(sync=[] if self.still_running else self.placed)
        self.here.remove_staging()
        self.meter.finish()
        moved_on = set(self._changing_paths)
        new_bytes = sum(e.size for same in wanted.values() for e in same if e.path not in moved_on)
        return DownloadReport(len(self.placed), unchanged, tuple(self.changing), new_bytes)

    def _is_here(self, entry: Entry) -> bool:
        found = self.here.stat(entry.path)
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
            return False
        digest = self.verified.digest(entry.path, found)
        if digest is None:
            digest = self.here.hash(entry.path)
            if digest is not None:
                self.verified.remember(entry.path, found, digest)
        return digest == entry.sha256

    # rounds ---------------------------------------------------------------------------------------------------------

    def _fetch_all(self, wanted: list[Entry]) -> None:
        attempts = Attempts(self.session.host)
        while wanted:
            have = {entry.path: self._begun_bytes(entry) for entry in wanted}
            left_bytes = sum(entry.size - have[entry.path] for entry in wanted)
            self.meter.set(self.meter.total - left_bytes)
            attempts.begin(left_bytes)
            try:
                self._fetch(wanted, have)
            except RemoteError as exc:
                attempts.failed(exc)
            done = set(self.placed) | set(self._changing_paths)
            wanted = [entry for entry in wanted if entry.path not in done]

    def _begun_bytes(self, entry: Entry) -> int:
        size = self.here.staged_bytes(entry.sha256)
        if size > entry.size:
            self.here.discard(entry.sha256)
            return 0
        return size

    def _fetch(self, wanted: list[Entry], have: dict[bytes, int]) -> None:
        ways = ways_for([e.size - have[e.path] for e in wanted], self.bulk, rsync_unfit=self.rsync_unfit)
        stream = ways.stream
        if ways.control:
            self._get(self.session, [wanted[at] for at in ways.control], have)
        if ways.rsync:
            try:
                self._get_by_rsync([wanted[at] for at in ways.rsync], have)
            except RsyncUnfit:
                self.rsync_unfit = True
                stream = [*stream, *ways.rsync]
        if stream:
            assert self.bulk is not None
            session = Session.open(self.bulk.stream(), root=self.session.root)
            try:
                self._get(session, [wanted[at] for at in stream], have)
            finally:
                session.close()

    def _arrived_whole(self, entry: Entry, data: bytes) -> None:
        """A small file: hashed in memory, written only when it is right."""
        digest = sha256(data).hexdigest()
        if digest == entry.sha256:
            self._is_placed(entry, self.here.write(entry.path, entry.mode, data))
        else:
            self._is_wrong(entry, digest)

    def _arrived_staged(self, entry: Entry, digest: str) -> None:
        """A file that grew under its digest in the staging folder."""
        if digest == entry.sha256:
            self._is_placed(entry, self.here.place(entry.sha256, entry.path))
        else:
            self.here.discard(entry.sha256)
            self._is_wrong(entry, digest)

    def _is_placed(self, entry: Entry, found: os.stat_result) -> None:
        self.verified.remember(entry.path, found, entry.sha256)
        self.placed.append(entry.path)

    def _is_wrong(self, entry: Entry, digest: str) -> None:
        """Other content than listed: the job wrote on, or it came in damaged, which a second try from 0 will tell."""
        if self.still_running:
            self._moved_on(entry)
        elif entry.path in self.wrong_once:
            raise HashMismatch(path=entry.display, found=digest, expected=entry.sha256)
        else:
            self.wrong_once.add(entry.path)

    def _moved_on(self, entry: Entry) -> None:
        self._changing_paths.append(entry.path)
        self.changing.append(entry.display)

    def _is_gone(self, entry: Entry, why: str) -> None:
        if not self.still_running:
            raise TransferIncomplete(
                reason=f"{entry.display} is {why} on {self.session.host}", rsync_code=0, host=self.session.host
            )
        self._moved_on(entry)

    def _copy_the_same(self, wanted: dict[str, list[Entry]]) -> None:
        """Files with the content of one that came in just now."""
        placed = set(self.placed)
        for first, *others in wanted.values():
            for entry in others:
                if first.path not in placed:
                    self._moved_on(entry)
                    continue
                found = self.here.copy(first.path, entry.path, entry.mode, entry.sha256)
                if found is None:
                    raise HashMismatch(path=entry.display, found="changed here meanwhile", expected=entry.sha256)
                self._is_placed(entry, found)

    # frames ---------------------------------------------------------------------------------------------------------

    def _get(self, session: Session, wanted: list[Entry], have: dict[bytes, int]) -> None:
        incoming = _Incoming(self, session.host, wanted, have)
        lines = [_request_line(number, entry, have[entry.path]) for number, entry in enumerate(wanted)]
        try:
            session.call(
                "get",
                {**self.args, "batch": True},
                body="".join(lines).encode(),
                on_data=incoming.frame,
                timeout_s=120,
                max_data_bytes=None,
            )
        finally:
            incoming.close()
        if not incoming.is_complete:
            raise ProtocolError(host=session.host, reason="it sent fewer files than it was asked for")

    # rsync ----------------------------------------------------------------------------------------------------------

    def _get_by_rsync(self, wanted: list[Entry], have: dict[bytes, int]) -> None:
        """Numbered files into a fresh folder; only those that were asked for are looked at afterwards."""
        assert self.bulk is not None
        lines = [_request_line(number, entry, None) for number, entry in enumerate(wanted)]
        remote = self.session.call("stage", self.args, body="".join(lines).encode())["path"]
        name = f"rsync-{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=self.here.open_staging())
        folder = self.here.staging / name
        begun = [number for number, entry in enumerate(wanted) if have[entry.path]]
        fresh = [number for number, entry in enumerate(wanted) if not have[entry.path]]
        try:
            for number in begun:
                os.rename(self.here.staging / wanted[number].sha256, folder / str(number))
            most_bytes = sum(entry.size for entry in wanted) + GROWN_BYTES
            before = self.meter.done - sum(have[entry.path] for entry in wanted)
            with _GrowingHashes(folder, len(wanted)) as hashes:

                def watch() -> None:
                    size = hashes.bytes_here()
                    self.meter.set(before + size)
                    if size > most_bytes:
                        raise ProtocolError(host=self.session.host, reason="it sends more than its manifest lists")

                incomplete = None
                for group, resume in ((begun, True), (fresh, False)):
                    try:
                        if group:
                            self.bulk.rsync_down(remote, folder, [str(n) for n in group], resume=resume, watch=watch)
                    except TransferIncomplete as exc:
                        if exc.details.get("rsync_code") not in RSYNC_PARTIAL:
                            raise
                        incomplete = exc  # some files went away or cannot be read: the others are here
                for number, entry in enumerate(wanted):
                    digest = hashes.finish(number)
                    if digest is None:
                        self._is_gone(entry, "gone")
                        continue
                    if digest != entry.sha256:  # perhaps rsync did not write from start to end
                        digest = hash_path(folder / str(number))
                    if digest != entry.sha256 and incomplete is not None and not self.still_running:
                        raise incomplete
                    os.rename(folder / str(number), self.here.staging / entry.sha256)
                    self.here.set_mode(entry.sha256, entry.mode)
                    self._arrived_staged(entry, digest)
        finally:
            self._keep_begun(folder, wanted)

    def _keep_begun(self, folder: Path, wanted: list[Entry]) -> None:
        for number, entry in enumerate(wanted):
            path = folder / str(number)
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode) and 0 < found.st_size <= entry.size:
                    os.rename(path, self.here.staging / entry.sha256)
        shutil.rmtree(folder, ignore_errors=True)


class _Incoming:
    """Takes the frames of one `get` in the order of its request."""

    def __init__(self, work: _Download, host: str, wanted: list[Entry], have: dict[bytes, int]):
        self._work = work
        self._host = host
        self._wanted = wanted
        self._have = have
        self._at = 0
        self._file: int | None = None
        self._digest: Any = None
        self._size = 0

    @property
    def is_complete(self) -> bool:
        return self._at == len(self._wanted)

    def frame(self, header: dict[str, Any], data: bytes) -> None:
        if "sizes" in header:
            self._batch(header, data)
            return
        if self.is_complete or header.get("i") != self._at or not isinstance(header.get("last"), bool):
            raise ProtocolError(host=self._host, reason="it sent a file that was not next")
        if not data and not header["last"]:
            raise ProtocolError(host=self._host, reason="it sent a frame with nothing in it")
        entry, work = self._wanted[self._at], self._work
        error = header.get("error")
        if error is not None:
            self.close()
            self._at += 1
            work._is_gone(entry, "gone" if error == "vanished" else "unreadable")
            return
        work.meter.add(len(data))
        if self._file is None and header["last"] and not self._have[entry.path]:
            self._at += 1
            work._arrived_whole(entry, data)
        else:
            self._piece(entry, data, header["last"])

    def _batch(self, header: dict[str, Any], data: bytes) -> None:
        """Several whole files, one after another."""
        sizes, work = header["sizes"], self._work
        are_sizes = isinstance(sizes, list) and sizes and all(type(size) is int and size >= 0 for size in sizes)
        if not are_sizes or sum(sizes) != len(data):
            raise ProtocolError(host=self._host, reason="it sent files whose sizes do not add up")
        until = self._at + len(sizes)
        if self._file is not None or header.get("i") != self._at or until > len(self._wanted):
            raise ProtocolError(host=self._host, reason="it sent a file that was not next")
        start = 0
        for size in sizes:
            entry = self._wanted[self._at]
            if self._have[entry.path]:
                raise ProtocolError(host=self._host, reason="it sent a file from its start that was begun")
            self._at += 1
            work._arrived_whole(entry, data[start : start + size])
            start += size
        work.meter.add(len(data))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _piece(self, entry: Entry, data: bytes, is_last: bool) -> None:
        if self._file is None:
            self._open_staged(entry)
        self._size += len(data)
        if self._size > entry.size + GROWN_BYTES:
            self._work.here.discard(entry.sha256)
            raise ProtocolError(host=self._host, reason=f"it sends more of {entry.display} than its manifest lists")
        if self._size <= entry.size:
            try:
                write_all(self._file, data)
            except OSError as exc:
                raise writing_failed(self._work.here.staging, exc) from exc
        self._digest.update(data)
        if is_last:
            digest = self._digest.hexdigest()
            self.close()
            self._at += 1
            self._work._arrived_staged(entry, digest)

    def _open_staged(self, entry: Entry) -> None:
        """Go on with what is staged, which is hashed first: nobody vouches for it."""
        self._file = self._work.here.open_staged(entry.sha256, entry.mode, keep=True)
        self._size = self._have[entry.path]
        os.ftruncate(self._file, self._size)
        self._digest = sha256()
        while data := os.read(self._file, BLOCK_BYTES):
            self._digest.update(data)


class _GrowingHashes:
    """Hashes files while rsync writes them, which takes the hashing off the end of a large transfer.

    rsync writes a new file from start to end. If it ever did not, the digest would be wrong and the file fetched again.
    """

    def __init__(self, folder: Path, count: int):
        self._folder = folder
        self._files: list[tuple[int, Any] | None] = [None] * count
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="hash-while-writing", daemon=True)

    def __enter__(self) -> _GrowingHashes:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._join()
        for held in self._files:
            if held is not None:
                os.close(held[0])

    def bytes_here(self) -> int:
        total = 0
        with os.scandir(self._folder) as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_size
        return total

    def finish(self, number: int) -> str | None:
        """The digest of the whole file; None when no regular file of that number came. Only after rsync has ended."""
        self._join()
        self._advance(number, until_stop=False)
        held = self._files[number]
        if held is None:
            return None
        self._files[number] = None
        os.close(held[0])
        return held[1].hexdigest()

    def _follow(self) -> None:
        while not self._stop.is_set():
            moved = False
            for number in range(len(self._files)):
                moved = self._advance(number, until_stop=True) or moved
            if not moved:
                self._stop.wait(0.02)

    def _advance(self, number: int, *, until_stop: bool) -> bool:
        held = self._files[number]
        if held is None:
            held = self._files[number] = self._open(number)
            if held is None:
                return False
        moved = False
        while not (until_stop and self._stop.is_set()) and (data := os.read(held[0], BLOCK_BYTES)):
            held[1].update(data)
            moved = True
        return moved

    def _open(self, number: int) -> tuple[int, Any] | None:
        try:
            descriptor = os.open(self._folder / str(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        return descriptor, sha256()

    def _join(self) -> None:
        self._stop.set()
        self._thread.join()


def _request_line(number: int, entry: Entry, offset: int | None) -> str:
    start = f'"offset":{offset},' if offset is not None else ""
    return f'{{"i":{number},{start}{path_members("path", entry.path)}}}\n'
