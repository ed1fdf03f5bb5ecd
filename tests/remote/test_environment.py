"""The environment of a job."""

from __future__ import annotations

import pytest

from gpu_skills.errors import ConfigError
from gpu_skills.remote.environment import job_environment


def test_the_whole_environment_of_a_job():
    assert job_environment(
        "/r", "p-1", "J-000007", model_id="org/model", hf_token="hf_x", user_env={"EPOCHS": "3"}
    ) == {
        "GPU_OUTPUT_DIR": "/r/projects/p-1/jobs/J-000007/outputs",
        "GPU_JOB_ID": "J-000007",
        "GPU_JOB_DIR": "/r/projects/p-1/jobs/J-000007/src",
        "GPU_MODEL_ID": "org/model",
        "JAMBU_OUTPUT_DIR": "/r/projects/p-1/jobs/J-000007/outputs",
        "JAMBU_JOB_ID": "J-000007",
        "JAMBU_JOB_DIR": "/r/projects/p-1/jobs/J-000007/src",
        "JAMBU_MODEL_ID": "org/model",
        "GPU_WORKSPACE": "/r/projects/p-1/workspace",
        "KURA_WORKSPACE": "/r/projects/p-1/workspace",
        "KURA_RUN_ID": "J-000007",
        "HF_HOME": "/r/projects/p-1/workspace/cache/huggingface",
        "HF_HUB_CACHE": "/r/projects/p-1/workspace/cache/huggingface/hub",
        "HF_TOKEN": "hf_x",
        "PYTHONUNBUFFERED": "1",
        "EPOCHS": "3",
    }


def test_without_a_token_there_is_no_empty_one():
    assert "HF_TOKEN" not in job_environment("/r", "p", "J-000001", hf_token=None)


def test_what_the_user_sets_wins_over_our_defaults():
    env = job_environment("/r", "p", "J-000001", hf_token="ours", user_env={"HF_TOKEN": "theirs", "HF_HOME": "/big"})
    assert (env["HF_TOKEN"], env["HF_HOME"], env["HF_HUB_CACHE"]) == ("theirs", "/big", "/big/hub")


@pytest.mark.parametrize("name", ["GPU_OUTPUT_DIR", "GPU_ANYTHING", "JAMBU_JOB_ID", "KURA_WORKSPACE", "KURA_RUN_ID"])
def test_names_that_are_ours_cannot_be_set(name):
    with pytest.raises(ConfigError, match=f"{name} is set by gpu itself"):
        job_environment("/r", "p", "J-000001", user_env={name: "x"})


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("A B", "x", "not a variable name"),
        ("1A", "x", "not a variable name"),
        ("A=B", "x", "not a variable name"),
        ("A", 3, "not text"),
        ("A", "x\0y", "NUL"),
        ("A", "x" * (128 << 10), "longer than 128 KiB"),
    ],
)
def test_what_no_process_could_be_given_is_named(name, value, problem):
    with pytest.raises(ConfigError, match=problem):
        job_environment("/r", "p", "J-000001", user_env={name: value})
