"""Plans to be approved, keys to sign with, and a policy that an agent in the project cannot write."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpu_skills.clock import timestamp
from gpu_skills.lifecycle.approval import approvals
from gpu_skills.lifecycle.approval.approvals import Approval, Ask
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import Candidate, Plan
from gpu_skills.lifecycle.runs import Run, owner_of
from gpu_skills.state import policy as policies
from gpu_skills.state.project import Project
from sshd import make_key

NAMESPACE = "gpu-skills"


def a_plan(project: Project, now: Any, **changes: Any) -> Plan:
    given: dict[str, Any] = {
        "project_id": project.project_id,
        "machine_class": "job",
        "provider": "vast",
        "image": "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
        "disk_gb": 40,
        "gpu_count": 1,
        "candidates": (Candidate("RTX 4090", None, (), Decimal("0.41")), Candidate("RTX 3090", "over the rate")),
        "max_rate_usd_hr": Decimal("0.60"),
        "deadline_s": 7200.0,
        "storage_grace_s": 86400.0,
        "worst_case_usd": Decimal("3.5"),
        "measured_at": timestamp(now),
        "expires_at": timestamp(now + timedelta(minutes=30)),
    }
    return Plan(**{**given, **changes})


def an_ask(op: Operator, **changes: Any) -> Ask:
    """Of a plan that was frozen in the operator's project."""
    name = plans.freeze(op.project, a_plan(op.project, op.clock.now(), **changes))
    return approvals.ask_of_plan(*plans.load(op.project, name))


def a_run(op: Operator, approval: Approval, **changes: Any) -> Run:
    given: dict[str, Any] = {
        "approval_id": approval.id,
        "plan_sha256": approval.plan_sha256,
        "project_id": op.project.project_id,
        "provider": "vast",
        "account": "vast-0",
        "owner": owner_of(op),
        "reserved_usd": 3.5,
        "approval_expires_at": timestamp(approval.expires_at),
        "began_at": timestamp(op.clock.now()),
    }
    return Run(**{**given, **changes})


def lines(op: Operator) -> list[dict[str, Any]]:
    """approvals.jsonl as it is."""
    path = op.project.path("approvals.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_lines(op: Operator, *records: dict[str, Any] | str) -> None:
    """approvals.jsonl written by hand."""
    texts = [record if isinstance(record, str) else json.dumps(record) for record in records]
    op.project.path("approvals.jsonl").write_text("".join(text + "\n" for text in texts))


def sign(key: Path, message: bytes, namespace: str = NAMESPACE) -> bytes:
    """What `ssh-keygen -Y sign` of the person's own computer makes of it."""
    done = subprocess.run(
        ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", namespace],
        input=message,
        capture_output=True,
        check=True,
    )
    return done.stdout


def signer_line(key: Path, principal: str = "owner@example.org", options: str = "") -> str:
    public = " ".join(Path(f"{key}.pub").read_text().split()[:2])
    return f"{principal} {options + ' ' if options else ''}{public}"


class Owner:
    """The person who pays: a key, and a policy in a place that the project's agent cannot write."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.key = make_key(folder / "id")
        self.write_policy(signers=[signer_line(self.key)])

    @property
    def environ(self) -> dict[str, str]:
        return {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder / "config")}

    def write_policy(self, *, level: str = "signature", signers: list[str], namespace: str = NAMESPACE) -> None:
        path = self.folder / "config/gpu/policy.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        approval = {"level": level, "signers": signers, "namespace": namespace}
        path.write_text(json.dumps({"ceilings": {}, "approval": approval}))

    def rules(self, op: Operator) -> Operator:
        """The operator under this owner's policy."""
        nowhere = self.folder / "no-system-policy.json"
        return replace(op, policy=lambda: policies.load(op.project, self.environ, system=nowhere))

    def approve(self, op: Operator, ask: Ask) -> Approval:
        message = approvals.message(op, ask)
        return approvals.give_signed(op, ask, message, sign(self.key, message))
