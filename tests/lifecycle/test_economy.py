"""What following costs: providers limit how often they are asked, and each call is a moment in which one may fail."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpu_skills.lifecycle.guard import sentinel
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.providers.base import Requirements
from races.commands import frozen, terminals
from races.conftest import plain_rig, rig
from rented import rent
from sandbox_fixture import eventually

__all__ = ["plain_rig", "rig", "terminals"]
pytestmark = pytest.mark.subprocess
VENDORS = pytest.mark.parametrize("vendor", ["vast", "runpod"])

MOST_CALLS = 40
MANY = 50
PAGE = {"vast": 25, "runpod": 1000}


def lasts_a_minute(here: Any, done: Any) -> threading.Thread:
    """Lets a minute of the vendor's time pass while the job runs, and the job end with it."""
    ledger = here.root / ".pi/gpu/jobs.jsonl"

    def minute() -> None:
        eventually(lambda: ledger.exists() and "running" in ledger.read_text(), within_s=60)
        for _ in range(12):
            here.r.sandbox.advance(5)
            threading.Event().wait(0.1)
        done.touch()

    thread = threading.Thread(target=minute)
    thread.start()
    return thread


@VENDORS
def test_a_whole_run_of_a_job_of_a_minute_costs_at_most_forty_calls(terminals: Any, tmp_path: Any, vendor: str) -> None:
    """From the plan to the machine's proven end; it boots for more than a minute, as the vendors' do."""
    here = terminals(vendor, limits="virtual", delays={"provisioning_s": 10, "loading_s": 70, "stopping_s": 5})
    world, done = here.r.sandbox.world, tmp_path / "done"
    plan = frozen(here, f"while [ ! -e {done} ]; do sleep 0.05; done; echo out > $GPU_OUTPUT_DIR/out")
    minute = lasts_a_minute(here, done)
    code, document = here.gpu("job", "run", "--plan", plan, "--yes", "--hold-for", "0")
    minute.join()
    assert (code, document["state"], document["machine_state"]) == (0, "succeeded", "destroyed"), document
    (machine,) = json.loads((here.root / ".pi/gpu/machines.json").read_text())
    assert not here.r.burning() and here.r.creates == 1 and machine["status"] == "destroyed"
    assert (here.root / f"gpu-outputs/{document['job']}/out").read_text() == "out\n"
    assert world.calls.total() <= MOST_CALLS, dict(world.calls)
    assert dict(world.too_frequent) == {}, "asked more often than the vendor documents"


# many machines --------------------------------------------------------------------------------------------------------


@pytest.fixture
def crowd(rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Fifty machines of one project that run, of whatever class the market has, on record as provision leaves them."""
    monkeypatch.setattr("rented.NEED", Requirements(disk_gb=50))

    def make(vendor: str) -> Any:
        r = rig(vendor, balance_usd=100_000)
        for number in range(MANY):
            rent(r, machine_class="job", number=number + 1, age_s=60)
        assert len(r.reader.machines()) == MANY
        r.sandbox.world.calls.clear()
        return r

    return make


def asked(r: Any) -> dict[str, int]:
    return {call: times for (_, call), times in r.sandbox.world.calls.items() if times}


@VENDORS
def test_fifty_machines_are_followed_with_one_list_per_pass(crowd: Any, vendor: str) -> None:
    r = crowd(vendor)
    pages = math.ceil(MANY / PAGE[vendor])
    assert reconcile.run(r.op, [vendor]).is_clear
    assert asked(r) == {"list": pages}
    r.sandbox.world.calls.clear()
    account = r.op.account(vendor)
    done = sentinel.run_pass(r.reader, r.writer, r.project.project_id, account=account, clock=r.clock)
    assert len(done.rows) == MANY and asked(r) == {"list": pages}


@VENDORS
def test_fifty_machines_past_their_deadline_cost_one_request_each_and_one_list_per_look(
    crowd: Any, vendor: str
) -> None:
    """Stopped, and after a day destroyed: each is told once and asked for once, all are looked at together."""
    r = crowd(vendor)
    pages, account, receipts = math.ceil(MANY / PAGE[vendor]), r.op.account(vendor), []
    looks = 1 + math.ceil(sentinel.WAIT_S / sentinel.LOOK_EVERY_S)
    for hours, result, own_calls in ((7, "stopped", 1), (26, "destroyed", 2)):
        r.clock.sleep(hours * 3600)
        r.sandbox.world.calls.clear()
        done = sentinel.run_pass(
            r.reader, r.writer, r.project.project_id, account=account, clock=r.clock, earlier=receipts
        )
        receipts.append(done.to_record())
        assert {row.result for row in done.rows} == {result} and len(done.rows) == MANY
        counts = asked(r)
        assert counts["list"] <= looks * pages and counts.get("charges", 0) <= looks, counts
        assert sum(counts.values()) <= counts["list"] + counts.get("charges", 0) + own_calls * MANY, counts
    assert not r.burning()
