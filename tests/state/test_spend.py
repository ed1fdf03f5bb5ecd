from __future__ import annotations

import json
import random
from decimal import Decimal
from itertools import pairwise

import jq
import pytest

from fake_clock import FakeClock
from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import UsageError
from gpu_skills.state import journal, prefix_cache, spend
from gpu_skills.state.ledger import Ledger

PUBLISHED = 'map(select(.status=="completed")) | map(.cost_usd // 0) | add'


@pytest.fixture
def book(project) -> Ledger:
    return Ledger(project, FakeClock())


def line(number: int, status: str, cost: object, *, day: str = "2026-01-02", **fields: object) -> dict[str, object]:
    ts = f"{day}T12:00:00Z"
    return {"id": f"J-{number:06d}", "status": status, "cost_usd": cost, "completed_at": ts, "ts": ts, **fields}


def slurped(book: Ledger) -> Decimal:
    """What the published jq line gives, rounded to six places."""
    records = [json.loads(text) for text in book.path.read_bytes().splitlines()]
    return round(Decimal(str(jq.compile(PUBLISHED).input_value(records).first() or 0)), 6)


def many(count: int, seed: int) -> list[dict[str, object]]:
    rng = random.Random(seed)
    return [
        line(
            n,
            rng.choice(["completed", "completed", "failed", "timeout"]),
            rng.choice([None, 0, 1, round(rng.uniform(0, 2), 6)]),
            day=f"2026-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
            provider=rng.choice(["vast", "runpod", None]),
            model=rng.choice(["m1", "m2", None]),
        )
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_completed_spend_equals_the_published_jq_line(book, seed):
    book.append(many(400, seed))
    assert book.spend(status="completed").total_usd == slurped(book)
    assert book.spend(status="succeeded").total_usd == slurped(book)


def test_failed_jobs_are_part_of_what_was_spent(book):
    book.append([line(1, "completed", 1), line(2, "failed", 0.25), line(3, "running", None), line(4, "lost", 0.5)])
    everything = book.spend(by="status")
    assert everything.total_usd == Decimal("1.75") and everything.jobs == 3
    assert [(r.key, r.cost_usd, r.jobs) for r in everything.rows] == [
        ("completed", 1, 1), ("lost", Decimal("0.5"), 1), ("failed", Decimal("0.25"), 1),
    ]  # fmt: skip


def test_spend_is_grouped_by_provider_model_day_and_kind(book, project):
    book.append(
        [
            line(1, "completed", 1, provider="vast", model="a", day="2026-01-02"),
            line(2, "failed", 2, provider="runpod", model="a", day="2026-01-01"),
            line(3, "completed", 4, provider="vast", day="2026-01-01"),
        ]
    )
    ts = "2026-01-01T00:00:00Z"
    journal.append(
        project.path("charges.jsonl"),
        [
            {"kind": "idle", "cost_usd": 0.5, "ts": ts, "provider": "vast"},
            {"kind": "correction", "cost_usd": -0.25, "ts": ts, "provider": "runpod"},
        ],
    )

    def rows(by: str, **options: object) -> dict[object, float]:
        return {r.key: float(r.cost_usd) for r in book.spend(by=by, **options).rows}

    assert rows("provider") == {"vast": 5, "runpod": 2}
    assert rows("model") == {"a": 3, None: 4}
    assert list(rows("day").items()) == [("2026-01-01", 6), ("2026-01-02", 1)]
    assert rows("kind", include_charges=True) == {"job": 7, "idle": 0.5, "correction": -0.25}
    assert book.spend(include_charges=True).total_usd == Decimal("7.25")
    assert rows("provider", include_charges=True) == {"vast": 5.5, "runpod": 1.75}
    with pytest.raises(UsageError, match="cannot group spend by 'colour'"):
        book.spend(by="colour")


def test_since_takes_a_day_or_a_moment(book):
    book.append([line(1, "completed", 1, day="2026-01-01"), line(2, "completed", 2, day="2026-01-02")])
    assert book.spend(since="2026-01-02").total_usd == 2
    assert book.spend(since="2026-01-02T00:00:00Z").total_usd == 2
    assert book.spend(since="2026-01-02T12:00:00Z").total_usd == 2
    assert book.spend(since="2026-01-02T12:00:01Z").total_usd == 0
    assert book.spend(since="2026-01-02T13:00:00+02:00").total_usd == 2
    for bad in ("yesterday", "2026-01-02T00:00:00", "2026-13-01"):
        with pytest.raises(UsageError, match="since"):
            book.spend(since=bad)


@pytest.mark.parametrize(
    "bad",
    [
        "{torn",
        '{"id": "J-000099", "status": "completed", "cost_usd": "1.0", "ts": "2026-01-01T00:00:00Z"}',
        '{"id": "J-000099", "status": "completed", "cost_usd": -1, "ts": "2026-01-01T00:00:00Z"}',
        '{"id": "J-000099", "status": "completed", "cost_usd": NaN, "ts": "2026-01-01T00:00:00Z"}',
        '{"id": "J-000099", "status": "finished", "cost_usd": 1, "ts": "2026-01-01T00:00:00Z"}',
        "[" * 200 + "]" * 200,
        '"' + "x" * 3_000_000 + '"',
    ],
)
def test_one_bad_line_in_a_hundred_makes_the_total_incomplete_and_is_left_alone(book, bad):
    book.append([line(n, "completed", 0.01) for n in range(1, 50)])
    offset = book.path.stat().st_size
    with open(book.path, "a") as stream:
        stream.write(bad + "\n")
    book.append([line(n, "completed", 0.01) for n in range(100, 150)])
    before = book.path.read_bytes()
    found = book.spend()
    assert found.incomplete and found.bad_lines == 1 and found.bad_offsets == {"jobs.jsonl": [offset]}
    assert found.total_usd == Decimal("0.99") and book.path.read_bytes() == before


def test_a_torn_last_line_is_counted_as_bad(book):
    book.append([line(1, "completed", 1)])
    offset = book.path.stat().st_size
    with open(book.path, "a") as stream:
        stream.write('{"id": "J-000002", "sta')
    found = book.spend()
    assert found.total_usd == 1 and found.bad_offsets == {"jobs.jsonl": [offset]}


@pytest.fixture
def small_steps(monkeypatch):
    """As if a few kilobytes were a large ledger: several processes, several blocks, a cache."""
    monkeypatch.setattr(prefix_cache, "WORTHWHILE_BYTES", 1000)
    monkeypatch.setattr(spend, "_SAVE_AFTER_BYTES", 1000)
    monkeypatch.setattr(spend, "_SMALL_BYTES", 1000)
    monkeypatch.setattr(spend, "_SPLIT_AFTER_BYTES", 10_000)
    monkeypatch.setattr(spend, "_BLOCK", 700)
    monkeypatch.setattr("os.cpu_count", lambda: 3)


def dated(number: int, cost: float, completed_at: object) -> str:
    return json.dumps({"id": f"J-{number:06d}", "status": "completed", "cost_usd": cost, "completed_at": completed_at})


@pytest.mark.subprocess
@pytest.mark.parametrize("size", ["small", "large"])
def test_days_are_utc_whatever_zone_a_line_has(book, request, size):
    lines = [dated(1, 1, "2026-12-01T01:00:00+09:00"), dated(2, 2, "2026-11-30T20:00:00-05:00")]
    if size == "large":
        request.getfixturevalue("small_steps")
        lines += [dated(n, 0, "2026-12-01T00:00:00Z") for n in range(3, 40)]
    book.path.write_text("\n".join(lines) + "\n")
    rows = {row.key: float(row.cost_usd) for row in book.spend(by="day").rows}
    assert rows == {"2026-11-30": 1, "2026-12-01": 2}
    assert float(book.spend(since="2026-12-01").total_usd) == 2


@pytest.mark.subprocess
@pytest.mark.parametrize("size", ["small", "large"])
def test_money_without_a_date_is_in_every_period(book, request, size):
    lines = [dated(n, 1, when) for n, when in enumerate((None, "", "soon", "1 Nov", "0 o'clock Z"), 1)]
    if size == "large":
        request.getfixturevalue("small_steps")
        lines += [dated(n, 0, "2026-12-01T00:00:00Z") for n in range(6, 40)]
    book.path.write_text("\n".join(lines) + "\n")
    assert [float(r.cost_usd) for r in book.spend(by="day").rows if r.key is None] == [5]
    for since in ("2026-12-01", "2026-12-01T00:00:01Z"):
        assert float(book.spend(since=since).total_usd) == 5


@pytest.mark.subprocess
@pytest.mark.parametrize("with_bad_lines", [False, True])
def test_a_large_ledger_gives_the_same_as_a_small_one(book, monkeypatch, small_steps, with_bad_lines):
    records = many(300, seed=9)
    book.append(records)
    if with_bad_lines:
        text = book.path.read_bytes().splitlines(keepends=True)
        text[100:100] = [b"{bad\n", b"\n", b"[1]\n"]
        book.path.write_bytes(b"".join(text) + b"{torn")
    for by in (None, *spend.BY):
        for options in ({}, {"since": "2026-05-05"}, {"since": "2026-05-05T01:00:00Z"}, {"status": "failed"}):
            book.path.with_name("jobs.spend.json").unlink(missing_ok=True)
            fast = book.spend(by=by, **options)
            with monkeypatch.context() as slow:
                slow.setattr(prefix_cache, "WORTHWHILE_BYTES", 1 << 30)
                slow.setattr(spend, "_SMALL_BYTES", 1 << 30)
                assert fast == book.spend(by=by, **options)
    assert fast.bad_lines == (3 if with_bad_lines else 0)


@pytest.mark.subprocess
def test_since_a_moment_reads_a_large_ledger_as_fast_as_since_a_day(book, monkeypatch, small_steps):
    hours = [f"2026-05-0{day}T{hour:02d}:30:00Z" for day in (4, 5, 6) for hour in range(24)]
    hours += ["2026-05-05T12:30:00+02:00", "2026-05-05T08:30:00-02:00", "2026-05-06T00:30:00+03:00"]
    records = [line(n, "completed", 1) | {"completed_at": when} for n, when in enumerate(hours, 1)]
    book.append(records)
    expected = sum(parse_timestamp(when) >= parse_timestamp("2026-05-05T10:30:00Z") for when in hours)

    def one_by_one(*_arguments):
        raise AssertionError("a plain line was decoded on its own")

    monkeypatch.setattr(spend, "_add_carefully", one_by_one)
    for since in ("2026-05-05T10:30:00Z", "2026-05-05T12:30:00+02:00"):
        assert book.spend(since=since).total_usd == expected == 24 + 14 + 3


def written(middle: str) -> str:
    return '{"id":"J-000900","status":"completed",' + middle + ',"ts":"2026-01-01T00:00:00Z"}'


MONEY_TWICE = [
    written('"cost_usd":1,"cost_usd":2'),
    written('"cost_usd":1,"cost_usd": null'),
    written('"cost_usd":1,"cost\\u005fusd":2'),
]
NOT_STRICT = [
    written('"cost_usd":1,"status":"failed"'),
    written('"cost_usd":1,"model":"a","model":"b"'),
    written('"cost_usd":1,"inputs":{"a":1,"a":2}'),
    written('"cost_usd":1,"inputs":{"a":"\\ud800"}'),
    written('"cost_usd":1,"inputs":{"a":1e999}'),
    written('"cost_usd":1,"inputs":{"a":"\udce9"}'),  # a byte that is not UTF-8
    written('"cost_usd":1,"inputs":{"a":' + "[" * 200 + "]" * 200 + "}"),
    written('"cost_usd":1,"inputs":' + '{"a":[' * 60 + "1" + '],"b":0}' * 60),
]


@pytest.mark.subprocess
@pytest.mark.parametrize("bad", [*MONEY_TWICE, *NOT_STRICT])
def test_a_line_that_is_no_strict_json_is_told_in_a_large_ledger_too(book, small_steps, bad):
    book.append(many(150, seed=4))
    offset, before = book.path.stat().st_size, book.spend().total_usd
    with open(book.path, "a", errors="surrogateescape") as stream:
        stream.write(bad + "\n")
    book.append([line(901, "completed", 0.5)])
    book.path.with_name("jobs.spend.json").unlink()
    found = book.spend()
    assert found.incomplete and found.bad_offsets == {"jobs.jsonl": [offset]}
    assert found.total_usd == before + Decimal("0.5")


@pytest.mark.subprocess
@pytest.mark.parametrize("bad", MONEY_TWICE)
def test_in_a_very_large_ledger_what_changes_the_total_is_still_told(book, small_steps, monkeypatch, bad):
    monkeypatch.setattr(spend, "_STRICT_BYTES", 0)
    book.append(many(150, seed=4))
    offset = book.path.stat().st_size
    with open(book.path, "a") as stream:
        stream.write(bad + "\n")
    assert book.spend().bad_offsets == {"jobs.jsonl": [offset]}


@pytest.mark.subprocess
def test_brackets_in_texts_are_not_taken_for_depth_but_lines_with_them_are_counted(book, small_steps):
    book.append([line(n, "completed", 0.5, inputs={"prompt": "{{{{[" * 9}) for n in range(1, 60)])
    assert book.spend().total_usd == Decimal("29.5") and not book.spend().incomplete


@pytest.mark.subprocess
def test_after_an_append_only_the_new_tail_is_read(book, monkeypatch, small_steps):
    book.append(many(200, seed=1))
    book.spend()
    ranges: list[tuple[int, int]] = []
    real = spend._scan

    def watched(path, kind, *, start=0, end=None, moment=None):
        ranges.append((start, end))
        return real(path, kind, start=start, end=end, moment=moment)

    monkeypatch.setattr(spend, "_scan", watched)
    size = book.path.stat().st_size
    book.append([line(900, "completed", 0.125)])
    assert book.spend(status="completed").total_usd == slurped(book)
    with open(book.path, "a") as stream:  # and by hand
        stream.write(json.dumps(line(901, "completed", 0.125)) + "\n")
    assert book.spend(status="completed").total_usd == slurped(book)
    assert [start for start, _end in ranges] == [size, size]


@pytest.mark.subprocess
def test_a_change_by_hand_in_the_middle_is_never_answered_from_the_cache(book, small_steps):
    book.append([line(n, "completed", 0.5) for n in range(1, 200)])
    assert book.spend().total_usd == Decimal("99.5")
    text = book.path.read_text()
    book.path.write_text(text.replace('"cost_usd":0.5', '"cost_usd":0.7', 1))  # same length, same inode
    assert book.spend().total_usd == Decimal("99.7")
    book.append([line(500, "completed", 1)])
    assert book.spend().total_usd == Decimal("100.7")
    book.path.write_text("".join(book.path.read_text().splitlines(keepends=True)[1:]))
    assert book.spend().total_usd == Decimal("100")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": 1}', '{"version": 1, "offset": 5, "data": [', "\xff"])
def test_a_spoiled_cache_is_thrown_away(book, small_steps, content):
    book.append([line(n, "completed", 0.5) for n in range(1, 40)])
    book.path.with_name("jobs.spend.json").write_text(content, encoding="latin-1")
    assert book.spend().total_usd == Decimal("19.5")


def test_many_small_amounts_add_up_exactly(book):
    book.append([line(n, "completed", 0.000001) for n in range(1, 1001)] + [line(2000, "completed", 1_000_000)])
    assert book.spend().total_usd == Decimal("1000000.001")


def test_adding_a_job_never_lowers_the_total(book):
    totals = []
    for n in range(1, 6):
        book.append([line(n, "failed" if n % 2 else "completed", 0.1)])
        totals.append(book.spend().total_usd)
    assert all(a < b for a, b in pairwise(totals))
