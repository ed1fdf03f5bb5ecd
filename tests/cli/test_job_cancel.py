"""A cancel says that a job has ended only when it has."""

from __future__ import annotations

import json

import pytest

from fake_clock import FakeClock
from gpu_skills.lifecycle.connect import Link

STATUS = {
    "job": "J-000001", "nonce": "n", "phase": "run", "exit_code": None, "reason": None, "message": None,
    "started_at": "2026-01-02T03:04:05Z", "started_epoch_s": 1767323045.0, "ended_at": None, "duration_s": 1.0,
    "log_bytes": 0, "progress": None, "outputs": None,
}  # fmt: skip


class Machine:
    """Answers as a runner does whose job outlives `stubborn` requests to end, each of which takes ten seconds."""

    host = "box"

    def __init__(self, clock, stubborn):
        self.clock, self.left = clock, stubborn

    def call(self, verb, args, on_data=None, **more):
        if verb == "cancel":
            self.clock.advance(10)
            self.left -= 1
        status = {**STATUS, "state": "running" if self.left >= 0 else "cancelled"}
        if verb == "cancel":
            return status
        return {
            "status": {"jobs": [status], "left_out": 0},
            "manifest": {"files": 0, "bytes": 0, "final": True, "skipped": [], "skipped_left_out": 0},
            "events": {"next": 0},
        }[verb]

    def close(self):
        pass


@pytest.mark.parametrize(("stubborn", "exit_code", "state"), [(1, 0, "cancelled"), (9, 1, "running")])
def test_a_job_that_does_not_end_in_time_is_not_said_to_have_ended(tmp_path, gpu, stubborn, exit_code, state):
    clock = FakeClock()
    assert gpu("init").exit_code == 0
    machine = {"id": "m_1", "provider": "ssh", "status": "ready", "ssh": {"host": "box"}}
    assert gpu("registry", "put", "machines", stdin=json.dumps(machine).encode()).exit_code == 0
    start = {"id": "J-000001", "status": "running", "machine_id": "m_1", "started_at": "2026-01-02T03:04:05Z"}
    assert gpu("ledger", "append", stdin=json.dumps(start).encode(), clock=clock).exit_code == 0
    folder = tmp_path / ".pi/gpu/jobs/J-000001"
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text('{"machine_id": "m_1", "spec": {}, "upload": {}}')
    result = gpu(
        "job", "cancel", "--json", clock=clock, connect=lambda machine: Link(machine, Machine(clock, stubborn))
    )
    assert (result.exit_code, result.document["state"]) == (exit_code, state)
    assert ("not ended yet" in result.stderr) == (state == "running")
