"""Read and hash the selected files: each as one whole state, none in the middle of a change."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from gpu_skills.jobs import secret_shapes
from gpu_skills.jobs.hashcache import HashCache
from gpu_skills.jobs.select import encode, opened_folder
from gpu_skills.remote.tree import Entry

KEEP_FILE_BYTES = 256 * 1024  # content of smaller files is kept for the upload that follows
KEEP_TOTAL_BYTES = 64 * 1024 * 1024
_LARGE_BYTES = 1024 * 1024  # from here on hashing runs in threads: it lets other threads run meanwhile
_CHUNK_BYTES = 1024 * 1024
_ATTEMPTS = 3
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

FilesByFolder = Mapping[str, list[tuple[str, str, os.stat_result]]]


@dataclass
class Hashed:
    """unsettled: files that were written to whenever they were read."""

    entries: list[Entry] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)
    vanished: list[str] = field(default_factory=list)


def hash_files(
    root_fd: int, files: FilesByFolder, cache: HashCache, progress: Callable[[int, int], None] | None
) -> Hashed:
    """Hash what the cache does not know. Problems are collected, not raised."""
    total = sum(status.st_size for found in files.values() for _, _, status in found)
    work = _Work(root_fd, cache, total, progress)
    for folder, found in files.items():
        work.folder(folder, found)
    work.large_files()
    return work.hashed


class _Unsettled(Exception):
    pass


class _Work:
    def __init__(self, root_fd: int, cache: HashCache, total: int, progress: Callable[[int, int], None] | None):
        self.hashed = Hashed()
        self._root_fd = root_fd
        self._cache = cache
        self._total = total
        self._progress = progress
        self._done = 0
        self._kept = 0
        self._large: list[tuple[str, str, str]] = []
        self._lock = threading.Lock()

    def folder(self, folder: str, found: list[tuple[str, str, os.stat_result]]) -> None:
        small: list[tuple[str, str, os.stat_result]] = []
        find, keep = self._cache.find, self.hashed.entries.append
        for name, path, status in found:
            known = find(path, status)
            if known is not None:
                digest, is_secret = known
                size = status.st_size
                keep(Entry(encode(path), size, status.st_mode & 0o777, digest))
                self._done += size
                if is_secret:
                    self.hashed.secrets.append(path)
            elif status.st_size >= _LARGE_BYTES:
                self._large.append((folder, name, path))
            else:
                small.append((name, path, status))
        if small:
            try:
                with opened_folder(self._root_fd, folder) as here:
                    for name, path, status in small:
                        self._small(here, name, path, status)
            except OSError as exc:
                self._failed(folder + "/", exc)
        self._tell(0)

    def _small(self, here: int, name: str, path: str, status: os.stat_result) -> None:
        try:
            descriptor = os.open(name, _OPEN_FILE, dir_fd=here)
            try:
                data = os.read(descriptor, status.st_size + 1)
                after = os.fstat(descriptor)
            finally:
                os.close(descriptor)
            if len(data) != status.st_size or not _is_same(status, after):
                self._streamed(here, name, path)  # it changed since the walk: once more, with care
                return
        except OSError as exc:
            self._failed(path, exc)
            return
        digest = sha256(data).hexdigest()
        self._take(path, name, status, digest, data, data)

    def _streamed(self, here: int, name: str, path: str) -> None:
        """Hash a file of any size as it was at one moment, trying again when it changed while being read."""
        try:
            status, digest, head = _hash_settled(here, name, self._tell)
        except _Unsettled:
            with self._lock:
                self.hashed.unsettled.append(path)
        except OSError as exc:
            self._failed(path, exc)
        else:
            self._take(path, name, status, digest, head, head if status.st_size == len(head) else None)

    def _take(self, path: str, name: str, status: os.stat_result, digest: str, head: bytes, data: bytes | None) -> None:
        is_secret = secret_shapes.in_content(name, head)
        size = status.st_size
        with self._lock:
            if data is not None and size < KEEP_FILE_BYTES and self._kept + size < KEEP_TOTAL_BYTES:
                self._kept += size
            else:
                data = None
            entry = Entry(encode(path), size, status.st_mode & 0o777, digest, None, False, data)
            self.hashed.entries.append(entry)
            if is_secret:
                self.hashed.secrets.append(path)
            self._cache.remember(path, status, digest, is_secret)
            if size < _LARGE_BYTES:
                self._done += size

    def large_files(self) -> None:
        """All large files, in as many threads as help."""
        if not self._large:
            return
        queue = self._large[::-1]
        failures: list[BaseException] = []

        def work() -> None:
            while not failures:
                try:
                    folder, name, path = queue.pop()
                except IndexError:
                    return
                try:
                    with opened_folder(self._root_fd, folder) as here:
                        self._streamed(here, name, path)
                except OSError as exc:
                    self._failed(path, exc)
                except BaseException as exc:  # also Ctrl-C: nothing here may look like a finished pack
                    failures.append(exc)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(_thread_count(len(queue)) - 1)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        self._tell(self._total)

    def _failed(self, path: str, exc: OSError) -> None:
        with self._lock:
            if isinstance(exc, FileNotFoundError):
                self.hashed.vanished.append(path)
            else:
                self.hashed.unreadable.append((path, exc.strerror or str(exc)))

    def _tell(self, more: int) -> None:
        with self._lock:
            self._done += more
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)


def _hash_settled(here: int, name: str, tell: Callable[[int], None]) -> tuple[os.stat_result, str, bytes]:
    """Status, digest and first bytes of a file whose status was the same before and after reading it."""
    for _ in range(_ATTEMPTS):
        descriptor = os.open(name, _OPEN_FILE, dir_fd=here)
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise _Unsettled(name)
            digest, head, size = _hash(descriptor, tell)
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if size == before.st_size and _is_same(before, after):
            return before, digest, head
    raise _Unsettled(name)


def _hash(descriptor: int, tell: Callable[[int], None]) -> tuple[str, bytes, int]:
    digest = sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    head = b""
    size = 0
    while count := os.readv(descriptor, [buffer]):
        digest.update(buffer[:count])
        if not size:
            head = bytes(buffer[: min(count, KEEP_FILE_BYTES)])
        size += count
        if count == _CHUNK_BYTES:
            tell(count)
    return digest.hexdigest(), head, size


def _is_same(before: os.stat_result, after: os.stat_result) -> bool:
    return (
        before.st_mtime_ns == after.st_mtime_ns
        and before.st_size == after.st_size
        and before.st_ctime_ns == after.st_ctime_ns
        and before.st_ino == after.st_ino
    )


def _thread_count(files: int) -> int:
    return max(1, min(files, os.cpu_count() or 1, 4))
