"""What ComfyUI's answers mean. Pure: each function takes what was parsed from JSON and trusts none of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_skills.errors import one_line

RUN_MARK = "gpu_run"  # our id of a run, in the extra_data of its prompt: queue and history carry it along
_MAX_TEXT_BYTES = 8 * 1024 * 1024
_MAX_LISTED = 50


@dataclass(frozen=True)
class ServerFile:
    """A file as the server names it, for `/view`. Nothing here is a path of ours."""

    node: str
    key: str
    filename: str
    subfolder: str
    type: str


@dataclass(frozen=True)
class ServerText:
    node: str
    text: str


@dataclass(frozen=True)
class ImportFailure:
    """A custom node that the server could not load. module: what it wanted and did not find, if that was it."""

    node: str
    reason: str
    module: str | None = None

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}"


@dataclass(frozen=True)
class Ended:
    """How a prompt ended, by its entry in the history. state: succeeded, failed or interrupted."""

    state: str
    outputs: Any
    messages: list[tuple[str, Mapping[str, Any]]]

    @property
    def error(self) -> Mapping[str, Any]:
        """The message `execution_error`, or nothing."""
        return next((data for name, data in self.messages if name == "execution_error"), {})


# a prompt that was refused --------------------------------------------------------------------------------------------


def problems_of(document: Any) -> list[dict[str, str]]:
    """All that a refusal holds against a workflow: {node, class_type, input, type, message, details}, where known.

    A problem of the whole workflow comes first, unless it only says that nodes have problems, which follow.
    """
    if not isinstance(document, Mapping):
        return []
    found = list(_node_problems(document.get("node_errors")))
    whole = document.get("error")
    if isinstance(whole, str):
        found.insert(0, {"message": one_line(whole, limit=300)})
    elif isinstance(whole, Mapping) and not (found and whole.get("type") == "prompt_outputs_failed_validation"):
        extra = whole.get("extra_info")
        found.insert(0, _problem(whole, extra if isinstance(extra, Mapping) else {}))
    return found


def problem_text(problem: Mapping[str, str]) -> str:
    """`node 4 (CheckpointLoaderSimple) ckpt_name: value_not_in_list: …`"""
    where = f"node {problem['node']}" if "node" in problem else "the workflow"
    if "class_type" in problem:
        where += f" ({problem['class_type']})"
    if "input" in problem:
        where += f" input {problem['input']}"
    said = ": ".join(problem[name] for name in ("message", "details") if problem.get(name))
    return f"{where}: {said or problem.get('type', 'refused')}"


def _node_problems(node_errors: Any) -> Iterator[dict[str, str]]:
    if not isinstance(node_errors, Mapping):
        return
    for node, content in list(node_errors.items())[:_MAX_LISTED]:
        if not isinstance(content, Mapping):
            continue
        about = {"node_id": node, "class_type": content.get("class_type")}
        errors = content.get("errors")
        for error in errors[:_MAX_LISTED] if isinstance(errors, list) else ():
            if isinstance(error, Mapping):
                extra = error.get("extra_info")
                yield _problem(error, {**(extra if isinstance(extra, Mapping) else {}), **about})


def _problem(error: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, str]:
    found = {
        "node": about.get("node_id"),
        "class_type": about.get("class_type"),
        "input": about.get("input_name"),
        "type": error.get("type"),
        "message": error.get("message"),
        "details": error.get("details"),
    }
    return {
        name: one_line(str(value), limit=300)
        for name, value in found.items()
        if isinstance(value, str | int) and value != ""
    }


# queue and history ----------------------------------------------------------------------------------------------------


def queued(document: Any) -> tuple[list[Any], list[Any]]:
    """What is running and what waits, as the queue lists it; ValueError for something else."""
    running, pending = (
        document.get(key) if isinstance(document, Mapping) else None for key in ("queue_running", "queue_pending")
    )
    if not isinstance(running, list) or not isinstance(pending, list):
        raise ValueError("no queue_running or queue_pending")
    return running, pending


def prompt_with_mark(items: list[Any], mark: str) -> str | None:
    """The prompt id of the item `[number, id, prompt, extra_data, …]` that carries our mark."""
    for item in items:
        if isinstance(item, list) and len(item) >= 4 and isinstance(item[1], str) and _carries(item[3], mark):
            return item[1]
    return None


def history_with_mark(document: Any, mark: str) -> str | None:
    """As `prompt_with_mark`, in the history; the newest wins."""
    entries = list(document.items()) if isinstance(document, Mapping) else []
    for prompt_id, entry in reversed(entries):
        if isinstance(entry, Mapping) and isinstance(entry.get("prompt"), list):
            if prompt_with_mark([[0, prompt_id, *entry["prompt"][2:]]], mark):
                return str(prompt_id)
    return None


def has_prompt(items: list[Any], prompt_id: str) -> bool:
    return any(isinstance(item, list) and len(item) > 1 and item[1] == prompt_id for item in items)


def _carries(extra: Any, mark: str) -> bool:
    return isinstance(extra, Mapping) and extra.get(RUN_MARK) == mark


def ended(entry: Any) -> Ended | None:
    """What a history entry says; None while it is not complete. An entry without a status is of an old server: done."""
    if not isinstance(entry, Mapping):
        return None
    status = entry.get("status")
    outputs = entry.get("outputs")
    if not isinstance(status, Mapping):
        return Ended("succeeded", outputs, []) if isinstance(outputs, Mapping) else None
    messages = [
        (item[0], item[1])
        for item in (status.get("messages") if isinstance(status.get("messages"), list) else ())
        if isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Mapping)
    ]
    names = {name for name, _ in messages}
    if "execution_interrupted" in names:
        return Ended("interrupted", outputs, messages)
    if status.get("status_str") == "error" or "execution_error" in names:
        return Ended("failed", outputs, messages)
    if status.get("completed") is True or status.get("status_str") == "success":
        return Ended("succeeded", outputs, messages)
    return None


def listed_outputs(outputs: Any) -> Iterator[ServerFile | ServerText]:
    """Everything that nodes left: files under any key (images, gifs, audio, video …) and texts.

    ValueError for a file without a usable name. Previews (`temp`) are left out when there is anything else.
    """
    found: list[ServerFile | ServerText] = []
    for node, content in outputs.items() if isinstance(outputs, Mapping) else ():
        for key, values in content.items() if isinstance(content, Mapping) else ():
            for value in values if isinstance(values, list) else ():
                if isinstance(value, Mapping) and "filename" in value:
                    found.append(_file(str(node), str(key), value))
                elif isinstance(value, str) and key in ("text", "string", "strings"):
                    if len(value) > _MAX_TEXT_BYTES:
                        raise ValueError(f"a text of {len(value)} characters")
                    found.append(ServerText(str(node), value))
    kept = [item for item in found if not (isinstance(item, ServerFile) and item.type == "temp")]
    yield from kept or found


def _file(node: str, key: str, value: Mapping[str, Any]) -> ServerFile:
    filename, subfolder, kind = value.get("filename"), value.get("subfolder") or "", value.get("type") or "output"
    if not all(isinstance(part, str) and len(part) <= 1024 for part in (filename, subfolder, kind)) or not filename:
        raise ValueError(f"node {one_line(node, limit=130)} lists a file without a usable name")
    try:
        (filename + subfolder + kind).encode()
    except UnicodeEncodeError:
        raise ValueError(f"node {one_line(node, limit=130)} lists a name with half a character in it") from None
    return ServerFile(node, key, filename, subfolder, kind)


# what a log tells -----------------------------------------------------------------------------------------------------

_CANNOT_IMPORT = re.compile(r"Cannot import (\S.{0,400}?) module for custom nodes: ?(.{0,400})")
_IMPORT_FAILED = re.compile(r"\(IMPORT FAILED\):? ?(\S.{0,400})")
_NO_MODULE = re.compile(r"No module named ['\"]?([\w.\-]+)['\"]?")
_CANNOT_NAME = re.compile(r"cannot import name ['\"](\w+)['\"] from ['\"]([\w.]+)['\"]")


def import_failures(log: str) -> list[ImportFailure]:
    """The custom nodes that a log says could not be loaded, each once, with the module that was missing."""
    found: dict[str, ImportFailure] = {}
    for line in log.splitlines():
        if match := _CANNOT_IMPORT.search(line):
            found[_folder(match[1])] = _failure(_folder(match[1]), match[2])
    for line in log.splitlines():
        if match := _IMPORT_FAILED.search(line):
            found.setdefault(_folder(match[1]), ImportFailure(_folder(match[1]), "its import failed"))
    return list(found.values())[:_MAX_LISTED]


def _failure(node: str, said: str) -> ImportFailure:
    module = None
    if match := _NO_MODULE.search(said):
        module = match[1]
    elif match := _CANNOT_NAME.search(said):
        module = f"{match[2]}.{match[1]}"
    return ImportFailure(node, one_line(said.strip() or "its import failed", limit=300), module)


def _folder(path: str) -> str:
    return one_line(re.split(r"[/\\]", path.strip().rstrip("/\\"))[-1] or "a node", limit=130)


def log_text(document: Any) -> str:
    """The text of `/internal/logs/raw`, or of the older `/internal/logs`; nothing for anything else."""
    if isinstance(document, str):
        return document
    entries = document.get("entries") if isinstance(document, Mapping) else None
    lines = (entry.get("m") for entry in entries if isinstance(entry, Mapping)) if isinstance(entries, list) else ()
    return "".join(line for line in lines if isinstance(line, str))
