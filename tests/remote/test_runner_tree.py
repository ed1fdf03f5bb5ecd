"""Nothing of a job outlives it, however it tries to leave."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from gpu_skills.remote import runner
from remote.runner_client import RunnerClient, eventually, is_alive

pytestmark = pytest.mark.subprocess

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{leave}
open({pid!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
DOUBLE_FORK = "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)"


def escapee(folder: Path, name: str, *, leave: str, cleared: bool = False) -> tuple[str, Path]:
    """A command that starts a process which ignores TERM and leaves the tree in some way; where it writes its pid."""
    pid = folder / name
    program = folder / f"{name}.py"
    program.write_text(STUBBORN.format(leave=leave, pid=str(pid)))
    return f"{'env -i ' if cleared else ''}$(command -v python3) {program} &", pid


def pid_in(path: Path) -> int:
    return int(eventually(lambda: path.exists() and path.read_text()))


@pytest.mark.slow
def test_within_12_s_of_a_cancel_no_process_is_left_whichever_way_it_went(
    machine: RunnerClient, tmp_path: Path
) -> None:
    ways = {
        "setsid": {"leave": "os.setsid()"},
        "daemon": {"leave": DOUBLE_FORK},
        "cleared": {"leave": "os.setsid()", "cleared": True},
        "cleared_daemon": {"leave": DOUBLE_FORK, "cleared": True},
    }
    commands, pids = zip(*[escapee(tmp_path, name, **how) for name, how in ways.items()], strict=True)
    machine.start(" ".join(commands) + " sleep 600")
    found = [pid_in(pid) for pid in pids]
    began = time.monotonic()
    machine.call("cancel", job="J-000001", why="user", wait_s=10)
    ended = machine.wait()
    assert time.monotonic() - began < 12
    assert ended["state"] == "cancelled"
    assert [pid for pid in found if is_alive(pid)] == []
    assert machine.carriers() == []


def test_after_a_normal_end_nothing_stays_behind(machine: RunnerClient, tmp_path: Path) -> None:
    ended = machine.run("setsid sleep 600 & (setsid setsid sleep 601 &); sleep 602 & echo done", limit_s=8)
    assert (ended["state"], ended["exit_code"]) == ("succeeded", 0)
    assert ended["duration_s"] < 5, "they end on TERM: nobody waits for KILL"
    assert machine.carriers() == []
    assert machine.log() == b"done\n"


def test_a_stopped_process_ends_without_waiting_for_kill(machine: RunnerClient) -> None:
    ended = machine.run("sleep 600 & kill -STOP $!; true", limit_s=8)
    assert ended["state"] == "succeeded"
    assert machine.carriers() == []


def test_what_setup_left_running_serves_run_and_ends_with_it(machine: RunnerClient) -> None:
    ended = machine.run("kill -0 $(cat pid) && echo served", setup="sleep 600 & echo $! > pid")
    assert ended["state"] == "succeeded"
    assert machine.log() == b"served\n"
    assert machine.carriers() == []


@pytest.mark.slow
def test_a_chain_of_forks_that_outruns_a_look_at_the_process_table_ends(machine: RunnerClient, tmp_path: Path) -> None:
    program, beat = tmp_path / "relay.py", tmp_path / "beat"
    program.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"beat = os.open({str(beat)!r}, os.O_RDWR | os.O_CREAT)\n"
        "for hop in range(200000):\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    os.setsid()\n"
        "    os.pwrite(beat, b'%d' % hop, 0)\n"
    )
    machine.start(f"$(command -v python3) {program}; sleep 600")
    eventually(lambda: beat.exists() and len(beat.read_text()) > 2)
    machine.call("cancel", job="J-000001", why="user", wait_s=10)
    assert machine.wait(limit_s=40)["state"] == "cancelled"
    last = beat.read_text()
    time.sleep(0.5)
    assert beat.read_text() == last, "it hops no more"
    assert int(last) < 199_999, "and it was ended, it did not come to its own end"


@pytest.mark.slow
def test_a_crowd_that_keeps_forking_ends(machine: RunnerClient, tmp_path: Path) -> None:
    program = tmp_path / "crowd.py"
    program.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for _ in range(40):\n"
        "    if not os.fork():\n"
        "        while True:\n"
        "            child = os.fork()\n"
        "            if not child:\n"
        "                time.sleep(0.05)\n"
        "                os._exit(0)\n"
        "            os.waitpid(child, 0)\n"
        "print('all here', flush=True)\n"
        "time.sleep(600)\n"
    )
    machine.start(f"$(command -v python3) {program}")
    eventually(lambda: machine.log() == b"all here\n")
    machine.call("cancel", job="J-000001", why="user", wait_s=10)
    assert machine.wait(limit_s=40)["state"] == "cancelled"
    assert machine.carriers() == []


def test_another_job_on_the_same_machine_is_not_touched(machine: RunnerClient) -> None:
    tree = machine.upload({})
    machine.start("sleep 600", tree=tree, job="J-000001")
    machine.start("sleep 600", tree=tree, job="J-000002")
    eventually(lambda: len(machine.carriers("J-000002")) >= 1 and machine.status()["phase"] == "run")
    machine.call("cancel", job="J-000001", wait_s=10)
    assert machine.status("J-000002")["state"] == "running"
    assert machine.carriers("J-000002") != []


def test_the_job_is_the_first_victim_when_memory_runs_out(machine: RunnerClient) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    machine.run("cat /proc/self/oom_score_adj")
    assert int(machine.log()) == min(1000, own + 100)


def test_where_there_is_no_proc_the_process_table_comes_from_ps(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("ps") is None:
        pytest.skip("no ps on this machine")
    monkeypatch.setattr(runner, "HAS_PROC", False)
    leader = subprocess.Popen(["bash", "-c", "sleep 600 & sleep 601; true"], start_new_session=True)
    try:
        found = runner.find_process(leader.pid)
        assert (found.ppid, found.session) == (os.getpid(), leader.pid)
        tree = runner.JobTree("nonce-that-nobody-has", {leader.pid: found.start})
        eventually(lambda: len(tree.members()) == 3)
        ending = runner.Ending(tree)
        eventually(ending.step, limit_s=8)
        assert leader.wait(timeout=5) in (-signal.SIGTERM, 0)  # 0: its `sleep` ended before it and it went on
    finally:
        leader.kill()
        leader.wait()
    assert runner.find_process(leader.pid) is None
