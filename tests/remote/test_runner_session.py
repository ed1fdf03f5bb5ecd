from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_skills.remote import runner
from remote.runner_client import Refused, RunnerClient, eventually, is_alive
from remote.runner_machine import leave_nothing
from sshd import Sshd

starts_processes = pytest.mark.subprocess


def open_session(machine: RunnerClient, name: str = "s1", **limits: Any) -> dict[str, Any]:
    wanted = {"id": name, "deadline_in_s": None, "deadline_reason": None, "idle_timeout_s": None, "on_expiry": "record"}
    return machine.call("session", session={**wanted, **limits})


def expired(machine: RunnerClient) -> Callable[[], dict[str, Any] | None]:
    return lambda: (s := machine.call("session"))["session"]["expired_at"] and s["events"] and s


@pytest.fixture
def quiet(root: Path) -> Iterator[RunnerClient]:
    """A machine of its own, as far as processes go: here others have SSH sessions, which would count as busy."""
    alone = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("no process namespaces on this machine")
    client = RunnerClient(root, prefix=alone)
    yield client
    client.close()


@starts_processes
def test_a_session_is_opened_read_and_replaced(machine: RunnerClient) -> None:
    assert machine.call("session") == {"session": None, "watcher": False, "events": []}
    opened = open_session(machine, deadline_in_s=600, deadline_reason="session_budget", idle_timeout_s=300)
    assert opened["watcher"] is True
    assert opened["session"] == machine.call("session")["session"]
    assert (opened["session"]["id"], opened["session"]["deadline_reason"]) == ("s1", "session_budget")
    assert (opened["session"]["idle_timeout_s"], opened["session"]["expired_at"]) == (300, None)
    again = open_session(machine, deadline_in_s=6000, deadline_reason="max_lifetime")["session"]
    assert again["started_at"] == opened["session"]["started_at"]
    assert again["deadline_at"] > opened["session"]["deadline_at"]
    assert open_session(machine, "s2")["session"]["deadline_at"] is None


@starts_processes
def test_of_two_set_ups_at_once_the_first_ones_session_and_deadline_stand(machine: RunnerClient) -> None:
    first = machine.call("session", session={"id": "s_1", "deadline_in_s": 500, "only_if_none": True})
    second = machine.call("session", session={"id": "s_2", "deadline_in_s": 900, "only_if_none": True})
    assert second["session"]["id"] == "s_1"
    assert second["session"]["deadline_at"] == first["session"]["deadline_at"]


@starts_processes
def test_a_job_is_cut_at_the_deadline_and_the_session_expires(machine: RunnerClient) -> None:
    open_session(machine, deadline_in_s=2, deadline_reason="max_lifetime")
    machine.start("echo x > $GPU_OUTPUT_DIR/x; sleep 60")
    ended = machine.wait(limit_s=10)
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("timeout", "max_lifetime", 124)
    assert ended["outputs"] == {"files": 1, "bytes": 2}
    seen = eventually(expired(machine))
    assert (seen["session"]["expired_why"], seen["events"][-1]["event"]) == ("max_lifetime", "session_expired")
    with pytest.raises(Refused) as refused:
        machine.start("true", job="J-000002")
    assert refused.value.code == "session_expired"
    assert open_session(machine, deadline_in_s=600)["session"]["expired_why"] == "max_lifetime", "it does not come back"
    open_session(machine, "s2", deadline_in_s=600)
    assert machine.run("true", job="J-000002")["state"] == "succeeded"


@starts_processes
def test_the_budget_is_named_when_it_is_what_cut_the_job(machine: RunnerClient) -> None:
    machine.start("sleep 60")
    open_session(machine, deadline_in_s=0.5, deadline_reason="session_budget")
    assert machine.wait(limit_s=10)["reason"] == "session_budget"


@starts_processes
def test_setting_the_wall_clock_back_gives_no_more_time(machine: RunnerClient) -> None:
    open_session(machine, deadline_in_s=600)
    path = machine.folder / "session.json"
    record = json.loads(path.read_text())
    # What it looks like when the wall clock was set back by a day meanwhile.
    path.write_text(json.dumps({**record, "deadline_epoch_s": time.time() + 86400, "deadline_boot_s": 0.0}))
    assert eventually(expired(machine))["session"]["expired_why"] == "max_lifetime"


@starts_processes
def test_an_idle_machine_expires_and_one_with_a_job_does_not(quiet: RunnerClient) -> None:
    open_session(quiet, idle_timeout_s=1.5)
    quiet.start("sleep 4")
    time.sleep(3)
    assert quiet.call("session")["session"]["expired_at"] is None
    quiet.wait()
    assert eventually(expired(quiet))["session"]["expired_why"] == "idle"


@starts_processes
def test_a_held_machine_does_not_expire_for_idleness_before_the_hold_is_over_and_does_after(
    quiet: RunnerClient,
) -> None:
    open_session(quiet, idle_timeout_s=1)
    held = open_session(quiet, idle_timeout_s=1, held_s=4)["session"]
    assert held["held_until"] and held["idle_timeout_s"] == 1
    assert open_session(quiet, idle_timeout_s=1)["session"]["held_until"] == held["held_until"], "left out: as it is"
    began = time.time()
    assert eventually(expired(quiet))["session"]["expired_why"] == "idle"
    assert time.time() - began >= 3


@starts_processes
def test_the_end_of_a_hold_and_another_session_know_no_hold(quiet: RunnerClient) -> None:
    open_session(quiet, idle_timeout_s=1, held_s=600)
    assert open_session(quiet, "s2", idle_timeout_s=600)["session"]["held_until"] is None
    open_session(quiet, "s2", idle_timeout_s=1, held_s=600)
    assert open_session(quiet, "s2", idle_timeout_s=1, held_s=0)["session"]["held_until"] is None
    assert eventually(expired(quiet))["session"]["expired_why"] == "idle"


@starts_processes
def test_a_second_job_just_before_the_idle_end_keeps_the_machine(quiet: RunnerClient) -> None:
    tree = quiet.upload({})
    open_session(quiet, idle_timeout_s=3)
    quiet.run("true", tree=tree)
    time.sleep(2)
    quiet.start("sleep 3; echo done", job="J-000002", tree=tree)
    ended = quiet.wait("J-000002")
    assert ended["state"] == "succeeded"
    assert quiet.call("session")["session"]["expired_at"] is None


@starts_processes
def test_work_without_a_job_counts_as_busy(quiet: RunnerClient) -> None:
    open_session(quiet, idle_timeout_s=1.5)
    cache = quiet.folder / "workspace/cache/hub"
    cache.mkdir(parents=True)
    with (cache / "model.incomplete").open("wb", buffering=0) as download:
        for _ in range(8):  # a model on its way
            download.write(b"x" * 1000)
            time.sleep(0.4)
    assert quiet.call("session")["session"]["expired_at"] is None
    for number in range(8):  # an upload on its way
        quiet.upload({"f": b"%d" % number})
        time.sleep(0.4)
    assert quiet.call("session")["session"]["expired_at"] is None


@starts_processes
def test_looking_at_the_status_does_not_keep_the_machine(quiet: RunnerClient) -> None:
    open_session(quiet, idle_timeout_s=1.5)
    eventually(lambda: quiet.status()["state"] == "unknown" and expired(quiet)(), limit_s=12)


@starts_processes
def test_a_watcher_that_vanished_is_started_by_the_next_request_and_goes_on_counting(root: Path) -> None:
    with RunnerClient(root) as machine:
        open_session(machine, deadline_in_s=600, idle_timeout_s=500)
        note = eventually(lambda: runner.read_json(str(machine.folder / "watch.json")))
        os.kill(note["pid"], signal.SIGKILL)
        eventually(lambda: not is_alive(note["pid"]))
    with RunnerClient(root) as machine:
        machine.call("status", jobs=[])
        again = eventually(
            lambda: (n := runner.read_json(str(machine.folder / "watch.json")))["pid"] != note["pid"] and n
        )
        assert again["last_busy_boot_s"] <= note["last_busy_boot_s"]
        assert machine.call("session")["watcher"] is True


@starts_processes
def test_an_end_that_was_marked_but_not_acted_on_is_finished_by_the_next_watcher(root: Path) -> None:
    with RunnerClient(root) as machine:
        open_session(machine)
        path = machine.folder / "session.json"
        record = {**json.loads(path.read_text()), "expired_at": "2026-01-01T00:00:00Z", "expired_why": "idle"}
        path.write_text(json.dumps({**record, "action_done": False}))
    with RunnerClient(root) as machine:
        machine.call("status", jobs=[])
        events = eventually(lambda: machine.call("session")["events"])
        assert (events[-1]["event"], events[-1]["why"]) == ("session_expired", "idle")
        eventually(lambda: not machine.call("session")["watcher"])
        assert len(machine.call("session")["events"]) == 1


@starts_processes
def test_ending_a_session_by_hand_runs_no_action(machine: RunnerClient) -> None:
    open_session(machine, deadline_in_s=600)
    ended = machine.call("session", session=None, end=True)
    assert (ended["session"]["expired_why"], ended["events"]) == ("ended", [])
    eventually(lambda: not machine.call("session")["watcher"])


@starts_processes
def test_the_watcher_settles_a_job_whose_supervisor_vanished(machine: RunnerClient) -> None:
    open_session(machine, deadline_in_s=600)
    machine.start("sleep 600")
    eventually(lambda: machine.status()["phase"] == "run")
    os.kill(machine.supervisor_pid(), signal.SIGKILL)
    record = eventually(lambda: runner.read_json(str(machine.folder / "jobs/J-000001/exit.json")))  # nobody asks
    assert record["state"] == "lost"


@starts_processes
def test_only_one_watcher_watches(root: Path) -> None:
    clients = [RunnerClient(root) for _ in range(4)]
    for client in clients:
        client.frame(
            {"verb": "session", "args": {"project": client.project, "session": {"id": "s", "deadline_in_s": 600}}}
        )
        client.process.stdin.flush()
    for client in clients:
        assert client.answer()[0]["watcher"] is True
        client.close()
    watchers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"watch\0" + os.fsencode(root) in read(path)]
    assert len(eventually(lambda: len(watchers) == 1 and watchers)) == 1


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@starts_processes
def test_ssh_traffic_counts_sessions_of_others_and_not_those_that_carry_us(sshd: Sshd, tmp_path: Path) -> None:
    def traffic() -> dict[tuple[int, str], int]:
        """Of this test's server only: others may have sessions on this machine as well."""
        processes = runner.all_processes()
        return {
            key: moved for key, moved in runner.ssh_traffic().items() if descends(processes, key[0], sshd.process.pid)
        }

    ssh = ["ssh", "-F", str(sshd.client_config), sshd.host]
    other = subprocess.Popen([*ssh, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    ours = None
    try:
        other.stdin.write(b"hello\n")
        other.stdin.flush()
        assert other.stdout.readline() == b"hello\n"
        foreign = traffic()
        assert foreign, "the other session is seen"
        other.stdin.write(b"more\n")
        other.stdin.flush()
        other.stdout.readline()
        later = traffic()
        assert any(later[key] > moved for key, moved in foreign.items())
        command = f"exec python3 -I {runner.__file__} serve --root {tmp_path / 'root'}"
        ours = subprocess.Popen([*ssh, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert ours.stdout.readline().startswith(b"GPU-SKILLS-RUNNER ")
        assert set(traffic()) == set(foreign)
    finally:
        for process in (other, ours):
            if process is not None:
                process.stdin.close()
                process.stdout.close()
                process.wait(timeout=20)
        leave_nothing(tmp_path / "root")


def descends(processes: dict[int, runner.Process], pid: int, ancestor: int) -> bool:
    while pid in processes and pid != ancestor:
        pid = processes[pid].ppid
    return pid == ancestor


def test_what_cannot_be_read_counts_as_busy_and_the_first_look_only_remembers() -> None:
    answers: list[Any] = [1, 1, 2, PermissionError("hidden"), 2]

    def measure() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    signal_ = runner.Changed(measure)
    assert [signal_.look(runner.boot_clock(), force=True) for _ in range(5)] == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("record", "left_s"),
    [
        ({}, float("inf")),
        ({"deadline_epoch_s": None}, float("inf")),
        ({"deadline_epoch_s": 1000.0, "boot_id": "other", "deadline_boot_s": 0.0}, 100.0),
        ({"deadline_epoch_s": 1000.0, "boot_id": "this", "deadline_boot_s": 57.0}, 7.0),
        ({"deadline_epoch_s": 910.0, "boot_id": "this", "deadline_boot_s": 150.0}, 10.0),
    ],
)
def test_the_deadline_is_the_earlier_of_both_clocks(
    monkeypatch: pytest.MonkeyPatch, record: dict, left_s: float
) -> None:
    monkeypatch.setattr(runner.time, "time", lambda: 900.0)
    monkeypatch.setattr(runner, "boot_clock", lambda: 50.0)
    monkeypatch.setattr(runner, "boot_id", lambda: "this")
    assert runner.deadline_in_s(record) == left_s
