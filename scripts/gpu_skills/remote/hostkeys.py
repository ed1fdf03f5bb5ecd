"""Which key a machine must show: pins in a known_hosts file of our own, under the machine's id.

Both stacks read that file: paramiko through `Pins`, OpenSSH with `HostKeyAlias=<machine id>`. It is never the user's.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpu_skills.errors import HostKeyMismatch, StateError

ORIGINS = ("tofu", "known_hosts", "provider_log")
MAX_KNOWN_HOSTS_BYTES = 16 << 20
_ALIAS = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass(frozen=True)
class HostKey:
    """type: `ssh-ed25519`, `ecdsa-sha2-nistp256`, `ssh-rsa` …; blob: the public key as it travels."""

    type: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The signature algorithms by which this key proves itself."""
        return _RSA_SIGNATURES if self.type == "ssh-rsa" else (self.type,)

    @property
    def line(self) -> str:
        return f"{self.type} {base64.b64encode(self.blob).decode()}"


@dataclass(frozen=True)
class Pin:
    """origin: what vouched for the key when it was first seen: nobody (`tofu`), the user's `known_hosts`, or the
    provider's log (`provider_log`)."""

    machine_id: str
    key: HostKey
    origin: str


@dataclass(frozen=True)
class Known:
    """What known_hosts files say of one host."""

    keys: tuple[HostKey, ...] = ()
    revoked: tuple[HostKey, ...] = ()


NOTHING_KNOWN = Known()


def fingerprint(blob: bytes) -> str:
    """As `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


class Pins:
    """The pinned keys in one file. Only machine ids of ours are names in it.

    may_write: False for whoever only reads; a first contact is then judged and not remembered.
    """

    def __init__(self, path: Path, *, may_write: bool = True):
        self.path = path
        self._may_write = may_write

    def get(self, machine_id: str) -> Pin | None:
        return self._read().get(machine_id)

    def check(
        self,
        machine_id: str,
        host: str,
        shown: HostKey,
        *,
        known: Known = NOTHING_KNOWN,
        vouched: str | None = None,
    ) -> Pin:
        """Compare the key a machine shows with its pin; on first contact write the pin.

        known: what the user's own known_hosts says of this host; when it says something, the key must be among it.
        vouched: a fingerprint that the provider's log printed. Raises HostKeyMismatch with both fingerprints.
        """
        if shown in known.revoked:
            raise _mismatch(host, machine_id, f"{shown.fingerprint} (revoked)", "any other")
        pin = self.get(machine_id)
        if pin is not None:
            _same(pin.key, shown, machine_id, host)
            return pin
        if vouched is not None:
            if not hmac.compare_digest(vouched, shown.fingerprint):
                raise _mismatch(host, machine_id, shown.fingerprint, f"{vouched} (provider's log)")
            origin = "provider_log"
        elif known.keys:
            if shown not in known.keys:
                expected = " or ".join(key.fingerprint for key in known.keys[:3])
                raise _mismatch(
                    host,
                    machine_id,
                    shown.fingerprint,
                    f"{expected} (your known_hosts)",
                    f"find out why it changed; if it is right: ssh-keygen -R {host}",
                )
            origin = "known_hosts"
        else:
            origin = "tofu"
        pin = Pin(machine_id, shown, origin)
        return self._add(pin, host) if self._may_write else pin

    def forget(self, machine_id: str) -> bool:
        """Take a pin away; the next contact is a first one again. False when there was none."""
        from gpu_skills.state import files

        if self.path.exists():
            with files.lock(self.path):
                pins = self._read()
                if pins.pop(machine_id, None) is not None:
                    self._write(pins)
                    return True
        return False

    def _add(self, pin: Pin, host: str) -> Pin:
        from gpu_skills.state import files

        files.make_directory(self.path.parent)
        with files.lock(self.path):
            pins = self._read()
            first = pins.setdefault(pin.machine_id, pin)  # two first contacts at once: the first one written counts
            if first is pin:
                self._write(pins)
        _same(first.key, pin.key, pin.machine_id, host)
        return first

    def _read(self) -> dict[str, Pin]:
        pins: dict[str, Pin] = {}
        for number, line in enumerate(_lines(self.path, missing_ok=False), start=1):
            fields = line.split(None, 3)
            if not fields or fields[0].startswith("#"):
                continue
            key = _key(fields[1:3])
            if key is None or not _ALIAS.fullmatch(fields[0]) or fields[0] in pins:
                # A line we cannot read may be the pin of this very machine: to go on would be to trust anything.
                raise StateError(
                    file=self.path.name, at=f":{number}", problem="found a line that is not one of our pins"
                )
            origin = fields[3].removeprefix("gpu:") if len(fields) > 3 else ""
            pins[fields[0]] = Pin(fields[0], key, origin if origin in ORIGINS else "tofu")
        return pins

    def _write(self, pins: dict[str, Pin]) -> None:
        from gpu_skills.state import files

        lines = [f"{pin.machine_id} {pin.key.line} gpu:{pin.origin}\n" for pin in pins.values()]
        files.commit(self.path, "".join(sorted(lines)).encode())


def known_hosts_of(names: Iterable[str], paths: Iterable[Path]) -> Known:
    """What known_hosts files say of a host under any of its names (`host`, `[host]:port`).

    Reads names, patterns and hashed names. Certificate authorities are left out: the key itself is what we compare.
    A file that cannot be read says nothing, as for `ssh`.
    """
    names = list(names)
    keys: list[HostKey] = []
    revoked: list[HostKey] = []
    for path in paths:
        for line in _lines(path, missing_ok=True):
            fields = line.split(None, 4)
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if len(fields) < 3 or fields[0].startswith("#") or not any(_matches(fields[0], name) for name in names):
                continue
            key = _key(fields[1:3])
            if key is None or marker == "@cert-authority":
                continue
            (revoked if marker == "@revoked" else keys).append(key)
    return Known(tuple(dict.fromkeys(keys)), tuple(revoked))


def _lines(path: Path, *, missing_ok: bool) -> list[str]:
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_KNOWN_HOSTS_BYTES)
    except FileNotFoundError:
        return []
    except OSError as exc:
        if missing_ok:
            return []
        raise StateError(file=path.name, at="", problem=f"cannot be read: {exc.strerror}") from exc
    return data.decode("utf-8", "replace").splitlines()


def _same(pinned: HostKey, shown: HostKey, machine_id: str, host: str) -> None:
    if pinned != shown:
        raise _mismatch(host, machine_id, shown.fingerprint, pinned.fingerprint)


def _mismatch(host: str, machine_id: str, found: str, pinned: str, next_step: str | None = None) -> HostKeyMismatch:
    return HostKeyMismatch(host=host, machine=machine_id, found=found, pinned=pinned, next_step=next_step)


def _key(fields: list[str]) -> HostKey | None:
    if len(fields) < 2:
        return None
    try:
        blob = base64.b64decode(fields[1], validate=True)
    except (binascii.Error, ValueError):
        return None
    # The blob names its type again; a line whose two types differ is not one OpenSSH would take.
    length = int.from_bytes(blob[:4], "big")
    return HostKey(fields[0], blob) if blob[4 : 4 + length] == fields[0].encode() else None


def _matches(patterns: str, name: str) -> bool:
    """The host field of a known_hosts line: patterns with commas, `!` excludes, `|1|salt|hash` is one hashed name."""
    name = name.lower()
    hit = False
    for pattern in patterns.split(","):
        if pattern.startswith("|1|"):
            hit = hit or _hash_matches(pattern, name)
            continue
        negated = pattern.startswith("!")
        # Only `*` and `?` are wildcards there; `[host]:port` is literal.
        literal = pattern.removeprefix("!").lower().replace("[", "[[]")
        if fnmatch.fnmatchcase(name, literal):
            if negated:
                return False
            hit = True
    return hit


def _hash_matches(pattern: str, name: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        expected = base64.b64decode(digest, validate=True)
        return hmac.compare_digest(hmac.digest(base64.b64decode(salt, validate=True), name.encode(), "sha1"), expected)
    except (ValueError, binascii.Error):
        return False
