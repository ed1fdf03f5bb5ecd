"""A server that speaks the OpenAI API for tests. Its model says the words of the prompt back, as often as was asked."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from runtimes.comfy_server import png


@dataclass
class Behaviour:
    """answers: False computes and then closes the connection. cut_after: events of a stream before it is cut."""

    models: tuple[str, ...] = ("echo",)
    health: int = 200
    key: str | None = None
    answers: bool = True
    usage: bool = True
    cut_after: int | None = None
    error_after: int | None = None
    piece: int = 7
    raw: dict[str, tuple[int, bytes]] = field(default_factory=dict)


class OpenAiServer:
    def __init__(self) -> None:
        self.behaviour = Behaviour()
        self.bodies: list[dict[str, Any]] = []
        self.generated = 0
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=lambda: self._http.serve_forever(0.02), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)


def _handler_of(server: OpenAiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self._is_stopped():
                return
            if self.path == "/health":
                self._answer(server.behaviour.health, {"status": "loading" if server.behaviour.health == 503 else "ok"})
            elif self.path == "/v1/models":
                data = [{"id": name, "object": "model", "owned_by": "tests"} for name in server.behaviour.models]
                self._answer(200, {"object": "list", "data": data})
            else:
                self._answer(404, {"error": {"message": "no such place", "type": "not_found"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            if self._is_stopped():
                return
            if body["model"] not in server.behaviour.models:
                return self._answer(
                    404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
                )
            server.generated += 1
            if not server.behaviour.answers:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return None
            if self.path == "/v1/embeddings":
                digest = hashlib.sha256(body["input"].encode()).digest()
                data = [{"object": "embedding", "index": 0, "embedding": [byte / 256 for byte in digest[:8]]}]
                return self._answer(
                    200, {"data": data, "model": body["model"], "usage": {"prompt_tokens": 2, "total_tokens": 2}}
                )
            if self.path == "/v1/images/generations":
                width, height = (int(side) for side in body.get("size", "16x16").split("x"))
                pictures = [
                    png(width, height, body.get("seed", 0) + n, body["prompt"]) for n in range(body.get("n", 1))
                ]
                return self._answer(
                    200, {"created": 1, "data": [{"b64_json": base64.b64encode(p).decode()} for p in pictures]}
                )
            is_chat = self.path == "/v1/chat/completions"
            prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
            words = prompt.split()[: body.get("max_tokens", 100)]
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(words)}
            usage["total_tokens"] = sum(usage.values())
            reason = "length" if len(words) < len(prompt.split()) else "stop"
            if body.get("stream"):
                return self._stream(body, words, usage, reason, is_chat)
            text = " ".join(words)
            choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            reply = {"id": "x", "model": body["model"], "choices": [{"index": 0, **choice, "finish_reason": reason}]}
            return self._answer(200, reply | ({"usage": usage} if server.behaviour.usage else {}))

        def _stream(
            self, body: dict[str, Any], words: list[str], usage: dict[str, int], reason: str, is_chat: bool
        ) -> None:
            def chunk(text: str, end: str | None = None) -> dict[str, Any]:
                inside = {"delta": {"content": text} if text else {}} if is_chat else {"text": text}
                return {"model": body["model"], "choices": [{"index": 0, **inside, "finish_reason": end}]}

            events = [chunk(word if n == 0 else " " + word) for n, word in enumerate(words)] + [chunk("", reason)]
            if server.behaviour.usage and body.get("stream_options", {}).get("include_usage"):
                events.append({"model": body["model"], "choices": [], "usage": usage})
            lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events] + ["data: [DONE]\n\n"]
            if server.behaviour.error_after is not None:
                lines = [
                    *lines[: server.behaviour.error_after],
                    'data: {"error": {"message": "CUDA error: device lost"}}\n\n',
                ]
            if server.behaviour.cut_after is not None:
                lines = lines[: server.behaviour.cut_after]
            data = b": a comment\n\n" + "".join(lines).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            # Cut anywhere, also within a character: that is how a network delivers it.
            for start in range(0, len(data), server.behaviour.piece):
                self.wfile.write(data[start : start + server.behaviour.piece])
                self.wfile.flush()

        def _is_stopped(self) -> bool:
            if self.path in server.behaviour.raw:
                status, body = server.behaviour.raw[self.path]
                self._send(status, body)
                return True
            if (
                server.behaviour.key is not None
                and self.headers.get("Authorization") != f"Bearer {server.behaviour.key}"
            ):
                self._answer(401, {"error": {"message": f"wrong key: {self.headers.get('Authorization')}"}})
                return True
            return False

        def _answer(self, status: int, document: Any) -> None:
            self._send(status, json.dumps(document).encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def openai_server() -> Iterator[OpenAiServer]:
    server = OpenAiServer()
    try:
        yield server
    finally:
        server.close()
