"""What a workflow takes and leaves, found by its links, and what may be filled in."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_skills import schemas
from gpu_skills.errors import ConfigError, GpuError, InputInvalid, WorkflowInvalid
from gpu_skills.runtimes.workflow import WorkflowManifest, fill, propose
from runtimes.workflows import guided, image_to_image, text_to_image


def places(manifest: WorkflowManifest) -> dict[str, tuple[str, str]]:
    return {name: (wanted.node, wanted.field) for name, wanted in manifest.inputs.items()}


def test_the_inputs_of_the_usual_workflow_have_the_names_people_use():
    assert places(propose(text_to_image())) == {
        "batch_size": ("5", "batch_size"), "cfg": ("3", "cfg"), "checkpoint": ("4", "ckpt_name"),
        "denoise": ("3", "denoise"),
        "height": ("5", "height"), "negative_prompt": ("7", "text"), "prompt": ("6", "text"),
        "sampler_name": ("3", "sampler_name"), "scheduler": ("3", "scheduler"), "seed": ("3", "seed"),
        "steps": ("3", "steps"),
        "width": ("5", "width"),
    }  # fmt: skip


def test_which_prompt_is_the_negative_one_is_read_from_the_links_and_not_from_the_order():
    workflow = text_to_image(positive=["7", 0], negative=["6", 0])
    found = places(propose(workflow))
    assert (found["prompt"], found["negative_prompt"]) == (("7", "text"), ("6", "text"))


def test_outputs_models_and_kinds_of_nodes_are_found():
    manifest = propose(text_to_image())
    assert {name: (o.node, o.class_type, o.kind) for name, o in manifest.outputs.items()} == {
        "image": ("9", "SaveImage", "image")
    }
    assert manifest.models == ("tiny.safetensors",)
    assert "KSampler" in manifest.class_types


def test_prompts_sizes_and_seeds_are_found_behind_guiders_and_primitive_nodes():
    manifest = propose(guided())
    found = places(manifest)
    assert found["prompt"] == ("4", "value")
    assert found["seed"] == ("8", "noise_seed")
    assert found["steps"] == ("11", "steps")
    assert found["frames"] == ("10", "length")
    assert found["guidance"] == ("6", "guidance")
    # One node of its own feeds both sides: one input, not two that contradict each other.
    assert ("9", "value") in found.values() and len([place for place in found.values() if place[0] == "9"]) == 1
    assert [o.kind for o in manifest.outputs.values()] == ["video"]
    assert manifest.models == ("big-fp8.safetensors", "t5.safetensors", "l.safetensors", "ae.safetensors")


def test_what_leads_to_no_output_is_no_input_and_is_noted():
    manifest = propose(guided())
    assert all(node != "20" for node, _ in places(manifest).values())
    assert any("node 20 (CLIPTextEncode)" in note for note in manifest.notes)


def test_the_last_node_is_the_output_when_none_is_known_to_save():
    workflow = text_to_image()
    workflow["9"]["class_type"] = "MyUploader"
    manifest = propose(workflow)
    assert [(o.node, o.kind) for o in manifest.outputs.values()] == [("9", "file")]
    assert any("known to save" in note for note in manifest.notes) and "prompt" in manifest.inputs


def test_an_image_is_required_because_the_author_s_file_is_on_no_other_server():
    image = propose(image_to_image()).inputs["image"]
    assert image.required and image.default is None


def test_a_second_prompt_is_called_by_its_title():
    workflow = text_to_image()
    workflow["11"] = {
        "class_type": "CLIPTextEncode",
        "inputs": {"text": "sky", "clip": ["4", 1]},
        "_meta": {"title": "The Sky"},
    }
    workflow["12"] = {
        "class_type": "ConditioningCombine",
        "inputs": {"conditioning_1": ["6", 0], "conditioning_2": ["11", 0]},
    }
    workflow["3"]["inputs"]["positive"] = ["12", 0]
    found = places(propose(workflow))
    assert (found["prompt"], found["prompt_the_sky"]) == (("6", "text"), ("11", "text"))


def test_both_sides_of_a_node_that_prepares_them_stay_apart():
    workflow = text_to_image(positive=["12", 0], negative=["12", 1])
    workflow["12"] = {
        "class_type": "ControlNetApplyAdvanced",
        "inputs": {"positive": ["6", 0], "negative": ["7", 0], "strength": 1},
    }
    found = places(propose(workflow))
    assert (found["prompt"], found["negative_prompt"]) == (("6", "text"), ("7", "text"))


def test_links_that_go_round_in_a_circle_end():
    workflow = text_to_image()
    workflow["4"]["inputs"]["again"] = ["8", 0]
    assert "prompt" in places(propose(workflow))


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        ({"nodes": [], "links": [], "version": 0.4}, "not the API format"),
        ({"prompt": {"1": {}}, "client_id": "x"}, "below `prompt`"),
        ([], "an object of nodes"),
        ({}, "an object of nodes"),
        ({"1": 5}, "node 1 has no class_type"),
        ({"1": {"class_type": "X"}}, "node 1 (X) has no inputs"),
        ({"1": {"class_type": "SaveImage", "inputs": {"images": ["7", 0]}}}, "comes from node 7, which is not there"),
        ({"1": {"class_type": "KSampler", "inputs": {}}}, "no node in it saves"),
    ],
    ids=["editor", "request", "list", "empty", "number", "no inputs", "loose link", "no output"],
)
def test_what_is_no_workflow_is_refused_with_its_reason(workflow, said):
    with pytest.raises(WorkflowInvalid, match=said.replace("(", r"\(").replace(")", r"\)")):
        propose(workflow)


def test_a_value_nested_too_deep_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    workflow = text_to_image()
    workflow["3"]["inputs"]["extra"] = deep
    with pytest.raises(WorkflowInvalid, match="too deep"):
        propose(workflow)


# filling --------------------------------------------------------------------------------------------------------------


def test_filling_changes_what_was_asked_for_and_nothing_else():
    workflow = text_to_image()
    before = copy.deepcopy(workflow)
    filled = fill(workflow, propose(workflow), {"prompt": "a barn", "seed": "12", "width": 64})
    assert workflow == before
    assert filled["6"]["inputs"]["text"] == "a barn"
    assert (filled["3"]["inputs"]["seed"], filled["5"]["inputs"]["width"]) == (12, 64)
    filled["6"]["inputs"]["text"], filled["3"]["inputs"]["seed"], filled["5"]["inputs"]["width"] = "a lighthouse", 5, 32
    assert filled == before


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"promt": "x"}, "there is no input promt; did you mean prompt?"),
        ({"seed": -1}, "seed: -1 is out of range"),
        ({"seed": 2**64}, "out of range"),
        ({"seed": 1.5}, "not a whole number"),
        ({"seed": True}, "not a number"),
        ({"cfg": float("nan")}, "not a number to work with"),
        ({"cfg": "1e999"}, "not a number to work with"),
        ({"steps": "many"}, "'many' is not a number".replace("'", "")),
        ({"prompt": 5}, "5 is not text"),
        ({"prompt": "\ud800"}, "half a character"),
        ({"prompt": "x" * 100_001}, "100001 characters"),
        ({"checkpoint": "../../etc/passwd"}, "no file name"),
    ],
)
def test_an_input_that_is_wrong_is_told_by_name(inputs, said):
    workflow = text_to_image()
    with pytest.raises(InputInvalid) as raised:
        fill(workflow, propose(workflow), inputs)
    assert said in raised.value.message


def test_everything_that_is_wrong_is_told_at_once():
    workflow = image_to_image()
    with pytest.raises(InputInvalid) as raised:
        fill(workflow, propose(workflow), {"seed": -1, "size": 5})
    assert len(raised.value.details["problems"]) == 3
    assert "image is missing (a file: name=@PATH)" in raised.value.message


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_a_file_that_is_missing_or_empty_is_refused(tmp_path, content):
    path = tmp_path / "x.png"
    if content is not None:
        path.write_bytes(content)
    workflow = image_to_image()
    with pytest.raises(InputInvalid):
        fill(workflow, propose(workflow), {"image": path})


def test_a_file_that_is_not_on_the_server_cannot_be_filled_in(tmp_path):
    path = Path(tmp_path / "x.png")
    path.write_bytes(b"x")
    workflow = image_to_image()
    with pytest.raises(InputInvalid, match="sent to the server first"):
        fill(workflow, propose(workflow), {"image": path})


def test_a_workflow_that_changed_below_its_manifest_is_refused():
    manifest = propose(text_to_image())
    with pytest.raises(WorkflowInvalid, match="not the one its manifest was made for"):
        fill(text_to_image(steps=4), manifest, {})


def test_the_same_workflow_laid_out_otherwise_is_the_same():
    workflow = text_to_image()
    again = json.loads(json.dumps(dict(reversed(workflow.items())), indent=7))
    assert propose(again).sha256 == propose(workflow).sha256


# records --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workflow", [text_to_image(), image_to_image(), guided()], ids=["text", "image", "video"])
def test_a_proposal_is_a_valid_record_and_comes_back_from_one(workflow):
    manifest = propose(workflow)
    record = json.loads(json.dumps(manifest.to_record("flow", model="tiny", file="workflows/flow.json")))
    schemas.check(record, "workflows", file="record", next_step="-")
    again = WorkflowManifest.of(record)
    assert again.inputs == manifest.inputs and again.outputs == manifest.outputs and again.sha256 == manifest.sha256


def test_a_manifest_written_by_hand_gives_defaults_and_no_places():
    record = {"id": "x", "inputs": {"prompt": "", "width": 832, "strength": 0.5, "tile": True}}
    manifest = WorkflowManifest.of(record)
    assert {name: wanted.type for name, wanted in manifest.inputs.items()} == {
        "prompt": "text", "width": "integer", "strength": "number", "tile": "boolean",
    }  # fmt: skip
    with pytest.raises(WorkflowInvalid, match="which node takes width"):
        fill(text_to_image(), manifest, {"width": 64})


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "blob"},
        {"min": "0"},
        {"max": True},
        {"choices": "abc"},
        {"required": "yes"},
        {"node": 5},
        {"field": []},
    ],
)
def test_an_input_described_by_hand_with_a_slip_is_told(wanted):
    with pytest.raises(ConfigError, match="input width"):
        WorkflowManifest.of({"id": "x", "inputs": {"width": wanted}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
NODE = st.fixed_dictionaries(
    {"class_type": st.sampled_from(["SaveImage", "KSampler", "CLIPTextEncode", "LoadImage", "X"]) | JSON},
    optional={
        "inputs": st.dictionaries(
            st.sampled_from(["images", "seed", "text", "positive", "negative", "image", "width", "value"]),
            JSON | st.tuples(st.sampled_from("123"), st.integers(0, 2)).map(list),
            max_size=5,
        )
        | JSON,
        "_meta": JSON,
    },
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from("123"), NODE, max_size=3) | JSON)
def test_whatever_it_is_given_it_proposes_or_says_what_is_wrong(workflow):
    try:
        manifest = propose(workflow)
    except GpuError:
        return
    required = {name: "x.png" for name, wanted in manifest.inputs.items() if wanted.required}
    try:
        filled = fill(workflow, manifest, required)
    except InputInvalid:
        return
    assert set(filled) == set(workflow)
