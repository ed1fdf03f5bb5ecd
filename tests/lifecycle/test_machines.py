"""Whether a machine of the user's own is what gpu.yaml asks for, and how long its session may last."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from gpu_skills.config import load_gpu_yaml
from gpu_skills.errors import CannotSatisfy, MachineLacks, StateError
from gpu_skills.lifecycle import machines
from gpu_skills.lifecycle.machines import Machine, machine_id, measured, session_deadline
from gpu_skills.state import project as projects

BOX = Machine(id="m_1", provider="ssh", host="box")


def config(tmp_path, text):
    (tmp_path / "gpu.yaml").write_text("provider: ssh\nhost: box\n" + text)
    return load_gpu_yaml(tmp_path, environ={"HOME": str(tmp_path)})


def probe(*gpus, bash=True):
    return {"bash": bash, "gpus": [{"index": i, "name": n, "vram_mib": v} for i, (n, v) in enumerate(gpus)]}


@pytest.mark.parametrize(
    ("need", "gpus", "fits"),
    [
        ("", [], True),
        ("compute: {min_vram_gb: 24}", [], False),
        ("compute: {min_vram_gb: 24}", [("NVIDIA L4", 23034)], True),  # a 24 GB card that reports less
        ("compute: {min_vram_gb: 16}", [("Tesla T4", 15360)], True),
        ("compute: {min_vram_gb: 24}", [("Tesla T4", 15360)], False),
        ("compute: {min_vram_gb: 24, gpu_count: 2}", [("NVIDIA L4", 23034)], False),
        ("compute: {min_vram_gb: 24, gpu_count: 2}", [("NVIDIA L4", 23034)] * 2, True),
        ("compute: {gpu: RTX 4090}", [("NVIDIA GeForce RTX 4090", 24564)], True),
        ("compute: {gpu: RTX 3090}", [("NVIDIA GeForce RTX 3090 Ti", 24564)], False),
    ],
)
def test_the_machine_is_measured_against_what_is_needed(tmp_path, need, gpus, fits):
    settings = config(tmp_path, need)
    if fits:
        assert measured(BOX, probe(*gpus), settings).gpu_count == len(gpus)
    else:
        with pytest.raises(CannotSatisfy) as error:
            measured(BOX, probe(*gpus), settings)
        assert "--provider" in error.value.next_step


def test_the_size_on_the_label_is_recorded_not_what_the_card_reports(tmp_path):
    assert measured(BOX, probe(("NVIDIA L4", 23034)), config(tmp_path, "")).vram_gb == 24


def test_a_machine_without_bash_is_refused(tmp_path):
    with pytest.raises(MachineLacks):
        measured(BOX, probe(bash=False), config(tmp_path, ""))


@pytest.mark.parametrize(
    ("text", "rate", "deadline"),
    [
        ("", "0", (21600, "max_lifetime")),
        ("budget: {session_usd: 3}", "1.5", (7200, "session_budget")),
        ("budget: {session_usd: 30}", "1.5", (21600, "max_lifetime")),
        ("lifecycle: {max_lifetime: 1h}\nbudget: {session_usd: 3}", "1.5", (3600, "max_lifetime")),
    ],
)
def test_the_earlier_of_lifetime_and_budget_is_the_deadline(tmp_path, text, rate, deadline):
    assert session_deadline(config(tmp_path, text), Decimal(rate)) == deadline


def test_the_id_of_a_host_of_ones_own_is_the_same_every_time_and_in_every_process():
    assert machine_id("ssh", "box") == machine_id("ssh", "box") == "m_" + machine_id("ssh", "box")[2:]
    assert machine_id("ssh", "box") != machine_id("local", "box")


@pytest.mark.parametrize(
    "name", ["intent", "plan", "approval_id", "account", "offer_id", "host_key", "ready_at", "was", "fuse"]
)
def test_a_field_of_another_type_is_told_with_its_place_and_not_used(tmp_path, name):
    project = projects.init(tmp_path)
    machines.save(project, Machine("m_1", "vast", "77"))
    path = project.path("machines.json")
    (record,) = json.loads(path.read_text())
    path.write_text(json.dumps([{**record, name: ["x"]}]))
    with pytest.raises(StateError, match=f"/{name}"):
        machines.all_machines(project)
