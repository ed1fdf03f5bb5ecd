"""The fixtures of the runner's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from remote.runner_client import RunnerClient, leave_nothing


@pytest.fixture
def root(tmp_path: Path, allow_subprocess: None) -> Iterator[Path]:
    """The runner's folder on the machine. Whatever still runs there after the test is ended."""
    folder = tmp_path / "root"
    folder.mkdir()
    yield folder
    leave_nothing(folder)


@pytest.fixture
def machine(root: Path) -> Iterator[RunnerClient]:
    """An open conversation with a runner that has just been installed."""
    client = RunnerClient(root)
    yield client
    if client.process.poll() is None:
        client.close()
