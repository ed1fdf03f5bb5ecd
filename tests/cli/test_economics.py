"""`gpu economics …`: the arithmetic, with flags that carry their units."""

from __future__ import annotations

import json

import pytest

PUBLISHED = ("--rate-usd-hr", "0.70")


@pytest.fixture
def state(tmp_path, gpu):
    assert gpu("init").exit_code == 0
    return tmp_path / ".pi/gpu"


def run_jobs(state, *intervals, provider="vast"):
    """Ledger lines of jobs from minute to minute of one hour."""
    with open(state / "jobs.jsonl", "a") as stream:
        for start, end in intervals:
            number = len((state / "jobs.jsonl").read_text().splitlines()) + 1
            line = {
                "id": f"J-{number:06d}", "provider": provider, "status": "completed", "cost_usd": 0.1,
                "started_at": f"2026-03-10T{10 + start // 60}:{start % 60:02d}:00Z",
                "completed_at": f"2026-03-10T{10 + end // 60}:{end % 60:02d}:00Z",
                "ts": f"2026-03-10T{10 + end // 60}:{end % 60:02d}:00Z",
            }  # fmt: skip
            stream.write(json.dumps(line) + "\n")
            stream.flush()


@pytest.mark.parametrize(
    ("startup", "gap", "action"), [("10", "9", "keep"), ("10", "11", "destroy"), ("13", "12", "keep")]
)
def test_the_published_example_keeps_unless_the_gap_exceeds_the_startup(gpu, startup, gap, action):
    document = gpu("economics", "keepalive", *PUBLISHED, "--startup-min", startup, "--gap-min", gap, "--json").document
    assert (document["rule"], document["action"]) == ("known_gap", action)
    assert document["break_even_gap_s"] == int(startup) * 60
    restart = {o["action"]: o["restart_usd"] for o in document["options"]}["destroy"]
    assert restart == pytest.approx(0.7 * int(startup) / 60, abs=1e-6)


def test_a_startup_of_thirteen_minutes_costs_about_fifteen_cents_as_text_too(gpu):
    shown = gpu("economics", "keepalive", *PUBLISHED, "--startup-min", "13", "--gap-min", "30").stdout
    assert "destroy" in shown and "$0.15" in shown and "break-even gap: 13m00s" in shown


def test_an_unknown_gap_and_a_stop_give_a_schedule(gpu):
    document = gpu(
        "economics", "keepalive", *PUBLISHED, "--startup-min", "12", "--storage-usd-hr", "0.02", "--restart-min", "2",
        "--idle-min", "20", "--json",
    ).document  # fmt: skip
    assert (document["rule"], document["action"], document["at_most_times_best"]) == ("unknown_gap", "stop", 2)
    assert [step["action"] for step in document["schedule"]] == ["keep", "stop", "destroy"]


def test_without_a_project_the_numbers_have_to_be_given(gpu):
    assert gpu("economics", "keepalive", *PUBLISHED, "--startup-min", "4").exit_code == 0
    refused = gpu("economics", "keepalive", *PUBLISHED, "--json")
    assert refused.exit_code == 2 and "--startup-min" in refused.error["next_step"]


def test_the_startup_comes_from_past_set_ups_when_none_is_given(state, gpu):
    charges = [
        {"kind": "setup", "duration_s": s, "cost_usd": 0.1, "ts": "2026-03-10T10:00:00Z"} for s in (300, 600, 4000)
    ]
    charges.append({"kind": "setup_failed", "duration_s": 9999, "cost_usd": 1, "ts": "2026-03-10T10:00:00Z"})
    (state / "charges.jsonl").write_text("".join(json.dumps(c) + "\n" for c in charges) + "{torn")
    document = gpu("economics", "keepalive", *PUBLISHED, "--gap-min", "5", "--json").document
    assert document["startup"] == {"startup_s": 600, "from": "history", "setups": 3}
    assert "the middle of 3 past set-ups" in gpu("economics", "keepalive", *PUBLISHED, "--gap-min", "5").stdout


def test_without_charges_the_way_of_a_deployment_to_its_test_is_the_startup(state, gpu):
    record = {
        "id": "dep_a", "provider": "vast", "status": "ready", "created_at": "2026-03-10T10:00:00Z",
        "test_generation": {"succeeded": True, "at": "2026-03-10T10:12:00Z"},
    }  # fmt: skip
    (state / "deployments.json").write_text(
        json.dumps([record, {"id": "dep_b", "provider": "vast", "status": "error"}])
    )
    document = gpu("economics", "batch", *PUBLISHED, "--jobs", "2", "--job-min", "1", "--json").document
    assert document["startup"] == {"startup_s": 720, "from": "history", "setups": 1}


def test_past_gaps_of_the_ledger_decide_where_there_are_some(state, gpu):
    run_jobs(state, (0, 10), (13, 20), (23, 30), (26, 32), (110, 115))
    document = gpu("economics", "keepalive", *PUBLISHED, "--startup-min", "12", "--json").document
    assert (document["rule"], document["gaps"]) == ("history", 3)
    forced = ("--rule", "unknown-gap", "--json")
    assert gpu("economics", "keepalive", *PUBLISHED, "--startup-min", "12", *forced).document["rule"] == "unknown_gap"


def test_idle_timeout_reads_the_projects_own_gaps_provider_by_provider(state, gpu):
    run_jobs(state, (0, 10), (13, 20), (110, 115))
    run_jobs(state, (11, 12), provider="local")  # one job alone leaves no gap and fills none of another provider
    document = gpu("economics", "idle-timeout", *PUBLISHED, "--startup-min", "12", "--json").document
    assert (document["gaps"], document["gaps_from"], document["timeout_s"]) == (2, "ledger", 180)
    compared = {c["name"]: c["timeout_s"] for c in document["compared"]}
    assert compared == {"usual": 1800, "break-even": 720}
    regret = {c["name"]: c["regret_usd"] for c in document["compared"]}
    assert regret["usual"] == pytest.approx(0.7 * 27 / 60, abs=1e-6)


def test_a_job_that_ends_before_it_started_after_the_clock_jumped_makes_no_nonsense(state, gpu):
    run_jobs(state, (0, 10), (30, 20), (50, 55))
    document = gpu("economics", "idle-timeout", *PUBLISHED, "--startup-min", "12", "--json").document
    # two gaps of 20 minutes, each dearer than a start-up of 12: gone at once is best
    assert (document["gaps"], document["timeout_s"]) == (2, 0)
    assert document["cost_usd"] == pytest.approx(0.7 * 24 / 60)


def test_without_gaps_idle_timeout_says_so(state, gpu):
    refused = gpu("economics", "idle-timeout", *PUBLISHED, "--startup-min", "12", "--json")
    assert refused.exit_code == 2 and "no gaps" in refused.error["message"]
    history = gpu("economics", "keepalive", *PUBLISHED, "--startup-min", "12", "--rule", "history", "--json")
    assert history.exit_code == 2 and "no gaps" in history.error["message"]


def test_batch_compares_the_ways_and_says_which_are_left_out_and_why(gpu):
    document = gpu(
        "economics", "batch", *PUBLISHED, "--startup-min", "12", "--jobs", "40", "--job-min", "6", "--machines", "4",
        "--interruptible-rate-usd-hr", "0.3", "--interrupted-every-min", "300", "--json",
    ).document  # fmt: skip
    cost = {o["strategy"]: o["cost_usd"] for o in document["options"]}
    assert cost["kept"] == pytest.approx(0.7 * (12 + 240) / 60)
    assert cost["parallel"] == pytest.approx(0.7 * (4 * 12 + 240) / 60)
    assert (document["cheapest"], document["fastest"]) == ("interruptible", "parallel")
    assert [entry["strategy"] for entry in document["left_out"]] == ["stopped_between"]


@pytest.mark.parametrize(
    ("verb", "flags", "what"),
    [
        ("keepalive", ("--rate-usd-hr", "nan", "--startup-min", "4"), "rate_usd_hr is nan"),
        ("keepalive", ("--rate-usd-hr", "1", "--startup-min", "-4"), "--startup-min is -4"),
        ("keepalive", ("--rate-usd-hr", "1", "--startup-min", "4", "--gap-min", "1e99"), "--gap-min is 1e99"),
        ("keepalive", ("--rate-usd-hr", "1", "--startup-min", "4", "--storage-usd-hr", "1"), "belong together"),
        ("keepalive", ("--rate-usd-hr", "1", "--startup-min", "4", "--rule", "known-gap"), "belong together"),
        ("batch", ("--rate-usd-hr", "1", "--startup-min", "4", "--jobs", "0", "--job-min", "1"), "--jobs"),
        ("batch", ("--rate-usd-hr", "1", "--startup-min", "4", "--jobs", "2", "--job-min", "x"), "--job-min is x"),
        ("idle-timeout", ("--rate-usd-hr", "1", "--startup-min", "4", "--gap-min", "1", "--action", "stop"), "stopped"),
        ("idle-timeout", ("--startup-min", "4"), "--rate-usd-hr"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_or_missing_is_a_usage_error(gpu, verb, flags, what):
    refused = gpu("economics", verb, *flags, "--json")
    assert refused.exit_code == 2 and what in refused.error["message"]


def test_all_of_it_runs_in_audit(gpu):
    assert gpu("economics", "keepalive", *PUBLISHED, "--startup-min", "4", "--mode", "audit").exit_code == 0
