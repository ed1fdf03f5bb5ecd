"""The whole life of a project's machine while something goes wrong: set up, used, stopped, started, destroyed, booked.

    Life(r).live({"setup": [fault("lost_reply", "create")]})

Each phase is what a command does. What it raises has to be a refusal, or an uncertainty that names a command; that
command is run, with time passing, until nothing is uncertain; then the phase is done again without the fault and has to
succeed. At every wait the world is looked at: nothing may bill that is on no record, and no machine be rented twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from gpu_skills.config import load_gpu_yaml
from gpu_skills.errors import ApprovalNeeded, ApprovalUsed, GpuError, RemoteError
from gpu_skills.lifecycle import intents, labels, machines, project_machine, runs, states
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.approval.approvals import Approval, Ask
from gpu_skills.lifecycle.ending import release, stops
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.recovery import reconcile
from gpu_skills.state import budget
from renting import guarded, play_machines
from run_by_hand import job

PHASES = ("setup", "use", "stop", "start", "destroy", "reconcile")
CONFIG = {
    "vast": "provider: vast\ncompute: {gpu: RTX 4090, candidates: [RTX 3090], disk_gb: 50}\n",
    "runpod": "provider: runpod\ncompute: {gpu: NVIDIA RTX A5000, candidates: [RTX 4090], disk_gb: 50}\n",
}
LAG_S = 1200.0  # after which charges are complete
CENT = Decimal("0.005")


def fault(name: str, call: str | None = None, *, times: int = 1, **args: Any) -> dict[str, Any]:
    """A rule of the sandbox. Without a call it strikes the machine there is."""
    return {"fault": name, "args": args, "times": times, "match": {} if call is None else {"call": call}}


class Life:
    """errors: what its commands raised, with their phase."""

    def __init__(self, r: Any):
        self.r = r
        self.errors: list[tuple[str, GpuError]] = []
        self.sent: Counter[str] = Counter()  # creates by label
        self.most_alive = 0
        (r.project.root / "gpu.yaml").write_text(CONFIG[r.vendor])
        self.config = load_gpu_yaml(r.project.root, environ={"HOME": str(r.project.root)})
        play_machines(r)
        guarded(r)
        self._count_creates()
        self._look_at_every_wait()

    def _count_creates(self) -> None:
        life, writer = self, self.r.writer

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(writer, name)

            def create(self, spec: Any) -> Any:
                life.sent[spec.label] += 1
                return writer.create(spec)

        self.r.op = replace(self.r.op, writer=lambda name: Counting())

    def _look_at_every_wait(self) -> None:
        sleep = self.r.clock.sleep

        def looking(seconds: float) -> None:
            self.look()
            sleep(seconds)

        self.r.clock.sleep = looking

    def look(self) -> None:
        """What bills is on record: as itself, or as a create of which nobody knows yet what it made."""
        world, project = self.r.sandbox.world, self.r.project
        with world.lock:
            alive = [instance for instance in world.instances.values() if not instance.is_destroyed]
            burning = {entry["resource"] for entry in world.burning()}
        self.most_alive = max(self.most_alive, len(alive))
        records = [m for m in machines.all_machines(project) if m.status not in states.FINAL]
        known = {m.instance_id for m in records}
        wanted = {m.intent for m in records}
        for instance in alive:
            label = labels.ours(instance.label, project.project_id)
            assert label is not None
            is_known = str(instance.id) in known or label.intent in wanted
            assert is_known or instance.resource not in burning, f"{instance.resource} bills and is on no record"

    # the life ---------------------------------------------------------------------------------------------------------

    def live(self, faults: Mapping[str, Iterable[dict[str, Any]]]) -> Life:
        """faults: rules by the phase before which they are set."""
        for phase in PHASES:
            self._strike(faults.get(phase, ()))
            self._phases[phase]()
            self.look()
            self.r.sandbox.faults.clear()
        self._require_its_end()
        return self

    @property
    def _phases(self) -> dict[str, Callable[[], None]]:
        steps = (self.set_up, self._use, self._stop, self._start, self._destroy, self._reconcile)
        return dict(zip(PHASES, steps, strict=True))

    @property
    def machine(self) -> Machine | None:
        return project_machine.current(self.r.project, self.r.vendor)

    def _strike(self, rules: Iterable[dict[str, Any]]) -> None:
        machine = self.machine
        for rule in rules:
            match = {**rule["match"], "provider": self.r.vendor}
            if not rule["match"] and rule["fault"] != "zero_balance":
                if machine is None or machine.instance_id is None:
                    continue
                match["instance"] = machine.instance_id
            self.r.sandbox.world.apply_faults([{**rule, "match": match}])

    def _do(self, phase: str, action: Callable[[], Any], *, tries: int = 5) -> Any:
        """The command; what it names when it fails; once the vendor is well again, the command once more."""
        for _ in range(tries):
            try:
                return action()
            except GpuError as exc:
                self._judge(phase, exc)
                self._follow(exc.next_step)
            self.reconciled()
            self._mend()
        raise AssertionError(f"{phase} never succeeds: {[(p, e.code, e.message) for p, e in self.errors]}")

    def _judge(self, phase: str, error: GpuError) -> None:
        """Refused: nothing happened. Failed: nothing is left. Uncertain: a command that goes on."""
        self.errors.append((phase, error))
        self.look()
        assert error.exit_code in (3, 4, 5, 6) or isinstance(error, RemoteError), repr(error)
        assert error.next_step, repr(error)
        if error.exit_code == 6:
            assert error.next_step.startswith("gpu reconcile"), (error.code, error.next_step)
        elif phase == "setup" and not error.may_be_billing:
            assert not self.r.burning(), f"{error.code} says that nothing bills: {error.message}"

    def _follow(self, step: str | None) -> None:
        """The one step of a person that is no look: a machine that nothing but its end can help."""
        if step is not None and step.startswith("gpu machine destroy "):
            machine = machines.find(self.r.project, step.split()[-1])
            assert machine is not None, step
            release.destroy(self.r.op, machine, why="asked")

    def reconciled(self) -> reconcile.Report:
        """`gpu reconcile`, as often as it asks for itself. A create that nobody ever sees is given up after a day."""
        for pause_s in (*[60] * 15, 25 * 3600, *[60] * 8):
            report = reconcile.run(self.r.op, [self.r.vendor])
            self.look()
            if report.is_clear:
                return report
            for finding in [finding for finding in report.findings if finding.is_uncertain]:
                assert finding.next_step, finding
                self._follow(finding.next_step)
            self.r.clock.sleep(pause_s)
        raise AssertionError(f"reconcile comes to no end: {report.findings} {report.accounts}")

    def _mend(self) -> None:
        """The vendor finds out what was wrong, and somebody pays what is owed."""
        world = self.r.sandbox.world
        self.r.sandbox.faults.clear()
        if self.machine is not None and self.machine.instance_id is not None:
            world.apply_faults([{"match": {"instance": self.machine.instance_id}, "fault": "well"}])
        account = world.account(self.r.vendor)
        if account.is_broke:
            world.set_balance(account, Decimal(100))

    # its phases -------------------------------------------------------------------------------------------------------

    def _agree(self, ask: Ask) -> Approval:
        """A person says yes to everything that was not allowed yet."""
        try:
            return approvals.find(self.r.op, ask)
        except ApprovalUsed:
            raise
        except ApprovalNeeded:
            return approvals.give(self.r.op, ask, statement="yes", source="approve")

    def _ready(self) -> None:
        project_machine.ready(self.r.op, self.config, agree=self._agree).close()

    def set_up(self) -> None:
        self._do("setup", self._ready)

    def _use(self) -> None:
        """A job, and a while of nothing; what happens to the machine meanwhile is found by whoever looks."""
        machine = self.machine
        assert machine is not None
        self.r.clock.sleep(120)
        job(self.r, machine, 60)
        self.r.clock.sleep(300)

    def _stop(self) -> None:
        def stopped() -> None:
            machine = self.machine
            if machine is not None and machine.status != "stopped":
                stops.stop(self.r.op, machine)

        self._do("stop", stopped)
        self.r.clock.sleep(900)

    def _start(self) -> None:
        self._do("start", self._ready)
        self.r.clock.sleep(300)

    def _destroy(self) -> None:
        def destroyed() -> None:
            if self.machine is not None:
                release.destroy(self.r.op, self.machine, why="asked")

        self._do("destroy", destroyed)

    def _reconcile(self) -> None:
        self.reconciled()
        self.r.clock.sleep(LAG_S)
        self.reconciled()

    # its end ----------------------------------------------------------------------------------------------------------

    def _require_its_end(self) -> None:
        r = self.r
        self.reconciled()  # whatever kept the charges from being read is over
        everything = machines.all_machines(r.project)
        assert not r.burning()
        assert {m.status for m in everything} <= {*states.FINAL}, [(m.id, m.status) for m in everything]
        assert not [i for i in intents.read(r.project).values() if i.is_open]
        assert budget.open_reservations(r.project, r.op.environ) == {}
        assert all(run.is_settled for run in runs.own_runs(r.op))
        self._require_no_create_twice()
        booked, billed = r.op.ledger.spend(include_charges=True).total_usd, r.billed_usd()
        assert abs(booked - billed) < CENT, f"booked {booked}, billed {billed}"

    def _require_no_create_twice(self) -> None:
        """One request for each attempt, and in each run no more that were not refused than its plan has room for."""
        assert set(self.sent.values()) <= {1} and self.r.creates == self.sent.total()
        for run in runs.own_runs(self.r.op):
            made = [attempt.offer_id for attempt in run.attempts if attempt.result != "refused"]
            assert len(made) <= 1 + plans.load(self.r.project, run.plan_sha256)[1].setup_failures_max, run
            assert self.r.vendor == "runpod" or len(made) == len(set(made)), "one offer was rented twice"
