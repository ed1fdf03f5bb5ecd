"""A plan on disk: canonical, named by its hash, and nothing else than what was approved."""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_skills.errors import PlanChanged, PlanUnknown, SchemaInvalid, UsageError
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import Candidate, Plan
from gpu_skills.state import project as projects

text = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
money = st.decimals(0, 10_000, places=6, allow_nan=False)
seconds = st.floats(1, 1e7, allow_nan=False)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | text
objects = st.dictionaries(text, leaves | st.lists(leaves, max_size=3), max_size=4)


def a_plan(**changes) -> Plan:
    given = {
        "project_id": "p-1",
        "machine_class": "job",
        "provider": "vast",
        "image": "img:1",
        "disk_gb": 50,
        "gpu_count": 1,
        "candidates": (Candidate("RTX 4090", None, ({"offer_id": "1", "rate_usd_hr": 0.4},), Decimal("0.4")),),
        "max_rate_usd_hr": Decimal("0.5"),
        "deadline_s": 43200.0,
        "storage_grace_s": 86400.0,
        "worst_case_usd": Decimal("7.2"),
        "measured_at": "2026-01-01T00:00:00Z",
        "expires_at": "2026-01-01T01:00:00Z",
        "hold_for_s": 1800.0,
        "job_timeout_s": 7200.0,
        "expected_s": 3600.0,
    }
    return Plan(**{**given, **changes})


@pytest.fixture
def project(tmp_path: Path):
    return projects.init(tmp_path / "work")


@settings(max_examples=150, deadline=None)
@given(
    rate=money, worst=money, deadline=seconds, image=text, warnings=st.lists(text, max_size=3),
    job=st.none() | objects.map(lambda o: {**o, "run": "x"}),
    inputs=st.none() | objects, left_out=st.none() | text, offers=st.lists(objects, max_size=3),
    vram=st.none() | st.floats(0, 1e4) | st.integers(0, 10_000),
)  # fmt: skip
def test_what_was_written_reads_back_as_the_same_plan_with_the_same_bytes(
    rate, worst, deadline, image, warnings, job, inputs, left_out, offers, vram
):
    made = a_plan(
        max_rate_usd_hr=rate,
        worst_case_usd=worst,
        deadline_s=deadline,
        image=image,
        warnings=tuple(warnings),
        job=job,
        inputs=inputs,
        min_vram_gb=vram,
        candidates=(Candidate("A100", left_out, tuple(offers), rate),),
    )
    raw = plans.canonical(made)
    again = Plan.from_record(json.loads(raw))
    assert plans.canonical(again) == raw and raw.isascii()
    shuffled = dict(reversed(json.loads(raw).items()))
    assert plans.sha256(Plan.from_record(shuffled)) == hashlib.sha256(raw).hexdigest()


def test_the_name_of_a_frozen_plan_is_the_hash_of_its_file(project):
    name = plans.freeze(project, a_plan())
    raw = (project.path("plans") / f"{name}.json").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == name
    full, loaded = plans.load(project, name[:12])
    assert (full, plans.sha256(loaded)) == (name, name)


def test_the_same_plan_frozen_twice_is_two_plans(project):
    assert plans.freeze(project, a_plan()) != plans.freeze(project, a_plan())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"max_rate_usd_hr":0.5', b'"max_rate_usd_hr":0.1'),
        (b'"deadline_s":43200.0', b'"deadline_s":99999.0'),
        (b'{"candidates"', b' {"candidates"'),
        (b'"provider":"vast"', b'"provider":"vast","price":0.1'),
        (b"}", b"} trailing"),
    ],
)
def test_a_plan_edited_by_hand_is_refused(project, old, new):
    name = plans.freeze(project, a_plan())
    path = project.path("plans") / f"{name}.json"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(PlanChanged) as raised:
        plans.load(project, name)
    assert (raised.value.code, raised.value.exit_code) == ("plan_changed", 4)


def test_a_file_that_has_its_hash_as_a_name_and_is_not_canonical_is_no_plan_of_ours(project):
    raw = json.dumps(a_plan(nonce="0" * 16).to_record(), indent=1).encode()
    folder = project.path("plans")
    folder.mkdir(exist_ok=True)
    name = hashlib.sha256(raw).hexdigest()
    (folder / f"{name}.json").write_bytes(raw)
    with pytest.raises(PlanChanged):
        plans.load(project, name)


def test_a_field_nobody_knows_is_not_approved_unseen():
    with pytest.raises(UsageError, match="also_rent"):
        Plan.from_record({**a_plan().to_record(), "also_rent": "an H100"})


def test_a_record_that_is_no_plan_is_named_as_such():
    with pytest.raises(SchemaInvalid):
        Plan.from_record({**a_plan().to_record(), "deadline_s": -1})


def test_a_draft_is_written_anew_under_its_name_and_a_frozen_one_never(project):
    draft = plans.save_draft(project, a_plan())
    assert plans.save_draft(project, a_plan(disk_gb=80), name=draft) == draft
    assert plans.load(project, draft)[1].disk_gb == 80
    frozen = plans.freeze(project, a_plan())
    assert plans.save_draft(project, a_plan(), name=frozen) != frozen
    assert plans.load(project, frozen)[1].disk_gb == 50


@pytest.mark.parametrize("name", ["draft-00000000", "0123abcd", "../../etc/passwd", "draft-../x", "*", "abc"])
def test_a_plan_that_is_not_there_is_named(project, name):
    with pytest.raises(PlanUnknown):
        plans.load(project, name)
