"""The durable home of a job's outputs: what was pulled and verified is pushed there, and read back when asked.

`jobs/<id>/artifacts.json` says what is where. Only a read-back makes an object count as collected, and only for a day:
the record says what was seen in the store, not what somebody did there since.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import Clock, parse_timestamp, timestamp
from gpu_skills.errors import ArtifactChanged, ArtifactMissing, GpuError, NotCollected, UnsafeKey, one_line
from gpu_skills.jobs.records import JobFolder, is_collected
from gpu_skills.state.project import Project

if TYPE_CHECKING:
    from gpu_skills.artifacts.base import Store

FRESH = timedelta(hours=24)
CLOCK_SKEW = timedelta(minutes=2)  # a read-back may be recorded by another host of the same project
AT_ONCE = 8
NAMED = 5  # files, in a message
LEFT_OUT_KEPT = 200
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Pushed:
    """kept: files that were there already, by their hash. left_out: [{path, why}]."""

    uri: str
    files: int
    kept: int
    bytes_sent: int
    left_out: list[dict[str, str]]


@dataclass(frozen=True)
class _Output:
    path: str  # as the manifest shows it
    place: Path
    size: int
    sha256: str


def require_home(project: Project, uri: str) -> None:
    """That a store can be written to as we need it: asked before a job starts, not when it has ended. Raises our errors
    for what is wrong with it."""
    from gpu_skills.artifacts.base import open_store

    store, prefix = open_store(uri, base=project.root)
    store.probe(prefix)


def wanted_home(project: Project, job: str) -> str | None:
    """Where the job's own description wants its outputs to go."""
    spec = (JobFolder(project, job).read("job") or {}).get("spec") or {}
    uri = spec.get("outputs_uri")
    return uri if isinstance(uri, str) else None


def push(project: Project, clock: Clock, job: str, uri: str, *, progress: Progress | None = None) -> Pushed:
    """Bring everything that was pulled of a job to a store, each file verified on its way. May be repeated and goes on.

    Raises NotCollected before all of it is here, and ArtifactChanged, when the others are there, for files that are not
    what they were when they were pulled.
    """
    from gpu_skills.artifacts.base import join, open_store

    folder = JobFolder(project, job)
    with folder.collecting():
        if not is_collected(project, job):
            raise NotCollected(jobs=job, next_step=f"gpu job pull {job}", outputs={})
        outputs, left_out = _outputs(folder)
        store, prefix = open_store(uri, base=project.root, notes=folder.path / "uploads.json")
        home = join(prefix, home_name(folder))
        before = recorded(folder, store.uri_of(home))
        if any(before.get(o.path, {}).get("sha256") != o.sha256 for o in outputs):
            store.probe(prefix)
        tally = _Tally(sum(o.size for o in outputs), progress)
        there: dict[str, dict[str, Any]] = {}
        try:
            changed = _put_all(store, home, outputs, before, there, tally)
        finally:
            lines = [there[o.path] for o in outputs if o.path in there]
            record(folder, clock, store.uri_of(home), lines, left_out, before)
    if changed:
        raise ArtifactChanged(
            what=f"{', '.join(changed[:NAMED])} of {job}",
            reason="the files here are not what was pulled",
            next_step=f"gpu job pull {job} --force, then: gpu job artifacts {job} --to {uri}",
        )
    return Pushed(store.uri_of(home), len(there), tally.kept, tally.sent_bytes, left_out)


def read_back(project: Project, clock: Clock, job: str, *, progress: Progress | None = None) -> int:
    """Read every object of the job's home whole, compare size and hash, record when; how many were right.

    Raises ArtifactChanged when one is not what was pushed, after all were read.
    """
    from gpu_skills.artifacts.base import join, open_store

    folder = JobFolder(project, job)
    record = folder.read("artifacts")
    if record is None:
        raise ArtifactMissing(f"no output of {job} was pushed anywhere", next_step=f"gpu job artifacts {job} --to URI")
    store, prefix = open_store(record["uri"], base=project.root)
    total, done = sum(f["size"] for f in record["files"]), 0
    wrong: list[str] = []
    for file in record["files"]:
        problem = _problem(store, join(prefix, file["path"]), file)
        file["verified_at"] = None if problem else timestamp(clock.now())
        if problem:
            wrong.append(f"{file['path']} ({problem})")
        done += file["size"]
        if progress is not None:
            progress(done, total)
    with folder.collecting():
        _merge_read_back(folder, record)
    if wrong:
        raise ArtifactChanged(
            what=record["uri"],
            reason=f"{len(wrong)} of {len(record['files'])} objects are wrong: {'; '.join(wrong[:NAMED])}",
            next_step=f"gpu job artifacts {job} --to URI, which replaces them",
            wrong=len(wrong),
        )
    return len(record["files"])


def is_kept(project: Project, job: str, now: datetime, manifest: Mapping[str, Any] | None = None) -> bool:
    """Whether all that the job left, by its final manifest, was seen in a durable home within the last day."""
    folder = JobFolder(project, job)
    manifest = manifest or folder.read("manifest")
    record = folder.read("artifacts")
    if manifest is None or record is None or not manifest.get("final") or not manifest["files"]:
        return False
    seen = {f["path"]: (f["size"], f["sha256"]) for f in record["files"] if _is_fresh(f.get("verified_at"), now)}
    return all(f.get("sha256") and seen.get(f["path"]) == (f["bytes"], f["sha256"]) for f in manifest["files"])


def addresses(folder: JobFolder) -> dict[str, tuple[str, str]]:
    """(hash, URI) of each output that is in a durable home, by its path."""
    record = folder.read("artifacts")
    return {f["path"]: (f["sha256"], f["uri"]) for f in record["files"]} if record else {}


def home_name(folder: JobFolder) -> str:
    """Not the id alone: each clone of a project counts its jobs from one, and they may share a bucket."""
    nonce = folder.submission().get("nonce")
    return f"{folder.job}-{nonce[:8]}" if isinstance(nonce, str) and nonce.isalnum() else folder.job


def record(
    folder: JobFolder,
    clock: Clock,
    uri: str,
    lines: list[dict[str, Any]],
    left_out: list[dict[str, str]],
    before: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write down what is in a home now. before: what was; a read-back of the same content still stands."""
    for line in lines:
        known = before.get(line["path"], {})
        line["verified_at"] = known.get("verified_at") if known.get("sha256") == line["sha256"] else None
    at = timestamp(clock.now())
    folder.write("artifacts", {"uri": uri, "at": at, "files": lines, "left_out": left_out[:LEFT_OUT_KEPT]})


def recorded(folder: JobFolder, uri: str) -> dict[str, dict[str, Any]]:
    record = folder.read("artifacts")
    return {f["path"]: f for f in record["files"]} if record and record["uri"] == uri else {}


def _outputs(folder: JobFolder) -> tuple[list[_Output], list[dict[str, str]]]:
    """What is to be pushed, and what cannot be, with its reason."""
    collected, manifest = folder.read("collected"), folder.read("manifest")
    assert collected is not None  # is_collected
    destination = Path(collected["destination"])
    names = _names_there(destination)
    outputs: dict[str, _Output] = {}
    left_out: list[dict[str, str]] = []
    for file in manifest["files"] if manifest else ():
        path, digest = file["path"], file.get("sha256")
        if digest is None:
            left_out.append({"path": path, "why": "a link"})
        elif path in outputs:
            left_out.append({"path": path, "why": "another file's name is written the same"})
        else:
            place = destination / names.get(path, path)
            outputs[path] = _Output(path, place, file["bytes"], digest)
    return list(outputs.values()), left_out


def _names_there(destination: Path) -> dict[str, str]:
    """Names that records show in another way than they are (control characters, no UTF-8), as they are on disk."""
    odd: dict[str, str] = {}
    root = os.fsencode(destination)
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), root)
            shown = one_line(path.decode("utf-8", "replace"), limit=1 << 20)
            if os.fsencode(shown) != path:
                odd[shown] = os.fsdecode(path)
    return odd


class _Tally:
    """How much is in the store; told from several threads."""

    def __init__(self, total: int, progress: Progress | None):
        self._total, self._progress = total, progress
        self._lock = threading.Lock()
        self._done = self.sent_bytes = self.kept = 0

    def sent(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)

    def finished(self, size: int, *, was_there: bool) -> None:
        with self._lock:
            self.kept += was_there
            self.sent_bytes += 0 if was_there else size


def _put_all(
    store: Store,
    home: str,
    outputs: list[_Output],
    before: dict[str, dict[str, Any]],
    there: dict[str, dict[str, Any]],
    tally: _Tally,
) -> list[str]:
    """Put each output and note it in `there`; the names of those that changed here. The first other error ends it."""
    from gpu_skills.artifacts.base import join

    changed: list[str] = []
    failed: list[GpuError] = []

    def put(output: _Output) -> None:
        if failed:
            return
        try:
            key = join(home, output.path)
            was_there = _is_there(store, key, output)
            if was_there:
                tally.sent(output.size)
            else:
                _require_plain(output)
                store.put_file(output.place, key, sha256=output.sha256, sent=tally.sent)
            tally.finished(output.size, was_there=was_there)
        except (ArtifactChanged, UnsafeKey):
            changed.append(output.path)
            return
        except GpuError as exc:
            failed.append(exc)
            return
        line = {"path": output.path, "size": output.size, "sha256": output.sha256, "uri": store.uri_of(key)}
        there[output.path] = line
        if not was_there:  # it is another object now than the one that was read back
            before.pop(output.path, None)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in list(map(lambda o: pool.submit(put, o), outputs)):
            done.result()
    if failed:
        raise failed[0]
    return sorted(changed)


def _is_there(store: Store, key: str, output: _Output) -> bool:
    found = store.head(key)
    return found is not None and found.bytes == output.size and found.sha256 == output.sha256


def _require_plain(output: _Output) -> None:
    """A regular file here, not a link that somebody put in its place."""
    try:
        is_plain = stat.S_ISREG(os.lstat(output.place).st_mode)
    except OSError:
        is_plain = False
    if not is_plain:
        raise ArtifactChanged(what=output.path, reason="it is not here any more")


def _problem(store: Store, key: str, file: Mapping[str, Any]) -> str | None:
    try:
        found = store.read_back(key)
    except ArtifactMissing:
        return "missing"
    except ArtifactChanged as exc:
        return exc.details.get("reason", "changed")
    if (found.bytes, found.sha256) != (file["size"], file["sha256"]):
        return f"{found.bytes} bytes, SHA-256 {found.sha256}"
    return None


def _merge_read_back(folder: JobFolder, read: dict[str, Any]) -> None:
    """Write down what was seen, unless the home changed meanwhile: a push may have gone on."""
    now = folder.read("artifacts")
    if now is None or now["uri"] != read["uri"]:
        return
    seen = {(f["path"], f["sha256"]): f["verified_at"] for f in read["files"]}
    for file in now["files"]:
        file["verified_at"] = seen.get((file["path"], file["sha256"]), file.get("verified_at"))
    folder.write("artifacts", now)


def _is_fresh(at: Any, now: datetime) -> bool:
    if not isinstance(at, str):
        return False
    try:
        age = now - parse_timestamp(at)
    except (ValueError, OverflowError):
        return False
    return -CLOCK_SKEW <= age < FRESH


def files_listed(folder: JobFolder) -> Iterator[dict[str, Any]]:
    """Every output of the job with where it is: here, in its durable home, or nowhere that is on record."""
    collected, manifest = folder.read("collected"), folder.read("manifest")
    kept = {f["path"]: f for f in (folder.read("artifacts") or {"files": []})["files"]}
    destination = Path(collected["destination"]) if collected else None
    names = _names_there(destination) if destination is not None else {}
    for file in manifest["files"] if manifest else ():
        place = None if destination is None else destination / names.get(file["path"], file["path"])
        home = kept.get(file["path"])
        is_home = home is not None and home["sha256"] == file.get("sha256")
        yield {
            "path": file["path"],
            "bytes": file["bytes"],
            "sha256": file.get("sha256"),
            "local": one_line(str(place)) if place is not None and _has_size(place, file["bytes"]) else None,
            "uri": home["uri"] if home is not None and is_home else None,
            "verified_at": home.get("verified_at") if home is not None and is_home else None,
        }


def _has_size(place: Path, size: int) -> bool:
    try:
        return place.stat().st_size == size
    except OSError:
        return False
