"""What reaches a person's terminal, whatever a machine, a file name or a locale does."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_skills.cli import output

pytestmark = pytest.mark.subprocess


@pytest.mark.parametrize("write", [output.print_text, output.say])
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("title \x1b]0;x\x07", "title \\x1b]0;x\\x07"),
        ("one byte \x9b31m", "one byte \\x9b31m"),
        ("over\rwritten", "over\\rwritten"),
        ("right to left \u202e", "right to left \\u202e"),
        ("no text \udcff", "no text \\udcff"),
        ("two\nlines\tand a tab, é × …", "two\nlines\tand a tab, é × …"),
    ],
)
def test_no_control_sequence_reaches_the_terminal_raw(write, given, shown, capsys):
    write(given)
    out, err = capsys.readouterr()
    assert out + err == shown + "\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_terminal_that_is_not_utf8_gets_what_it_can_show(name, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding="ascii"))
    (output.print_text if name == "stdout" else output.say)("1 × é")
    assert raw.getvalue() == b"1 \\xd7 \\xe9\n"


def test_names_that_a_job_gives_its_outputs_are_shown_escaped(tmp_path, gpu):
    assert gpu("init", "--jobs").exit_code == 0
    (tmp_path / "make.sh").write_text(
        'cd "$GPU_OUTPUT_DIR"; mkfifo "$(printf \'\\033]0;pipe\\007\')"; echo x > "$(printf \'\\033[2Jfile\')"\n'
    )
    ran = gpu("job", "run", "--", "bash", "make.sh")
    assert ran.exit_code == 0 and "pipe" in ran.stderr
    shown = gpu("job", "status")
    assert "\\x1b[2Jfile" in shown.stdout
    assert "\x1b" not in ran.stdout + ran.stderr + shown.stdout + shown.stderr
    assert os.listdir(tmp_path / "gpu-outputs/J-000001") == ["\x1b[2Jfile"]


def shell(tmp_path: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `$GPU` is the command line, as a process of its own."""
    scripts = Path(output.__file__).parents[2]
    environ = {
        **os.environ,
        "GPU": f"{sys.executable} {scripts}/gpu_skills/__main__.py",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def project(tmp_path, gpu):
    assert gpu("init", "--jobs").exit_code == 0
    return tmp_path


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_job_runs_also_where_standard_streams_are_closed(project, closed):
    ran = shell(project, f"$GPU job run -- 'echo hi; echo x > $GPU_OUTPUT_DIR/a; exit 9' {closed}")
    assert ran.returncode == 9, ran.stderr
    assert (project / "gpu-outputs/J-000001/a").read_text() == "x\n"
    assert (project / ".pi/gpu/jobs/J-000001/log").read_text() == "hi\n"


def test_a_reader_that_goes_away_is_no_failure_but_never_counts_as_a_jobs_success(project):
    ran = shell(project, "$GPU job run -- 'seq 200000' | head -1; echo ${PIPESTATUS[0]}")
    assert ran.stdout == "1\n125\n" and ran.stderr.splitlines()[-1].endswith("[output_lost]")
    listed = shell(project, "$GPU job ls | true; echo ${PIPESTATUS[0]}")
    assert listed.stdout == "0\n" and "Traceback" not in listed.stderr and "Exception ignored" not in listed.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_said_once(project):
    for command, code in (("status", 1), ("status --json", 1), ("job run -- 'echo hi'", 125)):
        ran = shell(project, f"$GPU {command} > /dev/full")
        assert ran.returncode == code, ran.stderr
        last = ran.stderr.splitlines()[-1]
        assert "No space left" in last and last.endswith("[output_lost]")
    assert shell(project, "$GPU job run -- 'echo hi; exit 5' 2> /dev/full").returncode == 5
