"""What `gpu.yaml`, the user's own settings, the environment and flags say together, and which of them said it.

Precedence: flag > environment > project (`gpu.yaml`) > user (`~/.config/gpu/config.yaml`) > default. For ceilings the
strictest of all that were written wins. Every key `a.b` is also the environment variable `GPU_A_B`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills import schemas, strict_yaml, userdirs
from gpu_skills.errors import ConfigError, UsageError
from gpu_skills.strict_yaml import Document, fault
from gpu_skills.units import parse_duration

DEFAULT_IMAGE = "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"

DEFAULTS: dict[str, Any] = {
    "provider": "local",
    "host": None,
    "compute.image": DEFAULT_IMAGE,
    "compute.image_gb": None,
    "compute.gpu": None,
    "compute.candidates": [],
    "compute.gpu_count": 1,
    "compute.min_vram_gb": None,
    "compute.disk_gb": 50,
    "compute.max_rate_usd_hr": None,
    "compute.capacity.mode": "immediate",
    "compute.capacity.attempts": 20,
    "compute.capacity.interval": "60s",
    "runtime.engine": "none",
    "lifecycle.idle_timeout": "15m",
    "lifecycle.max_lifetime": "6h",
    "lifecycle.hold_for": "30m",
    "lifecycle.storage_grace": "24h",
    "budget.session_usd": 10,
}
CEILINGS = frozenset({"compute.max_rate_usd_hr", "lifecycle.max_lifetime", "budget.session_usd"})
_WORDS = frozenset({"provider", "host", "compute.image", "compute.gpu", "compute.capacity.mode", "runtime.engine"})
_SHORTEST_S = 1.0
LONGEST_WAIT_S = 24 * 3600.0  # a yes to a plan that waits holds so long at most: prices and minds change


@dataclass(frozen=True)
class Capacity:
    mode: str
    attempts: int
    interval_s: float


@dataclass(frozen=True)
class Compute:
    """min_vram_gb None: no GPU is needed. max_rate_usd_hr None: no ceiling here. image_gb: the image on disk."""

    image: str
    gpu: str | None
    candidates: tuple[str, ...]
    gpu_count: int
    min_vram_gb: float | None
    disk_gb: float
    max_rate_usd_hr: Decimal | None
    capacity: Capacity
    image_gb: float | None = None


@dataclass(frozen=True)
class Runtime:
    engine: str


@dataclass(frozen=True)
class Lifecycle:
    """None means off."""

    idle_timeout_s: float | None
    max_lifetime_s: float | None
    hold_for_s: float
    storage_grace_s: float


@dataclass(frozen=True)
class Budget:
    session_usd: Decimal | None


@dataclass(frozen=True)
class Origin:
    """source: flag, environment, project, user or default. where: `gpu.yaml:12`, `GPU_PROVIDER`, `--disk-gb`.

    overruled: what was written elsewhere for the same key and does not hold, as `where = value`.
    """

    source: str
    where: str
    value: Any
    overruled: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuConfig:
    """host: with provider ssh, the one the project names. origins: for every key, who said it and what was written."""

    provider: str
    host: str | None
    compute: Compute
    runtime: Runtime
    lifecycle: Lifecycle
    budget: Budget
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def origin_of(self, key: str) -> Origin:
        return self.origins[key]

    def describe(self) -> list[dict[str, Any]]:
        """Every key with its value as written, for `gpu doctor --config`."""
        return [
            {"key": key, "value": o.value, "source": o.source, "where": o.where, "overruled": list(o.overruled)}
            for key, o in self.origins.items()
        ]


@dataclass(frozen=True)
class HostConfig:
    """One of the user's own machines. What is None is left to the SSH configuration."""

    name: str
    address: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    root: str | None = None
    rate_usd_hr: Decimal = Decimal(0)
    gpu: str | None = None
    vram_gb: float | None = None


def load_gpu_yaml(
    project_root: Path, *, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> GpuConfig:
    """The settings that hold for a project. A missing gpu.yaml means the defaults.

    flags: values by dotted key (`{"compute.disk_gb": "100"}`); None is a flag that was not given.
    """
    environ = os.environ if environ is None else environ
    layers = [
        _flag_layer(flags or {}),
        _environment_layer(environ),
        _file_layer("project", read_project_file(project_root, "gpu.yaml")),
        _file_layer("user", _user_file("config.yaml", environ)),
    ]
    settings: dict[str, _Setting] = {}
    origins: dict[str, Origin] = {}
    for key, default in DEFAULTS.items():
        written = [layer[key] for layer in layers if key in layer]
        winner = _winner(key, written) or _Setting("default", "default", default, str(default))
        settings[key] = winner
        overruled = tuple(f"{s.where} = {s.text}" for s in written if s is not winner)
        origins[key] = Origin(winner.source, winner.where, winner.value, overruled)
    _check_together(settings)
    return _built(settings, origins)


def load_hosts(project_root: Path, *, environ: Mapping[str, str] | None = None) -> dict[str, HostConfig]:
    """The hosts of the project's hosts.yaml, then those of `~/.config/gpu/hosts.yaml` whose names are still free."""
    environ = os.environ if environ is None else environ
    hosts: dict[str, HostConfig] = {}
    project_file = read_project_file(project_root, "hosts.yaml")
    user_file = _user_file("hosts.yaml", environ)
    for document, folder in ((project_file, project_root), (user_file, _own_config_dir(environ))):
        if document is None:
            continue
        schemas.check(document.data, "hosts.yaml", file=document.shown, line=document.line_of, error=ConfigError)
        for name, entry in (document.data.get("hosts") or {}).items():
            hosts.setdefault(name, _host(name, entry or {}, document, folder, environ))
    return hosts


_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*\Z", re.DOTALL)
_QUOTED = re.compile(r"""(?:'([^']*)'|"((?:[^"\\]|\\.)*)")\s*(?:#.*)?\Z""")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def read_dotenv(project_root: Path, names: Iterable[str]) -> dict[str, str]:
    """The named variables of the project's `.env`, as text: nothing in it is evaluated, no other name is looked at.

    Only for credentials: a URL or a path from a file that came with a repository must not steer anything. A missing
    file, or a directory of that name (some virtual environments), gives {}. No value ever appears in an error.
    """
    path = project_root / ".env"
    if path.is_dir():
        return {}
    text = strict_yaml.read_text(path)
    wanted = set(names)
    found: dict[str, str] = {}
    for number, line in enumerate((text or "").splitlines(), start=1):
        assignment = _ASSIGNMENT.match(line)
        if not assignment or assignment[1] not in wanted:
            continue
        value = _dotenv_value(assignment[2])
        if value is None:
            raise fault(".env", number, f"the value of {assignment[1]} has a quote that does not end on its line")
        if any(not c.isprintable() for c in value):
            raise fault(".env", number, f"the value of {assignment[1]} holds a control character")
        if value:
            found[assignment[1]] = value
    return found


def _dotenv_value(written: str) -> str | None:
    if written[:1] not in ("'", '"'):
        return re.split(r"\s#|\A#", written, maxsplit=1)[0].strip()
    quoted = _QUOTED.match(written)
    if quoted is None:
        return None
    if quoted[1] is not None:
        return quoted[1]
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), quoted[2])


# layers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setting:
    """text: the value exactly as written, from which money is made without passing through a float."""

    source: str
    where: str
    value: Any
    text: str

    def error(self, problem: str, key: str) -> UsageError:
        message = f"{self.where}: {problem}"
        if self.source == "flag":
            return UsageError(message, key=key)
        if self.source == "environment":
            return ConfigError(
                message, file=self.where, next_step="set {file} to an allowed value or unset it", key=key
            )
        return ConfigError(message, file=self.where.rpartition(":")[0] or self.where, key=key)


def read_project_file(directory: Path, name: str) -> Document | None:
    """A YAML file of the project, read strictly; the near miss `.yml` is told, not overlooked."""
    document = strict_yaml.read(directory / name)
    if document is None:
        other = directory / (name.removesuffix(".yaml") + ".yml")
        if other.exists():
            raise ConfigError(
                f"{other.name} is not read: the name is {name}", file=other.name, next_step=f"mv {other.name} {name}"
            )
    return document


def _own_config_dir(environ: Mapping[str, str]) -> Path | None:
    try:
        return userdirs.config_dir(environ)
    except userdirs.NoHome:  # then there are no settings of the user's own
        return None


def _user_file(name: str, environ: Mapping[str, str]) -> Document | None:
    folder = _own_config_dir(environ)
    if folder is None:
        return None
    path = folder / name
    home = userdirs.home(environ)
    inside = home and path.is_relative_to(home)
    return strict_yaml.read(path, shown=f"~/{path.relative_to(home)}" if inside else str(path))


def _file_layer(source: str, document: Document | None) -> dict[str, _Setting]:
    if document is None:
        return {}
    schemas.check(document.data, "gpu.yaml", file=document.shown, line=document.line_of, error=ConfigError)
    layer: dict[str, _Setting] = {}
    for key in DEFAULTS:
        pointer = "/" + key.replace(".", "/")
        value: Any = document.data
        for part in key.split("."):
            value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            where = f"{document.shown}:{document.line_of(pointer)}"
            text = document.texts.get(pointer) or _as_text(value)
            layer[key] = _Setting(source, where, value, text)
    if "host" in layer and layer.get("provider", layer["host"]).value in ("local", "vast", "runpod"):
        raise layer["host"].error(f"host is only for provider ssh, not {layer['provider'].value}", "host")
    return layer


def _environment_layer(environ: Mapping[str, str]) -> dict[str, _Setting]:
    layer: dict[str, _Setting] = {}
    for key in DEFAULTS:
        name = "GPU_" + key.upper().replace(".", "_")
        text = environ.get(name, "")
        if text:
            layer[key] = _checked(_Setting("environment", name, _meaning(key, text), text), key)
    return layer


def _flag_layer(flags: Mapping[str, Any]) -> dict[str, _Setting]:
    layer: dict[str, _Setting] = {}
    for key, given in flags.items():
        if key not in DEFAULTS:
            raise KeyError(key)
        if given is None:
            continue
        value = _meaning(key, given) if isinstance(given, str) else list(given) if isinstance(given, tuple) else given
        if isinstance(value, Decimal):
            value = float(value)
        name = "--" + key.rpartition(".")[2].replace("_", "-")
        layer[key] = _checked(_Setting("flag", name, value, _as_text(given)), key)
    return layer


def _meaning(key: str, text: str) -> Any:
    """A value that came as text, as the same word in gpu.yaml would be read."""
    if key == "compute.candidates":
        return [part.strip() for part in text.split(",") if part.strip()]
    if key in _WORDS and text not in ("null", "~"):
        return text
    value = strict_yaml.plain_value(text)
    return text if isinstance(value, ValueError) else value


def _checked(setting: _Setting, key: str) -> _Setting:
    record: Any = setting.value
    for part in reversed(key.split(".")):
        record = {part: record}
    for problem in schemas.problems(record, "gpu.yaml"):
        raise setting.error(problem.message, key)
    return setting


def _winner(key: str, written: list[_Setting]) -> _Setting | None:
    if not written:
        return None
    if key in CEILINGS:
        return min(written, key=lambda setting: _height(setting, key))  # the first of equals: the stronger layer
    return written[0]


def _height(setting: _Setting, key: str) -> Decimal:
    if setting.value is None or setting.value == "off":
        return Decimal("Infinity")
    return Decimal(str(_duration(setting, key))) if key == "lifecycle.max_lifetime" else _money(setting)


# from settings to the record ------------------------------------------------------------------------------------------


def _check_together(settings: dict[str, _Setting]) -> None:
    attempts, interval = settings["compute.capacity.attempts"], settings["compute.capacity.interval"]
    wait_s = int(attempts.value) * _duration(interval, "compute.capacity.interval")
    if settings["compute.capacity.mode"].value == "wait" and wait_s > LONGEST_WAIT_S:
        raise attempts.error(
            f"{attempts.text} attempts, one every {interval.text}, are more than 24h: fewer, or more often",
            attempts.where,
        )
    idle, lifetime = settings["lifecycle.idle_timeout"], settings["lifecycle.max_lifetime"]
    if idle.value == "off" and (lifetime.value == "off" or lifetime.source == "default"):
        raise idle.error(
            "idle_timeout off needs a max_lifetime: write one, or nothing ever stops the machine", idle.where
        )


def _built(settings: dict[str, _Setting], origins: dict[str, Origin]) -> GpuConfig:
    def value(key: str) -> Any:
        return settings[key].value

    def seconds(key: str) -> float:
        return _duration(settings[key], key)

    def seconds_or_off(key: str) -> float | None:
        if value(key) == "off":
            return None
        found = seconds(key)
        if found < _SHORTEST_S:
            raise settings[key].error(f"{key} is {settings[key].text}: to switch it off write off", key)
        return found

    def money(key: str) -> Decimal | None:
        return None if value(key) is None else _money(settings[key])

    return GpuConfig(
        provider=value("provider"),
        host=value("host") if value("provider") == "ssh" else None,
        compute=Compute(
            image=value("compute.image"),
            gpu=value("compute.gpu"),
            candidates=tuple(value("compute.candidates")),
            gpu_count=int(value("compute.gpu_count")),
            min_vram_gb=value("compute.min_vram_gb"),
            disk_gb=value("compute.disk_gb"),
            max_rate_usd_hr=money("compute.max_rate_usd_hr"),
            capacity=Capacity(
                mode=value("compute.capacity.mode"),
                attempts=int(value("compute.capacity.attempts")),
                interval_s=seconds("compute.capacity.interval"),
            ),
            image_gb=value("compute.image_gb"),
        ),
        runtime=Runtime(engine=value("runtime.engine")),
        lifecycle=Lifecycle(
            idle_timeout_s=seconds_or_off("lifecycle.idle_timeout"),
            max_lifetime_s=seconds_or_off("lifecycle.max_lifetime"),
            hold_for_s=seconds("lifecycle.hold_for"),
            storage_grace_s=seconds("lifecycle.storage_grace"),
        ),
        budget=Budget(session_usd=money("budget.session_usd")),
        origins=origins,
    )


def _host(
    name: str, entry: dict[str, Any], document: Document, folder: Path | None, environ: Mapping[str, str]
) -> HostConfig:
    pointer = f"/hosts/{strict_yaml.escape(name)}"
    identity = entry.get("identity_file")
    if identity is not None:
        identity = _local_path(identity, folder, environ)
        if identity is None:
            raise document.error("identity_file starts with ~ and this user has no home", f"{pointer}/identity_file")
    rate = document.texts.get(f"{pointer}/rate_usd_hr")
    return HostConfig(
        name=name,
        address=entry.get("address", name),
        user=entry.get("user"),
        port=entry.get("port"),
        identity_file=identity,
        root=entry.get("root"),
        rate_usd_hr=Decimal(rate) if rate else Decimal(0),
        gpu=entry.get("gpu"),
        vram_gb=entry.get("vram_gb"),
    )


def _local_path(text: str, folder: Path | None, environ: Mapping[str, str]) -> str | None:
    if text == "~" or text.startswith("~/"):
        home = userdirs.home(environ)
        return home + text[1:] if home else None
    return os.path.join(str(folder or ""), text)


def _duration(setting: _Setting, key: str) -> float:
    try:
        return parse_duration(setting.value)
    except ValueError as exc:
        raise setting.error(str(exc), key) from exc


def _money(setting: _Setting) -> Decimal:
    return Decimal(setting.text)


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(v) for v in value)
    return "null" if value is None else str(value)


_MISSING: Any = object()
