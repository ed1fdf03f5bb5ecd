"""The rules by which a fuse fires, with the text running here beside a vendor whose machine is only a row."""

from __future__ import annotations

import json
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lifecycle.fused import FOREIGN, Loop, soon
from sandbox_fixture import eventually

pytestmark = pytest.mark.subprocess
# Longer than the loop sleeps: what has not happened by then does not happen.
A_WHILE_S = 4.5


@pytest.fixture
def loop(rig: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(vendor: str = "vast", **options: Any) -> Loop:
        home = tmp_path / f"home{len(made)}"
        made.append(Loop(rig(vendor, limits="off"), home, **options))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def stays(one: Loop, for_s: float = A_WHILE_S) -> bool:
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        if one.is_over:
            return False
        time.sleep(0.05)
    return True


def old(ago_s: float) -> int:
    return int(time.time() - ago_s)


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_it_ends_the_billing_when_the_deadline_comes_and_not_before(loop: Callable[..., Loop], vendor: str) -> None:
    one = loop(vendor)
    at = soon(4).timestamp()
    one.start(in_s=4)
    one.armed()
    eventually(lambda: one.is_over, within_s=10)
    assert 0 <= time.time() - at < 4


def test_a_wall_clock_that_was_set_back_gives_no_more_time(loop: Callable[..., Loop]) -> None:
    """A day to go by the wall, three seconds by what the machine has counted."""
    one = loop()
    one.start(in_s=86400, longest_s=3)
    eventually(lambda: one.is_over, within_s=10)


def test_seconds_counted_in_earlier_lives_count(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.write("alive", old(5), 3598, "abc1")
    one.start(in_s=86400, longest_s=3600)
    eventually(lambda: one.is_over, within_s=10)


def test_a_longer_deadline_carries_its_own_bound(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.write("deadline", old(-86400), 3)
    one.start(in_s=-5)
    eventually(lambda: one.is_over, within_s=10)


@pytest.mark.parametrize(
    "content",
    [
        f"{FOREIGN} never 0\n",
        f"{FOREIGN} 9999999999 999999\n",
        "never\n",
        "p0123456789abcdef 9999999999\n",
        "p0123456789abcdef 99999999999999999999 99\n",
        "p0123456789abcdef 08 08\n",
        "p0123456789abcdef $(touch\tpwned) a[$(touch\tpwned)]\n",
        "p0123456789abcdef -1 9999999\n",
        "\0\xff garbage" * 4000,
        "",
    ],
)
def test_a_file_of_another_intent_or_with_garbage_leaves_the_deadline_it_was_born_with(
    loop: Callable[..., Loop], content: str
) -> None:
    one = loop()
    (one.folder / "deadline").write_text(content)
    one.start(in_s=3)
    eventually(lambda: one.is_over, within_s=10)
    assert not list(one.home.rglob("pwned")) and not Path("/pwned").exists()


def test_no_file_that_is_none_holds_it_up(loop: Callable[..., Loop]) -> None:
    import os

    one = loop()
    os.mkfifo(one.folder / "deadline")
    (one.folder / "alive").mkdir()
    (one.folder / "fire").symlink_to("/dev/zero")
    one.start(in_s=3)
    eventually(lambda: one.is_over, within_s=10)


def test_never_holds_only_for_this_intent_and_outlasts_everything(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.write("deadline", "never", 0)
    one.start(in_s=-5, longest_s=0)
    assert stays(one.armed())
    assert json.loads((one.folder / "receipt.json").read_text())["deadline"] == "never"


def test_a_crash_after_the_deadline_gives_no_grace(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.write("alive", old(100), 10, "abc1")
    one.start(in_s=-5)
    eventually(lambda: one.is_over, within_s=5)


def test_a_machine_that_never_lived_before_its_deadline_gets_none(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.start(in_s=-500)
    eventually(lambda: one.is_over, within_s=5)


@pytest.mark.parametrize("stopped_by", ["somebody", "its own fuse"])
def test_a_stopped_machine_that_is_started_after_its_deadline_waits_for_a_new_one(
    loop: Callable[..., Loop], stopped_by: str
) -> None:
    one = loop()
    one.write("alive", 0 if stopped_by == "its own fuse" else old(1000), 10, "abc1")
    one.start(in_s=-30)
    assert stays(one.armed())
    assert one.boot != "abc1"
    one.write("deadline", int(soon(4).timestamp()), 999)
    assert stays(one, 2)
    # The grace covers an old deadline, and so the new one too: ten minutes are in every start's price.
    until, deadline = map(int, one.words("grace"))
    assert 580 < until - time.time() <= 600 and deadline < time.time()


def test_the_grace_ends(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.write("alive", old(1000), 10, "abc1")
    deadline = int(soon(-30).timestamp())
    one.write("deadline", deadline, 999)
    one.write("grace", old(-3), deadline)
    one.start(in_s=-30)
    eventually(lambda: one.is_over, within_s=10)


def test_a_container_that_crashes_with_long_pauses_has_one_grace_per_deadline(loop: Callable[..., Loop]) -> None:
    one = loop()
    deadline = int(soon(-1200).timestamp())
    one.write("deadline", deadline, 999)
    one.write("alive", old(300), 10, "abc1")
    one.write("grace", old(10), deadline)
    one.start(in_s=-1200)
    eventually(lambda: one.is_over, within_s=5)


def test_a_second_start_a_day_later_has_its_own_grace(loop: Callable[..., Loop]) -> None:
    one = loop()
    deadline = int(soon(-90000).timestamp())
    one.write("deadline", deadline, 999)
    one.write("alive", old(80000), 10, "abc1")
    one.write("grace", old(80000), deadline)
    one.start(in_s=-90000)
    assert stays(one.armed())


@pytest.mark.slow
def test_a_session_of_this_life_lights_it_and_one_of_an_earlier_life_does_not(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.write("alive", old(1000), 10, "abc1")
    one.write("fire", "s_1", "abc1")
    one.start(in_s=3600)
    assert stays(one.armed())
    assert one.words("fire") == []
    one.write("fire", "s_2", "abc1")
    assert stays(one)
    one.write("fire", "s_3", one.boot)
    eventually(lambda: one.is_over, within_s=5)


def test_a_restarted_container_is_the_same_life(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.start()
    boot = one.armed().boot
    one.kill()
    one.write("fire", "s_1", boot)
    one.start()
    eventually(lambda: one.is_over, within_s=6)


def test_a_fire_of_another_intent_is_nothing(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.start()
    one.write("fire", "s_1", one.armed().boot, intent=FOREIGN)
    assert stays(one)


def test_there_is_one_loop_however_often_the_text_runs(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.start()
    one.armed()
    first = one.words("pid")
    for _ in range(3):
        one.start()
    time.sleep(0.5)
    assert one.words("pid") == first and one.log.count("armed") == 1
    one.kill()
    one.start()  # the number in the file is of nobody now, or of somebody else
    one.armed(2)
    assert one.words("pid") != first


def test_the_number_of_a_stranger_in_the_lock_keeps_nobody_out(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.write("pid", 1, 12345678)
    one.start(in_s=3)
    eventually(lambda: one.is_over, within_s=10)


@pytest.mark.slow
def test_a_refused_key_is_reported_and_it_keeps_trying(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.instance.faults["key_denied"] = {}
    one.start(in_s=3)
    one.armed()
    assert json.loads((one.folder / "receipt.json").read_text())["key"] == "denied"
    eventually(lambda: one.log.count("stop: 403") >= 2, within_s=15)
    one.instance.faults.clear()
    eventually(lambda: one.is_over, within_s=20)


def test_where_a_destroy_is_refused_at_least_the_gpu_stops(loop: Callable[..., Loop]) -> None:
    one = loop(on_expiry="destroy")
    one.rig.fault("403", "destroy", times=0)
    one.start(in_s=3)
    eventually(lambda: one.is_over, within_s=15)
    assert one.instance.phase != "destroyed" and one.rig.calls("destroy") == 1


def test_a_page_of_the_network_in_between_denies_nothing(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.rig.fault("403", "state", html=True)
    one.start()
    one.armed()
    eventually(lambda: " unknown" in one.log and " proven" in one.log, within_s=15)


def test_a_call_that_answers_success_false_has_proven_nothing_and_is_repeated(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.write("alive", old(5), 10, "abc1")
    one.rig.fault("failure_200", "state")
    one.start(in_s=-1)
    eventually(lambda: one.is_over, within_s=15)
    assert one.log.count("stop: 200") >= 1


def test_a_vendor_that_does_not_answer_is_asked_again(loop: Callable[..., Loop]) -> None:
    one = loop("runpod")
    one.rig.fault("500", "action", times=2)
    one.rig.fault("lost_request", "action", times=3)  # one for each program that is tried
    one.start(in_s=-1)
    eventually(lambda: one.is_over, within_s=30)


@pytest.mark.parametrize("missing", [("curl",), ("curl", "python3")])
@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_any_of_three_programs_will_do(
    loop: Callable[..., Loop], tmp_path: Path, vendor: str, missing: tuple[str, ...]
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"bash", "mkdir", "mv", "rm", "sleep", "curl", "python3", "wget"} - set(missing):
        where = shutil.which(name, path="/usr/bin:/bin")
        assert where, f"this machine has no {name}"
        (programs / name).symlink_to(where)
    one = loop(vendor)
    one.start(in_s=4, path=str(programs))
    one.armed()
    assert json.loads((one.folder / "receipt.json").read_text())["key"] == "proven"
    eventually(lambda: one.is_over, within_s=10)
    assert not list(Path("/dev/shm").glob("p0123456789abcdef"))


def test_a_program_that_does_not_work_is_passed_over(loop: Callable[..., Loop], tmp_path: Path) -> None:
    """Like a curl in an image without certificates."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "curl").write_text("#!/bin/sh\nprintf '\\n000'\nexit 60\n")
    (programs / "curl").chmod(0o755)
    one = loop()
    one.start(in_s=3, path=f"{programs}:/usr/bin:/bin")
    eventually(lambda: one.is_over, within_s=10)


def test_the_probe_changes_nothing(loop: Callable[..., Loop]) -> None:
    for vendor in ("vast", "runpod"):
        one = loop(vendor)
        before = (one.instance.turn, one.instance.phase, one.instance.boots, one.instance.label)
        one.start()
        one.armed()
        after = (one.instance.phase, one.instance.boots, one.instance.label)
        assert " proven" in one.log and after == before[1:]


def test_its_files_are_its_owners_only(loop: Callable[..., Loop]) -> None:
    one = loop()
    one.start()
    one.armed()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in one.folder.iterdir()}
    assert modes == {"alive": 0o600, "pid": 0o600, "receipt.json": 0o600}
