"""docs/state-files.md has every record, every field with a meaning, and every file that a project comes to have."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_skills import resources, schemas
from gpu_skills.cli.state_reference import OF_USER, RECORDS, SETTINGS, Field, fields, state_files_reference

SCHEMAS = resources.ROOT / "schemas"


@pytest.fixture(scope="module")
def page() -> str:
    return state_files_reference("note")


def test_every_schema_of_a_file_has_a_section(page: str) -> None:
    documented = [record.schema for record in (*RECORDS, *OF_USER, *SETTINGS)]
    there = [path.relative_to(SCHEMAS).as_posix().removesuffix(".json") for path in SCHEMAS.rglob("*.json")]
    assert sorted(documented) == sorted(name for name in there if not name.startswith("cli/"))
    for record in (*RECORDS, *OF_USER, *SETTINGS):
        assert re.search(rf"^##+ {re.escape(record.file)}$", page, re.MULTILINE), record.file


@pytest.mark.parametrize("record", [*RECORDS, *OF_USER, *SETTINGS], ids=lambda r: r.schema)
def test_every_field_has_a_type_and_says_what_it_means(record, page: str) -> None:
    found = list(fields(schemas.load(record.schema)))
    assert found
    assert [f.name for f in found if not f.type or not f.meaning.strip()] == []
    section = page.split(f"# {record.file}\n", 1)[1].split("\n## ", 1)[0]
    for field in found:
        assert f"| `{field.name}` | {field.type} | {field.meaning} | {field.required} |" in section


def test_a_table_has_what_is_inside_objects_arrays_maps_and_references() -> None:
    schema = {
        "required": ["a"],
        "$defs": {"time": {"type": ["string", "null"], "format": "date-time", "description": "Not this."}},
        "properties": {
            "a": {
                "type": "array",
                "description": "One | two.",
                "items": {
                    "type": "object",
                    "required": ["b"],
                    "properties": {"b": {"type": "integer", "minimum": 1, "description": "B."}},
                },
            },
            "m": {
                "type": "object",
                "description": "M.",
                "additionalProperties": {"properties": {"x": {"enum": ["u", "v"], "description": "X."}}},
            },
            "t": {"$ref": "#/$defs/time", "description": "T."},
            "d": {"$ref": "gpu.yaml.json#/$defs/duration", "description": "D."},
        },
    }
    assert list(fields(schema)) == [
        Field("a", "array of object", "One \\| two.", "yes"),
        Field("a[].b", "whole number ≥ 1", "B.", "yes"),
        Field("m", "object", "M.", ""),
        Field("m.*.x", "`u` · `v`", "X.", ""),
        Field("t", "time or null", "T.", ""),
        Field("d", "text like `90s` or number ≥ 0", "D.", ""),
    ]


def test_what_only_some_lines_of_the_journal_need_is_said(page: str) -> None:
    assert "- With kind `reservation` also required: `intent`, `reserved_usd`." in page


@pytest.mark.subprocess
def test_every_file_that_a_project_comes_to_have_is_on_the_page(page: str, tmp_path: Path) -> None:
    """After a job, its end by hand, a record that was destroyed and a change that was accepted."""

    def gpu(*arguments: str, given: str = "") -> None:
        environ = {"PYTHONPATH": str(resources.PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "gpu_skills", *arguments],
            cwd=tmp_path, env={**os.environ, **environ}, input=given, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    gpu("init", "--jobs")
    gpu("job", "run", "--", 'echo 1 > "$GPU_OUTPUT_DIR/one"')
    gpu("registry", "put", "deployments", given=json.dumps({"id": "dep_1", "provider": "x", "status": "destroyed"}))
    gpu("ledger", "append", given=json.dumps({"status": "completed", "cost_usd": 1}))
    gpu("ledger", "reseal", "--reason", "a test")
    gpu("destroy")

    state = tmp_path / ".pi" / "gpu"
    there = {path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()}
    assert {"jobs.jsonl", "journal.jsonl", "jobs/J-000001/manifest.json"} <= there
    named = {name.replace("jobs/ID/", "jobs/*/") for name in re.findall(r"`([\w*./]+)`", page)}
    named |= {record.file.replace("jobs/ID/", "jobs/*/") for record in RECORDS}
    assert sorted(name for name in there if not any(fnmatch.fnmatch(name, known) for known in named)) == []
