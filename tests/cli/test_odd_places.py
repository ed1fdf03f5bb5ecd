"""Projects and homes in places that nobody would choose."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.subprocess


@pytest.mark.parametrize("name", [b"no\xfftext", b"quote'; $(x)", b"line\nbreak", b"-dash", b"\x1b[2Jred"])
def test_a_project_may_lie_in_a_directory_of_any_name(tmp_path, gpu, name):
    project = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    project.mkdir()
    assert gpu("init", "--jobs", cwd=project).exit_code == 0
    ran = gpu("job", "run", "--json", "--", "echo x > $GPU_OUTPUT_DIR/a", cwd=project)
    assert ran.exit_code == 0, ran.stderr
    assert (project / "gpu-outputs/J-000001/a").read_text() == "x\n"
    status = gpu("job", "status", "--json", cwd=project).document
    assert status["collected"] and status["outputs_dir"].endswith("gpu-outputs/J-000001")
    shown = gpu("status", cwd=project)
    assert shown.exit_code == 0 and "\x1b" not in shown.stdout
    assert gpu("destroy", "--json", cwd=project).exit_code == 0
    for line in (project / ".pi/gpu/jobs.jsonl").read_bytes().splitlines():
        json.loads(line.decode("utf-8"))


def test_a_home_that_is_a_file_has_no_settings(tmp_path, gpu, monkeypatch):
    home = tmp_path / "home-file"
    home.write_text("")
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    assert gpu("init", "--jobs").exit_code == 0
    ran = gpu("job", "run", "--", "exit 3")
    assert ran.exit_code == 3, ran.stderr


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_demo_that_has_no_place_says_so(tmp_path, gpu, place):
    (tmp_path / "file").write_text("mine")
    result = gpu("demo", "--json", "--dir", place)
    assert (result.exit_code, result.error["code"]) == (1, "not_writable")
    assert (tmp_path / "file").read_text() == "mine"
