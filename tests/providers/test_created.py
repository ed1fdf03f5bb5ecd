"""What came against what was approved: any difference that costs or cripples is found."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from gpu_skills.providers.base import Machine, MachineSpec, Offer
from gpu_skills.providers.created import compare

SPEC = MachineSpec(
    offer=Offer("vast", "1", Decimal("0.325"), "RTX 4090", 1, 24),
    label="gpu1-x",
    image="x",
    disk_gb=50,
    gpu_count=1,
    max_rate_usd_hr=Decimal("0.325"),
)
MACHINE = Machine(
    provider="vast",
    instance_id="9",
    label="gpu1-x",
    status="booting",
    rate_usd_hr=Decimal("0.325"),
    gpu="RTX 4090",
    gpu_count=1,
    disk_gb=50,
    is_interruptible=False,
)


@pytest.mark.parametrize(
    ("spec", "machine", "problem"),
    [
        ({}, {}, None),
        ({}, {"rate_usd_hr": Decimal("0.3250000003")}, None),  # rounded somewhere
        ({}, {"rate_usd_hr": Decimal("0.30")}, None),
        ({}, {"rate_usd_hr": Decimal("0.3251")}, "it costs $0.3251/h"),
        ({"bid_usd_hr": Decimal("0.12"), "max_rate_usd_hr": Decimal("0.145")}, {}, "it costs $0.3250/h"),
        ({"bid_usd_hr": Decimal("0.12")}, {}, "it is on-demand, asked for was interruptible"),
        ({}, {"is_interruptible": True}, "it is interruptible, asked for was on-demand"),
        ({}, {"disk_gb": 8}, "it has 8 GB of disk, asked for were 50 GB"),
        ({}, {"disk_gb": 51}, None),
        ({}, {"gpu_count": 2}, "it has 2 GPUs, asked for were 1"),
        ({}, {"gpu_count": 0}, "it has 0 GPUs"),
        ({}, {"gpu": "RTX 3060"}, "its GPU is RTX 3060"),
        ({}, {"gpu": "NVIDIA GeForce RTX 4090"}, None),
    ],
)
def test_a_difference_is_found_and_named(spec, machine, problem):
    verdict = compare(replace(SPEC, **spec), replace(MACHINE, **machine))
    assert bool(verdict.problems) == (problem is not None)
    if problem:
        error = verdict.error(MACHINE)
        assert problem in error.message
        assert (error.code, error.exit_code, error.may_be_billing) == ("created_price_mismatch", 5, True)


def test_what_is_not_shown_yet_is_neither_right_nor_wrong():
    bare = Machine("vast", "9", "gpu1-x", "booting")
    verdict = compare(SPEC, bare)
    assert verdict.problems == ()
    assert set(verdict.unknown) == {"rate_usd_hr", "is_interruptible", "disk_gb", "gpu_count", "gpu"}
