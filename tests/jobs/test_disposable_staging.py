"""What a plan froze is what is sent: nothing else, nothing less, and nothing that changed."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from gpu_skills.errors import MissingCredential, PlanUnknown, UsageError
from gpu_skills.jobs import agreed, disposable, pack, staging
from gpu_skills.jobs.checkpoints import Checkpoint
from gpu_skills.jobs.spec import load_spec
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import Candidate, Plan
from gpu_skills.remote.tree import Entry
from gpu_skills.state import project as projects


@pytest.fixture
def project(tmp_path: Path):
    root = tmp_path / "project"
    root.mkdir()
    (root / "train.py").write_text("print(1)\n")
    (root / "data").mkdir()
    (root / "data/a.txt").write_text("a\n")
    (root / "empty").mkdir()
    os.symlink("data/a.txt", root / "link")
    return projects.init(root)


def a_plan(project, **changes) -> Plan:
    packed = pack.pack(project.root)
    given = {
        "project_id": project.project_id,
        "machine_class": "job",
        "provider": "vast",
        "image": "i",
        "disk_gb": 10,
        "gpu_count": 1,
        "candidates": (Candidate("RTX 4090"),),
        "max_rate_usd_hr": Decimal("0.5"),
        "deadline_s": 7200.0,
        "storage_grace_s": 0.0,
        "worst_case_usd": Decimal("1"),
        "measured_at": "2026-01-01T00:00:00Z",
        "expires_at": "2026-01-01T01:00:00Z",
        "hold_for_s": 1800.0,
        "job_timeout_s": 3600.0,
        "job": {"run": "python3 train.py", "directory": ".", "secret": []},
        "inputs": staging.inputs_record(packed),
    }
    return Plan(**{**given, **changes})


def test_an_untouched_directory_is_staged_as_it_was_planned(project):
    plan = a_plan(project)
    packed = staging.stage(project, plan)
    assert packed.tree.digest == plan.inputs["tree"]
    assert plan.inputs["bytes"] == packed.total_bytes and plan.inputs["count"] == 2 + _added(project)


def _added(project) -> int:
    """Files of the project that `init` made."""
    return sum(1 for p in project.root.iterdir() if p.is_file() and p.name not in ("train.py", "link"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda root: (root / "train.py").write_text("print(2)\n"), "train.py (has other content)"),
        (lambda root: (root / "data/a.txt").unlink() or (root / "link").unlink(), "data/a.txt (is gone)"),
        (lambda root: (root / "train.py").chmod(0o755), "permissions, links or empty folders"),
        (lambda root: (root / "link").unlink(), "permissions, links or empty folders"),
    ],
)
def test_what_is_not_as_planned_is_refused_by_name(project, change, named):
    plan = a_plan(project)
    change(project.root)
    with pytest.raises(staging.InputsChanged) as refused:
        staging.stage(project, plan)
    assert named in refused.value.message and refused.value.exit_code == 3


def test_all_changed_files_are_named_at_once(project):
    plan = a_plan(project)
    (project.root / "train.py").write_text("x")
    (project.root / "data/a.txt").write_text("y")
    with pytest.raises(staging.InputsChanged) as refused:
        staging.stage(project, plan)
    assert {c["path"] for c in refused.value.details["changed"]} == {"train.py", "data/a.txt"}


def test_a_file_that_came_since_is_left_here_and_told(project):
    plan = a_plan(project)
    (project.root / "new.txt").write_text("n")
    packed = staging.stage(project, plan)
    assert packed.tree.digest == plan.inputs["tree"]
    assert [o.path for o in packed.left_out if o.why == "came after the plan"] == ["new.txt"]


def test_a_checkpoint_is_staged_from_where_it_lies(project, tmp_path):
    outputs = tmp_path / "outputs/checkpoint-10"
    outputs.mkdir(parents=True)
    (outputs / "w").write_bytes(b"ten")
    checkpoint = Checkpoint("J-000001", 10, tmp_path / "outputs", (("checkpoint-10/w", 3, "f" * 64),))
    packed = staging.with_checkpoint(pack.pack(project.root), checkpoint)
    entry = next(e for e in packed.tree.entries if e.path == b".gpu/resume/checkpoint-10/w")
    assert entry == Entry(b".gpu/resume/checkpoint-10/w", 3, 0o644, "f" * 64)
    assert Path(os.fsdecode(packed.tree.local_path(entry))).read_bytes() == b"ten"
    own = next(e for e in packed.tree.entries if e.path == b"train.py")
    assert Path(os.fsdecode(packed.tree.local_path(own))) == project.root / "train.py"


# the plan -----------------------------------------------------------------------------------------------------------


def test_a_draft_and_a_plan_of_another_kind_or_project_are_not_run(project):
    draft = plans.save_draft(project, a_plan(project))
    with pytest.raises(UsageError, match="draft"):
        agreed.open_plan(project, draft)
    for changes in ({"machine_class": "project", "job": None, "inputs": None}, {"job": None}):
        name = plans.freeze(project, a_plan(project, **changes))
        with pytest.raises(UsageError, match="not for a job"):
            agreed.open_plan(project, name)
    foreign = plans.freeze(project, a_plan(project, project_id="p-other"))
    with pytest.raises(Exception, match="p-other"):
        agreed.open_plan(project, foreign)
    with pytest.raises(PlanUnknown):
        agreed.open_plan(project, "0" * 64)


def test_flags_shorten_and_what_is_not_given_stays(project):
    plan = a_plan(project)
    assert agreed.limits(plan) == disposable.Limits(1800.0, 7200.0, 3600.0)
    shorter = agreed.limits(plan, hold_for="0", max_lease="1h", job_timeout="30m")
    assert shorter == disposable.Limits(0.0, 3600.0, 1800.0)
    endless = replace(plan, job_timeout_s=0)
    assert agreed.limits(endless).job_timeout_s is None
    assert agreed.limits(endless, job_timeout="9h").job_timeout_s == 9 * 3600


@pytest.mark.parametrize(
    "flags", [{"hold_for": "31m"}, {"max_lease": "3h"}, {"job_timeout": "2h"}, {"max_lease": "0"}, {"job_timeout": "0"}]
)
def test_no_flag_makes_anything_longer(project, flags):
    with pytest.raises(UsageError) as refused:
        agreed.limits(a_plan(project), **flags)
    assert refused.value.exit_code == 2


def test_the_job_is_what_was_frozen_whatever_gpujob_yaml_says_now(project):
    (project.root / "gpujob.yaml").write_text("run: python3 train.py\nenv: {EPOCHS: '3'}\nexpect: [m]\n")
    record = load_spec(project.root, environ={}).to_record()
    plan = a_plan(project, job={**record, "directory": "."})
    (project.root / "gpujob.yaml").write_text("run: rm -rf /\n")
    spec = agreed.spec_of(project, plan, secret_env={"TOKEN": "s"}, timeout_s=60.0)
    assert (spec.run, spec.env, spec.expect, spec.timeout_s) == ("python3 train.py", {"EPOCHS": "3"}, ("m",), 60.0)
    assert spec.env_values() == {"EPOCHS": "3", "TOKEN": "s"} and spec.directory == project.root


def test_only_the_secrets_that_were_approved_reach_the_machine(project):
    job = {"run": "x", "directory": ".", "secret": ["WANDB_KEY"]}
    plan = a_plan(project, job=job, secrets=("WANDB_KEY",))
    known = {"WANDB_KEY": "w", "HF_TOKEN": "h"}.get
    assert agreed.secret_values(plan, {}, known) == ({"WANDB_KEY": "w"}, None)
    assert agreed.secret_values(plan, {"WANDB_KEY": "given"}, known)[0] == {"WANDB_KEY": "given"}
    assert agreed.secret_values(replace(plan, secrets=("WANDB_KEY", "HF_TOKEN")), {}, known)[1] == "h"
    with pytest.raises(UsageError, match="OTHER"):
        agreed.secret_values(plan, {"OTHER": "x"}, known)
    with pytest.raises(MissingCredential, match="WANDB_KEY"):
        agreed.secret_values(plan, {}, {}.get)


# waiting ------------------------------------------------------------------------------------------------------------


class _Still:
    """A clock on which only sleeping takes time."""

    def __init__(self):
        self.elapsed_s = 0.0

    def now(self):
        return datetime(2026, 1, 1, tzinfo=UTC)

    def monotonic(self):
        return self.elapsed_s

    def sleep(self, seconds):
        self.elapsed_s += seconds


def test_a_cancel_ends_a_long_wait_within_a_second_and_a_wait_without_one_lasts():
    clock = _Still()
    patient = disposable.CancellableClock(clock, lambda: clock.elapsed_s >= 10)
    patient.sleep(9.5)
    assert clock.elapsed_s == pytest.approx(9.5)
    with pytest.raises(disposable.CancelRequested):
        patient.sleep(600)
    assert clock.elapsed_s <= 11
