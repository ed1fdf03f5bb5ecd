"""The user's own directories, by the XDG rules: a relative value is ignored, without HOME the account's home counts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpu_skills.errors import UsageError


class NoHome(UsageError):
    code = "no_home"
    template = "this user has no home directory and HOME is not set"
    next_step = "set HOME or {variable}"


def account_home() -> Path | None:
    """The home that the system has for this user, whatever the environment says; None where there is none."""
    import pwd

    try:
        place = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None
    return Path(place) if os.path.isabs(place) else None


def account_state_dir() -> Path:
    """As `state_dir`, whatever the environment says. Raises NoHome."""
    place = account_home()
    if place is None:
        raise NoHome(
            "the system knows no home directory of this user, and no other place is safe from the environment",
            next_step="run gpu as a user with a home directory",
        )
    return place / ".local/state/gpu"


def home(environ: Mapping[str, str] | None = None) -> str | None:
    """The user's home, or None for one without (a container's odd user id)."""
    environ = os.environ if environ is None else environ
    found = environ.get("HOME", "")
    if not os.path.isabs(found):
        import pwd

        try:
            found = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return found if os.path.isabs(found) else None


def config_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Settings, own hosts, the user's policy, stored logins: `$XDG_CONFIG_HOME/gpu`. Raises NoHome."""
    return _directory("XDG_CONFIG_HOME", ".config", environ)


def state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Records that several projects share (accounts, receipts): `$XDG_STATE_HOME/gpu`. Raises NoHome."""
    return _directory("XDG_STATE_HOME", ".local/state", environ)


def data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where this machine's own jobs live: `$XDG_DATA_HOME/gpu`. Raises NoHome."""
    return _directory("XDG_DATA_HOME", ".local/share", environ)


def _directory(variable: str, below_home: str, environ: Mapping[str, str] | None) -> Path:
    environ = os.environ if environ is None else environ
    chosen = environ.get(variable, "")
    if os.path.isabs(chosen):
        return Path(chosen) / "gpu"
    place = home(environ)
    if place is None:
        raise NoHome(variable=variable)
    return Path(place) / below_home / "gpu"
