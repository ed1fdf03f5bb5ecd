"""Files that look like credentials: by their name, their folder, or how they begin."""

from __future__ import annotations

import re

HEAD_BYTES = 8192  # how much of a file `in_content` needs

_NAMES = re.compile(
    r"id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?|.*\.(?:pem|key|p12|pfx)|service[_-]?accounts?.*\.json|credentials\.json"
    r"|application_default_credentials\.json|[._]netrc|kaggle\.json|\.git-credentials|\.pgpass|\.htpasswd",
    re.IGNORECASE | re.DOTALL,
)
SECRET_FOLDERS = frozenset({".aws", ".kube", ".ssh", ".gnupg"})
_TOKEN_FILES = {
    # A reference such as ${NPM_TOKEN} is not the secret.
    ".npmrc": re.compile(rb"^[^#;\n]*_(?:authToken|password|auth)\s*=\s*(?!\$\{)\S", re.MULTILINE),
    ".pypirc": re.compile(rb"^\s*password\s*[=:]\s*\S", re.MULTILINE),
}
_PRIVATE_KEY = re.compile(rb"\s*-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
_BOM = b"\xef\xbb\xbf"
_POSSIBLE_STARTS = frozenset({b"-", b"{", b" ", b"\t", b"\r", b"\n", _BOM[:1]})


def by_name(name: str, folder: str) -> bool:
    """name: of the file; folder: its path below the directory, "" for the top."""
    if _NAMES.fullmatch(name):
        return True
    return name == "config.json" and folder.rpartition("/")[2] == ".docker"


def in_content(name: str, head: bytes) -> bool:
    """Whether the first bytes of a file are a private key, a service account or a configuration with a token."""
    token = _TOKEN_FILES.get(name)
    if token is not None:
        return bool(token.search(head[:HEAD_BYTES]))
    if head[:1] not in _POSSIBLE_STARTS:
        return False
    start = head[len(_BOM) : HEAD_BYTES] if head.startswith(_BOM) else head[:HEAD_BYTES]
    first = start.lstrip()[:1]
    if first == b"-":
        return bool(_PRIVATE_KEY.match(start))
    return first == b"{" and b'"private_key"' in start
