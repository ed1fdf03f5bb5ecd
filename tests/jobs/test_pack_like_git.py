"""The user's patterns mean what they mean to git: checked against git itself, on real trees."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_skills.jobs.pack import pack

pytestmark = pytest.mark.subprocess

FILES = [
    "a", "b.txt", "keep.txt", "x.ckpt", "foo", "dataset/a.csv", "dataset/keep.txt", "dataset/sub/a.csv",
    "dataset/sub/x.ckpt", "src/dataset/a.csv", "src/dataset/sub/b.txt", "src/main.py", "src/foo/bar/deep.py",
    "src/foo/keep.txt", "data/raw/a", "data/raw/sub/keep.txt", "data/clean/a", "a b/c d.txt", "[x]/a", "x/y/z/y/a",
    "x/y.txt", "#hash", "!bang", "tail ", "ünï/cödé.txt", "foo.d/foo/foo/a",
]  # fmt: skip

CORPUS = [
    ["*.ckpt"],
    ["dataset/*"],
    ["/dataset/*"],
    ["dataset/*", "!dataset/sub"],
    ["dataset/*", "!dataset/sub/", "*.ckpt"],
    ["dataset/**", "!dataset/keep.txt"],
    ["dataset/"],
    ["/a"],
    ["a"],
    ["a", "!/data/**/a"],
    ["*", "!*/", "!*.py"],
    ["*", "!keep.txt"],
    ["**/keep.txt"],
    ["foo", "!src/foo"],
    ["foo/", "!foo/bar"],
    ["src/**/deep.py"],
    ["data/raw", "!data/raw/sub/keep.txt"],
    ["data/*/a"],
    ["*.tx?"],
    ["[ab]"],
    ["[!a]"],
    ["[a-"],
    ["\\[x\\]"],
    ["\\#hash", "\\!bang"],
    ["# a comment", "#hash"],
    ["tail\\ "],
    ["tail "],
    ["./a"],
    ["/"],
    ["**"],
    ["*/"],
    ["**/"],
    ["**/a"],
    ["a b/"],
    ["x/**/y"],
    ["x/**/y/"],
    ["x/*/z"],
    ["dataset/**/"],
    ["/**/", "!src/"],
    ["**/foo/**/"],
    ["**/foo/**", "!**/a"],
    ["*/y.txt"],
    ["ün*"],
    ["c??d*.txt"],
    ["foo.d/**/foo", "!foo.d/foo/"],
    ["/*", "!/src", "/src/*", "!/src/foo"],
    ["", "   ", "b.txt"],
]


def make_repository(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for name in FILES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def kept_by_git(root: Path, patterns: list[str]) -> set[bytes]:
    (root / ".git" / "info" / "exclude").write_bytes("".join(p + "\n" for p in patterns).encode())
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--others", "--exclude-standard"], check=True, capture_output=True
    ).stdout
    asked = subprocess.run(
        ["git", "-C", str(root), "check-ignore", "-z", "--stdin"], input="\0".join(FILES).encode(), capture_output=True
    )
    assert asked.returncode in (0, 1), asked.stderr
    kept = set(listed.split(b"\0")) - {b""}
    assert kept == {os.fsencode(f) for f in FILES} - set(asked.stdout.split(b"\0"))  # git agrees with itself
    return kept


def kept_by_pack(root: Path, patterns: list[str]) -> set[bytes]:
    return {entry.path for entry in pack(root, exclude=patterns).tree.files}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    make_repository(root)
    return root


@pytest.mark.parametrize("patterns", CORPUS, ids=lambda p: " ".join(p) or "empty")
def test_a_list_of_patterns_keeps_the_files_git_keeps(repository: Path, patterns: list[str]) -> None:
    assert kept_by_pack(repository, patterns) == kept_by_git(repository, patterns)


part = st.sampled_from(
    ["a", "foo", "dataset", "sub", "src", "data", "raw", "y", "x", "*", "**", "*.txt", "?", "f*", "keep.txt"]
)
pattern = st.builds(
    lambda negated, anchored, parts, folder: negated + anchored + "/".join(parts) + folder,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.lists(part, min_size=1, max_size=3),
    st.sampled_from(["", "", "/"]),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(patterns=st.lists(pattern, min_size=1, max_size=4))
def test_any_list_of_patterns_keeps_the_files_git_keeps(repository: Path, patterns: list[str]) -> None:
    assert kept_by_pack(repository, patterns) == kept_by_git(repository, patterns)
