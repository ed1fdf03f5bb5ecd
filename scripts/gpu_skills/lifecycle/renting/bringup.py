"""From a create that was accepted, or a start, to a machine that may be used: looked at, logged into, tried, armed.

    until_it_answers()   polls one list, compares what came with what was asked for, opens the first way in that works
    ready()              health, the receipt of its fuse, a session that ends before the fuse does; then it is `ready`

Whatever speaks against it is a NotReady, CreatedPriceMismatch or HostFull. Nothing is destroyed here.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from gpu_skills.clock import parse_timestamp, timestamp
from gpu_skills.errors import (
    AuthFailed,
    GpuError,
    HostFull,
    HostKeyMismatch,
    MachineLacks,
    NotReady,
    ProviderError,
    RemoteError,
    Uncertain,
    one_line,
)
from gpu_skills.lifecycle import intents, machines, memory
from gpu_skills.lifecycle.books import lives
from gpu_skills.lifecycle.connect import VOUCHED, Link
from gpu_skills.lifecycle.guard import fuse, keyproof
from gpu_skills.lifecycle.guard.fuse import Receipt
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.lifecycle.renting import health, outcomes, sshkeys, waiting
from gpu_skills.lifecycle.renting.waiting import Watch
from gpu_skills.providers import created
from gpu_skills.providers.base import Machine as Instance
from gpu_skills.providers.base import MachineSpec
from gpu_skills.units import format_duration

# Quick looks while most machines come up, then slower ones: the list is one call for all machines of the account.
POLL_S, SLOW_POLL_S, QUICK_FOR_S = 5.0, 10.0, 60.0
# The log costs more than a look: asked for when the looks tell nothing new.
LOG_AFTER_S, LOG_EVERY_S, LOG_LINES = 45.0, 90.0, 200
KEY_EVERY_S = 30.0
LAST_LOOK_S = 120.0
# Real seconds: what is waited for is a process on the machine, which reads no clock of ours.
RECEIPT_S, KEY_VERDICT_S, RECEIPT_PAUSE_S = 60.0, 20.0, 0.25
# `ssh-keygen -l` as start scripts print it, and not what a server logs of its guests' keys.
_FINGERPRINT = re.compile(r"\d{3,5} (SHA256:[A-Za-z0-9+/]{43}) .{0,200}\((ED25519|ECDSA|RSA)\)")


@dataclass(frozen=True)
class Ready:
    """A machine whose record says `ready`, an open conversation with it, and what its fuse says."""

    machine: Machine
    link: Link
    receipt: Receipt


class Boot:
    """One machine on its way. began_s: by the clock's monotonic, when the provider was asked.

    spec: what was asked for, None after a start. is_start: it was stopped and told to start.
    """

    def __init__(
        self,
        op: Operator,
        plan: Plan,
        machine: Machine,
        *,
        spec: MachineSpec | None,
        waited_s: float = 0.0,
        is_start: bool = False,
    ):
        self.op = op
        self.plan = plan
        self.machine = machine
        self.spec = spec
        self.is_start = is_start
        self.reader = op.reader(machine.provider)
        self.key = sshkeys.ensure(op)
        began_s = op.clock.monotonic() - waited_s
        # What was waited before a crash counts, but whoever comes back looks at it at least for a while.
        self.watch = Watch(op.clock.monotonic(), max(plan.setup_cap_s - waited_s, LAST_LOOK_S), is_start)
        self._began_s = began_s
        self._unclear = spec is not None
        self._key_sent_s: float | None = None
        self._log_asked_s = began_s
        self._has_key_of_host = False
        self._said = ""

    # waiting ----------------------------------------------------------------------------------------------------------

    def until_it_answers(self) -> Link:
        """The first connection that works. NotReady, HostFull or CreatedPriceMismatch when there is none to come."""
        while True:
            shown = self._look()
            if shown is not None:
                self._compare(shown)
            self._judge(shown)
            if shown is not None:
                self._attach_key()
                link = self._try_ways(shown)
                if link is not None:
                    return link
            waited_s = self.op.clock.monotonic() - self._began_s
            self.op.clock.sleep(POLL_S if waited_s < QUICK_FOR_S else SLOW_POLL_S)

    def _look(self) -> Instance | None:
        """The machine in the one list. A list that fails tells nothing: the limits of waiting go on all the same."""
        try:
            listed = self.reader.machines()
        except ProviderError as exc:
            self._tell(f"{self.machine.provider} did not answer: {exc.message}")
            return None
        found = next((m for m in listed if m.instance_id == self.machine.instance_id), None)
        if found is not None and self.machine.last_seen_at is None:
            intents.observe(self.op.project, self.op.clock, lives.PRESENT, machine_id=self.machine.id)
            self.machine = self._update(lambda m: outcomes.with_seen(m, found, self.op.clock.now()))
        return found

    def _compare(self, shown: Instance) -> None:
        """Whether it is what was asked for: as soon as that shows, since a dearer one has to go at once."""
        if not self._unclear or self.spec is None:
            return
        verdict = created.compare(self.spec, shown)
        if verdict.problems:
            raise verdict.error(shown)
        if not verdict.unknown:
            self._unclear = False
            self.machine = self._update(lambda m: outcomes.with_seen(m, shown, self.op.clock.now()))

    def _judge(self, shown: Instance | None) -> None:
        now_s = self.op.clock.monotonic()
        log = None
        is_quiet = now_s - self.watch.since_s >= LOG_AFTER_S
        if shown is not None and is_quiet and now_s - self._log_asked_s >= LOG_EVERY_S:
            self._log_asked_s = now_s
            log = self._log("system")
        self.watch, gave_up = waiting.look(self.watch, waiting.seen_now(shown, now_s, log))
        if shown is not None and shown.said != self._said:
            self._said = shown.said
            self._tell(f"{self.machine.id} is {shown.status}: {one_line(shown.said, limit=160)}")
        if gave_up is None:
            return
        if gave_up.code == "host_full":
            raise HostFull(machine=self.machine.id, reason=gave_up.reason)
        raise NotReady(machine=self.machine.id, what=gave_up.code, reason=gave_up.reason)

    def _log(self, source: str) -> tuple[str, ...] | None:
        if not self.reader.traits.shows_host_log:
            return None
        try:
            return tuple(self.reader.log_lines(str(self.machine.instance_id), source=source, lines=LOG_LINES))  # type: ignore[arg-type]
        except ProviderError:
            return None

    # the way in -------------------------------------------------------------------------------------------------------

    def _attach_key(self) -> None:
        """Where a key is given to the machine itself, as often as it takes: doing it again is harmless."""
        now_s = self.op.clock.monotonic()
        if self.reader.traits.key_reaches_instance != "attach":
            return
        if self._key_sent_s is not None:
            return
        try:
            self.op.writer(self.machine.provider).attach_key(str(self.machine.instance_id), self.key.public)
            self._key_sent_s = now_s
        except (ProviderError, Uncertain) as exc:
            self._tell(f"the SSH key did not get in yet: {exc.message}")

    def _try_ways(self, shown: Instance) -> Link | None:
        """Only a banner tells which way works, and after a start the first that is shown may be of before."""
        if shown.status not in ("running", "booting", "unknown"):
            return None
        ways = [way for way in shown.ways if way.carries_commands]
        if ways and not self._has_key_of_host:
            self._learn_host_key()
        for way in ways:
            endpoint = replace(way.endpoint, identity_file=str(self.key.private))
            candidate = replace(self.machine, endpoint=endpoint)
            try:
                link = self.op.connect(candidate)
            except (HostKeyMismatch, MachineLacks) as exc:
                raise NotReady(machine=self.machine.id, what=exc.code, reason=exc.message) from exc
            except AuthFailed as exc:
                self._key_was_refused()
                self._tell(exc.message)
                continue
            except RemoteError:
                continue
            self.machine = self._update(lambda m, endpoint=endpoint: replace(m, endpoint=endpoint))
            link.machine = self.machine
            return link
        return None

    def _key_was_refused(self) -> None:
        """Providers take a while, and drop keys: it is sent again after some time."""
        if self._key_sent_s is not None and self.op.clock.monotonic() - self._key_sent_s >= KEY_EVERY_S:
            self._key_sent_s = None

    def _learn_host_key(self) -> None:
        """Before the first contact: what the machine's own log says its key is, where it says so."""
        self._has_key_of_host = True
        if self.machine.extra.get(VOUCHED) or self.is_start:
            return
        vouched = fingerprint(self._log("container") or ())
        if vouched is not None:
            self.machine = self._update(lambda m: replace(m, extra={**m.extra, VOUCHED: vouched}))

    def _update(self, change: Callable[[Machine], Machine]) -> Machine:
        return machines.update(self.op.project, self.machine.id, change, clock=self.op.clock)

    def _tell(self, line: str) -> None:
        self.op.say(line)

    # ready ------------------------------------------------------------------------------------------------------------

    def ready(self, link: Link) -> Ready:
        """Try it, take the receipt of its fuse, open its session; then the record says `ready`."""
        op, plan = self.op, self.plan
        answered_after_s = op.clock.monotonic() - self._began_s
        found = self._healthy(link)
        receipt = self._armed(link)
        session = open_session(op, plan, link, self.machine, receipt)
        now = timestamp(op.clock.now())

        def is_ready(machine: Machine) -> Machine:
            return replace(
                machine,
                status="ready",
                gpu=found.gpu or machine.gpu,
                gpu_count=found.gpu_count,
                vram_gb=found.vram_gb or machine.vram_gb,
                session=session,
                ready_at=now,
                last_seen_at=now,
                extra={**machine.extra, "fuse": receipt.to_record(), "gpu_tried_by": found.how, "cuda": found.cuda},
            )

        self.machine = link.machine = self._update(is_ready)
        intents.observe(op.project, op.clock, lives.READY, machine_id=self.machine.id)
        if self.machine.host_key is not None and not self.is_start:
            memory.remember_start(op.project, self.machine.host_key, clock=op.clock, time_to_ssh_s=answered_after_s)
        op.say(
            f"{self.machine.id} is ready after {format_duration(op.clock.monotonic() - self._began_s)}: "
            f"{machines.describe_gpus(self.machine)}"
        )
        return Ready(self.machine, link, receipt)

    def _healthy(self, link: Link) -> health.Health:
        try:
            found = health.check(link, self.plan, gpu=self.machine.gpu, base_url=self.reader.base_url)
        except RemoteError as exc:
            raise NotReady(machine=self.machine.id, what=exc.code, reason=exc.message) from exc
        if found.problems:
            raise found.error(self.machine.id)
        for warning in found.warnings:
            self._tell(f"{self.machine.id}: {warning}")
        return found

    def _armed(self, link: Link) -> Receipt:
        """No work without it: a machine whose fuse does not answer, or holds another deadline, is not ready."""
        return _relied_on(self.op, self.machine, await_receipt(link, self.machine))


def follow(op: Operator, machine: Machine, *, wait_s: float | None = None) -> tuple[Link, Receipt]:
    """A conversation with a machine that was made ready before, for more work, and what its fuse says now.

    link.machine is the record as it is then: another command may be moving the deadline, first in the fuse, then on
    record. NotReady where work may not rely on the fuse.
    """
    until = time.monotonic() + (RECEIPT_S if wait_s is None else wait_s)
    link = op.connect(machine)
    try:
        while True:
            link.machine = machines.find(op.project, machine.id) or machine
            receipt = fuse.read_receipt(link, link.machine)
            if problem_of(receipt, link.machine) is None or time.monotonic() >= until:
                return link, _relied_on(op, link.machine, receipt)
            time.sleep(RECEIPT_PAUSE_S)
    except BaseException:
        link.close()
        raise


def _relied_on(op: Operator, machine: Machine, receipt: Receipt | None) -> Receipt:
    problem = problem_of(receipt, machine)
    if receipt is None or problem is not None:
        raise NotReady(machine=machine.id, what="fuse_missing", reason=problem)
    keyproof.note(op, machine.provider, op.account(machine.provider), receipt.key, receipt.on_expiry)
    return receipt


def await_receipt(link: Link, machine: Machine) -> Receipt | None:
    """What the fuse says, once it says it; a little longer for whether its key may end the bill."""
    began = time.monotonic()
    while True:
        receipt = fuse.read_receipt(link, machine)
        waited_s = time.monotonic() - began
        is_whole = receipt is not None and receipt.is_alive and receipt.key != "unknown"
        is_enough = receipt is not None and receipt.is_alive and waited_s >= KEY_VERDICT_S
        if is_whole or is_enough or waited_s >= RECEIPT_S:
            return receipt
        time.sleep(RECEIPT_PAUSE_S)


def problem_of(receipt: Receipt | None, machine: Machine) -> str | None:
    """Why a receipt is none that work may rely on."""
    if receipt is None:
        return "its fuse has written no receipt"
    if not receipt.is_alive:
        return "its fuse does not run any more"
    wanted = None if machine.deadline_at is None else parse_timestamp(machine.deadline_at)
    if receipt.deadline_at != wanted:
        shown = "never" if receipt.deadline_at is None else timestamp(receipt.deadline_at)
        return f"its fuse holds the deadline {shown}, not {machine.deadline_at or 'never'}"
    return None


def open_session(op: Operator, plan: Plan, link: Link, machine: Machine, receipt: Receipt) -> dict[str, object]:
    """The runner's own limits: idleness, and a deadline early enough that outputs are whole when the fuse acts.

    Idleness ends nothing where the fuse destroys: outputs that nobody collected yet would be gone.
    """
    left_s = None
    if machine.deadline_at is not None:
        left_s = session_left_s(parse_timestamp(machine.deadline_at), op.clock.now())
    wanted = {
        "id": "s_" + secrets.token_hex(5),
        "deadline_in_s": left_s,
        "deadline_reason": plan.deadline_reason or "max_lifetime",
        "idle_timeout_s": plan.idle_timeout_s if receipt.on_expiry == "stop" else None,
        "on_expiry": "fuse",
        "fuse": machine.intent,
    }
    try:
        answer = link.session.call("session", {"project": op.project.project_id, "session": wanted})
    except GpuError as exc:
        raise NotReady(machine=machine.id, what=exc.code, reason=exc.message) from exc
    return answer["session"]


def session_left_s(deadline_at: datetime, now: datetime) -> float:
    """Of a deadline that is nearer than two drains, half: there has to be some time to work in."""
    left_s = max(0.0, (deadline_at - now).total_seconds())
    return max(left_s - fuse.DRAIN.total_seconds(), left_s / 2)


def fingerprint(log: tuple[str, ...] | list[str]) -> str | None:
    """The host key's fingerprint as a start script printed it, of the kind that SSH shows first."""
    found: dict[str, str] = {}
    for line in log:
        match = _FINGERPRINT.fullmatch(line.strip())
        if match is not None:
            found[match[2]] = match[1]  # of several starts the last
    return found.get("ED25519") or found.get("ECDSA") or found.get("RSA")
