from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_skills.lifecycle.guard import keyproof


def test_nothing_is_known_of_an_account_before_its_first_machine(rig: Callable[..., Any]) -> None:
    assert keyproof.last(rig().op, "vast", "a", "stop") == "unknown"


def test_the_last_answer_is_remembered_per_account_and_rights(rig: Callable[..., Any]) -> None:
    op = rig().op
    keyproof.note(op, "vast", "a", "proven", "stop")
    assert keyproof.last(op, "vast", "a", "stop") == "proven"
    assert keyproof.last(op, "vast", "a", "destroy") == "unknown"
    assert keyproof.last(op, "vast", "b", "stop") == keyproof.last(op, "runpod", "a", "stop") == "unknown"


def test_one_denial_cancels_every_proof_until_there_is_a_new_one(rig: Callable[..., Any]) -> None:
    op = rig().op
    for rights in ("stop", "destroy"):
        keyproof.note(op, "vast", "a", "proven", rights)
    keyproof.note(op, "vast", "a", "denied", "stop")
    assert keyproof.last(op, "vast", "a", "stop") == keyproof.last(op, "vast", "a", "destroy") == "denied"
    keyproof.note(op, "vast", "a", "proven", "destroy")
    assert (keyproof.last(op, "vast", "a", "stop"), keyproof.last(op, "vast", "a", "destroy")) == ("denied", "proven")


def test_a_probe_without_an_answer_changes_nothing(rig: Callable[..., Any]) -> None:
    op = rig().op
    keyproof.note(op, "vast", "a", "unknown", "stop")
    assert keyproof.last(op, "vast", "a", "stop") == "unknown"
    keyproof.note(op, "vast", "a", "proven", "stop")
    keyproof.note(op, "vast", "a", "unknown", "stop")
    assert keyproof.last(op, "vast", "a", "stop") == "proven"


def test_another_project_of_this_user_knows_it_and_no_secret_is_written(
    rig: Callable[..., Any], tmp_path: Path
) -> None:
    r = rig()
    keyproof.note(r.op, "vast", r.op.account("vast"), "proven", "stop")
    other = r.another(tmp_path / "other")
    assert keyproof.last(other.op, "vast", r.op.account("vast"), "stop") == "proven"
    (file,) = (tmp_path / "user").rglob("keyproof.json")
    assert r.sandbox.key("vast") not in file.read_text() and file.stat().st_mode & 0o777 == 0o600


def test_a_broken_file_proves_nothing_and_stops_nobody(rig: Callable[..., Any], tmp_path: Path) -> None:
    op = rig().op
    keyproof.note(op, "vast", "a", "proven", "stop")
    (file,) = (tmp_path / "user").rglob("keyproof.json")
    for content in ("", "[]", '{"stop": "proven"}', '{"stop": {"verdict": ["proven"]}}', '{"stop": {"verdict": 1}}',
                    "[" * 3000, '{"stop": {"verdict": "sure"}}'):  # fmt: skip
        file.write_text(content)
        assert keyproof.last(op, "vast", "a", "stop") == "unknown", content
    file.write_text("{")
    keyproof.note(op, "vast", "a", "proven", "stop")
    assert keyproof.last(op, "vast", "a", "stop") == "proven"
