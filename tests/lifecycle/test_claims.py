"""Offers that a launch of ours is about to take: one launch each, for a while."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal

import pytest

from gpu_skills.lifecycle.renting import claims
from gpu_skills.providers.base import Offer

OFFER = Offer("vast", "77", Decimal("0.4"), "RTX 4090", 1, 24.0, machine_id="4711")


@pytest.fixture
def op(rig):
    return rig("vast", containers=False).op


def file_of(op):
    (path,) = op.user_state.glob("accounts/vast-*/claims.json")
    return path


def test_an_offer_is_taken_by_the_first_who_claims_it_until_the_claim_ends(op):
    assert claims.take(op, "vast", OFFER, "j1") and not claims.take(op, "vast", OFFER, "j2")
    assert claims.take(op, "vast", OFFER, "j1") and claims.still_held(op, "vast", OFFER, "j1")
    op.clock.sleep(claims.LASTS.total_seconds() + 1)
    assert not claims.still_held(op, "vast", OFFER, "j1") and claims.take(op, "vast", OFFER, "j2")


def test_a_claim_given_back_is_free_for_others(op):
    claims.take(op, "vast", OFFER, "j1")
    claims.release(op, "vast", "j1")
    assert claims.take(op, "vast", OFFER, "j2")


def test_a_kind_of_machine_can_be_had_by_many(op):
    kind = replace(OFFER, provider="runpod", offer_id="NVIDIA L4", machine_id=None)
    assert claims.take(op, "runpod", kind, "j1") and claims.take(op, "runpod", kind, "j2")
    assert claims.apart([kind], claims.current(op, "runpod")) == [kind]


def test_of_many_at_once_one_gets_the_offer(op):
    claims.take(op, "vast", replace(OFFER, offer_id="1"), "j0")
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda n: claims.take(op, "vast", OFFER, f"j{n}"), range(1, 33)))
    assert sum(got) == 1


def test_claimed_offers_fall_and_those_of_a_machine_being_rented_come_last(op):
    claims.take(op, "vast", OFFER, "j1")
    same_host, other = replace(OFFER, offer_id="78"), replace(OFFER, offer_id="79", machine_id="9")
    assert claims.apart([OFFER, same_host, other], claims.current(op, "vast")) == [other, same_host]


@pytest.mark.parametrize("content", ['{"a": 1}', "[]", "[7, null, {}]", '[{"offer_id": "77", "until": "soon"}]'])
def test_a_file_written_by_hand_claims_nothing_and_stops_nobody(op, content):
    claims.take(op, "vast", OFFER, "j1")
    file_of(op).write_text(content)
    assert claims.current(op, "vast") == [] and claims.take(op, "vast", OFFER, "j2")


def test_a_claim_from_a_clock_that_went_ahead_does_not_hold_for_hours(op):
    claims.take(op, "vast", OFFER, "j1")
    record = json.loads(file_of(op).read_text())
    record[0]["until"] = "2999-01-01T00:00:00Z"
    file_of(op).write_text(json.dumps(record))
    assert claims.take(op, "vast", OFFER, "j2")
