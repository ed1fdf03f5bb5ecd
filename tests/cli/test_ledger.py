"""`gpu ledger …`: lines from stdin or a file, all or none; what is bad is named and never rewritten."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from fake_clock import FakeClock

DONE = {"status": "completed", "model": "sdxl", "cost_usd": 0.12}


@pytest.fixture
def state(tmp_path, gpu):
    assert gpu("init").exit_code == 0
    return tmp_path / ".pi/gpu"


@pytest.fixture
def clock():
    return FakeClock(datetime(2026, 3, 10, 12, 0, tzinfo=UTC))


def append(gpu, *records, flags=(), **world):
    data = b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in records)
    return gpu("ledger", "append", "--json", *flags, stdin=data, **world)


def lines(state):
    return [json.loads(line) for line in (state / "jobs.jsonl").read_text().splitlines()]


def test_one_object_gets_an_id_and_a_time_and_states_become_ledger_words(state, gpu, clock):
    done = append(gpu, {**DONE, "status": "succeeded"}, clock=clock)
    line = {"job": "J-000001", "status": "completed", "ts": "2026-03-10T12:00:00Z"}
    assert done.document["lines"] == [line] and done.document["appended"] == 1
    assert lines(state) == [{"id": "J-000001", "ts": "2026-03-10T12:00:00Z", **DONE}]


def test_an_object_over_several_lines_and_many_objects_are_both_taken(state, gpu, tmp_path):
    assert append(gpu, json.dumps(DONE, indent=2).replace("\n", "\r\n").encode()).document["appended"] == 1
    (tmp_path / "many.jsonl").write_bytes(b"\r\n".join([json.dumps(DONE).encode()] * 3))
    assert gpu("ledger", "append", "--file", "many.jsonl").exit_code == 0
    assert [line["id"] for line in lines(state)] == ["J-000001", "J-000002", "J-000003", "J-000004"]


def test_lines_are_written_all_or_none(state, gpu):
    refused = append(gpu, DONE, {**DONE, "cost_usd": -1}, DONE)
    assert refused.exit_code == 2 and "record 2: /cost_usd is -1, allowed: 0 or more" in refused.error["message"]
    assert not (state / "jobs.jsonl").exists()


def test_inputs_are_kept_as_the_policy_says(state, gpu):
    policy = state / "policy.json"
    policy.write_text(json.dumps({**json.loads(policy.read_text()), "ledger_inputs": "hash"}))
    append(gpu, {**DONE, "inputs": {"prompt": "a secret wish"}})
    assert "secret wish" not in (state / "jobs.jsonl").read_text()
    assert set(lines(state)[0]["inputs"]["prompt"]) == {"sha256", "bytes", "name"}


def test_a_private_input_leaves_nothing_but_its_hash(state, gpu):
    append(gpu, {**DONE, "inputs": {"prompt": "a secret wish", "steps": 20}}, flags=("--private", "prompt"))
    inputs = lines(state)[0]["inputs"]
    assert inputs["steps"] == 20 and set(inputs["prompt"]) == {"sha256"}


def test_without_a_policy_nothing_is_appended_but_reading_goes_on(state, gpu):
    append(gpu, DONE)
    (state / "policy.json").unlink()
    refused = append(gpu, DONE)
    assert refused.exit_code == 3
    assert (refused.error["code"], refused.error["next_step"]) == ("policy_missing", "gpu init")
    for reading in (["ledger", "tail"], ["ledger", "verify"], ["spend"], ["registry", "validate"]):
        assert gpu(*reading).exit_code == 0, reading
    assert len(lines(state)) == 1


BAD_INPUT = [
    (b'{"status": "completed", "cost_usd": 1,}', "stdin:1:38: found a trailing comma"),
    (b'\xef\xbb\xbf{"status": "completed"}', "stdin:1:1: found a byte order mark"),
    (b'{"status": "completed", "cost_usd": NaN}', "stdin:1:37 /cost_usd: found"),
    (b'{"status": "completed", "cost_usd": Infinity}', "stdin:1:37 /cost_usd: found"),
    (b'{"status": "completed",\n"status": "failed"}', 'stdin:2:1 /status: found the key "status" again'),
    (b'{"status": "completed", "cost_usd": "1"}', '/cost_usd is "1"'),
    (b'{"status": "completed", "cost_usd": -0.01}', "/cost_usd is -0.01, allowed: 0 or more"),
    (b'{"status": "completed", "completed_at": "2026-03-10T12:00:00"}', "zone"),
    (b'{"status": "completed", "model": "\\ud83d"}', "a lone surrogate \\ud83d"),
    (b'{"status": "completed", "x": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}", "level 101 of nesting"),
    (b'{"status": "complete"}', '/status is "complete"'),
    (b'{"status": "completed", "id": 7}', "/id"),
    (b'{"status": "completed", "id": "J-7"}', "/id"),
    (b'{"model": "sdxl"}', "/status is missing"),
    (b"[1]", "an object"),
    (b"\x00", "stdin:1:1"),
    (b"", "stdin is empty"),
    (b'{"status": "completed"}\n{"status": "completed",}\n', "stdin:2:23"),
]


@pytest.mark.parametrize(("data", "what"), BAD_INPUT)
def test_what_is_no_line_is_refused_with_its_place_and_nothing_is_written(state, gpu, data, what):
    append(gpu, DONE)
    before = (state / "jobs.jsonl").read_bytes()
    refused = append(gpu, data)
    assert refused.exit_code == 2 and what in refused.error["message"], refused.error["message"]
    assert "edit" not in refused.error["next_step"]  # standard input is no file
    assert (state / "jobs.jsonl").read_bytes() == before


def test_an_id_starts_once_and_ends_once(state, gpu):
    running = {"id": "J-000007", "status": "running", "started_at": "2026-03-10T12:00:00Z"}
    assert append(gpu, running).exit_code == 0
    assert "already started" in append(gpu, running).error["message"]
    assert append(gpu, {"id": "J-000007", "status": "failed"}).exit_code == 0
    assert "already ended" in append(gpu, {"id": "J-000007", "status": "completed"}).error["message"]
    assert "record 2" in append(gpu, {**DONE, "id": "J-000008"}, {**DONE, "id": "J-000008"}).error["message"]
    assert len(lines(state)) == 2


def test_a_line_of_three_megabytes_is_taken_and_one_over_the_limit_is_named(state, gpu):
    big = {**DONE, "note": "x" * (3 << 20)}
    assert append(gpu, big).exit_code == 0
    assert gpu("ledger", "verify").exit_code == 0
    refused = append(gpu, {**DONE, "note": "x" * (9 << 20)})
    assert refused.exit_code == 2 and "8" in refused.error["message"]
    assert len(lines(state)) == 1


BY_HAND = [
    (b'{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01Z",}', "a trailing comma"),
    (b'\xef\xbb\xbf{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01Z"}', "a byte order mark"),
    (b'{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01Z","cost_usd":NaN}', "NaN"),
    (b'{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01Z","cost_usd":-Infinity}', "Infinity"),
    (b'{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01Z","cost_usd":1,"cost_usd":2}', "again"),
    (b'{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01Z","cost_usd":"1"}', "/cost_usd"),
    (b'{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01Z","cost_usd":-1}', "0 or more"),
    (b'{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01"}', "/ts"),
    (b'{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01Z","model":"\\udc00"}', "a lone surrogate"),
    (b'{"id":"J-000002","status":"completed","ts":"2026-03-10T12:00:01Z","x":' + b"[" * 200 + b"]" * 200 + b"}", "101"),
    (b'{"id":"J-000001","status":"completed","ts":"2026-03-10T12:00:01Z"}', "after its end"),
    (b'{"id":"J-000001","status":"failed","ts":"2026-03-09T12:00:01Z"}', "after its end"),
    (b'{"id":"J-000002","status":"compl', "torn"),
]


@pytest.mark.parametrize(("line", "what"), BY_HAND)
def test_a_bad_line_written_by_hand_is_named_by_verify_and_swallows_nothing(state, gpu, clock, line, what):
    append(gpu, DONE, clock=clock)
    path = state / "jobs.jsonl"
    torn = not line.endswith(b"}")
    with open(path, "ab") as stream:
        stream.write(line + (b"" if torn else b"\n"))
    content = path.read_bytes()
    found = gpu("ledger", "verify", "--json")
    assert found.exit_code == 2 and found.document["problem_count"] == 1
    assert what in found.document["problems"][0]["message"]
    assert (found.document["problems"][0]["line"], found.document["torn_tail"]) == (2, torn)
    assert gpu("ledger", "tail", "--json").exit_code == 0
    assert path.read_bytes() == content
    clock.advance(60)
    added = append(gpu, {**DONE, "id": "J-000009"}, clock=clock)
    assert added.exit_code == 0
    assert path.read_bytes().startswith(content), "what was there stays byte for byte"
    assert json.loads(path.read_bytes().splitlines()[-1])["id"] == "J-000009"
    assert gpu("ledger", "verify", "--json").document["problem_count"] == 1


def test_lines_that_end_in_crlf_are_lines(state, gpu, clock):
    append(gpu, DONE, clock=clock)
    with open(state / "jobs.jsonl", "ab") as stream:
        stream.write(b'{"id":"J-000002","status":"completed","cost_usd":1,"ts":"2026-03-10T12:00:01Z"}\r\n')
    assert gpu("ledger", "verify").exit_code == 0
    assert gpu("spend", "--json").document["total_usd"] == 1.12


ODD = ("1e300", "1e999", "NaN", "-1", '"x"', "[]", "{}", "true", "[null]", '"\\ud800"', '"9999-12-31T23:59:59-23:59"')
READERS = (
    ("job", "ls"), ("job", "status", "J-000001"), ("status",), ("doctor",), ("spend", "--all", "--by", "day"),
    ("policy", "check", "--cost", "1", "--rate", "1", "--job", "J-000001"), ("ledger", "query", "."),
    ("ledger", "tail"), ("economics", "keepalive", "--rate-usd-hr", "1", "--startup-min", "5"), ("ledger", "verify"),
)  # fmt: skip


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "field", ["status", "provider", "model", "started_at", "completed_at", "duration_s", "cost_usd"]
)
def test_a_field_that_is_anything_at_all_stops_no_command(state, gpu, clock, field):
    line = {"id": "J-000001", **DONE, "deployment_id": "dep_a", "ts": "2026-03-10T12:00:00Z"}
    (state / "deployments.json").write_text('[{"id": "dep_a", "provider": "ssh", "status": "error", "cost_hr": 1}]')
    for odd in ODD:
        (state / "jobs.jsonl").write_text(json.dumps({**line, field: "?"}).replace('"?"', odd) + "\n")
        for command in READERS:
            for flags in ((), ("--json",)):
                assert "[bug]" not in gpu(*command, *flags, clock=clock).stderr, (odd, command)


def test_a_job_with_a_damaged_field_is_seen_and_can_end(state, gpu, clock):
    text = (
        '{"id": "J-000007", "status": "running", "provider": 7, "started_at": "2026-03-10T11:00:00Z", "ts": "soon"}\n'
    )
    (state / "jobs.jsonl").write_text(text)
    assert [job["job"] for job in gpu("job", "ls", "--json", clock=clock).document["jobs"]] == ["J-000007"]
    done = gpu("job", "finish", "J-000007", "--status", "failed", "--json", clock=clock)
    assert (done.document["line"]["provider"], done.document["line"]["duration_s"]) == (None, 3600)
    assert (state / "jobs.jsonl").read_text().startswith(text)


def test_more_money_than_there_is_is_a_slip_of_the_hand(state, gpu):
    refused = append(gpu, {**DONE, "cost_usd": 1e300})
    assert refused.exit_code == 2 and "/cost_usd is 1e+300" in refused.error["message"]
    (state / "jobs.jsonl").write_text(
        json.dumps({"id": "J-000001", **DONE, "cost_usd": 1e300, "ts": "2026-03-10T12:00:00Z"})
    )
    spent = gpu("spend", "--json").document
    assert (spent["total_usd"], spent["incomplete"]) == (0, True)


def test_an_unknown_word_is_named_with_the_number_of_its_record(state, gpu):
    refused = append(gpu, DONE, {**DONE, "status": "complete"})
    assert refused.exit_code == 2
    assert 'record 2: /status is "complete"' in refused.error["message"] and "completed" in refused.error["message"]


@pytest.mark.parametrize(
    ("end", "what"),
    [
        (
            {"ts": "2026-03-10T11:59:59Z"},
            "/ts is 2026-03-10T11:59:59Z, before J-000001 started at 2026-03-10T12:00:00Z",
        ),
        ({"started_at": "2026-03-10T12:00:00Z", "completed_at": "2026-03-10T13:59:00+02:00"}, "/completed_at is 2026"),
    ],
)
def test_a_job_that_ends_before_it_starts_is_refused_as_verify_would_name_it(state, gpu, clock, end, what):
    append(gpu, {"status": "running"}, clock=clock)
    before = (state / "jobs.jsonl").read_bytes()
    refused = append(gpu, {**DONE, "id": "J-000001", **end}, clock=clock)
    assert refused.exit_code == 2 and f"record 1: {what}" in refused.error["message"]
    assert (
        append(gpu, {**DONE, "id": "J-000009", "status": "running"}, {**DONE, "id": "J-000009", **end}).exit_code == 2
    )
    assert (state / "jobs.jsonl").read_bytes() == before


def test_a_clock_that_was_set_back_ends_no_job_before_its_start(state, gpu, clock):
    append(gpu, {"status": "running"}, {"status": "running"}, clock=clock)
    clock.jump_wall(-3600)
    append(gpu, {**DONE, "id": "J-000001"}, clock=clock)
    gpu("job", "finish", "J-000002", "--status", "failed", "--duration", "1m", clock=clock)
    assert [line["ts"] for line in lines(state)] == ["2026-03-10T12:00:00Z"] * 4
    assert gpu("ledger", "verify").exit_code == 0


def test_a_clock_that_jumps_back_is_told_as_a_warning(state, gpu, clock):
    append(gpu, DONE, clock=clock)
    clock.jump_wall(-3600)
    append(gpu, DONE, clock=clock)
    found = gpu("ledger", "verify", "--json")
    assert found.exit_code == 0
    assert "the time goes back by 1:00:00" in found.document["warnings"][0]["message"]
    assert "warning" in gpu("ledger", "verify").stdout


def test_a_rewritten_line_is_found_until_it_is_accepted_with_a_reason(state, gpu):
    append(gpu, DONE, DONE, DONE)
    path = state / "jobs.jsonl"
    path.write_bytes(path.read_bytes().replace(b"0.12", b"0.02", 1))
    found = gpu("ledger", "verify", "--json")
    assert found.exit_code == 2 and "rewritten, removed or reordered" in found.document["problems"][0]["message"]
    assert "gpu ledger reseal" in found.stderr
    assert gpu("ledger", "reseal", "--reason", " ", "--json").exit_code == 2
    sealed = gpu("ledger", "reseal", "--reason", "the price was wrong", "--json")
    assert sealed.document["lines"] == 3
    again = gpu("ledger", "verify")
    assert again.exit_code == 0 and "the price was wrong" in again.stdout


def test_a_line_appended_by_hand_is_well_and_counts_as_not_sealed_yet(state, gpu, clock):
    append(gpu, DONE, clock=clock)
    with open(state / "jobs.jsonl", "a") as stream:
        stream.write('{"id":"J-000002","status":"lost","ts":"2026-03-10T12:00:05Z"}\n')
    assert gpu("ledger", "verify", "--json").document["unsealed_lines"] == 1
    append(gpu, DONE, clock=clock)
    assert gpu("ledger", "verify", "--json").document["unsealed_lines"] == 0


def test_tail_shows_the_last_lines_as_they_stand_and_bad_ones_as_problems(state, gpu):
    append(gpu, DONE, DONE)
    with open(state / "jobs.jsonl", "ab") as stream:
        stream.write(b"{oops\n\x1b[2J")
    shown = gpu("ledger", "tail", "-n", "3", "--json").document["lines"]
    assert shown[0]["record"]["id"] == "J-000002"
    assert [entry["problem"]["torn"] for entry in shown[1:]] == [False, True]
    assert "\x1b" not in gpu("ledger", "tail").stdout


@pytest.mark.subprocess
def test_query_gives_what_jq_makes_of_all_good_lines(state, gpu):
    append(gpu, DONE, {**DONE, "status": "failed"})
    with open(state / "jobs.jsonl", "ab") as stream:
        stream.write(b"{oops\n")
    example = 'map(select(.status == "failed")) | length'
    assert gpu("ledger", "query", example, "--json").document["results"] == [1]
    endless = gpu("ledger", "query", "def f: f; f", "--json")
    assert endless.exit_code == 2 and "stopped" in endless.error["message"]


@pytest.mark.subprocess
def test_query_shows_numbers_that_no_record_may_have(state, gpu):
    append(gpu, DONE)
    assert gpu("ledger", "query", "1e300, infinite, -1e308", "--json").document["results"] == [
        1e300,
        1.7976931348623157e308,
        -1e308,
    ]


def test_a_ledger_too_large_for_a_query_is_refused_before_it_is_read(state, gpu):
    with open(state / "jobs.jsonl", "wb") as stream:
        stream.truncate(70_000_000)
    refused = gpu("ledger", "query", "length", "--json")
    assert refused.exit_code == 2 and "the ledger has 70.0 MB" in refused.error["message"]
    assert "jq -c" in refused.error["next_step"]


def test_a_terminal_on_stdin_is_not_waited_for(state, gpu, terminal):
    refused = gpu("ledger", "append", "--json", stdin=terminal)
    assert refused.exit_code == 2 and "--file" in refused.error["message"]


def test_audit_reads_the_ledger_and_does_not_write_it(state, gpu):
    assert append(gpu, DONE, flags=("--mode", "audit")).error["code"] == "mode_forbids"
    assert gpu("ledger", "verify", "--mode", "audit").exit_code == 0
