"""The command line as a customer of a vendor of the sandbox: `call = customer(gpu, r, monkeypatch)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

KEY_NAMES = {"vast": "VAST_API_KEY", "runpod": "RUNPOD_API_KEY"}


def customer(gpu: Callable[..., Any], r: Any, monkeypatch: Any) -> Callable[..., Any]:
    """`call("machine", "ls", "--json")` in the project of the rig, by the vendor's clock; cwd for another place."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME", "VAST_URL", "RUNPOD_API_BASE_URL"):
        monkeypatch.setenv(name, r.op.environ[name])
    monkeypatch.setenv(KEY_NAMES[r.vendor], r.sandbox.key(r.vendor))
    Path(r.op.environ["HOME"]).mkdir(parents=True, exist_ok=True)

    def call(*args: str, cwd: Path | None = None, **world: Any) -> Any:
        return gpu(*args, cwd=cwd or r.project.root, clock=r.clock, **world)

    return call
