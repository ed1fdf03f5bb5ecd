"""Text without credentials, for whatever is written or sent where people read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_HEADER = re.compile(
    r"(?i)(?<![a-z])(authorization|x-api-key|(?:api|access)[_-]?key|token|password|secret)(\"?\s*[:=]\s*\"?)"
    r"((?:bearer|basic)\s+)?[^\s\"',&}]+"
)
_SHAPES = re.compile(r"\b(hf_|sk-|rpa_|sbx_|ghp_|github_pat_|AKIA)[A-Za-z0-9_-]{8,}")
_LOGIN = re.compile(r"(://)[^\s/@:]{0,100}:[^\s/@]{1,200}@")  # of an address, `user:password@`
# What makes a presigned URL a key; the older form has no prefix.
_SIGNED = re.compile(
    r"(?i)([?&](?:x-amz-(?:signature|credential|security-token)|signature|awsaccesskeyid)=)[^\s&\"'<>]+"
)
_SOUNDS_SECRET = re.compile(r"(?i)key|token|secret|password")
_SHORTEST = 6  # shorter values stand in ordinary words


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Text without credentials: named values, well-known shapes, and the given ones wherever they stand."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, "***")
    text = _SIGNED.sub(lambda m: f"{m.group(1)}***", text)
    text = _LOGIN.sub(lambda m: f"{m.group(1)}***@", text)
    text = _HEADER.sub(lambda m: f"{m.group(1)}{m.group(2)}***", text)
    return _SHAPES.sub(lambda m: f"{m.group(1)}***", text)


def secrets_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What must not be shown: the values of variables whose names sound like it."""
    return tuple(value for name, value in environ.items() if _SOUNDS_SECRET.search(name))
