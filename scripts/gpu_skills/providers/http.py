"""The one way to a provider over HTTP: which key may go where, what is repeated, and what a silence means.

    read()    asked again after a failure, with growing uneven pauses and Retry-After, within a bounded time
    write()   sent once. No answer is `Unanswered`: it may have happened, and only the caller can find out

Four things can come of a call: an answer (which may be a refusal), `NotSent` (nothing left this computer), `Unanswered`
(it left, and no whole answer came back), or a key that may not go there, which is refused before anything is tried.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from gpu_skills import __version__
from gpu_skills.clock import Clock
from gpu_skills.credentials import Credential
from gpu_skills.doors import door
from gpu_skills.errors import DestinationRefused, NetworkDenied, RateLimited, Unavailable, UnexpectedReply, one_line

if TYPE_CHECKING:
    import requests

    from gpu_skills.providers.limits import Limiter

log = logging.getLogger("gpu_skills.providers.http")

# An edge in front of RunPod refuses callers that name no agent, or the standard library's.
USER_AGENT = f"gpu-skills/{__version__}"
SANDBOX_KEY_PREFIX = "sbx_"
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0  # between two bytes
WHOLE_TIMEOUT_S = 120.0
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_DEPTH = 64
_MAX_DIGITS = 40
ATTEMPTS = 4
WAIT_BUDGET_S = 60.0
_FIRST_PAUSE_S = 0.5
_WORTH_REPEATING = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Call:
    """One request. endpoint: our word for it, for limits and counts. sensitive: values to mask beside the key.

    key None: none is sent. stop_after_s: take what has come by then as the whole body (a stream that never ends).
    """

    method: str
    url: str
    endpoint: str
    body: bytes | None = field(default=None, repr=False)
    key: Credential | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    sensitive: tuple[str, ...] = field(default=(), repr=False)
    proxy: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    stop_after_s: float | None = None
    max_bytes: int = MAX_BODY_BYTES


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


Wire = Callable[[Call], Answer]


@door("send")
def send(call: Call, wire: Wire) -> Answer:
    """The door: every request to a provider, and nothing else, passes here. Raises NotSent or Unanswered."""
    return wire(call)


class Http:
    """A provider's API as one account sees it.

    origin: from `origin_for`, which decides whether the key may go there. sent: how often each endpoint was asked.
    """

    def __init__(
        self,
        provider: str,
        origin: str,
        key: Credential,
        *,
        clock: Clock,
        limiter: Limiter | None = None,
        environ: Mapping[str, str] | None = None,
        wire: Wire | None = None,
        jitter: Callable[[], float] = random.random,
    ):
        self.provider = provider
        self.origin = origin
        self.key = key
        self.sent: Counter[str] = Counter()
        self._clock = clock
        self._limiter = limiter
        self._environ = environ or {}
        self._wire = wire or RequestsWire()
        self._jitter = jitter

    def read(
        self,
        endpoint: str,
        path: str,
        *,
        method: str = "GET",
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        is_final: Callable[[Answer], bool] = lambda answer: False,
        stop_after_s: float | None = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> Answer:
        """Ask until there is an answer, within bounds. Also for what reads with another method than GET.

        is_final: a failure that asking again cannot mend (a daily quota). Raises NetworkDenied, Unavailable,
        RateLimited; every other status is an answer.
        """
        call = self._call(endpoint, path, method, query, body, stop_after_s=stop_after_s, max_bytes=max_bytes)
        waited_s = 0.0
        for attempt in range(1, ATTEMPTS + 1):
            if self._limiter is not None:
                self._limiter.wait(endpoint)
            pause_s = _FIRST_PAUSE_S * 2**attempt * (0.5 + self._jitter() / 2)
            problem: Exception
            cause: Exception | None = None
            try:
                answer = self._send(call)
            except NotSent as exc:
                if exc.denied:
                    raise self._denied(exc) from exc
                problem, cause = self._unreachable(endpoint, exc.reason), exc
            except Unanswered as exc:
                problem, cause = self._unreachable(endpoint, exc.reason), exc
            else:
                if answer.status not in _WORTH_REPEATING:
                    return self._not_a_redirect(endpoint, answer)
                if answer.status == 429:
                    problem = self.rate_limited(endpoint, answer)
                    pause_s = max(pause_s, answer.retry_after_s or 0)
                else:
                    problem = self._unreachable(endpoint, f"HTTP {answer.status}: {answer.text}")
                if is_final(answer):
                    raise problem
            if attempt == ATTEMPTS or waited_s + pause_s > WAIT_BUDGET_S:
                raise problem from cause
            self._clock.sleep(pause_s)
            waited_s += pause_s
        raise AssertionError("the last attempt raises or returns")

    def write(
        self, endpoint: str, method: str, path: str, *, body: Any = None, sensitive: Iterable[str] = ()
    ) -> Answer:
        """Send once. The limiter may delay it, never drop it.

        Raises Unanswered when it may have happened; NetworkDenied or Unavailable when certainly nothing left. A status
        is the caller's to judge, 429 and 5xx included.
        """
        call = self._call(endpoint, path, method, None, body, sensitive=tuple(s for s in sensitive if s))
        if self._limiter is not None:
            self._limiter.wait(endpoint, is_write=True)
        try:
            answer = self._send(call)
        except NotSent as exc:
            if exc.denied:
                raise self._denied(exc) from exc
            raise self._unreachable(endpoint, f"{exc.reason}; nothing was sent") from exc
        return self._not_a_redirect(endpoint, answer)

    def fetch(self, endpoint: str, url: str, *, max_bytes: int) -> Answer:
        """GET a place the provider named, without the key: object storage over HTTPS, or the sandbox's own origin."""
        parts = urlsplit(url)
        on_sandbox = bool(parts.hostname) and f"{parts.scheme}://{parts.netloc}" == self.origin
        if not on_sandbox and not _is_public_https(url):
            shown = one_line(url.partition("?")[0], limit=80)
            raise UnexpectedReply(provider=self.provider, what=endpoint, reason=f"an address not to be read: {shown}")
        call = Call("GET", url, endpoint, max_bytes=max_bytes, **self._way(parts.hostname or ""))
        try:
            return self._send(call)
        except NotSent as exc:
            if exc.denied:
                raise self._denied(exc) from exc
            raise self._unreachable(endpoint, exc.reason) from exc
        except Unanswered as exc:
            raise self._unreachable(endpoint, exc.reason) from exc

    def rate_limited(self, endpoint: str, answer: Answer) -> RateLimited:
        seconds = answer.retry_after_s
        return RateLimited(
            provider=self.provider,
            what=endpoint,
            reason=answer.text,
            retry_after_s=10 if seconds is None else math.ceil(seconds),
        )

    def unexpected(self, endpoint: str, reason: str) -> UnexpectedReply:
        return UnexpectedReply(provider=self.provider, what=endpoint, reason=reason)

    def masked(self, text: str, sensitive: Iterable[str] = ()) -> str:
        return _mask(text.encode(), (self.key.value, *sensitive)).decode("utf-8", "replace")

    def _call(
        self,
        endpoint: str,
        path: str,
        method: str,
        query: Mapping[str, Any] | None,
        body: Any,
        **more: Any,
    ) -> Call:
        encoded = None
        headers = {"Accept": "application/json, text/event-stream"}
        if body is not None:
            encoded = json.dumps(body, allow_nan=False, default=_plain).encode()
            headers["Content-Type"] = "application/json"
        url = self.origin + path
        if query:
            url += "?" + urlencode({name: _query_value(value) for name, value in query.items()}, quote_via=quote)
        host = urlsplit(self.origin).hostname or ""
        return Call(method, url, endpoint, encoded, self.key, headers, **self._way(host), **more)

    def _way(self, host: str) -> dict[str, Any]:
        """The proxy and certificates the user's environment names; neither for this computer itself."""
        if _is_loopback(host):
            return {}
        environ = self._environ
        proxy = environ.get("https_proxy") or environ.get("HTTPS_PROXY") or environ.get("all_proxy")
        if proxy and _bypasses_proxy(host, environ.get("no_proxy") or environ.get("NO_PROXY") or ""):
            proxy = None
        bundle = environ.get("REQUESTS_CA_BUNDLE") or environ.get("SSL_CERT_FILE")
        return {"proxy": proxy or None, "ca_bundle": bundle if bundle and os.path.exists(bundle) else None}

    def _send(self, call: Call) -> Answer:
        self.sent[call.endpoint] += 1
        began = time.monotonic()
        where = call.url.partition("?")[0]
        try:
            answer = send(call, self._wire)
        except (NotSent, Unanswered) as exc:
            log.debug("%s %s: %s: %s", call.method, where, type(exc).__name__, exc)
            raise
        secrets = (self.key.value, *call.sensitive)
        answer = replace(
            answer,
            body=_mask(answer.body, secrets),
            headers={name: _mask(v.encode(), secrets).decode("utf-8", "replace") for name, v in answer.headers.items()},
        )
        took_ms = (time.monotonic() - began) * 1000
        log.debug("%s %s: %d, %d bytes, %.0f ms", call.method, where, answer.status, len(answer.body), took_ms)
        if self._limiter is not None:
            self._limiter.learn(call.endpoint, answer.status, answer.headers)
        return answer

    def _not_a_redirect(self, endpoint: str, answer: Answer) -> Answer:
        if 300 <= answer.status < 400:
            to = urlsplit(answer.headers.get("location", "")).hostname or "another place"
            raise self.unexpected(endpoint, f"a redirect to {to}, which is not followed")
        return answer

    def _denied(self, exc: NotSent) -> NetworkDenied:
        return NetworkDenied(reason=exc.reason, provider=self.provider)

    def _unreachable(self, endpoint: str, reason: str) -> Unavailable:
        return Unavailable(
            f"{self.provider} did not answer {endpoint}: {reason}",
            next_step="run the command again; in a sandbox without network see docs/external-access.md",
            provider=self.provider,
        )


# where a key may go ---------------------------------------------------------------------------------------------------


def origin_for(provider: str, vendor: str, variable: str, key: Credential, environ: Mapping[str, str]) -> str:
    """Scheme, host and port to speak to: the vendor's, or with a sandbox key the loopback one that `variable` names.

    A real key never reaches loopback and a sandbox key never leaves it, whatever a variable says.
    """
    given = environ.get(variable, "").strip()

    def refuse(reason: str) -> DestinationRefused:
        shown = one_line(given, limit=80) if "@" not in given else "an address with a login in it"
        return DestinationRefused(
            provider=provider, base_url=shown or vendor, reason=reason, variable=variable, key_source=key.source
        )

    is_sandbox_key = key.value.startswith(SANDBOX_KEY_PREFIX)
    if not given or given.rstrip("/") == vendor:
        if is_sandbox_key:
            raise refuse(f"the key from {key.source} is a sandbox key and {variable} names no sandbox")
        return vendor
    try:
        parts = urlsplit(given)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise refuse(f"{variable} is not an address") from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise refuse(f"{variable} may hold scheme, host and port only")
    if parts.path.strip("/") or "\\" in given or any(not c.isprintable() or c.isspace() for c in given):
        raise refuse(f"{variable} may hold scheme, host and port only")
    if parts.scheme not in ("http", "https") or not _is_loopback(host):
        raise refuse(f"{variable} is neither {vendor} nor an address on this computer (http://127.0.0.1:PORT)")
    if not is_sandbox_key:
        raise refuse(f"{variable} names a sandbox and the key from {key.source} is a real one")
    # Rebuilt from what was checked, so that no second parser can read it otherwise. "localhost" is a name that a hosts
    # file may point anywhere.
    address = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{address}" + (f":{port}" if port else "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    if "%" in host:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_public_https(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme != "https" or parts.username is not None or parts.port not in (None, 443):
            return False
    except ValueError:
        return False
    if not re.fullmatch(r"[a-z0-9.-]+\.[a-z]{2,}", host):  # a name; no address, no "localhost"
        return False
    return not host.endswith((".local", ".internal", ".localhost"))


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


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _query_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=_plain)


def _mask(data: bytes, secrets: Iterable[str]) -> bytes:
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for form in {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}:
            data = data.replace(form.encode(), b"***")
    return data


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
                timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S if call.stop_after_s is None else call.stop_after_s),
                allow_redirects=False,
                stream=True,
                proxies={"https": call.proxy} if call.proxy else {},
                verify=call.ca_bundle or True,
            ) as reply:
                body = _body(call, reply)
                return Answer(reply.status_code, body, {k.lower(): v for k, v in reply.headers.items()})
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
    return session


def _body(call: Call, reply: requests.Response) -> bytes:
    """The whole body within size and time. A stream is cut at `stop_after_s` and what came counts."""
    import requests
    import urllib3

    limit_s = WHOLE_TIMEOUT_S if call.stop_after_s is None else call.stop_after_s
    ends = time.monotonic() + limit_s
    parts: list[bytes] = []
    size = 0
    chunks: Iterator[bytes] = reply.iter_content(65536 if call.stop_after_s is None else 1)
    try:
        for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size > call.max_bytes:
                if call.stop_after_s is not None:
                    break
                raise Unanswered(f"a body of more than {call.max_bytes} bytes", status=reply.status_code)
            if time.monotonic() > ends:
                if call.stop_after_s is not None:
                    break
                raise Unanswered(f"no whole body within {limit_s:.0f} s", status=reply.status_code)
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as exc:
        if call.stop_after_s is None:
            raise Unanswered(f"the answer broke off ({_words(exc)})", status=reply.status_code) from exc
    announced = reply.headers.get("Content-Length", "")
    if call.stop_after_s is None and announced.isdigit() and size < int(announced):
        if not reply.headers.get("Content-Encoding") and call.method != "HEAD":
            raise Unanswered(f"{size} of {announced} bytes of an answer", status=reply.status_code)
    return b"".join(parts)


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
    if not any(isinstance(e, before_sending) for e in chain) and not _is_certificate_error(chain):
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
