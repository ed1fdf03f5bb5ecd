"""What a person sees: a status line and bars on a terminal, and nothing of them anywhere else."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_skills.cli.bottom_rows import BottomRows
from gpu_skills.cli.job_view import progress_text
from gpu_skills.cli.progress import Pace
from gpu_skills.resources import PACKAGE
from terminal import OnTerminal, Screen

LINES = [f"line {n}" for n in range(1, 6)]
TALKING = 'for n in 1 2 3 4 5; do echo "progress rows=${n}200"; echo "line $n"; sleep 0.3; done'
SHOWN = [text for n in range(1, 6) for text in (f"progress rows={n}200", f"line {n}")]


# rows below a text that scrolls ---------------------------------------------------------------------------------


def drawn(write: Callable[[BottomRows, io.StringIO], object], rows: Callable[[], list[str]]) -> io.StringIO:
    screen = io.StringIO()
    with BottomRows(screen, rows, tick_s=3600) as bottom:
        write(bottom, screen)
    return screen


def test_text_scrolls_above_the_rows_and_nothing_of_them_is_left() -> None:
    def write(bottom: BottomRows, screen: io.StringIO) -> None:
        for text in LINES:
            bottom.above(lambda text=text: screen.write(text + "\r\n"))
            assert Screen(80).feed(screen.getvalue()).text[-2:] == ["unfinished", "status"]

    screen = drawn(write, lambda: ["unfinished", "status"])
    assert Screen(80).feed(screen.getvalue()).text == LINES


@pytest.mark.parametrize(
    "row", ["x" * 300, "漢" * 100, "e\u0301" * 200, "a\tb" * 50], ids=["long", "wide", "marks", "tabs"]
)
def test_a_row_takes_one_line_however_long_it_is(row: str) -> None:
    def write(bottom: BottomRows, screen: io.StringIO) -> None:
        bottom.above(lambda: screen.write("text\r\n"))
        assert len(Screen(80).feed(screen.getvalue()).text) == 2

    assert Screen(80).feed(drawn(write, lambda: [row]).getvalue()).text == ["text"]


def test_rows_that_come_and_go_are_erased_as_they_were_drawn() -> None:
    rows = [["one"], ["one", "two"], ["one", "two", "three"], []]
    left = list(rows)

    def write(bottom: BottomRows, screen: io.StringIO) -> None:
        for expected in rows:
            bottom.above(lambda: screen.write("text\r\n"))
            assert Screen(80).feed(screen.getvalue()).text[-len(expected) :] == (expected or ["text"] * 4)

    assert Screen(80).feed(drawn(write, lambda: left.pop(0)).getvalue()).text == ["text"] * 4


def test_the_rate_is_that_of_late_and_is_not_told_from_a_moment() -> None:
    pace = Pace()
    assert pace.rate_per_s(0.0, 1_000_000) is None and pace.rate_per_s(0.1, 900_000_000) is None
    assert pace.rate_per_s(10.0, 11_000_000) == 1_000_000
    for second in range(11, 41):
        rate = pace.rate_per_s(float(second), 11_000_000 + 500 * (second - 10))
    assert rate == pytest.approx(500)


@pytest.mark.parametrize(
    ("value", "rate", "stalled_s", "text"),
    [
        (1200, 45.31, 0.2, "1,200 rows, 45.3/s"),
        (12_345_678, 12_345.6, 0, "12,345,678 rows, 12,346/s"),
        (0.25, 0.00321, 5, "0.25 rows, 0.00321/s"),
        (3, None, 1, "3 rows"),
        (3, 4.0, 130, "3 rows, no more for 2m10s"),
    ],
)
def test_progress_reads_as_a_person_writes_it(value: float, rate: float | None, stalled_s: float, text: str) -> None:
    assert progress_text({"unit": "rows", "value": value, "rate_per_s": rate, "stalled_s": stalled_s}) == text


def test_a_unit_that_a_program_chose_cannot_steer_the_terminal() -> None:
    text = progress_text({"unit": "\x1b]0;mine\x07", "value": 1, "rate_per_s": None, "stalled_s": 0})
    assert text.isprintable()


# the real command on a pseudo-terminal ------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, gpu) -> Iterator[Path]:
    (tmp_path / "project").mkdir()
    assert gpu("init", "--jobs", cwd=tmp_path / "project").exit_code == 0
    yield tmp_path / "project"
    gpu("job", "cancel", cwd=tmp_path / "project")


@pytest.fixture
def on_terminal(project: Path) -> Iterator[Callable[..., OnTerminal]]:
    started: list[OnTerminal] = []

    def start(*args: str, term: str = "xterm", **settings) -> OnTerminal:
        environ = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "TERM": term}
        started.append(OnTerminal(args, cwd=project, environ=environ, **settings))
        return started[-1]

    yield start
    for program in started:
        program.close()


@pytest.mark.subprocess
def test_a_status_line_stands_below_the_log_while_the_job_runs_and_is_gone_afterwards(on_terminal) -> None:
    program = on_terminal("job", "run", "--timeout", "10m", "--", TALKING)
    assert program.end() == 0
    status = re.compile(r"── J-000001 run · \ds of 10m00s · [\d,]+00 rows[^·]* · \$0\.00")
    assert status.search(program.sent)
    shown = program.screen
    assert [line for line in shown if line in SHOWN] == SHOWN
    assert not any("──" in line for line in shown)
    assert shown[-1].startswith("J-000001 succeeded, exit 0")


@pytest.mark.subprocess
def test_a_line_that_is_rewritten_moves_above_the_status_line_and_stands_once_in_the_end(on_terminal) -> None:
    moving = r"for n in 1 2 3 4; do printf '\rbatch %s of 4' $n; sleep 0.4; done; echo; echo end"
    program = on_terminal("job", "run", "--", moving)
    program.read_until(lambda sent: re.search(r"batch [234] of 4\r+\n\x1b\[2m── J-000001", sent) is not None)
    assert program.end() == 0
    assert [line for line in program.screen if "batch" in line] == ["batch 4 of 4"]


@pytest.mark.subprocess
def test_a_log_that_goes_to_a_file_has_nothing_of_the_status_line(on_terminal, tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as file:
        program = on_terminal("job", "run", "--", TALKING, stdout=file.fileno())
        assert program.end() == 0
    assert "── J-000001 run" in program.sent
    assert (tmp_path / "log").read_text().splitlines() == SHOWN


@pytest.mark.subprocess
@pytest.mark.parametrize("case", ["json", "dumb", "no terminal for stderr"])
def test_nothing_moves_in_json_or_where_nobody_could_see_it(on_terminal, tmp_path: Path, case: str) -> None:
    args = ["job", "run", *(["--json"] if case == "json" else []), "--", TALKING]
    with open(tmp_path / "stderr", "wb") as file:
        stderr = file.fileno() if case.startswith("no") else None
        program = on_terminal(*args, term="dumb" if case == "dumb" else "xterm", stderr=stderr)
        assert program.end() == 0
    everything = program.sent + (tmp_path / "stderr").read_text()
    assert "\x1b" not in everything and "──" not in everything and "\r" not in everything.replace("\r\n", "")
    if case == "json":
        assert json.loads(program.sent.splitlines()[-1])["state"] == "succeeded"


@pytest.mark.subprocess
def test_ctrl_c_stops_watching_with_one_clean_line_and_the_job_goes_on(on_terminal, project: Path, gpu) -> None:
    program = on_terminal("job", "run", "--", "echo begun; sleep 300", width=120)
    program.read_until(lambda sent: "begun" in sent and "── J-000001 run" in sent)
    program.interrupt()
    assert program.end() == 130
    assert program.screen[-2:] == [
        "begun",
        "gpu: stopped watching, J-000001 goes on; next: gpu job logs -f J-000001, or gpu job cancel J-000001",
    ]
    assert gpu("job", "status", "--json", cwd=project).document["state"] == "running"


@pytest.mark.subprocess
def test_ctrl_c_with_json_still_gives_the_job_and_that_it_runs(on_terminal) -> None:
    program = on_terminal("job", "run", "--json", "--", "echo begun; sleep 300")
    program.read_until(lambda sent: "begun" in sent)
    program.interrupt()
    assert program.end() == 130
    document = json.loads(program.sent.splitlines()[-1])
    assert (document["job"], document["state"]) == ("J-000001", "running")
    assert document["next_step"] == "gpu job logs -f J-000001"
