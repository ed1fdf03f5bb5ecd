"""The conversation with a runner: greeting, answers, errors, repeats, and machines that say something else."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pytest

from gpu_skills import doors
from gpu_skills.errors import (
    CommandFailed,
    GpuError,
    HashMismatch,
    JobNotFound,
    MachineDiskFull,
    MachineLacks,
    NotWritable,
    OutcomeUnknown,
    ProtocolError,
    TransferIncomplete,
    Unreachable,
)
from gpu_skills.remote.answers import JobExists, MachineBusy, SessionExpired
from gpu_skills.remote.session import Frame, Session
from gpu_skills.remote.transport import LocalTransport, login_environment
from remote.far_end import FAKE_RUNNER, HELLO, ScriptedTransport, data, greeting, ok, refused

DIGEST = hashlib.sha256(FAKE_RUNNER).hexdigest()


@pytest.fixture
def talk(fake_runner: Path):
    """`talk([chunk, …], …)`: a session with a machine of that script, one list per connection."""

    def start(*connections: list[bytes | None]) -> Session:
        return Session.open(ScriptedTransport(*connections), runner=fake_runner)

    return start


# on this machine, with the real runner ------------------------------------------------------------------------------


def test_the_runner_is_installed_once_and_then_found(root, allow_subprocess):
    session = Session.open(LocalTransport(), root=str(root))
    (installed,) = root.glob("runner-*.py")
    written = installed.stat()
    assert session.greeting.root == str(root)
    assert session.greeting.runner == hashlib.sha256(installed.read_bytes()).hexdigest()
    session.reopen()
    assert (installed.stat().st_ino, installed.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert session.call("have", {"project": "p", "tree": "0" * 64}) == {"known": False}
    session.close()


def test_a_runner_that_was_cut_short_is_replaced(root, allow_subprocess):
    Session.open(LocalTransport(), root=str(root)).close()
    (installed,) = root.glob("runner-*.py")
    whole = installed.read_bytes()
    installed.write_bytes(whole + b"\n")
    Session.open(LocalTransport(), root=str(root)).close()
    assert installed.read_bytes() == whole


@pytest.mark.parametrize("damage", [b"", b"import sys; sys.exit(3)\n", b"\0\0\0\0", b"print('hello')\n"])
def test_a_runner_that_does_not_start_is_replaced(root, allow_subprocess, damage):
    Session.open(LocalTransport(), root=str(root)).close()
    (installed,) = root.glob("runner-*.py")
    whole = installed.read_bytes()
    installed.write_bytes(damage)
    Session.open(LocalTransport(), root=str(root)).close()
    assert installed.read_bytes() == whole


@pytest.mark.parametrize("name", ["a b", "it's", '"q"', "$HOME", "`id`", "$(id)", ";", "é", "-n"])
def test_any_name_can_be_the_root(tmp_path, allow_subprocess, name):
    session = Session.open(LocalTransport(), root=str(tmp_path / name))
    assert session.greeting.root == str(tmp_path / name)
    session.close()


def test_a_root_below_the_home_is_found_by_the_machine_itself(home, allow_subprocess):
    session = Session.open(LocalTransport())
    assert session.greeting.root == str(home / ".gpu-skills")
    assert (home / ".gpu-skills").stat().st_mode & 0o777 == 0o700
    session.close()


def test_a_root_that_cannot_be_made_is_named(tmp_path, allow_subprocess):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match=r"this machine:.*file/root"):
        Session.open(LocalTransport(), root=str(tmp_path / "file" / "root"))


@pytest.mark.parametrize(("lacking", "what"), [("bash", "bash"), ("python3", "python3")])
def test_a_machine_without_python3_or_bash_is_named(tmp_path, allow_subprocess, lacking, what):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"sh", "bash", "python3"} - {lacking}:
        (programs / name).symlink_to(f"/bin/{name}")
    transport = LocalTransport({"PATH": str(programs), "HOME": str(tmp_path)})
    transport.python = "python3"
    with pytest.raises(MachineLacks, match=f"this machine has no {what}") as error:
        Session.open(transport, root=str(tmp_path / "root"))
    assert what in error.value.next_step


def test_an_older_python_is_named_with_the_one_that_is_needed(tmp_path, allow_subprocess):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "bash"):
        (programs / name).symlink_to(f"/bin/{name}")
    old = programs / "python3"
    old.write_text(
        "#!/bin/sh\n"
        'case "$*" in *"import hashlib"*) ;; *) exit 1;; esac\n'
        "exec /usr/bin/env -i /usr/bin/python3 -c 'import sys; sys.version_info = (3, 6); exec(sys.argv[1])' \"$3\"\n"
    )
    old.chmod(0o755)
    transport = LocalTransport({"PATH": str(programs), "HOME": str(tmp_path)})
    transport.python = "python3"
    with pytest.raises(MachineLacks, match=r"3\.8 or later"):
        Session.open(transport, root=str(tmp_path / "root"))


def test_a_job_of_this_machine_does_not_see_what_this_process_holds():
    seen = login_environment(
        {"PATH": "/bin", "HOME": "/h", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0", "PIP_INDEX_URL": "https://i"}
        | {"VAST_API_KEY": "v", "RUNPOD_API_KEY": "r", "AWS_SECRET_ACCESS_KEY": "a", "GPU_MODE": "audit"}
        | {"CUDA_API_KEY": "c", "ANTHROPIC_API_KEY": "k", "SSH_AUTH_SOCK": "/s"}
    )
    assert seen == {
        "PATH": "/bin",
        "HOME": "/h",
        "LC_ALL": "C",
        "CUDA_VISIBLE_DEVICES": "0",
        "PIP_INDEX_URL": "https://i",
    }


def test_opening_and_calling_are_crossings_of_the_remote_door(root, allow_subprocess):
    seen: list[tuple[str, str]] = []
    doors.watch(lambda name, when: seen.append((name, when)))
    try:
        session = Session.open(LocalTransport(), root=str(root))
        session.call("have", {"project": "p", "tree": "0" * 64})
    finally:
        doors.watch(None)
    session.close()
    assert seen == [("remote.execute", "before"), ("remote.execute", "after")] * 2


# what a machine may say before its greeting -------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [b"Welcome!\nLast login: never\n", b"no newline at the end ", b"\x00\xff\x1b[31m\n"])
def test_what_a_login_shell_prints_is_skipped(talk, noise):
    session = talk([noise, HELLO, ok({"known": True})])
    assert session.call("have")["known"] is True


def test_a_greeting_in_pieces_is_put_together(talk):
    talk([HELLO[at : at + 3] for at in range(0, len(HELLO), 3)])


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ([b"x" * 200_000], ProtocolError, "more than 64 KiB before"),
        ([b"motd\n" * 20_000], ProtocolError, "more than 64 KiB before"),
        ([b"GPU-SKILLS-RUNNER " + b"{" * 200_000], ProtocolError, "more than 64 KiB"),
        ([b"GPU-SKILLS-RUNNER nonsense\n"], ProtocolError, "not JSON"),
        ([b"GPU-SKILLS-RUNNER []\n"], ProtocolError, "list in place of an object"),
        ([b"GPU-SKILLS-RUNNER " + b"[" * 50_000 + b"\n"], ProtocolError, "nested too deeply"),
        ([greeting(DIGEST, protocol=2)], ProtocolError, "protocol 2"),
        ([greeting(DIGEST, root="relative")], ProtocolError, "root is not absolute"),
        ([greeting(DIGEST, root="/a\0b")], ProtocolError, "without runner"),
        ([greeting(DIGEST, boot_id=None)], ProtocolError, "without runner"),
        ([None], Unreachable, "no answer for 30 s"),
        ([], Unreachable, "it closed"),
    ],
)
def test_a_machine_that_does_not_greet_as_agreed_is_an_error_in_one_line(talk, said, error, words):
    with pytest.raises(error, match=words) as caught:
        talk(said)
    assert caught.value.message.isprintable()


def test_a_machine_that_never_keeps_the_runner_is_given_up(talk):
    other = greeting("0" * 64)
    with pytest.raises(ProtocolError, match="did not keep the runner"):
        talk([other], [other])


# hostile answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"hello\n", "not JSON"),
        (b"[]\n", "list in place of an object"),
        (b"{" * 70_000 + b"\n", "more than 64 KiB"),
        (b'{"a":' * 9_000 + b"\n", "nested too deeply|not JSON"),
        (b'{"ok":true,"ok":false}\n', "not JSON"),
        (b'{"ok":true,"result":NaN}\n', "not JSON"),
        (b'{"ok":true,"result":{"known":true,"x":1e999}}\n', "not JSON"),
        (b'{"ok":true,"result":{"known":true,"x":"\\uD83D"}}\n', "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        (b'{"n":-1}\n', "a frame of -1 bytes"),
        (b'{"n":99999999999}\n', "a frame of 99999999999 bytes"),
        (b'{"n":true}\n', "a frame of True bytes"),
        (b'{"n":1e3}\n', "a frame of 1000.0 bytes"),
        (b'{"n":' + b"9" * 5000 + b"}\n", "not JSON"),
        (b'{"n":0}\n', "data nobody asked for"),
        (b"{}\n", "neither done nor refused"),
        (b'{"ok":1,"result":{}}\n', "neither done nor refused"),
        (b'{"ok":true,"result":[]}\n', "no object"),
        (b'{"ok":true,"result":{}}\n', "no known"),
        (b'{"ok":true,"result":{"known":"yes"}}\n', "known of have is 'yes'"),
    ],
)
def test_an_answer_that_is_none_is_a_protocol_error_and_ends_the_connection(talk, answer, words):
    session = talk([HELLO, answer])
    channel = session.transport.channels[0]
    with pytest.raises(ProtocolError, match=words) as caught:
        session.call("have")
    assert "far.example" in caught.value.message
    assert caught.value.message.isprintable()
    assert channel.is_closed


def test_both_halves_of_a_pair_are_text(talk):
    session = talk([HELLO, b'{"ok":true,"result":{"known":true,"x":"\\ud83d\\ude00"}}\n'])
    assert session.call("have")["x"] == "\N{GRINNING FACE}"


def test_data_without_end_is_cut_off_at_its_limit(talk):
    session = talk(itertools.chain([HELLO], itertools.repeat(data(b"x" * 100_000))))
    with pytest.raises(ProtocolError, match="more than 1000000 bytes"):
        session.call("log", on_data=lambda header, data: None, max_data_bytes=1_000_000)


def test_empty_frames_without_end_are_cut_off_as_well(talk):
    session = talk(itertools.chain([HELLO], itertools.repeat(data(b"") * 1000)))
    with pytest.raises(ProtocolError, match="more than 1000000 bytes"):
        session.call("log", on_data=lambda header, data: None, max_data_bytes=1_000_000)


def test_a_stream_that_drips_is_not_waited_for(talk, monkeypatch):
    from gpu_skills.remote import session as module

    now = itertools.count(0, 1)  # every look at the clock is a second later
    frames, got = itertools.repeat(data(b"x", i=0, last=False)), []
    session = talk(itertools.chain([HELLO], itertools.islice(frames, 10_000)))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with pytest.raises(Unreachable, match="too slowly"):
        session.call("get", on_data=lambda header, payload: got.append(payload), timeout_s=60, max_data_bytes=None)
    assert 100 < len(got) < 10_000


def test_a_long_stream_at_a_slow_but_honest_pace_is_read_to_its_end(talk, monkeypatch):
    from gpu_skills.remote import session as module

    now = itertools.count(0, 1)
    frames = [data(b"x" * 20_000, i=0, last=False)] * 2_000
    session = talk([HELLO, *frames, ok({})])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    session.call("get", on_data=lambda header, payload: None, timeout_s=60, max_data_bytes=None)


def test_a_header_that_drips_is_silence_in_disguise(talk, monkeypatch):
    from gpu_skills.remote import session as module

    now = itertools.count(0, 10)  # every look at the clock is ten seconds later
    session = talk(itertools.chain([HELLO], itertools.repeat(b" ")))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with pytest.raises(Unreachable, match="too slowly"):
        session.call("put", body=iter(()), timeout_s=60)


@pytest.mark.parametrize(
    ("verb", "result", "field"),
    [
        ("log", {"offset": -1, "next": 0, "gap_bytes": 0, "total": 0, "status": {}}, "offset"),
        ("log", {"offset": 0, "next": 1 << 60, "gap_bytes": 0, "total": 0, "status": {}}, "next"),
        ("status", {"jobs": [{"job": "J-000001"}]}, "jobs"),
        ("status", {"jobs": "none"}, "jobs"),
        ("manifest", {"files": 1, "bytes": 1.5, "final": True, "skipped": []}, "bytes"),
        ("admit", {"admitted": 0, "failed": [{}]}, "failed"),
        ("seal", {"known": False}, "known"),
        ("probe", {"python": 3, "bash": True, "rsync": None, "gpus": []}, "python"),
        ("incoming", {"path": None}, "path"),
    ],
)
def test_results_of_the_wrong_type_never_reach_the_caller(talk, verb, result, field):
    session = talk([HELLO, ok(result)])
    with pytest.raises(ProtocolError, match=field):
        session.call(verb)


@pytest.mark.parametrize("duration_s", [-1, 1e12, 1 << 53, "1", True])
def test_a_duration_that_cannot_be_is_not_booked(talk, duration_s):
    texts = dict.fromkeys(("nonce", "phase", "reason", "message", "started_at", "ended_at"))
    numbers = dict.fromkeys(("exit_code", "started_epoch_s", "log_bytes", "progress", "outputs"))
    status = {"job": "J-000001", "state": "succeeded", **texts, **numbers}
    session = talk(
        [HELLO, ok({"jobs": [{**status, "duration_s": 5}]}), ok({"jobs": [{**status, "duration_s": duration_s}]})]
    )
    assert session.call("status")["jobs"][0]["duration_s"] == 5
    with pytest.raises(ProtocolError, match="jobs"):
        session.call("status")


# errors of the machine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "details", "error"),
    [
        ("bad_request", {}, ProtocolError),
        ("job_unknown", {}, JobNotFound),
        ("job_exists", {}, JobExists),
        ("session_expired", {}, SessionExpired),
        ("tree_unknown", {}, TransferIncomplete),
        ("blobs_missing", {}, TransferIncomplete),
        ("hash_mismatch", {"sha256": "aa", "found": "bb"}, HashMismatch),
        ("disk_full", {}, MachineDiskFull),
        ("not_writable", {"path": "/r"}, NotWritable),
        ("busy", {}, MachineBusy),
        ("failed", {}, CommandFailed),
        ("unheard_of", {}, CommandFailed),
    ],
)
def test_each_error_of_the_machine_is_one_of_ours_and_the_conversation_goes_on(talk, code, details, error):
    session = talk([HELLO, refused(code, "because\x1b[31m", **details), ok({"known": True})])
    with pytest.raises(error) as caught:
        session.call("cancel", {"job": "J-000001"})
    assert caught.value.message.isprintable()
    assert session.call("have") == {"known": True}
    assert len(session.transport.channels) == 1


@pytest.mark.parametrize("error", [None, [], {}, {"code": 5}])
def test_an_error_that_does_not_say_which_is_a_protocol_error(talk, error):
    session = talk([HELLO, json.dumps({"ok": False, "error": error}).encode() + b"\n"])
    with pytest.raises(ProtocolError, match="failed without saying how"):
        session.call("have")


def test_details_of_the_wrong_type_do_no_harm(talk):
    answer = {"ok": False, "error": {"code": "hash_mismatch", "message": 5, "details": ["x"]}}
    session = talk([HELLO, json.dumps(answer).encode() + b"\n"])
    with pytest.raises(HashMismatch):
        session.call("put")


# broken connections -------------------------------------------------------------------------------------------------


def test_a_repeatable_question_is_asked_again_over_a_new_connection(talk):
    session = talk([HELLO], [HELLO, ok({"known": True})])
    assert session.call("have") == {"known": True}
    assert b'"verb":"have"' in session.transport.channels[1].heard


def test_a_question_is_not_asked_for_ever(talk):
    session = talk([HELLO], [HELLO], [HELLO, ok({"known": True})])
    with pytest.raises(Unreachable):
        session.call("have")
    assert session.call("have") == {"known": True}  # the next call connects again


def test_silence_is_asked_again_too(talk):
    session = talk([HELLO, None], [HELLO, ok({"known": True})])
    assert session.call("have") == {"known": True}


def test_what_may_have_been_done_is_not_repeated(talk):
    session = talk([HELLO], [HELLO, ok({})])
    with pytest.raises(OutcomeUnknown, match=r"forget was sent to far\.example"):
        session.call("forget", {"job": "J-000001"})
    assert len(session.transport.channels) == 1


def test_data_that_was_handed_over_is_not_handed_over_twice(talk):
    session = talk([HELLO, data(b"some")], [HELLO, data(b"some"), ok({"next": 4})])
    chunks: list[bytes] = []
    with pytest.raises(Unreachable):
        session.call("events", on_data=lambda header, data: chunks.append(data))
    assert chunks == [b"some"]


def test_a_body_that_cannot_be_read_twice_is_not_sent_twice(talk):
    session = talk([HELLO], [HELLO, ok({"blobs": 0, "bytes": 0})])
    with pytest.raises(Unreachable):
        session.call("put", body=iter([Frame("", b"x")]))
    assert len(session.transport.channels) == 1


def test_what_the_reader_of_data_raises_ends_the_connection_but_not_the_session(talk):
    class Enough(Exception):
        pass

    def stop(header: dict, data: bytes) -> None:
        raise Enough

    session = talk([HELLO, data(b"x"), data(b"y")], [HELLO, ok({"known": True})])
    with pytest.raises(Enough):
        session.call("log", on_data=stop)
    assert session.call("have") == {"known": True}


def test_a_request_is_what_the_protocol_says(talk):
    session = talk([HELLO, ok({"blobs": 1, "bytes": 2})])
    session.call("put", {"project": "p"}, body=[Frame('"offset":0', b"ab"), Frame("", b"")])
    assert bytes(session.transport.channels[0].heard) == (
        b'{"verb":"put","args":{"project":"p"}}\n{"offset":0,"n":2}\nab{"n":0}\n{"end":true}\n'
    )


def test_a_refusal_during_a_long_body_stops_the_sending(root, allow_subprocess):
    """The machine refuses the first frame; gigabytes behind it would be read there only to be thrown away."""
    session = Session.open(LocalTransport(), root=str(root))
    sent = 0

    def frames():
        nonlocal sent
        for _ in range(2000):
            sent += 1
            yield Frame(f'"offset":0,"sha256":"{"0" * 64}","size":{1 << 20}', b"x" * (1 << 20))

    with pytest.raises(HashMismatch):
        session.call("put", {"project": "p"}, body=frames())
    assert sent < 200
    assert session.call("have", {"project": "p", "tree": "0" * 64}) == {"known": False}
    session.close()


def test_a_request_too_large_for_a_header_is_not_sent(talk):
    session = talk([HELLO])
    with pytest.raises(GpuError, match="64 KiB fit"):
        session.call("start", {"env": {"A": "x" * 70_000}})
