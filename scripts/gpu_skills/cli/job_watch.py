"""Show a job's log as it comes: a moving line on a terminal, whole lines elsewhere, documents with `--json`."""

from __future__ import annotations

import sys
from typing import Any

from gpu_skills.cli.context import Context
from gpu_skills.cli.output import FORMAT, print_json, print_text, say


def stream(context: Context, link: Any, job_id: str, offset: int, *, to_stderr: bool = False) -> Any:
    """Print the log as it comes; returns the last piece. A terminal sees the moving line, others whole lines."""
    from gpu_skills.jobs import follow as following

    folder, last = following.LineFolder(), None
    moving = context.is_interactive and sys.stdout.isatty() and not to_stderr
    width = 0

    def show(text: str) -> None:
        if to_stderr:
            say(text)
        else:
            show_line(context, job_id, text, last)

    for piece in following.follow(
        link, context.project.project_id, job_id, clock=context.clock, offset=offset, say=say
    ):
        last = piece
        if width:
            sys.stdout.write("\r" + " " * width + "\r")
            width = 0
        if piece.gap_bytes:
            show(following.gap_notice(piece.gap_bytes))
        for text in folder.feed(piece.data):
            show(text)
        if moving and (partial := folder.unfinished()):
            partial = partial[-200:]
            width = len(partial)
            sys.stdout.write("\r" + partial)
            sys.stdout.flush()
    for text in folder.finish():
        show(text)
    return last


def show_line(context: Context, job_id: str, text: str, piece: Any) -> None:
    if context.json:
        print_json({"format": FORMAT, "job": job_id, "text": text, "next": piece.next, "state": piece.status["state"]})
    else:
        print_text(text + "\n")
