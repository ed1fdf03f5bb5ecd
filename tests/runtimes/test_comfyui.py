"""ComfyUI, against a server that speaks as the real one does and really runs what it is given."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path

import pytest

from gpu_skills.errors import (
    DestinationRefused,
    GenerationFailed,
    GenerationInterrupted,
    GenerationLost,
    GenerationTimeout,
    GenerationUnknown,
    InputInvalid,
    OutputTooLarge,
    RequestRejected,
    ServiceKeyRejected,
    ServiceReply,
    ServiceUnreachable,
)
from gpu_skills.runtimes.base import Endpoint, Event, Request
from gpu_skills.runtimes.manifest import ModelManifest, Trial
from gpu_skills.runtimes.outputs import FolderSink
from runtimes.comfy_server import IMPORT_LOG, ComfyServer, png
from runtimes.workflows import image_to_image, text_to_image

MODEL = ModelManifest("tiny", "comfyui")


def request(identity="J-000001", workflow=None, **inputs) -> Request:
    return Request(identity, MODEL, inputs, workflow or text_to_image(), timeout_s=20)


def model_with_test(workflow=None, **inputs) -> ModelManifest:
    return ModelManifest("tiny", "comfyui", test=Trial(inputs, workflow=workflow or text_to_image(), timeout_s=20))


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


# what comes back ------------------------------------------------------------------------------------------------------


def test_a_workflow_comes_back_as_the_picture_that_its_inputs_ask_for(comfyui, endpoint, sink):
    result = comfyui.run(endpoint, request(prompt="a red barn", seed=9, width=48), sink)
    (output,) = result.outputs
    wanted = png(48, 24, 9, "a red barn|blurry")
    assert output.path.read_bytes() == wanted
    assert (output.sha256, output.bytes) == (hashlib.sha256(wanted).hexdigest(), len(wanted))
    assert output.mime == "image/png" and output.path.parent == sink.folder


def test_what_happens_on_the_server_is_told_as_it_happens(comfyui, endpoint, sink, server):
    events: list[Event] = []
    comfyui.run(endpoint, request(), sink, events.append)
    told = names(events)
    assert told.index("queued") < told.index("started") < told.index("executing") < told.index("progress")
    assert told.index("progress") < told.index("executed") < told.index("output")
    assert [e.data["value"] for e in events if e.name == "progress"] == [1, 2, 3]


def test_what_is_told_of_other_prompts_or_is_no_message_is_passed_by(comfyui, endpoint, sink, server):
    server.faults.tells_of_others = True
    events: list[Event] = []
    assert comfyui.run(endpoint, request(), sink, events.append).outputs
    assert [e.data["value"] for e in events if e.name == "progress"] == [1, 2, 3] and "error" not in names(events)


@pytest.mark.parametrize("websocket", ["none", "cut"])
def test_without_a_websocket_the_history_is_followed(comfyui, endpoint, sink, server, websocket):
    server.faults.websocket = websocket
    server.faults.step_s = 0.1
    result = comfyui.run(endpoint, request(seed=3), sink)
    assert result.outputs[0].path.read_bytes() == png(32, 24, 3, "a lighthouse|blurry")
    assert len(server.executed) == 1


def test_a_socket_that_breaks_is_noticed_and_said(comfyui, endpoint, sink, server):
    server.faults.websocket = "cut"
    server.faults.step_s = 0.1
    events: list[Event] = []
    comfyui.run(endpoint, request(), sink, events.append)
    assert any("the history is asked" in event.data["text"] for event in events if event.name == "note")


def test_a_history_that_is_written_after_the_end_was_told_is_waited_for(comfyui, endpoint, sink, server):
    server.faults.history_late_s = 0.4
    assert comfyui.run(endpoint, request(), sink).outputs[0].mime == "image/png"


def test_a_file_goes_up_under_a_name_of_its_content_and_into_the_workflow(comfyui, endpoint, sink, server, tmp_path):
    picture = tmp_path / "my photo;$(x).png"
    picture.write_bytes(png(8, 8, 1))
    comfyui.run(endpoint, request(workflow=image_to_image(), image=picture), sink)
    ((kind, _, name), data), *_ = server.files.items()
    assert kind == "input" and data == picture.read_bytes()
    assert name == hashlib.sha256(data).hexdigest()[:16] + "-my photo_(x).png"
    assert server.bodies[-1]["prompt"]["10"]["inputs"]["image"] == name


def test_texts_and_other_kinds_of_files_are_outputs_too_and_previews_are_not(comfyui, endpoint, sink, server):
    server.files["output", "sub/dir", "sound.flac"] = b"fLaC" + b"\0" * 20
    server.files["temp", "", "p.png"] = b"preview"
    server.faults.extra_outputs = {
        "20": {"audio": [{"filename": "sound.flac", "subfolder": "sub/dir", "type": "output"}]},
        "21": {"text": ["a caption"], "animated": [True]},
        "22": {"images": [{"filename": "p.png", "subfolder": "", "type": "temp"}]},
    }
    outputs = comfyui.run(endpoint, request(), sink).outputs
    assert {output.name: output.mime for output in outputs} == {
        "out_00001_.png": "image/png", "sound.flac": "audio/flac", "node-21.txt": "text/plain",
    }  # fmt: skip
    assert (sink.folder / "node-21.txt").read_text() == "a caption"


def test_the_same_workflow_twice_leaves_two_files(comfyui, endpoint, sink, server):
    first = comfyui.run(endpoint, request("J-1", seed=1), sink).outputs[0]
    server.faults.filename = first.name
    second = comfyui.run(endpoint, request("J-2", seed=2), sink).outputs[0]
    assert first.path != second.path and first.path.read_bytes() != second.path.read_bytes()


# sent once ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("honours", [True, False], ids=["our prompt id", "an old server"])
def test_a_run_that_is_given_again_is_found_and_not_run_again(comfyui, endpoint, server, tmp_path, honours):
    server.faults.honours_prompt_id = honours
    first = comfyui.run(endpoint, request(seed=4), FolderSink(tmp_path / "a")).outputs[0]
    events: list[Event] = []
    second = comfyui.run(endpoint, request(seed=4), FolderSink(tmp_path / "b"), events.append).outputs[0]
    assert first.sha256 == second.sha256
    assert len(server.executed) == 1 and names(events)[0] == "found"


@pytest.mark.parametrize("honours", [True, False], ids=["our prompt id", "an old server"])
def test_a_prompt_that_was_taken_in_without_an_answer_is_found_by_its_mark(comfyui, endpoint, sink, server, honours):
    server.faults.answer_prompt = False
    server.faults.honours_prompt_id = honours
    assert comfyui.run(endpoint, request(), sink).outputs[0].mime == "image/png"
    assert len(server.executed) == 1
    assert server.requests.count("POST /prompt") == 1


def test_a_prompt_without_an_answer_that_is_not_found_is_unknown_and_never_sent_twice(comfyui, endpoint, sink, server):
    server.faults.takes_prompt = False
    with pytest.raises(GenerationUnknown) as raised:
        comfyui.run(endpoint, request(), sink)
    assert raised.value.exit_code == 6 and raised.value.retryable
    assert server.requests.count("POST /prompt") == 1
    server.faults.takes_prompt = True
    assert comfyui.run(endpoint, request(), sink).outputs
    assert len(server.executed) == 1


def test_a_run_that_still_runs_is_followed_by_a_second_controller(comfyui, endpoint, server, tmp_path):
    server.faults.step_s = 0.3
    results = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(comfyui.run(endpoint, request(), FolderSink(tmp_path / n))))
        for n in "ab"
    ]
    threads[0].start()
    while not server.running:
        time.sleep(0.01)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert len({result.outputs[0].sha256 for result in results}) == 1 and len(results) == 2
    assert len(server.executed) == 1


def test_a_history_too_large_to_read_is_asked_for_in_smaller_parts(comfyui, endpoint, sink, server, monkeypatch):
    from gpu_skills.runtimes import comfyui as module

    monkeypatch.setattr(module, "MAX_HISTORY_BYTES", 60_000)
    server.faults.honours_prompt_id = False
    filler = {"prompt": [0, "x", {"pad": "p" * 1000}, {}, []], "outputs": {}, "status": {}}
    server.history.update({f"old-{n}": filler for n in range(200)})
    comfyui.run(endpoint, request(), sink)
    comfyui.run(endpoint, request(), sink)
    assert len(server.executed) == 1
    asked = [line for line in server.requests if line.startswith("GET /history?")]
    assert asked == [f"GET /history?max_items={n}" for n in (1000, 250, 62, 15)][: len(asked) // 2] * 2


# what fails -----------------------------------------------------------------------------------------------------------


def test_a_refused_prompt_names_node_class_and_input(comfyui, endpoint, sink, server):
    with pytest.raises(RequestRejected) as raised:
        comfyui.run(endpoint, request(checkpoint="other.safetensors"), sink)
    assert "node 4 (CheckpointLoaderSimple) input ckpt_name: Value not in list" in raised.value.message
    assert "other.safetensors" in raised.value.message
    assert raised.value.details["problems"] == [
        {
            "node": "4", "class_type": "CheckpointLoaderSimple", "input": "ckpt_name", "type": "value_not_in_list",
            "message": "Value not in list", "details": "ckpt_name: 'other.safetensors' not in ['tiny.safetensors']",
        }
    ]  # fmt: skip
    assert server.executed == []


def test_inputs_that_are_wrong_are_refused_before_anything_is_sent(comfyui, endpoint, sink, server):
    with pytest.raises(InputInvalid):
        comfyui.run(endpoint, request(seed=-1, promt="x"), sink)
    assert server.requests == []


def test_a_node_that_fails_is_named_with_what_it_said(comfyui, endpoint, sink, server):
    server.faults.execution_error = True
    with pytest.raises(GenerationFailed) as raised:
        comfyui.run(endpoint, request(), sink)
    assert "node 3 (KSampler): torch.OutOfMemoryError: CUDA out of memory" in raised.value.message
    assert raised.value.details["node_class"] == "KSampler"


def test_a_prompt_that_vanishes_is_lost_and_not_waited_for_until_the_timeout(comfyui, endpoint, sink, server):
    server.faults.forgets_prompt = True
    with pytest.raises(GenerationLost):
        comfyui.run(endpoint, request(), sink)


def test_a_run_that_takes_too_long_is_reported_and_still_there(comfyui, endpoint, sink, server):
    server.faults.step_s = 5
    slow = Request("J-7", MODEL, {}, text_to_image(), timeout_s=0.3)
    with pytest.raises(GenerationTimeout):
        comfyui.run(endpoint, slow, sink)
    assert comfyui.interrupt(endpoint, "J-7") == "interrupted"


def test_a_server_that_goes_away_in_the_middle_is_given_up_after_its_time(comfyui, endpoint, sink, server):
    server.faults.step_s = 5
    raised: list[BaseException] = []

    def run() -> None:
        try:
            comfyui.run(endpoint, request(), sink)
        except ServiceUnreachable as exc:
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    while not server.running:
        time.sleep(0.01)
    server.close()
    thread.join(20)
    assert len(raised) == 1


def test_an_output_that_cannot_be_fetched_at_first_is_asked_for_again(comfyui, endpoint, sink, server):
    server.faults.cut_views = 2
    assert comfyui.run(endpoint, request(seed=8), sink).outputs[0].path.read_bytes() == png(
        32, 24, 8, "a lighthouse|blurry"
    )
    assert [path.name for path in sink.folder.iterdir()] == ["out_00001_.png"]


def test_an_output_that_is_gone_is_an_error_and_not_a_short_result(comfyui, endpoint, sink, server):
    server.faults.extra_outputs = {"20": {"images": [{"filename": "gone.png", "subfolder": "", "type": "output"}]}}
    with pytest.raises(ServiceReply, match="HTTP 404 for an output of node 20"):
        comfyui.run(endpoint, request(), sink)


# interrupting ---------------------------------------------------------------------------------------------------------


def test_only_the_run_that_is_meant_is_interrupted(comfyui, endpoint, server, tmp_path):
    server.faults.step_s = 0.2
    ends: dict[str, object] = {}

    def run(name: str) -> None:
        try:
            ends[name] = comfyui.run(endpoint, request(name), FolderSink(tmp_path / name))
        except (GenerationInterrupted, GenerationLost) as exc:
            ends[name] = exc

    threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "second")]
    threads[0].start()
    while not server.running:
        time.sleep(0.01)
    threads[1].start()
    while not server.queue:
        time.sleep(0.01)
    assert comfyui.facts(endpoint)["queue_pending"] == 1
    assert comfyui.interrupt(endpoint, "second") == "deleted"
    assert comfyui.interrupt(endpoint, "first") == "interrupted"
    assert comfyui.interrupt(endpoint, "nobody") == "not_found"
    for thread in threads:
        thread.join(20)
    assert isinstance(ends["first"], GenerationInterrupted) and isinstance(ends["second"], GenerationLost)
    assert len(server.executed) == 1


# health, facts, proof -------------------------------------------------------------------------------------------------


def test_health_tells_ready_loading_and_failed_apart(comfyui, endpoint, server):
    assert comfyui.health(endpoint).state == "ready"
    server.faults.starting = True
    assert comfyui.health(endpoint).state == "loading"
    server.faults.starting = False
    server.faults.raw["/system_stats"] = (200, b'{"hello": 1}')
    assert comfyui.health(endpoint).state == "failed"
    server.close()
    assert comfyui.health(endpoint).state == "loading"


def test_facts_are_queue_devices_version_and_nodes_that_did_not_load(comfyui, endpoint, server):
    server.faults.log = IMPORT_LOG
    facts = comfyui.facts(endpoint)
    assert (facts["queue_running"], facts["queue_pending"], facts["version"]) == (0, 0, "0.9.2")
    assert facts["devices"] == [{"name": "cuda:0 NVIDIA Test", "type": "cuda", "vram_total": 1000, "vram_free": 900}]
    assert facts["import_failures"] == [
        {"node": "ComfyUI-Fancy", "reason": "No module named 'comfy_api.latest'", "module": "comfy_api.latest"}
    ]


def test_a_test_generation_that_comes_back_proves_it_with_its_hash(comfyui, endpoint, sink):
    proof = comfyui.test_generation(endpoint, model_with_test(seed=5), sink)
    wanted = png(32, 24, 5, "a lighthouse|blurry")
    assert proof.succeeded
    assert proof.evidence == {
        "bytes": len(wanted), "sha256": hashlib.sha256(wanted).hexdigest(), "kind": "image/png",
    }  # fmt: skip


def test_a_template_that_is_up_and_broken_is_not_ready_and_quotes_module_and_node(comfyui, endpoint, sink, server):
    workflow = text_to_image()
    workflow["8"]["class_type"] = "FancyDecode"
    workflow["5"]["class_type"] = "FancyLatent"
    server.faults.log = IMPORT_LOG
    assert comfyui.health(endpoint).state == "ready"
    proof = comfyui.test_generation(endpoint, model_with_test(workflow), sink)
    assert not proof.succeeded
    assert "ComfyUI-Fancy: No module named 'comfy_api.latest'" in proof.detail
    assert "nodes that are not there: FancyDecode, FancyLatent" in proof.detail
    assert proof.evidence["import_failures"][0]["module"] == "comfy_api.latest"


def test_a_test_generation_draws_anew_each_time(comfyui, endpoint, sink):
    proofs = [comfyui.test_generation(endpoint, model_with_test(), sink) for _ in "ab"]
    assert all(proof.succeeded for proof in proofs)
    assert proofs[0].evidence["sha256"] != proofs[1].evidence["sha256"]


def test_without_a_log_that_is_served_the_missing_nodes_are_still_named(comfyui, endpoint, sink):
    workflow = text_to_image()
    workflow["8"]["class_type"] = "FancyDecode"
    assert comfyui.missing_nodes(endpoint, workflow) == ["FancyDecode"]
    proof = comfyui.test_generation(endpoint, model_with_test(workflow), sink)
    assert "node 8 (FancyDecode): Node 'FancyDecode' not found" in proof.detail


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "it is empty"),
        (lambda data: data[:-20], "cut off"),
        (lambda data: data[:60] + b"\xff" + data[61:], "damaged"),
        (lambda data: b"<!DOCTYPE html><html>error", "text/html"),
    ],
    ids=["empty", "cut", "damaged", "page"],
)
def test_a_test_generation_is_looked_at(comfyui, endpoint, sink, server, change, said):
    server.faults.image_bytes = change
    proof = comfyui.test_generation(endpoint, model_with_test(), sink)
    assert not proof.succeeded and said in proof.detail


def test_a_picture_of_one_colour_proves_nothing(comfyui, endpoint, sink, server):
    server.faults.flat = True
    proof = comfyui.test_generation(endpoint, model_with_test(), sink)
    assert not proof.succeeded and "same colour" in proof.detail


def test_a_manifest_without_a_test_proves_nothing(comfyui, endpoint, sink):
    assert not comfyui.test_generation(endpoint, MODEL, sink).succeeded


# hostile --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../../x.png", "/etc/passwd", "..\\..\\x.png", "a\0b.png", "x" * 900 + ".png", "..", "\x1b[2J.png"]
)
def test_a_hostile_file_name_lands_inside_the_folder_under_a_harmless_name(comfyui, endpoint, sink, server, name):
    server.faults.filename = name
    (output,) = comfyui.run(endpoint, request(), sink).outputs
    assert output.path.resolve().parent == sink.folder.resolve()
    assert output.name.isprintable() and not output.name.startswith(".") and len(output.name) <= 120
    assert [path.name for path in sink.folder.iterdir()] == [output.name]


def test_an_output_without_end_is_cut_at_the_limit_and_nothing_of_it_stays(comfyui, endpoint, server, tmp_path):
    server.faults.endless_view = True
    with pytest.raises(OutputTooLarge):
        comfyui.run(endpoint, request(), FolderSink(tmp_path / "o", max_bytes=1_000_000))
    assert list((tmp_path / "o").iterdir()) == []


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b'{"queue_running": 5}', b"[" * 100_000, b'{"a": NaN, "a": 1}', b"\xff\xfe", b"<html>"],
    ids=["nothing", "list", "null", "number", "deep", "twice", "no text", "page"],
)
def test_a_reply_that_is_none_is_said_to_be_none(comfyui, endpoint, sink, server, body):
    server.faults.raw["/queue"] = (200, body)
    with pytest.raises(ServiceReply):
        comfyui.run(endpoint, request(), sink)


@pytest.mark.parametrize(
    "entry",
    [
        {"outputs": {"9": {"images": [{"filename": 5}]}}, "status": {"status_str": "success", "completed": True}},
        {
            "outputs": {"9": {"images": [{"filename": "\ud800"}]}},
            "status": {"status_str": "success", "completed": True},
        },
    ],
)
def test_a_listed_file_without_a_usable_name_is_an_error(comfyui, endpoint, sink, server, entry):
    from gpu_skills.runtimes.comfyui import prompt_id_of

    server.faults.raw[f"/history/{prompt_id_of('J-000001')}"] = (
        200,
        json.dumps({prompt_id_of("J-000001"): entry}).encode(),
    )
    with pytest.raises(ServiceReply, match="node 9"):
        comfyui.run(endpoint, request(), sink)


def test_a_redirect_is_not_followed(comfyui, endpoint, sink, server):
    server.faults.raw["/queue"] = (302, b"")
    with pytest.raises(ServiceReply, match="redirect"):
        comfyui.run(endpoint, request(), sink)


def test_the_key_goes_along_everywhere_and_is_in_no_message(comfyui, server, sink, tmp_path):
    server.faults.key = "secret-key-0123456789"
    comfyui.run(Endpoint(server.url, server.faults.key), request(), sink)
    right = server.faults.key
    server.faults.key = "another-key-of-the-server"
    with pytest.raises(ServiceKeyRejected) as raised:
        comfyui.run(Endpoint(server.url, right), request("J-2"), sink)
    assert right not in json.dumps(raised.value.to_dict())
    assert right not in repr(Endpoint(server.url, right))


def test_a_key_does_not_cross_a_network_in_the_clear(comfyui):
    with pytest.raises(DestinationRefused):
        comfyui.health(Endpoint("http://203.0.113.5:8188", "secret-key-0123456789"))


def test_a_full_name_of_a_path_is_never_made_of_what_the_server_says(comfyui, endpoint, sink, server, tmp_path):
    outside = tmp_path / "outside.png"
    outside.write_bytes(b"mine")
    (sink.folder).mkdir()
    (sink.folder / "out_00001_.png").symlink_to(outside)
    (output,) = comfyui.run(endpoint, request(), sink).outputs
    assert outside.read_bytes() == b"mine" and output.name == "out_00001_-2.png"
    assert isinstance(server, ComfyServer) and isinstance(output.path, Path)
