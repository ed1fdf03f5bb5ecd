"""How often a provider may be asked: one clock per account, shared by all processes and projects of this user.

Whoever wants to call takes the next free moment of an endpoint under a file lock, lets the lock go and sleeps until
then, so callers queue without holding anything. The file is advice: when it cannot be used (a read-only home) this
process still keeps its own pace, and a destroy is never given up for it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_skills.clock import Clock
from gpu_skills.errors import GpuError, RateLimited
from gpu_skills.state import files

log = logging.getLogger("gpu_skills.providers.limits")

# A read that would have to queue longer says so instead of standing still; a write always queues.
LONGEST_READ_WAIT_S = 60.0
# What is planned further ahead than this was written before the wall clock went back, or by somebody else.
_LONGEST_PLAN_S = 600.0


@dataclass(frozen=True)
class Limit:
    """At most `calls` in any `per_s` seconds. penalty_s: how long to keep away after a refusal for being too fast."""

    calls: int
    per_s: float
    penalty_s: float = 0.0


class Limiter:
    """limits: by endpoint; an endpoint that is not named is not limited. account: `Credential.account`."""

    def __init__(
        self,
        provider: str,
        account: str,
        limits: Mapping[str, Limit],
        *,
        clock: Clock,
        state_dir: Path | None,
    ):
        self._provider = provider
        self._limits = limits
        self._clock = clock
        self._path = state_dir / "limits" / f"{account}.json" if state_dir is not None else None
        self._own: dict[str, Any] = {}

    def wait(self, endpoint: str, *, is_write: bool = False) -> None:
        """Sleep until this endpoint may be called, having taken that moment. Reads may raise RateLimited instead."""
        limit = self._limits.get(endpoint)
        wait_s = 0.0

        def take(record: dict[str, Any], now: float) -> None:
            nonlocal wait_s
            moment = max(now, _until(record, endpoint, now), _until(record, "*", now) if not is_write else now)
            stamps = _stamps(record, endpoint, now)
            if limit is not None and len(stamps) >= limit.calls:
                moment = max(moment, stamps[-limit.calls] + limit.per_s)
            wait_s = moment - now
            if wait_s > LONGEST_READ_WAIT_S and not is_write:
                return
            if limit is not None:
                record[endpoint] = {**_entry(record, endpoint), "at": [*stamps, moment][-limit.calls :]}

        self._with_record(take)
        if wait_s > LONGEST_READ_WAIT_S and not is_write:
            raise RateLimited(
                provider=self._provider,
                what=endpoint,
                reason=f"the next call is allowed in {math.ceil(wait_s)} s",
                retry_after_s=math.ceil(wait_s),
            )
        if wait_s > 0:
            self._clock.sleep(wait_s)

    def learn(self, endpoint: str, status: int, headers: Mapping[str, str]) -> None:
        """Take in what an answer says about the pace: a 429 with its Retry-After, or an exhausted RateLimit window."""
        limit = self._limits.get(endpoint)
        pause_s, scope = 0.0, "*"
        if status == 429:
            retry_after = headers.get("retry-after", "")
            pause_s = float(retry_after) if re.fullmatch(r"\d{1,5}", retry_after) else 0.0
            if limit is not None:
                pause_s, scope = max(pause_s, limit.penalty_s, limit.per_s), endpoint
        else:
            pause_s = exhausted_for_s(headers.get("ratelimit", ""))
        if pause_s <= 0:
            return

        def note(record: dict[str, Any], now: float) -> None:
            until = max(now + min(pause_s, _LONGEST_PLAN_S), _until(record, scope, now))
            record[scope] = {**_entry(record, scope), "until": until}

        self._with_record(note)

    def _with_record(self, change: Any) -> None:
        now = self._clock.now().timestamp()
        if self._path is None:
            change(self._own, now)
            return
        try:
            files.make_directory(self._path.parent)
            with files.lock(self._path):
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    record = _parsed(os.pread(descriptor, 1 << 16, 0))
                    change(record, now)
                    data = json.dumps(record).encode()
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, data, 0)
                finally:
                    os.close(descriptor)
        except (GpuError, OSError) as exc:
            log.debug("limits of %s are kept by this process alone: %s", self._provider, exc)
            change(self._own, now)


def exhausted_for_s(header: str) -> float:
    """Seconds until a used-up window opens again, from `RateLimit: "minute";r=0;t=12, "hour";r=700;t=800`; else 0."""
    longest = 0.0
    for window in header.split(","):
        fields = dict(re.findall(r";\s*([rt])=(\d{1,6})\b", window))
        if fields.get("r") == "0" and "t" in fields:
            longest = max(longest, float(fields["t"]))
    return longest


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _entry(record: dict[str, Any], endpoint: str) -> dict[str, Any]:
    entry = record.get(endpoint)
    return entry if isinstance(entry, dict) else {}


def _stamps(record: dict[str, Any], endpoint: str, now: float) -> list[float]:
    stamps = _entry(record, endpoint).get("at")
    return [s for s in stamps if _is_believable(s, now)] if isinstance(stamps, list) else []


def _until(record: dict[str, Any], endpoint: str, now: float) -> float:
    until = _entry(record, endpoint).get("until")
    return until if _is_believable(until, now) else now


def _is_believable(moment: object, now: float) -> bool:
    return isinstance(moment, int | float) and math.isfinite(moment) and moment <= now + _LONGEST_PLAN_S
