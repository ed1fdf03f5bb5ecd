"""A request that a manifest describes, against a small image server."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpu_skills import schemas
from gpu_skills.errors import (
    ConfigError,
    GenerationFailed,
    GenerationUnknown,
    InputInvalid,
    OutputTooLarge,
    RequestRejected,
    ServiceBusy,
    ServiceKeyRejected,
    ServiceReply,
)
from gpu_skills.runtimes.base import Endpoint, Request, Surroundings
from gpu_skills.runtimes.http import DescribedHttp, filled
from gpu_skills.runtimes.manifest import Described, ModelManifest
from gpu_skills.runtimes.outputs import FolderSink
from runtimes.comfy_server import png

KEY = "key-of-the-image-server"


def record(**request):
    described = {
        "path": "/generate/{{style}}",
        "body": {
            "prompt": "{{prompt}}",
            "seed": "{{seed}}",
            "size": ["{{width}}", 12],
            "note": "seed {{seed}}",
            "mask": "{{mask}}",
        },
        "headers": {"X-Style": "{{style}}"},
        "file_name": "picture.png",
        "auth_header": "X-API-Key",
        "auth_prefix": "",
        **request,
    }
    return {
        "id": "painter",
        "runtime": "http",
        "request": described,
        "inputs": {
            "prompt": {"type": "text", "required": True},
            "seed": {"type": "integer", "default": 7, "min": 0, "max": 999},
            "width": 20,
            "style": "plain",
            "mask": {"type": "image"},
        },
        "test": {"inputs": {"prompt": "a test"}},
    }


class Painter:
    def __init__(self):
        self.seen = []
        self.status, self.reply, self.breaks, self.health = 200, None, False, 200
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self.send(owner.health, b"ok" if owner.health == 200 else b"no")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.seen.append((self.path, dict(self.headers), body))
                if self.headers.get("X-API-Key") != KEY:
                    return self.send(403, f"not {self.headers.get('X-API-Key')}".encode())
                if owner.breaks:
                    self.close_connection = True
                    return self.connection.shutdown(socket.SHUT_RDWR)
                picture = png(body["size"][0], body["size"][1], body["seed"], body["prompt"])
                return self.send(owner.status, picture if owner.reply is None else owner.reply(picture))

            def send(self, status, body):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if status == 503:
                    self.send_header("Retry-After", "4")
                self.end_headers()
                self.wfile.write(body)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=lambda: self.http.serve_forever(0.02), daemon=True)
        self.thread.start()


@contextmanager
def painting():
    painter = Painter()
    try:
        yield painter
    finally:
        painter.http.shutdown()
        painter.http.server_close()
        painter.thread.join(5)


@pytest.fixture
def painter():
    with painting() as running:
        yield running


@pytest.fixture
def http():
    return DescribedHttp(Surroundings(environ={}))


def run(http, painter, sink, model=None, **inputs):
    model = model or ModelManifest.of(record())
    return http.run(Endpoint(painter.url, KEY), Request("J-000009", model, inputs, timeout_s=20), sink)


def data_address(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_the_record_of_such_a_model_is_valid():
    schemas.check(record(result="base64", pointer="/images/0"), "models", file="record", next_step="-")


def test_inputs_go_to_their_places_with_their_types_and_the_body_comes_back_as_a_file(http, painter, sink):
    result = run(http, painter, sink, prompt='say "hi"', seed="8", style="a/b?c")
    assert result.outputs[0].path.read_bytes() == png(20, 12, 8, 'say "hi"')
    assert result.outputs[0].name == "picture.png"
    ((path, headers, body),) = painter.seen
    assert path == "/generate/a%2Fb%3Fc"
    assert body == {"prompt": 'say "hi"', "seed": 8, "size": [20, 12], "note": "seed 8"}
    assert headers["X-API-Key"] == KEY and headers["Idempotency-Key"] == "J-000009"


def test_a_header_cannot_be_broken_by_an_input(http, painter, sink):
    run(http, painter, sink, prompt="x", style="a\r\nX-Evil: 1")
    assert "X-Evil" not in painter.seen[0][1]


@pytest.mark.parametrize(
    ("described", "reply"),
    [
        ({"result": "base64", "pointer": "/images/0"}, lambda p: {"images": [base64.b64encode(p).decode()]}),
        ({"result": "base64", "pointer": "/a~1b/url"}, lambda p: {"a/b": {"url": data_address(p)}}),
    ],
    ids=["base64", "data address"],
)
def test_a_result_inside_json_is_taken_out(http, painter, sink, described, reply):
    painter.reply = lambda picture: json.dumps(reply(picture)).encode()
    result = run(http, painter, sink, ModelManifest.of(record(**described)), prompt="x")
    assert result.outputs[0].sha256 == hashlib.sha256(png(20, 12, 7, "x")).hexdigest()


@pytest.mark.parametrize(
    "body",
    [
        b"{}", b"[]", b"", b'{"images": []}', b'{"images": [5]}', b'{"images": ["%%"]}', b"{" * 9000,
        b'{"images": {"0": 1}}',
    ],
)  # fmt: skip
def test_a_result_that_is_not_where_it_should_be_is_no_result(http, painter, sink, body):
    painter.reply = lambda picture: body
    with pytest.raises(ServiceReply):
        run(http, painter, sink, ModelManifest.of(record(result="base64", pointer="/images/0")), prompt="x")


def test_an_empty_body_is_no_result(http, painter, sink):
    painter.reply = lambda picture: b""
    with pytest.raises(ServiceReply, match="empty"):
        run(http, painter, sink, prompt="x")


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, RequestRejected), (422, RequestRejected), (500, GenerationFailed), (429, ServiceBusy), (302, ServiceReply)],
)
def test_a_refusal_is_told_by_its_kind_and_leaves_no_file(http, painter, sink, status, error):
    painter.status = status
    painter.reply = lambda picture: b"width must be at most 1024"
    with pytest.raises(error):
        run(http, painter, sink, prompt="x")
    assert not sink.folder.exists() or list(sink.folder.iterdir()) == []


def test_a_full_queue_says_when_to_come_back(http, painter, sink):
    painter.status = 503
    with pytest.raises(ServiceBusy) as raised:
        run(http, painter, sink, prompt="x")
    assert raised.value.retryable and raised.value.next_step.startswith("wait 4 s")


def test_what_was_not_answered_is_unknown_and_was_sent_once(http, painter, sink):
    painter.breaks = True
    with pytest.raises(GenerationUnknown):
        run(http, painter, sink, prompt="x")
    assert len(painter.seen) == 1 and list(sink.folder.iterdir()) == []


def test_inputs_are_checked_before_anything_is_sent(http, painter, sink):
    with pytest.raises(InputInvalid):
        run(http, painter, sink, seed=1000)
    assert painter.seen == []


def test_a_file_goes_along_as_base64(http, painter, sink, tmp_path):
    (tmp_path / "m.png").write_bytes(b"mask")
    run(http, painter, sink, prompt="x", mask=tmp_path / "m.png")
    assert base64.b64decode(painter.seen[0][2]["mask"]) == b"mask"


def test_a_result_beyond_the_limit_is_cut(http, painter, tmp_path):
    painter.reply = lambda picture: b"x" * 300_000
    with pytest.raises(OutputTooLarge):
        run(http, painter, FolderSink(tmp_path / "o", max_bytes=200_000), prompt="x")
    assert list((tmp_path / "o").iterdir()) == []


def test_a_wrong_key_is_told_without_the_key(http, painter, sink):
    with pytest.raises(ServiceKeyRejected) as raised:
        http.run(
            Endpoint(painter.url, "my-own-wrong-key"), Request("J-1", ModelManifest.of(record()), {"prompt": "x"}), sink
        )
    assert "my-own-wrong-key" not in json.dumps(raised.value.to_dict())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"path": "generate"}, "does not begin with /"),
        ({"path": "/x{{nobody}}"}, "no input: nobody"),
        ({"result": "file"}, "none of body, base64, text"),
    ],
)
def test_a_description_that_cannot_be_is_told_before_anything_is_sent(http, painter, sink, change, said):
    with pytest.raises(ConfigError, match=said):
        run(http, painter, sink, ModelManifest.of(record(**change)), prompt="x")
    assert painter.seen == []


def test_health_is_what_its_path_answers(http, painter):
    endpoint = Endpoint(painter.url)
    found = {}
    for painter.health in (200, 404, 503, 500):
        found[painter.health] = http.health(endpoint).state
    assert found == {200: "ready", 404: "ready", 503: "loading", 500: "failed"}


def test_a_test_generation_is_a_picture_with_more_than_one_colour(http, painter, sink):
    model = ModelManifest.of(record())
    proof = http.test_generation(Endpoint(painter.url, KEY), model, sink)
    assert proof.succeeded and proof.evidence["sha256"] == hashlib.sha256(png(20, 12, 7, "a test")).hexdigest()
    painter.reply = lambda picture: png(20, 12, 7, flat=True)
    assert "same colour" in http.test_generation(Endpoint(painter.url, KEY), model, sink).detail
    painter.reply = lambda picture: b"<html>oops"
    assert "web page" in http.test_generation(Endpoint(painter.url, KEY), model, sink).detail


def test_a_key_without_a_value_leaves_the_body_and_null_stays():
    body = {"a": "{{gone}}", "b": None, "c": [{"d": "{{gone}}"}], "e": "x {{gone}} y"}
    assert filled(Described("/", body=body), {})[2] == {"b": None, "c": [{}], "e": "x  y"}
