"""What was learned about rented machines: which failed and why, how fast they pulled, how long until SSH answered.

Advice for the next choice, no lock. A machine that failed is left alone for a while: longer after each failure, and
forgiven with time. `memory.json` of the project holds it, by `provider:machine id`, since offer ids change daily.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from gpu_skills.clock import Clock, time_of, timestamp
from gpu_skills.state import files
from gpu_skills.state.project import Project

FIRST_COOLDOWN = timedelta(hours=6)
LONGEST_COOLDOWN = timedelta(days=14)
# A failure counts half as much after this time.
HALF_LIFE = timedelta(days=7)
# A new measurement weighs this much against what was known.
NEW_SHARE = 0.5
MAX_HOSTS = 2000


@dataclass(frozen=True)
class HostMemory:
    """Of one machine. strikes: its failures, as they weighed at `struck_at`."""

    strikes: float = 0.0
    struck_at: datetime | None = None
    last_failure: str | None = None
    cooldown_until: datetime | None = None
    down_mbps: float | None = None
    time_to_ssh_s: float | None = None
    successes: int = 0
    failures: int = 0
    seen_at: datetime | None = None

    def is_cooling(self, now: datetime) -> bool:
        return self.cooldown_until is not None and now < self.cooldown_until

    def strikes_at(self, now: datetime) -> float:
        if self.struck_at is None or self.strikes <= 0:
            return 0.0
        return self.strikes * 0.5 ** (max(now - self.struck_at, timedelta(0)) / HALF_LIFE)

    def struck(self, reason: str, now: datetime) -> HostMemory:
        """After one more failure: the pause doubles with each that still counts."""
        strikes = self.strikes_at(now) + 1
        pause = min(FIRST_COOLDOWN * 2 ** min(strikes - 1, 16), LONGEST_COOLDOWN)
        return HostMemory(
            strikes=strikes,
            struck_at=now,
            last_failure=reason,
            cooldown_until=now + pause,
            down_mbps=self.down_mbps,
            time_to_ssh_s=self.time_to_ssh_s,
            successes=self.successes,
            failures=self.failures + 1,
            seen_at=now,
        )

    def started(self, now: datetime, *, down_mbps: float | None, time_to_ssh_s: float | None) -> HostMemory:
        """After a start that worked, with what was measured."""
        return HostMemory(
            strikes=self.strikes,
            struck_at=self.struck_at,
            last_failure=self.last_failure,
            cooldown_until=self.cooldown_until,
            down_mbps=_blended(self.down_mbps, down_mbps),
            time_to_ssh_s=_blended(self.time_to_ssh_s, time_to_ssh_s),
            successes=self.successes + 1,
            failures=self.failures,
            seen_at=now,
        )


def load(project: Project) -> dict[str, HostMemory]:
    """Everything remembered. What cannot be read of an entry counts as absent; a broken file is a StateError."""
    record = files.read_json(project.path("memory.json"), default={})
    hosts = record.get("hosts") if isinstance(record, dict) else None
    if not isinstance(hosts, dict):
        return {}
    return {key: _read(entry) for key, entry in hosts.items() if isinstance(entry, dict)}


def remember_failure(project: Project, host_key: str, reason: str, *, clock: Clock) -> HostMemory:
    """Put a machine on cooldown. reason: in a few words, from our own vocabulary or the provider's masked text."""
    return _update(project, host_key, lambda known, now: known.struck(reason[:200], now), clock)


def remember_start(
    project: Project,
    host_key: str,
    *,
    clock: Clock,
    down_mbps: float | None = None,
    time_to_ssh_s: float | None = None,
) -> HostMemory:
    """Keep what a start measured: the speed of the image pull and the time until SSH answered."""
    return _update(
        project,
        host_key,
        lambda known, now: known.started(now, down_mbps=down_mbps, time_to_ssh_s=time_to_ssh_s),
        clock,
    )


def _update(project: Project, host_key: str, change: Any, clock: Clock) -> HostMemory:
    project.require_writable()
    now = clock.now()
    made = HostMemory()

    def apply(before: Any) -> dict[str, Any]:
        nonlocal made
        record = before if isinstance(before, dict) else {}
        hosts = record.get("hosts") if isinstance(record.get("hosts"), dict) else {}
        entry = hosts.get(host_key) if isinstance(hosts.get(host_key), dict) else {}
        made = change(_read(entry), now)
        hosts = {**hosts, host_key: {**entry, **_written(made)}}
        if len(hosts) > MAX_HOSTS:
            oldest = sorted(hosts, key=lambda key: str((hosts[key] or {}).get("seen_at") or ""))
            hosts = {key: hosts[key] for key in hosts if key not in set(oldest[: len(hosts) - MAX_HOSTS])}
        return {**record, "hosts": hosts}

    files.update(project.path("memory.json"), apply, default={})
    return made


def _blended(known: float | None, measured: float | None) -> float | None:
    if measured is None or measured <= 0:
        return known
    return measured if known is None else known * (1 - NEW_SHARE) + measured * NEW_SHARE


def _read(entry: Mapping[str, Any]) -> HostMemory:
    def amount(name: str) -> float | None:
        value = entry.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None

    def moment(name: str) -> datetime | None:
        return time_of(entry.get(name))

    reason = entry.get("last_failure")
    return HostMemory(
        strikes=amount("strikes") or 0.0,
        struck_at=moment("struck_at"),
        last_failure=reason if isinstance(reason, str) else None,
        cooldown_until=moment("cooldown_until"),
        down_mbps=amount("down_mbps"),
        time_to_ssh_s=amount("time_to_ssh_s"),
        successes=int(amount("successes") or 0),
        failures=int(amount("failures") or 0),
        seen_at=moment("seen_at"),
    )


def _written(memory: HostMemory) -> dict[str, Any]:
    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    def stamp(value: datetime | None) -> str | None:
        return None if value is None else timestamp(value)

    return {
        "strikes": rounded(memory.strikes),
        "struck_at": stamp(memory.struck_at),
        "last_failure": memory.last_failure,
        "cooldown_until": stamp(memory.cooldown_until),
        "down_mbps": rounded(memory.down_mbps),
        "time_to_ssh_s": rounded(memory.time_to_ssh_s),
        "successes": memory.successes,
        "failures": memory.failures,
        "seen_at": stamp(memory.seen_at),
    }
