"""Starting is quick because nothing heavy is imported before it is needed."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.subprocess

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
HEAVY = {
    "boto3", "botocore", "cryptography", "jsonschema", "keyring", "paramiko", "pathspec", "referencing", "requests",
    "rich", "urllib3", "yaml", "msgspec", "jq", "asyncio", "multiprocessing", "unittest",
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


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = sum(project["optional-dependencies"].values(), project["dependencies"])
    declared = {re.match(r"[A-Za-z0-9_-]+", line)[0].lower() for line in requirements}
    imported = set()
    for path in (SCRIPTS / "gpu_skills").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    foreign = imported - sys.stdlib_module_names - {"gpu_skills"}
    assert {"click", "paramiko"} <= foreign
    assert {{"yaml": "pyyaml", "graphql": "graphql-core"}.get(name, name) for name in foreign} - declared == set()


def test_all_that_is_needed_stands_in_the_lock():
    """The launcher installs the lock and nothing else: what only an extra brings, a checkout never has.

    Messages work from a checkout too: who is told of a machine that may bill on must not depend on how gpu came here.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = set(re.findall(r"(?m)^([A-Za-z0-9_.-]+)==", (ROOT / "requirements.lock").read_text()))
    assert {re.match(r"[A-Za-z0-9_-]+", line)[0] for line in project["dependencies"]} - locked == set()
    extras = project["optional-dependencies"]
    assert set(extras) == {"s3", "keyring", "notify"}, "what speaks to something of the user's own"
    assert {re.match(r"[A-Za-z0-9_-]+", line)[0] for line in extras["notify"]} <= locked
