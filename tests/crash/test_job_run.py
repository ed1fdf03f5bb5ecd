"""The process dies before and after every door of a job run; later commands find everything in order."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from pathlib import Path

import pytest

from gpu_skills import doors
from gpu_skills.cli import main
from gpu_skills.cli.context import Context

pytestmark = pytest.mark.subprocess
PARTS = 6


class Died(BaseException):
    """The process is gone: nothing of ours may catch this."""


class Killer:
    """Counts crossings and dies at the k-th: before it (even) or after it (odd)."""

    def __init__(self, at: int | None):
        self.at, self.count, self.log = at, 0, []

    def __call__(self, name: str, moment: str) -> None:
        self.log.append((name, moment))
        if self.count == self.at:
            doors.watch(None)
            raise Died(f"{moment} {name}")
        self.count += 1


def gpu(project: Path, *args: str) -> tuple[int, dict]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main.run([*args, "--json"], obj=Context(cwd=project, environ=dict(os.environ)))
    lines = out.getvalue().splitlines()
    return code, json.loads(lines[-1]) if lines else {}


def run_job(project: Path, killer: Killer) -> None:
    doors.watch(killer)
    context = Context(cwd=project, environ=dict(os.environ))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main.run(["job", "run", "--json"], obj=context)
    except Died:
        context.close()
    finally:
        doors.watch(None)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    gpu(tmp_path, "init", "--jobs")
    (tmp_path / "gpujob.yaml").write_text("run: echo x > $GPU_OUTPUT_DIR/x\n")
    return tmp_path


def crossings(project: Path) -> int:
    killer = Killer(None)
    run_job(project, killer)
    return killer.count


def check(project: Path) -> None:
    """Whatever happened: the files read, no job has two ends, an ended one can be pulled, and a new one runs."""
    deadline = time.monotonic() + 20
    while gpu(project, "status")[1]["running_jobs"] and time.monotonic() < deadline:
        gpu(project, "job", "ls")
        time.sleep(0.05)
    status = gpu(project, "status")[1]
    assert status["running_jobs"] == []
    ledger = project / ".pi/gpu/jobs.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    for job in {line["id"] for line in lines}:
        words = [line["status"] for line in lines if line["id"] == job]
        assert words[0] == "running" and len(words) == 2, words
        if words[1] == "completed":
            code, pulled = gpu(project, "job", "pull", job)
            assert code == 0 and pulled["final"], pulled
            assert (project / "gpu-outputs" / job / "x").read_text() == "x\n"
        else:
            assert words[1] == "lost"
    assert gpu(project, "doctor")[1]["problems"] == 0
    code, document = gpu(project, "job", "run")
    assert code == 0 and document["collected"], document
    assert gpu(project, "destroy")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_death_at_every_door_of_a_job_run_loses_nothing_and_blocks_nothing(project: Path, part: int) -> None:
    total = crossings(project)
    assert total > 30
    for k in range(part, total, PARTS):
        run_job(project, Killer(k))
        check(project)


def test_death_at_some_doors_of_a_job_run_loses_nothing_and_blocks_nothing(project: Path) -> None:
    total = crossings(project)
    for k in range(total // 3, total, total // 2):
        run_job(project, Killer(k))
        check(project)
