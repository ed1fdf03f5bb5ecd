"""A provider's volume as a home of outputs: paths on the machines that mount it, and what it promises.

It outlives every machine and bills until it is deleted, stands in one data centre, and is read by mounting it: nothing
here can open it. It knows no conditions and no hashes, so jobs keep apart by their folders, one runner writes each, and
what lies there counts as collected only once it was pulled or read back from elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpu_skills.artifacts.base import require_key
from gpu_skills.errors import Refused, UsageError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class OnVolume:
    """Something on a volume. path: below where it is mounted."""

    volume_id: str
    path: str

    @property
    def uri(self) -> str:
        return f"volume://{self.volume_id}/{self.path}"

    def on_machine(self, mount: str) -> str:
        """Its path on a machine that mounts the volume there."""
        return f"{mount.rstrip('/')}/{self.path}"


def parse(uri: str) -> OnVolume:
    volume_id, _, path = uri.removeprefix("volume://").partition("/")
    if not uri.startswith("volume://") or not _ID.fullmatch(volume_id) or not path:
        raise UsageError(
            f"{uri[:200]!r} is nothing on a volume; write volume://VOLUME/PATH", next_step="gpu plan --help"
        )
    return OnVolume(volume_id, require_key(path))


def located(volume_id: str, path: str, mount: str) -> OnVolume | None:
    """What a path of a machine is on the volume it has mounted; None when it lies beside it."""
    inside = path.removeprefix(mount.rstrip("/") + "/")
    return None if inside == path else OnVolume(volume_id, require_key(inside))


def only_on_a_machine(uri: str) -> Refused:
    found = parse(uri)
    return Refused(
        f"volume {found.volume_id} can be opened only by a machine that mounts it",
        next_step=f"plan a job with --volume {found.volume_id}, and pull its outputs",
    )
