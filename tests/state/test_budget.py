"""What counts against a ceiling now, and that two who reserve at once cannot both have the last dollar."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from fake_clock import FakeClock
from gpu_skills.errors import OverCeiling, StateError, UsageError
from gpu_skills.state import budget, files, journal, policy, registry
from gpu_skills.state import project as projects
from gpu_skills.state.ledger import Ledger

LIMITS = policy.combine(
    [("project", {"ceilings": dict.fromkeys(("job_usd", "session_usd")) | {"day_usd": 20, "month_usd": 100}})]
)


@pytest.fixture
def clock():
    return FakeClock(datetime(2026, 3, 10, 12, 0, tzinfo=UTC))


@pytest.fixture
def ledger(project, clock):
    return Ledger(project, clock)


@pytest.fixture
def other(tmp_path):
    return projects.init(tmp_path / "other", project_id="p-other")


def job(at: str, cost: float) -> dict:
    return {"status": "completed", "completed_at": at, "ts": at, "cost_usd": cost}


def charge(at: str, cost: float, kind: str = "idle") -> dict:
    return {"kind": kind, "ts": at, "completed_at": at, "cost_usd": cost}


def reserve(project, clock, cost: float, intent: str = "i1", limits=LIMITS, **more):
    question = {"account": "acct", "provider": "vast", "rate_usd_hr": 1, "deadline_h": 1, **more}
    return budget.reserve(project, Ledger(project, clock), clock, limits, intent=intent, cost_usd=cost, **question)


def settle(project, clock, settled: float, intent: str = "i1", account: str = "acct"):
    budget.settle(project, clock, intent=intent, account=account, provider="vast", settled_usd=settled)


def now(project, clock, **more) -> budget.Books:
    return budget.books(project, Ledger(project, clock), clock, **more)


def test_jobs_and_charges_of_the_utc_day_and_month_are_summed(project, ledger, clock):
    ledger.append([job("2026-02-28T23:59:59Z", 50), job("2026-03-01T00:00:00Z", 4), job("2026-03-10T00:00:00Z", 2)])
    journal.append(ledger.charges, [charge("2026-03-10T11:00:00Z", 0.5), charge("2026-03-09T11:00:00Z", 1)])
    spent = now(project, clock).spent
    assert (spent.day_usd, spent.month_usd, spent.incomplete) == (Decimal("2.5"), Decimal("7.5"), False)


def test_a_clock_that_went_back_gives_no_money_back(project, ledger, clock):
    ledger.append([job("2026-03-10T10:00:00Z", 6)])
    clock.jump_wall(-26 * 3600)
    assert now(project, clock).spent.day_usd == 6


def test_money_without_a_date_counts_as_today(project, ledger, clock):
    ledger.path.write_text('{"id": "J-000001", "status": "completed", "cost_usd": 8}\n')
    books = now(project, clock)
    assert (books.spent.day_usd, books.spent.month_usd) == (8, 8)


def test_a_line_that_cannot_be_read_makes_the_sum_incomplete_and_nothing_is_rewritten(project, ledger, clock):
    ledger.append([job("2026-03-10T10:00:00Z", 6)])
    with open(ledger.path, "ab") as stream:
        stream.write(b'{"id":"J-000009","cost_usd":-4}\n')
    before = ledger.path.read_bytes()
    spent = now(project, clock).spent
    assert (spent.day_usd, spent.incomplete) == (6, True)
    assert ledger.path.read_bytes() == before


@pytest.mark.parametrize(
    ("provider", "status", "counted"),
    [
        ("vast", "ready", 1), ("vast", "requested", 1), ("vast", "unknown", 1), ("vast", "terminating", 1),
        ("vast", "stopped", 0), ("vast", "destroyed", 0), ("ssh", "ready", 0), ("local", "ready", 0),
    ],
)  # fmt: skip
def test_rented_machines_that_may_bill_are_counted_and_own_hosts_are_not(project, clock, provider, status, counted):
    registry.put(project, "machines", {"id": "m_1", "provider": provider, "status": status}, clock=clock)
    assert now(project, clock).spent.machines == counted


def test_two_projects_share_the_reservations_of_one_account(project, other, clock):
    reserve(project, clock, 15)
    assert now(other, clock).reserved_usd == 15
    with pytest.raises(OverCeiling, match=r"\$6\.00 exceeds the day ceiling of \$20\.00, of which \$5\.00 is left"):
        reserve(other, clock, 6, "i2")
    reserve(other, clock, 5, "i3")
    assert budget.account_journal("vast", "acct").parent.parent.is_relative_to(os.environ["XDG_STATE_HOME"])


def test_the_name_of_an_account_is_not_in_its_path(clock):
    path = budget.account_journal("vast", "key-1234567890")
    assert "1234567890" not in str(path) and path.parent.name.startswith("vast-")
    assert (
        path != budget.account_journal("vast", "key-1234567891") != budget.account_journal("runpod", "key-1234567890")
    )


@pytest.mark.parametrize(("provider", "account"), [("../x", "a"), ("", "a"), ("vast", "")])
def test_a_provider_or_account_that_names_nothing_is_refused(provider, account):
    with pytest.raises(UsageError):
        budget.account_journal(provider, account)


def test_a_refused_reservation_writes_nothing(project, clock):
    with pytest.raises(OverCeiling):
        reserve(project, clock, 21)
    assert not budget.account_journal("vast", "acct").exists()


def test_settled_money_is_free_again_here_and_spent_for_the_other_project(project, other, clock):
    reserve(project, clock, 15)
    settle(project, clock, 3.25)
    assert now(project, clock).reserved_usd == 0
    assert now(project, clock).spent.day_usd == 0  # the project's own ledger says what it spent
    assert now(other, clock).spent.day_usd == Decimal("3.25") == now(other, clock).spent.month_usd
    clock.advance(24 * 3600)
    assert now(other, clock).spent.day_usd == 0 and now(other, clock).spent.month_usd == Decimal("3.25")


def test_settling_twice_counts_once(project, other, clock):
    reserve(project, clock, 15)
    settle(project, clock, 3)
    settle(project, clock, 3)
    assert now(other, clock).spent.day_usd == 3


def test_reserving_again_for_an_intent_replaces_its_amount(project, clock):
    reserve(project, clock, 15)
    reserve(project, clock, 18)
    assert [r.reserved_usd for r in now(project, clock).reservations] == [18]


def test_attempts_of_one_job_add_up_and_other_jobs_do_not(project, clock):
    reserve(project, clock, 3, "i1", job_id="J-000001")
    settle(project, clock, 1, "i1")
    reserve(project, clock, 2, "i2", job_id="J-000001")
    reserve(project, clock, 4, "i3", job_id="J-000002")
    assert now(project, clock, job_id="J-000001").spent.job_usd == 3
    limits = policy.combine([("project", {"ceilings": {"job_usd": 5}})])
    with pytest.raises(OverCeiling, match="job ceiling"):
        reserve(project, clock, 2.5, "i4", limits, job_id="J-000001")


def test_what_the_ledger_says_a_job_cost_counts_against_its_ceiling(project, ledger, clock):
    ledger.append([job("2026-03-10T11:00:00Z", 2.25) | {"id": "J-000001", "status": "failed"}])
    assert now(project, clock, job_id="J-000001").spent.job_usd == Decimal("2.25")
    assert now(project, clock, job_id="J-000002").spent.job_usd == 0
    reserve(project, clock, 1, "i1", job_id="J-000001")
    assert now(project, clock, job_id="J-000001").spent.job_usd == Decimal("3.25")


def test_money_that_is_settled_and_in_the_ledger_counts_once(project, ledger, clock):
    reserve(project, clock, 3, "i1", job_id="J-000001")
    settle(project, clock, 1.5, "i1")
    ledger.append([job("2026-03-10T11:00:00Z", 1.25) | {"id": "J-000001"}])
    assert now(project, clock, job_id="J-000001").spent.job_usd == Decimal("1.5")


def test_a_job_of_another_project_has_the_same_id_and_is_another_job(project, other, clock):
    reserve(other, clock, 3, "i1", job_id="J-000001")
    settle(other, clock, 3, "i1")
    reserve(other, clock, 2, "i2", job_id="J-000001")
    assert now(project, clock, job_id="J-000001").spent.job_usd == 0
    assert now(other, clock, job_id="J-000001").spent.job_usd == 5


def on_machine(machine: str, cost: float) -> dict:
    return charge("2026-03-10T11:00:00Z", cost) | {"machine_id": machine}


def test_what_is_booked_on_a_machine_is_not_reserved_as_well(project, ledger, clock):
    directory = reserve(project, clock, 10, "run").account
    budget.note_attempt(project, clock, intent="run", directory=directory, machine_id="m_1")
    journal.append(ledger.charges, [on_machine("m_1", 3), on_machine("m_2", 1)])
    ledger.append([job("2026-03-10T11:30:00Z", 2) | {"id": "J-000001", "machine_id": "m_1"}])
    books = now(project, clock)
    assert (books.spent.day_usd, books.reserved_usd) == (6, 5)
    reserve(project, clock, 9, "other")  # 6 + 5 + 9 are the ceiling of 20
    with pytest.raises(OverCeiling, match="day ceiling"):
        reserve(project, clock, 0.01, "more")
    journal.append(ledger.charges, [on_machine("m_1", 7)])
    assert now(project, clock).reserved_usd == 9


def test_a_dollar_booked_makes_one_of_two_reservations_of_a_machine_smaller(project, ledger, clock):
    directory = reserve(project, clock, 4, "run").account
    budget.note_attempt(project, clock, intent="run", directory=directory, machine_id="m_1")
    clock.sleep(1)
    reserve(project, clock, 3, "x1", machine_id="m_1", machines=0)
    journal.append(ledger.charges, [on_machine("m_1", 5)])
    books = now(project, clock)
    assert [(r.intent, r.reserved_usd) for r in books.reservations] == [("run", 0), ("x1", 2)]


def test_what_is_booked_here_does_not_make_another_projects_reservation_smaller(project, other, clock):
    directory = reserve(other, clock, 10, "run").account
    budget.note_attempt(other, clock, intent="run", directory=directory, machine_id="m_1")
    journal.append(Ledger(project, clock).charges, [on_machine("m_1", 3)])
    assert now(project, clock).reserved_usd == 10


def test_a_job_counts_what_its_machine_was_reserved_for_or_has_cost_whichever_is_more(project, ledger, clock):
    directory = reserve(project, clock, 10, "run", job_id="J-000001").account
    budget.note_attempt(project, clock, intent="run", directory=directory, machine_id="m_1")
    journal.append(ledger.charges, [on_machine("m_1", 3)])
    ledger.append([job("2026-03-10T11:30:00Z", 4) | {"id": "J-000001", "machine_id": "m_1"}])
    assert now(project, clock, job_id="J-000001").spent.job_usd == 10
    journal.append(ledger.charges, [on_machine("m_1", 5)])
    assert now(project, clock, job_id="J-000001").spent.job_usd == 12


def test_a_job_that_goes_on_with_an_older_one_has_the_same_ceiling(project, clock):
    limits = policy.combine([("project", {"ceilings": {"job_usd": 5}})])
    reserve(project, clock, 2, "i1", limits, job_id="J-000001")
    settle(project, clock, 2, "i1")
    reserve(project, clock, 1, "i2", limits, job_id="J-000002", resumes="J-000001")
    settle(project, clock, 1, "i2")
    assert now(project, clock, job_id="J-000002").spent.job_usd == 3
    with pytest.raises(OverCeiling, match="job ceiling"):
        reserve(project, clock, 2.5, "i3", limits, job_id="J-000003", resumes="J-000002")
    reserve(project, clock, 2, "i3", limits, job_id="J-000003", resumes="J-000002")
    reserve(project, clock, 5, "i4", limits, job_id="J-000004")


def test_jobs_that_say_they_go_on_with_each_other_are_counted_once(project, clock):
    reserve(project, clock, 2, "i1", job_id="J-000001", resumes="J-000002")
    reserve(project, clock, 1, "i2", job_id="J-000002", resumes="J-000001")
    assert now(project, clock, job_id="J-000001").spent.job_usd == 3


def test_a_start_and_what_prolongs_it_add_up_against_the_ceiling_of_a_session(project, clock):
    limits = policy.combine([("project", {"ceilings": {"session_usd": 5}})])
    reserve(project, clock, 3, "start1", limits)
    reserve(project, clock, 1, "x1", limits, session="start1", machine_id="m_1", machines=0)
    assert now(project, clock, session="start1").spent.session_usd == 4
    with pytest.raises(OverCeiling, match="session ceiling"):
        reserve(project, clock, 1.5, "x2", limits, session="start1", machine_id="m_1", machines=0)
    reserve(project, clock, 1, "x2", limits, session="start1", machine_id="m_1", machines=0)
    reserve(project, clock, 5, "start2", limits, machine_id="m_1")  # another start is another session


def test_a_reservation_without_a_machine_yet_is_one_more_machine_and_one_with_it_is_not(project, clock):
    limits = policy.combine([("project", {"ceilings": {"machines": 2}})])
    registry.put(project, "machines", {"id": "m_1", "provider": "vast", "status": "ready"}, clock=clock)
    reserve(project, clock, 1, "i1", limits, machine_id="m_1", machines=0)
    assert now(project, clock).spent.machines == 1
    reserve(project, clock, 1, "i2", limits)
    with pytest.raises(OverCeiling, match="machines"):
        reserve(project, clock, 1, "i3", limits)


def test_a_reservation_in_both_journals_counts_once(project, clock):
    reserve(project, clock, 5)
    event = {"kind": "reservation", "ts": "2026-03-10T12:00:00Z", "intent": "i1", "reserved_usd": 5}
    journal.append(project.path("journal.jsonl"), [event])
    assert now(project, clock).reserved_usd == 5


def test_a_settlement_frees_a_reservation_whatever_file_it_stands_in(project, clock):
    reserve(project, clock, 5)
    clock.advance(10)
    event = {"kind": "settlement", "ts": "2026-03-10T12:00:10Z", "intent": "i1", "settled_usd": 1}
    journal.append(project.path("journal.jsonl"), [event])
    assert now(project, clock).reserved_usd == 0
    clock.advance(10)
    reserve(project, clock, 4)
    assert now(project, clock).reserved_usd == 4, "reserved again, it counts again"


def test_a_copy_of_a_settled_reservation_in_another_file_stays_settled(project, clock):
    event = {"kind": "reservation", "ts": "2026-03-10T12:00:00Z", "intent": "i1", "reserved_usd": 5}
    journal.append(project.path("journal.jsonl"), [event])
    reserve(project, clock, 5)
    settle(project, clock, 1)
    assert now(project, clock).reserved_usd == 0


def test_within_one_second_the_order_of_the_lines_decides(project, clock):
    reserve(project, clock, 5)
    settle(project, clock, 0)
    assert now(project, clock).reserved_usd == 0
    reserve(project, clock, 5)
    assert now(project, clock).reserved_usd == 5
    settle(project, clock, 0)
    assert now(project, clock).reserved_usd == 0


def test_money_reserved_with_a_key_that_changed_since_comes_free_by_the_directory(project, clock):
    directory = reserve(project, clock, 5).account
    settle(project, clock, 1, account="the new key")
    clock.advance(5)
    reserve(project, clock, 5)
    clock.advance(5)
    budget.settle(project, clock, intent="i1", directory=directory, settled_usd=1)
    assert now(project, clock).reserved_usd == 0
    for wrong in ("../x-0123456789abcdef", "vast", ""):
        with pytest.raises(UsageError):
            budget.settle(project, clock, intent="i1", directory=wrong, settled_usd=1)


def test_a_reservation_and_the_machine_of_its_newest_attempt_are_one_machine(project, clock):
    limits = policy.combine([("project", {"ceilings": {"machines": 1}})])
    directory = reserve(project, clock, 1, limits=limits).account
    for n, status in ((1, "lost"), (2, "booting")):
        budget.note_attempt(project, clock, intent="i1", directory=directory, machine_id=f"m_{n}")
        registry.put(project, "machines", {"id": f"m_{n}", "provider": "vast", "status": status}, clock=clock)
    assert now(project, clock).spent.machines == 1
    assert budget.open_reservations(project)["i1"].machine_ids == ("m_1", "m_2")
    with pytest.raises(OverCeiling, match="machines"):
        reserve(project, clock, 1, "i2", limits)


def test_a_machine_that_its_reservation_does_not_name_yet_is_no_second_one(project, clock):
    """Another launch may look between the two writes."""
    directory = reserve(project, clock, 1).account
    asked_for = {"id": "m_1", "provider": "vast", "status": "requested", "approval_id": "i1"}
    registry.put(project, "machines", asked_for, clock=clock)
    assert now(project, clock).spent.machines == 1
    budget.note_attempt(project, clock, intent="i1", directory=directory, machine_id="m_1")
    registry.put(project, "machines", {**asked_for, "id": "m_2"}, clock=clock)
    registry.put(project, "machines", {**asked_for, "status": "destroyed"}, clock=clock)
    assert now(project, clock).spent.machines == 1


def test_a_run_that_goes_on_does_not_count_its_own_machines_against_itself(project, clock):
    limits = policy.combine([("project", {"ceilings": {"machines": 1}})])
    directory = reserve(project, clock, 1, limits=limits).account
    budget.note_attempt(project, clock, intent="i1", directory=directory, machine_id="m_1")
    registry.put(project, "machines", {"id": "m_1", "provider": "vast", "status": "terminating"}, clock=clock)
    reserve(project, clock, 2, limits=limits)
    assert now(project, clock).reserved_usd == 2


def test_a_stopped_machine_that_is_started_again_is_not_one_more(project, clock):
    limits = policy.combine([("project", {"ceilings": {"machines": 1}})])
    directory = reserve(project, clock, 1, limits=limits).account
    budget.note_attempt(project, clock, intent="i1", directory=directory, machine_id="m_1")
    registry.put(project, "machines", {"id": "m_1", "provider": "vast", "status": "stopped"}, clock=clock)
    reserve(project, clock, 1, "start1", limits, machine_id="m_1")
    assert now(project, clock).spent.machines == 1


def test_reservations_of_other_projects_are_not_this_ones_to_settle(project, other, clock):
    reserve(other, clock, 5)
    assert budget.open_reservations(project) == {} and set(budget.open_reservations(other)) == {"i1"}


def test_a_torn_line_of_a_write_that_was_cut_does_not_block_what_follows(project, clock):
    reserve(project, clock, 5)
    path = budget.account_journal("vast", "acct")
    with open(path, "ab") as stream:
        stream.write(b'{"kind":"reservation","intent":"i2","reserved_')
    reserve(project, clock, 6, "i3")
    assert now(project, clock).reserved_usd == 11
    assert now(project, clock).spent.incomplete


ODD = ("project_id", "job_id", "resumes", "session", "account", "provider", "machine_id")


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "reservation", "intent": "i1"},
        {"kind": "reservation", "intent": "i1", "reserved_usd": "5"},
        {"kind": "reservation", "intent": "i1", "reserved_usd": -5},
        {"kind": "reservation", "reserved_usd": 5},
        {"kind": "settlement", "intent": ["i1"], "settled_usd": 5},
        {"kind": "settlement", "intent": "i1", "settled_usd": True},
        *({"kind": "reservation", "intent": "i1", "reserved_usd": 1, key: ["x"]} for key in ODD),
        {"kind": "reservation", "intent": "i1", "reserved_usd": 1, "ts": 5},
        {"kind": "reservation", "intent": "i1", "reserved_usd": 1, "ts": "yesterday"},
    ],
)
def test_a_reservation_that_cannot_be_added_up_refuses_money_instead_of_counting_as_nothing(project, clock, event):
    path = budget.account_journal("vast", "acct")
    files.make_directory(path.parent)
    path.write_text(json.dumps({"ts": "2026-03-10T12:00:00Z", **event}) + "\n")
    before = path.read_bytes()
    with pytest.raises(StateError, match=r"journal\.jsonl:1 /"):
        reserve(project, clock, 1, "i2")
    assert path.read_bytes() == before


RACE = """
import sys
from decimal import Decimal
from pathlib import Path
from gpu_skills.clock import SystemClock
from gpu_skills.errors import OverCeiling
from gpu_skills.state import budget, policy, project
from gpu_skills.state.ledger import Ledger
found = project.load(Path(sys.argv[1]))
limits = policy.combine([("project", {"ceilings": {"day_usd": 20, "month_usd": None, "job_usd": None,
    "session_usd": None, "machines": None}})])
environ = {"HOME": sys.argv[2]}
print("ready", flush=True)
sys.stdin.readline()
taken = 0
for n in range(5):
    try:
        budget.reserve(found, Ledger(found, SystemClock()), SystemClock(), limits, intent=f"{sys.argv[3]}-{n}",
            account="a", provider="vast", cost_usd=3, rate_usd_hr=1, deadline_h=1, environ=environ)
        taken += 1
    except OverCeiling:
        pass
print(taken, flush=True)
"""


def test_processes_that_reserve_at_once_never_have_more_than_the_ceiling_together(project, other, tmp_path, spawn):
    racers = [spawn(RACE, (project, other)[n % 2].root, tmp_path / "h", n) for n in range(4)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    assert sum(int(racer.communicate(timeout=60)[0]) for racer in racers) == 6
