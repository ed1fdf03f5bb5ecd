"""The OpenAI runtime against a real llama.cpp server and a tiny model that is written here."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_skills.errors import RequestRejected, ServiceKeyRejected
from gpu_skills.runtimes.base import Endpoint, Event, Request, Served, Surroundings
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.runtimes.openai import OpenAI
from runtimes.llama_cpp import CannotBeHad, llama_server
from runtimes.tiny_gguf import CONTEXT, WORDS, write_tiny_gguf

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

KEY = "key-of-the-tiny-llama-0123"
SAID = {word.removeprefix("\u2581") for word in WORDS}


def manifest(folder: Path) -> ModelManifest:
    record = {
        "id": "tiny",
        "runtime": "openai",
        "source": str(folder / "tiny.gguf"),
        "serve": {
            "command": [
                "llama-server", "-m", "{model}", "--host", "127.0.0.1", "--port", "{port}", "--alias", "{name}",
                "--api-key-file", "{root}/keys", "-c", str(CONTEXT), "-np", "1", "-t", "1", "--no-ui",
            ],
        },
        "test": {"inputs": {"prompt": "the sea", "max_tokens": 6, "temperature": 0}, "operation": "completion"},
    }  # fmt: skip
    return ModelManifest.of(record)


@pytest.fixture(scope="module")
def served(tmp_path_factory, real_environment) -> Iterator[tuple[Endpoint, ModelManifest]]:
    """Started with the very command that the runtime makes of the manifest."""
    try:
        program = llama_server(real_environment)
    except CannotBeHad as exc:
        pytest.skip(f"no llama.cpp: {exc}")
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_gguf(folder / "tiny.gguf")
    (folder / "keys").write_text(KEY + "\n")
    model = manifest(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    service = OpenAI(Surroundings(environ={})).service(Served(model, port, str(folder)))
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([program, *service.command[1:]], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", KEY)
        ends = time.monotonic() + 60
        while (health := OpenAI(Surroundings(environ={})).health(endpoint)).state != "ready":
            assert health.state == "loading" and process.poll() is None and time.monotonic() < ends, health
            time.sleep(0.1)
        yield endpoint, model
    finally:
        process.terminate()
        process.wait(20)


def ask(served, sink, operation, on_event=lambda event: None, **inputs):
    endpoint, model = served
    request = Request("J-000001", model, inputs, operation=operation, timeout_s=60)
    return OpenAI(Surroundings(environ={})).run(endpoint, request, sink, on_event)


def test_it_is_ready_and_serves_the_model_under_its_name(served):
    endpoint, _ = served
    openai = OpenAI(Surroundings(environ={}))
    assert openai.models(endpoint) == ["tiny"]
    assert openai.health(endpoint).detail == "serves tiny"


@pytest.mark.parametrize("operation", ["chat", "completion"])
def test_whole_and_streamed_say_the_same_words_and_count_the_same_tokens(served, sink, operation):
    asked = {"prompt": "the lighthouse", "max_tokens": 8, "temperature": 0, "seed": 3}
    whole = ask(served, sink, operation, **asked)
    events: list[Event] = []
    streamed = ask(served, sink, operation, events.append, **asked, stream=True)
    text = whole.outputs[0].path.read_text()
    assert text == streamed.outputs[0].path.read_text() == "".join(event.data["text"] for event in events)
    assert set(text.split()) <= SAID and len(text.split()) == 8 and len(events) > 1
    for result in (whole, streamed):
        assert result.facts["completion_tokens"] == 8 and result.facts["finish_reason"] == "length"
        assert result.facts["prompt_tokens"] > 3
        assert result.facts["total_tokens"] == result.facts["prompt_tokens"] + 8


def test_its_test_generation_is_a_proof(served, sink):
    endpoint, model = served
    proof = OpenAI(Surroundings(environ={})).test_generation(endpoint, model, sink)
    assert proof.succeeded, proof.detail
    assert proof.evidence["kind"] == "text/plain" and "6 tokens" in proof.detail


def test_a_prompt_longer_than_its_context_is_refused_with_its_own_words(served, sink):
    with pytest.raises(RequestRejected, match="context"):
        ask(served, sink, "completion", prompt="sea " * CONTEXT, max_tokens=4)


def test_another_key_is_refused_and_shown_nowhere(served, sink):
    endpoint, model = served
    with pytest.raises(ServiceKeyRejected) as raised:
        ask((Endpoint(endpoint.base_url, "a-wrong-key-98765"), model), sink, "chat", prompt="x")
    assert "a-wrong-key-98765" not in json.dumps(raised.value.to_dict())
