"""Commands of one user in several terminals: whole ones, each a process, against machines that can be logged into."""

from __future__ import annotations

import json
import time
from typing import Any

from races.commands import frozen, terminals
from races.racers import race
from sandbox_fixture import eventually

__all__ = ["terminals"]


def test_the_same_plan_in_four_terminals_at_once_is_one_machine_and_one_job(terminals: Any) -> None:
    here = terminals()
    plan = frozen(here)
    told = here.at_once(*[["job", "run", "--plan", plan, "--yes", "--detach"]] * 4)
    assert [code for code, _ in told] == [0] * 4, told
    assert here.r.creates == 1 and len({document["job"] for _, document in told}) == 1
    lines = [json.loads(line) for line in (here.root / ".pi/gpu/jobs.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 1 and len(here.r.burning()) == 1


def test_a_setup_in_four_terminals_at_once_is_one_machine(terminals: Any) -> None:
    """Each would measure a plan of its own and have its own yes. Later ones find the machine, or are told to wait."""
    here = terminals()
    (here.root / "gpu.yaml").write_text("provider: vast\ncompute: {gpu: RTX 4090, disk_gb: 20}\n")
    told = here.at_once(*[["setup", "--yes"]] * 4)
    refusals = {document["error"]["code"] for code, document in told if code}
    assert 0 in [code for code, _ in told] and refusals <= {"state_busy"}, told
    assert here.r.creates == 1 and len(here.r.burning()) == 1
    assert here.gpu("setup")[0] == 0 and here.r.creates == 1


def test_launches_at_once_arm_a_fuse_on_each_machine_and_read_its_receipt(terminals: Any) -> None:
    here = terminals()
    compute = "{gpu: RTX 4090, candidates: [RTX 3090, RTX A6000], disk_gb: 20}"
    (here.root / "gpu.yaml").write_text(f"provider: vast\ncompute: {compute}\n")
    path = here.root / ".pi/gpu/policy.json"
    policy = json.loads(path.read_text())
    policy["ceilings"] |= {"machines": 5, "day_usd": 200, "month_usd": None, "job_usd": None, "session_usd": None}
    path.write_text(json.dumps(policy))
    plans = [frozen(here, f"sleep 60 # {number}") for number in range(4)]
    told = here.at_once(*[["job", "run", "--plan", plan, "--yes", "--detach"] for plan in plans])
    assert [code for code, _ in told] == [0] * 4, told
    records = json.loads((here.root / ".pi/gpu/machines.json").read_text())
    ready = [record for record in records if record["status"] in ("ready", "busy")]
    assert len(ready) == len({record["fuse"]["intent"] for record in ready}) == len(here.r.burning()) == 4
    for record in ready:
        fuse = record["fuse"]
        assert (fuse["intent"], fuse["deadline_at"], fuse["key"]) == (record["intent"], record["deadline_at"], "proven")


def test_a_destroy_during_a_pull_waits_for_it_and_nothing_is_lost(terminals: Any, monkeypatch: Any) -> None:
    from gpu_skills.jobs import collect

    here = terminals()
    code, document = here.gpu("job", "run", "--plan", frozen(here), "--yes", "--detach")
    assert code == 0, document
    job, machine = document["job"], document["machine"]
    eventually(lambda: here.gpu("job", "status", job)[1]["state"] == "succeeded", within_s=30)
    begun, download = here.root / "begun", collect.download

    def slow_download(*args: Any, **options: Any) -> Any:
        begun.touch()
        time.sleep(1.5)
        return download(*args, **options)

    monkeypatch.setattr(collect, "download", slow_download)

    def act(mine: Any, number: int) -> Any:
        if number == 0:
            return here.gpu("job", "pull", job), time.monotonic()
        eventually(begun.exists)
        return here.gpu("machine", "destroy", machine, "--yes"), time.monotonic()

    pulled, destroyed = (outcome.value for outcome in race(here.r, 2, act))
    assert pulled[0][0] == 0, pulled
    outputs = here.root / "gpu-outputs" / job
    for number in range(20):
        assert (outputs / f"part-{number}").read_bytes() == bytes([number]) * 50_000
    (code, document), ended = destroyed
    assert code in (0, 3), document
    if code == 0:
        assert ended > pulled[1] and not here.r.burning()
    else:
        assert document["error"]["code"] in ("not_collected", "state_busy") and here.r.burning()
        assert here.gpu("machine", "destroy", machine, "--yes")[0] == 0 and not here.r.burning()
