"""What the journal says of intents, and that it is read once, however often it is asked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fake_clock import FakeClock
from gpu_skills.lifecycle import intents
from gpu_skills.state import journal
from gpu_skills.state import project as projects
from gpu_skills.state.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return projects.init(tmp_path)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each line that was parsed."""
    lines: list[int] = []
    parse = journal.parse_line

    def counting(line: bytes, number: int):
        lines.append(number)
        return parse(line, number)

    monkeypatch.setattr(journal, "parse_line", counting)
    return lines


def many(project: Project, number: int) -> None:
    clock = FakeClock()
    for n in range(number):
        intents.begin(project, clock, "create", f"j{n:016x}", machine_id=f"m_{n}")
        intents.observe(project, clock, "present", machine_id=f"m_{n}")


def anew(project: Project):
    """As a process reads it that has not read it before."""
    intents._known.clear()
    return intents.read(project), intents.observations(project)


def test_each_line_is_parsed_once_in_a_process_however_often_it_is_asked_and_appended_to(project, parsed):
    many(project, 20)
    for n in range(30):
        assert len(intents.read(project)) == 20
        assert len(intents.observations(project, "present")) == 20
        intents.close(project, FakeClock(), f"j{n % 20:016x}", "done")
    assert intents.read(project)[f"j{0:016x}"].result == "done"
    assert len(parsed) == 2 * 20 + 30


def test_what_was_asked_for_is_the_askers_own(project):
    many(project, 1)
    intents.read(project).clear()
    intents.observations(project).clear()
    assert len(intents.read(project)) == 1 and len(intents.observations(project)) == 1


def rewritten(path: Path) -> None:
    """Another file of that name."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"m_1", b"m_7"))
    os.replace(other, path)


def in_place(path: Path) -> None:
    """The same file, as long as before."""
    path.write_bytes(path.read_bytes().replace(b"m_1", b"m_7"))
    os.utime(path, ns=(1, 1))


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes().splitlines(True)[0])


def longer(path: Path) -> None:
    """Other lines, and one more than were there."""
    text = path.read_bytes().replace(b"m_2", b"m_8")
    path.write_bytes(text + text.splitlines(True)[-1])


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [rewritten, in_place, shorter, longer, gone])
def test_a_journal_that_somebody_changed_is_read_anew(project, change):
    many(project, 3)
    before = intents.read(project), intents.observations(project)
    change(project.path("journal.jsonl"))
    now = intents.read(project), intents.observations(project)
    assert now == anew(project) and now != before


@pytest.mark.parametrize(
    "end", [b'{"kind": "intent", "ts": "2026', b'{"kind":"intent","ts":"","intent":"x","action":"stop"}']
)
def test_a_line_without_its_end_is_read_as_it_is_and_again_when_it_has_one(project, end):
    many(project, 2)
    intents.read(project)
    path = project.path("journal.jsonl")
    with path.open("ab") as stream:
        stream.write(end)
    now = intents.read(project)
    assert now == anew(project)[0] and len(now) == (3 if end.endswith(b"}") else 2)
    intents.begin(project, FakeClock(), "stop", "x1")
    assert [*intents.read(project)][-1] == "x1" and intents.read(project) == anew(project)[0]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("job_id", "J-000001", "../../x"),
        ("job_id", "J-000001", "J-1"),
        ("machine_id", "m_1", "m_1/../2"),
        ("approval_id", "a_1", "a_1; rm"),
    ],
)
def test_an_id_of_another_form_is_none(project, name, good, bad):
    for number, value in enumerate((good, bad, 7, None)):
        line = {"kind": "intent", "ts": "", "intent": f"x{number}", "action": "stop", name: value}
        with project.path("journal.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
    assert [getattr(intent, name) for intent in intents.read(project).values()] == [good, None, None, None]
