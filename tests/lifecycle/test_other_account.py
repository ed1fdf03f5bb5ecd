"""With the key of another account, what is not shown is not gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_skills.errors import OtherAccount, ProviderSilent
from gpu_skills.lifecycle import intents, machines, runs
from gpu_skills.lifecycle.ending import release
from gpu_skills.lifecycle.recovery import overview, reconcile
from gpu_skills.state import budget
from run_by_hand import ByHand, job

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


@both
def test_a_record_without_an_instance_is_not_given_up_by_what_another_account_shows(rig, vendor, tmp_path):
    r, hand, other = rented(rig, vendor, tmp_path)
    alone = replace(hand.machine, id="m_0000000001", intent="0123456789", host="", status="requested")
    machines.save(r.project, alone)
    r.clock.sleep(24 * 3600)
    report = reconcile.run(other, [vendor])
    assert machines.find(r.project, alone.id).status != "lost" and not report.is_clear
    reconcile.run(r.op, [vendor])
    assert machines.find(r.project, alone.id).status == "lost"


@both
def test_money_reserved_in_one_account_is_not_settled_by_what_another_shows(rig, vendor, tmp_path):
    r, hand, other = rented(rig, vendor, tmp_path)
    r.project.path("machines.json").write_text("[]\n")
    r.project.path(intents.JOURNAL).unlink()
    (runs.folder(r.op) / f"{hand.approval}.json").unlink()
    before = set(budget.open_reservations(r.project, r.op.environ))
    for _ in range(5):
        r.clock.sleep(1000)
        assert not reconcile.run(other, [vendor]).is_clear
    assert before and set(budget.open_reservations(r.project, r.op.environ)) == before


@both
def test_a_machine_that_is_shown_is_ended_though_nobody_says_whose_the_key_is(rig, vendor, tmp_path):
    r, hand, _ = rented(rig, vendor, tmp_path)

    def silent(name: str) -> str:
        raise ProviderSilent(provider=name, what="whose key", reason="no answer")

    assert release.destroy(replace(r.op, account=silent), hand.machine, why="asked", wait_s=0) == "terminating"
    assert not r.burning()


@both
def test_what_was_never_sent_away_and_shows_again_is_not_ended_unasked(rig, vendor, tmp_path):
    r, hand, _ = rented(rig, vendor, tmp_path)
    job(r, hand.machine, 1800)
    machines.update(r.project, hand.machine_id, lambda m: replace(m, status="destroyed", session=None))
    report = reconcile.run(r.op, [vendor])
    assert [f.what for f in report.findings if f.is_uncertain][:1] == ["reappeared"] and r.burning()
