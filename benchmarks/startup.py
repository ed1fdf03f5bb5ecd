"""How long a command takes to start: what an agent waits for at every step."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from report import HERE, Figure, in_turn

GPU = HERE.parent / "scripts" / "gpu"


def main() -> list[Figure]:
    # The very interpreter that the launcher becomes, with the same compiled code at hand.
    python = [sys.executable, "-I", "-X", f"pycache_prefix={sys.prefix}/pycache"]
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as folder:
        # HOME and the cache stay: that is where the environment is.
        own = {f"XDG_{kind}_HOME": os.path.join(folder, kind) for kind in ("CONFIG", "DATA", "STATE")}
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("GPU_", "PYTHON"))} | own
        project = Path(folder, "project")
        project.mkdir()

        def command(*words: str | Path) -> Callable[[], None]:
            def run() -> None:
                done = subprocess.run(words, cwd=project, env=environ, stdin=subprocess.DEVNULL, capture_output=True)
                if done.returncode:
                    raise SystemExit(f"{' '.join(map(str, words))} failed:\n{done.stderr.decode(errors='replace')}")

            return run

        command(GPU, "init", "--jobs", "--provider", "local")()
        command(GPU, "job", "run", "--", "true")()
        click = 'python -c "import click"'
        took = in_turn(
            {
                click: command(*python, "-c", "import click"),
                "gpu --help": command(GPU, "--help"),
                "gpu job status --json": command(GPU, "job", "status", "--json"),
            },
            rounds=31,
            warm_up=3,
        )
        # A few fixed milliseconds: the best of many rounds shows them on a busy machine too.
        started = in_turn(
            {
                "through the launcher": command(GPU, "--version"),
                "directly": command(*python, HERE.parent / "scripts" / "gpu_skills" / "__main__.py", "--version"),
            },
            rounds=31,
            pick=min,
        )
    return [
        Figure("gpu --help", took["gpu --help"], click, took[click], limit=2.5),
        Figure("gpu job status --json", took["gpu job status --json"], click, took[click], limit=2.5),
        Figure(
            "gpu --version, through the launcher",
            started["through the launcher"],
            "its Python started directly",
            started["directly"],
            limit_extra_s=0.015,
        ),
    ]
