"""One request over the network: what it is, what came back, and what a failure of the HTTP library means.

Bodies are bounded in size, time and depth; what is sent is exactly what the call says. Policy stands in http.py.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gpu_skills import __version__
from gpu_skills.credentials import Credential
from gpu_skills.doors import door
from gpu_skills.errors import one_line

if TYPE_CHECKING:
    import requests

# An edge in front of RunPod refuses callers that name no agent, or the standard library's.
USER_AGENT = f"gpu-skills/{__version__}"
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0  # between two bytes
WHOLE_TIMEOUT_S = 120.0
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_DEPTH = 64
_MAX_DIGITS = 40


@dataclass(frozen=True)
class Call:
    """One request. endpoint: our word for it, for limits and counts. sensitive: values to mask beside the key.

    key None: none is sent. stop_after_s: take what has come by then as the whole body (a stream that never ends).
    timeout_s: for the whole answer, and silence_s between two bytes of it, where the usual ones are too short.
    into: takes the body of a 2xx answer piece by piece, as it comes; `Answer.body` is then empty. What it raises comes
    out of `send` as it is.
    """

    method: str
    url: str
    endpoint: str
    body: bytes | None = field(default=None, repr=False)
    key: Credential | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    sensitive: tuple[str, ...] = field(default=(), repr=False)
    proxy: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    stop_after_s: float | None = None
    max_bytes: int = MAX_BODY_BYTES
    timeout_s: float | None = None
    silence_s: float | None = None
    into: Callable[[bytes], None] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Answer:
    """What came back, with every secret we know of already masked. headers: names in lower case."""

    status: int
    body: bytes = field(default=b"", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def json(self) -> Any:
        """The document; ValueError when it is none. Fractions are Decimals, NaN and infinities are None."""
        return parse_json(self.body)

    @property
    def text(self) -> str:
        """The beginning of the body for a message: one line, without markup."""
        shown = self.body[:4000].decode("utf-8", "replace")
        if "<html" in shown.lower():
            title = re.search(r"(?is)<title[^>]*>(.*?)</title>", shown)
            shown = "an HTML page" + (f" ({title[1].strip()})" if title else "")
        return one_line(" ".join(shown.split()), limit=300) or "an empty body"

    @property
    def retry_after_s(self) -> float | None:
        try:
            seconds = float(self.headers.get("retry-after", ""))
        except ValueError:
            return None
        return seconds if 0 <= seconds < 1e6 else None


class NotSent(Exception):
    """Nothing left this computer. denied: the operating system, or our own proxy, forbids it."""

    def __init__(self, reason: str, *, denied: bool = False):
        super().__init__(reason)
        self.reason, self.denied = reason, denied


class Unanswered(Exception):
    """It was sent, or may have been, and no whole answer came. status: of the answer that broke off, if one began."""

    def __init__(self, reason: str, *, status: int | None = None):
        super().__init__(reason)
        self.reason, self.status = reason, status


class BodyTooLarge(Unanswered):
    """More than the call allows. Asking for less may help."""


class _IntoFailed(Exception):
    """What `Call.into` raised, on its way past everything that speaks of the network. It is the cause."""


Wire = Callable[[Call], Answer]


@door("send")
def send(call: Call, wire: Wire) -> Answer:
    """The door: every request to a provider or a service, and nothing else, passes here. Raises NotSent, Unanswered."""
    return wire(call)


# the way there --------------------------------------------------------------------------------------------------------


def way_to(host: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """`proxy` and `ca_bundle` of a call, as the user's environment names them; neither for this computer itself."""
    if is_loopback(host):
        return {}
    proxy = environ.get("https_proxy") or environ.get("HTTPS_PROXY") or environ.get("all_proxy")
    if proxy and _bypasses_proxy(host, environ.get("no_proxy") or environ.get("NO_PROXY") or ""):
        proxy = None
    bundle = environ.get("REQUESTS_CA_BUNDLE") or environ.get("SSL_CERT_FILE")
    return {"proxy": proxy or None, "ca_bundle": bundle if bundle and os.path.exists(bundle) else None}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    if "%" in host:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bypasses_proxy(host: str, no_proxy: str) -> bool:
    names = [name.strip().lstrip("*").lstrip(".") for name in no_proxy.split(",")]
    return "*" in no_proxy.split(",") or any(n and (host == n or host.endswith("." + n)) for n in names)


# bodies ---------------------------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> Any:
    """A provider's JSON, whatever it is made of; ValueError for what is none, is too deep or says a key twice."""
    try:
        value = json.loads(
            body.decode("utf-8-sig"),
            parse_float=_decimal,
            parse_int=_integer,
            parse_constant=lambda name: None,
            object_pairs_hook=_each_key_once,
        )
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise ValueError("nested too deep")
    return value


def _is_deep(value: Any) -> bool:
    waiting = [(value, 1)]
    while waiting:
        current, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return True
        children = current.values() if isinstance(current, dict) else current if isinstance(current, list) else ()
        waiting += [(child, depth + 1) for child in children if isinstance(child, dict | list)]
    return False


def _decimal(digits: str) -> Decimal | None:
    """1e999999 is a short text and a huge number: what a provider means lies within thirty places of one."""
    try:
        value = +Decimal(digits)
    except ArithmeticError:
        return None
    if value == 0 or -30 <= value.adjusted() <= 30:
        return value
    return Decimal(0) if value.adjusted() < 0 else None


def _integer(digits: str) -> int | None:
    return int(digits) if len(digits) <= _MAX_DIGITS else None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key that is there twice")
    return made


# the real wire --------------------------------------------------------------------------------------------------------


class RequestsWire:
    """The wire over `requests`, with nothing it would do by itself: no redirects, no netrc, no retries, no proxy that
    the call does not name. Reads share connections. A write has one of its own: on a kept one that the server has just
    closed it would look as if it had been sent."""

    def __init__(self) -> None:
        self._session: requests.Session | None = None

    def __call__(self, call: Call) -> Answer:
        import requests
        import urllib3

        if call.method == "GET":
            session = self._session = self._session or _bare_session()
        else:
            session = _bare_session()
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **call.headers}
        if call.key is not None:
            headers["Authorization"] = f"Bearer {call.key.value}"
        try:
            with session.request(
                call.method,
                call.url,
                data=call.body,
                headers=headers,
                timeout=(CONNECT_TIMEOUT_S, call.stop_after_s or call.silence_s or READ_TIMEOUT_S),
                allow_redirects=False,
                stream=True,
                proxies={"https": call.proxy} if call.proxy else {},
                verify=call.ca_bundle or True,
            ) as reply:
                body = _body(call, reply)
                return Answer(reply.status_code, body, {k.lower(): v for k, v in reply.headers.items()})
        except _IntoFailed as exc:
            assert exc.__cause__ is not None
            raise exc.__cause__ from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as exc:
            raise classified(exc) from exc
        finally:
            if session is not self._session:
                session.close()


def _bare_session() -> requests.Session:
    import requests

    session = requests.Session()
    session.trust_env = False
    session.headers.clear()
    # Even where redirects are not followed it would look up the target, and read the whole body for that.
    session.get_redirect_target = lambda reply: None  # type: ignore[method-assign]
    return session


def _body(call: Call, reply: requests.Response) -> bytes:
    """The whole body within size and time. A stream is cut at `stop_after_s` and what came counts."""
    import requests
    import urllib3

    limit_s = call.stop_after_s or call.timeout_s or WHOLE_TIMEOUT_S
    ends = time.monotonic() + limit_s
    into = call.into if 200 <= reply.status_code < 300 else None
    parts: list[bytes] = []
    size = 0
    try:
        # `read1` gives what is there: a read of so many bytes would last until they came, however slowly they drip.
        while chunk := reply.raw.read1(65536, decode_content=True):
            size += len(chunk)
            if into is None:
                parts.append(chunk)
            if size > call.max_bytes:
                if call.stop_after_s is not None:
                    break
                raise BodyTooLarge(f"a body of more than {call.max_bytes} bytes", status=reply.status_code)
            if time.monotonic() > ends:
                if call.stop_after_s is not None:
                    break
                raise Unanswered(f"no whole body within {limit_s:.0f} s", status=reply.status_code)
            if into is not None:
                _hand_over(chunk, into)
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as exc:
        if call.stop_after_s is None:
            raise Unanswered(f"the answer broke off ({_words(exc)})", status=reply.status_code) from exc
    announced = reply.headers.get("Content-Length", "")
    if call.stop_after_s is None and announced.isdigit() and size < int(announced):
        if not reply.headers.get("Content-Encoding") and call.method != "HEAD":
            raise Unanswered(f"{size} of {announced} bytes of an answer", status=reply.status_code)
    return b"".join(parts)


def _hand_over(chunk: bytes, into: Callable[[bytes], None]) -> None:
    try:
        into(chunk)
    except Exception as exc:
        raise _IntoFailed from exc


def classified(exc: BaseException) -> NotSent | Unanswered:
    """What a failure of the HTTP library means. In doubt something was sent."""
    import requests
    import urllib3

    chain = list(_chain(exc))
    if any(isinstance(e, Unanswered) for e in chain):
        return next(e for e in chain if isinstance(e, Unanswered))
    before_sending = (
        requests.exceptions.ConnectTimeout,
        requests.exceptions.ProxyError,
        requests.exceptions.InvalidURL,
        requests.exceptions.InvalidSchema,
        requests.exceptions.MissingSchema,
        requests.exceptions.InvalidHeader,
        requests.exceptions.InvalidProxyURL,
        requests.exceptions.UnrewindableBodyError,
        urllib3.exceptions.NewConnectionError,
        urllib3.exceptions.ConnectTimeoutError,
        urllib3.exceptions.NameResolutionError,
        urllib3.exceptions.ProxyError,
        urllib3.exceptions.LocationParseError,
    )
    # The two InvalidHeaders differ: the one of requests alone is about ours, that of urllib3 about an answer's.
    is_of_answer = any(isinstance(e, urllib3.exceptions.InvalidHeader) for e in chain)
    is_early = any(isinstance(e, before_sending) for e in chain) or _is_certificate_error(chain)
    if is_of_answer or not is_early:
        return Unanswered(f"no answer ({_words(exc)})")
    numbers = {e.errno for e in chain if isinstance(e, OSError) and e.errno is not None}
    if numbers & {errno.EPERM, errno.EACCES}:
        return NotSent(_words(exc), denied=True)
    if any(isinstance(e, requests.exceptions.ProxyError | urllib3.exceptions.ProxyError) for e in chain):
        refused = any(re.search(r"Tunnel connection failed: (403|407)", str(e)) for e in chain)
        return NotSent(
            "the proxy of this environment refuses the connection" if refused else _words(exc), denied=refused
        )
    return NotSent(_words(exc))


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """An exception and everything it was made from, however it refers to it."""
    waiting: list[Any] = [exc]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__, getattr(current, "reason", None), *current.args]


def _is_certificate_error(chain: list[BaseException]) -> bool:
    import ssl

    return any(isinstance(e, ssl.SSLCertVerificationError) for e in chain)


def _words(exc: BaseException) -> str:
    """A failure in words that hold neither an address nor a header."""
    for e in _chain(exc):
        if isinstance(e, OSError) and e.strerror and not isinstance(e.strerror, BaseException):
            return one_line(str(e.strerror), limit=120)
    return type(next(iter(_chain(exc)))).__name__
