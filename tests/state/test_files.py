from __future__ import annotations

import json
import os
import stat
import time
from decimal import Decimal

import pytest

from dying import dies
from gpu_skills.errors import Bug, ChangedMeanwhile, DiskFull, NotWritable, StateBusy, StateError
from gpu_skills.state import files


def test_a_commit_is_private_and_leaves_nothing_else_behind(tmp_path):
    files.commit(tmp_path / "a.json", b"one")
    files.commit(tmp_path / "a.json", b"two", expected=b"one")
    assert (tmp_path / "a.json").read_bytes() == b"two"
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("on_disk, expected", [(b"theirs", b"mine"), (b"theirs", None), (None, b"mine")])
def test_a_commit_over_something_unexpected_is_refused(tmp_path, on_disk, expected):
    path = tmp_path / "a.json"
    if on_disk is not None:
        path.write_bytes(on_disk)
    with pytest.raises(ChangedMeanwhile):
        files.commit(path, b"new", expected=expected)
    assert (path.read_bytes() if path.exists() else None) == on_disk


@pytest.mark.parametrize("side, left", [("before", b"old"), ("after", b"new")])
def test_death_at_a_commit_leaves_the_old_or_the_new_file(tmp_path, side, left):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    assert dies(lambda: files.commit(path, b"new"), crossing=1, side=side)
    assert path.read_bytes() == left


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_commit_that_fails_half_way_leaves_the_old_file_alone(tmp_path, monkeypatch, call):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(DiskFull, match="No space left"):
        files.commit(path, b"new")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a.json"] and path.read_bytes() == b"old"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotWritable, match=r"file/a\.json"):
        files.commit(tmp_path / "file" / "a.json", b"")
    with pytest.raises(NotWritable), files.lock(tmp_path / "missing" / "a.json"):
        pass


def test_a_change_by_hand_meanwhile_is_kept_and_ours_applied_to_it(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1]")
    calls = []

    def add_two(value):
        calls.append(value)
        if len(calls) == 1:
            path.write_text("[1, 99]")  # an editor saves while we compute
        return [*value, 2]

    assert files.update(path, add_two) == [1, 99, 2]
    assert json.loads(path.read_text()) == [1, 99, 2]


def test_a_file_that_changes_all_the_time_is_given_up(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[0]")

    def disturbed(value):
        path.write_text(f"[{value[0] + 1}]")
        return [-1]

    with pytest.raises(ChangedMeanwhile):
        files.update(path, disturbed)


def test_an_update_that_changes_nothing_writes_nothing(tmp_path):
    path = tmp_path / "a.json"
    files.update(path, lambda value: value, default=[])
    inode = path.stat().st_ino
    files.update(path, lambda value: value)
    assert path.stat().st_ino == inode


def test_a_lock_that_is_held_names_its_holder(tmp_path, spawn):
    path = tmp_path / "a.json"
    holder = spawn(
        "import sys; from pathlib import Path; from gpu_skills.state import files\n"
        "with files.lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()",
        path,
    )
    assert holder.stdout.readline() == "held\n"
    began = time.monotonic()
    with (
        pytest.raises(StateBusy, match=rf"a\.json is held by pid {holder.pid} .* more than 0\.2 s"),
        files.lock(path, 0.2),
    ):
        pass
    assert time.monotonic() - began < 5
    holder.kill()
    holder.wait()
    with files.lock(path, timeout_s=5):  # a lock ends with its process
        pass


def test_locks_against_the_order_are_a_bug_and_with_it_are_not(tmp_path):
    with files.lock(tmp_path / "machines.json"), files.lock(tmp_path / "jobs.jsonl"):
        pass
    with files.lock(tmp_path / "jobs.jsonl"):
        with pytest.raises(Bug), files.lock(tmp_path / "machines.json"):
            pass
        with pytest.raises(Bug), files.lock(tmp_path / "jobs.jsonl"):
            pass


def test_a_syntax_error_is_reported_with_file_line_and_pointer(tmp_path):
    path = tmp_path / "machines.json"
    path.write_text('[\n {"id": "m_1", "id": "m_2"}\n]')
    with pytest.raises(StateError) as caught:
        files.read_json(path)
    assert caught.value.message == ('machines.json:2:16 /0/id: found the key "id" again, allowed is each key once')
    assert caught.value.details["line"] == 2 and caught.value.details["pointer"] == "/0/id"


def test_a_pipe_a_directory_and_a_huge_file_are_refused_without_hanging(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    with open(tmp_path / "huge.json", "wb") as stream:
        stream.truncate(100 * 1024 * 1024)
    for name in ("pipe", "folder", "huge"):
        with pytest.raises(StateError, match=f"{name}.json"):
            files.read_json(tmp_path / f"{name}.json")


def test_a_missing_file_gives_the_default_or_names_the_next_step(tmp_path):
    assert files.read_json(tmp_path / "a.json", default=[]) == []
    with pytest.raises(StateError) as caught:
        files.read_json(tmp_path / "a.json")
    assert caught.value.next_step == "gpu init"


def test_money_is_written_as_a_number_with_at_most_six_places():
    assert json.loads(files.dumps_pretty({"cost_usd": Decimal("0.12345678")})) == {"cost_usd": 0.123457}
    assert files.dumps_line({"a": Decimal(2)}) == b'{"a":2}\n'
    with pytest.raises(ValueError):
        files.dumps_line({"a": float("nan")})
