"""Servers to speak to, and where their outputs land."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_skills.runtimes.base import Endpoint, Surroundings
from gpu_skills.runtimes.comfyui import ComfyUI
from gpu_skills.runtimes.outputs import FolderSink
from runtimes.comfy_server import ComfyServer, comfy


@pytest.fixture
def server() -> Iterator[ComfyServer]:
    with comfy() as running:
        yield running


@pytest.fixture
def endpoint(server: ComfyServer) -> Endpoint:
    return Endpoint(server.url)


@pytest.fixture
def sink(tmp_path: Path) -> FolderSink:
    return FolderSink(tmp_path / "outputs")


@pytest.fixture
def around() -> Surroundings:
    return Surroundings(environ={})


@pytest.fixture
def comfyui(around: Surroundings, monkeypatch: pytest.MonkeyPatch) -> ComfyUI:
    """With short pauses: the server is next door."""
    from gpu_skills.runtimes import comfy_files
    from gpu_skills.runtimes import comfyui as module

    for name, seconds in {"POLL_S": 0.05, "LOOKED_FOR_S": 0.3, "MISSING_FOR_S": 0.5, "SILENT_FOR_S": 1.0}.items():
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(comfy_files, "PAUSE_S", 0.05)
    return ComfyUI(around)
