"""A link leads to the machine that is meant or nowhere."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from gpu_skills.errors import Unreachable
from gpu_skills.lifecycle.connect import connect, ssh_command
from gpu_skills.lifecycle.machines import Machine
from renting import rent


@pytest.mark.parametrize("provider", ["vast", "runpod", "ssh"])
def test_a_machine_without_an_address_is_never_this_computer(provider, tmp_path):
    with pytest.raises(Unreachable, match="shows no address"):
        connect(Machine("m_1", provider, "20517"), known_hosts=tmp_path / "known_hosts", environ={})


@pytest.mark.parametrize("vendor", ["vast", "runpod"])
def test_the_ssh_command_that_a_person_is_shown_works_as_it_is_typed(rig, vendor, tmp_path):
    r = rig(vendor, real=True)
    got = rent(r)
    got.link.close()
    command = ssh_command(got.machine, known_hosts=r.project.state / "known_hosts")
    here = {"HOME": str(tmp_path), "PATH": r.op.environ["PATH"]}
    # -F: the user's own settings are not those of who runs this test
    typed = ["bash", "-c", command.replace("ssh ", "ssh -F /dev/null -o BatchMode=yes ", 1) + " echo it is here"]
    done = subprocess.run(typed, env=here, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "it is here"), done.stderr
    assert ssh_command(replace(got.machine, endpoint=None), known_hosts=tmp_path) is None
