"""The image server as a process: what it draws, what it refuses, how it behaves when too much is asked of it."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from examples.serving import KEY, Running, running
from gpu_skills import resources, schemas
from gpu_skills.runtimes.base import Endpoint, Request, Served, Surroundings, runtime_of
from gpu_skills.runtimes.manifest import ModelManifest
from gpu_skills.runtimes.outputs import FolderSink

EXAMPLE = resources.example("image-server")
ORDER = {"prompt": "a lighthouse in fog", "seed": 7, "width": 64, "height": 48}

pytestmark = pytest.mark.subprocess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("image-server") / "log"
    with running(EXAMPLE / "server.py", "IMAGE_SERVER_KEY", log=log) as found:
        yield found


def start(tmp_path: Path, *options: str):
    return running(EXAMPLE / "server.py", "IMAGE_SERVER_KEY", *options, log=tmp_path / "log")


def until(condition, within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


# pictures -------------------------------------------------------------------------------------------------------------


def test_the_same_order_is_the_same_bytes_and_any_other_is_not(server: Running) -> None:
    first = server.ask("POST", "/generate", ORDER)
    assert (first.status, first.headers["Content-Type"]) == (200, "image/png")
    assert server.ask("POST", "/generate", ORDER).body == first.body
    others = [{**ORDER, name: value} for name, value in (("seed", 8), ("prompt", "b"), ("steps", 5), ("width", 65))]
    assert len({server.ask("POST", "/generate", other).body for other in others} | {first.body}) == 5


def test_a_picture_is_a_whole_png_of_the_size_asked_for(server: Running) -> None:
    for width, height in ((16, 16), (33, 512), (512, 17)):
        body = server.ask("POST", "/generate", {**ORDER, "width": width, "height": height}).body
        assert body[:8] == b"\x89PNG\r\n\x1a\n" and body[-8:-4] == b"IEND"
        assert (int.from_bytes(body[16:20], "big"), int.from_bytes(body[20:24], "big")) == (width, height)
        start = body.index(b"IDAT")
        size = int.from_bytes(body[start - 4 : start], "big")
        pixels = zlib.decompress(body[start + 4 : start + 4 + size])
        assert len(pixels) == height * (width + 1) and len(set(pixels)) > 20


def test_what_is_left_out_has_a_default(server: Running) -> None:
    full = {"prompt": "x", "seed": 0, "width": 128, "height": 128, "steps": 4}
    assert server.ask("POST", "/generate", {"prompt": "x"}).body == server.ask("POST", "/generate", full).body


@pytest.mark.parametrize("name", ["server.py", "picture.py"])
def test_its_code_is_python_3_8_without_anything_installed(name: str) -> None:
    tree = ast.parse((EXAMPLE / name).read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {*sys.stdlib_module_names, "http.server", "picture"}


# refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"width": 15}, "width"), ({"width": 513}, "width"), ({"width": True}, "width"), ({"width": "64"}, "width"),
        ({"height": 10**30}, "height"), ({"height": 4.0}, "height"), ({"steps": 0}, "steps"), ({"steps": 9}, "steps"),
        ({"seed": -1}, "seed"), ({"seed": 2**32}, "seed"), ({"seed": None}, "seed"), ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 1001}, "prompt"), ({"prompt": 5}, "prompt"), ({"negative": "y"}, "unknown_field"),
    ],
)  # fmt: skip
def test_an_order_outside_the_limits_is_refused_by_name(server: Running, change: dict, code: str) -> None:
    answer = server.ask("POST", "/generate", {**ORDER, **change})
    assert answer.status in (400, 422) and answer.json["error"]["code"] == code and answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"{", 400), (b"[]", 400), (b"[" * 60_000, 400), (b"\xff", 400), (b'{"prompt": NaN}', 422)],
)
def test_a_body_that_is_no_order_is_refused(server: Running, body: bytes, status: int) -> None:
    assert server.ask("POST", "/generate", body).status == status


def test_a_prompt_with_half_a_character_is_drawn_all_the_same(server: Running) -> None:
    assert server.ask("POST", "/generate", b'{"prompt": "\\ud800"}').status == 200


def test_a_body_too_large_is_refused_and_the_answer_arrives(server: Running) -> None:
    for size in (65 * 1024, 1 << 20):
        assert server.ask("POST", "/generate", b" " * size).status == 413


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ünicode"]
)
def test_without_the_key_there_is_no_picture_and_no_metrics(server: Running, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    for method, path, body in (("POST", "/generate", ORDER), ("GET", "/metrics", None)):
        answer = server.ask(method, path, body, headers)
        assert (answer.status, answer.headers["Www-Authenticate"]) == (401, "Bearer")
    assert server.ask("GET", "/health", headers={}).json == {"status": "ready"}


def test_without_a_key_of_its_own_it_does_not_start() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "IMAGE_SERVER_KEY"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "server.py"), "--port", "0"], env=environ, capture_output=True, timeout=30
    )
    assert done.returncode == 1 and b"IMAGE_SERVER_KEY" in done.stderr


def test_the_log_has_neither_prompts_nor_keys_nor_escapes(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        server.ask("POST", "/generate", {"prompt": "violet orchid"})
        raw = socket.create_connection(("127.0.0.1", server.port), 10)
        raw.sendall(b"GET /\x1b[31m HTTP/1.0\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.0 401")
        raw.close()
        log = server.log.read_bytes()
    assert b"POST /generate" in log and b"violet" not in log and KEY.encode() not in log and b"\x1b" not in log


# load -----------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_the_queue_is_shed_at_once_and_the_rest_is_done(tmp_path: Path) -> None:
    with start(tmp_path, "--queue", "2", "--step-seconds", "0.25") as server, ThreadPoolExecutor(9) as pool:
        work = [pool.submit(server.ask, "POST", "/generate", {**ORDER, "seed": n}) for n in range(8)]
        until(lambda: server.ask("GET", "/metrics").json["shed"] == 5)
        metrics = server.ask("GET", "/metrics").json
        assert (metrics["working"], metrics["waiting"], metrics["room"]) == (1, 2, 3)
        assert server.ask("GET", "/health").status == 200
        answers = [one.result() for one in work]
        shed = [one for one in answers if one.status == 503]
        assert (len(shed), sum(one.status == 200 for one in answers)) == (5, 3)
        assert all(int(one.headers["Retry-After"]) >= 1 and one.json["error"]["code"] == "busy" for one in shed)
        metrics = server.ask("GET", "/metrics").json
        assert (metrics["requests"], metrics["pictures"], metrics["waiting"]) == (8, 3, 0)
        assert 1.0 <= metrics["p50_s"] <= metrics["p95_s"]
        assert server.ask("POST", "/generate", {**ORDER, "steps": 1}).status == 200


def test_an_order_given_twice_under_one_id_is_made_once_also_while_it_is_being_made(tmp_path: Path) -> None:
    with start(tmp_path, "--step-seconds", "0.1") as server, ThreadPoolExecutor(4) as pool:
        headers = {**server.headers, "Idempotency-Key": "run-1"}
        work = [pool.submit(server.ask, "POST", "/generate", ORDER, headers) for _ in range(4)]
        answers = [one.result() for one in work]
        assert {one.status for one in answers} == {200} and len({one.body for one in answers}) == 1
        assert server.ask("POST", "/generate", ORDER, headers).body == answers[0].body
        assert server.ask("GET", "/metrics").json["pictures"] == 1
        assert server.ask("POST", "/generate", {**ORDER, "seed": 1}, headers).json["error"]["code"] == "id_reused"


def test_a_shed_order_may_be_given_again_under_its_id(tmp_path: Path) -> None:
    with start(tmp_path, "--queue", "0", "--step-seconds", "0.2") as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.ask, "POST", "/generate", ORDER)
        until(lambda: server.ask("GET", "/metrics").json["working"] == 1)
        headers = {**server.headers, "Idempotency-Key": "run-2"}
        assert server.ask("POST", "/generate", ORDER, headers).status == 503
        assert first.result().status == 200
        until(lambda: server.ask("GET", "/metrics").json["working"] == 0)
        assert server.ask("POST", "/generate", ORDER, headers).body == first.result().body


def test_a_client_that_goes_away_or_says_nothing_holds_nobody_up(server: Running) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(20)]
    silent[0].sendall(b"POST /generate HTTP/1.0\r\nContent-Length: 100\r\n\r\n{")
    assert server.ask("POST", "/generate", ORDER).status == 200
    for one in silent:
        one.close()


# its end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_finishes_what_it_began_and_ends_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path, "--step-seconds", "0.3") as server, ThreadPoolExecutor(2) as pool:
        work = [pool.submit(server.ask, "POST", "/generate", {**ORDER, "seed": n}) for n in range(2)]
        until(lambda: server.ask("GET", "/metrics").json["waiting"] == 1)
        server.process.send_signal(number)
        assert [one.result().status for one in work] == [200, 200]
        assert server.process.wait(10) == 0
        with pytest.raises(ConnectionError):
            server.ask("GET", "/health")


# as a deployment ------------------------------------------------------------------------------------------------------


def manifest() -> ModelManifest:
    record = yaml.safe_load((EXAMPLE / "model.yaml").read_text())
    assert not schemas.problems(record, "models")
    return ModelManifest.of(record)


def test_its_description_starts_it_proves_it_and_runs_it(server: Running, tmp_path: Path) -> None:
    model, runtime = manifest(), runtime_of("http", Surroundings(environ={}))
    service = runtime.service(Served(model, 8600, str(tmp_path)))
    assert (service.key_variable, service.health_path) == ("IMAGE_SERVER_KEY", "/health")
    assert "--port 8600" in service.command
    endpoint = Endpoint(server.url, KEY)
    assert runtime.health(endpoint).state == "ready"
    proof = runtime.test_generation(endpoint, model, FolderSink(tmp_path / "proof"))
    assert proof.succeeded and proof.evidence["kind"] == "image/png"
    wanted = {**ORDER, "steps": 2}
    result = runtime.run(endpoint, Request("run-9", model, wanted), FolderSink(tmp_path / "out"))
    assert result.outputs[0].path.read_bytes() == server.ask("POST", "/generate", wanted).body


def test_its_limits_are_those_of_its_description(server: Running) -> None:
    for name, wanted in manifest().inputs.items():
        if wanted.type == "integer":
            for value, status in ((wanted.min, 200), (wanted.max, 200), (wanted.min - 1, 422), (wanted.max + 1, 422)):
                order = {"prompt": "x", "width": 16, "height": 16, name: value}
                assert server.ask("POST", "/generate", order).status == status, (name, value)
            assert server.ask("POST", "/generate", {"prompt": "x", name: wanted.default}).status == 200


def test_its_scripts_set_it_up_twice_and_prove_it_by_one_known_picture(tmp_path: Path) -> None:
    environ = {**os.environ, "GPU_WORKSPACE": str(tmp_path / "a workspace")}
    for script in ("setup.sh", "setup.sh", "verify.sh"):
        done = subprocess.run(["bash", str(EXAMPLE / script)], env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    place = tmp_path / "a workspace/services/image-server"
    assert {path.name for path in place.iterdir() if path.is_file()} == {"server.py", "picture.py", "verify.sh"}
    command = manifest().serve.command.replace("{port}", "0")
    started = subprocess.Popen(
        ["bash", "-c", command], env={**environ, "IMAGE_SERVER_KEY": KEY}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert "http://127.0.0.1:" in started.stdout.readline()
    finally:
        started.terminate()
        assert started.wait(10) == 0
        started.stdout.close()
    (place / "picture.py").write_text((place / "picture.py").read_text().replace("BANDS = 3", "BANDS = 2"))
    done = subprocess.run(["bash", str(EXAMPLE / "verify.sh")], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "another one" in done.stderr


def test_the_known_picture_is_the_one_the_server_gives(server: Running) -> None:
    order = json.loads(json.dumps(manifest().test.inputs))
    body = server.ask("POST", "/generate", order).body
    assert hashlib.sha256(body).hexdigest() in (EXAMPLE / "verify.sh").read_text()
