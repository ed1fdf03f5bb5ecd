"""What differs between providers is a trait with a name; a provider's own name decides nothing above its adapter."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.books import charged
from gpu_skills.providers.known import RENTED_PROVIDERS, traits_of
from rented import rent

PACKAGE = Path(__file__).parents[2] / "scripts/gpu_skills"
WIRES = "lifecycle/guard/fuse.py"  # the requests that a machine of each provider ends itself with


@pytest.mark.parametrize("layer", ["lifecycle", "jobs"])
def test_no_provider_is_named_in_the_code_of_procedures(layer):
    named = {}
    for path in (PACKAGE / layer).rglob("*.py"):
        texts = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        if any(text in RENTED_PROVIDERS for text in texts):
            named[str(path.relative_to(PACKAGE))] = path
    assert set(named) <= {WIRES}


@pytest.mark.parametrize("provider", RENTED_PROVIDERS)
def test_the_traits_of_a_name_are_those_its_reader_has(rig, provider):
    assert traits_of(provider) is rig(provider, containers=False).reader.traits


def test_a_machine_of_a_provider_that_nobody_knows_here_does_not_keep_spend_from_being_told(rig):
    r = rig("vast", containers=False)
    known = rent(r)
    record = known.to_record() | {"id": "m_newer", "provider": "another", "intent": None, "label": None}
    machines.save(r.project, machines.Machine.from_record(record))
    assert [m.id for m in charged.without_traffic(r.project)] == [known.id]
