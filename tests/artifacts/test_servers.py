"""The store against S3 servers of other makes: SeaweedFS keeps conditional writes, rclone ignores them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_skills.artifacts.s3 import S3Store
from gpu_skills.errors import AuthRejected, StoreIgnoresConditions
from s3_server import KEY, SECRET, boto3_client, name_in_environment

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]
PART = 5 << 20


def program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (there is a wheel for Linux on x86-64)")
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def started(command: list[str], folder: Path, endpoint: str) -> subprocess.Popen[bytes]:
    """A server that answers an S3 request; its whole group is the caller's to end."""
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + 60
    client = boto3_client(endpoint)
    while True:
        try:
            client.create_bucket(Bucket="tests")
            return server
        except Exception:
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                raise AssertionError((folder / "log").read_text(errors="replace")[-2000:]) from None
            time.sleep(0.2)


def ended(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait(timeout=10)


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("weed")
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
    ports = free_ports(len(names) + 2)
    command = [
        program("weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'data'}", "-filer", "-s3",
        *(f"-{name}={port}" for name, port in zip(names, ports, strict=False)), f"-s3.port={ports[-2]}",
        f"-s3.port.grpc={ports[-1]}", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-volume.max=20",
        "-master.volumeSizeLimitMB=64",
    ]  # fmt: skip
    endpoint = f"http://127.0.0.1:{ports[-2]}"
    server = started(command, folder, endpoint)
    yield endpoint
    ended(server)


@pytest.fixture(scope="module")
def rclone(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "data").mkdir()
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    command = [program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
    server = started([*command, "--config", str(folder / "none.conf"), str(folder / "data")], folder, endpoint)
    yield endpoint
    ended(server)


def test_a_store_of_another_make_keeps_every_promise(seaweed, tmp_path, monkeypatch):
    name_in_environment(monkeypatch, seaweed)
    store = S3Store("tests", notes=tmp_path / "uploads.json", part_bytes=PART)
    store.probe("probed")
    first = store.create_if_absent("lease", b"1")
    assert store.create_if_absent("lease", b"2") is None
    assert store.replace_if_unchanged("lease", b"2", '"00000000000000000000000000000000"') is None
    assert store.replace_if_unchanged("nothing", b"2", first.etag) is None
    assert store.replace_if_unchanged("lease", b"2", first.etag) is not None
    content = os.urandom(2 * PART + 77)
    (tmp_path / "large").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    assert store.put_file(tmp_path / "large", "runs/model", sha256=digest).sha256 == digest
    assert store.head("runs/model").sha256 == digest and store.read_back("runs/model").sha256 == digest
    assert store.get_file("runs/model", tmp_path / "back").bytes == len(content)
    assert [found.key for found in store.list("runs")] == ["runs/model"]


def test_an_upload_that_was_killed_goes_on_there_too(seaweed, tmp_path, monkeypatch):
    name_in_environment(monkeypatch, seaweed)
    content = os.urandom(2 * PART + 77)
    (tmp_path / "large").write_bytes(content)
    digest, notes = hashlib.sha256(content).hexdigest(), tmp_path / "uploads.json"
    upload, _ = S3Store("tests", notes=notes, part_bytes=PART)._upload("resumed", len(content), digest)
    boto3_client(seaweed).upload_part(
        Bucket="tests", Key="resumed", UploadId=upload.upload_id, PartNumber=1, Body=content[:PART]
    )
    again = S3Store("tests", notes=notes, part_bytes=PART)
    known, arrived = again._upload("resumed", len(content), digest)
    assert known == upload and [size for _, size in arrived.values()] == [PART]
    again.put_file(tmp_path / "large", "resumed", sha256=digest)
    assert again.read_back("resumed").sha256 == digest


def test_of_eight_that_create_one_object_there_exactly_one_wins(seaweed, monkeypatch):
    name_in_environment(monkeypatch, seaweed)
    store, won, together = S3Store("tests"), [], threading.Barrier(8)

    def run(number: int) -> None:
        together.wait()
        if store.create_if_absent("raced", f"{number}".encode()) is not None:
            won.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and store.get("raced", max_bytes=9)[0] == f"{won[0]}".encode()


def test_a_signed_url_opens_one_object_for_one_size_and_no_other(seaweed, monkeypatch):
    name_in_environment(monkeypatch, seaweed)
    store = S3Store("tests")
    put = store.presign("from-machine", "PUT", expires_in_s=600, size=5)
    assert _send(put.url, put.headers, b"12345") == 200
    assert store.get("from-machine", max_bytes=9)[0] == b"12345"
    assert _send(put.url, {**put.headers, "Content-Length": "6"}, b"123456") == 403
    assert _send(put.url.replace("from-machine", "another"), put.headers, b"12345") == 403
    assert store.get("another", max_bytes=9) is None


def test_a_signed_url_of_a_new_object_records_its_hash_and_replaces_nothing(seaweed, monkeypatch):
    name_in_environment(monkeypatch, seaweed)
    store = S3Store("tests")
    digest = hashlib.sha256(b"12345").hexdigest()
    put = store.presign("new", "PUT", expires_in_s=600, size=5, sha256=digest)
    without = {name: value for name, value in put.headers.items() if name != "If-None-Match"}
    assert _send(put.url, without, b"12345") == 403
    assert _send(put.url, put.headers, b"12345") == 200
    assert store.head("new").sha256 == digest
    assert _send(put.url, put.headers, b"54321") == 412
    assert store.get("new", max_bytes=9)[0] == b"12345"


def _send(url: str, headers: dict[str, str], body: bytes) -> int:
    request = urllib.request.Request(url, data=body, method="PUT", headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as exc:
        return exc.code


def test_a_wrong_key_is_a_refusal_that_says_so(seaweed, monkeypatch):
    name_in_environment(monkeypatch, seaweed)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-than-the-right-one")
    with pytest.raises(AuthRejected):
        S3Store("tests").head("k")


def test_rclones_store_ignores_conditions_and_is_refused(rclone, monkeypatch):
    name_in_environment(monkeypatch, rclone)
    store = S3Store("tests")
    with pytest.raises(StoreIgnoresConditions):
        store.probe("runs")
    assert list(store.list("")) == []
