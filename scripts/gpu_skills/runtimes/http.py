"""A server with one request that the model's manifest describes, as image servers have."""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpu_skills.errors import (
    ConfigError,
    GenerationFailed,
    GenerationUnknown,
    GpuError,
    InputInvalid,
    RequestRejected,
    ServiceUnreachable,
)
from gpu_skills.runtimes.base import (
    Endpoint,
    Health,
    MachineJob,
    OnEvent,
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
from gpu_skills.runtimes.inputs import check
from gpu_skills.runtimes.manifest import Described, ModelManifest
from gpu_skills.runtimes.outputs import look
from gpu_skills.runtimes.serving import command_of
from gpu_skills.wire import Answer, Unanswered

MAX_FILE_BYTES = 100 * 1024 * 1024
MAX_RESULT_BYTES = 8 * 1024**3
RUN_HEADER = "Idempotency-Key"  # a server that knows it does not do one run twice
RESULTS = ("body", "base64", "text")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


@dataclass
class DescribedHttp:
    around: Surroundings

    name = "http"

    def service(self, served: Served) -> Service:
        serve = served.model.serve
        return Service(
            name=f"http-{served.port}",
            command=command_of(served, None),
            env=dict(serve.env),
            port=served.port,
            health_path=serve.health_path or "/health",
            ready_within_s=serve.ready_within_s or 900.0,
            cwd=serve.cwd,
            key_variable=serve.key_variable,
        )

    def job(self, request: Request) -> MachineJob | None:
        return None

    def health(self, endpoint: Endpoint, path: str = "/health") -> Health:
        """Any 2xx of the health path. A server that has none (404) answers, and more is not known."""
        try:
            answer = self._calls(endpoint).read("health", path, attempts=1, timeout_s=15)
        except ServiceUnreachable as exc:
            return Health("loading", exc.message)
        except GpuError as exc:
            return Health("failed", exc.message)
        if 200 <= answer.status < 300:
            return Health("ready", f"{path} answers {answer.status}")
        if answer.status in (404, 405):
            return Health("ready", f"it answers, without a {path}")
        return Health("failed", f"{path} answers {answer.status}: {answer.text}")

    def test_generation(self, endpoint: Endpoint, model: ModelManifest, sink: Sink) -> Proof:
        if model.test is None:
            return Proof(False, "the manifest has no `test`: nothing can be proven")
        request = Request(
            f"test-{secrets.token_hex(6)}", model, model.test.inputs, timeout_s=model.test.timeout_s, is_new=True
        )
        try:
            output = self.run(endpoint, request, sink).outputs[0]
        except GpuError as exc:
            return Proof(False, exc.message)
        evidence = {"bytes": output.bytes, "sha256": output.sha256, "kind": output.mime}
        problem = look(output.path, "").problem
        if problem is None and output.mime == "text/html":
            problem = "it is a web page"
        if problem:
            return Proof(False, f"{output.name}: {problem}", evidence)
        return Proof(True, f"{output.name}: {output.mime}, {output.bytes} bytes", evidence)

    def run(self, endpoint: Endpoint, request: Request, sink: Sink, on_event: OnEvent = ignore) -> Result:
        """One output. Sent once, with our id of the run as its idempotency key.

        Raises InputInvalid, RequestRejected (4xx), GenerationFailed (5xx), ServiceBusy (429, 503), GenerationUnknown.
        """
        model = request.model
        described = _described(model)
        values = check(model.inputs, request.inputs, what=model.id)
        path, headers, body = filled(described, {name: _content(name, value) for name, value in values.items()})
        calls = self._calls(endpoint, described)
        began = self.around.clock.monotonic()
        taker = sink.take(described.file_name) if described.result == "body" else None
        try:
            answer = calls.write(
                "the request",
                path,
                body,
                method=described.method,
                headers={RUN_HEADER: quote(request.id), **headers},
                into=taker.write if taker else None,
                max_bytes=MAX_RESULT_BYTES if taker else 512 * 1024 * 1024,
                timeout_s=request.timeout_s,
            )
            if not 200 <= answer.status < 300:
                raise _refused(calls, model, answer)
            if taker is None:
                data = result_of(calls, described, answer)
                taker = sink.take(described.file_name)
                taker.write(data)
            output = taker.done()
        except Unanswered as exc:
            if taker:
                taker.discard()
            raise GenerationUnknown(what=f"run {request.id}", service=calls.service, reason=exc.reason) from exc
        except BaseException:
            if taker:
                taker.discard()
            raise
        if output.bytes == 0:
            raise calls.unexpected("the request", "an empty result")
        return Result(
            (output,), {"duration_s": round(self.around.clock.monotonic() - began, 3), "status": answer.status}
        )

    def interrupt(self, endpoint: Endpoint, run_id: str) -> str:
        return "not_supported"

    def facts(self, endpoint: Endpoint) -> dict[str, Any]:
        health = self.health(endpoint)
        return {"health": health.state, "detail": health.detail}

    def _calls(self, endpoint: Endpoint, described: Described | None = None) -> Calls:
        wanted = described or Described("/")
        return Calls("the server", endpoint, self.around, key_header=wanted.auth_header, key_prefix=wanted.auth_prefix)


# pure -----------------------------------------------------------------------------------------------------------------


def filled(described: Described, values: Mapping[str, Any]) -> tuple[str, dict[str, str], Any]:
    """Path, headers and body with the inputs in their places.

    A text of the body that is one place and nothing else becomes the value with its type, and its key goes when there
    is no value. Everywhere else it is text; in a path it is quoted.
    """
    path = _PLACE.sub(lambda m: quote(_as_text(values, m[1]), safe=""), described.path)
    headers = {
        name: _PLACE.sub(lambda m: quote(_as_text(values, m[1])), text) for name, text in described.headers.items()
    }
    return path, headers, _body(described.body, values)


def result_of(calls: Calls, described: Described, answer: Answer) -> bytes:
    """The result inside a JSON answer. ServiceReply when it is not where the manifest says."""
    found = calls.document("the request", answer) if answer.status == 200 else None
    for part in described.pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, str):
        raise calls.unexpected("the request", f"no text at {described.pointer or 'the whole answer'}")
    if described.result == "text":
        return found.encode("utf-8", "backslashreplace")
    packed = found.partition(",")[2] if found.startswith("data:") else found
    try:
        return base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise calls.unexpected("the request", f"what stands at {described.pointer} is no base64") from exc


def _described(model: ModelManifest) -> Described:
    described = model.request
    if described is None:
        raise ConfigError(file=f"model {model.id}", problem="`request` is missing: nothing says how to ask the server")
    if described.result not in RESULTS:
        allowed = ", ".join(RESULTS)
        raise ConfigError(file=f"model {model.id}", problem=f"request.result {described.result!r} is none of {allowed}")
    if not described.path.startswith("/") or not described.path.isprintable() or not described.path.isascii():
        raise ConfigError(file=f"model {model.id}", problem=f"request.path {described.path!r} does not begin with /")
    places = set(_PLACE.findall(json.dumps([described.path, dict(described.headers), described.body])))
    if unknown := sorted(places - set(model.inputs)):
        raise ConfigError(
            file=f"model {model.id}", problem=f"`request` has places that are no input: {', '.join(unknown)}"
        )
    return described


def _body(template: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(template, str):
        whole = _PLACE.fullmatch(template)
        return values.get(whole[1]) if whole else _PLACE.sub(lambda m: _as_text(values, m[1]), template)
    if isinstance(template, Mapping):
        made = {key: _body(value, values) for key, value in template.items()}
        return {key: value for key, value in made.items() if value is not None or template[key] is None}
    if isinstance(template, list):
        return [_body(value, values) for value in template]
    return template


def _as_text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _content(name: str, value: Any) -> Any:
    """A file goes along as base64, which is what JSON can carry."""
    if not isinstance(value, Path):
        return value
    if value.stat().st_size > MAX_FILE_BYTES:
        size = value.stat().st_size
        problem = f"{name}: {value.name} has {size} bytes, at most {MAX_FILE_BYTES}"
        raise InputInvalid(what="the request", problem=problem, problems=[problem])
    return base64.b64encode(value.read_bytes()).decode()


def _refused(calls: Calls, model: ModelManifest, answer: Answer) -> GpuError:
    reason = f"HTTP {answer.status}: {calls.masked(answer.text)}"
    if 400 <= answer.status < 500:
        return RequestRejected(service=calls.service, what=f"the request to {model.id}", reason=reason, problems=[])
    return GenerationFailed(service=calls.service, what=f"the request to {model.id}", reason=reason)
