from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote.runner_client import Refused, RunnerClient, leave_nothing, manifest_of

pytestmark = pytest.mark.subprocess
MIB = 1 << 20


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def missing_of(machine: RunnerClient, manifest: bytes) -> list[dict]:
    _, frames = machine.ask("offer", [({}, manifest)], tree=sha256(manifest))
    return [json.loads(line) for line in b"".join(data for _, data in frames).splitlines()]


def blob(machine: RunnerClient, digest: str) -> Path:
    return machine.folder / "store" / digest[:2] / digest


def test_an_unchanged_directory_is_known_and_sends_nothing(machine: RunnerClient) -> None:
    files = {"a.py": b"print(1)", "dir/b.bin": os.urandom(9000), "empty": b""}
    tree = machine.upload(files)
    assert machine.call("have", tree=tree) == {"known": True}
    assert missing_of(machine, manifest_of(files)) == []
    assert [m["size"] for m in missing_of(machine, manifest_of({**files, "c": b"new"}))] == [3]


def test_a_directory_is_not_known_before_it_is_sealed(machine: RunnerClient) -> None:
    manifest = manifest_of({"a": b"x"})
    missing_of(machine, manifest)
    machine.ask("put", [({"sha256": sha256(b"x"), "size": 1, "offset": 0}, b"x")])
    assert machine.call("have", tree=sha256(manifest)) == {"known": False}
    with pytest.raises(Refused) as refused:
        machine.call("seal", tree="b" * 64)
    assert refused.value.code == "tree_unknown"


def test_seal_refuses_while_content_is_missing(machine: RunnerClient) -> None:
    manifest = manifest_of({"a": b"x", "b": b"y"})
    missing_of(machine, manifest)
    with pytest.raises(Refused) as refused:
        machine.call("seal", tree=sha256(manifest))
    assert refused.value.code == "blobs_missing"
    assert sorted(refused.value.details["first"]) == sorted([sha256(b"x"), sha256(b"y")])


@pytest.mark.parametrize("size", [100, 4 * MIB + 5])
def test_content_that_arrives_changed_never_enters_the_store(machine: RunnerClient, size: int) -> None:
    good, changed = b"g" * size, b"g" * (size - 1) + b"h"
    frames = [
        ({"sha256": sha256(good), "size": size, "offset": at}, changed[at : at + 4 * MIB])
        for at in range(0, size, 4 * MIB)
    ]
    with pytest.raises(Refused) as refused:
        machine.ask("put", frames)
    assert refused.value.code == "hash_mismatch"
    assert refused.value.details["found"] == sha256(changed)
    assert not blob(machine, sha256(good)).exists()
    assert missing_of(machine, manifest_of({"a": good}))[0]["have_bytes"] == 0


def test_a_cut_transfer_goes_on_where_it_stopped(root: Path) -> None:
    content = os.urandom(9 * MIB)
    digest, manifest = sha256(content), manifest_of({"big": content})
    machine = RunnerClient(root)
    missing_of(machine, manifest)
    machine.frame({"verb": "put", "args": {"project": machine.project}})
    machine.frame({"sha256": digest, "size": len(content), "offset": 0}, content[: 4 * MIB])
    machine.frame({"sha256": digest, "size": len(content), "offset": 4 * MIB}, content[4 * MIB : 6 * MIB])
    machine.process.stdin.write(b'{"sha256":"' + digest.encode())  # and here the line breaks
    machine.close()
    with RunnerClient(root) as machine:
        assert missing_of(machine, manifest) == [{"have_bytes": 6 * MIB, "sha256": digest, "size": len(content)}]
        machine.ask("put", [({"sha256": digest, "size": len(content), "offset": 6 * MIB}, content[6 * MIB :])])
        assert machine.call("seal", tree=sha256(manifest)) == {"known": True}
        assert blob(machine, digest).read_bytes() == content


def test_a_resumed_transfer_over_a_spoiled_beginning_is_noticed(machine: RunnerClient) -> None:
    content = os.urandom(5 * MIB)
    digest = sha256(content)
    machine.call("incoming")
    (machine.folder / "incoming" / digest).write_bytes(b"?" * MIB)
    with pytest.raises(Refused) as refused:
        machine.ask("put", [({"sha256": digest, "size": len(content), "offset": MIB}, content[MIB:])])
    assert refused.value.code == "hash_mismatch"
    assert missing_of(machine, manifest_of({"a": content}))[0]["have_bytes"] == 0


def test_a_file_cut_short_in_the_store_is_sent_again(machine: RunnerClient) -> None:
    files = {"a": b"content"}
    tree = machine.upload(files)
    blob(machine, sha256(b"content")).write_bytes(b"cont")
    assert machine.call("have", tree=tree) == {"known": False}
    machine.upload(files)
    assert blob(machine, sha256(b"content")).read_bytes() == b"content"


def test_two_connections_may_send_the_same_new_file(root: Path) -> None:
    content = os.urandom(6 * MIB)
    digest = sha256(content)
    with RunnerClient(root) as first, RunnerClient(root) as second:
        for client in (first, second):
            client.frame({"verb": "put", "args": {"project": client.project}})
            client.frame({"sha256": digest, "size": len(content), "offset": 0}, content[: 4 * MIB])
            client.process.stdin.flush()
        for client in (second, first):
            client.frame({"sha256": digest, "size": len(content), "offset": 4 * MIB}, content[4 * MIB :])
            client.frame({"end": True})
            client.process.stdin.flush()
            assert client.answer()[0]["blobs"] == 1
        assert blob(first, digest).read_bytes() == content
        assert list((first.folder / "incoming").iterdir()) == []


def test_admit_takes_what_rsync_brought_and_throws_out_what_is_wrong(machine: RunnerClient) -> None:
    incoming = Path(machine.call("incoming")["path"])
    good, wrong, absent = sha256(b"good"), sha256(b"wanted"), sha256(b"absent")
    (incoming / good).write_bytes(b"good")
    (incoming / wrong).write_bytes(b"something else")
    (incoming / sha256(b"link")).symlink_to("/etc/passwd")
    wanted = [(good, 4), (wrong, 6), (absent, 6), (sha256(b"link"), 4)]
    body = "".join(json.dumps({"sha256": digest, "size": size}) + "\n" for digest, size in wanted)
    result, _ = machine.ask("admit", [({}, body.encode())])
    assert result["admitted"] == 1
    assert result["failed"] == [
        {"sha256": wrong, "found": sha256(b"something else")},
        {"sha256": absent, "found": None},
        {"sha256": sha256(b"link"), "found": None},
    ]
    assert blob(machine, good).read_bytes() == b"good"
    assert blob(machine, good).stat().st_mode & 0o777 == 0o600
    assert list(incoming.iterdir()) == []
    assert machine.ask("admit", [({}, json.dumps({"sha256": good, "size": 4}).encode() + b"\n")])[0]["admitted"] == 1


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "../up", "mode": 420, "sha256": "a" * 64, "size": 1},
        {"path": "/abs", "mode": 420, "sha256": "a" * 64, "size": 1},
        {"path": "a//b", "mode": 420, "sha256": "a" * 64, "size": 1},
        {"path": "a/./b", "mode": 420, "sha256": "a" * 64, "size": 1},
        {"path": "a\0b", "mode": 420, "sha256": "a" * 64, "size": 1},
        {"path": "", "mode": 420, "sha256": "a" * 64, "size": 1},
        {"path": "n" * 256, "mode": 420, "sha256": "a" * 64, "size": 1},
        {"path": "x", "path_b64": base64.b64encode(b"../x").decode(), "mode": 420, "sha256": "a" * 64, "size": 1},
        {"path": "x", "path_b64": "!", "mode": 420, "sha256": "a" * 64, "size": 1},
        {"path": "x", "mode": 420, "sha256": "A" * 64, "size": 1},
        {"path": "x", "mode": 420, "sha256": "a" * 64, "size": -1},
        {"path": "x", "mode": 420, "sha256": "a" * 64, "size": 1.0},
        {"path": "x", "mode": 99999, "sha256": "a" * 64, "size": 1},
        {"path": "x", "link": "../out"},
        {"path": "d/x", "link": "../../out"},
        {"path": "x", "link": "/etc/passwd"},
        {"path": "x"},
    ],
    ids=lambda entry: json.dumps(entry)[:40],
)
def test_a_manifest_with_an_unsafe_entry_is_refused(machine: RunnerClient, entry: dict) -> None:
    manifest = (json.dumps(entry, sort_keys=True, separators=(",", ":")) + "\n").encode()
    with pytest.raises(Refused) as refused:
        missing_of(machine, manifest)
    assert refused.value.code == "bad_request"


def test_a_manifest_that_is_not_sorted_or_names_a_path_twice_is_refused(machine: RunnerClient) -> None:
    a, b = manifest_of({"a": b"1"}), manifest_of({"b": b"2"})
    for manifest in (b + a, a + a, a + b.rstrip(b"\n")):
        with pytest.raises(Refused) as refused:
            missing_of(machine, manifest)
        assert refused.value.code == "bad_request"


def test_a_manifest_under_another_name_is_refused(machine: RunnerClient) -> None:
    with pytest.raises(Refused) as refused:
        machine.ask("offer", [({}, manifest_of({"a": b"1"}))], tree="c" * 64)
    assert refused.value.code == "hash_mismatch"


@pytest.fixture
def small_disk(tmp_path: Path, allow_subprocess: None) -> Iterator[Path]:
    """A filesystem of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small filesystem")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "gpu-test", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode().strip()}")
    yield folder
    leave_nothing(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_said_and_what_was_sent_is_kept(small_disk: Path) -> None:
    content = os.urandom(12 * MIB)
    digest = sha256(content)
    with RunnerClient(small_disk) as machine:
        missing_of(machine, manifest_of({"a": content}))
        filler = small_disk / "filler"
        filler.write_bytes(bytes(8 * MIB))
        frames = [
            ({"sha256": digest, "size": len(content), "offset": at}, content[at : at + 2 * MIB])
            for at in range(0, len(content), 2 * MIB)
        ]
        with pytest.raises(Refused) as refused:
            machine.ask("put", frames)
        assert refused.value.code == "disk_full"
        filler.unlink()
        have_bytes = missing_of(machine, manifest_of({"a": content}))[0]["have_bytes"]
        assert have_bytes >= 4 * MIB
        rest = [
            ({"sha256": digest, "size": len(content), "offset": at}, content[at : at + 2 * MIB])
            for at in range(have_bytes, len(content), 2 * MIB)
        ]
        machine.ask("put", rest)
        assert blob(machine, digest).read_bytes() == content


def test_a_job_that_fills_the_disk_loses_log_but_not_its_end(small_disk: Path) -> None:
    with RunnerClient(small_disk) as machine:
        machine.start(
            f"echo before; cat /dev/zero > {small_disk}/filler 2>/dev/null; echo while full; sleep 0.3;"
            "head -c 200000 /dev/zero | tr '\\0' x; echo; echo result > $GPU_OUTPUT_DIR/r; exit 7"
        )
        ended = machine.wait()
        assert (ended["state"], ended["exit_code"]) == ("failed", 7)
        log = machine.log()
        assert log.startswith(b"before\n")
        assert b"bytes of log lost: the disk was full]" in log
        assert ended["log_bytes"] == len(log)
        result, entries = machine.manifest()
        assert result["final"] is True
        assert list(entries) == ["r"]


def test_a_job_is_refused_when_there_is_no_space_for_its_end(small_disk: Path) -> None:
    with RunnerClient(small_disk) as machine:
        tree = machine.upload({})
        with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(bytes(65536))
        with pytest.raises(Refused) as refused:
            machine.start("true", tree=tree)
        assert refused.value.code == "disk_full"
        (small_disk / "filler").unlink()
        assert machine.run("true", tree=tree)["state"] == "succeeded"
