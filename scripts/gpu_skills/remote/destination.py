"""The folder that outputs come home to. Nothing outside it can be written, whatever it contains.

Every component of a path is opened from the one above it without following links, so a link that stands in the way (put
there by a job, a user or an attacker, before or during a pull) is an error and never a detour.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from gpu_skills.errors import DiskFull, NotWritable, one_line

BLOCK_BYTES = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FEW_FILES = 64
_FIRST_TREE = "tree"


class Destination:
    """An existing folder, held open, and a private staging folder beside it on the same file system.

    While the folder is empty everything is put together in the staging folder, and `publish` makes it the destination
    in one step. Later a folder that is new there (a checkpoint) is put together beside it too, and appears in one step.
    """

    def __init__(self, path: Path):
        self.path = path
        self.staging = path.parent / f".{path.name}.incoming"
        self._staging = -1
        self._new_folders: dict[bytes, bytes] = {}  # path of a folder that is to appear → its name in staging
        self._is_first = False
        self.is_empty = False
        with writing(path):
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            # Not through a link, and not over a mounted disk: neither can be replaced by a rename.
            if not os.listdir(self._root) and not path.is_symlink() and not os.path.ismount(path):
                os.close(self._root)
                self._root = self._open_first_tree()
                self._is_first = True
        self._folder: tuple[bytes, int] = (b"", self._root)

    def __enter__(self) -> Destination:
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave_folder()
        os.close(self._root)
        if self._staging >= 0:
            os.close(self._staging)

    def _open_first_tree(self) -> int:
        try:
            os.mkdir(_FIRST_TREE, 0o777, dir_fd=self.open_staging())
            self.is_empty = True
        except FileExistsError:
            pass  # an earlier pull was interrupted
        return os.open(_FIRST_TREE, _FOLDER, dir_fd=self._staging)

    # what is here ---------------------------------------------------------------------------------------------------

    def stat(self, path: bytes) -> os.stat_result | None:
        """lstat of an entry; None when it or a folder above it is missing or a link stands in its way."""
        try:
            name, folder = self._enter(path, make=False)
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None

    def hash(self, path: bytes) -> str | None:
        """SHA-256 of a regular file; None when it cannot be read."""
        try:
            name, folder = self._enter(path, make=False)
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return None
        try:
            return hash_descriptor(descriptor) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
        finally:
            os.close(descriptor)

    # bringing something in ------------------------------------------------------------------------------------------

    def make_folder(self, path: bytes) -> None:
        self._enter(path + b"/.", make=True)

    def place(self, staged: str, path: bytes) -> os.stat_result:
        """Move a verified file of the staging folder to its place. An older one there is replaced in one step."""
        try:
            name, folder = self._enter(path, make=True)
            os.rename(staged, name, src_dir_fd=self._staging, dst_dir_fd=folder)
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError as exc:
            raise writing_failed(self._shown(path), exc) from exc

    def write(self, path: bytes, mode: int, data: bytes) -> os.stat_result:
        """A file whose verified content is at hand."""
        if not self._is_first:
            self.write_staged("whole", mode, data)
            return self.place("whole", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            name, folder = self._enter(path, make=True)
            try:
                descriptor = os.open(name, flags, mode | 0o600, dir_fd=folder)
            except FileExistsError:  # left behind half-written by a pull that was killed
                os.unlink(name, dir_fd=folder)
                descriptor = os.open(name, flags, mode | 0o600, dir_fd=folder)
            try:
                write_all(descriptor, data)
                return os.fstat(descriptor)
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise writing_failed(self._shown(path), exc) from exc

    def copy(self, source: bytes, path: bytes, mode: int, expected: str) -> os.stat_result | None:
        """A second file with the content of one that was placed; None when that is not what it was any more."""
        name = f"copy-{secrets.token_hex(8)}"
        digest = sha256()
        try:
            file_name, folder = self._enter(source, make=False)
            here = os.open(file_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                there = self.open_staged(name, mode)
                try:
                    while data := os.read(here, BLOCK_BYTES):
                        digest.update(data)
                        write_all(there, data)
                finally:
                    os.close(there)
            finally:
                os.close(here)
        except OSError as exc:
            raise writing_failed(self._shown(path), exc) from exc
        if digest.hexdigest() != expected:
            self.discard(name)
            return None
        return self.place(name, path)

    # staging --------------------------------------------------------------------------------------------------------

    def open_staging(self) -> int:
        """A descriptor of the staging folder, which only we can write to. Made at the first call."""
        if self._staging < 0:
            with writing(self.staging):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.staging, 0o700)
                self._staging = os.open(self.staging, _FOLDER)
                found = os.fstat(self._staging)
                if found.st_uid != os.getuid():
                    raise NotWritable(path=str(self.staging), reason="it belongs to somebody else")
                os.fchmod(self._staging, 0o700)
        return self._staging

    def open_staged(self, name: str, mode: int, *, keep: bool = False) -> int:
        """A descriptor of a staged file, new or (`keep`) the one that is there. The umask cuts its mode."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if keep else os.O_EXCL)
        try:
            try:
                return os.open(name, flags, mode | 0o600, dir_fd=self.open_staging())
            except FileExistsError:
                self.discard(name)
                return os.open(name, flags, mode | 0o600, dir_fd=self.open_staging())
        except OSError as exc:
            raise writing_failed(self.staging / name, exc) from exc

    def write_staged(self, name: str, mode: int, data: bytes) -> None:
        descriptor = self.open_staged(name, mode)
        try:
            write_all(descriptor, data)
        except OSError as exc:
            raise writing_failed(self.staging / name, exc) from exc
        finally:
            os.close(descriptor)

    def set_mode(self, name: str, mode: int) -> None:
        """Give a staged file that another program made the mode it would have had from `open_staged`."""
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, (mode | 0o600) & ~umask, dir_fd=self.open_staging())

    def staged_bytes(self, name: str) -> int:
        """The size of a regular staged file, 0 when there is none."""
        try:
            found = os.stat(name, dir_fd=self.open_staging(), follow_symlinks=False)
        except FileNotFoundError:
            return 0
        if not stat.S_ISREG(found.st_mode):
            self.discard(name)
            return 0
        return found.st_size

    def discard(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.open_staging())

    def remove_staging(self) -> None:
        if self._staging >= 0:
            os.close(self._staging)
            self._staging = -1
        shutil.rmtree(self.staging, ignore_errors=True)

    def publish(self, *, sync: list[bytes]) -> None:
        """Make what was placed visible, and what `sync` names safe from a power failure: what comes next may be the
        end of the only other copy."""
        if sync:
            self._sync(sync)
        if not self._is_first:
            self._publish_new_folders(is_synced=bool(sync))
            return
        with writing(self.path):
            os.chmod(self._root, stat.S_IMODE(os.stat(self.path).st_mode))
            os.rename(_FIRST_TREE, self.path, src_dir_fd=self.open_staging())
            if sync:
                parent = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(parent)
                finally:
                    os.close(parent)

    def _publish_new_folders(self, *, is_synced: bool) -> None:
        appearing, self._new_folders = self._new_folders, {}
        self._leave_folder()
        for path, staged in appearing.items():
            try:
                name, folder = self._enter(path, make=False)
                os.rename(staged, name, src_dir_fd=self.open_staging(), dst_dir_fd=folder)
                if is_synced:
                    os.fsync(folder)
            except OSError as exc:
                raise writing_failed(self._shown(path), exc) from exc

    def _sync(self, placed: list[bytes]) -> None:
        with writing(self.path):
            if len(placed) > _FEW_FILES:
                if ctypes.CDLL(None, use_errno=True).syncfs(self._root) if os.uname().sysname == "Linux" else True:
                    os.sync()
                return
            for path in placed:
                name, folder = self._enter(path, make=False)
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                os.fsync(folder)

    # walking --------------------------------------------------------------------------------------------------------

    def _enter(self, path: bytes, make: bool) -> tuple[bytes, int]:
        """The name of `path` and a descriptor of its folder. The last one is kept: manifests list folder by folder."""
        wanted, _, name = path.rpartition(b"/")
        if wanted == self._folder[0]:
            return name, self._folder[1]
        self._leave_folder()
        descriptor = self._root
        names = wanted.split(b"/") if wanted else []
        try:
            for depth, step in enumerate(names):
                below = self._step(descriptor, step, make, b"/".join(names[: depth + 1]))
                if descriptor != self._root:
                    os.close(descriptor)
                descriptor = below
        except BaseException:
            if descriptor != self._root:
                os.close(descriptor)
            raise
        self._folder = (wanted, descriptor)
        return name, descriptor

    def _step(self, folder: int, name: bytes, make: bool, path: bytes) -> int:
        try:
            return os.open(name, _FOLDER, dir_fd=folder)
        except FileNotFoundError:
            if not self._is_first and not self._is_in_new_folder(path):
                return self._open_new_folder(path, make)
            if not make:
                raise
        except NotADirectoryError as exc:
            if not make:
                raise
            raise NotWritable(path=str(self._shown(path)), reason=_what_stands(folder, name)) from exc
        except OSError as exc:
            if make and exc.errno == errno.ELOOP:
                raise NotWritable(path=str(self._shown(path)), reason=_what_stands(folder, name)) from exc
            raise
        with writing(self._shown(path)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o777, dir_fd=folder)
            return os.open(name, _FOLDER, dir_fd=folder)

    def _is_in_new_folder(self, path: bytes) -> bool:
        return any(path.startswith(new + b"/") for new in self._new_folders)

    def _open_new_folder(self, path: bytes, make: bool) -> int:
        """A folder that is not in the destination yet, as it is put together in staging; an interrupted pull's too.

        FileNotFoundError when nothing of it is there and it is not to be made.
        """
        if not make and not self.staging.exists():
            raise FileNotFoundError(path)
        staged = b"new-" + sha256(path).hexdigest()[:32].encode()
        if make:
            with writing(self._shown(path)), contextlib.suppress(FileExistsError):
                os.mkdir(staged, 0o777, dir_fd=self.open_staging())
        descriptor = os.open(staged, _FOLDER, dir_fd=self.open_staging())
        self._new_folders[path] = staged
        return descriptor

    def _leave_folder(self) -> None:
        if self._folder[1] != self._root:
            os.close(self._folder[1])
        self._folder = (b"", self._root)

    def _shown(self, path: bytes) -> Path:
        return self.path / one_line(path.decode("utf-8", "replace"))


class Verified:
    """Which files here were found to have which content, remembered by size, times and inode.

    It may be lost at any time; all it saves is hashing again.
    """

    def __init__(self, cache_path: Path | None, *, trust: bool = True):
        self._path = cache_path
        self._known: dict[str, list] = {}
        if cache_path is not None and trust:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                loaded = json.loads(cache_path.read_bytes())
                if isinstance(loaded, dict) and isinstance(loaded.get("files"), dict):
                    self._known = loaded["files"]
        self._changed = False

    def digest(self, path: bytes, found: os.stat_result) -> str | None:
        known = self._known.get(path.decode("latin-1"))
        if isinstance(known, list) and known[:-1] == _identity(found) and isinstance(known[-1], str):
            return known[-1]
        return None

    def remember(self, path: bytes, found: os.stat_result, digest: str) -> None:
        self._known[path.decode("latin-1")] = [*_identity(found), digest]
        self._changed = True

    def save(self) -> None:
        from gpu_skills.state import files

        if self._path is not None and self._changed:
            files.commit(self._path, json.dumps({"files": self._known}).encode(), durable=False)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise writing_failed(path, exc) from exc


def writing_failed(path: Path, exc: OSError) -> DiskFull | NotWritable:
    """The system's refusal to write, in our words."""
    reason = exc.strerror or str(exc)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(path=one_line(str(path)), reason=reason)
    if exc.errno in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST):
        reason = "a folder is in the way"
    return NotWritable(path=one_line(str(path)), reason=reason)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    written = os.write(descriptor, data)
    if written < len(data):
        view = memoryview(data)[written:]
        while view:
            view = view[os.write(descriptor, view) :]


def hash_descriptor(descriptor: int) -> str:
    """SHA-256 from where the descriptor stands to the end."""
    digest = sha256()
    while data := os.read(descriptor, BLOCK_BYTES):
        digest.update(data)
    return digest.hexdigest()


def hash_path(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return hash_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _identity(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _what_stands(folder: int, name: bytes) -> str:
    try:
        is_link = stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return "something is in the way"
    return "it is a link, and nothing is written through a link" if is_link else "a file is in the way of a folder"
