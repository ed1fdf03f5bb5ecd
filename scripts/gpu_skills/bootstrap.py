"""Makes the Python environment that `scripts/gpu` and `scripts/test` run in. Standard library only.

    bootstrap.py PLATFORM LOCK [--remake] [-- ARGUMENTS OF GPU]

prints the folder of an environment with exactly the packages of LOCK. Environments live in the user's cache, one per
lock, Python and platform. Each holds a copy of its lock, which is what the launcher compares, so an environment is
trusted only once it is whole: it is made in a temporary folder and renamed last. One process makes, others wait.
"""

from __future__ import annotations

import configparser
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_skills.errors import DiskFull, EnvironmentFailed, GpuError, MissingProgram, NotWritable, one_line

UNUSED_FOR_S = 30 * 24 * 3600
WAIT_S = 20 * 60
# Settings of pip that would put the packages elsewhere than into the environment.
_MISPLACING = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "PIP_EDITABLE")


def main(arguments: list[str]) -> int:
    own, of_gpu = _split(arguments)
    platform, lock = own[0], Path(own[1]).resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        try:
            print(environment(platform, lock, remake="--remake" in own))
            return 0
        except OSError as error:
            raise _translated(error) from error
    except GpuError as error:
        print(f"gpu: {error.message}; next: {error.next_step} [{error.code}]", file=sys.stderr)
        if "--json" in of_gpu:
            print(json.dumps({"format": 1, "error": error.to_dict()}))
        return 1
    except KeyboardInterrupt:
        print("gpu: interrupted; next: run the command again", file=sys.stderr)
        return 1


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def environment(platform: str, lock: Path, *, remake: bool = False) -> Path:
    """The folder of a whole environment for this lock and Python; makes it if there is none, or on `remake`."""
    cache = _cache_folder()
    # The versioned program itself, not the name that a system update may give to another version.
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    packages = lock.read_bytes()
    key = hashlib.sha256(b"\0".join([packages, os.fsencode(python), sys.version.encode()])).hexdigest()[:16]
    # The launcher looks for the length as bash counts it: without the newlines at the end.
    env = cache / f"env-{platform}-{len(packages.rstrip())}-{key}"
    if not remake and _is_whole(env, packages):
        return env
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    asked_at = time.time()
    with _alone(cache / "making.lock"):
        # The one we waited for may have made it. It may be in use by now, so `remake` is not meant for it.
        if _is_whole(env, packages) and (not remake or (env / "lock").stat().st_mtime >= asked_at):
            return env
        _remove_leftovers(cache, env)
        _make(env, python, lock, packages)
    return env


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):
        home = os.environ.get("HOME", "")
        if not home.startswith("/"):
            raise EnvironmentFailed(
                reason="HOME is not set", next_step="set HOME, or XDG_CACHE_HOME, to a folder of yours"
            )
        base = os.path.join(home, ".cache")
    return Path(base, "gpu-skills")


def _is_whole(env: Path, packages: bytes) -> bool:
    try:
        return (env / "lock").read_bytes() == packages and os.access(env / "bin" / "python", os.X_OK)
    except OSError:
        return False


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock on `path`. The kernel lets go of it when its holder dies, however it dies."""
    with open(path, "a+") as file:
        give_up_at = time.monotonic() + WAIT_S
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            if time.monotonic() > give_up_at:
                raise EnvironmentFailed(
                    reason=f"process {one_line(holder)} has been making it for {WAIT_S // 60} minutes",
                    next_step="look at that process, end it if it hangs, and run the command again",
                )
            if not told:
                _say(f"process {one_line(holder)} is making the environment; waiting for it")
                told = True
            time.sleep(0.1)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def _remove_leftovers(cache: Path, env: Path) -> None:
    """What a killed maker left, environments whose Python is gone, and those unused for 30 days."""
    for folder in cache.glob("making-*/"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in cache.glob("env-*/"):
        try:
            unused_s = time.time() - (folder / "used").stat().st_mtime
        except OSError:
            unused_s = UNUSED_FOR_S + 1
        broken = not (folder / "bin" / "python").exists()
        if folder == env or broken or unused_s > UNUSED_FOR_S:
            shutil.rmtree(folder, ignore_errors=True)


def _make(env: Path, python: Path, lock: Path, packages: bytes) -> None:
    began = time.monotonic()
    count = packages.count(b"==")
    making = Path(tempfile.mkdtemp(prefix="making-", dir=env.parent))
    log = env.parent / "install.log"
    try:
        _say(f"making its Python environment in {env} ({count} packages; first use, or the lock changed)")
        _install_with_first(_installers(), making, python, lock, log)
        new = making / "env"
        (new / "used").touch()
        (new / "lock").write_bytes(packages)
        # The scripts in bin/ keep the temporary path in their first line; everything here is started through Python.
        os.rename(new, env)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    _compile(env)
    _say(f"environment ready after {time.monotonic() - began:.1f} s")


Installer = Callable[[Path, Path, Path, Path], None]


def _installers() -> list[Installer]:
    """uv first, for its speed, unless only pip was told where packages come from: uv does not read those settings."""
    uv_knows = any(name.startswith("UV_") and ("INDEX" in name or "FIND_LINKS" in name) for name in os.environ)
    return [_with_pip, _with_uv] if _pip_knows_an_index() and not uv_knows else [_with_uv, _with_pip]


def _install_with_first(installers: list[Installer], making: Path, python: Path, lock: Path, log: Path) -> None:
    """Try in order; the lock's hashes make the outcome the same. Raises what the last one said."""
    log.write_bytes(b"")
    failure: GpuError | None = None
    for install in installers:
        shutil.rmtree(making / "env", ignore_errors=True)
        try:
            install(making, python, lock, log)
            return
        except MissingProgram as missing:
            failure = failure or missing
        except EnvironmentFailed as failed:
            failure = failed
    assert failure is not None
    raise failure


def _with_uv(making: Path, python: Path, lock: Path, log: Path) -> None:
    uv = shutil.which("uv")
    # A version manager may offer a `uv` that is not installed.
    if uv is None or subprocess.run([uv, "--version"], capture_output=True, stdin=subprocess.DEVNULL).returncode:
        raise MissingProgram(program="uv")
    env = making / "env"
    _run([uv, "venv", "--no-project", "--python", str(python), str(env)], making, log)
    command = [uv, "pip", "install", "--python", str(env / "bin" / "python"), "--require-hashes", "-r", str(lock)]
    _run(command, making, log)


def _with_pip(making: Path, python: Path, lock: Path, log: Path) -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise MissingProgram(
            program=f"the venv module of {python}",
            next_step="install it (Debian, Ubuntu: apt install python3-venv), or install uv",
        ) from None
    env = making / "env"
    _run([str(python), "-I", "-m", "venv", str(env)], making, log)
    pip = [str(env / "bin" / "python"), "-I", "-m", "pip", "--no-input", "--disable-pip-version-check"]
    _run([*pip, "install", "--no-compile", "--require-hashes", "-r", str(lock)], making, log)


def _run(command: list[str], folder: Path, log: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in _MISPLACING}
    environ["PIP_USER"] = "0"
    with open(log, "ab") as output:
        start = output.tell()
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        # In a folder of ours: uv would read the settings of a project it finds above the current one.
        done = subprocess.run(
            command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise _explained(log.read_bytes()[start:].decode(errors="replace"), log)


def _explained(said: str, log: Path) -> GpuError:
    """An installer's output as one line and a next step."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = said.lower()
    if "no space left on device" in text or "disk quota exceeded" in text:
        return DiskFull(path=log.parent, reason="no space left on device")
    reason = next(
        (line for line in lines if line.lower().startswith("error")), lines[-1] if lines else "no reason given"
    )
    if "do not match the hashes" in text or "hash mismatch" in text:
        step = "the package index serves other files than the lock names: check its settings"
    else:
        step = "check the network and the package index settings of pip or uv, then run the command again"
    return EnvironmentFailed(reason=f"{reason} (all of it in {log})", next_step=step)


def _pip_knows_an_index() -> bool:
    """Whether pip's variables or one of its configuration files say where packages come from."""
    settings = ("index-url", "extra-index-url", "no-index", "find-links", "proxy")
    if any("PIP_" + name.upper().replace("-", "_") in os.environ for name in settings):
        return True
    home = Path(os.environ.get("HOME", "/"))
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [
        Path("/etc/pip.conf"),
        Path("/Library/Application Support/pip/pip.conf"),
        *(Path(folder, "pip", "pip.conf") for folder in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")),
        config / "pip" / "pip.conf",
        home / ".config" / "pip" / "pip.conf",
        home / ".pip" / "pip.conf",
        home / "Library" / "Application Support" / "pip" / "pip.conf",
    ]
    if "PIP_CONFIG_FILE" in os.environ:
        files.append(Path(os.environ["PIP_CONFIG_FILE"]))
    for file in files:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(file, encoding="utf-8")
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue  # pip itself will say what is wrong with it
        if any(parser.has_option(section, name) for section in parser.sections() for name in settings):
            return True
    return False


def _compile(env: Path) -> None:
    """Compile the packages to where the launcher's Python looks. Only speed depends on it, so nothing here is fatal."""
    python = env / "bin" / "python"
    skip = r"/site-packages/(pip|setuptools|pkg_resources|_distutils_hack)/"
    command = [python, "-I", "-X", f"pycache_prefix={env / 'pycache'}", "-m", "compileall", "-q", "-j", "0", "-x", skip]
    subprocess.run([*command, env / "lib"], stdin=subprocess.DEVNULL, capture_output=True)


def _translated(error: OSError) -> GpuError:
    path = error.filename or "the cache"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(path=path, reason=error.strerror)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return NotWritable(
            path=path, reason=error.strerror, next_step="set XDG_CACHE_HOME to a folder that this user can write"
        )
    return EnvironmentFailed(reason=str(error))


def _say(text: str) -> None:
    print(f"gpu: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
