"""A canary in place of each credential: after all a provider does, it is in one header and nowhere else."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import traceback
from dataclasses import replace

import pytest

from fake_clock import FakeClock
from gpu_skills.cli import main
from gpu_skills.cli.context import Context
from gpu_skills.errors import GpuError
from gpu_skills.providers.base import RegistryLogin, Requirements
from gpu_skills.providers.runpod import RunpodReader, RunpodWriter, connect_runpod
from gpu_skills.providers.vast import VastReader, VastWriter, connect_vast
from gpu_skills.state import project as projects
from gpu_skills.wire import Answer, Call, Unanswered
from providers.replies import gpu_type, pod, vast_instance, vast_offer, vast_page
from providers.test_runpod import SPEC as RUNPOD_SPEC
from providers.test_vast_reader import WHEN
from providers.test_vast_writer import SPEC as VAST_SPEC
from providers.wires import RUNPOD_KEY, VAST_KEY, answer

CANARY = "canary-Q7w/x+9=Zk3-made-up"
PASSWORD = "canary-registry-made-up"


class Echo:
    """A vendor that puts the caller's key, and what it was sent, into everything it says."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> Answer:
        self.calls.append(call)
        number = len(self.calls) % 7
        said = f"Authorization: Bearer {CANARY} {(call.body or b'').decode()}"
        if number == 1:
            return Answer(400, json.dumps({"error": CANARY, "msg": said, "detail": said}).encode(), {"x": CANARY})
        if number == 2:
            return answer(500, f"<html><title>{said}</title></html>")
        if number == 3:
            raise Unanswered("reset")
        if number == 4:
            return answer(302, said, location=f"https://{CANARY}.example/")
        if number == 5:
            return answer(200, {"success": False, "msg": said, "result_url": f"http://evil/{CANARY}"})
        page = vast_page(vast_instance(label=said[:200]))
        rows = {"offers": [vast_offer(gpu_name=said[:60])], "pods": [pod(name=said)], "gpus": [gpu_type(name=said)]}
        return answer(200, {**page, **rows, "new_contract": 5, "records": [], "results": []})


@pytest.mark.parametrize("provider", ["vast", "runpod"])
def test_the_key_is_in_the_header_and_nowhere_else(provider, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    echo, clock = Echo(), FakeClock()
    login = RegistryLogin("ghcr.io", "me", PASSWORD)
    if provider == "vast":
        key = replace(VAST_KEY, value=CANARY)
        client = connect_vast(key, environ={}, clock=clock, state_dir=tmp_path, wire=echo)
        reader, writer = VastReader(client, clock=clock), VastWriter(client)
        spec = replace(VAST_SPEC, registry=login)
    else:
        key = replace(RUNPOD_KEY, value=CANARY)
        client = connect_runpod(key, environ={}, clock=clock, state_dir=tmp_path, wire=echo)
        reader, writer, spec = RunpodReader(client), RunpodWriter(client), RUNPOD_SPEC
    seen: list[str] = []
    acts = [
        lambda: reader.search(Requirements()),
        reader.machines,
        lambda: reader.machine("20517"),
        lambda: reader.charges(*WHEN),
        reader.check_key,
        lambda: reader.log_lines("20517"),
        lambda: writer.create(spec),
        lambda: writer.stop("20517"),
        lambda: writer.destroy("20517"),
    ]
    for act in acts * 7:
        try:
            seen.append(repr(act()))
        except GpuError as error:
            seen += [error.message, error.next_step, json.dumps(error.to_dict(), default=str)]
            seen += traceback.format_exception(error)
    seen += [caplog.text, *(repr(call) for call in echo.calls), *(call.url for call in echo.calls)]
    seen += [str(call.headers) for call in echo.calls]
    seen += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    everything = "\n".join(seen)
    assert "***" in everything and len(echo.calls) > 60
    assert CANARY not in everything and PASSWORD not in everything
    creates = [call for call in echo.calls if call.endpoint == "create"]
    assert creates and all(CANARY not in (call.body or b"").decode() for call in echo.calls)
    assert all(call.key is not None and call.key.value == CANARY for call in creates)


def test_a_command_leaves_the_key_in_no_file_and_on_no_screen(tmp_path, home, monkeypatch, capfd):
    """Commands with vendors that echo the key; then every file below home and project is read."""
    root = tmp_path / "work"
    projects.init(root)
    monkeypatch.setenv("VAST_API_KEY", CANARY)
    monkeypatch.setenv("RUNPOD_API_KEY", CANARY)
    for args in (["offers", "--json", "--debug"], ["offers", "--provider", "vast", "--debug"], ["status", "--json"]):
        context = Context(cwd=root, environ=dict(os.environ), clock=FakeClock(), wire=Echo(), connect=_nobody)
        main.run(args, obj=context)
    monkeypatch.setattr(sys, "stdin", io.StringIO(CANARY + "\n"))
    main.run(["login", "vast"], obj=Context(cwd=root, environ=dict(os.environ), clock=FakeClock(), wire=Echo()))
    out, err = capfd.readouterr()
    assert CANARY not in out + err
    files = [path for folder in (home, root) for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in files if CANARY.encode() in path.read_bytes()]
    # What the user asked to be kept is kept, in that one place.
    assert set(kept) <= {home / ".config" / "gpu" / "credentials.json"}
    assert any(path.name == "debug.log" for path in files)


def _nobody(machine):
    from gpu_skills.errors import MachineLacks

    raise MachineLacks(host=machine.host, what="python3")
