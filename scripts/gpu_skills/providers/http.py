"""The one way to a provider over HTTP: which key may go where, what is repeated, and what a silence means.

    read()    asked again after a failure, with growing uneven pauses and Retry-After, within a bounded time
    write()   sent once. No answer is `Unanswered`: it may have happened, and only the caller can find out

Four things can come of a call: an answer (which may be a refusal), `NotSent` (nothing left this computer), `Unanswered`
(it left, and no whole answer came back), or a key that may not go there, which is refused before anything is tried.
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from gpu_skills.clock import Clock
from gpu_skills.credentials import Credential
from gpu_skills.errors import DestinationRefused, NetworkDenied, RateLimited, Unavailable, UnexpectedReply, one_line
from gpu_skills.wire import (
    MAX_BODY_BYTES,
    Answer,
    Call,
    NotSent,
    RequestsWire,
    Unanswered,
    Wire,
    is_loopback,
    send,
    way_to,
)

if TYPE_CHECKING:
    from gpu_skills.providers.limits import Limiter

log = logging.getLogger("gpu_skills.providers.http")

SANDBOX_KEY_PREFIX = "sbx_"
ATTEMPTS = 4
WAIT_BUDGET_S = 60.0
_FIRST_PAUSE_S = 0.5
_WORTH_REPEATING = frozenset({408, 429, 500, 502, 503, 504})


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
        try:
            parts = urlsplit(url)
        except ValueError:
            raise self.unexpected(endpoint, "an address that is none") from None
        on_sandbox = bool(parts.hostname) and f"{parts.scheme}://{parts.netloc}" == self.origin
        if not on_sandbox and not _is_public_https(url):
            shown = one_line(url.partition("?")[0], limit=80)
            raise UnexpectedReply(provider=self.provider, what=endpoint, reason=f"an address not to be read: {shown}")
        call = Call("GET", url, endpoint, max_bytes=max_bytes, **way_to(parts.hostname or "", self._environ))
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
        return Call(method, url, endpoint, encoded, self.key, headers, **way_to(host, self._environ), **more)

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
            try:
                to = urlsplit(answer.headers.get("location", "")).hostname or "another place"
            except ValueError:
                to = "no address"
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

    def refuse(reason: str, **more: Any) -> DestinationRefused:
        shown = one_line(given, limit=80) if "@" not in given else "an address with a login in it"
        return DestinationRefused(
            provider=provider, base_url=shown or vendor, reason=reason, variable=variable, key_source=key.source, **more
        )

    is_sandbox_key = key.value.startswith(SANDBOX_KEY_PREFIX)
    if not given or given.rstrip("/") == vendor:
        if is_sandbox_key:
            raise refuse(
                f"the key from {key.source} is a sandbox key and {variable} names no sandbox",
                next_step=f"gpu --sandbox …, or take the key out of {key.source}",
            )
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
    if parts.scheme not in ("http", "https") or not is_loopback(host):
        raise refuse(f"{variable} is neither {vendor} nor an address on this computer (http://127.0.0.1:PORT)")
    if not is_sandbox_key:
        raise refuse(f"{variable} names a sandbox and the key from {key.source} is a real one")
    # Rebuilt from what was checked, so that no second parser can read it otherwise. "localhost" is a name that a hosts
    # file may point anywhere.
    address = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{address}" + (f":{port}" if port else "")


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


# bodies ---------------------------------------------------------------------------------------------------------------


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
