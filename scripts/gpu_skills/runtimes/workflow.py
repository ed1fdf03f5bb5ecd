"""A ComfyUI workflow in API format: its inputs and outputs, found by walking its links, and filled in again. Pure.

    {"3": {"class_type": "KSampler", "inputs": {"seed": 5, "positive": ["6", 0], …}, "_meta": {"title": …}}, …}

A value that is a list of a node's id and a number is a link to that node's output. What no output reaches is ignored:
the server does not run it either.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills.errors import InputInvalid, WorkflowInvalid, one_line
from gpu_skills.runtimes.inputs import Input, check, inputs_of

MAX_NODES = 5000
MAX_SEED = 2**64 - 1

# What an output node leaves. Others are known by their names: SaveImageWebsocket, Save3D, PreviewAudio …
_OUTPUT_KINDS = (
    ("video", re.compile(r"(?i)^(save|preview).*(video|webm)|video_?combine")),
    ("audio", re.compile(r"(?i)^(save|preview).*audio")),
    ("image", re.compile(r"(?i)^(save|preview).*(image|png|webp|gif)|^image ?save")),
    ("text", re.compile(r"(?i)^(save|preview|show).*(text|any|string)")),
    ("file", re.compile(r"(?i)^save[ _A-Z0-9]")),
)

# Fields whose name says what they are, wherever they stand: type, least, most.
_NUMBERS: dict[str, tuple[str, float | None, float | None]] = {
    "seed": ("integer", 0, MAX_SEED),
    "noise_seed": ("integer", 0, MAX_SEED),
    "steps": ("integer", 1, 10_000),
    "cfg": ("number", 0, 100),
    "guidance": ("number", 0, 100),
    "denoise": ("number", 0, 1),
    "width": ("integer", 16, 16_384),
    "height": ("integer", 16, 16_384),
    "batch_size": ("integer", 1, 4096),
    "length": ("integer", 1, 16_384),
    "fps": ("number", 0.01, 1000),
    "frame_rate": ("number", 0.01, 1000),
    "megapixels": ("number", 0.01, 1000),
}
_NAMED = {"noise_seed": "seed", "frame_rate": "fps", "length": "frames"}
_TEXTS = ("text", "prompt", "string", "text_g", "text_l", "clip_l", "t5xxl", "value")
_FILES = {
    "LoadImage": ("image", "image"),
    "LoadImageMask": ("image", "image"),
    "LoadImageOutput": ("image", "image"),
    "LoadAudio": ("audio", "audio"),
    "LoadVideo": ("file", "video"),
    "VHS_LoadVideo": ("video", "video"),
    "VHS_LoadAudioUpload": ("audio", "audio"),
}
_MODEL_FIELD = re.compile(r"(ckpt|unet|vae|clip|lora|model|control_net|style_model|gligen|encoder|upscale)_?name\d*$")
_MODEL_FILE = re.compile(r"(?i)\.(safetensors|ckpt|pt|pth|bin|gguf|sft|onnx)$")
_PLAIN = ("sampler_name", "scheduler")


@dataclass(frozen=True)
class WorkflowOutput:
    """A node that leaves something. kind: image, video, audio, text or file."""

    node: str
    class_type: str
    kind: str

    def to_record(self) -> dict[str, Any]:
        return {"node": self.node, "class_type": self.class_type, "kind": self.kind}


@dataclass(frozen=True)
class WorkflowManifest:
    """What a workflow takes and leaves. sha256: of the workflow, so that it cannot change below its manifest."""

    inputs: Mapping[str, Input]
    outputs: Mapping[str, WorkflowOutput]
    sha256: str
    models: tuple[str, ...] = ()
    class_types: tuple[str, ...] = ()
    id: str | None = None
    version: str | int | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def to_record(self, identity: str, *, model: str | None = None, file: str | None = None) -> dict[str, Any]:
        """A record for workflows.json. A proposal has version 1; whoever changes the workflow counts on."""
        record: dict[str, Any] = {"id": identity, "version": self.version or 1, "model": model, "runtime": "comfyui"}
        record |= {"file": file, "sha256": self.sha256}
        record["inputs"] = {name: wanted.to_record() for name, wanted in self.inputs.items()}
        record["outputs"] = list(self.outputs)
        record["output_nodes"] = {name: output.to_record() for name, output in self.outputs.items()}
        record |= {"models": list(self.models), "class_types": list(self.class_types)}
        return {name: value for name, value in record.items() if value is not None}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> WorkflowManifest:
        """From a record that its schema has let through. Inputs written by hand name a default only: they have no node
        and `fill` says so."""
        nodes = record.get("output_nodes") or {}
        return cls(
            inputs=inputs_of(record.get("inputs") or {}),
            outputs={
                name: WorkflowOutput(**{k: o[k] for k in ("node", "class_type", "kind")}) for name, o in nodes.items()
            },
            sha256=record.get("sha256") or "",
            models=tuple(record.get("models") or ()),
            class_types=tuple(record.get("class_types") or ()),
            id=record.get("id"),
            version=record.get("version"),
        )


def digest_of(workflow: Mapping[str, Any]) -> str:
    """SHA-256 of what a workflow says, however its file is laid out. WorkflowInvalid for what JSON cannot say."""
    try:
        text = json.dumps(workflow, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
    except (ValueError, TypeError, RecursionError) as exc:
        reason = "nested too deep" if isinstance(exc, RecursionError) else "a value that JSON does not have"
        raise WorkflowInvalid(what="the workflow", problem=reason) from exc
    return hashlib.sha256(text.encode()).hexdigest()


def propose(workflow: Any) -> WorkflowManifest:
    """The manifest of a workflow. notes: what a person should look at. WorkflowInvalid for what is no workflow."""
    nodes = _checked(workflow)
    digest = digest_of(workflow)
    outputs = _outputs(nodes)
    if not outputs:
        raise WorkflowInvalid(what="the workflow", problem="no node in it saves or shows anything")
    reached = _reached(nodes, [output.node for output in outputs.values()])
    found: dict[tuple[str, str], tuple[str, Input]] = {}
    _texts(nodes, reached, found)
    for node in reached:
        _plain_inputs(nodes, node, found)
    left_out = [node for node in nodes if node not in reached]
    notes = [f"node {n} ({nodes[n]['class_type']}) leads to no output and is not run" for n in left_out[:20]]
    known = any(pattern.search(o.class_type) for o in outputs.values() for _, pattern in _OUTPUT_KINDS)
    notes += [] if known else ["no node that is known to save anything: its last nodes are taken for the outputs"]
    if not any(wanted.type == "text" for _, wanted in found.values()):
        notes.append("no text prompt was found")
    return WorkflowManifest(
        inputs=_named(nodes, found),
        outputs=outputs,
        sha256=digest,
        models=tuple(dict.fromkeys(_model_files(nodes, reached))),
        class_types=tuple(sorted({nodes[node]["class_type"] for node in reached})),
        notes=tuple(notes),
    )


def fill(workflow: Mapping[str, Any], manifest: WorkflowManifest, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow with these inputs. Everything is checked before: InputInvalid, WorkflowInvalid; the given one stays.

    A file has to be on the server by now: a `Path` is refused here.
    """
    name = manifest.id or "the workflow"
    nodes = _checked(workflow)
    digest = digest_of(workflow)
    if manifest.sha256 and manifest.sha256 != digest:
        raise WorkflowInvalid(
            what=name,
            problem="it is not the one its manifest was made for",
            next_step="gpu registry show workflows, then propose its manifest again as a new version",
        )
    values = check(manifest.inputs, inputs, what=name)
    filled: dict[str, Any] = copy.deepcopy(nodes)
    for key, value in values.items():
        wanted = manifest.inputs[key]
        if isinstance(value, Path):
            raise InputInvalid(what=name, problem=f"{key}: a file is sent to the server first", problems=[key])
        if wanted.node is None or wanted.field is None:
            if key in inputs:
                raise WorkflowInvalid(what=name, problem=f"its manifest does not say which node takes {key}")
            continue
        if wanted.node not in filled or wanted.field not in filled[wanted.node]["inputs"]:
            raise WorkflowInvalid(what=name, problem=f"it has no node {wanted.node} with a field {wanted.field}")
        filled[wanted.node]["inputs"][wanted.field] = value
    return filled


# reading --------------------------------------------------------------------------------------------------------------


def _checked(workflow: Any) -> dict[str, dict[str, Any]]:
    def wrong(problem: str) -> WorkflowInvalid:
        return WorkflowInvalid(what="the workflow", problem=problem)

    if isinstance(workflow, Mapping) and isinstance(workflow.get("nodes"), list):
        raise wrong("this is the editor's own format, not the API format")
    if isinstance(workflow, Mapping) and isinstance(workflow.get("prompt"), Mapping):
        raise wrong("this is a whole request: take what stands below `prompt`")
    if not isinstance(workflow, Mapping) or not workflow:
        raise wrong("an object of nodes was expected")
    if len(workflow) > MAX_NODES:
        raise wrong(f"{len(workflow)} nodes, at most {MAX_NODES}")
    for node, content in workflow.items():
        shown = one_line(str(node), limit=130)
        if not isinstance(content, Mapping) or not isinstance(content.get("class_type"), str):
            raise wrong(f"node {shown} has no class_type")
        if not isinstance(content.get("inputs"), Mapping):
            raise wrong(f"node {shown} ({one_line(content['class_type'], limit=130)}) has no inputs")
        for name, value in content["inputs"].items():
            if _is_link(value) and str(value[0]) not in workflow:
                raise wrong(f"node {shown}: {name} comes from node {value[0]}, which is not there")
    return {str(node): dict(content) for node, content in workflow.items()}


def _is_link(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int)
        and not isinstance(value[1], bool)
    )


def _order(node: str) -> tuple[int, str]:
    return (int(node), "") if node.isdecimal() and len(node) < 12 else (10**12, node)


def _sources(nodes: Mapping[str, Any], node: str) -> Iterator[str]:
    yield from (str(value[0]) for value in nodes[node]["inputs"].values() if _is_link(value))


def _reached(nodes: Mapping[str, Any], ends: list[str]) -> list[str]:
    """Every node that leads to these, in order of their ids. Links that go round in a circle end the walk there."""
    seen = set(ends)
    waiting = deque(ends)
    while waiting:
        for source in _sources(nodes, waiting.popleft()):
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return sorted(seen, key=_order)


def _outputs(nodes: Mapping[str, Any]) -> dict[str, WorkflowOutput]:
    found: dict[str, WorkflowOutput] = {}
    feeding = {source for node in nodes for source in _sources(nodes, node)}
    for node in sorted(nodes, key=_order):
        class_type = nodes[node]["class_type"]
        kind = next((kind for kind, pattern in _OUTPUT_KINDS if pattern.search(class_type)), None)
        if kind is None or (node in feeding and not class_type.startswith(("Save", "VHS_"))):
            continue
        found[_free(kind, found)] = WorkflowOutput(node, class_type, kind)
    if not found:
        # A custom node may save under any name: what nothing else takes in is the end of the workflow.
        for node in sorted(nodes, key=_order):
            if node not in feeding and any(_sources(nodes, node)):
                found[_free("file", found)] = WorkflowOutput(node, nodes[node]["class_type"], "file")
    return found


# finding inputs -------------------------------------------------------------------------------------------------------


Found = dict[tuple[str, str], tuple[str, Input]]


def _texts(nodes: Mapping[str, Any], reached: list[str], found: Found) -> None:
    """Prompts: the texts that lead into what a sampler calls positive and negative, then every other prompt."""
    for role, name in (("positive", "prompt"), ("negative", "negative_prompt")):
        for node in reached:
            link = nodes[node]["inputs"].get(role)
            if _is_link(link):
                _texts_above(nodes, str(link[0]), name, found)
    for node in reached:
        if re.search(r"(?i)text|prompt|string", nodes[node]["class_type"]):
            for field_name in _TEXTS:
                _add_text(nodes, node, field_name, "prompt", found)


def _texts_above(nodes: Mapping[str, Any], start: str, name: str, found: Found) -> None:
    """A node with both sides of its own (it prepares conditioning) ends the walk: they are walked from there."""
    seen, waiting = {start}, deque([start])
    while waiting:
        node = waiting.popleft()
        inputs = nodes[node]["inputs"]
        if "Sampler" in nodes[node]["class_type"]:
            continue
        texts = [field_name for field_name in _TEXTS if isinstance(inputs.get(field_name), str)]
        for field_name in texts:
            _add_text(nodes, node, field_name, name, found)
        if _is_link(inputs.get("positive")) and _is_link(inputs.get("negative")):
            continue
        links = [value for name_there, value in inputs.items() if _is_link(value) and _may_carry_text(name_there)]
        for link in links:
            source = str(link[0])
            if source not in seen:
                seen.add(source)
                waiting.append(source)


def _may_carry_text(field_name: str) -> bool:
    return field_name not in (
        "clip",
        "model",
        "vae",
        "image",
        "pixels",
        "latent",
        "latent_image",
        "samples",
        "control_net",
    )


def _add_text(nodes: Mapping[str, Any], node: str, field_name: str, name: str, found: Found) -> None:
    value = nodes[node]["inputs"].get(field_name)
    if isinstance(value, str) and (node, field_name) not in found:
        found[node, field_name] = (name, Input("text", node, field_name, default=value))


def _plain_inputs(nodes: Mapping[str, Any], node: str, found: Found) -> None:
    class_type, inputs = nodes[node]["class_type"], nodes[node]["inputs"]
    if class_type in _FILES:
        field_name, kind = _FILES[class_type]
        if isinstance(inputs.get(field_name), str):
            # The file lies on the server where the workflow was made: it has no default elsewhere.
            found[node, field_name] = (kind, Input(kind, node, field_name, required=True))
    for field_name, value in inputs.items():
        at_node, at_field, value = _literal(nodes, node, field_name, value)
        if (at_node, at_field) in found:
            continue
        if field_name in _NUMBERS and _is_number(value):
            kind, least, most = _NUMBERS[field_name]
            name = _NAMED.get(field_name, field_name)
            value = float(value) if kind == "number" and not isinstance(value, int) else value
            found[at_node, at_field] = (name, Input(kind, at_node, at_field, default=value, min=least, max=most))
        elif field_name in _PLAIN and isinstance(value, str):
            found[at_node, at_field] = (field_name, Input("text", at_node, at_field, default=value))
        elif isinstance(value, str) and _is_model(field_name, value):
            found[at_node, at_field] = (_model_name(field_name), Input("model", at_node, at_field, default=value))


def _literal(nodes: Mapping[str, Any], node: str, field_name: str, value: Any) -> tuple[str, str, Any]:
    """Where a value really stands: a primitive node that only holds it may feed several others."""
    if _is_link(value):
        source = str(value[0])
        inputs = nodes[source]["inputs"]
        literals = [(k, v) for k, v in inputs.items() if k in ("value", "seed", "int", "float", "string", "number")]
        if len(literals) == 1 and not any(_is_link(v) for v in inputs.values()):
            return source, literals[0][0], literals[0][1]
    return node, field_name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _is_model(field_name: str, value: str) -> bool:
    return bool(_MODEL_FILE.search(value)) or (bool(_MODEL_FIELD.match(field_name)) and "." in value)


def _model_name(field_name: str) -> str:
    base = re.sub(r"_?name(\d*)$", r"\1", field_name)
    return {"ckpt": "checkpoint", "unet": "diffusion_model"}.get(base, base)


def _model_files(nodes: Mapping[str, Any], reached: list[str]) -> Iterator[str]:
    for node in reached:
        for field_name, value in nodes[node]["inputs"].items():
            if isinstance(value, str) and _is_model(field_name, value):
                yield value


def _named(nodes: Mapping[str, Any], found: Found) -> dict[str, Input]:
    """One name for each: the second of a kind is called by its node's title if that is the user's own, or counted."""
    named: dict[str, Input] = {}
    for (node, _), (name, wanted) in sorted(
        found.items(), key=lambda item: (item[1][0], _order(item[0][0]), item[0][1])
    ):
        if name in named:
            meta = nodes[node].get("_meta")
            title = meta.get("title") if isinstance(meta, Mapping) else None
            slug = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")[:40] if isinstance(title, str) else ""
            name = f"{name}_{slug}" if slug and slug != nodes[node]["class_type"].lower() else name
        named[_free(name, named)] = wanted
    return named


def _free(name: str, taken: Mapping[str, Any]) -> str:
    return (
        name
        if name not in taken
        else next(f"{name}_{n}" for n in range(2, MAX_NODES + 3) if f"{name}_{n}" not in taken)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
