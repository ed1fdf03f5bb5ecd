import pytest

from gpu_skills.clock import SystemClock
from gpu_skills.errors import ProtocolError, Unreachable
from gpu_skills.jobs import follow
from gpu_skills.jobs.follow import LineFolder, last_lines, safe_text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://evil\x1b\\link", "link"),
        ("\x1b[2J\x1b[Hgone?", "gone?"),
        ("a\x08b", "a\\x08b"),
        ("tab\tstays", "tab\tstays"),
        ("bell\x07", "bell\\x07"),
        ("\u202eabc", "\\u202eabc"),
        ("\x9b31mC1", "\\x9b31mC1"),
        ("half\x1b", "half"),
        ("\x1bPq#0\x1b\\sixel", "sixel"),
    ],
)
def test_control_sequences_of_the_machine_never_reach_the_terminal_raw(raw, shown):
    assert safe_text(raw) == shown


def test_a_line_rewritten_with_carriage_returns_is_its_last_state():
    folder = LineFolder()
    assert folder.feed(b"10%\r50%\r") == []
    assert folder.unfinished() == "50%"
    assert folder.feed(b"100%\r\nnext\n") == ["100%", "next"]


def test_lines_and_characters_cut_between_pieces_come_out_whole():
    folder = LineFolder()
    data = "grüße\nzweite Zeile\n".encode()
    lines = [line for i in range(len(data)) for line in folder.feed(data[i : i + 1])]
    assert lines == ["grüße", "zweite Zeile"]


def test_bytes_that_are_no_text_are_shown_as_replacements():
    assert LineFolder().feed(b"\xff\xfe\n") == ["\ufffd\ufffd"]


def test_an_endless_line_keeps_its_end_and_bounded_memory():
    folder = LineFolder(longest=1000)
    for _ in range(100):
        folder.feed(b"x" * 1000)
    folder.feed(b"the end")
    assert folder.finish()[0].endswith("the end")
    assert len(folder.finish()) == 0


def test_the_last_lines_are_counted_after_folding():
    assert last_lines(b"a\nb\r1\r2\nc", 2) == ["2", "c"]


class Clock(SystemClock):
    def __init__(self):
        self.t = 0.0

    def monotonic(self):
        return self.t

    def sleep(self, seconds):
        self.t += seconds


class FakeLink:
    """A machine whose log is `text` and whose connection breaks as the script says."""

    host = "box"

    def __init__(self, text: bytes, script: list):
        self.text, self.script, self.reopened = text, script, 0
        self.session = self

    def reopen(self):
        self.reopened += 1

    def call(self, verb, args, on_data=None, timeout_s=0):
        assert verb == "log"
        step = self.script.pop(0) if self.script else 5
        if isinstance(step, Exception):
            raise step
        data = self.text[args["offset"] : args["offset"] + step]
        on_data({}, data)
        done = args["offset"] + len(data) >= len(self.text)
        return {
            "offset": args["offset"],
            "next": args["offset"] + len(data),
            "gap_bytes": 0,
            "status": {"job": args["job"], "state": "succeeded" if done else "running"},
        }


def lost():
    return Unreachable(host="box", reason="cut")


def test_following_resumes_at_the_same_byte_after_a_cut_connection():
    text = b"0123456789" * 5
    link, said = FakeLink(text, [7, lost(), lost(), 3, lost(), 11]), []
    pieces = list(follow.follow(link, "p", "J-000001", clock=Clock(), say=said.append))
    assert b"".join(p.data for p in pieces) == text
    assert link.reopened == 3
    assert any("lost" in s for s in said) and any("again" in s for s in said)


def test_following_gives_up_after_ten_minutes_without_an_answer():
    clock = Clock()
    link = FakeLink(b"abc", [lost() for _ in range(1000)])
    with pytest.raises(Unreachable):
        list(follow.follow(link, "p", "J-000001", clock=clock, say=lambda line: None))
    assert 600 <= clock.t < 700


def test_an_answer_that_makes_no_sense_is_not_retried():
    link = FakeLink(b"abc", [ProtocolError(host="box", reason="nonsense")])
    with pytest.raises(ProtocolError):
        list(follow.follow(link, "p", "J-000001", clock=Clock(), say=lambda line: None))


class LyingLink:
    """A machine that answers the same to every question about a log."""

    host = "box"

    def __init__(self, data: bytes = b"", state: str = "succeeded", job: str = "J-000001", **answer: int):
        self.data, self.answer = data, {"offset": 0, "next": len(data), "gap_bytes": 0, **answer}
        self.status = {"job": job, "state": state}
        self.session, self.asked = self, 0

    def call(self, verb, args, on_data=None, timeout_s=0):
        self.asked += 1
        assert self.asked < 10, "it is asked for ever"
        if self.data:
            on_data({}, self.data)
        return {**self.answer, "status": self.status}


@pytest.mark.parametrize(
    "link",
    [
        LyingLink(b"abc", next=0),  # the same again and again
        LyingLink(b"abc", next=2),
        LyingLink(b"abc", next=1 << 52),
        LyingLink(b"abc"),  # from 0 again when it is asked from 3
        LyingLink(b"abc", offset=10, next=13, gap_bytes=0),  # something left out, and not said
        LyingLink(b"abc", job="J-000002"),
    ],
)
def test_a_log_whose_offsets_do_not_add_up_is_refused_and_not_read_for_ever(link):
    with pytest.raises(ProtocolError):
        list(follow.follow(link, "p", "J-000001", clock=Clock(), say=lambda line: None))


def test_a_gap_with_nothing_after_it_is_the_end_of_an_ended_job():
    link = LyingLink(offset=10, next=10, gap_bytes=10)
    assert [p.gap_bytes for p in follow.follow(link, "p", "J-000001", clock=Clock(), say=lambda line: None)] == [10]
