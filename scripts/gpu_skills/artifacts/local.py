"""A folder as a store: on this computer, or on a disk that others mount too.

Conditions are looked at under a lock on the folder, so they hold between processes of one host, and between hosts
where the file system's locks do. Hashes are not recorded, they are found by reading: a file is what it holds.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from hashlib import sha256 as new_sha256
from pathlib import Path
from urllib.parse import unquote

from gpu_skills.artifacts.base import OWN_PREFIX, Sent, Stored, require_key
from gpu_skills.artifacts.incoming import BLOCK_BYTES, Incoming
from gpu_skills.errors import ArtifactChanged, ArtifactMissing, HashMismatch, StoreIgnoresConditions, UsageError
from gpu_skills.state import files


def folder_of(text: str, base: Path, uri: str) -> Path:
    """The folder that a path or the part of a `file://` URI behind the slashes names."""
    if uri.startswith("file://"):
        host, slash, rest = text.partition("/")
        if not slash or host not in ("", "localhost"):
            raise UsageError(
                f"{uri[:200]!r} names no folder of this computer; write file:///FOLDER",
                next_step="gpu job artifacts --help",
            )
        return Path("/" + unquote(rest))
    if not text:
        raise UsageError("an empty path names no store", next_step="gpu job artifacts --help")
    try:
        return (base / Path(text).expanduser()).absolute()
    except RuntimeError as exc:  # `~` of a user without a home
        raise UsageError(f"{text[:200]!r} names no folder here", next_step="gpu job artifacts --help") from exc


class LocalStore:
    def __init__(self, root: Path):
        self.root = root

    def uri_of(self, key: str) -> str:
        return self._path(key).as_uri()

    def put_file(self, path: Path, key: str, *, sha256: str, sent: Sent | None = None) -> Stored:
        there = self._path(key)
        try:
            size = path.stat().st_size
        except OSError as exc:
            raise ArtifactChanged(what=str(path), reason=f"it cannot be read here: {exc.strerror}") from exc
        if _size_of(there) != size or _hash_of(there) != sha256:
            files.make_directory(there.parent)
            try:
                _copy(path, there, size=size, sha256=sha256)
            except HashMismatch as exc:
                found = exc.details["found"]
                raise ArtifactChanged(what=path.name, reason=f"its SHA-256 is {found} here, not {sha256}") from exc
        if sent is not None:
            sent(size)
        return self._stored(key, size, sha256)

    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> Stored:
        size = _size_of(self._path(key))
        if size is None:
            raise ArtifactMissing(uri=self.uri_of(key))
        return self._stored(key, size, _copy(self._path(key), path, size=size, sha256=sha256))

    def head(self, key: str) -> Stored | None:
        size = _size_of(self._path(key))
        digest = None if size is None else _hash_of(self._path(key))
        return None if size is None or digest is None else self._stored(key, size, digest)

    def list(self, prefix: str) -> Iterator[Stored]:
        start = self.root / prefix if prefix else self.root
        for folder, folders, names in os.walk(start, followlinks=False):
            folders[:] = sorted(name for name in folders if not name.startswith(OWN_PREFIX))
            for name in sorted(names):
                path = Path(folder, name)
                size = None if name.startswith(OWN_PREFIX) else _size_of(path)
                if size is not None:
                    key = path.relative_to(self.root).as_posix()
                    yield Stored(path.as_uri(), key, size)

    def read_back(self, key: str) -> Stored:
        found = self.head(key)
        if found is None:
            raise ArtifactMissing(uri=self.uri_of(key))
        return found

    def blocks(self, key: str) -> Iterator[bytes]:
        path = self._path(key)
        if _size_of(path) is None:
            return
        try:
            with open(path, "rb") as stream:
                while data := stream.read(BLOCK_BYTES):
                    yield data
        except OSError as exc:
            raise ArtifactChanged(what=self.uri_of(key), reason=f"it cannot be read: {exc.strerror}") from exc

    def get(self, key: str, *, max_bytes: int) -> tuple[bytes, Stored] | None:
        path = self._path(key)
        size = _size_of(path)
        if size is None:
            return None
        if size > max_bytes:
            raise ArtifactChanged(what=self.uri_of(key), reason=f"it has {size} bytes, allowed are {max_bytes}")
        data = files.read_bytes(path, max_bytes=max_bytes)
        return None if data is None else (data, self._stored(key, len(data), _digest(data)))

    def put(self, key: str, data: bytes) -> Stored:
        files.make_directory(self._path(key).parent)
        files.commit(self._path(key), data)
        return self._stored(key, len(data), _digest(data))

    def create_if_absent(self, key: str, data: bytes) -> Stored | None:
        return self._write_if(key, data, lambda path: not path.exists() and not path.is_symlink())

    def replace_if_unchanged(self, key: str, data: bytes, etag: str) -> Stored | None:
        return self._write_if(key, data, lambda path: (digest := _hash_of(path)) is not None and _etag(digest) == etag)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise files.writing_failed(path, exc) from exc

    def probe(self, prefix: str = "") -> None:
        files.make_directory(self.root)
        name = f"{OWN_PREFIX}probe-{secrets.token_hex(8)}"
        key = f"{prefix}/{name}" if prefix else name
        try:
            if self.create_if_absent(key, b"1") is None or self.create_if_absent(key, b"2") is not None:
                raise StoreIgnoresConditions(store=self.root.as_uri(), reason="a file that is there was made again")
        finally:
            self.delete(key)

    def _write_if(self, key: str, data: bytes, may: Callable[[Path], bool]) -> Stored | None:
        path = self._path(key)
        files.make_directory(path.parent)
        with files.lock(self.root / f"{OWN_PREFIX}store"):
            if not may(path):
                return None
            files.commit(path, data)
        return self._stored(key, len(data), _digest(data))

    def _path(self, key: str) -> Path:
        return self.root / require_key(key)

    def _stored(self, key: str, size: int, digest: str) -> Stored:
        return Stored(self.uri_of(key), key, size, digest, _etag(digest))


def _etag(digest: str) -> str:
    return f'"{digest}"'


def _digest(data: bytes) -> str:
    return new_sha256(data).hexdigest()


def _size_of(path: Path) -> int | None:
    """The size of a regular file; None for anything else."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _hash_of(path: Path) -> str | None:
    digest = new_sha256()
    try:
        with open(path, "rb") as stream:
            while data := stream.read(BLOCK_BYTES):
                digest.update(data)
    except OSError:
        return None
    return digest.hexdigest()


def _copy(source: Path, target: Path, *, size: int, sha256: str | None) -> str:
    with Incoming(target, size=size, sha256=sha256) as incoming:
        try:
            with open(source, "rb") as stream:
                stream.seek(incoming.offset)
                while data := stream.read(BLOCK_BYTES):
                    incoming.write(data)
        except OSError as exc:
            raise ArtifactChanged(what=str(source), reason=f"it cannot be read: {exc.strerror}") from exc
        return incoming.place()
