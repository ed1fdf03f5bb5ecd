"""Fields, states, reasons, error codes, variables and samples that a skill shows are real."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import skill_vocabulary as vocabulary
from quoted_commands import fences

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "skills").rglob("*.md"))
BLOCKS = [
    pytest.param(fence, id=f"{page.relative_to(ROOT / 'skills')}:{fence.line}")
    for page in PAGES
    for fence in fences(page.read_text(encoding="utf-8"))
    if fence.language in ("json", "yaml", "python", "bash", "sh")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT / "skills")))
def test_every_name_in_code_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert vocabulary.unknown_words(text, page.name) == []
    assert vocabulary.unknown_variables(text, page.name) == []
    assert vocabulary.wrong_exits(text, page.name) == []


def test_a_name_that_is_nearly_right_is_found() -> None:
    text = "`cost_usdd` `outputs_mising` `succeded` `job.run_time` `exit_code` and `$GPU_OUTPUTS_DIR` `HF_HOME`"
    assert vocabulary.unknown_words(text, "p") == [
        "p:1: cost_usdd", "p:1: outputs_mising", "p:1: succeded", "p:1: job.run_time",
    ]  # fmt: skip
    assert vocabulary.unknown_variables(text, "p") == ["p:1: GPU_OUTPUTS_DIR"]


@pytest.mark.subprocess
@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_what_its_language_and_our_readers_accept(block, tmp_path: Path) -> None:
    if block.language == "json" and block.info:
        assert vocabulary.record_problems(block.text, block.info) == []
    elif block.language == "json":
        assert vocabulary.sample_problem(block.text) is None
    elif block.language == "yaml":
        _read(block.text, tmp_path)
    elif block.language == "python":
        ast.parse(block.text)
    else:
        done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("sample", "word"),
    [
        ('{"job": "J-000001", "state": "succeeded", "cost": 1}', "/cost "),
        ('{"job": "J-000001", "state": "completed", "exit_code": 0}', "completed"),
        ('{"job": "J-000001", "outputs": [{"path": "a", "size": 1}], "collected": true}', "/outputs/-/size"),
        ('{"job": }', "not JSON"),
    ],
)
def test_a_sample_with_a_wrong_field_or_state_is_found(sample: str, word: str) -> None:
    assert word in vocabulary.sample_problem(sample)


def test_an_exit_code_that_does_not_belong_to_its_error_is_found() -> None:
    text = "right (exit 3, `not_collected`), wrong (exit 2,\n`not_collected`), (exit 1, `not_colected`)"
    assert vocabulary.wrong_exits(text, "p") == [
        "p: not_collected ends with 3, not 2",
        "p: not_colected ends with nothing: there is no such code, not 1",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT / "skills")))
def test_the_records_a_page_shows_pass_the_checks_together(page: Path, tmp_path: Path, fake_clock) -> None:
    """As files of one project: the rules that no schema has, such as `ready` only after a test generation."""
    from gpu_skills.state import project as projects
    from gpu_skills.state import registry
    from gpu_skills.state.ledger import Ledger

    project = projects.init(tmp_path)
    shown = [fence for fence in fences(page.read_text(encoding="utf-8")) if fence.info]
    for fence in shown:
        text = f"[{fence.text}]" if fence.info.endswith(".json") and fence.text.startswith("{") else fence.text
        (project.state / fence.info).write_text(text + "\n", encoding="utf-8")
    assert [str(problem) for problem in registry.validate(project)] == []
    verified = Ledger(project, fake_clock).verify()
    assert (verified.problems, verified.warning_count) == ([], 0)


@pytest.mark.parametrize(
    ("text", "file", "word"),
    [
        ('[{"id": "dep_1", "provider": "ssh", "status": "redy"}]', "deployments.json", "ready"),
        ('{"id": "dep_1", "provider": "ssh", "status": "ready", "endpont": "x"}', "deployments.json", "/endpont"),
        ('{"id": "J-000001", "status": "succeeded", "ts": "2026-11-30T10:00:00Z"}', "jobs.jsonl", "completed"),
        ('{"id": "J-000001",\n "status": "lost"}', "jobs.jsonl", "not JSON"),
        ("{}", "deployment.json", "there is no deployment.json"),
    ],
)
def test_a_record_that_no_file_may_hold_is_found(text: str, file: str, word: str) -> None:
    found = vocabulary.record_problems(text, file)
    assert found and word in found[0]


@pytest.mark.parametrize(("heading", "schema"), [("deployment", "deployments"), ("machine", "machines")])
def test_the_tables_of_states_have_every_state_and_lead_to_states_only(heading: str, schema: str) -> None:
    from gpu_skills import schemas

    text = (ROOT / "skills" / "gpu-ops" / "SKILL.md").read_text(encoding="utf-8")
    states = schemas.load(schema)["properties"]["status"]["enum"]
    assert sorted(vocabulary.first_column(text, heading)) == sorted(states)
    rows = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0].split("\n")[2:]
    leads_to = {word for row in rows for word in re.findall(r"`(\w+)`", row.rstrip("|").rsplit("|", 1)[1])}
    assert leads_to <= set(states)
    assert all(f"`{word}`" in text for word in states)


def test_a_yaml_block_with_a_wrong_key_is_found(tmp_path: Path) -> None:
    from gpu_skills.errors import ConfigError

    with pytest.raises(ConfigError, match="expects"):
        _read("# gpujob.yaml\nrun: true.sh\nexpects: [a]\n", tmp_path)


def _read(text: str, folder: Path) -> None:
    """Put the block into the file that its first line names, and read it as `gpu` does."""
    from gpu_skills import config
    from gpu_skills.jobs.spec import load_spec

    name = text.split("\n", 1)[0].removeprefix("# ").strip()
    (folder / name).write_text(text, encoding="utf-8")
    readers = {
        "gpu.yaml": lambda: config.load_gpu_yaml(folder, environ={}),
        "hosts.yaml": lambda: config.load_hosts(folder, environ={}),
        "gpujob.yaml": lambda: load_spec(folder, environ={}),
    }
    assert name in readers, "the first line of a YAML block names its file"
    readers[name]()
