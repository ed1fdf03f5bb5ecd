"""The fuse: what ends a machine's billing at its deadline when nobody else does, and what is known of it.

A machine is born with it: the create request carries the text that `bootstrap` makes. It runs at every start of the
container, needs neither SSH nor our runner, and asks the provider with the machine's own key to stop or destroy the
machine. It reads its deadline from a file in its folder, which the runner's verb `fuse` writes, and answers with a
receipt there: only what the receipt says counts as set. `fuse.sh` is the text, docs/runner-protocol.md the folder.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from gpu_skills import resources
from gpu_skills.clock import Clock, SystemClock, time_of, timestamp
from gpu_skills.errors import FuseMissing, FuseSilent, UsageError
from gpu_skills.providers.base import MAX_BOOTSTRAP_CHARS

if TYPE_CHECKING:
    from gpu_skills.lifecycle.connect import Link
    from gpu_skills.lifecycle.machines import Machine

OnExpiry = Literal["stop", "destroy"]
KeyVerdict = Literal["proven", "denied", "unknown"]

# Between the end of a session and the fuse: exit records and manifests are written, outputs are closed.
DRAIN = timedelta(seconds=150)
CLOCKS_DIFFER = timedelta(seconds=150)
# How long a machine that was stopped waits for a new deadline after its start, whatever the old one says.
START_GRACE = timedelta(minutes=10)
ACKNOWLEDGE_S = 30.0
# Where a machine's record keeps the receipt that was relied on last.
ON_RECORD = "fuse"
_VERDICTS = ("proven", "denied", "unknown")
_INTENT = re.compile(r"[a-z][0-9a-f]{16}")
_FOLDER = re.compile(r"~|/[A-Za-z0-9._/-]{1,200}")
_MAX_EPOCH_S = 9_999_999_999


@dataclass(frozen=True)
class Receipt:
    """What the fuse on the machine says of itself. deadline_at None: never.

    key: whether the machine's own key may end its billing, tried without effect at arming. is_alive: its process is
    there and was busy a moment ago. boot: changes when the machine was stopped and started.
    """

    intent: str
    deadline_at: datetime | None
    armed_at: datetime
    key: KeyVerdict
    is_alive: bool
    on_expiry: OnExpiry
    boot: str

    def to_record(self) -> dict[str, Any]:
        return {
            "intent": self.intent,
            "deadline_at": None if self.deadline_at is None else timestamp(self.deadline_at),
            "armed_at": timestamp(self.armed_at),
            "key": self.key,
            "on_expiry": self.on_expiry,
            "is_alive": self.is_alive,
        }


def receipt_on_record(record: dict[str, Any]) -> Receipt | None:
    """The receipt that `to_record` wrote; None for what is none."""
    armed_at, deadline = time_of(record.get("armed_at")), record.get("deadline_at")
    deadline_at, intent = time_of(deadline), record.get("intent")
    key, on_expiry = record.get("key"), record.get("on_expiry")
    is_whole = isinstance(intent, str) and key in _VERDICTS and on_expiry in ("stop", "destroy")
    if not is_whole or armed_at is None or (deadline_at is None and deadline is not None):
        return None
    return Receipt(intent, deadline_at, armed_at, key, record.get("is_alive") is True, on_expiry, "")


def session_deadline(fuse_deadline: datetime) -> datetime:
    """When the runner's session ends, so that what a job left is complete before the fuse acts."""
    return fuse_deadline - DRAIN


def planned_end(fuse_deadline: datetime) -> datetime:
    """From when on an end is the one that was planned: a session acts by the machine's clock, which may be ahead."""
    return session_deadline(fuse_deadline) - CLOCKS_DIFFER


def runner_root(keeps: str) -> str:
    """The runner's folder on a machine, beside that of the fuse, which the runner finds by this."""
    return f"{keeps.rstrip('/')}/.gpu-skills"


# the text that a create carries -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wire:
    """How a machine of one vendor speaks for itself: variables of its environment, and the requests.

    is_command: the start text takes the place of the image's command, as one shell word, and has to do its work.
    """

    vendor_url: str
    key_variable: str
    path: str
    probe: tuple[str, str, str]
    stop: tuple[str, str, str]
    destroy: tuple[str, str, str]
    is_command: bool


# The probe asks for what is so already: the answer tells whether the key was accepted, and nothing changes.
_WIRES = {
    "vast": _Wire(
        "https://console.vast.ai",
        "CONTAINER_API_KEY",
        "/api/v0/instances/${CONTAINER_ID:-${VAST_CONTAINERLABEL#C.}}/",
        probe=("PUT", "", '{"state":"running"}'),
        stop=("PUT", "", '{"state":"stopped"}'),
        destroy=("DELETE", "", "{}"),
        is_command=False,
    ),
    "runpod": _Wire(
        "https://api.runpod.io",
        "RUNPOD_API_KEY",
        "/v2/pods/$RUNPOD_POD_ID",
        probe=("POST", "/action", '{"action":"start"}'),
        stop=("POST", "/action", '{"action":"stop"}'),
        destroy=("POST", "/action", '{"action":"terminate"}'),  # the call that the probe has proven
        is_command=True,
    ),
}


def bootstrap(
    *,
    provider: str,
    base_url: str | None,
    intent: str,
    deadline_at: datetime,
    longest_s: float,
    on_expiry: OnExpiry,
    keeps: str,
    then: str | None = None,
) -> str:
    """The text for Vast's `onstart` or RunPod's `args`, at most 4,000 characters.

    base_url None: the vendor's own. longest_s: how long the machine may run until the deadline, which bounds what a
    wrong wall clock can do. keeps: the folder that survives a stop, `~` for the home. then: bash to go on with; on
    RunPod, where the text takes the place of the image's command, None means its start script or an SSH server.
    """
    wire = _WIRES[provider]
    if not _INTENT.fullmatch(intent) or not _FOLDER.fullmatch(keeps) or ".." in keeps.split("/"):
        raise UsageError(f"no fuse for intent {intent!r} in {keeps!r}", next_step="gpu doctor")
    folder = "${HOME:-/root}" + keeps[1:] if keeps.startswith("~") else keeps.rstrip("/")
    act = wire.stop if on_expiry == "stop" else wire.destroy
    url = _checked_url(base_url or wire.vendor_url) + wire.path
    lines = [
        f"I={intent} E={int(deadline_at.timestamp())} L={math.ceil(longest_s)} W={on_expiry} N={wire.key_variable}",
        f"F={folder}/.gpu-fuse/$I V={url}",
        _request("", act),
        _request("P", wire.probe),
        # What the probe has not proven may be refused: then at least the costly part ends.
        "S=" + (_escaped(wire.stop[2]) if act[:2] != wire.probe[:2] else ""),
        *_compact("fuse.sh"),
    ]
    if then is not None:
        lines.append(then)
    elif wire.is_command:
        lines += _compact("start_script.sh")
    text = "\n".join(lines)
    if wire.is_command:
        text = f"bash -c {shlex.quote(text)}"
    if len(text) > MAX_BOOTSTRAP_CHARS:
        raise UsageError(
            f"the machine's start text has {len(text)} characters, {provider} takes {MAX_BOOTSTRAP_CHARS}",
            next_step="shorten what runs at the start of the machine",
        )
    return text


def _request(prefix: str, request: tuple[str, str, str]) -> str:
    method, below, body = request
    return f"{prefix}M={method} {prefix}U=$V{below} {prefix}B={_escaped(body)}"


def _escaped(body: str) -> str:
    return body.replace('"', '\\"')


def _compact(name: str) -> list[str]:
    """Without comments, blank lines and indentation: the vendors count characters."""
    source = resources.machine_script(name).read_text(encoding="utf-8").splitlines()
    lines = (re.sub(r"\s+# .*", "", line.strip()) for line in source)
    return [line for line in lines if line and not line.startswith("#")]


def _checked_url(base_url: str) -> str:
    address = urlsplit(base_url)
    is_plain = re.fullmatch(r"https?://[A-Za-z0-9.:-]{1,100}(/[A-Za-z0-9._-]+)*/?", base_url) is not None
    is_safe = address.scheme == "https" or address.hostname in ("127.0.0.1", "localhost")
    if not is_plain or not is_safe:
        raise UsageError(f"a machine's key is not sent to {base_url[:80]!r}", next_step="gpu doctor")
    return base_url.rstrip("/")


# what the machine says ----------------------------------------------------------------------------------------------


def read_receipt(link: Link, machine: Machine) -> Receipt | None:
    """What the fuse says of itself now. None: there is none yet (or none of this machine's intent)."""
    return _receipt(link.session.call("fuse", {"intent": machine.intent}), machine)


def set_deadline(
    link: Link, machine: Machine, deadline_at: datetime | None, *, clock: Clock | None = None
) -> datetime | None:
    """Move the deadline on the machine, None: never; what the fuse itself then says it holds.

    Raises FuseMissing when no fuse lives there, FuseSilent when it does not take the new deadline over in time: then
    the old one may hold.
    """
    clock = clock or SystemClock()
    if deadline_at is None:
        wanted: dict[str, Any] = {"epoch_s": None}
    else:
        left_s = (deadline_at - clock.now()).total_seconds()
        epoch_s = int(deadline_at.timestamp())
        wanted = {"epoch_s": epoch_s, "in_s": max(0, math.ceil(left_s))}
    args: dict[str, Any] = {"intent": machine.intent, "deadline": wanted, "wait_s": 10}
    held = None if deadline_at is None else datetime.fromtimestamp(wanted["epoch_s"], UTC)
    until = time.monotonic() + ACKNOWLEDGE_S
    while True:
        receipt = _receipt(link.session.call("fuse", args), machine)
        if receipt is not None and receipt.is_alive and receipt.deadline_at == held:
            return receipt.deadline_at
        if time.monotonic() >= until:
            break
        args.pop("deadline", None)
    if receipt is None or not receipt.is_alive:
        raise FuseMissing(machine=machine.id)
    shown = "never" if receipt.deadline_at is None else timestamp(receipt.deadline_at)
    raise FuseSilent(machine=machine.id, deadline=shown)


def _receipt(answer: dict[str, Any], machine: Machine) -> Receipt | None:
    """What the machine wrote is hostile: a receipt that is not whole, or of another intent, is none."""
    found = answer.get("receipt")
    if not isinstance(found, dict) or found.get("intent") != machine.intent:
        return None
    key, on_expiry, boot = found.get("key"), found.get("on_expiry"), found.get("boot")
    armed_at, deadline = _moment(found.get("armed_at")), found.get("deadline")
    deadline_at = None if deadline == "never" else _moment(deadline)
    is_whole = key in _VERDICTS and on_expiry in ("stop", "destroy") and isinstance(boot, str)
    if not is_whole or armed_at is None or (deadline_at is None and deadline != "never"):
        return None
    return Receipt(machine.intent, deadline_at, armed_at, key, answer.get("alive") is True, on_expiry, boot[:64])


def _moment(value: Any) -> datetime | None:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:12]) <= _MAX_EPOCH_S:
        return None
    return datetime.fromtimestamp(int(text[:12]), UTC)
