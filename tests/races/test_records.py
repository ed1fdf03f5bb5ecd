"""Many processes on the same files: nothing is lost, nothing is booked or told twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from gpu_skills.lifecycle import intents, machines, runs, states
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.state import budget, journal
from races.racers import race
from run_by_hand import ByHand, job

VENDORS = pytest.mark.parametrize("vendor", ["vast", "runpod"])


def charges(r: Any) -> list[dict[str, Any]]:
    return [line for _offset, _number, line in journal.scan(r.op.ledger.charges)]


def test_32_processes_write_one_registry_and_lose_nothing(rig: Any) -> None:
    r = rig("vast")
    machines.save(r.project, Machine(id="m_shared", provider="vast", host="1", status="ready"))

    def write(mine: Any, number: int) -> None:
        own = f"m_{number:04d}"
        machines.save(mine.project, Machine(id=own, provider="vast", host=str(100 + number), status="booting"))
        for turn in range(4):
            machines.update(mine.project, own, lambda m, turn=turn: replace(m, extra={**m.extra, f"turn{turn}": turn}))
            machines.update(
                mine.project, "m_shared", lambda m: replace(m, extra={"times": int(m.extra.get("times", 0)) + 1})
            )

    assert Counter(outcome.code for outcome in race(r, 32, write)) == {None: 32}
    found = {m.id: m for m in machines.all_machines(r.project)}
    assert len(found) == 33 and found["m_shared"].extra["times"] == 32 * 4
    for number in range(32):
        record = found[f"m_{number:04d}"]
        assert record.instance_id == str(100 + number) and [record.extra[f"turn{n}"] for n in range(4)] == [0, 1, 2, 3]


def test_32_processes_append_to_one_journal_and_one_ledger_and_tear_no_line(rig: Any) -> None:
    r = rig("vast")

    def write(mine: Any, number: int) -> list[str]:
        for turn in range(4):
            intents.observe(mine.project, mine.clock, "seen", machine_id=f"m_{number}", details={"turn": turn})
        line = mine.op.ledger.start(
            {"provider": "vast", "machine_id": f"m_{number}", "started_at": "2026-01-02T03:04:05Z"}
        )
        mine.op.ledger.finish({"id": line["id"], "status": "succeeded", "cost_usd": 0.25, "artifacts": []})
        return line["id"]

    ids = [outcome.value for outcome in race(r, 32, write)]
    assert len(set(ids)) == 32 and None not in ids
    seen = intents.observations(r.project, "seen")
    assert Counter(event["machine_id"] for event in seen) == {f"m_{number}": 4 for number in range(32)}
    assert r.op.ledger.spend().total_usd == 8 and r.op.ledger.verify().ok


@VENDORS
def test_reconciles_at_once_finish_what_was_left_once(rig: Any, vendor: str) -> None:
    """A late arrival of an expired approval, a destroy that died, a machine that vanished: all are ended and booked."""
    r = rig(vendor)
    late, dying, vanished = (ByHand(r, approval=f"a_{n:016x}") for n in range(3))
    late.upto("create")
    for hand in (dying, vanished):
        hand.upto("close")
        hand.ready()
    job(r, dying.machine, 300)
    r.clock.sleep(3700)
    reconcile.run(r.op, [vendor])
    intents.begin(r.project, r.clock, "destroy", "x1", machine_id=dying.machine_id, reason="asked")
    r.writer.destroy(vanished.machine.instance_id)
    for pause_s in (0, 40, 40, 40, 600, 1200):
        r.clock.sleep(pause_s)
        assert {o.code for o in race(r, 4, lambda mine, number: str(reconcile.run(mine.op, [vendor]).is_clear))} == {
            None
        }
    assert reconcile.run(r.op, [vendor]).is_clear and not r.burning()
    found = machines.all_machines(r.project)
    assert len(found) == 3 and {m.status for m in found} <= {*states.FINAL}
    assert all(n == 1 for n in Counter(line["id"] for line in charges(r)).values())
    assert budget.open_reservations(r.project, r.op.environ) == {} and all(
        run.is_settled for run in runs.own_runs(r.op)
    )
    assert abs(r.op.ledger.spend(include_charges=True).total_usd - r.billed_usd()) < 0.005


@VENDORS
def test_a_destroy_and_a_reconcile_and_another_destroy_at_once_end_one_machine_and_book_it_once(
    rig: Any, vendor: str
) -> None:
    r = rig(vendor)
    hand = ByHand(r).upto("close")
    machine = hand.ready()
    r.clock.sleep(600)

    def end(mine: Any, number: int) -> str:
        if number % 3 == 2:
            return str(len(reconcile.run(mine.op, [vendor]).findings))
        return release.destroy(mine.op, machine, why="asked", wait_s=600)

    outcomes = race(r, 6, end)
    assert {outcome.code for outcome in outcomes} == {None}
    assert {outcomes[n].value for n in (0, 1, 3, 4)} == {"destroyed"} and not r.burning()
    assert hand.machine.status == "destroyed" and not [i for i in intents.read(r.project).values() if i.is_open]
    assert Counter(line["kind"] for line in charges(r)) == {"setup": 1, "idle": 1}
