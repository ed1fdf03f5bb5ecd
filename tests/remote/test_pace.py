"""When a broken transfer is tried again, and which way bytes go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpu_skills.errors import HashMismatch, MachineDiskFull, TransferIncomplete, Unreachable
from gpu_skills.remote.answers import MachineBusy
from gpu_skills.remote.pace import Attempts, Meter, Ways, ways_for

MIB = 1 << 20
BROKEN = Unreachable(host="far", reason="the connection closed")
BUSY = MachineBusy(host="far", reason="another connection")


def bulk(*, ssh: bool = True, rsync: bool = True) -> SimpleNamespace:
    return SimpleNamespace(has_ssh=ssh, has_rsync=rsync)


@pytest.mark.parametrize(
    ("sizes_mib", "bulk", "unfit", "expected"),
    [
        ([1, 63], bulk(), False, Ways([0, 1], [], [])),
        ([1, 64], bulk(), False, Ways([0], [], [1])),
        ([1, 64], None, False, Ways([0, 1], [], [])),
        ([1, 64], bulk(ssh=False), False, Ways([0, 1], [], [])),
        ([1, 64], bulk(rsync=False), False, Ways([], [0, 1], [])),
        ([1, 64], bulk(), True, Ways([], [0, 1], [])),
        ([7] * 10, bulk(), False, Ways([], list(range(10)), [])),
        ([7] * 10 + [8], bulk(), False, Ways([], list(range(10)), [10])),
    ],
)
def test_large_files_go_by_rsync_small_ones_together_and_little_over_the_open_connection(
    sizes_mib, bulk, unfit, expected
):
    assert ways_for([size * MIB for size in sizes_mib], bulk, rsync_unfit=unfit) == expected


def test_a_broken_connection_is_tried_again_as_long_as_something_moves():
    attempts = Attempts("far")
    for left in range(100, 0, -1):
        attempts.begin(left)
        attempts.failed(BROKEN)


def test_two_rounds_in_vain_are_enough():
    attempts = Attempts("far")
    attempts.begin(100)
    attempts.failed(BROKEN)
    attempts.begin(100)
    with pytest.raises(TransferIncomplete) as error:
        attempts.failed(BROKEN)
    assert error.value.__cause__ is BROKEN


@pytest.mark.parametrize(
    "error",
    [
        MachineDiskFull(host="far", reason="full"),
        TransferIncomplete(reason="rsync exited with 23", rsync_code=23),
    ],
)
def test_what_another_connection_would_not_change_is_not_tried_again(error):
    attempts = Attempts("far")
    attempts.begin(100)
    with pytest.raises(type(error)):
        attempts.failed(error)


@pytest.mark.parametrize("code", [10, 12, 30, 35])
def test_an_rsync_whose_connection_broke_is_tried_again(code):
    attempts = Attempts("far")
    attempts.begin(100)
    attempts.failed(TransferIncomplete(reason="broken", rsync_code=code))


def test_a_hash_mismatch_is_tried_again_once():
    mismatch = HashMismatch(path="f", found="a", expected="b")
    attempts = Attempts("far")
    attempts.begin(100)
    attempts.failed(mismatch)
    attempts.begin(100)
    with pytest.raises(HashMismatch):
        attempts.failed(mismatch)


def test_a_machine_that_still_writes_down_the_last_connection_is_waited_for_but_not_for_ever():
    slept: list[float] = []
    attempts = Attempts("far", sleep=slept.append)
    with pytest.raises(MachineBusy):
        for _ in range(1000):
            attempts.begin(100)
            attempts.failed(BUSY)
    assert 5 <= sum(slept) <= 30


def test_progress_is_told_in_steps_never_beyond_the_total_and_always_at_the_end():
    told: list[tuple[int, int]] = []
    meter = Meter(lambda done, total: told.append((done, total)), 10 * MIB)
    for _ in range(12 * 1024):
        meter.add(1024)
    meter.finish()
    assert told[-1] == (10 * MIB, 10 * MIB)
    assert max(done for done, _ in told) == 10 * MIB
    assert len(told) < 40
