"""The fuse on real machines: whatever the controller and the machine do, billing ends at the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_skills.clock import SystemClock, timestamp
from gpu_skills.errors import FuseMissing, FuseSilent, ProtocolError, RemoteError
from gpu_skills.lifecycle.connect import Link
from gpu_skills.lifecycle.guard import fuse, sentinel
from gpu_skills.sandbox import processes
from lifecycle.fused import FOREIGN, INTENT, NO_DELAY, Fused, rent, soon
from sandbox_fixture import eventually, ssh

BOTH = pytest.mark.parametrize("vendor", ["vast", "runpod"])
# A look every two seconds, the call, and a computer that does other things.
LATE_S = 15.0


@pytest.fixture
def real(rig: Callable[..., Any]) -> Callable[[str], Any]:
    return lambda vendor: rig(vendor, real=True, frozen=False, limits="off", delays=NO_DELAY)


@pytest.fixture
def open_link() -> Iterator[Callable[[Fused], Link]]:
    made: list[Link] = []

    def opened(fused: Fused) -> Link:
        made.append(fused.link())
        return made[-1]

    yield opened
    for link in made:
        link.close()


def act(fused: Fused, what: str) -> None:
    """Of the account, and until the container has followed."""
    getattr(fused.rig.writer, what)(fused.instance_id)
    fused.rig.sandbox.settle()


@pytest.mark.parametrize(
    ("vendor", "on_expiry", "persistent", "left"),
    [("vast", "stop", True, {"disk"}), ("runpod", "stop", True, {"volume"}), ("runpod", "destroy", False, set()),
     ("vast", "destroy", True, set())],
)  # fmt: skip
def test_a_controller_that_does_nothing_after_the_create_is_not_needed(
    real: Callable[[str], Any], vendor: str, on_expiry: str, persistent: bool, left: set[str]
) -> None:
    fused = rent(real(vendor), in_s=5, on_expiry=on_expiry, persistent=persistent)
    assert fused.receipt(key="proven")["on_expiry"] == on_expiry
    assert 0 <= fused.late_s() < LATE_S
    fused.rig.sandbox.settle()
    assert fused.burning() == left
    container = fused.instance.container
    assert processes.instance_processes(container.mark, container.directory, ()) == set()


@BOTH
def test_a_machine_whose_ssh_never_comes_up_is_ended_all_the_same(real: Callable[[str], Any], vendor: str) -> None:
    r = real(vendor)
    r.fault("dead_ssh", "create")
    assert rent(r, in_s=4).late_s() < LATE_S


@pytest.mark.slow
@BOTH
def test_a_container_restarted_before_the_deadline_is_ended_in_time(real: Callable[[str], Any], vendor: str) -> None:
    fused = rent(real(vendor), in_s=9)
    boot = fused.receipt(key="proven")["boot"]
    act(fused, "restart")
    eventually(lambda: fused.log.count("armed") == 2 and fused.instance.phase == "running")
    assert fused.receipt()["boot"] == boot
    assert fused.late_s() < LATE_S


@pytest.mark.slow
def test_a_command_of_the_image_that_crashes_again_and_again_is_ended_in_time(real: Callable[[str], Any]) -> None:
    r = real("runpod")
    r.sandbox.world.faces["runpod"].settings.restart_delay_s = 0.2
    fused = rent(r, in_s=6, then="sleep 0.5; exit 3")
    assert fused.late_s() < LATE_S
    assert fused.log.count("armed") >= 2


@pytest.mark.slow
@BOTH
def test_a_machine_key_that_is_denied_is_told_it_keeps_trying_and_a_sentinel_ends_the_machine(
    real: Callable[[str], Any], vendor: str
) -> None:
    r = real(vendor)
    r.fault("key_denied", "create")
    fused = rent(r, in_s=4)
    fused.receipt(key="denied")
    eventually(lambda: fused.log.count("deadline: stop: 403") >= 2, within_s=20)
    assert not fused.is_over
    sentinel.run_pass(r.reader, r.writer, r.project.project_id, account="test", clock=SystemClock(), wait_s=20)
    assert fused.late_s() < 60, "the sentinel alone is in time"


@pytest.mark.slow
@BOTH
def test_the_deadline_moves_when_the_machine_itself_says_so(
    real: Callable[[str], Any], open_link: Callable[[Fused], Link], login_key: Path, vendor: str
) -> None:
    fused = rent(real(vendor), in_s=8, identity=login_key)
    link, machine = open_link(fused), fused.machine
    receipt = fuse.read_receipt(link, machine)
    assert receipt is not None
    assert (receipt.deadline_at, receipt.key, receipt.is_alive) == (fused.deadline_at, "proven", True)
    assert abs(receipt.armed_at.timestamp() - time.time()) < 10
    later = fused.deadline_at + timedelta(seconds=6)
    assert fuse.set_deadline(link, machine, later) == later
    moved = fuse.read_receipt(link, machine)
    assert moved is not None and moved.deadline_at == later and moved.boot == receipt.boot
    assert moved.to_record()["deadline_at"] == timestamp(later)
    assert 6 <= fused.late_s() < 6 + LATE_S


@pytest.mark.slow
def test_never_is_taken_back_by_a_deadline(
    real: Callable[[str], Any], open_link: Callable[[Fused], Link], login_key: Path
) -> None:
    fused = rent(real("vast"), in_s=6, identity=login_key)
    link, machine = open_link(fused), fused.machine
    assert fuse.set_deadline(link, machine, None) is None
    receipt = fuse.read_receipt(link, machine)
    assert receipt is not None and receipt.deadline_at is None and receipt.is_alive
    time.sleep(max(0.0, fused.deadline_at.timestamp() + 3 - time.time()))
    assert not fused.is_over
    fuse.set_deadline(link, machine, soon(2))
    fused.late_s()


@pytest.mark.slow
@BOTH
def test_a_stopped_machine_started_after_its_deadline_has_time_for_a_new_one(
    real: Callable[[str], Any], open_link: Callable[[Fused], Link], login_key: Path, vendor: str
) -> None:
    """Its own fuse stopped it a moment before, so the pause alone would not tell a start from a crash."""
    fused = rent(real(vendor), in_s=4, identity=login_key)
    before = fused.receipt(key="proven")["boot"]
    fused.late_s()
    eventually(lambda: fused.instance.phase == "stopped")
    fused.rig.sandbox.settle()
    act(fused, "start")
    eventually(lambda: fused.instance.phase == "running" and fused.receipt()["boot"] != before)
    link, machine = open_link(fused), fused.machine
    time.sleep(3)
    assert not fused.is_over
    new = soon(3600)
    assert fuse.set_deadline(link, machine, new) == new


@pytest.mark.slow
def test_the_key_is_in_no_file_and_no_command_line(real: Callable[[str], Any]) -> None:
    for vendor in ("vast", "runpod"):
        r = real(vendor)
        fused = rent(r, in_s=5)
        fused.instance.faults["key_denied"] = {}  # so that it lives on, and calls
        seen: list[str] = []
        until = fused.deadline_at.timestamp() + 4
        while time.time() < until:
            seen += fused.command_lines()
            time.sleep(0.01)
        container, key = fused.instance.container, fused.key
        files = [path for path in container.directory.rglob("*") if path.is_file() and not path.is_symlink()]
        holding = [path.name for path in files if key.encode() in path.read_bytes()]
        assert len(seen) > 50 and len(files) > 5
        assert holding == [] and not any(key in line for line in seen)
        assert key not in fused.log and ": 403" in fused.log


@pytest.mark.slow
@BOTH
def test_the_end_of_a_session_ends_the_machine_and_not_its_next_life(
    real: Callable[[str], Any], open_link: Callable[[Fused], Link], login_key: Path, vendor: str
) -> None:
    fused = rent(real(vendor), in_s=3600, identity=login_key)
    boot = fused.receipt(key="proven")["boot"]
    project = fused.rig.project.project_id
    session = {"id": "s1", "on_expiry": "fuse", "fuse": INTENT, "deadline_in_s": 1}
    open_link(fused).session.call("session", {"project": project, "session": session})
    eventually(lambda: fused.is_over)
    eventually(lambda: fused.instance.phase == "stopped")
    fused.rig.sandbox.settle()
    act(fused, "start")
    eventually(lambda: fused.instance.phase == "running" and fused.receipt()["boot"] != boot)
    # The session is on the disk as expired and not yet done: the first look at it sees that its end has come.
    session = open_link(fused).session
    eventually(lambda: session.call("session", {"project": project})["watcher"] is False)
    time.sleep(3)
    assert not fused.is_over


def test_nothing_is_set_where_no_fuse_lives(
    real: Callable[[str], Any], open_link: Callable[[Fused], Link], login_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "ACKNOWLEDGE_S", 0.0)
    fused = rent(real("vast"), in_s=3600, identity=login_key, change=lambda text: "true")
    link, machine = open_link(fused), fused.machine
    assert fuse.read_receipt(link, machine) is None
    with pytest.raises(RemoteError):
        fuse.set_deadline(link, machine, soon(60))
    fused.folder.mkdir(parents=True)
    with pytest.raises(FuseMissing):
        fuse.set_deadline(link, machine, soon(60))


def test_a_fuse_that_does_not_take_the_deadline_over_is_no_success(
    real: Callable[[str], Any], open_link: Callable[[Fused], Link], login_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "ACKNOWLEDGE_S", 0.0)
    fused = rent(real("vast"), in_s=3600, identity=login_key)
    link, machine = open_link(fused), fused.machine
    fused.receipt(key="proven")
    (fused.folder / "deadline").mkdir()
    with pytest.raises(RemoteError):
        fuse.set_deadline(link, machine, soon(7200))
    (fused.folder / "deadline").rmdir()
    real_call = link.session.call

    def without_writing(verb: str, args: dict[str, Any]) -> dict[str, Any]:
        """What a machine says whose loop reads its folder no more."""
        return real_call(verb, {"intent": args["intent"]})

    monkeypatch.setattr(link.session, "call", without_writing)
    with pytest.raises(FuseSilent):
        fuse.set_deadline(link, machine, soon(7200))


@pytest.mark.parametrize(
    "receipt",
    [
        {"intent": FOREIGN},
        {"intent": INTENT},
        {"intent": INTENT, "deadline": "never", "armed_at": 1, "key": "sure", "on_expiry": "stop", "boot": "a"},
        {"intent": INTENT, "deadline": "soon", "armed_at": 1, "key": "proven", "on_expiry": "stop", "boot": "a"},
        {"intent": INTENT, "deadline": -1, "armed_at": 1, "key": "proven", "on_expiry": "stop", "boot": "a"},
        {"intent": INTENT, "deadline": 1e400, "armed_at": True, "key": "proven", "on_expiry": "stop", "boot": 7},
        {"intent": INTENT, "deadline": "9" * 5000, "armed_at": 1, "key": "proven", "on_expiry": "stop", "boot": "a"},
        {"intent": INTENT, "deadline": "never", "armed_at": 1, "key": ["proven"], "on_expiry": "stop", "boot": "a"},
        None,
    ],
)
def test_a_receipt_that_is_not_whole_is_none(receipt: Any) -> None:
    from types import SimpleNamespace

    link = SimpleNamespace(session=SimpleNamespace(call=lambda verb, args: {"receipt": receipt, "alive": True}))
    machine = SimpleNamespace(intent=INTENT)
    assert fuse.read_receipt(link, machine) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "args",
    [
        {"intent": "../../../etc"},
        {"intent": "p0123456789abcdeg"},
        {"intent": None},
        {"intent": INTENT, "deadline": "never"},
        {"intent": INTENT, "deadline": {"epoch_s": "1"}},
        {"intent": INTENT, "deadline": {"epoch_s": 1 << 60, "in_s": 1}},
        {"intent": INTENT, "deadline": {"epoch_s": 1796000000}},
        {"intent": INTENT, "deadline": {"epoch_s": 1796000000, "in_s": -1}},
    ],
)
def test_the_verb_takes_no_paths_and_no_nonsense(
    real: Callable[[str], Any], open_link: Callable[[Fused], Link], login_key: Path, args: dict[str, Any]
) -> None:
    fused = rent(real("vast"), in_s=3600, identity=login_key)
    with pytest.raises(ProtocolError):
        open_link(fused).session.call("fuse", args)
    assert not (fused.folder / "deadline").exists()


def test_a_start_script_and_ssh_follow_the_fuse_on_runpod(real: Callable[[str], Any], login_key: Path) -> None:
    fused = rent(real("runpod"), in_s=3600, identity=login_key)
    port = fused.machine.endpoint.port  # type: ignore[union-attr]
    assert eventually(lambda: ssh(login_key, port, "echo in").stdout) == "in\n"
