"""Three files, one answer: the strictest; and what it leaves."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest

from gpu_skills import resources, userdirs
from gpu_skills.errors import OverCeiling, PolicyMissing, StateNewer, UsageError
from gpu_skills.state import policy, quick_check
from gpu_skills.state.policy import Spent, check, combine, require, what_is_left

ALICE = "alice@x ssh-ed25519 AAAAC3alice alice's key"
BOB = "bob@x ssh-ed25519 AAAAC3bob"
MALLORY = "mallory ssh-ed25519 AAAAC3mallory"


def ceilings(**values: object) -> dict:
    return {"ceilings": values}


def approval(**values: object) -> dict:
    return {"ceilings": {}, "approval": values}


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def user_file() -> Path:
    return userdirs.config_dir(os.environ) / "policy.json"


# combining -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "user", "project", "limit", "origins"),
    [
        (None, None, 20, 20, ("project",)),
        (5, None, 20, 5, ("system",)),
        (5, 3, 20, 3, ("user",)),
        (5, 3, 2, 2, ("project",)),
        (7, 7, 20, 7, ("system", "user")),
        (None, 0, 20, 0, ("user",)),
    ],
)
def test_the_smallest_ceiling_of_all_files_holds_and_its_origin_is_known(system, user, project, limit, origins):
    given = [
        (origin, ceilings(day_usd=value))
        for origin, value in (("system", system), ("user", user), ("project", project))
        if value is not None
    ]
    found = combine(given)
    assert (found.ceilings["day_usd"], found.origins["ceilings.day_usd"]) == (limit, origins)


def test_null_lifts_a_ceiling_only_as_far_as_its_own_file_goes():
    assert combine([("user", ceilings(day_usd=4)), ("project", ceilings(day_usd=None))]).ceilings["day_usd"] == 4
    assert combine([("user", ceilings()), ("project", ceilings(day_usd=None))]).ceilings["day_usd"] is None


def test_a_ceiling_that_no_file_names_is_the_default_and_not_unlimited():
    found = combine([("project", ceilings(day_usd=3))])
    template = json.loads(resources.template("policy.json").read_text())
    assert found.ceilings["month_usd"] == template["ceilings"]["month_usd"]
    assert found.origins["ceilings.month_usd"] == ("default",)
    assert (found.retry_limit, found.ledger_inputs, found.idle_shutdown_after_min) == (1, "full", 30)


def test_a_file_that_only_tightens_the_approval_needs_no_ceilings():
    found = combine([("system", {"approval": {"level": "signature"}}), ("project", {})])
    template = json.loads(resources.template("policy.json").read_text())
    assert found.approval_level == "signature"
    assert found.ceilings == {name: Decimal(str(limit)) for name, limit in template["ceilings"].items()}


@pytest.mark.parametrize(
    ("key", "user", "project", "combined"),
    [
        ("fuse_layers", ["machine"], ["sentinel", "machine"], ("machine", "sentinel")),
        ("protected_files", ["a"], ["b", "a"], ("a", "b")),
        ("allowed_providers", ["vast", "local"], ["local", "runpod", "vast"], ("vast", "local")),
        ("allowed_providers", ["vast"], [], ()),
        ("notify", [{"kind": "mail"}], [{"kind": "mail"}, {"kind": "hook"}], ({"kind": "mail"}, {"kind": "hook"})),
        ("sentinel_receipts", ["/a.json"], ["s3://b/c", "/a.json"], ("/a.json", "s3://b/c")),
        ("retry_limit", 3, 1, 1),
        ("retry_limit", 0, 5, 0),
        ("ledger_inputs", "hash", "full", "hash"),
        ("ledger_inputs", "hash", "none", "none"),
        ("idle_shutdown_after_min", 60, 10, 10),
        ("idle_shutdown_after_min", None, 10, 10),
    ],
)
def test_lists_add_up_or_shrink_and_words_tighten(key, user, project, combined):
    found = combine([("user", {"ceilings": {}, key: user}), ("project", {"ceilings": {}, key: project})])
    assert getattr(found, key) == combined


@pytest.mark.parametrize(
    ("user", "project", "level"),
    [
        ("statement", "signature", "signature"),
        ("signature", "statement", "signature"),
        ("statement", "statement", "statement"),
        (None, "signature", "signature"),
    ],
)
def test_a_signature_beats_a_statement_wherever_it_is_asked(user, project, level):
    outer = approval(level=user) if user else ceilings()
    assert combine([("user", outer), ("project", approval(level=project))]).approval_level == level


@pytest.mark.parametrize(
    ("given", "signers"),
    [
        ([("project", approval(signers=[ALICE]))], (ALICE,)),
        ([("user", approval(signers=[ALICE, BOB])), ("project", approval(signers=[]))], (ALICE, BOB)),
        ([("user", approval(signers=[ALICE, BOB])), ("project", approval(signers=[BOB, MALLORY]))], (BOB,)),
        ([("user", approval(signers=[ALICE])), ("project", approval(signers=[MALLORY]))], ()),
        ([("user", approval(level="signature")), ("project", approval(signers=[MALLORY]))], ()),
        ([("user", ceilings()), ("project", approval(level="signature", signers=[ALICE]))], (ALICE,)),
        ([("system", approval(signers=[ALICE])), ("user", approval(signers=[ALICE, BOB]))], (ALICE,)),
    ],
)
def test_the_project_can_take_signers_away_but_never_add_one(given, signers):
    assert combine(given).approval_signers == signers


def test_a_signer_keeps_the_options_of_the_file_that_decides():
    bounded = 'alice@x namespaces="gpu-skills",valid-before="20270101" ssh-ed25519 AAAAC3alice'
    wide = "* ssh-ed25519 AAAAC3alice"
    found = combine([("user", approval(signers=[bounded])), ("project", approval(signers=[wide]))])
    assert found.approval_signers == (bounded,)


def test_the_namespace_of_the_outermost_file_holds():
    found = combine([("user", approval(namespace="team")), ("project", approval(namespace="gpu-skills"))])
    assert (found.approval_namespace, found.origins["approval.namespace"]) == ("team", ("user",))


def test_a_key_nobody_knows_is_shown_because_it_may_be_a_misspelt_limit():
    found = combine([("user", {"ceilings": {}, "allowed_provider": ["local"]})])
    assert found.unknown == (("user", "allowed_provider"),)


def test_every_value_has_an_origin():
    found = combine([("project", ceilings())])
    assert set(found.values()) == set(found.origins)


# reading ---------------------------------------------------------------------------------------------------------


def test_the_files_of_system_user_and_project_are_combined(project, tmp_path):
    write(tmp_path / "etc/policy.json", {**ceilings(rate_usd_hr=1.5), "ledger_inputs": "hash"})
    write(user_file(), ceilings(day_usd=7))
    found = policy.load(project, system=tmp_path / "etc/policy.json")
    assert (found.ceilings["rate_usd_hr"], found.origins["ceilings.rate_usd_hr"]) == (Decimal("1.5"), ("system",))
    assert (found.ceilings["day_usd"], found.origins["ceilings.day_usd"]) == (7, ("user",))
    assert (found.ceilings["month_usd"], found.origins["ceilings.month_usd"]) == (100, ("project",))
    assert found.ledger_inputs == "hash" == policy.ledger_inputs(project, system=tmp_path / "etc/policy.json")


def test_without_a_project_policy_money_is_refused_and_gpu_init_is_named(project, tmp_path):
    project.path("policy.json").unlink()
    with pytest.raises(PolicyMissing) as refused:
        policy.load(project, system=tmp_path / "none")
    assert refused.value.exit_code == 3 and "gpu init" in refused.value.next_step
    assert ".pi/gpu/policy.json" in refused.value.message


BROKEN = [
    ('{"ceilings": {"day_usd": 20,}}', ":1:28", "trailing comma"),
    ('\ufeff{"ceilings": {}}', ":1:1", "byte order mark"),
    ('{"ceilings": {},\n "ceilings": {"day_usd": 1}}', ":2:2", "again"),
    ('{"ceilings": {"day_usd": NaN}}', ":1:26 /ceilings/day_usd", "NaN"),
    ('{"ceilings": {"day_usd": 1e999}}', ":1:26 /ceilings/day_usd", "too large"),
    ('{"ceilings": {\n"day_usd": "20"}}', ":2", "/ceilings/day_usd"),
    ('{"ceilings": {\n\n"day_usd": -1}}', ":3", "0 or more"),
    ('{"ceilings": {"dayusd": 1}}', ":1", "nearest is day_usd"),
    ('{"ceilings": {"machines": 1.5}}', ":1", "/ceilings/machines"),
    ('{"ceilings": {}, "approval": {"level": "sig"}}', ":1", "/approval/level"),
    ("[]", ":1", "an object"),
    ('{"ceilings": null}', ":1", "/ceilings"),
    ("", ":1:1", "the end of the file"),
    ('{"ceilings": ' + "[" * 200 + "]" * 200 + "}", ":1", "level 101"),
]


@pytest.mark.parametrize("where", ["system", "user", "project"])
@pytest.mark.parametrize(("text", "place", "what"), BROKEN)
def test_a_file_that_does_not_read_is_refused_with_its_place_and_never_passed_over(
    project, tmp_path, where, text, place, what
):
    path = {"system": tmp_path / "etc.json", "user": user_file(), "project": project.path("policy.json")}[where]
    write(path, text)
    before = path.read_bytes()
    with pytest.raises(PolicyMissing) as refused:
        policy.load(project, system=tmp_path / "etc.json")
    shown = ".pi/gpu/policy.json" if where == "project" else str(path)
    assert refused.value.message.startswith(shown + place), refused.value.message
    assert what in refused.value.message
    assert shown in refused.value.next_step
    assert path.read_bytes() == before


def test_a_directory_or_a_file_without_permission_in_its_place_is_refused(project, tmp_path):
    user_file().mkdir(parents=True)
    with pytest.raises(PolicyMissing, match="not a file"):
        policy.load(project, system=tmp_path / "none")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_user_policy_that_may_not_be_read_is_refused(project, tmp_path):
    write(user_file(), ceilings())
    user_file().chmod(0)
    with pytest.raises(PolicyMissing, match="Permission denied"):
        policy.load(project, system=tmp_path / "none")


def test_a_policy_of_a_newer_version_moves_no_money(project, tmp_path):
    write(user_file(), {"schema_version": 2, **ceilings()})
    with pytest.raises(StateNewer):
        policy.load(project, system=tmp_path / "none")


@pytest.mark.parametrize(
    ("user", "own", "kept"),
    [
        (None, '{"ceilings": {}}', "full"),
        ('{"ceilings": {}, "ledger_inputs": "none"}', '{"ceilings": {}}', "none"),
        ("{broken", '{"ceilings": {}}', "hash"),
        ("{broken", '{"ceilings": {}, "ledger_inputs": "none"}', "none"),
        (None, '{"ceilings": {}, "ledger_inputs": ["full"]}', "hash"),
        (None, None, "hash"),
    ],
)
def test_what_the_ledger_may_keep_is_known_without_the_rest_and_a_broken_file_allows_no_content(
    project, tmp_path, user, own, kept
):
    if user is not None:
        write(user_file(), user)
    if own is None:
        project.path("policy.json").unlink()
    else:
        write(project.path("policy.json"), own)
    assert policy.ledger_inputs(project, system=tmp_path / "none") == kept


def test_a_user_without_a_home_is_allowed_no_content(project, tmp_path, monkeypatch):
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    assert policy.ledger_inputs(project, {}, system=tmp_path / "none") == "hash"


# what is left ----------------------------------------------------------------------------------------------------

LIMITS = combine(
    [
        (
            "project",
            {
                **ceilings(
                    job_usd=5, session_usd=10, day_usd=20, month_usd=100, rate_usd_hr=2, machines=2, deadline_h=12
                ),
                "allowed_providers": ["local", "vast"],
            },
        )
    ]
)
ASK = {"cost_usd": 4, "rate_usd_hr": 1, "deadline_h": 4, "provider": "vast", "reserved_usd": Decimal(0)}


def asked(**changes: object) -> list[str]:
    question = {**ASK, "spent": Spent(), **changes}
    return [v.ceiling for v in check(LIMITS, **question)]


@pytest.mark.parametrize(
    ("changes", "in_the_way"),
    [
        ({}, []),
        ({"cost_usd": 5}, []),
        ({"cost_usd": "5.000001"}, ["job_usd"]),
        ({"cost_usd": 11}, ["job_usd", "session_usd"]),
        ({"cost_usd": 101}, ["job_usd", "session_usd", "day_usd", "month_usd"]),
        ({"spent": Spent(day_usd=Decimal(16))}, []),
        ({"spent": Spent(day_usd=Decimal("16.01"))}, ["day_usd"]),
        ({"reserved_usd": Decimal("16.01")}, ["day_usd"]),
        ({"spent": Spent(day_usd=Decimal(9)), "reserved_usd": Decimal(8)}, ["day_usd"]),
        ({"spent": Spent(month_usd=Decimal(97))}, ["month_usd"]),
        ({"spent": Spent(month_usd=Decimal(90)), "reserved_usd": Decimal(7)}, ["month_usd"]),
        ({"spent": Spent(session_usd=Decimal(7))}, ["session_usd"]),
        ({"spent": Spent(job_usd=Decimal(2))}, ["job_usd"]),
        ({"rate_usd_hr": 2}, []),
        ({"rate_usd_hr": "2.01"}, ["rate_usd_hr"]),
        ({"deadline_h": 12.5}, ["deadline_h"]),
        ({"deadline_h": "inf"}, ["deadline_h"]),
        ({"deadline_h": float("inf")}, ["deadline_h"]),
        ({"deadline_h": None}, []),
        ({"spent": Spent(machines=1)}, []),
        ({"spent": Spent(machines=2)}, ["machines"]),
        ({"spent": Spent(machines=2), "machines": 0}, []),
        ({"provider": "runpod"}, ["allowed_providers"]),
        ({"provider": None}, []),
        # what is free passes when the money is gone, but a machine is a machine
        ({"cost_usd": 0, "rate_usd_hr": 0, "spent": Spent(day_usd=Decimal(50), month_usd=Decimal(500))}, []),
    ],
)
def test_each_ceiling_stands_in_the_way_of_what_exceeds_it_and_of_nothing_else(changes, in_the_way):
    assert asked(**changes) == in_the_way


def test_what_is_left_counts_what_is_spent_and_reserved_and_is_never_negative():
    left = what_is_left(LIMITS, Spent(day_usd=Decimal(15), month_usd=Decimal(30), machines=3), Decimal("7.5"))
    assert left == {
        "job_usd": 5,
        "session_usd": 10,
        "day_usd": 0,
        "month_usd": Decimal("62.5"),
        "rate_usd_hr": 2,
        "machines": 0,
        "deadline_h": 12,
    }
    unlimited = combine([("project", ceilings(day_usd=None))])
    assert what_is_left(unlimited, Spent(day_usd=Decimal(10**6)), Decimal(0))["day_usd"] is None


def test_everything_in_the_way_is_named_at_once_with_what_is_left_and_who_said_so():
    with pytest.raises(OverCeiling) as refused:
        require(LIMITS, **{**ASK, "rate_usd_hr": 3, "provider": "runpod"}, spent=Spent(day_usd=Decimal(18)))
    message = refused.value.message
    assert "$4.00 exceeds the day ceiling of $20.00, of which $2.00 is left (project)" in message
    assert "$3.00/h exceeds the rate_usd_hr ceiling of $2.00/h (project)" in message
    assert "runpod is not among the allowed ones (local, vast; project)" in message
    found = refused.value.to_dict()["details"]["violations"]
    assert [v["ceiling"] for v in found] == ["day_usd", "rate_usd_hr", "allowed_providers"]
    assert found[0] | {"asked": 4, "limit": 20, "left": 2, "from": ["project"]} == found[0]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "1e30", "four", "", True])
@pytest.mark.parametrize("name", ["cost_usd", "rate_usd_hr", "deadline_h"])
def test_an_amount_that_is_no_amount_is_refused_before_it_is_compared(name, value):
    if name == "deadline_h" and value == "inf":
        return
    with pytest.raises(UsageError, match=name):
        asked(**{name: value})


@pytest.mark.parametrize(
    "case", json.loads((Path(__file__).parents[1] / "schemas/cases/policy.json").read_text())["bad"]
)
def test_the_quick_look_at_a_policy_lets_nothing_pass_that_its_schema_refuses(case):
    assert not quick_check.fits(case[0], "policy")


def test_the_quick_look_takes_the_policy_that_gpu_init_writes():
    assert quick_check.fits(json.loads(resources.template("policy.json").read_text()), "policy")


def test_a_ceiling_that_is_missed_by_less_than_a_cent_is_shown_exactly():
    found = check(
        combine([("project", ceilings(rate_usd_hr=2, job_usd=5))]),
        cost_usd="5.000001", rate_usd_hr="2.000001", deadline_h=None, provider=None, spent=Spent(),
        reserved_usd=Decimal(0),
    )  # fmt: skip
    assert [str(v) for v in found] == [
        "$5.000001 exceeds the job ceiling of $5 (project)",
        "$2.000001 exceeds the rate_usd_hr ceiling of $2 (project)",
    ]


def test_a_link_to_a_policy_that_is_not_there_is_not_no_policy(project, tmp_path):
    user_file().parent.mkdir(parents=True, exist_ok=True)
    user_file().symlink_to(tmp_path / "unmounted/policy.json")
    with pytest.raises(PolicyMissing, match="a link to nothing"):
        policy.load(project, os.environ, system=tmp_path / "none.json")


def test_an_environment_that_points_elsewhere_does_not_leave_the_users_policy_behind(project, tmp_path, monkeypatch):
    kept = tmp_path / "account/.config/gpu/policy.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({**ceilings(), "approval": {"level": "signature", "signers": ["ssh-ed25519 AAAA me"]}}))
    monkeypatch.setattr(policy, "account_home", lambda: tmp_path / "account")
    elsewhere = {"HOME": str(tmp_path / "other"), "XDG_CONFIG_HOME": str(tmp_path / "other/config")}
    found = policy.load(project, elsewhere, system=tmp_path / "none")
    assert (found.approval_level, found.approval_signers) == ("signature", ("ssh-ed25519 AAAA me",))
    assert found.origins["approval.level"] == ("user",)
