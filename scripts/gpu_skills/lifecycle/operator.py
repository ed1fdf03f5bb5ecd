"""What the lifecycle works with: the records, the providers, the clock, and what only the layers above can know.

`cli/context.py` builds it; tests build it on a sandbox. Nothing in `lifecycle/` finds any of these by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_skills.clock import Clock
from gpu_skills.state.ledger import Ledger
from gpu_skills.state.policy import Policy
from gpu_skills.state.project import Project

if TYPE_CHECKING:
    from gpu_skills.lifecycle.connect import Link
    from gpu_skills.lifecycle.machines import Machine
    from gpu_skills.providers.base import RentedReader, RentedWriter


def _nothing(machine_id: str) -> list[str]:
    return []


def _settles_nothing(machine_id: str, why: str, at: datetime | None = None) -> None:
    return None


def _no_jobs(link: Link, *, write: bool) -> tuple[list[str], list[str]]:
    return [], []


def _silent(line: str) -> None:
    return None


@dataclass(frozen=True)
class Operator:
    """reader, writer, account: by the provider's name; writer raises ModeForbids in Audit. account: what names the
    account behind our key, for what projects share about it.

    connect: raises RemoteError kinds. running_jobs, unverified: job ids of a machine, as the ledger and the job folders
    have them: what runs there, and whose outputs are nowhere but there. settle_jobs: (machine id, why, at=when it went)
    ends in the ledger what can no longer end there, before the machine's own time is booked. jobs_there: (link,
    write=whether to put on record what no record names) ids put on record, and those that no record names still.
    say: one line for a person who waits. notify: (event, machine or job id, facts); never raises.
    account_home: of the computer's account; tests name another. No environment variable does.
    """

    project: Project
    ledger: Ledger
    clock: Clock
    policy: Callable[[], Policy]
    environ: Mapping[str, str]
    reader: Callable[[str], RentedReader]
    writer: Callable[[str], RentedWriter]
    account: Callable[[str], str]
    connect: Callable[[Machine], Link]
    running_jobs: Callable[[str], list[str]] = _nothing
    unverified: Callable[[str], list[str]] = _nothing
    settle_jobs: Callable[..., object] = _settles_nothing
    jobs_there: Callable[..., tuple[list[str], list[str]]] = _no_jobs
    say: Callable[[str], None] = _silent
    notify: Callable[..., None] = field(default=lambda event, subject, **facts: None)
    account_home: Path | None = None

    @property
    def user_state(self) -> Path:
        """What all projects of this user share: accounts, sentinel passes, keys."""
        from gpu_skills.userdirs import state_dir

        return state_dir(self.environ)

    @property
    def account_state(self) -> Path:
        """What must not follow the environment: which signed approvals are used up. Raises NoHome."""
        from gpu_skills.userdirs import account_state_dir

        return account_state_dir() if self.account_home is None else self.account_home / ".local/state/gpu"
