"""What logs say about a failure: one real-looking log per class, what only looks like it, and logs that mean harm."""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path

import pytest

from gpu_skills.jobs.diagnose import classify as classifying
from gpu_skills.jobs.diagnose.classify import EVIDENCE_LINES, SHOWN_CHARS, Text, classify
from gpu_skills.jobs.diagnose.failures import catalogue

LOGS = Path(__file__).with_name("logs")
CLASSES = sorted(catalogue().classes)


def of(*lines: bytes | str, **more):
    data = "\n".join(line if isinstance(line, str) else line.decode("latin-1") for line in lines).encode()
    return classify([Text("log", (data,), is_account=True)], **more)


def names(*lines: bytes | str) -> list[str]:
    return [found.failure.name for found in of(*lines, has_failed=False)]


# One log per class ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CLASSES, "unknown"])
def test_the_log_of_each_class_is_told_by_lines_that_are_in_it(name: str) -> None:
    log = (LOGS / f"{name}.log").read_bytes()
    first = classify([Text("log", (log,), is_account=True)])[0]
    assert first.failure.name == name and not first.is_weak
    lines = log.decode().splitlines()
    for evidence in first.evidence:
        shown = evidence.text.strip("…")
        assert shown and shown in lines[evidence.line - 1]


def test_every_class_has_a_log_and_every_log_is_looked_at() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {*CLASSES, "unknown", "near_misses", "two_causes"}


@pytest.mark.parametrize("line", (LOGS / "near_misses.log").read_text().splitlines())
def test_a_line_that_only_sounds_like_a_failure_is_none(line: str) -> None:
    assert names(line) == []


@pytest.mark.parametrize(
    ("name", "details"),
    [
        ("cuda_oom", {"wanted": "10.31 GiB"}),
        ("driver_mismatch", {"driver": "12020"}),
        ("arch_unsupported", {"sm": "sm_120"}),
        ("node_import_failed", {"node": "ComfyUI-TideSampler", "module": "comfy_api.latest"}),
        ("module_missing", {"module": "peft"}),
        ("port_held", {"port": "8188"}),
        ("host_fault", {"xid": "79"}),
        ("weights", {"problem": "MetadataIncompleteBuffer"}),
    ],
)
def test_what_a_line_names_is_kept(name: str, details: dict[str, str]) -> None:
    assert of((LOGS / f"{name}.log").read_text())[0].details == details


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("sha256 mismatch for model.safetensors: expected 9f86d0, got 2c26b4", "weights"),
        ("OSError: Consistency check failed: file should be of size 4902257696 but has size 0 (model.bin)", "weights"),
        ("checkpoints/unet.safetensors is empty", "weights"),
        ("models/vae.gguf has 0 bytes", "weights"),
        ("_pickle.UnpicklingError: invalid load key, '<'.", "weights"),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "weights"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_4f1c'", "shm_small"),
        ("RuntimeError: unable to write to file </torch_812_1733_0>: No space left on device (28)", "shm_small"),
        ("OSError: [Errno 98] Address already in use", "port_held"),
        (
            "[W socket.cpp:752] The server socket on [::]:29500 has failed: errno: 98 - Address already in use",
            "port_held",
        ),
        ("ERROR: Port 8000 is already in use", "port_held"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120'", "arch_unsupported"),
        ("ptxas fatal   : Value 'sm_120a' is not defined for option 'gpu-name'", "arch_unsupported"),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory", "driver_mismatch"),
        ("ImportError: libGL.so.1: cannot open shared object file: No such file or directory", "module_missing"),
        ("bash: line 1: ffmpeg: command not found", "module_missing"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 93.1 GiB for an array", "host_oom"),
        ("RuntimeError: DataLoader worker (pid 31) is killed by signal: Killed.", "host_oom"),
        ("ValueError: No available memory for the cache blocks. Try increasing gpu_memory_utilization", "cuda_oom"),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9216.00 MiB on device 0: cudaMalloc failed",
            "cuda_oom",
        ),
        ("curl: (28) Operation timed out after 30001 milliseconds with 0 bytes received", "network_stall"),
        ("   0.1 seconds (IMPORT FAILED): /opt/ComfyUI/custom_nodes/Reef-Nodes", "node_import_failed"),
    ],
)
def test_other_words_for_the_same_failures(line: str, name: str) -> None:
    assert names(line)[:1] == [name]


def test_a_missing_module_below_a_custom_node_is_the_nodes_and_names_both() -> None:
    found = of(
        '  File "/w/ComfyUI/custom_nodes/Reef-Nodes/nodes/mask.py", line 3, in <module>',
        "    import onnxruntime",
        "ModuleNotFoundError: No module named 'onnxruntime'",
    )
    assert found[0].failure.name == "node_import_failed"
    assert found[0].details == {"node": "Reef-Nodes", "module": "onnxruntime"}


# Several classes ------------------------------------------------------------------------------------------------------


def test_the_root_comes_before_what_follows_from_it() -> None:
    found = of((LOGS / "two_causes.log").read_text())
    assert [(f.failure.name, f.is_weak) for f in found] == [
        ("cuda_oom", False), ("nccl_error", False), ("network_stall", True),
    ]  # fmt: skip
    assert [f.evidence[0].line for f in found] == [3, 4, 5]


def test_rank_decides_whatever_the_order_and_position_among_equals() -> None:
    truncated = "SafetensorError: Error while deserializing header: InvalidHeader"
    full, memory, killed = "OSError: [Errno 28] No space left on device", "CUDA error: out of memory", "std::bad_alloc"
    assert names(memory, truncated, full) == names(full, truncated, memory) == ["disk_full", "weights", "cuda_oom"]
    assert names(memory, killed) == ["cuda_oom", "host_oom"]
    assert names(killed, memory) == ["host_oom", "cuda_oom"]


def test_a_weak_sign_counts_only_near_the_end_and_never_before_a_strong_one() -> None:
    weak, later = "ReadTimeout: Read timed out.", ["step"] * 500
    assert names(weak) == ["network_stall"]
    assert names(weak, *later) == []
    assert of(weak, *later)[0].failure.name == "unknown"
    assert names("exit code 137", "RuntimeError: NCCL error in: comm.cpp") == ["nccl_error", "host_oom"]


def test_the_same_failure_many_times_is_one_finding_with_its_first_lines() -> None:
    (found,) = of(*["step", "CUDA error: out of memory"] * 1000)
    assert (found.matches, [e.line for e in found.evidence]) == (1000, [2, 4, 6])


def test_without_a_class_the_first_errors_and_the_newest_are_shown() -> None:
    errors = [f"ValueError: number {n}" for n in range(9)]
    (found,) = of("start", *errors, "bye")
    assert [e.text for e in found.evidence] == [errors[0], errors[1], errors[8]]
    (found,) = of("one", "two", "", "three", "four")
    assert [e.text for e in found.evidence] == ["two", "three", "four"]
    assert found.failure.retry == "changed" and found.failure.name == "unknown"


def test_when_nothing_failed_nothing_is_unknown() -> None:
    assert of("all is well", has_failed=False) == []


# Logs that mean harm --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_log_of_a_hundred_megabytes_is_read_in_a_few_of_memory() -> None:
    block = (b"all is well " * 170 + b"\n") * 128
    blocks = 100_000_000 // len(block)

    def log():
        for _ in range(blocks):
            yield block
        yield b"RuntimeError: CUDA error: out of memory\n"

    tracemalloc.start()
    try:
        (found,) = classify([Text("log", log(), is_account=True)])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (found.failure.name, found.evidence[0].line) == ("cuda_oom", 128 * blocks + 1)


@pytest.mark.parametrize(
    "filler",
    [
        b"A",
        b" ",
        b"CUDA out of mem ",
        b"xid " * 4,
        b"sha256 ",
        b"\x1b]0;t\x07",
        b"\x1b[31m",
        b"\xff\xfe",
        b"port 1 ",
        b"line 1:  ",
    ],
)
def test_a_line_of_a_megabyte_is_read_in_a_moment_and_hides_nothing_near_its_ends(filler: bytes) -> None:
    line = filler * ((1 << 20) // len(filler))
    started = time.process_time()
    found = classify([Text("log", (b"no space left on device " + line, b"\n", line + b" CUDA error: out of memory\n"))])
    assert time.process_time() - started < 5
    assert [f.failure.name for f in found][-1] == "cuda_oom"
    for finding in found:
        assert all(len(e.text) < 4 * SHOWN_CHARS for e in finding.evidence) and len(finding.evidence) <= EVIDENCE_LINES


def test_no_expression_of_the_catalogue_goes_back_and_forth() -> None:
    """Each expression against texts made of its own words, repeated: time may grow no faster than the text."""
    for sign in catalogue().signs:
        for expression in filter(None, (sign.match, sign.after)):
            words = re.findall(r"[A-Za-z]{3,}", expression.pattern) or ["x"]
            text = (sign.has + " " + " ".join(words) + " 1:/.'\" ") * 40
            started = time.process_time()
            for cut in range(0, 200, 10):
                expression.search(text[cut : cut + 900])
            assert time.process_time() - started < 0.5, expression.pattern


def test_no_expression_of_the_catalogue_repeats_without_a_bound() -> None:
    for sign in catalogue().signs:
        for expression in filter(None, (sign.match, sign.after)):
            bare = re.sub(r"\\.|\[[^\]]*\]", "x", expression.pattern)
            # A version number stays short in a window; a `*`, or a `+` of a group, does not.
            assert "*" not in bare and ")+" not in bare, expression.pattern


def test_escapes_and_bytes_that_are_no_text_do_not_reach_the_reader() -> None:
    (found,) = classify(
        [Text("log", (b"\x1b[31m\x1b]0;own\x07CUDA error: out of \x1b[0mmemory \xff\x00\x9b2J \xe2\x80\xae!\n",))]
    )
    text = found.evidence[0].text
    assert found.failure.name == "cuda_oom" and text.isprintable() and "\x1b" not in text and "own" not in text


def test_secrets_are_taken_out_also_those_that_a_cut_would_halve() -> None:
    token = "hf_" + "a1B2" * 9
    for padding in range(0, 2600, 37):
        line = f"{token} {'x' * padding} CUDA error: out of memory {'y' * padding} password=hunter2secret own-value-1"
        (found,) = of(line, secrets=["own-value-1"])
        text = found.evidence[0].text
        assert "a1B2" not in text and "hunter2" not in text and "own-value" not in text
        assert "out of memory" in text


def test_a_sign_split_between_two_pieces_is_found_all_the_same() -> None:
    log = (LOGS / "disk_full.log").read_bytes()
    pieces = (log[i : i + 7] for i in range(0, len(log), 7))
    assert classify([Text("log", pieces)])[0].failure.name == "disk_full"


def test_lines_keep_their_numbers_and_texts_their_names() -> None:
    found = classify([Text("log", (b"a\nb\n",)), Text("gpu", (b"GPU is lost",))])
    assert [(e.source, e.line) for e in found[0].evidence] == [("gpu", 1)]


def test_only_the_classes_asked_for_are_looked_for() -> None:
    log = Text("log", (b"CUDA error: out of memory\nGPU is lost\n",))
    assert [f.failure.name for f in classify([log], only={"host_fault"})] == ["host_fault"]


# The catalogue --------------------------------------------------------------------------------------------------------


def test_every_sign_can_be_seen_where_its_expression_looks() -> None:
    """The literal text of a sign is what makes its expression be tried, so the two must be able to stand together."""
    for failure in catalogue().classes.values():
        assert failure.remedy and failure.retry in ("same", "elsewhere", "changed")
        for sign in failure.signs:
            assert sign.has == sign.has.lower().strip() and len(sign.has) >= 3
    assert classifying._AROUND >= 400


def test_what_may_be_tried_again_unchanged_is_only_what_passes_or_stays_with_the_host() -> None:
    again = {name: c.retry for name, c in catalogue().classes.items() if c.retry != "changed"}
    assert again == {"network_stall": "same", "host_fault": "elsewhere"}
