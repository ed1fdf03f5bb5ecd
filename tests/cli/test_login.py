"""`gpu login` keeps a token where only its user can read it, and says it nowhere."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from gpu_skills import credentials
from gpu_skills.cli.main import run

TOKEN = "hf_madeUpForThisTest0123"


def test_a_token_from_stdin_is_stored_for_its_user_only_and_found_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"HOME": str(home)}
    monkeypatch.setattr("sys.stdin", io.StringIO(TOKEN + "\n"))
    assert run(["login", "hf", "--json"]) == 0
    said = capsys.readouterr()
    assert TOKEN not in said.out + said.err
    path = Path(json.loads(said.out)["stored_in"])
    assert path == home / ".config" / "gpu" / "credentials.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert credentials.hf_token(None, environ) == TOKEN


def test_a_new_token_replaces_the_old_and_leaves_other_entries(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / ".config" / "gpu" / "credentials.json"
    path.parent.mkdir()
    path.write_text('{"other": "kept", "hf": "hf_old_one"}')
    monkeypatch.setattr("sys.stdin", io.StringIO(TOKEN))
    assert run(["login", "hf"]) == 0
    assert json.loads(path.read_text()) == {"other": "kept", "hf": TOKEN}


@pytest.mark.parametrize("typed", ["", "\n", "two words here\n", "short\n", "hf_with\x1b[31mescape\n"])
def test_what_is_no_token_is_usage_and_stores_nothing(
    typed: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert run(["login", "hf"]) == 2
    assert "next:" in capsys.readouterr().err
    assert not (home / ".config" / "gpu" / "credentials.json").exists()
