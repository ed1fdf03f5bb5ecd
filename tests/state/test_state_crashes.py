"""Death before and after every crossing of a door: what is left validates and shows before or after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dying import dies
from fake_clock import FakeClock
from gpu_skills.errors import ChangedMeanwhile, JobNotFound, StateNewer
from gpu_skills.state import journal, migrate
from gpu_skills.state import project as projects
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project

SIDES = ("before", "after")


def deaths(project: Project, prepare: Callable[[Ledger], None], act: Callable[[Ledger], object]):
    """Every (fresh copy of the project, crossing, side) at which `act` dies, until it dies no more."""
    prepare(Ledger(project, FakeClock()))
    saved = project.root.with_name("saved")
    shutil.copytree(project.root, saved)
    for side in SIDES:
        for crossing in range(1, 50):
            shutil.rmtree(project.root)
            shutil.copytree(saved, project.root)
            book = Ledger(project, FakeClock())
            died = dies(lambda book=book: (act(book), book.close()), crossing=crossing, side=side)
            book._sealer._pending = None  # who died does not seal afterwards
            if not died:
                assert crossing > 1, "no door was crossed"
                break
            yield crossing, side


def two_lines(book: Ledger) -> None:
    book.append([{"id": "J-000001", "status": "completed", "cost_usd": 1}, {"id": "J-000002", "status": "running"}])
    book.close()


def shown(book: Ledger) -> list[tuple[str, str]]:
    return [(line["id"], line["status"]) for line in book.jobs()]


def test_death_in_an_append_leaves_none_or_all_of_its_lines(project):
    def act(book: Ledger) -> None:
        book.append([{"id": "J-000003", "status": "failed"}, {"id": "J-000004", "status": "failed"}])

    before = [("J-000002", "running"), ("J-000001", "completed")]
    after = [("J-000004", "failed"), ("J-000003", "failed"), *before]
    seen = set()
    for crossing, side in deaths(project, two_lines, act):
        book = Ledger(project, FakeClock())
        assert shown(book) == (before if (crossing, side) == (1, "before") else after)
        found = book.verify()
        assert found.ok and found.sealed_lines <= found.lines
        book.append([{"status": "lost"}])
        assert book.verify().ok and book.verify().unsealed_lines == 0
        seen.add(len(shown(book)))
    assert seen == {3, 5}


def test_death_in_start_or_finish_leaves_a_job_that_can_be_finished_once(project):
    def act(book: Ledger) -> None:
        job = book.new_job_id()
        book.start({"id": job})
        book.finish({"id": job, "status": "succeeded", "cost_usd": 0.5})

    for _crossing, _side in deaths(project, two_lines, act):
        book = Ledger(project, FakeClock())
        assert book.verify().ok
        job, states = "J-000003", dict(shown(book))
        if job in states:
            assert book.finish({"id": job, "status": "lost"}) == (states[job] == "running")
        else:
            with pytest.raises(JobNotFound):
                book.finish({"id": job, "status": "lost"})
        ends = [r for _o, _n, r in journal.scan(book.path) if r["id"] == job and r["status"] != "running"]
        assert len(ends) == (1 if job in states else 0) and book.verify().ok
        assert book.new_job_id() == "J-000004"  # an id once taken is not given again


def test_death_in_reseal_leaves_the_old_or_the_new_seal(project):
    def prepare(book: Ledger) -> None:
        two_lines(book)
        book.path.write_bytes(book.path.read_bytes().replace(b'"cost_usd":1', b'"cost_usd":2'))

    accepted = []
    for _crossing, _side in deaths(project, prepare, lambda book: book.reseal("a wrong price")):
        book = Ledger(project, FakeClock())
        found = book.verify()
        accepted.append(found.ok)
        assert found.ok == bool(found.accepted)
        book.reseal("a wrong price")
        assert book.verify().ok
    assert set(accepted) == {False, True}


def old_project(tmp_path: Path) -> Project:
    made = projects.init(tmp_path / "work", project_id="p-old")
    made.path("machines.json").write_text('[{"id": "m_1", "price": 1}]')
    made.path("models.json").write_text('[{"name": "m"}]')
    return made


STEPS = {
    1: {
        "machines.json": lambda records: [{"id": r["id"], "rate_usd_hr": r["price"]} for r in records],
        "models.json": lambda records: [{"id": r["name"]} for r in records],
        "memory.json": lambda records: records,
    },
    2: {"models.json": lambda records: [{**r, "version": 1} for r in records]},
}


def test_a_migration_runs_its_steps_in_order_and_keeps_a_backup_of_each(tmp_path):
    migrated = migrate.migrate(old_project(tmp_path), steps=STEPS, target=3)
    assert migrated.schema_version == 3
    assert json.loads(migrated.path("machines.json").read_text()) == [{"id": "m_1", "rate_usd_hr": 1}]
    assert json.loads(migrated.path("models.json").read_text()) == [{"id": "m", "version": 1}]
    assert json.loads((migrated.path("backups") / "v1" / "machines.json").read_text()) == [{"id": "m_1", "price": 1}]
    assert json.loads((migrated.path("backups") / "v2" / "models.json").read_text()) == [{"id": "m"}]
    assert migrate.migrate(migrated, steps=STEPS, target=3) == migrated
    with pytest.raises(StateNewer):
        migrate.migrate(migrated, steps=STEPS, target=2)


@pytest.mark.parametrize("side", SIDES)
def test_death_at_any_door_of_a_migration_is_made_good_by_running_it_again(tmp_path, side):
    crossing = 0
    while True:
        crossing += 1
        project = old_project(tmp_path / f"{crossing}")
        if not dies(lambda at=project: migrate.migrate(at, steps=STEPS, target=3), crossing=crossing, side=side):
            break
        left = projects.load(project.root)
        assert left.schema_version in (1, 2, 3)
        done = migrate.migrate(left, steps=STEPS, target=3)
        assert json.loads(done.path("machines.json").read_text()) == [{"id": "m_1", "rate_usd_hr": 1}]
        assert json.loads(done.path("models.json").read_text()) == [{"id": "m", "version": 1}]
        assert json.loads((done.path("backups") / "v1" / "models.json").read_text()) == [{"name": "m"}]
    assert crossing > 15


def test_a_file_edited_between_a_crash_and_the_repetition_is_not_overwritten(tmp_path):
    project = old_project(tmp_path)
    assert dies(lambda: migrate.migrate(project, steps=STEPS, target=2), crossing=9, side="before")
    project.path("models.json").write_text('[{"name": "mine"}]')
    with pytest.raises(ChangedMeanwhile, match=r"models\.json"):
        migrate.migrate(projects.load(project.root), steps=STEPS, target=2)
    assert project.path("models.json").read_text() == '[{"name": "mine"}]'


@pytest.mark.parametrize("opened", [projects.find, projects.init])
def test_records_of_an_older_version_are_brought_up_wherever_a_project_is_opened(tmp_path, monkeypatch, opened):
    older = old_project(tmp_path)
    Ledger(older, FakeClock()).append([{"status": "failed"}])
    lines = older.path("jobs.jsonl").read_bytes()
    monkeypatch.setattr(projects, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(migrate, "STEPS", STEPS)
    found = opened(older.root)
    assert found.schema_version == 3 and found.project_id == "p-old" and not found.is_read_only
    assert json.loads(found.path("machines.json").read_text()) == [{"id": "m_1", "rate_usd_hr": 1}]
    assert json.loads((found.path("backups") / "v1" / "machines.json").read_text()) == [{"id": "m_1", "price": 1}]
    assert found.path("jobs.jsonl").read_bytes() == lines
    before = found.path("project.json").read_bytes()
    assert opened(older.root) == found and found.path("project.json").read_bytes() == before


def test_every_version_before_ours_has_its_migration():
    assert set(migrate.STEPS) == set(range(1, projects.SCHEMA_VERSION))


def test_the_ledger_is_never_migrated(tmp_path):
    assert not any(name.endswith(".jsonl") for step in migrate.STEPS.values() for name in step)
