from __future__ import annotations

import json
import os

import pytest

from dying import dies
from fake_clock import FakeClock
from gpu_skills.errors import SchemaInvalid, StateError, StateNewer, UsageError
from gpu_skills.state import query, registry
from gpu_skills.state.project import Project

TS = "2026-01-02T03:04:05Z"
MACHINE = {"id": "m_1", "provider": "vast", "status": "ready", "rate_usd_hr": 0.69}
READY = {"id": "dep_1", "provider": "vast", "status": "ready", "test_generation": {"succeeded": True, "at": TS}}


def write(project, kind, text):
    project.path(f"{kind}.json").write_text(text)


def put(project, kind, record):
    return registry.put(project, kind, record, clock=FakeClock())


def test_put_adds_a_record_or_replaces_the_one_of_its_id(project):
    put(project, "machines", MACHINE)
    put(project, "machines", {**MACHINE, "id": "m_2"})
    put(project, "machines", {**MACHINE, "status": "busy"})
    assert [(r["id"], r["status"]) for r in registry.load(project, "machines")] == [("m_1", "busy"), ("m_2", "ready")]


def test_put_keeps_other_records_even_those_that_do_not_fit(project):
    write(project, "machines", '[{"id": "m_9", "status": "wrong", "mine": [1]}, 5]')
    put(project, "machines", MACHINE)
    kept = json.loads(project.path("machines.json").read_text())
    assert kept == [{"id": "m_9", "status": "wrong", "mine": [1]}, 5, MACHINE]


def test_a_record_written_by_hand_with_fields_of_its_own_is_accepted(project):
    write(
        project,
        "deployments",
        '[{"id": "dep_a", "provider": "x", "status": "stopped", "ssh": "ssh -p 1 h", "note": 1}]',
    )
    assert registry.validate(project) == []
    assert registry.show(project, "deployments", "dep_a")[0]["note"] == 1
    with pytest.raises(UsageError, match=r"no dep_b in deployments\.json; there is dep_a"):
        registry.show(project, "deployments", "dep_b")


@pytest.mark.parametrize(
    "text, line, pointer, words",
    [
        ('[\n {"id": "m_1",\n  "provider": "vast",\n  "status": "redy"}\n]', 4, "/0/status", "nearest is ready"),
        ('[\n {"id": "m_1"}\n]', 2, "/0/provider", "missing"),
        ('[{"id": "m_1", "provider": "v", "status": "ready", "rate_usd_hr": "1"}]', 1, "/0/rate_usd_hr", "a number"),
        ('[{"id": "m_1", "provider": "v", "status": "ready", "rate_usd_hr": -1}]', 1, "/0/rate_usd_hr", "0 or more"),
        ('[{"id": "m_1", "provider": "v", "status": "lost", "created_at": "2026-01-02"}]', 1, "/0/created_at", "zone"),
        ("[\n 5]", 2, "/0", "mapping"),
        ("{}", 1, "", "array"),
        ('[\n {"id": "m_1"},\n]', 2, "", "trailing comma"),
        ('\ufeff[]', 1, "", "byte order mark"),
        ('[{"id": "m_1", "x": NaN}]', 1, "/0/x", "NaN"),
        ('[{"id": "m_1", "id": "m_1"}]', 1, "/0/id", "again"),
        ('[{"id": "m_\\ud800"}]', 1, "/0/id", "lone surrogate"),
        ("[" * 200 + "]" * 200, 1, "/0/0", "nesting"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_line_and_pointer_and_nothing_is_rewritten(
    project, text, line, pointer, words
):
    write(project, "machines", text)
    found = registry.validate(project)
    assert any(p.line == line and p.pointer.startswith(pointer) and words in p.message for p in found), found
    with pytest.raises(StateError, match=r"machines\.json"):
        registry.load(project, "machines")
    assert project.path("machines.json").read_text() == text


def test_windows_line_ends_are_read(project):
    write(project, "machines", json.dumps([MACHINE], indent=1).replace("\n", "\r\n"))
    assert registry.load(project, "machines") == [MACHINE] and registry.validate(project) == []


def test_an_id_that_is_there_twice_is_an_error_and_put_does_not_choose(project):
    write(project, "machines", json.dumps([MACHINE, MACHINE]))
    assert "as /0/id is" in registry.validate(project)[0].message
    with pytest.raises(StateError, match="2 times"):
        put(project, "machines", MACHINE)


def test_ready_needs_a_successful_test_generation_on_record(project):
    for test in (None, {"succeeded": False, "at": TS}):
        with pytest.raises(UsageError, match="without a successful test generation"):
            put(project, "deployments", {**READY, "test_generation": test})
    put(project, "deployments", READY)
    write(project, "deployments", json.dumps([{**READY, "test_generation": None}]))
    assert [p.pointer for p in registry.validate(project)] == ["/0/status"]


@pytest.mark.parametrize("kind, record", [("deployments", READY), ("machines", MACHINE)])
def test_a_status_never_leaves_destroyed_and_a_destroyed_record_never_disappears(project, kind, record):
    put(project, kind, record)
    put(project, kind, {**record, "status": "destroyed"})
    assert registry.validate(project) == []
    with pytest.raises(UsageError, match="was destroyed; that never changes") as refused:
        put(project, kind, record)
    assert refused.value.next_step == f"gpu registry show {kind} {record['id']}"
    write(project, kind, json.dumps([record]))
    assert "that never changes" in registry.validate(project)[0].message
    write(project, kind, "[]")
    assert f"the destroyed record {record['id']} has disappeared" in registry.validate(project)[0].message


def test_a_host_of_the_users_own_may_come_back(project):
    own = {"id": "m_own", "provider": "ssh", "status": "destroyed"}
    put(project, "machines", own)
    put(project, "machines", {**own, "status": "ready"})
    assert registry.validate(project) == []


def test_a_record_that_does_not_fit_is_refused_before_anything_is_written(project):
    before = project.path("machines.json").read_bytes()
    for record in ({**MACHINE, "status": "redy"}, {"id": "m_1"}, {**MACHINE, "rate_usd_hr": float("nan")}):
        with pytest.raises(SchemaInvalid):
            put(project, "machines", record)
    assert project.path("machines.json").read_bytes() == before
    with pytest.raises(UsageError, match="no registry 'machine'; there are providers"):
        put(project, "machine", MACHINE)


def test_a_newer_major_is_not_written(project):
    with pytest.raises(StateNewer):
        put(Project(project.root, project.state, project.project_id, 2), "machines", MACHINE)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("crossing", [1, 2])
def test_death_at_any_door_of_put_leaves_the_old_or_the_new_records(project, crossing, side):
    put(project, "machines", MACHINE)
    old, new = [MACHINE], [{**MACHINE, "status": "destroyed"}]
    assert dies(lambda: put(project, "machines", new[0]), crossing=crossing, side=side)
    left = registry.load(project, "machines")
    assert left == (old if (crossing, side) == (1, "before") else new)
    assert registry.validate(project) == []
    put(project, "machines", new[0])  # running it again completes it
    write(project, "machines", "[]")
    assert "has disappeared" in registry.validate(project)[0].message


PUT_ONE = """
import sys
from pathlib import Path
from gpu_skills.state import project, registry
found = project.load(Path(sys.argv[1]))
sys.stdin.readline()
registry.put(found, "machines", {"id": f"m_{sys.argv[2]}", "provider": "vast", "status": "ready"})
"""


def test_twenty_processes_that_write_the_registry_leave_twenty_records(project, spawn):
    writers = [spawn(PUT_ONE, project.root, n) for n in range(20)]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _out, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    assert {r["id"] for r in registry.load(project, "machines")} == {f"m_{n}" for n in range(20)}


@pytest.mark.subprocess
def test_a_query_sees_the_records_and_nothing_of_the_caller(project, monkeypatch):
    monkeypatch.setenv("A_SECRET", "s3cr3t-value")
    put(project, "machines", MACHINE)
    assert registry.query(project, ".machines[].id") == ["m_1"]
    assert registry.query(project, "map(.rate_usd_hr) | add", "machines") == [0.69]
    seen = json.dumps(registry.query(project, "env, $ENV, input_filename, $__loc__"))
    assert "s3cr3t" not in seen and os.environ["PATH"] not in seen
    assert registry.query(project, "env") == [{}]


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "program, words",
    [
        ("][", "syntax error"),
        (".x", "Cannot index"),
        ('error("mine")', "mine"),
        ("nosuch", "nosuch"),
        ("def f: f; f", "took"),
        ("[range(1e12)]", "took"),
        ("repeat(1)", "stopped"),
        ('import "passwd" as $x {search: "/etc"}; $x', "module"),
    ],
)
def test_a_program_that_is_wrong_or_greedy_is_one_line(program, words):
    with pytest.raises(UsageError, match=words) as caught:
        query.run(program, [1], timeout_s=1.5)
    assert "Traceback" not in caught.value.message


@pytest.mark.subprocess
def test_a_data_file_beside_the_search_path_cannot_be_read(tmp_path):
    (tmp_path / "secret.json").write_text('{"token": "s3cr3t"}')
    with pytest.raises(UsageError) as caught:
        query.run(f'import "secret" as $x {{search: "{tmp_path}"}}; $x', [1])
    assert "s3cr3t" not in str(caught.value.to_dict())
