"""What one pass of reconcile works with and what it reports: a listing, the pass itself, its findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpu_skills.errors import GpuError
from gpu_skills.lifecycle import labels, machines, states
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.recovery import adoption
from gpu_skills.lifecycle.runs import Run
from gpu_skills.providers.base import Charge, RentedReader
from gpu_skills.providers.base import Machine as Instance


@dataclass(frozen=True)
class Finding:
    """what: a word to branch on. is_uncertain: it may bill, or go on billing, and nothing here can change that now.

    burn_usd_hr: what it costs as far as anybody can tell.
    """

    what: str
    text: str
    provider: str
    machine_id: str | None = None
    instance_id: str | None = None
    next_step: str | None = None
    is_uncertain: bool = False
    burn_usd_hr: Decimal | None = None


@dataclass(frozen=True)
class Account:
    """What one provider showed. problem: why it could not be listed; then nothing was concluded about its machines."""

    provider: str
    ours: int = 0
    foreign: int = 0
    project_ids: dict[str, int] = field(default_factory=dict)
    problem: GpuError | None = None


@dataclass(frozen=True)
class Report:
    accounts: tuple[Account, ...]
    findings: tuple[Finding, ...]
    booked: int = 0

    @property
    def is_clear(self) -> bool:
        """Nothing is uncertain, and every provider was listed."""
        return not any(f.is_uncertain for f in self.findings) and all(a.problem is None for a in self.accounts)


class Listing:
    """A reader that lists an account once for the whole pass. Single instances and everything else are asked anew."""

    def __init__(self, reader: RentedReader):
        self._reader = reader
        self._shown = reader.machines()
        self._charges: dict[datetime, list[Charge]] = {}

    def machines(self) -> list[Instance]:
        return list(self._shown)

    def charges(self, since: datetime, until: datetime) -> list[Charge]:
        """Of one beginning asked once: a pass that takes a while sees the charges as they were in it."""
        if since not in self._charges:
            self._charges[since] = self._reader.charges(since, until)
        return self._charges[since]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def instead_of(self, op: Operator) -> Any:
        return lambda name: self if name == self._reader.name else op.reader(name)


class Pass:
    """One provider, once: what it shows, and what has been found so far.

    held: machines that another process works on, or that were dealt with in this pass.
    """

    def __init__(self, op: Operator, provider: str, listing: Listing):
        self.op, self.provider = op, provider
        self.shown = listing.machines()
        self.findings: list[Finding] = []
        self.booked = 0
        self.held: set[str] = set()
        self.adopts = False

    def account(self) -> Account:
        ours = sum(1 for seen in self.shown if labels.ours(seen.label, self.op.project.project_id))
        ids = adoption.project_ids(self.shown)
        ids.pop(self.op.project.project_id, None)
        return Account(self.provider, ours, len(self.shown) - ours, ids)

    def say(
        self, what: str, text: str, *, machine: Machine | None = None, machine_id: str | None = None, **more: Any
    ) -> None:
        if machine is not None:
            machine_id = machine.id
            more.setdefault("instance_id", machine.instance_id)
            stopped = machine.status == "stopped"
            if machine.status not in states.FINAL:
                more.setdefault("burn_usd_hr", machine.storage_usd_hr if stopped else machine.rate_usd_hr)
        self.findings.append(Finding(what, text, self.provider, machine_id, **more))

    def machines(self) -> list[Machine]:
        return [m for m in machines.all_machines(self.op.project) if m.provider == self.provider and m.is_rented]

    def is_ours(self, run: Run) -> bool:
        return run.project_id == self.op.project.project_id

    def plan(self, sha256: str | None) -> Any:
        return plans.find(self.op.project, sha256)

    def with_intent(self, intent: str) -> list[Instance]:
        """All that carry it, the oldest first."""
        found = []
        for seen in self.shown:
            if labels.intent_of(seen.label, self.op.project.project_id) == intent:
                found.append(seen)
        now = self.op.clock.now()
        return sorted(found, key=lambda seen: (seen.created_at is None, seen.created_at or now, seen.instance_id))

    def end(self, machine: Machine, why: str) -> None:
        """Sent away; its absence is found out by later passes."""
        self.held.add(machine.id)
        state = release.destroy(self.op, machine, why=why, wait_s=0)
        step = None if state == "destroyed" else f"gpu reconcile --provider {self.provider}"
        self.say("ended", f"{why}: destroyed", machine=machine, next_step=step, is_uncertain=step is not None)
