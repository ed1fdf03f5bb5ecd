"""What reaches a person's terminal, whatever a machine, a file name or a locale does."""

from __future__ import annotations

import io
import os
import sys

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
