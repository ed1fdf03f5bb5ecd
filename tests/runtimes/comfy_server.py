"""A ComfyUI for tests: the wire shapes of the real server, and a tiny workflow that is really executed.

It draws a deterministic PNG from seed, text and size. `Faults` say what goes wrong. HTTP and websocket share a port, as
with the real one: the first bytes of a connection say which it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

CHECKPOINTS = ["tiny.safetensors"]
IMPORT_LOG = (
    "Traceback (most recent call last):\n"
    '  File "/opt/ComfyUI/nodes.py", line 2135, in load_custom_node\n'
    "    from comfy_api.latest import io\n"
    "ModuleNotFoundError: No module named 'comfy_api.latest'\n\n"
    "Cannot import /opt/ComfyUI/custom_nodes/ComfyUI-Fancy module for custom nodes: "
    "No module named 'comfy_api.latest'\n"
    "\nImport times for custom nodes:\n"
    "   0.0 seconds: /opt/ComfyUI/custom_nodes/websocket_image_save.py\n"
    "   0.1 seconds (IMPORT FAILED): /opt/ComfyUI/custom_nodes/ComfyUI-Fancy\n\n"
)
KNOWN = {
    "CheckpointLoaderSimple": {"ckpt_name"},
    "CLIPTextEncode": {"text", "clip"},
    "EmptyLatentImage": {"width", "height", "batch_size"},
    "KSampler": {
        "model",
        "positive",
        "negative",
        "latent_image",
        "seed",
        "steps",
        "cfg",
        "sampler_name",
        "scheduler",
        "denoise",
    },
    "VAEDecode": {"samples", "vae"},
    "LoadImage": {"image"},
    "SaveImage": {"images", "filename_prefix"},
    "PreviewImage": {"images"},
    "ShowText": {"text"},
}


@dataclass
class Faults:
    """What this server does wrong.

    answer_prompt: False takes a prompt in and closes the connection instead of answering. takes_prompt: False closes it
    without taking the prompt in. honours_prompt_id: False is an old server, which makes its own.
    """

    websocket: str = "works"  # works | none | cut
    history_late_s: float = 0.0
    execution_error: bool = False
    answer_prompt: bool = True
    takes_prompt: bool = True
    honours_prompt_id: bool = True
    forgets_prompt: bool = False
    step_s: float = 0.0
    image_bytes: Callable[[bytes], bytes] = lambda data: data
    filename: str | None = None
    endless_view: bool = False
    cut_views: int = 0
    key: str | None = None
    log: str = ""
    starting: bool = False
    flat: bool = False
    tells_of_others: bool = False
    extra_outputs: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, tuple[int, bytes]] = field(default_factory=dict)


def png(width: int, height: int, seed: int, text: str = "", *, flat: bool = False) -> bytes:
    """A picture of stripes whose colours come from seed and text."""
    colours = hashlib.sha256(f"{seed}\0{text}".encode()).digest()
    rows = []
    for y in range(height):
        shade = 0 if flat else (y * 7 + seed) % 31
        pixel = bytes(
            (colours[0] if flat else (colours[(x // 4) % 32] + shade) % 256) for x in range(width) for _ in "rgb"
        )
        rows.append(b"\0" + pixel)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"".join(rows)))
        + chunk(b"IEND", b"")
    )


class ComfyServer:
    """faults may be changed while it runs. executed: the prompts that were really run, in order."""

    def __init__(self, faults: Faults | None = None):
        self.faults = faults or Faults()
        self.queue: list[list[Any]] = []
        self.running: list[list[Any]] = []
        self.history: dict[str, Any] = {}
        self.files: dict[tuple[str, str, str], bytes] = {}
        self.executed: list[str] = []
        self.requests: list[str] = []
        self.bodies: list[Any] = []
        self._number = 0
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._interrupted = threading.Event()
        self._stopping = False
        self._open: set[socket.socket] = set()
        self._websocket = _WebsocketSide(self)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._http.daemon_threads = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (lambda: self._http.serve_forever(0.02), self._accept, self._work, self._websocket.serve)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stopping = True
        self._interrupted.set()
        with self._wake:
            self._wake.notify_all()
        self._http.shutdown()
        self._http.server_close()
        self._websocket.close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for near in list(self._open):
            with suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)

    # the front: one port for both ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._stopping:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(near,), daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        with near:
            self._open.add(near)
            near.settimeout(20)
            try:
                first = near.recv(65536)
            except OSError:
                return
            is_websocket = first.startswith(b"GET /ws")
            if is_websocket and self.faults.websocket == "none":
                near.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            port = self._websocket.port if is_websocket else self._http.server_address[1]
            with socket.create_connection(("127.0.0.1", port)) as far, suppress(OSError):
                far.sendall(first)
                back = threading.Thread(target=_copy, args=(far, near), daemon=True)
                back.start()
                near.settimeout(None)
                _copy(near, far)
                back.join(5)

    # queue and execution ------------------------------------------------------------------------------------------

    def submit(self, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = document.get("prompt")
        if not isinstance(prompt, dict):
            error = {
                "type": "no_prompt",
                "message": "No prompt provided",
                "details": "No prompt provided",
                "extra_info": {},
            }
            return 400, {"error": error, "node_errors": {}}
        refusal = validate(prompt)
        if refusal:
            return 400, refusal
        with self._wake:
            self._number += 1
            given = str(document["prompt_id"]) if self.faults.honours_prompt_id and "prompt_id" in document else None
            prompt_id = given or str(uuid.uuid4())
            extra = {**document.get("extra_data", {}), "client_id": document.get("client_id")}
            ends = [
                node
                for node, content in prompt.items()
                if content["class_type"] in ("SaveImage", "PreviewImage", "ShowText")
            ]
            if not self.faults.forgets_prompt:
                self.queue.append([self._number, prompt_id, prompt, extra, ends])
            self._wake.notify_all()
        return 200, {"prompt_id": prompt_id, "number": self._number, "node_errors": {}}

    def interrupt(self) -> None:
        with self._lock:
            if self.running:
                self._interrupted.set()

    def tell(self, client: str, kind: str, data: dict[str, Any]) -> None:
        self._websocket.send(client, json.dumps({"type": kind, "data": data}))

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self.queue or self._stopping)
                if self._stopping:
                    return
                item = self.queue.pop(0)
                self.running.append(item)
                self._interrupted.clear()
            self._websocket.wait_for(str(item[3].get("client_id")))
            outputs, status, final = self._execute(item)
            if self._stopping:
                return
            client = str(item[3].get("client_id"))
            # The real server tells before it writes into the history.
            self.tell(client, final[0], final[1])
            time.sleep(self.faults.history_late_s)
            with self._lock:
                self.running.remove(item)
                self.history[item[1]] = {"prompt": item, "outputs": outputs, "status": status, "meta": {}}
            if final[0] == "execution_success":
                self.tell(client, "executing", {"node": None, "prompt_id": item[1]})
            self.tell(client, "status", {"status": {"exec_info": {"queue_remaining": len(self.queue)}}})

    def _execute(self, item: list[Any]) -> tuple[dict[str, Any], dict[str, Any], tuple[str, dict[str, Any]]]:
        _, prompt_id, prompt, extra, ends = item
        client = str(extra.get("client_id"))
        messages: list[Any] = []

        def note(kind: str, data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            data = {**data, "prompt_id": prompt_id}
            if kind.startswith("execution_"):
                messages.append([kind, {**data, "timestamp": 1_700_000_000_000}])
            return kind, data

        self.executed.append(prompt_id)
        self.tell(client, *note("execution_start", {}))
        self.tell(client, *note("execution_cached", {"nodes": []}))
        if self.faults.tells_of_others:
            self.tell(client, "progress", {"value": 99, "max": 99, "node": "1", "prompt_id": "another"})
            self.tell(client, "execution_error", {"exception_message": "not mine", "prompt_id": "another"})
            self._websocket.send(client, "{" * 50_000)
            self._websocket.send(client, '{"type": "progress", "data": [1]}')
        if self.faults.websocket == "cut":
            self._websocket.cut(client)
        outputs: dict[str, Any] = {}
        for node in sorted(prompt, key=lambda n: (n in ends, n)):
            content = prompt[node]
            self.tell(client, *note("executing", {"node": node, "display_node": node}))
            if content["class_type"] == "KSampler":
                steps = content["inputs"]["steps"]
                for step in range(1, steps + 1):
                    if self._interrupted.wait(self.faults.step_s) if self.faults.step_s else self._interrupted.is_set():
                        final = note(
                            "execution_interrupted", {"node_id": node, "node_type": "KSampler", "executed": []}
                        )
                        return {}, {"status_str": "error", "completed": False, "messages": messages}, final
                    self.tell(client, *note("progress", {"value": step, "max": steps, "node": node}))
                    self._websocket.send(client, b"\0\0\0\1\0\0\0\2" + b"preview")
                if self.faults.execution_error:
                    final = note(
                        "execution_error",
                        {
                            "node_id": node, "node_type": "KSampler", "executed": [], "current_inputs": {},
                            "exception_type": "torch.OutOfMemoryError", "traceback": ["  File x\n"],
                            "exception_message": "CUDA out of memory. Tried to allocate 2.00 GiB\n",
                            "current_outputs": [],
                        },
                    )  # fmt: skip
                    return {}, {"status_str": "error", "completed": False, "messages": messages}, final
            if node in ends:
                outputs[node] = self._leave(prompt, node)
                self.tell(client, *note("executed", {"node": node, "display_node": node, "output": outputs[node]}))
        outputs |= self.faults.extra_outputs
        final = note("execution_success", {})
        return outputs, {"status_str": "success", "completed": True, "messages": messages}, final

    def _leave(self, prompt: dict[str, Any], node: str) -> dict[str, Any]:
        content = prompt[node]
        if content["class_type"] == "ShowText":
            return {"text": [content["inputs"]["text"]]}
        seen = _walk(prompt, node)
        sampler = next((prompt[n]["inputs"] for n in seen if prompt[n]["class_type"] == "KSampler"), {"seed": 0})
        size = next((prompt[n]["inputs"] for n in seen if prompt[n]["class_type"] == "EmptyLatentImage"), {})
        texts = [str(prompt[n]["inputs"]["text"]) for n in sorted(seen) if prompt[n]["class_type"] == "CLIPTextEncode"]
        texts += [
            str(self.files.get(("input", "", prompt[n]["inputs"]["image"])))
            for n in seen
            if "LoadImage" in prompt[n]["class_type"]
        ]
        data = png(
            size.get("width", 16), size.get("height", 16), sampler["seed"], "|".join(texts), flat=self.faults.flat
        )
        kind = "temp" if content["class_type"] == "PreviewImage" else "output"
        prefix = content["inputs"].get("filename_prefix", "ComfyUI_temp")
        name = self.faults.filename or f"{prefix}_{len(self.executed):05d}_.png"
        self.files[kind, "", name] = self.faults.image_bytes(data)
        return {"images": [{"filename": name, "subfolder": "", "type": kind}]}


def validate(prompt: dict[str, Any]) -> dict[str, Any] | None:
    """The refusal of a prompt, as the real server words it, or None."""
    for node, content in prompt.items():
        kind = content.get("class_type")
        if kind not in KNOWN:
            title = content.get("_meta", {}).get("title", kind)
            return {
                "error": {
                    "type": "missing_node_type",
                    "message": f"Node '{title}' not found. The custom node may not be installed.",
                    "details": f"Node ID '#{node}'",
                    "extra_info": {"node_id": node, "class_type": kind, "node_title": title},
                },
                "node_errors": {},
            }
    errors = {}
    for node, content in prompt.items():
        found = []
        inputs = content["inputs"]
        for name in sorted(KNOWN[content["class_type"]] - set(inputs)):
            found.append(_error("required_input_missing", "Required input is missing", name, name))
        if inputs.get("ckpt_name", CHECKPOINTS[0]) not in CHECKPOINTS:
            details = f"ckpt_name: '{inputs['ckpt_name']}' not in {CHECKPOINTS}"
            found.append(_error("value_not_in_list", "Value not in list", details, "ckpt_name"))
        if found:
            errors[node] = {"errors": found, "dependent_outputs": ["9"], "class_type": content["class_type"]}
    if not errors:
        return None
    whole = {
        "type": "prompt_outputs_failed_validation",
        "message": "Prompt outputs failed validation",
        "details": "",
        "extra_info": {},
    }
    return {"error": whole, "node_errors": errors}


def _error(kind: str, message: str, details: str, name: str) -> dict[str, Any]:
    return {"type": kind, "message": message, "details": details, "extra_info": {"input_name": name}}


def _walk(prompt: dict[str, Any], node: str) -> list[str]:
    seen, waiting = [node], [node]
    while waiting:
        for value in prompt[waiting.pop()]["inputs"].values():
            if isinstance(value, list) and value[0] not in seen:
                seen.append(value[0])
                waiting.append(value[0])
    return seen


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with suppress(OSError):
            end.shutdown(how)


def _client_of(path: str) -> str:
    return parse_qs(urlsplit(path).query).get("clientId", [""])[0]


class _WebsocketSide:
    def __init__(self, owner: ComfyServer):
        from websockets.sync.server import serve

        self._owner = owner
        self._clients: dict[str, Any] = {}
        self._admitted: set[str] = set()
        self._server = serve(self._handle, "127.0.0.1", 0, compression=None, process_request=self._admit)
        self.port = self._server.socket.getsockname()[1]

    def serve(self) -> None:
        self._server.serve_forever()

    def close(self) -> None:
        for connection in list(self._clients.values()):
            with suppress(Exception):
                connection.close_socket()
        self._server.shutdown()

    def send(self, client: str, message: str | bytes) -> None:
        connection = self._clients.get(client)
        if connection is not None:
            with suppress(Exception):
                connection.send(message)

    def wait_for(self, client: str) -> None:
        """Until a client whose handshake was answered can be told something: that happens on another thread."""
        ends = time.monotonic() + 5
        while client in self._admitted and client not in self._clients and time.monotonic() < ends:
            time.sleep(0.005)

    def cut(self, client: str) -> None:
        connection = self._clients.pop(client, None)
        if connection is not None:
            connection.close_socket()

    def _admit(self, connection: Any, request: Any) -> Any:
        key = self._owner.faults.key
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return connection.respond(401, "no\n")
        self._admitted.add(_client_of(request.path))
        return None

    def _handle(self, connection: Any) -> None:
        client = _client_of(connection.request.path)
        self._clients[client] = connection
        status = {"status": {"exec_info": {"queue_remaining": len(self._owner.queue)}}, "sid": client}
        with suppress(Exception):
            connection.send(json.dumps({"type": "status", "data": status}))
            for _ in connection:
                pass


def _handler_of(server: ComfyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 65536

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
            server.requests.append(f"GET {self.path}")
            if not self._may_pass(parts.path):
                return
            if parts.path == "/queue":
                with server._lock:
                    self._answer(200, {"queue_running": server.running[:], "queue_pending": server.queue[:]})
            elif parts.path == "/history":
                with server._lock:
                    items = list(server.history.items())[-int(query.get("max_items", 10_000)) :]
                self._answer(200, dict(items))
            elif match := re.fullmatch(r"/history/([^/]+)", parts.path):
                with server._lock:
                    entry = server.history.get(match[1])
                self._answer(200, {match[1]: entry} if entry else {})
            elif parts.path == "/system_stats":
                devices = [
                    {"name": "cuda:0 NVIDIA Test", "type": "cuda", "index": 0, "vram_total": 1000, "vram_free": 900}
                ]
                system = {"os": "posix", "comfyui_version": "0.9.2", "pytorch_version": "2.8.0"}
                self._answer(200, {"system": system, "devices": devices})
            elif parts.path == "/object_info":
                self._answer(
                    200, {kind: {"input": {"required": {key: [] for key in names}}} for kind, names in KNOWN.items()}
                )
            elif parts.path == "/internal/logs/raw" and server.faults.log:
                entries = [{"t": "2026-11-30T00:00:00", "m": line} for line in server.faults.log.splitlines(True)]
                self._answer(200, {"entries": entries, "size": {"cols": 80, "rows": 24}})
            elif parts.path == "/view":
                self._view(query)
            else:
                self._answer(404, {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server.requests.append(f"POST {self.path}")
            if not self._may_pass(self.path):
                return
            if self.path == "/upload/image":
                return self._upload(body)
            document = json.loads(body or b"{}")
            server.bodies.append(document)
            if self.path == "/prompt":
                status, reply = server.submit(document) if server.faults.takes_prompt else (0, {})
                if not server.faults.answer_prompt or not status:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return None
                return self._answer(status, reply)
            if self.path == "/interrupt":
                server.interrupt()
                return self._answer(200, None)
            if self.path == "/queue":
                with server._lock:
                    gone = set(document.get("delete", ()))
                    server.queue[:] = [item for item in server.queue if item[1] not in gone]
                return self._answer(200, None)
            return self._answer(404, {})

        def _may_pass(self, path: str) -> bool:
            if path in server.faults.raw:
                status, body = server.faults.raw[path]
                self._send(status, body, "application/json")
                return False
            if server.faults.starting:
                self._answer(503, {})
                return False
            if server.faults.key is not None and self.headers.get("Authorization") != f"Bearer {server.faults.key}":
                self._answer(401, {"error": f"wrong key {self.headers.get('Authorization')}"})
                return False
            return True

        def _upload(self, body: bytes) -> None:
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            parts = {}
            for part in BytesParser().parsebytes(head + body).get_payload():
                parts[part.get_param("name", header="content-disposition")] = part
            name = parts["image"].get_filename()
            server.files[parts["type"].get_payload(), "", name] = parts["image"].get_payload(decode=True)
            self._answer(200, {"name": name, "subfolder": "", "type": "input"})

        def _view(self, query: dict[str, str]) -> None:
            data = server.files.get(
                (query.get("type", "output"), query.get("subfolder", ""), query.get("filename", ""))
            )
            if data is None:
                return self._answer(404, {})
            if server.faults.endless_view:
                self.send_response(200)
                self.end_headers()
                self.close_connection = True
                with suppress(OSError):
                    while not server._stopping:
                        self.wfile.write(b"\0" * 65536)
                return None
            if server.faults.cut_views:
                server.faults.cut_views -= 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return None
            return self._send(200, data, "image/png")

        def _answer(self, status: int, document: Any) -> None:
            self._send(status, b"" if document is None else json.dumps(document).encode(), "application/json")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if 300 <= status < 400:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def comfy(faults: Faults | None = None) -> Iterator[ComfyServer]:
    server = ComfyServer(faults)
    try:
        yield server
    finally:
        server.close()
