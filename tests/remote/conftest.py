"""Fixtures for everything that talks to a machine."""

from pathlib import Path

import pytest

from remote.far_end import FAKE_RUNNER
from remote.runner_machine import machine, root
from sshd import sshd, sshd_factory

__all__ = ["machine", "root", "sshd", "sshd_factory"]


@pytest.fixture
def fake_runner(tmp_path: Path) -> Path:
    """The runner file that scripted machines claim to have."""
    path = tmp_path / "fake_runner.py"
    path.write_bytes(FAKE_RUNNER)
    return path
