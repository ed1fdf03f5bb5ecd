"""Any server that speaks the OpenAI API: vLLM, SGLang, llama.cpp and others.

A request is sent once. These servers know no request by a name of ours, so one that was not answered is reported as
unknown and never repeated here. Token counts are those of the server's `usage`, or there are none.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpu_skills.errors import (
    GenerationFailed,
    GenerationUnknown,
    GpuError,
    RequestRejected,
    ServiceUnreachable,
    one_line,
)
from gpu_skills.runtimes.base import (
    Endpoint,
    Event,
    Health,
    MachineJob,
    OnEvent,
    Output,
    Proof,
    Request,
    Result,
    Served,
    Service,
    Sink,
    Surroundings,
    ignore,
)
from gpu_skills.runtimes.calls import Calls
from gpu_skills.runtimes.inputs import Input, check
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.runtimes.outputs import look
from gpu_skills.runtimes.serving import command_of
from gpu_skills.runtimes.sse import SseReader
from gpu_skills.wire import Answer, Unanswered, parse_json

MAX_TEXT_BYTES = 64 * 1024 * 1024
MAX_IMAGES_BYTES = 512 * 1024 * 1024
MAX_MODELS = 1000
STREAM_SILENCE_S = 600.0  # between two pieces of a stream; the first waits for its turn

PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "image": "/v1/images/generations",
    "embedding": "/v1/embeddings",
}
_SAMPLING = {
    "max_tokens": Input("integer", min=1, max=10_000_000),
    "temperature": Input("number", min=0, max=10),
    "top_p": Input("number", min=0, max=1),
    "seed": Input("integer", min=-(2**63), max=2**63 - 1),
    "stop": Input("text"),
    "stream": Input("boolean"),
}
INPUTS: dict[str, dict[str, Input]] = {
    "chat": {"prompt": Input("text"), "system": Input("text"), **_SAMPLING},
    "completion": {"prompt": Input("text", required=True), **_SAMPLING},
    "image": {
        "prompt": Input("text", required=True),
        "size": Input("text"),
        "n": Input("integer", min=1, max=64),
        "seed": _SAMPLING["seed"],
        "quality": Input("text"),
    },
    "embedding": {"prompt": Input("text", required=True), "dimensions": Input("integer", min=1, max=1_000_000)},
}
# What goes through as it is: `messages` of a chat, and `extra` for what one server alone understands.
_RAW = ("messages", "extra")


@dataclass
class OpenAI:
    around: Surroundings

    name = "openai"

    def service(self, served: Served) -> Service | None:
        """As the manifest says; there is no command that all these servers share."""
        serve = served.model.serve
        return Service(
            name=f"{self.name}-{served.port}",
            command=command_of(served, None),
            env=dict(serve.env),
            port=served.port,
            health_path=serve.health_path or "/health",
            ready_within_s=serve.ready_within_s or 1800.0,
            serves_llm=True,
            cwd=serve.cwd,
            key_variable=serve.key_variable,
        )

    def job(self, request: Request) -> MachineJob | None:
        return None

    def health(self, endpoint: Endpoint) -> Health:
        """`/health`, which says whether weights are loaded, where there is one; then the list of models."""
        calls = self._calls(endpoint)
        try:
            answer = calls.read("health", "/health", attempts=1, timeout_s=15)
            if answer.status >= 500:
                return Health("failed", f"HTTP {answer.status}: {answer.text}")
            answer = calls.read("models", "/v1/models", attempts=1, timeout_s=15)
            names = self._names(calls, answer)
        except ServiceUnreachable as exc:
            return Health("loading", exc.message)
        except GpuError as exc:
            return Health("failed", exc.message)
        if not names:
            return Health("loading", "it serves no model yet")
        return Health("ready", f"serves {', '.join(names[:5])}")

    def models(self, endpoint: Endpoint) -> list[str]:
        """What the server calls its models."""
        calls = self._calls(endpoint)
        return self._names(calls, calls.read("models", "/v1/models"))

    def test_generation(self, endpoint: Endpoint, model: ModelManifest, sink: Sink) -> Proof:
        """A short answer of the very model, read: some text, some tokens."""
        test = model.test
        operation = (test.operation if test else None) or "chat"
        inputs = dict(test.inputs) if test else {}
        if not inputs:
            inputs = {"prompt": "Say hello."} | ({} if operation in ("image", "embedding") else {"max_tokens": 16})
        try:
            names = self.models(endpoint)
            if model.name_at_service not in names:
                shown = ", ".join(names[:5]) or "none"
                return Proof(False, f"{model.name_at_service} is not among the models that it serves: {shown}")
            request = Request(
                "test", model, inputs, operation=operation, timeout_s=test.timeout_s if test else 300.0, is_new=True
            )
            result = self.run(endpoint, request, sink)
        except GpuError as exc:
            return Proof(False, exc.message)
        output = result.outputs[0]
        wanted = {"image": "image", "embedding": "application"}.get(operation, "")
        looked = look(output.path, wanted)
        evidence = {"bytes": output.bytes, "sha256": output.sha256, "kind": output.mime}
        if looked.problem:
            return Proof(False, f"{output.name}: {looked.problem}", evidence)
        tokens = result.facts.get("completion_tokens")
        return Proof(True, f"{operation}: {output.bytes} bytes" + (f", {tokens} tokens" if tokens else ""), evidence)

    def run(self, endpoint: Endpoint, request: Request, sink: Sink, on_event: OnEvent = ignore) -> Result:
        """Outputs: `answer.txt`, images, or `embedding.json`. facts: model, finish_reason, prompt_tokens …

        Raises InputInvalid, RequestRejected, GenerationFailed, GenerationUnknown, ServiceBusy, ServiceUnreachable.
        """
        operation = request.operation or "chat"
        body = body_of(request, operation)
        calls = self._calls(endpoint)
        began = self.around.clock.monotonic()
        if body.get("stream"):
            answer = _Streamed(calls, on_event)
            self._send(calls, request, operation, body, into=answer.take)
            text, facts = answer.whole()
            outputs = [_stored(sink, "answer.txt", text.encode("utf-8", "backslashreplace"))]
        else:
            reply = calls.mapping(operation, self._send(calls, request, operation, body))
            if reply.get("error"):
                raise GenerationFailed(service=calls.service, what=operation, reason=_error_text(reply["error"]))
            outputs, facts = self._whole(calls, operation, reply, sink)
        facts |= {"duration_s": round(self.around.clock.monotonic() - began, 3)}
        return Result(tuple(outputs), facts)

    def interrupt(self, endpoint: Endpoint, run_id: str) -> str:
        """These servers end a generation when its connection ends, and in no other way."""
        return "not_supported"

    def facts(self, endpoint: Endpoint) -> dict[str, Any]:
        return {"models": self.models(endpoint)}

    def _calls(self, endpoint: Endpoint) -> Calls:
        """An address with or without `/v1` at its end is the same server."""
        base = endpoint.base_url.rstrip("/").removesuffix("/v1")
        return Calls("the OpenAI server", Endpoint(base, endpoint.api_key), self.around)

    def _names(self, calls: Calls, answer: Answer) -> list[str]:
        data = calls.mapping("models", answer).get("data")
        if not isinstance(data, list):
            raise calls.unexpected("models", "no list of models")
        ids = (entry.get("id") for entry in data[:MAX_MODELS] if isinstance(entry, Mapping))
        return [one_line(name, limit=200) for name in ids if isinstance(name, str)]

    def _send(self, calls: Calls, request: Request, operation: str, body: dict[str, Any], into: Any = None) -> Answer:
        limit = MAX_IMAGES_BYTES if operation == "image" else MAX_TEXT_BYTES
        try:
            answer = calls.write(
                operation,
                PATHS[operation],
                body,
                into=into,
                max_bytes=limit,
                timeout_s=request.timeout_s,
                silence_s=min(STREAM_SILENCE_S, request.timeout_s) if into else None,
            )
        except Unanswered as exc:
            raise GenerationUnknown(what=f"run {request.id}", service=calls.service, reason=exc.reason) from exc
        if answer.status in (400, 404, 413, 415, 422):
            reason = calls.masked(_said(answer))
            raise RequestRejected(service=calls.service, what=f"the {operation}", reason=reason, problems=[])
        if answer.status != 200:
            raise GenerationFailed(
                service=calls.service, what=operation, reason=f"HTTP {answer.status}: {calls.masked(_said(answer))}"
            )
        return answer

    def _whole(
        self, calls: Calls, operation: str, reply: dict[str, Any], sink: Sink
    ) -> tuple[list[Output], dict[str, Any]]:
        facts = facts_of(reply)
        key = "choices" if operation in ("chat", "completion") else "data"
        entries = reply.get(key)
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
            raise calls.unexpected(operation, f"no {key}")
        if operation == "embedding":
            vectors = [_vector(calls, entry.get("embedding")) for entry in entries]
            data = json.dumps(vectors[0] if len(vectors) == 1 else vectors).encode()
            return [_stored(sink, "embedding.json", data)], {**facts, "dimensions": len(vectors[0])}
        if operation == "image":
            return [_stored(sink, f"image-{n}.png", _image(calls, e)) for n, e in enumerate(entries, 1)], facts
        message = entries[0].get("message") if operation == "chat" else entries[0]
        text = message.get("content" if operation == "chat" else "text") if isinstance(message, Mapping) else None
        if text is None and isinstance(message, Mapping):
            # A model that thinks first may have used up its tokens before it said anything.
            text = message.get("reasoning_content") or ""
        if not isinstance(text, str):
            raise calls.unexpected(operation, "a choice without text")
        facts |= {"finish_reason": _word(entries[0].get("finish_reason"))}
        return [_stored(sink, "answer.txt", text.encode("utf-8", "backslashreplace"))], facts


class _Streamed:
    """A streamed answer, put together. It is whole only when the server said that it was at its end."""

    def __init__(self, calls: Calls, on_event: OnEvent):
        self._calls = calls
        self._on_event = on_event
        self._reader = SseReader()
        self._parts: list[str] = []
        self._facts: dict[str, Any] = {}
        self._is_over = False
        self._error: str | None = None

    def take(self, piece: bytes) -> None:
        try:
            for data in self._reader.feed(piece):
                self._event(data)
        except ValueError as exc:
            raise self._calls.unexpected("stream", str(exc)) from exc

    def whole(self) -> tuple[str, dict[str, Any]]:
        if self._error is not None:
            raise GenerationFailed(service=self._calls.service, what="stream", reason=self._error)
        if not self._is_over:
            raise self._calls.unexpected("stream", "it ended before its end", text_characters=len("".join(self._parts)))
        return "".join(self._parts), self._facts

    def _event(self, data: str) -> None:
        if data.strip() == "[DONE]":
            self._is_over = True
            return
        chunk = parse_json(data.encode())
        if not isinstance(chunk, Mapping):
            raise ValueError("an event that is no object")
        if "choices" not in chunk and (chunk.get("error") or chunk.get("message")):
            self._error = _error_text(chunk.get("error") or chunk)
            return
        self._facts |= {name: value for name, value in facts_of(chunk).items() if value is not None}
        choices = chunk.get("choices")
        for choice in choices[:1] if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                continue
            delta = choice.get("delta")
            text = delta.get("content") if isinstance(delta, Mapping) else choice.get("text")
            if isinstance(text, str) and text:
                self._parts.append(text)
                self._on_event(Event("text", {"text": text}))
            if choice.get("finish_reason"):
                self._facts["finish_reason"] = _word(choice["finish_reason"])


# pure -----------------------------------------------------------------------------------------------------------------


def body_of(request: Request, operation: str) -> dict[str, Any]:
    """The request as the API wants it. InputInvalid, RequestRejected for what is wrong before anything is sent."""
    if operation not in PATHS:
        raise RequestRejected(
            service="gpu", what=f"operation {operation}", reason=f"there are {', '.join(PATHS)}", problems=[]
        )
    raw = {name: request.inputs[name] for name in _RAW if request.inputs.get(name) is not None}
    given = {name: value for name, value in request.inputs.items() if name not in _RAW}
    values = check(INPUTS[operation], given, what=operation)
    body: dict[str, Any] = {"model": request.model.name_at_service}
    prompt, system = values.pop("prompt", None), values.pop("system", None)
    if operation == "chat":
        messages = list(raw.get("messages") or ())
        messages = ([{"role": "system", "content": system}] if system else []) + messages
        messages += [{"role": "user", "content": prompt}] if prompt is not None else []
        check({"prompt": Input("text", required=True)}, {"prompt": "given" if messages else None}, what=operation)
        body["messages"] = messages
    elif operation == "embedding":
        body["input"] = prompt
    else:
        body["prompt"] = prompt
    if operation == "image":
        body["response_format"] = "b64_json"  # an address would lead elsewhere
    if values.get("stream"):
        body["stream_options"] = {"include_usage": True}
    extra = raw.get("extra")
    return {**(extra if isinstance(extra, Mapping) else {}), **body, **values}


def facts_of(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Model and tokens, as the server counts them; what it does not say is None."""
    usage = reply.get("usage")
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    counts = {name: _count(usage.get(name)) if isinstance(usage, Mapping) else None for name in names}
    return {"model": _word(reply.get("model")), **counts}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12 else None


def _word(value: Any) -> str | None:
    return one_line(value, limit=200) if isinstance(value, str) else None


def _said(answer: Answer) -> str:
    try:
        document = parse_json(answer.body)
    except ValueError:
        return answer.text
    return _error_text(document.get("error") or document) if isinstance(document, Mapping) else answer.text


def _error_text(error: Any) -> str:
    found = (error.get("message") or error.get("detail")) if isinstance(error, Mapping) else error
    return one_line(found if isinstance(found, str) else str(error), limit=400)


def _vector(calls: Calls, value: Any) -> list[float]:
    numbers = value if isinstance(value, list) else []
    if not numbers or not all(isinstance(x, int | Decimal) and not isinstance(x, bool) for x in numbers):
        raise calls.unexpected("embedding", "a vector that is none")
    return [float(x) for x in numbers]


def _image(calls: Calls, entry: Mapping[str, Any]) -> bytes:
    packed = entry.get("b64_json")
    if not isinstance(packed, str):
        raise calls.unexpected("image", "an image without b64_json; addresses are not followed")
    try:
        return base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise calls.unexpected("image", "b64_json that is no base64") from exc


def _stored(sink: Sink, name: str, data: bytes) -> Output:
    taker = sink.take(name)
    try:
        taker.write(data)
        return taker.done()
    except BaseException:
        taker.discard()
        raise
