"""One key of our own per user, for the machines we rent."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_skills.errors import MissingProgram
from gpu_skills.lifecycle.renting import sshkeys
from gpu_skills.lifecycle.renting.sshkeys import KeyUnusable

pytestmark = pytest.mark.subprocess


@pytest.fixture
def op(rig):
    return rig("vast", containers=False).op


def test_the_key_is_made_once_and_only_its_user_can_read_it(op, home):
    first = sshkeys.ensure(op)
    assert sshkeys.ensure(op) == first and first.public.startswith("ssh-ed25519 ")
    assert first.private.is_relative_to(op.user_state)
    assert stat.S_IMODE(first.private.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.private.parent.stat().st_mode) == 0o700
    assert sorted(p.name for p in first.private.parent.iterdir()) == ["id_ed25519", "id_ed25519.lock", "id_ed25519.pub"]
    assert not (home / ".ssh").exists()


def test_many_at_once_agree_on_one_key(op):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: sshkeys.ensure(op), range(8)))
    assert len(set(made)) == 1


def test_a_public_half_that_was_lost_is_derived_from_the_private_one(op):
    first = sshkeys.ensure(op)
    first.private.with_suffix(".pub").unlink()
    assert sshkeys.ensure(op) == first


def test_a_file_that_is_no_key_is_told_and_left_alone(op):
    first = sshkeys.ensure(op)
    first.private.with_suffix(".pub").unlink()
    first.private.write_text("not a key")
    with pytest.raises(KeyUnusable):
        sshkeys.ensure(op)
    assert first.private.read_text() == "not a key"


def test_without_ssh_keygen_the_program_is_named(op, tmp_path):
    op.environ["PATH"] = str(tmp_path)
    with pytest.raises(MissingProgram):
        sshkeys.ensure(op)
