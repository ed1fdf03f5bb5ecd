"""What a person is told to run next leads where it should: into the sandbox, to the plan that was meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_skills.cli import output
from gpu_skills.cli.output import Output
from gpu_skills.errors import ApprovalNeeded, Refused
from gpu_skills.state import project as projects

pytestmark = pytest.mark.subprocess
NAMES = ["3f2a9c81d004" + "0" * 52, "3f2a9c81d777" + "1" * 52, "b" * 64]


@pytest.mark.parametrize(
    ("step", "there"),
    [
        ("gpu reconcile", "gpu --sandbox reconcile"),
        ("gpu job pull J-000001, then gpu destroy", "gpu --sandbox job pull J-000001, then gpu --sandbox destroy"),
        (
            "ask them, then: gpu approve 3f --statement TEXT",
            "ask them, then: gpu --sandbox approve 3f --statement TEXT",
        ),
        ("set it up (gpu setup)", "set it up (gpu --sandbox setup)"),
        ("gpu sandbox up", "gpu sandbox up"),
        ("gpu --sandbox setup", "gpu --sandbox setup"),
        ("rent a gpu plan by plan", "rent a gpu --sandbox plan by plan"),
        ("gpu jobs and gpu machines", "gpu jobs and gpu machines"),
        ("edit .pi/gpu plan and my-gpu plan", "edit .pi/gpu plan and my-gpu plan"),
        ("gpu --help", "gpu --help"),
    ],
)
def test_a_command_of_ours_in_a_step_leads_to_the_sandbox_where_everything_else_did(step, there):
    assert output.in_sandbox(step) == there


def test_an_error_in_the_sandbox_and_its_document_name_the_command_in_the_sandbox(capsys):
    error = Refused("not now: gpu status tells", next_step="gpu reconcile", commands=["gpu approve 3f"], run="gpu plan")
    output.print_error(error, as_json=True, sandbox=True)
    said = capsys.readouterr()
    document = json.loads(said.out)["error"]
    assert document["next_step"] == "gpu --sandbox reconcile"
    assert document["details"] == {"commands": ["gpu --sandbox approve 3f"], "run": "gpu plan"}
    assert said.err == "gpu: not now: gpu --sandbox status tells; next: gpu --sandbox reconcile [refused]\n"
    output.print_error(error, as_json=True)
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["next_step"] == "gpu reconcile" and "--sandbox" not in said.err


def test_a_result_in_the_sandbox_names_the_command_in_the_sandbox(capsys):
    from gpu_skills.cli.base import emit

    made = Output(
        {"next_step": "gpu setup", "jobs": [{"next_step": "gpu job pull"}]}, "next: gpu setup", hints=["gpu ls"]
    )
    emit(made, as_json=True, sandbox=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["next_step"], document["jobs"]) == (
        "gpu --sandbox setup",
        [{"next_step": "gpu --sandbox job pull"}],
    )
    emit(made, as_json=False, sandbox=True)
    assert capsys.readouterr().out == "next: gpu --sandbox setup\n"


def test_what_a_command_names_next_in_a_sandbox_is_run_there_as_it_stands(gpu, tmp_path):
    made = gpu("--sandbox", "init", "--json")  # there is none yet
    assert made.error["next_step"] == "gpu sandbox up"


def test_what_a_person_has_to_agree_to_is_printed_whole_and_line_by_line(capsys):
    lines = [f"line {n}: " + "x" * 90 for n in range(12)]
    error = ApprovalNeeded(
        f"a person has to agree: {'; '.join(lines)}", next_step="gpu approve 3f --show", text="\n".join(lines)
    )
    output.print_error(error, as_json=False)
    assert capsys.readouterr().err.splitlines() == [
        *lines,
        "gpu: a person has to agree; next: gpu approve 3f --show [approval_missing]",
    ]


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    project = projects.init(tmp_path)
    (tmp_path / "gpu.yaml").write_text("provider: local\n")
    project.path("plans").mkdir()
    for name in (*NAMES, "draft-01234567"):
        (project.path("plans") / f"{name}.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("3f2a9c81d040", NAMES[0]),
        ("3f2a9c81d776", NAMES[1]),
        ("3f2a9c8", NAMES[0]),
        ("draft-01234576", "draft-01234567"),
    ],
)
@pytest.mark.parametrize("how", [("approve",), ("job", "run", "--plan"), ("plan",)])
def test_a_misspelt_plan_is_told_with_those_there_are_the_nearest_first(gpu, planned, how, typed, nearest):
    result = gpu(*how, typed, "--json")
    assert result.error["code"] == "plan_unknown", result.stderr
    known = result.error["details"]["known"]
    shown = nearest if nearest.startswith("draft") else nearest[:12]
    assert known[0] == shown and len(known) == 4
    assert f"there is no plan {typed}; there are {shown}, " in result.error["message"]
    assert result.error["next_step"] == f"gpu approve {shown} --show"


@pytest.mark.parametrize("typed", ["3f2a9c81d004", "3f2a9c81d0", "3f2a9c81d040"])
def test_the_name_of_a_plan_is_not_run_as_a_command(gpu, planned, typed):
    result = gpu("job", "run", "--json", typed)
    assert result.exit_code == 125 and result.error["code"] == "plan_unknown"
    assert "would be run as a command" in result.error["message"]
    assert result.error["next_step"] == "gpu job run --plan 3f2a9c81d004"


def test_a_name_where_there_are_no_plans_is_told_plainly(gpu, tmp_path):
    projects.init(tmp_path)
    error = gpu("approve", "3f2a9c81d004", "--json").error
    assert (error["message"], error["next_step"]) == ("there is no plan 3f2a9c81d004", "gpu plan --freeze")


def test_a_job_that_is_started_in_the_sandbox_is_followed_there(capsys):
    from gpu_skills.cli.context import Context

    context = Context()
    context.say("next: gpu job logs -f J-000001")
    context.sandbox = True
    context.say("next: gpu job logs -f J-000001")
    said = capsys.readouterr().err.splitlines()
    assert said == ["next: gpu job logs -f J-000001", "next: gpu --sandbox job logs -f J-000001"]


@pytest.mark.parametrize(
    ("typed", "step"),
    [
        (("doctor", "runpo"), "gpu doctor runpod"),
        (("doctor", "nowhere"), "gpu doctor --help"),
        (("reconcile", "--provider", "vats"), "gpu reconcile --provider vast"),
        (("machine", "destroy", "m_1", "--abandon-outputs"), "gpu machine destroy --help"),
        (("plan",), "gpu plan -- CMD"),
        (
            ("job", "run", "--hold-for", "3h", "--", "python", "a b.py"),
            "gpu plan --freeze --hold-for 3h -- python 'a b.py'",
        ),
    ],
)
def test_what_was_mistyped_is_told_with_the_command_that_was_meant(gpu, tmp_path, typed, step):
    projects.init(tmp_path)
    (tmp_path / "gpu.yaml").write_text("provider: vast\n")
    result = gpu("--json", *typed)
    assert result.exit_code in (2, 125) and result.error["next_step"] == step
