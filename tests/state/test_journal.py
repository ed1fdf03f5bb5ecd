from __future__ import annotations

import json
import os
from decimal import Decimal

import pytest

from dying import dies
from gpu_skills.errors import DiskFull
from gpu_skills.state import journal

APPEND_ONE = """
import sys
from pathlib import Path
from gpu_skills.state import journal
sys.stdin.readline()
journal.append(Path(sys.argv[1]), [{"writer": int(sys.argv[2]), "pad": "x" * 8192}])
"""


def test_sixty_four_processes_appending_8_kb_leave_sixty_four_whole_lines(tmp_path, spawn):
    path = tmp_path / "jobs.jsonl"
    writers = [spawn(APPEND_ONE, path, n) for n in range(64)]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _out, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert sorted(r["writer"] for r in records) == list(range(64))
    assert all(len(r["pad"]) == 8192 for r in records)


def test_append_says_where_its_lines_are(tmp_path):
    path = tmp_path / "j.jsonl"
    journal.append(path, [{"n": 1}])
    offset, length = journal.append(path, [{"n": 2}, {"n": 3}])
    assert path.read_bytes()[offset : offset + length] == b'{"n":2}\n{"n":3}\n'


def test_a_torn_tail_stays_a_bad_line_and_swallows_nothing(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2,"te')
    offset, length = journal.append(path, [{"n": 3}])
    assert path.read_bytes()[offset : offset + length] == b'{"n":3}\n'
    first, torn, third = (record for _offset, _number, record in journal.scan(path))
    assert (first, third) == ({"n": 1}, {"n": 3})
    assert isinstance(torn, journal.Problem) and torn.at.startswith(":2")


def test_a_torn_last_line_is_marked_as_torn(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"n":1}\n{"n"')
    *_, (offset, number, problem) = journal.scan(path)
    assert (offset, number) == (8, 2) and problem.torn


def test_a_short_write_on_a_full_disk_is_cut_off_again(tmp_path, monkeypatch):
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"n":1}\n')
    real_write = os.write
    with monkeypatch.context() as patch:
        # The second write is the block of lines; the first is the name in the lock file.
        patch.setattr(os, "write", lambda fd, data: real_write(fd, bytes(data)[:5]))
        with pytest.raises(DiskFull):
            journal.append(path, [{"n": 2}, {"n": 3}])
    assert path.read_bytes() == b'{"n":1}\n'


@pytest.mark.parametrize("side, lines", [("before", 1), ("after", 3)])
def test_death_at_an_append_leaves_none_or_all_of_its_lines(tmp_path, side, lines):
    path = tmp_path / "j.jsonl"
    journal.append(path, [{"n": 1}])
    assert dies(lambda: journal.append(path, [{"n": 2}, {"n": 3}]), crossing=1, side=side)
    assert path.read_bytes().count(b"\n") == lines


def test_bad_lines_are_problems_with_their_place_and_reading_goes_on(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"a": NaN}\n[1]\n\n' + b'"' + b"x" * (9 * 1024 * 1024) + b'"\n{"n":5}\n')
    found = list(journal.scan(path))
    assert [number for _o, number, _r in found] == [1, 2, 4, 5]
    assert found[0][2].at == ":1:7 /a"
    assert "an array" in found[1][2].message
    assert "longer than" in found[2][2].message
    assert found[3][2] == {"n": 5}
    assert path.read_bytes()[found[3][0] :] == b'{"n":5}\n'


def test_a_line_of_three_megabytes_is_read(tmp_path):
    path = tmp_path / "j.jsonl"
    journal.append(path, [{"pad": "x" * 3_000_000}])
    ((_offset, _number, record),) = journal.scan(path)
    assert len(record["pad"]) == 3_000_000


def event(kind: str, intent: str, **fields: object) -> dict[str, object]:
    return {"kind": kind, "intent": intent, "ts": "2026-11-30T12:00:00Z", **fields}


def test_a_reservation_counts_until_it_is_settled_whatever_its_outcome():
    events = [
        event("intent", "i1"),
        event("reservation", "i1", reserved_usd=1.5, account="vast:7", project_id="p-a"),
        event("reservation", "i2", reserved_usd=0.25, account="vast:7", project_id="p-b"),
        event("reservation", "i3", reserved_usd=4, account="runpod:1", project_id="p-a"),
        event("outcome", "i1", result="failed"),
        event("settlement", "i3", settled_usd=3.1),
        event("reservation", "i2", reserved_usd=0.5, account="vast:7", project_id="p-b"),
    ]
    still_open = journal.open_reservations(events)
    assert [(r.intent, r.reserved_usd) for r in still_open] == [("i1", Decimal("1.5")), ("i2", Decimal("0.5"))]
    assert journal.reserved_usd(still_open) == 2
    assert journal.reserved_usd(still_open, account="vast:7") == 2
    assert journal.reserved_usd(still_open, project_id="p-a") == Decimal("1.5")
    assert journal.reserved_usd(still_open, account="runpod:1") == 0
