"""Runs the benchmarks of this folder and prints their figures as one table of ratios.

A benchmark is a module here whose `main()` returns a list of `Figure`. It measures what it compares in one run, in turn
(`in_turn`), so that a busy machine slows both.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Benchmarks measure this checkout and start the servers its tests start.
sys.path[:0] = [str(HERE.parent / "scripts"), str(HERE.parent / "tests")]


@dataclass(frozen=True)
class Figure:
    """`what` took `seconds`, and `reference` in the same run `reference_seconds`.

    At most `limit` times the reference is promised, or `limit_extra_s` more than it; None: nothing is.
    """

    what: str
    seconds: float
    reference: str
    reference_seconds: float
    limit: float | None = None
    limit_extra_s: float | None = None

    @property
    def ratio(self) -> float:
        return self.seconds / self.reference_seconds

    @property
    def extra_s(self) -> float:
        return self.seconds - self.reference_seconds

    @property
    def over(self) -> bool:
        return (self.limit is not None and self.ratio > self.limit) or (
            self.limit_extra_s is not None and self.extra_s > self.limit_extra_s
        )


def in_turn(
    actions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 1,
    before: Callable[[], object] = bool,
    pick: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Seconds of each action, each measured once a round; `before` prepares every one, unmeasured."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(-warm_up, rounds):
        for name, action in actions.items():
            before()
            began = time.perf_counter()
            action()
            if number >= 0:
                taken[name].append(time.perf_counter() - began)
    return {name: pick(seconds) for name, seconds in taken.items()}


def table(figures: list[Figure]) -> str:
    rows = [("", "ratio", "at most", "took", "reference", "took")]
    for figure in figures:
        shown, limit = f"{figure.ratio:.2f}", ""
        if figure.limit is not None:
            limit = f"{figure.limit:.2f}"
        elif figure.limit_extra_s is not None:
            shown, limit = f"+{figure.extra_s * 1000:.1f} ms", f"+{figure.limit_extra_s * 1000:.1f} ms"
        row = (figure.what, shown, limit, seconds(figure.seconds), figure.reference, seconds(figure.reference_seconds))
        rows.append((("OVER  " if figure.over else "") + row[0], *row[1:]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def main(names: list[str]) -> int:
    known = sorted(path.stem for path in HERE.glob("*.py") if path.name != "report.py")
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    for name in names or known:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        figures += importlib.import_module(name).main()
    print(f"{os.cpu_count()} CPUs, Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f}")
    print(table(figures))
    return 1 if any(figure.over for figure in figures) else 0


if __name__ == "__main__":
    # Benchmarks import this module by its name: let them get this one.
    sys.modules["report"] = sys.modules[__name__]
    sys.exit(main(sys.argv[1:]))
