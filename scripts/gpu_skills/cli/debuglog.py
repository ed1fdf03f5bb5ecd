"""`--debug`: a log of what happened: redacted, 0600, rotated, in the user's state directory. Tracebacks go here."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Mapping

from gpu_skills.redaction import redact, secrets_of

_log: logging.Logger | None = None


def start(environ: Mapping[str, str]) -> None:
    """Begin to log everything of gpu_skills. Quietly does nothing where the state directory cannot be written."""
    global _log
    from logging.handlers import RotatingFileHandler

    from gpu_skills.errors import GpuError
    from gpu_skills.userdirs import state_dir

    values = secrets_of(environ)

    class Redacting(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return redact(super().format(record), values)

    try:
        folder = state_dir(environ)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / "debug.log"
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        handler = RotatingFileHandler(path, maxBytes=2_000_000, backupCount=3)
    except (OSError, GpuError):  # a log that cannot be written must not stop the command it should explain
        return
    handler.setFormatter(Redacting("%(asctime)s %(process)d %(name)s %(message)s"))
    _log = logging.getLogger("gpu_skills")
    _log.setLevel(logging.DEBUG)
    _log.addHandler(handler)
    _log.debug("start")


def record(exc: BaseException) -> str | None:
    """Put a traceback into the log if one is open; returns the log's path."""
    if _log is None:
        return None
    _log.error("%s", "".join(traceback.format_exception(exc)))
    return str(_log.handlers[0].baseFilename)  # type: ignore[attr-defined]
