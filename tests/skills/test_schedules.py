"""The schedules in templates/: what a scheduler would run is a command that exists, and gets no more than it needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from quoted_commands import Quoted, commands_of, problem_of

FOLDER = Path(__file__).resolve().parents[2] / "templates" / "schedules"


def entries() -> list[str]:
    lines = (FOLDER / "gpu-sentinel.cron").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#") and not re.match(r"[A-Z_]+=", line)]


def workflow() -> dict[Any, Any]:
    import yaml

    found = yaml.safe_load((FOLDER / "gpu-sentinel.yaml").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def scripts() -> list[str]:
    return [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]


def problems(script: str) -> list[str | None]:
    found = [command for line in script.splitlines() for command in commands_of(line)]
    assert any(command.startswith("gpu sentinel") for command in found), script
    return [problem_of(Quoted("a schedule", command, inline=False)) for command in found]


def test_the_crontab_runs_a_sentinel_that_exists_every_ten_minutes() -> None:
    [entry] = entries()
    fields, command = entry.split(maxsplit=5)[:5], entry.split(maxsplit=5)[5]
    assert fields == ["*/10", "*", "*", "*", "*"]
    assert problems(command.replace('"$HOME/gpu-skills/scripts/gpu"', "scripts/gpu")) == [None]
    assert "%" not in command, "cron makes a line break of it"


def test_the_workflow_runs_a_sentinel_that_exists_often_enough_for_a_launch() -> None:
    found = workflow()
    schedule = found[True]["schedule"]  # YAML 1.1 reads the key `on` as true
    assert [one["cron"] for one in schedule] == ["*/10 * * * *"], "a pass counts for an hour, and CI starts late"
    assert [problems(script) for script in scripts()] == [[None]]


def test_the_workflow_has_no_rights_in_the_repository_ends_by_itself_and_runs_once_at_a_time() -> None:
    found = workflow()
    assert found["permissions"] == {} and found["concurrency"]
    assert all(job["timeout-minutes"] <= 15 for job in found["jobs"].values())


def test_secrets_are_named_and_given_to_the_one_step_that_needs_them() -> None:
    text = (FOLDER / "gpu-sentinel.yaml").read_text(encoding="utf-8")
    found = workflow()
    assert not any("secrets." in str(value) for value in found.get("env", {}).values())
    for job in found["jobs"].values():
        assert "env" not in job
        for step in job["steps"]:
            assert ("secrets." in str(step)) is ("run" in step)
    assert "secrets." not in "".join(scripts()), "a secret in a script stands in the process list"
    assert not re.search(r"(?m)(KEY|TOKEN)\s*[:=]\s*[A-Za-z0-9_]{12,}$", text)


@pytest.mark.subprocess
def test_what_the_schedules_run_is_shell() -> None:
    for script in [*scripts(), *(entry.split(maxsplit=5)[5] for entry in entries())]:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_skill_names_both() -> None:
    page = FOLDER.parents[1] / "skills" / "runpod-lifecycle" / "references" / "schedules.md"
    text = page.read_text(encoding="utf-8")
    assert all(f"templates/schedules/{path.name}" in text for path in FOLDER.iterdir())
