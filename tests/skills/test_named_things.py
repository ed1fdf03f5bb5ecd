"""Fields, states, reasons, error codes, variables and samples that a skill shows are real."""

from __future__ import annotations

import ast
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


def test_a_name_that_is_nearly_right_is_found() -> None:
    text = "`cost_usdd` `outputs_mising` `succeded` `job.run_time` `exit_code` and `$GPU_OUTPUTS_DIR` `HF_HOME`"
    assert vocabulary.unknown_words(text, "p") == [
        "p:1: cost_usdd", "p:1: outputs_mising", "p:1: succeded", "p:1: job.run_time",
    ]  # fmt: skip
    assert vocabulary.unknown_variables(text, "p") == ["p:1: GPU_OUTPUTS_DIR"]


@pytest.mark.subprocess
@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_what_its_language_and_our_readers_accept(block, tmp_path: Path) -> None:
    if block.language == "json":
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
