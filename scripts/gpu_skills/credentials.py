"""Where credentials are looked for. They are never printed, logged, put in argv, a URL or a record.

Order: environment, the named variable of the project's `.env`, what `gpu login` stored (keyring, else a file only its
user can read), then what the vendor's own command line stored. What was said to `gpu` comes before what was said to
another program: a narrow key given to `gpu login` must not lose to a wide one in a vendor's file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_skills import userdirs
from gpu_skills.config import read_dotenv
from gpu_skills.errors import ConfigError

HF_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
KEY_NAMES = {"vast": "VAST_API_KEY", "runpod": "RUNPOD_API_KEY"}
KEYRING_SERVICE = "gpu-skills"
_MAX_FILE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Credential:
    """A provider's key. source: where it was found, for messages. The value is in no repr."""

    provider: str
    value: str = field(repr=False)
    source: str

    @property
    def account(self) -> str:
        """A name for the account behind the key that tells nothing of it: for locks and files of this user."""
        digest = hashlib.sha256(f"gpu-skills account\0{self.provider}\0{self.value}".encode()).hexdigest()
        return f"{self.provider}-{digest[:16]}"


def provider_key(provider: str, project_root: Path | None, environ: Mapping[str, str]) -> Credential | None:
    """The key of `vast` or `runpod`, or None. ConfigError for a value that cannot be a key; it is never shown."""
    for value, source in _places(provider, project_root, environ):
        value = value.strip()
        if not value:
            continue
        if not is_plausible(value):
            raise ConfigError(
                file=source, problem="what stands there is no key: one word of printable ASCII, 8 or more characters"
            )
        return Credential(provider, value, source)
    return None


def is_plausible(value: str) -> bool:
    return value.isascii() and value.isprintable() and " " not in value and 8 <= len(value) <= 4096


def _places(provider: str, project_root: Path | None, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    name = KEY_NAMES[provider]
    if environ.get(name):
        yield environ[name], name
    if project_root is not None:
        found = read_dotenv(project_root, [name]).get(name)
        if found:
            yield found, f"{name} in .env"
    kept = stored(provider, environ)
    if kept:
        yield kept, "gpu login"
    yield from VENDOR_FILES[provider](environ)


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


# what `gpu login` stored ----------------------------------------------------------------------------------------------


def store_path(environ: Mapping[str, str]) -> Path:
    return userdirs.config_dir(environ) / "credentials.json"


def stored(provider: str, environ: Mapping[str, str]) -> str | None:
    """What `gpu login PROVIDER` stored. An unreadable file or keyring counts as nothing stored.

    The file names what is in the keyring, so that a keyring nobody uses is not even loaded (it may ask to be unlocked).
    """
    try:
        record = json.loads(store_path(environ).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, userdirs.NoHome):
        return None
    value = record.get(provider) if isinstance(record, dict) else None
    if isinstance(value, dict) and value.get("in") == "keyring":
        return _from_keyring(provider)
    return value if isinstance(value, str) and value else None


def store_in_keyring(provider: str, value: str) -> bool:
    """Keep it in the system's keyring; False where there is none to rely on, and nothing was kept."""
    backend = _keyring()
    if backend is None:
        return False
    try:
        backend.set_password(KEYRING_SERVICE, provider, value)
        return backend.get_password(KEYRING_SERVICE, provider) == value
    except Exception:  # a keyring that is locked, absent or broken has an error class of its own each
        return False


def _from_keyring(provider: str) -> str | None:
    backend = _keyring()
    if backend is None:
        return None
    try:
        return backend.get_password(KEYRING_SERVICE, provider) or None
    except Exception:  # as above
        return None


def _keyring() -> Any:
    """The keyring module when it is installed and has a real backend."""
    try:
        import keyring

        return keyring if getattr(keyring.get_keyring(), "priority", 0) > 0 else None
    except Exception:  # not installed, or no backend could be loaded
        return None


# what the vendors' own programs stored --------------------------------------------------------------------------------


def _vast_files(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    home = userdirs.home(environ)
    config = environ.get("XDG_CONFIG_HOME", "")
    folders = [Path(config)] if os.path.isabs(config) else [Path(home) / ".config"] if home else []
    paths = [folder / "vastai" / "vast_api_key" for folder in folders]
    if home:
        paths.append(Path(home) / ".vast_api_key")
    for path in paths:
        text = _small_file(path)
        if text:
            yield text, str(path)


def _runpod_files(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The key only: an address in that file must not steer anything."""
    import tomllib

    home = userdirs.home(environ)
    path = Path(home) / ".runpod" / "config.toml" if home else None
    text = _small_file(path) if path else None
    if not text:
        return
    try:
        config = tomllib.loads(text)
    except (ValueError, RecursionError):
        return
    sections = [config.get("default"), config]
    for section in sections:
        for name in ("api_key", "apikey", "apiKey"):
            value = section.get(name) if isinstance(section, dict) else None
            if isinstance(value, str) and value.strip():
                yield value, str(path)
                return


VENDOR_FILES: dict[str, Callable[[Mapping[str, str]], Iterator[tuple[str, str]]]] = {
    "vast": _vast_files,
    "runpod": _runpod_files,
}


def _small_file(path: Path) -> str | None:
    """Text of a regular file; None for what is missing, large, not text, or somebody's pipe."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            return None
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
