"""ComfyUI's websocket: what happens, as it happens. Nothing depends on it; a socket that breaks is not opened again.

The traffic is that of the `websockets` library, to the same origin as everything else, without redirects or proxy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from gpu_skills.clock import Clock
from gpu_skills.errors import one_line
from gpu_skills.runtimes.base import Event, OnEvent
from gpu_skills.runtimes.calls import Calls
from gpu_skills.wire import parse_json

log = logging.getLogger("gpu_skills.runtimes")

OPEN_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 16 * 1024 * 1024  # a preview picture is the largest
_OVER = frozenset({"execution_success", "execution_error", "execution_interrupted"})
_TOLD = {
    "execution_start": "started",
    "execution_cached": "cached",
    "executing": "executing",
    "progress": "progress",
    "executed": "executed",
    "execution_error": "error",
}
_KEPT = ("node", "node_id", "node_type", "value", "max", "exception_message", "exception_type")


class Socket:
    """A socket that is open, or was, or never could be: `wait` works either way. Use it as a context."""

    def __init__(self, calls: Calls, client_id: str, clock: Clock):
        self._clock = clock
        self._masked = calls.masked
        self._kept = contextlib.ExitStack()
        self._connection = _connected(calls, client_id, self._kept)

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def wait(self, prompt_id: str, seconds: float, on_event: OnEvent) -> bool:
        """Tell what comes within this time. Returns at once, and true, when it says that the prompt is over."""
        ends = self._clock.monotonic() + seconds
        while (left_s := ends - self._clock.monotonic()) > 0:
            if self._connection is None:
                self._clock.sleep(left_s)
                return False
            try:
                message = self._connection.recv(timeout=left_s)
            except TimeoutError:
                return False
            except Exception as exc:  # closed, cut, a frame too large: from now on the history is asked alone
                self._close()
                on_event(Event("note", {"text": f"the websocket ended ({type(exc).__name__}); the history is asked"}))
                continue
            if isinstance(message, str) and _told(self._masked(message), prompt_id, on_event):
                return True
        return False

    def _close(self) -> None:
        self._connection = None
        with contextlib.suppress(Exception):  # whatever a broken connection has to say about its end
            self._kept.close()


def _connected(calls: Calls, client_id: str, kept: contextlib.ExitStack) -> Any:
    from websockets.sync.client import connect

    scheme, _, rest = calls.origin.partition("://")
    address = f"{'wss' if scheme == 'https' else 'ws'}://{rest}/ws?clientId={client_id}"
    try:
        opening = connect(
            address,
            additional_headers=calls.key_headers,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=1,
            max_size=MAX_MESSAGE_BYTES,
            compression=None,
            proxy=None,
        )
        return kept.enter_context(opening)
    except Exception as exc:  # no websocket there, or none through this way: the history is asked alone
        log.debug("no websocket: %s", type(exc).__name__)
        return None


def _told(message: str, prompt_id: str, on_event: OnEvent) -> bool:
    """Tell one message; true when the prompt is over. What is of another prompt, or no message at all, is passed by."""
    try:
        document = parse_json(message.encode("utf-8", "surrogatepass"))
    except ValueError:
        return False
    kind, data = (document.get("type"), document.get("data")) if isinstance(document, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(data, Mapping):
        return False
    if kind == "status":
        _tell_queue(data, on_event)
        return False
    if data.get("prompt_id") != prompt_id:
        return False
    if kind in _TOLD:
        on_event(Event(_TOLD[kind], {name: _shown(data[name]) for name in _KEPT if data.get(name) is not None}))
    return kind in _OVER or (kind == "executing" and data.get("node") is None)


def _tell_queue(data: Mapping[str, Any], on_event: OnEvent) -> None:
    status = data.get("status")
    info = status.get("exec_info") if isinstance(status, Mapping) else None
    remaining = info.get("queue_remaining") if isinstance(info, Mapping) else None
    if isinstance(remaining, int):
        on_event(Event("queue", {"remaining": remaining}))


def _shown(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    return value if isinstance(value, int) else one_line(str(value), limit=300)
