"""A link leads to the machine that is meant or nowhere."""

from __future__ import annotations

import pytest

from gpu_skills.errors import Unreachable
from gpu_skills.lifecycle.connect import connect
from gpu_skills.lifecycle.machines import Machine


@pytest.mark.parametrize("provider", ["vast", "runpod", "ssh"])
def test_a_machine_without_an_address_is_never_this_computer(provider, tmp_path):
    with pytest.raises(Unreachable, match="shows no address"):
        connect(Machine("m_1", provider, "20517"), known_hosts=tmp_path / "known_hosts", environ={})
