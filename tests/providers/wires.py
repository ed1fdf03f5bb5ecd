"""A provider as a function from a request to an answer: the adapter above it is the real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fake_clock import FakeClock
from gpu_skills.credentials import Credential
from gpu_skills.providers.runpod import connect_runpod
from gpu_skills.providers.runpod.client import RunpodClient
from gpu_skills.providers.vast import connect_vast
from gpu_skills.providers.vast.client import VastClient
from gpu_skills.wire import Answer, Call

KEY = "madeUpKeyForTests0123456789"
VAST_KEY = Credential("vast", KEY, "VAST_API_KEY")
RUNPOD_KEY = Credential("runpod", KEY, "RUNPOD_API_KEY")


def answer(status: int = 200, body: Any = None, **headers: str) -> Answer:
    """A JSON answer; text or bytes go as they are."""
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return Answer(status, data, {name.replace("_", "-").lower(): value for name, value in headers.items()})


@dataclass
class Script:
    """Answers in order, the last one for ever; an exception in their place is raised. `calls`: what was asked."""

    answers: Iterable[Answer | Exception | Callable[[Call], Answer]]
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = list(self.answers)

    def __call__(self, call: Call) -> Answer:
        self.calls.append(call)
        now = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if isinstance(now, Exception):
            raise now
        return now(call) if callable(now) else now

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(call.body) if call.body else None for call in self.calls]

    @property
    def lines(self) -> list[str]:
        return [f"{call.method} {call.url.partition('://')[2].partition('/')[2]}" for call in self.calls]


def vast(script: Callable[[Call], Answer], clock: FakeClock | None = None) -> VastClient:
    return connect_vast(VAST_KEY, environ={}, clock=clock or FakeClock(), state_dir=None, wire=script)


def runpod(script: Callable[[Call], Answer], clock: FakeClock | None = None) -> RunpodClient:
    return connect_runpod(RUNPOD_KEY, environ={}, clock=clock or FakeClock(), state_dir=None, wire=script)
