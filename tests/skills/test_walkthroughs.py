"""Walkthroughs are run as they are written: every console block of every page, on this machine, its output checked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from console_sessions import Answer, Step, difference, differences, run, steps
from quoted_commands import texts

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in texts(ROOT, ".md") if steps(page.read_text(encoding="utf-8"))]
# A machine is proven gone after a minute of looking, and that minute is real.
RENTS = [page for page in PAGES if "$ gpu sandbox up" in page.read_text(encoding="utf-8")]
SBIN = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin"
SKILLS = sorted(path.parent for path in (ROOT / "skills").glob("*/SKILL.md"))


@pytest.fixture
def project(tmp_path: Path):
    """An empty directory; a session or a sandbox that a walkthrough leaves open on this machine is ended afterwards."""
    directory = tmp_path / "project"
    directory.mkdir()
    yield directory
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "PYTHONDONTWRITEBYTECODE": "1"}
    for state, ending in (("gpu", ["destroy"]), ("gpu-sandbox", ["sandbox", "down"])):
        if (directory / ".pi" / state).is_dir():
            command = [sys.executable, "-m", "gpu_skills", *ending]
            subprocess.run(command, cwd=directory, env=environ, capture_output=True, timeout=60)


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page in RENTS else []) for page in PAGES],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
def test_a_walkthrough_prints_what_the_page_shows(page: Path, project: Path) -> None:
    session = steps(page.read_text(encoding="utf-8"))
    if any("jq " in step.command for step in session) and not shutil.which("jq"):
        pytest.skip("jq is not installed")
    if page in RENTS and not shutil.which("sshd", path=SBIN):
        pytest.skip("sshd is not installed")
    assert differences(session, run(session, project, timeout_s=300 if page in RENTS else 120)) == []


def test_the_skill_that_rents_is_rehearsed_in_the_sandbox() -> None:
    assert ROOT / "skills/runpod-lifecycle/references/walkthrough.md" in RENTS


@pytest.mark.parametrize("skill", SKILLS, ids=lambda p: p.name)
def test_every_skill_has_a_walkthrough(skill: Path) -> None:
    commands = [step.command for page in PAGES if page.is_relative_to(skill) for step in steps(page.read_text("utf-8"))]
    assert len([c for c in commands if c.startswith("gpu ")]) >= 4


def test_a_block_is_taken_apart_into_what_is_typed_and_what_is_shown() -> None:
    typed = "$ cat > a <<'END'\n$ not typed\nEND\n$ echo a \\\n  b\n"
    text = f"text\n\n```console\n{typed}a b\n\nlast\n```\n\n```sh\n$ no\n```\n"
    assert steps(text) == [
        Step(4, "cat > a <<'END'\n$ not typed\nEND", ()),
        Step(7, "echo a \\\n  b", ("a b", "", "last")),
    ]


@pytest.mark.subprocess
def test_a_session_keeps_its_directory_variables_and_the_status_of_the_last_command(project: Path) -> None:
    session = [
        Step(n, c, ()) for n, c in enumerate(["mkdir x && cd x", "v=7", "(exit $v)", "echo $?", "pwd; ls y >&2"])
    ]
    answers = run(session, project)
    assert [a.status for a in answers] == [0, 0, 7, 0, 2]
    assert answers[3].output.strip() == "7"
    assert answers[4].output.startswith("/home/you/project/x\n") and "y" in answers[4].output


@pytest.mark.subprocess
def test_a_command_that_does_not_end_is_named_with_what_it_printed(project: Path) -> None:
    session = [Step(1, "echo one", ()), Step(4, "echo two; exec sleep 30", ()), Step(9, "echo three", ())]
    with pytest.raises(AssertionError, match=r"(?s)line 4: `echo two; exec sleep 30` does not end.*two"):
        run(session, project, timeout_s=1)


def test_a_failure_that_the_page_does_not_show_is_found() -> None:
    session = [Step(1, "gpu a", ("x",)), Step(2, "gpu b", ("x",)), Step(3, "echo $?", ("3",))]
    assert differences(session, [Answer(0, "x\n"), Answer(3, "x\n"), Answer(0, "3\n")]) == []
    [found] = differences(session, [Answer(1, "x\n"), Answer(3, "x\n"), Answer(0, "3\n")])
    assert found.startswith("line 1: `gpu a` ends with 1")


@pytest.mark.parametrize(
    ("shown", "came"),
    [
        ("J-000001 succeeded, exit 0, 1s, $0.00", "J-000001 succeeded, exit 0, 12m03s, $0.00"),
        ("project p-4tq7k2mzab in /home/you/project", "project p-aswyrriazz in /home/you/project"),
        ("ready: m_4f6c2a91d0  local   no GPU", "ready: m_6bbc5765a3  local  no GPU"),
        ('{"ts": "2026-11-30T18:00:00Z", "duration_s": 250}', '{"ts": "2027-01-02T03:04:05.123Z", "duration_s": 0.2}'),
        ("a\n…\nb", "a\n1\n2\nb"),
        ("a\n…\nb", "a\nb"),
        ("sent … of …", "sent 1 kB of 2 kB"),
        ("", ""),
    ],
)
def test_what_changes_from_run_to_run_is_no_difference(shown: str, came: str) -> None:
    assert difference(Step(1, "gpu x", tuple(shown.split("\n"))), came + "\n") is None


@pytest.mark.parametrize(
    ("command", "shown", "came"),
    [
        ("gpu x", "J-000001 succeeded", "J-000001 failed"),
        ("gpu x", "J-000001 succeeded", "J-000002 succeeded"),
        ("gpu x", "total: $0.05", "total: $0.06"),
        ("gpu x", '{"state": 1}', '{"status": 1}'),
        ("gpu x", '{"state": 1}', '{"state": 1, "more": 2}'),
        ("gpu x", "a", "a\nb"),
        ("gpu x", "a\nb", "a"),
        ("gpu x", "", "a hint"),
        ("gpu x", "[usage]", "[state_invalid]"),
        ("gpu x", "outputs in gpu-outputs/J-000001/a.txt", "outputs in gpu-outputs/J-000001/b.txt"),
        ("gpu x", "/home/you/project/a", "/home/you/project/b"),
        ("gpu economics keepalive", "break-even gap: 12m00s", "break-even gap: 11m00s"),
    ],
)
def test_everything_else_is_a_difference(command: str, shown: str, came: str) -> None:
    assert difference(Step(1, command, tuple(shown.split("\n"))), came + "\n") is not None
