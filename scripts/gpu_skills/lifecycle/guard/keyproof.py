"""Whether machines of an account may end their own billing, as the last of them showed.

The rights of a machine's key are documented nowhere: each machine tries them without effect when its fuse arms. While
the last answer is not `proven`, the second layer has to be there before the next create. The memory lies with the
account in the user's state directory, so that all projects on it share what one machine has shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from gpu_skills.clock import timestamp
from gpu_skills.errors import StateError
from gpu_skills.lifecycle.guard.fuse import KeyVerdict, OnExpiry
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.state import budget, files

FILE = "keyproof.json"
_KNOWN: tuple[Literal["proven", "denied"], ...] = ("proven", "denied")


def note(op: Operator, provider: str, account: str, verdict: KeyVerdict, rights: OnExpiry) -> None:
    """Remember what a machine's key was seen to be allowed. `unknown` says nothing and changes nothing.

    rights: what the fuse does on expiry. A denial counts for all of them, since keys of an account are made alike.
    """
    if verdict not in _KNOWN:
        return
    path = _path(op, provider, account)
    files.make_directory(path.parent)
    with files.lock(path):
        kept = _read(path) if verdict == "proven" else {}  # one denial cancels all proofs
        entry = {"verdict": verdict, "at": timestamp(op.clock.now())}
        files.commit(path, files.dumps_pretty({**kept, rights: entry}))


def last(op: Operator, provider: str, account: str, rights: OnExpiry) -> KeyVerdict:
    """The last answer for these rights; `denied` if there is none since other ones were. A broken file is unknown."""
    entries = _read(_path(op, provider, account))
    verdicts = {name: entry.get("verdict") for name, entry in entries.items() if isinstance(entry, dict)}
    found = verdicts.get(rights, "denied" if "denied" in verdicts.values() else None)
    return cast(KeyVerdict, found) if found in _KNOWN else "unknown"


def _read(path: Path) -> dict[str, Any]:
    """What can be found out again by the next machine is no reason to stop: a broken file says nothing."""
    try:
        raw = files.read_bytes(path)
        record = files.parse(raw, path) if raw is not None else {}
    except StateError:
        return {}
    return record if isinstance(record, dict) else {}


def _path(op: Operator, provider: str, account: str) -> Path:
    return budget.account_directory(provider, account, op.environ) / FILE
