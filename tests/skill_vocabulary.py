"""What exists: the words a skill may name, taken from the schemas, the error classes and the code itself."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quoted_commands import code_spans

ROOT = Path(__file__).resolve().parents[1]
WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
VARIABLE = re.compile(r"\$?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?:=.*)?")
# Programs and words of the world outside.
OUTSIDE = {
    "bash", "python", "python3", "rsync", "ssh", "pip", "torch", "numpy", "nvidia-smi", "cd", "export", "except", "jq",
    "accelerate", "torchrun",
    # ComfyUI: keys of a history entry and of an answer of /prompt; the folder of what others wrote for it
    "execution_error", "node_errors", "custom_nodes", "libcudart", "links", "dmesg", "missing_node_type",
}  # fmt: skip
# What servers read, and what a process of one's own finds its request by.
SERVED = {"VLLM_API_KEY", "LLAMA_API_KEY", "REQUEST_FILE"}
# `(exit 3, `not_collected`)`: how a skill says what a refusal looks like.
_EXIT_AND_CODE = re.compile(r"\(exit (\d+), `([\w-]+)`\)")


@functools.cache
def words() -> frozenset[str]:
    """Keys and fixed values of all schemas, error codes, and the identifiers that stand as text in the code."""
    from gpu_skills.cli.reference import import_everything
    from gpu_skills.errors import all_errors

    import_everything()
    found = {error.code for error in all_errors()} | OUTSIDE
    for path in (ROOT / "schemas").rglob("*.json"):
        found |= set(schema_words(json.loads(path.read_text(encoding="utf-8"))))
    for path in (ROOT / "scripts" / "gpu_skills").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
                found.add(node.value)
    return frozenset(found)


@functools.cache
def variables() -> frozenset[str]:
    """The variables a job finds, and those that `gpu` itself reads."""
    from gpu_skills.config import DEFAULTS
    from gpu_skills.remote.environment import job_environment

    served = {"openai_base_url": "u", "openai_api_key": "k"}
    job = job_environment("/r", "p", "J-000001", model_id="m", hf_token="t", copy=(0, 2), resume="c", **served)
    settings = {"GPU_" + key.upper().replace(".", "_") for key in DEFAULTS}
    return frozenset(job) | settings | {"GPU_MODE", "GPU_PYTHON"} | SERVED


def schema_words(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            yield from properties
        for key in ("enum", "const"):
            values = schema.get(key, [])
            yield from (v for v in (values if isinstance(values, list) else [values]) if isinstance(v, str))
        for value in schema.values():
            yield from schema_words(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from schema_words(value)


def unknown_words(text: str, page: str) -> list[str]:
    """Inline code of one lower-case word or dotted words (a field, a state, an error code) that exists nowhere."""
    return [
        f"{page}:{line}: {span}"
        for line, span in code_spans(text)
        if re.fullmatch(rf"{WORD.pattern}(\.{WORD.pattern})*", span)
        and not re.search(r"\.(yaml|py|json|md|txt|sh|svg|npz|jsonl)$", span)
        and any(part not in words() for part in span.split("."))
    ]


def unknown_variables(text: str, page: str) -> list[str]:
    return [
        f"{page}:{line}: {match[1]}"
        for line, span in code_spans(text)
        if (match := VARIABLE.fullmatch(span)) and match[1] not in variables()
    ]


def misfit(value: Any, schema: dict[str, Any], at: str = "") -> str | None:
    """The first key or fixed value of a sample that the schema does not know. A sample may leave things out."""
    if "enum" in schema and not isinstance(value, dict | list) and value not in schema["enum"]:
        return f"{at}: {value!r} is none of {schema['enum']}"
    if isinstance(value, dict) and ("properties" in schema or "object" not in schema.get("type", ())):
        for key, inner in value.items():
            known = schema.get("properties", {})
            if key not in known:
                return f"{at}/{key} is not in the schema"
            if found := misfit(inner, known[key], f"{at}/{key}"):
                return found
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for inner in value:
            if found := misfit(inner, schema["items"], f"{at}/-"):
                return found
    return None


def sample_problem(text: str) -> str | None:
    """A JSON sample has to be (a part of) what some command prints."""
    try:
        sample = json.loads(text)
    except ValueError as exc:
        return f"not JSON: {exc}"
    found = []
    for path in sorted((ROOT / "schemas" / "cli").glob("*.json")):
        problem = misfit(sample, json.loads(path.read_text(encoding="utf-8")))
        if problem is None:
            return None
        found.append((len(set(sample) & set(schema_words(json.loads(path.read_text())))), f"{path.name}: {problem}"))
    return max(found)[1]


def wrong_exits(text: str, page: str) -> list[str]:
    """`(exit N, `code`)` where no error has that code, or where it ends with another exit code."""
    from gpu_skills.cli.reference import import_everything
    from gpu_skills.errors import all_errors

    import_everything()
    exits = {error.code: error.exit_code for error in all_errors() if "code" in vars(error)}
    plain = " ".join(text.split())
    return [
        f"{page}: {code} ends with {exits.get(code, 'nothing: there is no such code')}, not {stated}"
        for stated, code in _EXIT_AND_CODE.findall(plain)
        if exits.get(code) != int(stated)
    ]


def record_problems(text: str, file: str) -> list[str]:
    """Why a block that shows a file of `.pi/gpu` is not what that file may hold. Fields nobody knows are wrong, too."""
    from gpu_skills import schemas
    from gpu_skills.cli.state_reference import RECORDS

    schema = {record.file: record.schema for record in RECORDS}.get(file)
    if schema is None:
        return [f"there is no {file}"]
    try:
        parsed = [json.loads(line) for line in text.split("\n")] if file.endswith(".jsonl") else json.loads(text)
    except ValueError as exc:
        return [f"{file}: not JSON: {exc}"]
    found = []
    for record in parsed if isinstance(parsed, list) else [parsed]:
        found += [f"{file}: {problem.message}" for problem in schemas.problems(record, schema)]
        if unknown := misfit(record, schemas.load(schema), ""):
            found.append(f"{file}: {unknown}")
    return found


def first_column(text: str, heading: str) -> list[str]:
    """The words in code in the first column of the table whose first heading this is."""
    rows = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0].split("\n")[2:]
    return [word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])]
