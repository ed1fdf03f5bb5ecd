"""Death anywhere in a stop, a destroy or a sentinel pass: whoever comes next ends it, and books it once."""

from __future__ import annotations

import json

import pytest

from dying import dies
from gpu_skills.lifecycle import intents, machines
from gpu_skills.lifecycle.ending import release, stops
from gpu_skills.lifecycle.guard import sentinel, sentinel_records
from rented import rent

SIDES = pytest.mark.parametrize("side", ["before", "after"])
VENDORS = pytest.mark.parametrize("vendor", ["vast", "runpod"])


def charges(r, machine) -> list[tuple[str, float]]:
    path = r.project.path("charges.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["kind"], line.get("duration_s")) for line in lines if line.get("machine_id") == machine.id]


def is_over(r, machine) -> None:
    """Gone at the vendor, gone on record, booked once, nothing left open."""
    assert not r.burning()
    record = machines.find(r.project, machine.id)
    assert record.status == "destroyed"
    booked = charges(r, machine)
    assert booked and len(booked) == len(set(booked)), booked
    assert all(not intent.is_open for intent in intents.read(r.project).values() if intent.action == "destroy")


@SIDES
@VENDORS
def test_a_destroy_that_died_anywhere_is_brought_to_its_end(rig, vendor, side):
    r = rig(vendor, balance_usd=100_000)
    crossing = 0
    while True:
        crossing += 1
        machine = rent(r, number=crossing)
        died = dies(lambda: release.destroy(r.op, machine, why="asked", wait_s=600), crossing=crossing, side=side)  # noqa: B023
        r.sandbox.advance(20)
        assert release.destroy(r.op, machine, why="asked", wait_s=600) == "destroyed"
        is_over(r, machine)
        if not died:
            break
    assert crossing > 10


@SIDES
def test_a_stop_that_died_anywhere_is_stopped_by_the_next(rig, side):
    r = rig("vast", balance_usd=100_000)
    crossing = 0
    while True:
        crossing += 1
        machine = rent(r, number=crossing)
        died = dies(lambda: stops.stop(r.op, machine), crossing=crossing, side=side)  # noqa: B023
        assert stops.stop(r.op, machine).status == "stopped"
        assert not [e for e in r.sandbox.world.burning() if e["kind"] == "gpu"]
        assert release.destroy(r.op, machine, why="asked", wait_s=600) == "destroyed"
        is_over(r, machine)
        if not died:
            break
    assert crossing > 5


@SIDES
def test_a_pass_that_died_anywhere_is_made_good_by_the_next(rig, side):
    r = rig("runpod", balance_usd=100_000)
    crossing = 0

    def one_pass() -> sentinel.Pass:
        note = sentinel_records.recorder(r.op, "runpod")
        return sentinel.run_pass(
            r.reader, r.writer, r.project.project_id, account="acc", clock=r.clock, note=note, wait_s=300
        )

    while True:
        crossing += 1
        machine = rent(r, number=crossing, machine_class="job", hours=0.5, keeps=False)
        r.sandbox.advance(1800)
        died = dies(one_pass, crossing=crossing, side=side)
        one_pass()
        for _ in range(12):  # what the pass could not prove any more, looks at the record do
            if release.confirm(r.op, machine) == "destroyed":
                break
            r.sandbox.advance(40)
        is_over(r, machine)
        if not died:
            break
    assert crossing > 8
