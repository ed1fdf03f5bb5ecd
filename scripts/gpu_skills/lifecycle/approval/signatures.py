"""SSH signatures, made with `ssh-keygen -Y sign` and checked with `ssh-keygen -Y verify`.

The program is looked for where systems keep theirs, never along PATH, and gets none of our environment: whoever could
put another `ssh-keygen` in its place would sign for everybody.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gpu_skills.errors import MissingProgram, one_line

MAX_SIGNATURE_BYTES = 64 << 10  # RSA of 16,384 bits takes 6 kB
MAX_PRINCIPALS = 20
TIMEOUT_S = 20.0
PLACES = (
    "/usr/bin", "/bin", "/usr/local/bin", "/opt/homebrew/bin", "/opt/local/bin", "/run/current-system/sw/bin",
)  # fmt: skip
_HEAD = "-----BEGIN SSH SIGNATURE-----"


class BadSignature(Exception):
    """It proves nothing; the words say why."""


def verify(message: bytes, signature: str, *, signers: Sequence[str], namespace: str) -> str:
    """Who signed, as the allowed signers name them; BadSignature when it is none of them.

    signers: lines of an allowed_signers file. Their options (namespaces, valid-before) hold; the clock for those is the
    computer's own. MissingProgram without an ssh-keygen.
    """
    if not signature.startswith(_HEAD) or len(signature) > MAX_SIGNATURE_BYTES or not signature.isascii():
        raise BadSignature("it is no SSH signature")
    import tempfile

    lines = [line for line in signers if line.isprintable()]  # one entry is one line
    if not lines:
        raise BadSignature("the policy names nobody who may sign")
    with tempfile.TemporaryDirectory(prefix="gpu-sig-") as folder:  # 0700
        allowed, signed = Path(folder, "allowed_signers"), Path(folder, "signature")
        allowed.write_text("\n".join(lines) + "\n")
        signed.write_text(signature)
        known = _ssh_keygen("-Y", "find-principals", "-f", str(allowed), "-s", str(signed))
        if known.returncode != 0:
            raise BadSignature(f"it is of none of the allowed signers ({_reason(known)})")
        failed = "nobody is named beside its key"
        for principal in known.stdout.decode("utf-8", "replace").splitlines()[:MAX_PRINCIPALS]:
            done = _ssh_keygen(
                "-Y", "verify", "-f", str(allowed), "-I", principal, "-n", namespace, "-s", str(signed), given=message
            )
            if done.returncode == 0:
                return one_line(principal, limit=200)
            failed = _reason(done)
    raise BadSignature(failed)


def signing_commands(message: bytes, *, namespace: str, file: str) -> tuple[str, str]:
    """What a person types, on any computer of theirs: the message into a file, and that file signed."""
    return (
        f"printf %s {shlex.quote(message.decode())} > {shlex.quote(file)}",
        f"ssh-keygen -Y sign -n {shlex.quote(namespace)} -f ~/.ssh/id_ed25519 {shlex.quote(file)}",
    )


def _ssh_keygen(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = next((path for path in (Path(place, "ssh-keygen") for place in PLACES) if path.is_file()), None)
    if program is None:
        raise MissingProgram(program="ssh-keygen", next_step="install OpenSSH's client")
    try:
        return subprocess.run(
            [str(program), *arguments],
            input=given,
            capture_output=True,
            timeout=TIMEOUT_S,
            env={"PATH": ":".join(PLACES), "LC_ALL": "C", "HOME": "/nonexistent"},
        )
    except subprocess.TimeoutExpired as exc:
        raise BadSignature(f"ssh-keygen did not end within {TIMEOUT_S:g} s") from exc
    except OSError as exc:
        raise MissingProgram(program="ssh-keygen", next_step="install OpenSSH's client") from exc


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stderr.decode("utf-8", "replace").split("\n")
    return one_line("; ".join(line.strip() for line in said if line.strip()), limit=300) or f"exit {done.returncode}"
