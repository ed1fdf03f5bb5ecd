"""What of a directory stays here: names that are never uploaded, and the user's gitignore patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpu_skills.errors import ConfigError

NEVER_UPLOADED = frozenset(
    {".git", "__pycache__", "node_modules", ".gpu", ".pi", ".env", "gpu-outputs", ".venv", "venv"}
)
_VIRTUAL_ENVIRONMENTS = frozenset({".venv", "venv"})
# A folder that holds one of these is a virtual environment, whatever its name.
VIRTUAL_ENVIRONMENT_MARKS = frozenset({"pyvenv.cfg", "conda-meta"})


def never_uploaded(name: str, *, is_dir: bool) -> str | None:
    """Why a file or folder of this name is never uploaded, at any depth and whatever the patterns say."""
    if name in NEVER_UPLOADED:
        if name in _VIRTUAL_ENVIRONMENTS:
            return "virtual environment" if is_dir else None
        return "never uploaded"
    return "never uploaded" if name.startswith(".env.") else None


class Patterns:
    """gitignore patterns, with git's meaning: the last one that matches decides, `!` takes a match back.

    To be asked level by level from the top, as git does: what is inside an excluded folder is not asked about any more.
    `unused` are the patterns that never excluded or brought back anything.
    """

    def __init__(self, patterns: Sequence[str]):
        self._rules: list[tuple[str, re.Pattern[bytes], bool, bool]] = []
        self._used: set[str] = set()
        self._written = [p for p in patterns if p.strip() and not p.startswith("#")]
        if self._written:
            self._compile()

    def __bool__(self) -> bool:
        return bool(self._rules)

    @property
    def unused(self) -> list[str]:
        return [p for p in dict.fromkeys(self._written) if p not in self._used]

    def decide(self, path: bytes, *, is_dir: bool) -> str | None:
        """The pattern that excludes this path, None when it stays. The folders above it must have been kept."""
        subject = path + b"/" if is_dir else path
        for written, regex, excludes, has_mark in self._rules:
            if _matches_itself(regex, subject, is_dir, has_mark):
                self._used.add(written)
                return written if excludes else None
        return None

    def _compile(self) -> None:
        from pathspec.patterns.gitignore.base import GitIgnorePatternError
        from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

        for written in self._written:
            try:
                # As bytes: `?` is one byte for git too, and names need not be UTF-8.
                regex, excludes = GitIgnoreSpecPattern.pattern_to_regex(written.encode("utf-8", "surrogateescape"))
                compiled = re.compile(regex, re.DOTALL) if regex is not None else None
            except (GitIgnorePatternError, re.error) as exc:
                raise ConfigError(
                    file="gpujob.yaml",
                    problem=f"exclude {written!r} is not a gitignore pattern",
                    next_step="correct the pattern in gpujob.yaml or --exclude",
                ) from exc
            if compiled is not None:
                self._rules.insert(0, (written, compiled, bool(excludes), _MARK in compiled.groupindex))


_MARK = "ps_d"  # pathspec's name for the slash after which a path is only inside of what matched


def _matches_itself(regex: re.Pattern[bytes], subject: bytes, is_dir: bool, has_mark: bool) -> bool:
    """Whether the path itself matches, not only a folder above it.

    pathspec's expressions are made for whole paths asked at once, so `foo` also matches `foo/bar`. With `!` among the
    patterns that differs from git, which asks about each level by itself (`*`, `!*/`, `!*.py` is the common case).
    """
    match = regex.search(subject)
    if match is None:
        return False
    if regex.pattern == b".":  # `*` and `**`
        return True
    if not has_mark:  # ends in `/**`: everything below, not the folder
        return match.end() < len(subject)
    if regex.pattern == b"(?P<ps_d>/)":  # `*/`: every folder
        return is_dir
    mark = match.start(_MARK)
    return mark == len(subject) - 1 if mark >= 0 else match.end() == len(subject)
