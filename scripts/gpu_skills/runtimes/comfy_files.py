"""Files of ComfyUI: inputs go there under a name of their content, outputs come through /view. Both may be repeated."""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path
from typing import Any

from gpu_skills.clock import Clock
from gpu_skills.errors import InputInvalid, ServiceReply, ServiceUnreachable
from gpu_skills.runtimes import comfy_replies as replies
from gpu_skills.runtimes.base import Event, OnEvent, Output, Sink
from gpu_skills.runtimes.calls import Calls
from gpu_skills.runtimes.outputs import safe_name
from gpu_skills.wire import Unanswered

MAX_UPLOAD_BYTES = 100 * 1024 * 1024  # ComfyUI's own limit, unless it was started with another
VIEW_TIMEOUT_S = 3600.0
VIEW_ATTEMPTS = 3
PAUSE_S = 2.0


def on_server(calls: Calls, value: Any) -> Any:
    """A local file uploaded under a name made of its content, so that a second time changes nothing."""
    if not isinstance(value, Path):
        return value
    size = value.stat().st_size
    if size > MAX_UPLOAD_BYTES:
        problem = f"{value.name} has {size} bytes, ComfyUI takes at most {MAX_UPLOAD_BYTES}"
        raise InputInvalid(what="the workflow", problem=problem, problems=[problem])
    data = value.read_bytes()
    name = f"{hashlib.sha256(data).hexdigest()[:16]}-{safe_name(value.name)}"
    boundary, body = multipart(name, data)
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    try:
        answer = calls.write("upload", "/upload/image", body, headers=headers, timeout_s=600)
    except Unanswered as exc:
        raise ServiceUnreachable(service=calls.service, reason=f"{exc.reason} (upload of {name})") from exc
    document = calls.mapping("upload", answer)
    stored, subfolder = document.get("name"), document.get("subfolder") or ""
    if not isinstance(stored, str) or not stored or not isinstance(subfolder, str):
        raise calls.unexpected("upload", "no name")
    return f"{subfolder}/{stored}" if subfolder else stored


def fetch(calls: Calls, outputs: Any, sink: Sink, on_event: OnEvent, clock: Clock) -> list[Output]:
    """Every output of a history entry, through /view, into the sink."""
    fetched = []
    try:
        listed = list(replies.listed_outputs(outputs))
    except ValueError as exc:
        raise calls.unexpected("history", str(exc)) from exc
    for item in listed:
        if isinstance(item, replies.ServerText):
            taker = sink.take(f"node-{item.node}.txt")
            taker.write(item.text.encode("utf-8", "backslashreplace"))
            output = taker.done()
        else:
            output = _view(calls, item, sink, clock)
        on_event(Event("output", {"node": item.node, "name": output.name, "bytes": output.bytes}))
        fetched.append(output)
    return fetched


def _view(calls: Calls, file: replies.ServerFile, sink: Sink, clock: Clock) -> Output:
    """One file through /view; asked again from its beginning when the connection broke."""
    query = {"filename": file.filename, "subfolder": file.subfolder, "type": file.type}
    for attempt in range(1, VIEW_ATTEMPTS + 1):
        taker = sink.take(file.filename)
        try:
            answer = calls.read(
                "view", "/view", query=query, into=taker.write, max_bytes=2**62, timeout_s=VIEW_TIMEOUT_S
            )
            if answer.status != 200:
                raise ServiceReply(
                    service=calls.service, what="view", reason=f"HTTP {answer.status} for an output of node {file.node}"
                )
            return taker.done()
        except ServiceUnreachable:
            taker.discard()
            if attempt == VIEW_ATTEMPTS:
                raise
            clock.sleep(PAUSE_S)
        except BaseException:
            taker.discard()
            raise
    raise AssertionError("the last attempt raises or returns")


def multipart(name: str, data: bytes) -> tuple[str, bytes]:
    """The body of an upload: the file as `image`, replacing one of the same name. The boundary occurs in no content."""
    boundary = "gpu-skills-" + hashlib.sha256(data).hexdigest()
    mime = mimetypes.guess_type(name)[0] or "application/octet-stream"
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'
        f"Content-Type: {mime}\r\n\r\n"
    )
    fields = "".join(
        f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}'
        for key, value in (("type", "input"), ("overwrite", "true"))
    )
    return boundary, head.encode() + data + f"{fields}\r\n--{boundary}--\r\n".encode()
