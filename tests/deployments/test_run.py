"""A request to a deployment: checked before it is sent, on the ledger from start to end, never done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_skills.clock import SystemClock
from gpu_skills.deployments import run as running
from gpu_skills.deployments import workflows
from gpu_skills.deployments.run import Asked, Ran
from gpu_skills.errors import (
    DeploymentNotReady,
    GenerationFailed,
    GenerationUnknown,
    InputInvalid,
)
from gpu_skills.jobs import observe
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.connect import Link
from gpu_skills.runtimes import comfyui as comfy_module
from gpu_skills.runtimes.base import Endpoint, Event, Surroundings, runtime_of
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.state import project as projects
from gpu_skills.state import registry
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from runtimes.comfy_server import ComfyServer, comfy
from runtimes.workflows import text_to_image

DEPLOYMENT = {
    "id": "dep_a41c",
    "provider": "local",
    "machine_id": "m_here",
    "runtime": "comfyui",
    "model": "sd15",
    "gpu": "NVIDIA L4",
    "status": "ready",
    "test_generation": {"succeeded": True, "at": "2026-11-30T12:00:00Z"},
}
MODEL = ModelManifest(id="sd15", runtime="comfyui", private_inputs=("negative_prompt",))
CHILD = """
import json, sys
from pathlib import Path
from gpu_skills.clock import SystemClock
from gpu_skills.deployments import run as running, workflows
from gpu_skills.runtimes.base import Endpoint, Surroundings, runtime_of
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.project import Project
from gpu_skills.state import project as projects

project = projects.init(Path(sys.argv[1]))
model = ModelManifest(id="sd15", runtime="comfyui", private_inputs=("negative_prompt",))
asked = running.Asked(json.loads(sys.argv[3]), model, {"seed": "11"}, workflows.load(project, "portrait"))
runtime = runtime_of("comfyui", Surroundings(environ={}))
tell = lambda event: print(event.name, flush=True)
ledger = Ledger(project, SystemClock())
running.run(project, ledger, SystemClock(), runtime, Endpoint(sys.argv[2]), asked, on_event=tell)
"""


@pytest.fixture
def server() -> Iterator[ComfyServer]:
    with comfy() as found:
        yield found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name, seconds in {"POLL_S": 0.05, "LOOKED_FOR_S": 0.3, "MISSING_FOR_S": 0.5, "SILENT_FOR_S": 1.0}.items():
        monkeypatch.setattr(comfy_module, name, seconds)
    project = projects.init(tmp_path)
    registry.put(project, "deployments", DEPLOYMENT)
    registry.put(
        project,
        "machines",
        {"id": "m_here", "provider": "local", "status": "ready", "host": "here", "rate_usd_hr": 3.6},
    )
    path = tmp_path / "portrait.json"

    path.write_text(json.dumps(text_to_image()))
    workflows.add(project, path, SystemClock(), model="sd15")
    return project


def ask(project: Project, server: ComfyServer, inputs: dict | None = None, *, on_event=None, **changes) -> Ran:
    asked = Asked(
        {**DEPLOYMENT, **changes},
        MODEL,
        {"seed": "11"} if inputs is None else inputs,
        workflows.load(project, "portrait"),
    )
    runtime = runtime_of("comfyui", Surroundings(environ={}))
    ledger = Ledger(project, SystemClock())
    return running.run(
        project, ledger, SystemClock(), runtime, Endpoint(server.url), asked, on_event=on_event or (lambda event: None)
    )


def lines(project: Project) -> list[dict]:
    return Ledger(project, SystemClock()).jobs()


def test_a_run_leaves_its_outputs_here_and_its_line_says_what_was_made_of_what(project: Project, server: ComfyServer):
    ran = ask(project, server, {"seed": "11", "negative_prompt": "my secret"})
    assert ran.line["status"] == "completed" and ran.line["deployment_id"] == "dep_a41c"
    assert (ran.line["workflow"], ran.line["workflow_version"], ran.line["model"]) == ("portrait", 1, "sd15")
    assert ran.line["inputs"]["seed"] == 11 and list(ran.line["inputs"]["negative_prompt"]) == ["sha256"]
    assert "my secret" not in project.path("jobs.jsonl").read_text()
    artifact = ran.line["artifacts"][0]
    assert artifact["uri"].startswith(f"gpu-outputs/{ran.job}/")
    assert (project.root / artifact["uri"]).read_bytes().startswith(b"\x89PNG")
    assert ran.line["cost_usd"] == pytest.approx(ran.line["duration_s"] * 3.6 / 3600, abs=2e-6)
    assert registry.show(project, "deployments", "dep_a41c")[0]["last_used_at"] == ran.line["completed_at"]


def test_all_that_is_wrong_with_inputs_is_told_before_anything_is_sent_or_written(
    project: Project, server: ComfyServer
):
    with pytest.raises(InputInvalid) as caught:
        ask(project, server, {"seed": "many", "step": "3"})
    assert len(caught.value.details["problems"]) == 2
    assert server.requests == [] and lines(project) == []


def test_a_deployment_that_is_not_ready_is_refused_and_asked_nothing(project: Project, server: ComfyServer):
    with pytest.raises(DeploymentNotReady) as caught:
        ask(project, server, status="error")
    assert caught.value.next_step == "gpu deployment show dep_a41c" and server.requests == []


def test_a_run_that_fails_ends_as_failed_with_the_reason(project: Project, server: ComfyServer):
    server.faults.execution_error = True
    with pytest.raises(GenerationFailed):
        ask(project, server)
    assert lines(project)[0]["status"] == "failed" and lines(project)[0]["reason"] == "generation_failed"


def test_interrupting_ends_the_run_at_the_service_and_its_line_as_cancelled(project: Project, server: ComfyServer):
    server.faults.step_s = 0.5

    def stop(event: Event) -> None:
        if event.name != "queued":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(project, server, on_event=stop)
    assert lines(project)[0]["status"] == "cancelled"
    assert any("/interrupt" in request or "/queue" in request for request in server.requests)


def test_a_request_without_an_answer_stays_running_and_the_same_again_goes_on_with_it(
    project: Project, server: ComfyServer, monkeypatch: pytest.MonkeyPatch
):
    server.faults.takes_prompt = False
    with pytest.raises(GenerationUnknown) as caught:
        ask(project, server)
    assert caught.value.exit_code == 6 and lines(project)[0]["status"] == "running"
    server.faults.takes_prompt = True
    ran = ask(project, server)
    assert ran.has_gone_on and [line["status"] for line in lines(project)] == ["completed"]
    assert len(server.executed) == 1
    assert not ask(project, server).has_gone_on


@pytest.mark.subprocess
def test_a_command_killed_in_the_middle_and_given_again_is_done_once(project: Project, server: ComfyServer):

    server.faults.step_s = 0.3
    place = str(Path(running.__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(project.root), server.url, json.dumps(DEPLOYMENT)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": place},
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline().strip() == "queued"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        child.stdout.close()  # type: ignore[union-attr]
    assert lines(project)[0]["status"] == "running" and JobFolder(project, lines(project)[0]["id"]).is_request
    ran = ask(project, server)
    assert ran.has_gone_on and ran.line["status"] == "completed" and ran.line["artifacts"]
    assert len(server.executed) == 1 and len(lines(project)) == 1


class _MachineThatKnowsNothing:
    """Any question to it is a fault: a run at a deployment is none of its runner's jobs."""

    def call(self, *args: object, **more: object) -> dict:
        raise AssertionError(f"asked {args}")


def test_a_run_without_an_answer_is_not_taken_for_a_job_that_its_machine_forgot(project: Project, server: ComfyServer):
    server.faults.takes_prompt = False
    with pytest.raises(GenerationUnknown):
        ask(project, server)
    machine = machines.find(project, "m_here")
    assert machine is not None
    link = Link(machine, _MachineThatKnowsNothing())  # type: ignore[arg-type]
    observe.settle(project, Ledger(project, SystemClock()), SystemClock(), link)
    assert lines(project)[0]["status"] == "running"
