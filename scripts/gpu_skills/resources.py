"""The only finder of schemas, templates, examples and runner files: from a checkout or an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# In a wheel these folders are packed inside the package (see pyproject.toml); in a checkout they are at its top.
_INSTALLED = PACKAGE / "_data"
ROOT = _INSTALLED if _INSTALLED.is_dir() else PACKAGE.parent.parent


def schema_path(name: str) -> Path:
    """name: `job`, `gpu.yaml` or `cli/job_status`, without the `.json` ending."""
    return ROOT / "schemas" / f"{name}.json"


def template(name: str) -> Path:
    return ROOT / "templates" / name


def example(name: str) -> Path:
    return ROOT / "examples" / name


def runner() -> Path:
    """The one file that works for us on a machine."""
    return PACKAGE / "remote" / "runner.py"


def machine_script(name: str) -> Path:
    """Bash that travels in a create request: `fuse.sh`, `start_script.sh`."""
    return PACKAGE / "lifecycle" / "guard" / name


def checkup() -> Path:
    """The program that runs once on a rented machine and tells what it has."""
    return PACKAGE / "remote" / "checkup.py"


def failures() -> Path:
    """The classes of failure with their signs and remedies, for `gpu job diagnose`."""
    return PACKAGE / "jobs" / "diagnose" / "failures.yaml"
