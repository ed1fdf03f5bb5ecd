"""A bucket in this process: moto on loopback, behind one lock, for its conditional writes look and write in two steps.

    def test_x(s3):                        # `from s3_server import s3, s3_application` in a conftest
        store, prefix = open_store(f"s3://{s3.bucket}/runs")
        s3.client.list_objects_v2(Bucket=s3.bucket)   # what is really there, by boto3 itself
        s3.fault = lambda request: "lose" if request.method == "PUT" else None

The environment of the test then names it, as a user's would: AWS_ENDPOINT_URL_S3 and keys that open nothing else.
"""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import pytest

KEY, SECRET = "AKIATESTTESTTESTTEST", "made-up-secret-of-the-tests-000000"
CONDITIONS = ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str] = field(repr=False)

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.query


# "drop": the connection breaks before anything happened. "lose": it happens, and the answer never comes. An integer:
# that status and nothing happens.
Fault = Callable[[Request], "str | int | None"]


class S3Application:
    """One request at a time, with faults. ignores_conditions: as stores do that never heard of them."""

    def __init__(self, inner: Callable[..., Any]):
        self._inner = inner
        self._alone = threading.Lock()
        self.fault: Fault | None = None
        self.ignores_conditions = False
        self.requests: list[Request] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"], keep_blank_values=True).items()}
        headers = {name[5:].lower().replace("_", "-"): v for name, v in environ.items() if name.startswith("HTTP_")}
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], query, headers)
        with self._alone:
            self.requests.append(request)
            fault = self.fault(request) if self.fault is not None else None
            if fault == "drop":
                return self._hang_up(environ)
            if isinstance(fault, int):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response(f"{fault} Fault", [("Content-Length", "0")])
                return []
            if self.ignores_conditions:
                for name in CONDITIONS:
                    environ.pop(name, None)
            if fault == "lose":
                self._answer(environ, lambda *_: None)
                return self._hang_up(environ)
            return self._answer(environ, start_response)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        answer = self._inner(environ, start_response)
        try:
            return list(answer)
        finally:
            getattr(answer, "close", lambda: None)()

    @staticmethod
    def _hang_up(environ: dict[str, Any]) -> list[bytes]:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError("as the test asked")


@dataclass
class S3:
    """A bucket of this test's own."""

    endpoint: str
    bucket: str
    application: S3Application | None
    client: Any = field(repr=False)

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}"

    def keys(self) -> list[str]:
        return [found["Key"] for found in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", ())]

    def content(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def uploads(self) -> list[dict[str, Any]]:
        return self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])


@contextmanager
def served(application: S3Application) -> Iterator[str]:
    """The address it listens on, on loopback, while the block runs."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def boto3_client(endpoint: str) -> Any:
    """What the tests look with: nothing of it comes from the environment."""
    import boto3.session
    from botocore.config import Config

    return boto3.session.Session(KEY, SECRET, region_name="us-east-1").client(
        "s3", endpoint_url=endpoint, config=Config(retries={"total_max_attempts": 1})
    )


def name_in_environment(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What a user of another store than AWS exports."""
    patch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    patch.setenv("AWS_ACCESS_KEY_ID", KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session")
def s3_application() -> Iterator[tuple[S3Application, str]]:
    from moto.server import create_backend_app

    application = S3Application(create_backend_app("s3"))
    with served(application) as endpoint:
        yield application, endpoint


@pytest.fixture
def s3(s3_application: tuple[S3Application, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    application, endpoint = s3_application
    name_in_environment(monkeypatch, endpoint)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3_client(endpoint)
    client.create_bucket(Bucket=bucket)
    application.requests.clear()
    try:
        yield S3(endpoint, bucket, application, client)
    finally:
        application.fault, application.ignores_conditions = None, False
