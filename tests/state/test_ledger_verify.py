from __future__ import annotations

import fcntl
import gc
import json

import pytest

from fake_clock import FakeClock
from gpu_skills.errors import UsageError
from gpu_skills.state import chain, journal, ledger_verify
from gpu_skills.state.ledger import Ledger


@pytest.fixture
def book(project) -> Ledger:
    made = Ledger(project, FakeClock())
    for n in range(1, 11):
        made.append([{"id": f"J-{n:06d}", "status": "completed", "cost_usd": 0.5, "provider": "vast"}])
        made.close()  # as at the end of a command
    return made


def rewrite(book: Ledger, change) -> None:
    lines = book.path.read_bytes().splitlines(keepends=True)
    book.path.write_bytes(b"".join(change(lines)))


def test_a_ledger_that_only_we_wrote_is_sealed_to_its_end(book):
    found = book.verify()
    assert found.ok and found.lines == found.sealed_lines == 10 and found.unsealed_lines == 0
    assert json.dumps(found.to_dict())


def swap(lines):
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


@pytest.mark.parametrize(
    "change, line",
    [
        (lambda lines: [*lines[:3], lines[3].replace(b"0.5", b"0.7"), *lines[4:]], 4),
        (lambda lines: [*lines[:3], lines[3].replace(b"0.5", b"0.75"), *lines[4:]], 4),
        (lambda lines: [lines[0].replace(b"vast", b"vasT"), *lines[1:]], 1),
        (lambda lines: lines[:6] + lines[7:], 7),
        (swap, 4),
        (lambda lines: [lines[-1], *lines[1:-1], lines[0]], 1),
        (lambda lines: [b"\n", *lines], 1),
    ],
    ids=["rewritten", "rewritten longer", "first", "removed", "reordered", "ends swapped", "inserted"],
)
def test_a_line_that_was_changed_by_hand_is_found_and_named(book, change, line):
    rewrite(book, change)
    changed = book.path.read_bytes()
    found = book.verify()
    assert [f.line for f in found.problems] == [line], found.problems
    assert f"line {line} is not what was sealed" in found.problems[0].message
    # It stays found when life goes on, and nothing is mended.
    book.append([{"status": "failed"}])
    assert not book.verify().ok and book.path.read_bytes().startswith(changed)


def test_lines_removed_from_the_end_are_found(book):
    rewrite(book, lambda lines: lines[:8])
    found = book.verify()
    assert "ends after line 8, sealed were 10: lines were removed" in found.problems[0].message
    book.append([{"status": "failed"}])
    assert not book.verify().ok


def test_a_line_appended_by_hand_validates_and_is_sealed_by_the_next_append(book):
    with open(book.path, "a") as stream:
        stream.write('{"id": "J-000050", "status": "failed", "ts": "2026-01-02T03:04:05Z", "by_hand": true}\n')
    found = book.verify()
    assert found.ok and (found.lines, found.sealed_lines, found.unsealed_lines) == (11, 10, 1)
    book.append([{"status": "failed"}])
    found = book.verify()
    assert found.ok and (found.lines, found.sealed_lines, found.unsealed_lines) == (12, 12, 0)
    rewrite(book, lambda lines: [line.replace(b"by_hand", b"by_foot") for line in lines])
    assert book.verify().problems[0].line == 11


def test_a_torn_tail_is_reported_and_swallows_nothing(book):
    with open(book.path, "a") as stream:
        stream.write('{"id": "J-000050", "sta')
    found = book.verify()
    assert found.torn_tail and [(f.line, f.message) for f in found.problems] == [
        (11, "the last line is torn: it has no newline at its end")
    ]
    book.append([{"id": "J-000051", "status": "failed"}])
    found = book.verify()
    assert not found.torn_tail and [f.line for f in found.problems] == [11] and found.unsealed_lines == 0
    assert book.latest("J-000051")["status"] == "failed"


def test_a_head_that_lags_or_is_torn_is_no_problem(book):
    whole = book.head.read_bytes().splitlines(keepends=True)
    book.head.write_bytes(b"".join(whole[:7]) + whole[7][:40])
    found = book.verify()
    assert found.ok and found.unsealed_lines == 3
    book.append([{"status": "failed"}])
    found = book.verify()
    assert found.ok and found.unsealed_lines == 0 and found.lines == 11


def test_a_head_that_is_gone_is_made_again_and_a_spoiled_one_is_a_problem(book):
    book.head.unlink()
    assert book.verify().unsealed_lines == 10
    book.append([{"status": "failed"}])
    assert book.verify().sealed_lines == 11
    book.head.write_text("nonsense\n")
    assert "no readable seal" in book.verify().problems[0].message


def test_reseal_notes_its_reason_under_the_lock_of_the_journal(book, project, monkeypatch):
    path, real, was_free = project.path("journal.jsonl"), journal.append_locked, []

    def watched(target, data, **more):
        if target == path:
            with open(f"{path}.lock", "a") as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    was_free.append(True)
                except BlockingIOError:
                    was_free.append(False)
        return real(target, data, **more)

    monkeypatch.setattr(journal, "append_locked", watched)
    book.reseal("why")
    assert was_free == [False]


def test_reseal_accepts_a_change_and_keeps_its_reason(book, project):
    rewrite(book, lambda lines: lines[1:])
    with pytest.raises(UsageError, match="reason"):
        book.reseal("  ")
    book.reseal("the first line was a test")
    found = book.verify()
    assert found.ok and found.sealed_lines == 9
    assert found.accepted == [{"reason": "the first line was a test", "ts": "2026-01-02T03:04:05Z"}]
    book.append([{"status": "failed"}])
    book.close()
    rewrite(book, lambda lines: lines[1:])
    assert not book.verify().ok
    book.reseal("and the second")
    assert [a["reason"] for a in book.verify().accepted] == ["the first line was a test", "and the second"]
    events = [r for _o, _n, r in journal.scan(project.path("journal.jsonl"))]
    assert [e["reason"] for e in events if e["what"] == "ledger_resealed"] == [
        "the first line was a test",
        "and the second",
    ]
    rewrite(book, lambda lines: lines[::-1])
    assert not book.verify().ok


def test_a_loop_of_appends_is_sealed_as_it_goes_and_to_its_end_when_the_ledger_goes(project, monkeypatch):
    monkeypatch.setattr(chain, "SEAL_AFTER_BYTES", 1000)
    book = Ledger(project, FakeClock())
    head, path = book.head, book.path
    for n in range(1, 101):
        book.append([{"id": f"J-{n:06d}", "status": "failed"}])
    assert 90 <= chain.last_seal(head).lines < 100
    del book
    gc.collect()
    assert chain.last_seal(head).lines == 100 and ledger_verify.verify(path, head).ok


def test_a_process_seals_what_it_appended_when_it_ends(project, spawn):
    program = (
        "import sys; from pathlib import Path; from gpu_skills.clock import SystemClock\n"
        "from gpu_skills.state import ledger, project\n"
        "book = ledger.Ledger(project.load(Path(sys.argv[1])), SystemClock())\n"
        "book.append([{'status': 'failed'}]); sys.exit(3)"
    )
    for _ in range(2):
        process = spawn(program, project.root)
        process.communicate(timeout=30)
        assert process.returncode == 3
    found = Ledger(project, FakeClock()).verify()
    assert (found.lines, found.sealed_lines) == (2, 2)
    assert [s.custody for s in chain.seals(project.path("jobs.head.jsonl"))] == [0, 0]  # nobody else wrote


def test_old_seals_are_thinned_to_one_per_thousand_lines(project, monkeypatch):
    monkeypatch.setattr(chain, "_SLACK_BYTES", 20_000)
    book = Ledger(project, FakeClock())
    book.append([{"id": f"J-{n:06d}", "status": "failed"} for n in range(1, 2600)])
    for n in range(3000, 3300):
        book.append([{"id": f"J-{n:06d}", "status": "failed"}])
        book.close()
    assert book.head.stat().st_size < 60_000
    assert {1000, 2000} <= {s.lines for s in chain.seals(book.head)}
    assert book.verify().ok and book.verify().unsealed_lines == 0
    rewrite(book, lambda lines: [*lines[:1500], lines[1500].replace(b"failed", b"timeout"), *lines[1501:]])
    assert "among lines 1001 to 2000" in book.verify().problems[0].message


TS = "2026-01-02T03:04:05Z"


def a_line(**fields: object) -> str:
    return json.dumps({"id": "J-000099", "status": "failed", "ts": TS, **fields})


@pytest.mark.parametrize(
    "text, pointer, words",
    [
        (a_line() + ",", "", "nothing after the document"),
        ("\ufeff" + a_line(), "", "byte order mark"),
        ('{"id": "J-000099", "status": "failed", "ts": "' + TS + '",}', "", "trailing comma"),
        (a_line(cost_usd=float("nan")), "/cost_usd", "NaN"),
        (a_line(cost_usd=float("inf")), "/cost_usd", "Infinity"),
        (a_line(cost_usd="1.5"), "/cost_usd", '"1.5"'),
        (a_line(cost_usd=-0.5), "/cost_usd", "0 or more"),
        (a_line(duration_s=True), "/duration_s", "true"),
        (a_line(ts="2026-01-02T03:04:05"), "/ts", "zone"),
        (a_line(completed_at="2026-01-02"), "/completed_at", "zone"),
        (a_line(status="succeeded"), "/status", "completed"),
        (a_line(id="J-99"), "/id", "J-000123"),
        (a_line(inputs=[1]), "/inputs", "mapping"),
        (a_line(error="\ud800"), "/error", "lone surrogate"),
        (a_line(inputs={"x": "\udfff"}), "/inputs/x", "lone surrogate"),
        ('{"id": "J-000099", "id": "J-000098", "status": "failed", "ts": "' + TS + '"}', "/id", "again"),
        (a_line()[:-1] + ', "inputs": {"a": 1, "a": 2}}', "/inputs/a", "again"),
        ('{"id":"J-000099","inputs":{"a":1,"a":2},"status":"failed","ts":"' + TS + '"}', "/inputs/a", "again"),
        (a_line()[:-1] + ', "x": ' + "[" * 200 + "]" * 200 + "}", "/x", "nesting"),
        ('{"id": "J-000099", "ts": "' + TS + '"}', "/status", "missing"),
        ('{"id": "J-000099", "status": "failed"}', "/ts", "missing"),
        ("[]", "", "array"),
        (a_line(started_at="2026-01-02T03:04:05Z", completed_at="2026-01-02T03:04:04Z"), "/completed_at", "before"),
        (a_line(id="J-000003"), "/id", "ends again after its end"),
        (a_line(id="J-000003", status="running"), "/id", "starts again after its end"),
        (a_line(id="J-000003", ts="2025-01-02T03:04:05Z"), "/id", "ends again"),
    ],
)
def test_a_bad_line_is_named_precisely_and_left_alone(book, text, pointer, words):
    with open(book.path, "ab") as stream:
        stream.write(text.encode("utf-8", "surrogatepass") + b"\n")
    before = book.path.read_bytes()
    found = book.verify()
    assert found.problem_count == 1, found.problems
    problem = found.problems[0]
    assert problem.line == 11 and words in problem.message, problem.message
    assert pointer.split("/")[:3] == problem.pointer.split("/")[:3] or problem.pointer.startswith(pointer)
    assert book.path.read_bytes() == before


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_lines_in_any_layout_that_hold_are_accepted(book, end, separators):
    record = {
        "ts": "2026-01-02T05:04:05+02:00",
        "mine": [1.50, {"x": None}],
        "artifacts": [{"name": "a", "uri": None, "sha": 1}],
        "status": "completed",
        "id": "J-000099",
        "cost_usd": 0,
        "workflow_version": "3",
        "error": None,
        "model": "\N{GRINNING FACE}",
    }
    with open(book.path, "a") as stream:
        stream.write(json.dumps(record, separators=separators) + end)
    assert book.verify().ok, book.verify().problems


def test_a_line_of_three_megabytes_is_read_and_one_of_nine_is_named(book):
    book.append([{"status": "failed", "pad": "x" * 3_000_000}])
    assert book.verify().ok
    with open(book.path, "a") as stream:
        stream.write(a_line(pad="x" * 9_000_000) + "\n")
    book.append([{"status": "failed"}])
    found = book.verify()
    assert [(f.line, "longer than" in f.message) for f in found.problems] == [(12, True)]
    assert found.unsealed_lines == 0 and found.lines == 13


def test_a_second_start_and_an_end_before_the_start_are_named(book):
    with open(book.path, "a") as stream:
        for text in (a_line(status="running"), a_line(status="running"), a_line(ts="2026-01-02T03:04:04Z")):
            stream.write(text + "\n")
    found = book.verify()
    assert [(f.line, f.pointer) for f in found.problems] == [(12, "/id"), (13, "/ts")]


def test_a_clock_that_jumps_back_is_a_warning_with_its_line(book):
    book.clock.jump_wall(-3600)
    book.append([{"status": "failed"}])
    found = book.verify()
    assert found.ok and [(w.line, w.message) for w in found.warnings] == [(11, "the time goes back by 1:00:00")]


def test_of_very_many_problems_the_first_are_kept_and_all_are_counted(book):
    with open(book.path, "a") as stream:
        stream.write("x\n" * 500)
    found = book.verify()
    assert found.problem_count == 500 and len(found.problems) == ledger_verify.MAX_SHOWN
