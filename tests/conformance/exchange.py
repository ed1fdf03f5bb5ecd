"""What a client sends and what the sandbox answers, as committed in the folders beside this file.

    recording = Recording(sandbox)
    recording.command("vastai show user --raw")     # what follows belongs to this
    ...
    recording.matches(HERE / "vast" / "account.json")

The files are data of our own, recorded from the sandbox with SANDBOX_RECORD=1. A run is held against them: the
requests word for word, the answers by status and shape (names and types), each with what differs from run to run left
out: times, ids, ports, keys, folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from gpu_skills.sandbox import Sandbox
from gpu_skills.sandbox.face import Reply, Request
from gpu_skills.sandbox.http import HangUp

IS_RECORDING = bool(os.environ.get("SANDBOX_RECORD"))
KEPT_OF_A_LIST = 1  # of objects, which are all alike
EPOCH_SECONDS = (1_500_000_000, 4_000_000_000)
IDS = (10_000_000, 1_000_000_000)
STANDARD_TIME = 1_800_000_000  # when the sandbox starts, in the files
# Fields of one run only, whatever they hold.
STANDARD_VALUES = {"ssh_port": 22022, "HostPort": "22022", "jupyter_token": "0" * 64}
ONLY_WITHOUT_ROOT = {"ssh_user"}


class Recording:
    """Listens to a sandbox from now on. folder: where this run keeps its files, the user's home among them."""

    def __init__(self, sandbox: Sandbox, folder: Path):
        self._sandbox = sandbox
        self._folder = folder
        self._began = sandbox.world.now()
        self.calls: list[dict[str, Any]] = []
        self._answer = sandbox.service.answer
        sandbox.service.answer = self._listen  # type: ignore[method-assign]

    def command(self, text: str) -> None:
        self.calls.append({"command": self._standard(text), "exchanges": []})

    @property
    def exchanges(self) -> list[dict[str, Any]]:
        """Those of the last command."""
        return self.calls[-1]["exchanges"]

    @property
    def requests(self) -> list[str]:
        """`PUT /api/v0/…` of the last command."""
        return [f"{exchange['request']['method']} {exchange['request']['path']}" for exchange in self.exchanges]

    def body(self, number: int = -1) -> Any:
        """The body of a request of the last command."""
        return self.exchanges[number]["request"]["body"]

    def matches(self, file: Path) -> None:
        """Fail unless this run is like the committed one. When recording: write the file."""
        now = {"calls": self.calls}
        if IS_RECORDING:
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            return
        committed = json.loads(file.read_text(encoding="utf-8"))
        is_other = difference(_essence_of_all(committed), _essence_of_all(now))
        assert is_other is None, f"not as in {file.name}: {is_other}\nif it is right now: SANDBOX_RECORD=1"

    def _listen(self, request: Request) -> Reply:
        try:
            reply = self._answer(request)
        except HangUp:
            self._add(request, None)
            raise
        self._add(request, reply)
        return reply

    def _add(self, request: Request, reply: Reply | None) -> None:
        if not self.calls:
            return
        told = None
        if reply is not None:
            is_stream = isinstance(reply.body, Iterator)  # whoever reads it here takes it from the client
            body = "stream" if is_stream else self._standard(_decoded(reply.encoded()), cut=True)
            told = {"status": reply.status, "content_type": reply.content_type, "body": body}
        self.exchanges.append(
            {
                "request": {
                    "method": request.method,
                    "path": self._standard(request.path),
                    "query": {name: self._standard(_value(text)) for name, text in parse_qsl(request.query_string)},
                    "body": self._standard(_decoded(request.raw)),
                },
                "reply": told,
            }
        )

    def _standard(self, value: Any, *, cut: bool = False) -> Any:
        """Without what is true of this run only. cut: of a list of objects only the first."""
        if isinstance(value, dict):
            return {
                self._standard(name): STANDARD_VALUES.get(name, self._standard(entry, cut=cut))
                for name, entry in value.items()
                if name not in ONLY_WITHOUT_ROOT
            }
        if isinstance(value, list):
            is_cut = cut and len(value) > KEPT_OF_A_LIST and all(isinstance(entry, dict) for entry in value)
            return [self._standard(entry, cut=cut) for entry in (value[:KEPT_OF_A_LIST] if is_cut else value)]
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_in(value, EPOCH_SECONDS):
            return round(value - self._began) + STANDARD_TIME
        return self._standard_text(value) if isinstance(value, str) else value

    def _standard_text(self, text: str) -> str:
        text = text.replace(self._sandbox.url, "http://sandbox").replace(str(self._sandbox.directory), "/sandbox")
        text = text.replace(str(self._folder), "/home")
        text = re.sub(r"\b(sbx_[a-z]+_[a-z]+)_[0-9a-f]{32}\b", r"\1_0", text)
        text = re.sub(r"(sandbox-results/)[0-9a-f]{32}\b", r"\1token", text)
        text = re.sub(r"\b(ssh-[a-z0-9]+) [A-Za-z0-9+/=]{40,}", r"\1 AAAA", text)
        text = re.sub(r"\b20\d\d-\d\d-\d\d([T ]\d\d:\d\d:\d\d)?", _standard_date, text)
        text = re.sub(r"\bport \d+\b", "port 22022", text)
        return re.sub(r"\b(1[5-9]|2\d|3\d)\d{8}\b(\.\d+)?", str(STANDARD_TIME), text)  # EPOCH_SECONDS


def _standard_date(found: re.Match[str]) -> str:
    return "2027-01-15" + (f"{found[1][0]}08:00:00" if found[1] else "")


def _decoded(data: bytes) -> Any:
    """JSON if it is, else text; nothing for an empty body."""
    return _value(data.decode("utf-8", "replace")) if data else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_in(value: float, limits: tuple[int, int]) -> bool:
    return limits[0] <= value < limits[1]


# comparing ----------------------------------------------------------------------------------------------------------


def _essence_of_all(recording: dict[str, Any]) -> list[Any]:
    return [
        {"command": _without_numbers_of_the_run(call["command"]), "exchanges": [_essence(e) for e in call["exchanges"]]}
        for call in recording["calls"]
    ]


def difference(before: Any, now: Any, where: str = "") -> str | None:
    """The first place where two values differ, with both; None when they are alike."""
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        pairs = [(f"{where}/{name}", before[name], now[name]) for name in before]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(f"{where}/{number}", *both) for number, both in enumerate(zip(before, now, strict=True))]
    elif before == now:
        return None
    elif isinstance(before, dict) and isinstance(now, dict):
        return f"{where}: missing {sorted(before.keys() - now.keys())}, new {sorted(now.keys() - before.keys())}"
    else:
        return f"{where}: {str(before)[:300]} was recorded, now {str(now)[:300]}"
    return next((found for at, old, new in pairs if (found := difference(old, new, at)) is not None), None)


def _essence(exchange: dict[str, Any]) -> dict[str, Any]:
    request, reply = exchange["request"], exchange["reply"]
    return {
        "request": {name: _without_numbers_of_the_run(part) for name, part in request.items()},
        "reply": reply and {**reply, "body": shape(reply["body"])},
    }


def _without_numbers_of_the_run(value: Any) -> Any:
    """Times and ids are told by their size: nothing else that is sent here is as large."""
    if isinstance(value, dict):
        return {name: _without_numbers_of_the_run(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_numbers_of_the_run(entry) for entry in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "time" if _is_in(value, EPOCH_SECONDS) else "id" if _is_in(value, IDS) else value
    return re.sub(r"\b\d{8,10}\b", "id", value) if isinstance(value, str) else value


def shape(value: Any) -> Any:
    """Names and types. A list has the shapes of its entries, each once, and none when it is empty."""
    if isinstance(value, dict):
        return {name: shape(entry) for name, entry in value.items()}
    if isinstance(value, list):
        shapes: list[Any] = []
        for entry in map(shape, value[:KEPT_OF_A_LIST] if all(isinstance(e, dict) for e in value) else value):
            if entry not in shapes:
                shapes.append(entry)
        return shapes
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "number" if isinstance(value, int | float) else "text"
