"""The sandbox as a process: `gpu sandbox …`, `gpu --sandbox …`, and how it ends by itself without leaving anything."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_skills.cli import main
from gpu_skills.cli.context import Context
from gpu_skills.sandbox import client, processes
from sandbox_fixture import Wire, eventually, ssh
from vast_calls import create, show

FAST = ["--delay", "loading=0s", "--delay", "provisioning=0s", "--limits", "count"]


@pytest.fixture
def project(tmp_path, allow_subprocess):
    directory = tmp_path / "project"
    directory.mkdir()
    yield directory
    client.stop(directory / ".pi" / "gpu-sandbox")


@pytest.fixture
def gpu(project, capfd):
    """gpu(words…) → (exit code, document or None, stderr); every document fits its schema."""
    from gpu_skills import schemas

    def call(*words: str):
        capfd.readouterr()
        code = main.run([*words, "--json"], obj=Context(cwd=project, environ=dict(os.environ)))
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        document = json.loads(out) if out else None
        if document is not None:
            names = [word for word in words if not word.startswith("-")]
            name = "error" if "error" in document else "_".join(names[:2] if names[0] == "sandbox" else names[:1])
            assert schemas.problems(document, f"cli/{name}") == []
        return code, document, err

    return call


class Origin:
    """What `Wire` needs of a sandbox that runs elsewhere."""

    def __init__(self, document: dict):
        self.url = document["url"]
        self._keys = document["keys"]

    def key(self, vendor: str) -> str:
        return self._keys[vendor]


def test_up_status_bill_clock_chaos_and_down(gpu, project):
    code, up, err = gpu("sandbox", "up", "--seed", "9", *FAST)
    assert code == 0
    assert up["is_new"] is True
    assert "gpu --sandbox" in err
    assert gpu("sandbox", "up")[1] == {**up, "is_new": False}
    api = Wire(Origin(up))
    instance_id = create(api, label="job-1")
    eventually(lambda: show(api, instance_id)["actual_status"] == "running")
    _, status, _ = gpu("sandbox", "status")
    assert [(i["id"], i["phase"], i["label"]) for i in status["instances"]] == [(str(instance_id), "running", "job-1")]
    assert status["mutating_calls"] == {"vast create": 1}
    assert status["defects"] == 0
    assert gpu("sandbox", "clock", "--advance", "2h")[1]["ahead_s"] in (7199, 7200, 7201)
    _, bill, _ = gpu("sandbox", "bill")
    account = next(a for a in bill["accounts"] if a["provider"] == "vast")
    assert {line["kind"] for line in account["lines"]} >= {"gpu", "disk"}
    assert account["spent_usd"] == pytest.approx(sum(line["amount_usd"] for line in account["lines"]), abs=1e-3)
    assert {entry["label"] for entry in bill["burning"]} == {"job-1"}
    _, chaos, _ = gpu("sandbox", "chaos", "--fault", "exited", "--instance", "job-1")
    assert (chaos["added"], chaos["faults"][0]["used"]) == (1, 1)
    assert show(api, instance_id)["actual_status"] == "exited"
    assert gpu("sandbox", "chaos", "--clear")[1]["faults"] == []
    code, down, _ = gpu("sandbox", "down")
    assert (code, down) == (0, {"format": 1, "was_running": True, "instances": 1, "burning": 1})
    assert gpu("sandbox", "down")[1]["was_running"] is False
    assert _left_in(project) == []


def _left_in(project: Path) -> list[int]:
    """Processes that have to do with this project's sandbox."""
    mark = f"{processes.MARK}={processes.mark_of(project / '.pi' / 'gpu-sandbox')}".encode()
    found = []
    for process in processes.snapshot():
        line, environment = processes._command_line(process.pid), processes._environment(process.pid)
        below = processes._working_directory(process.pid).startswith(f"{project}/.pi/")
        if not process.is_zombie and (mark in environment or below or str(project).encode() in line):
            found.append(process.pid)
    return found


def test_what_tells_of_keys_is_for_this_user_only(gpu, project):
    gpu("sandbox", "up", *FAST)
    directory = project / ".pi" / "gpu-sandbox"
    assert stat.S_IMODE((directory / "sandbox.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_admin_calls_need_the_token(gpu):
    _, up, _ = gpu("sandbox", "up", *FAST)
    for method, path in (("GET", "status"), ("POST", "down"), ("POST", "clock")):
        assert Wire(Origin(up))(method, f"/_sandbox/{path}", {})[0] == 401


@pytest.mark.parametrize("command", [["status"], ["bill"], ["clock"], ["chaos"]])
def test_without_a_sandbox_the_next_step_is_up(gpu, command):
    code, document, _ = gpu("sandbox", *command)
    assert (code, document["error"]["code"], document["error"]["next_step"]) == (2, "no_sandbox", "gpu sandbox up")


@pytest.mark.parametrize(
    "words",
    [
        ["chaos", "--fault", "explode"],
        ["chaos", "--script", "ok, boom", "--provider", "vast", "--call", "create"],
        ["chaos", "--script", "ok"],
        ["chaos", "--fault", "slow", "--args", "[1]"],
        ["chaos", "--file", "missing.json"],
        ["clock", "--advance", "tomorrow"],
        ["up", "--delay", "sleeping=3s"],
        ["up", "--idle", "-3s"],
    ],
)
def test_a_wrong_call_is_exit_2_with_one_line(gpu, words):
    gpu("sandbox", "up", *FAST)
    code, document, err = gpu("sandbox", *words)
    assert code == 2
    assert err.count("\n") == 1
    assert document["error"]["message"]


@pytest.mark.parametrize("content", ["{", '{"gpu_types": []}', "[]"])
def test_a_catalogue_that_is_none_stops_the_start_with_its_reason(gpu, project, content):
    (project / "catalogue.json").write_text(content)
    code, document, _ = gpu("sandbox", "up", "--catalogue", "catalogue.json")
    assert (code, document["error"]["code"]) == (1, "sandbox_failed")
    assert _left_in(project) == []


def test_in_the_sandbox_records_are_its_own_and_every_document_is_marked(gpu, project, monkeypatch):
    monkeypatch.setenv("VAST_API_KEY", "a-real-key-that-must-stay-home")
    assert gpu("--sandbox", "status")[1]["error"]["code"] == "no_sandbox"
    gpu("sandbox", "up", *FAST)
    code, document, err = gpu("--sandbox", "status")
    assert (code, document["sandbox"]) == (0, True)
    assert err.startswith("SANDBOX")
    code, document, _ = gpu("--sandbox", "offers", "--provider", "vast")
    assert (code, document["sandbox"]) == (0, True)
    assert {offer["provider"] for offer in document["offers"]} == {"vast"}
    assert not (project / ".pi" / "gpu").exists()
    code, document, _ = gpu("--sandbox", "job", "status", "J-000001")
    assert (code != 0, document["sandbox"]) == (True, True)


def start(project: Path, *options: str) -> tuple[subprocess.Popen, dict]:
    """The server as a child of this test, which must collect it."""
    directory = project / ".pi" / "gpu-sandbox"
    directory.mkdir(parents=True)
    package = str(Path(client.__file__).parents[2])
    words = [sys.executable, "-m", "gpu_skills.sandbox", str(directory), "--limits", "count", *options]
    words += ["--delays", '{"loading_s": 0, "provisioning_s": 0}']
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": package})
    info = directory / "sandbox.json"
    eventually(info.exists)
    return process, json.loads(info.read_text())


def with_machine(content: dict, login_key: Path) -> int:
    """Give it a machine with processes in it; its SSH port."""
    api = Wire(Origin(content))
    key = Path(f"{login_key}.pub").read_text()
    api("POST", "/api/v0/ssh/", {"ssh_key": key})
    instance_id = create(api, onstart="(setsid sleep 800 &); sleep 801")
    found = eventually(lambda: s if (s := show(api, instance_id))["actual_status"] == "running" else None)
    port = int(found["ports"]["22/tcp"][0]["HostPort"])
    assert ssh(login_key, port, "(setsid env -i /bin/sleep 802 </dev/null >/dev/null 2>&1 &); echo in").stdout == "in\n"
    return port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_and_everything_in_it(project, login_key, number):
    process, content = start(project)
    with_machine(content, login_key)
    process.send_signal(number)
    assert process.wait(20) == 0
    assert _left_in(project) == []
    assert not (project / ".pi" / "gpu-sandbox" / "sandbox.json").exists()


def test_it_ends_with_the_process_it_was_started_for(project, login_key):
    parent = subprocess.Popen(["sleep", "600"])
    process, content = start(project, "--parent", str(parent.pid))
    with_machine(content, login_key)
    parent.kill()
    parent.wait()
    assert process.wait(20) == 0
    assert _left_in(project) == []


def test_it_ends_by_itself_when_nobody_asks_anything(project):
    process, _ = start(project, "--idle-s", "0.7")
    assert process.wait(20) == 0


def test_after_a_kill_nothing_is_left(project, login_key):
    process, content = start(project)
    with_machine(content, login_key)
    process.kill()
    process.wait()
    eventually(lambda: _left_in(project) == [])
    assert not (project / ".pi" / "gpu-sandbox" / "sandbox.json").exists()


def test_a_start_right_after_a_kill_waits_for_the_cleaning(project, login_key):
    process, content = start(project)
    with_machine(content, login_key)
    (project / ".pi" / "gpu-sandbox" / "sandbox.json").unlink()
    process.kill()
    process.wait()
    running, is_new = client.start(project / ".pi" / "gpu-sandbox", ["--limits", "count"])
    assert is_new and running.pid != content["pid"]


def test_after_a_kill_of_all_of_it_the_next_start_sweeps_up_what_was_left(project, login_key):
    process, content = start(project)
    port = with_machine(content, login_key)
    package = str(project).encode()
    keepers = [p.pid for p in processes.snapshot() if p.parent == process.pid and p.session == p.pid]
    for pid in keepers:
        if b"gpu_skills.sandbox" in (line := processes._command_line(pid)) and package in line:
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
    assert len(_left_in(project)) >= 3
    running, is_new = client.start(project / ".pi" / "gpu-sandbox", ["--limits", "count"])
    assert is_new
    assert ssh(login_key, port, "true").returncode == 255
    client.stop(project / ".pi" / "gpu-sandbox")
    assert running.pid not in _left_in(project)
    eventually(lambda: _left_in(project) == [])


def test_it_ends_when_its_directory_is_removed(project, login_key):
    process, content = start(project)
    with_machine(content, login_key)
    shutil.rmtree(project / ".pi")
    assert process.wait(20) == 0
    assert _left_in(project) == []


def test_the_keys_of_real_accounts_are_not_even_in_its_environment(project, monkeypatch):
    for name in ("VAST_API_KEY", "RUNPOD_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "canary-of-a-credential")
    running, _ = client.start(project / ".pi" / "gpu-sandbox", [])
    environment = processes._environment(running.pid)
    assert b"PATH=" in environment and b"canary" not in environment


def test_two_starts_at_once_make_one_sandbox(project):
    from concurrent.futures import ThreadPoolExecutor

    directory = project / ".pi" / "gpu-sandbox"
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: client.start(directory, []), range(4)))
    assert len({running.pid for running, _ in results}) == 1
    assert [is_new for _, is_new in results].count(True) == 1


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"url": "http://192.0.2.1:1", "pid": 1, "token": "x", "keys": {}, "ssh_user": "a", "seed": 1}'],
)
def test_a_sandbox_file_that_lies_leads_nowhere(project, content):
    directory = project / ".pi" / "gpu-sandbox"
    directory.mkdir(parents=True)
    (directory / "sandbox.json").write_text(content)
    assert client.find(directory) is None
