"""Where credentials are looked for. They are never printed, logged, put in argv or in a record.

Order: environment, the named variable of the project's `.env`, then what `gpu login` stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gpu_skills import userdirs
from gpu_skills.config import read_dotenv

HF_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def hf_token(project_root: Path | None, environ: Mapping[str, str]) -> str | None:
    """The Hugging Face token jobs get as HF_TOKEN, or None."""
    for name in HF_NAMES:
        if environ.get(name):
            return environ[name]
    if project_root is not None:
        found = read_dotenv(project_root, HF_NAMES)
        for name in HF_NAMES:
            if found.get(name):
                return found[name]
    return stored("hf", environ)


def store_path(environ: Mapping[str, str]) -> Path:
    return userdirs.config_dir(environ) / "credentials.json"


def stored(provider: str, environ: Mapping[str, str]) -> str | None:
    """What `gpu login PROVIDER` stored. An unreadable file counts as nothing stored."""
    try:
        record = json.loads(store_path(environ).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, userdirs.NoHome):
        return None
    value = record.get(provider) if isinstance(record, dict) else None
    return value if isinstance(value, str) and value else None
