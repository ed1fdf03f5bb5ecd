from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from remote.runner_client import RunnerClient, eventually, is_alive

pytestmark = pytest.mark.subprocess
MIB = 1 << 20


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def get(machine: RunnerClient, *wanted: dict) -> dict[int, tuple[bytes, str | None]]:
    """Content and error of each file asked for, by its number."""
    body = "".join(json.dumps({"offset": 0, **entry}) + "\n" for entry in wanted)
    _, frames = machine.ask("get", [({}, body.encode())], job="J-000001")
    found: dict[int, tuple[bytes, str | None]] = {}
    finished = set()
    for header, data in frames:
        assert header["i"] not in finished
        before, _ = found.get(header["i"], (b"", None))
        found[header["i"]] = (before + data, header.get("error"))
        if header["last"]:
            finished.add(header["i"])
    assert finished == {entry["i"] for entry in wanted}
    return found


ODD_OUTPUTS = r"""
cd "$GPU_OUTPUT_DIR"
echo model > model.bin; chmod 640 model.bin
mkdir -p sub/empty deep/er; echo x > deep/er/f
echo n > "$(printf 'new\nline')"; echo b > "$(printf 'bad\377name')"
ln -s model.bin inside; ln -s ../model.bin sub/up; ln -s "$PWD/model.bin" absolute
ln -s /etc/passwd outside; ln -s ../../job.json sneaky; ln -s nowhere broken; ln -s deep folder; ln -s loop loop
mkfifo pipe; python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('sock')"
"""


def test_the_manifest_lists_files_and_links_that_stay_and_names_what_it_leaves_out(machine: RunnerClient) -> None:
    assert machine.run(ODD_OUTPUTS)["state"] == "succeeded"
    result, frames = machine.ask("manifest", job="J-000001")
    lines = b"".join(data for _, data in frames).splitlines()
    model = {"mode": 0o640, "sha256": sha256(b"model\n"), "size": 6}
    entries = [json.loads(line) for line in lines]
    assert {entry["path"]: {k: v for k, v in entry.items() if k != "path"} for entry in entries} == {
        "model.bin": model,
        "inside": model,
        "absolute": model,
        "sub/up": model,
        "sub/empty": {"dir": True},
        "deep/er/f": {"mode": 0o644, "sha256": sha256(b"x\n"), "size": 2},
        "new\nline": {"mode": 0o644, "sha256": sha256(b"n\n"), "size": 2},
        "bad�name": {
            "mode": 0o644,
            "path_b64": base64.b64encode(b"bad\xffname").decode(),
            "sha256": sha256(b"b\n"),
            "size": 2,
        },
    }
    paths = [base64.b64decode(e["path_b64"]) if "path_b64" in e else e["path"].encode() for e in entries]
    assert paths == sorted(paths)
    assert lines == [json.dumps(e, sort_keys=True, separators=(",", ":")).encode() for e in entries]
    assert {skip["path"]: skip["why"] for skip in result["skipped"]} == {
        "outside": "link leaves the outputs",
        "sneaky": "link leaves the outputs",
        "broken": "broken link",
        "loop": "broken link",
        "folder": "link to a directory",
        "pipe": "fifo",
        "sock": "socket",
    }
    assert (result["files"], result["bytes"], result["final"]) == (7, 30, True)


def test_get_sends_listed_files_from_an_offset_and_nothing_from_outside(machine: RunnerClient) -> None:
    machine.run(ODD_OUTPUTS)
    found = get(
        machine,
        {"i": 0, "path": "model.bin"},
        {"i": 1, "path": "model.bin", "offset": 3},
        {"i": 2, "path": "model.bin", "offset": 99},
        {"i": 3, "path": "sub/up"},
        {"i": 4, "path": "x", "path_b64": base64.b64encode(b"bad\xffname").decode()},
        {"i": 5, "path": "outside"},
        {"i": 6, "path": "sneaky"},
        {"i": 7, "path": "pipe"},
        {"i": 8, "path": "gone"},
        {"i": 9, "path": "deep"},
        {"i": 10, "path": "folder/er/f"},
        {"i": 11, "path": "loop"},
    )
    nothing = (b"", "vanished")
    assert found == {
        0: (b"model\n", None),
        1: (b"el\n", None),
        2: (b"", None),
        3: (b"model\n", None),
        4: (b"b\n", None),
        **dict.fromkeys([5, 6, 7, 8, 9, 11], nothing),
        10: (b"x\n", None),
    }


def test_a_large_file_comes_in_frames_of_4_mib_at_most(machine: RunnerClient) -> None:
    machine.run("head -c 9000000 /dev/urandom > $GPU_OUTPUT_DIR/big")
    data, error = get(machine, {"i": 5, "path": "big"})[5]
    assert error is None
    assert sha256(data) == machine.manifest()[1]["big"]["sha256"]


@pytest.mark.parametrize("path", ["../job.json", "/etc/passwd", "a/../../job.json", "", "a\0b"])
def test_get_and_stage_refuse_paths_that_leave_the_outputs(machine: RunnerClient, path: str) -> None:
    from remote.runner_client import Refused

    machine.run("true")
    body = json.dumps({"i": 0, "path": path, "offset": 0}).encode() + b"\n"
    for verb in ("get", "stage"):
        with pytest.raises(Refused) as refused:
            machine.ask(verb, [({}, body)], job="J-000001")
        assert refused.value.code == "bad_request"


def test_stage_links_the_wanted_files_by_number_and_forgets_the_last_ones(machine: RunnerClient) -> None:
    machine.run(ODD_OUTPUTS)
    body = [{"i": 0, "path": "model.bin"}, {"i": 7, "path": "new\nline"}, {"i": 8, "path": "outside"}]
    for wanted in (body, body[:1]):
        data = "".join(json.dumps(entry) + "\n" for entry in wanted).encode()
        folder = Path(machine.ask("stage", [({}, data)], job="J-000001")[0]["path"])
        expected = {"0": b"model\n", "7": b"n\n"}
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            name: content for name, content in expected.items() if int(name) in [e["i"] for e in wanted]
        }


def test_an_output_directory_that_became_a_link_is_not_followed(machine: RunnerClient) -> None:
    machine.run("rm -r $GPU_OUTPUT_DIR; ln -s /etc $GPU_OUTPUT_DIR")
    result, entries = machine.manifest()
    assert entries == {}
    assert result["skipped"] == [{"path": ".", "why": "the output directory was replaced by a link"}]
    assert get(machine, {"i": 0, "path": "passwd"}) == {0: (b"", "vanished")}


def test_outputs_can_be_listed_while_the_job_runs_and_unchanged_ones_are_not_read_again(machine: RunnerClient) -> None:
    machine.start(
        "cd $GPU_OUTPUT_DIR; echo one > a; echo two > b; touch -d '1 hour ago' a b; sleep 3; echo go; sleep 60"
    )
    eventually(lambda: machine.log() == b"go\n")
    result, first = machine.manifest()
    assert (result["final"], sorted(first)) == (False, ["a", "b"])
    outputs = machine.folder / "jobs/J-000001/outputs"
    hashes = json.loads((machine.folder / "jobs/J-000001/hashes.json").read_text())
    hashes["a"][4] = "f" * 64  # what is remembered is used as it is ...
    (machine.folder / "jobs/J-000001/hashes.json").write_text(json.dumps(hashes))
    (outputs / "b").write_text("TWO\n")  # ... and not for what has changed
    second = machine.manifest()[1]
    assert second["a"]["sha256"] == "f" * 64
    assert second["b"]["sha256"] == sha256(b"TWO\n")


def test_a_file_that_keeps_changing_is_left_out_while_the_job_runs_and_listed_at_its_end(machine: RunnerClient) -> None:
    program = (
        "import os, time\n"
        "file = open(os.environ['GPU_OUTPUT_DIR'] + '/busy', 'wb', buffering=0)\n"
        "file.write(bytes(30_000_000)); print('here', flush=True)\n"
        "while True: file.write(b'x'); time.sleep(0.001)\n"
    )
    tree = machine.upload({"p.py": program.encode()})
    machine.start("python3 p.py", tree=tree)
    eventually(lambda: machine.log() == b"here\n")
    result, entries = machine.manifest()
    assert entries == {}
    assert result["skipped"] == [{"path": "busy", "why": "changing"}]
    machine.call("cancel", job="J-000001", wait_s=10)
    result, entries = machine.manifest()
    content = (machine.folder / "jobs/J-000001/outputs/busy").read_bytes()
    assert (result["final"], entries["busy"]["sha256"]) == (True, sha256(content))


def test_more_left_out_names_than_fit_into_a_header_are_counted(machine: RunnerClient) -> None:
    machine.run("cd $GPU_OUTPUT_DIR; for i in $(seq 600); do ln -s /etc/passwd $(printf 'link-%0150d' $i); done")
    result, _ = machine.manifest()
    assert 0 < len(result["skipped"]) < 600
    assert len(result["skipped"]) + result["skipped_left_out"] == 600


def test_the_manifest_is_there_before_the_exit_record_and_is_made_again_when_it_is_not(machine: RunnerClient) -> None:
    machine.start("echo x > $GPU_OUTPUT_DIR/x; sleep 60")
    eventually(lambda: (machine.folder / "jobs/J-000001/outputs/x").exists())
    os.kill(pid := machine.supervisor_pid(), signal.SIGKILL)
    eventually(lambda: not is_alive(pid))
    assert machine.wait()["state"] == "lost"
    job = machine.folder / "jobs/J-000001"
    assert (job / "manifest.jsonl").stat().st_mtime_ns <= (job / "exit.json").stat().st_mtime_ns
    (job / "manifest.jsonl").unlink()
    result, entries = machine.manifest()
    assert (result["final"], list(entries)) == (True, ["x"])


def test_ten_thousand_unchanged_outputs_are_listed_without_reading_them(machine: RunnerClient) -> None:
    machine.start("cd $GPU_OUTPUT_DIR; seq 10000 | split -l 1 -a 4 - f; echo made; sleep 60", limit_s=60)
    eventually(lambda: machine.log() == b"made\n", limit_s=60)
    time.sleep(2.1)  # younger files are read again to be sure
    assert machine.manifest()[0]["files"] == 10_000
    began = time.monotonic()
    assert machine.manifest()[0]["files"] == 10_000
    assert time.monotonic() - began < 2
