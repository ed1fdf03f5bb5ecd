"""A model set up, registered, found again and given back, with the real runner and a real service on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_skills import resources
from gpu_skills.cli import main
from gpu_skills.cli.context import Context
from gpu_skills.deployments import model_dir, records, register, scripts
from gpu_skills.deployments.records import DeploymentFailed

pytestmark = pytest.mark.subprocess
TINY = resources.ROOT / "examples/tiny-llm"


@pytest.fixture
def context(tmp_path: Path, allow_subprocess: None):
    assert main.run(["init", "--jobs"], obj=Context(cwd=tmp_path, environ=dict(os.environ))) == 0
    made = Context(cwd=tmp_path, environ=dict(os.environ))
    yield made
    for deployment in records.all_deployments(made.project):
        register.destroy(made.operator, deployment.id)
    made.close()


def test_a_model_is_set_up_proven_registered_once_and_given_back(context):
    link, op = context.ready_machine(), context.operator
    model = model_dir.put_on_record(op.project, model_dir.read(TINY), op.clock)
    lines: list[str] = []
    result = scripts.run_script(op, "setup", model, link, on_line=lines.append)
    assert result.succeeded and result.exit_code == 0 and any("tiny-llm is in" in line for line in lines)
    assert scripts.last_run(op.project, link.machine.id, "tiny-llm", "setup")["exit_code"] == 0
    first = register.register(op, model, link)
    assert first.status == "ready" and first.test_generation["succeeded"]
    assert register.register(op, model, link).id == first.id
    assert [d.id for d in records.all_deployments(op.project)] == [first.id]
    assert register.destroy(op, first.id).status == "destroyed"


@pytest.mark.slow
def test_a_service_that_cannot_start_ends_as_error_with_what_it_said(context):
    link, op = context.ready_machine(), context.operator
    with pytest.raises(DeploymentFailed):  # nothing was set up: its command ends again and again
        register.register(op, model_dir.read(TINY), link)
    [found] = records.all_deployments(op.project)
    assert found.status == "error" and "ended" in found.error and "server.py" in found.error
