"""A bucket as a store: S3, R2 and whatever else speaks S3.

A write says what it expects to find (If-None-Match, If-Match) and is sent once: repeated after a lost answer it would
meet itself and call that a defeat. The hash of the content stands in the object's metadata (`x-amz-meta-sha256`).
Every body carries its MD5, which the store compares.
"""

from __future__ import annotations

import base64
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import md5, sha256
from pathlib import Path
from typing import Any, BinaryIO

from gpu_skills.artifacts.base import OWN_PREFIX, Sent, Stored, require_key
from gpu_skills.artifacts.incoming import Incoming
from gpu_skills.artifacts.s3_client import Gone, Lost, NoUpload, connect, translated
from gpu_skills.artifacts.uploads import Upload, Uploads
from gpu_skills.errors import (
    ArtifactChanged,
    ArtifactMissing,
    StoreIgnoresConditions,
    StoreSilent,
    TransferIncomplete,
    UnexpectedReply,
)

PART_BYTES = 16 << 20
MAX_PARTS = 10_000
PARTS_AT_ONCE = 4
RANGE_BYTES = 16 << 20
RANGE_ATTEMPTS = 4
PAGE_KEYS = 1000
SETTLE_ATTEMPTS = 4
SHA256 = "sha256"  # the metadata that names the content
MAX_PRESIGNED_S = 7 * 24 * 3600  # what signature version 4 allows


@dataclass(frozen=True)
class Presigned:
    """A URL that is a key to one object until it expires: a secret, for stdin and session bodies only.

    headers: what the request has to carry, since they are signed too.
    """

    method: str
    url: str = field(repr=False)
    expires_in_s: int
    headers: dict[str, str] = field(default_factory=dict)


class S3Store:
    def __init__(self, bucket: str, *, notes: Path | None = None, part_bytes: int = PART_BYTES):
        self.bucket = bucket
        self.name = f"s3://{bucket}"
        self._part_bytes = part_bytes
        self._uploads = Uploads(notes)
        self._making = threading.Lock()

    @cached_property
    def _client(self) -> Any:
        return connect(self.name)

    @cached_property
    def _once(self) -> Any:
        return connect(self.name, attempts=1)

    def _ready(self) -> None:
        """Make both clients in one thread: making one is not safe beside another."""
        with self._making:
            _ = self._client, self._once

    def uri_of(self, key: str) -> str:
        return f"{self.name}/{key}"

    # files -----------------------------------------------------------------------------------------------------------

    def put_file(self, path: Path, key: str, *, sha256: str, sent: Sent | None = None) -> Stored:
        """See `base.Store`. Larger files go in parts; those that arrived before a death are not sent again."""
        require_key(key)
        self._ready()
        with _opened(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            for _ in range(SETTLE_ATTEMPTS):
                there = self.head(key)
                if there is not None and there.bytes == size and there.sha256 == sha256:
                    if sent is not None:
                        sent(size)
                    if self._uploads.find(there.uri) is not None:
                        self._abandon(key)
                    return there
                condition = {"IfNoneMatch": "*"} if there is None else {"IfMatch": there.etag}
                stream.seek(0)
                try:
                    if size <= self._part_bytes:
                        stored = self._put_whole(stream, path, key, sha256, condition)
                    else:
                        return self._put_parts(stream, path, key, size, sha256, condition, sent)
                except (Lost, NoUpload, StoreSilent):  # somebody was faster, or it is there: look again
                    continue
                if sent is not None:
                    sent(size)
                return stored
        raise StoreSilent(store=self.name, key=key, reason=f"it changed {SETTLE_ATTEMPTS} times meanwhile")

    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> Stored:
        there = self._require(key)
        expected = sha256 or there.sha256
        with Incoming(path, size=there.bytes, sha256=expected) as incoming:
            for data in self._content(there, incoming.offset):
                incoming.write(data)
            return replace(there, sha256=incoming.place())

    def read_back(self, key: str) -> Stored:
        there = self._require(key)
        digest, size = sha256(), 0
        for data in self._content(there, 0):
            digest.update(data)
            size += len(data)
        return replace(there, bytes=size, sha256=digest.hexdigest())

    def blocks(self, key: str) -> Iterator[bytes]:
        there = self.head(key)
        if there is not None:
            yield from self._content(there, 0)

    def head(self, key: str) -> Stored | None:
        try:
            with translated(self.name):
                answer = self._client.head_object(Bucket=self.bucket, Key=require_key(key))
        except Gone:
            return None
        return self._stored(key, answer, answer.get("ContentLength"))

    def list(self, prefix: str) -> Iterator[Stored]:
        below = f"{prefix}/" if prefix else ""
        asked = {"Bucket": self.bucket, "Prefix": below, "MaxKeys": PAGE_KEYS}
        token: str | None = None
        while True:
            with translated(self.name):
                answer = self._client.list_objects_v2(**asked, **({"ContinuationToken": token} if token else {}))
            for found in answer.get("Contents", ()):
                key, size = found.get("Key"), found.get("Size")
                if isinstance(key, str) and isinstance(size, int) and not key.rpartition("/")[2].startswith(OWN_PREFIX):
                    yield Stored(f"{self.name}/{key}", key, size, None, found.get("ETag"))
            following = answer.get("NextContinuationToken")
            if not answer.get("IsTruncated"):
                return
            if not following or following == token:
                raise UnexpectedReply(provider=self.name, what="a listing", reason="it goes on without an end")
            token = following

    # small objects ---------------------------------------------------------------------------------------------------

    def get(self, key: str, *, max_bytes: int) -> tuple[bytes, Stored] | None:
        try:
            with translated(self.name):
                answer = self._client.get_object(Bucket=self.bucket, Key=require_key(key))
                with answer["Body"] as body:
                    data = body.read(max_bytes + 1)
        except Gone:
            return None
        if len(data) > max_bytes:
            raise ArtifactChanged(what=self.uri_of(key), reason=f"it has more than {max_bytes} bytes")
        return data, self._stored(key, answer, len(data))

    def put(self, key: str, data: bytes) -> Stored:
        with translated(self.name):
            return self._put(self._client, require_key(key), data, {})

    def create_if_absent(self, key: str, data: bytes) -> Stored | None:
        return self._put_if(key, data, {"IfNoneMatch": "*"})

    def replace_if_unchanged(self, key: str, data: bytes, etag: str) -> Stored | None:
        return self._put_if(key, data, {"IfMatch": etag})

    def delete(self, key: str) -> None:
        try:
            with translated(self.name):
                self._client.delete_object(Bucket=self.bucket, Key=require_key(key))
        except Gone:
            pass

    def probe(self, prefix: str = "") -> None:
        name = f"{OWN_PREFIX}probe-{secrets.token_hex(8)}"
        key = f"{prefix}/{name}" if prefix else name
        try:
            first = self.create_if_absent(key, b"1")
            if first is None or first.etag is None:
                self._ignores("a new object is refused, or has no ETag")
            if self.create_if_absent(key, b"2") is not None:
                self._ignores("If-None-Match: an object that is there was made again")
            if self.replace_if_unchanged(key, b"3", f'"{"0" * 32}"') is not None:
                self._ignores("If-Match: another object than the one that was read was replaced")
            second = self.replace_if_unchanged(key, b"4", first.etag)
            found = self.get(key, max_bytes=16)
            if second is None or found is None or found[0] != b"4":
                self._ignores("If-Match: what was read could not be replaced")
        finally:
            self.delete(key)

    def _ignores(self, reason: str) -> None:
        raise StoreIgnoresConditions(store=self.name, reason=reason)

    # machine → store -------------------------------------------------------------------------------------------------

    def presign(
        self,
        key: str,
        method: str,
        *,
        expires_in_s: int,
        size: int | None = None,
        sha256: str | None = None,
        part: tuple[str, int] | None = None,
    ) -> Presigned:
        """A URL with which a machine that has no key may PUT or GET one object, or one part of an upload.

        size: exactly so many bytes and no others. sha256: what is recorded with a new object, which then replaces none.
        part: (upload id, number). It ends with the credential that signs it, if that ends earlier.
        """
        asked: dict[str, Any] = {"Bucket": self.bucket, "Key": require_key(key)}
        operation = {"PUT": "put_object", "GET": "get_object"}[method]
        # Named, since what a program says of a body by itself makes some servers read a form.
        headers = {} if method == "GET" else {"Content-Type": "application/octet-stream"}
        if part is not None:
            operation = "upload_part"
            asked |= {"UploadId": part[0], "PartNumber": part[1]}
        if size is not None:
            asked["ContentLength"] = size
            headers["Content-Length"] = str(size)
        if sha256 is not None:
            asked |= {"Metadata": {SHA256: sha256}, "IfNoneMatch": "*"}
            headers |= {f"x-amz-meta-{SHA256}": sha256, "If-None-Match": "*"}
        expires_in_s = max(1, min(expires_in_s, MAX_PRESIGNED_S))
        with translated(self.name):
            url = self._client.generate_presigned_url(operation, Params=asked, ExpiresIn=expires_in_s)
        return Presigned(method, url, expires_in_s, headers)

    def begin_upload(self, key: str, sha256: str) -> str:
        """The id of an upload whose parts come through `presign`; the hash is that of the whole."""
        with translated(self.name):
            answer = self._client.create_multipart_upload(
                Bucket=self.bucket, Key=require_key(key), Metadata={SHA256: sha256}
            )
        return answer["UploadId"]

    def upload_under_way(self, key: str, size: int, sha256: str) -> tuple[Upload, dict[int, tuple[str, int]]]:
        """An upload of this content, with (ETag, bytes) of its parts by number: one that was begun, else a new one."""
        self._ready()
        return self._upload(require_key(key), size, sha256)

    def complete_upload(self, key: str, upload_id: str) -> Stored | None:
        """Put together what arrived, unless there is an object of that name already (None)."""
        self._ready()
        try:
            arrived = self._arrived(key, upload_id)
            tags = {number: etag for number, (etag, _) in arrived.items()}
            stored = self._complete(key, upload_id, tags, {"IfNoneMatch": "*"}, sum(n for _, n in arrived.values()))
        except (Lost, NoUpload):
            return None
        self._uploads.drop(self.uri_of(key))
        return stored

    # how -------------------------------------------------------------------------------------------------------------

    def _put(self, client: Any, key: str, data: bytes, more: dict[str, Any], digest: str | None = None) -> Stored:
        digest = digest or sha256(data).hexdigest()
        answer = client.put_object(
            Bucket=self.bucket, Key=key, Body=data, ContentMD5=_md5(data), Metadata={SHA256: digest}, **more
        )
        return Stored(self.uri_of(key), key, len(data), digest, answer.get("ETag"), answer.get("VersionId"))

    def _put_if(self, key: str, data: bytes, condition: dict[str, Any]) -> Stored | None:
        self._ready()
        try:
            with translated(self.name, conditional=require_key(key)):
                return self._put(self._once, key, data, condition)
        except Lost:
            return None

    def _put_whole(self, stream: BinaryIO, path: Path, key: str, digest: str, condition: dict[str, Any]) -> Stored:
        data = stream.read(self._part_bytes + 1)
        _require_same(sha256(data).hexdigest(), digest, path)
        with translated(self.name, conditional=key):
            return self._put(self._once, key, data, condition, digest)

    def _put_parts(
        self,
        stream: BinaryIO,
        path: Path,
        key: str,
        size: int,
        digest: str,
        condition: dict[str, Any],
        sent: Sent | None,
    ) -> Stored:
        upload, arrived = self._upload(key, size, digest)
        whole = sha256()
        tags: dict[int, Future[str]] = {}
        room = threading.Semaphore(PARTS_AT_ONCE * 2)  # how many parts are in memory

        def send(number: int, data: bytes) -> str:
            try:
                etag, _ = arrived.get(number, ("", 0))
                if etag.strip('"') != md5(data, usedforsecurity=False).hexdigest():
                    with translated(self.name):
                        etag = self._client.upload_part(
                            Bucket=self.bucket,
                            Key=key,
                            UploadId=upload.upload_id,
                            PartNumber=number,
                            Body=data,
                            ContentMD5=_md5(data),
                        )["ETag"]
                if sent is not None:
                    sent(len(data))
                return etag
            finally:
                room.release()

        try:
            with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
                number = 0
                while data := stream.read(upload.part_bytes):
                    number += 1
                    whole.update(data)
                    room.acquire()
                    if any(done.done() and done.exception() for done in tags.values()):
                        break
                    tags[number] = pool.submit(send, number, data)
            made = {number: tag.result() for number, tag in tags.items()}
            _require_same(whole.hexdigest(), digest, path)
            stored = self._complete(key, upload.upload_id, made, condition, size)
        except (ArtifactChanged, Lost):
            self._abandon(key)
            raise
        except NoUpload:
            self._uploads.drop(self.uri_of(key))
            raise
        self._uploads.drop(self.uri_of(key))
        return replace(stored, sha256=digest)

    def _upload(self, key: str, size: int, digest: str) -> tuple[Upload, dict[int, tuple[str, int]]]:
        """An upload of this content that is under way, with its parts, else a new one; others of ours are ended."""
        uri = self.uri_of(key)
        known = self._uploads.find(uri)
        if known is not None and (known.sha256, known.bytes) == (digest, size):
            try:
                return known, self._arrived(key, known.upload_id)
            except NoUpload:
                pass
        self._abandon(key)
        fewest_mib = -(-size // (MAX_PARTS << 20))
        upload = Upload(self.begin_upload(key, digest), digest, size, max(self._part_bytes, fewest_mib << 20))
        self._uploads.note(uri, upload)
        return upload, {}

    def _abandon(self, key: str) -> None:
        """End what is under way for this very object: its name is one that only this project's job has."""
        uri = self.uri_of(key)
        with translated(self.name):
            listed = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=key)
        for upload in listed.get("Uploads", ()):
            if upload.get("Key") == key and upload.get("UploadId"):
                try:
                    with translated(self.name):
                        self._client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload["UploadId"])
                except (Gone, NoUpload):
                    continue
        self._uploads.drop(uri)

    def _arrived(self, key: str, upload_id: str) -> dict[int, tuple[str, int]]:
        """(ETag, bytes) of each part that is there, by number."""
        arrived: dict[int, tuple[str, int]] = {}
        after = 0
        while True:
            try:
                with translated(self.name):
                    answer = self._client.list_parts(
                        Bucket=self.bucket, Key=key, UploadId=upload_id, PartNumberMarker=after
                    )
            except Gone as exc:
                raise NoUpload from exc
            for part in answer.get("Parts", ()):
                arrived[part["PartNumber"]] = (part["ETag"], part.get("Size", 0))
            following = answer.get("NextPartNumberMarker") or 0
            if not answer.get("IsTruncated") or following <= after:
                return arrived
            after = following

    def _complete(self, key: str, upload_id: str, tags: dict[int, str], condition: dict[str, Any], size: int) -> Stored:
        parts = [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]
        with translated(self.name, conditional=key):
            answer = self._once.complete_multipart_upload(
                Bucket=self.bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}, **condition
            )
        return Stored(self.uri_of(key), key, size, None, answer.get("ETag"), answer.get("VersionId"))

    def _content(self, there: Stored, offset: int) -> Iterator[bytes]:
        """What is in an object from an offset on, in ranges of this very version of it."""
        while offset < there.bytes:
            data = self._range(there, offset, min(offset + RANGE_BYTES, there.bytes))
            yield data
            offset += len(data)

    def _range(self, there: Stored, start: int, end: int) -> bytes:
        for attempt in range(1, RANGE_ATTEMPTS + 1):
            try:
                with translated(self.name, conditional=there.key):
                    answer = self._client.get_object(
                        Bucket=self.bucket,
                        Key=there.key,
                        Range=f"bytes={start}-{end - 1}",
                        **({"IfMatch": there.etag} if there.etag else {}),
                    )
                    with answer["Body"] as body:
                        data = body.read(end - start + 1)
            except Lost as exc:
                raise ArtifactChanged(what=there.uri, reason="it was replaced while it was read") from exc
            except StoreSilent as exc:  # of a read: the connection broke in the middle
                if attempt == RANGE_ATTEMPTS:
                    raise TransferIncomplete(reason=f"{there.uri}: {exc.details['reason']}") from exc
                continue
            if len(data) == end - start:
                return data
        raise TransferIncomplete(reason=f"{there.uri} gave {len(data)} of {end - start} bytes at {start}")

    def _require(self, key: str) -> Stored:
        there = self.head(key)
        if there is None:
            raise ArtifactMissing(uri=self.uri_of(key))
        return there

    def _stored(self, key: str, answer: dict[str, Any], size: Any) -> Stored:
        if not isinstance(size, int):
            raise UnexpectedReply(provider=self.name, what="a request for an object", reason="it gives no length")
        digest = answer.get("Metadata", {}).get(SHA256)
        is_digest = isinstance(digest, str) and len(digest) == 64 and not set(digest) - set("0123456789abcdef")
        return Stored(
            self.uri_of(key), key, size, digest if is_digest else None, answer.get("ETag"), answer.get("VersionId")
        )


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as exc:
        raise ArtifactChanged(what=str(path), reason=f"it cannot be read here: {exc.strerror}") from exc


def _require_same(found: str, expected: str, path: Path) -> None:
    if found != expected:
        raise ArtifactChanged(what=path.name, reason=f"its SHA-256 is {found} here, {expected} was to be stored")


def _md5(data: bytes) -> str:
    return base64.b64encode(md5(data, usedforsecurity=False).digest()).decode()
