"""Bringing outputs home: what is fetched, over which way, what may never be written, and what a bad machine gains."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_skills.errors import HashMismatch, NotWritable, ProtocolError, TransferIncomplete, UnsafeManifest
from gpu_skills.remote import destination, pace
from gpu_skills.remote.bulk import Bulk
from gpu_skills.remote.destination import Destination
from gpu_skills.remote.download import DownloadReport
from gpu_skills.remote.environment import job_environment
from gpu_skills.remote.session import Session
from gpu_skills.remote.sshconfig import SshEndpoint
from gpu_skills.remote.transfer import download, upload
from gpu_skills.remote.transport import LocalTransport
from gpu_skills.remote.tree import Entry, parse_manifest
from remote.far_end import HELLO, CuttingProxy, ScriptedTransport, data, ok, programs, session_to, tree_of

MIB = 1 << 20
JOB = "J-000001"
NAMES = [b"metrics.json", "naïve.txt".encode(), b"new\nline", b"$(touch x)", b"-rf", b"b\xff\xfe", b"deep/er/run.sh"]
CONTENTS = {name: b"output %d" % number for number, name in enumerate(NAMES)}
CONTENTS |= {b"empty": b"", b"deep/empty": b"", b"same": b"output 0"}
CONTENTS |= {b"model.bin": os.urandom(3 * MIB + 7), b"optimizer.bin": os.urandom(9 * MIB + 1)}
TOTAL = sum(map(len, CONTENTS.values()))


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "CONTROL_BYTES", MIB)
    monkeypatch.setattr(pace, "LARGE_FILE_BYTES", MIB)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "gpu-outputs" / JOB
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def job(root: Path, tmp_path: Path) -> Callable[[], Session]:
    """An ended job on this machine whose outputs are CONTENTS."""
    outputs = tmp_path / "produced"
    for name, content in CONTENTS.items():
        path = Path(os.fsdecode(os.fsencode(outputs) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (outputs / "deep" / "er" / "run.sh").chmod(0o755)
    (outputs / "hollow").mkdir()
    start_job(root, tmp_path, f"cp -a {outputs}/. $GPU_OUTPUT_DIR", wait=True)
    return lambda: Session.open(LocalTransport(), root=str(root))


def start_job(root: Path, tmp_path: Path, run: str, *, wait: bool) -> None:
    session = Session.open(LocalTransport(), root=str(root))
    (tmp_path / "nothing").mkdir()
    tree = upload(session, None, "p", tree_of(tmp_path / "nothing")).tree
    spec = {
        "id": JOB,
        "nonce": secrets.token_hex(8),
        "tree": tree,
        "run": run,
        "setup": None,
        "timeout_s": None,
        "expect": [],
    }
    spec |= {"progress": None, "label": None, "secret": []}
    environment = job_environment(session.greeting.root, "p", JOB)
    session.call("start", {"project": "p", "job": spec, "env": environment})
    until = time.monotonic() + 30
    while wait and time.monotonic() < until:
        (status,) = session.call("status", {"project": "p", "jobs": [JOB]})["jobs"]
        if status["state"] != "running":
            assert status["state"] == "succeeded", status
            break
        time.sleep(0.05)
    session.close()


def outputs_folder(root: Path) -> Path:
    return root / "projects" / "p" / "jobs" / JOB / "outputs"


def manifest(session: Session) -> list[Entry]:
    chunks: list[bytes] = []
    session.call("manifest", {"project": "p", "job": JOB}, on_data=lambda header, data: chunks.append(data))
    return parse_manifest(chunks)


def pull(session: Session, here: Path, *, bulk: Bulk | None = None, **options: object) -> DownloadReport:
    return download(session, bulk, "p", JOB, manifest(session), here, **options)


def contents(folder: Path) -> dict[bytes, bytes]:
    found = {}
    for path in folder.rglob("*"):
        assert not path.is_symlink()
        if path.is_file():
            found[os.fsencode(path.relative_to(folder))] = path.read_bytes()
    return found


# what is fetched ----------------------------------------------------------------------------------------------------


def test_all_outputs_come_home_with_their_names_bytes_and_modes(job, here):
    session = job()
    told: list[tuple[int, int]] = []
    report = pull(session, here, progress=lambda done, total: told.append((done, total)))
    assert contents(here) == CONTENTS
    assert (report.new, report.unchanged, report.changing, report.bytes) == (len(CONTENTS), 0, (), TOTAL)
    assert (here / "hollow").is_dir()
    assert os.access(here / "deep" / "er" / "run.sh", os.X_OK)
    assert not os.access(here / "metrics.json", os.X_OK) or os.getuid() == 0
    assert (here / "metrics.json").stat().st_mode & 0o111 == 0
    assert sorted(os.listdir(here.parent)) == [JOB]
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    session.close()


def test_a_second_pull_moves_nothing_and_asks_for_nothing(job, here, tmp_path, monkeypatch):
    session = job()
    cache = tmp_path / "verified.json"
    pull(session, here, cache_path=cache)
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    monkeypatch.setattr(Destination, "hash", lambda self, path: pytest.fail("a file that is known was read again"))
    report = pull(session, here, cache_path=cache)
    assert (report.new, report.unchanged, report.bytes) == (0, len(CONTENTS), 0)
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before
    session.close()


@pytest.mark.parametrize("cache", ["lost", b"", b"[]", b'{"files":{"empty":[]}}', b'{"files":5}', b"[" * 100_000])
def test_without_a_usable_cache_every_file_is_hashed_and_nothing_is_fetched(job, here, tmp_path, cache):
    session = job()
    path = tmp_path / "verified.json"
    pull(session, here, cache_path=path)
    path.unlink()
    if isinstance(cache, bytes):
        path.write_bytes(cache)
    assert pull(session, here, cache_path=path).unchanged == len(CONTENTS)
    session.close()


def test_only_what_differs_here_is_fetched_again(job, here, tmp_path):
    session = job()
    pull(session, here, cache_path=tmp_path / "v")
    (here / "metrics.json").write_bytes(b"edited!!")  # the same size
    (here / "model.bin").unlink()
    (here / "mine.txt").write_text("not listed there")
    report = pull(session, here, cache_path=tmp_path / "v")
    assert (report.new, report.unchanged, report.bytes) == (2, len(CONTENTS) - 2, 8 + 3 * MIB + 7)
    assert (here / "mine.txt").read_text() == "not listed there"
    (here / "mine.txt").unlink()
    assert contents(here) == CONTENTS
    session.close()


def test_a_forced_pull_does_not_trust_what_it_remembers(job, here, tmp_path, monkeypatch):
    session = job()
    pull(session, here, cache_path=tmp_path / "v")
    hashed: list[bytes] = []
    honest = Destination.hash
    monkeypatch.setattr(Destination, "hash", lambda self, path: hashed.append(path) or honest(self, path))
    pull(session, here, cache_path=tmp_path / "v", trust_cache=False)
    assert set(hashed) == set(CONTENTS)
    session.close()


@pytest.mark.parametrize("way", ["control", "stream", "rsync"])
def test_every_way_brings_the_same_outputs(sshd, job, tmp_path, here, small_limits, monkeypatch, way):
    environ = dict(os.environ)
    if way == "control":
        monkeypatch.setattr(pace, "CONTROL_BYTES", 1 << 40)
    if way == "stream":
        environ["PATH"] = programs(tmp_path, "ssh")
    session = session_to(sshd, tmp_path, environ=environ)
    ways = watch_ways(monkeypatch)
    pull(session, here, bulk=Bulk(session.transport))
    assert contents(here) == CONTENTS
    assert ways[-1] == way
    assert not os.access(here / "optimizer.bin", os.X_OK) or os.getuid() == 0
    assert sorted(os.listdir(here.parent)) == [JOB]
    session.close()


def test_a_machine_without_rsync_gives_a_stream(sshd_factory, job, tmp_path, here, small_limits, monkeypatch):
    server = sshd_factory(environment={"PATH": programs(tmp_path, "sh", "bash", "python3")})
    session = session_to(server, tmp_path)
    ways = watch_ways(monkeypatch)
    pull(session, here, bulk=Bulk(session.transport))
    assert contents(here) == CONTENTS
    assert ways[-2:] == ["rsync", "stream"]
    session.close()


def watch_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes how the large files went: `rsync`, a `stream` of their own, or `control`."""
    ways: list[str] = []
    rsync, stream = Bulk.rsync_down, Bulk.stream
    monkeypatch.setattr(Bulk, "rsync_down", lambda self, *a, **k: (ways.append("rsync"), rsync(self, *a, **k))[1])
    monkeypatch.setattr(Bulk, "stream", lambda self: (ways.append("stream"), stream(self))[1])
    honest = Session.call

    def call(self: Session, verb: str, *args: object, **options: object) -> dict:
        if verb == "get" and not ways:
            ways.append("control")
        return honest(self, verb, *args, **options)

    monkeypatch.setattr(Session, "call", call)
    return ways


# broken connections -------------------------------------------------------------------------------------------------


def test_a_pull_that_is_cut_goes_on_from_where_it_was(sshd, job, tmp_path, here):
    with CuttingProxy(sshd.port, down=[11 * MIB]) as proxy:
        session = session_to(sshd, tmp_path, endpoint=SshEndpoint(sshd.host, port=proxy.port))
        pull(session, here)
        session.close()
        assert proxy.connections > 1
        assert proxy.bytes_down < TOTAL + 7 * MIB
    assert contents(here) == CONTENTS


@pytest.mark.parametrize("way", ["stream", "rsync"])
def test_a_cut_bulk_pull_goes_on_from_where_it_was(sshd, job, tmp_path, here, small_limits, way):
    environ = {**os.environ, **({"PATH": programs(tmp_path, "ssh")} if way == "stream" else {})}
    with CuttingProxy(sshd.port, down=[None, 11 * MIB]) as proxy:
        session = session_to(sshd, tmp_path, endpoint=SshEndpoint(sshd.host, port=proxy.port), environ=environ)
        pull(session, here, bulk=Bulk(session.transport))
        session.close()
        assert proxy.bytes_down < TOTAL + 7 * MIB
    assert contents(here) == CONTENTS


def test_an_interrupted_first_pull_shows_nothing_half_done_and_the_next_one_completes_it(sshd, job, tmp_path, here):
    with CuttingProxy(sshd.port, down=[9 * MIB] + [20_000] * 20) as proxy:
        session = session_to(sshd, tmp_path, endpoint=SshEndpoint(sshd.host, port=proxy.port))
        with pytest.raises(TransferIncomplete):
            pull(session, here)
        session.close()
    assert contents(here) == {}
    with CuttingProxy(sshd.port) as proxy:
        session = session_to(sshd, tmp_path, endpoint=SshEndpoint(sshd.host, port=proxy.port))
        pull(session, here)
        session.close()
        assert proxy.bytes_down < TOTAL - 2 * MIB
    assert contents(here) == CONTENTS


def test_what_a_killed_pull_left_is_verified_before_it_counts(job, here):
    session = job()
    staging = here.parent / f".{JOB}.incoming"
    (staging / "tree").mkdir(parents=True)
    (staging / "tree" / "metrics.json").write_bytes(b"outp")  # half written
    digest = hashlib.sha256(CONTENTS[b"optimizer.bin"]).hexdigest()
    (staging / digest).write_bytes(b"\0" * (9 * MIB))  # not the beginning of that file
    pull(session, here)
    assert contents(here) == CONTENTS
    session.close()


# a job that still writes --------------------------------------------------------------------------------------------


def test_a_file_that_is_being_written_is_reported_and_the_older_copy_stays(job, root, here):
    session = job()
    pull(session, here)
    listed = manifest(session)
    for name in ("model.bin", "same"):
        with open(outputs_folder(root) / name, "ab") as file:
            file.write(b"grown")
    (here / "model.bin").write_bytes(b"an older state")
    (here / "same").unlink()
    report = download(session, None, "p", JOB, listed, here, still_running=True)
    assert (report.new, report.changing) == (0, ("model.bin", "same"))
    assert (here / "model.bin").read_bytes() == b"an older state"
    assert not (here / "same").exists()
    session.close()


def test_a_file_that_vanished_is_changing_while_the_job_runs_and_an_error_afterwards(job, root, here):
    session = job()
    listed = manifest(session)
    (outputs_folder(root) / "model.bin").unlink()
    report = download(session, None, "p", JOB, listed, here, still_running=True)
    assert report.changing == ("model.bin",)
    assert report.new == len(CONTENTS) - 1
    with pytest.raises(TransferIncomplete, match=r"model\.bin is gone on this machine"):
        download(session, None, "p", JOB, listed, here)
    session.close()


def test_a_large_file_that_grows_under_rsync_is_reported(sshd, job, root, tmp_path, here, small_limits):
    session = session_to(sshd, tmp_path)
    listed = manifest(session)
    with open(outputs_folder(root) / "optimizer.bin", "ab") as file:
        file.write(b"grown")
    (outputs_folder(root) / "model.bin").unlink()
    report = download(session, Bulk(session.transport), "p", JOB, listed, here, still_running=True)
    assert sorted(report.changing) == ["model.bin", "optimizer.bin"]
    assert set(contents(here)) == set(CONTENTS) - {b"model.bin", b"optimizer.bin"}
    session.close()


def test_bytes_that_rotted_on_the_machine_are_refused_and_the_copy_here_stays(job, root, here):
    session = job()
    pull(session, here)
    listed = manifest(session)
    (here / "metrics.json").write_bytes(b"local")
    (outputs_folder(root) / "metrics.json").write_bytes(b"rotten 0")
    with pytest.raises(HashMismatch, match=r"metrics\.json arrived changed"):
        download(session, None, "p", JOB, listed, here)
    assert (here / "metrics.json").read_bytes() == b"local"
    session.close()


# nothing outside ----------------------------------------------------------------------------------------------------


def test_nothing_is_written_through_a_link_that_stands_in_the_way(job, here, tmp_path):
    session = job()
    outside = tmp_path / "outside"
    outside.mkdir()
    (here / "deep").symlink_to(outside)
    with pytest.raises(NotWritable, match="it is a link, and nothing is written through a link"):
        pull(session, here)
    assert list(outside.iterdir()) == []
    session.close()


def test_a_link_in_the_place_of_a_file_is_replaced_and_its_target_untouched(job, here, tmp_path):
    session = job()
    victim = tmp_path / "victim"
    victim.write_bytes(b"output 0")  # even the right content is not ours when it is elsewhere
    (here / "metrics.json").symlink_to(victim)
    pull(session, here)
    assert contents(here) == CONTENTS
    victim.write_bytes(b"changed")
    assert (here / "metrics.json").read_bytes() == b"output 0"
    session.close()


def test_a_staging_folder_that_is_a_link_is_not_used(job, here, tmp_path):
    session = job()
    outside = tmp_path / "outside"
    outside.mkdir()
    (here.parent / f".{JOB}.incoming").symlink_to(outside)
    with pytest.raises(NotWritable):
        pull(session, here)
    assert list(outside.iterdir()) == []
    session.close()


@pytest.mark.parametrize(
    ("name", "what"), [("metrics.json", "a folder is in the way"), ("deep", "a file is in the way")]
)
def test_what_is_in_the_way_is_named_and_kept(job, here, name, what):
    session = job()
    if name == "deep":
        (here / name).write_text("mine")
    else:
        (here / name / "mine").mkdir(parents=True)
    with pytest.raises(NotWritable, match=what) as error:
        pull(session, here)
    assert name in error.value.message
    assert (here / name).exists()
    session.close()


def test_a_destination_behind_a_link_of_the_user_is_used(job, tmp_path):
    session = job()
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "big-disk")
    pull(session, tmp_path / "outputs")
    assert contents(tmp_path / "big-disk") == CONTENTS
    assert (tmp_path / "outputs").is_symlink()
    session.close()


def test_a_full_disk_here_is_one_line_and_the_older_copies_stay(job, here, monkeypatch):
    session = job()
    pull(session, here)
    (here / "model.bin").write_bytes(b"old")

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(destination, "write_all", full)
    monkeypatch.setattr("gpu_skills.remote.download.write_all", full)
    from gpu_skills.errors import DiskFull

    with pytest.raises(DiskFull, match="No space left"):
        pull(session, here)
    assert (here / "model.bin").read_bytes() == b"old"
    session.close()


# machines that lie --------------------------------------------------------------------------------------------------


def entry(path: bytes, content: bytes) -> Entry:
    return Entry(path, len(content), 0o644, hashlib.sha256(content).hexdigest())


def frame(i: object, payload: bytes, last: object = True, **fields: object) -> bytes:
    return data(payload, i=i, last=last, **fields)


END = ok({"files": 1, "bytes": 1})


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([frame(1, b"a")], "not next"),
        ([frame(-1, b"a")], "not next"),
        ([frame("0", b"a")], "not next"),
        ([frame(None, b"a")], "not next"),
        ([frame(0, b"a"), frame(0, b"a")], "not next"),
        ([frame(0, b"a"), frame(1, b"b"), frame(2, b"c")], "not next"),
        ([frame(0, b"a", last="yes")], "not next"),
        ([data(b"a")], "not next"),
        ([frame(0, b"", last=False)], "nothing in it"),
        ([frame(0, b"a"), END], "fewer files"),
        ([data(b"ab", i=0, sizes=[1])], "do not add up"),
        ([data(b"ab", i=0, sizes=[3, -1])], "do not add up"),
        ([data(b"ab", i=0, sizes=[True, 1])], "do not add up"),
        ([data(b"ab", i=0, sizes=[])], "do not add up"),
        ([data(b"ab", i=0, sizes=2)], "do not add up"),
        ([data(b"abc", i=0, sizes=[1, 1, 1])], "not next"),
        ([data(b"b", i=1, sizes=[1])], "not next"),
        ([frame(0, b"a", last=False), data(b"ab", i=0, sizes=[1, 1])], "not next"),
        ([END], "fewer files"),
    ],
)
def test_frames_that_were_not_asked_for_are_a_protocol_error(here, fake_runner, frames, words):
    session = Session.open(ScriptedTransport([HELLO, *frames, END]), runner=fake_runner)
    with pytest.raises(ProtocolError, match=words):
        download(session, None, "p", JOB, [entry(b"a", b"a"), entry(b"b", b"b")], here)
    assert contents(here) == {}


def test_a_file_without_end_is_cut_off_and_nothing_of_it_kept(here, fake_runner):
    def endless():
        yield HELLO
        while True:
            yield frame(0, b"x" * MIB, last=False)

    session = Session.open(ScriptedTransport(endless()), runner=fake_runner)
    with pytest.raises(ProtocolError, match="more of a than its manifest lists"):
        download(session, None, "p", JOB, [entry(b"a", b"a")], here)
    left = [path for path in here.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) <= 1


def test_a_link_in_a_manifest_is_never_made(here, fake_runner):
    session = Session.open(ScriptedTransport([HELLO]), runner=fake_runner)
    with pytest.raises(UnsafeManifest, match="a is a link"):
        download(session, None, "p", JOB, [Entry(b"a", link=b"b")], here)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("trick", ["link", "extra", "fifo", "large"])
def test_an_rsync_that_brings_something_else_gains_nothing(sshd, job, tmp_path, here, small_limits, trick):
    """The other end of rsync is the machine's: what it puts into our folder is looked at before it counts."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    does = {
        "link": f"ln -s {victim} 0; ln -s {victim} 1",
        "extra": f"ln -s {tmp_path} evil; echo x > 7; mkdir sub",
        "fifo": "mkfifo 0 1",
        "large": "head -c 100000000 /dev/zero > 0; sleep 5",
    }[trick]
    folder = Path(programs(tmp_path, "ssh"))
    (folder / "rsync").write_text(
        "#!/bin/sh\nPATH=/usr/bin:/bin\n"
        '[ "$1" = --version ] && { echo "rsync  version 3.2.7  protocol version 31"; exit 0; }\n'
        f'for last; do :; done; cd "$last" || exit 9\n{does}\nexit 0\n'
    )
    (folder / "rsync").chmod(0o755)
    session = session_to(sshd, tmp_path, environ={**os.environ, "PATH": str(folder)})
    with pytest.raises((TransferIncomplete, ProtocolError)) as error:
        pull(session, here, bulk=Bulk(session.transport))
    assert ("more than its manifest" if trick == "large" else "is gone") in error.value.message
    assert victim.read_text() == "untouched"
    assert not any(path.is_symlink() for path in here.parent.rglob("*"))
    session.close()
