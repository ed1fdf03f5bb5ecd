"""The project's `gpu.yaml`: written once from the template, later changed only in the lines that were asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gpu_skills import config, resources, schemas, strict_yaml
from gpu_skills.errors import ConfigError, UsageError
from gpu_skills.state import files

PROVIDERS = ("local", "ssh", "vast", "runpod")


def write_gpu_yaml(
    root: Path,
    *,
    jobs: bool,
    min_vram_gb: float | None,
    provider: str | None,
    host: str | None,
    environ: Mapping[str, str],
) -> str:
    """Write or adjust gpu.yaml. Returns `written`, `changed` or `unchanged`. All else in it stays as it is."""
    if provider is not None and provider not in PROVIDERS:
        raise UsageError(f"unknown provider {provider!r}", next_step=f"use one of {', '.join(PROVIDERS)}")
    if host is not None:
        for problem in schemas.problems({"host": host}, "gpu.yaml"):
            raise UsageError(f"--host {problem.message.removeprefix('/host ')}", next_step="gpu init --host NAME")
        provider = provider or "ssh"
    path = root / "gpu.yaml"
    before = None if strict_yaml.read_text(path) is None else files.read_bytes(path)
    text = (before or resources.template("gpu.yaml").read_bytes()).decode("utf-8")
    if provider is not None:
        text = _set(text, "provider", provider, file=path)
    if host is not None:
        text = _set(text, "host", _scalar(host), file=path)
    if min_vram_gb is not None:
        text = _set(text, "min_vram_gb", f"{min_vram_gb:g}" if min_vram_gb else "null", file=path)
    if jobs:
        text = _set(text, "engine", "none", file=path)
    data = text.encode("utf-8")
    if data == before:
        return "unchanged"
    files.commit(path, data, mode=0o644)
    try:
        config.load_gpu_yaml(root, environ=environ)
    except ConfigError:
        if before is not None:  # our edit of a hand-written file does not read: put the original back
            files.commit(path, before, mode=0o644)
        raise
    return "written" if before is None else "changed"


def _set(text: str, key: str, value: str, *, file: Path) -> str:
    """Give `key:` this value where it stands, flow or block style; at the top level it may be added."""
    pattern = re.compile(rf"(?m)^(?P<head>(?:[^#\n]*[\s{{,])?{key}:[ \t]*)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s,}}#]*)")
    if pattern.search(text):
        return pattern.sub(
            lambda m: m["head"] + (" " if not m["head"].endswith((" ", "\t")) else "") + value, text, count=1
        )
    commented = re.compile(rf"(?m)^#\s*{key}:.*$")
    if commented.search(text):
        return commented.sub(f"{key}: {value}", text, count=1)
    if key in ("provider", "host"):
        return f"{key}: {value}\n{text}"
    raise ConfigError(
        file=file.name, problem=f"no place for {key} found", next_step=f"write {key}: {value} into {file.name}"
    )


def _scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9._-]+", text) else "'" + text.replace("'", "''") + "'"
