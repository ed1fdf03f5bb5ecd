"""With the key of another account, what is not shown is not gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_skills.errors import OtherAccount
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.recovery import overview, reconcile
from gpu_skills.state import budget
from run_by_hand import ByHand

both = pytest.mark.parametrize("vendor", ["vast", "runpod"])


def rented(rig: Any, vendor: str, tmp_path: Any) -> tuple[Any, ByHand, Any]:
    """A shop with a machine, and the same project's operator under the key of an account that has none."""
    r = rig(vendor, containers=False)
    empty = rig(vendor, containers=False, home=tmp_path / "other")
    hand = ByHand(r).upto("close")
    hand.ready()
    here = budget.account_directory(vendor, r.op.account(vendor), r.op.environ).name
    machines.update(r.project, hand.machine_id, lambda m: replace(m, account=here))
    other = replace(
        r.op, reader=lambda name: empty.reader, writer=lambda name: empty.writer, account=lambda name: "another account"
    )
    return r, hand, other


@both
def test_a_destroy_does_not_call_a_machine_gone_that_another_account_has(rig, vendor, tmp_path):
    r, hand, other = rented(rig, vendor, tmp_path)
    with pytest.raises(OtherAccount) as caught:
        release.destroy(other, hand.machine, why="asked", wait_s=900)
    assert caught.value.may_be_billing and hand.machine.status not in ("destroyed", "lost") and r.burning()


@both
@pytest.mark.parametrize("hours", [0, 7])
def test_a_reconcile_concludes_nothing_and_is_not_clear(rig, vendor, tmp_path, hours):
    r, hand, other = rented(rig, vendor, tmp_path)
    r.clock.sleep(hours * 3600)
    for _ in range(4):
        report = reconcile.run(other, [vendor])
        assert not report.is_clear
        r.clock.sleep(200)
    assert hand.machine.status not in ("destroyed", "lost")
    assert overview.leaving(other, [vendor])


@both
def test_a_key_that_was_renewed_shows_the_machine_and_then_its_absence_counts(rig, vendor, tmp_path):
    r, hand, _ = rented(rig, vendor, tmp_path)
    renewed = replace(r.op, account=lambda name: "fingerprint of the new key")
    assert release.destroy(renewed, hand.machine, why="asked", wait_s=900) == "destroyed"
    assert not r.burning()
