"""No machine without a guard: its own key is proven, or a sentinel passed within the hour."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from gpu_skills.clock import timestamp
from gpu_skills.errors import AuthRejected, MissingProgram, NotWritable, Unguarded, UsageError
from gpu_skills.lifecycle import runs
from gpu_skills.lifecycle.guard import keyproof, receipts, sentinel
from gpu_skills.lifecycle.recovery import overview
from gpu_skills.lifecycle.renting import provision, specs
from gpu_skills.state import files
from s3_server import s3, s3_application

__all__ = ["s3", "s3_application"]
from renting import a_plan, approved, guarded


def leave_receipt(r, place: str | None = None, **changes) -> None:
    """That of a pass of now, with something changed."""
    account = r.op.account(r.vendor)
    done = sentinel.run_pass(r.reader, r.writer, r.project.project_id, account=account, clock=r.clock)
    own = receipts.own_path(r.op.user_state, r.vendor, account, r.project.project_id)
    files.make_directory(own.parent)
    receipts.write(place or str(own), done.to_record() | changes)


@pytest.fixture
def r(rig):
    return rig("vast", containers=False)


def test_without_any_receipt_the_error_names_the_command(r):
    with pytest.raises(Unguarded) as caught:
        receipts.require_recent(r.op, "vast", "stop")
    assert caught.value.exit_code == 3 and caught.value.next_step == "gpu sentinel --provider vast"
    assert "no pass of the sentinel is on record" in caught.value.message


def test_a_pass_of_the_last_hour_is_enough_and_then_it_is_not(r):
    leave_receipt(r)
    receipts.require_recent(r.op, "vast", "stop")
    r.sandbox.advance(3590)
    receipts.require_recent(r.op, "vast", "stop")
    r.sandbox.advance(20)
    with pytest.raises(Unguarded, match="1h00m ago"):
        receipts.require_recent(r.op, "vast", "stop")


@pytest.mark.parametrize(
    "changes",
    [
        {"complete": False},
        {"complete": "true"},
        {"provider": "runpod"},
        {"account": "another"},
        {"project_id": "another"},
        {"ended_at": None},
        {"ended_at": "yesterday"},
        {"ended_at": "2026-01-01T00:00:00"},
    ],
)
def test_a_receipt_of_something_else_does_not_count(r, changes):
    leave_receipt(r, **changes)
    with pytest.raises(Unguarded):
        receipts.require_recent(r.op, "vast", "stop")


def test_a_receipt_of_the_future_does_not_count_but_a_clock_may_be_a_little_ahead(r):
    leave_receipt(r, ended_at=timestamp(r.clock.now() + timedelta(minutes=1)))
    receipts.require_recent(r.op, "vast", "stop")
    leave_receipt(r, ended_at=timestamp(r.clock.now() + timedelta(minutes=30)))
    with pytest.raises(Unguarded, match="future"):
        receipts.require_recent(r.op, "vast", "stop")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"complete": NaN}', b'{"a":' * 500, b"\xff\xfe", b"null"])
def test_a_receipt_that_is_none_does_not_count(r, content):
    path = receipts.own_path(r.op.user_state, "vast", r.op.account("vast"), r.project.project_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(Unguarded):
        receipts.require_recent(r.op, "vast", "stop")


def test_a_proven_key_needs_no_sentinel_and_only_for_what_was_proven(r):
    keyproof.note(r.op, "vast", r.op.account("vast"), "proven", "stop")
    receipts.require_recent(r.op, "vast", "stop")
    with pytest.raises(Unguarded):
        receipts.require_recent(r.op, "vast", "destroy")


def with_receipts(op, *places: str):
    return replace(op, policy=lambda: replace(op.policy(), sentinel_receipts=places))


def test_a_receipt_of_another_host_counts_where_the_policy_names_it(r, tmp_path):
    elsewhere = tmp_path / "receipt.json"
    leave_receipt(r, str(elsewhere))
    with pytest.raises(Unguarded):
        receipts.require_recent(r.op, "vast", "stop")
    named = with_receipts(r.op, str(tmp_path / "not-there.json"), str(elsewhere))
    receipts.require_recent(named, "vast", "stop")


def test_the_error_says_what_is_wrong_with_each_place(r, tmp_path):
    with pytest.raises(Unguarded) as caught:
        receipts.require_recent(with_receipts(r.op, str(tmp_path / "none.json")), "vast", "stop")
    assert "none.json" in caught.value.message


def test_a_receipt_is_not_written_into_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(NotWritable):
        receipts.write(str(tmp_path / "no" / "r.json"), {})


# in a bucket --------------------------------------------------------------------------------------------------------


def test_a_receipt_in_a_bucket_counts_like_one_in_a_file(r, s3):
    place = f"{s3.uri}/fleet/receipt.json"
    named = with_receipts(r.op, place)
    with pytest.raises(Unguarded):
        receipts.require_recent(named, "vast", "stop")
    leave_receipt(r, place)
    assert s3.keys() == ["fleet/receipt.json"]
    receipts.require_recent(named, "vast", "stop")


def test_a_bucket_that_refuses_is_no_receipt_and_says_why(r, s3):
    s3.application.fault = lambda request: 403
    with pytest.raises(Unguarded, match=s3.bucket):
        receipts.require_recent(with_receipts(r.op, f"{s3.uri}/r.json"), "vast", "stop")
    with pytest.raises(AuthRejected):
        receipts.write(f"{s3.uri}/r.json", {})


def test_a_bucket_that_is_not_there_is_no_receipt(r, s3):
    with pytest.raises(Unguarded, match="no-such-bucket"):
        receipts.require_recent(with_receipts(r.op, "s3://no-such-bucket/r.json"), "vast", "stop")


def test_an_object_too_large_to_be_a_receipt_is_not_read_whole(r, s3):
    s3.client.put_object(Bucket=s3.bucket, Key="r.json", Body=b" " * (receipts.MAX_BYTES + 2))
    with pytest.raises(Unguarded, match="4 MB"):
        receipts.require_recent(with_receipts(r.op, f"{s3.uri}/r.json"), "vast", "stop")


def test_without_boto3_the_error_says_what_to_install(r, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    with pytest.raises(MissingProgram, match="boto3"):
        receipts.read("s3://ours/r.json")
    with pytest.raises(Unguarded, match="boto3"):
        receipts.require_recent(with_receipts(r.op, "s3://ours/r.json"), "vast", "stop")


@pytest.mark.parametrize("place", ["s3://", "s3://bucket", "s3://bucket/", "s3:///key"])
def test_an_address_that_names_no_object_is_a_usage_error(place):
    with pytest.raises(UsageError):
        receipts.write(place, {})


def test_own_receipts_of_different_projects_and_accounts_lie_apart(tmp_path: Path):
    places = {
        receipts.own_path(tmp_path, *words)
        for words in (("vast", "a", "p"), ("vast", "b", "p"), ("vast", "a", "q"), ("runpod", "a", "p"))
    }
    assert len(places) == 4


# what the guard has to be allowed -----------------------------------------------------------------------------------


def test_a_machine_that_will_destroy_itself_needs_a_key_that_was_shown_to_destroy(rig):
    r = rig("runpod", containers=False)
    guarded(r, "stop")
    name, plan, approval = approved(r, outputs_ephemeral=True)
    with pytest.raises(Unguarded):
        provision.provision(r.op, name, plan, approval)
    assert r.creates == 0 and runs.load(r.op, approval.id) is None


@pytest.mark.parametrize(
    ("vendor", "changes", "action"),
    [
        ("vast", {}, "stop"),
        ("vast", {"outputs_ephemeral": True}, "stop"),
        ("runpod", {}, "stop"),
        ("runpod", {"outputs_ephemeral": True}, "destroy"),
        ("runpod", {"outputs_ephemeral": True, "volume_id": "v1"}, "stop"),
    ],
)
def test_the_fuse_does_what_the_disk_of_the_plan_allows(rig, vendor, changes, action):
    r = rig(vendor, containers=False)
    assert specs.fuse_action(r.op, a_plan(r, **changes)) == action


def test_where_the_policy_names_the_sentinel_a_proven_key_does_not_stand_in_for_it(r):
    keyproof.note(r.op, "vast", r.op.account("vast"), "proven", "stop")
    both = replace(r.op, policy=lambda: replace(r.op.policy(), fuse_layers=("machine", "sentinel")))
    with pytest.raises(Unguarded, match="no pass of the sentinel"):
        receipts.require_recent(both, "vast", "stop")
    leave_receipt(r)
    receipts.require_recent(both, "vast", "stop")


def test_by_default_only_the_fuse_on_the_machine_is_asked_for(r):
    assert r.op.policy().fuse_layers == ("machine",)


def test_doctor_tells_what_is_shown_for_each_thing_a_fuse_may_do(rig):
    r = rig("runpod", containers=False)
    guarded(r, "stop")
    seen = [one for one in overview.view(r.op, "runpod") if one.what == "runpod fuse"]
    assert [one.verdict for one in seen] == ["ok", "note"] and "destroy" in seen[1].text
