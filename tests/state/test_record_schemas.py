from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_skills import resources, schemas
from gpu_skills.state import job_record, quick_check

TS = "2026-01-02T03:04:05Z"
SHA = "a" * 64

GOOD: dict[str, list[object]] = {
    "project": [{"project_id": "p-abc", "schema_version": 1}, {"project_id": "x"}],
    "providers": [{"id": "vast", "installed": True, "authenticated": False, "checked_at": TS}],
    "machines": [
        {"id": "m_1", "provider": "vast", "status": "ready", "rate_usd_hr": 0.69, "instance_id": 4711},
        {"id": "m_2", "provider": "ssh", "status": "busy", "ssh": {"host": "h", "port": 22, "user": None}, "own": [1]},
    ],
    "deployments": [
        {"id": "dep_1", "provider": "vast", "status": "provisioning"},
        {"id": "dep_1", "provider": "vast", "status": "ready", "test_generation": {"succeeded": True, "at": TS}},
    ],
    "models": [{"id": "m", "files": [{"path": "a.bin", "sha256": SHA, "size_bytes": 3}], "min_vram_gb": 16}],
    "workflows": [{"id": "w", "version": 2, "inputs": {}, "outputs": ["x.png"]}],
    "jobs": [
        {"id": "J-000001", "status": "running", "ts": TS},
        {"id": "J-000001", "status": "failed", "ts": TS, "error": "x", "cost_usd": 0.1, "artifacts": [], "new": 1},
    ],
    "charges": [
        {"kind": "idle", "cost_usd": 0.5, "ts": TS},
        {"kind": "correction", "cost_usd": -0.5, "ts": TS, "note": "from the invoice"},
    ],
    "journal": [
        {"kind": "intent", "ts": TS, "intent": "i1", "action": "create"},
        {"kind": "outcome", "ts": TS, "intent": "i1", "result": "unknown"},
        {"kind": "reservation", "ts": TS, "intent": "i1", "reserved_usd": 3.5, "account": "vast:1"},
        {"kind": "settlement", "ts": TS, "intent": "i1", "settled_usd": 2},
        {"kind": "observation", "ts": TS, "what": "absent"},
        {"kind": "something_newer", "ts": TS},
    ],
    "approvals": [
        {
            "id": "a1",
            "plan_sha256": SHA,
            "project_id": "p",
            "level": "statement",
            "statement": "yes",
            "approved_at": TS,
            "expires_at": TS,
            "ts": TS,
        }
    ],
    "memory": [{}, {"hosts": {"vast:1": {"successes": 1, "failures": 2, "cooldown_until": TS}}}],
    "ledger_head": [{"offset": 1, "lines": 1, "chain": SHA, "custody": 0, "size": 1, "mtime_ns": 1, "inode": 1}],
    "policy": [json.loads(resources.template("policy.json").read_text()), {"ceilings": {"job_usd": None}}],
}

BAD: list[tuple[str, dict[str, object], str]] = [
    ("project", {"project_id": "Bad Id"}, "/project_id"),
    ("providers", {"id": ""}, "/id"),
    ("machines", {"id": "m_1", "provider": "vast", "status": "redy"}, "/status"),
    ("machines", {"id": "1", "provider": "vast", "status": "ready"}, "/id"),
    ("machines", {"id": "m_1", "provider": "vast", "status": "ready", "rate_usd_hr": "0.69"}, "/rate_usd_hr"),
    ("machines", {"id": "m_1", "provider": "vast", "status": "ready", "gpu_count": 1.5}, "/gpu_count"),
    ("deployments", {"id": "dep_1", "provider": "x", "status": "running"}, "/status"),
    ("deployments", {"id": "dep_1", "provider": "x", "status": "ready", "test_generation": {}}, "/test_generation"),
    ("models", {"id": "m", "files": [{"path": "a", "sha256": "xyz"}]}, "/files/0/sha256"),
    ("workflows", {"id": "w", "outputs": [1]}, "/outputs/0"),
    ("charges", {"kind": "idle", "cost_usd": -0.1, "ts": TS}, "/cost_usd"),
    ("charges", {"kind": "correction", "cost_usd": -1e300, "ts": TS}, "/cost_usd"),
    ("charges", {"kind": "idle", "cost_usd": 1e300, "ts": TS}, "/cost_usd"),
    ("charges", {"kind": "other", "cost_usd": 0.1, "ts": TS}, "/kind"),
    ("journal", {"kind": "reservation", "ts": TS, "intent": "i1"}, "/reserved_usd"),
    ("journal", {"kind": "intent", "ts": "now", "intent": "i", "action": "create"}, "/ts"),
    ("approvals", {"id": "a", "plan_sha256": "x", "project_id": "p", "level": "verbal"}, "/level"),
    ("memory", {"hosts": {"h": {"failures": -1}}}, "/hosts/h/failures"),
    ("ledger_head", {"offset": -1, "lines": 1, "chain": SHA, "custody": 0}, "/offset"),
    ("policy", {"ceilings": []}, "/ceilings"),
    ("policy", {"ceilings": {"job_usd": "5"}}, "/ceilings/job_usd"),
    ("policy", {"ceilings": {"jobs_usd": 5}}, "/ceilings/jobs_usd"),
    ("policy", {"ceilings": {}, "approval": {"level": "none"}}, "/approval/level"),
    ("policy", {"ceilings": {}, "fuse_layers": ["guest"]}, "/fuse_layers/0"),
]


@pytest.mark.parametrize("name", sorted(GOOD))
def test_good_records_fit_their_schema(name):
    for record in GOOD[name]:
        assert schemas.problems(record, name) == []


@pytest.mark.parametrize("name, record, pointer", BAD)
def test_a_near_miss_is_named_at_its_pointer(name, record, pointer):
    found = schemas.problems(record, name)
    assert any(p.pointer.startswith(pointer) for p in found), found
    assert not quick_check.fits(record, name)


def test_the_default_policy_is_bounded_in_every_ceiling():
    policy = json.loads(resources.template("policy.json").read_text())
    known = schemas.load("policy")["properties"]["ceilings"]["properties"]
    assert set(policy["ceilings"]) == set(known)
    assert all(isinstance(limit, int | float) and 0 < limit < math.inf for limit in policy["ceilings"].values())
    assert policy["retry_limit"] == 1 and policy["idle_shutdown_after_min"] == 30


WRONG = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=True), st.text(max_size=4), st.just([]),
    st.just({}), st.sampled_from([TS, "2026-01-02T03:04:05", "J-000001", "J-1", "completed", "ready", SHA, "m_1\n"]),
)  # fmt: skip
SPOILED = st.sampled_from([(name, record) for name in sorted(GOOD) for record in GOOD[name]])


@settings(max_examples=300, deadline=None)
@given(SPOILED, st.data())
def test_the_quick_check_never_accepts_what_the_schema_refuses(chosen, data):
    name, good = chosen
    record = copy.deepcopy(good)
    keys = sorted(schemas.load(name)["properties"])
    record[data.draw(st.sampled_from(keys))] = data.draw(WRONG)
    if quick_check.fits(record, name):
        assert schemas.problems(record, name) == []
    if name == "jobs" and job_record.is_plainly_valid(record):
        assert schemas.problems(record, name) == []


@pytest.mark.parametrize("name", ["machines", "deployments", "providers", "models", "workflows", "jobs"])
def test_the_quick_check_accepts_ordinary_records_so_that_no_validator_is_loaded(name):
    assert all(quick_check.fits(record, name) for record in GOOD[name])


def test_the_quick_check_of_ledger_lines_accepts_ordinary_lines():
    assert all(job_record.is_plainly_valid(record) for record in GOOD["jobs"])
    assert set(job_record.STATE) == set(schemas.load("jobs")["properties"]["status"]["enum"])
    assert set(job_record.FIELDS) <= set(schemas.load("jobs")["properties"])
