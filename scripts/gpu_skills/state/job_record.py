"""One line of the ledger: its words, its order of fields, and whether it is what the schema allows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection
from typing import Any

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import UsageError
from gpu_skills.units import MAX_USD

# What a user sees ↔ what the ledger says. The one place where the two meet.
LEDGER_WORD = {
    "running": "running",
    "succeeded": "completed",
    "failed": "failed",
    "timeout": "timeout",
    "cancelled": "cancelled",
    "lost": "lost",
}
STATE = {word: state for state, word in LEDGER_WORD.items()}
TERMINAL_WORDS = tuple(word for word in STATE if word != "running")

FIELDS = (
    "id",
    "deployment_id",
    "provider",
    "model",
    "workflow",
    "workflow_version",
    "inputs",
    "status",
    "started_at",
    "completed_at",
    "duration_s",
    "cost_usd",
    "gpu",
    "artifacts",
    "error",
    "ts",
)
JOB_ID = re.compile(r"J-\d{6,18}")
MAX_JOB_NUMBER = 10**18 - 2  # the one above it is an id too, and would be the last there can be
MAX_INPUT_BYTES = 1024

_TEXT_OR_NULL = ("deployment_id", "provider", "model", "workflow", "gpu", "error", "machine_id", "reason", "plan")
_TIME_OR_NULL = ("started_at", "completed_at")
_USD_OR_NULL = ("cost_usd", "wasted_usd")
_AMOUNT_OR_NULL = ("duration_s", *_USD_OR_NULL)
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)")


def ledger_word(status: str) -> str:
    """`succeeded` or `completed` → `completed`; both vocabularies are taken on input."""
    word = LEDGER_WORD.get(status, status)
    if word not in STATE:
        allowed = ", ".join(dict.fromkeys([*LEDGER_WORD, *STATE]))
        raise UsageError(f"no job status {status!r}; allowed are {allowed}", next_step="gpu job finish --help")
    return word


def is_terminal(record: dict[str, Any]) -> bool:
    return record.get("status") in TERMINAL_WORDS


def interval_s(record: dict[str, Any]) -> tuple[float, float | None] | None:
    """When a line says it was, in seconds since 1970: a job, or machine time of charges.jsonl; None: still running.

    None for the whole where the line does not say. An end before the start counts as the start.
    """
    try:
        started = parse_timestamp(record["started_at"]).timestamp()
        if record.get("status") == "running":
            return started, None
        return started, max(started, parse_timestamp(record.get("completed_at") or record["ts"]).timestamp())
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def ordered(record: dict[str, Any]) -> dict[str, Any]:
    """The published fields first and in their order, then whatever else the line carries."""
    return {key: record[key] for key in FIELDS if key in record} | record


def shortened_inputs(inputs: Any, *, policy: str = "full", private: Collection[str] = ()) -> Any:
    """Inputs as the ledger keeps them: a large one by hash, a private one by nothing but its hash.

    policy: `full`, `hash` (every input by hash) or `none` (no inputs at all), as `ledger_inputs` in policy.json.
    """
    if policy == "none" or inputs is None:
        return None
    if not isinstance(inputs, dict):
        inputs = {"inputs": inputs}
    kept: dict[str, Any] = {}
    for name, value in inputs.items():
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
        data = text.encode("utf-8", "surrogatepass")
        if name in private:
            kept[name] = {"sha256": hashlib.sha256(data).hexdigest()}
        elif policy == "hash" or (len(data) > MAX_INPUT_BYTES and not _is_digest(value)):
            kept[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "name": name}
        else:
            kept[name] = value
    return kept


def is_plainly_valid(record: Any) -> bool:
    """True when the schema `jobs` holds beyond doubt, without loading a validator.

    False only says that the schema has to be asked. A test keeps the two in step.
    """
    if not isinstance(record, dict) or record.get("ts") is None:
        return False
    identity, status = record.get("id"), record.get("status")
    if type(identity) is not str or not JOB_ID.fullmatch(identity) or type(status) is not str or status not in STATE:
        return False
    checks = _PLAIN
    # A generator would cost as much as the checks.
    for key, value in record.items():  # noqa: SIM110
        if value is not None and key in checks and not checks[key](value):
            return False
    return True


def readable(record: dict[str, Any]) -> dict[str, Any]:
    """A line for those who only read it: a field that is not what the schema allows is null; `verify` tells it."""
    if is_plainly_valid(record):
        return record
    return {key: value if value is None or _fits(key, value) else None for key, value in record.items()}


def _is_time(value: Any) -> bool:
    """Whether the schema takes it as a time: any way of RFC 3339 to write one."""
    try:
        return type(value) is str and bool(parse_timestamp(value))
    except (ValueError, OverflowError):
        return False


def _fits(key: str, value: Any) -> bool:
    if key in (*_TIME_OR_NULL, "ts"):
        return _is_time(value)
    return key not in _PLAIN or _PLAIN[key](value)


def _is_plain_time(value: Any) -> bool:
    if type(value) is not str or not _TIMESTAMP.fullmatch(value):
        return False
    try:
        parse_timestamp(value)
    except (ValueError, OverflowError):
        return False
    return True


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def _is_artifact(value: Any) -> bool:
    return type(value) is dict and type(value.get("name")) is str and type(value.get("uri", 0)) in (str, type(None))


def _is_digest(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"sha256", "bytes", "name"}


_PLAIN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_TEXT_OR_NULL, lambda value: type(value) is str),
    **dict.fromkeys(_AMOUNT_OR_NULL, _is_amount),
    **dict.fromkeys(_USD_OR_NULL, lambda value: _is_amount(value) and value <= MAX_USD),
    **dict.fromkeys((*_TIME_OR_NULL, "ts"), _is_plain_time),
    "inputs": lambda value: type(value) is dict,
    "workflow_version": lambda value: type(value) in (str, int),
    "exit_code": lambda value: type(value) is int,
    "artifacts": lambda value: type(value) is list and all(map(_is_artifact, value)),
}
