"""What has to be true after a death, whatever it left behind: asked of a rig's files, its vendor and its bill."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills import schemas
from gpu_skills.errors import GpuError
from gpu_skills.jobs import release
from gpu_skills.jobs.records import JobFolder, is_collected
from gpu_skills.lifecycle import intents, labels, machines, runs, states
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.state import budget, files, journal, registry
from gpu_skills.state.ledger import Ledger

# A scheduler calls every few minutes. With the last one what was on its way at a death has arrived or never will.
PAUSES_S = (0.0, 150.0, 600.0)
CHARGES_ARE_WRITTEN_S = 1200.0
_LINES = {
    "journal.jsonl": "journal",
    "approvals.jsonl": "approvals",
    "charges.jsonl": "charges",
    "jobs.jsonl": "jobs",
    "jobs.head.jsonl": "ledger_head",
}
_JOB_FILES = ("job", "accepted", "manifest", "collected", "ended", "abandoned", "events_cursor")


def reborn(r: Any) -> None:
    """Another process comes: it remembers nothing but what is on disk."""
    if hasattr(r, "reborn"):
        r.reborn()
    else:
        r.op = replace(r.op, ledger=Ledger(r.project, r.clock))


def reconciled(r: Any) -> reconcile.Report:
    """One pass of another process, and what must hold after each."""
    reborn(r)
    report = reconcile.run(r.op, [r.vendor])
    all_that_bills_is_recorded(r)
    for finding in report.findings:
        assert finding.next_step or not finding.is_uncertain, finding
    return report


def scheduled(r: Any) -> reconcile.Report:
    """As a scheduler would."""
    for pause_s in PAUSES_S:
        r.clock.sleep(pause_s)
        report = reconciled(r)
    return report


def all_that_bills_is_recorded(r: Any) -> None:
    alive = {m.instance_id for m in machines.all_machines(r.project) if m.status not in states.FINAL}
    burning = {resource.removeprefix("instance-").removeprefix("volume-") for resource in r.burning()}
    assert burning <= alive, f"{burning - alive} bills and is not on record"


def nothing_was_rented_twice(r: Any, creates: int = 1) -> None:
    """At most `creates` requests, one for each intent that was written down, and at most one machine of an approval."""
    sent = [i for i in intents.read(r.project).values() if i.action == "create"]
    assert r.creates <= min(creates, len(sent)), (r.creates, creates, len(sent))
    alive = [i for i in r.sandbox.world.instances.values() if not i.is_destroyed]
    parsed = [label.intent for i in alive if (label := labels.ours(i.label, r.project.project_id)) is not None]
    assert len(parsed) == len(set(parsed)) == len(alive), parsed
    for run in runs.own_runs(r.op):
        mine = {attempt.intent for attempt in run.attempts}
        assert len(mine & set(parsed)) <= 1, run


def every_record_validates(r: Any) -> None:
    state = r.project.state
    assert registry.validate(r.project) == []
    for name, schema in _LINES.items():
        _lines_fit(state / name, schema)
    for path in r.op.user_state.glob("accounts/*/journal.jsonl"):
        _lines_fit(path, "journal")
    for path in state.glob("plans/*.json"):
        record = json.loads(path.read_text())
        assert schemas.problems(record, "actions" if "action" in record else "plans") == [], path.name
    for path in state.glob("launches/*.json"):
        assert schemas.problems(json.loads(path.read_text()), "launches") == [], path.name
    for folder in state.glob("jobs/J-*"):
        for name in _JOB_FILES:
            path = folder / f"{name}.json"
            if path.exists():
                assert schemas.problems(json.loads(path.read_text()), f"jobs/{name}") == [], path
        _lines_fit(folder / "events.jsonl", "jobs/events")
    for path in (*state.rglob("*.json"), *r.op.user_state.rglob("*.json")):
        files.read_json(path)
    for run in runs.all_runs(r.op):
        plans.load(r.project, run.plan_sha256)
    left = [path for path in (*state.rglob("*.tmp"), *r.op.user_state.rglob("*.tmp"))]
    assert left == []


def _lines_fit(path: Path, schema: str) -> None:
    for _offset, number, line in journal.scan(path):
        assert isinstance(line, dict), f"{path.name}:{number}: {line}"
        assert schemas.problems(line, schema) == [], f"{path.name}:{number}: {line}"


def nothing_is_stuck(r: Any, *, is_clear: bool) -> None:
    """No lock is held. Where nothing is uncertain, money is reserved for what bills alone, and nothing waits."""
    for place in (r.project.state, r.op.user_state):
        for path in place.rglob("*.lock"):
            with files.lock(path.with_suffix(""), timeout_s=0):
                pass
    for run in runs.all_runs(r.op):
        assert not runs.is_worked_on(r.op, run.approval_id)
    if not is_clear:
        return
    alive = [m for m in machines.all_machines(r.project) if m.status not in states.FINAL]
    reserved = budget.open_reservations(r.project, r.op.environ)
    if r.burning():
        bound = {m.extra.get("approval_id") for m in alive}
        begun = [i for i in intents.read(r.project).values() if i.is_open or i.result == "done"]
        for name, entry in reserved.items():
            is_change = any(name in (i.id, i.approval_id) for i in begun)
            assert name in bound or (is_change and set(entry.machine_ids) <= {m.id for m in alive}), entry
        return
    assert reserved == {}, reserved
    books = budget.books(r.project, r.op.ledger, r.clock, r.op.environ)
    assert books.reserved_usd == 0 and books.spent.machines == 0
    for run in runs.own_runs(r.op):
        assert run.is_settled and all(a.is_over or a.result == "refused" for a in run.attempts), run
    for intent in intents.read(r.project).values():
        assert not intent.is_open, intent


def no_output_was_lost(r: Any) -> None:
    """A job whose machine was sent away has its outputs here, or somebody said that they may be lost."""
    for job in {line["id"]: line for line in r.op.ledger.jobs(limit=1000)}.values():
        machine = machines.find(r.project, job.get("machine_id") or "")
        folder = JobFolder(r.project, job["id"])
        if machine is None or machine.status != "destroyed" or folder.read("accepted") is None:
            continue
        manifest = folder.read("manifest")
        has_none = manifest is not None and manifest.get("final") and not manifest["files"]
        assert has_none or is_collected(r.project, job["id"]) or folder.read("abandoned"), job


def the_books_equal_the_bill(r: Any) -> None:
    """To the cent, and no stretch of a machine's life was booked twice."""
    booked = r.op.ledger.spend(include_charges=True).total_usd
    assert abs(booked - r.billed_usd()) < Decimal("0.005"), (booked, r.billed_usd())
    ids = Counter(line["id"] for _o, _n, line in journal.scan(r.op.ledger.charges) if isinstance(line, dict))
    assert not [name for name, count in ids.items() if count > 1]
    ends = Counter(line["id"] for line in r.op.ledger.jobs(limit=1000))
    assert not [name for name, count in ends.items() if count > 1]


def holds(r: Any, *, creates: int = 1, is_clear: bool = False) -> None:
    """What is true at any moment after a reconcile. is_clear: it said that nothing is uncertain."""
    all_that_bills_is_recorded(r)
    nothing_was_rented_twice(r, creates)
    every_record_validates(r)
    no_output_was_lost(r)
    nothing_is_stuck(r, is_clear=is_clear)


def wound_up(r: Any, *, creates: int = 1) -> None:
    """Everything is ended, whatever a person may lose by it, and the books are held against the bill."""
    for machine in machines.all_machines(r.project):
        if machine.status not in states.FINAL and machine.instance_id is not None:
            release.destroy(r.op, machine, abandon=r.op.ledger.jobs_on(machine.id), wait_s=900)
    r.clock.sleep(CHARGES_ARE_WRITTEN_S)
    if not _until_clear(r):
        r.clock.sleep(25 * 3600)  # an unknown create is looked for a day
        assert _until_clear(r), reconciled(r).findings
    r.clock.sleep(CHARGES_ARE_WRITTEN_S)
    reconciled(r)
    assert not r.burning()
    holds(r, creates=creates, is_clear=True)
    the_books_equal_the_bill(r)


def _until_clear(r: Any) -> bool:
    for _ in range(4):
        if reconciled(r).is_clear:
            return True
        r.clock.sleep(90)
    return False


def says_what_to_do(error: GpuError) -> None:
    assert error.next_step, error
    assert error.message
