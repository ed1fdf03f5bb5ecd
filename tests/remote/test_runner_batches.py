"""Frames with several files, and blobs that are hashed while another program writes them."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from remote.runner_client import Refused, RunnerClient

MIB = 1 << 20


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stored(machine: RunnerClient, digest: str) -> Path:
    return machine.folder / "store" / digest[:2] / digest


def test_several_whole_blobs_in_one_frame_are_each_verified_and_stored(machine):
    contents = [b"one", b"", b"three" * 1000]
    blobs = [[sha256(content), len(content)] for content in contents]
    result, _ = machine.ask("put", [({"blobs": blobs}, b"".join(contents))])
    assert result == {"blobs": 3, "bytes": 5003}
    assert [stored(machine, digest).read_bytes() for digest, _ in blobs] == contents


def test_a_blob_of_a_frame_that_is_not_what_it_is_named_after_is_refused(machine):
    blobs = [[sha256(b"good"), 4], [sha256(b"evil"), 4]]
    with pytest.raises(Refused) as refusal:
        machine.ask("put", [({"blobs": blobs}, b"goodEVIL")])
    assert refusal.value.code == "hash_mismatch"
    assert refusal.value.details["sha256"] == sha256(b"evil")
    assert not stored(machine, sha256(b"evil")).exists()


@pytest.mark.parametrize(
    "blobs",
    [
        None,
        {},
        [[]],
        ["x"],
        [["0" * 64]],
        [[sha256(b"ab"), 3]],
        [[sha256(b"a"), 1]],
        [[sha256(b"ab"), -2]],
        [[sha256(b"ab"), True]],
        [["../../x", 2]],
        [[None, 2]],
    ],
)
def test_a_frame_whose_blobs_make_no_sense_is_a_bad_request(machine, blobs):
    with pytest.raises(Refused) as refusal:
        machine.ask("put", [({"blobs": blobs}, b"ab")])
    assert refusal.value.code == "bad_request"


def admit(machine: RunnerClient, digest: str, size: int) -> dict:
    body = b'{"sha256":"%s","size":%d}\n' % (digest.encode(), size)
    return machine.ask("admit", [({}, body)])[0]


def test_a_blob_that_was_followed_while_it_grew_is_admitted(machine):
    content = os.urandom(3 * MIB + 7)
    digest = sha256(content)
    folder = Path(machine.ask("incoming", follow=[digest, "0" * 64])[0]["path"])
    with open(folder / digest, "wb", buffering=0) as file:
        for at in range(0, len(content), MIB):
            file.write(content[at : at + MIB])
            time.sleep(0.05)
    assert admit(machine, digest, len(content))["failed_count"] == 0
    assert stored(machine, digest).read_bytes() == content


def test_a_followed_blob_that_was_not_written_from_start_to_end_is_hashed_again(machine):
    content = os.urandom(MIB)
    digest = sha256(content)
    folder = Path(machine.ask("incoming", follow=[digest])[0]["path"])
    (folder / digest).write_bytes(bytes(MIB))
    time.sleep(0.1)  # the zeros are hashed by now
    with open(folder / digest, "r+b") as file:
        file.write(content)
    assert admit(machine, digest, MIB)["failed_count"] == 0


def test_a_followed_blob_that_was_replaced_by_another_file_is_judged_by_what_is_there(machine):
    content, other = os.urandom(MIB), os.urandom(MIB)
    digest = sha256(content)
    folder = Path(machine.ask("incoming", follow=[digest])[0]["path"])
    (folder / digest).write_bytes(content)
    time.sleep(0.1)
    (folder / "other").write_bytes(other)
    os.rename(folder / "other", folder / digest)
    assert admit(machine, digest, MIB)["failed"] == [{"sha256": digest, "found": sha256(other)}]
    assert not stored(machine, digest).exists()


@pytest.mark.parametrize("follow", ["x", ["../../etc/passwd"], [5], {}])
def test_only_digests_can_be_followed(machine, follow):
    with pytest.raises(Refused) as refusal:
        machine.ask("incoming", follow=follow)
    assert refusal.value.code == "bad_request"
