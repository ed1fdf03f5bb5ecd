from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_skills.state import project as projects

SCRIPTS = Path(projects.__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path) -> projects.Project:
    return projects.init(tmp_path / "work", project_id="p-test")


@pytest.fixture
def spawn(allow_subprocess: None) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a Python program with the package on its path; whatever is still running at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            env={"PYTHONPATH": str(SCRIPTS), "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
