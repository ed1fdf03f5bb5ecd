from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from conformance.clients import NotInstalled, PythonClient, install
from sandbox_fixture import login_key, make_sandbox

__all__ = ["login_key", "make_sandbox"]


@pytest.fixture(scope="session")
def official_client(real_environment: dict[str, str]) -> Callable[[str], PythonClient]:
    """`official_client("vastai.lock")`. Where it cannot be installed: an error with CI=true, else the test is skipped.

    Ask for it in a fixture of session or module scope: it starts processes and may use the network.
    """

    @functools.cache
    def get(lock: str) -> PythonClient:
        try:
            return install(lock, real_environment)
        except NotInstalled as missing:
            if real_environment.get("CI") == "true":
                raise
            pytest.skip(str(missing))

    return get
