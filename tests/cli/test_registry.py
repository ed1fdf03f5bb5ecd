"""`gpu registry …`: records that people and agents edit by hand, and what is said when they are wrong."""

from __future__ import annotations

import json

import pytest

GOOD = {"id": "dep_a41c", "provider": "ssh", "status": "installing"}
TESTED = {"succeeded": True, "at": "2026-01-01T00:12:00Z"}


@pytest.fixture
def state(tmp_path, gpu):
    assert gpu("init").exit_code == 0
    return tmp_path / ".pi/gpu"


def put(gpu, record, kind="deployments", *flags):
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    return gpu("registry", "put", kind, "--json", *flags, stdin=data)


def test_a_record_is_added_then_replaced_and_the_others_stay(state, gpu):
    for record in (GOOD, {**GOOD, "id": "dep_b"}, {**GOOD, "status": "verifying", "mine": [1]}):
        assert put(gpu, record).exit_code == 0
    assert [r["id"] for r in json.loads((state / "deployments.json").read_text())] == ["dep_a41c", "dep_b"]
    shown = gpu("registry", "show", "deployments", "dep_a41c", "--json").document
    assert shown["records"] == [{**GOOD, "status": "verifying", "mine": [1]}]
    assert "verifying" in gpu("registry", "show", "deployments").stdout


def test_put_reads_a_file_and_names_it(state, gpu, tmp_path):
    (tmp_path / "d.json").write_text(json.dumps(GOOD, indent=2).replace("\n", "\r\n"))
    assert gpu("registry", "put", "deployments", "--file", "d.json").exit_code == 0
    (tmp_path / "d.json").write_text('{\n "id": "dep_x",\n}')
    refused = gpu("registry", "put", "deployments", "--file", "d.json", "--json")
    assert refused.exit_code == 2 and refused.error["message"].startswith("d.json:2:15: found a trailing comma")


def test_ready_needs_a_successful_test_generation_and_destroyed_is_for_ever(state, gpu):
    refused = put(gpu, {**GOOD, "status": "ready"})
    assert refused.exit_code == 2 and "test generation" in refused.error["message"]
    assert put(gpu, {**GOOD, "status": "ready", "test_generation": TESTED}).exit_code == 0
    assert put(gpu, {**GOOD, "status": "destroyed"}).exit_code == 0
    assert put(gpu, {**GOOD, "status": "installing"}).exit_code == 2
    (state / "deployments.json").write_text("[]")
    found = gpu("registry", "validate", "deployments", "--json")
    assert found.exit_code == 2 and "dep_a41c has disappeared" in found.document["problems"][0]["message"]


def test_validate_names_file_line_pointer_found_allowed_and_nearest(state, gpu):
    (state / "deployments.json").write_text('[\n {"id": "dep_a", "provider": "ssh",\n  "status": "redy"}\n]\n')
    found = gpu("registry", "validate", "--json")
    assert found.exit_code == 2 and not found.document["ok"]
    problem = found.document["problems"][0]
    assert (problem["file"], problem["line"], problem["pointer"]) == ("deployments.json", 3, "/0/status")
    assert (problem["found"], problem["nearest"]) == ('"redy"', "ready") and "stopped" in problem["allowed"]
    assert "deployments.json:3: /0/status" in gpu("registry", "validate").stdout
    assert gpu("registry", "validate", "machines", "--json").document["checked"] == ["machines"]


BAD = [
    (b'[{"id": "m_1", "provider": "ssh", "status": "ready",}]', "1", "a trailing comma"),
    (b"\xef\xbb\xbf[]", "1", "a byte order mark"),
    (b'[{"id": "m_1", "provider": "ssh", "status": "ready", "rate_usd_hr": NaN}]', "1", "NaN"),
    (b'[{"id": "m_1", "provider": "ssh", "status": "ready", "rate_usd_hr": -Infinity}]', "1", "-Infinity"),
    (b'[{"id": "m_1",\n"id": "m_2", "provider": "ssh", "status": "ready"}]', "2", "again"),
    (b'[{"id": "m_1", "provider": "ssh", "status": "ready", "rate_usd_hr": "0.7"}]', "1", "/rate_usd_hr"),
    (b'[{"id": "m_1", "provider": "ssh", "status": "ready", "rate_usd_hr": -1}]', "1", "0 or more"),
    (b'[{"id": "m_1", "provider": "ssh",\n"status": "ready", "created_at": "2026-01-01T00:00:00"}]', "2", "zone"),
    (b'[{"id": "m_1", "provider": "\\ud800", "status": "ready"}]', "1", "a lone surrogate"),
    (b'[{"id": "m_1", "provider": "ssh", "status": "ready", "x": ' + b"[" * 200 + b"]" * 200 + b"}]", "1", "level 101"),
    (b'[{"id": "m_1", "provider": "x", "status": "lost"},\n{"id":"m_1","provider":"x","status":"lost"}]', "2", "m_1"),
    (b"{}", "1", "an array"),
    (b"\xff[]", "1", "0xff"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "line", "what"), BAD)
def test_what_is_wrong_by_hand_is_named_and_not_rewritten_by_anyone(state, gpu, content, line, what):
    path = state / "machines.json"
    path.write_bytes(content)
    found = gpu("registry", "validate", "machines", "--json")
    assert found.exit_code == 2
    problem = found.document["problems"][0]
    assert problem["line"] == int(line) and what in problem["message"], problem
    reading = gpu("registry", "show", "machines", "--json")
    assert reading.exit_code == 2 and what in reading.error["message"]
    if content.startswith(b"[") and "m_1" in problem["message"] and what == "m_1":
        assert put(gpu, {"id": "m_1", "provider": "ssh", "status": "ready"}, "machines").exit_code == 2
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b'{"id": "dep_a", "provider": "ssh", "status": "error",}', "stdin:1:53: found a trailing comma"),
        (b'\xef\xbb\xbf{"id": "dep_a"}', "stdin:1:1: found a byte order mark"),
        (b'{"id": "dep_a", "cost_hr": NaN}', "stdin:1:28 /cost_hr"),
        (b'{"id": "dep_a", "id": "dep_b"}', "stdin:1:17"),
        (b'{"id": "dep_a", "x": "\\udead"}', "lone surrogate"),
        (b'{"id": "dep_a", "x": ' + b"[" * 200 + b"]" * 200 + b"}", "level 101"),
        (b'{"id": "dep_a", "provider": "ssh", "status": "error", "cost_hr": -0.5}', "/cost_hr is -0.5, allowed: 0"),
        (b'{"id": "dep_a", "provider": "ssh", "status": "error", "cost_hr": "1"}', "/cost_hr"),
        (b'{"id": "dep_a", "provider": "ssh", "status": "error", "created_at": "2026-01-01"}', "/created_at"),
        (b'{"id": "a41c", "provider": "ssh", "status": "error"}', "/id"),
        (b"[]", "not one JSON object"),
        (b" ", "stdin is empty"),
    ],
)  # fmt: skip
def test_put_refuses_what_is_no_record_and_leaves_the_file_alone(state, gpu, data, what):
    assert put(gpu, GOOD).exit_code == 0
    before = (state / "deployments.json").read_bytes()
    refused = put(gpu, data)
    assert refused.exit_code == 2 and what in refused.error["message"]
    assert "edit" not in refused.error["next_step"]  # standard input is no file
    assert (state / "deployments.json").read_bytes() == before


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("created_at", '"9999-12-31T23:59:59-23:59"', "/0/created_at is"),
        ("created_at", '"0001-01-01T00:00:00+14:00"', "/0/created_at is"),
        ("cost_hr", "1e300", "/0/cost_hr is 1e+300, allowed: 1000000000 or less"),
    ],
)
def test_a_time_or_a_rate_that_nobody_can_reckon_with_is_named(state, gpu, field, value, what):
    text = '[{"id": "dep_a", "provider": "ssh", "status": "error", "?": ?}]'.replace("?", field, 1).replace("?", value)
    (state / "deployments.json").write_text(text)
    found = gpu("registry", "validate", "--json")
    assert found.exit_code == 2 and what in found.document["problems"][0]["message"]
    assert gpu("doctor").exit_code != 0


def test_lists_are_bounded_and_say_what_they_leave_out(state, gpu):
    records = [{"id": f"m_{n}", "provider": "ssh", "status": "lost"} for n in range(5)]
    (state / "machines.json").write_text(json.dumps(records))
    shown = gpu("registry", "show", "machines", "--limit", "2", "--json").document
    assert [r["id"] for r in shown["records"]] == ["m_3", "m_4"] and shown["left_out"] == 3


def test_an_id_that_is_not_there_names_those_that_are(state, gpu):
    put(gpu, GOOD)
    refused = gpu("registry", "show", "deployments", "dep_z", "--json")
    assert refused.exit_code == 2 and "dep_a41c" in refused.error["message"]


@pytest.mark.subprocess
def test_query_runs_jq_over_one_kind_or_all_and_sees_no_secret_of_ours(state, gpu, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cr3tXYZ")
    put(gpu, {**GOOD, "status": "ready", "test_generation": TESTED})
    example = '.deployments[] | select(.status == "ready") | .id'
    assert gpu("registry", "query", example, "--json").document["results"] == ["dep_a41c"]
    assert gpu("registry", "query", "--kind", "deployments", "length").stdout == "1\n"
    assert "s3cr3tXYZ" not in gpu("registry", "query", "env").stdout
    broken = gpu("registry", "query", ".[", "--json")
    assert broken.exit_code == 2 and broken.error["message"].startswith("jq: ")


def test_audit_may_read_the_records_but_not_write_them(state, gpu):
    assert gpu("registry", "validate", "--mode", "audit").exit_code == 0
    refused = put(gpu, GOOD, "deployments", "--mode", "audit")
    assert refused.exit_code == 3 and refused.error["code"] == "mode_forbids"
    assert (state / "deployments.json").read_text() == "[]\n"


def test_without_a_project_gpu_init_is_named(gpu):
    refused = gpu("registry", "validate", "--json")
    assert refused.exit_code == 2 and refused.error["next_step"] == "gpu init"


def test_everything_that_may_bill_is_in_the_burn(state, gpu):
    words = ("requested", "booting", "ready", "busy", "stopping", "terminating", "unknown", "stopped", "destroyed")
    for number, word in enumerate(words):
        record = {"id": f"m_{number}", "provider": "vast", "status": word, "rate_usd_hr": 0.1}
        assert gpu("registry", "put", "machines", stdin=json.dumps(record).encode()).exit_code == 0
    assert gpu("status", "--json").document["burn_usd_hr"] == 0.7


@pytest.mark.subprocess
def test_a_machine_written_by_hand_may_say_more_of_its_address_and_not_less(state, gpu):
    record = {"id": "m_1", "provider": "ssh", "status": "stopped", "ssh": {"host": "box", "note": "in the cellar"}}
    assert gpu("registry", "put", "machines", stdin=json.dumps(record).encode()).exit_code == 0
    assert gpu("machine", "ls", "--json").document["machines"][0]["id"] == "m_1"
    record["ssh"] = {"user": "me"}
    refused = gpu("registry", "put", "machines", "--json", stdin=json.dumps(record).encode())
    assert refused.exit_code == 2 and "host" in refused.error["message"]
