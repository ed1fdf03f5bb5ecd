"""Twenty launches at once: no offer twice, no ceiling passed, a fuse in each."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from gpu_skills.clock import parse_timestamp
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.lifecycle.renting import provision
from gpu_skills.state import budget
from races.racers import race
from renting import approved, guarded, instances

VENDORS = pytest.mark.parametrize("vendor", ["vast", "runpod"])
GPUS = {
    "vast": ("RTX 4090", "RTX 3090", "RTX A6000", "RTX A5000", "A100 SXM4"),
    "runpod": ("NVIDIA RTX A5000", "RTX 4090", "RTX 3090", "NVIDIA RTX A6000"),
}
LAUNCHES = 20


def ceilings(r: Any, **changes: Any) -> None:
    path = r.project.path("policy.json")
    policy = json.loads(path.read_text())
    policy["ceilings"] |= {"machines": None, "day_usd": None, "month_usd": None, **changes}
    path.write_text(json.dumps(policy))


def given_to(rigs: list[Any], count: int, **plan: Any) -> list[Any]:
    """That many plans with a yes, of each project in turn."""
    vendor = rigs[0].vendor
    return [approved(rigs[n % len(rigs)], gpus=GPUS[vendor], **plan) for n in range(count)]


def launched(given: list[Any]) -> Any:
    def launch(mine: Any, number: int) -> str:
        return provision.provision(mine.op, *given[number]).machine.id

    return launch


def left_of(r: Any) -> int:
    """GPUs of the classes asked for that nobody has."""
    return sum(
        h.free_gpus for h in r.sandbox.world.catalogue.hosts if h.vendor == r.vendor and h.gpu.name in GPUS[r.vendor]
    )


def command_of(r: Any, instance: Any) -> str:
    """What a machine was told in its create to run at each start."""
    return str(instance.extra["onstart"] if r.vendor == "vast" else instance.extra["pod"].args)


@VENDORS
def test_twenty_launches_share_no_offer_and_each_machine_is_born_with_its_own_fuse(rig: Any, vendor: str) -> None:
    r = rig(vendor)
    guarded(r)
    ceilings(r)
    outcomes = race(r, LAUNCHES, launched(given_to([r], LAUNCHES, worst_case_usd=Decimal("0.10"), deadline_s=300.0)))
    won = [outcome.value for outcome in outcomes if outcome.code is None]
    assert {outcome.code for outcome in outcomes} <= {None, "no_capacity"} and len(set(won)) == len(won)
    records = {m.id: m for m in machines.all_machines(r.project)}
    alive = {str(i.id): i for i in instances(r) if not i.is_destroyed}
    assert {records[id].instance_id for id in won} == set(alive)
    assert len(won) == LAUNCHES or left_of(r) == 0, "somebody was turned away although there was stock"
    attempts = [a for run in runs.own_runs(r.op) for a in run.attempts if a.result == "done"]
    assert vendor == "runpod" or len({a.offer_id for a in attempts}) == len(attempts), "one offer was taken twice"
    for id in won:
        machine = records[id]
        command = command_of(r, alive[machine.instance_id])
        deadline = int(parse_timestamp(machine.deadline_at).timestamp())
        assert machine.intent in command and str(deadline) in command
        assert labels.parse(alive[machine.instance_id].label).deadline_at == parse_timestamp(machine.deadline_at)
        assert machine.status == "ready"
    creates = [i for i in intents.read(r.project).values() if i.action == "create"]
    assert len(creates) == r.creates and not [i for i in creates if i.is_open]


@VENDORS
@pytest.mark.parametrize(
    ("ceiling", "most"), [({"machines": 6}, 6), ({"day_usd": 7.5}, 7), ({"month_usd": 5}, 5), ({"rate_usd_hr": 1}, 0)]
)
def test_twenty_launches_of_two_projects_pass_no_ceiling(
    rig: Any, tmp_path: Any, vendor: str, ceiling: dict[str, Any], most: int
) -> None:
    """Each asks for at most $1.00 at up to $1.20/h; who comes too late is refused before anything is asked for."""
    one = rig(vendor)
    guarded(one)
    rigs = [one, one.another(tmp_path / "second")]
    for r in rigs:
        ceilings(r, **ceiling)
    outcomes = race(
        one, LAUNCHES, launched(given_to(rigs, LAUNCHES, worst_case_usd=Decimal(1), deadline_s=2400.0)), among=rigs
    )
    codes = [outcome.code for outcome in outcomes]
    assert codes.count(None) + codes.count("no_capacity") == most and (codes.count(None) or not most)
    assert codes.count("over_ceiling") == LAUNCHES - most and set(codes) <= {None, "over_ceiling", "no_capacity"}
    assert len([i for i in instances(one) if not i.is_destroyed]) == codes.count(None) <= most
    books = budget.books(one.project, one.op.ledger, one.clock, one.op.environ)
    assert len(books.reservations) == codes.count(None) and books.reserved_usd <= most


@VENDORS
def test_two_projects_on_one_account_never_touch_each_others_machines(rig: Any, tmp_path: Any, vendor: str) -> None:
    """One destroys, reconciles and lets a sentinel end everything that is past its deadline; the other's go on."""
    one = rig(vendor)
    guarded(one)
    other = one.another(tmp_path / "second")
    for r in (one, other):
        ceilings(r)
    given = given_to([one, other], 6, worst_case_usd=Decimal("0.10"), deadline_s=300.0)
    assert {outcome.code for outcome in race(one, 6, launched(given), among=[one, other])} == {None}
    theirs = {m.instance_id: m for m in machines.all_machines(other.project)}
    before = {i.label: i.phase for i in instances(one) if str(i.id) in theirs}

    def end(mine: Any, number: int) -> None:
        if number % 2:
            reconcile.run(mine.op, [vendor], adopt=True)
        for machine in machines.all_machines(mine.project) if number % 2 == 0 else ():
            release.destroy(mine.op, machine, why="asked")

    assert {outcome.code for outcome in race(one, 4, end)} == {None}
    assert {i.label: i.phase for i in instances(one) if str(i.id) in theirs} == before
    assert {m.status for m in machines.all_machines(one.project)} <= {*states.FINAL, "terminating"}
    assert len([i for i in instances(one) if not i.is_destroyed]) == 3
    assert {m.instance_id: m for m in machines.all_machines(other.project)} == theirs
