"""Show a job's log as it comes: above a status line on a terminal, whole lines elsewhere, documents with `--json`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from gpu_skills.cli.bottom_rows import BottomRows
from gpu_skills.cli.context import Context
from gpu_skills.cli.job_view import progress_text
from gpu_skills.cli.output import FORMAT, print_json, print_text, say
from gpu_skills.errors import one_line
from gpu_skills.units import format_duration, format_usd

# How long a question to the machine may take: the status line and a standstill need its answer also when no log comes.
WATCHED_WAIT_S = 2.0
UNWATCHED_WAIT_S = 10.0
SILENCE_S = 10.0


def stream(context: Context, link: Any, job_id: str, offset: int, *, to_stderr: bool = False, watch: Any = None) -> Any:
    """Print the log as it comes; returns the last piece.

    watch: a `jobs.watching.Watch`, which sees each piece's status and each try to connect that failed.
    """
    from gpu_skills.jobs import follow as following
    from gpu_skills.jobs.records import JobFolder

    folder, last = following.LineFolder(), None
    spec = (JobFolder(context.project, job_id).read("job") or {}).get("spec") or {}
    standstill = _Standstill(job_id, (spec.get("progress") or {}).get("stall_s"))
    status = _StatusLine(context, link, job_id, spec.get("timeout_s")) if context.is_watched else None
    bottom = BottomRows(sys.stderr, status.rows, style=context.dim) if status is not None else nullcontext()

    def above(write: Callable[[], object]) -> None:
        bottom.above(write) if status is not None else write()  # type: ignore[union-attr]

    def show(texts: list[str]) -> None:
        if to_stderr:
            say("\n".join(texts))
        elif context.json:
            for text in texts:
                show_line(context, job_id, text, last)
        else:
            print_text("\n".join(texts) + "\n")

    pieces = following.follow(
        link,
        context.project.project_id,
        job_id,
        clock=context.clock,
        offset=offset,
        say=lambda line: above(lambda: say(line)),
        on_silence=(lambda: None) if watch is None else watch.silence,
        wait_s=WATCHED_WAIT_S if status is not None or standstill.is_looked_for else UNWATCHED_WAIT_S,
    )
    with bottom:
        for piece in pieces:
            last = piece
            texts = [following.gap_notice(piece.gap_bytes)] if piece.gap_bytes else []
            texts += folder.feed(piece.data)
            if watch is not None:
                watch.piece(piece.status, piece.next)
            if status is not None:
                status.see(piece.status, folder.unfinished())
            if texts:
                above(lambda texts=texts: show(texts))
            if notice := standstill.notice(piece.status):
                above(lambda notice=notice: say(notice))
    if texts := folder.finish():
        show(texts)
    return last


def show_line(context: Context, job_id: str, text: str, piece: Any) -> None:
    if context.json:
        document = {"format": FORMAT, "job": job_id, "text": text, "next": piece.next, "state": piece.status["state"]}
        print_json(document, sandbox=context.sandbox)
    else:
        print_text(text + "\n")


class _Standstill:
    """Says once, for each time it happens, that the job's progress stands still for longer than `progress.stall`."""

    def __init__(self, job_id: str, stall_s: float | None):
        self._job, self._stall_s = job_id, stall_s
        self.is_looked_for = stall_s is not None
        self._told = False

    def notice(self, status: dict[str, Any]) -> str | None:
        progress = status.get("progress")
        if self._stall_s is None or progress is None or status["state"] != "running":
            return None
        told, self._told = self._told, progress["stalled_s"] >= self._stall_s
        if told or not self._told:
            return None
        what = f"no more {one_line(progress['unit'], limit=200)} for {format_duration(progress['stalled_s'])}"
        return f"{self._job}: {what}; next: gpu job status {self._job}, or gpu job cancel {self._job}"


class _StatusLine:
    """Where a running job stands, by what the machine said last; below the line its program has not finished yet."""

    def __init__(self, context: Context, link: Any, job_id: str, timeout_s: float | None):
        self._job = job_id
        self._host = link.machine.host
        self._clock = context.clock
        self._rate_usd_hr = float(link.machine.rate_json or 0)
        self._timeout_s = timeout_s
        self._status: dict[str, Any] = {}
        self._seen_at_s = context.clock.monotonic()
        self._unfinished = ""

    def see(self, status: dict[str, Any], unfinished: str) -> None:
        self._status, self._seen_at_s = status, self._clock.monotonic()
        self._unfinished = unfinished if sys.stdout.isatty() else ""

    def rows(self) -> list[str]:
        line = "── " + " · ".join(self._parts())
        return [self._unfinished, line] if self._unfinished else [line]

    def _parts(self) -> list[str]:
        status, silent_s = self._status, self._clock.monotonic() - self._seen_at_s
        running = status.get("state", "running") == "running"
        word = (status.get("phase") or "starting") if running else status["state"]
        parts = [f"{self._job} {one_line(word, limit=200)}"]
        elapsed_s = status.get("duration_s")
        if elapsed_s is not None:
            elapsed_s += silent_s if running else 0
            limit = f" of {format_duration(self._timeout_s)}" if self._timeout_s else ""
            parts.append(format_duration(elapsed_s) + limit)
        if silent_s > SILENCE_S:
            parts.append(f"nothing heard from {self._host} for {format_duration(silent_s)}")
        elif status.get("progress"):
            parts.append(progress_text(status["progress"]))
        if elapsed_s is not None:
            parts.append(format_usd(self._rate_usd_hr * elapsed_s / 3600))
        return parts
