from __future__ import annotations

import itertools
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_skills.remote import runner
from remote.runner_client import RunnerClient, eventually

MIB = 1 << 20
starts_processes = pytest.mark.subprocess


@starts_processes
def test_a_reader_that_comes_back_goes_on_at_the_same_byte(root: Path) -> None:
    command = "for i in $(seq 200); do echo line $i; sleep 0.005; done"
    seen, offset = b"", 0
    with RunnerClient(root) as machine:
        machine.start(command)
    while True:  # a new connection for each piece
        with RunnerClient(root) as machine:
            result, frames = machine.ask("log", job="J-000001", offset=offset, max_bytes=700, wait_s=1)
        data = b"".join(data for _, data in frames)
        assert (result["offset"], result["gap_bytes"], result["next"]) == (offset, 0, offset + len(data))
        seen, offset = seen + data, result["next"]
        if not data and result["status"]["state"] != "running":
            break
    assert seen == b"".join(b"line %d\n" % i for i in range(1, 201))


@starts_processes
def test_waiting_for_log_ends_with_the_first_output_and_with_the_job(machine: RunnerClient) -> None:
    machine.start("sleep 0.7; echo hello; sleep 0.7")
    began = time.monotonic()
    result, frames = machine.ask("log", job="J-000001", offset=0, wait_s=10)
    assert [data for _, data in frames] == [b"hello\n"]
    result, frames = machine.ask("log", job="J-000001", offset=result["next"], wait_s=10)
    assert (frames, result["status"]["state"]) == ([], "succeeded")
    assert 1.3 < time.monotonic() - began < 8


@starts_processes
def test_the_tail_is_the_end_of_the_log(machine: RunnerClient) -> None:
    machine.run("seq 1000")
    result, frames = machine.ask("log", job="J-000001", tail_bytes=10)
    assert frames[0][1] == b"\n999\n1000\n"
    assert (result["offset"], result["total"]) == (3883, 3893)
    assert machine.ask("log", job="J-000001", tail_bytes=10**9)[0]["offset"] == 0


@starts_processes
def test_a_long_log_keeps_its_head_and_its_tail_and_counts_every_byte(machine: RunnerClient) -> None:
    machine.run("seq 1000000; echo the last error", log_cap_bytes=MIB)
    everything = b"".join(b"%d\n" % i for i in range(1, 1_000_001)) + b"the last error\n"
    total = machine.status()["log_bytes"]
    assert total == len(everything)
    offset, kept = 0, {}
    while offset < total:
        result, frames = machine.ask("log", job="J-000001", offset=offset)
        assert result["offset"] - result["gap_bytes"] == offset
        kept[result["offset"]] = b"".join(data for _, data in frames)
        offset = result["next"]
    assert next(iter(kept)) == 0
    assert len(kept) == 2, "one gap"
    for offset, data in kept.items():
        assert everything[offset : offset + len(data)] == data
    head, tail = kept.values()
    assert len(head) == MIB // 9
    assert len(tail) >= MIB * 8 // 9
    on_disk = sum(path.stat().st_size for path in (machine.folder / "jobs/J-000001/log").iterdir())
    assert on_disk < 1.2 * MIB
    assert [event["event"] for event in machine.events()] == ["log_capped"]


@starts_processes
@pytest.mark.slow
def test_a_flood_of_log_neither_fills_memory_nor_disk_nor_holds_up_the_status(machine: RunnerClient) -> None:
    program = (
        "import os, time\n"
        "block = b'x' * 99 + b'\\n'\n"
        "block *= 10000\n"
        "began = time.monotonic()\n"
        "for n in range(1, 801):\n"  # 800 MB at 100 MB/s
        "    os.write(1, block)\n"
        "    time.sleep(max(0, began + n / 100 - time.monotonic()))\n"
    )
    tree = machine.upload({"flood.py": program.encode()})
    machine.start("python3 flood.py; echo the last error >&2", tree=tree)
    supervisor = machine.supervisor_pid()
    slowest_s = peak_kib = 0.0
    while True:
        began = time.monotonic()
        status = machine.status()
        slowest_s = max(slowest_s, time.monotonic() - began)
        if status["state"] != "running":
            break
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{supervisor}/status").read_text())
        peak_kib = max(peak_kib, int(found.group(1)) if found else 0)
        on_disk = sum(path.stat().st_size for path in (machine.folder / "jobs/J-000001/log").iterdir() if path.exists())
        assert on_disk <= 42 * MIB
        time.sleep(0.2)
    assert status["state"] == "succeeded"
    assert status["log_bytes"] == 800_000_000 + len("the last error\n")
    assert slowest_s < 1
    assert 0 < peak_kib < 60_000
    tail = machine.data("log", job="J-000001", tail_bytes=100)
    assert tail.endswith(b"\nthe last error\n")


@starts_processes
def test_progress_lines_are_counted_with_their_rate(machine: RunnerClient) -> None:
    command = "for i in 1 2 3 4; do echo progress rows=$((i*100)); sleep 0.7; done"
    command += "; echo ' progress rows=9999'; printf 'progress rows=500'"
    machine.start(command, progress={"unit": "rows", "stall_s": None, "on_stall": None})
    running = eventually(lambda: (s := machine.status())["progress"] and s["progress"]["rate_per_s"] and s)
    assert running["progress"]["unit"] == "rows"
    assert 40 < running["progress"]["rate_per_s"] < 400
    ended = machine.wait()
    assert ended["progress"]["value"] == 500


@starts_processes
def test_no_progress_is_an_event_once_and_again_after_it_moved(machine: RunnerClient) -> None:
    command = "echo progress rows=10; sleep 2.4; echo progress rows=10; echo progress other=11; sleep 0.5"
    command += "; echo progress rows=11; sleep 2.6"
    ended = machine.run(command, progress={"unit": "rows", "stall_s": 1, "on_stall": "event"})
    assert ended["state"] == "succeeded"
    events = machine.events()
    assert [(e["event"], e["unit"], e["value"]) for e in events] == [
        ("no_progress", "rows", 10),
        ("no_progress", "rows", 11),
    ]
    assert events[0]["stalled_s"] >= 1


@starts_processes
def test_no_progress_cancels_when_the_job_asked_for_it(machine: RunnerClient) -> None:
    ended = machine.run("sleep 60", progress={"unit": "rows", "stall_s": 1, "on_stall": "cancel"}, limit_s=10)
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("cancelled", "no_progress", 130)
    assert [event["event"] for event in machine.events()] == ["no_progress"]


def feed_in_pieces(sink, data: bytes, cuts: list[int]) -> list:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [sink(data[first:last]) for first, last in itertools.pairwise(edges)]


PIECES_OF_PROGRESS = [
    *(b"progress rows=1\n", b"progress rows=25\r", b"progress", b" rows=7\n"),
    *(b"progress rows=3", b"\n", b"text", b"progress cols=9\n"),
]


@given(st.lists(st.sampled_from(PIECES_OF_PROGRESS), max_size=20), st.lists(st.integers(0, 300), max_size=12))
@settings(max_examples=300, deadline=None)
def test_progress_lines_are_found_wherever_the_reads_cut_them(words: list[bytes], cuts: list[int]) -> None:
    text = b"".join(words) + b"\n"
    lines = [line for line in re.split(rb"[\r\n]", text) if re.match(rb"progress rows=\d+(\s|$)", line)]
    expected = float(re.match(rb"progress rows=(\d+)", lines[-1]).group(1)) if lines else None
    progress = runner.Progress("rows")
    feed_in_pieces(progress.feed, text, cuts)
    assert progress.value == expected


def test_a_flood_without_line_ends_costs_no_memory() -> None:
    progress = runner.Progress("rows")
    for _ in range(20):
        progress.feed(b"progress " * 100_000)
    assert len(progress.rest) < 300
