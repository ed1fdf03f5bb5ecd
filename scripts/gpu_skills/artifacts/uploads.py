"""Uploads in parts that are under way, remembered on disk so that the next call goes on with them.

It may be lost at any time: what is in the store of an upload nobody remembers is taken away there, and it begins anew.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_skills.errors import StateError
from gpu_skills.state import files


@dataclass(frozen=True)
class Upload:
    upload_id: str
    sha256: str
    bytes: int
    part_bytes: int


class Uploads:
    """By URI of the object. path None: nothing is remembered. Safe between the threads of one process."""

    def __init__(self, path: Path | None):
        self._path = path
        self._lock = threading.Lock()
        self._known = self._load()

    def find(self, uri: str) -> Upload | None:
        return self._known.get(uri)

    def note(self, uri: str, upload: Upload) -> None:
        with self._lock:
            self._known[uri] = upload
            self._save()

    def drop(self, uri: str) -> None:
        with self._lock:
            if self._known.pop(uri, None) is not None:
                self._save()

    def _save(self) -> None:
        if self._path is not None:
            record = {"uploads": {uri: asdict(upload) for uri, upload in self._known.items()}}
            files.commit(self._path, files.dumps_pretty(record), durable=False)

    def _load(self) -> dict[str, Upload]:
        try:
            record = files.read_json(self._path, default=None) if self._path is not None else None
        except StateError:
            return {}
        known = record.get("uploads") if isinstance(record, dict) else None
        found = {uri: _upload(value) for uri, value in known.items()} if isinstance(known, dict) else {}
        return {uri: upload for uri, upload in found.items() if upload is not None}


def _upload(value: Any) -> Upload | None:
    if not isinstance(value, dict):
        return None
    texts = [value.get("upload_id"), value.get("sha256")]
    numbers = [value.get("bytes"), value.get("part_bytes")]
    if not all(isinstance(text, str) and text for text in texts) or not all(type(n) is int and n > 0 for n in numbers):
        return None
    return Upload(value["upload_id"], value["sha256"], value["bytes"], value["part_bytes"])
