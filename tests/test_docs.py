"""The documentation says what is: generated pages are current, links lead somewhere, advice names real commands."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from quoted_commands import Quoted, fences, problems, quoted_commands, texts, without_fences

ROOT = Path(__file__).resolve().parents[1]
PAGES = texts(ROOT, ".md")
PACKAGE = ROOT / "scripts" / "gpu_skills"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Advice inside a message: the whole text, or what follows "next: ", "run: ", "then: " and the like.
ADVICE = re.compile(r"(?:^|: |\(|, or |, then )(gpu [a-z](?:(?!, |; | or | with | shows |\n|\)).)*)", re.MULTILINE)


@pytest.mark.parametrize("page", ["cli", "errors", "state-files"])
def test_the_generated_pages_are_current(page: str) -> None:
    from gpu_skills.cli import reference

    assert (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") == reference.PAGES[page](), "run docs/generate"


def test_the_reference_has_every_command_and_every_error_code() -> None:
    from gpu_skills.cli import reference

    commands = [" ".join(path) for path, _ in reference.leaves()]
    assert {"gpu init", "gpu job run", "gpu machine ls"} <= set(commands)
    page = reference.cli_reference()
    assert [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")] == commands
    codes = {error.code for error in reference.coded_errors()}
    assert {"secret_shaped", "start_refused", "demo_failed"} <= codes, "also those that stand beside their raise"
    assert set(re.findall(r"^\| `(\w+)` \|", reference.error_reference(), re.MULTILINE)) == codes


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_and_a_broken_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# One `code` thing\n[x](b.md) [y](#one-code-thing) [z](#two) [w](a.md#one) <https://x> [v](https://y)\n"
    )
    assert broken_links(page) == ["b.md", "#two", "a.md#one"]


def broken_links(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(without_fences(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in headings(target)):
            found.append(link)
    return found


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", without_fences(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


SOURCE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py)`")


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name in ("docs", "decisions")], ids=lambda p: p.name)
def test_every_module_a_page_names_exists(page: Path) -> None:
    named = SOURCE.findall(page.read_text(encoding="utf-8"))
    assert [name for name in named if not any((base / name).exists() for base in (ROOT, PACKAGE))] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        if page.is_dir():
            waiting += sorted(page.glob("*.md"))
        elif page.suffix == ".md":
            links = LINK.findall(without_fences(page.read_text(encoding="utf-8")))
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links if "://" not in link]
    assert [str(p.relative_to(ROOT)) for p in PAGES if p.is_relative_to(ROOT / "docs") and p not in reached] == []


# advice in messages ---------------------------------------------------------------------------------------------------


def advice(text: str) -> list[str]:
    """The commands a message tells people to run."""
    return [match[1].rstrip(" .,:") for match in ADVICE.finditer(text) if not match[1].startswith("gpu itself")]


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts of a module that are not docstrings, with the fields of a format as X."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "X" for p in node.values]
            yield node.lineno, "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in inside and id(node) not in docstrings:
                yield node.lineno, re.sub(r"\{\w+\}", "X", node.value)


def test_every_command_that_a_message_advises_exists() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "sandbox":  # the vendors' own words, such as "gpu type not found"
            continue
        for line, text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            for command in advice(text):
                where = f"{path.relative_to(PACKAGE)}:{line}"
                # "…": a message may leave out what the reader knows better.
                found.append(Quoted(where, f"{_closed(command)} …", inline=True))
    assert len(found) > 40
    assert problems(found) == []


def _closed(command: str) -> str:
    """Without a quotation that was cut off in its middle, and with a login that there is."""
    command = re.sub(r"\b(login|show|put) X\b", lambda m: {"login": "login hf"}.get(m[1], f"{m[1]} machines"), command)
    try:
        shlex.split(command)
    except ValueError:
        return re.split("['\"]", command, maxsplit=1)[0]
    return command


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("gpu job pull X", ["gpu job pull X"]),
        ("edit X, then: gpu doctor", ["gpu doctor"]),
        ("next: gpu setup, then gpu job run -- CMD", ["gpu setup", "gpu job run -- CMD"]),
        ("stopped. next: gpu job logs -f X, or gpu job cancel X", ["gpu job logs -f X", "gpu job cancel X"]),
        ("raise it (gpu doctor --config shows where)", ["gpu doctor --config"]),
        ("125 gpu itself failed", []),
    ],
)
def test_advice_is_found_in_a_message(text: str, commands: list[str]) -> None:
    assert advice(text) == commands


def test_wrong_advice_is_found() -> None:
    tree = ast.parse(
        'class E:\n    """Docstring: gpu nonsense."""\n    next_step = "mend it, then: gpu machine forgt {id}"\n'
    )
    [(line, text)] = messages(tree)
    [problem] = problems([Quoted(f"e.py:{line}", c, inline=True) for c in advice(text)])
    assert "forgt" in problem


# walkthroughs ---------------------------------------------------------------------------------------------------------


@pytest.mark.subprocess
def test_the_tour_of_the_readme_works_as_it_is_written(tmp_path: Path, home: Path) -> None:
    """The blocks for this machine, one after the other in one shell, with the interpreter of the tests as `gpu`."""
    checkout = tmp_path / "checkout"
    launcher = checkout / "scripts" / "gpu"
    launcher.parent.mkdir(parents=True)
    python = f"PYTHONPATH={shlex.quote(str(ROOT / 'scripts'))} exec {shlex.quote(sys.executable)}"
    launcher.write_text(f'#!/bin/sh\n{python} -m gpu_skills "$@"\n')
    launcher.chmod(0o755)
    tour = _section((ROOT / "README.md").read_text(encoding="utf-8"), "Three minutes")
    blocks = [fence.text for fence in fences(tour) if fence.language == "sh" and "ssh" not in fence.text]
    assert len(blocks) == 3
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)],
        cwd=checkout,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = home / "gpu-tour" / "gpu-outputs"
    assert (outputs / "J-000001" / "squares.json").read_text() == "[0, 1, 4, 9, 16]"
    assert (outputs / "J-000002" / "done").stat().st_size > 0
    assert "step 3" in done.stdout
    assert "Traceback" not in done.stderr


def _section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_the_readme_begins_with_what_it_is_for_and_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    what_for = text.split("\n\n")[1]
    assert len(what_for.splitlines()) <= 5
    first = next(fence for fence in fences(text))
    assert re.findall(r"^scripts/\w+", first.text, re.MULTILINE) == ["scripts/gpu", "scripts/test"]
    assert len(quoted_commands(text, "README.md")) > 10


# the inventory --------------------------------------------------------------------------------------------------------


def test_the_inventory_of_this_repository_is_dated_and_adds_up() -> None:
    text = (ROOT / "GPU_INSTANCES.md").read_text(encoding="utf-8")
    assert inventory_problems(text) == []


ROW = "| vast:46607014 | image-server | 1234 | RTX 4090 | DE | ready | 0.35 | audit 2026-11-30T18:08Z |"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("Last updated: 2026", "Last updated: soon, 2026"), "no date"),
        (("|---|\n\n## Stopped", f"|---|\n{ROW}\n\n## Stopped"), "total burn is 0.35 and 252.00, not 0.00 and 0.00"),
        (("|---|\n\n## Stopped", "|---|\n| – | – | – | – | – | – | – | – |\n\n## Stopped"), "'–' is no instance"),
        (("| region |", "| place |"), "columns"),
    ],
)
def test_an_inventory_that_does_not_add_up_is_found(change: tuple[str, str], problem: str) -> None:
    text = (ROOT / "GPU_INSTANCES.md").read_text(encoding="utf-8")
    assert change[0] in text
    assert problem in " · ".join(inventory_problems(text.replace(change[0], change[1], 1)))


def inventory_problems(text: str) -> list[str]:
    """What keeps an inventory from being read by people and programs alike."""
    found = []
    if not re.search(r"^Last updated: \d{4}-\d\d-\d\d$", text, re.MULTILINE):
        found.append("no date")
    burn = Decimal(0)
    for rate in ("rate USD/h", "storage USD/h"):
        columns = f"| instance | workload | machine | GPU | region | status | {rate} | evidence |"
        head = f"{columns}\n{'|---' * 8}|\n"
        if head not in text:
            found.append(f"the columns of the table with {rate} are others")
            continue
        for row in itertools.takewhile(lambda line: line.startswith("|"), text.split(head, 1)[1].splitlines()):
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            if not re.fullmatch(r"[a-z0-9]+:\S+", cells[0]):
                found.append(f"{cells[0]!r} is no instance")
            else:
                burn += Decimal(cells[6])
    total = re.search(r"^Total burn: ([\d.]+) USD/h, ([\d.]+) USD in 30 days$", text, re.MULTILINE)
    if not total or (Decimal(total[1]), Decimal(total[2])) != (burn, burn * 720):
        said = f"{total[1]} and {total[2]}" if total else "said"
        found.append(f"total burn is {burn:.2f} and {burn * 720:.2f}, not {said}")
    return found
