"""Pins of host keys, and what the user's own known_hosts says."""

from __future__ import annotations

import base64
import subprocess
import threading
from pathlib import Path

import pytest

from gpu_skills.errors import HostKeyMismatch, StateError
from gpu_skills.remote.hostkeys import HostKey, Known, Pins, known_hosts_of
from sshd import make_key


def key(number: int, type: str = "ssh-ed25519") -> HostKey:
    name = type.encode()
    blob = len(name).to_bytes(4, "big") + name + number.to_bytes(36, "big")
    return HostKey(type, blob)


@pytest.fixture
def pins(tmp_path: Path) -> Pins:
    return Pins(tmp_path / "state" / "known_hosts")


def test_first_contact_pins_the_key_and_says_that_nobody_vouched(pins):
    assert pins.check("m_1", "box", key(1)).origin == "tofu"
    assert pins.path.read_text() == f"m_1 ssh-ed25519 {base64.b64encode(key(1).blob).decode()} gpu:tofu\n"
    assert Pins(pins.path).get("m_1").key == key(1)


def test_another_key_later_is_a_mismatch_with_both_fingerprints_and_the_way_out(pins):
    pins.check("m_1", "box", key(1))
    with pytest.raises(HostKeyMismatch) as error:
        pins.check("m_1", "box", key(2))
    assert key(1).fingerprint in error.value.message
    assert key(2).fingerprint in error.value.message
    assert "m_1" in error.value.next_step
    assert pins.get("m_1").key == key(1)


def test_another_machine_has_a_pin_of_its_own(pins):
    pins.check("m_1", "box", key(1))
    pins.check("m_2", "box", key(2))
    assert (pins.get("m_1").key, pins.get("m_2").key) == (key(1), key(2))


def test_a_host_the_user_knows_must_show_a_key_the_user_knows(pins):
    with pytest.raises(HostKeyMismatch, match="your known_hosts"):
        pins.check("m_1", "box", key(2), known=Known((key(1),)))
    assert pins.get("m_1") is None
    assert pins.check("m_1", "box", key(1), known=Known((key(3), key(1)))).origin == "known_hosts"


def test_a_revoked_key_is_never_accepted(pins):
    with pytest.raises(HostKeyMismatch, match="revoked"):
        pins.check("m_1", "box", key(1), known=Known(revoked=(key(1),)))


def test_a_fingerprint_of_the_providers_log_must_match(pins):
    with pytest.raises(HostKeyMismatch, match="provider's log"):
        pins.check("m_1", "box", key(2), vouched=key(1).fingerprint)
    assert pins.check("m_1", "box", key(1), vouched=key(1).fingerprint).origin == "provider_log"


def test_a_forgotten_pin_makes_the_next_contact_a_first_one(pins):
    pins.check("m_1", "box", key(1))
    pins.check("m_2", "box", key(1))
    assert pins.forget("m_1") is True
    assert pins.forget("m_1") is False
    assert pins.check("m_1", "box", key(2)).key == key(2)
    assert pins.get("m_2").key == key(1)


def test_many_first_contacts_at_once_lose_no_pin(pins):
    threads = [threading.Thread(target=pins.check, args=(f"m_{n}", "box", key(n))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(pins.get(f"m_{n}").key == key(n) for n in range(20))


@pytest.mark.parametrize("line", ["m_1 ssh-ed25519", "m_1 ssh-ed25519 !!!", "m_1 ssh-rsa AAAA", "nonsense"])
def test_a_damaged_pin_is_an_error_and_not_a_first_contact(pins, line):
    pins.path.parent.mkdir()
    pins.path.write_text(line + "\n")
    with pytest.raises(StateError, match="known_hosts:1"):
        pins.check("m_1", "box", key(1))


def test_names_of_known_hosts_are_read_as_openssh_reads_them(tmp_path):
    def line(names: str, number: int) -> str:
        return f"{names} {key(number).line}\n"

    file = tmp_path / "known_hosts"
    file.write_text(
        "# comment\n\n"
        + line("plain.example,10.0.0.1", 1)
        + line("[ported.example]:2222", 2)
        + line("*.wild.example,!not.wild.example", 3)
        + "@cert-authority * "
        + key(4).line
        + "\n@revoked plain.example "
        + key(5).line
        + "\nbroken.example ssh-ed25519 AAAA\n"
        + line("UPPER.example", 6)
    )

    def keys(name: str) -> list[HostKey]:
        return list(known_hosts_of([name], [file, tmp_path / "missing"]).keys)

    assert keys("plain.example") == keys("10.0.0.1") == [key(1)]
    assert keys("[ported.example]:2222") == [key(2)]
    assert keys("ported.example") == []
    assert keys("a.wild.example") == [key(3)]
    assert keys("not.wild.example") == []
    assert keys("broken.example") == []
    assert keys("upper.example") == [key(6)]
    assert known_hosts_of(["plain.example"], [file]).revoked == (key(5),)


@pytest.mark.subprocess
def test_hashed_names_and_fingerprints_agree_with_ssh_keygen(tmp_path):
    public = make_key(tmp_path / "k").with_suffix(".pub").read_text().split()
    file = tmp_path / "known_hosts"
    file.write_text(f"secret.example {public[0]} {public[1]}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert "secret.example" not in file.read_text()
    (found,) = known_hosts_of(["secret.example"], [file]).keys
    said = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "k.pub"], check=True, capture_output=True, text=True)
    assert found.fingerprint == said.stdout.split()[1]
    assert known_hosts_of(["other.example"], [file]) == Known()
