"""One command in a process of its own that kills itself at a door. Not a test: `python killed.py JSON`, see Victim.

What happens is SIGKILL: nothing is unwound, closed or flushed, and locks go as the kernel takes them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Victim:
    """args: of `gpu`. url: of the sandbox, whose clock is the command's."""

    args: list[str]
    root: str
    url: str
    crossing: int
    side: str

    def dies(self, environ: dict[str, str]) -> bool:
        """Whether the signal ended it; False when it got to its end before that."""
        environ = {**environ, "PYTHONPATH": f"{TESTS.parent / 'scripts'}:{TESTS}", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, __file__, json.dumps(asdict(self))]
        done = subprocess.run(command, env=environ, cwd=self.root, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode == -signal.SIGKILL


def main() -> int:
    from gpu_skills import doors
    from gpu_skills.cli import main as cli
    from gpu_skills.cli.context import Context
    from races.racers import FarClock

    victim = Victim(**json.loads(sys.argv[1]))
    seen = 0

    def watcher(name: str, side: str) -> None:
        nonlocal seen
        seen += side == victim.side
        if seen == victim.crossing:
            os.kill(os.getpid(), signal.SIGKILL)

    root = Path(victim.root)
    context = Context(
        cwd=root,
        environ=dict(os.environ),
        clock=FarClock(victim.url),
        system_policy=root / "no-system-policy.json",
        account_home=Path(os.environ["HOME"]),
    )
    doors.watch(watcher)
    return cli.run(victim.args, obj=context)


if __name__ == "__main__":
    raise SystemExit(main())
