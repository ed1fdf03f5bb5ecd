from __future__ import annotations

import json
from decimal import Decimal

import pytest

from fake_clock import FakeClock
from gpu_skills.errors import GpuError, JobNotFound, SchemaInvalid, StateError, StateNewer, UsageError
from gpu_skills.state import files, job_index, journal, ledger, prefix_cache
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project


@pytest.fixture
def book(project) -> Ledger:
    return Ledger(project, FakeClock())


def run_job(book: Ledger, *, status: str = "succeeded", **fields: object) -> str:
    job = book.new_job_id()
    book.start({"id": job, "provider": "vast", "machine_id": "m_1"})
    book.finish({"id": job, "status": status, **fields})
    return job


def lines(book: Ledger) -> list[dict[str, object]]:
    return [json.loads(line) for line in book.path.read_bytes().splitlines()]


def test_a_job_leaves_a_line_when_it_starts_and_one_when_it_ends(book):
    job = book.new_job_id()
    book.start({"id": job, "provider": "vast", "gpu": "RTX 4090", "inputs": {"run": "python x.py"}})
    assert book.state_of(book.latest(job)) == "running" and book.is_open(book.latest(job))
    assert [line["id"] for line in book.open_jobs()] == [job]
    assert book.finish({"id": job, "status": "succeeded", "cost_usd": Decimal("0.12345678"), "artifacts": []})
    end = book.latest(job)
    published = "id deployment_id provider model workflow workflow_version inputs status started_at completed_at"
    assert list(end) == [*published.split(), "duration_s", "cost_usd", "gpu", "artifacts", "ts"]
    assert end["status"] == "completed" and book.state_of(end) == "succeeded"
    assert end["cost_usd"] == 0.123457 and end["gpu"] == "RTX 4090" and end["ts"] == "2026-01-02T03:04:05Z"
    assert book.open_jobs() == []


def test_an_id_ends_once_whoever_comes_second_writes_nothing(book):
    job = run_job(book)
    before = book.path.read_bytes()
    assert book.finish({"id": job, "status": "lost"}) is False
    assert book.path.read_bytes() == before


def test_two_ledgers_of_one_project_see_each_others_lines(book, project):
    other = Ledger(project, FakeClock())
    job = book.new_job_id()
    book.start({"id": job})
    assert other.finish({"id": job, "status": "failed"}) is True
    assert book.finish({"id": job, "status": "succeeded"}) is False
    assert other.new_job_id() != job and book.last_id() == job


def appended_by_another(book: Ledger, text: str) -> None:
    with open(book.path, "a") as stream:
        stream.write(text)


@pytest.mark.parametrize(
    "line",
    [
        '{"id":"J-000007","status":"failed"}\n',
        '{"status":"failed","id":"J-000007"}\n',
        '{"id" : "J-000007", "status":"failed"}\n',
        '{"id":"J-000009","status":"failed","id":"J-000007"}\n',
        '{"id":"J-000009","status":"failed","\\u0069d":"J-000007"}\n',
        '{"id":"J-00000\\u0037","status":"failed"}\n',
        '{"id":"J-000009","status":"failed"}\n\n{"id":"J-000007","status":"failed"}\r\n',
        'no record\n{"id":"J-000007","status":"failed"}\n',
        '{"id":"J-000009","status":"fail{"id":"J-000007","status":"failed"}\n{"id":"J-000007","status":"failed"}\n',
    ],
)
def test_a_writer_refuses_what_another_has_ended_however_that_line_is_written(book, line):
    book.append([{"id": "J-000001", "status": "failed"}])
    appended_by_another(book, line)
    book.append([{"id": "J-000020", "status": "failed"}])  # looks at the line, of which nothing concerns it
    before = book.path.read_bytes()
    for status in ("completed", "running"):
        with pytest.raises(UsageError, match="J-000007 has already ended"):
            book.append([{"id": "J-000007", "status": status}])
    assert book.path.read_bytes() == before


def test_what_was_only_looked_at_is_read_once_someone_asks(book, project):
    book.append([{"id": "J-000001", "status": "failed"}])
    other = Ledger(project, FakeClock())
    other.append([{"id": "J-000050", "status": "running"}, {"id": "J-000051", "status": "running"}])
    book.append([{"id": "J-000002", "status": "failed"}, {"id": "J-000003", "status": "running"}])
    with pytest.raises(UsageError, match="J-000050 has already started"):
        book.append([{"id": "J-000050", "status": "running"}])
    other.finish({"id": "J-000051", "status": "failed"})
    book.append([{"id": "J-000004", "status": "failed"}])
    assert [line["id"] for line in book.open_jobs()] == ["J-000050", "J-000003"]
    assert book.new_job_id() == "J-000052"
    assert book.finish({"id": "J-000051", "status": "lost"}) is False


def test_a_line_that_another_left_torn_is_closed_and_what_follows_is_seen(book):
    book.append([{"id": "J-000001", "status": "failed"}])
    appended_by_another(book, '{"id":"J-000007","status":"fai')
    book.append([{"id": "J-000002", "status": "running"}])
    with pytest.raises(UsageError, match="J-000002 has already started"):
        book.append([{"id": "J-000002", "status": "running"}])
    book.append([{"id": "J-000007", "status": "failed"}])  # the torn line was no end
    assert book.verify().problem_count == 1


def test_a_ledger_that_another_cut_or_replaced_is_read_anew(book):
    book.append([{"id": f"J-{n:06d}", "status": "failed"} for n in range(1, 4)])
    whole = book.path.read_bytes()
    book.path.write_bytes(whole[: whole.index(b"\n") + 1])
    book.append([{"id": "J-000003", "status": "failed"}])
    changed = book.path.with_name("changed")
    changed.write_bytes(book.path.read_bytes().replace(b"J-000001", b"J-000009"))
    changed.rename(book.path)
    with pytest.raises(UsageError, match="J-000009 has already ended"):
        book.append([{"id": "J-000009", "status": "failed"}])
    book.append([{"id": "J-000001", "status": "failed"}])


def test_many_lines_of_others_are_read_before_they_fill_the_memory(book, project, monkeypatch):
    monkeypatch.setattr(job_index, "_MAX_UNREAD_IDS", 5)
    other = Ledger(project, FakeClock())
    book.append([{"id": "J-000001", "status": "failed"}])
    for n in range(2, 40, 2):
        other.append([{"id": f"J-{n:06d}", "status": "running"}])
        book.append([{"id": f"J-{n + 1:06d}", "status": "failed"}])
        assert len(book._known.unread) <= 7
    assert len(book.open_jobs()) == 19


def test_finishing_an_unknown_job_or_with_no_end_is_refused(book):
    with pytest.raises(JobNotFound):
        book.finish({"id": "J-000009", "status": "failed"})
    with pytest.raises(UsageError, match="cannot end as 'running'"):
        book.finish({"id": run_job(book), "status": "running"})
    with pytest.raises(UsageError, match="no job status 'done'; allowed are running, succeeded"):
        book.finish({"id": run_job(book), "status": "done"})


def test_both_vocabularies_are_taken_and_one_is_written(book):
    written = book.append([{"status": word} for word in ("succeeded", "completed", "timeout", "cancelled", "lost")])
    assert [line["status"] for line in written] == ["completed", "completed", "timeout", "cancelled", "lost"]
    assert len(book.jobs(status="succeeded")) == len(book.jobs(status="completed")) == 2


def test_append_completes_id_and_time_and_keeps_what_is_given(book):
    first, second = book.append(
        [{"status": "failed", "error": "x", "mine": 1}, {"id": "J-000077", "status": "running"}]
    )
    assert first["id"] == "J-000001" and first["ts"] == "2026-01-02T03:04:05Z" and first["mine"] == 1
    assert book.new_job_id() == "J-000078"
    assert second == lines(book)[1]


@pytest.mark.parametrize(
    "record, words",
    [
        ({"status": "failed", "cost_usd": -1}, ["/cost_usd", "-1"]),
        ({"status": "failed", "cost_usd": "0.5"}, ["/cost_usd", '"0.5"']),
        ({"status": "failed", "ts": "2026-01-02T03:04:05"}, ["/ts"]),
        ({"status": "failed", "started_at": "yesterday"}, ["/started_at"]),
        ({"status": "failed", "id": "job-1"}, ["/id", "J-000123"]),
        ({"status": "failed", "artifacts": [{"name": "x"}]}, ["/artifacts/0/uri"]),
        ({"status": "faild"}, ["faild"]),
        ({"id": "J-000001"}, ["/status"]),
    ],
)
def test_a_record_that_cannot_be_a_line_is_refused_with_all_others(book, record, words):
    with pytest.raises((SchemaInvalid, UsageError)) as caught:
        book.append([{"status": "completed"}, record])
    assert all(word in caught.value.message for word in words), caught.value.message
    assert not book.path.exists()


@pytest.mark.parametrize(
    "records",
    [
        [{"id": "J-000005", "status": "completed"}],
        [{"id": "J-000005", "status": "running"}],
        [{"id": "J-000006", "status": "running"}],
        [{"id": "J-000007", "status": "failed"}, {"id": "J-000007", "status": "failed"}],
        [{"id": "J-000007", "status": "failed"}, {"id": "J-000007", "status": "running"}],
    ],
)
def test_a_second_start_or_end_of_an_id_is_refused(book, records):
    book.append([{"id": "J-000005", "status": "completed"}, {"id": "J-000006", "status": "running"}])
    before = book.path.read_bytes()
    with pytest.raises(UsageError, match="already"):
        book.append(records)
    assert book.path.read_bytes() == before


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_an_end_before_the_start_is_refused_whether_the_start_is_new_or_on_disk(book, is_on_disk):
    start = {"id": "J-000001", "status": "running", "ts": "2026-01-02T03:04:05Z"}
    end = {"id": "J-000001", "status": "failed", "ts": "2026-01-02T03:04:04Z"}
    if is_on_disk:
        book.append([start])
    with pytest.raises(UsageError, match="/ts is 2026-01-02T03:04:04Z, before J-000001 started"):
        book.append([end] if is_on_disk else [start, end])
    assert book.path.exists() == is_on_disk


def test_an_id_that_leaves_none_for_the_next_job_is_refused(book):
    for status in ("running", "completed"):
        with pytest.raises(UsageError, match="record 1: J-999999999999999999 would leave no id"):
            book.append([{"id": "J-" + "9" * 18, "status": status}])
    book.append([{"id": "J-999999999999999997", "status": "failed"}])
    assert book.new_job_id() == "J-999999999999999998"
    with pytest.raises(StateError, match="found J-999999999999999998, allowed are ids below it"):
        book.new_job_id()


@pytest.mark.parametrize("place", ["jobs.jsonl", "jobs", "gpu-outputs"])
def test_a_job_after_the_last_id_is_refused_wherever_that_stands(book, project, place):
    last = "J-" + "9" * 18
    if place == "jobs.jsonl":
        book.path.write_text(f'{{"id":"{last}","status":"failed"}}\n')
    else:
        folder = project.path("jobs") if place == "jobs" else project.root / place
        (folder / last).mkdir(parents=True)
    with pytest.raises(StateError, match=f"{place}.*found {last}"):
        book.new_job_id()
    assert not any(len(entry.name) > len(last) for entry in project.path("jobs").iterdir())


def test_an_infinite_cost_or_a_lone_surrogate_is_refused_and_not_a_traceback(book):
    for record in ({"cost_usd": float("inf")}, {"cost_usd": float("nan")}, {"error": "\ud800"}, {"x": float("nan")}):
        with pytest.raises(GpuError):
            book.append([{"status": "failed", **record}])
    assert not book.path.exists()


def test_large_inputs_become_their_hash_and_private_ones_nothing_else(book):
    line = book.start({"id": "J-000001", "inputs": {"a": "x" * 2000, "b": 1, "c": "secret"}}, private=["c"])
    assert line["inputs"]["a"]["bytes"] == 2000 and set(line["inputs"]["a"]) == {"sha256", "bytes", "name"}
    assert line["inputs"]["b"] == 1 and set(line["inputs"]["c"]) == {"sha256"}
    assert b"secret" not in book.path.read_bytes()


@pytest.mark.parametrize("policy, kept", [("none", None), ("hash", {"sha256", "bytes", "name"})])
def test_the_policy_can_keep_inputs_out_of_the_ledger(project, policy, kept):
    book = Ledger(project, FakeClock(), inputs=policy)
    line = book.append([{"status": "failed", "inputs": {"prompt": "mine"}}])[0]
    assert line["inputs"] is None if kept is None else set(line["inputs"]["prompt"]) == kept
    assert b"mine" not in book.path.read_bytes()


def test_jobs_are_listed_with_the_newest_start_first(book):
    first, second = book.new_job_id(), book.new_job_id()
    book.start({"id": first})
    book.start({"id": second})
    book.finish({"id": first, "status": "failed"})
    assert [line["id"] for line in book.jobs()] == [second, first]
    assert [line["id"] for line in book.jobs(limit=1)] == [second] and book.last_id() == second
    assert [line["id"] for line in book.jobs(status="running")] == [second]
    assert book.jobs(status="timeout") == []


def test_jobs_are_counted_without_being_kept(book, monkeypatch):
    records = [{"id": f"J-{n:06d}", "status": word} for n in range(1, 31) for word in ("running", "failed")]
    book.append(records)
    with open(book.path, "ab") as stream:
        stream.write(b'{"id": 7, "status": "failed"}\n[]\n{"id": "J-000001", "status": []}\nnot json\n')
        stream.write(b'{"id": "J-000031", "status": "running"}')
    assert book.count_jobs() == 31
    monkeypatch.setattr(job_index, "_BULK_BYTES", 0)
    monkeypatch.setattr(job_index, "_AT_ONCE_BYTES", 0)
    assert book.count_jobs() == 31 == len(book.jobs())


@pytest.mark.subprocess
def test_an_empty_ledger_answers_everything_with_nothing(book):
    assert book.jobs() == book.open_jobs() == book.jobs_on("m_1") == book.tail() == book.query(".[]") == []
    assert book.last_id() is None and book.latest("J-000001") is None
    assert book.verify().ok and book.spend().total_usd == 0


def test_the_jobs_of_a_machine_are_found(book):
    ids = [run_job(book), run_job(book)]
    book.append([{"status": "failed", "machine_id": "m_2", "error": "not on m_1"}])
    assert book.jobs_on("m_1") == ids


def test_a_hand_made_ledger_is_read_as_it_is(book):
    book.path.write_text(
        '{"id": "J-000041", "status": "running", "ts": "2026-01-01T00:00:00Z"}\r\n'
        "\n"
        '{"id": "J-000042", "status": "completed", "cost_usd": 0.5, "ts": "2026-01-01T00:00:00Z"}\n'
        "this is no line\n"
        '{"id": "J-000043", "status": "running", "ts": "2026-01-01T00:0'
    )
    assert [line["id"] for line in book.jobs()] == ["J-000042", "J-000041"]
    assert [line["id"] for line in book.open_jobs()] == ["J-000041"]
    assert book.new_job_id() == "J-000043"
    book.start({"id": "J-000043"})
    assert [line["id"] for line in book.open_jobs()] == ["J-000041", "J-000043"]
    assert isinstance(book.tail(2)[0], journal.Problem) and book.tail(2)[1]["id"] == "J-000043"


def test_reading_goes_on_behind_a_line_longer_than_any_of_ours(book):
    book.path.write_bytes(b'"' + b"x" * (journal.MAX_LINE_BYTES + 10) + b'"\n')
    book.append([{"id": "J-000500", "status": "running"}])
    assert [line["id"] for line in book.open_jobs()] == ["J-000500"]
    assert [line["id"] for line in book.jobs()] == ["J-000500"]
    assert book.verify().problem_count == 1


def test_a_newer_major_stops_writing_and_not_reading(project):
    run_job(Ledger(project, FakeClock()))
    newer = Ledger(Project(project.root, project.state, project.project_id, 2), FakeClock())
    assert len(newer.jobs()) == 1 and newer.spend().jobs == 1
    for write in (
        newer.new_job_id,
        lambda: newer.start({"id": "J-000009"}),
        lambda: newer.finish({"id": "J-000001", "status": "lost"}),
        lambda: newer.append([{"status": "failed"}]),
        lambda: newer.reseal("x"),
    ):
        with pytest.raises(StateNewer):
            write()


def test_large_ledgers_are_read_from_an_index_that_stays_true(project, monkeypatch):
    monkeypatch.setattr(prefix_cache, "WORTHWHILE_BYTES", 1000)
    monkeypatch.setattr("gpu_skills.state.job_index._SAVE_AFTER_BYTES", 1000)
    monkeypatch.setattr("gpu_skills.state.job_index._BULK_BYTES", 1000)
    book = Ledger(project, FakeClock())
    book.append([{"id": f"J-{n:06d}", "status": "running"} for n in range(1, 40)])
    Ledger(project, FakeClock()).finish({"id": "J-000003", "status": "failed"})
    fresh = Ledger(project, FakeClock())
    assert len(fresh.open_jobs()) == 38 and project.path("jobs.index.json").exists()
    # From the index alone: a job that ends later, and a change by hand that must not be overlooked.
    fresh.finish({"id": "J-000004", "status": "failed"})
    assert len(Ledger(project, FakeClock()).open_jobs()) == 37
    text = book.path.read_text()
    book.path.write_text(text.replace('"id":"J-000005","status":"running"', '"id":"J-000005","status":"timeout"'))
    assert len(Ledger(project, FakeClock()).open_jobs()) == 36
    project.path("jobs.index.json").write_text('{"version": 1, "offset": "x"}')
    assert len(Ledger(project, FakeClock()).open_jobs()) == 36


TAKE_IDS = """
import sys
from pathlib import Path
from gpu_skills.clock import SystemClock
from gpu_skills.state import project, ledger
book = ledger.Ledger(project.load(Path(sys.argv[1])), SystemClock())
for _ in range(25):
    job = book.new_job_id()
    book.start({"id": job})
    print(job)
"""


def test_processes_that_take_ids_at_once_never_take_the_same(project, spawn, book):
    takers = [spawn(TAKE_IDS, project.root) for _ in range(4)]
    taken = []
    for taker in takers:
        out, errors = taker.communicate(timeout=60)
        assert taker.returncode == 0, errors
        taken += out.split()
    assert len(taken) == len(set(taken)) == 100
    assert {line["id"] for line in book.open_jobs()} == set(taken)
    assert book.verify().ok and book.verify().unsealed_lines == 0


@pytest.mark.parametrize(
    "text, count",
    [
        ('{"status": "failed"}', 1),
        ('{\n  "status": "failed"\n}\n', 1),
        ('{"status": "failed"}\n\n{"status": "lost"}\r\n', 2),
    ],
)
def test_records_are_read_from_one_object_or_one_a_line(text, count):
    assert len(ledger.read_records(text.encode(), "records")) == count


@pytest.mark.parametrize(
    "text, place",
    [
        ('{"status": "failed",}', ":1:20"),
        ('{"a": 1}\n{"a": 1, "a": 2}\n', ":2:10 /a"),
        ('{"a": 1}\n[1]\n', ":2"),
        ("nonsense", ":1:1"),
    ],
)
def test_records_that_are_no_json_are_named_with_their_place(text, place):
    with pytest.raises(StateError) as caught:
        ledger.read_records(text.encode(), "records.jsonl")
    assert f"records.jsonl{place}" in caught.value.message


def test_a_money_amount_is_written_with_at_most_six_places(book):
    written = book.append([{"status": "completed", "cost_usd": 0.1 + 0.2}])[0]
    assert written["cost_usd"] == 0.3 and files.dumps_line(written).count(b"0.3,") == 1
