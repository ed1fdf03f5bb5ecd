"""What a create carries: its size, its form, and what is not put into it."""

from __future__ import annotations

import os
import shlex
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpu_skills import resources
from gpu_skills.errors import UsageError
from gpu_skills.lifecycle.guard import fuse
from lifecycle.fused import text_of

AT = datetime(2026, 12, 1, tzinfo=UTC)
LONG_URL = "https://a-rather-long-name-of-a-host-that-stands-in-for-the-vendor.example.com:8443"
LONG_FOLDER = "/workspace/of-a-project-with-a-long-name"


@pytest.mark.parametrize("provider", ["vast", "runpod"])
@pytest.mark.parametrize("on_expiry", ["stop", "destroy"])
@pytest.mark.subprocess
def test_the_text_fits_into_a_create_with_long_values_and_is_bash(provider: str, on_expiry: str) -> None:
    text = text_of(provider, LONG_URL, AT, longest_s=366 * 86400, keeps=LONG_FOLDER, on_expiry=on_expiry)
    assert len(text) <= 4000
    script = shlex.split(text)[2] if provider == "runpod" else text
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_a_text_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(UsageError, match="4000"):
        text_of("vast", None, AT, then="echo " + "x" * 900)


def test_runpods_args_are_three_words_and_hold_the_script_as_it_is() -> None:
    words = shlex.split(text_of("runpod", None, AT))
    assert words[:2] == ["bash", "-c"] and len(words) == 3
    assert "/start.sh" in words[2] and "'" not in words[2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("intent", "p0123456789abcde;"),
        ("intent", "../../etc"),
        ("keeps", "/workspace; rm -rf /"),
        ("keeps", "/workspace/../etc"),
        ("keeps", "relative"),
        ("base_url", "http://example.com"),
        ("base_url", "https://x.example.com/$(id)"),
        ("base_url", "https://user@example.com"),
    ],
)
def test_nothing_that_bash_would_take_apart_gets_into_it(field: str, value: str) -> None:
    given = {"intent": "p0123456789abcdef", "keeps": "~", "base_url": None, field: value}
    with pytest.raises(UsageError):
        fuse.bootstrap(provider="vast", deadline_at=AT, longest_s=60, on_expiry="stop", **given)  # type: ignore[arg-type]


def test_the_key_is_named_and_never_there() -> None:
    assert "N=CONTAINER_API_KEY" in text_of("vast", None, AT)
    assert "https://console.vast.ai/api/v0/instances/" in text_of("vast", None, AT)
    assert "https://api.runpod.io/v2/pods/" in text_of("runpod", None, AT)


def test_what_goes_on_after_the_fuse_stands_at_its_end() -> None:
    assert text_of("vast", None, AT, then="echo mine").endswith("\necho mine")
    assert shlex.split(text_of("runpod", None, AT, then="echo 'mine'"))[2].endswith("\necho 'mine'")
    assert "start.sh" not in text_of("runpod", None, AT, then="exec sleep 9")


def test_a_session_ends_before_the_fuse_acts() -> None:
    assert fuse.session_deadline(AT) == AT - timedelta(seconds=150)


def test_the_runner_lives_beside_the_folder_of_the_fuse() -> None:
    assert fuse.runner_root("~") == "~/.gpu-skills"
    assert fuse.runner_root("/workspace/") == "/workspace/.gpu-skills"


@pytest.mark.subprocess
def test_an_image_without_a_start_script_gets_an_ssh_server_with_the_key(tmp_path: Path) -> None:
    """Run with stand-ins for every program, since the real ones would change this computer."""
    done, programs = tmp_path / "done", tmp_path / "bin"
    programs.mkdir()
    for name in ("apt-get", "ssh-keygen", "sshd"):
        (programs / name).write_text(f'#!/bin/bash\nprintf "{name} %s\\n" "$*" >>{done}\n')
    (programs / "sleep").write_text("#!/bin/bash\nkill $PPID\n")
    for name in ("mkdir", "chmod"):
        (programs / name).write_text(
            f'#!/bin/bash\n[[ "$*" = */run/sshd* ]] && set -- "${{@:1:$#-1}}"\n/bin/{name} "$@"\n'
        )
    for program in programs.iterdir():
        program.chmod(0o755)
    script = resources.machine_script("start_script.sh").read_text()
    script = script.replace("/start.sh", f"{tmp_path}/none").replace("/usr/sbin/sshd", f"{programs}/sshd")
    environment = {"PATH": str(programs), "HOME": str(tmp_path), "PUBLIC_KEY": "ssh-ed25519 AAAA me"}
    subprocess.run(["/bin/bash", "-c", script], env=environment, timeout=20)
    assert done.read_text() == f"ssh-keygen -A\nsshd -o SetEnv=PATH={programs} LD_LIBRARY_PATH=\n"
    assert (tmp_path / ".ssh" / "authorized_keys").read_text() == "ssh-ed25519 AAAA me\n"
    assert os.stat(tmp_path / ".ssh" / "authorized_keys").st_mode & 0o777 == 0o600
    (programs / "sshd").unlink()
    subprocess.run(["/bin/bash", "-c", script], env=environment, timeout=20)
    assert "apt-get update\napt-get install -y openssh-server\n" in done.read_text()
