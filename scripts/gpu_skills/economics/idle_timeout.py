"""After how long should an idle machine have gone? The timeout that would have been cheapest on gaps that happened.

A timeout keeps the machine through every gap that is not longer, and pays the timeout plus a restart for each that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from gpu_skills.economics.machine_cost import MachineCost, Number, number
from gpu_skills.errors import UsageError
from gpu_skills.units import MAX_DURATION_S, format_duration, format_usd, json_number

USUAL_TIMEOUT_S = 30 * 60


@dataclass(frozen=True)
class Compared:
    """Another timeout on the same gaps. timeout_s is None for one that never ends; regret is what it costs more."""

    name: str
    timeout_s: Decimal | None
    cost_usd: Decimal
    regret_usd: Decimal

    def to_record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "timeout_s": None if self.timeout_s is None else json_number(self.timeout_s),
            "cost_usd": json_number(self.cost_usd),
            "regret_usd": json_number(self.regret_usd),
        }


@dataclass(frozen=True)
class TimeoutAdvice:
    """best_possible_usd: what one who knew each gap beforehand would have paid, with the same two choices."""

    action: Literal["stop", "destroy"]
    timeout_s: Decimal
    cost_usd: Decimal
    best_possible_usd: Decimal
    gaps: int
    gaps_kept: int
    compared: tuple[Compared, ...]

    @property
    def reason(self) -> str:
        did = "stopped" if self.action == "stop" else "destroyed"
        others = "; ".join(
            f"{other.name} ({'never' if other.timeout_s is None else format_duration(float(other.timeout_s))}) "
            f"cost {format_usd(other.regret_usd)} more"
            for other in self.compared
        )
        return (
            f"on {self.gaps} gaps, {did} after {format_duration(float(self.timeout_s))} would have cost "
            f"{format_usd(self.cost_usd)} and kept the machine through {self.gaps_kept}; {others}"
        )

    def to_record(self) -> dict[str, Any]:
        return {
            "rule": "history",
            "action": self.action,
            "timeout_s": json_number(self.timeout_s),
            "cost_usd": json_number(self.cost_usd),
            "best_possible_usd": json_number(self.best_possible_usd),
            "gaps": self.gaps,
            "gaps_kept": self.gaps_kept,
            "compared": [other.to_record() for other in self.compared],
            "reason": self.reason,
        }


def cheapest_timeout(
    machine: MachineCost,
    gaps_s: Sequence[Number],
    *,
    action: Literal["stop", "destroy"] = "destroy",
    usual_timeout_s: Number = USUAL_TIMEOUT_S,
) -> TimeoutAdvice:
    """The best timeout in hindsight, and how much the usual one and the break-even one would have cost more.

    Between two gaps a longer timeout only costs more, so only 0 and the gaps themselves can be best: one pass over the
    sorted gaps. Of equal ones the shortest. Raises UsageError without gaps, or for `stop` where it cannot be stopped.
    """
    gaps = sorted(number("gap_s", gap, at_most=MAX_DURATION_S) for gap in gaps_s)
    if not gaps:
        raise UsageError("there are no gaps to learn from", next_step="gpu economics keepalive --help")
    if action == "stop" and not machine.can_stop:
        raise UsageError(
            "a machine without storage_usd_hr and resume_s cannot be stopped", next_step="gpu economics --help"
        )

    best_timeout, best_cost = Decimal(0), _replay(machine, gaps, Decimal(0), action)
    for timeout, cost in _candidates(machine, gaps, action):
        if cost < best_cost:
            best_timeout, best_cost = timeout, cost

    others = {"usual": number("usual_timeout_s", usual_timeout_s, at_most=MAX_DURATION_S)}
    others["break-even"] = break_even_timeout_s(machine, action)
    compared = []
    for name, timeout in others.items():
        cost = _replay(machine, gaps, timeout, action)
        compared.append(Compared(name, timeout, machine.usd(cost), machine.usd(cost - best_cost)))
    return TimeoutAdvice(
        action=action,
        timeout_s=best_timeout,
        cost_usd=machine.usd(best_cost),
        best_possible_usd=machine.usd(sum((min(gap, _left_at_once(machine, gap, action)) for gap in gaps), Decimal(0))),
        gaps=len(gaps),
        gaps_kept=sum(1 for gap in gaps if gap <= best_timeout),
        compared=tuple(compared),
    )


def replay_usd(
    machine: MachineCost,
    gaps_s: Iterable[Number],
    timeout_s: Number | None,
    action: Literal["stop", "destroy"] = "destroy",
) -> Decimal:
    """What these gaps would have cost with this timeout; None keeps the machine through all of them."""
    gaps = [number("gap_s", gap, at_most=MAX_DURATION_S) for gap in gaps_s]
    timeout = None if timeout_s is None else number("timeout_s", timeout_s, at_most=MAX_DURATION_S)
    return machine.usd(_replay(machine, gaps, timeout, action))


def break_even_timeout_s(machine: MachineCost, action: Literal["stop", "destroy"] = "destroy") -> Decimal | None:
    """The idle time whose cost equals leaving right away and coming back; None where leaving never pays."""
    if machine.is_free:
        return None
    saved_per_s = 1 - machine.idle_rate(action)
    return machine.restart_s(action) / saved_per_s if saved_per_s > 0 else None


def gaps_between(jobs: Iterable[tuple[float, float | None]]) -> list[float]:
    """Idle seconds between the jobs of one machine, from (started, ended) in the same clock; None: still running.

    Jobs that overlap or touch leave no gap. The idle time after the last job is not a gap: nobody knows its end.
    """
    gaps: list[float] = []
    busy_until: float | None = None
    for started, ended in sorted(jobs, key=lambda job: job[0]):
        if busy_until is not None and started > busy_until:
            gaps.append(started - busy_until)
        ended = float("inf") if ended is None else ended
        busy_until = ended if busy_until is None else max(busy_until, ended)
    return gaps


def _candidates(machine: MachineCost, gaps: list[Decimal], action: Literal["stop", "destroy"]) -> Iterable[tuple]:
    """Each gap as the timeout, with the cost of them all in full-rate seconds. gaps: sorted."""
    sleeping = _idle_rate(machine, action)
    restart = machine.restart_s(action)
    kept, longer, longer_sum = Decimal(0), len(gaps), sum(gaps, Decimal(0))
    for i, timeout in enumerate(gaps):
        kept, longer, longer_sum = kept + timeout, longer - 1, longer_sum - timeout
        if i + 1 < len(gaps) and gaps[i + 1] == timeout:
            continue  # the gaps of this length belong together
        yield timeout, kept + longer * (timeout + restart) + sleeping * (longer_sum - longer * timeout)


def _replay(
    machine: MachineCost, gaps: Iterable[Decimal], timeout: Decimal | None, action: Literal["stop", "destroy"]
) -> Decimal:
    total = Decimal(0)
    for gap in gaps:
        if timeout is None or gap <= timeout:
            total += gap
        else:
            total += timeout + _left_at_once(machine, gap - timeout, action)
    return total


def _left_at_once(machine: MachineCost, gap: Decimal, action: Literal["stop", "destroy"]) -> Decimal:
    return machine.restart_s(action) + _idle_rate(machine, action) * gap


def _idle_rate(machine: MachineCost, action: Literal["stop", "destroy"]) -> Decimal:
    return Decimal(0) if machine.is_free else machine.idle_rate(action)
