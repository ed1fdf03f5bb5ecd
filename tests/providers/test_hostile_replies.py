"""Whatever a provider answers, what leaves the adapter is a record or a typed error, and a create stays one request."""

from __future__ import annotations

import json
import string
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_clock import FakeClock
from gpu_skills.errors import GpuError
from gpu_skills.providers.base import CreateOutcome, Machine, Offer, Requirements
from gpu_skills.providers.runpod import RunpodReader, RunpodWriter
from gpu_skills.providers.runpod.offers import read_offer as read_gpu_type
from gpu_skills.providers.vast import VastReader, VastWriter
from gpu_skills.providers.vast.offers import read_offer
from gpu_skills.wire import Answer, NotSent, Unanswered
from providers.replies import gpu_type, pod, vast_instance, vast_offer, vast_page
from providers.test_runpod import SPEC as RUNPOD_SPEC
from providers.test_vast_writer import SPEC as VAST_SPEC
from providers.wires import Script, runpod, vast

QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NOW = (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC))

numbers = st.one_of(
    st.integers(-(10**25), 10**25),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["1e999", "NaN", "-0", "0x10", "٣", "1_000", " 5 ", ""]),
)
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=12), inner, max_size=4)),
    max_leaves=8,
)
KEYS = [
    "success", "error", "msg", "instances", "offers", "pods", "gpus", "next_token", "nextCursor", "new_contract", "id",
    "total_instances", "results", "records", "result_url", "status", "detail", "errors", "credit", "data",
]  # fmt: skip
WORDS = ["auth_error", "no_such_instance", "no_such_ask", "invalid_args", "not_found", True, False, None, 0, 7, "7", []]


def spoilt(row):
    """A real row in which some fields became anything."""
    return st.dictionaries(st.sampled_from(sorted(row)), junk, max_size=5).map(lambda changes: {**row, **changes})


VALID = {
    "vast list": vast_page(vast_instance()),
    "vast one": {"instances": vast_instance()},
    "vast offers": {"offers": [vast_offer()]},
    "vast created": {"success": True, "new_contract": 5},
    "pods": {"pods": [pod()]},
    "pod": pod(),
    "gpus": {"gpus": [gpu_type()]},
}
documents = st.one_of(
    junk,
    st.dictionaries(st.sampled_from(KEYS), st.one_of(st.sampled_from(WORDS), junk), max_size=5),
    spoilt(vast_instance()).map(lambda row: {"instances": row}),
    spoilt(vast_instance()).map(lambda row: vast_page(row)),
    spoilt(vast_offer()).map(lambda row: {"offers": [row, vast_offer(id=2)]}),
    spoilt(pod()).map(lambda row: {"pods": [row]}),
    spoilt(pod()),
    spoilt(gpu_type()).map(lambda row: {"gpus": [row]}),
)
bodies = st.one_of(
    documents.map(lambda value: json.dumps(value, allow_nan=True).encode()),
    st.binary(max_size=60),
    st.sampled_from(sorted(VALID)).flatmap(
        lambda name: st.integers(0, len(json.dumps(VALID[name]))).map(lambda n: json.dumps(VALID[name]).encode()[:n])
    ),
    st.sampled_from([b"[" * 100_000, b'{"a":' * 5000, b"\xef\xbb\xbf{}", b"null", b"<html><title>x</title>" * 10]),
)
header_text = st.text(alphabet=string.printable, max_size=30)
answers = st.builds(
    Answer,
    st.one_of(st.sampled_from([200, 201, 204, 400, 401, 404, 410, 422, 429, 500, 502]), st.integers(100, 599)),
    bodies,
    st.dictionaries(st.sampled_from(["retry-after", "ratelimit", "location", "content-type"]), header_text, max_size=2),
)
what_comes = st.lists(
    st.one_of(answers, st.just(Unanswered("reset")), st.just(NotSent("refused"))), min_size=1, max_size=5
)

READS = [
    lambda r: r.machines(),
    lambda r: r.machine("20517"),
    lambda r: r.search(Requirements(disk_gb=50)),
    lambda r: r.charges(*NOW),
    lambda r: r.balance(),
    lambda r: r.check_key(),
    lambda r: r.log_lines("20517"),
]


@pytest.mark.parametrize("number", range(len(READS)))
@pytest.mark.parametrize("provider", ["vast", "runpod"])
@QUICK
@given(come=what_comes)
def test_a_read_gives_records_or_a_typed_error(provider, number, come):
    script = Script(come)
    reader = VastReader(vast(script), clock=FakeClock()) if provider == "vast" else RunpodReader(runpod(script))
    try:
        READS[number](reader)
    except GpuError as error:
        assert error.message.isprintable() and len(error.message) < 700


@pytest.mark.parametrize("provider", ["vast", "runpod"])
@QUICK
@given(come=what_comes)
def test_a_create_is_one_request_with_a_clear_outcome(provider, come):
    script = Script(come)
    writer, spec = (
        (VastWriter(vast(script)), VAST_SPEC) if provider == "vast" else (RunpodWriter(runpod(script)), RUNPOD_SPEC)
    )
    outcome = writer.create(spec)
    assert isinstance(outcome, CreateOutcome)
    assert len(script.calls) == 1
    assert (outcome.instance_id is not None) == (outcome.kind == "created")
    assert outcome.kind == "created" or outcome.problem is not None


@pytest.mark.parametrize("act", ["destroy", "stop", "start", "restart"])
@pytest.mark.parametrize("provider", ["vast", "runpod"])
@settings(QUICK, max_examples=60)
@given(come=what_comes)
def test_any_other_write_is_one_request_that_worked_or_a_typed_error(provider, act, come):
    script = Script(come)
    writer = VastWriter(vast(script)) if provider == "vast" else RunpodWriter(runpod(script))
    try:
        assert getattr(writer, act)("20517") in (None, "accepted", "absent")
    except GpuError:
        pass
    assert len(script.calls) == 1


@QUICK
@given(row=spoilt(vast_instance()))
def test_a_spoilt_instance_is_still_a_machine_with_its_id(row):
    row["id"] = 20517
    reader = VastReader(vast(Script([Answer(200, json.dumps({"instances": row}).encode())])), clock=FakeClock())
    try:
        machine = reader.machine("20517")
    except GpuError:
        return  # not JSON any more: a key that is there twice cannot come from here, a number too large can
    assert isinstance(machine, Machine) and machine.instance_id == "20517"
    for way in machine.ways:
        assert not way.endpoint.host.startswith("-") and 0 < way.endpoint.port < 65536


@QUICK
@given(row=spoilt(pod()))
def test_a_spoilt_pod_is_still_a_machine_with_its_id(row):
    row["id"] = "k3x9abcd01"
    machine = RunpodReader(runpod(Script([Answer(200, json.dumps(row).encode())]))).machine("k3x9abcd01")
    assert isinstance(machine, Machine) and machine.instance_id == "k3x9abcd01"
    assert machine.rate_usd_hr is None or machine.rate_usd_hr.is_finite()


@QUICK
@given(row=spoilt(vast_offer()), other=spoilt(gpu_type()))
def test_a_spoilt_offer_is_none_or_has_a_price_that_is_a_number(row, other):
    for offer in (read_offer(row, Requirements(disk_gb=50)), read_gpu_type(other, Requirements(disk_gb=50))):
        if offer is not None:
            assert isinstance(offer, Offer) and offer.rate_usd_hr.is_finite() and offer.rate_usd_hr >= 0
            assert offer.gpu_count >= 1 and isinstance(offer.gpu, str)
