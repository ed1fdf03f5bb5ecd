"""What was about to be billed or destroyed and what came of it: the project's journal, folded by intent.

`begin` is synced before a request leaves; `close` says how it ended. What has begun and is not closed, or closed as
`unknown`, may have happened: `gpu reconcile` finds out.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gpu_skills.clock import Clock, timestamp
from gpu_skills.errors import NotReady
from gpu_skills.state import chain, files, journal
from gpu_skills.state.job_record import JOB_ID
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


_FORMS = {
    "job_id": JOB_ID,
    "machine_id": re.compile(r"m_[A-Za-z0-9_-]{1,60}"),
    "approval_id": re.compile(r"a_[0-9A-Za-z]{1,80}"),
}
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
    return dict(_folded(project.path(JOURNAL)).intents)


def require_staying(project: Project, machine_id: str) -> None:
    """NotReady for a machine whose stop or destroy has begun and not ended: whoever finds it goes on with it, and would
    end what was started there since.
    """
    for intent in read(project).values():
        if intent.action in ("stop", "destroy") and intent.machine_id == machine_id and intent.is_open:
            raise NotReady(
                machine=machine_id, what="ending", reason=f"its {intent.action} has begun and has no end yet"
            )


def observations(project: Project, *what: str, machine_id: str | None = None) -> list[dict[str, Any]]:
    """What was seen, oldest first."""
    return [
        event
        for event in _folded(project.path(JOURNAL)).seen
        if (not what or event.get("what") in what) and (machine_id is None or event.get("machine_id") == machine_id)
    ]


@dataclass
class _Folded:
    """What the journal says as far as it was read. Only whole lines count as read; a torn one may be made whole."""

    intents: dict[str, Intent] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    stamp: chain.Stamp | None = None
    offset: int = 0
    tail: bytes = b""  # what stands just before `offset`: a file that only grew has it still

    def copy(self) -> _Folded:
        return replace(self, intents=dict(self.intents), seen=list(self.seen))

    def take(self, event: dict[str, Any] | journal.Problem) -> None:
        if isinstance(event, journal.Problem):
            return
        identity = event.get("intent")
        if event.get("kind") == "observation":
            self.seen.append(event)
        elif not isinstance(identity, str):
            return
        elif event.get("kind") == "intent" and isinstance(event.get("action"), str):
            told = {name: _judged(name, event.get(name)) for name in _NAMED}
            details = event.get("details") if isinstance(event.get("details"), dict) else {}
            self.intents.setdefault(
                identity, Intent(identity, event["action"], str(event.get("ts", "")), **told, details=details)
            )
        elif event.get("kind") == "outcome" and identity in self.intents:
            before = self.intents[identity]
            told = {name: _judged(name, event.get(name)) or getattr(before, name) for name in _NAMED}
            more = event.get("details") if isinstance(event.get("details"), dict) else {}
            self.intents[identity] = replace(
                before,
                **told,
                result=_text(event.get("result")) or "unknown",
                closed_at=str(event.get("ts", "")),
                reason=_text(event.get("reason")),
                details={**before.details, **more},
            )


# Of the journals that this process reads, newest last: each question would read the whole file again, and a machine's
# life asks dozens.
_known: OrderedDict[Path, _Folded] = OrderedDict()
_MOST_KNOWN, _TAIL_BYTES = 8, 200
_reading = threading.Lock()


def _folded(path: Path) -> _Folded:
    with _reading:
        stamp = chain.stamp_of(path)
        known = _known.pop(path, None)
        if stamp is None:
            return _Folded()
        if known is None or not _only_grew(path, known, stamp):
            known = _Folded()
        now = known if known.stamp == stamp else _read_on(path, known, stamp)
        _known[path] = known
        while len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
        return now


def _only_grew(path: Path, known: _Folded, stamp: chain.Stamp) -> bool:
    if known.stamp == stamp:
        return True
    if known.stamp is None or known.stamp.inode != stamp.inode or stamp.size < known.offset:
        return False
    if known.stamp.size == stamp.size:
        return False  # changed by hand, and as long as before
    descriptor = files.open_regular(path)
    if descriptor is None:
        return False
    try:
        return os.pread(descriptor, len(known.tail), known.offset - len(known.tail)) == known.tail
    finally:
        os.close(descriptor)


def _read_on(path: Path, known: _Folded, stamp: chain.Stamp) -> _Folded:
    """Take what stands behind `offset`; the journal as it is now, with a last line that nobody has ended yet."""
    now, is_kept = known, True
    for offset, number, line in journal.raw_lines(path, known.offset, stop=stamp.size):
        if is_kept and not line.endswith(b"\n"):  # torn, or too long to be kept whole: this time only
            now, is_kept = known.copy(), False
        if line.strip():
            now.take(journal.parse_line(line, number))
        if is_kept:
            known.offset, known.tail = offset + len(line), line[-_TAIL_BYTES:]
    # With a torn end, or more that came meanwhile, the same stamp would not say that all is read.
    known.stamp = stamp if known.offset == stamp.size else chain.Stamp(-1, 0, stamp.inode)
    return now


def _append(project: Project, clock: Clock, event: dict[str, Any]) -> None:
    project.require_writable()
    kept = {key: value for key, value in event.items() if value is not None}
    journal.append(project.path(JOURNAL), [{"ts": timestamp(clock.now()), **kept}])


def _judged(name: str, value: Any) -> str | None:
    """An id that becomes part of paths and commands; one of another form is none."""
    text, form = _text(value), _FORMS.get(name)
    return text if text is None or form is None or form.fullmatch(text) else None


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
