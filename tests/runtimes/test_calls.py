"""What crosses the door to a service: where a key may go, what is asked again, and what a silence means."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from fake_clock import FakeClock
from gpu_skills import wire as wire_module
from gpu_skills.errors import ConfigError, DestinationRefused, NetworkDenied, ServiceReply, ServiceUnreachable
from gpu_skills.runtimes.base import Endpoint, Surroundings
from gpu_skills.runtimes.calls import Calls, origin_of
from gpu_skills.wire import Answer, BodyTooLarge, Call, NotSent, Unanswered


@contextmanager
def answering(*replies: bytes, pause_s: float = 0.0, piece: int = 65536):
    """A socket that answers each connection with the next of these bytes, in pieces, and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def serve() -> None:
        for reply in replies:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            with near:
                near.settimeout(10)
                try:
                    seen.append(near.recv(65536))
                    for start in range(0, len(reply), piece):
                        near.sendall(reply[start : start + piece])
                        time.sleep(pause_s)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # which ends an accept that waits
        listener.close()
        thread.join(10)


def http(body: bytes, status: int = 200, *, length: int | None = None, close: bool = True) -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) if length is None else length}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def calls(url: str, key: str | None = None, **surroundings) -> Calls:
    around = Surroundings(**{"clock": FakeClock(), "environ": {}, **surroundings})
    return Calls("the service", Endpoint(url, key), around)


def test_a_body_is_handed_on_as_it_comes_and_the_answer_keeps_none_of_it():
    pieces: list[bytes] = []
    with answering(http(b"x" * 300_000)) as (url, _):
        answer = calls(url).read("view", "/", into=pieces.append)
    assert b"".join(pieces) == b"x" * 300_000 and len(pieces) > 1 and answer.body == b""


def test_the_body_of_a_refusal_is_kept_for_its_message():
    pieces: list[bytes] = []
    with answering(http(b"no such file", 404)) as (url, _):
        answer = calls(url).read("view", "/", into=pieces.append)
    assert (answer.status, answer.text, pieces) == (404, "no such file", [])


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("bad"), KeyError("k"), TimeoutError()]
)
def test_what_the_taker_raises_comes_out_as_it_is(error):
    def full(piece: bytes) -> None:
        raise error

    with answering(http(b"x" * 10)) as (url, _), pytest.raises(type(error)) as raised:
        calls(url).read("view", "/", into=full)
    assert raised.value is error


def test_a_body_shorter_than_it_said_is_no_answer():
    with answering(http(b"x" * 10, length=20), http(b"ok")) as (url, seen):
        assert calls(url).read("queue", "/").body == b"ok"
    assert len(seen) == 2


def test_what_is_taken_piece_by_piece_is_asked_for_once():
    with answering(http(b"x" * 10, length=20), http(b"x" * 20)) as (url, seen):
        with pytest.raises(ServiceUnreachable):
            calls(url).read("view", "/", into=lambda piece: None)
        assert len(seen) == 1


def test_a_write_is_sent_once_whatever_comes_back():
    with answering(b"", http(b"{}")) as (url, seen):
        with pytest.raises(Unanswered):
            calls(url).write("prompt", "/prompt", {"a": 1})
        assert len(seen) == 1


def test_a_body_beyond_the_limit_is_said_to_be_too_large_and_not_asked_for_again():
    with answering(http(b"x" * 5000), http(b"x")) as (url, seen):
        with pytest.raises(ServiceReply) as raised:
            calls(url).read("history", "/", max_bytes=1000)
        assert raised.value.details["too_large"] and len(seen) == 1


def test_a_call_may_wait_longer_than_others_and_no_longer():
    reply = http(b"x" * 800)
    with answering(reply, pause_s=0.05, piece=8) as (url, _):
        began = time.monotonic()
        with pytest.raises(Unanswered, match="no whole body within 0 s"):
            calls(url).write("chat", "/", {}, timeout_s=0.3, silence_s=5)
        assert time.monotonic() - began < 5


def test_a_silence_in_the_middle_ends_at_its_own_limit():
    with answering(http(b"x" * 40), pause_s=1.5, piece=60) as (url, _):
        began = time.monotonic()
        with pytest.raises(Unanswered):
            calls(url).write("chat", "/", {}, timeout_s=60, silence_s=0.2)
        assert time.monotonic() - began < 1.4


def test_a_server_that_is_starting_is_asked_again_and_then_unreachable():
    clock = FakeClock()
    with answering(http(b"wait", 503), http(b"wait", 502), http(b"{}")) as (url, _):
        assert calls(url, clock=clock).read("queue", "/").body == b"{}"
    assert clock.slept == [0.5, 1.0]
    with (
        answering(*[http(b"bad gateway", 502)] * 3) as (url, _),
        pytest.raises(ServiceUnreachable, match="bad gateway"),
    ):
        calls(url).read("queue", "/")


def test_a_refusal_by_the_operating_system_is_no_outage():
    def forbidden(call: Call) -> Answer:
        raise NotSent("Operation not permitted", denied=True)

    for ask in (lambda c: c.read("x", "/"), lambda c: c.write("x", "/")):
        with pytest.raises(NetworkDenied):
            ask(calls("http://127.0.0.1:1", wire=forbidden))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://h",
        "http://",
        "http://user:pw@h",
        "http://h/?a=1",
        "http://h/#x",
        "http://h:99999",
        "http://h\n",
        "file:///etc/passwd",
        "http://ho st",
        "http://h\\@e",
    ],
)
def test_what_is_no_address_is_refused_and_a_login_in_it_is_not_shown(url):
    with pytest.raises(ConfigError) as raised:
        origin_of("the service", Endpoint(url))
    assert "pw" not in raised.value.message


@pytest.mark.parametrize(
    ("url", "key", "may"),
    [
        ("http://127.0.0.1:80", "k" * 9, True),
        ("http://[::1]:80/", "k" * 9, True),
        ("https://example.com/base/", "k" * 9, True),
        ("http://example.com", None, True),
        ("http://example.com", "k" * 9, False),
        ("http://127.0.0.1.example.com", "k" * 9, False),
    ],
)
def test_a_key_goes_to_this_computer_or_over_tls(url, key, may):
    if may:
        assert origin_of("the service", Endpoint(url, key)) == url.rstrip("/")
    else:
        with pytest.raises(DestinationRefused):
            origin_of("the service", Endpoint(url, key))


def test_a_key_with_a_line_break_is_refused_before_it_makes_a_header():
    with pytest.raises(ConfigError):
        calls("http://127.0.0.1:1", "key\r\nX: 1")


def test_a_key_that_the_server_says_back_is_masked_in_what_is_read():
    def echo(call: Call) -> Answer:
        return Answer(200, f'{{"you": "{call.headers["Authorization"]}"}}'.encode())

    service = calls("http://127.0.0.1:5", "secret-123456", wire=echo)
    assert service.mapping("x", service.read("x", "/")) == {"you": "Bearer ***"}


def test_a_proxy_of_the_user_is_for_others_and_not_for_this_computer():
    seen: list[Call] = []

    def record(call: Call) -> Answer:
        seen.append(call)
        return Answer(200, b"{}")

    environ = {"https_proxy": "http://proxy:3128", "no_proxy": ".internal"}
    for url in ("https://example.com", "http://127.0.0.1:5", "https://a.internal"):
        calls(url, wire=record, environ=environ).read("x", "/")
    assert [call.proxy for call in seen] == ["http://proxy:3128", None, None]


def test_a_call_shows_neither_its_key_nor_its_body():
    seen: list[Call] = []
    calls("http://127.0.0.1:5", "secret-123456", wire=lambda call: seen.append(call) or Answer(200, b"{}")).write(
        "x", "/", {"a": "private"}
    )
    assert "secret-123456" not in repr(seen[0]) and "private" not in repr(seen[0])


def test_too_large_is_also_a_silence_for_whoever_does_not_ask():
    assert issubclass(BodyTooLarge, wire_module.Unanswered)
