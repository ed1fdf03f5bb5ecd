"""What speaks against a plan, in words and figures."""

from __future__ import annotations

from decimal import Decimal

import pytest

from gpu_skills.errors import PlanRefused
from gpu_skills.lifecycle.plans import images, preflight
from gpu_skills.lifecycle.plans.preflight import Reason
from gpu_skills.state.policy import Violation

IMAGE = "me/big:cuda12.8"


def test_a_disk_smaller_than_twice_the_image_is_refused_with_the_size_that_will_do():
    (reason,) = preflight.disk(20, images.needs(IMAGE, size_gb=23.6))
    assert reason.code == "disk_too_small"
    assert "47.2 GB" in reason.message and "50 GB will do" in reason.message
    assert "compute.disk_gb: 50" in (reason.next_step or "")


@pytest.mark.parametrize(
    ("disk_gb", "weights_gb", "inputs_bytes", "fits"),
    [(48, 0, 0, True), (47, 0, 0, False), (60, 12, 0, True), (59, 12, 0, False), (50, 0, 2_000_000_000, False)],
)
def test_weights_and_two_copies_of_the_inputs_come_on_top(disk_gb, weights_gb, inputs_bytes, fits):
    needs = images.needs(IMAGE, size_gb=24)
    assert (preflight.disk(disk_gb, needs, weights_gb=weights_gb, inputs_bytes=inputs_bytes) == []) is fits


def test_a_size_that_is_assumed_is_told_as_assumed():
    (reason,) = preflight.disk(10, images.needs("me/unheard-of:1"))
    assert "(assumed)" in reason.message


def test_an_account_with_less_than_the_worst_case_is_refused_and_an_unknown_balance_is_not():
    (reason,) = preflight.balance("vast", Decimal("1.50"), Decimal("3.00"))
    assert reason.code == "balance_too_low" and "$1.50" in reason.message and "$3.00" in reason.message
    assert preflight.balance("vast", Decimal("3.00"), Decimal("3.00")) == []
    assert preflight.balance("runpod", None, Decimal("3.00")) == []


def test_a_ceiling_says_which_deadline_would_fit_and_a_provider_that_is_not_allowed_has_its_own_code():
    money = Violation("job_usd", Decimal(9), Decimal(5), Decimal(5), ("project",))
    rate = Violation("rate_usd_hr", Decimal(9), Decimal(2), Decimal(2), ("user",))
    provider = Violation("allowed_providers", "vast", ["local"], ["local"], ("system",))
    first, second, third = preflight.ceilings([money, rate, provider], longest_s=7200)
    assert first.code == "over_ceiling" and "a deadline of 2h00m would fit" in first.message
    assert all(reason.next_step.startswith("gpu policy show") for reason in (first, second, third))
    with pytest.raises(PlanRefused) as refused:
        preflight.refuse([first, second])
    assert refused.value.next_step == "gpu policy show"
    assert second.code == "over_ceiling" and "would fit" not in second.message
    assert third.code == "provider_not_allowed"


def test_a_refusal_has_every_reason_and_a_single_one_its_own_next_step():
    both = [Reason("missing_file", "a.py is not there"), Reason("vram_too_small", "24 GB", "take a larger one")]
    with pytest.raises(PlanRefused) as raised:
        preflight.refuse(both)
    assert raised.value.exit_code == 3
    assert [r["code"] for r in raised.value.details["reasons"]] == ["missing_file", "vram_too_small"]
    assert "a.py is not there; 24 GB" in raised.value.message
    with pytest.raises(PlanRefused) as raised:
        preflight.refuse(both[1:])
    assert (raised.value.message, raised.value.next_step) == ("24 GB", "take a larger one")
