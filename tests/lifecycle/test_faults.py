"""Every fault at every call it can affect, through a whole life: done, refused, or uncertain with a way out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from faulty_lives import PHASES, Life, fault
from gpu_skills.errors import ConflictingState
from gpu_skills.lifecycle.ending import stops
from gpu_skills.lifecycle.guard import sentinel
from gpu_skills.sandbox.faults import ACCOUNT, CALL, INSTANCE, KINDS, WORK
from rented import rent

pytestmark = pytest.mark.subprocess

READS = {
    "vast": ("search", "user", "list", "show", "logs", "charges"),
    "runpod": ("gpus", "graphql", "list", "show", "logs", "charges"),
}
WRITES = {
    "vast": ("create", "attach_ssh", "state", "destroy"),
    "runpod": ("create", "action", "update", "destroy"),
}
# name → the arguments it is tried with at a read, and those more at a write.
OF_CALLS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "lost_reply": ([{}], []),
    "lost_request": ([{}], []),
    "duplicate": ([], [{}]),
    "slow": ([{"seconds": 0.6}], []),
    "half_body": ([{}], []),
    "html": ([{}, {"status": 200}], [{"done": True}]),
    "failure_200": ([{}], [{"done": True}]),
    "429": ([{"retry_after": 20}, {"style": "json"}], []),
    "500": ([{}], [{"done": True}]),
    "502": ([{}], [{"done": True}]),
    "503": ([{}], []),
    "504": ([{}], [{"done": True}]),
    "401": ([{}], []),
    "403": ([{}, {"html": True}], []),
    "not_found": ([{}], []),
    "garbage": ([{}], []),
}
OF_WORK: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "offer_gone": [("create", {"status": 404}), ("create", {"status": 410})],
    "no_capacity": [("create", {})],
    "insufficient_balance": [("create", {})],
    "error_with_contract": [("create", {})],
    "wrong_id": [("create", {})],
    "list_empty": [("list", {})],
    "destroy_again": [("destroy", {})],
}
OF_INSTANCES: dict[str, dict[str, Any]] = {
    name: {} for name, (where, _) in KINDS.items() if where == INSTANCE and name != "well"
} | {"outbid": {"after": 30, "resume": 900}, "status_error": {"message": "Error: OCI runtime create failed"}}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for in real time: a log that stays open, an answer that is late."""
    monkeypatch.setattr("gpu_skills.providers.runpod.reader._LOG_STREAM_S", 0.03)
    monkeypatch.setattr("gpu_skills.wire.READ_TIMEOUT_S", 0.3)


def test_no_fault_and_no_call_of_a_life_is_left_out(rig: Any) -> None:
    by_place = {where: {n for n, (w, _) in KINDS.items() if w == where} for where in (CALL, WORK, INSTANCE, ACCOUNT)}
    assert set(OF_CALLS) == by_place[CALL] - {"ok"} and set(OF_WORK) == by_place[WORK]
    assert set(OF_INSTANCES) == by_place[INSTANCE] - {"well"} and by_place[ACCOUNT] == {"zero_balance"}


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_life_without_faults_makes_the_calls_that_are_spoilt_here(rig: Any, vendor: str) -> None:
    life = Life(rig(vendor, containers=False)).live({})
    calls = {call for (_, call), times in life.r.sandbox.world.calls.items() if times}
    assert calls == {*READS[vendor], *WRITES[vendor]} and life.errors == [] and life.most_alive == 1


def _spoilt_calls() -> list[Any]:
    found = []
    for vendor in ("vast", "runpod"):
        for call in (*READS[vendor], *WRITES[vendor]):
            for name, (everywhere, at_writes) in OF_CALLS.items():
                for args in [*everywhere, *(at_writes if call in WRITES[vendor] else [])]:
                    found.append(_case(vendor, name, call, args))
        for name, places in OF_WORK.items():
            found += [_case(vendor, name, call, args) for call, args in places]
    return found


def _case(vendor: str, name: str, call: str, args: dict[str, Any]) -> Any:
    words = [vendor, call, name, *(f"{key}={value}" for key, value in args.items() if key not in ("seconds",))]
    return pytest.param(vendor, name, call, args, id="-".join(words))


@pytest.mark.parametrize(("vendor", "name", "call", "args"), _spoilt_calls())
def test_a_call_that_is_spoilt_once_in_each_phase(
    rig: Any, vendor: str, name: str, call: str, args: dict[str, Any]
) -> None:
    life = Life(rig(vendor, containers=False))
    life.live({phase: [fault(name, call, **args)] for phase in PHASES})
    assert life.most_alive <= (2 if name == "duplicate" else 1)


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
@pytest.mark.parametrize("name", sorted(OF_INSTANCES))
def test_a_machine_that_is_made_with_a_fault(rig: Any, vendor: str, name: str) -> None:
    life = Life(rig(vendor, containers=False))
    life.live({"setup": [fault(name, "create", **OF_INSTANCES[name])]})
    assert life.most_alive == 1


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
@pytest.mark.parametrize("phase", ["use", "stop", "start", "destroy"])
@pytest.mark.parametrize("name", sorted({*OF_INSTANCES, "zero_balance"}))
def test_a_machine_that_is_struck_later(rig: Any, vendor: str, phase: str, name: str) -> None:
    life = Life(rig(vendor, containers=False))
    life.live({phase: [fault(name, **OF_INSTANCES.get(name, {}))]})
    assert life.most_alive == 1


# two at once ----------------------------------------------------------------------------------------------------------

PAIRS, PAIRS_AT_ONCE = 120, 20


def _pairs(vendor: str) -> Iterator[Any]:
    """A sample that is the same each time: two faults, each before a phase of its own, once or for a while."""
    dice = random.Random(f"pairs of {vendor}")
    spoilt = [tuple(case.values[1:]) for case in _spoilt_calls() if case.values[0] == vendor]
    for number in range(PAIRS):
        chosen: dict[str, list[dict[str, Any]]] = {}
        for _ in range(2):
            times = dice.choice((1, 2, 4, 12))
            kind = dice.choice(("call", "call", "made", "struck"))
            if kind == "call":
                name, call, args = dice.choice(spoilt)
                rule, phase = fault(name, call, times=times, **args), dice.choice(PHASES)
            elif kind == "made":
                name = dice.choice(sorted(OF_INSTANCES))
                rule, phase = fault(name, "create", times=min(times, 2), **OF_INSTANCES[name]), "setup"
            else:
                name = dice.choice(sorted({*OF_INSTANCES, "zero_balance"}))
                rule, phase = fault(name, **OF_INSTANCES.get(name, {})), dice.choice(PHASES[1:5])
            chosen.setdefault(phase, []).append(rule)
        words = [f"{phase}:{rule['fault']}" for phase, rules in chosen.items() for rule in rules]
        marks = () if number < PAIRS_AT_ONCE else (pytest.mark.slow,)
        yield pytest.param(vendor, chosen, id="-".join((vendor, str(number), *words)), marks=marks)


@pytest.mark.parametrize(("vendor", "faults"), [*_pairs("vast"), *_pairs("runpod")])
def test_two_faults_in_one_life(rig: Any, vendor: str, faults: dict[str, list[dict[str, Any]]]) -> None:
    life = Life(rig(vendor, containers=False)).live(faults)
    doubled = any(rule["fault"] == "duplicate" for rules in faults.values() for rule in rules)
    assert life.most_alive <= (2 if doubled else 1)


# nobody left but the sentinel -----------------------------------------------------------------------------------------

OF_A_PASS = {
    "vast": [("list", True), ("show", False), ("state", True), ("destroy", False), ("charges", False)],
    "runpod": [("list", True), ("show", False), ("action", True), ("destroy", False), ("charges", False)],
}
ENDINGS = ("lost_reply", "lost_request", "half_body", "html", "429", "500", "401", "not_found", "garbage")


def _spoilt_passes() -> Iterator[Any]:
    """Each call of a pass, for a machine whose disk is kept and for one that goes at once."""
    for vendor, calls in OF_A_PASS.items():
        for call, of_a_stop in calls:
            for name in ENDINGS:
                for machine_class in ("project", "job") if of_a_stop else ("job",):
                    yield pytest.param(vendor, machine_class, call, name, id=f"{vendor}-{machine_class}-{call}-{name}")


@pytest.mark.parametrize(("vendor", "machine_class", "call", "name"), list(_spoilt_passes()))
def test_a_sentinel_alone_ends_the_bill_whatever_goes_wrong_in_its_first_pass(
    rig: Any, vendor: str, machine_class: str, call: str, name: str
) -> None:
    r = rig(vendor, containers=False)
    keeps = machine_class == "project"
    rent(r, machine_class=machine_class, hours=1, keeps=keeps, on_record=False)
    project, account = r.project.project_id, r.op.account(vendor)
    receipts: list[dict[str, Any]] = []

    def passes(times: int) -> sentinel.Pass:
        for _ in range(times):
            done = sentinel.run_pass(r.reader, r.writer, project, account=account, clock=r.clock, earlier=receipts)
            receipts[:] = [done.to_record()]
            r.clock.sleep(600)
        return done

    r.clock.sleep(3600)
    r.fault(name, call, times=6)
    passes(1)
    r.sandbox.faults.clear()
    done = passes(1)
    rate = r.sandbox.world.account(vendor).bill.burn_usd_hr()
    assert done.is_confirmed and float(rate) < 0.05, "the GPU bills no more"
    r.clock.sleep(25 * 3600)
    assert passes(2).is_confirmed and not r.burning()


# what these lives have shown ------------------------------------------------------------------------------------------


def test_a_pod_beyond_recovery_goes_at_its_deadline_since_nothing_stops_it(rig: Any) -> None:
    """RunPod bills it and takes no stop: a sentinel that only tried to stop it would watch it bill for ever."""
    r = rig("runpod", containers=False)
    machine = rent(r, hours=1)
    r.sandbox.world.apply_faults([{"match": {"instance": machine.instance_id}, "fault": "exited"}])
    with pytest.raises(ConflictingState) as caught:
        stops.stop(r.op, machine)
    assert caught.value.next_step == f"gpu machine destroy {machine.id}" and r.burning()
    r.clock.sleep(3600)
    project, account = r.project.project_id, r.op.account("runpod")
    done = sentinel.run_pass(r.reader, r.writer, project, account=account, clock=r.clock)
    assert [row.result for row in done.rows] == ["destroyed"] and not r.burning()


def test_a_start_that_arrived_twice_is_no_refusal(rig: Any) -> None:
    """The second answer says that it starts already. Called stopped, its machine would bill on no record."""
    life = Life(rig("runpod", containers=False))
    life.live({"start": [fault("duplicate", "action")]})
    assert life.errors == []


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_machine_that_started_by_itself_is_brought_up_under_the_deadline_it_has(rig: Any, vendor: str) -> None:
    r = rig(vendor, containers=False)
    life = Life(r)
    life.set_up()
    deadline = life.machine.deadline_at
    rule = fault("outbid", after=1, resume=300)
    r.sandbox.world.apply_faults([{**rule, "match": {"instance": life.machine.instance_id}}])
    r.clock.sleep(60)
    life.reconciled()
    assert life.machine.status == "stopped"
    r.clock.sleep(600)
    life.reconciled()
    assert life.machine.status == "booting"
    life.set_up()
    assert (life.machine.status, life.machine.deadline_at) == ("ready", deadline) and life.errors == []


def test_a_machine_of_any_class_in_gpu_yaml_is_started_again(rig: Any) -> None:
    life = Life(rig("runpod", containers=False))
    life.live({"setup": [fault("no_capacity", "create")]})
    assert life.errors == [] and life.r.creates == 2
