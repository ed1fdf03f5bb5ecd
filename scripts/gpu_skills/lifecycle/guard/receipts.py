"""Receipts of sentinel passes: proof that somebody outside the machine watches its deadline.

Every pass leaves one in the user's state directory, and where `--receipt` says: a file or an `s3://bucket/key`. A
machine whose own key is not proven to end its billing is made only while a fresh one can be shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_skills.clock import parse_timestamp
from gpu_skills.errors import ArtifactChanged, GpuError, NotWritable, StateError, Unguarded, UsageError
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.state import files
from gpu_skills.units import format_duration

if TYPE_CHECKING:
    from gpu_skills.artifacts.base import Store
    from gpu_skills.lifecycle.guard.fuse import OnExpiry

MAX_AGE = timedelta(hours=1)
# Another host's clock may be a little ahead of ours; further ahead than this is no receipt of the past hour.
CLOCK_SKEW = timedelta(minutes=2)
MAX_BYTES = 4 << 20
S3 = "s3://"


def require_recent(op: Operator, provider: str, rights: OnExpiry) -> None:
    """Unguarded, unless a machine's key was proven to end billing on this account, or a pass ended within the hour.

    To be asked before each create. rights: what the fuse of the machine is going to do. Where the policy's fuse layers
    name the sentinel, a proven key does not stand in for it. Only complete passes over this very provider, account and
    project count.
    """
    from gpu_skills.lifecycle.guard import keyproof

    account = op.account(provider)
    is_proven = keyproof.last(op, provider, account, rights) == "proven"
    if is_proven and "sentinel" not in op.policy().fuse_layers:
        return
    reasons = []
    for place in places(op, provider, account):
        try:
            problem = why_not(read(place), provider, account, op.project.project_id, op.clock.now())
        except GpuError as exc:
            problem = exc.message
        if problem is None:
            return
        reasons.append(f"{place}: {problem}" if reasons else problem)
    raise Unguarded(provider=provider, reason="; ".join(reasons)[:500])


def places(op: Operator, provider: str, account: str) -> list[str]:
    """Where receipts may be: this user's own first, then those that the policy names."""
    own = own_path(op.user_state, provider, account, op.project.project_id)
    return [str(own), *op.policy().sentinel_receipts]


def own_path(user_state: Path, provider: str, account: str, project_id: str) -> Path:
    """The receipt of the last pass of this user."""
    mark = hashlib.sha256(f"{provider}\0{account}\0{project_id}".encode()).hexdigest()[:16]
    return user_state / "sentinel" / f"{provider}-{mark}.json"


def why_not(receipt: Any, provider: str, account: str, project_id: str, now: datetime) -> str | None:
    """Why this is no receipt that counts here; None: it counts. Pure."""
    if receipt is None:
        return "no pass of the sentinel is on record"
    if not isinstance(receipt, Mapping):
        return "it is no receipt of a pass"
    for name, wanted in (("provider", provider), ("account", account), ("project_id", project_id)):
        if receipt.get(name) != wanted:
            return f"its {name} is another one"
    if receipt.get("complete") is not True:
        return "its last pass was not complete"
    try:
        ended_at = parse_timestamp(str(receipt.get("ended_at")))
    except (ValueError, OverflowError):
        return "it does not say when its pass ended"
    age = now - ended_at
    if age < -CLOCK_SKEW:
        return "its pass ended in the future"
    if age >= MAX_AGE:
        return f"its last pass was {format_duration(age.total_seconds())} ago"
    return None


# where they are -------------------------------------------------------------------------------------------------------


def read(place: str) -> Any:
    """What a receipt says, None when there is none. StateError or ProviderError kinds when it cannot be read."""
    if not place.startswith(S3):
        return files.read_json(_path(place), max_bytes=MAX_BYTES, default=None)
    store, key = _object(place)
    try:
        found = store.get(key, max_bytes=MAX_BYTES)
    except ArtifactChanged as exc:
        raise StateError(file=place, at="", problem="found more than 4 MB, allowed is a receipt") from exc
    return None if found is None else files.parse(found[0], Path(key))


def write(place: str, receipt: Mapping[str, Any]) -> None:
    """Replace the receipt at a place."""
    content = files.dumps_pretty(receipt)
    if not place.startswith(S3):
        path = _path(place)
        if not path.parent.is_dir():
            raise NotWritable(path=place, reason="there is no such folder")
        files.commit(path, content)
        return
    store, key = _object(place)
    store.put(key, content)


def _path(place: str) -> Path:
    try:
        return Path(place).expanduser()
    except RuntimeError as exc:  # `~` of a user without a home
        raise UsageError(f"{place[:200]!r} names no place here", next_step="gpu sentinel --help") from exc


def _object(place: str) -> tuple[Store, str]:
    from gpu_skills.artifacts.base import open_store

    store, key = open_store(place)
    if not key or place.endswith("/"):
        raise UsageError(f"{place[:200]!r} is no object; write s3://BUCKET/KEY", next_step="gpu sentinel --help")
    return store, key
