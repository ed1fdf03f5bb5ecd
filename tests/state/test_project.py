from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from gpu_skills import userdirs
from gpu_skills.errors import NoProject, StateError, StateNewer, UsageError
from gpu_skills.state import project as projects


def test_init_makes_a_private_state_directory_with_empty_registries(tmp_path):
    made = projects.init(tmp_path)
    assert stat.S_IMODE(made.state.stat().st_mode) == 0o700
    for name in ("providers", "machines", "deployments", "models", "workflows"):
        path = made.path(f"{name}.json")
        assert json.loads(path.read_text()) == [] and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(made.path("policy.json").read_text())["ceilings"]["job_usd"] > 0
    assert projects.PROJECT_ID.fullmatch(made.project_id) and len(made.project_id) == 12


def test_init_again_keeps_everything(tmp_path):
    first = projects.init(tmp_path)
    first.path("machines.json").write_text('[{"id": "m_1"}]')
    before = {p.name: p.read_bytes() for p in first.state.iterdir() if p.is_file()}
    assert projects.init(tmp_path) == first
    assert {p.name: p.read_bytes() for p in first.state.iterdir() if p.is_file()} == before


def test_another_project_id_than_the_one_on_disk_is_refused(tmp_path):
    assert projects.init(tmp_path, project_id="shared-fleet").project_id == "shared-fleet"
    with pytest.raises(UsageError, match="already has the id shared-fleet"):
        projects.init(tmp_path, project_id="another")


@pytest.mark.parametrize("bad", ["", "Upper", "-first", "a" * 65, "a b", "a/../b", "a\n", "a-j0123456789abcdef-never"])
def test_a_project_id_that_no_label_can_hold_is_refused(tmp_path, bad):
    with pytest.raises(UsageError):
        projects.init(tmp_path, project_id=bad)
    assert not (tmp_path / ".pi").exists()


@pytest.mark.parametrize(
    "before, after",
    [
        (None, b".pi/\n"),
        (b"", b".pi/\n"),
        (b"*.pyc\n", b"*.pyc\n.pi/\n"),
        (b"*.pyc", b"*.pyc\n.pi/\n"),
        (b"a\r\nb\r\n", b"a\r\nb\r\n.pi/\r\n"),
        (b"a\r\nb", b"a\r\nb\r\n.pi/\r\n"),
        (b"caf\xe9\n", b"caf\xe9\n.pi/\n"),
        (b"x\n/.pi/\ny\n", b"x\n/.pi/\ny\n"),
        (b".pi\r\n", b".pi\r\n"),
    ],
)
def test_gitignore_gains_one_line_and_keeps_its_bytes(tmp_path, before, after):
    path = tmp_path / ".gitignore"
    if before is not None:
        path.write_bytes(before)
        path.chmod(0o640)
    projects.init(tmp_path)
    projects.init(tmp_path)
    assert path.read_bytes() == after
    if before is not None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_linked_gitignore_stays_a_link(tmp_path):
    (tmp_path / "shared").write_bytes(b"a\n")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / ".gitignore").symlink_to("../shared")
    projects.init(tmp_path / "work")
    assert (tmp_path / "work" / ".gitignore").is_symlink()
    assert (tmp_path / "shared").read_bytes() == b"a\n.pi/\n"


def test_the_project_is_found_from_below_and_not_from_beside(tmp_path):
    made = projects.init(tmp_path / "a")
    deep = tmp_path / "a" / "src" / "deep"
    deep.mkdir(parents=True)
    assert projects.find(deep) == made
    (tmp_path / "b").mkdir()
    with pytest.raises(NoProject, match=r"no \.pi/gpu in"):
        projects.find(tmp_path / "b")


def test_the_sandbox_has_a_state_directory_of_its_own(tmp_path):
    real = projects.init(tmp_path)
    sandbox = projects.init(tmp_path, name="gpu-sandbox")
    assert sandbox.state == tmp_path / ".pi" / "gpu-sandbox" and sandbox.project_id != real.project_id
    assert projects.find(tmp_path, name="gpu-sandbox") == sandbox


def git(directory: Path, *arguments: str) -> None:
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(directory)}
    who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", *who, *arguments], cwd=directory, env=environment, check=True, capture_output=True)


@pytest.mark.subprocess
def test_a_linked_worktree_uses_the_project_of_the_main_one(tmp_path):
    main = tmp_path / "main"
    main.mkdir()
    git(main, "init", "-q")
    git(main, "commit", "-q", "--allow-empty", "-m", "x")
    git(main, "worktree", "add", "-q", "../linked")
    linked = tmp_path / "linked"
    (linked / "src").mkdir()
    with pytest.raises(NoProject):
        projects.find(linked)
    made = projects.init(linked / "src")  # asked for in the linked one, made in the main one
    assert made.root == main / "src" and not (linked / "src" / ".pi").exists()
    assert projects.find(linked / "src") == made
    with pytest.raises(NoProject):
        projects.find(linked)


@pytest.mark.parametrize("text", ["", "gitdir: nowhere\n", "gitdir:\n", "no such thing", "gitdir: \0\n"])
def test_a_git_file_that_leads_nowhere_changes_nothing(tmp_path, text):
    made = projects.init(tmp_path)
    (tmp_path / ".git").write_text(text)
    assert projects.find(tmp_path) == made


def test_a_newer_major_is_read_and_never_written(tmp_path):
    made = projects.init(tmp_path)
    made.path("project.json").write_text('{"project_id": "p-x", "schema_version": 2, "new": {"a": 1}}')
    newer = projects.find(tmp_path)
    assert newer.project_id == "p-x" and newer.is_read_only
    with pytest.raises(StateNewer) as caught:
        newer.require_writable()
    assert caught.value.exit_code == 3
    with pytest.raises(StateNewer):
        projects.init(tmp_path)


@pytest.mark.parametrize(
    "content, at",
    [
        ("[]", ":1"),
        ("{}", "/project_id"),
        ('{"project_id": "../x"}', "/project_id"),
        ('{"project_id": "a", "schema_version": "1"}', "/schema_version"),
        ('{"project_id": "a", "schema_version": true}', "/schema_version"),
        ('{"project_id": "a",}', ":1:19"),
    ],
)
def test_a_spoiled_project_file_is_named_with_its_place(tmp_path, content, at):
    projects.init(tmp_path).path("project.json").write_text(content)
    with pytest.raises(StateError, match=r"project\.json") as caught:
        projects.find(tmp_path)
    assert at in caught.value.message


def test_user_directories_follow_xdg_then_home_then_the_password_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    assert userdirs.state_dir() == tmp_path / "s" / "gpu"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert userdirs.state_dir() == tmp_path / ".local" / "state" / "gpu"
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert userdirs.config_dir() == tmp_path / ".config" / "gpu"
    monkeypatch.delenv("HOME")
    assert userdirs.config_dir().is_absolute()
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    with pytest.raises(UsageError, match="no home directory"):
        userdirs.config_dir()


def test_a_project_id_on_disk_that_reads_like_a_label_is_told_with_what_to_do(tmp_path):
    path = projects.init(tmp_path).path("project.json")
    path.write_text('{"project_id": "a-c0123456789abcdef-1764536400-b", "schema_version": 1}')
    with pytest.raises(StateError, match="intent and deadline") as caught:
        projects.load(tmp_path)
    assert caught.value.next_step == f"choose another project_id in {path}, then: gpu doctor"


def test_a_sandbox_behind_a_link_is_refused_and_nothing_is_written_there(project):
    real = project.state
    before = sorted(real.rglob("*"))
    (real.parent / "gpu-sandbox").symlink_to(real)
    for use in (
        lambda: projects.init(project.root, name="gpu-sandbox"),
        lambda: projects.find(project.root, name="gpu-sandbox"),
    ):
        with pytest.raises(UsageError, match="symbolic link"):
            use()
    assert sorted(real.rglob("*")) == before
