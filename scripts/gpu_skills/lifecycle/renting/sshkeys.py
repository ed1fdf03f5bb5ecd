"""The key by which this user's rented machines let us in: one pair, in the user's state directory, made at first use.

The user's own keys are never offered to a rented machine and never touched.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gpu_skills.errors import Failed, MissingProgram, NotWritable, one_line
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.state import files

_PUBLIC = re.compile(r"ssh-ed25519 [A-Za-z0-9+/=]{40,120}")
_TIMEOUT_S = 30


@dataclass(frozen=True)
class KeyPair:
    """private: the path of the file; public: the line that a provider is given."""

    private: Path
    public: str


class KeyUnusable(Failed):
    code = "ssh_key_unusable"
    template = "the SSH key of gpu cannot be used: {reason}"
    next_step = "move {path} away: the next command makes a new one (running machines then let only the old one in)"


def ensure(op: Operator) -> KeyPair:
    """The pair, made when there is none. Two commands at once agree on one."""
    path = op.user_state / "ssh" / "id_ed25519"
    public = path.with_suffix(".pub")
    if not (path.is_file() and public.is_file()):
        files.make_directory(path.parent)
        with files.lock(path):
            if not path.is_file():
                _make(path, op)
            if not public.is_file():
                # A machine may know it already, so it is derived from the key that is there and not made anew.
                files.commit(public, (_derive(path, op) + "\n").encode())
    line = " ".join((files.read_bytes(public, max_bytes=4096) or b"").decode("utf-8", "replace").split()[:2])
    if not _PUBLIC.fullmatch(line):
        raise KeyUnusable(path=str(path), reason=f"{public.name} is no ed25519 key")
    return KeyPair(path, line)


def _make(path: Path, op: Operator) -> None:
    """Made under another name and moved: a crash leaves a whole key or none."""
    draft = path.with_name(f".{secrets.token_hex(8)}")
    _keygen(op, path, "-q", "-t", "ed25519", "-N", "", "-C", "gpu", "-f", str(draft))
    try:
        os.chmod(draft, 0o600)
        os.rename(draft, path)
        os.unlink(draft.with_name(draft.name + ".pub"))
        files.sync_directory(path.parent)
    except OSError as exc:
        raise NotWritable(path=str(path), reason=exc.strerror or str(exc)) from exc


def _derive(path: Path, op: Operator) -> str:
    return " ".join(_keygen(op, path, "-y", "-P", "", "-f", str(path)).split()[:2])


def _keygen(op: Operator, path: Path, *words: str) -> str:
    search_path = op.environ.get("PATH", os.defpath)
    program = shutil.which("ssh-keygen", path=search_path)
    if program is None:
        raise MissingProgram(program="ssh-keygen", next_step="install openssh-client")
    try:
        done = subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            env={"PATH": search_path},
        )
    except subprocess.TimeoutExpired as exc:
        raise KeyUnusable(path=str(path), reason=f"ssh-keygen took more than {_TIMEOUT_S} s") from exc
    except OSError as exc:
        raise KeyUnusable(path=str(path), reason=f"ssh-keygen does not start: {exc.strerror}") from exc
    if done.returncode != 0:
        raise KeyUnusable(path=str(path), reason=one_line(done.stderr.decode("utf-8", "replace").strip(), limit=200))
    return done.stdout.decode("utf-8", "replace")
