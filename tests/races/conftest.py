"""Rigs on a vendor whose time other processes can ask for and wait in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lifecycle.conftest import login_key, make_sandbox
from lifecycle.conftest import rig as plain_rig
from races.racers import SharedTime

__all__ = ["login_key", "make_sandbox", "plain_rig"]


@pytest.fixture
def rig(plain_rig: Callable[..., Any], allow_subprocess: None) -> Callable[..., Any]:
    """As in lifecycle/, without containers; `racers.race` runs processes against it."""

    def make(vendor: str, *, home: Path | None = None, **options: Any) -> Any:
        time = SharedTime()
        places = {} if home is None else {"home": home}
        r = plain_rig(vendor, admin=time, **{"containers": False, "limits": "off", **places, **options})
        time.sandbox = r.sandbox
        return r

    return make
