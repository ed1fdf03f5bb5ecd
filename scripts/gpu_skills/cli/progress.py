"""Bars with rate and remaining time, for a person at a terminal; nothing at all for anybody else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpu_skills.units import format_bytes, format_duration

if TYPE_CHECKING:
    from gpu_skills.cli.context import Context


class Pace:
    """The rate of late: over the last WINDOW_S, and none before there is enough to tell from."""

    WINDOW_S = 15.0
    ENOUGH_S = 0.5

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def rate_per_s(self, now_s: float, done: int) -> float | None:
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - self.WINDOW_S:
            self._samples.popleft()
        if not self._samples or now_s - self._samples[-1][0] >= self.ENOUGH_S / 5:
            self._samples.append((now_s, done))
        since_s, before = self._samples[0]
        return (done - before) / (now_s - since_s) if now_s - since_s >= self.ENOUGH_S else None


@contextmanager
def byte_bar(
    context: Context, what: str, *, before: str = "", after: str = ""
) -> Iterator[Callable[[int, int], None] | None]:
    """Yields `progress(done_bytes, total_bytes)`, or None when nobody watches.

    before, after: what happens until the first call, and once all bytes are done.
    """
    if not context.is_watched:
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[figures]}"),
        console=Console(stderr=True, highlight=False),
        transient=True,
    )

    def title(doing: str) -> str:
        return escape(f"{what}: {doing}" if doing else what)

    with bar:
        task = bar.add_task(title(before), total=None, figures="")
        pace = Pace()

        def progress(done: int, total: int) -> None:
            figures = f"{format_bytes(done)} of {format_bytes(total)}" if total else ""
            rate = pace.rate_per_s(context.clock.monotonic(), done)
            if rate and done < total:
                figures += f", {format_bytes(rate)}/s, {format_duration((total - done) / rate)} left"
            doing = title("" if done < total else after)
            bar.update(task, description=doing, completed=done, total=total, figures=figures)

        yield progress


@contextmanager
def spinner(context: Context, what: str) -> Iterator[Callable[[str], None]]:
    """A line that moves with the seconds it took, for steps without a measure. Yields `step(text)`: what it is at."""
    if not context.is_watched:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True, highlight=False),
        transient=True,
    ) as bar:
        task = bar.add_task(escape(what), total=None)
        yield lambda text: bar.update(task, description=escape(f"{what}: {text}"))
