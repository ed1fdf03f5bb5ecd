"""One launch per plan, whoever asks, and what is known of it before its job has begun."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fake_clock import FakeClock
from gpu_skills.errors import StateError
from gpu_skills.jobs import device_errors, launch
from gpu_skills.jobs.launch import Limits
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import memory
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.state import project as projects
from gpu_skills.state.ledger import Ledger

PLAN, OTHER = "a" * 64, "b" * 64
LIMITS = Limits(1800.0, 7200.0, None)


@pytest.fixture
def place(tmp_path: Path):
    project = projects.init(tmp_path)
    clock = FakeClock()
    return project, Ledger(project, clock), clock


def test_the_same_plan_is_the_same_job(place):
    first = launch.begin(*place, PLAN, LIMITS, "a_1")
    assert launch.begin(*place, PLAN, Limits(0.0, 60.0, None), "a_1") == first
    assert launch.find(place[0], PLAN) == first and launch.of_job(place[0], first.job) == first
    assert launch.begin(*place, OTHER, LIMITS, "a_2").job != first.job


def test_twenty_commands_at_once_begin_one_launch(place):
    project, _, clock = place
    with ThreadPoolExecutor(20) as pool:
        begun = list(
            pool.map(lambda _: launch.begin(project, Ledger(project, clock), clock, PLAN, LIMITS, "a_1"), range(20))
        )
    assert len({one.job for one in begun}) == 1 and len(launch.all_launches(project)) == 1


def test_another_approval_of_a_plan_that_led_to_nothing_is_the_same_job_with_new_limits(place):
    first = launch.begin(*place, PLAN, LIMITS, "a_1")
    launch.cancel(place[0], place[2], PLAN)
    again = launch.begin(*place, PLAN, Limits(0.0, 60.0, 5.0), "a_2")
    assert again.job == first.job and again.limits == Limits(0.0, 60.0, 5.0)
    assert again.cancelled_at is None


def test_a_launch_that_was_damaged_by_hand_is_told_and_not_guessed(place):
    launch.begin(*place, PLAN, LIMITS, "a_1")
    path = place[0].path("launches") / f"{PLAN}.json"
    path.write_text('{"plan": "x"}')
    with pytest.raises(StateError, match="launches/"):
        launch.find(place[0], PLAN)
    with pytest.raises(StateError):
        launch.find(place[0], "../../etc/passwd")


def test_what_is_pending_is_the_latest_job_until_another_one_began_after_it(place):
    project, ledger, clock = place
    pending = launch.begin(project, ledger, clock, PLAN, LIMITS, "a_1")
    assert launch.latest_pending(project, ledger) == pending
    ledger.start({"id": ledger.new_job_id(), "started_at": "2026-01-02T03:04:05Z"})
    assert launch.latest_pending(project, ledger) is None


def test_a_cancel_is_said_once_and_stays(place):
    project, ledger, clock = place
    launch.begin(project, ledger, clock, PLAN, LIMITS, "a_1")
    assert not launch.is_cancelled(project, PLAN)
    first = launch.cancel(project, clock, PLAN)
    clock.advance(60)
    assert launch.cancel(project, clock, PLAN).cancelled_at == first.cancelled_at and launch.is_cancelled(project, PLAN)


# a device that fails ------------------------------------------------------------------------------------------------


class _Op:
    def __init__(self, place):
        self.project, self.ledger, self.clock = place


def a_failed_job(place, plan: str, log: bytes, tree: str = "t"):
    launched = launch.begin(*place, plan, LIMITS, "a_" + plan[0])
    folder = JobFolder(place[0], launched.job)
    folder.write("job", {"machine_id": "m_1", "upload": {"tree": tree}})
    folder.log.write_bytes(log)
    return launched


BROKEN = b"step 1\nRuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.mark.parametrize(
    ("log", "is_device"),
    [
        (BROKEN, True),
        (b"NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", True),
        (b"RuntimeError: No CUDA GPUs are available\nno CUDA-capable device is detected", True),
        (b"Failed to initialize NVML: Unknown Error", True),
        (b"torch.cuda.OutOfMemoryError: CUDA out of memory.", False),
        (b"RuntimeError: CUDA error: device-side assert triggered", False),
        (b"CUDA error: an illegal memory access was encountered", False),
        (b"Xid is a word in my notes", False),
    ],
)
def test_a_failure_of_the_device_is_told_from_one_of_the_code(place, log, is_device):
    launched = a_failed_job(place, PLAN, log)
    assert (device_errors.in_log(JobFolder(place[0], launched.job)) is not None) is is_device


def test_the_host_is_left_out_for_a_while_and_the_work_is_tried_elsewhere_once(place):
    op, machine = _Op(place), Machine("m_1", "vast", "77", host_key="vast:4711")
    first = a_failed_job(place, PLAN, BROKEN)
    said = device_errors.advice(op, first, machine)
    assert "once more elsewhere: gpu plan --freeze" in said
    assert memory.load(op.project)["vast:4711"].is_cooling(op.clock.now())
    second = a_failed_job(place, OTHER, BROKEN)
    said = device_errors.advice(op, second, replace(machine, host_key="vast:4712"))
    assert "look at image and code" in said and "once more" not in said


def test_another_works_device_error_does_not_count_against_this_one(place):
    op, machine = _Op(place), Machine("m_1", "vast", "77", host_key="vast:4711")
    a_failed_job(place, PLAN, BROKEN, tree="other")
    assert "once more" in device_errors.advice(op, a_failed_job(place, OTHER, BROKEN), machine)
    assert device_errors.advice(op, a_failed_job(place, "c" * 64, b"Traceback: KeyError"), machine) is None
