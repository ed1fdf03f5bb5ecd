"""`gpu model add-workflow` and `gpu deployment run`, against a ComfyUI server on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_skills.state import project as projects
from gpu_skills.state import registry
from runtimes.comfy_server import comfy
from runtimes.workflows import text_to_image


@pytest.fixture
def place(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    registry.put(projects.init(root), "models", {"id": "sd15", "runtime": "comfyui"})
    (root / "portrait.json").write_text(json.dumps(text_to_image()))
    return root


def test_a_workflow_is_added_and_a_deployment_runs_it(gpu, place: Path):
    added = gpu("model", "add-workflow", "portrait.json", "--model", "sd15", "--json", cwd=place)
    assert added.exit_code == 0 and added.document["is_new"] and "seed" in added.document["workflow"]["inputs"]
    with comfy() as server:
        record = {"id": "dep_1", "provider": "local", "model": "sd15", "runtime": "comfyui", "endpoint": server.url}
        proof = {"succeeded": True, "at": "2026-11-30T12:00:00Z"}
        registry.put(projects.init(place), "deployments", {**record, "status": "ready", "test_generation": proof})
        wrong = gpu("deployment", "run", "dep_1", "-i", "seed=x", "-i", "sed=1", "--json", cwd=place)
        assert wrong.exit_code == 2 and server.requests == []
        ran = gpu("deployment", "run", "dep_1", "-i", "seed=5", "--json", cwd=place)
    assert ran.exit_code == 0 and ran.document["state"] == "succeeded"
    assert Path(ran.document["outputs"][0]["path"]).read_bytes().startswith(b"\x89PNG")


def test_a_deployment_that_failed_is_not_asked(gpu, place: Path):
    registry.put(projects.init(place), "deployments", {"id": "dep_1", "provider": "local", "status": "error"})
    refused = gpu("deployment", "run", "dep_1", "--json", cwd=place)
    assert refused.exit_code == 3 and refused.error["code"] == "deployment_not_ready"
