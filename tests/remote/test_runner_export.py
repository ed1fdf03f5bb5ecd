"""Outputs from the machine to signed addresses: only what is an output, only over TLS, and no address repeated."""

from __future__ import annotations

import json

import pytest

from remote.runner_client import Refused, RunnerClient, eventually
from s3_server import S3, s3, s3_application

__all__ = ["s3", "s3_application"]
pytestmark = pytest.mark.subprocess
MAKES = "cd $GPU_OUTPUT_DIR; printf 0123456789 > a; ln -s /etc/hostname out; : > empty; mkfifo pipe"


def export(machine: RunnerClient, *pieces: dict) -> list[dict]:
    """What was said of each piece."""
    lines = "".join(json.dumps({"i": i, "offset": 0, "headers": {}, **piece}) + "\n" for i, piece in enumerate(pieces))
    result, frames = machine.ask("export", [({}, lines.encode())], job="J-000001")
    told = [header for header, _ in frames]
    assert [header["i"] for header in told] == list(range(len(pieces)))
    assert result == {"sent": sum("etag" in header for header in told)}
    return told


def url(s3: S3, key: str) -> str:
    return s3.client.generate_presigned_url("put_object", Params={"Bucket": s3.bucket, "Key": key})


def test_pieces_of_outputs_go_to_their_addresses(machine: RunnerClient, s3: S3) -> None:
    machine.run(MAKES)
    binary = {"Content-Type": "application/octet-stream"}
    told = export(
        machine,
        {"path": "a", "offset": 2, "bytes": 5, "url": url(s3, "middle"), "headers": binary},
        {"path": "a", "bytes": 10, "url": url(s3, "whole"), "headers": binary | {"x-amz-meta-sha256": "ab"}},
        {"path": "empty", "bytes": 0, "url": url(s3, "nothing"), "headers": binary},
    )
    assert all(header["etag"] for header in told)
    assert (s3.content("middle"), s3.content("whole"), s3.content("nothing")) == (b"23456", b"0123456789", b"")
    assert s3.client.head_object(Bucket=s3.bucket, Key="whole")["Metadata"] == {"sha256": "ab"}


def test_what_is_no_output_or_shorter_than_announced_is_not_sent(machine: RunnerClient, s3: S3) -> None:
    machine.run(MAKES)
    told = export(
        machine,
        *({"path": path, "bytes": 1, "url": url(s3, "k")} for path in ("out", "pipe", "nothing")),
        {"path": "a", "bytes": 11, "url": url(s3, "k")},
    )
    assert [header["error"] for header in told] == ["vanished", "vanished", "vanished", "changed"]
    assert s3.keys() == []


def test_a_refusal_says_its_status_and_never_the_address(machine: RunnerClient, s3: S3) -> None:
    machine.run(MAKES)
    s3.application.fault = lambda request: 403
    (refused,) = export(machine, {"path": "a", "bytes": 10, "url": url(s3, "k")})
    assert (refused["error"], refused["status"]) == ("refused", 403)
    s3.application.fault = lambda request: "drop"
    (dropped,) = export(machine, {"path": "a", "bytes": 10, "url": url(s3, "k")})
    assert dropped["error"] == "unreachable"
    (nobody,) = export(machine, {"path": "a", "bytes": 10, "url": "http://127.0.0.1:1/k?X-Amz-Signature=secret"})
    assert nobody["error"] == "unreachable"
    kept = [path for path in machine.root.rglob("*") if path.is_file() and b"Signature=" in path.read_bytes()]
    assert "ignature" not in json.dumps([refused, dropped, nobody])
    assert [path.name for path in kept if path.suffix != ".py" and path.suffix != ".pyc"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"url": "http://192.0.2.1/k"},
        {"url": "file:///etc/passwd"},
        {"url": "https:///k"},
        {"url": "http://[::1"},
        {"url": 5},
        {"url": None},
        {"headers": {"a": "b\r\nc: d"}},
        {"headers": {"a": 5}},
        {"headers": []},
        {"bytes": -1},
        {"bytes": None},
        {"path": "../job.json"},
        {"path": "/etc/passwd"},
    ],
)
def test_what_is_no_request_of_ours_is_refused_before_anything_is_sent(machine: RunnerClient, s3: S3, change) -> None:
    machine.run(MAKES)
    good = {"path": "a", "bytes": 10, "url": url(s3, "k")}
    with pytest.raises(Refused) as caught:
        export(machine, good, {**good, **change})
    assert caught.value.code == "bad_request" and s3.keys() == []


# the end of a session -------------------------------------------------------------------------------------------------


def give_home(machine: RunnerClient, s3: S3, slots: int = 3) -> None:
    names = [*(f"{number:05}" for number in range(slots)), "manifest.jsonl"]
    lines = "".join(
        json.dumps({"url": url(s3, f"end/{name}"), "headers": {"Content-Type": "application/octet-stream"}}) + "\n"
        for name in names
    )
    result, _ = machine.ask("home", [({}, lines.encode())], job="J-000001")
    assert result == {"slots": slots + 1}


def expire(machine: RunnerClient) -> dict:
    """Let the session's deadline pass; the event that tells of the outputs."""
    machine.call("session", session={"id": "s1", "deadline_in_s": 0.3, "deadline_reason": "x", "on_expiry": "record"})
    log = machine.folder / "events.jsonl"

    def told() -> list[dict]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [e for e in map(json.loads, lines) if e["event"] in ("outputs_sent", "outputs_not_sent")]

    return eventually(told)[-1]


def test_with_its_session_a_machine_sends_what_nobody_came_for(machine: RunnerClient, s3: S3) -> None:
    machine.run("cd $GPU_OUTPUT_DIR; printf 01234 > a; mkdir d; printf 56789 > d/b; : > empty")
    listed = machine.data("manifest", job="J-000001")
    give_home(machine, s3)
    kept = machine.folder / "jobs/J-000001/home.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    told = expire(machine)
    assert (told["event"], told["files"], told["bytes"]) == ("outputs_sent", 3, 10)
    assert s3.content("end/00000") == b"0123456789" and s3.content("end/manifest.jsonl") == listed
    assert s3.keys() == ["end/00000", "end/manifest.jsonl"] and not kept.exists()
    assert "Signature" not in (machine.folder / "events.jsonl").read_text()


def test_what_fails_there_is_an_event_and_no_manifest_and_the_session_still_ends(machine: RunnerClient, s3: S3) -> None:
    machine.run(MAKES)
    give_home(machine, s3)
    s3.application.fault = lambda request: 403
    told = expire(machine)
    assert (told["event"], told["error"], told["status"]) == ("outputs_not_sent", "refused", 403)
    s3.application.fault = None
    assert s3.keys() == []
    eventually(lambda: "session_expired" in (machine.folder / "events.jsonl").read_text())


def test_a_file_that_is_not_as_listed_any_more_leaves_no_manifest(machine: RunnerClient, s3: S3) -> None:
    machine.run(MAKES)
    give_home(machine, s3)
    (machine.folder / "jobs/J-000001/outputs/a").write_bytes(b"0")
    assert expire(machine)["error"] == "changed" and s3.keys() == []


def test_addresses_that_were_taken_back_are_gone(machine: RunnerClient, s3: S3) -> None:
    machine.run(MAKES)
    give_home(machine, s3)
    assert machine.ask("home", [], job="J-000001")[0] == {"slots": 0}
    assert not (machine.folder / "jobs/J-000001/home.json").exists()


@pytest.mark.parametrize("slots", [[{"url": "https://x/1"}], [{"url": "http://192.0.2.1/1"}] * 2, [{}] * 2])
def test_what_are_no_slots_is_refused(machine: RunnerClient, slots: list[dict]) -> None:
    machine.run("true")
    with pytest.raises(Refused):
        machine.ask("home", [({}, "".join(json.dumps(slot) + "\n" for slot in slots).encode())], job="J-000001")
