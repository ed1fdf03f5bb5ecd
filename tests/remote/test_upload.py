"""Uploads by content: what is sent, over which way, and what happens when it goes wrong on the way."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_skills.errors import (
    ChangedMeanwhile,
    HashMismatch,
    MachineDiskFull,
    ProtocolError,
    TransferIncomplete,
)
from gpu_skills.remote import pace
from gpu_skills.remote.bulk import Bulk
from gpu_skills.remote.session import Session
from gpu_skills.remote.sshconfig import SshEndpoint
from gpu_skills.remote.transfer import upload
from gpu_skills.remote.transport import LocalTransport
from remote.far_end import (
    HELLO,
    CuttingProxy,
    ScriptedTransport,
    data,
    ok,
    programs,
    refused,
    session_to,
    tree_of,
)

MIB = 1 << 20
ODD_NAMES = [
    b"plain",
    "ünïcödé".encode(),
    b"new\nline",
    b"quo'te\"s",
    b"$(touch x);`id`",
    b"-rf",
    b"bad\xff\xfe",
    b"a b",
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with what directories have: odd names, empty files, copies, depth, one large file."""
    folder = tmp_path / "source"
    (folder / "deep" / "er").mkdir(parents=True)
    for number, name in enumerate(ODD_NAMES):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"content %d" % number)
    (folder / "empty").write_bytes(b"")
    (folder / "deep" / "copy").write_bytes(b"content 1")
    (folder / "deep" / "er" / "run.sh").write_bytes(b"#!/bin/sh\n")
    (folder / "deep" / "er" / "run.sh").chmod(0o755)
    (folder / "large.bin").write_bytes(os.urandom(3 * MIB + 5))
    (folder / "larger.bin").write_bytes(os.urandom(9 * MIB + 1))
    return folder


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything above 1 MiB counts as bulk, so that a test need not move a gigabyte."""
    monkeypatch.setattr(pace, "CONTROL_BYTES", MIB)
    monkeypatch.setattr(pace, "LARGE_FILE_BYTES", MIB)


@pytest.fixture
def local(root: Path) -> Iterator[Session]:
    session = Session.open(LocalTransport(), root=str(root))
    yield session
    session.close()


def stored(root: Path) -> set[str]:
    """The digests in the store, each checked."""
    found = {path.name: path for path in (root / "projects" / "p" / "store").glob("*/*")}
    for digest, path in found.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    return set(found)


def is_sealed(session: Session, tree_digest: str) -> bool:
    return session.call("have", {"project": "p", "tree": tree_digest})["known"]


# what is sent -------------------------------------------------------------------------------------------------------


def test_every_content_is_sent_once_and_an_unchanged_directory_sends_nothing(local, root, source):
    tree = tree_of(source)
    first = upload(local, None, "p", tree)
    contents = {entry.sha256: entry.size for entry in tree.files}
    assert (first.tree, first.files_sent, first.bytes_sent) == (tree.digest, len(contents), sum(contents.values()))
    assert first.bytes_total == sum(entry.size for entry in tree.files)
    assert stored(root) == set(contents)
    assert is_sealed(local, tree.digest)
    again = upload(local, None, "p", tree_of(source))
    assert (again.files_sent, again.bytes_sent, again.method) == (0, 0, "none")


def test_after_a_change_only_the_changed_file_is_sent(local, source):
    upload(local, None, "p", tree_of(source))
    (source / "plain").write_bytes(b"other content")
    report = upload(local, None, "p", tree_of(source))
    assert (report.files_sent, report.bytes_sent) == (1, 13)


def test_an_empty_directory_can_be_uploaded(local, tmp_path):
    (tmp_path / "empty").mkdir()
    report = upload(local, None, "p", tree_of(tmp_path / "empty"))
    assert (report.files_sent, report.bytes_total) == (0, 0)
    assert is_sealed(local, report.tree)


def test_progress_grows_to_the_total_and_no_further(local, source):
    told: list[tuple[int, int]] = []
    report = upload(local, None, "p", tree_of(source), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (report.bytes_sent, report.bytes_sent)
    assert told == sorted(told)
    assert len({total for _, total in told}) == 1


def test_content_kept_from_hashing_is_not_read_again(local, tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "f").write_bytes(b"kept")
    tree = tree_of(folder, keep_data=True)
    (folder / "f").write_bytes(b"else")
    assert upload(local, None, "p", tree).bytes_sent == 4


# the ways -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["control", "stream", "rsync"])
def test_every_way_brings_the_same_content(sshd, root, tmp_path, source, small_limits, monkeypatch, way):
    environ = dict(os.environ)
    if way == "control":
        monkeypatch.setattr(pace, "CONTROL_BYTES", 1 << 40)
    if way == "stream":
        environ["PATH"] = programs(tmp_path, "ssh")
    session = session_to(sshd, tmp_path, environ=environ)
    tree = tree_of(source)
    report = upload(session, Bulk(session.transport), "p", tree)
    assert report.method == way
    assert stored(root) == {entry.sha256 for entry in tree.files}
    assert upload(session, Bulk(session.transport), "p", tree).method == "none"
    session.close()


def test_a_machine_without_rsync_gets_a_stream(sshd_factory, root, tmp_path, source, small_limits):
    server = sshd_factory(environment={"PATH": programs(tmp_path, "sh", "bash", "python3")})
    session = session_to(server, tmp_path)
    report = upload(session, Bulk(session.transport), "p", tree_of(source))
    assert report.method == "stream"
    assert is_sealed(session, report.tree)
    session.close()


def test_a_pinned_key_holds_for_paths_with_blanks_and_percent_signs(sshd, root, tmp_path, source, small_limits):
    session = session_to(sshd, tmp_path, known_hosts=tmp_path / "it's 100% mine" / "known hosts")
    assert upload(session, Bulk(session.transport), "p", tree_of(source)).method == "rsync"
    session.close()


def test_an_rsync_that_fails_is_told_in_its_own_words_and_nothing_is_sealed(sshd, root, tmp_path, source, small_limits):
    folder = Path(programs(tmp_path, "ssh"))
    write_program(
        folder / "rsync",
        '[ "$1" = --version ] && { echo "rsync  version 3.2.7  protocol version 31"; exit 0; }\n'
        "echo 'rsync: [sender] read errors mapping \"x\": Input/output error (5)' >&2\n"
        "echo 'rsync error: some files/attrs were not transferred (code 23) at main.c(1338)' >&2; exit 23\n",
    )
    session = session_to(sshd, tmp_path, environ={**os.environ, "PATH": str(folder)})
    tree = tree_of(source)
    with pytest.raises(TransferIncomplete, match=r"rsync exited with 23.*Input/output error") as error:
        upload(session, Bulk(session.transport), "p", tree)
    assert error.value.exit_code == 1
    assert not is_sealed(session, tree.digest)
    session.close()


@pytest.mark.parametrize("version", ["rsync  version 2.6.9  protocol version 29", "openrsync: protocol version 29"])
def test_an_rsync_that_is_too_old_is_not_used(sshd, root, tmp_path, source, small_limits, version):
    folder = Path(programs(tmp_path, "ssh"))
    write_program(folder / "rsync", f'[ "$1" = --version ] && {{ echo "{version}"; exit 0; }}; exit 1\n')
    session = session_to(sshd, tmp_path, environ={**os.environ, "PATH": str(folder)})
    assert upload(session, Bulk(session.transport), "p", tree_of(source)).method == "stream"
    session.close()


# broken connections -------------------------------------------------------------------------------------------------


def test_a_cut_control_connection_goes_on_from_where_it_was(sshd, root, tmp_path, source):
    with CuttingProxy(sshd.port, up=[11 * MIB]) as proxy:
        session = session_to(sshd, tmp_path, endpoint=SshEndpoint(sshd.host, port=proxy.port))
        tree = tree_of(source)
        upload(session, Bulk(session.transport), "p", tree)
        session.close()
        assert proxy.connections > 1
        # What crosses twice is what was in buffers when it was cut; from the start it would be 11 MiB.
        assert proxy.bytes_up < tree.total_bytes + 7 * MIB
    assert stored(root) == {entry.sha256 for entry in tree.files}


@pytest.mark.parametrize("way", ["stream", "rsync"])
def test_a_cut_bulk_connection_goes_on_from_where_it_was(sshd, root, tmp_path, source, small_limits, way):
    environ = {**os.environ, **({"PATH": programs(tmp_path, "ssh")} if way == "stream" else {})}
    with CuttingProxy(sshd.port, up=[None, 11 * MIB]) as proxy:
        session = session_to(sshd, tmp_path, endpoint=SshEndpoint(sshd.host, port=proxy.port), environ=environ)
        tree = tree_of(source)
        report = upload(session, Bulk(session.transport), "p", tree)
        session.close()
        moved = proxy.bytes_up
    assert report.method != "control"
    assert stored(root) == {entry.sha256 for entry in tree.files}
    assert moved < tree.total_bytes + 7 * MIB


@pytest.mark.parametrize("begun", ["well", "with other bytes"])
def test_rsync_completes_what_was_begun_and_verifies_all_of_it(sshd, root, tmp_path, source, small_limits, begun):
    with CuttingProxy(sshd.port) as proxy:
        session = session_to(sshd, tmp_path, endpoint=SshEndpoint(sshd.host, port=proxy.port))
        tree = tree_of(source)
        incoming = Path(session.call("incoming", {"project": "p"})["path"])
        for entry in tree.files:
            if entry.size > MIB:
                content = Path(os.fsdecode(tree.local_path(entry))).read_bytes()[: entry.size - 5 * MIB // 4]
                (incoming / entry.sha256).write_bytes(content if begun == "well" else bytes(len(content)))
        report = upload(session, Bulk(session.transport), "p", tree)
        session.close()
        assert stored(root) == {entry.sha256 for entry in tree.files}
        if begun == "well":
            assert report.method == "rsync"
            assert proxy.bytes_up < 3 * MIB


def test_a_connection_that_is_always_cut_is_given_up_and_says_what_to_do(sshd, tmp_path, source, root):
    with CuttingProxy(sshd.port, up=[200_000] * 50) as proxy:
        session = session_to(sshd, tmp_path, endpoint=SshEndpoint(sshd.host, port=proxy.port))
        with pytest.raises(TransferIncomplete, match="the transfer stopped") as error:
            upload(session, None, "p", tree_of(source))
        session.close()
    assert error.value.retryable
    assert "again" in error.value.next_step


# files that change, bytes that change -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "large.bin", "larger.bin"])
@pytest.mark.parametrize("change", ["other bytes", "shorter", "gone", "a link"])
def test_a_file_that_changes_after_it_was_hashed_is_named(local, source, name, change):
    tree = tree_of(source)
    path = source / name
    was = path.read_bytes()
    path.unlink()
    match change:
        case "other bytes":
            path.write_bytes(was[:-1] + bytes([was[-1] ^ 1]))
        case "shorter":
            path.write_bytes(was[:-1])
        case "a link":
            path.symlink_to("/etc/passwd")
    with pytest.raises(ChangedMeanwhile, match=name.replace(".", r"\.")):
        upload(local, None, "p", tree)
    assert not is_sealed(local, tree.digest)


def test_a_file_that_only_grows_is_sent_as_it_was_hashed(local, root, source):
    tree = tree_of(source)
    for name in ("plain", "larger.bin"):
        with open(source / name, "ab") as file:
            file.write(b"more")
    upload(local, None, "p", tree)
    assert stored(root) == {entry.sha256 for entry in tree.files}


def test_a_file_that_changes_under_rsync_is_named(sshd, root, tmp_path, source, small_limits):
    session = session_to(sshd, tmp_path)
    tree = tree_of(source)
    was = (source / "larger.bin").read_bytes()
    (source / "larger.bin").write_bytes(was[:-1] + bytes([was[-1] ^ 1]))
    with pytest.raises(ChangedMeanwhile, match=r"larger\.bin"):
        upload(session, Bulk(session.transport), "p", tree)
    session.close()


class CorruptingTransport(LocalTransport):
    """Flips a bit of what is written after so many bytes, on as many connections as it is told."""

    def __init__(self, *, connections: int, after_bytes: int):
        super().__init__()
        self._left, self._after = connections, after_bytes

    def start(self, command: str):
        channel = super().start(command)
        if self._left:
            self._left -= 1
            honest, written = channel.write, 0

            def write(*buffers: bytes | memoryview) -> None:
                nonlocal written
                joined = bytearray(b"".join(buffers))
                if written <= self._after < written + len(joined):
                    joined[self._after - written] ^= 1
                written += len(joined)
                honest(joined)

            channel.write = write
        return channel


def test_content_that_arrives_changed_is_refused_and_sent_again(root, source, allow_subprocess):
    Session.open(LocalTransport(), root=str(root)).close()  # installed: what is written from here on is frames
    session = Session.open(CorruptingTransport(connections=1, after_bytes=6 * MIB), root=str(root))
    tree = tree_of(source)
    report = upload(session, None, "p", tree)
    assert report.bytes_sent > tree.total_bytes - len(b"content 0")
    assert stored(root) == {entry.sha256 for entry in tree.files}
    session.close()


# machines that lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"sha256": "0" * 64, "size": 4, "have_bytes": 0},
        {"sha256": None, "size": 5, "have_bytes": 0},
        {"sha256": None, "size": 4, "have_bytes": -1},
        {"sha256": None, "size": 4, "have_bytes": 5},
        {"sha256": None, "size": 4, "have_bytes": True},
        {"sha256": None, "size": 4},
        {"sha256": ["x"], "size": 4, "have_bytes": 0},
        [],
    ],
)
def test_a_machine_that_asks_for_what_was_not_offered_gets_nothing(tmp_path, fake_runner, asked):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "f").write_bytes(b"data")
    tree = tree_of(tmp_path / "s")
    if isinstance(asked, dict) and asked["sha256"] is None:
        asked["sha256"] = tree.entries[0].sha256
    line = json.dumps(asked).encode() + b"\n"
    transport = ScriptedTransport([HELLO, ok({"known": False}), data(line), ok({"missing": 1})])
    with pytest.raises(ProtocolError, match="asks for what was never offered"):
        upload(Session.open(transport, runner=fake_runner), None, "p", tree)
    assert b'"verb":"put"' not in transport.channels[0].heard


def test_a_full_disk_there_is_said_and_the_tree_is_not_sealed(tmp_path, fake_runner):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "f").write_bytes(b"data")
    tree = tree_of(tmp_path / "s")
    line = json.dumps({"sha256": tree.entries[0].sha256, "size": 4, "have_bytes": 0}).encode() + b"\n"
    transport = ScriptedTransport(
        [HELLO, ok({"known": False}), data(line), ok({"missing": 1}), refused("disk_full", "No space left on device")]
    )
    with pytest.raises(MachineDiskFull, match=r"disk of far\.example is full: No space left"):
        upload(Session.open(transport, runner=fake_runner), None, "p", tree)
    assert b'"verb":"seal"' not in transport.channels[0].heard


def test_a_machine_that_never_accepts_a_file_is_given_up(tmp_path, fake_runner):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "f").write_bytes(b"data")
    tree = tree_of(tmp_path / "s")
    digest = tree.entries[0].sha256
    line = json.dumps({"sha256": digest, "size": 4, "have_bytes": 0}).encode() + b"\n"
    round_trip = [data(line), ok({"missing": 1}), refused("hash_mismatch", sha256=digest, found="0" * 64)]
    transport = ScriptedTransport([HELLO, ok({"known": False}), *round_trip * 10])
    with pytest.raises(HashMismatch):
        upload(Session.open(transport, runner=fake_runner), None, "p", tree)
    assert transport.channels[0].heard.count(b'"verb":"put"') == 2


def write_program(path: Path, body: str) -> None:
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
