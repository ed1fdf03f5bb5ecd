"""What an approval is good for, and when it stops being good."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpu_skills.clock import timestamp
from gpu_skills.errors import ApprovalNeeded
from gpu_skills.lifecycle import approvals
from gpu_skills.lifecycle import plan as plans
from gpu_skills.lifecycle.plan import Candidate, Plan


def a_plan(op, **changes) -> Plan:
    now = op.clock.now()
    given = {
        "project_id": op.project.project_id,
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


def an_ask(op, **changes):
    name = plans.freeze(op.project, a_plan(op, **changes))
    return approvals.ask_of_plan(*plans.load(op.project, name))


@pytest.fixture
def op(rig):
    return rig("vast", containers=False).op


def test_a_yes_is_found_again(op):
    ask = an_ask(op)
    with pytest.raises(ApprovalNeeded):
        approvals.find(op, ask)
    given = approvals.give(op, ask, statement="yes, rent it", source="approve")
    assert approvals.find(op, ask) == given
