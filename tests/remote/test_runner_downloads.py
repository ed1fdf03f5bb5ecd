"""A download that stands still is noticed, and in setup started again over plain HTTP with the bytes it has."""

from __future__ import annotations

import textwrap

import pytest

from remote.runner_client import RunnerClient

starts_processes = pytest.mark.subprocess

# As the hub's client does it: an unfinished file held open; here its first way of transfer stops after 1,000 bytes.
DOWNLOADER = textwrap.dedent(
    """
    import os, sys, time
    target = os.path.join(os.environ["GPU_WORKSPACE"], "model.bin")
    plain = os.environ.get("HF_HUB_DISABLE_XET") == "1"
    with open(target + ".incomplete", "ab") as stream:
        print("plain" if plain else "xet", "from", stream.tell(), flush=True)
        stream.write(b"x" * (3000 - stream.tell() if plain else 1000))
        stream.flush()
        if not plain:
            time.sleep(60)
    os.replace(target + ".incomplete", target)
    """
)


def in_shell(program: str) -> str:
    return f"python3 - <<'END'\n{program}\nEND"


@starts_processes
def test_a_download_of_setup_that_stands_still_goes_on_over_plain_http(machine: RunnerClient) -> None:
    job = {"setup": in_shell(DOWNLOADER), "download_stall_s": 1, "limit_s": 20}
    ended = machine.run('wc -c <"$GPU_WORKSPACE/model.bin"; echo "xet off: $HF_HUB_DISABLE_XET"', **job)
    assert ended["state"] == "succeeded"
    log = machine.data("log", job="J-000001", tail_bytes=10_000).decode()
    assert "xet from 0\n" in log and "plain from 1000\n" in log and "3000\n" in log and "xet off: 1" in log
    stalled, restarted = machine.events()
    assert (stalled["event"], stalled["files"], stalled["bytes"]) == ("download_stalled", 1, 1000)
    assert stalled["stalled_s"] >= 1
    assert (restarted["event"], restarted["with_env"]) == ("download_restarted", "HF_HUB_DISABLE_XET")


@starts_processes
def test_the_command_itself_is_never_repeated(machine: RunnerClient) -> None:
    program = DOWNLOADER.replace("time.sleep(60)", "time.sleep(3)")
    ended = machine.run(in_shell(program), download_stall_s=1, limit_s=20)
    assert ended["state"] == "succeeded"
    assert [event["event"] for event in machine.events()] == ["download_stalled"]


@starts_processes
def test_what_grows_or_is_held_by_nobody_does_not_stand_still(machine: RunnerClient) -> None:
    grows = textwrap.dedent(
        """
        import os, time
        path = os.path.join(os.environ["GPU_WORKSPACE"], "slow.incomplete")
        open(path.replace("slow", "left from before"), "wb").close()
        with open(path, "wb", buffering=0) as stream:
            for _ in range(12):
                stream.write(b"x" * 10_000)
                time.sleep(0.25)
        """
    )
    ended = machine.run("true", setup=in_shell(grows), download_stall_s=2, limit_s=20)
    assert ended["state"] == "succeeded"
    assert machine.events() == []


@starts_processes
def test_a_second_standstill_is_told_and_left_to_the_timeout(machine: RunnerClient) -> None:
    stuck = DOWNLOADER.replace("if not plain:", "if True:")
    ended = machine.run("true", setup=in_shell(stuck), download_stall_s=1, timeout_s=6, limit_s=30)
    assert (ended["state"], ended["reason"]) == ("timeout", "timeout")
    events = [event["event"] for event in machine.events()]
    assert events == ["download_stalled", "download_restarted", "download_stalled"]
