"""What a store of artifacts does, whichever it is, and which names an object may have.

A store is addressed by a URI: a folder (`file:///mnt/nas/runs` or a plain path), a bucket (`s3://bucket/prefix`, also
R2 and others, by boto3's own settings such as AWS_ENDPOINT_URL_S3), or a provider's volume, which only a machine can
open. Credentials come from the environment and boto3's own chain; none is in a URI, a record or a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu_skills.errors import UnsafeKey, UsageError

MAX_KEY_BYTES = 1024  # what S3 takes
# Objects of ours that are no artifacts: probes, locks, what is still arriving. Listings leave them out.
OWN_PREFIX = ".gpu-"
Sent = Callable[[int], None]  # told of bytes that are in the store now, as they get there


@dataclass(frozen=True)
class Stored:
    """One object. sha256: as recorded when it was put, or as found by `read_back`; None where nobody recorded one.

    etag: what `replace_if_unchanged` compares; it says nothing about the content. version: where the store keeps some.
    """

    uri: str
    key: str
    bytes: int
    sha256: str | None = None
    etag: str | None = None
    version: str | None = None


class Store(Protocol):
    """Objects by key. Every failure is one of our errors; None where an answer is `no`, not a failure."""

    def uri_of(self, key: str) -> str: ...

    def put_file(self, path: Path, key: str, *, sha256: str, sent: Sent | None = None) -> Stored:
        """Store a file under its hash; nothing is sent when it is there already. A call after a death goes on.

        Raises ArtifactChanged when the file is not what `sha256` says.
        """
        ...

    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> Stored:
        """Bring an object to `path`: verified by size and hash (given, else recorded), then renamed into place."""
        ...

    def head(self, key: str) -> Stored | None: ...

    def list(self, prefix: str) -> Iterator[Stored]:
        """Everything below a prefix. Keys are whatever somebody put there: `below` before one becomes a path."""
        ...

    def read_back(self, key: str) -> Stored:
        """Read an object whole and say what is there: bytes and SHA-256 as found. Raises ArtifactMissing."""
        ...

    def blocks(self, key: str) -> Iterator[bytes]:
        """The content of an object in pieces, nothing for one that is not there."""
        ...

    def get(self, key: str, *, max_bytes: int) -> tuple[bytes, Stored] | None:
        """A small object whole; ArtifactChanged when it is larger than that."""
        ...

    def put(self, key: str, data: bytes) -> Stored:
        """A small object, whatever was there."""
        ...

    def create_if_absent(self, key: str, data: bytes) -> Stored | None:
        """Of all that try at once exactly one gets an answer; None: somebody else's object is there.

        StoreSilent when the store did not answer: it may be there, so read it before you decide.
        """
        ...

    def replace_if_unchanged(self, key: str, data: bytes, etag: str) -> Stored | None:
        """None: it is not what was read any more, or gone. StoreSilent as above."""
        ...

    def delete(self, key: str) -> None: ...

    def probe(self, prefix: str = "") -> None:
        """Write, read and delete a small object. StoreIgnoresConditions for a store that takes conditional writes
        without looking at the condition: two could win the same lease there, and one would overwrite the other."""
        ...


def open_store(uri: str, *, base: Path | None = None, notes: Path | None = None) -> tuple[Store, str]:
    """(store, prefix) of a URI. Nothing is asked of anybody yet.

    base: what a relative path starts from. notes: a file that remembers uploads under way, so that a later call goes on
    with them (`uploads`). UsageError for what is no address of a store, Refused for one that only a machine can open.
    """
    scheme, separator, rest = uri.partition("://")
    if any(not c.isprintable() for c in uri):
        raise UsageError("the address of a store holds a control character", next_step="gpu job artifacts --help")
    if not separator or scheme == "file":
        from gpu_skills.artifacts.local import LocalStore, folder_of

        return LocalStore(folder_of(rest if separator else uri, base or Path.cwd(), uri)), ""
    if scheme == "s3":
        from gpu_skills.artifacts.s3 import S3Store

        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        if prefix:
            require_key(prefix)
        return S3Store(_bucket_name(bucket, uri), notes=notes), prefix
    if scheme == "volume":
        from gpu_skills.artifacts import volume

        raise volume.only_on_a_machine(uri)
    raise UsageError(
        f"{uri[:200]!r} is no store: write s3://BUCKET/PREFIX, file:///FOLDER or a path",
        next_step="gpu job artifacts --help",
    )


def join(prefix: str, *names: str) -> str:
    """The key of something below a prefix; UnsafeKey for names that no object of ours may have."""
    return require_key("/".join([*([prefix] if prefix else []), *names]))


def require_key(key: str) -> str:
    problem = _problem(key)
    if problem:
        raise UnsafeKey(key=repr(key[:200]), reason=problem)
    return key


def below(key: str, prefix: str) -> str:
    """The path of a listed object below the prefix, which may then be used as one; UnsafeKey otherwise."""
    inside = key.removeprefix(prefix + "/") if prefix else key
    if prefix and inside == key:
        raise UnsafeKey(key=repr(key[:200]), reason="it is not below the prefix")
    require_key(inside)
    return inside


def _problem(key: str) -> str | None:
    """Why a key could do harm as a path or in a message; None: it cannot. Pure."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if not 0 < size <= MAX_KEY_BYTES:
        return f"it has {size} bytes, allowed are 1 to {MAX_KEY_BYTES}"
    if any(not c.isprintable() for c in key):
        return "it holds a control character"
    for name in key.split("/"):
        if name in ("", ".", ".."):
            return "it is absolute, or has an empty or dotted component"
    return None


def _bucket_name(bucket: str, uri: str) -> str:
    if not bucket or any(not (c.isascii() and (c.isalnum() or c in "._-")) for c in bucket) or ".." in bucket:
        raise UsageError(
            f"{uri[:200]!r} names no bucket; write s3://BUCKET/PREFIX", next_step="gpu job artifacts --help"
        )
    return bucket
