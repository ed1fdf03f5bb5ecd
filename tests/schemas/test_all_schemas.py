"""Every schema of the project is a sound schema, and says what its examples here say it says.

`cases/<name>.json` (name as in `schemas/`) holds `good`: records that fit, and `bad`: `[record, pointer]` pairs with
the place of the first problem. A near miss there defends a rule of the schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from gpu_skills import resources, schemas
from gpu_skills.state import quick_check

SCHEMAS = resources.ROOT / "schemas"
NAMES = sorted(path.relative_to(SCHEMAS).as_posix().removesuffix(".json") for path in SCHEMAS.rglob("*.json"))
CASES = Path(__file__).parent / "cases"
CASE_NAMES = sorted(path.relative_to(CASES).as_posix().removesuffix(".json") for path in CASES.rglob("*.json"))


def cases(name: str) -> dict[str, Any]:
    return json.loads((CASES / f"{name}.json").read_text("utf-8"))


def references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own + [r for value in schema.values() for r in references(value)]
    return [r for value in schema for r in references(value)] if isinstance(schema, list) else []


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_valid_names_itself_and_says_what_it_is_for(name: str) -> None:
    from jsonschema import Draft202012Validator

    schema = schemas.load(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert urljoin(schemas.BASE, schema["$id"]) == f"{schemas.BASE}{name}.json"
    assert schema["title"]


@pytest.mark.parametrize("name", NAMES)
def test_every_reference_of_a_schema_leads_somewhere(name: str) -> None:
    resolver = schemas._validator(name)._resolver
    for reference in references(schemas.load(name)):
        base = resolver.lookup(f"{schemas.BASE}{name}.json").resolver
        assert base.lookup(reference).contents is not None


@pytest.mark.parametrize("name", CASE_NAMES)
def test_good_examples_fit(name: str) -> None:
    for record in cases(name)["good"]:
        assert schemas.problems(record, name) == [], record


@pytest.mark.parametrize("name", CASE_NAMES)
def test_near_misses_are_refused_at_their_place(name: str) -> None:
    for record, pointer in cases(name)["bad"]:
        found = [problem.pointer for problem in schemas.problems(record, name)]
        assert found[:1] == [pointer], record


@pytest.mark.parametrize("name", [n for n in CASE_NAMES if n.startswith("jobs/")])
def test_the_quick_check_of_a_jobs_records_agrees_with_their_schemas(name: str) -> None:
    assert [record for record in cases(name)["good"] if not quick_check.fits(record, name)] == []
    assert [record for record, _ in cases(name)["bad"] if quick_check.fits(record, name)] == []


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith(".yaml") or n.startswith("jobs/")])
def test_every_setting_and_every_record_of_a_job_is_described_and_has_examples_here(name: str) -> None:
    assert name in CASE_NAMES

    def undescribed(schema: dict[str, Any], at: str) -> list[str]:
        found = []
        for key, value in schema.get("properties", {}).items():
            if not value.get("description"):
                found.append(f"{at}/{key}")
            found += undescribed(value, f"{at}/{key}")
        if isinstance(schema.get("items"), dict):
            found += undescribed(schema["items"], f"{at}[]")
        return found

    schema = schemas.load(name)
    assert undescribed(schema, "") == []
    for definition in schema.get("$defs", {}).values():
        assert undescribed(definition, "$defs") == []
