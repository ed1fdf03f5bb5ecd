"""A real llama.cpp server for slow tests, built once from source and kept in the user's cache.

The source is the one inside the Python package `llama-cpp-python`, which the package index has; the program is built
without what a tiny model on a CPU does not need. On two free cores that takes three and a half minutes, once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

VERSION = "0.3.36"
BUILD_TIMEOUT_S = 40 * 60
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "None",
    "CMAKE_CXX_FLAGS": "-O0",  # most of the time goes into optimising models that nobody loads here
    "CMAKE_C_FLAGS": "-O1",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_NATIVE": "OFF",
    "GGML_OPENMP": "OFF",
    "GGML_LLAMAFILE": "OFF",
    "GGML_CPU_REPACK": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_SUBPROCESS": "OFF",
}


class CannotBeHad(Exception):
    """There is no llama.cpp to be had here, and why."""


def llama_server(environ: Mapping[str, str]) -> Path:
    """The program. CannotBeHad without compiler or package index; a build that fails is a failure."""
    missing = [program for program in ("cmake", "c++", "cc") if shutil.which(program, path=environ.get("PATH")) is None]
    base = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/nonexistent")) / ".cache")
    options = hashlib.sha256(repr(sorted(_OPTIONS.items())).encode()).hexdigest()[:8]
    folder = base / "gpu-skills-tests" / f"llama.cpp-{VERSION}-{platform.machine()}-{options}"
    program = folder / "llama-server"
    if program.exists():
        return program
    if missing:
        raise CannotBeHad(f"{', '.join(missing)} not installed")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of these tests may be at it
        if not program.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                built = _build(_source(Path(work), environ), Path(work) / "build", environ)
                os.replace(built, program)
    return program


def _source(work: Path, environ: Mapping[str, str]) -> Path:
    _run([sys.executable, "-m", "venv", work / "venv"], environ, 300)
    pip = [work / "venv" / "bin" / "python", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work]
    try:
        _run([*pip, "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}"], environ, 600)
    except subprocess.CalledProcessError as exc:
        raise CannotBeHad(f"the package index does not give llama-cpp-python {VERSION}: {exc.stderr[-300:]}") from exc
    (archive,) = work.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work / "source", filter="data")
    (source,) = (work / "source").glob("*/vendor/llama.cpp")
    return source


def _build(source: Path, build: Path, environ: Mapping[str, str]) -> Path:
    options = [f"-D{name}={value}" for name, value in _OPTIONS.items()]
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=environ.get("PATH")) else []
    _run(["cmake", "-S", source, "-B", build, *generator, *options], environ, 600)
    jobs = str(os.cpu_count() or 1)
    _run(
        ["nice", "-n", "10", "cmake", "--build", build, "--target", "llama-server", "-j", jobs],
        environ,
        BUILD_TIMEOUT_S,
    )
    return build / "bin" / "llama-server"


def _run(command: list[str | Path], environ: Mapping[str, str], timeout_s: float) -> None:
    subprocess.run(
        command,
        env=dict(environ),
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
    )
