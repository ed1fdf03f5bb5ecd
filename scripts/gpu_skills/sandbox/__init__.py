"""The vendors on loopback: their APIs, prices, delays and faults, and instances that are real directories with SSH.

    with Sandbox(seed=1) as sandbox:
        sandbox.url, sandbox.key("vast")          # what a client needs
        sandbox.faults.script("vast", "create", "ok, lost_reply")
        sandbox.advance(3600)                     # the vendor's clock
        sandbox.world.burning()                   # [] when nothing costs money

It speaks the vendors' wire formats and knows nothing of the rest of this package. How a vendor is added: face.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_skills.sandbox.sandbox import Sandbox

__all__ = ["Sandbox"]


def __getattr__(name: str) -> Any:
    if name == "Sandbox":
        from gpu_skills.sandbox.sandbox import Sandbox

        return Sandbox
    raise AttributeError(name)
