"""RunPod on the wire: problem+json, bodies, query values, times, the quota headers, and what may be configured."""

from __future__ import annotations

import re
import secrets
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from gpu_skills.sandbox.face import Reply, Request, WireError
from gpu_skills.sandbox.runpod_bodies import Object
from gpu_skills.sandbox.world import World


@dataclass
class Settings:
    """What no source settles, or what differs between the documents and the live service. Change it at any time."""

    count_is_required: bool = True  # without `gpu.count` every create fails as "no instances", as seen live
    refuses_urllib: bool = True  # the edge answers agents without a name, or named Python-urllib, with 403 and HTML
    idle_runtime: dict[str, Any] | None = (
        None  # `runtime` of a pod that does not run: null by the schema, {} in examples
    )
    report_delay_s: float = 0.3  # a RUNNING pod has neither ports nor runtime for so long
    shows_injected_env: bool = False  # whether PUBLIC_KEY and JUPYTER_PASSWORD that were injected appear in `env`
    session_sees_env: bool = False  # whether SSH sessions see the pod's environment, as with the newest images only
    edit_resets: bool = True  # an edit of a running pod, its name included, resets the container
    volume_places_pod: bool = False  # whether a network volume alone chooses the data centre
    locked_refuses_terminate: bool = False
    # The calls that a pod's own key may make, and on itself only. The vendor documents this nowhere.
    pod_key_may: frozenset[str] = frozenset({"show", "action", "destroy", "graphql"})
    quotas: dict[str, int] = field(default_factory=lambda: {"minute": 200, "hour": 7200, "day": 50_000})
    spend_limit_usd_hr: int = 80
    billing_period_s: int = 300  # the job that writes billing records runs this often
    restart_delay_s: float = 1.0  # before a container whose command ended starts again; doubles up to five minutes


def problem(status: int, detail: str, errors: list[str] | None = None) -> Reply:
    body: dict[str, Any] = {"title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    if errors:
        body["errors"] = errors
    return Reply(status, body, content_type="application/problem+json")


class Problem(WireError):
    """An answer that refuses, raised from any depth."""

    def __init__(self, status: int, detail: str, errors: list[str] | None = None):
        super().__init__(problem(status, detail, errors))
        self.status, self.detail = status, detail


def invalid(what: str, value: str) -> Problem:
    return Problem(422, "Request validation failed.", [f"{what}: {value[:60]!r} is not valid"])


def read_body(request: Request, shape: Object) -> dict[str, Any]:
    """The body, valid by its schema. Raises Problem 400 (no JSON) or 422 (another shape)."""
    try:
        body = without_half_pairs(request.json())
    except ValueError:
        raise Problem(400, "request body is not valid JSON") from None
    if errors := list(shape.violations(body, "$"))[:50]:
        raise Problem(422, "Request validation failed.", errors)
    return body


def without_half_pairs(value: Any) -> Any:
    """Half a surrogate pair becomes the replacement character, as in the vendor's own decoder."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [without_half_pairs(item) for item in value]
    if isinstance(value, dict):
        return {without_half_pairs(name): without_half_pairs(item) for name, item in value.items()}
    return value


def listed(request: Request, name: str, choices: tuple[str, ...] | None = None, pattern: str = "") -> list[str]:
    """A comma-separated query value. Raises Problem 422 for an entry that is none of `choices`."""
    values = [value for value in request.query.get(name, "").split(",") if value]
    for value in values:
        if (choices is not None and value not in choices) or (pattern and re.fullmatch(pattern, value) is None):
            raise invalid(f"query parameter {name!r}", value)
    return values


def whole(request: Request, name: str, low: int, high: int) -> int | None:
    value = request.query.get(name)
    if value is None:
        return None
    if re.fullmatch(r"-?\d{1,9}", value) is None or not low <= int(value) <= high:
        raise Problem(422, "Request validation failed.", [f"query parameter {name!r}: want an integer {low}-{high}"])
    return int(value)


def flag(request: Request, name: str) -> bool | None:
    value = request.query.get(name)
    if value not in (None, "true", "false"):
        raise Problem(422, "Request validation failed.", [f"query parameter {name!r}: want true or false"])
    return None if value is None else value == "true"


def moment(text: str, what: str) -> float:
    """RFC 3339 to epoch seconds. Raises Problem 422."""
    if re.fullmatch(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", text):
        try:
            parsed = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.upper()))
            return parsed.timestamp()
        except (ValueError, OverflowError):
            pass
    raise invalid(what, text)


def stamp(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Quotas:
    """Requests per minute, hour and day of one account, all its keys together."""

    WINDOWS = {"minute": 60, "hour": 3600, "day": 86400}

    def __init__(self, world: World, settings: Settings):
        self._world = world
        self._settings = settings
        self._used: dict[tuple[int, str], tuple[int, int]] = {}  # account, window → number of the window, requests
        self._lock = threading.Lock()

    def _now(self) -> float:
        return time.monotonic() if self._world.limit_mode == "real" else self._world.now()

    def spend(self, account_id: int) -> tuple[str, int] | None:
        """Count one request; the window that refuses it and the seconds until that resets."""
        if self._world.limit_mode == "off":
            return None
        now = self._now()
        exceeded = None
        with self._lock:
            for window, length in self.WINDOWS.items():
                number, used = self._used.get((account_id, window), (-1, 0))
                used = used + 1 if number == int(now // length) else 1
                self._used[account_id, window] = (int(now // length), used)
                if used > self._settings.quotas[window]:
                    exceeded = exceeded or (window, length - int(now % length))
        if exceeded is not None:
            self._world.too_frequent["runpod", exceeded[0]] += 1
        return exceeded if self._world.limit_mode in ("real", "virtual") else None

    def headers(self, account_id: int) -> dict[str, str]:
        now, parts, policy = self._now(), [], []
        for window, length in self.WINDOWS.items():
            number, used = self._used.get((account_id, window), (-1, 0))
            quota = self._settings.quotas[window]
            left = max(quota - used, 0) if number == int(now // length) else quota
            parts.append(f'"{window}";r={left};t={length - int(now % length)}')
            policy.append(f'"{window}";q={quota};w={length}')
        return {"RateLimit": ", ".join(parts), "RateLimit-Policy": ", ".join(policy)}


def request_id() -> str:
    return secrets.token_hex(16)
