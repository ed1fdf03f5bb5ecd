"""What a machine says about its jobs, on the way into records."""

from __future__ import annotations

import json

import pytest

from gpu_skills.jobs import observe
from gpu_skills.jobs.records import JobFolder
from gpu_skills.state import files, journal
from gpu_skills.state import project as projects

JOB = "J-000001"


class EventLink:
    """A machine whose events are `lines`."""

    host = "box"

    def __init__(self, lines: bytes):
        self.lines, self.session, self.asked = lines, self, []

    def call(self, verb, args, on_data=None, max_data_bytes=None):
        assert verb == "events" and max_data_bytes <= 8 << 20
        self.asked.append(args["offset"])
        rest = self.lines[args["offset"] :]
        if rest:
            on_data({}, rest)
        return {"next": args["offset"] + len(rest)}


@pytest.fixture
def project(tmp_path):
    made = projects.init(tmp_path)
    files.make_directory(JobFolder(made, JOB).path)
    return made


def recorded(project):
    return [record for _, _, record in journal.scan(JobFolder(project, JOB).events)]


def test_events_that_no_record_can_hold_are_left_out_and_the_others_kept(project):
    lines = [
        b'{"event":"first"}',
        b'{"event":NaN}',
        b'{"event":1e999}',
        b'{"event":"\\ud800"}',
        b'{"event":1,"event":2}',
        b"[" * 50_000,
        b"[1]",
        b"\xff",
        b'{"event":"a\\u000bb"}',
    ]
    observe.sync_events(project, EventLink(b"\n".join(lines) + b"\n"), JOB)
    assert recorded(project) == [{"event": "first"}, {"event": "a\x0bb"}]


def test_events_are_read_on_from_where_the_last_reading_ended(project):
    link = EventLink(b'{"event":1}\n')
    observe.sync_events(project, link, JOB)
    link.lines += b'{"event":2}\n'
    observe.sync_events(project, link, JOB)
    assert recorded(project) == [{"event": 1}, {"event": 2}] and link.asked == [0, 12]


@pytest.mark.parametrize("cursor", [{}, [], {"next": "12"}, {"next": -1}, {"next": True}, None])
def test_a_damaged_cursor_starts_again(project, cursor):
    (JobFolder(project, JOB).path / "events_cursor.json").write_text(json.dumps(cursor))
    link = EventLink(b'{"event":1}\n')
    observe.sync_events(project, link, JOB)
    assert link.asked == [0] and recorded(project) == [{"event": 1}]
