"""A job with a machine of its own, through the real command line and machines of the sandbox that really run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dying import Died
from gpu_skills.cli.context import Context
from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import Unreachable
from gpu_skills.jobs import launch, parting
from gpu_skills.lifecycle import runs
from gpu_skills.lifecycle.guard import keyproof
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.sandbox import Sandbox
from s3_server import s3, s3_application
from sandbox_fixture import eventually, make_sandbox
from vendor_clock import VendorClock

__all__ = ["make_sandbox", "s3", "s3_application"]

pytestmark = pytest.mark.subprocess

TRAIN = """
import os, time
out = os.environ["GPU_OUTPUT_DIR"]
print("progress steps=1", flush=True)
os.makedirs(out + "/checkpoint-10")
open(out + "/checkpoint-10/weights", "wb").write(b"w" * 5000)
open(out + "/result.txt", "w").write("done")
"""


class EventfulClock(VendorClock):
    """Something may happen while somebody waits: Ctrl-C, another command, death."""

    def __init__(self, sandbox: Sandbox):
        super().__init__(sandbox)
        self._planned: list[tuple[Callable[[], bool], Callable[[], Any]]] = []

    def meanwhile(self, when: Callable[[], bool], then: Callable[[], Any]) -> None:
        """Do this once, at the first wait at which `when` holds."""
        self._planned.append((when, then))

    def interrupts_after(self, when: Callable[[], bool]) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        self.meanwhile(when, interrupt)

    def sleep(self, seconds: float) -> None:
        for planned in [p for p in self._planned if p[0]()]:
            self._planned.remove(planned)
            planned[1]()
        super().sleep(seconds)


@dataclass
class Shop:
    """A project whose jobs are rented for at one vendor of a sandbox. `gpu(...)` is a command of its user."""

    vendor: str
    sandbox: Sandbox
    clock: EventfulClock
    root: Path
    call: Callable[..., Any]
    world: dict[str, Any] = field(default_factory=dict)

    def gpu(self, *args: str, **more: Any) -> Any:
        return self.call(*args, cwd=self.root, clock=self.clock, **{**self.world, **more})

    def operator(self) -> Operator:
        """What its commands work with."""
        world = {**self.world, "system_policy": self.root / "no-policy.json"}
        return Context(cwd=self.root, environ=dict(os.environ), clock=self.clock, **world).operator

    def plan(self, *args: str, run: str = "python3 train.py") -> str:
        """Freeze a plan for a job; its name."""
        result = self.gpu("plan", "--json", "--freeze", *args, "--", run)
        assert result.exit_code == 0, result.stderr
        return result.document["name"]

    def run(self, plan: str, *args: str, **more: Any) -> Any:
        return self.gpu("job", "run", "--plan", plan, "--json", *args, **more)

    def ledger(self) -> list[dict[str, Any]]:
        path = self.root / ".pi/gpu/jobs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def machines(self) -> list[dict[str, Any]]:
        return json.loads((self.root / ".pi/gpu/machines.json").read_text())

    def burning(self) -> list[str]:
        return sorted({entry["resource"] for entry in self.sandbox.world.burning()})

    @property
    def creates(self) -> int:
        return self.sandbox.world.calls[self.vendor, "create"]


@pytest.fixture
def shop(make_sandbox, gpu, tmp_path: Path, monkeypatch, home) -> Callable[..., Shop]:
    def make(vendor: str = "vast", *, real: bool = True, **options: Any) -> Shop:
        sandbox = make_sandbox(real=real, **{"seed": 3, "limits": "off", **options})
        monkeypatch.setenv("VAST_URL", sandbox.url)
        monkeypatch.setenv("RUNPOD_API_BASE_URL", sandbox.url)
        monkeypatch.setenv(f"{vendor.upper()}_API_KEY", sandbox.key(vendor))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
        root = tmp_path / "project"
        root.mkdir()
        made = Shop(vendor, sandbox, EventfulClock(sandbox), root, gpu, {"account_home": tmp_path / "account"})
        assert made.gpu("init", "--jobs", "--provider", vendor).exit_code == 0
        (root / "train.py").write_text(TRAIN)
        op = made.operator()
        for rights in ("destroy", "stop"):
            keyproof.note(op, vendor, op.account(vendor), "proven", rights)
        return made

    return make


def test_a_job_gets_a_machine_of_its_own_and_leaves_nothing_behind(shop):
    s = shop()
    plan = s.plan("--expect", "result.txt")
    assert s.creates == 0
    result = s.run(plan, "--yes", "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    document = result.document
    assert (document["state"], document["collected"], document["machine_state"]) == ("succeeded", True, "destroyed")
    assert (s.root / "gpu-outputs/J-000001/result.txt").read_text() == "done"
    assert s.creates == 1 and s.burning() == []
    first, last = s.ledger()
    assert first["plan"] == last["plan"] == plan and last["machine_id"] == document["machine"]
    again = s.run(plan)
    assert again.exit_code == 0 and again.document["job"] == "J-000001" and s.creates == 1


def test_outputs_with_a_durable_home_are_there_before_the_machine_goes(shop, s3, monkeypatch):
    from gpu_skills.jobs import expiry

    s = shop()
    (s.root / "gpujob.yaml").write_text(f"run: python3 train.py\noutputs: {{uri: '{s3.uri}/runs'}}\n")
    handed: list[int] = []
    hand_over = expiry.hand_over
    monkeypatch.setattr(expiry, "hand_over", lambda *given: handed.append(hand_over(*given)))
    shown = s.gpu("plan", "--freeze", "--", "python3", "train.py")
    assert f"{s3.uri}/runs" in shown.stdout
    result = s.run(s.plan(), "--yes", "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    assert result.document["machine_state"] == "destroyed" and "not pushed" not in result.stderr
    last = s.ledger()[-1]
    assert {a["name"] for a in last["artifacts"]} == {"checkpoint-10/weights", "result.txt"}
    assert all(a["uri"].startswith(f"{s3.uri}/runs/J-000001-") for a in last["artifacts"])
    assert len(s3.keys()) == 2 and handed == [expiry.SLOTS + 1]
    kept = [path for path in (s.root / ".pi").rglob("*") if path.is_file() and b"X-Amz-" in path.read_bytes()]
    assert kept == [], "an address is a key"


def test_a_home_that_is_not_there_is_said_before_anything_is_rented(shop, s3):
    s = shop()
    (s.root / "gpujob.yaml").write_text("run: python3 train.py\noutputs: {uri: 's3://no-such-bucket-here/runs'}\n")
    result = s.run(s.plan(), "--yes")
    assert result.exit_code == 125 and result.error["code"] == "bucket_missing"
    assert s.creates == 0 and s.ledger() == []


def test_on_runpod_it_is_the_same(shop):
    s = shop("runpod")
    result = s.run(s.plan(), "--yes", "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    assert result.document["machine_state"] == "destroyed" and s.burning() == []
    assert (s.root / "gpu-outputs/J-000001/checkpoint-10/weights").stat().st_size == 5000


def test_without_a_yes_nothing_is_rented_and_the_text_to_show_is_in_the_output(shop):
    s = shop(real=False)
    result = s.run(s.plan())
    assert result.exit_code == 125 and result.error["code"] == "approval_missing"
    assert "worst case" in result.error["details"]["text"] and "deadline" in result.error["details"]["text"]
    assert s.creates == 0 and s.ledger() == []


@pytest.mark.parametrize(
    ("flag", "value"), [("--hold-for", "31m"), ("--max-lease", "13h"), ("--job-timeout", "2h"), ("--hold-for", "soon")]
)
def test_a_flag_can_only_shorten_what_was_approved(shop, flag, value):
    s = shop(real=False)
    result = s.run(s.plan("--job-timeout", "1h"), "--yes", flag, value)
    assert result.exit_code == 125 and result.error["code"] == "usage" and flag in result.error["message"]
    if value != "soon":
        assert result.error["next_step"] == f"gpu plan --freeze {flag} {value} -- python3 train.py", "works as typed"
    assert s.creates == 0


@pytest.mark.parametrize("given", [["--timeout", "5m"], ["--expect", "x"], ["--dir", "."], ["--", "true"]])
def test_what_a_plan_froze_cannot_be_given_again(shop, given):
    s = shop(real=False)
    result = s.run(s.plan(), "--yes", *given)
    assert result.exit_code == 125 and result.error["code"] == "usage" and "frozen" in result.error["message"]
    run = "true" if given[0] == "--" else "python3 train.py"
    assert result.error["next_step"] == f"gpu plan --freeze -- {run}"


def test_a_file_that_changed_since_the_plan_is_named_and_nothing_is_rented(shop):
    s = shop(real=False)
    plan = s.plan()
    (s.root / "train.py").write_text("print('other')")
    result = s.run(plan, "--yes")
    assert result.exit_code == 125 and result.error["code"] == "inputs_changed"
    assert "train.py (has other content)" in result.error["message"] and s.creates == 0
    assert result.error["next_step"].endswith("gpu plan --freeze -- python3 train.py")
    assert not (s.root / ".pi/gpu/approvals.jsonl").exists()


def test_a_file_that_came_after_the_plan_stays_here(shop):
    s = shop()
    plan = s.plan(run="ls > $GPU_OUTPUT_DIR/listing")
    (s.root / "notes.txt").write_text("nobody approved this")
    result = s.run(plan, "--yes", "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    listing = (s.root / "gpu-outputs/J-000001/listing").read_text().split()
    assert "train.py" in listing and "notes.txt" not in listing
    assert "notes.txt came after the plan" in result.stderr


def test_a_shorter_lease_is_the_deadline_on_the_machines_label(shop):
    s = shop()
    result = s.run(s.plan(), "--yes", "--hold-for", "0", "--max-lease", "2h")
    assert result.exit_code == 0, result.stderr
    (machine,) = s.machines()
    begun, ends = parse_timestamp(machine["created_at"]), parse_timestamp(machine["deadline_at"])
    assert abs((ends - begun).total_seconds() - 7200) < 60


def test_the_exit_code_is_the_jobs_own_and_its_machine_goes_all_the_same(shop):
    s = shop()
    result = s.run(s.plan(run="echo bad; exit 7"), "--yes", "--hold-for", "0")
    assert result.exit_code == 7 and result.document["state"] == "failed" and s.burning() == []


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_whole_run_costs_at_most_forty_calls(shop, vendor):
    s = shop(vendor)
    plan = s.plan(run="sleep 2")
    before = s.sandbox.world.calls.total()
    assert s.run(plan, "--yes", "--hold-for", "0").exit_code == 0
    assert s.sandbox.world.calls.total() - before <= 40


def test_a_machine_is_held_for_review_and_says_how_long(shop):
    s = shop()
    result = s.run(s.plan(), "--yes", "--hold-for", "10m")
    assert result.exit_code == 0, result.stderr
    assert result.document["held"] == "over" and result.document["machine_state"] == "destroyed"
    assert "is held for review" in result.stderr and "ssh -o HostKeyAlias=" in result.stderr
    assert "9m59s left" in result.stderr or "10m00s left" in result.stderr
    assert sum(s.clock.slept) >= 600 and s.burning() == []


def test_an_interrupted_hold_ends_the_machine(shop):
    s = shop()
    s.clock.interrupts_after(lambda: any(line["status"] == "completed" for line in s.ledger()))
    result = s.run(s.plan(), "--yes")
    assert result.exit_code == 0, result.stderr
    assert result.document["held"] == "interrupted" and s.burning() == []
    assert result.document["collected"]


def holds(s: Shop, *words: str) -> None:
    (machine,) = s.machines()
    assert s.gpu("machine", "hold", machine["id"], *words).exit_code == 0


def is_completed(s: Shop) -> bool:
    return any(line["status"] == "completed" for line in s.ledger())


@pytest.mark.parametrize(("review", "by_hand"), [("10m", "40m"), ("40m", "10m")])
def test_of_the_review_and_a_hold_by_hand_the_longer_one_counts(shop, review, by_hand):
    s = shop()
    s.clock.meanwhile(lambda: is_completed(s), lambda: holds(s, "--for", by_hand))
    result = s.run(s.plan("--hold-for", "40m"), "--yes", "--hold-for", review)
    assert result.exit_code == 0, result.stderr
    assert result.document["held"] == "over" and 2300 <= sum(s.clock.slept) < 2800 and s.burning() == []


def test_a_machine_that_is_held_while_its_job_runs_outlives_the_job_by_the_hold(shop):
    s = shop()
    plan = s.plan(run="sleep 2")
    assert s.run(plan, "--yes", "--detach").exit_code == 0
    holds(s, "--for", "40m")
    slept = len(s.clock.slept)
    result = s.run(plan, "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    assert result.document["held"] == "over" and sum(s.clock.slept[slept:]) >= 2200 and s.burning() == []


def test_a_held_machine_goes_at_a_word_and_not_for_the_end_of_its_job(shop):
    s = shop()
    plan = s.plan(run="sleep 1")
    assert s.run(plan, "--yes", "--detach").exit_code == 0
    holds(s, "--for", "40m")
    op = s.operator()
    launched = launch.find(op.project, op.project.path("launches").glob("*.json").__next__().stem)
    with pytest.raises(parting.MachineHeld, match="is held until"):
        parting.let_go(op, launched)
    assert len(s.burning()) == 1
    holds(s, "--off")
    result = s.run(plan, "--hold-for", "0")
    assert result.exit_code == 0 and result.document["held"] is None and s.burning() == []


def test_a_detached_run_is_followed_collected_and_let_go_by_the_same_call(shop):
    s = shop()
    plan = s.plan(run="sleep 1; echo out > $GPU_OUTPUT_DIR/o")
    started = s.run(plan, "--yes", "--detach")
    assert started.exit_code == 0 and started.document["state"] == "running", started.stderr
    assert "bills until" in started.stderr and len(s.burning()) == 1
    result = s.run(plan, "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    assert result.document["job"] == started.document["job"] and result.document["collected"]
    assert s.creates == 1 and s.burning() == []


def test_a_later_call_shortens_the_hold_and_is_told_what_it_can_no_longer_shorten(shop):
    s = shop()
    plan = s.plan(run="sleep 1")
    assert s.run(plan, "--yes", "--detach", "--job-timeout", "1h").exit_code == 0
    for flag in ("--max-lease", "--job-timeout"):
        result = s.run(plan, flag, "30m")
        assert result.exit_code == 125 and result.error["code"] == "usage", result.stderr
        assert flag in result.error["message"] and "comes too late" in result.error["message"]
    slept = len(s.clock.slept)
    result = s.run(plan, "--hold-for", "0", "--job-timeout", "1h")
    assert result.exit_code == 0, result.stderr
    assert result.document["held"] is None and sum(s.clock.slept[slept:]) < 600 and s.burning() == []


def test_a_hold_that_was_broken_off_by_death_is_ended_by_a_later_call_that_holds_nothing(shop):
    s = shop()
    plan = s.plan()

    def die() -> None:
        raise Died

    s.clock.meanwhile(lambda: any(line["status"] == "completed" for line in s.ledger()), die)
    with pytest.raises(Died):
        s.run(plan, "--yes")
    assert len(s.burning()) == 1
    result = s.run(plan, "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    assert result.document["held"] is None and s.burning() == []


def died_in_its_hold(s: Shop) -> tuple[str, dict[str, Any]]:
    """(plan, machine) of a job that is collected and whose controller was killed while the machine was held."""
    plan = s.plan()

    def die() -> None:
        raise Died

    s.clock.meanwhile(lambda: held(s, plan), die)
    with pytest.raises(Died):
        s.run(plan, "--yes")
    (machine,) = s.machines()
    assert len(s.burning()) == 1 and machine["status"] == "ready"
    return plan, machine


def held(s: Shop, plan: str) -> bool:
    found = launch.find(s.operator().project, plan)
    return found is not None and found.hold_until is not None


def stops_at_the_end_of_its_hold(s: Shop, plan: str, machine: dict[str, Any], *, found_after_s: float = 3600) -> None:
    """As its own watcher does, with nobody looking: an hour later somebody looks."""
    until = launch.find(s.operator().project, plan).held_until
    s.clock.sleep((until - s.clock.now()).total_seconds())
    s.operator().writer(s.vendor).stop(machine["instance_id"])
    s.clock.sleep(found_after_s)


@pytest.mark.parametrize("by", ["reconcile", "job run --plan"])
def test_a_machine_that_stopped_after_a_hold_nobody_ended_is_ended_and_not_kept_for_its_storage(shop, by):
    s = shop()
    plan, machine = died_in_its_hold(s)
    stops_at_the_end_of_its_hold(s, plan, machine)
    assert s.burning() != []
    if by == "reconcile":
        result = s.gpu("reconcile", "--json")
        assert [f["what"] for f in result.document["findings"]] == ["ended"] and result.exit_code == 6
        for _ in range(4):  # its absence is believed after several looks
            s.clock.sleep(60)
            result = s.gpu("reconcile", "--json")
        assert result.exit_code == 0
    assert s.run(plan).exit_code == 0 and s.creates == 1
    assert s.burning() == [] and s.machines()[0]["status"] == "destroyed"
    charges = [json.loads(line) for line in (s.root / ".pi/gpu/charges.jsonl").read_text().splitlines()]
    idle_s = sum(c["duration_s"] for c in charges if c["kind"] == "idle")
    assert idle_s < 1800 + 300, "what it ran, and not until somebody looked"


def test_a_machine_whose_job_is_over_and_that_nobody_ends_is_named_while_it_is_held(shop):
    s = shop()
    _, machine = died_in_its_hold(s)
    (named,) = s.gpu("reconcile", "--json").document["findings"]
    assert named["what"] == "job_over" and named["machine_id"] == machine["id"]
    assert named["next_step"] == f"gpu machine destroy {machine['id']}"
    assert s.machines()[0]["status"] == "ready" and len(s.burning()) == 1


def test_a_stopped_machine_of_a_job_that_is_over_goes_only_when_nobody_holds_it_any_more(shop):
    s = shop()
    _, machine = died_in_its_hold(s)
    held = s.gpu("machine", "hold", machine["id"], "--for", "2h", "--json").document["machine"]["held_until"]
    s.operator().writer(s.vendor).stop(machine["instance_id"])
    s.clock.sleep(600)
    (named,) = s.gpu("reconcile", "--json").document["findings"]
    assert named["what"] == "held" and held in named["text"] and machine["id"] in named["next_step"]
    assert s.machines()[0]["status"] == "stopped" and len(s.burning()) == 1
    s.clock.sleep(2 * 3600)
    assert [f["what"] for f in s.gpu("reconcile", "--json").document["findings"]] == ["ended"]


def test_a_stopped_machine_that_is_kept_is_named_with_what_its_disk_costs(shop):
    s = shop()
    _, machine = died_in_its_hold(s)
    assert s.gpu("machine", "stop", machine["id"]).exit_code == 0
    (named,) = s.gpu("reconcile", "--json").document["findings"]
    assert named["what"] == "stopped" and 0 < named["burn_usd_hr"] < 0.1
    assert f"gpu machine destroy {machine['id']}" in named["next_step"]
    assert s.machines()[0]["status"] == "stopped"


def test_a_disk_that_is_full_once_the_machine_is_there_does_not_read_as_if_nothing_were_billing(shop, monkeypatch):
    s = shop()
    plan = s.plan()
    here, write, op = threading.get_ident(), os.write, s.operator()

    def writing(descriptor: int, data: Any) -> int:
        if threading.get_ident() == here and any(run.state == "won" for run in runs.all_runs(op)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as full:
        full.setattr(os, "write", writing)
        result = s.run(plan, "--yes")
    assert result.exit_code == 125 and len(s.burning()) == 1
    assert result.error["may_be_billing"] is True and "gpu reconcile" in result.error["next_step"], result.error
    assert s.run(plan, "--hold-for", "0").exit_code == 0 and s.burning() == [] and s.creates == 1


# cancelled ------------------------------------------------------------------------------------------------------------


def test_a_cancel_while_the_machine_boots_leaves_no_machine(shop):
    """Another terminal's `gpu job cancel`, seen by the command that waits for the machine."""
    s = shop()
    plan = s.plan()
    s.clock.meanwhile(lambda: s.creates == 1, lambda: launch.cancel(s.operator().project, s.clock, plan))
    s.sandbox.world.delays = replace(s.sandbox.world.delays, loading_s=300)
    result = s.run(plan, "--yes")
    assert result.exit_code == 130, result.stderr
    assert s.burning() == [] and s.ledger()[-1]["status"] == "cancelled"
    assert s.gpu("job", "cancel", "--json").document["state"] == "cancelled"
    assert s.run(plan, "--yes").exit_code == 130 and s.creates == 1


def test_ctrl_c_while_the_machine_boots_leaves_no_machine(shop):
    s = shop()
    s.clock.interrupts_after(lambda: s.creates == 1)
    result = s.run(s.plan(), "--yes")
    assert result.exit_code == 130, result.stderr
    assert s.burning() == [] and [line["status"] for line in s.ledger()] == ["running", "cancelled"]


def test_a_cancel_after_the_launching_command_died_ends_what_it_began(shop):
    """Dead after the create was accepted: nobody is left to be told, so the cancel does it itself."""
    s = shop()
    plan = s.plan()
    s.clock.meanwhile(lambda: s.creates == 1, _die)
    with pytest.raises(Died):
        s.run(plan, "--yes")
    assert len(s.burning()) == 1
    pending = s.gpu("job", "status", "--json").document
    assert (pending["job"], pending["state"], pending["phase"]) == ("J-000001", "running", "booting")
    assert [job["job"] for job in s.gpu("job", "ls", "--json").document["jobs"]] == ["J-000001"]
    result = s.gpu("job", "cancel", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.document["state"] == "cancelled" and s.burning() == []


def test_a_cancel_of_a_running_job_collects_and_lets_the_machine_go(shop):
    s = shop()
    plan = s.plan(run="echo half > $GPU_OUTPUT_DIR/half; echo ready; sleep 600")
    assert s.run(plan, "--yes", "--detach").exit_code == 0
    eventually(lambda: "ready" in s.gpu("job", "logs", "--json").document["text"])
    result = s.gpu("job", "cancel", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.document["state"] == "cancelled" and result.document["collected"]
    assert (s.root / "gpu-outputs/J-000001/half").read_text() == "half\n"
    assert s.burning() == []


def test_a_cancel_of_a_job_whose_machine_was_taken_away_leaves_no_machine(shop):
    s = shop()
    assert s.run(s.plan(run="sleep 600"), "--yes", "--detach").exit_code == 0
    (machine,) = s.machines()
    _stop_at_the_vendor(s, machine)
    result = s.gpu("job", "cancel", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.document["state"] == "cancelled" and s.burning() == []


def test_a_machine_that_runs_and_does_not_answer_is_not_destroyed_unless_its_outputs_are_given_up(shop):
    s = shop()
    assert s.run(s.plan(run="sleep 600"), "--yes", "--detach").exit_code == 0

    def nobody(machine: Any) -> Any:
        raise Unreachable(host=machine.host, reason="no route")

    result = s.gpu("job", "cancel", "--json", connect=nobody)
    assert result.exit_code == 6 and result.error["code"] == "outputs_out_of_reach", result.stderr
    assert "--abandon-outputs" in result.error["next_step"] and len(s.burning()) == 1
    result = s.gpu("job", "cancel", "--json", "--abandon-outputs", connect=nobody)
    assert result.exit_code == 0, result.stderr
    assert s.burning() == [] and s.ledger()[-1]["status"] == "cancelled"
    assert (s.root / ".pi/gpu/jobs/J-000001/abandoned.json").exists()


def test_a_cancel_ends_the_hold(shop):
    s = shop()
    plan = s.plan()
    held = lambda: (found := launch.find(s.operator().project, plan)) is not None and found.hold_until is not None  # noqa: E731
    s.clock.meanwhile(held, lambda: launch.cancel(s.operator().project, s.clock, plan))
    result = s.run(plan, "--yes")
    assert result.exit_code == 0 and result.document["held"] == "ended" and s.burning() == [], result.stderr


# when things go wrong -----------------------------------------------------------------------------------------------


def test_a_command_that_died_after_the_create_is_gone_on_with_and_rents_once(shop):
    s = shop()
    plan = s.plan()
    s.clock.meanwhile(lambda: s.creates == 1, _die)
    with pytest.raises(Died):
        s.run(plan, "--yes")
    result = s.run(plan, "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    assert s.creates == 1 and s.burning() == [] and len(s.ledger()) == 2


def test_a_second_command_waits_for_the_one_that_is_at_it(shop):
    s = shop()
    plan = s.plan()
    approval = s.gpu("approve", plan, "--statement", "yes, rent it", "--json").document["approval"]["id"]
    others = contextlib.ExitStack()
    others.enter_context(runs.working_on(s.operator(), approval))
    s.clock.meanwhile(lambda: sum(s.clock.slept) >= 6, others.close)
    result = s.run(plan, "--hold-for", "0")
    assert result.exit_code == 0 and sum(s.clock.slept) >= 6, result.stderr
    assert s.creates == 1


def test_a_launch_that_found_nothing_to_rent_is_no_running_job(shop):
    s = shop(real=False)
    plan = s.plan()
    s.sandbox.world.apply_faults([{"match": {"call": "create"}, "fault": "no_capacity", "times": 99}])
    result = s.run(plan, "--yes")
    assert result.exit_code == 125 and result.error["code"] == "no_capacity", result.stderr
    status = s.gpu("job", "status", "J-000001", "--json").document
    assert (status["state"], status["reason"]) == ("failed", "not_launched")
    assert s.gpu("job", "ls", "--json").document["jobs"] == [] and s.burning() == [] and s.ledger() == []


def test_one_approval_is_one_machine_also_from_a_copy_of_the_state(shop, tmp_path):
    s = shop()
    plan = s.plan()
    s.clock.meanwhile(lambda: s.creates == 1, _die)
    with pytest.raises(Died):
        s.run(plan, "--yes")
    shutil.copytree(s.root, tmp_path / "copy")
    copy = replace(s, root=tmp_path / "copy")
    result = copy.run(plan, "--yes")
    assert result.exit_code == 125 and result.error["code"] == "approval_used", result.stderr
    assert s.creates == 1
    assert s.run(plan, "--hold-for", "0").exit_code == 0 and s.creates == 1 and s.burning() == []


def test_outputs_of_a_stopped_machine_are_had_by_starting_it(shop):
    s = shop()
    assert s.run(s.plan(run="sleep 600"), "--yes", "--detach").exit_code == 0
    (machine,) = s.machines()
    _stop_at_the_vendor(s, machine)
    assert s.gpu("reconcile", "--json").exit_code in (0, 6)
    result = s.gpu("job", "pull", "J-000001", "--json")
    assert result.exit_code == 3 and result.error["code"] == "machine_stopped", result.stderr
    assert result.error["next_step"] == f"gpu machine start {machine['id']}"
    assert s.gpu("job", "cancel", "--json").exit_code == 0 and s.burning() == []
    assert s.gpu("job", "pull", "J-000001", "--json").error["code"] == "machine_gone"


def test_pulling_again_with_force_hashes_everything_here_anew(shop):
    s = shop()
    plan = s.plan(run="echo one > $GPU_OUTPUT_DIR/o; echo ready; sleep 600")
    assert s.run(plan, "--yes", "--detach").exit_code == 0
    eventually(lambda: "ready" in s.gpu("job", "logs", "--json").document["text"])
    assert s.gpu("job", "pull", "--json").document["new"] == 1
    assert s.gpu("job", "pull", "--json").document["unchanged"] == 1
    output = s.root / "gpu-outputs/J-000001/o"
    before = output.stat()
    output.write_text("two\n")
    os.utime(output, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert s.gpu("job", "pull", "--force", "--json").document["new"] == 1 and output.read_text() == "one\n"
    assert s.gpu("job", "cancel", "--json").exit_code == 0 and s.burning() == []


def test_a_failed_collection_keeps_the_machine_and_says_how_to_go_on(shop):
    s = shop()
    plan = s.plan()
    (s.root / "gpu-outputs").write_text("a file in the way")
    result = s.run(plan, "--yes", "--hold-for", "0")
    assert result.exit_code == 125 and result.error["code"] == "not_writable", result.stderr
    assert "may bill until" in result.error["next_step"] and len(s.burning()) == 1
    (s.root / "gpu-outputs").unlink()
    result = s.run(plan, "--hold-for", "0")
    assert result.exit_code == 0 and result.document["collected"] and s.burning() == [], result.stderr


def test_a_machine_that_is_taken_away_ends_its_job_as_preempted(shop):
    s = shop()
    plan = s.plan("--interruptible", run="echo ready; sleep 600")
    assert s.run(plan, "--yes", "--detach").exit_code == 0
    (machine,) = s.machines()
    s.sandbox.world.apply_faults([_rule(s, "outbid", machine)])
    result = s.run(plan)
    assert result.exit_code == 125 and result.error["code"] == "preempted", result.stderr
    assert "plan" in result.error["next_step"]
    last = s.ledger()[-1]
    assert last["status"] == "lost" and last["reason"] in ("preempted", "outbid")
    assert s.creates == 1 and last["reason"] in s.machines()[0]["conditions"]


def test_a_machine_that_comes_back_runs_its_job_once_more_and_rents_nothing(shop):
    s = shop()
    run = "echo try $GPU_JOB_ID; test $GPU_JOB_ID = J-000002 || sleep 600"
    plan = s.plan("--interruptible", run=run)
    assert s.run(plan, "--yes", "--detach").exit_code == 0
    (machine,) = s.machines()
    s.sandbox.world.apply_faults([_rule(s, "outbid", machine, resume=120)])
    result = s.run(plan, "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    assert result.document["job"] == "J-000002" and "second and last try" in result.stderr
    ends = {line["id"]: (line["status"], line.get("reason")) for line in s.ledger()}
    assert ends == {"J-000001": ("lost", "runner_vanished"), "J-000002": ("completed", None)}
    assert s.creates == 1 and s.burning() == []


def test_a_policy_that_allows_no_retry_leaves_a_job_that_went_down_lost(shop):
    s = shop()
    policy = s.root / ".pi/gpu/policy.json"
    policy.write_text(json.dumps({**json.loads(policy.read_text()), "retry_limit": 0}))
    plan = s.plan("--interruptible", run="sleep 600")
    assert s.run(plan, "--yes", "--detach").exit_code == 0
    (machine,) = s.machines()
    s.sandbox.world.apply_faults([_rule(s, "outbid", machine, resume=120)])
    s.run(plan, "--hold-for", "0")
    assert {line["id"]: line["status"] for line in s.ledger()} == {"J-000001": "lost"}
    assert s.creates == 1 and s.burning() == []


def test_without_a_guard_nothing_begins_and_the_approval_is_unused(shop):
    s = shop("runpod", real=False)
    op = s.operator()
    keyproof.note(op, "runpod", op.account("runpod"), "denied", "destroy")
    keyproof.note(op, "runpod", op.account("runpod"), "proven", "stop")
    plan = s.plan()
    result = s.run(plan, "--yes")
    assert result.exit_code == 125 and result.error["code"] == "sentinel_missing"
    assert not list((s.root / ".pi/gpu").glob("launches/*")) and s.creates == 0 and s.ledger() == []
    assert not list((s.root / ".pi/gpu").glob("J-*")) and runs.all_runs(op) == []


def test_a_job_goes_on_when_the_connection_breaks(shop):
    s = shop()
    plan = s.plan(run="for i in 1 2 3 4 5 6; do echo line $i; sleep 0.4; done")
    assert s.run(plan, "--yes", "--detach").exit_code == 0
    result = s.run(plan, "--hold-for", "0")
    assert result.exit_code == 0 and "line 6" in result.stderr


@pytest.mark.slow
def test_a_job_that_outlives_its_machines_time_is_a_timeout_that_names_the_limit(shop):
    s = shop()
    plan = s.plan(run="echo half > $GPU_OUTPUT_DIR/half; sleep 600")
    result = s.run(plan, "--yes", "--hold-for", "0", "--max-lease", "20s")
    assert result.exit_code == 124, result.stderr
    assert result.document["state"] == "timeout" and result.document["reason"] in ("max_lease", "deadline_passed")
    assert (s.root / "gpu-outputs/J-000001/half").exists()


def test_a_stalled_job_that_is_cancelled_for_it_has_its_waste_in_the_ledger(shop):
    s = shop()
    (s.root / "gpujob.yaml").write_text("progress: {unit: rows, stall: 2s, on_stall: cancel}\n")
    result = s.run(s.plan(run="echo progress rows=1; sleep 600"), "--yes", "--hold-for", "0")
    assert result.exit_code == 130, result.stderr
    last = s.ledger()[-1]
    assert last["reason"] == "no_progress" and 0 < last["wasted_usd"] <= last["cost_usd"]
    assert last["wasted_usd"] == pytest.approx(2 * s.machines()[0]["rate_usd_hr"] / 3600, rel=0.8)


def test_more_than_twice_the_expected_time_is_told_once(shop):
    s = shop()
    result = s.run(s.plan("--expected", "1s", run="sleep 4"), "--yes", "--hold-for", "0")
    assert result.exit_code == 0, result.stderr
    events = (s.root / ".pi/gpu/jobs/J-000001/events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events].count("expected_exceeded") == 1
    assert "expected were 1s" in result.stderr


# checkpoints --------------------------------------------------------------------------------------------------------


def test_only_checkpoints_after_a_step_are_pulled(shop):
    s = shop()
    write = "mkdir -p checkpoint-10 checkpoint-20; echo a > checkpoint-10/w; echo b > checkpoint-20/w; echo c > log"
    plan = s.plan(run=f"cd $GPU_OUTPUT_DIR; {write}; echo ready; sleep 600")
    assert s.run(plan, "--yes", "--detach").exit_code == 0
    eventually(lambda: "ready" in s.gpu("job", "logs", "--json").document["text"])
    pulled = s.gpu("job", "pull", "J-000001", "--since-step", "10", "--json")
    assert pulled.exit_code == 0 and pulled.document["files"] == 1 and not pulled.document["final"]
    outputs = s.root / "gpu-outputs/J-000001"
    assert sorted(p.name for p in outputs.rglob("*") if p.is_file()) == ["w"]
    assert (outputs / "checkpoint-20/w").read_text() == "b\n"
    assert s.gpu("job", "cancel", "--json").exit_code == 0 and (outputs / "log").exists()


def test_a_job_goes_on_from_the_checkpoint_of_an_older_one_whose_machine_is_gone(shop):
    s = shop()
    first = s.run(s.plan(), "--yes", "--hold-for", "0")
    assert first.exit_code == 0 and s.burning() == [], first.stderr
    run = "cat $GPU_RESUME_DIR/checkpoint-10/weights | wc -c > $GPU_OUTPUT_DIR/size"
    plan = s.plan("--resume-from", "J-000001", run=run)
    wrong = s.run(plan, "--yes", "--resume-from", "J-000009")
    assert wrong.exit_code == 125 and wrong.error["code"] == "usage"
    result = s.run(plan, "--yes", "--hold-for", "0", "--resume-from", "J-000001")
    assert result.exit_code == 0, result.stderr
    assert (s.root / "gpu-outputs/J-000002/size").read_text().strip() == "5000"


def test_a_checkpoint_that_changed_here_is_refused_before_anything_is_rented(shop):
    s = shop()
    assert s.run(s.plan(), "--yes", "--hold-for", "0").exit_code == 0
    plan = s.plan("--resume-from", "J-000001")
    (s.root / "gpu-outputs/J-000001/checkpoint-10/weights").write_bytes(b"x" * 5000)
    result = s.run(plan, "--yes")
    assert result.exit_code == 125 and result.error["code"] == "checkpoint_changed" and s.creates == 1


# helpers ------------------------------------------------------------------------------------------------------------


def _die() -> None:
    raise Died


def _rule(s: Shop, fault: str, machine: dict[str, Any], **args: Any) -> dict[str, Any]:
    match = {"provider": s.vendor, "instance": machine["instance_id"]}
    return {"match": match, "fault": fault, "args": args, "times": 1}


def _stop_at_the_vendor(s: Shop, machine: dict[str, Any]) -> None:
    s.operator().writer(s.vendor).stop(machine["instance_id"])
    eventually(lambda: s.operator().reader(s.vendor).machine(machine["instance_id"]).status == "stopped")
