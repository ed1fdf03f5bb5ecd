"""A folder as a store."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from gpu_skills.artifacts import incoming
from gpu_skills.artifacts.base import open_store
from gpu_skills.artifacts.local import LocalStore
from gpu_skills.errors import ArtifactChanged, ArtifactMissing, DiskFull, HashMismatch, NotWritable, UsageError


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    found, prefix = open_store(str(tmp_path / "home"))
    assert prefix == ""
    return found


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "source.bin"
    path.write_bytes(os.urandom(3 << 20))
    return path, digest_of(path.read_bytes())


def test_a_file_is_stored_found_and_brought_back(store, source, tmp_path):
    path, digest = source
    stored = store.put_file(path, "J-1/a/b.bin", sha256=digest)
    assert stored.uri == (tmp_path / "home/J-1/a/b.bin").as_uri() and stored.bytes == 3 << 20
    assert store.head("J-1/a/b.bin") == stored == store.read_back("J-1/a/b.bin")
    assert store.get_file("J-1/a/b.bin", tmp_path / "back", sha256=digest).sha256 == digest
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert [found.key for found in store.list("J-1")] == ["J-1/a/b.bin"]


def test_a_file_that_is_there_is_not_written_again(store, source, tmp_path):
    path, digest = source
    store.put_file(path, "k", sha256=digest)
    before = (tmp_path / "home/k").stat().st_ino
    store.put_file(path, "k", sha256=digest)
    assert (tmp_path / "home/k").stat().st_ino == before


def test_a_file_that_is_not_what_was_verified_is_not_stored(store, source, tmp_path):
    with pytest.raises(ArtifactChanged):
        store.put_file(source[0], "k", sha256="0" * 64)
    assert list(store.list("")) == [] and os.listdir(tmp_path / "home") == []
    with pytest.raises(ArtifactChanged):
        store.put_file(tmp_path / "nothing", "k", sha256="0" * 64)


def test_a_full_disk_leaves_what_was_there_and_nothing_half_written(store, source, tmp_path, monkeypatch):
    path, digest = source
    store.put_file(path, "k", sha256=digest)
    target = tmp_path / "back"
    target.write_bytes(b"as it was")
    whole = incoming.files.write_all

    def fills_up(descriptor, data):
        if os.fstat(descriptor).st_size >= 2 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(descriptor, data)

    monkeypatch.setattr(incoming.files, "write_all", fills_up)
    with pytest.raises(DiskFull) as caught:
        store.get_file("k", target, sha256=digest)
    assert caught.value.exit_code == 1
    assert target.read_bytes() == b"as it was" and sorted(os.listdir(tmp_path)) == ["back", "home", "source.bin"]


def test_a_copy_that_was_killed_goes_on_and_what_it_left_is_verified(store, source, tmp_path, monkeypatch):
    path, digest = source
    store.put_file(path, "k", sha256=digest)

    class Killed(BaseException):
        pass

    whole = incoming.Incoming.write

    def dies(self, data):
        if self.offset >= 2 << 20:
            raise Killed
        whole(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(incoming.Incoming, "write", dies)
        with pytest.raises(Killed):
            store.get_file("k", tmp_path / "back", sha256=digest)
    (part,) = tmp_path.glob(".gpu-*.part")
    assert part.stat().st_size == 2 << 20
    written = []
    monkeypatch.setattr(incoming.Incoming, "write", lambda self, data: (written.append(len(data)), whole(self, data)))
    store.get_file("k", tmp_path / "back", sha256=digest)
    assert sum(written) == 1 << 20 and digest_of((tmp_path / "back").read_bytes()) == digest
    assert list(tmp_path.glob(".gpu-*.part")) == []


def test_what_a_killed_copy_left_and_somebody_spoiled_is_found_out_and_taken_away(store, source, tmp_path):
    path, digest = source
    store.put_file(path, "k", sha256=digest)
    arriving = incoming.Incoming(tmp_path / "back", size=3 << 20, sha256=digest)
    arriving._part.write_bytes(b"spoiled")
    with pytest.raises(HashMismatch):
        store.get_file("k", tmp_path / "back", sha256=digest)
    store.get_file("k", tmp_path / "back", sha256=digest)
    assert digest_of((tmp_path / "back").read_bytes()) == digest


def test_a_link_that_waits_where_a_file_arrives_is_not_followed(store, source, tmp_path):
    path, digest = source
    store.put_file(path, "k", sha256=digest)
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    os.symlink(victim, incoming.Incoming(tmp_path / "back", size=3 << 20, sha256=digest)._part)
    with pytest.raises(NotWritable):
        store.get_file("k", tmp_path / "back", sha256=digest)
    assert victim.read_bytes() == b"mine"


def test_of_32_threads_that_create_one_file_exactly_one_wins(store):
    for round_ in range(5):
        together, won = threading.Barrier(32), []

        def run(number: int, key=f"leases/{round_}", together=together, won=won) -> None:
            together.wait()
            if store.create_if_absent(key, f"{number}".encode()) is not None:
                won.append(number)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and store.get(f"leases/{round_}", max_bytes=9)[0] == f"{won[0]}".encode()


def test_a_file_is_replaced_only_by_who_read_what_is_there(store):
    first = store.create_if_absent("lease", b"1")
    assert store.replace_if_unchanged("lease", b"2", '"stale"') is None
    second = store.replace_if_unchanged("lease", b"2", first.etag)
    assert second is not None and store.replace_if_unchanged("lease", b"3", first.etag) is None
    assert store.replace_if_unchanged("nothing", b"3", first.etag) is None
    assert store.get("lease", max_bytes=9)[0] == b"2"


def test_a_probe_leaves_nothing(store, tmp_path):
    store.probe("runs")
    assert list(store.list("")) == []


def test_what_is_missing_or_no_file_is_said_to_be_missing(store, tmp_path):
    (tmp_path / "home/folder").mkdir(parents=True)
    assert store.head("folder") is None and store.get("folder", max_bytes=1) is None
    for key in ("folder", "nothing"):
        with pytest.raises(ArtifactMissing):
            store.read_back(key)
        with pytest.raises(ArtifactMissing):
            store.get_file(key, tmp_path / "x")


def test_a_folder_is_named_by_a_path_or_a_file_uri(tmp_path):
    assert open_store(f"file://{tmp_path}/a%20b")[0].root == tmp_path / "a b"
    assert open_store("out/put", base=tmp_path)[0].root == tmp_path / "out/put"
    for uri in ("file://host/x", "file://", "file:///a\nb"):
        with pytest.raises(UsageError):
            open_store(uri)


def test_a_folder_that_cannot_be_made_is_not_writable(tmp_path, source):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotWritable):
        open_store(str(tmp_path / "file/below"))[0].put_file(source[0], "k", sha256=source[1])
