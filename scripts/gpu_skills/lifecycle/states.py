"""The states of a machine: which may follow which, and which cost something."""

from __future__ import annotations

from typing import Literal

Bills = Literal["yes", "storage", "assume", "no"]

FOLLOWS: dict[str, tuple[str, ...]] = {
    "requested": ("booting", "lost", "unknown"),
    "booting": ("ready", "terminating", "unknown"),
    "ready": ("busy", "stopping", "terminating", "lost", "unknown"),
    "busy": ("ready", "stopping", "terminating", "lost", "unknown"),
    "stopping": ("stopped", "terminating", "unknown"),
    "stopped": ("booting", "terminating", "lost", "unknown"),
    "terminating": ("destroyed", "unknown"),
    "unknown": (
        "requested", "booting", "ready", "busy", "stopping", "stopped", "terminating", "destroyed", "lost",
    ),
    "destroyed": (),
    "lost": (),
}  # fmt: skip
BILLS: dict[str, Bills] = {
    "requested": "assume",
    "booting": "yes",
    "ready": "yes",
    "busy": "yes",
    "stopping": "yes",
    "stopped": "storage",
    "terminating": "yes",
    "unknown": "assume",
    "destroyed": "no",
    "lost": "no",
}
FINAL = ("destroyed", "lost")
# What a provider shows → the state of one that nobody knows more about.
AS_SHOWN = {"running": "ready", **{word: word for word in ("booting", "stopping", "stopped", "terminating")}}

# Why a machine went → what that makes of the jobs that ran on it; what is not here lost them.
ENDS_OF_JOBS = {
    **dict.fromkeys(("deadline_passed", "session_budget", "max_lifetime", "max_lease", "ceiling"), "timeout"),
    "cancelled": "cancelled",
}


def may_follow(before: str, after: str) -> bool:
    return before == after or after in FOLLOWS[before]


def path(before: str, after: str) -> tuple[str, ...]:
    """The states to pass to get from one to the other, `after` last; through `unknown` where there is no other way.

    A provider may show a step that nobody saw happening: a machine that was ready and is now stopped.
    """
    if may_follow(before, after):
        return (after,)
    if before in FINAL:
        raise ValueError(f"{before} is final")
    for between in FOLLOWS[before]:
        if after in FOLLOWS[between] and between != "unknown":
            return (between, after)
    return ("unknown", after)
