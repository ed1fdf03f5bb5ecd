"""Starting is quick because nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.subprocess

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
HEAVY = {
    "boto3", "botocore", "cryptography", "jsonschema", "keyring", "paramiko", "pathspec", "referencing", "requests",
    "rich", "urllib3", "yaml", "asyncio", "multiprocessing", "unittest",
}  # fmt: skip


def heavy_after(code: str, cwd: Path) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded once `code` has run."""
    program = f"import sys, json\nsys.path.insert(0, {str(SCRIPTS)!r})\n{code}\n"
    program += "sys.__stdout__.write('\\n' + json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    environ = {name: os.environ[name] for name in ("HOME", "PATH", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return HEAVY & set(json.loads(done.stdout.splitlines()[-1]))


def run(*arguments: str) -> str:
    return f"""
from gpu_skills.cli.main import main
sys.argv = ["gpu", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
"""


def test_importing_the_command_line_loads_nothing_heavy(tmp_path):
    assert heavy_after("import gpu_skills.cli.main", tmp_path) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["job", "--help"], ["job", "run", "--help"]])
def test_help_loads_nothing_heavy(tmp_path, arguments):
    assert heavy_after(run(*arguments), tmp_path) == set()


def test_the_check_would_see_a_heavy_import(tmp_path):
    assert heavy_after("import yaml", tmp_path) == {"yaml"}
