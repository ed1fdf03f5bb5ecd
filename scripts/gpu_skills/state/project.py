"""Where a project keeps its records, and how that place is made and found."""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gpu_skills import resources
from gpu_skills.errors import NoProject, PolicyMissing, StateError, StateNewer, UsageError
from gpu_skills.state import files

SCHEMA_VERSION = 1
STATE_NAME = "gpu"  # `.pi/gpu`
SANDBOX_NAME = "gpu-sandbox"  # records made with `gpu --sandbox`, and the sandbox itself
ARRAYS = ("providers", "machines", "deployments", "models", "workflows")
# Not with what reads like the rest of a label in it: such a label would be taken for one of a project of a shorter id.
PROJECT_ID = re.compile(r"(?!.*-[pjc][0-9a-f]{16}-(?:[0-9]{10}|never)(?:-|\Z))[a-z0-9][a-z0-9-]{0,63}")
ALLOWED_ID = "1 to 64 lower-case letters, digits and hyphens, and in them nothing that reads like intent and deadline"


@dataclass(frozen=True)
class Project:
    """root: the user's directory. state: its `.pi/gpu`. project_id: part of every label we put on a machine."""

    root: Path
    state: Path
    project_id: str
    schema_version: int = SCHEMA_VERSION

    def path(self, name: str) -> Path:
        """A file of the state directory: `project.path("machines.json")`."""
        return self.state / name

    @property
    def is_read_only(self) -> bool:
        """A newer version has written here: what it means by a record is unknown to us."""
        return self.schema_version > SCHEMA_VERSION

    def require_writable(self) -> None:
        """StateNewer (exit 3) when only reading is safe. Everything that writes records asks this first."""
        if self.is_read_only:
            raise StateNewer(file="project.json", found=self.schema_version, known=SCHEMA_VERSION)


def find(start: Path, *, name: str = STATE_NAME) -> Project:
    """The project of a directory: `.pi/<name>` there or above; a linked git worktree uses the main worktree's.

    Records of an older version are brought up to ours first, with a backup.

    A state directory that belongs to another user is passed over, so that nobody can plant one in /tmp.
    """
    begin = in_main_worktree(start.absolute())
    for directory in (begin, *begin.parents):
        state = directory / ".pi" / name
        if (state / "project.json").exists() and _is_ours(state):
            return _migrated(load(directory, name=name))
    raise NoProject(directory=str(start))


def load(root: Path, *, name: str = STATE_NAME) -> Project:
    """Read `project.json` below a root that is known. Fields of newer minor versions are passed over."""
    state = _state_directory(root, name)
    path = state / "project.json"
    content = files.read_json(path)
    if not isinstance(content, dict):
        raise StateError(file=path.name, at=":1", problem="found no object, allowed is an object")
    project_id, version = content.get("project_id"), content.get("schema_version", 1)
    if not isinstance(project_id, str) or not PROJECT_ID.fullmatch(project_id):
        raise StateError(
            file=path.name,
            at=" /project_id",
            problem=f"found {project_id!r}, allowed are {ALLOWED_ID}",
            next_step=f"choose another project_id in {path}, then: gpu doctor",
        )
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        problem = f"found {version!r}, allowed is a whole number from 1"
        raise StateError(file=path.name, at=" /schema_version", problem=problem)
    return Project(root, state, project_id, version)


def init(root: Path, *, project_id: str | None = None, name: str = STATE_NAME) -> Project:
    """Make the state directory of a project, or complete one; what is there is kept.

    Another `project_id` than the one on disk is a UsageError: machines carry the old one in their labels.
    """
    if project_id is not None and not PROJECT_ID.fullmatch(project_id):
        raise UsageError(
            message=f"found project id {project_id!r}, allowed are {ALLOWED_ID}",
            next_step="gpu init --project-id ID",
        )
    root = in_main_worktree(root.absolute())
    state = _state_directory(root, name)
    files.make_directory(state)
    files.make_directory(state / "jobs")
    with files.lock(state / "project.json"):
        if not (state / "project.json").exists():
            content = {"project_id": project_id or new_project_id(), "schema_version": SCHEMA_VERSION}
            files.commit(state / "project.json", files.dumps_pretty(content), expected=None)
    project = _migrated(load(root, name=name))
    if project_id is not None and project.project_id != project_id:
        raise UsageError(
            message=f"this project already has the id {project.project_id}; its machines carry it in their labels",
            next_step="gpu init",
        )
    project.require_writable()
    for array in ARRAYS:
        _create(state / f"{array}.json", b"[]\n")
    _create(state / "policy.json", _default_policy())
    ignore(root)
    return project


def _state_directory(root: Path, name: str) -> Path:
    """Where the sandbox writes is never another place: behind a link might be the records of real money."""
    state = root / ".pi" / name
    if name == SANDBOX_NAME and state.is_symlink():
        raise UsageError(f"{state} is a symbolic link, allowed is a directory", next_step=f"rm {state}")
    return state


def _migrated(project: Project) -> Project:
    if project.schema_version >= SCHEMA_VERSION:
        return project
    from gpu_skills.state import migrate

    return migrate.migrate(project, target=SCHEMA_VERSION)


def new_project_id() -> str:
    """Fifty random bits: short enough for a label, and no two projects of one account meet."""
    return "p-" + base64.b32encode(os.urandom(7)).decode().lower()[:10]


def ignore(root: Path) -> None:
    """Add `.pi/` to .gitignore; its bytes, newline style and a missing last newline are respected."""
    path = Path(os.path.realpath(root / ".gitignore"))
    raw = files.read_bytes(path)
    lines = (raw or b"").replace(b"\r\n", b"\n").split(b"\n")
    if any(line.strip() in (b".pi", b".pi/", b"/.pi", b"/.pi/") for line in lines):
        return
    newline = b"\r\n" if raw and b"\r\n" in raw else b"\n"
    content = raw or b""
    if content and not content.endswith(b"\n"):
        content += newline
    mode = path.stat().st_mode & 0o777 if raw is not None else 0o644
    files.commit(path, content + b".pi/" + newline, expected=raw, mode=mode)


def in_main_worktree(directory: Path) -> Path:
    """The same place in the main worktree when `directory` is in a linked one, else itself. Git is not run."""
    for top in (directory, *directory.parents):
        marker = top / ".git"
        if marker.is_dir():
            return directory
        if marker.is_file():
            main = _main_worktree(marker)
            return main / directory.relative_to(top) if main else directory
    return directory


def _main_worktree(marker: Path) -> Path | None:
    """Follow a `.git` file: `gitdir: …/.git/worktrees/x`, whose `commondir` leads to the main `.git`.

    A submodule has no `commondir`, a bare repository no worktree beside it: None for both.
    """
    try:
        text = _small_text(marker)
        if not text.startswith("gitdir:"):
            return None
        git_directory = Path(os.path.normpath(marker.parent / text.removeprefix("gitdir:").strip()))
        common = Path(os.path.normpath(git_directory / _small_text(git_directory / "commondir").strip()))
    except (OSError, ValueError):
        return None
    return common.parent if common.name == ".git" and common.is_dir() else None


def _small_text(path: Path) -> str:
    with open(path, "rb") as stream:
        return stream.read(8192).decode("utf-8", "surrogateescape")


def _is_ours(state: Path) -> bool:
    return os.geteuid() in (0, state.stat().st_uid)


def _create(path: Path, content: bytes) -> None:
    with files.lock(path):
        if not path.exists():
            files.commit(path, content, expected=None)


def _default_policy() -> bytes:
    path = resources.template("policy.json")
    try:
        return path.read_bytes()
    except OSError as exc:
        raise PolicyMissing(
            file=str(path), reason=exc.strerror or str(exc), next_step="install gpu-skills again"
        ) from exc
