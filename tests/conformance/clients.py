"""The vendors' own clients, unmodified, each in a Python environment of its own.

An environment has exactly the packages of a lock beside this file (names, versions, hashes), is made once in the user's
cache by the machinery of `scripts/gpu`, under its lock, with uv or pip and the caller's settings of the package index,
and serves every later run. Another version, or another client:

    echo vastai==1.9.1 | uv pip compile - --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
"""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BOOTSTRAP = HERE.parents[1] / "scripts" / "gpu_skills" / "bootstrap.py"
INSTALL_TIMEOUT_S = 900


class NotInstalled(Exception):
    """The client is not here and could not be installed."""


@dataclass(frozen=True)
class PythonClient:
    """An environment with one official client."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """What every program needs of the environment; nothing of the caller's."""
        return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}

    def run_python(self, *arguments: str) -> list[str]:
        """How to start its Python, with the modules that were compiled when it was made."""
        return [
            str(self.folder / "bin" / "python"),
            "-I",
            "-X",
            f"pycache_prefix={self.folder / 'pycache'}",
            *arguments,
        ]

    def run(self, program: str, *arguments: str) -> list[str]:
        """How to start one of its programs. Not by its first line, which names the folder it was made in."""
        return self.run_python(str(self.folder / "bin" / program), *arguments)


def install(lock: str, environ: dict[str, str]) -> PythonClient:
    """The environment of `lock`, made now if need be. Raises NotInstalled."""
    kind = f"{sys.platform}-{platform.machine()}"
    command = [sys.executable, "-I", "-B", str(BOOTSTRAP), kind, str(HERE / lock)]
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
    )
    if done.returncode:
        raise NotInstalled(f"{lock} cannot be installed: {done.stderr.strip()}")
    folder = Path(done.stdout.strip())
    (folder / "used").touch()  # what nobody has used for a month is removed
    return PythonClient(folder)
