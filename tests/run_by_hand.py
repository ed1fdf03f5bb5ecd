"""A run step by step, written down as provisioning writes it: so that a test can end in the middle, or go on alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

from gpu_skills.clock import timestamp
from gpu_skills.lifecycle import intents, labels, machines, runs
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import Candidate, Plan
from gpu_skills.lifecycle.runs import Attempt, Run
from gpu_skills.providers.base import MachineSpec, Offer, Requirements
from gpu_skills.state import budget, policy

APPROVAL = "a_0123456789abcdef"
_CEILINGS = ("job_usd", "session_usd", "day_usd", "month_usd", "machines")
LIMITS = policy.combine([("project", {"ceilings": dict.fromkeys(_CEILINGS)})])
STEPS = ("bind", "reserve", "attempt", "record", "begin", "create", "close")


@dataclass
class ByHand:
    """One approval on its way. Each step may be the last."""

    r: Any
    approval: str = APPROVAL
    number: int = 1
    machine_class: str = "project"
    deadline_h: float = 6
    disk_gb: int = 50
    bid: bool = False

    def __post_init__(self) -> None:
        op = self.r.op
        self.op, self.project, self.vendor = op, op.project, self.r.vendor
        self.intent = labels.create_intent(self.machine_class, self.approval, self.number)
        self.machine_id = labels.machine_id(self.intent)
        self.deadline_at = op.clock.now() + timedelta(hours=self.deadline_h)
        self.label = str(labels.Label(self.project.project_id, self.intent, self.deadline_at))
        self.offer: Offer | None = None
        self.outcome: Any = None

    def upto(self, last: str) -> ByHand:
        for step in STEPS[: STEPS.index(last) + 1]:
            getattr(self, step)()
        return self

    def freeze(self) -> str:
        """The plan that was approved: any offer up to a dollar an hour."""
        now = self.op.clock.now()
        plan = Plan(
            project_id=self.project.project_id,
            machine_class=self.machine_class,
            provider=self.vendor,
            image="pytorch/pytorch:2.8.0",
            disk_gb=self.disk_gb,
            gpu_count=1,
            candidates=(Candidate("RTX 4090"),),
            max_rate_usd_hr=Decimal(1),
            deadline_s=self.deadline_h * 3600,
            storage_grace_s=24 * 3600.0,
            worst_case_usd=Decimal(5),
            measured_at=timestamp(now),
            expires_at=timestamp(now + timedelta(hours=1)),
        )
        return plans.freeze(self.project, plan)

    def bind(self) -> None:
        op, now = self.op, self.op.clock.now()
        run = Run(
            approval_id=self.approval,
            plan_sha256=self.freeze(),
            project_id=self.project.project_id,
            provider=self.vendor,
            account=budget.account_directory(self.vendor, op.account(self.vendor), op.environ).name,
            owner=runs.owner_of(op),
            reserved_usd=5,
            approval_expires_at=timestamp(now + timedelta(hours=1)),
            began_at=timestamp(now),
        )
        runs.create(op, run)

    def reserve(self) -> None:
        budget.reserve(
            self.project,
            self.op.ledger,
            self.op.clock,
            LIMITS,
            intent=self.approval,
            account=self.op.account(self.vendor),
            provider=self.vendor,
            cost_usd=5,
            rate_usd_hr=1,
            deadline_h=6,
            environ=self.op.environ,
        )

    def attempt(self) -> None:
        need = Requirements(gpu="RTX 4090", disk_gb=self.disk_gb, interruptible=self.bid)
        self.offer = self.r.reader.offers(need)[0]
        attempt = Attempt(
            number=self.number,
            intent=self.intent,
            machine_id=self.machine_id,
            label=self.label,
            deadline_at=timestamp(self.deadline_at),
            offer_id=self.offer.offer_id,
            gpu=self.offer.gpu,
            rate_usd_hr=float(self.offer.rate_usd_hr),
            began_at=timestamp(self.op.clock.now()),
        )
        runs.update(self.op, self.approval, lambda run: runs.with_attempt(run, attempt))

    def make_unrecorded(self) -> None:
        """Make the machine and write nothing down about it, as another project's machine looks from here."""
        self.offer = self.r.reader.offers(Requirements(gpu="RTX 4090", disk_gb=self.disk_gb))[0]
        self.create()

    def record(self) -> None:
        machines.save(
            self.project,
            Machine(
                id=self.machine_id,
                provider=self.vendor,
                host=self.machine_id,
                status="requested",
                rate_usd_hr=self.offer.rate_usd_hr,
                storage_usd_hr=self.offer.storage_usd_hr,
                gpu=self.offer.gpu,
                gpu_count=1,
                label=self.label,
                machine_class=self.machine_class,
                intent=self.intent,
                disk_gb=self.disk_gb,
                deadline_at=timestamp(self.deadline_at),
                created_at=timestamp(self.op.clock.now()),
                plan=runs.load(self.op, self.approval).plan_sha256,
            ),
        )
        run = runs.load(self.op, self.approval)
        budget.note_attempt(
            self.project,
            self.op.clock,
            intent=self.approval,
            directory=run.account,
            machine_id=self.machine_id,
            environ=self.op.environ,
        )

    def begin(self) -> None:
        intents.begin(
            self.project,
            self.op.clock,
            "create",
            self.intent,
            provider=self.vendor,
            machine_id=self.machine_id,
            label=self.label,
            approval_id=self.approval,
        )

    def create(self) -> None:
        bid = {"bid_usd_hr": self.offer.min_bid_usd_hr * Decimal("1.5")} if self.bid else {}
        self.outcome = self.r.writer.create(
            MachineSpec(
                offer=self.offer,
                label=self.label,
                image="pytorch/pytorch:2.8.0",
                disk_gb=self.disk_gb,
                gpu_count=1,
                max_rate_usd_hr=self.offer.rate_usd_hr * 2,
                ssh_public_key="ssh-ed25519 AAAA test",
                persistent_gb=self.disk_gb if self.machine_class == "project" else None,
                **bid,
            )
        )

    def result(self) -> str:
        return {"created": "done", "refused": "refused", "unknown": "unknown"}[self.outcome.kind]

    def close(self) -> None:
        instance = self.outcome.instance_id
        intents.close(self.project, self.op.clock, self.intent, self.result(), instance_id=instance)
        if self.outcome.kind != "created":
            return

        def known(machine: Machine) -> Machine:
            return replace(machine, host=instance, status="booting", last_seen_at=timestamp(self.op.clock.now()))

        machines.update(self.project, self.machine_id, known)
        self._mark(result="done")

    def refused(self, reason: str = "no_capacity") -> None:
        """The provider said no: nothing was made."""
        intents.begin(self.project, self.op.clock, "create", self.intent, machine_id=self.machine_id, label=self.label)
        intents.close(self.project, self.op.clock, self.intent, "refused", reason=reason)
        machines.update(self.project, self.machine_id, lambda m: replace(m, status="lost"))
        self._mark(result="refused", reason=reason, is_over=True)

    def ready(self, after_s: float = 60) -> Machine:
        """It came up and everything was checked."""
        self.r.clock.sleep(after_s)
        now = timestamp(self.op.clock.now())
        self._mark(result="done")
        runs.update(self.op, self.approval, lambda run: replace(run, state="won", won=self.intent))
        return machines.update(
            self.project, self.machine_id, lambda m: replace(m, status="ready", ready_at=now, last_seen_at=now)
        )

    def _mark(self, **changes: Any) -> None:
        def marked(run: Run) -> Run:
            attempt = next(a for a in run.attempts if a.number == self.number)
            return runs.with_attempt(run, replace(attempt, **changes))

        runs.update(self.op, self.approval, marked)

    @property
    def machine(self) -> Machine:
        found = machines.find(self.project, self.machine_id)
        assert found is not None
        return found


def job(r: Any, machine: Machine, seconds: float, *, status: str = "succeeded", end: bool = True) -> str:
    """A job that runs on a machine for so long, booked at the machine's rate."""
    start = r.clock.now()
    line = r.op.ledger.start(
        {"provider": machine.provider, "machine_id": machine.id, "started_at": timestamp(start), "gpu": machine.gpu}
    )
    if end:
        r.clock.sleep(seconds)
        cost = machine.rate_usd_hr * Decimal(str(seconds)) / 3600
        ending = {"id": line["id"], "status": status, "completed_at": timestamp(r.clock.now()), "duration_s": seconds}
        r.op.ledger.finish({**ending, "cost_usd": cost, "artifacts": []})
    return line["id"]


def changed(r: Any, hand: ByHand, **changes: Any) -> Machine:
    """The machine's record with these fields, as another part would write them."""
    return machines.update(r.project, hand.machine_id, lambda machine: replace(machine, **changes))
