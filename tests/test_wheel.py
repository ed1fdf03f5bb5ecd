"""What `pip install .` gives works anywhere: the wheel, in an empty environment, started from another directory."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

ROOT = Path(__file__).resolve().parent.parent

# Run in this order in one empty directory: arguments, and what the answer has.
COMMANDS: list[tuple[list[str], str]] = [
    (["--version"], "0."),
    (["--help"], "Usage: gpu"),
    (["init", "--jobs", "--json"], "gpu_yaml"),
    (["offers", "--json"], "local"),
    (["demo", "--json", "--seconds", "2"], "ledger_line"),
]


def run(command: list[str | Path], cwd: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, real_environment: dict[str, str]) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out], ROOT, real_environment)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_what_the_commands_read_and_nothing_else(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("schemas", "templates", "examples", "skills"):
        wanted = {
            f"gpu_skills/_data/{path.relative_to(ROOT).as_posix()}"
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert wanted and wanted <= packed, folder
    assert {"gpu_skills/remote/runner.py", "gpu_skills/cli/main.py"} <= packed
    assert {name.split("/")[0] for name in packed if not name.startswith("gpu_skills-")} == {"gpu_skills"}
    assert not [name for name in packed if "__pycache__" in name or "/tests/" in name]
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_installed_in_an_empty_environment_it_works_from_another_directory(wheel, tmp_path, home, real_environment):
    env = tmp_path / "env"
    run([sys.executable, "-I", "-m", "venv", env], tmp_path, real_environment)
    pip = [env / "bin" / "python", "-I", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, wheel], tmp_path, real_environment)

    elsewhere = tmp_path / "some where"
    elsewhere.mkdir()
    # Not the caller's: neither a checkout on PYTHONPATH nor a home with settings may be what makes it work.
    settings = {name: value for name, value in real_environment.items() if name.startswith(("PIP_", "UV_"))}
    environ = {**settings, "HOME": str(home), "PATH": f"{env / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
    for arguments, expected in COMMANDS:
        answer = run([env / "bin" / "gpu", *arguments], elsewhere, environ)
        assert expected in answer, arguments
        if "--json" in arguments:
            json.loads(answer)
    where = run([env / "bin" / "python", "-c", "import gpu_skills; print(gpu_skills.__file__)"], elsewhere, environ)
    assert Path(where.strip()).is_relative_to(env)
