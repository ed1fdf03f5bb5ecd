"""Where the outputs of a run land here, under names that are ours to choose, and what they turn out to be.

A service's word for an output is a hint: the last part of it, made harmless. What is stored was counted and hashed on
its way in, is below a limit, and appears under its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpu_skills.errors import DiskFull, NotWritable, OutputTooLarge
from gpu_skills.runtimes.base import Output

MAX_RUN_BYTES = 20 * 1000**3
MAX_OUTPUTS = 2000
_MAX_NAME = 120
_HEAD_BYTES = 64
_LOOKED_AT_BYTES = 256 * 1024 * 1024
_UNSAFE = re.compile(r"[^A-Za-z0-9._ ()+=@,-]+")

# How a file begins, and from which byte on. What begins like none of these is `application/octet-stream`.
_MAGIC = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF87a", "image/gif"),
    (0, b"GIF89a", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (8, b"WAVE", "audio/wav"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"),
    (0, b"fLaC", "audio/flac"),
    (0, b"OggS", "audio/ogg"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xfb", "audio/mpeg"),
    (0, b"glTF", "model/gltf-binary"),
)


def safe_name(said: str) -> str:
    """A file name of ours from a service's word for one: its last part, without anything that a path or shell reads."""
    name = _UNSAFE.sub("_", re.split(r"[/\\]", said)[-1]).strip(" .")
    stem, dot, ending = name.rpartition(".")
    if len(name) > _MAX_NAME:
        name = f"{stem[: _MAX_NAME - 20]}{dot}{ending[:16]}" if dot else name[:_MAX_NAME]
    return name or "output"


class FolderSink:
    """Outputs as files of one folder, which is made when the first comes. max_bytes: of all of them together."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_RUN_BYTES, max_outputs: int = MAX_OUTPUTS):
        self.folder = folder
        self.max_bytes = max_bytes
        self.max_outputs = max_outputs
        self._taken_bytes = 0
        self._taken = 0

    def take(self, name: str) -> FileTaker:
        self._taken += 1
        if self._taken > self.max_outputs:
            raise OutputTooLarge(name=f"output {self._taken}", limit=self.max_bytes, outputs=self.max_outputs)
        return FileTaker(self, safe_name(name))

    def count(self, name: str, size: int) -> None:
        self._taken_bytes += size
        if self._taken_bytes > self.max_bytes:
            raise OutputTooLarge(name=name, limit=self.max_bytes)

    def forget(self, size: int) -> None:
        """What was discarded does not count."""
        self._taken_bytes -= size


class FileTaker:
    """One file on its way in. A name that is taken by another content gets a number; by the same, it stays one file."""

    def __init__(self, sink: FolderSink, name: str):
        self._sink = sink
        self._name = name
        self._size = 0
        self._digest = hashlib.sha256()
        self._head = b""
        self._part = sink.folder / f".{secrets.token_hex(8)}.part"
        with _disk_errors(sink.folder):
            sink.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
            self._file: BinaryIO = os.fdopen(os.open(self._part, flags, 0o600), "wb")

    def write(self, data: bytes) -> None:
        self._sink.count(self._name, len(data))
        self._size += len(data)
        self._digest.update(data)
        if len(self._head) < _HEAD_BYTES:
            self._head += data[: _HEAD_BYTES - len(self._head)]
        with _disk_errors(self._part):
            self._file.write(data)

    def done(self) -> Output:
        digest = self._digest.hexdigest()
        with _disk_errors(self._part):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            path = self._into_place(digest)
        return Output(path.name, path, self._size, digest, mime_of(self._head))

    def discard(self) -> None:
        self._sink.forget(self._size)
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink()

    def _into_place(self, digest: str) -> Path:
        """`link` never replaces: two runs into one folder cannot take each other's name."""
        stem, dot, ending = self._name.rpartition(".")
        for number in range(1, 10_000):
            numbered = f"{stem}-{number}{dot}{ending}" if dot and stem else f"{self._name}-{number}"
            path = self._sink.folder / (self._name if number == 1 else numbered)
            try:
                os.link(self._part, path, follow_symlinks=False)
            except FileExistsError:
                if path.is_symlink() or not path.is_file() or _sha256(path) != digest:
                    continue
            self._part.unlink()
            return path
        raise OSError(f"no free name for {self._name}")


@contextlib.contextmanager
def _disk_errors(path: Path):  # type: ignore[no-untyped-def]
    try:
        yield
    except OSError as exc:
        kind = NotWritable if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR) else DiskFull
        raise kind(path=str(path), reason=exc.strerror or str(exc)) from exc


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# what a result is -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Looked:
    """What a look at a result showed. problem: why it is no result, in words for a report."""

    kind: str
    problem: str | None = None


def mime_of(head: bytes) -> str:
    """By content: a server that answers an error page as `image.png` is not believed."""
    for offset, magic, mime in _MAGIC:
        if head[offset : offset + len(magic)] == magic and (
            offset == 0 or head[:4] in (b"RIFF",) or mime[:5] == "video"
        ):
            return mime
    try:
        text = head.decode()
    except UnicodeDecodeError as exc:
        if exc.end < len(head) - 3:
            return "application/octet-stream"
        text = head[: exc.start].decode()
    if not text or any(ord(c) < 32 and c not in "\t\r\n\f" for c in text):
        return "application/octet-stream"
    start = text.lstrip().lower()
    if start.startswith(("<!doctype html", "<html")):
        return "text/html"
    return "application/json" if start.startswith(("{", "[")) else "text/plain"


def look(path: Path, wanted: str) -> Looked:
    """Whether a file is a whole result of the wanted kind (`image`, `video`, `audio`, `text`, or empty for any).

    A PNG is decoded: one colour from edge to edge is what a broken model paints. What is larger than 256 MB is known by
    its beginning only.
    """
    with path.open("rb") as file:
        data = file.read(_LOOKED_AT_BYTES)
    kind = mime_of(data[:_HEAD_BYTES])
    if not data:
        return Looked(kind, "it is empty")
    if wanted and not kind.startswith(wanted + "/"):
        return Looked(kind, f"it is {kind}, not {wanted}")
    if len(data) == _LOOKED_AT_BYTES:
        return Looked(kind)
    if kind == "image/png":
        return Looked(kind, _png_problem(data))
    if kind == "image/jpeg" and b"\xff\xd9" not in data[-4096:]:
        return Looked(kind, "the JPEG is cut off")
    return Looked(kind)


def _png_problem(data: bytes) -> str | None:
    """None for a whole PNG with more than one colour in it."""
    at, packed, is_ended, header = 8, [], False, b""
    while at + 12 <= len(data) and not is_ended:
        size = int.from_bytes(data[at : at + 4], "big")
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if data[at + 8 + size : at + 12 + size] != zlib.crc32(kind + content).to_bytes(4, "big"):
            return "the PNG is damaged or cut off"
        if kind == b"IHDR":
            header = content
        elif kind == b"IDAT":
            packed.append(content)
        is_ended = kind == b"IEND"
        at += 12 + size
    if not is_ended or len(header) != 13:
        return "the PNG is cut off"
    try:
        pixels = zlib.decompressobj().decompress(b"".join(packed), 512 * 1024 * 1024)
    except zlib.error:
        return "the PNG does not unpack"
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(header[9], 0)
    row_bytes = (int.from_bytes(header[:4], "big") * channels * header[8] + 7) // 8 + 1
    if not channels or row_bytes * int.from_bytes(header[4:8], "big") != len(pixels):
        return None if header[12] and channels else "the PNG holds fewer pixels than it says"
    return "every pixel has the same colour" if _is_flat(pixels, row_bytes, max(1, channels * header[8] // 8)) else None


def _is_flat(pixels: bytes, row_bytes: int, pixel_bytes: int) -> bool:
    """Filters turn a flat picture into rows of zeros after the first pixel, or into the pixel again and again."""
    first = pixels[1 : 1 + pixel_bytes]
    for start in range(0, len(pixels), row_bytes):
        row = pixels[start + 1 : start + row_bytes]
        if not row.strip(b"\0") or row == first * (len(row) // pixel_bytes):
            continue
        if not row[pixel_bytes:].strip(b"\0") and row[:pixel_bytes] == first:
            continue
        return False
    return True
