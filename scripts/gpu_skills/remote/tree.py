"""A directory as content: its entries, its canonical manifest, and the manifests that machines send us.

What we build ourselves (`Tree`) is trusted. What a machine lists (`parse_manifest`) is not: a path there may try to
leave the folder it is written to, and a size or a count may try to fill memory.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from json.encoder import encode_basestring_ascii as _json_string
from pathlib import Path
from typing import Any, NoReturn

from gpu_skills.errors import UnsafeManifest, one_line

MAX_ENTRIES = 200_000
MAX_MANIFEST_BYTES = 128 << 20
MAX_FILE_BYTES = 1 << 50
MAX_PATH_BYTES = 4096
MAX_NAME_BYTES = 255
MAX_LINK_HOPS = 40
MAX_LINK_STEPS = 2_000_000  # of all links together: rings of long links must not keep us busy
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Nearly every line and nearly every path of a real manifest; what these do not match is judged piece by piece.
_USUAL_LINE = re.compile(
    rb'\{"mode":(\d{1,3}),"path":"([ !#-\[\]-~]{1,4096})","sha256":"([0-9a-f]{64})","size":(\d{1,15})\}'
)
_USUAL_PATH = re.compile(rb"(?:(?!\.{1,2}/)[^/\0]{1,255}/)*(?!\.{1,2}\Z)[^/\0]{1,255}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, link or empty directory. Paths are relative bytes with `/`, as `os.fsencode` gives them.

    sha256: of a file's content, None for links and directories. data: that content, when whoever hashed it kept it.
    """

    path: bytes
    size: int = 0
    mode: int = 0o644
    sha256: str | None = None
    link: bytes | None = None
    is_dir: bool = False
    data: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def display(self) -> str:
        """The path for people: one line, whatever bytes it has."""
        return one_line(self.path.decode("utf-8", "replace"), limit=4 * MAX_PATH_BYTES)

    @property
    def is_file(self) -> bool:
        return self.link is None and not self.is_dir

    def manifest_line(self) -> str:
        if self.is_dir:
            return f'{{"dir":true,{path_members("path", self.path)}}}\n'
        if self.link is not None:
            return f"{{{path_members('link', self.link)},{path_members('path', self.path)}}}\n"
        return f'{{"mode":{self.mode},{path_members("path", self.path)},"sha256":"{self.sha256}","size":{self.size}}}\n'


class Tree:
    """The entries of one directory, in manifest order. `root` is where the content of files without `data` is read."""

    def __init__(self, root: Path, entries: Iterable[Entry]):
        self.root = root
        self.entries = sorted(entries, key=lambda entry: entry.path)

    @cached_property
    def manifest(self) -> bytes:
        return "".join([entry.manifest_line() for entry in self.entries]).encode("ascii")

    @cached_property
    def digest(self) -> str:
        return sha256(self.manifest).hexdigest()

    @cached_property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.entries if entry.is_file)

    @property
    def files(self) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.is_file)

    def local_path(self, entry: Entry) -> bytes:
        return os.path.join(os.fsencode(self.root), entry.path)


def parse_manifest(
    chunks: Iterable[bytes],
    *,
    host: str = "the machine",
    job: str = "",
    max_entries: int = MAX_ENTRIES,
    max_bytes: int = MAX_MANIFEST_BYTES,
) -> list[Entry]:
    """Read a manifest that came from a machine. Raises UnsafeManifest naming the entry and what is wrong with it.

    What comes back can be written below a folder: no path leaves it, no file stands where a folder has to be, and
    every link points inside. The caller must still not follow links that are on its own disk already.
    """
    entries: list[Entry] = []
    seen: set[bytes] = set()
    folders: set[bytes] = {b""}
    for number, line in enumerate(_lines(chunks, max_bytes, host, job), start=1):
        if number > max_entries:
            _refuse(host, job, f"more than {max_entries} entries")
        try:
            entry = _entry(line)
            if entry.path in seen:
                raise _Unsafe("it is listed twice")
        except _Unsafe as unsafe:
            _refuse(host, job, f"entry {number}{unsafe.where(line)}: {unsafe}")
        entries.append(entry)
        seen.add(entry.path)
        parent = entry.path.rpartition(b"/")[0]
        while parent not in folders:
            folders.add(parent)
            parent = parent.rpartition(b"/")[0]
    links = {entry.path: entry.link for entry in entries if entry.link is not None}
    steps = itertools.count(1)
    for entry in entries:
        if not entry.is_dir and entry.path in folders:
            _refuse(host, job, f"{entry.display} is a file or link and also a folder")
        if entry.link is not None and _leaves(entry, links, steps):
            _refuse(host, job, f"{entry.display} is a link that points outside")
    return entries


class _Unsafe(Exception):
    def where(self, line: bytes) -> str:
        """The path of the entry as far as it can be told, for the message."""
        try:
            path = json.loads(line).get("path")
        except (ValueError, AttributeError, RecursionError):
            return ""
        return f" ({one_line(path, limit=200)!r})" if isinstance(path, str) else ""


def _refuse(host: str, job: str, reason: str) -> NoReturn:
    raise UnsafeManifest(host=host, job=job, reason=reason)


def _lines(chunks: Iterable[bytes], max_bytes: int, host: str, job: str) -> Iterator[bytes]:
    total, rest = 0, b""
    for chunk in chunks:
        total += len(chunk)
        if total > max_bytes:
            _refuse(host, job, f"the manifest is larger than {max_bytes >> 20} MiB")
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        _refuse(host, job, "the manifest ends in the middle of a line")


def _entry(line: bytes) -> Entry:
    usual = _USUAL_LINE.fullmatch(line)
    if usual is not None:
        mode, path, digest, size = usual.groups()
        _check_relative(path)
        return Entry(path, int(size), int(mode) & 0o777, digest.decode())
    value = _strict_object(line)
    path = _path(value, "path")
    _check_relative(path)
    if "dir" in value:
        if value["dir"] is not True:
            raise _Unsafe("dir is not true")
        return Entry(path, mode=0o755, is_dir=True)
    if "link" in value:
        target = _path(value, "link")
        _check_target(target)
        return Entry(path, link=target)
    size, mode, digest = value.get("size"), value.get("mode"), value.get("sha256")
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        raise _Unsafe(f"size is {one_line(repr(size), limit=200)}")
    if type(mode) is not int or not 0 <= mode <= 0o7777:
        raise _Unsafe(f"mode is {one_line(repr(mode), limit=200)}")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise _Unsafe("sha256 is not 64 lower-case hex digits")
    return Entry(path, size, mode & 0o777, digest)


def _strict_object(line: bytes) -> dict[str, Any]:
    if len(line) > 64 << 10:
        raise _Unsafe("the line is longer than 64 KiB")
    try:
        value = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise _Unsafe("it is not a JSON object") from exc
    if not isinstance(value, dict):
        raise _Unsafe("it is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _path(value: dict[str, Any], name: str) -> bytes:
    text, encoded = value.get(name), value.get(name + "_b64")
    if not isinstance(text, str):
        raise _Unsafe(f"it has no {name}")
    if encoded is None:
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise _Unsafe(f"{name} has a lone surrogate") from exc
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError, TypeError) as exc:
        raise _Unsafe(f"{name}_b64 is not base64") from exc


def _check_relative(path: bytes) -> None:
    if len(path) <= MAX_PATH_BYTES and _USUAL_PATH.fullmatch(path):
        return
    if not path:
        raise _Unsafe("the path is empty")
    if path.startswith(b"/"):
        raise _Unsafe("the path is absolute")
    if b"\0" in path:
        raise _Unsafe("the path has a NUL")
    if len(path) > MAX_PATH_BYTES:
        raise _Unsafe(f"the path is longer than {MAX_PATH_BYTES} bytes")
    for name in path.split(b"/"):
        if name in (b"", b".", b".."):
            raise _Unsafe(f"the path has the part {name.decode()!r}")
        if len(name) > MAX_NAME_BYTES:
            raise _Unsafe(f"a name is longer than {MAX_NAME_BYTES} bytes")


def _check_target(target: bytes) -> None:
    if not target or target.startswith(b"/") or b"\0" in target or len(target) > MAX_PATH_BYTES:
        raise _Unsafe("the link points outside")


def _leaves(entry: Entry, links: dict[bytes, bytes], steps: Iterator[int]) -> bool:
    """Whether following this link, and the links on its way, ever steps above the top.

    Counting `..` is not enough: in `x/../..` the middle step depends on where `x` itself points.
    """
    here = entry.path.split(b"/")[:-1]
    ahead = entry.link.split(b"/")[::-1]
    hops = 0
    while ahead:
        name = ahead.pop()
        if next(steps) > MAX_LINK_STEPS:
            return True
        if name in (b"", b"."):
            continue
        if name == b"..":
            if not here:
                return True
            here.pop()
            continue
        here.append(name)
        onward = links.get(b"/".join(here))
        if onward is not None:
            hops += 1
            if hops > MAX_LINK_HOPS:  # a ring: the system refuses to follow it as well
                return False
            here.pop()
            ahead.extend(onward.split(b"/")[::-1])
    return False


def path_members(name: str, path: bytes) -> str:
    """A path as members of a JSON object: as text, and where it is no UTF-8 as base64 of its bytes too."""
    try:
        return f'"{name}":{_json_string(path.decode("utf-8"))}'
    except UnicodeDecodeError:
        shown = _json_string(path.decode("utf-8", "replace"))
        return f'"{name}":{shown},"{name}_b64":"{base64.b64encode(path).decode()}"'
