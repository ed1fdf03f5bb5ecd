"""`gpu login` keeps a token where only its user can read it, and says it nowhere."""

from __future__ import annotations

import io
import json
import os
import sys
import types
from pathlib import Path

import pytest

from fake_clock import FakeClock
from gpu_skills import credentials
from gpu_skills.cli.context import Context
from gpu_skills.cli.main import run
from gpu_skills.wire import Answer, Call, NotSent, Unanswered
from providers.wires import answer

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


# keys of providers ----------------------------------------------------------------------------------------------------

KEY = "madeUpKeyForLogin0123"


def log_in(
    monkeypatch: pytest.MonkeyPatch, come: Answer | Exception, *args: str, typed: str = KEY
) -> tuple[int, list[Call]]:
    calls: list[Call] = []

    def wire(call: Call) -> Answer:
        calls.append(call)
        if isinstance(come, Exception):
            raise come
        return come

    monkeypatch.setattr("sys.stdin", io.StringIO(typed + "\n"))
    monkeypatch.setitem(sys.modules, "keyring", None)
    return run(["login", *args], obj=Context(environ=dict(os.environ), clock=FakeClock(), wire=wire)), calls


def test_a_providers_key_is_tried_before_it_is_stored(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, calls = log_in(monkeypatch, answer(200, {"id": 7, "credit": 3}), "vast", "--json")
    assert code == 0 and [call.endpoint for call in calls] == ["user"]
    assert json.loads(capsys.readouterr().out)["checked"] == "accepted"
    found = credentials.provider_key("vast", None, {"HOME": str(home)})
    assert found is not None and (found.value, found.source) == (KEY, "gpu login")


def test_a_key_that_is_refused_is_not_stored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = log_in(monkeypatch, answer(401, {"error": "auth_error", "msg": "Invalid key"}), "vast")
    assert code == 5
    assert credentials.provider_key("vast", None, {"HOME": str(home)}) is None


@pytest.mark.parametrize("failure", [NotSent("not permitted", denied=True), NotSent("no route"), Unanswered("reset")])
def test_a_key_that_cannot_be_tried_now_is_stored_and_that_is_said(
    failure: Exception, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = log_in(monkeypatch, failure, "runpod", "--json")
    assert code == 0
    assert json.loads(capsys.readouterr().out)["checked"] == "not_checked"


def test_a_sandbox_key_is_not_sent_to_the_vendor(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, calls = log_in(monkeypatch, answer(200, {}), "vast", typed="sbx_madeUpForTests")
    assert (code, calls) == (3, [])


def test_no_check_sends_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, calls = log_in(monkeypatch, answer(500, ""), "vast", "--no-check")
    assert (code, calls) == (0, [])


def test_a_key_that_another_place_overrules_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VAST_API_KEY", "anotherMadeUpKey")
    log_in(monkeypatch, answer(200, {"id": 7}), "vast")
    said = capsys.readouterr()
    assert "the key from VAST_API_KEY comes first" in said.err
    assert KEY not in said.out + said.err and "anotherMadeUpKey" not in said.out + said.err


def test_with_a_keyring_the_file_holds_only_a_note(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = types.SimpleNamespace(kept={}, priority=5)
    ring.get_keyring = lambda: ring
    ring.set_password = lambda service, name, value: ring.kept.update({(service, name): value})
    ring.get_password = lambda service, name: ring.kept.get((service, name))
    monkeypatch.setitem(sys.modules, "keyring", ring)
    monkeypatch.setattr("sys.stdin", io.StringIO(TOKEN + "\n"))
    assert run(["login", "hf"]) == 0
    path = home / ".config" / "gpu" / "credentials.json"
    assert json.loads(path.read_text()) == {"hf": {"in": "keyring"}}
    assert credentials.hf_token(None, {"HOME": str(home)}) == TOKEN
