"""One policy for every provider: what is repeated, what a silence means, and where a key may go."""

from __future__ import annotations

import errno
import http.server
import inspect
import socket
import threading
import time
from collections.abc import Iterator
from decimal import Decimal

import pytest
import requests
import urllib3

from fake_clock import FakeClock
from gpu_skills import doors
from gpu_skills import wire as wire_module
from gpu_skills.credentials import Credential
from gpu_skills.errors import DestinationRefused, NetworkDenied, RateLimited, Unavailable, UnexpectedReply
from gpu_skills.providers.http import Http, origin_for
from gpu_skills.wire import Answer, Call, NotSent, RequestsWire, Unanswered, classified, parse_json
from providers.wires import KEY, Script, answer

SANDBOX_KEY = Credential("vast", "sbx_madeUpForTests", "test")
REAL_KEY = Credential("vast", KEY, "VAST_API_KEY")


def made(wire, clock=None, key=REAL_KEY, origin="https://console.vast.ai", **more) -> Http:
    return Http("vast", origin, key, clock=clock or FakeClock(), wire=wire, jitter=lambda: 1.0, **more)


# reads ----------------------------------------------------------------------------------------------------------------


def test_a_read_is_asked_again_after_each_kind_of_failure_with_growing_pauses():
    clock = FakeClock()
    wire = Script([Unanswered("reset"), NotSent("refused"), answer(503, "busy"), answer(200, {"a": 1})])
    assert made(wire, clock).read("list", "/x").json() == {"a": 1}
    assert clock.slept == [1.0, 2.0, 4.0]


def test_a_read_gives_up_after_a_few_attempts_and_says_what_happened_last():
    wire = Script([answer(502, "<html><title>Bad gateway</title></html>")])
    with pytest.raises(Unavailable, match=r"did not answer list: HTTP 502: an HTML page \(Bad gateway\)"):
        made(wire).read("list", "/x")
    assert len(wire.calls) == 4


def test_retry_after_is_waited_for_within_a_bound():
    clock = FakeClock()
    wire = Script([answer(429, "slow down", retry_after="17"), answer(200, {})])
    made(wire, clock).read("list", "/x")
    assert clock.slept == [17.0]
    with pytest.raises(RateLimited) as caught:
        made(Script([answer(429, "slow down", retry_after="3600")]), clock).read("list", "/x")
    assert caught.value.details["retry_after_s"] == 3600
    assert clock.slept == [17.0]


def test_a_failure_that_time_does_not_mend_is_not_repeated():
    wire = Script([answer(429, {"error": "search_quota_exceeded"})])
    with pytest.raises(RateLimited):
        made(wire).read("search", "/x", is_final=lambda a: a.json()["error"] == "search_quota_exceeded")
    assert len(wire.calls) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 422])
def test_a_clear_refusal_of_a_read_is_an_answer(status):
    wire = Script([answer(status, {"error": "no"})])
    assert made(wire).read("list", "/x").status == status
    assert len(wire.calls) == 1


def test_a_redirect_is_never_followed():
    for call in (
        lambda h: h.read("list", "/x"),
        lambda h: h.write("create", "PUT", "/x", body={}),
    ):
        wire = Script([answer(302, "", location="https://elsewhere.example/steal")])
        with pytest.raises(UnexpectedReply, match=r"a redirect to elsewhere\.example"):
            call(made(wire))
        assert len(wire.calls) == 1
        with pytest.raises(UnexpectedReply, match="a redirect to no address"):
            call(made(Script([answer(301, "", location="http://[half")])))


# writes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "come", [answer(500, "x"), answer(429, "x", retry_after="1"), answer(200, {}), answer(503, "")]
)
def test_a_write_is_sent_once_whatever_comes(come):
    clock, wire = FakeClock(), Script([come])
    assert made(wire, clock).write("create", "PUT", "/x", body={}).status == come.status
    assert len(wire.calls) == 1 and clock.slept == []


def test_a_write_without_an_answer_is_told_apart_from_one_that_never_left():
    wire = Script([Unanswered("connection reset")])
    with pytest.raises(Unanswered):
        made(wire).write("create", "PUT", "/x", body={})
    assert len(wire.calls) == 1
    with pytest.raises(Unavailable, match="nothing was sent"):
        made(Script([NotSent("connection refused")])).write("create", "PUT", "/x", body={})
    with pytest.raises(NetworkDenied):
        made(Script([NotSent("Operation not permitted", denied=True)])).write("create", "PUT", "/x", body={})


def test_a_denied_network_is_not_asked_again():
    wire = Script([NotSent("Permission denied", denied=True)])
    with pytest.raises(NetworkDenied) as caught:
        made(wire).read("list", "/x")
    assert len(wire.calls) == 1
    assert (caught.value.exit_code, caught.value.next_step) == (3, "read docs/external-access.md")


def test_every_request_crosses_the_door_and_is_counted():
    crossings = []
    doors.watch(lambda name, side: crossings.append((name, side)))
    try:
        client = made(Script([answer(503, ""), answer(200, {})]))
        client.read("list", "/x")
        client.write("create", "PUT", "/x")
    finally:
        doors.watch(None)
    assert crossings == [("send", "before"), ("send", "after")] * 3
    assert client.sent == {"list": 2, "create": 1}


# where a key may go ---------------------------------------------------------------------------------------------------

VENDOR = "https://console.vast.ai"


def origin(url: str | None, key: Credential) -> str:
    return origin_for("vast", VENDOR, "VAST_URL", key, {} if url is None else {"VAST_URL": url})


@pytest.mark.parametrize("url", [None, "", VENDOR, VENDOR + "/"])
def test_a_real_key_goes_to_the_vendor(url):
    assert origin(url, REAL_KEY) == VENDOR


@pytest.mark.parametrize(
    ("url", "to"),
    [
        ("http://127.0.0.1:8081", "http://127.0.0.1:8081"),
        ("http://localhost:8081/", "http://127.0.0.1:8081"),
        ("http://[::1]:8081", "http://[::1]:8081"),
        ("https://127.8.9.1", "https://127.8.9.1"),
    ],
)
def test_a_sandbox_key_goes_to_loopback(url, to):
    assert origin(url, SANDBOX_KEY) == to


@pytest.mark.parametrize("url", [None, "", VENDOR, VENDOR + "/"])
def test_a_sandbox_key_never_leaves_loopback(url):
    with pytest.raises(DestinationRefused) as caught:
        origin(url, SANDBOX_KEY)
    assert "unset" not in caught.value.next_step, "the variable is not what is wrong"


@pytest.mark.parametrize("url", ["http://127.0.0.1:8081", "http://localhost:8081", "https://[::1]"])
def test_a_real_key_never_reaches_loopback(url):
    with pytest.raises(DestinationRefused) as caught:
        origin(url, REAL_KEY)
    assert KEY not in str(caught.value) and caught.value.exit_code == 3


@pytest.mark.parametrize(
    "url",
    [
        "https://console.vast.ai.evil.example",
        "http://console.vast.ai",
        "https://console.vast.ai@evil.example",
        "https://evil.example/https://console.vast.ai",
        "http://127.0.0.1@evil.example",
        "http://127.0.0.1:80\\@evil.example",
        "http://127.0.0.1.evil.example",
        "http://2130706433",
        "http://0x7f.1",
        "http://10.0.0.1",
        "http://169.254.169.254",
        "http://127.0.0.1:99999",
        "http://127.0.0.1/base",
        "http://127.0.0.1/?x=1",
        "http://user:password@127.0.0.1:1",
        "ftp://127.0.0.1",
        "file:///etc/passwd",
        "127.0.0.1:8081",
        "http://[::1%eth0]:80",
        "http://127.0.0.1\t:80",
        "console.vast.ai",
    ],
)
@pytest.mark.parametrize("key", [REAL_KEY, SANDBOX_KEY], ids=["real", "sandbox"])
def test_no_other_address_gets_any_key(url, key):
    with pytest.raises(DestinationRefused) as caught:
        origin(url, key)
    assert "password" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://objects.example.com/log?signature=x", True),
        ("http://objects.example.com/log", False),
        ("https://127.0.0.1/log", False),
        ("https://localhost/log", False),
        ("https://169.254.169.254/latest", False),
        ("https://metadata.google.internal/x", False),
        ("https://u:p@objects.example.com/log", False),
        ("https://objects.example.com:8443/log", False),
        ("file:///etc/passwd", False),
        ("https://[::1]/x", False),
        ("https://[half", False),
        ("nonsense", False),
    ],
)
def test_a_place_the_provider_names_is_read_without_the_key_and_only_in_public(url, allowed):
    wire = Script([answer(200, "log")])
    client = made(wire)
    if allowed:
        assert client.fetch("log body", url, max_bytes=100).status == 200
        assert wire.calls[0].key is None
    else:
        with pytest.raises(UnexpectedReply):
            client.fetch("log body", url, max_bytes=100)
        assert wire.calls == []


def test_the_proxy_and_certificates_of_the_environment_are_used_outside_only(tmp_path):
    bundle = tmp_path / "ca.pem"
    bundle.write_text("x")
    environ = {"HTTPS_PROXY": "http://proxy.example:3128", "SSL_CERT_FILE": str(bundle), "NO_PROXY": "intern.example"}
    wire = Script([answer(200, {})])
    made(wire, environ=environ).read("list", "/x")
    assert (wire.calls[0].proxy, wire.calls[0].ca_bundle) == ("http://proxy.example:3128", str(bundle))
    made(wire, environ={**environ, "NO_PROXY": ".vast.ai"}).read("list", "/x")
    assert wire.calls[1].proxy is None
    made(wire, environ=environ, key=SANDBOX_KEY, origin="http://127.0.0.1:1").read("list", "/x")
    assert (wire.calls[2].proxy, wire.calls[2].ca_bundle) == (None, None)


# bodies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": 0.1}', {"a": Decimal("0.1")}),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'{"a": NaN, "b": -Infinity}', {"a": None, "b": None}),
        (b'{"a": 1e999999}', {"a": None}),
        (b'{"a": 1e-999999}', {"a": 0}),
        (b'{"a": ' + b"9" * 5000 + b"}", {"a": None}),
        (b'"' + b"[" * 500 + b'"', "[" * 500),
        (b"[" * 64 + b"]" * 64, None),
    ],
)
def test_json_of_a_provider_is_read_whatever_it_means(body, value):
    read = parse_json(body)
    assert value is None or read == value


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b'{"a": 1', b'{"a": 1, "a": 2}', b"\xff\xfe", b"[" * 65 + b"]" * 65, b"[" * 200_000, b'{"a":}'],
)
def test_what_is_no_json_is_a_value_error_and_nothing_else(body):
    with pytest.raises(ValueError):
        parse_json(body)


def test_the_key_and_other_secrets_are_masked_in_everything_that_comes_back(caplog):
    caplog.set_level("DEBUG")
    wire = Script([answer(400, f'{{"msg": "key {KEY} and p%2Fw p/w"}}', location=f"https://x/{KEY}")])
    came = made(wire).write("create", "PUT", "/x", body={}, sensitive=["p/w"])
    assert came.json() == {"msg": "key *** and *** ***"}
    assert KEY not in str(came.headers) + repr(came) + caplog.text + repr(wire.calls[0])


# the library underneath -----------------------------------------------------------------------------------------------


def _instances(module) -> Iterator[BaseException]:
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if issubclass(cls, Exception) and not issubclass(cls, Warning):
            made = cls.__new__(cls)
            made.args = ("made for this test",)
            yield made


def _name(exc: BaseException) -> str:
    return f"{type(exc).__module__}.{type(exc).__name__}"


@pytest.mark.parametrize("exc", [*_instances(requests.exceptions), *_instances(urllib3.exceptions)], ids=_name)
def test_every_exception_of_the_http_library_is_translated(exc):
    told = classified(exc)
    assert isinstance(told, NotSent | Unanswered)
    assert "made for this test" not in told.reason  # it may hold an address or a header


def test_in_doubt_something_was_sent():
    assert isinstance(classified(requests.exceptions.ReadTimeout()), Unanswered)
    assert isinstance(classified(requests.exceptions.ConnectionError(ConnectionResetError(104, "reset"))), Unanswered)
    assert isinstance(classified(requests.exceptions.ChunkedEncodingError()), Unanswered)
    assert isinstance(classified(requests.exceptions.ConnectTimeout()), NotSent)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_a_refusal_by_the_operating_system_is_denied_and_nothing_else_is(number, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(number, "made up")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    call = Call("GET", "http://127.0.0.1:9/x", "list")
    with pytest.raises(NotSent) as caught:
        RequestsWire()(call)
    assert caught.value.denied
    monkeypatch.setattr(socket.socket, "connect", lambda *a: (_ for _ in ()).throw(OSError(errno.ENETUNREACH, "x")))
    with pytest.raises(NotSent) as caught:
        RequestsWire()(call)
    assert not caught.value.denied


# the real wire over a real socket -------------------------------------------------------------------------------------


class Server(http.server.BaseHTTPRequestHandler):
    """Each path is a way to answer badly."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, str], bytes]] = []

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.seen.append((f"{self.command} {self.path}", dict(self.headers), self.rfile.read(length)))
        getattr(self, self.path.strip("/").partition("?")[0])()

    do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        pass

    def start(self, status: int, length: int | None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def fine(self) -> None:
        self.start(200, 8)
        self.wfile.write(b'{"a": 1}')

    def nothing(self) -> None:
        self.start(204, None)

    def silent(self) -> None:
        self.close_connection = True

    def half(self) -> None:
        self.start(200, 1000)
        self.wfile.write(b'{"success": true, "new_con')
        self.close_connection = True

    def half_chunked(self) -> None:
        self.start(200, None, **{"Transfer-Encoding": "chunked"})
        self.wfile.write(b"8\r\n" + b'{"a": 1,' + b"\r\n")
        self.close_connection = True

    def endless(self) -> None:
        self.start(200, None)
        self.close_connection = True
        try:
            for _ in range(2000):
                self.wfile.write(b"x" * 65536)
        except OSError:
            pass

    def two_lengths(self) -> None:
        self.start(200, 8, **{"Content-Length": "9"})
        self.wfile.write(b'{"a": 1}')
        self.close_connection = True

    def away_at_length(self) -> None:
        self.start(307, 100_000_000, Location="http://[half")
        self.close_connection = True
        try:
            for _ in range(1000):
                self.wfile.write(b"x" * 100_000)
        except OSError:
            pass

    def drip(self) -> None:
        self.start(200, 100_000)
        self.close_connection = True
        try:
            for _ in range(200):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.02)
        except OSError:
            pass

    def away(self) -> None:
        self.start(307, 0, Location=f"http://127.0.0.1:{self.server.server_port}/fine")

    def stream(self) -> None:
        self.start(200, None, **{"Content-Type": "text/event-stream"})
        self.close_connection = True
        self.wfile.write(b"data: one\n\n")
        self.wfile.flush()
        time.sleep(1.5)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    listening.daemon_threads = True
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    listening.server_close()
    thread.join()


def call(url: str, method: str = "GET", **more) -> Call:
    return Call(method, url, "test", key=SANDBOX_KEY, **more)


def test_a_request_names_its_agent_and_carries_the_key_in_one_header_only(server, monkeypatch, home):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    (home / "netrc").write_text("machine 127.0.0.1 login me password stolen\n")
    Server.seen.clear()
    assert RequestsWire()(call(f"{server}/fine", "PUT", body=b"{}")).json() == {"a": 1}
    [(line, headers, body)] = Server.seen
    assert (line, body) == ("PUT /fine", b"{}")
    assert headers["Authorization"] == f"Bearer {SANDBOX_KEY.value}"
    assert headers["User-Agent"].startswith("gpu-skills/")
    assert [name for name, value in headers.items() if SANDBOX_KEY.value in value] == ["Authorization"]


def test_an_answer_without_a_body_and_a_redirect_come_as_they_are(server):
    wire = RequestsWire()
    assert (wire(call(f"{server}/nothing", "DELETE")).status, wire(call(f"{server}/away", "PUT")).status) == (204, 307)


@pytest.mark.parametrize("path", ["silent", "half", "half_chunked"])
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_half_an_answer_is_no_answer(server, path, method):
    with pytest.raises(Unanswered):
        RequestsWire()(call(f"{server}/{path}", method))


def test_a_body_without_end_is_cut_off(server):
    with pytest.raises(Unanswered, match="more than 1000000 bytes"):
        RequestsWire()(call(f"{server}/endless", max_bytes=1_000_000))


def test_of_a_stream_that_stays_open_what_came_in_time_is_taken(server):
    came = RequestsWire()(call(f"{server}/stream", stop_after_s=0.3))
    assert came.body == b"data: one\n\n"


def test_a_refused_connection_means_that_nothing_was_sent(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(NotSent) as caught:
            RequestsWire()(call(f"http://127.0.0.1:{port}/x", "PUT"))
    assert not caught.value.denied


def test_a_body_that_drips_is_given_up_at_last(server, monkeypatch):
    monkeypatch.setattr(wire_module, "WHOLE_TIMEOUT_S", 0.2)
    began = time.monotonic()
    with pytest.raises(Unanswered, match="no whole body within 0 s"):
        RequestsWire()(call(f"{server}/drip"))
    assert time.monotonic() - began < 2, "each byte comes in time; the whole would take hours"


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_an_answer_with_two_lengths_was_an_answer_to_something_sent(server, method):
    with pytest.raises(Unanswered):
        RequestsWire()(call(f"{server}/two_lengths", method))


def test_the_body_of_a_redirect_is_bounded_too(server):
    with pytest.raises(Unanswered, match="more than 1000 bytes"):
        RequestsWire()(call(f"{server}/away_at_length", max_bytes=1000))


def test_an_answer_knows_its_retry_after():
    assert answer(429, "", retry_after="12").retry_after_s == 12
    for written in ("soon", "-1", "nan", "inf", "1e99", ""):
        assert Answer(429, b"", {"retry-after": written}).retry_after_s is None
