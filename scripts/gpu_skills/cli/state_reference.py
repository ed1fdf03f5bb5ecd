"""The page docs/state-files.md: what lies in `.pi/gpu` and beside it, field by field, as the schemas say it.

What a schema cannot say (which file, and the rule of that file) stands here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpu_skills import schemas

_INTRO = """\
A project's records lie in `.pi/gpu`, found by walking up from the current directory; a linked git worktree uses its
main worktree's. They are plain files: any program can read them, `jq` included, and an agent without `gpu` can write
them. `gpu init` makes them (folders 0700, files 0600) and adds `.pi/` to `.gitignore`.

- **Whole files** (`.json`) are replaced as a whole: lock, compare with what was read, temporary file, fsync, rename.
  Someone who reads sees the old file or the new one. A change by hand that comes between is not overwritten.
- **Lines** (`.jsonl`) are only ever appended, one `write` each time, and fsynced. The last line of an id is its state.
  A line that was torn by a crash is reported, and never cut off or merged with the next one.
- **By hand** is allowed: a record without `$schema`, with other spacing, or with fields that are not below is taken, if
  those that are below fit. What does not fit is told with file, line, JSON pointer, found and allowed, and left as it
  is. Duplicate keys, NaN, a byte order mark and times without a zone do not fit.
- **Versions**: within a major version fields are only added. When `project.json` has a newer major than the tool, the
  tool only reads (`state_newer`). Migrations are numbered and keep a copy; the ledger is never migrated.
- Times are RFC 3339 with a zone; days and months are UTC. Money is a JSON number of USD with at most six places.

`gpu registry validate`, `gpu ledger verify` and `gpu policy show` check what is there. In the tables `a.b` is the field
b of the object a, `a[]` an entry of the array a, `a.*` the value under any name; what is required inside an object is
required when there is such an object.
"""

_AROUND = """\
## What else lies there

| file | content |
|---|---|
| `jobs/ID/log` | the job's log, kept by the pull after its end |
| `known_hosts` | the pinned host keys |
| `jobs.index.json`, `jobs.spend.json` | caches of the ledger: may be deleted, are made again |
| `jobs/ID/verified.json`, `hashes/*.cache` | caches of what was hashed here: may be deleted, it is hashed again |
| `backups/` | copies from before a migration |
| `*.lock` | held for moments, never longer than a command; empty |

Shared by the user's projects, outside of them: reservations on an account, in `~/.local/state/gpu/accounts/`, in the
form of `journal.jsonl`, so that two projects that rent on one account share its ceilings.
"""


@dataclass(frozen=True)
class StateFile:
    """schema: its name below `schemas/`. rule: who may change it and how, beyond what the introduction says."""

    schema: str
    file: str
    rule: str


RECORDS = (
    StateFile("project", "project.json", "Made by `gpu init` and kept: rented machines carry its `project_id`."),
    StateFile("providers", "providers.json", "An array. `gpu registry put providers` adds or replaces one."),
    StateFile(
        "machines",
        "machines.json",
        "An array; no record is deleted. The commands that set up and give back machines write it.",
    ),
    StateFile(
        "deployments",
        "deployments.json",
        "An array; no record is deleted. Errors are: ready without a test_generation that succeeded, a status that "
        "leaves destroyed, and a destroyed record that has gone.",
    ),
    StateFile("models", "models.json", "An array. A changed manifest is a new `version`."),
    StateFile("workflows", "workflows.json", "An array. A changed manifest is a new `version`."),
    StateFile(
        "jobs",
        "jobs.jsonl",
        "The ledger, written by `gpu job run`, `gpu job finish` and `gpu ledger append`. A terminal line has all of "
        "id, deployment_id, provider, model, workflow, workflow_version, inputs, status, started_at, completed_at, "
        "duration_s, cost_usd, gpu, artifacts and ts, null where unknown, and error when it did not succeed.",
    ),
    StateFile(
        "ledger_head",
        "jobs.head.jsonl",
        "Written with the ledger, by the tool alone: evidence that sealed lines are what they were. It may lag behind "
        "the ledger, so a line appended by hand is well. `gpu ledger reseal` accepts an honest change.",
    ),
    StateFile("charges", "charges.jsonl", "With `jobs.jsonl` it sums to what machines billed: `gpu spend --all`."),
    StateFile(
        "policy",
        "policy.json",
        "Changed by a person. When one of the files is unreadable, or the project's is missing, every question about "
        "money is refused (`policy_missing`).",
    ),
    StateFile("journal", "journal.jsonl", "Written by the tool alone."),
    StateFile("approvals", "approvals.jsonl", "Appended to when a person agrees to a plan."),
    StateFile("plans", "plans/SHA256.json", "Written by `gpu plan --freeze` and never changed: its name is its hash."),
    StateFile("actions", "plans/SHA256.json of one machine", "As plans, for what is done to a machine that is there."),
    StateFile("launches", "launches/PLAN.json", "Written by `gpu job run --plan PLAN` and `gpu job cancel`."),
    StateFile("memory", "memory.json", "May be deleted."),
    StateFile(
        "script", "deployments/MACHINE.MODEL.SCRIPT.json", "Written by `gpu model setup` and `gpu model verify`."
    ),
    StateFile("jobs/job", "jobs/ID/job.json", "Written by `gpu job run` before the ledger's line, and kept."),
    StateFile("jobs/request", "jobs/ID/request.json", "Of a run at a deployment; written before the ledger's line."),
    StateFile("jobs/accepted", "jobs/ID/accepted.json", "Without it a job that the machine does not know never began."),
    StateFile("jobs/manifest", "jobs/ID/manifest.json", "Replaced by every pull, and when the job's end is seen."),
    StateFile(
        "jobs/collected",
        "jobs/ID/collected.json",
        "Replaced by every pull. Until it is `final`, `gpu destroy` refuses to give back the machine.",
    ),
    StateFile(
        "jobs/artifacts",
        "jobs/ID/artifacts.json",
        "Written by what pushes outputs to a durable home and reads them back.",
    ),
    StateFile("jobs/ended", "jobs/ID/ended.json", "Written just before the ledger's terminal line."),
    StateFile("jobs/abandoned", "jobs/ID/abandoned.json", "Written by `gpu destroy --abandon-outputs JOB`."),
    StateFile("jobs/events_cursor", "jobs/ID/events_cursor.json", "Without it events are read from the first again."),
    StateFile("jobs/events", "jobs/ID/events.jsonl", "Copied from the machine; what is no such line is left out."),
)
OF_USER = (
    StateFile(
        "runs",
        "runs/APPROVAL.json",
        "Written by what rents. A damaged one is named by `gpu reconcile`, and nothing is rented until it is mended.",
    ),
)
SETTINGS = (
    StateFile("gpu.yaml", "gpu.yaml", "Written once by `gpu init`, then yours."),
    StateFile("gpujob.yaml", "gpujob.yaml", "Yours; flags of `gpu job run` override it."),
    StateFile("model.yaml", "model.yaml", "Yours, in the directory of a model; `gpu model setup` reads it."),
    StateFile("hosts.yaml", "hosts.yaml", "Yours; beside gpu.yaml or in `~/.config/gpu/`."),
)


def state_files_reference(note: str) -> str:
    """The whole page. note: the line that says how it was made."""
    parts = [f"# State files\n\n{note}\n", _INTRO]
    parts += [_section(record, f"`.pi/gpu/{record.file}`") for record in RECORDS]
    parts += [_section(record, f"`~/.local/state/gpu/{record.file}`") for record in OF_USER]
    parts.append(_AROUND)
    parts.append(
        "## Settings\n\nRead strictly: an unknown key, or a key that stands twice, is an error with file and line.\n"
    )
    parts += [_section(setting, f"`{setting.file}`", level="###") for setting in SETTINGS]
    return "\n".join(parts)


def _section(record: StateFile, place: str, *, level: str = "##") -> str:
    schema = schemas.load(record.schema)
    rows = [f"| `{f.name}` | {f.type} | {f.meaning} | {f.required} |" for f in fields(schema)]
    about = textwrap.fill(f"{place}. {schema['description']} {record.rule}", 120, break_on_hyphens=False)
    text = (
        f"{level} {record.file}\n\n{about}\nSchema: [{record.schema}.json](../schemas/{record.schema}.json).\n\n"
        "| field | type | meaning | required |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    conditions = list(_conditions(schema))
    return text + ("\n" + "\n".join(conditions) + "\n" if conditions else "")


@dataclass(frozen=True)
class Field:
    """One row: name with the names of what it is in, and the other cells."""

    name: str
    type: str
    meaning: str
    required: str


def fields(schema: dict[str, Any], root: dict[str, Any] | None = None, inside: str = "") -> Iterator[Field]:
    """Every field of a schema, each followed by those inside it."""
    root = schema if root is None else root
    for name, own in schema.get("properties", {}).items():
        described, home = _resolved(own, root)
        required = "yes" if name in schema.get("required", ()) else ""
        meaning = _cell(described.get("description", ""))
        yield Field(inside + name, _cell(_type(described, home)), meaning, required)
        yield from _below(described, home, inside + name)


def _below(schema: dict[str, Any], root: dict[str, Any], name: str) -> Iterator[Field]:
    yield from fields(schema, root, f"{name}.")
    for keyword, mark in (("items", "[]."), ("additionalProperties", ".*.")):
        if isinstance(schema.get(keyword), dict):
            inner, home = _resolved(schema[keyword], root)
            yield from fields(inner, home, name + mark)


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema that a reference leads to, with what stands beside the reference; and the file it is in."""
    if "$ref" not in schema:
        return schema, root
    file, _, pointer = schema["$ref"].partition("#")
    home = schemas.load(file.removesuffix(".json")) if file else root
    found: Any = home
    for part in pointer.strip("/").split("/"):
        found = found[part]
    return {**found, **{key: value for key, value in schema.items() if key != "$ref"}}, home


def _type(schema: dict[str, Any], root: dict[str, Any]) -> str:
    if "enum" in schema:
        return " · ".join(f"`{value}`" for value in schema["enum"])
    names = schema.get("type", [])
    words = [_word(name, schema, root) for name in ([names] if isinstance(names, str) else names)]
    return " or ".join(words)


def _word(name: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
    match name:
        case "string" if schema.get("format") == "date-time":
            return "time"
        case "string" if schema.get("examples"):
            return "text like `" + str(schema["examples"][0]) + "`"
        case "string":
            return "text"
        case "integer" | "number":
            word = "whole number" if name == "integer" else "number"
            if "minimum" in schema:
                return f"{word} ≥ {schema['minimum']}"
            return f"{word} > {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else word
        case "boolean":
            return "true or false"
        case "array":
            entry, home = _resolved(schema.get("items", {}), root)
            return f"array of {_type(entry, home)}" if entry else "array"
        case _:
            return name


def _conditions(schema: dict[str, Any]) -> Iterator[str]:
    """What is required only with some value of another field."""
    for rule in schema.get("allOf", []):
        [(field, wanted)] = rule["if"]["properties"].items()
        needed = ", ".join(f"`{name}`" for name in rule["then"]["required"])
        yield f"- With {field} `{wanted['const']}` also required: {needed}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
