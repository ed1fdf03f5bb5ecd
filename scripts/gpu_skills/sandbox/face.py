"""What a vendor adds to the world: its wire format, its prices, and what it does at each turn of an instance's life.

A face is one class per vendor, listed in FACES. It brings

- `routes`: method, path pattern and handler of every call. http.py finds the route, checks the key through
  `authenticate`, plays the faults of calls, counts, and hands a `Request` to the handler, which returns a `Reply` or
  raises `WireError`. Handlers run with `world.lock` held unless the route says otherwise.
- the rules: `tariff` (what an instance costs per hour in its present phase), `boot` (environment, start command, keys,
  mounts of the next container start), and what happens when a command ends or the money does.

Handlers change the world through `world.rent`, `start`, `stop`, `reboot`, `destroy`; these move the state machine,
bill, and queue the real effects. Everything else a vendor knows about an instance goes into `instance.extra`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from gpu_skills.sandbox.containers import Boot
    from gpu_skills.sandbox.world import Account, Instance, Key, World

# Which class speaks for whom. A vendor is added here and nowhere else.
FACES = {"vast": "gpu_skills.sandbox.vast:VastFace", "runpod": "gpu_skills.sandbox.runpod:RunpodFace"}


@dataclass
class Reply:
    """body: a JSON value, bytes, or an iterator of bytes for a stream that stays open."""

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"

    def encoded(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        if isinstance(self.body, Iterator):
            return next(self.body, b"")
        return json.dumps(self.body, default=_number).encode() if self.body is not None else b""


class WireError(Exception):
    """A handler's way to answer with an error from any depth."""

    def __init__(self, reply: Reply):
        super().__init__(reply.status)
        self.reply = reply


@dataclass
class Request:
    """One call as a handler sees it. params: the named groups of the route. faults: what it meets, by name → args."""

    method: str
    path: str
    query_string: str
    headers: dict[str, str]  # names in lower case
    raw: bytes
    base_url: str
    params: dict[str, str] = field(default_factory=dict)
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    key: Key | None = None

    @property
    def account(self) -> Account:
        assert self.key is not None, "this route has no account: its handler must not ask for one"
        return self.key.account

    @functools.cached_property
    def query(self) -> dict[str, str]:
        """The last value of each query parameter."""
        return dict(parse_qsl(self.query_string, keep_blank_values=True))

    @property
    def bearer(self) -> str | None:
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        return value.strip() if scheme.lower() == "bearer" and value.strip() else None

    def json(self) -> Any:
        """The body as JSON; ValueError when it is not, is nested too deep, or holds NaN."""
        try:
            return json.loads(self.raw or b"{}", parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("nested too deep") from None


Handler = Callable[[Request], Reply]


@dataclass
class Route:
    """call: the name that faults, counters and limits go by. about: the path parameter that holds an instance's id.

    interval_s: the documented minimum between two such calls of one account; penalty_s: what a call that came too soon
    adds. per_minute: a budget instead. holds_lock: False for handlers that wait.
    """

    method: str
    pattern: re.Pattern[str]
    call: str
    handler: Handler
    mutates: bool = False
    needs_key: bool = True
    interval_s: float = 0.0
    penalty_s: float = 0.0
    per_minute: int = 0
    about: str | None = None
    holds_lock: bool = True


def route(method: str, path: str, call: str, handler: Handler, **options: Any) -> Route:
    """path: like `/api/v0/instances/{id}`; with or without a slash at the end it is the same."""
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path.rstrip("/"))
    return Route(method, re.compile(f"{pattern}/?"), call, handler, **options)


class Face:
    """Base of all faces. Override what the vendor does otherwise."""

    vendor = ""
    prefixes: tuple[str, ...] = ()  # the paths that are this vendor's

    def __init__(self, world: World):
        self.world = world
        self.routes: list[Route] = []

    # the wire ------------------------------------------------------------------------------------------------------

    def owns(self, path: str) -> bool:
        return path.startswith(self.prefixes)

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]] | set[str]:
        """The route and its path parameters; else the methods that this path knows (empty: no such path)."""
        methods = set()
        for candidate in self.routes:
            match = candidate.pattern.fullmatch(path)
            if match is not None:
                if candidate.method == method:
                    return candidate, match.groupdict()
                methods.add(candidate.method)
        return methods

    def authenticate(self, request: Request) -> Key:
        """The key of this request. Raises WireError with the vendor's own refusal."""
        raise NotImplementedError

    def authorize(self, route: Route, request: Request) -> None:
        """Refuse (WireError) what this key may not do."""

    def failure(self, status: int, code: str, message: str) -> Reply:
        """An error in the vendor's shape."""
        raise NotImplementedError

    def too_frequent(self, route: Route, args: dict[str, Any]) -> Reply:
        """429, by a limit or by a fault (`style`, `retry_after`)."""
        raise NotImplementedError

    def failure_inside_200(self) -> Reply:
        return Reply(200, {"success": False})

    def decorate(self, request: Request, reply: Reply) -> None:
        """Add the headers that every answer of this vendor has."""

    # the rules -----------------------------------------------------------------------------------------------------

    def tariff(self, instance: Instance) -> dict[str, Decimal]:
        """USD per hour by kind, for the instance as it is now. Destroyed and offline ones are not asked about."""
        raise NotImplementedError

    def boot(self, instance: Instance) -> Boot:
        """What the next start of its container is given."""
        raise NotImplementedError

    def rented(self, instance: Instance) -> None:
        """It was just taken into the world (lock held)."""

    def came_up(self, instance: Instance) -> None:
        """It is running, for the first time or again (lock held)."""

    def outbid(self, instance: Instance) -> None:
        """Somebody offered more for its GPUs; it is being stopped (lock held)."""

    def command_ended(self, instance: Instance, code: int) -> None:
        """Its main process ended by itself (lock held). The container stays up unless the vendor ends it."""

    def balance_is_zero(self, account: Account) -> None:
        """The account's balance reached zero (lock held)."""
        for instance in list(self.world.living(account)):
            self.world.stop(instance, reason="no credit")


def build_faces(world: World, names: Iterable[str] = FACES) -> Iterator[Face]:
    for name in names:
        module, _, class_name = FACES[name].partition(":")
        if importlib.util.find_spec(module) is not None:
            yield getattr(importlib.import_module(module), class_name)(world)


def _number(value: Any) -> float:
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"{type(value).__name__} does not go into JSON")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
