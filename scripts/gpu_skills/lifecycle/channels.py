"""Ways to reach a person: the targets of the policy, and one message to one of them, bounded in time.

A target is an address in apprise's form. Secrets in it are named, `${NTFY_TOKEN}`, and come from the environment or the
project's `.env`; one that stands in the policy itself is refused. Neither an address nor a secret is in any text here.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpu_skills import credentials
from gpu_skills.config import read_dotenv
from gpu_skills.errors import GpuError, one_line
from gpu_skills.state.policy import Policy

TIMEOUT_S = 10.0  # for all targets together
INSTALL = "pip install 'gpu-skills[notify]'"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NO_SECRETS_OF_OTHERS = (*credentials.KEY_NAMES.values(), *credentials.HF_NAMES)
# What the project's policy may name: it may have come with a repository, and its address could be anybody's.
_MADE_FOR_MESSAGES = re.compile(r"(^|_)(NOTIFY|NTFY|APPRISE)(_|$)")
_SHORTEST_SECRET = 4
_SECRET_ARGUMENT = re.compile(r"(?i)[?&][^=&]*(authorization|api[-_]?key|token|secret|password)[^=&]*=[^&\0]")
_STATUS = re.compile(r"error=(\d{3})\b")


@dataclass(frozen=True)
class Target:
    """shown: how texts call it. events: what it is told; None: everything. is_users: the project's file does not have
    it, but the user's or the system's."""

    shown: str
    template: str = field(repr=False)
    events: frozenset[str] | None = None
    is_users: bool = False

    @property
    def key(self) -> str:
        """Names it in records, and tells nothing of it."""
        return hashlib.sha256(f"gpu-skills target\0{self.template}".encode()).hexdigest()[:12]

    def wants(self, event: str) -> bool:
        return self.events is None or event in self.events


@dataclass(frozen=True)
class Told:
    """What came of one message to one target. reason: why it was not delivered, without address or secret."""

    target: Target
    delivered: bool
    reason: str | None = None


class Unusable(Exception):
    """Nothing can be sent to this target as it is written. The text is for people."""


def targets_of(policy: Policy) -> list[Target]:
    """The targets of all policy files, in their order."""
    beyond_the_project = [
        entry
        for source in policy.sources
        if source.origin != "project"
        for entry in (source.content or {}).get("notify") or ()
    ]
    found = []
    for number, entry in enumerate(policy.notify):
        template = str(entry.get("url") or f"{entry.get('kind')}://{entry.get('target') or ''}")
        scheme = template.partition("://")[0] if "://" in template else ""
        kind = scheme if re.fullmatch(r"[a-z][a-z0-9]{0,20}", scheme) else "target"
        shown = one_line(str(entry.get("name") or f"{kind} (notify {number + 1})"), limit=80)
        events = entry.get("events")
        found.append(
            Target(shown, template, None if events is None else frozenset(events), entry in beyond_the_project)
        )
    return found


def address_of(target: Target, environ: Mapping[str, str], project_root: Path | None) -> tuple[str, tuple[str, ...]]:
    """(the address with its variables filled in, their values). Raises Unusable."""
    names = list(dict.fromkeys(_VARIABLE.findall(target.template)))
    for name in names:
        if name in _NO_SECRETS_OF_OTHERS:
            raise Unusable(f"{name} is a credential for something else and is not sent there")
        if not (target.is_users or _MADE_FOR_MESSAGES.search(name)):
            raise Unusable(
                f"a project's policy may only name variables such as GPU_NOTIFY_TOKEN or NTFY_TOKEN, not {name}; "
                "the user's policy may name any"
            )
    values = {name: environ[name] for name in names if environ.get(name)}
    is_whole = len(names) == 1 and target.template == f"${{{names[0]}}}"  # the address is the secret, as of a webhook
    missing = [name for name in names if name not in values]
    if is_whole and missing:
        # Not from .env: what may have come with a repository does not say where messages go.
        raise Unusable(f"{names[0]} is not in the environment")
    if missing and project_root is not None:
        try:
            values |= read_dotenv(project_root, missing)
        except GpuError as exc:
            raise Unusable(exc.message) from exc
    for name in names:
        if name not in values:
            raise Unusable(f"{name} is neither in the environment nor in .env")
    if is_whole:
        return values[names[0]], tuple(values.values())
    address = _VARIABLE.sub(lambda match: quote(values[match[1]], safe=""), target.template)
    return address, tuple(values.values())


def deliver(
    targets: Iterable[Target],
    title: str,
    body: str,
    *,
    kind: str = "info",
    environ: Mapping[str, str],
    project_root: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Told]:
    """Send one message to every target at once, and say of each what came of it. Raises nothing.

    kind: info, success, warning or failure. Who has not taken it after timeout_s is not waited for: the thread is a
    daemon, so that the command can end.
    """
    chosen = list(targets)
    answers: list[str | None] = ["it did not answer in time"] * len(chosen)

    def send(number: int, channel: Any) -> None:
        answers[number] = _send(channel, title, body, kind)

    threads = []
    for number, target in enumerate(chosen):
        try:
            channel = _channel(target, environ, project_root)
        except Unusable as exc:
            answers[number] = str(exc)
        else:
            threads.append(threading.Thread(target=send, args=(number, channel), name="notify", daemon=True))
    for thread in threads:
        thread.start()
    ends_at = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, ends_at - time.monotonic()))
    said = list(answers)  # what comes from now on is too late
    return [Told(target, reason is None, reason) for target, reason in zip(chosen, said, strict=True)]


def _send(channel: Any, title: str, body: str, kind: str) -> str | None:
    """None when it was delivered, else why not."""
    with _StatusCodes() as codes:
        try:
            delivered = channel.notify(body=body, title=title, notify_type=kind)
        except Exception as exc:  # a plugin's own defect: its text may hold the address
            return f"it could not be told ({type(exc).__name__})"
    if delivered:
        return None
    return f"it answered {codes.last}" if codes.last else "it was not reached"


def _channel(target: Target, environ: Mapping[str, str], project_root: Path | None) -> Any:
    """apprise's object for a target. Raises Unusable. Connects to nothing."""
    address, secrets = address_of(target, environ, project_root)
    try:
        import apprise
    except ImportError as exc:
        raise Unusable(f"the package apprise is not installed: {INSTALL}") from exc

    log = logging.getLogger("apprise")
    log.propagate = False  # its lines may hold addresses
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    asset = apprise.AppriseAsset(
        app_id="gpu", app_desc="gpu-skills", storage_mode="memory", http_redirects=False, allow_templates=False
    )
    try:
        channel = apprise.Apprise.instantiate(address, asset=asset)
    except Exception as exc:
        raise Unusable(f"apprise does not take it ({type(exc).__name__})") from exc
    if channel is None:
        raise Unusable("it is no address that apprise knows, or a part of it is missing")
    if _written_secret(channel, target.template, secrets):
        raise Unusable("a secret stands in the policy itself; put it into a variable and name that: ${NTFY_TOKEN}")
    return channel


def _written_secret(channel: Any, template: str, secrets: tuple[str, ...]) -> bool:
    """Whether what this kind of channel calls private stands in the policy as it is."""
    literal = _VARIABLE.sub("\0", template)
    if _SECRET_ARGUMENT.search(literal):
        return True
    for name, about in getattr(channel, "template_tokens", {}).items():
        if not about.get("private"):
            continue
        found = getattr(channel, str(about.get("map_to") or name), None)
        for one in found if isinstance(found, list | tuple | set) else (found,):
            if not isinstance(one, str) or len(one) < _SHORTEST_SECRET or any(one in value for value in secrets):
                continue
            if one in literal or quote(one, safe="") in literal:
                return True
    return False


class _StatusCodes:
    """The HTTP status that apprise logs on this thread: three digits of a line that may hold more than it should."""

    def __enter__(self) -> _StatusCodes:
        self.last: str | None = None
        thread = threading.get_ident()
        outer = self

        class Reads(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if record.thread == thread and (found := _STATUS.search(record.getMessage())):
                    outer.last = found[1]

        self._handler = Reads(logging.WARNING)
        logging.getLogger("apprise").addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("apprise").removeHandler(self._handler)
