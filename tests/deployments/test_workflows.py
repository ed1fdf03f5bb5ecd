"""A ComfyUI workflow on record: its manifest, its versions, and the copy that runs use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_skills.clock import SystemClock
from gpu_skills.deployments import workflows
from gpu_skills.errors import UsageError, WorkflowInvalid
from gpu_skills.state import project as projects
from gpu_skills.state import registry
from gpu_skills.state.project import Project
from runtimes.workflows import image_to_image, text_to_image


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return projects.init(tmp_path)


def written(project: Project, content: object, name: str = "portrait.json") -> Path:
    path = project.root / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_workflow_is_put_on_record_with_its_inputs_and_outputs(project: Project):
    found = workflows.add(project, written(project, text_to_image()), SystemClock(), model="sd15")
    record = registry.show(project, "workflows", "portrait")[0]
    assert found.is_new and record["version"] == 1 and record["model"] == "sd15"
    assert {"prompt", "seed", "steps"} <= set(record["inputs"]) and record["outputs"]


def test_the_same_file_again_changes_nothing_and_another_content_is_the_next_version(project: Project):
    path = written(project, text_to_image())
    workflows.add(project, path, SystemClock())
    before = project.path("workflows.json").read_bytes()
    path.write_text(json.dumps(text_to_image(), indent=3))
    assert not workflows.add(project, path, SystemClock()).is_new
    assert project.path("workflows.json").read_bytes() == before
    written(project, image_to_image())
    assert workflows.add(project, path, SystemClock()).record["version"] == 2


def test_a_run_uses_the_copy_when_the_file_is_gone(project: Project):
    path = written(project, text_to_image())
    workflows.add(project, path, SystemClock())
    path.unlink()
    assert workflows.load(project, "portrait").content == json.loads(json.dumps(text_to_image()))


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "[]", '{"a": NaN}', "{}"])
def test_what_is_no_workflow_is_refused_and_leaves_no_record(project: Project, content: str):
    with pytest.raises(WorkflowInvalid):
        workflows.add(project, written(project, content), SystemClock())
    assert registry.load(project, "workflows") == []


def test_a_record_that_names_a_file_outside_the_project_is_not_followed(project: Project):
    registry.put(project, "workflows", {"id": "sly", "file": "../../etc/hostname"})
    with pytest.raises(UsageError, match="outside"):
        workflows.load(project, "sly")


def test_without_a_name_the_only_workflow_of_the_model_is_meant(project: Project):
    workflows.add(project, written(project, text_to_image()), SystemClock(), model="sd15")
    assert workflows.choose(project, "sd15", None).id == "portrait"
    workflows.add(project, written(project, image_to_image(), "redraw.json"), SystemClock(), model="sd15")
    with pytest.raises(UsageError, match="portrait, redraw"):
        workflows.choose(project, "sd15", None)
