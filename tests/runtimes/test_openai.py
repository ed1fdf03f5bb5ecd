"""Servers of the OpenAI API: what is asked, what comes back, streamed or whole, and what is believed of it."""

from __future__ import annotations

import json

import pytest

from gpu_skills.errors import (
    GenerationFailed,
    GenerationUnknown,
    InputInvalid,
    RequestRejected,
    ServiceBusy,
    ServiceKeyRejected,
    ServiceReply,
    ServiceUnreachable,
)
from gpu_skills.runtimes.base import Endpoint, Event, Request, Served, Surroundings
from gpu_skills.runtimes.manifest import ModelManifest, Serve
from gpu_skills.runtimes.openai import OpenAI
from gpu_skills.runtimes.sse import MAX_EVENT_BYTES, SseReader
from gpu_skills.runtimes.vllm import Vllm
from runtimes.comfy_server import png
from runtimes.openai_server import openai_server

MODEL = ModelManifest("echo", "openai")


@pytest.fixture
def llm():
    with openai_server() as running:
        yield running


@pytest.fixture
def endpoint(llm):
    return Endpoint(llm.url)


@pytest.fixture
def openai():
    return OpenAI(Surroundings(environ={}))


def request(operation="chat", **inputs) -> Request:
    return Request("J-000001", MODEL, inputs, operation=operation, timeout_s=20)


def test_a_chat_leaves_its_answer_and_the_tokens_that_the_server_counted(openai, endpoint, sink):
    result = openai.run(endpoint, request(prompt="one two three", max_tokens=2), sink)
    assert result.outputs[0].path.read_text() == "one two"
    facts = dict(result.facts)
    assert facts.pop("duration_s") >= 0
    assert facts == {
        "model": "echo", "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "finish_reason": "length",
    }  # fmt: skip


def test_messages_go_through_with_the_system_s_word_first(openai, endpoint, sink, llm):
    messages = [{"role": "assistant", "content": "hm"}]
    openai.run(endpoint, request(messages=messages, system="be brief", prompt="go on", extra={"top_k": 5}), sink)
    assert llm.bodies[-1] == {
        "top_k": 5, "model": "echo",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "assistant", "content": "hm"},
            {"role": "user", "content": "go on"},
        ],
    }  # fmt: skip


def test_what_is_extra_cannot_name_another_model(openai, endpoint, sink, llm):
    openai.run(endpoint, request(prompt="x", extra={"model": "other", "stream": True}), sink)
    assert llm.bodies[-1]["model"] == "echo"


@pytest.mark.parametrize("operation", ["chat", "completion"])
@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_a_stream_is_told_word_by_word_and_adds_up_to_the_answer(openai, endpoint, sink, llm, operation, piece):
    llm.behaviour.piece = piece
    events: list[Event] = []
    result = openai.run(
        endpoint, request(operation, prompt="günther läuft weit 走る", stream=True), sink, events.append
    )
    assert [event.data["text"] for event in events] == ["günther", " läuft", " weit", " 走る"]
    assert result.outputs[0].path.read_text() == "günther läuft weit 走る"
    assert (result.facts["completion_tokens"], result.facts["finish_reason"]) == (4, "stop")


def test_tokens_that_the_server_does_not_count_are_not_guessed(openai, endpoint, sink, llm):
    llm.behaviour.usage = False
    for stream in (False, True):
        facts = openai.run(endpoint, request(prompt="a b", stream=stream), sink).facts
        assert facts.get("completion_tokens") is None


def test_a_stream_that_breaks_off_is_no_answer(openai, endpoint, sink, llm):
    llm.behaviour.cut_after = 2
    with pytest.raises(ServiceReply, match="ended before its end"):
        openai.run(endpoint, request(prompt="a b c d", stream=True), sink)
    assert not sink.folder.exists()


def test_a_failure_in_the_middle_of_a_stream_is_a_failure(openai, endpoint, sink, llm):
    llm.behaviour.error_after = 2
    with pytest.raises(GenerationFailed, match="CUDA error: device lost"):
        openai.run(endpoint, request(prompt="a b c d", stream=True), sink)


def test_images_come_as_what_they_are(openai, endpoint, sink):
    result = openai.run(endpoint, request("image", prompt="x", size="20x10", n=2, seed=3), sink)
    assert [output.path.read_bytes() for output in result.outputs] == [png(20, 10, 3, "x"), png(20, 10, 4, "x")]
    assert {output.mime for output in result.outputs} == {"image/png"}


def test_an_embedding_is_a_list_of_numbers(openai, endpoint, sink):
    result = openai.run(endpoint, request("embedding", prompt="x"), sink)
    assert len(json.loads(result.outputs[0].path.read_text())) == result.facts["dimensions"] == 8


# what fails -----------------------------------------------------------------------------------------------------------


def test_a_request_that_was_not_answered_is_unknown_and_was_sent_once(openai, endpoint, sink, llm):
    llm.behaviour.answers = False
    with pytest.raises(GenerationUnknown):
        openai.run(endpoint, request(prompt="a"), sink)
    assert llm.generated == 1


def test_nothing_that_listens_means_nothing_was_sent(openai, endpoint, sink, llm):
    llm.close()
    with pytest.raises(ServiceUnreachable, match="nothing was sent"):
        openai.run(endpoint, request(prompt="a"), sink)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, RequestRejected), (422, RequestRejected), (429, ServiceBusy), (503, ServiceBusy), (500, GenerationFailed),
        (302, ServiceReply), (401, ServiceKeyRejected),
    ],
)  # fmt: skip
def test_a_refusal_is_told_with_the_server_s_reason(openai, endpoint, sink, llm, status, error):
    llm.behaviour.raw["/v1/chat/completions"] = (status, b'{"error": {"message": "context of 4096 tokens exceeded"}}')
    with pytest.raises(error) as raised:
        openai.run(endpoint, request(prompt="a"), sink)
    assert status == 302 or "context of 4096 tokens exceeded" in raised.value.message


@pytest.mark.parametrize(
    "inputs",
    [{}, {"prompt": 5}, {"prompt": "a", "max_tokens": 0}, {"prompt": "a", "temperature": "hot"}, {"promt": "a"}],
)
def test_inputs_are_checked_before_anything_is_sent(openai, endpoint, sink, llm, inputs):
    with pytest.raises(InputInvalid):
        openai.run(endpoint, request(**inputs), sink)
    assert llm.bodies == []


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b'{"choices": []}', b'{"choices": [5]}', b'{"choices": [{"message": {"content": 5}}]}',
        b'{"choices": {"0": {}}}', b"[" * 50_000, b'{"error": "out of memory"}',
    ],
)  # fmt: skip
def test_a_reply_without_an_answer_is_no_answer(openai, endpoint, sink, llm, body):
    llm.behaviour.raw["/v1/chat/completions"] = (200, body)
    with pytest.raises((ServiceReply, GenerationFailed)):
        openai.run(endpoint, request(prompt="a"), sink)
    assert not sink.folder.exists()


@pytest.mark.parametrize("vector", ["[]", "[NaN]", "[1e999]", '["1"]', "null", "[[1]]", "[true]"])
def test_a_vector_that_is_none_is_refused(openai, endpoint, sink, llm, vector):
    llm.behaviour.raw["/v1/embeddings"] = (200, f'{{"data": [{{"embedding": {vector}}}]}}'.encode())
    with pytest.raises(ServiceReply):
        openai.run(endpoint, request("embedding", prompt="a"), sink)


@pytest.mark.parametrize(
    "entry", ['{"url": "http://169.254.169.254/x"}', '{"b64_json": "%%%"}', '{"b64_json": 5}', "{}"]
)
def test_an_image_comes_in_the_answer_or_not_at_all(openai, endpoint, sink, llm, entry):
    llm.behaviour.raw["/v1/images/generations"] = (200, f'{{"data": [{entry}]}}'.encode())
    with pytest.raises(ServiceReply):
        openai.run(endpoint, request("image", prompt="a"), sink)


def test_token_counts_that_are_none_are_left_out(openai, endpoint, sink, llm):
    usage = {"prompt_tokens": -5, "completion_tokens": "9", "total_tokens": True}
    reply = {"choices": [{"message": {"content": "x"}}], "usage": usage}
    llm.behaviour.raw["/v1/chat/completions"] = (200, json.dumps(reply).encode())
    facts = openai.run(endpoint, request(prompt="a"), sink).facts
    assert [facts[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [None] * 3


# health and proof -----------------------------------------------------------------------------------------------------


def test_health_is_loading_until_the_weights_are_there(openai, endpoint, llm):
    llm.behaviour.health = 503
    assert openai.health(endpoint).state == "loading"
    llm.behaviour.health = 200
    assert openai.health(endpoint).state == "ready"
    llm.behaviour.health = 404  # a server without one
    assert openai.health(endpoint).state == "ready"
    llm.behaviour.health = 500
    assert openai.health(endpoint).state == "failed"
    llm.close()
    assert openai.health(endpoint).state == "loading"


def test_an_address_with_or_without_v1_is_the_same(openai, llm):
    assert openai.models(Endpoint(llm.url + "/v1/")) == openai.models(Endpoint(llm.url)) == ["echo"]


@pytest.mark.parametrize(("operation", "kind"), [("chat", "text/plain"), ("embedding", "application/json")])
def test_a_test_generation_is_read(openai, endpoint, sink, operation, kind):
    from gpu_skills.runtimes.manifest import Trial

    proof = openai.test_generation(endpoint, ModelManifest("echo", "openai", test=Trial(operation=operation)), sink)
    assert proof.succeeded and proof.evidence["kind"] == kind and proof.evidence["bytes"] > 0


def test_another_model_than_the_manifest_s_proves_nothing(openai, endpoint, sink):
    proof = openai.test_generation(endpoint, ModelManifest("qwen-7b", "openai"), sink)
    assert not proof.succeeded and "qwen-7b is not among the models that it serves: echo" in proof.detail


def test_an_empty_answer_proves_nothing(openai, endpoint, sink, llm):
    llm.behaviour.raw["/v1/chat/completions"] = (200, b'{"choices": [{"message": {"content": ""}}]}')
    assert not openai.test_generation(endpoint, MODEL, sink).succeeded


def test_the_key_is_in_no_message(openai, llm, sink):
    llm.behaviour.key = "the-right-key"
    assert openai.models(Endpoint(llm.url, "the-right-key")) == ["echo"]
    with pytest.raises(ServiceKeyRejected) as raised:
        openai.run(Endpoint(llm.url, "my-own-key-12345"), request(prompt="a"), sink)
    assert "my-own-key-12345" not in json.dumps(raised.value.to_dict())


# how it is started ----------------------------------------------------------------------------------------------------


def test_vllm_is_started_on_loopback_without_a_key_in_its_arguments():
    model = ModelManifest(
        "qwen", "vllm", source="hf:Qwen/Qwen3-8B", revision="abc", serve=Serve(args=("--max-model-len", "4096"))
    )
    service = Vllm(Surroundings(environ={})).service(
        Served(model, 8000, "/workspace", gpu_memory_fraction=0.5, gpu_count=2)
    )
    assert service.command == (
        "vllm", "serve", "Qwen/Qwen3-8B", "--host", "127.0.0.1", "--port", "8000", "--served-model-name", "qwen",
        "--gpu-memory-utilization", "0.5", "--revision", "abc", "--tensor-parallel-size", "2",
        "--max-model-len", "4096",
    )  # fmt: skip
    assert service.key_variable == "VLLM_API_KEY" and service.serves_llm
    assert service.env["HF_HOME"] == "/workspace/cache/huggingface"


def test_a_command_of_one_s_own_is_filled_in_and_quoted_for_its_shell():
    model = ModelManifest(
        "tiny",
        "openai",
        source="/w/it's.gguf",
        serve=Serve("llama-server -m {model} --port {port}", ("--alias", "{name}")),
    )
    service = OpenAI(Surroundings(environ={})).service(Served(model, 8080, "/w"))
    assert service.command == """llama-server -m '/w/it'"'"'s.gguf' --port 8080 --alias tiny"""


# a stream -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("piece", [1, 2, 3, 1000])
def test_events_are_the_same_however_they_are_cut(newline, piece):
    lines = [
        ": note",
        "",
        "data: one",
        "",
        "event: x",
        "id: 5",
        "data:two",
        "data: three",
        "",
        "",
        "data: läuft",
        "",
        "",
    ]
    text = newline.join(lines)
    data, reader = text.encode(), SseReader()
    found = [event for start in range(0, len(data), piece) for event in reader.feed(data[start : start + piece])]
    assert found == ["one", "two\nthree", "läuft"]


@pytest.mark.parametrize("piece", [b"x" * 100_000, b"data: " + b"y" * 100_000 + b"\n"])
def test_an_event_without_end_is_given_up(piece):
    reader = SseReader()
    with pytest.raises(ValueError, match="more than"):
        for _ in range(MAX_EVENT_BYTES // 100_000 + 2):
            list(reader.feed(piece))
