"""An end that began and was not finished: no work starts on it, and one wrong look does not undo it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_skills.clock import timestamp
from gpu_skills.errors import NotOwned, NotReady
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import intents
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.guard import sentinel
from gpu_skills.lifecycle.recovery import reconcile
from run_by_hand import ByHand

both = pytest.mark.parametrize("vendor", ["vast", "runpod"])


@pytest.fixture
def begun(rig: Any):
    """A machine of which an action was written down, and then the process died."""

    def make(vendor: str, action: str | None) -> tuple[Any, ByHand]:
        r = rig(vendor, containers=False)
        hand = ByHand(r).upto("close")
        hand.ready()
        if action is not None:
            intents.begin(r.project, r.clock, action, "x1", machine_id=hand.machine_id, details={"why": "asked"})
        return r, hand

    return make


def shown(r: Any, monkeypatch: Any, **changes: Any) -> Any:
    """While this holds, the provider shows its machines otherwise than they are."""
    real = type(r.reader).machines
    patch = monkeypatch.context()
    inner = patch.__enter__()
    inner.setattr(type(r.reader), "machines", lambda self: [replace(seen, **changes) for seen in real(self)])
    return patch


@both
@pytest.mark.parametrize("action", ["destroy", "stop"])
def test_no_work_starts_on_a_machine_whose_end_has_begun(begun, vendor, action):
    r, hand = begun(vendor, action)
    with pytest.raises(NotReady) as caught:
        intents.require_staying(r.project, hand.machine_id)
    assert caught.value.next_step == "gpu reconcile" and action in caught.value.message
    reconcile.run(r.op, [vendor])
    if action == "stop":
        intents.require_staying(r.project, hand.machine_id)


@both
@pytest.mark.parametrize("action", ["destroy", "stop"])
def test_an_end_that_died_does_not_end_a_job_that_was_started_since(begun, vendor, action):
    r, hand = begun(vendor, action)
    job = r.op.ledger.new_job_id()
    JobFolder(r.project, job).write("job", {"id": job, "nonce": "00"})
    now = timestamp(r.clock.now())
    r.op.ledger.start({"id": job, "provider": vendor, "machine_id": hand.machine_id, "started_at": now})
    reconcile.run(r.op, [vendor])
    assert hand.machine.status == "ready" and r.op.ledger.latest(job)["status"] == "running" and r.burning()


@both
def test_one_look_without_its_label_does_not_end_a_destroy(begun, vendor, monkeypatch):
    r, hand = begun(vendor, "destroy")
    patch = shown(r, monkeypatch, label=None)
    with pytest.raises(NotOwned):
        release.confirm(r.op, hand.machine)
    patch.__exit__(None, None, None)
    assert r.burning()
    for _ in range(5):
        reconcile.run(r.op, [vendor])
        r.clock.sleep(60)
    assert hand.machine.status == "destroyed" and not r.burning()


@both
def test_what_was_shown_as_going_once_and_stays_meets_its_deadline(begun, vendor, monkeypatch):
    r, hand = begun(vendor, None)
    patch = shown(r, monkeypatch, status="terminating")
    reconcile.run(r.op, [vendor])
    patch.__exit__(None, None, None)
    reconcile.run(r.op, [vendor])
    assert hand.machine.status == "ready"
    r.clock.sleep(40 * 3600)
    for _ in range(5):
        reconcile.run(r.op, [vendor])
        r.clock.sleep(60)
    assert hand.machine.status in ("stopped", "terminating", "destroyed")


@both
def test_what_is_shown_as_going_for_ever_is_told_to_go_again_at_its_deadline(begun, vendor, monkeypatch):
    r, _ = begun(vendor, None)
    patch = shown(r, monkeypatch, status="terminating")
    r.clock.sleep(40 * 3600)
    for _ in range(5):
        reconcile.run(r.op, [vendor])
        r.clock.sleep(60)
    patch.__exit__(None, None, None)
    assert not r.burning()


@both
def test_a_sentinel_tells_what_is_said_to_be_going_long_past_its_deadline_to_go_again(begun, vendor, monkeypatch):
    r, _ = begun(vendor, None)
    r.clock.sleep(40 * 3600)
    patch = shown(r, monkeypatch, status="terminating")
    done = sentinel.run_pass(
        r.reader, r.writer, r.project.project_id, account=r.op.account(vendor), clock=r.clock, wait_s=5
    )
    patch.__exit__(None, None, None)
    assert [row.alarm is not None for row in done.rows] == [True]
    assert not r.burning()
