"""Every `gpu` command that a Markdown file or a template quotes exists, with its flags and arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from quoted_commands import Quoted, commands_of, fences, problem_of, problems, quoted_commands, texts

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*texts(ROOT, ".md"), *texts(ROOT / "templates", ".yaml", ".json"), *texts(ROOT / "examples", ".yaml", ".sh")]


@pytest.fixture(autouse=True)
def no_debug_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing `--debug` opens the log at once; here it must not."""
    monkeypatch.setattr("gpu_skills.cli.debuglog.start", lambda environ: None)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_a_page_quotes_is_one_the_command_line_takes(page: Path) -> None:
    found = quoted_commands(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    assert problems(found) == []


@pytest.mark.parametrize("name", ["README.md", "AGENTS.md", "skills/gpu-jobs/SKILL.md", "docs/cli.md"])
def test_the_pages_people_start_from_do_quote_commands(name: str) -> None:
    """An extractor that finds nothing would pass everything."""
    assert len(quoted_commands((ROOT / name).read_text(encoding="utf-8"), name)) >= (1 if name == "AGENTS.md" else 8)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("`gpu job run --no-such-flag -- true`", "--no-such-flag"),
        ("`gpu job start`", "start"),
        ("`gpu jobs ls`", "jobs"),
        ("`scripts/gpu job run --detatch -- true`", "--detatch"),
        ("`gpu job status|stauts`", "stauts"),
        ("`gpu job status J-000001 J-000002`", "unexpected extra argument"),
        ("`gpu job logs --tail none`", "--tail"),
        ("`gpu login vault`", "vault"),
        ("`gpu job run\n--detatch -- true` wrapped over two lines", "--detatch"),
        ("| a table | `gpu job pull --too PATH` |", "--too"),
        ("```sh\ngpu init --jobs\ngpu setup --force\n```", "--force"),
        ("```console\n$ gpu job ls --limt 3\nJOB  STATE\n```", "--limt"),
        ("```\ngpu job run --dri examples\n```", "--dri"),
        ("```bash\nif ! gpu job status --jsno; then exit 1; fi\n```", "--jsno"),
        ("```sh\nid=$(gpu job run --detach --jsn -- true | jq -r .job)\n```", "--jsn"),
        ("```sh\ngpu job run \\\n  --detatch -- true\n```", "--detatch"),
        ("```sh\ncd x && GPU_MODE=audit gpu statsu > out.txt 2>&1\n```", "statsu"),
        ("```sh\ngpu job   # a comment does not make it whole: it's a group\n```", "group"),
        ("1. in a list\n\n   ```sh\n   gpu offers --cheap\n   ```", "--cheap"),
    ],
)
def test_a_wrong_command_is_found_wherever_it_stands(text: str, word: str) -> None:
    found = problems(quoted_commands(text, "page.md"))
    assert len(found) == 1, found
    assert word in found[0]
    assert found[0].startswith("page.md:")


@pytest.mark.parametrize(
    "text",
    [
        "`gpu job run -- CMD`",
        "`gpu job …` and `gpu …`",
        "`gpu job status [JOB]`",
        "`gpu job status|logs|pull`",
        "`gpu login`",  # inline, a name without its argument
        "`gpu job run --help`",
        "`gpu --version`",
        "`gpu job run -- --not-our-flag`",
        "``gpu job run -- 'echo `date`'``",
        "```python\ngpu = 'gpu nonsense'\n```",
        "```sh\ncat > run.sh <<'END'\ngpu nonsense\nEND\ngpu job ls\n```",
        "```console\n$ gpu job ls\ngpu nonsense that is output\n```",
        "```sh\n# gpu nonsense in a comment\n```",
    ],
)
def test_what_is_right_or_no_command_is_left_alone(text: str) -> None:
    assert problems(quoted_commands(text, "page.md")) == []


@pytest.mark.parametrize(
    ("line", "commands"),
    [
        ("printenv HF_TOKEN | gpu login hf", ["gpu login hf"]),
        ("gpu setup && gpu job run -- 'a | b'", ["gpu setup", "gpu job run -- 'a | b'"]),
        ("while gpu job status --json | jq -e .collected; do sleep 1; done", ["gpu job status --json"]),
        ('for j in $(gpu job ls --json | jq -r .jobs[].job); do gpu job pull "$j"; done',
         ["gpu job ls --json", "gpu job pull '$j'"]),
        ("(cd sub; ./scripts/gpu status) >log 2>&1", ["gpu status"]),
        ("echo gpu job run", []),
        ("mygpu job run", []),
    ],
)  # fmt: skip
def test_a_line_of_shell_is_taken_apart(line: str, commands: list[str]) -> None:
    assert commands_of(line) == commands


def test_a_block_knows_where_it_stands_and_a_longer_fence_holds_a_shorter_one() -> None:
    text = "text\n\n````markdown\n```sh\ngpu nonsense\n```\n````\n\n```sh\ngpu job ls\n```\n"
    assert [(f.language, f.line) for f in fences(text)] == [("markdown", 3), ("sh", 9)]
    assert quoted_commands(text, "p") == [Quoted("p:10", "gpu job ls", inline=False)]


def test_nothing_is_run_while_a_command_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem_of(Quoted("p:1", "gpu init --jobs", inline=False)) is None
    assert list(tmp_path.iterdir()) == []
