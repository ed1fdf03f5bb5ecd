"""A model's manifest, as a runtime needs it: a record of models.json, read once and with one word for each thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_skills.errors import ConfigError
from gpu_skills.runtimes.inputs import Input, inputs_of

RUNTIMES = ("vllm", "openai", "comfyui", "http", "native", "none")


@dataclass(frozen=True)
class Serve:
    """How the service is started, where it is not as the engine does by itself.

    command may hold {port}, {root}, {model}, {gpu_count} and {gpu_memory_fraction}; as a list each part is one
    argument, as a text the machine's shell reads it.
    """

    command: tuple[str, ...] | str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    health_path: str | None = None
    ready_within_s: float | None = None
    key_variable: str | None = None


@dataclass(frozen=True)
class Described:
    """A request in data, for `http`: `{{name}}` in path, headers and body stands for the input of that name.

    result: `body`, or `base64` / `text` at a JSON pointer. auth_header: where the key goes, after auth_prefix.
    """

    path: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    result: str = "body"
    pointer: str = ""
    file_name: str = "result"
    auth_header: str = "Authorization"
    auth_prefix: str = "Bearer "


@dataclass(frozen=True)
class Trial:
    """The test generation. workflow: a ComfyUI workflow in API format, already read, for `comfyui`."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    workflow: Mapping[str, Any] | None = None
    operation: str | None = None
    timeout_s: float = 900.0


@dataclass(frozen=True)
class ModelManifest:
    """source: where the weights come from, as `org/name` or a path. served_name: what the service calls the model."""

    id: str
    runtime: str
    version: str | int | None = None
    source: str | None = None
    revision: str | None = None
    served_name: str | None = None
    serve: Serve = field(default_factory=Serve)
    request: Described | None = None
    inputs: Mapping[str, Input] = field(default_factory=dict)
    private_inputs: tuple[str, ...] = ()
    test: Trial | None = None

    @property
    def name_at_service(self) -> str:
        return self.served_name or self.id

    @classmethod
    def of(cls, record: Mapping[str, Any], *, test_workflow: Mapping[str, Any] | None = None) -> ModelManifest:
        """From a record that its schema has already let through; ConfigError for what a schema cannot say.

        test_workflow: the content of the file that `test.workflow` names, read by the caller.
        """
        runtime = record.get("runtime") or "none"
        if runtime not in RUNTIMES:
            raise ConfigError(
                file=f"model {record['id']}", problem=f"runtime {runtime!r} is none of {', '.join(RUNTIMES)}"
            )
        serve, request, test = record.get("serve") or {}, record.get("request"), record.get("test")
        command = serve.get("command")
        return cls(
            id=record["id"],
            runtime=runtime,
            version=record.get("version"),
            source=record.get("source"),
            revision=record.get("revision"),
            served_name=record.get("served_name"),
            serve=Serve(
                command=tuple(command) if isinstance(command, list) else command,
                args=tuple(serve.get("args") or ()),
                env=dict(serve.get("env") or {}),
                cwd=serve.get("cwd"),
                health_path=serve.get("health_path"),
                ready_within_s=serve.get("ready_within_s"),
                key_variable=serve.get("key_variable"),
            ),
            request=None if request is None else Described(**_known(request, Described)),
            inputs=inputs_of(record.get("inputs") or {}),
            private_inputs=tuple(record.get("private_inputs") or ()),
            test=None if test is None else Trial(**{**_known(test, Trial), "workflow": test_workflow}),
        )


def _known(record: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """The fields that a class has: others in a record are somebody's own notes."""
    return {name: record[name] for name in cls.__dataclass_fields__ if record.get(name) is not None}  # type: ignore[attr-defined]
