"""A file on its way from a store: put together beside its place, verified, renamed into it.

The place holds the old file or the whole new one, never a part. What a broken connection left is gone on with when the
hash that is expected says that it is the same content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gpu_skills.errors import DiskFull, HashMismatch, TransferIncomplete
from gpu_skills.state import files

BLOCK_BYTES = 1 << 20


class Incoming:
    """Used in a `with`; `write` what comes from `offset` on, then `place`."""

    def __init__(self, path: Path, *, size: int, sha256: str | None):
        self.path = path
        self.size = size
        self.sha256 = sha256
        mark = hashlib.sha256(f"{path.name}\0{size}\0{sha256 or os.urandom(8).hex()}".encode()).hexdigest()[:16]
        self._part = path.with_name(f".gpu-{mark}.part")
        self._digest = hashlib.sha256()
        self.offset = 0
        self._descriptor = -1

    def __enter__(self) -> Incoming:
        with self._writing():
            self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > self.size or self.sha256 is None:
                os.ftruncate(self._descriptor, 0)
            while data := os.read(self._descriptor, BLOCK_BYTES):
                self._digest.update(data)
                self.offset += len(data)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        os.close(self._descriptor)
        # Without a hash to know it by, nobody could go on with it; on a full disk it is what fills it.
        if kind is not None and (self.sha256 is None or issubclass(kind, DiskFull | HashMismatch)):
            self._discard()

    def write(self, data: bytes) -> None:
        with self._writing():
            files.write_all(self._descriptor, data)
        self._digest.update(data)
        self.offset += len(data)

    def place(self) -> str:
        """Verify, make it safe from a power failure, rename. The SHA-256 of what is there now."""
        if self.offset != self.size:
            raise TransferIncomplete(reason=f"{self.offset} of {self.size} bytes of {self.path.name} came")
        found = self._digest.hexdigest()
        if self.sha256 is not None and found != self.sha256:
            raise HashMismatch(path=self.path.name, found=found, expected=self.sha256)
        with self._writing():
            os.fsync(self._descriptor)
            os.rename(self._part, self.path)
            files.sync_directory(self.path.parent)
        return found

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise files.writing_failed(self.path, exc) from exc

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._part)
