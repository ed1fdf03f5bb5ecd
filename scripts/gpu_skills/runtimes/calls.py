"""One service over HTTP: where its key may go, what its refusals mean, and what a silence means.

    read()    asked again a few times: reading changes nothing
    write()   sent once. A silence is `Unanswered`: the service may be at work, and only the runtime can find out

Redirects are refused, whatever they say: the key belongs to this origin alone.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from gpu_skills.errors import (
    ConfigError,
    DestinationRefused,
    NetworkDenied,
    ServiceBusy,
    ServiceKeyRejected,
    ServiceReply,
    ServiceUnreachable,
    one_line,
)
from gpu_skills.runtimes.base import Endpoint, Surroundings
from gpu_skills.wire import (
    Answer,
    BodyTooLarge,
    Call,
    NotSent,
    RequestsWire,
    Unanswered,
    is_loopback,
    parse_json,
    send,
    way_to,
)

log = logging.getLogger("gpu_skills.runtimes")

MAX_JSON_BYTES = 64 * 1024 * 1024
READ_ATTEMPTS = 3
READ_TIMEOUT_S = 60.0
_PAUSE_S = 0.5
_STARTING = frozenset({502, 503, 504})  # it, or what stands in front of it, says that it is not there yet


class Calls:
    """A service as one endpoint sees it. key_header and key_prefix: how it wants its key."""

    def __init__(
        self,
        service: str,
        endpoint: Endpoint,
        surroundings: Surroundings,
        *,
        key_header: str = "Authorization",
        key_prefix: str = "Bearer ",
    ):
        self.service = service
        self.origin = origin_of(service, endpoint)
        self._around = surroundings
        self._wire = surroundings.wire or RequestsWire()
        self._key = endpoint.api_key
        if self._key is not None and not (self._key.isascii() and self._key.isprintable()):
            raise ConfigError(file=f"the key of {service}", problem="it is not printable ASCII")
        self.key_headers = {key_header: key_prefix + self._key} if self._key else {}

    def read(
        self,
        what: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        into: Callable[[bytes], None] | None = None,
        max_bytes: int = MAX_JSON_BYTES,
        timeout_s: float = READ_TIMEOUT_S,
        attempts: int = READ_ATTEMPTS,
    ) -> Answer:
        """GET. Raises ServiceUnreachable after the attempts (502, 503 and 504 too), ServiceKeyRejected; other statuses
        are answers.

        With `into` it is asked once: what it took cannot be taken back.
        """
        if into is not None:
            attempts = 1
        for attempt in range(1, attempts + 1):
            cause: Exception | None = None
            try:
                answer = self._send("GET", what, path, query, None, {}, into, max_bytes, timeout_s, READ_TIMEOUT_S)
                if answer.status not in _STARTING:
                    return answer
                reason = f"HTTP {answer.status}: {self.masked(answer.text)}"
            except BodyTooLarge as exc:
                raise self.unexpected(what, exc.reason, too_large=True) from exc
            except (NotSent, Unanswered) as exc:
                if isinstance(exc, NotSent) and exc.denied:
                    raise NetworkDenied(reason=exc.reason, service=self.service) from exc
                reason, cause = exc.reason, exc
            if attempt == attempts:
                raise ServiceUnreachable(service=self.service, reason=reason) from cause
            self._around.clock.sleep(_PAUSE_S * attempt)
        raise AssertionError("the last attempt raises or returns")

    def write(
        self,
        what: str,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        into: Callable[[bytes], None] | None = None,
        max_bytes: int = MAX_JSON_BYTES,
        timeout_s: float = READ_TIMEOUT_S,
        silence_s: float | None = None,
    ) -> Answer:
        """Send once; bytes go as they are, everything else as JSON. Unanswered: it may have been taken in.

        Raises ServiceUnreachable when certainly nothing was, ServiceKeyRejected, ServiceBusy for 429 and 503.
        """
        given = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body, allow_nan=False, default=_plain).encode()
            given.setdefault("Content-Type", "application/json")
        try:
            answer = self._send(
                method, what, path, None, body, given, into, max_bytes, timeout_s, silence_s or timeout_s
            )
        except NotSent as exc:
            if exc.denied:
                raise NetworkDenied(reason=exc.reason, service=self.service) from exc
            raise ServiceUnreachable(service=self.service, reason=f"{exc.reason}; nothing was sent") from exc
        if answer.status in (429, 503):
            seconds = 10 if answer.retry_after_s is None else math.ceil(answer.retry_after_s)
            raise ServiceBusy(service=self.service, reason=answer.text, retry_after_s=seconds)
        return answer

    def document(self, what: str, answer: Answer) -> Any:
        """The JSON of a 200; ServiceReply for anything else."""
        if answer.status != 200:
            raise self.unexpected(what, f"HTTP {answer.status}: {answer.text}")
        try:
            return parse_json(answer.body)
        except ValueError as exc:
            raise self.unexpected(what, f"no JSON ({exc})") from exc

    def mapping(self, what: str, answer: Answer) -> dict[str, Any]:
        found = self.document(what, answer)
        if not isinstance(found, dict):
            raise self.unexpected(what, "JSON that is no object")
        return found

    def unexpected(self, what: str, reason: str, **details: Any) -> ServiceReply:
        return ServiceReply(service=self.service, what=what, reason=self.masked(one_line(reason, limit=300)), **details)

    def masked(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _send(
        self,
        method: str,
        what: str,
        path: str,
        query: Mapping[str, str] | None,
        body: bytes | None,
        headers: dict[str, str],
        into: Callable[[bytes], None] | None,
        max_bytes: int,
        timeout_s: float,
        silence_s: float,
    ) -> Answer:
        url = self.origin + path + ("?" + urlencode(query, quote_via=quote) if query else "")
        way = way_to(urlsplit(self.origin).hostname or "", self._around.environ)
        call = Call(
            method,
            url,
            what,
            body,
            headers={"Accept": "*/*", **headers, **self.key_headers},
            sensitive=(self._key,) if self._key else (),
            max_bytes=max_bytes,
            timeout_s=timeout_s,
            silence_s=silence_s,
            into=into,
            **way,
        )
        answer = send(call, self._wire)
        if self._key:
            answer = replace(answer, body=answer.body.replace(self._key.encode(), b"***"))
        log.debug("%s %s: %d, %d bytes", method, self.origin + path, answer.status, len(answer.body))
        if 300 <= answer.status < 400:
            raise self.unexpected(what, "a redirect, which is not followed")
        if answer.status in (401, 403):
            raise ServiceKeyRejected(service=self.service, reason=f"HTTP {answer.status}: {self.masked(answer.text)}")
        return answer


def origin_of(service: str, endpoint: Endpoint) -> str:
    """The endpoint without a slash at its end. ConfigError for what is no address; a key goes to this computer's own
    end of a tunnel, or over TLS, and nowhere else."""
    given = endpoint.base_url
    shown = one_line(given, limit=80) if "@" not in given else "an address with a login in it"
    try:
        parts = urlsplit(given)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise ConfigError(file=f"endpoint of {service}", problem=f"{shown} is no address") from None
    is_plain = given.isascii() and given.isprintable() and not set(given) & set(" \\@?#")
    if parts.scheme not in ("http", "https") or not host or not is_plain:
        raise ConfigError(file=f"endpoint of {service}", problem=f"{shown} is no address (http://HOST:PORT)")
    if endpoint.api_key and parts.scheme != "https" and not is_loopback(host):
        raise DestinationRefused(
            provider=service,
            base_url=shown,
            reason="its key would cross the network in the clear",
            variable="",
            next_step="reach it through a tunnel, or over https",
        )
    return given.rstrip("/")


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
