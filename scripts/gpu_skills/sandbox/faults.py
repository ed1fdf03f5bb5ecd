"""Faults as data: which call or instance of which vendor goes wrong, how, and how often.

A list of rules, in a file, at start or at run time:

    [{"match": {"provider": "vast", "call": "create", "nth": 2}, "fault": "lost_reply"},
     {"match": {"call": "create"}, "fault": "capped_disk", "args": {"disk_gb": 8}},
     {"match": {"instance": 12345}, "fault": "dead_ssh"}]

or a script, one word per call: `faults.script("vast", "create", "ok, lost_reply, 429, ok")`.

`match` may hold `provider`, `call`, `instance` (id or label) and `nth` (the how-manieth matching call, from 1). A rule
acts once, unless `times` says otherwise (0: always). Faults of a *call* spoil an answer, or what the call does; faults
of an *instance* are bound to the instance that a matching create makes, or at once to the one that is named.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CALL, WORK, INSTANCE, ACCOUNT = "call", "work", "instance", "account"

# name → (where it acts, what it does with which arguments). CALL faults are played by http.py for every vendor; WORK
# faults by the vendor's own handler; INSTANCE faults by the world; ACCOUNT faults once, when they are set.
KINDS: dict[str, tuple[str, str]] = {
    "ok": (CALL, "nothing: a place in a script"),
    "lost_reply": (CALL, "the work is done, then the connection closes without an answer"),
    "lost_request": (CALL, "the connection closes, nothing was done"),
    "duplicate": (CALL, "the request is delivered twice; the second answer goes back"),
    "slow": (CALL, "`seconds` (default 2) of real time pass before the answer; the work is done first"),
    "half_body": (CALL, "the work is done, half of the body arrives, the connection closes"),
    "html": (CALL, "an HTML page with `status` (default 502); `done`: the work was done all the same"),
    "failure_200": (CALL, "200 with a failure inside; `done`: the work was done all the same"),
    "429": (CALL, "too many requests; `style`: plain or json, `retry_after` in seconds"),
    "500": (CALL, "server error; `done`: the work was done all the same"),
    "502": (CALL, "bad gateway; `done`"),
    "503": (CALL, "unavailable; `done`"),
    "504": (CALL, "gateway timeout; `done`"),
    "401": (CALL, "the key is refused"),
    "403": (CALL, "the key lacks the right; `html`: a page of the edge instead"),
    "not_found": (CALL, "404 for something that is there"),
    "garbage": (CALL, "200 with a body that is not JSON"),
    "offer_gone": (WORK, "create: the offer is not there any more; `status` 404 or 410"),
    "no_capacity": (WORK, "create: nothing free"),
    "insufficient_balance": (WORK, "create: refused for want of balance"),
    "error_with_contract": (WORK, "create: an error reply that carries the id of an instance that exists, stopped"),
    "wrong_id": (WORK, "create: it is made, and the answer names another `instance` (default: one that never was)"),
    "list_empty": (WORK, "list: a successful reply without anything"),
    "destroy_again": (WORK, "destroy: says success and does nothing"),
    "price_changed": (INSTANCE, "it costs `factor` (default 1.5) times the offer"),
    "capped_disk": (INSTANCE, "it gets `disk_gb` (default 8) at most"),
    "created_stopped": (INSTANCE, "it is made in state stopped"),
    "created_on_demand": (INSTANCE, "asked for as interruptible, made on-demand at the full rate"),
    "list_lag": (INSTANCE, "no list shows it for `seconds` of the vendor's clock (default 60)"),
    "hidden_at_first": (INSTANCE, "show and list answer as if it were not there, for `seconds` (default 60)"),
    "comes_back": (INSTANCE, "after destroy it is absent, and `seconds` (default 30) later there and billing again"),
    "destroy_repeats": (INSTANCE, "`times` (default 2) destroys change nothing"),
    "stuck_loading": (INSTANCE, "it never leaves loading"),
    "exited": (INSTANCE, "its container ends at once"),
    "unknown": (INSTANCE, "its host sends no heartbeat: status unknown"),
    "offline": (INSTANCE, "its host is gone: status offline, nothing is billed"),
    "null_status": (INSTANCE, "its status stays null"),
    "status_error": (INSTANCE, "status stays created with `message`, an error of the container runtime"),
    "dead_ssh": (INSTANCE, "its SSH port refuses connections"),
    "old_port": (INSTANCE, "the first look after a start shows the port of before"),
    "changed_host_key": (INSTANCE, "its SSH host key is another one after the next start, or at once when it runs"),
    "missing_gpu": (INSTANCE, "nvidia-smi finds `count` (default 1) GPUs fewer than were rented"),
    "no_gpu_driver": (INSTANCE, "nvidia-smi fails"),
    "outbid": (INSTANCE, "stopped `after` seconds; with `resume` it runs again by itself that many seconds later"),
    "host_full": (INSTANCE, "the next start finds no free GPU"),
    "zero_gpu_start": (INSTANCE, "the next start comes up without a GPU"),
    "key_denied": (INSTANCE, "its machine key may do nothing"),
    "crash_loop": (INSTANCE, "its container ends again and again while it bills"),
    "well": (INSTANCE, "what was wrong with it ends: its host is back, it loads on, its status shows again"),
    "zero_balance": (ACCOUNT, "the balance of the provider's account is 0 now"),
}  # fmt: skip


class UnknownFault(ValueError):
    """Not a fault, or not a rule."""


@dataclass
class Rule:
    fault: str
    args: dict[str, Any] = field(default_factory=dict)
    provider: str | None = None
    call: str | None = None
    instance: str | None = None
    nth: int | None = None
    times: int = 1
    seen: int = 0
    used: int = 0

    @property
    def where(self) -> str:
        return KINDS[self.fault][0]

    @property
    def is_spent(self) -> bool:
        return bool(self.times) and self.used >= self.times

    def covers(self, provider: str, call: str, names: Iterable[str]) -> bool:
        return (
            self.provider in (None, provider)
            and self.call in (None, call)
            and (self.instance is None or self.instance in names)
        )

    def to_dict(self) -> dict[str, Any]:
        wanted = {"provider": self.provider, "call": self.call, "instance": self.instance, "nth": self.nth}
        match = {name: value for name, value in wanted.items() if value is not None}
        return {"match": match, "fault": self.fault, "args": self.args, "times": self.times, "used": self.used}


def parse(rules: Any) -> list[Rule]:
    """Rules from JSON. UnknownFault names the entry and what is allowed."""
    if not isinstance(rules, list):
        raise UnknownFault("faults are a list of rules")
    return [_rule(entry, number) for number, entry in enumerate(rules)]


def _rule(entry: Any, number: int) -> Rule:
    where = f"rule {number}"
    if not isinstance(entry, dict) or not isinstance(entry.get("match", {}), dict):
        raise UnknownFault(f'{where}: write {{"match": {{…}}, "fault": NAME}}')
    if unknown := set(entry) - {"match", "fault", "args", "times"}:
        raise UnknownFault(f"{where}: unknown {', '.join(sorted(unknown))}; allowed: match, fault, args, times")
    match, args = entry.get("match", {}), entry.get("args", {})
    if unknown := set(match) - {"provider", "call", "instance", "nth"}:
        raise UnknownFault(
            f"{where}: cannot match {', '.join(sorted(unknown))}; allowed: provider, call, instance, nth"
        )
    fault = str(entry.get("fault"))
    if fault not in KINDS:
        raise UnknownFault(f"{where}: no fault {fault!r}; there are: {', '.join(sorted(KINDS))}")
    if not isinstance(args, dict):
        raise UnknownFault(f"{where}: args is an object")
    counts = {"nth": match.get("nth", 1), "times": entry.get("times", 1)}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if name == "nth" else 0):
            raise UnknownFault(f"{where}: {name} is a whole number")
    instance = match.get("instance")
    return Rule(
        fault,
        dict(args),
        provider=_text(match.get("provider")),
        call=_text(match.get("call")),
        instance=_text(instance),
        nth=match.get("nth"),
        times=counts["times"],
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


class Faults:
    """The rules in force. Thread-safe."""

    def __init__(self, rules: Any = ()):
        self._lock = threading.Lock()
        self._rules = parse(list(rules))
        self._scripts: dict[tuple[str, str], list[str]] = {}

    def add(self, rules: Any) -> list[Rule]:
        parsed = parse(rules)
        with self._lock:
            self._rules += parsed
        return parsed

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()
            self._scripts.clear()

    def script(self, provider: str, call: str, words: str) -> None:
        """One word per call from now on, like `"ok, lost_reply, 429, ok"`; after the last one all is well."""
        names = [word.strip() for word in words.split(",") if word.strip()]
        if unknown := [name for name in names if name not in KINDS]:
            raise UnknownFault(f"no fault {', '.join(unknown)}; there are: {', '.join(sorted(KINDS))}")
        with self._lock:
            self._scripts[provider, call] = names

    def take(self, provider: str, call: str, names: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
        """The faults this call meets, by name, used up. names: id and label of the instance it is about."""
        if not self._rules and not self._scripts:
            return {}
        taken: dict[str, dict[str, Any]] = {}
        names = tuple(names)
        with self._lock:
            scripted = self._scripts.get((provider, call))
            if scripted:
                taken[scripted.pop(0)] = {}
            for rule in self._rules:
                if rule.is_spent or not rule.covers(provider, call, names):
                    continue
                rule.seen += 1
                if rule.nth is not None and rule.seen != rule.nth:
                    continue
                rule.used += 1
                taken[rule.fault] = rule.args
        taken.pop("ok", None)
        return taken

    def discard(self, rule: Rule) -> None:
        """Count a rule as used: it was applied at once, without waiting for a call."""
        rule.used = max(rule.times, 1)

    def to_list(self) -> list[dict[str, Any]]:
        with self._lock:
            rules = [rule.to_dict() for rule in self._rules]
            scripts = [
                {"match": {"provider": provider, "call": call}, "script": ", ".join(words)}
                for (provider, call), words in self._scripts.items()
                if words
            ]
        return rules + scripts


def of_instances(taken: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that stay with the instance a create makes."""
    return {name: dict(args) for name, args in taken.items() if KINDS[name][0] == INSTANCE}


def load(path: str) -> list[Any]:
    with open(path, encoding="utf-8") as stream:
        return json.load(stream)
