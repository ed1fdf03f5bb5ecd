"""What was hashed before: SHA-256 by path, believed only while size, times and inode are what they were.

A file written within the last two seconds is neither believed nor remembered: it may change once more without its
times telling, as far as a file system's clock counts. git calls such entries racily clean.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path

from gpu_skills.errors import GpuError

RACY_NS = 2_000_000_000
_VERSION = 1


class HashCache:
    """A cache in one file. Without a path, or with a file that is damaged, it starts empty; it is never needed."""

    def __init__(self, path: Path | None, root: os.stat_result, now_ns: int):
        self._path = path
        self._root = [root.st_dev, root.st_ino]
        self._believed_before_ns = now_ns - RACY_NS
        self._old: dict[str, list[object]] = _load(path, self._root) if path else {}
        self._new: dict[str, list[object]] = {}
        self._is_changed = False

    def find(self, path: str, found: os.stat_result) -> tuple[str, bool] | None:
        """Digest and secret mark of a file that looks as it did when it was hashed."""
        known = self._old.get(path)
        if known is None:
            return None
        size, mtime_ns, ctime_ns, inode, _, _ = known
        is_same = (
            mtime_ns == found.st_mtime_ns
            and size == found.st_size
            and ctime_ns == found.st_ctime_ns
            and inode == found.st_ino
        )
        if not is_same or mtime_ns >= self._believed_before_ns or ctime_ns >= self._believed_before_ns:  # type: ignore[operator]
            return None
        self._new[path] = known
        return known[4], known[5]  # type: ignore[return-value]

    def remember(self, path: str, found: os.stat_result, digest: str, is_secret: bool) -> None:
        if max(found.st_mtime_ns, found.st_ctime_ns) < self._believed_before_ns:
            stamp = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
            self._new[path] = [*stamp, digest, is_secret]
            self._is_changed = True

    def save(self) -> None:
        """Write what this pass saw. Where it cannot be written the next pass only takes longer."""
        if self._path is None or not (self._is_changed or len(self._new) != len(self._old)):
            return
        from gpu_skills.state import files

        body = json.dumps({"version": _VERSION, "root": self._root, "files": self._new}, separators=(",", ":")).encode()
        try:
            files.make_directory(self._path.parent)
            files.commit(self._path, sha256(body).hexdigest().encode() + b"\n" + body, durable=False)
        except GpuError:
            pass


def _load(path: Path, root: list[int]) -> dict[str, list[object]]:
    """The files of a cache of this directory. A first line with the digest of the rest tells a damaged file.

    A wrong digest taken from here would make every later upload fail, so nothing doubtful is used.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            seal, _, body = stream.read().partition(b"\n")
        if seal.decode() != sha256(body).hexdigest():
            return {}
        stored = json.loads(body)
        if stored["version"] != _VERSION or stored["root"] != root:
            return {}
        files: dict[str, list[object]] = stored["files"]
        return files
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
