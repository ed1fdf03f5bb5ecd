"""One stage, killed at each of its crossings in turn, each time in a world of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aftermath import holds, reborn, reconciled, says_what_to_do, scheduled, wound_up
from dying import SIDES, dies
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
    make: Callable[[Path], Stage], home: Path, *, side: str, part: int = 0, parts: int = 1, least: int = 6
) -> Iterator[tuple[int, Stage]]:
    """(crossing, what died there); of all crossings every `parts`-th, from number `part` on, until it lives through.

    side: or the name of a vendor, for both in turn: where it is before a crossing at one it is after it at the other.

    How many there are is not always the same: charges come in pieces, and a few looks more may be needed.
    """
    crossing = 1 + part
    while True:
        stage = make(home / str(crossing))
        here = side if side in SIDES else SIDES[(crossing // parts + (side == "vast")) % 2]
        has_died = _dies(stage, crossing, here)
        if has_died:
            yield crossing, stage
        stage.r.sandbox.stop()
        if not has_died:
            break
        crossing += parts
    assert crossing > least, f"only {crossing} crossings"


def _dies(stage: Stage, crossing: int, side: str) -> bool:
    gc.collect()  # ledgers of earlier commands seal what they have when they go: not in the middle of this one
    try:
        return dies(stage.act, crossing=crossing, side=side)
    except GpuError as error:  # it lived, and that is its end
        says_what_to_do(error)
        return False


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
