from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from remote.runner_client import Refused, RunnerClient, eventually, is_alive, manifest_of

pytestmark = pytest.mark.subprocess


def test_a_job_runs_in_its_own_copy_with_the_modes_that_were_sent(machine: RunnerClient) -> None:
    files = {"run.sh": b"#!/bin/sh\necho ran > made-here; ls\n", "data/in.txt": b"input", "big": os.urandom(3 << 20)}
    tree = machine.upload(files, {"run.sh": 0o755, "data/in.txt": 0o640})
    ended = machine.run("stat -c %a run.sh data/in.txt; ./run.sh; echo changed > big", tree=tree)
    assert ended["state"] == "succeeded"
    assert machine.log() == b"755\n640\nbig\ndata\nmade-here\nrun.sh\n"
    again = machine.run("stat -c %s big; ls", job="J-000002", tree=tree)
    assert again["state"] == "succeeded"
    assert machine.log("J-000002") == b"3145728\nbig\ndata\nrun.sh\n"
    for blob in (machine.folder / "store").glob("*/*"):
        assert (blob.stat().st_mode & 0o777, blob.stat().st_nlink) == (0o600, 1)


def test_names_links_and_empty_folders_arrive_as_they_were(machine: RunnerClient) -> None:
    odd = "a'b\"$(x);\n\\ é"
    lines = [
        *manifest_of({odd: b"odd", "t": b"target"}).splitlines(keepends=True),
        b'{"dir":true,"path":"void/deep"}\n',
        b'{"link":"t","path":"l"}\n',
        b'{"mode":420,"path":"\\ufffd","path_b64":"/w==","sha256":"%s","size":3}\n' % machine_digest(b"odd"),
    ]
    manifest = b"".join(sorted(lines, key=sort_key))
    tree = machine_digest(manifest).decode()
    machine.ask("offer", [({}, manifest)], tree=tree)
    for content in (b"odd", b"target"):
        machine.ask("put", [({"sha256": machine_digest(content).decode(), "size": len(content), "offset": 0}, content)])
    machine.call("seal", tree=tree)
    assert machine.run("readlink l; cat l", tree=tree)["state"] == "succeeded"
    assert machine.log() == b"t\ntarget"
    src = os.fsencode(machine.folder / "jobs/J-000001/src")
    assert sorted(os.listdir(src)) == sorted([odd.encode(), b"t", b"void", b"l", b"\xff"])
    assert os.listdir(src + b"/void/deep") == []


def machine_digest(data: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(data).hexdigest().encode()


def sort_key(line: bytes) -> bytes:
    import base64

    entry = json.loads(line)
    return base64.b64decode(entry["path_b64"]) if "path_b64" in entry else entry["path"].encode()


def test_the_environment_has_what_was_sent_and_no_credential_of_the_machine(root: Path) -> None:
    traces = {
        "VAST_API_KEY": "v",
        "RUNPOD_API_KEY": "r",
        "CONTAINER_API_KEY": "c",
        "SSH_CONNECTION": "1 2",
        "KEEP_ME": "kept",
    }
    with RunnerClient(root, env=traces) as machine:
        machine.run("env -0 > $GPU_OUTPUT_DIR/env", env={"GREETING": "two\nlines", "KEEP_ME_TOO": "ü"})
        found = (machine.folder / "jobs/J-000001/outputs/env").read_bytes().split(b"\0")
    environment = dict(item.split(b"=", 1) for item in found if item)
    assert environment[b"GREETING"] == b"two\nlines"
    assert environment[b"KEEP_ME_TOO"] == "ü".encode()
    assert environment[b"KEEP_ME"] == b"kept"
    assert environment[b"GPU_JOB_NONCE"] == machine.nonce().encode()
    assert environment[b"GPU_JOB_DIR"] == environment[b"PWD"] == os.fsencode(root / "projects/p-test/jobs/J-000001/src")
    assert environment[b"GPU_WORKSPACE"] == os.fsencode(root / "projects/p-test/workspace")
    assert not {name for name in environment if name.startswith(b"SSH_") or name.endswith(b"API_KEY")}


def test_a_secret_value_is_neither_on_disk_nor_in_a_command_line_nor_in_the_log(
    machine: RunnerClient, root: Path
) -> None:
    secret = "s3cr3t-Value-XYZ"
    machine.start("echo token is $TOKEN; sleep 30", env={"TOKEN": secret}, secret=["TOKEN"])
    eventually(lambda: machine.log() == b"token is ***\n")
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                assert secret.encode() not in (folder / "cmdline").read_bytes()
            except OSError:
                pass
    supervisor = Path(f"/proc/{machine.supervisor_pid()}")
    assert secret.encode() not in (supervisor / "environ").read_bytes()
    machine.call("cancel", job="J-000001", wait_s=10)
    for path in root.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("exit 3", 3, "the command ended with exit code 3"),
        ("kill -TERM $$", 143, "the command was ended by SIGTERM"),
        ("kill -KILL $$", 137, "the command was killed (SIGKILL): often the machine ran out of memory"),
        ("no-such-program", 127, "the command ended with exit code 127"),
    ],
)
def test_a_failed_command_gives_its_own_exit_code(machine: RunnerClient, command: str, code: int, message: str) -> None:
    ended = machine.run(command)
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("failed", "exit_code", code)
    assert ended["message"] == message


def test_setup_comes_first_and_when_it_fails_run_does_not_happen(machine: RunnerClient) -> None:
    ended = machine.run("echo never", setup="echo installing; exit 5")
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("failed", "setup_failed", 5)
    assert machine.log() == b"installing\n"
    machine.run("cat made", job="J-000002", setup="echo yes > made; echo installed >&2")
    assert machine.log("J-000002") == b"installed\nyes\n"


def test_stdin_of_a_job_is_empty_and_closed(machine: RunnerClient) -> None:
    assert machine.run("wc -c; read x || echo nothing", setup="cat", limit_s=10)["state"] == "succeeded"
    assert machine.log() == b"0\nnothing\n"


def test_a_job_may_handle_interrupts_and_hangups_again(machine: RunnerClient) -> None:
    machine.run("grep -E '^Sig(Ign|Blk)' /proc/self/status; trap 'echo caught' HUP; kill -HUP $$; umask")
    assert machine.log().splitlines()[:3] == [b"SigBlk:\t0000000000000000", b"SigIgn:\t0000000000000000", b"caught"]


def test_the_answer_to_start_comes_at_once_and_closing_the_connection_leaves_the_job_alone(root: Path) -> None:
    machine = RunnerClient(root)
    tree = machine.upload({})
    began = time.monotonic()
    started = machine.start("sleep 1.5; echo done", tree=tree)
    assert time.monotonic() - began < 3
    assert started["state"] == "running"
    machine.process.kill()  # as when SSH is cut
    machine.process.wait()
    machine.process.stdin.close()
    machine.process.stdout.close()
    with RunnerClient(root) as machine:
        pid = machine.supervisor_pid()
        assert os.getsid(pid) == pid
        descriptors = {os.readlink(f"/proc/{pid}/fd/{n}") for n in (0, 1)}
        assert descriptors == {"/dev/null"}
        assert machine.wait()["state"] == "succeeded"
        assert machine.log() == b"done\n"


def test_starting_again_with_the_same_nonce_starts_nothing(machine: RunnerClient) -> None:
    tree = machine.upload({})
    machine.start("echo once >> $GPU_WORKSPACE/count; sleep 0.5", tree=tree, nonce="same")
    assert machine.start("echo once >> $GPU_WORKSPACE/count", tree=tree, nonce="same")["state"] == "running"
    with pytest.raises(Refused) as refused:
        machine.start("echo other >> $GPU_WORKSPACE/count", tree=tree, nonce="another")
    assert refused.value.code == "job_exists"
    machine.wait()
    assert machine.start("true", tree=tree, nonce="same")["state"] == "succeeded"
    assert (machine.folder / "workspace/count").read_text() == "once\n"


def test_a_connection_that_died_before_the_supervisor_came_can_be_made_good(machine: RunnerClient) -> None:
    tree = machine.upload({})
    machine.run("true", tree=tree)
    job = machine.folder / "jobs/J-000001"
    for name in ("state.json", "exit.json", "manifest.jsonl", "lock", "supervisor.err"):
        (job / name).unlink()
    assert machine.status()["state"] == "running"
    assert machine.start("echo second try", tree=tree)["state"] in ("running", "succeeded")
    assert machine.wait()["state"] == "succeeded"
    assert machine.log() == b"second try\n"


def test_many_connections_start_jobs_of_one_project_at_once(root: Path) -> None:
    with RunnerClient(root) as first:
        tree = first.upload({"a": b"x"})
        clients = [RunnerClient(root) for _ in range(12)]
        for number, client in enumerate(clients, 1):
            job = {"id": f"J-{number:06d}", "nonce": f"n{number}", "tree": tree, "run": f"echo {number}"}
            client.frame({"verb": "start", "args": {"project": client.project, "job": job}})
            client.process.stdin.flush()
        for client in clients:
            assert client.answer()[0]["state"] in ("running", "succeeded")
            client.close()
        names = [f"J-{number:06d}" for number in range(1, 13)]
        for number, name in enumerate(names, 1):
            assert first.wait(name)["state"] == "succeeded"
            assert first.log(name) == f"{number}\n".encode()
        assert [status["job"] for status in first.call("status", jobs=names)["jobs"]] == names


def test_the_machine_tells_of_every_job_it_has_whoever_asks(machine: RunnerClient) -> None:
    assert machine.call("jobs") == {"jobs": [], "left_out": 0}
    machine.run("echo x > $GPU_OUTPUT_DIR/x", job="J-000007")
    machine.start("sleep 60", job="J-000003")
    told = machine.call("jobs")["jobs"]
    assert [(status["job"], status["state"]) for status in told] == [("J-000003", "running"), ("J-000007", "succeeded")]
    assert told[1]["outputs"] == {"files": 1, "bytes": 2}
    assert [status["job"] for status in machine.call("jobs", after="J-000003")["jobs"]] == ["J-000007"]
    machine.call("cancel", job="J-000003", wait_s=5)


def test_jobs_that_do_not_fit_into_one_answer_are_counted_and_told_by_the_next(machine: RunnerClient) -> None:
    machine.run("true", job="J-000001")
    folder = machine.folder / "jobs"
    for number in range(2, 301):
        shutil.copytree(folder / "J-000001", folder / f"J-{number:06d}")
    first = machine.call("jobs")
    assert 0 < first["left_out"] < 300
    found, left = first["jobs"], first["left_out"]
    while left:
        more = machine.call("jobs", after=found[-1]["job"])
        found, left = found + more["jobs"], more["left_out"]
    assert [status["job"] for status in found] == [f"J-{number:06d}" for number in range(1, 301)]


def test_a_tree_that_is_not_there_is_refused_before_anything_is_made(machine: RunnerClient) -> None:
    with pytest.raises(Refused) as refused:
        machine.start("true", tree="d" * 64)
    assert refused.value.code == "tree_unknown"
    assert machine.status()["state"] == "unknown"


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_inputs_that_are_not_what_was_sent_stop_the_job_before_it_ran(machine: RunnerClient, how: str) -> None:
    tree = machine.upload({"weights": b"0123456789"})
    blob = next((machine.folder / "store").glob("*/*"))
    if how == "changed":
        blob.write_bytes(b"0123456780")
    else:
        blob.unlink()
    ended = machine.run("echo ran", tree=tree)
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("failed", "inputs_corrupt", 1)
    assert "weights" in ended["message"]
    assert machine.log() == b""
    assert machine.call("have", tree=tree) == {"known": False}, "the bad content has to be sent again"


def test_a_job_past_its_timeout_ends_with_124_and_names_the_limit(machine: RunnerClient) -> None:
    ended = machine.run("echo partial > $GPU_OUTPUT_DIR/p; sleep 60", timeout_s=0.7)
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("timeout", "timeout", 124)
    assert "0.7 s" in ended["message"]
    assert ended["outputs"] == {"files": 1, "bytes": 8}
    assert 0.7 <= ended["duration_s"] < 5


def test_cancel_ends_the_job_with_130_and_the_given_reason(machine: RunnerClient) -> None:
    machine.start("echo working; sleep 60")
    eventually(lambda: machine.log() == b"working\n")
    ended = machine.call("cancel", job="J-000001", why="user", wait_s=10)
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("cancelled", "user", 130)
    assert machine.call("cancel", job="J-000001", why="user", wait_s=10)["state"] == "cancelled"


def test_a_terminated_supervisor_ends_its_job_and_says_so(machine: RunnerClient) -> None:
    machine.start("sleep 60")
    os.kill(machine.supervisor_pid(), signal.SIGHUP)
    time.sleep(0.3)
    assert machine.status()["state"] == "running", "a hangup is no reason to end"
    os.kill(machine.supervisor_pid(), signal.SIGTERM)
    ended = machine.wait()
    assert (ended["state"], ended["reason"]) == ("cancelled", "supervisor_terminated")
    assert machine.carriers() == []


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("model.safetensors", True),
        ("*.safetensors", True),
        ("./model.safetensors", True),
        ("*.bin", False),
        ("**/*.bin", True),
        ("checkpoints/**", True),
        ("checkpoints", True),
        ("checkpoints/*/last.bin", True),
        ("checkpoints/*.bin", False),
        ("m?del.safetensors", True),
        ("[lm]odel.*", True),
        ("[!m]odel.*", False),
        ("empty.txt", False),
        ("*.txt", False),
        ("absent", False),
        ("[", False),
    ],
)
def test_expected_outputs(machine: RunnerClient, pattern: str, found: bool) -> None:
    ended = machine.run(
        "cd $GPU_OUTPUT_DIR; echo w > model.safetensors; touch empty.txt;"
        "mkdir -p checkpoints/3; echo b > checkpoints/3/last.bin",
        expect=[pattern],
    )
    if found:
        assert (ended["state"], ended["exit_code"]) == ("succeeded", 0)
    else:
        assert (ended["state"], ended["reason"], ended["exit_code"]) == ("failed", "outputs_missing", 1)
        assert pattern in ended["message"]
        assert ("(0 bytes)" in ended["message"]) == pattern.endswith(".txt")


def test_a_job_that_failed_keeps_its_own_exit_code_whatever_was_expected(machine: RunnerClient) -> None:
    ended = machine.run("exit 9", expect=["absent"])
    assert (ended["reason"], ended["exit_code"]) == ("exit_code", 9)


def kill_supervisor(machine: RunnerClient, job: str = "J-000001") -> None:
    pid = machine.supervisor_pid(job)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_alive(pid))


def test_a_job_whose_supervisor_vanished_is_lost_and_what_is_left_of_it_ends(machine: RunnerClient) -> None:
    machine.start("echo saved > $GPU_OUTPUT_DIR/kept; sleep 300 & env -i sleep 301 & sleep 302")
    eventually(lambda: (machine.folder / "jobs/J-000001/outputs/kept").exists() and len(machine.carriers()) >= 3)
    session = os.getsid(machine.carriers()[0])
    kill_supervisor(machine)
    ended = machine.wait()
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("lost", "runner_vanished", None)
    assert ended["outputs"] == {"files": 1, "bytes": 6}
    assert machine.carriers() == []
    assert session_members(session) == [], "also the one that cleared its environment"
    assert machine.manifest()[0]["final"] is True


def session_members(session: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if os.getsid(int(folder.name)) == session and is_alive(int(folder.name)):
                    found.append(int(folder.name))
            except ProcessLookupError:
                pass
    return found


def pretend(machine: RunnerClient, **changes: object) -> None:
    path = machine.folder / "jobs/J-000001/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_after_a_reboot_the_job_is_lost_and_foreign_processes_are_left_alone(machine: RunnerClient) -> None:
    machine.start("sleep 300")
    eventually(lambda: machine.status()["phase"] == "run")
    kill_supervisor(machine)
    left = machine.carriers()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    bystander = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        # After a reboot the old numbers belong to somebody else.
        pretend(machine, boot_id="another", pid=bystander.pid, sessions={str(bystander.pid): "1"})
        ended = machine.wait()
        assert (ended["state"], ended["reason"]) == ("lost", "reboot")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_pid_that_was_given_to_another_process_is_not_taken_for_the_supervisor(machine: RunnerClient) -> None:
    machine.start("sleep 300")
    eventually(lambda: machine.status()["phase"] == "run")
    kill_supervisor(machine)
    bystander = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        pretend(machine, pid=bystander.pid)
        assert machine.wait()["reason"] == "runner_vanished"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_running_job_is_not_forgotten_and_an_ended_one_is_gone_whatever_it_left(machine: RunnerClient) -> None:
    machine.start(
        "mkdir -p $GPU_OUTPUT_DIR/locked/$(printf 'd/%.0s' {1..300}); chmod 0 $GPU_OUTPUT_DIR/locked; sleep 60"
    )
    eventually(lambda: machine.status()["phase"] == "run")
    with pytest.raises(Refused) as refused:
        machine.call("forget", job="J-000001")
    assert refused.value.code == "busy"
    machine.call("cancel", job="J-000001", wait_s=10)
    assert machine.call("forget", job="J-000001") == {}
    assert machine.call("forget", job="J-000001") == {}
    assert list((machine.folder / "jobs").iterdir()) == []
    assert machine.status() == {**dict.fromkeys(machine.status()), "job": "J-000001", "state": "unknown"}


def test_verbs_about_a_job_that_was_never_here_say_so(machine: RunnerClient) -> None:
    for verb in ("log", "events", "manifest", "cancel"):
        with pytest.raises(Refused) as refused:
            machine.call(verb, job="J-999999")
        assert refused.value.code == "job_unknown"


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{{{",
        b"null",
        b"[1]",
        b'{"state":"dancing","exit_code":0}',
        b'{"state":["failed"],"exit_code":0}',
        b'{"state":"failed","exit_code":"x"}',
        b'{"state":"succeeded","exit_code":0,"duration_s":-5}',
        b'{"state":"succeeded","exit_code":0,"duration_s":"5"}',
    ],
)
def test_an_exit_record_that_was_damaged_is_lost_and_no_other_job_suffers(machine: RunnerClient, record: bytes) -> None:
    assert machine.run("exit 3")["exit_code"] == 3
    assert machine.run("exit 4", job="J-000002")["exit_code"] == 4
    (machine.folder / "jobs/J-000001/exit.json").write_bytes(record)
    first, second = machine.call("status", jobs=["J-000001", "J-000002"])["jobs"]
    assert (first["state"], first["reason"], first["exit_code"]) == ("lost", "runner_error", None)
    assert (second["state"], second["exit_code"]) == ("failed", 4)
