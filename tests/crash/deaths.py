"""One stage, killed at each of its crossings in turn, each time in a world of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aftermath import holds, reborn, reconciled, says_what_to_do, scheduled, wound_up
from dying import dies
from gpu_skills.errors import GpuError

# What comes after a death: a scheduler's reconcile within minutes, the same command at once, or a reconcile when the
# approval has long expired.
RECOVERIES = ("reconcile", "again", "late")


@dataclass
class Stage:
    """act: what is killed. again: the same command by another process; act when it takes no other way then.

    creates: requests for a machine that all of it may come to.
    """

    r: Any
    act: Callable[[], Any]
    again: Callable[[], Any] | None = None
    creates: int = 1


def each_death(
    make: Callable[[Path], Stage], home: Path, *, side: str, part: int = 0, parts: int = 1, least: int = 8
) -> Iterator[tuple[int, Stage]]:
    """(crossing, what died there); of all crossings every `parts`-th, from number `part` on, until it lives through.

    How many there are is not always the same: charges come in pieces, and a few looks more may be needed.
    """
    crossing = 1 + part
    while True:
        stage = make(home / str(crossing))
        has_died = dies(stage.act, crossing=crossing, side=side)
        if has_died:
            yield crossing, stage
        stage.r.sandbox.stop()
        if not has_died:
            break
        crossing += parts
    assert crossing > least, f"only {crossing} crossings"


def made_good(stage: Stage, recovery: str) -> None:
    """Whoever comes next finds everything in order, and in the end the books are the bill."""
    r = stage.r
    if recovery == "late":
        r.clock.sleep(2 * 3600)
    if recovery != "again":
        report = scheduled(r)
        holds(r, creates=stage.creates, is_clear=report.is_clear)
    reborn(r)
    try:
        (stage.again or stage.act)()
    except GpuError as error:
        says_what_to_do(error)
    reconciled(r)
    holds(r, creates=stage.creates)
    wound_up(r, creates=stage.creates)
