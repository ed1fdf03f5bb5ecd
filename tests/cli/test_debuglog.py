"""What goes wrong inside is one line for the user and a redacted traceback in a log of their own."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from gpu_skills import cli
from gpu_skills.cli import debuglog
from gpu_skills.cli.context import Context

SECRET = "canary-5b2e-do-not-show"


@pytest.fixture(autouse=True)
def nothing_stays_open():
    yield
    logger = logging.getLogger("gpu_skills")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    debuglog._log = None


@pytest.fixture
def broken(monkeypatch):
    def fail(self):
        raise RuntimeError(f"it broke with {SECRET}, Authorization: Bearer abc.def and hf_madeUpToken0123")

    monkeypatch.setattr(Context, "project", property(fail))


def test_a_defect_is_one_line_and_its_traceback_is_in_the_log_without_secrets(gpu, home, monkeypatch, broken):
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    result = gpu("status", "--json", "--debug")
    assert (result.exit_code, result.error["code"]) == (1, "bug")
    assert SECRET not in result.stdout + result.stderr and "it broke with ***" in result.error["message"]
    log = Path(result.error["details"]["log"])
    assert log == home / ".local/state/gpu/debug.log" and log.stat().st_mode & 0o777 == 0o600
    text = log.read_text()
    assert "Traceback" in text and "RuntimeError: it broke with ***" in text
    assert not any(secret in text for secret in (SECRET, "abc.def", "madeUpToken"))


def test_without_debug_a_defect_says_how_to_get_the_log(gpu, home, broken):
    result = gpu("status")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1 and "--debug" in result.stderr
    assert not (home / ".local/state/gpu/debug.log").exists()


def test_a_log_that_cannot_be_written_does_not_stop_the_command(gpu, home):
    assert gpu("init").exit_code == 0
    (home / ".local/state").mkdir(parents=True, exist_ok=True)
    (home / ".local/state/gpu").write_text("a file in the way")
    assert gpu("spend", "--debug").exit_code == 0


def test_only_login_and_approvals_ask_a_question_and_only_at_a_terminal():
    asking = set()
    for path in Path(cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                "input", "prompt", "confirm", "getpass", "getchar", "pause", "edit",
            ):  # fmt: skip
                asking.add(path.name)
    assert asking <= {"login.py", "approve.py"}
