"""The runner's side of the fuse: the folder it shares with the loop, and a session whose end ends the machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote.runner_client import Refused, RunnerClient, eventually, find_start

pytestmark = pytest.mark.subprocess
INTENT = "p0123456789abcdef"
FOREIGN = "p00000000000000ff"


class Folder:
    """What the loop of a living fuse leaves there, written by hand."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True)

    def write(self, name: str, *words: Any, intent: str = INTENT) -> None:
        (self.path / name).write_text(" ".join(map(str, (intent, *words))) + "\n")

    def words(self, name: str) -> list[str]:
        try:
            return (self.path / name).read_text().split()
        except FileNotFoundError:
            return []

    def live(self, boot: str = "abc1", deadline: Any = 1796000000, used_s: int = 100) -> None:
        self.write("alive", int(time.time()), used_s, boot)
        self.write("pid", os.getpid(), find_start(os.getpid()))
        receipt = {"intent": INTENT, "deadline": str(deadline), "armed_at": 1, "key": "proven"}
        (self.path / "receipt.json").write_text(json.dumps({**receipt, "on_expiry": "stop", "boot": boot}) + "\n")


@pytest.fixture
def folder(root: Path) -> Folder:
    return Folder(root.parent / ".gpu-fuse" / INTENT)


def with_fuse(machine: RunnerClient, name: str = "s1", **limits: Any) -> dict[str, Any]:
    return machine.call("session", session={"id": name, "on_expiry": "fuse", "fuse": INTENT, **limits})


@pytest.fixture
def lit(machine: RunnerClient, folder: Folder) -> Iterator[Folder]:
    """After a session's end was given to the fuse."""
    folder.live()
    with_fuse(machine, deadline_in_s=0.1)
    eventually(lambda: folder.words("fire") == [INTENT, "s1", "abc1"])
    yield folder


def test_without_a_fuse_there_is_no_receipt_and_nothing_to_write_to(machine: RunnerClient) -> None:
    found = machine.call("fuse", intent=INTENT)
    assert (found["receipt"], found["alive"], found["acknowledged"]) == (None, False, False)
    with pytest.raises(Refused, match="no fuse"):
        machine.call("fuse", intent=INTENT, deadline={"epoch_s": 1796000000, "in_s": 60})


def test_a_living_fuse_is_one_whose_process_is_there_and_was_busy_a_moment_ago(
    machine: RunnerClient, folder: Folder
) -> None:
    folder.live()
    assert machine.call("fuse", intent=INTENT)["alive"] is True
    folder.write("alive", int(time.time()) - 200, 100, "abc1")
    assert machine.call("fuse", intent=INTENT)["alive"] is False
    folder.live()
    folder.write("pid", os.getpid(), 1)
    assert machine.call("fuse", intent=INTENT)["alive"] is False, "the number is somebody else's now"
    folder.write("pid", os.getpid(), find_start(os.getpid()), intent=FOREIGN)
    assert machine.call("fuse", intent=INTENT)["alive"] is False


def test_only_what_the_loop_says_counts_as_set(machine: RunnerClient, folder: Folder) -> None:
    folder.live(deadline=1796000000)
    wanted = {"epoch_s": 1796009999, "in_s": 600}
    answer = machine.call("fuse", intent=INTENT, deadline=wanted, wait_s=0.3)
    assert answer["acknowledged"] is False and answer["receipt"]["deadline"] == "1796000000"
    intent, epoch_s, limit_s = folder.words("deadline")
    # What the loop has counted, what is left by the caller's clock, and a little more than it may not have written yet.
    assert (intent, epoch_s) == (INTENT, "1796009999") and 700 < int(limit_s) <= 100 + 600 + 30 + 2
    folder.live(deadline=1796009999)
    assert machine.call("fuse", intent=INTENT, deadline=wanted)["acknowledged"] is True
    folder.live(deadline="never")
    assert machine.call("fuse", intent=INTENT, deadline={"epoch_s": None})["acknowledged"] is True
    assert folder.words("deadline")[:2] == [INTENT, "never"]


@pytest.mark.parametrize("alive", ["", f"{FOREIGN} 1 999999", f"{INTENT} -1 -1", f"{INTENT} 1 " + "9" * 400])
def test_what_the_loop_counted_is_taken_from_its_own_words_only(
    machine: RunnerClient, folder: Folder, alive: str
) -> None:
    folder.live()
    (folder.path / "alive").write_text(alive)
    machine.call("fuse", intent=INTENT, deadline={"epoch_s": 1796009999, "in_s": 600})
    assert folder.words("deadline") == [INTENT, "1796009999", "630"]


@pytest.mark.parametrize(
    "receipt",
    [
        "",
        "[]",
        "{",
        "[" * 3000,
        "x" * 5000,
        '{"intent": NaN}',
        '{"intent": 1, "intent": 2}',
        f'{{"intent": "{FOREIGN}"}}',
    ],
)
def test_a_receipt_that_is_none_of_this_intent_is_none(machine: RunnerClient, folder: Folder, receipt: str) -> None:
    folder.live()
    (folder.path / "receipt.json").write_text(receipt)
    assert machine.call("fuse", intent=INTENT)["receipt"] is None


def test_links_pipes_and_folders_in_its_place_hold_nothing_up(machine: RunnerClient, folder: Folder) -> None:
    folder.live()
    outside = folder.path.parent / "outside"
    outside.write_text((folder.path / "receipt.json").read_text())
    for name in ("receipt.json", "alive", "pid"):
        (folder.path / name).unlink()
    (folder.path / "receipt.json").symlink_to(outside)
    os.mkfifo(folder.path / "alive")
    (folder.path / "pid").mkdir()
    answer = machine.call("fuse", intent=INTENT)
    assert (answer["receipt"], answer["alive"]) == (None, False)
    (folder.path / "receipt.json").unlink()
    os.mkfifo(folder.path / "receipt.json")
    assert machine.call("fuse", intent=INTENT)["receipt"] is None


def test_a_session_that_ends_by_the_fuse_names_it(machine: RunnerClient) -> None:
    for wrong in ({}, {"fuse": None}, {"fuse": "../../x"}, {"fuse": 7}):
        with pytest.raises(Refused, match=r"session\.fuse"):
            machine.call("session", session={"id": "s1", "on_expiry": "fuse", "deadline_in_s": 60, **wrong})


def test_the_end_of_a_session_lights_the_fuse_and_is_told_once(machine: RunnerClient, lit: Folder) -> None:
    time.sleep(2.5)
    found = machine.call("session")
    assert found["session"]["expired_why"] == "max_lifetime" and found["watcher"] is True
    assert [event["event"] for event in found["events"]] == ["session_expired"]


def test_it_is_asked_again_until_the_machine_was_started_anew(machine: RunnerClient, lit: Folder) -> None:
    (lit.path / "fire").unlink()
    eventually(lambda: lit.words("fire") == [INTENT, "s1", "abc1"])
    (lit.path / "fire").unlink()
    lit.live(boot="def2")
    eventually(lambda: machine.call("session")["watcher"] is False)
    assert lit.words("fire") == [] and json.loads((machine.folder / "session.json").read_text())["action_done"] is True


def test_a_fuse_that_comes_to_life_after_the_end_is_asked_too(machine: RunnerClient, folder: Folder) -> None:
    with_fuse(machine, deadline_in_s=0.1)
    eventually(lambda: machine.call("session")["events"])
    folder.live()
    eventually(lambda: folder.words("fire") == [INTENT, "s1", "abc1"])


def test_a_job_has_its_record_before_the_fuse_is_lit(machine: RunnerClient, folder: Folder) -> None:
    folder.live()
    with_fuse(machine, deadline_in_s=1.5)
    machine.start("trap '' TERM; echo x > $GPU_OUTPUT_DIR/x; while :; do sleep 0.1; done")
    record = machine.folder / "jobs" / "J-000001" / "exit.json"
    eventually(lambda: folder.words("fire"), 30)
    ended = json.loads(record.read_text())
    assert (ended["state"], ended["reason"]) == ("timeout", "max_lifetime")
    assert (folder.path / "fire").stat().st_mtime >= record.stat().st_mtime


def test_a_session_opened_after_the_end_takes_the_fire_back(machine: RunnerClient, lit: Folder) -> None:
    with_fuse(machine, "s2", deadline_in_s=600)
    time.sleep(2.5)
    assert lit.words("fire") == []
    found = machine.call("session")
    assert (found["session"]["id"], found["session"]["expired_at"]) == ("s2", None)


def test_a_session_ended_by_hand_lights_nothing(machine: RunnerClient, folder: Folder) -> None:
    folder.live()
    with_fuse(machine, deadline_in_s=600)
    machine.call("session", end=True)
    time.sleep(2.5)
    assert folder.words("fire") == []
