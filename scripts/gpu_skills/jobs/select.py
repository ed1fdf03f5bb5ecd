"""Which files, links and empty folders of a directory belong to a job: one walk that reads no content.

Every folder is opened from the one above it and never through a link, so what is read is inside the directory even
when somebody moves things meanwhile.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from gpu_skills.errors import UploadTooLarge
from gpu_skills.jobs.exclude import NEVER_UPLOADED, VIRTUAL_ENVIRONMENT_MARKS, Patterns, never_uploaded
from gpu_skills.jobs.secret_shapes import SECRET_FOLDERS
from gpu_skills.jobs.secret_shapes import by_name as secret_name

MAX_FILES = 200_000
MAX_PATH_BYTES = 4000  # Linux takes 4,096 including the folder that the machine puts in front
SHORT_PATH = MAX_PATH_BYTES // 4  # characters that cannot be more bytes than that
MAX_SUMMED = 20_000  # entries looked at to tell the size of what is left out
MAX_OPEN_FOLDERS = 200  # at once, while that is counted
MAX_LINK_HOPS = 40  # as Linux

_ENCODING = sys.getfilesystemencoding()
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class LeftOut:
    """Something that stays here. A folder is one entry, its path ends in `/`. complete False: it holds more."""

    path: str
    bytes: int
    files: int
    why: str
    complete: bool = True


@dataclass
class Selection:
    """What one walk found. Paths are str as os.fsdecode gives them, relative, with `/`; "" is the directory itself."""

    files: dict[str, list[tuple[str, str, os.stat_result]]] = field(default_factory=dict)  # folder → (name, path, stat)
    folders: set[str] = field(default_factory=lambda: {""})
    links: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)  # by path without the slash at the end
    secrets: list[str] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    outside: list[tuple[str, str]] = field(default_factory=list)
    file_count: int = 0

    def all_files(self) -> Iterator[tuple[str, os.stat_result]]:
        for found in self.files.values():
            for _, path, status in found:
                yield path, status

    @cached_property
    def file_paths(self) -> frozenset[str]:
        """For when the walk is over."""
        return frozenset(path for path, _ in self.all_files())

    def empty_folders(self) -> list[str]:
        used = {parent(path) for path in (*self.folders, *self.links)}
        return sorted(self.folders - used - set(self.files) - {""})


def select(root_fd: int, patterns: Patterns) -> Selection:
    """Walk the directory behind `root_fd` and settle its links. Nothing is raised for what is in it; see the fields."""
    selection = Selection()
    _Walk(root_fd, patterns, selection).run()
    _settle_links(selection)
    return selection


def encode(path: str) -> bytes:
    return path.encode(_ENCODING, "surrogateescape")


def display(path: str) -> str:
    """For people and JSON: bytes that are no text become U+FFFD."""
    return encode(path).decode("utf-8", "replace")


def parent(path: str) -> str:
    return path.rpartition("/")[0]


@contextmanager
def opened_folder(root_fd: int, folder: str) -> Iterator[int]:
    """A descriptor of a folder below the root, reached without following a link."""
    descriptor = os.dup(root_fd)
    try:
        for name in folder.split("/") if folder else ():
            below = os.open(name, OPEN_FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


class _Walk:
    def __init__(self, root_fd: int, patterns: Patterns, selection: Selection):
        self._root_fd = root_fd
        self._patterns = patterns
        self._found = selection
        self._may_sum = MAX_SUMMED

    def run(self) -> None:
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with opened_folder(self._root_fd, folder) as here:
                    folders += self._folder(folder, here)
            except FileNotFoundError:  # gone since the folder above was listed
                self._found.folders.discard(folder)
            except OSError as exc:
                self._found.unreadable.append((f"{folder or '.'}/", exc.strerror or str(exc)))

    def _folder(self, folder: str, here: int) -> list[str]:
        """Take in one folder; return the paths of those in it to go on with."""
        with os.scandir(here) as listing:
            entries = list(listing)
        if folder and any(entry.name in VIRTUAL_ENVIRONMENT_MARKS for entry in entries):
            self._leave_out_folder(folder, "virtual environment", here)
            return []
        self._found.folders.add(folder)
        files: list[tuple[str, str, os.stat_result]] = []
        below: list[str] = []
        prefix = folder + "/" if folder else ""
        unconditional = not self._patterns
        for entry in entries:
            name = entry.name
            path = prefix + name
            try:
                if unconditional and name[0] != "." and entry.is_file(follow_symlinks=False) and len(path) < SHORT_PATH:
                    if name not in NEVER_UPLOADED:  # nearly every file: no questions left
                        files.append((name, path, entry.stat(follow_symlinks=False)))
                        continue
                if entry.is_dir(follow_symlinks=False):
                    if self._keeps_folder(name, path, here):
                        below.append(path)
                elif self._keeps_file(entry, path, here):
                    files.append((name, path, entry.stat(follow_symlinks=False)))
            except FileNotFoundError:  # gone since it was listed
                continue
            except OSError as exc:
                self._found.unreadable.append((path, exc.strerror or str(exc)))
        if files:
            self._take_files(folder, files)
        return below

    def _keeps_folder(self, name: str, path: str, here: int) -> bool:
        why = self._why_not(name, path, is_dir=True)
        if why is None:
            return True
        descriptor = os.open(name, OPEN_FOLDER, dir_fd=here)
        try:
            self._leave_out_folder(path, why, descriptor)
        finally:
            os.close(descriptor)
        return False

    def _keeps_file(self, entry: os.DirEntry[str], path: str, here: int) -> bool:
        why = self._why_not(entry.name, path, is_dir=False)
        if why is not None:
            size = entry.stat(follow_symlinks=False).st_size
            self._found.left_out[path] = LeftOut(display(path), size, 1, why)
            return False
        if entry.is_symlink():
            self._found.links[path] = os.readlink(entry.name, dir_fd=here)
            return False
        if not entry.is_file(follow_symlinks=False):
            kind = _kind(entry.stat(follow_symlinks=False).st_mode)
            self._found.left_out[path] = LeftOut(display(path), 0, 1, kind)
            return False
        if len(path) > SHORT_PATH and len(encode(path)) > MAX_PATH_BYTES:
            raise OSError(0, f"its path is longer than {MAX_PATH_BYTES} bytes")
        return True

    def _why_not(self, name: str, path: str, *, is_dir: bool) -> str | None:
        why = never_uploaded(name, is_dir=is_dir)
        if why is None and self._patterns:
            pattern = self._patterns.decide(encode(path), is_dir=is_dir)
            why = f"exclude: {pattern}" if pattern is not None else None
        return why

    def _take_files(self, folder: str, files: list[tuple[str, str, os.stat_result]]) -> None:
        found = self._found
        found.files[folder] = files
        found.file_count += len(files)
        if found.file_count > MAX_FILES:
            raise UploadTooLarge(f"more than {MAX_FILES} files to upload", files=found.file_count, limit=MAX_FILES)
        in_secret_folder = not SECRET_FOLDERS.isdisjoint(folder.split("/"))
        found.secrets += [path for name, path, _ in files if in_secret_folder or secret_name(name, folder)]

    def _leave_out_folder(self, path: str, why: str, descriptor: int) -> None:
        """Note a folder with what it holds, counted without opening a file and not for ever: it is for the report."""
        size = count = 0
        open_folders = [os.dup(descriptor)]
        complete = True
        while open_folders:
            here = open_folders.pop()
            try:
                with os.scandir(here) as listing:
                    for entry in listing:
                        if self._may_sum <= 0:
                            complete = False
                            break
                        self._may_sum -= 1
                        if entry.is_dir(follow_symlinks=False):
                            if len(open_folders) < MAX_OPEN_FOLDERS:
                                open_folders.append(os.open(entry.name, OPEN_FOLDER, dir_fd=here))
                            else:
                                complete = False
                        else:
                            count += 1
                            size += entry.stat(follow_symlinks=False).st_size
            except OSError:  # unreadable, or gone meanwhile: it stays here anyway
                complete = False
            finally:
                os.close(here)
        self._found.left_out[path] = LeftOut(display(path) + "/", size, count, why, complete)


def _kind(mode: int) -> str:
    if stat.S_ISSOCK(mode):
        return "socket"
    return "named pipe" if stat.S_ISFIFO(mode) else "device"


# links ----------------------------------------------------------------------------------------------------------------


class Target(Enum):
    """Where a path leads when links on the way are followed inside the selection."""

    KEPT = "kept"
    LEFT_OUT = "its target is left out"
    MISSING = "its target does not exist"
    OUTSIDE = "it leaves the directory"
    ABSOLUTE = "its target is absolute"


def resolve(selection: Selection, folder: str, target: str) -> tuple[Target, str]:
    """Follow `target` from `folder` step by step; the second value is the path where it ended.

    Counting `..` is not enough: in `x/..` the step up depends on where `x` itself points. Nor is asking the system: a
    link through `../this-directory/file` works here and nowhere else.
    """
    if target.startswith("/"):
        return Target.ABSOLUTE, target
    here = folder.split("/") if folder else []
    ahead = target.split("/")[::-1]
    hops = 0
    while ahead:
        name = ahead.pop()
        if name in ("", "."):
            continue
        if name == "..":
            if not here:
                return Target.OUTSIDE, target
            here.pop()
            continue
        here.append(name)
        path = "/".join(here)
        if path in selection.links:
            hops += 1
            onward = selection.links[path]
            if onward.startswith("/"):
                return Target.ABSOLUTE, onward
            if hops > MAX_LINK_HOPS:
                return Target.MISSING, path
            here.pop()
            ahead += onward.split("/")[::-1]
        elif path in selection.left_out:
            return Target.LEFT_OUT, path
        elif path not in selection.folders:
            is_last = not any(part not in ("", ".") for part in ahead)
            return (Target.KEPT if is_last and path in selection.file_paths else Target.MISSING), path
    return Target.KEPT, "/".join(here)


def _settle_links(selection: Selection) -> None:
    """Keep the links that will work on the machine; note those that leave the directory or lead nowhere."""
    lost: dict[str, Target] = {}
    for path, target in selection.links.items():
        end, _ = resolve(selection, parent(path), target)
        if end in (Target.OUTSIDE, Target.ABSOLUTE):
            selection.outside.append((path, target))
        elif end is not Target.KEPT:
            lost[path] = end
    for path, end in lost.items():
        del selection.links[path]
        selection.left_out[path] = LeftOut(display(path), 0, 1, f"link: {end.value}")
