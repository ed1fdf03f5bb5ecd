"""One origin for all faces: keys, faults of calls, limits, counters and the request log. The socket is listener.py's.

A key that is not the sandbox's own is refused with the vendor's refusal before anything else looks at the request, and
no key is ever written to the log.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from contextlib import nullcontext
from typing import Any
from urllib.parse import unquote

from gpu_skills.sandbox.face import Face, Reply, Request, Route, WireError
from gpu_skills.sandbox.world import KEY_PREFIX, World

_ERRORS = {"500": 500, "502": 502, "503": 503, "504": 504}
_EDGE_PAGE = b"<html><head><title>%d</title></head><body><center><h1>%d</h1></center><hr>cloudflare</body></html>\n"


class HangUp(Exception):
    """Close the connection in place of an answer, or in the middle of one."""

    def __init__(self, reply: Reply | None = None):
        super().__init__()
        self.reply = reply


class Limits:
    """The documented minimum interval between two calls of one account to one endpoint.

    mode `count` only counts calls that came too soon by the vendor's clock (`world.too_frequent`); `virtual` refuses
    them with 429 as well, `real` refuses by real time; `off` does nothing. A machine's own key is counted by itself.
    """

    MODES = ("off", "count", "real", "virtual")

    def __init__(self, world: World, mode: str):
        assert mode in self.MODES, mode
        self.world = world
        self.mode = mode
        self._recent: dict[Any, deque[float]] = {}
        self._lock = threading.Lock()

    def is_too_soon(self, identity: Any, vendor: str, route: Route) -> bool:
        """Whether to refuse this call."""
        if self.mode == "off" or not (route.interval_s or route.per_minute):
            return False
        now = time.monotonic() if self.mode == "real" else self.world.now()
        with self._lock:
            if not self._came_too_soon((identity, vendor, route.call), route, now):
                return False
            self.world.too_frequent[vendor, route.call] += 1
            return self.mode != "count"

    def _came_too_soon(self, who: Any, route: Route, now: float) -> bool:
        recent = self._recent.setdefault(who, deque(maxlen=max(route.per_minute, 1)))
        if route.per_minute:
            if len(recent) == route.per_minute and now - recent[0] < 60:
                return True
        elif recent and now - recent[-1] < route.interval_s:
            if route.penalty_s and self.mode != "count":
                recent[-1] = now - route.interval_s + route.penalty_s
            return True
        recent.append(now)
        return False


def _identity(request: Request) -> Any:
    """Who a limit counts: the account, or the one machine whose own key was shown."""
    key = request.key
    return "anybody" if key is None else (key.account.id, key.instance_id)


class Service:
    """Answers requests: the way from a parsed HTTP request to a reply, the same for every face."""

    def __init__(self, world: World, *, limits: str = "count", admin: Any = None):
        self.world = world
        self.limits = Limits(world, limits)
        world.limit_mode = limits
        self.admin = admin  # answers /_sandbox/…
        self.served_at = time.monotonic()

    def answer(self, request: Request) -> Reply:
        self.served_at = time.monotonic()
        if self.admin is not None and request.path.startswith("/_sandbox/"):
            return self.admin(request)
        face = next((face for face in self.world.faces.values() if face.owns(request.path)), None)
        if face is None:
            return Reply(404, {"error": "not_found", "msg": f"no such path: {request.path}"})
        try:
            reply = self._dispatch(face, request)
        except WireError as exc:
            reply = exc.reply
        except HangUp as exc:
            if exc.reply is not None:
                face.decorate(request, exc.reply)
            raise
        except Exception:
            self.world.crashes.append(f"{request.method} {request.path}\n{traceback.format_exc()}")
            reply = face.failure(500, "internal_error", "internal error of the sandbox; see `gpu sandbox status`")
        face.decorate(request, reply)
        return reply

    def _dispatch(self, face: Face, request: Request) -> Reply:
        found = face.find(request.method, request.path)
        if isinstance(found, set):
            if not found:
                raise WireError(face.failure(404, "not_found", f"no such path: {request.path}"))
            reply = face.failure(405, "method_not_allowed", f"{request.method} is not allowed here")
            reply.headers["Allow"] = ", ".join(sorted(found))
            raise WireError(reply)
        route, params = found
        request.params = {name: unquote(value) for name, value in params.items()}
        if route.needs_key:
            request.key = face.authenticate(request)
            face.authorize(route, request)
        self._count(face, route, request)
        if self.limits.is_too_soon(_identity(request), face.vendor, route):
            raise WireError(face.too_frequent(route, {}))
        request.faults = self.world.faults.take(face.vendor, route.call, self._names(route, request))
        return self._play(face, route, request)

    def _count(self, face: Face, route: Route, request: Request) -> None:
        world, counted = self.world, (face.vendor, route.call)
        with world.lock:
            world.calls[counted] += 1
            if route.mutates:
                world.mutating_calls[counted] += 1
            world.log.append(
                {
                    "at": world.now(),
                    "provider": face.vendor,
                    "call": route.call,
                    "method": request.method,
                    "path": request.path,
                    "account": request.key.account.id if request.key is not None else None,
                    "machine_key": request.key is not None and request.key.instance_id is not None,
                }
            )

    def _names(self, route: Route, request: Request) -> list[str]:
        """What rules may call the instance this request is about."""
        if route.about is None:
            return []
        name = request.params[route.about]
        names = [name]
        for instance_id in (name, int(name) if name.isdecimal() and len(name) < 20 else None):
            instance = self.world.instances.get(instance_id)
            if instance is not None and instance.label:
                names.append(instance.label)
        return names

    def _play(self, face: Face, route: Route, request: Request) -> Reply:
        """Do the work, spoilt by the faults of the call."""
        faults = request.faults
        if not faults:
            return self._work(route, request)
        if "lost_request" in faults:
            raise HangUp
        if "401" in faults:
            return face.failure(401, "auth_error", "Invalid user key")
        if "403" in faults:
            return _edge_page(403) if faults["403"].get("html") else face.failure(403, "not_authorized", "not allowed")
        if "429" in faults:
            return face.too_frequent(route, faults["429"])
        if "not_found" in faults:
            return face.failure(404, "not_found", "not found")
        spoilt = next((name for name in ("html", "failure_200", *_ERRORS) if name in faults), None)
        if spoilt is not None:
            if faults[spoilt].get("done"):
                self._work(route, request)
            return _spoilt(face, spoilt, faults[spoilt])
        if "duplicate" in faults:
            self._work(route, request)
        reply = self._work(route, request)
        if "slow" in faults:
            time.sleep(min(float(faults["slow"].get("seconds", 2)), 600))
        if "lost_reply" in faults:
            raise HangUp
        if "half_body" in faults:
            raise HangUp(reply)
        if "garbage" in faults:
            return Reply(200, b'{"success": tru', content_type="application/json")
        return reply

    def _work(self, route: Route, request: Request) -> Reply:
        with self.world.lock if route.holds_lock else nullcontext():
            try:
                return route.handler(request)
            except WireError as exc:
                return exc.reply


def _spoilt(face: Face, name: str, args: dict[str, Any]) -> Reply:
    if name == "html":
        return _edge_page(int(args.get("status", 502)))
    if name == "failure_200":
        return face.failure_inside_200()
    return face.failure(_ERRORS[name], "server_error", "Something went wrong on our side")


def _edge_page(status: int) -> Reply:
    return Reply(status, _EDGE_PAGE % (status, status), content_type="text/html; charset=UTF-8")


def is_sandbox_key(value: str | None) -> bool:
    return value is not None and value.startswith(KEY_PREFIX)


def json_body(request: Request) -> dict[str, Any]:
    """The body as an object. Raises ValueError."""
    body = request.json()
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body
