"""Signatures of a real ssh-keygen: whose they are, and whose they are not."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from approving import NAMESPACE, sign, signer_line
from gpu_skills.errors import MissingProgram
from gpu_skills.lifecycle.approval import signatures
from gpu_skills.lifecycle.approval.signatures import BadSignature, verify
from sshd import make_key

pytestmark = pytest.mark.usefixtures("allow_subprocess")
MESSAGE = b'{"plan":"0","max_cost_usd":3.5}'


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path / "owner")


@pytest.fixture
def stranger(tmp_path):
    return make_key(tmp_path / "stranger")


def checked(signature: bytes, *signers: str, message: bytes = MESSAGE, namespace: str = NAMESPACE) -> str:
    return verify(message, signature.decode(), signers=signers, namespace=namespace)


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_the_signer_is_named_as_the_policy_names_them(tmp_path, stranger, kind):
    key = make_key(tmp_path / kind, kind)
    signers = [signer_line(stranger, "somebody"), signer_line(key, "owner@example.org")]
    assert checked(sign(key, MESSAGE), *signers) == "owner@example.org"


def test_a_key_that_nobody_named_proves_nothing(key, stranger):
    with pytest.raises(BadSignature, match="of none of the allowed signers"):
        checked(sign(stranger, MESSAGE), signer_line(key))


def test_a_signature_in_another_namespace_proves_nothing(key):
    for made_in, wanted in (("git", NAMESPACE), (NAMESPACE, "git"), (NAMESPACE, NAMESPACE + "2")):
        with pytest.raises(BadSignature):
            checked(sign(key, MESSAGE, made_in), signer_line(key), namespace=wanted)


def test_a_signature_of_other_bytes_proves_nothing(key):
    for other in (MESSAGE + b"\n", MESSAGE.replace(b"3.5", b"9.5"), b""):
        with pytest.raises(BadSignature):
            checked(sign(key, MESSAGE), signer_line(key), message=other)


def test_the_options_beside_a_key_hold(key):
    signature = sign(key, MESSAGE)
    for options in ('namespaces="file"', 'valid-before="20200101"', "cert-authority"):
        with pytest.raises(BadSignature):
            checked(signature, signer_line(key, options=options))
    assert checked(signature, signer_line(key, options=f'namespaces="file,{NAMESPACE}"')) == "owner@example.org"


def test_one_entry_is_one_line_so_none_brings_a_second_signer_along(key, stranger):
    two = f"{signer_line(key)}\n{signer_line(stranger)}"
    with pytest.raises(BadSignature, match="names nobody"):
        checked(sign(stranger, MESSAGE), two)


def test_a_line_that_is_no_signer_takes_no_other_with_it(key):
    assert checked(sign(key, MESSAGE), "nonsense", "", "# remark", signer_line(key)) == "owner@example.org"


@pytest.mark.parametrize(
    "text",
    ["", "yes", "-----BEGIN SSH SIGNATURE-----", "-----BEGIN SSH SIGNATURE-----\n####\n-----END SSH SIGNATURE-----\n",
     "-----BEGIN SSH SIGNATURE-----\n" + "A" * 100_000, "-----BEGIN SSH SIGNATURE-----\n\u00e9"],
)  # fmt: skip
def test_what_is_no_signature_proves_nothing(key, text):
    with pytest.raises(BadSignature):
        verify(MESSAGE, text, signers=[signer_line(key)], namespace=NAMESPACE)


def test_an_ssh_keygen_on_the_path_that_says_yes_is_not_asked(key, stranger, tmp_path, monkeypatch):
    liar = tmp_path / "bin" / "ssh-keygen"
    liar.parent.mkdir()
    liar.write_text("#!/bin/sh\necho owner@example.org\n")
    liar.chmod(0o755)
    monkeypatch.setenv("PATH", f"{liar.parent}:{os.environ['PATH']}")
    with pytest.raises(BadSignature):
        checked(b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n", signer_line(key))


def test_without_ssh_keygen_the_error_says_what_to_install(key, monkeypatch, tmp_path):
    signature = sign(key, MESSAGE)
    monkeypatch.setattr(signatures, "PLACES", (str(tmp_path),))
    with pytest.raises(MissingProgram) as caught:
        checked(signature, signer_line(key))
    assert "OpenSSH" in caught.value.next_step


def test_an_ssh_keygen_that_hangs_proves_nothing(key, monkeypatch, tmp_path):
    hanging = tmp_path / "ssh-keygen"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    signature = sign(key, MESSAGE)
    monkeypatch.setattr(signatures, "PLACES", (str(tmp_path), "/usr/bin", "/bin"))
    monkeypatch.setattr(signatures, "TIMEOUT_S", 0.2)
    with pytest.raises(BadSignature, match="did not end"):
        checked(signature, signer_line(key))


def test_nothing_is_left_of_the_files_it_was_asked_with(key, monkeypatch, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    checked(sign(key, MESSAGE), signer_line(key))
    assert list(folder.iterdir()) == []


def test_the_commands_that_are_printed_make_a_signature_that_holds(key, tmp_path, home):
    message = b'{"words":"it\'s $HOME `date` \\\\ %s"}'
    commands = signatures.signing_commands(message, namespace="a space", file="approval it's.txt")
    (home / ".ssh").mkdir(mode=0o700)
    for ending in ("", ".pub"):
        (home / f".ssh/id_ed25519{ending}").write_bytes((tmp_path / f"owner{ending}").read_bytes())
        (home / f".ssh/id_ed25519{ending}").chmod(0o600)
    environ = {"HOME": str(home), "PATH": os.environ["PATH"]}
    for command in commands:
        subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environ, check=True, capture_output=True)
    assert (tmp_path / "approval it's.txt").read_bytes() == message
    signature = (tmp_path / "approval it's.txt.sig").read_text()
    assert verify(message, signature, signers=[signer_line(key)], namespace="a space") == "owner@example.org"
    assert shlex.split(commands[1])[-1] == "approval it's.txt"
