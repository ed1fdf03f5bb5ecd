"""What cleans up after a sandbox that was killed: a fork of it that waits for its end and does nothing else.

A process that gets SIGKILL can end nothing of what it started, and a machine's processes detach from it on purpose.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from gpu_skills.sandbox import processes


def keep(directory: Path, info: Path) -> Callable[[], None]:
    """Begin to watch this process; call it before there are threads. Returns what ends the watch.

    If this process ends without that, everything of its instances is killed and `info` removed. The lock of the
    directory, if held, stays held until then, since the fork has it too: the next sandbox begins after the cleaning.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    keeper = os.fork()
    if keeper == 0:
        try:
            os.close(writing)
            _wait_and_clean(reading, directory, info)
        finally:
            os._exit(0)
    os.close(reading)

    def release() -> None:
        with contextlib.suppress(OSError):
            os.write(writing, b".")
        os.close(writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(keeper, 0)

    return release


def _wait_and_clean(reading: int, directory: Path, info: Path) -> None:
    os.setsid()  # what is sent to the sandbox's group is not for us
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # whoever reads the sandbox's output to its end does not wait for us
        os.dup2(nothing, standard)
    if os.read(reading, 1):
        return
    info.unlink(missing_ok=True)
    processes.sweep(directory)
