"""A ledger of a million lines: what it costs to ask, to check and to go on, beside `jq -s` on the same file."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import HERE, Figure, in_turn

GPU = HERE.parent / "scripts" / "gpu"
LINES = int(os.environ.get("GPU_BENCHMARK_LINES", "1000000"))
PUBLISHED = 'map(select(.status=="completed")) | map(.cost_usd // 0) | add'
MAX_SPEND_MB = 100
APPENDS = 4800
PROCESSES = 16


def main() -> list[Figure]:
    sys.path.insert(0, str(HERE.parent / "scripts"))
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as folder:
        return [*_million_lines(Path(folder)), *_appends(Path(folder))]


def _million_lines(folder: Path) -> list[Figure]:
    jq = shutil.which("jq")
    if jq is None:
        print("ledger: no jq here, nothing to compare with", file=sys.stderr)
        return []
    project = folder / "project"
    project.mkdir()
    _run(GPU, "init", "--jobs", "--provider", "local", cwd=project)
    ledger = project / ".pi" / "gpu" / "jobs.jsonl"
    _write_ledger(ledger, LINES)
    slurp_s = _seconds(lambda: _run(jq, "-s", PUBLISHED, ledger, cwd=project))

    def cold() -> None:
        ledger.with_name("jobs.spend.json").unlink(missing_ok=True)
        _run(GPU, "spend", "--status", "completed", "--json", cwd=project)

    cold_s = min(_seconds(cold) for _ in range(3))
    peak_mb = _peak_mb(ledger)
    if peak_mb > MAX_SPEND_MB:
        raise SystemExit(f"gpu spend took {peak_mb:.0f} MB, allowed are {MAX_SPEND_MB}")
    verify = f"{_OPEN}; found = book.verify(); assert found.ok, found.problems"
    reseal = f"{_OPEN}; book.reseal('benchmark')"
    _run(sys.executable, "-c", reseal, project, cwd=project)
    verify_s = _seconds(lambda: _run(sys.executable, "-c", verify, project, cwd=project))
    _run(GPU, "spend", "--json", cwd=project)

    def append() -> None:
        _run(
            sys.executable,
            "-c",
            f"{_OPEN}; book.append([{{'status': 'failed', 'cost_usd': 0.1}}])",
            project,
            cwd=project,
        )

    after = in_turn(
        {
            "spend": lambda: _run(GPU, "spend", "--json", cwd=project),
            "help": lambda: _run(GPU, "--help", cwd=project),
        },
        rounds=7,
        before=append,
    )
    size = f"{LINES:,} lines"
    return [
        Figure(f"gpu spend, {size}, nothing cached, {peak_mb:.0f} MB", cold_s, "jq -s", slurp_s, limit=1 / 15),
        Figure(f"ledger verify, {size}", verify_s, "jq -s", slurp_s, limit=0.5),
        Figure("gpu spend after one more append", after["spend"], "gpu --help", after["help"], limit=3),
    ]


def _appends(folder: Path) -> list[Figure]:
    figures = []
    for count in (1, PROCESSES):
        taken: dict[str, list[float]] = {"bare": [], "ours": []}
        for number in range(5):
            for name, work in (("bare", _append_bare), ("ours", _append_ours)):
                place = folder / f"{name}-{count}-{number}"
                place.mkdir()
                if name == "ours":
                    _project(place)
                taken[name].append(_at_once(work, place, count))
        who = "1 process" if count == 1 else f"{count} processes"
        each = {name: min(seconds) / APPENDS for name, seconds in taken.items()}
        figures.append(Figure(f"append a job line, {who}", each["ours"], "flock, write, fsync", each["bare"], limit=2))
    return figures


def _append_bare(place: Path, number: int, count: int, begin: Callable[[], Any]) -> None:
    line = b"x" * 449 + b"\n"
    descriptor = os.open(place / "bare", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    begin()
    for _ in range(count):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, line)
        os.fsync(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _append_ours(place: Path, number: int, count: int, begin: Callable[[], Any]) -> None:
    book = _project(place)
    record = {"status": "completed", "provider": "vast", "model": "m", "cost_usd": 0.123456, "inputs": {"p": "x" * 250}}
    begin()
    for n in range(count):
        book.append([{**record, "id": f"J-{number * 1_000_000 + n + 1:09d}"}])


def _at_once(work: Callable[..., None], place: Path, count: int) -> float:
    """Seconds until `count` processes have made APPENDS appends together, all of them ready before it begins."""
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(count + 1)
    children = [fork.Process(target=work, args=(place, n, APPENDS // count, ready.wait)) for n in range(count)]
    for child in children:
        child.start()

    def all_of_them() -> None:
        ready.wait()
        for child in children:
            child.join()
            if child.exitcode:
                raise SystemExit(f"{work.__name__} failed")

    return _seconds(all_of_them)


_OPEN = (
    "import sys; from pathlib import Path; from gpu_skills.clock import SystemClock; "
    "from gpu_skills.state import ledger, project; book = ledger.Ledger(project.load(Path(sys.argv[1])), SystemClock())"
)


def _project(place: Path):  # type: ignore[no-untyped-def]
    from gpu_skills.clock import SystemClock
    from gpu_skills.state import ledger, project

    return ledger.Ledger(project.init(place), SystemClock())


def _peak_mb(ledger: Path) -> float:
    """Peak memory of all processes of one cold sum, added up: more than was ever used at once."""
    program = (
        "import resource, sys; from pathlib import Path; from gpu_skills.state import spend; p = Path(sys.argv[1])\n"
        "spend.total(p, p.with_name('none'), may_save=False)\n"
        # Not ru_maxrss of its own: that starts with the size of the process it was started from.
        "own = int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "forks = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "import os; print(own + forks * (min(os.cpu_count() or 1, 4) - 1))"
    )
    kilobytes = int(_run(sys.executable, "-c", program, ledger, cwd=ledger.parent))
    return kilobytes / 1000


def _write_ledger(path: Path, count: int) -> None:
    """Lines of about 450 bytes as jobs leave them, over ten months, 80 % completed."""
    rng = random.Random(7)
    with open(path, "w") as stream:
        for n in range(1, count + 1):
            day = f"2026-{1 + 10 * n // (count + 1):02d}-{1 + 280 * n // (count + 1) % 28:02d}"
            status = rng.choices(["completed", "failed", "timeout", "cancelled"], [80, 12, 4, 4])[0]
            record = {
                "id": f"J-{n:06d}",
                "deployment_id": f"dep_{rng.randrange(40):06x}",
                "provider": rng.choice(["vast", "runpod", "local"]),
                "model": rng.choice(["qwen-7b", "sdxl", "wan-2.2", "flux"]),
                "workflow": "image-gen",
                "workflow_version": 3,
                "inputs": {"prompt": "p" * rng.randrange(20, 60), "seed": rng.randrange(10**9)},
                "status": status,
                "started_at": f"{day}T10:00:00Z",
                "completed_at": f"{day}T10:01:00Z",
                "duration_s": round(rng.uniform(5, 200), 1),
                "cost_usd": round(rng.uniform(0, 0.08), 6) if rng.random() < 0.95 else None,
                "gpu": "RTX 4090",
                "artifacts": [{"name": "out.png", "uri": f"file:///data/outputs/{n}/out.png"}],
                **({"error": "CUDA out of memory"} if status == "failed" else {}),
                "ts": f"{day}T10:01:00Z",
            }
            stream.write(json.dumps(record, separators=(",", ":")) + "\n")


def _run(*words: str | Path, cwd: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent / "scripts")}
    done = subprocess.run(words, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))[:200]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
