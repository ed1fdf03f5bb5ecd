"""Plans measured on a vendor of the sandbox, and what is refused before any money moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_skills import schemas
from gpu_skills.clock import parse_timestamp
from gpu_skills.config import load_gpu_yaml
from gpu_skills.errors import PlanRefused, UsageError
from gpu_skills.lifecycle import memory
from gpu_skills.lifecycle.plans import market, planning
from gpu_skills.lifecycle.plans import plan as plans
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.plans.preflight import Reason
from gpu_skills.lifecycle.plans.wanted import SHORTEST_S
from gpu_skills.lifecycle.plans.worst_case import SETUP_CAP_S, WorstCase
from gpu_skills.providers.gpus import same_model
from gpu_skills.providers.known import traits_of
from gpu_skills.sandbox.vast_instances import STOPPED_STORAGE_FACTOR
from gpu_skills.state import files

JOB = {"run": "python train.py", "setup": None, "secret": ["WANDB_API_KEY"], "directory": "."}


def a_config(r: Any, text: str):
    (r.project.root / "gpu.yaml").write_text(f"provider: {r.vendor}\n{text}\n")
    return load_gpu_yaml(r.project.root, environ={"HOME": str(r.project.root)})


def plan_job(r: Any, text: str = "", **wish: Any) -> Plan:
    return planning.plan_job(r.op, a_config(r, text), **{"job": JOB, "inputs": None, **wish})


def plan_project(r: Any, text: str = "") -> Plan:
    return planning.plan_project(r.op, a_config(r, text))


def refused(plan: Callable[..., Plan], *args: Any, **wish: Any) -> PlanRefused:
    with pytest.raises(PlanRefused) as raised:
        plan(*args, **wish)
    assert raised.value.exit_code == 3
    return raised.value


def codes(error: PlanRefused) -> list[str]:
    return [reason["code"] for reason in error.details["reasons"]]


def text_of(error: PlanRefused, code: str) -> str:
    return next(reason["message"] for reason in error.details["reasons"] if reason["code"] == code)


def ceilings(r: Any, **changes: Any) -> None:
    path = r.project.path("policy.json")
    policy = files.read_json(path)
    policy["ceilings"] |= changes
    path.write_text(json.dumps(policy))


def hosts(r: Any, gpu: str | None = None) -> list[Any]:
    return [h for h in r.sandbox.world.catalogue.hosts if h.vendor == r.vendor and gpu in (None, h.gpu.name)]


@pytest.fixture
def vast(rig):
    return rig("vast", containers=False)


@pytest.fixture
def runpod(rig):
    return rig("runpod", containers=False)


# what a plan says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_a_plan_satisfies_its_schema_and_costs_few_calls_and_no_money(rig, vendor):
    r = rig(vendor, containers=False)
    made = plan_job(r, "compute: {gpu: RTX 4090, candidates: [RTX 3090]}", expected_s=600)
    assert schemas.problems(made.to_record(), "plans") == []
    assert (made.project_id, made.machine_class, made.provider) == (r.project.project_id, "job", vendor)
    assert [c.gpu for c in made.tried] == ["RTX 4090", "RTX 3090"]
    assert sum(r.sandbox.world.calls.values()) <= 3
    assert r.creates == 0 and r.billed_usd() == 0


@pytest.mark.parametrize(
    ("flags", "ends_h"),
    [
        ({"expected_s": 3600.0, "hold_for_s": 1800.0}, 3.0),  # twice an hour, half an hour of review, half for set-up
        ({"expected_s": 3600.0, "hold_for_s": 1800.0, "job_timeout_s": 4 * 3600.0}, 5.0),
        ({"expected_s": 3600.0, "max_lease_s": 8 * 3600.0}, 8.0),
        ({"expected_s": 20 * 3600.0 / 4, "hold_for_s": 3600.0}, 11.5),
        ({"expected_s": 6 * 3600.0, "hold_for_s": 1800.0}, 12.0),
        ({}, 12.0),
    ],
)
def test_what_runs_longer_than_twice_the_expected_time_needs_a_new_plan(vast, flags, ends_h):
    assert plan_job(vast, "compute: {gpu: RTX 3090}", **flags).deadline_h == ends_h


def test_every_offer_is_told_with_its_id_machine_and_rate_and_none_is_dearer_than_the_maximum(vast):
    made = plan_job(vast, "compute: {gpu: RTX 4090, candidates: [RTX 3090]}")
    shown = [offer for candidate in made.tried for offer in candidate.offers]
    assert shown and all(o["offer_id"] and o["machine_id"] for o in shown)
    now = {o.offer_id: o for o in vast.reader.offers(market.need_of(made))}
    assert all(float(now[o["offer_id"]].rate_usd_hr) == pytest.approx(o["rate_usd_hr"], abs=1e-6) for o in shown)
    assert made.max_rate_usd_hr >= max(now[o["offer_id"]].rate_usd_hr for o in shown)
    assert made.max_rate_usd_hr - max(now[o["offer_id"]].rate_usd_hr for o in shown) < Decimal("0.000001")


def test_the_worst_case_is_what_its_parts_make(vast):
    made = plan_job(vast, "compute: {gpu: RTX 3090}", max_lease_s=3600.0)
    rate, parts = made.max_rate_usd_hr, {name: Decimal(str(v)) for name, v in made.worst_case.items()}
    assert parts["running"] == rate  # one hour
    assert parts["failed_setups"] == pytest.approx(rate / 2 * made.setup_failures_max, abs=Decimal("0.000002"))
    assert parts["start_grace"] == pytest.approx(rate / 6, abs=Decimal("0.000002"))
    assert parts["storage"] == pytest.approx(made.storage_usd_hr * 24, abs=Decimal("0.000002"))
    assert made.worst_case_usd == sum(parts.values())
    dearest = max(offer["storage_usd_hr"] for candidate in made.tried for offer in candidate.offers)
    assert made.storage_usd_hr == pytest.approx(Decimal(str(dearest)) * Decimal("1.25"), abs=Decimal("0.000002"))


def test_the_written_order_is_kept_and_the_explicit_gpu_comes_first(vast):
    made = plan_job(vast, "compute: {gpu: A100, candidates: [RTX 3090, A100, RTX 4090], max_rate_usd_hr: 2}")
    assert [c.gpu for c in made.candidates] == ["A100", "RTX 3090", "RTX 4090"]


def test_with_no_gpu_written_vast_gives_the_smallest_classes_that_do(vast):
    made = plan_job(vast, "compute: {min_vram_gb: 40}")
    sizes = [offer["vram_gb"] for candidate in made.tried for offer in candidate.offers]
    assert min(sizes) >= 40 and sizes == sorted(sizes)
    cheapest = [candidate.rate_usd_hr for candidate in made.tried]
    assert max(cheapest) <= cheapest[0] * market.DEARER_TIMES


def test_with_no_gpu_written_runpod_gives_its_defaults_in_order(runpod):
    made = plan_job(runpod)
    assert [c.gpu for c in made.candidates] == ["NVIDIA RTX A5000", "NVIDIA A40"]
    assert made.candidates[0].left_out is None
    assert "NVIDIA A40" in (made.candidates[1].left_out or "")  # this market has none


def test_defaults_that_are_too_small_are_kept_with_the_reason_and_the_smallest_that_do_follow(runpod):
    made = plan_job(runpod, "compute: {min_vram_gb: 40}")
    assert made.candidates[0].left_out == "NVIDIA RTX A5000 has 24 GB, 40 GB are needed"
    assert made.tried and all(c.gpu not in traits_of("runpod").default_candidates for c in made.tried)


def test_a_class_that_cannot_satisfy_the_need_is_left_out_with_its_reason_and_the_others_are_tried(vast):
    made = plan_job(vast, "compute: {gpu: RTX 4090, candidates: [RTX A6000], min_vram_gb: 40}")
    assert [(c.gpu, c.left_out) for c in made.candidates] == [
        ("RTX 4090", "RTX 4090 has 24 GB, 40 GB are needed"),
        ("RTX A6000", None),
    ]


def test_a_machine_on_cooldown_is_not_shown(vast):
    first = plan_job(vast, "compute: {gpu: RTX 3090}").tried[0].offers[0]
    memory.remember_failure(vast.project, f"vast:{first['machine_id']}", "boot_timeout", clock=vast.clock)
    shown = plan_job(vast, "compute: {gpu: RTX 3090}").tried[0].offers
    assert shown and first["machine_id"] not in {offer["machine_id"] for offer in shown}


def test_a_job_on_runpod_without_a_volume_says_that_its_outputs_are_ephemeral_and_pays_for_no_volume(runpod):
    made = plan_job(runpod)
    assert made.outputs_ephemeral and any(w.startswith("outputs_ephemeral") for w in made.warnings)
    assert (made.storage_usd_hr, made.storage_grace_s, made.idle_timeout_s) == (0, 0, None)
    kept = plan_project(runpod)
    assert not kept.outputs_ephemeral and kept.storage_usd_hr > 0
    assert kept.tried[0].rate_usd_hr > made.tried[0].rate_usd_hr  # the volume disk beside the container's


def test_on_vast_the_disk_survives_a_stop(vast):
    made = plan_job(vast, "compute: {gpu: RTX 3090}")
    assert not made.outputs_ephemeral and made.storage_grace_s == 86400
    assert "owner could read" in (made.whose_machine or "")


def test_the_names_of_secrets_are_told_and_no_value(vast):
    (vast.project.root / ".env").write_text("HF_TOKEN=hf_abcdefghijklmnopqrst\n")
    made = plan_job(vast, "compute: {gpu: RTX 3090}")
    assert made.secrets == ("HF_TOKEN", "WANDB_API_KEY")
    assert b"hf_abcdef" not in plans.canonical(made)


def test_the_expected_cost_is_that_of_the_cheapest_offer_with_start_up_and_hold(vast):
    made = plan_job(vast, "compute: {gpu: RTX 3090}", expected_s=3600.0, hold_for_s=1800.0)
    cheapest = made.tried[0].rate_usd_hr
    assert cheapest * Decimal("1.5") < made.expected_usd < made.worst_case_usd
    assert plan_job(vast, "compute: {gpu: RTX 3090}").expected_usd is None


def test_interruptible_machines_are_planned_only_when_asked_for(vast):
    usual = plan_job(vast, "compute: {gpu: RTX 3090}")
    cheap = plan_job(vast, "compute: {gpu: RTX 3090}", interruptible=True)
    assert not usual.interruptible and cheap.interruptible
    assert cheap.max_rate_usd_hr < usual.tried[0].rate_usd_hr
    assert any("taken away" in w for w in cheap.warnings)


def test_what_the_ceilings_leave_is_in_the_plan(vast):
    ceilings(vast, day_usd=7)
    made = plan_job(vast, "compute: {gpu: RTX 3090}")
    assert made.ceilings_left["day_usd"] == 7 and made.ceilings_left["machines"] == 2


# deadlines --------------------------------------------------------------------------------------------------------


def test_the_projects_machine_ends_at_max_lifetime_or_earlier_where_the_session_budget_ends(vast):
    text = "compute: {{gpu: RTX 3090}}\nlifecycle: {{max_lifetime: 6h}}\nbudget: {{session_usd: {usd}}}"
    long = plan_project(vast, text.format(usd=10))
    assert (long.deadline_s, long.deadline_reason, long.idle_timeout_s) == (21600, "max_lifetime", 900)
    short = plan_project(vast, text.format(usd="1.50"))
    assert short.deadline_s < 21600 and short.deadline_reason == "session_budget"
    assert Decimal("1.49") < short.worst_case_usd <= Decimal("1.50")


def test_a_budget_that_buys_next_to_nothing_is_refused(vast):
    error = refused(plan_project, vast, "compute: {gpu: RTX 3090}\nbudget: {session_usd: 0.2}")
    assert codes(error) == ["over_ceiling"] and "session_usd of $0.20" in error.message


def test_without_max_lifetime_the_ceiling_bounds_the_machine_and_without_both_there_is_no_plan(vast):
    text = "compute: {gpu: RTX 3090}\nlifecycle: {max_lifetime: 'off'}\nbudget: {session_usd: null}"
    ceilings(vast, deadline_h=3)
    assert (plan_project(vast, text).deadline_s, plan_project(vast, text).deadline_reason) == (10800, "ceiling")
    ceilings(vast, deadline_h=None)
    assert codes(refused(plan_project, vast, text)) == ["no_deadline"]


def test_the_default_lease_is_twelve_hours_and_shorter_where_the_ceilings_do_not_reach(vast):
    ceilings(vast, job_usd=50, session_usd=50, day_usd=50)
    made = plan_job(vast, "compute: {gpu: RTX 3090}")
    assert (made.deadline_s, made.deadline_reason, made.hold_for_s) == (43200, "max_lease", 1800)
    ceilings(vast, job_usd=2)
    made = plan_job(vast, "compute: {gpu: RTX 3090}")
    assert made.deadline_s < 43200 and made.deadline_reason == "ceiling"
    assert Decimal("1.99") < made.worst_case_usd <= 2
    assert any("not 12h00m" in warning for warning in made.warnings)


def test_a_lease_that_was_asked_for_is_not_shortened_but_refused_with_the_one_that_would_fit(vast):
    ceilings(vast, job_usd=2)
    error = refused(plan_job, vast, "compute: {gpu: RTX 3090}", max_lease_s=43200.0)
    assert codes(error) == ["over_ceiling"] and "would fit" in error.message and vast.creates == 0
    ceilings(vast, job_usd=50, session_usd=50, day_usd=50, deadline_h=10)
    assert codes(refused(plan_job, vast, "compute: {gpu: RTX 3090}", max_lease_s=43200.0)) == ["over_ceiling"]


def test_the_deadline_that_would_fit_fits_all_ceilings_at_once(vast):
    error = refused(plan_job, vast, "compute: {gpu: RTX 3090}", max_lease_s=400 * 3600.0)
    told = [reason["message"] for reason in error.details["reasons"]]
    assert any("deadline_h ceiling of 12 h" in text for text in told) and any("job ceiling" in text for text in told)
    assert {text.partition("; ")[2] for text in told} == {"a deadline of 12h00m would fit"}
    assert plan_job(vast, "compute: {gpu: RTX 3090}", max_lease_s=12 * 3600.0).deadline_h == 12
    ceilings(vast, job_usd=2)
    told = [
        r["message"]
        for r in refused(plan_job, vast, "compute: {gpu: RTX 3090}", max_lease_s=400 * 3600.0).details["reasons"]
    ]
    (fits,) = {text.partition("; ")[2] for text in told}
    assert fits != "a deadline of 12h00m would fit"


def test_the_storage_of_the_worst_case_is_at_least_what_a_stopped_machine_is_charged(vast):
    made = plan_project(vast, "compute: {gpu: RTX 3090}")
    dearest = max(Decimal(str(offer["storage_usd_hr"])) for one in made.tried for offer in one.offers)
    assert made.storage_usd_hr >= dearest * STOPPED_STORAGE_FACTOR
    assert Decimal(str(made.worst_case["storage"])) >= made.storage_usd_hr * Decimal(made.storage_grace_s) / 3600


def test_a_checkpoint_to_go_on_from_counts_as_what_is_sent_and_stored(vast):
    for host in hosts(vast):
        host.down_usd_gb = Decimal("0.02")
    weights = {"path": "checkpoint-9/w", "bytes": 15 * 10**9, "sha256": "0" * 64}
    resume = {"job": "J-000001", "step": 9, "files": [weights, {**weights, "path": "checkpoint-9/o"}]}
    text = "compute: {gpu: RTX 3090, disk_gb: 120}"
    without, resumed = plan_job(vast, text), plan_job(vast, text, resume_from=resume)
    assert resumed.worst_case["traffic"] - without.worst_case["traffic"] >= 0.02 * 30
    small = refused(plan_job, vast, "compute: {gpu: RTX 3090, disk_gb: 50}", resume_from=resume)
    assert "disk_too_small" in codes(small) and "30.0 GB of inputs" not in small.message
    assert "60.0 GB of inputs" in text_of(small, "disk_too_small")


def test_a_timeout_longer_than_the_lease_is_refused(vast):
    error = refused(plan_job, vast, "compute: {gpu: RTX 3090}", max_lease_s=3600.0, job_timeout_s=7200.0)
    assert "timeout_too_long" in codes(error)


def test_an_immediate_plan_holds_an_hour_and_a_waiting_one_until_its_attempts_end(vast):
    made = plan_job(vast, "compute: {gpu: RTX 3090}")
    assert parse_timestamp(made.measured_at) <= vast.clock.now()
    assert parse_timestamp(made.expires_at) - parse_timestamp(made.measured_at) == timedelta(hours=1)
    text = "compute: {gpu: RTX 3090, capacity: {mode: wait, attempts: 100, interval: 2m}}"
    made = plan_job(vast, text)
    assert parse_timestamp(made.expires_at) - parse_timestamp(made.measured_at) == timedelta(minutes=200)
    assert made.capacity == {"mode": "wait", "attempts": 100, "interval_s": 120}
    assert any("in the foreground, 3h20m at most" in w and "price may change" in w for w in made.warnings)


@settings(max_examples=200, deadline=None)
@given(
    rate=st.decimals("0.01", 50, places=6), storage=st.decimals(0, 1, places=6), traffic=st.decimals(0, 20, places=6),
    failures=st.integers(1, 5), budget=st.decimals("0.01", 500, places=2),
)  # fmt: skip
def test_what_a_budget_buys_never_comes_to_more_than_the_budget(rate, storage, traffic, failures, budget):
    money = WorstCase(rate, storage, 86400.0, traffic, failures, 43200.0, "max_lease")
    buys_s = money.buys_s(budget)
    assert buys_s is not None
    if buys_s >= SHORTEST_S:
        assert replace(money, deadline_s=float(int(buys_s))).worst_usd <= budget
    longer = replace(money, deadline_s=buys_s + SETUP_CAP_S)
    assert longer.worst_usd > budget  # and it is not much less either


# waiting ----------------------------------------------------------------------------------------------------------


def taken(r: Any, gpu: str) -> None:
    """Somebody else has all of these."""
    for host in hosts(r, gpu):
        host.others = host.gpu_count
        host.used = {}
        host.generation += 1


def test_a_waiting_plan_keeps_a_class_of_which_nothing_is_free_and_takes_the_written_price_as_its_maximum(vast):
    taken(vast, "RTX 3090")
    text = "compute: {{gpu: RTX 3090, max_rate_usd_hr: 0.4, capacity: {{mode: {mode}}}}}"
    made = plan_job(vast, text.format(mode="wait"))
    assert [c.gpu for c in made.tried] == ["RTX 3090"] and made.max_rate_usd_hr == Decimal("0.4")
    assert made.worst_case["storage"] > 0
    assert any("none to be had now: RTX 3090" in w for w in made.warnings)
    assert codes(refused(plan_job, vast, text.format(mode="immediate"))) == ["no_offers"]


def test_waiting_for_what_will_never_do_is_refused(vast):
    text = "compute: {gpu: RTX 4090, min_vram_gb: 40, max_rate_usd_hr: 1, capacity: {mode: wait}}"
    assert codes(refused(plan_job, vast, text)) == ["vram_too_small"]


def test_waiting_without_an_offer_or_any_ceiling_has_no_price(vast):
    taken(vast, "RTX 3090")
    ceilings(vast, rate_usd_hr=None)
    error = refused(plan_job, vast, "compute: {gpu: RTX 3090, capacity: {mode: wait}}")
    assert codes(error) == ["no_price"]


def test_a_wait_lasts_for_all_classes_of_a_plan_together(vast):
    text = "compute: {gpu: RTX 3090, candidates: [RTX 4090], capacity: {mode: wait, attempts: 3, interval: 10s}}"
    made = plan_job(vast, text)
    assert made.capacity["attempts"] == 3 and [c.gpu for c in made.tried] == ["RTX 3090", "RTX 4090"]
    assert parse_timestamp(made.expires_at) - parse_timestamp(made.measured_at) == timedelta(hours=1)


# refusals ---------------------------------------------------------------------------------------------------------


def test_a_missing_file_and_a_gpu_too_small_are_told_together_and_nothing_is_created(vast):
    error = refused(
        plan_job,
        vast,
        "compute: {gpu: RTX 4090, min_vram_gb: 40}",
        reasons=[Reason("missing_file", "data.bin would not be on the machine: is not there")],
    )
    assert codes(error) == ["missing_file", "vram_too_small"]
    assert error.details["filters"]["RTX 4090"] and vast.creates == 0


def test_everything_wrong_is_told_at_once(vast):
    vast.sandbox.world.set_balance(next(iter(vast.sandbox.world.accounts.values())), Decimal("0.01"))
    ceilings(vast, machines=0, deadline_h=1)
    text = "compute: {gpu: RTX 3090, disk_gb: 20, image: 'me/big:cuda12.4', image_gb: 23.6}"
    error = refused(plan_job, vast, text, max_lease_s=7200.0, job_timeout_s=9000.0)
    assert set(codes(error)) == {"disk_too_small", "timeout_too_long", "over_ceiling", "balance_too_low"}
    assert codes(error).count("over_ceiling") == 2  # machines and deadline
    assert "50 GB will do" in text_of(error, "disk_too_small")


def test_the_price_cap_counts_the_disk(vast):
    for host in hosts(vast, "RTX 3090"):
        host.rate_usd_hr, host.storage_usd_gb_month, host.disk_gb = Decimal("0.30"), Decimal("0.30"), 2000.0
    error = refused(plan_job, vast, "compute: {gpu: RTX 3090, disk_gb: 200, max_rate_usd_hr: 0.35}")
    assert codes(error) == ["over_ceiling"] and "$0.38/h with its disk" in error.message
    made = plan_job(vast, "compute: {gpu: RTX 3090, disk_gb: 50, max_rate_usd_hr: 0.35}")
    assert made.max_rate_usd_hr == Decimal("0.320834")  # 0.30 and 50 GB at 0.30 a month


def test_an_offer_of_five_hours_is_not_taken_for_a_lease_of_twelve(vast):
    short, *others = hosts(vast, "RTX 3090")
    for host in [short, *others]:
        host.available_s, host.verification, host.port_count, host.cuda = 5 * 3600.0, "verified", 100, "13.0"
    ceilings(vast, job_usd=50, session_usd=50, day_usd=50)
    error = refused(plan_job, vast, "compute: {gpu: RTX 3090}", max_lease_s=43200.0)
    assert codes(error) == ["too_short"] and "the longest has 5h00m" in error.message
    assert plan_job(vast, "compute: {gpu: RTX 3090}", max_lease_s=14400.0).tried
    others[0].available_s = 13 * 3600.0
    made = plan_job(vast, "compute: {gpu: RTX 3090}", max_lease_s=43200.0)
    assert {offer["machine_id"] for offer in made.tried[0].offers} == {str(others[0].machine_id)}


def test_where_money_ends_the_lease_earlier_a_shorter_offer_will_do(vast):
    for host in hosts(vast, "RTX 3090"):
        host.available_s = 5 * 3600.0
    ceilings(vast, job_usd=50, session_usd=50, day_usd=50)
    assert codes(refused(plan_job, vast, "compute: {gpu: RTX 3090}")) == ["too_short"]
    ceilings(vast, job_usd=1.2)
    made = plan_job(vast, "compute: {gpu: RTX 3090}")
    assert made.deadline_s < 5 * 3600 and made.worst_case_usd <= Decimal("1.2")
    assert all(offer["duration_h"] * 3600 >= made.deadline_s for offer in made.tried[0].offers)


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_no_host_with_an_older_cuda_is_among_the_offers_and_the_create_carries_the_need(rig, vendor):
    r = rig(vendor, containers=False)
    made = plan_job(r, "compute: {gpu: RTX 4090}")
    assert (made.min_cuda, made.min_driver) == (12.8, "570")
    assert all(offer["cuda"] >= 12.8 for offer in made.tried[0].offers)
    assert market.need_of(made).min_cuda == 12.8


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_wheels_for_a_newer_cuda_exclude_older_drivers_and_the_explanation_names_the_filter(rig, vendor):
    r = rig(vendor, containers=False)
    for host in hosts(r, "RTX 4090"):
        host.driver_version, host.cuda = "570.153.02", "12.8"
    assert plan_job(r, "compute: {gpu: RTX 4090}").tried
    texts = {"requirements.txt": "torch==2.9.0+cu130\n"}
    error = refused(plan_job, r, "compute: {gpu: RTX 4090}", texts=texts)
    assert "driver 580" in error.message or vendor == "runpod"
    if vendor == "vast":
        assert codes(error) == ["driver_too_old"]
        assert "torch==2.9.0+cu130 (requirements.txt)" in error.message and "cuda (13 or newer)" in error.message


def test_hosts_too_old_for_the_image_are_named_as_that(vast):
    for host in hosts(vast):
        host.driver_version, host.cuda = "525.60.13", "11.8"
    error = refused(plan_job, vast, "compute: {gpu: RTX 4090, image: 'pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime'}")
    assert codes(error) == ["cuda_too_old"] and "filter cuda" in error.message


def test_a_provider_the_policy_does_not_allow_is_refused(vast):
    path = vast.project.path("policy.json")
    path.write_text(json.dumps({**files.read_json(path), "allowed_providers": ["local"]}))
    assert "provider_not_allowed" in codes(refused(plan_job, vast, "compute: {gpu: RTX 3090}"))


def test_a_gpu_nobody_has_is_explained_by_the_filters(vast):
    error = refused(plan_job, vast, "compute: {gpu: RTX 9999}")
    assert codes(error) == ["no_offers"] and "gpu (RTX 9999) removed" in error.message
    rows = error.details["filters"]["RTX 9999"]
    assert rows[0]["filter"] == "gpu" and rows[0]["left"] == 0


def test_more_disk_than_any_host_has_free_is_named_as_that(vast):
    error = refused(plan_job, vast, "compute: {gpu: RTX 3090, disk_gb: 50000, max_rate_usd_hr: 1000}")
    assert codes(error) == ["disk_unspecified"] and "disk_gb (50000 GB free) removed" in error.message


def test_a_volume_in_another_place_than_the_gpus_is_refused_and_one_beside_them_is_planned(runpod):
    here = runpod.reader.search(market.Requirements(gpu="RTX A5000")).offers[0].location
    places = {center["id"] for center in runpod.sandbox.world.catalogue.data_centers}
    there = next(
        place
        for place in sorted(places - set((here or "").split(", ")))
        if next(c for c in runpod.sandbox.world.catalogue.data_centers if c["id"] == place)["network_volumes"]
    )
    volume = runpod.writer.create_volume("models", 100, there)
    error = refused(plan_job, runpod, "compute: {gpu: RTX A5000}", volume_id=volume.volume_id)
    assert codes(error) == ["volume_location"] and there in error.message


def test_a_volume_makes_outputs_last_and_names_its_data_centre(runpod):
    place = None
    for center in runpod.sandbox.world.catalogue.data_centers:
        if center["network_volumes"] and any(
            center["id"] in (o.location or "") for o in runpod.reader.offers(market.Requirements(disk_gb=50))
        ):
            place = center["id"]
            break
    assert place is not None
    volume = runpod.writer.create_volume("models", 100, place)
    offers = runpod.reader.offers(market.Requirements(disk_gb=50, volume_id=volume.volume_id, min_cuda=12.8))
    text = f"compute: {{gpu: '{offers[0].offer_id}', max_rate_usd_hr: 2}}"
    made = plan_job(runpod, text, volume_id=volume.volume_id)
    assert (made.volume_id, made.locations, made.outputs_ephemeral) == (volume.volume_id, (place,), False)
    assert any("bills until it is deleted" in w for w in made.warnings)


def test_vast_has_no_network_volumes(vast):
    assert "volume_location" in codes(refused(plan_job, vast, "compute: {gpu: RTX 3090}", volume_id="v1"))


def test_interruptible_on_runpod_is_refused(runpod):
    error = refused(plan_job, runpod, "", interruptible=True)
    assert codes(error) == ["no_interruptible"] and "runpod has no interruptible machines" in error.message


def test_a_machine_of_ones_own_needs_no_plan(vast):
    (vast.project.root / "gpu.yaml").write_text("provider: local\n")
    config = load_gpu_yaml(vast.project.root, environ={"HOME": "/nowhere"})
    with pytest.raises(UsageError, match="rents nothing"):
        planning.plan_project(vast.op, config)


def test_what_is_reserved_by_others_shrinks_the_deadline(vast):
    from gpu_skills.state import budget

    ceilings(vast, day_usd=6)
    budget.reserve(
        vast.project, vast.op.ledger, vast.clock, vast.op.policy(), intent="other", account="a", provider="vast",
        cost_usd="4.5", rate_usd_hr="0.4", deadline_h=1, environ=vast.op.environ,
    )  # fmt: skip
    made = plan_job(vast, "compute: {gpu: RTX 3090}")
    assert made.worst_case_usd <= Decimal("1.5") and made.deadline_reason == "ceiling"


def test_every_class_a_plan_tries_is_found_again_by_its_need(vast):
    made = plan_job(vast, "compute: {min_vram_gb: 20}")
    for candidate in made.tried:
        offers = vast.reader.offers(market.need_of(made, candidate.gpu))
        assert {o["offer_id"] for o in candidate.offers} <= {o.offer_id for o in offers}
        assert all(same_model(candidate.gpu, o.gpu or "") for o in offers)
