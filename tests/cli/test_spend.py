"""`gpu spend`: everything that was paid for, successes or not, and what could not be counted."""

from __future__ import annotations

import json

import pytest

JOBS = [
    ("completed", "vast", "sdxl", 0.5, "2026-03-10T10:00:00Z"),
    ("failed", "vast", "sdxl", 1.25, "2026-03-10T11:00:00Z"),
    ("timeout", "runpod", "wan", 2, "2026-03-11T10:00:00Z"),
    ("cancelled", "runpod", None, None, "2026-03-12T10:00:00Z"),
]


@pytest.fixture
def state(tmp_path, gpu):
    assert gpu("init").exit_code == 0
    state = tmp_path / ".pi/gpu"
    lines = [
        {"id": f"J-{n:06d}", "status": status, "provider": provider, "model": model, "cost_usd": cost,
         "completed_at": at, "ts": at}
        for n, (status, provider, model, cost, at) in enumerate(JOBS, 1)
    ]  # fmt: skip
    (state / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return state


def charges(state):
    entries = [("setup", 0.1, "2026-03-10T09:00:00Z"), ("setup_failed", 0.3, "2026-03-10T08:00:00Z")]
    entries += [("storage", 0.05, "2026-03-12T09:00:00Z")]
    text = "".join(json.dumps({"kind": k, "provider": "vast", "cost_usd": c, "ts": t}) + "\n" for k, c, t in entries)
    (state / "charges.jsonl").write_text(text)


def rows(gpu, *flags):
    document = gpu("spend", "--json", *flags).document
    return {row["key"]: (row["cost_usd"], row["jobs"]) for row in document["rows"]}


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("provider", {"runpod": (2, 2), "vast": (1.75, 2)}),
        ("model", {"wan": (2, 1), "sdxl": (1.75, 2), None: (0, 1)}),
        ("status", {"timeout": (2, 1), "failed": (1.25, 1), "completed": (0.5, 1), "cancelled": (0, 1)}),
        ("day", {"2026-03-10": (1.75, 2), "2026-03-11": (2, 1), "2026-03-12": (0, 1)}),
        ("kind", {"job": (3.75, 4)}),
    ],
)
def test_the_sum_is_grouped_as_asked_and_failed_attempts_are_in_it(state, gpu, by, expected):
    assert rows(gpu, "--by", by) == expected
    assert gpu("spend", "--json", "--by", by).document["total_usd"] == 3.75


def test_a_state_and_a_ledger_word_ask_for_the_same(state, gpu):
    for word in ("succeeded", "completed"):
        assert gpu("spend", "--status", word, "--json").document["total_usd"] == 0.5
    assert gpu("spend", "--status", "done", "--json").exit_code == 2


def test_since_takes_a_day_or_a_time_with_zone(state, gpu):
    assert gpu("spend", "--since", "2026-03-11", "--json").document["total_usd"] == 2
    assert gpu("spend", "--since", "2026-03-10T11:30:00+01:00", "--json").document["jobs"] == 3
    refused = gpu("spend", "--since", "2026-03-10T11:30:00", "--json")
    assert refused.exit_code == 2 and "zone" in refused.error["message"]


def test_all_adds_machine_time_that_no_job_carries(state, gpu):
    charges(state)
    assert gpu("spend", "--json").document["total_usd"] == 3.75
    everything = gpu("spend", "--all", "--by", "kind", "--json").document
    assert (everything["total_usd"], everything["jobs"], everything["charges"]) == (4.2, 4, 3)
    assert rows(gpu, "--all", "--by", "kind") == {
        "job": (3.75, 4), "setup_failed": (0.3, 1), "setup": (0.1, 1), "storage": (0.05, 1),
    }  # fmt: skip
    assert "over 4 jobs and 3 charges" in gpu("spend", "--all").stdout


def attempt(number, result, reason="no such offer", **more):
    intent = {
        "kind": "intent", "action": "create", "intent": f"i{number}", "ts": f"2026-03-1{number}T10:00:00Z",
        "provider": "vast", **more,
    }  # fmt: skip
    outcome = {"kind": "outcome", "intent": f"i{number}", "ts": intent["ts"], "result": result, "reason": reason}
    return [intent] if result is None else [intent, outcome]


def test_all_lists_the_creates_that_rented_nothing_as_attempts_that_cost_nothing(state, gpu):
    events = [
        *attempt(1, "failed"),
        *attempt(2, "refused"),
        *attempt(3, "done"),
        *attempt(4, "unknown"),
        *attempt(5, None),
    ]
    events.append({"kind": "intent", "action": "destroy", "intent": "d1", "ts": "2026-03-10T10:00:00Z"})
    (state / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    assert gpu("spend", "--json").document["attempts"] == []
    found = gpu("spend", "--all", "--json").document
    assert [(a["intent"], a["result"]) for a in found["attempts"]] == [
        ("i1", "failed"), ("i2", "refused"), ("i4", "unknown"), ("i5", None),
    ]  # fmt: skip
    assert found["total_usd"] == 3.75
    assert [a["intent"] for a in gpu("spend", "--all", "--since", "2026-03-13", "--json").document["attempts"]] == [
        "i4", "i5",
    ]  # fmt: skip
    text = gpu("spend", "--all").stdout
    assert "4 creates without a machine, $0:" in text and "no such offer" in text and "no outcome" in text


def test_many_attempts_are_bounded_and_counted(state, gpu):
    events = [
        {"kind": "intent", "action": "create", "intent": f"i{n}", "ts": "2026-03-10T10:00:00Z"} for n in range(60)
    ]
    (state / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    found = gpu("spend", "--all", "--json").document
    assert (len(found["attempts"]), found["attempts_left_out"]) == (50, 10)
    assert "60 creates without a machine" in gpu("spend", "--all").stdout


@pytest.mark.parametrize(
    "bad",
    [
        b'{"id":"J-000009","status":"completed","cost_usd":1,}\n',
        b'\xef\xbb\xbf{"id":"J-000009","status":"completed","cost_usd":1}\n',
        b'{"id":"J-000009","status":"completed","cost_usd":NaN}\n',
        b'{"id":"J-000009","status":"completed","cost_usd":"1"}\n',
        b'{"id":"J-000009","status":"completed","cost_usd":-1}\n',
        b'{"id":"J-000009","status":"completed","cost_usd":1,"x":' + b"[" * 200 + b"]" * 200 + b"}\n",
        b'{"id":"J-000009","status":"completed","cost_usd":1,"model":"\\ud800"}\n',
        b'{"id":"J-000009","status":"comp',
    ],
)
def test_a_line_that_cannot_be_read_flags_the_sum_with_count_and_offset_and_stays_as_it_is(state, gpu, bad):
    path = state / "jobs.jsonl"
    offset = path.stat().st_size
    with open(path, "ab") as stream:
        stream.write(bad)
    before = path.read_bytes()
    found = gpu("spend", "--json")
    assert found.exit_code == 0
    document = found.document
    assert (document["total_usd"], document["incomplete"], document["bad_lines"]) == (3.75, True, 1)
    assert document["bad_offsets"] == {"jobs.jsonl": [offset]}
    assert f"incomplete: 1 lines cannot be read (jobs.jsonl at byte {offset})" in gpu("spend").stdout
    assert path.read_bytes() == before


def test_a_bad_line_of_charges_or_journal_flags_the_sum_of_everything(state, gpu):
    charges(state)
    with open(state / "charges.jsonl", "ab") as stream:
        stream.write(b"{oops\n")
    (state / "journal.jsonl").write_bytes(b"{oops\n")
    document = gpu("spend", "--all", "--json").document
    assert (document["incomplete"], document["bad_lines"]) == (True, 2)
    assert set(document["bad_offsets"]) == {"charges.jsonl", "journal.jsonl"}


def test_nothing_spent_is_zero_and_not_an_error(tmp_path, gpu):
    gpu("init")
    assert gpu("spend", "--all").stdout == "total: $0.00 over 0 jobs and 0 charges\n"


def test_all_shows_how_much_of_a_machines_time_was_work_and_each_long_idle_gap(state, gpu):
    def line(number, start, end, machine="m_a"):
        at = {"started_at": f"2026-03-10T{start}Z", "completed_at": f"2026-03-10T{end}Z", "ts": f"2026-03-10T{end}Z"}
        return {"id": f"J-{number:06d}", "status": "completed", "provider": "vast", "machine_id": machine, **at}

    jobs = [line(1, "00:00:00", "04:00:00"), line(2, "04:10:00", "05:00:00"), line(3, "08:14:00", "10:00:00")]
    jobs += [line(4, "00:00:00", "09:00:00", machine="m_own")]
    (state / "jobs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in jobs))
    spans = [("idle", "04:00:00", "04:10:00"), ("idle", "05:00:00", "08:14:00"), ("storage", "10:00:00", "23:00:00")]
    (state / "charges.jsonl").write_text(
        "".join(json.dumps({**line(0, start, end), "kind": kind, "cost_usd": 0.1}) + "\n" for kind, start, end in spans)
    )
    [machine] = gpu("spend", "--all", "--json").document["machines"]
    assert machine == {
        "machine_id": "m_a", "billed_s": 36000, "busy_s": 23760, "duty_pct": 66.0,
        "idle_gaps": [{"started_at": "2026-03-10T05:00:00Z", "duration_s": 11640}], "idle_gaps_left_out": 0,
    }  # fmt: skip
    shown = gpu("spend", "--all").stdout
    assert "m_a: 10h00m billed, 6h36m of work, duty 66 %; idle since 2026-03-10T05:00:00Z 3h14m" in shown
    assert gpu("spend", "--all", "--since", "2026-03-11", "--json").document["machines"] == []
    assert gpu("spend", "--json").document["machines"] == []
