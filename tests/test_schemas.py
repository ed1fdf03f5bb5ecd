from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpu_skills import resources, schemas
from gpu_skills.errors import Bug, ConfigError, SchemaInvalid, StateError

MACHINE: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "machine.json",
    "type": "object",
    "required": ["id", "status"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "pattern": "^m_[0-9]+$", "examples": ["m_1"]},
        "status": {"enum": ["ready", "stopped", "destroyed"]},
        "rate_usd_hr": {"type": ["number", "null"], "minimum": 0},
        "count": {"type": "integer", "maximum": 8},
        "label": {"type": "string"},
        "started_at": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "maxItems": 2, "uniqueItems": True, "items": {"type": "string"}},
        "endpoint": {
            "anyOf": [
                {"type": "null"},
                {"type": "object", "required": ["host"], "properties": {"host": {"type": "string"}}},
            ]
        },
        "anything": {},
    },
}
LIST = {"type": "array", "items": {"$ref": "machine.json"}}
CLI = {"type": "object", "properties": {"machine": {"$ref": "../machine.json"}}}


@pytest.fixture(autouse=True)
def own_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "schemas"
    (folder / "cli").mkdir(parents=True)
    for name, schema in {"machine": MACHINE, "machines": LIST, "cli/show": CLI}.items():
        (folder / f"{name}.json").write_text(json.dumps(schema))
    (folder / "broken.json").write_text("{")
    monkeypatch.setattr(resources, "ROOT", tmp_path)
    _forget()
    yield
    _forget()


def _forget() -> None:
    schemas._validator.cache_clear()
    schemas._retrieve.cache_clear()


A_TIME = "a time with its zone like 2026-11-30T18:08:00Z"
GOOD = {"id": "m_1", "status": "ready"}


def test_a_record_that_fits_has_no_problems() -> None:
    full = GOOD | {
        "rate_usd_hr": Decimal("0.7"),
        "endpoint": {"host": "h"},
        "started_at": "2026-11-30T18:08:00Z",
        "tags": ["a"],
    }
    assert schemas.problems(full, "machine") == []


@pytest.mark.parametrize(
    ("change", "pointer", "found", "allowed", "nearest"),
    [
        ({"status": "redy"}, "/status", '"redy"', '"ready", "stopped" or "destroyed"', "ready"),
        ({"status": None}, "/status", "null", '"ready", "stopped" or "destroyed"', None),
        ({"id": "x"}, "/id", '"x"', 'text like "m_1"', None),
        ({"id": "m_1\n"}, "/id", '"m_1\\n"', 'text like "m_1"', None),
        ({"rate_usd_hr": "1"}, "/rate_usd_hr", '"1"', "a number or null", None),
        ({"rate_usd_hr": -1}, "/rate_usd_hr", "-1", "0 or more", None),
        ({"rate_usd_hr": float("nan")}, "/rate_usd_hr", "nan", "a number or null", None),
        ({"rate_usd_hr": float("inf")}, "/rate_usd_hr", "inf", "a number or null", None),
        ({"rate_usd_hr": True}, "/rate_usd_hr", "true", "a number or null", None),
        ({"count": 9}, "/count", "9", "8 or less", None),
        ({"label": 7}, "/label", "7", "text (in quotes)", None),
        ({"started_at": "18:08"}, "/started_at", '"18:08"', A_TIME, None),
        ({"started_at": "2026-11-30"}, "/started_at", '"2026-11-30"', A_TIME, None),
        ({"tags": ["a", "b", "c"]}, "/tags", "3 entries", "at most 2", None),
        ({"tags": ["a", "a"]}, "/tags", "an entry that is there twice", "each entry once", None),
        ({"tags": ["a", 1]}, "/tags/1", "1", "text (in quotes)", None),
        ({"endpoint": 3}, "/endpoint", "3", "null or a mapping", None),
        ({"endpoint": {"hots": "h"}}, "/endpoint/host", "nothing", "the key host", "hots"),
    ],
)  # fmt: skip
def test_a_problem_says_where_what_was_found_and_what_is_allowed(
    change: dict[str, Any], pointer: str, found: str, allowed: str, nearest: str | None
) -> None:
    (problem,) = schemas.problems(GOOD | change, "machine")
    assert (problem.pointer, problem.found, problem.allowed, problem.nearest) == (pointer, found, allowed, nearest)
    assert "\n" not in problem.message


def test_an_unknown_key_is_told_with_the_nearest_one() -> None:
    (problem,) = schemas.problems(GOOD | {"rate_usd": 1}, "machine")
    assert (problem.pointer, problem.nearest) == ("/rate_usd", "rate_usd_hr")
    assert problem.message == "/rate_usd is not a known key, nearest is rate_usd_hr"
    (far,) = schemas.problems(GOOD | {"zzz~/": 1}, "machine")
    assert (far.pointer, far.nearest) == ("/zzz~0~1", None)


def test_missing_keys_are_told_one_by_one() -> None:
    assert [p.pointer for p in schemas.problems({"stauts": 1}, "machine")] == ["/id", "/status", "/stauts"]
    assert schemas.problems({"stauts": 1}, "machine")[1].message == "/status is missing (there is stauts)"


def test_references_between_schemas_follow_the_folders_without_a_network() -> None:
    assert [p.pointer for p in schemas.problems([GOOD, GOOD | {"id": 1}], "machines")] == ["/1/id"]
    assert [p.pointer for p in schemas.problems({"machine": {"id": "m_1"}}, "cli/show")] == ["/machine/status"]


def test_check_raises_one_line_with_file_line_and_everything_an_agent_needs() -> None:
    with pytest.raises(SchemaInvalid) as caught:
        schemas.check(GOOD | {"status": "redy", "x": 1}, "machine", file="machines.json", line=7)
    error = caught.value
    assert error.message.startswith("machines.json:7: ") and error.message.endswith("(and 1 more)")
    assert error.next_step == "edit machines.json"
    assert error.exit_code == 2
    assert [p["pointer"] for p in error.details["problems"]] == ["/x", "/status"]
    json.dumps(error.to_dict())


@pytest.mark.parametrize("error", [ConfigError, StateError])
def test_check_raises_the_error_it_is_asked_for_with_the_line_of_the_pointer(error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        schemas.check(
            {"id": "m_1", "status": "no"}, "machine", file="f", line=lambda pointer: len(pointer), error=error
        )  # type: ignore[arg-type]
    assert str(caught.value).startswith("f:7: /status is")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_record_nested_without_end_is_a_problem_not_a_crash(opening: str) -> None:
    record: Any = 1
    for _ in range(100_000):
        record = [record] if opening == "[" else {"a": record}
    (problem,) = schemas.problems(GOOD | {"anything": record}, "machine")
    assert problem.allowed == "at most 100"
    with pytest.raises(SchemaInvalid):
        schemas.check({"anything": record}, "machine", file="f")
    while isinstance(record, list | dict):  # take it apart here: the interpreter would recurse doing it
        record = record[0] if isinstance(record, list) else record["a"]


def test_hostile_texts_stay_short_and_on_one_line() -> None:
    for value in ("x" * 1_000_000, "a\nb\x1b[31m", "\ud800", "\u202e"):
        with pytest.raises(SchemaInvalid) as caught:
            schemas.check(GOOD | {"status": value, value: 1}, "machine", file="f")
        assert len(caught.value.message) < 700
        assert caught.value.message.isprintable()


def test_a_thousand_problems_are_told_as_the_first_twenty() -> None:
    assert len(schemas.problems([{}] * 1000, "machines")) == schemas.MAX_PROBLEMS


def test_a_schema_that_is_missing_or_broken_is_a_bug_of_ours() -> None:
    for name in ("missing", "broken"):
        with pytest.raises(Bug):
            schemas.load(name)


def test_an_absurdly_large_integer_is_compared_not_converted() -> None:
    assert [p.allowed for p in schemas.problems(GOOD | {"count": 10**400}, "machine")] == ["8 or less"]
    assert schemas.problems(GOOD | {"rate_usd_hr": 10**400}, "machine") == []
