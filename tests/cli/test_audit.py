"""In Audit nothing is written: not in the project, not in the user's own folders, not on the machine."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from gpu_skills.state import job_index, prefix_cache, spend
from providers.wires import Script, answer

pytestmark = pytest.mark.subprocess

READING = [
    ["status"],
    ["doctor"],
    ["doctor", "--config"],
    ["offers"],
    ["spend"],
    ["machine", "ls"],
    ["job", "ls"],
    ["job", "status"],
    ["job", "logs"],
    ["job", "logs", "--tail", "1"],
    ["ledger", "verify"],
    ["ledger", "tail"],
    ["registry", "validate"],
    ["policy", "show"],
]


def contents(*roots: Path) -> dict[str, tuple[int, str]]:
    found = {}
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if name != "watch.json":  # the watcher's own notes: it runs, whoever looks
                    found[str(path)] = (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
    return found


@pytest.fixture
def audit(gpu, monkeypatch):
    monkeypatch.setenv("GPU_MODE", "audit")
    return gpu


def test_no_reading_command_writes_anything_anywhere(tmp_path, gpu, home, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    assert gpu("init", "--jobs", cwd=project).exit_code == 0
    assert gpu("job", "run", "--", "echo hi", cwd=project).exit_code == 0
    assert gpu("job", "run", "--detach", "--", "echo x > $GPU_OUTPUT_DIR/a", cwd=project).exit_code == 0
    machine = home / ".local/share/gpu/machine"
    deadline = time.monotonic() + 20
    while not list(machine.glob("projects/*/jobs/J-000002/exit.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    monkeypatch.setenv("GPU_MODE", "audit")
    before = contents(project, home)
    for command in READING:
        result = gpu(*command, "--json", cwd=project)
        assert result.exit_code == 0, (command, result.stderr)
        assert contents(project, home) == before, command
    assert gpu("job", "status", "--json", cwd=project).document["state"] == "succeeded"


def test_what_is_computed_from_a_long_ledger_is_kept_only_where_writing_is_allowed(tmp_path, gpu, home, monkeypatch):
    assert gpu("init", "--jobs").exit_code == 0
    lines = b'{"status": "completed", "cost_usd": 0.5}\n{"status": "running"}\n' * 50
    assert gpu("ledger", "append", stdin=lines).exit_code == 0
    for module, name in (
        (prefix_cache, "WORTHWHILE_BYTES"),
        (spend, "_SAVE_AFTER_BYTES"),
        (job_index, "_SAVE_AFTER_BYTES"),
    ):
        monkeypatch.setattr(module, name, 1)
    before = contents(tmp_path, home)
    for command in (
        ["spend"],
        ["status"],
        ["policy", "show"],
        ["economics", "keepalive", "--rate-usd-hr", "1", "--startup-min", "9"],
    ):
        assert gpu(*command, "--json", "--mode", "audit").exit_code == 0
        assert contents(tmp_path, home) == before, command
    assert gpu("spend").exit_code == 0 and gpu("status").exit_code == 0
    assert {path.name for path in (tmp_path / ".pi/gpu").glob("jobs.*.json")} == {"jobs.spend.json", "jobs.index.json"}


def test_a_provider_is_asked_at_a_pace_that_no_file_remembers(tmp_path, gpu, home, monkeypatch):
    monkeypatch.setenv("VAST_API_KEY", "made-up-key-of-a-test")

    wire = Script([answer(body={"offers": []})])
    assert gpu("init", "--jobs").exit_code == 0
    before = contents(tmp_path, home)
    asked = ("offers", "--json", "--provider", "vast")
    gpu(*asked, "--mode", "audit", wire=wire)
    assert wire.calls and contents(tmp_path, home) == before
    gpu(*asked, wire=wire)
    assert list((home / ".local/state/gpu/limits").iterdir())


def test_a_machine_without_our_runner_stays_so(tmp_path, audit, gpu, home, monkeypatch):
    monkeypatch.delenv("GPU_MODE")
    assert gpu("init", "--jobs").exit_code == 0
    monkeypatch.setenv("GPU_MODE", "audit")
    before = contents(tmp_path, home)
    [offer] = audit("offers", "--json").document["offers"]
    assert not offer["fits"] and "installs none" in offer["why_not"]
    assert contents(tmp_path, home) == before and not (home / ".local/share/gpu/machine").exists()


def test_no_host_key_is_pinned(tmp_path, gpu, sshd, home, monkeypatch):
    assert gpu("init", "--jobs", "--provider", "ssh", "--host", "box").exit_code == 0
    (tmp_path / "hosts.yaml").write_text(
        f"hosts:\n  box: {{address: 127.0.0.1, port: {sshd.port}, user: {sshd.user},"
        f" identity_file: {sshd.identity}, root: {tmp_path / 'machine'}}}\n"
    )
    assert gpu("offers", "--json", "--mode", "audit").document["offers"][0]["why_not"]
    assert not (tmp_path / ".pi/gpu/known_hosts").exists() and not (tmp_path / "machine").exists()
    assert gpu("offers", "--json").document["offers"][0]["fits"]
    assert (tmp_path / ".pi/gpu/known_hosts").exists()
    assert gpu("offers", "--json", "--mode", "audit").document["offers"][0]["fits"]
