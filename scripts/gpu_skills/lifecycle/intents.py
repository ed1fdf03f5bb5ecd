"""What was about to be billed or destroyed and what came of it: the project's journal, folded by intent.

`begin` is synced before a request leaves; `close` says how it ended. What has begun and is not closed, or closed as
`unknown`, may have happened: `gpu reconcile` finds out.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpu_skills.clock import Clock, timestamp
from gpu_skills.state import journal
from gpu_skills.state.project import Project

Action = Literal["create", "start", "stop", "destroy", "extend", "protect"]
Result = Literal["done", "refused", "failed", "unknown"]
JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Intent:
    """result None: nobody wrote how it ended. details: what the lines of it say beside the named fields."""

    id: str
    action: str
    ts: str
    provider: str | None = None
    account: str | None = None
    machine_id: str | None = None
    instance_id: str | None = None
    label: str | None = None
    approval_id: str | None = None
    job_id: str | None = None
    result: str | None = None
    closed_at: str | None = None
    reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """It may have happened, and nobody knows."""
        return self.result in (None, "unknown")


_NAMED = ("provider", "account", "machine_id", "instance_id", "label", "approval_id", "job_id")


def new_id() -> str:
    """For everything but a create, whose id follows from its approval."""
    return "x" + secrets.token_hex(8)


def begin(project: Project, clock: Clock, action: Action, intent: str, **fields: Any) -> None:
    """Written and synced. fields: the named ones of the journal, and `details`."""
    _append(project, clock, {"kind": "intent", "intent": intent, "action": action, **fields})


def close(
    project: Project, clock: Clock, intent: str, result: Result, *, reason: str | None = None, **fields: Any
) -> None:
    """Closing again replaces what was said before: an `unknown` that was cleared up."""
    _append(project, clock, {"kind": "outcome", "intent": intent, "result": result, "reason": reason, **fields})


def observe(project: Project, clock: Clock, what: str, **fields: Any) -> None:
    """Something that was seen and counts as evidence: an absence, a receipt, a deadline that passed."""
    _append(project, clock, {"kind": "observation", "what": what, **fields})


def read(project: Project) -> dict[str, Intent]:
    """All intents by id, oldest first. Lines that are no record are passed over: nothing was sent after them."""
    found: dict[str, Intent] = {}
    for event in events(project):
        identity = event.get("intent")
        if not isinstance(identity, str):
            continue
        if event.get("kind") == "intent" and isinstance(event.get("action"), str):
            known = {name: _text(event.get(name)) for name in _NAMED}
            details = event.get("details") if isinstance(event.get("details"), dict) else {}
            found.setdefault(
                identity, Intent(identity, event["action"], str(event.get("ts", "")), **known, details=details)
            )
        elif event.get("kind") == "outcome" and identity in found:
            before = found[identity]
            told = {name: _text(event.get(name)) or getattr(before, name) for name in _NAMED}
            more = event.get("details") if isinstance(event.get("details"), dict) else {}
            found[identity] = replace(
                before,
                **told,
                result=_text(event.get("result")) or "unknown",
                closed_at=str(event.get("ts", "")),
                reason=_text(event.get("reason")),
                details={**before.details, **more},
            )
    return found


def observations(project: Project, *what: str, machine_id: str | None = None) -> list[dict[str, Any]]:
    """What was seen, oldest first."""
    return [
        event
        for event in events(project)
        if event.get("kind") == "observation"
        and (not what or event.get("what") in what)
        and (machine_id is None or event.get("machine_id") == machine_id)
    ]


def events(project: Project) -> Iterator[dict[str, Any]]:
    for _offset, _number, event in journal.scan(project.path(JOURNAL)):
        if not isinstance(event, journal.Problem):
            yield event


def _append(project: Project, clock: Clock, event: dict[str, Any]) -> None:
    project.require_writable()
    kept = {key: value for key, value in event.items() if value is not None}
    journal.append(project.path(JOURNAL), [{"ts": timestamp(clock.now()), **kept}])


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
