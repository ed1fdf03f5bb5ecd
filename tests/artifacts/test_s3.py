"""A bucket as a store, against a server that speaks S3."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from gpu_skills.artifacts import s3 as s3_module
from gpu_skills.artifacts.base import open_store
from gpu_skills.artifacts.s3 import S3Store
from gpu_skills.errors import (
    ArtifactChanged,
    ArtifactMissing,
    AuthRejected,
    BucketMissing,
    DestinationRefused,
    HashMismatch,
    MissingCredential,
    MissingProgram,
    RateLimited,
    StoreIgnoresConditions,
    StoreSilent,
    TransferIncomplete,
    Unavailable,
    UsageError,
)

MIB = 1 << 20
PART = 5 * MIB  # the smallest S3 takes


def file_of(path: Path, content: bytes) -> tuple[Path, str]:
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


@pytest.fixture
def store(s3) -> S3Store:
    return S3Store(s3.bucket)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, str]:
    return file_of(tmp_path / "small", b"one small file\n")


@pytest.fixture(scope="module")
def large_content() -> bytes:
    return os.urandom(3 * PART + 1234)


@pytest.fixture
def large(tmp_path: Path, large_content: bytes) -> tuple[Path, str]:
    return file_of(tmp_path / "large", large_content)


# files ---------------------------------------------------------------------------------------------------------------


def test_a_file_is_stored_with_its_hash_and_read_back_as_it_was(s3, store, small):
    path, digest = small
    stored = store.put_file(path, "runs/J-1/a b/ü.txt", sha256=digest)
    assert (stored.uri, stored.bytes, stored.sha256) == (f"{s3.uri}/runs/J-1/a b/ü.txt", 15, digest)
    assert s3.content("runs/J-1/a b/ü.txt") == b"one small file\n"
    assert s3.client.head_object(Bucket=s3.bucket, Key=stored.key)["Metadata"] == {"sha256": digest}
    assert store.head(stored.key) == stored
    assert store.read_back(stored.key).sha256 == digest


def test_an_empty_file_is_a_file(s3, store, tmp_path):
    path, digest = file_of(tmp_path / "empty", b"")
    store.put_file(path, "empty", sha256=digest)
    assert store.get_file("empty", tmp_path / "back").sha256 == digest
    assert (tmp_path / "back").read_bytes() == b""


def test_what_is_there_with_the_same_hash_is_not_sent_again(s3, store, small):
    path, digest = small
    store.put_file(path, "k", sha256=digest)
    s3.application.requests.clear()
    store.put_file(path, "k", sha256=digest)
    assert [r.method for r in s3.application.requests] == ["HEAD"]


def test_an_object_of_another_content_is_replaced_by_its_etag(s3, store, small):
    path, digest = small
    s3.client.put_object(Bucket=s3.bucket, Key="k", Body=b"older")
    store.put_file(path, "k", sha256=digest)
    (put,) = [r for r in s3.application.requests if r.method == "PUT" and r.path.endswith("/k")][-1:]
    assert put.headers["if-match"] and s3.content("k") == path.read_bytes()


def test_a_file_that_changed_since_it_was_verified_is_not_stored(s3, store, small, large, tmp_path):
    path, digest = small
    path.write_bytes(b"something else!")
    with pytest.raises(ArtifactChanged):
        store.put_file(path, "k", sha256=digest)
    in_parts = S3Store(s3.bucket, part_bytes=PART)
    with pytest.raises(ArtifactChanged):
        in_parts.put_file(large[0], "large", sha256=digest)
    assert s3.keys() == [] and s3.uploads() == []


def test_a_large_file_goes_in_parts_and_comes_back_the_same(s3, large, tmp_path, monkeypatch):
    monkeypatch.setattr(s3_module, "RANGE_BYTES", 4 * MIB)
    path, digest = large
    sent: list[int] = []
    stored = S3Store(s3.bucket, part_bytes=PART).put_file(path, "model", sha256=digest, sent=sent.append)
    assert (stored.sha256, stored.bytes, sum(sent)) == (digest, path.stat().st_size, path.stat().st_size)
    assert len([r for r in s3.application.requests if r.is_part]) == 4
    assert s3.uploads() == []
    other = S3Store(s3.bucket)
    assert other.head("model").sha256 == digest
    assert other.get_file("model", tmp_path / "back").sha256 == digest
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


UPLOADER = """
import sys
from pathlib import Path
from gpu_skills.artifacts.s3 import S3Store
bucket, path, digest, notes, part = sys.argv[1:]
S3Store(bucket, notes=Path(notes), part_bytes=int(part)).put_file(Path(path), "model", sha256=digest)
"""


@pytest.mark.subprocess
def test_a_large_file_whose_upload_was_killed_goes_on_with_the_parts_that_arrived(s3, large, tmp_path):
    path, digest = large
    notes = tmp_path / "uploads.json"
    arrived: list[str] = []

    def killed_at_the_third(request):
        if request.is_part and len(arrived) == 2:
            uploader.kill()
            return "drop"
        arrived.extend([request.query["partNumber"]] if request.is_part else [])
        return None

    s3.application.fault = killed_at_the_third
    command = [sys.executable, "-c", UPLOADER, s3.bucket, str(path), digest, str(notes), str(PART)]
    uploader = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert uploader.wait(timeout=60) == -signal.SIGKILL
    s3.application.fault = None
    assert len(s3.uploads()) == 1 and s3.keys() == []
    s3.application.requests.clear()
    stored = S3Store(s3.bucket, notes=notes, part_bytes=PART).put_file(path, "model", sha256=digest)
    assert stored.sha256 == digest and s3.content("model") == path.read_bytes()
    sent_again = {r.query["partNumber"] for r in s3.application.requests if r.is_part}
    assert sent_again == {"1", "2", "3", "4"} - set(arrived)
    assert s3.uploads() == []


def test_a_part_that_is_not_what_the_file_holds_now_is_sent_again(s3, large, tmp_path):
    path, digest = large
    notes = tmp_path / "uploads.json"
    first = S3Store(s3.bucket, notes=notes, part_bytes=PART)
    upload, _ = first._upload("model", path.stat().st_size, digest)
    for number, body in ((1, path.read_bytes()[:PART]), (2, os.urandom(PART))):
        s3.client.upload_part(Bucket=s3.bucket, Key="model", UploadId=upload.upload_id, PartNumber=number, Body=body)
    s3.application.requests.clear()
    S3Store(s3.bucket, notes=notes, part_bytes=PART).put_file(path, "model", sha256=digest)
    assert sorted(r.query["partNumber"] for r in s3.application.requests if r.is_part) == ["2", "3", "4"]
    assert s3.content("model") == path.read_bytes()


def test_an_upload_that_nobody_remembers_is_ended_before_a_new_one_begins(s3, large):
    path, digest = large
    for _ in range(2):
        s3.client.create_multipart_upload(Bucket=s3.bucket, Key="model")
    s3.client.create_multipart_upload(Bucket=s3.bucket, Key="model-of-others")
    S3Store(s3.bucket, part_bytes=PART).put_file(path, "model", sha256=digest)
    assert [upload["Key"] for upload in s3.uploads()] == ["model-of-others"]


def test_an_upload_that_was_aborted_elsewhere_begins_anew(s3, large, tmp_path):
    path, digest = large
    notes = tmp_path / "uploads.json"
    upload, _ = S3Store(s3.bucket, notes=notes, part_bytes=PART)._upload("model", path.stat().st_size, digest)
    s3.client.abort_multipart_upload(Bucket=s3.bucket, Key="model", UploadId=upload.upload_id)
    assert S3Store(s3.bucket, notes=notes, part_bytes=PART).put_file(path, "model", sha256=digest).sha256 == digest


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"uploads": {"s3://b/k": {"upload_id": 1}}}', b"\xff"])
def test_notes_that_are_damaged_are_no_reason_not_to_store(s3, small, tmp_path, content):
    (tmp_path / "uploads.json").write_bytes(content)
    store = S3Store(s3.bucket, notes=tmp_path / "uploads.json")
    store.put_file(small[0], "k", sha256=small[1])
    assert s3.keys() == ["k"]


# bringing back -------------------------------------------------------------------------------------------------------


def test_an_object_of_another_content_than_recorded_never_comes_to_its_place(s3, store, tmp_path):
    s3.client.put_object(Bucket=s3.bucket, Key="k", Body=b"tampered", Metadata={"sha256": "0" * 64})
    target = tmp_path / "k"
    target.write_bytes(b"as it was")
    with pytest.raises(HashMismatch):
        store.get_file("k", target)
    assert target.read_bytes() == b"as it was" and os.listdir(tmp_path) == ["k"]
    assert store.read_back("k").sha256 == hashlib.sha256(b"tampered").hexdigest()


def test_a_read_that_breaks_off_goes_on_from_there_next_time(s3, store, tmp_path, monkeypatch):
    monkeypatch.setattr(s3_module, "RANGE_BYTES", MIB)
    content = os.urandom(3 * MIB)
    path, digest = file_of(tmp_path / "source", content)
    store.put_file(path, "k", sha256=digest)
    s3.application.fault = lambda r: (
        "drop" if r.method == "GET" and r.headers.get("range") == "bytes=2097152-3145727" else None
    )
    with pytest.raises(TransferIncomplete):
        store.get_file("k", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    s3.application.fault = None
    s3.application.requests.clear()
    store.get_file("k", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    assert [r.headers["range"] for r in s3.application.requests if r.method == "GET"] == ["bytes=2097152-3145727"]


def test_an_object_replaced_while_it_is_read_is_not_a_mixture(s3, store, tmp_path, monkeypatch):
    monkeypatch.setattr(s3_module, "RANGE_BYTES", 10)
    s3.client.put_object(Bucket=s3.bucket, Key="k", Body=b"a" * 20)
    inner = s3.client

    def replace_in_the_middle(request):
        if request.headers.get("range") == "bytes=10-19":
            s3.application.fault = None
            threading.Thread(
                target=inner.put_object, kwargs={"Bucket": s3.bucket, "Key": "k", "Body": b"b" * 20}
            ).start()
            return 500
        return None

    s3.application.fault = replace_in_the_middle
    with pytest.raises(ArtifactChanged):
        store.get_file("k", tmp_path / "back")
    assert os.listdir(tmp_path) == []


def test_an_object_that_is_not_there_is_said_to_be_missing(s3, store, tmp_path):
    assert store.head("nothing") is None and store.get("nothing", max_bytes=10) is None
    for ask in (lambda: store.get_file("nothing", tmp_path / "x"), lambda: store.read_back("nothing")):
        with pytest.raises(ArtifactMissing):
            ask()


def test_a_listing_has_every_page_of_what_is_below_a_prefix_and_nothing_of_ours(s3, store, monkeypatch):
    monkeypatch.setattr(s3_module, "PAGE_KEYS", 4)
    for number in range(10):
        s3.client.put_object(Bucket=s3.bucket, Key=f"runs/J-1/{number:04}", Body=b"x")
    s3.client.put_object(Bucket=s3.bucket, Key="runs/J-10/other", Body=b"x")
    s3.client.put_object(Bucket=s3.bucket, Key="runs/J-1/.gpu-probe-1", Body=b"x")
    assert [found.key for found in store.list("runs/J-1")] == [f"runs/J-1/{number:04}" for number in range(10)]


# conditions ----------------------------------------------------------------------------------------------------------


def test_of_32_threads_that_create_one_object_exactly_one_wins(s3, store):
    for round_ in range(5):
        won = race(32, lambda n, k=f"lease-{round_}": store.create_if_absent(k, f"holder {n}".encode()))
        assert len(won) == 1 and s3.content(f"lease-{round_}") == f"holder {won[0]}".encode()


def test_of_32_threads_that_replace_what_they_read_exactly_one_wins(s3, store):
    first = store.create_if_absent("lease", b"held")
    won = race(32, lambda n: store.replace_if_unchanged("lease", f"holder {n}".encode(), first.etag))
    assert len(won) == 1 and s3.content("lease") == f"holder {won[0]}".encode()


def race(count: int, attempt) -> list[int]:
    """The numbers of those whose attempt was answered."""
    together, won, failed = threading.Barrier(count), [], []

    def run(number: int) -> None:
        try:
            together.wait()
            if attempt(number) is not None:
                won.append(number)
        except BaseException as exc:  # the assertion below says it
            failed.append(exc)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    return won


def test_a_write_whose_condition_does_not_hold_is_lost_whatever_the_store_calls_it(s3, store):
    first = store.create_if_absent("k", b"1")
    assert store.create_if_absent("k", b"2") is None
    assert store.replace_if_unchanged("k", b"3", '"00000000000000000000000000000000"') is None
    assert store.replace_if_unchanged("nothing", b"4", first.etag) is None
    for status in (404, 409, 412):
        s3.application.fault = lambda request, status=status: status if request.method == "PUT" else None
        assert store.create_if_absent("other", b"5") is None
        assert store.replace_if_unchanged("k", b"6", first.etag) is None
    s3.application.fault = None
    assert store.replace_if_unchanged("k", b"7", first.etag) is not None and s3.content("k") == b"7"


@pytest.mark.parametrize(("fault", "is_there"), [("lose", True), ("drop", False), (500, False)])
def test_a_conditional_write_without_an_answer_is_sent_once_and_nobody_says_how_it_ended(s3, store, fault, is_there):
    s3.application.fault = lambda request: fault if request.method == "PUT" else None
    with pytest.raises(StoreSilent) as caught:
        store.create_if_absent("lease", b"mine")
    assert caught.value.exit_code == 6
    assert len([r for r in s3.application.requests if r.method == "PUT"]) == 1
    s3.application.fault = None
    assert (s3.keys() == ["lease"]) is is_there


def test_a_file_whose_answer_was_lost_is_found_there_and_not_called_a_defeat(s3, store, small):
    lost = iter(["lose"])
    s3.application.fault = lambda request: next(lost, None) if request.method == "PUT" else None
    assert store.put_file(small[0], "k", sha256=small[1]).sha256 == small[1]
    assert len([r for r in s3.application.requests if r.method == "PUT"]) == 1


def test_a_large_file_whose_last_answer_was_lost_is_found_there(s3, large, tmp_path):
    lost = iter(["lose"])
    s3.application.fault = lambda r: next(lost, None) if r.method == "POST" and "uploadId" in r.query else None
    stored = S3Store(s3.bucket, notes=tmp_path / "n.json", part_bytes=PART).put_file(large[0], "k", sha256=large[1])
    assert stored.sha256 == large[1] and s3.uploads() == []
    assert len([r for r in s3.application.requests if r.is_part]) == 4


def test_a_probe_of_a_store_that_keeps_conditions_passes_and_leaves_nothing(s3, store):
    store.probe("runs")
    assert s3.keys() == []


def test_a_store_that_ignores_conditions_is_refused_and_the_probe_leaves_nothing(s3, store):
    s3.application.ignores_conditions = True
    with pytest.raises(StoreIgnoresConditions) as caught:
        store.probe("runs")
    assert caught.value.exit_code == 3 and s3.keys() == []


def test_a_store_that_only_knows_if_none_match_is_refused(s3, store):
    def without_if_match(request):
        s3.application.ignores_conditions = "if-match" in request.headers
        return None

    s3.application.fault = without_if_match
    with pytest.raises(StoreIgnoresConditions, match="If-Match"):
        store.probe()
    assert s3.keys() == []


def test_a_store_that_says_that_it_knows_no_conditions_is_refused(s3, store):
    s3.application.fault = lambda request: 501 if request.method == "PUT" else None
    with pytest.raises(StoreIgnoresConditions):
        store.probe()


# what goes wrong -----------------------------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_named(s3):
    with pytest.raises(BucketMissing, match="s3://no-such-bucket-here"):
        S3Store("no-such-bucket-here").create_if_absent("k", b"")
    with pytest.raises(BucketMissing):
        list(S3Store("no-such-bucket-here").list(""))


@pytest.mark.parametrize(
    ("status", "error"), [(403, AuthRejected), (401, AuthRejected), (429, RateLimited), (500, Unavailable)]
)
def test_a_refusal_is_one_of_our_errors(s3, store, status, error, monkeypatch):
    monkeypatch.setattr("gpu_skills.artifacts.s3_client.ATTEMPTS", 1)
    s3.application.fault = lambda request: status
    with pytest.raises(error):
        store.head("k")


def test_without_a_credential_the_error_says_what_to_set(s3, store, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(MissingCredential) as caught:
        store.head("k")
    assert "AWS_ACCESS_KEY_ID" in caught.value.next_step and caught.value.exit_code == 2


def test_a_profile_that_is_not_there_is_a_missing_credential(s3, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(MissingCredential, match="nobody"):
        S3Store(s3.bucket).head("k")


def test_a_store_nobody_listens_at_is_unavailable_also_for_a_conditional_write(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setattr("gpu_skills.artifacts.s3_client.ATTEMPTS", 1)
    with pytest.raises(Unavailable):
        S3Store("b").create_if_absent("k", b"")


@pytest.mark.parametrize("endpoint", ["http://192.0.2.7:9000", "http://store.example", "ftp://127.0.0.1"])
def test_keys_are_not_sent_in_the_clear_to_another_computer(s3, monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises((DestinationRefused, UsageError)):
        S3Store("b").head("k")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "nothing", "http://"])
def test_an_endpoint_that_is_no_address_is_a_usage_error(s3, monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises((UsageError, DestinationRefused)):
        S3Store("b").head("k")


def test_without_boto3_the_error_names_the_extra(s3, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    with pytest.raises(MissingProgram) as caught:
        S3Store("b").head("k")
    assert "gpu-skills[s3]" in caught.value.next_step


# machine → store -----------------------------------------------------------------------------------------------------


def test_a_machine_without_a_key_puts_one_object_of_the_announced_size_and_reads_one(s3, store):
    put = store.presign("J-1/out.bin", "PUT", expires_in_s=600, size=5)
    send(put, b"12345")
    assert s3.content("J-1/out.bin") == b"12345"
    got = store.presign("J-1/out.bin", "GET", expires_in_s=600)
    with urllib.request.urlopen(got.url) as answer:
        assert answer.read() == b"12345"
    assert "Signature" not in repr(put) and "X-Amz-SignedHeaders=content-length" in put.url


def test_a_machine_sends_single_parts_and_the_controller_puts_them_together(s3, store, large):
    path, digest = large
    content = path.read_bytes()
    upload_id = store.begin_upload("J-1/model", digest)
    for number, start in enumerate(range(0, len(content), PART), 1):
        piece = content[start : start + PART]
        send(store.presign("J-1/model", "PUT", expires_in_s=600, size=len(piece), part=(upload_id, number)), piece)
    stored = store.complete_upload("J-1/model", upload_id)
    assert stored.bytes == len(content) and store.read_back("J-1/model").sha256 == digest
    assert store.head("J-1/model").sha256 == digest
    assert store.complete_upload("J-1/model", upload_id) is None


def send(presigned, body: bytes) -> None:
    request = urllib.request.Request(presigned.url, data=body, method=presigned.method, headers=presigned.headers)
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200


def test_a_url_lives_a_week_at_most(s3, store):
    assert store.presign("k", "GET", expires_in_s=10**9).expires_in_s == 7 * 24 * 3600
    assert "X-Amz-Expires=604800" in store.presign("k", "GET", expires_in_s=10**9).url


# addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "uri",
    ["s3://", "s3:///k", "s3://a b/k", "s3://b/../k", "s3://b/a\nb", "gs://b/k", "", "https://x/y", "s3://b..c/k"],
)
def test_an_address_of_no_store_is_a_usage_error(uri):
    from gpu_skills.errors import UnsafeKey

    with pytest.raises((UsageError, UnsafeKey)):
        open_store(uri)


def test_an_address_has_a_store_and_a_prefix(s3):
    store, prefix = open_store(f"{s3.uri}/runs/a/")
    assert (store.name, prefix) == (s3.uri, "runs/a")
