"""Turn a directory into what a job needs of it: a Tree with every file hashed, and an account of what stays here.

Everything that speaks against an upload is found before anything leaves this computer, and told at once per kind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from gpu_skills.errors import (
    ChangedMeanwhile,
    InputMissing,
    InputUnreadable,
    SecretShaped,
    UnsafeLink,
    UploadTooLarge,
    UsageError,
)
from gpu_skills.jobs.exclude import Patterns
from gpu_skills.jobs.hashcache import HashCache
from gpu_skills.jobs.hashing import Hashed, hash_files
from gpu_skills.jobs.select import LeftOut, Selection, Target, display, encode, parent, resolve, select
from gpu_skills.remote.tree import Entry, Tree
from gpu_skills.units import format_bytes

__all__ = ["LIMIT_BYTES", "LeftOut", "Packed", "cache_path", "pack"]

LIMIT_BYTES = 2_000_000_000
MANY_FILES = 10_000
_MAX_LISTED = 100


@dataclass(frozen=True)
class Packed:
    """left_out: sorted, largest first. warnings: lines for people; nothing was refused for them."""

    tree: Tree
    left_out: list[LeftOut]
    warnings: list[str]
    total_bytes: int


def pack(
    directory: Path,
    *,
    exclude: Sequence[str] = (),
    require_inputs: Sequence[str] = (),
    allow_secret_files: Sequence[str] = (),
    limit_bytes: int = LIMIT_BYTES,
    cache_path: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> Packed:
    """Select and hash a directory.

    exclude: gitignore patterns. require_inputs, allow_secret_files: paths below the directory. progress: bytes done,
    bytes in all. Refuses with UnsafeLink, InputMissing, UploadTooLarge, InputUnreadable, SecretShaped or
    ChangedMeanwhile; each names all that it is about.
    """
    patterns = Patterns(exclude)
    root_fd = _open(directory)
    try:
        cache = HashCache(cache_path, os.fstat(root_fd), now_ns())
        selection = select(root_fd, patterns)
        _refuse_links(selection)
        _refuse_missing(selection, directory, require_inputs)
        _refuse_size(selection, limit_bytes)
        hashed = hash_files(root_fd, selection.files, cache, progress)
    finally:
        os.close(root_fd)
    _refuse_unreadable([*selection.unreadable, *hashed.unreadable])
    _refuse_secrets(selection, hashed, allow_secret_files)
    if hashed.unsettled:
        raise ChangedMeanwhile(
            file=", ".join(display(p) for p in hashed.unsettled[:_MAX_LISTED]),
            next_step="wait until nothing writes there, or exclude it in gpujob.yaml",
        )
    cache.save()
    tree = Tree(directory, [*hashed.entries, *_links_and_folders(selection)])
    return Packed(
        tree=tree,
        left_out=sorted(selection.left_out.values(), key=lambda o: (-o.bytes, o.path)),
        warnings=_warnings(hashed, patterns),
        total_bytes=sum(entry.size for entry in hashed.entries),
    )


def cache_path(state: Path, directory: Path) -> Path:
    """Where the hashes of a directory are remembered, below a project's state directory."""
    return state / "hashes" / f"{sha256(os.fsencode(directory.absolute())).hexdigest()[:20]}.cache"


def _open(directory: Path) -> int:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(f"directory {directory}: {reason}", next_step="gpu job run --dir DIR") from exc


def _links_and_folders(selection: Selection) -> list[Entry]:
    links = [Entry(encode(path), link=encode(target)) for path, target in selection.links.items()]
    return links + [Entry(encode(path), mode=0o755, is_dir=True) for path in selection.empty_folders()]


# refusals -------------------------------------------------------------------------------------------------------------


def _refuse_links(selection: Selection) -> None:
    if selection.outside:
        links = [{"path": display(path), "target": display(target)} for path, target in sorted(selection.outside)]
        shown = ", ".join(f"{link['path']} -> {link['target']}" for link in links[:_MAX_LISTED])
        raise UnsafeLink(paths=shown, links=links[:_MAX_LISTED], count=len(links))


def _refuse_missing(selection: Selection, directory: Path, required: Sequence[str]) -> None:
    missing = []
    for given in required:
        why = _why_missing(selection, directory, given)
        if why is not None:
            missing.append({"path": given, "why": why})
    if missing:
        raise InputMissing(paths=", ".join(f"{m['path']} ({m['why']})" for m in missing), inputs=missing)


def _why_missing(selection: Selection, directory: Path, given: str) -> str | None:
    path = given
    if os.path.isabs(given):
        path = os.path.relpath(given, directory.absolute())
    end, at = resolve(selection, "", path)
    if end is Target.KEPT:
        return _why_emptied(selection, at) if at in selection.folders else None
    if end is Target.LEFT_OUT:
        return f"left out, {selection.left_out[at].why}"
    if end is Target.MISSING:
        return "is not there"
    return "is outside of the directory"


def _why_emptied(selection: Selection, folder: str) -> str | None:
    """A folder that is kept while everything in it is left out is no input."""
    below = folder + "/" if folder else ""
    kept = (*selection.files, *(parent(link) for link in selection.links))
    if any(path == folder or path.startswith(below) for path in kept):
        return None
    for path, left_out in selection.left_out.items():
        if path.startswith(below):
            return f"all of it is left out, {left_out.why}"
    return None


def _refuse_size(selection: Selection, limit_bytes: int) -> None:
    total = sum(status.st_size for _, status in selection.all_files())
    if total <= limit_bytes:
        return
    sizes: dict[str, int] = {}
    for path, status in selection.all_files():
        top, slash, _ = path.partition("/")
        sizes[top + slash] = sizes.get(top + slash, 0) + status.st_size
    largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:5]
    raise UploadTooLarge(
        bytes=total,
        limit=limit_bytes,
        largest=", ".join(f"{display(path)} ({format_bytes(size)})" for path, size in largest),
        entries=[{"path": display(path), "bytes": size} for path, size in largest],
    )


def _refuse_unreadable(unreadable: list[tuple[str, str]]) -> None:
    if unreadable:
        files = [{"path": display(path), "reason": reason} for path, reason in sorted(unreadable)]
        shown = ", ".join(f"{f['path']} ({f['reason']})" for f in files[:_MAX_LISTED])
        raise InputUnreadable(paths=shown, files=files[:_MAX_LISTED], count=len(files))


def _refuse_secrets(selection: Selection, hashed: Hashed, allowed: Sequence[str]) -> None:
    allowed_paths = {os.path.normpath(path) for path in allowed}
    found = sorted({*selection.secrets, *hashed.secrets} - allowed_paths)
    if found:
        paths = [display(path) for path in found[:_MAX_LISTED]]
        raise SecretShaped(paths=", ".join(paths), files=paths, count=len(found))


def _warnings(hashed: Hashed, patterns: Patterns) -> list[str]:
    warnings = []
    if len(hashed.entries) > MANY_FILES:
        warnings.append(
            f"{len(hashed.entries)} files to upload: many small files are slow, exclude what the job does not read"
        )
    warnings += [f"exclude {pattern!r} matches nothing" for pattern in patterns.unused]
    warnings += [f"{display(path)} vanished while it was packed" for path in hashed.vanished[:_MAX_LISTED]]
    return warnings
