"""What a person is told, once: a job that ended or stands still, a machine that may bill on, a ceiling that is near.

One message per event and subject, whoever sees it first: what was told is remembered in the user's state directory,
under a lock, before it is sent. Nothing here ever fails the command that tells; a target that does not take a message
is named on stderr and in the journal, and tried again when the same is told later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import Clock, time_of, timestamp
from gpu_skills.errors import GpuError, one_line
from gpu_skills.lifecycle import channels, intents, states
from gpu_skills.lifecycle.channels import Target, Told
from gpu_skills.redaction import redact, secrets_of
from gpu_skills.state import budget, files
from gpu_skills.state.policy import Policy, Spent, what_is_left
from gpu_skills.state.project import SANDBOX_NAME, Project
from gpu_skills.units import format_duration, format_usd

if TYPE_CHECKING:
    from gpu_skills.lifecycle.machines import Machine
    from gpu_skills.lifecycle.operator import Operator


@dataclass(frozen=True)
class _Words:
    """title: of the subject. kind: as channels colour it. then: what to do, when the facts bring no steps."""

    title: str
    kind: str
    then: str | None = None


EVENTS = {
    "job_done": _Words("{subject} is done", "success", "gpu job pull {subject}"),
    "job_failed": _Words("{subject} failed", "failure", "gpu job logs {subject} --tail 40"),
    "job_stalled": _Words("{subject} stands still", "warning", "gpu job logs {subject} --tail 40"),
    "expected_exceeded": _Words("{subject} takes longer than expected", "warning", "gpu job logs {subject} --tail 40"),
    "deadline_80": _Words("{subject} has used 80 % of its time", "warning", "gpu machine extend {subject} --by 1h"),
    "idle_stop": _Words("{subject} was stopped: it was idle", "info", "gpu status"),
    "destroy_unconfirmed": _Words("{subject} may still bill: nobody saw it end", "failure", "gpu reconcile"),
    "ceiling_80": _Words("80 % of the ceiling {subject} is used", "warning", "gpu policy show"),
    "recovery": _Words("{subject}: it is not certain what happened", "failure", "gpu reconcile"),
}
SHARE = Decimal("0.8")
TRIES = 3
TRY_AGAIN_AFTER = timedelta(minutes=10)
IN_FLIGHT = timedelta(minutes=2)  # longer, and who was sending it has died
KEPT = timedelta(days=90)
MANY = 1000  # of what is remembered: from here on old lines go
_BODY_CHARS = 1200  # longer ones are split by some channels, and one event is one message
_MEMORY_BYTES = 4 << 20


@dataclass
class Notifier:
    """policy: read when there is something to tell. user_state: the user's state directory. say: a line on stderr.
    is_silent: nobody is told and nothing written, as in Audit; `test` still tells.

    Its `send` is the `notify` of an Operator.
    """

    project: Project
    policy: Callable[[], Policy]
    environ: Mapping[str, str]
    user_state: Callable[[], Path]
    clock: Clock
    say: Callable[[str], None] = lambda line: None
    timeout_s: float = channels.TIMEOUT_S
    is_silent: bool = False
    _told_by_us: set[tuple[str, str]] = field(default_factory=set)

    def send(self, event: str, subject: str, **facts: Any) -> None:
        """Tell it to every target that has not been told. Facts become lines; `steps` is what to do, one or a list.

        Raises nothing and takes at most `timeout_s` of sending.
        """
        if self.is_silent:
            return
        try:
            wanting = [target for target in channels.targets_of(self.policy()) if target.wants(event)]
            if wanting:
                self._send(wanting, event, subject, facts)
        except Exception as exc:  # what is told about must not fail because of who is told
            self.say(f"nobody could be told of {event} of {subject}: {one_line(str(exc), limit=200)}")

    def test(self) -> list[Told]:
        """One message to every target, whether told before or not. Raises what reading the policy raises."""
        return self._deliver(
            channels.targets_of(self.policy()),
            "gpu: a test",
            "You will be told here what happens to jobs and machines.",
            "info",
        )

    def _send(self, wanting: list[Target], event: str, subject: str, facts: dict[str, Any]) -> None:
        key = memory_key(event, subject, facts, self.clock.now())
        claimed = self._claim(key, wanting)
        if not claimed:
            return
        title, body = message(event, subject, facts, secrets=self._secrets())
        told = self._deliver(claimed, title, self._signed(body), EVENTS.get(event, _UNKNOWN).kind)
        self._remember(key, told)
        for one in told:
            if not one.delivered:
                self._report(one, event, subject)

    def _deliver(self, targets: list[Target], title: str, body: str, kind: str) -> list[Told]:
        marked = f"SANDBOX {title}" if self.project.state.name == SANDBOX_NAME else title
        return channels.deliver(
            targets, marked, body,
            kind=kind, environ=self.environ, project_root=self.project.root, timeout_s=self.timeout_s,
        )  # fmt: skip

    def _signed(self, body: str) -> str:
        return f"{body}\nproject: {one_line(self.project.root.name, limit=80)} ({self.project.project_id})"

    def _secrets(self) -> tuple[str, ...]:
        return secrets_of(self.environ)

    def _report(self, one: Told, event: str, subject: str) -> None:
        self.say(f"{one.target.shown} was not told of {event} of {subject}: {one.reason}")
        about = {"job_id": subject} if subject.startswith("J-") else {}
        about |= {"machine_id": subject} if subject.startswith("m_") else {}
        details = {"event": event, "subject": subject, "target": one.target.shown}
        try:
            intents.observe(self.project, self.clock, "notify_failed", reason=one.reason, details=details, **about)
        except (GpuError, OSError):
            pass  # it was said

    # what was told ------------------------------------------------------------------------------------------------

    @property
    def _memory(self) -> Path:
        return self.user_state() / "notified" / f"{self.project.project_id}.json"

    def _claim(self, key: str, wanting: list[Target]) -> list[Target]:
        """Those that are to be told now, by us: marked before anything is sent, so that another process leaves them."""
        now = self.clock.now()
        claimed: list[Target] = []

        def claim(record: Any) -> dict[str, Any]:
            memory = _checked(record)
            before = dict(memory.get(key) or {})
            claimed[:] = [target for target in wanting if _is_due(before.get(target.key), now)]
            for target in claimed:
                tries = (before.get(target.key) or {}).get("tries", 0)
                before[target.key] = {"at": timestamp(now), "result": "sending", "tries": tries + 1}
            return _without_old({**memory, key: before}, now)

        try:
            if self._is_known(key, wanting, now):
                return []
            files.make_directory(self._memory.parent)
            files.update(self._memory, claim, default={})
        except (GpuError, OSError) as exc:
            # Better told twice than never; by this process it is told once all the same.
            self.say(f"what was told cannot be remembered: {one_line(str(exc), limit=200)}")
            claimed = [target for target in wanting if (key, target.key) not in self._told_by_us]
        self._told_by_us |= {(key, target.key) for target in claimed}
        return claimed

    def _is_known(self, key: str, wanting: list[Target], now: datetime) -> bool:
        """Whether reading is enough: most polls see what was told long ago."""
        memory = _checked(files.read_json(self._memory, max_bytes=_MEMORY_BYTES, default={}))
        before = memory.get(key) or {}
        return not any(_is_due(before.get(target.key), now) for target in wanting)

    def _remember(self, key: str, told: list[Told]) -> None:
        at = timestamp(self.clock.now())

        def remember(record: Any) -> dict[str, Any]:
            memory = _checked(record)
            before = dict(memory.get(key) or {})
            for one in told:
                entry = {"tries": 1, **(before.get(one.target.key) or {})}
                before[one.target.key] = {**entry, "at": at, "result": "sent" if one.delivered else "failed"}
            return {**memory, key: before}

        try:
            files.update(self._memory, remember, default={})
        except (GpuError, OSError):
            pass  # the claim stands, or could not be written either, which was said


def memory_key(event: str, subject: str, facts: Mapping[str, Any], now: datetime) -> str:
    """What counts as the same message. Alarms that are repeated are repeated once a day (UTC)."""
    parts = [event, one_line(subject, limit=120)]
    if event == "destroy_unconfirmed" or (event == "idle_stop" and facts.get("uncollected")):
        parts.append(now.astimezone(UTC).date().isoformat())
    elif event == "deadline_80":
        parts.append(str(facts.get("deadline_at", "")))  # an extended deadline is another one
    elif event == "recovery":
        parts.append(str(facts.get("intent", "")))
    return " ".join(part for part in parts if part)


def message(event: str, subject: str, facts: Mapping[str, Any], *, secrets: Iterable[str] = ()) -> tuple[str, str]:
    """(title, body) as a person reads it: facts line by line with units in words, then what to do. No credential."""
    words = EVENTS.get(event, _UNKNOWN)
    name = one_line(subject, limit=120)
    title = "gpu: " + words.title.format(subject=name, event=event.replace("_", " "))
    lines = [_line(key, value) for key, value in facts.items() if value is not None and key not in ("steps", "intent")]
    steps = facts.get("steps") or (words.then and words.then.format(subject=name))
    for step in [steps] if isinstance(steps, str) else list(steps or ()):
        lines.append("next: " + one_line(str(step), limit=300))
    kept, body = list(secrets), "\n".join(lines)
    if len(body) > _BODY_CHARS:
        body = body[: _BODY_CHARS - 2] + " …"
    return redact(title, kept), redact(body, kept)


@dataclass(frozen=True)
class Due:
    """Something to tell: `notify(due.event, due.subject, **due.facts)`."""

    event: str
    subject: str
    facts: dict[str, Any]


def due(
    *,
    now: datetime,
    machines: Iterable[Machine] = (),
    policy: Policy | None = None,
    spent: Spent | None = None,
    reserved_usd: Decimal = Decimal(0),
    session: str | None = None,
    job: str | None = None,
) -> list[Due]:
    """Which machines have used 80 % of their time and which ceilings are used up to 80 %. Pure.

    session, job: what `spent.session_usd` and `spent.job_usd` are about; without them those ceilings are left out.
    Reserved money counts for day and month, as it does against the ceilings.
    """
    found = [one for machine in machines if (one := _deadline_due(machine, now)) is not None]
    if policy is None or spent is None:
        return found
    day = now.astimezone(UTC).date().isoformat()
    periods = {"day_usd": day, "month_usd": day[:7], "session_usd": session, "job_usd": job}
    left = what_is_left(policy, spent, reserved_usd)
    for name, period in periods.items():
        limit, rest = policy.ceilings.get(name), left.get(name)
        if period is None or limit is None or rest is None or limit <= 0:
            continue
        used = getattr(spent, name) + (reserved_usd if name in ("day_usd", "month_usd") else Decimal(0))
        if used >= limit * SHARE:
            facts = {"used_usd": used, "limit_usd": limit}
            if name in ("day_usd", "month_usd") and reserved_usd:
                facts["of_it_reserved_usd"] = reserved_usd
            found.append(Due("ceiling_80", f"{name} {period}", facts))
    return found


def tell_due(op: Operator, *, job: str | None = None) -> None:
    """Tell what is due by the records: for whoever has looked at machines anyway. Raises nothing, free without targets.

    job: one whose own ceiling is of interest.
    """
    from gpu_skills.lifecycle import machines, runs

    try:
        policy = op.policy()
        if not policy.notify:
            return
        all_machines = machines.all_machines(op.project)
        books = budget.books(op.project, op.ledger, op.clock, op.environ, job_id=job)
        told = due(
            now=op.clock.now(), machines=all_machines, policy=policy,
            spent=books.spent, reserved_usd=books.reserved_usd, job=job,
        )  # fmt: skip
        for machine in all_machines if policy.ceilings["session_usd"] is not None else ():
            if machine.is_rented and machine.status in budget.BILLING and (session := runs.session_of(op, machine)):
                books = budget.books(op.project, op.ledger, op.clock, op.environ, session=session)
                spent = Spent(session_usd=books.spent.session_usd)
                told += due(now=op.clock.now(), policy=policy, spent=spent, session=f"{machine.id} {session}")
    except (GpuError, OSError):
        return  # records that cannot be read are named by whoever needs them, and by gpu doctor
    for one in told:
        op.notify(one.event, one.subject, **one.facts)


def _deadline_due(machine: Machine, now: datetime) -> Due | None:
    if machine.deadline_at is None or states.BILLS.get(machine.status) not in ("yes", "assume"):
        return None
    begin = time_of(machine.ready_at) or time_of(machine.created_at)
    end = time_of(machine.deadline_at)
    if begin is None or end is None or not begin < end or now >= end:
        return None
    if (now - begin) < (end - begin) * float(SHARE):
        return None
    facts = {"deadline_at": machine.deadline_at, "left_s": (end - now).total_seconds(), "gpu": machine.gpu}
    return Due("deadline_80", machine.id, {**facts, "rate_usd_hr": machine.rate_usd_hr})


# helpers ---------------------------------------------------------------------------------------------------------

_UNKNOWN = _Words("{subject}: {event}", "info")
_UNIT = re.compile(r"_(usd_hr|usd|s)$")


def _line(key: str, value: Any) -> str:
    unit = _UNIT.search(key)
    label = _UNIT.sub("", key).replace("_", " ")
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and unit:
        shown = format_duration(float(value)) if unit[1] == "s" else format_usd(value)
        return f"{label}: {shown}{'/h' if unit[1] == 'usd_hr' else ''}"
    if isinstance(value, list | tuple | set | frozenset):
        value = ", ".join(map(str, value))
    return f"{label}: {one_line(str(value), limit=300)}"


def _checked(record: Any) -> dict[str, Any]:
    """The memory, as far as it is one: a foreign value is as if nothing had been told."""
    if not isinstance(record, dict):
        return {}
    return {
        key: {name: told for name, told in entry.items() if isinstance(told, dict)}
        for key, entry in record.items()
        if isinstance(entry, dict)
    }


def _is_due(told: dict[str, Any] | None, now: datetime) -> bool:
    if told is None:
        return True
    tries = told.get("tries")
    if told.get("result") == "sent" or not isinstance(tries, int) or tries >= TRIES:
        return False
    at = time_of(told.get("at"))
    patience = IN_FLIGHT if told.get("result") == "sending" else TRY_AGAIN_AFTER
    return at is None or now - at >= patience


def _without_old(memory: dict[str, Any], now: datetime) -> dict[str, Any]:
    if len(memory) <= MANY:
        return memory
    oldest = timestamp(now - KEPT)
    return {key: entry for key, entry in memory.items() if any(str(t.get("at", "")) >= oldest for t in entry.values())}
