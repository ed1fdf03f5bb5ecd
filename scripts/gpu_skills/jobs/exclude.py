"""What of a directory stays here: names that are never uploaded, and the user's gitignore patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpu_skills.errors import ConfigError

NEVER_UPLOADED = frozenset(
    {".git", "__pycache__", "node_modules", ".gpu", ".pi", ".env", "gpu-outputs", ".venv", "venv"}
)
_VIRTUAL_ENVIRONMENTS = frozenset({".venv", "venv"})
# What a person signs and hands in for a plan (`gpu approve`): it is about that plan, and part of no other one's inputs.
_SIGNING_FILE = re.compile(r"approval-[0-9a-f]{12}\.txt(\.sig)?")
# A folder that holds one of these is a virtual environment, whatever its name.
VIRTUAL_ENVIRONMENT_MARKS = frozenset({"pyvenv.cfg", "conda-meta"})


def never_uploaded(name: str, *, is_dir: bool) -> str | None:
    """Why a file or folder of this name is never uploaded, at any depth and whatever the patterns say."""
    if name in NEVER_UPLOADED:
        if name in _VIRTUAL_ENVIRONMENTS:
            return "virtual environment" if is_dir else None
        return "never uploaded"
    if name.startswith(".env.") or (not is_dir and _SIGNING_FILE.fullmatch(name)):
        return "never uploaded"
    return None


class Patterns:
    """gitignore patterns, with git's meaning: the last one that matches decides, `!` takes a match back.

    To be asked level by level from the top, as git does: what is inside an excluded folder is not asked about any more.
    `unused` are the patterns that never excluded or brought back anything.
    """

    def __init__(self, patterns: Sequence[str]):
        self._rules: list[_Rule] = []  # the last written first
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
        for rule in self._rules:
            if rule.matches(subject, is_dir):
                self._used.add(rule.written)
                return rule.written if rule.excludes else None
        return None

    def _compile(self) -> None:
        from pathspec.patterns.gitignore.base import GitIgnorePatternError
        from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

        for written in self._written:
            # To git `a/**/` is every folder below `a`; pathspec makes it `a` itself.
            folders_only = written.rstrip().endswith("/**/")
            pattern = written.rstrip()[:-1] if folders_only else written
            try:
                # As bytes: `?` is one byte for git too, and names need not be UTF-8.
                regex, excludes = GitIgnoreSpecPattern.pattern_to_regex(pattern.encode("utf-8", "surrogateescape"))
                rule = _Rule(written, regex, bool(excludes), folders_only) if regex is not None else None
            except (GitIgnorePatternError, re.error, UnicodeEncodeError) as exc:
                raise ConfigError(
                    file="gpujob.yaml",
                    problem=f"exclude {written!r} is not a gitignore pattern",
                    next_step="correct the pattern in gpujob.yaml or --exclude",
                ) from exc
            if rule is not None:
                self._rules.insert(0, rule)


_MARK = b"(?P<ps_d>/)"  # how pathspec writes the slash after which a path is only inside of what matched


class _Rule:
    """One pattern, asked about one level at a time.

    pathspec's expressions are made for whole paths asked at once, so `foo` also matches `foo/bar`. With `!` among the
    patterns that differs from git, which asks about each level by itself (`*`, `!*/`, `!*.py` is the common case).
    """

    def __init__(self, written: str, regex: bytes, excludes: bool, folders_only: bool):
        self.written = written
        self.excludes = excludes
        self._folders_only = folders_only or regex == _MARK  # `*/`
        self._search = None
        if regex not in (b".", _MARK):  # not one of the patterns for everything
            # With the mark the match must end where the path ends; without (`/**`) it is everything below.
            self._search = re.compile(regex + (rb"\Z" if _MARK in regex else rb"."), re.DOTALL).search

    def matches(self, subject: bytes, is_dir: bool) -> bool:
        """Whether the path itself matches, not only a folder above it. subject: the path, a folder's with `/`."""
        if self._folders_only and not is_dir:
            return False
        return self._search is None or self._search(subject) is not None
