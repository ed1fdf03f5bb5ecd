"""`gpu model` and `gpu deployment` from a model directory to a proven deployment and back, on this machine."""

from __future__ import annotations

import pytest

from gpu_skills import resources

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]


@pytest.fixture
def project(gpu):
    assert gpu("init", "--jobs").exit_code == 0


TINY = str(resources.example("tiny-llm"))


def test_a_model_is_set_up_registered_asked_and_given_back(project, gpu):
    set_up = gpu("model", "setup", TINY, "--json")
    assert set_up.exit_code == 0, set_up.error
    assert (set_up.document["model"], set_up.document["state"], set_up.document["exit_code"]) == (
        "tiny-llm",
        "succeeded",
        0,
    )
    made = gpu("deployment", "register", "tiny-llm", "--json")
    assert made.exit_code == 0, made.error
    one = made.document["deployment"]
    assert one["status"] == "ready" and one["test_generation"]["succeeded"]
    try:
        assert [d["id"] for d in gpu("deployment", "ls", "--json").document["deployments"]] == [one["id"]]
        logs = gpu("deployment", "logs", one["id"], "--json").document
        assert logs["state"] == "running" and logs["service"]["restarts"] == 0
        asked = gpu("deployment", "run", one["id"], "-i", "prompt=the tide", "--operation", "completion", "--json")
        assert asked.exit_code == 0, asked.error
        assert asked.document["state"] == "succeeded" and asked.document["outputs"]
        bad = gpu("deployment", "error", one["id"], "--reason", "it rambles", "--json").document["deployment"]
        assert (bad["status"], bad["error"]) == ("error", "it rambles")
        refused = gpu("deployment", "run", one["id"], "-i", "prompt=x", "--operation", "completion", "--json")
        assert refused.error["code"] == "deployment_not_ready"
    finally:
        ended = gpu("deployment", "destroy", one["id"], "--json")
    assert ended.document["deployment"]["status"] == "destroyed"
    assert gpu("deployment", "show", one["id"], "--json").document["deployment"]["status"] == "destroyed"


def test_what_does_not_work_is_put_on_record_without_asking_the_machine(project, gpu):
    made = gpu("deployment", "register", TINY, "--status", "error", "--reason", "no disk", "--json")
    assert made.exit_code == 0, made.error
    assert made.document["deployment"]["status"] == "error" and made.document["deployment"]["error"] == "no disk"
    assert gpu("deployment", "register", TINY, "--status", "error", "--json").exit_code == 2
    assert gpu("deployment", "show", "dep_none", "--json").exit_code == 2
