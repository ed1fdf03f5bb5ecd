"""Bars with rate and remaining time, for a person at a terminal; nothing at all for anybody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_skills.cli.context import Context


@contextmanager
def byte_bar(context: Context, what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yields `progress(done_bytes, total_bytes)` for a transfer, or None when nobody watches."""
    if not context.is_interactive:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def spinner(context: Context, what: str) -> Iterator[None]:
    """A line that moves with the seconds it took, for steps without a measure."""
    if not context.is_interactive:
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        bar.add_task(what, total=None)
        yield
