"""The tiny language model, and its server as a process that speaks the OpenAI API."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from examples.serving import KEY, Answer, Running, running
from gpu_skills import resources, schemas
from gpu_skills.runtimes.base import Endpoint, Request, Served, Surroundings, runtime_of
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.runtimes.outputs import FolderSink

EXAMPLE = resources.example("tiny-llm")
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ASKED = {"model": "tiny-llm", "messages": [{"role": "user", "content": "Where does the ferry go?"}], "seed": 7}
PROMPT = {"model": "tiny-llm", "prompt": "The lighthouse ", "seed": 7, "max_tokens": 60}


@pytest.fixture(scope="module")
def code() -> ModuleType:
    """The example's model, under a name that no other example has."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("tiny_llm_model", EXAMPLE / "model.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(EXAMPLE / "server.py", "TINY_LLM_KEY", log=tmp_path_factory.mktemp("tiny-llm") / "log") as found:
        yield found


def start(tmp_path: Path, *options: str):
    return running(EXAMPLE / "server.py", "TINY_LLM_KEY", *options, log=tmp_path / "log")


def events(answer: Answer) -> list[dict]:
    """The documents of a stream, which has to end as the API says."""
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    *parts, last, rest = answer.body.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


# the model ------------------------------------------------------------------------------------------------------------


def test_what_always_followed_follows_again(code: ModuleType) -> None:
    model = code.Model("abcabd")
    assert "".join(model.go_on("a", 1, temperature=0)) == "b"
    drawn = {"".join(model.go_on("cab", 1, seed=seed)) for seed in range(20)}
    assert drawn == {"d"}, "the longer context is the one that counts"
    assert {"".join(model.go_on("b", 1, seed=seed)) for seed in range(40)} == {"c", "d"}


def test_characters_are_drawn_as_often_as_they_followed(code: ModuleType) -> None:
    model = code.Model("xa xa xa xb")
    drawn = [next(model.go_on("x", 1, seed=seed)) for seed in range(2000)]
    assert 0.71 < drawn.count("a") / 2000 < 0.79
    cooler = [next(model.go_on("x", 1, temperature=0.5, seed=seed)) for seed in range(2000)]
    assert 0.87 < cooler.count("a") / 2000 < 0.93  # 9 to 1
    assert {next(model.go_on("x", 1, top_p=0.7, seed=seed)) for seed in range(200)} == {"a"}
    assert {next(model.go_on("x", 1, temperature=1e-300, seed=seed)) for seed in range(20)} == {"a"}


def test_a_text_it_never_saw_is_gone_on_from_all_the_same(code: ModuleType) -> None:
    model = code.Model("abc")
    assert len("".join(model.go_on("日本\ud800", 30, seed=1))) == 30
    assert model.topic("日本") == model.topic("") == "abc"


# the API --------------------------------------------------------------------------------------------------------------


@pytest.mark.subprocess
def test_a_chat_is_answered_with_text_reason_and_counts_that_are_right(server: Running) -> None:
    reply = server.ask("POST", CHAT, ASKED).json
    (choice,) = reply["choices"]
    text = choice["message"]["content"]
    assert (reply["object"], reply["model"], choice["message"]["role"]) == ("chat.completion", "tiny-llm", "assistant")
    assert text.startswith("On Sundays") and choice["finish_reason"] in ("stop", "length")
    usage = reply["usage"]
    assert usage["prompt_tokens"] == len("Where does the ferry go?")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    end = 2 if choice["finish_reason"] == "stop" else 0  # the empty line that ended it
    assert usage["completion_tokens"] == len(text) + end


@pytest.mark.subprocess
@pytest.mark.parametrize(("path", "asked"), [(CHAT, ASKED), (COMPLETE, PROMPT)])
def test_the_same_seed_says_the_same_and_another_seed_something_else(server: Running, path: str, asked: dict) -> None:
    def choice(**change):
        found = server.ask("POST", path, {**asked, "temperature": 1.5, **change}).json["choices"][0]
        return found.get("text") or found["message"]["content"]

    assert choice() == choice()
    assert len({choice(seed=seed) for seed in range(12)}) > 6
    assert len({choice(seed=None) for _ in range(12)}) > 6
    assert len({choice(seed=seed, temperature=0) for seed in range(4)}) == 1


@pytest.mark.subprocess
@pytest.mark.parametrize(("path", "asked"), [(CHAT, ASKED), (COMPLETE, PROMPT)])
@pytest.mark.parametrize("stop", [None, "the", ["e isl", "q", "water"]])
def test_a_stream_says_the_same_as_a_whole_answer(server: Running, path: str, asked: dict, stop) -> None:
    asked = {**asked, "stop": stop}
    whole = server.ask("POST", path, asked).json
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(server.ask("POST", path, streamed))
    choices = [chunk["choices"][0] for chunk in chunks]
    if path == CHAT:
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert choices[0]["delta"]["role"] == "assistant" and text == whole["choices"][0]["message"]["content"]
    else:
        text = "".join(choice["text"] for choice in choices)
        assert text == whole["choices"][0]["text"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[-1] == whole["choices"][0]["finish_reason"] and set(reasons[:-1]) <= {None}
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not [word for word in ([stop] if isinstance(stop, str) else stop or []) if word in text]


@pytest.mark.subprocess
def test_usage_is_in_a_stream_only_when_asked_for(server: Running) -> None:
    assert not [chunk for chunk in events(server.ask("POST", CHAT, {**ASKED, "stream": True})) if "usage" in chunk]


@pytest.mark.subprocess
def test_max_tokens_are_kept_and_said_to_be_the_reason(server: Running) -> None:
    for limit in (1, 3, 5, 200):
        reply = server.ask("POST", COMPLETE, {**PROMPT, "max_tokens": limit}).json
        assert len(reply["choices"][0]["text"]) == reply["usage"]["completion_tokens"] == limit
        assert reply["choices"][0]["finish_reason"] == "length"
        reply = server.ask("POST", CHAT, {**ASKED, "max_completion_tokens": min(limit, 5)}).json
        assert len(reply["choices"][0]["message"]["content"]) == min(limit, 5)


@pytest.mark.subprocess
def test_the_one_model_is_listed_and_no_other_is_known(server: Running) -> None:
    listed = server.ask("GET", "/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["tiny-llm"] and listed["object"] == "list"
    assert server.ask("GET", "/v1/models/tiny-llm").json == listed["data"][0]
    answer = server.ask("POST", CHAT, {**ASKED, "model": "larger"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"messages": []}, "messages"), (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"), (CHAT, {"n": 2}, "n"), (CHAT, {"stream": "y"}, "stream"),
        (CHAT, {"stream_options": 3}, "stream_options"), (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (COMPLETE, {"prompt": None}, "prompt"), (COMPLETE, {"prompt": ["a"]}, "prompt"),
        (COMPLETE, {"max_tokens": 4097}, "max_tokens"), (COMPLETE, {"max_tokens": True}, "max_tokens"),
        (COMPLETE, {"temperature": 2.1}, "temperature"), (COMPLETE, {"temperature": "0"}, "temperature"),
        (COMPLETE, {"temperature": float("nan")}, "temperature"), (COMPLETE, {"top_p": -0.1}, "top_p"),
        (COMPLETE, {"seed": 1.5}, "seed"), (COMPLETE, {"seed": 2**63}, "seed"), (COMPLETE, {"stop": [""]}, "stop"),
        (COMPLETE, {"stop": ["a"] * 5}, "stop"), (COMPLETE, {"stop": 5}, "stop"),
    ],
)  # fmt: skip
def test_a_parameter_that_is_wrong_is_named(server: Running, path: str, change: dict, param: str) -> None:
    answer = server.ask("POST", path, {**(ASKED if path == CHAT else PROMPT), **change})
    error = answer.json["error"]
    assert (answer.status, error["param"], error["type"]) == (400, param, "invalid_request_error") and error["message"]


@pytest.mark.subprocess
def test_content_in_parts_and_unknown_parameters_are_taken(server: Running) -> None:
    parts = [{"type": "text", "text": "Where does "}, {"type": "text", "text": "the ferry go?"}]
    asked = {**ASKED, "messages": [{"role": "user", "content": parts}], "user": "me", "logit_bias": {}}
    assert server.ask("POST", CHAT, asked).json["choices"] == server.ask("POST", CHAT, ASKED).json["choices"]


@pytest.mark.subprocess
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b"1" * 10_000])
def test_a_body_that_is_no_request_is_refused(server: Running, body: bytes) -> None:
    assert server.ask("POST", CHAT, body).status == 400
    assert server.ask("POST", CHAT, b" " * (300 * 1024)).status == 413


@pytest.mark.subprocess
@pytest.mark.parametrize("given", [None, "Bearer wrong", KEY])
def test_without_the_key_only_health_answers(server: Running, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    for method, path, body in (("POST", CHAT, ASKED), ("POST", COMPLETE, PROMPT), ("GET", "/v1/models", None)):
        answer = server.ask(method, path, body, headers)
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
    assert server.ask("GET", "/health", headers=headers).status == 200


@pytest.mark.subprocess
def test_without_a_key_of_its_own_it_does_not_start() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TINY_LLM_KEY"}
    done = subprocess.run([sys.executable, str(EXAMPLE / "server.py")], env=environ, capture_output=True, timeout=30)
    assert done.returncode == 1 and b"TINY_LLM_KEY" in done.stderr


# load and end ---------------------------------------------------------------------------------------------------------


@pytest.mark.subprocess
def test_a_stream_comes_while_it_is_written_and_one_that_nobody_reads_frees_its_place(tmp_path: Path) -> None:
    asked = {**PROMPT, "stream": True, "max_tokens": 4096}
    body = json.dumps(asked).encode()
    head = f"POST {COMPLETE} HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with start(tmp_path, "--pause", "0.02") as server:
        readers = []
        for _ in range(16):
            reader = socket.create_connection(("127.0.0.1", server.port), 10)
            reader.sendall(head + body)
            readers.append(reader)
        for reader in readers:
            assert reader.recv(16)  # 4096 pieces take more than a minute: this is one of the first
        refused = server.ask("POST", CHAT, ASKED)
        assert (refused.status, refused.json["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["Retry-After"]) >= 1
        for reader in readers:
            reader.close()
        end = time.monotonic() + 10
        while server.ask("POST", COMPLETE, {**PROMPT, "max_tokens": 1}).status == 429:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.subprocess
def test_told_to_end_it_finishes_what_it_began_and_ends_with_0(tmp_path: Path) -> None:
    with start(tmp_path, "--pause", "0.02") as server, ThreadPoolExecutor(1) as pool:
        work = pool.submit(server.ask, "POST", COMPLETE, {**PROMPT, "stream": True, "max_tokens": 60})
        end = time.monotonic() + 10
        while b"POST" not in server.log.read_bytes():  # a stream is logged at its first byte
            assert time.monotonic() < end
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        assert events(work.result())[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0
        with pytest.raises(ConnectionError):
            server.ask("GET", "/health")


@pytest.mark.subprocess
def test_the_log_has_neither_texts_nor_keys(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        server.ask("POST", COMPLETE, {**PROMPT, "prompt": "violet orchid"})
        log = server.log.read_text()
    assert COMPLETE in log and "violet" not in log and KEY not in log


# as a deployment ------------------------------------------------------------------------------------------------------


def manifest() -> ModelManifest:
    record = yaml.safe_load((EXAMPLE / "model.yaml").read_text())
    assert not schemas.problems(record, "models")
    return ModelManifest.of(record)


@pytest.mark.subprocess
@pytest.mark.parametrize("stream", [False, True])
def test_its_description_starts_it_proves_it_and_runs_it(server: Running, tmp_path: Path, stream: bool) -> None:
    model, runtime = manifest(), runtime_of("openai", Surroundings(environ={}))
    service = runtime.service(Served(model, 8700, str(tmp_path)))
    assert service.serves_llm and service.key_variable == "TINY_LLM_KEY" and "--port 8700" in service.command
    endpoint = Endpoint(server.url, KEY)
    assert runtime.health(endpoint).state == "ready"
    assert runtime.test_generation(endpoint, model, FolderSink(tmp_path / "proof")).succeeded
    inputs = {"prompt": "Where does the ferry go?", "seed": 7, "stream": stream}
    request = Request("run-1", model, inputs, operation="chat")
    result = runtime.run(endpoint, request, FolderSink(tmp_path / "out"))
    whole = server.ask("POST", CHAT, ASKED).json
    assert result.outputs[0].path.read_text() == whole["choices"][0]["message"]["content"]
    assert result.facts["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.subprocess
def test_its_scripts_set_it_up_twice_and_prove_it_by_one_known_sentence(tmp_path: Path) -> None:
    environ = {**os.environ, "GPU_WORKSPACE": str(tmp_path / "a workspace")}
    for script in ("setup.sh", "setup.sh", "verify.sh"):
        done = subprocess.run(["bash", str(EXAMPLE / script)], env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    command = manifest().serve.command.replace("{port}", "0")
    started = subprocess.Popen(
        ["bash", "-c", command], env={**environ, "TINY_LLM_KEY": KEY}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert "http://127.0.0.1:" in started.stdout.readline()
    finally:
        started.terminate()
        assert started.wait(10) == 0
        started.stdout.close()
    corpus = tmp_path / "a workspace/services/tiny-llm/corpus.txt"
    corpus.write_text(corpus.read_text().replace("lighthouse", "windmill"))
    done = subprocess.run(["bash", str(EXAMPLE / "verify.sh")], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "something else" in done.stderr


@pytest.mark.parametrize("name", ["server.py", "model.py"])
def test_its_code_is_python_3_8_without_anything_installed(name: str) -> None:
    tree = ast.parse((EXAMPLE / name).read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {*sys.stdlib_module_names, "http.server", "model"}
