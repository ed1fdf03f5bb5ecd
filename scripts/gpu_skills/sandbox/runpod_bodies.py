"""The bodies that REST v2 accepts, as data, and what is wrong with a given one: unknown fields are refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Text:
    min_length: int = 0
    pattern: str | None = None
    choices: tuple[str, ...] = ()
    is_nullable: bool = False

    def violations(self, value: Any, path: str) -> Iterator[str]:
        if value is None and self.is_nullable:
            return
        if not isinstance(value, str):
            wanted = "null or string" if self.is_nullable else "string"
            yield f"{path}: got {_kind(value)}, want {wanted}"
        elif self.choices and value not in self.choices:
            yield f"{path}: value must be one of {', '.join(repr(choice) for choice in self.choices)}"
        elif len(value) < self.min_length:
            yield f"{path}: minLength: got {len(value)}, want {self.min_length}"
        elif self.pattern is not None and re.fullmatch(self.pattern, value) is None:
            yield f"{path}: {value[:60]!r} does not match pattern {self.pattern!r}"


@dataclass(frozen=True)
class Whole:
    minimum: int | None = None
    maximum: int | None = None

    def violations(self, value: Any, path: str) -> Iterator[str]:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{path}: got {_kind(value)}, want integer"
        elif self.minimum is not None and value < self.minimum:
            yield f"{path}: minimum: got {_digits(value)}, want {self.minimum}"
        elif self.maximum is not None and value > self.maximum:
            yield f"{path}: maximum: got {_digits(value)}, want {self.maximum}"


@dataclass(frozen=True)
class Flag:
    def violations(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, bool):
            yield f"{path}: got {_kind(value)}, want boolean"


@dataclass(frozen=True)
class ListOf:
    item: Any
    max_items: int | None = None

    def violations(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{path}: got {_kind(value)}, want array"
            return
        if self.max_items is not None and len(value) > self.max_items:
            yield f"{path}: maxItems: got {len(value)}, want {self.max_items}"
        for number, item in enumerate(value):
            yield from self.item.violations(item, f"{path}[{number}]")


@dataclass(frozen=True)
class MapOf:
    item: Any

    def violations(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{path}: got {_kind(value)}, want object"
            return
        for name, item in value.items():
            yield from self.item.violations(item, f"{path}.{name[:60]}")


@dataclass(frozen=True)
class Object:
    fields: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    min_fields: int = 0

    def violations(self, value: Any, path: str = "$") -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{path}: got {_kind(value)}, want object"
            return
        if unknown := [name for name in value if name not in self.fields]:
            yield f"{path}: additional properties {', '.join(repr(name[:60]) for name in unknown)} not allowed"
        if missing := [name for name in self.required if name not in value]:
            yield f"{path}: missing properties {', '.join(repr(name) for name in missing)}"
        if len(value) < self.min_fields:
            yield f"{path}: minProperties: got {len(value)}, want {self.min_fields}"
        for name, shape in self.fields.items():
            if name in value:
                yield from shape.violations(value[name], f"{path}.{name}")


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _digits(value: int) -> str:
    return str(value) if value.bit_length() < 200 else "a number of many digits"


_CUDA = Text(pattern=r"\d+\.\d+")
_CONTAINER = {
    "args": Text(),
    "disk": Whole(1),
    "env": MapOf(Text()),
    "image": Text(),
    "ports": ListOf(Text()),
    "registry": Text(is_nullable=True),
}
_PERSISTENT = Object({"size": Whole(10), "path": Text()}, required=("size", "path"))
_NETWORK = Object({"volumeId": Text(), "path": Text()}, required=("volumeId", "path"))
_MOUNTS = Object({"persistent": _PERSISTENT, "network": ListOf(_NETWORK, max_items=1)})

CREATE_POD = Object(
    {
        **_CONTAINER,
        "name": Text(1),
        "cloud": Text(choices=("SECURE", "COMMUNITY")),
        "cpu": Object({"id": Text(1), "vcpuCount": Whole(2)}, required=("id", "vcpuCount")),
        "gpu": Object(
            {"id": Text(), "count": Whole(1), "allowedCudaVersions": ListOf(_CUDA), "minCudaVersion": _CUDA},
            required=("id",),
        ),
        "dataCenterIds": ListOf(Text()),
        "globalNetworking": Flag(),
        "mounts": _MOUNTS,
        "startJupyter": Flag(),
        "startSsh": Flag(),
        "templateId": Text(1),
    },
    required=("name",),
)
UPDATE_POD = Object(
    {
        **_CONTAINER,
        "name": Text(1),
        "mounts": _MOUNTS,
        "locked": Flag(),
        "globalNetworking": Flag(),
        "templateId": Text(),
    }
)
POD_ACTION = Object({"action": Text(choices=("start", "stop", "restart", "terminate"))}, required=("action",))
SSH_KEYS = Object(
    {"keys": ListOf(Text(pattern=r"(ssh|ecdsa|sk)-[^\s]+ [^\s]+([ \t][^\n\r]*)?"))},
    required=("keys",),
)
_VOLUME_SIZE = Whole(10, 4096)
CREATE_VOLUME = Object(
    {
        "name": Text(1),
        "size": _VOLUME_SIZE,
        "dataCenter": Text(1),
        "type": Text(choices=("STANDARD", "HIGH_PERFORMANCE")),
    },
    required=("name", "size", "dataCenter"),
)
UPDATE_VOLUME = Object({"name": Text(1), "size": _VOLUME_SIZE}, min_fields=1)
CREATE_REGISTRY = Object(
    {"name": Text(1), "username": Text(1), "password": Text(1)}, required=("name", "username", "password")
)
_TEMPLATE = {
    **_CONTAINER,
    "name": Text(1),
    "allowedCudaVersions": ListOf(_CUDA),
    "category": Text(choices=("NVIDIA", "AMD", "CPU")),
    "mounts": Object({"persistent": _PERSISTENT}),
    "public": Flag(),
    "serverless": Flag(),
    "startJupyter": Flag(),
    "startSsh": Flag(),
}
CREATE_TEMPLATE = Object(_TEMPLATE, required=("name", "image"))
UPDATE_TEMPLATE = Object(_TEMPLATE)
