"""Agents branch on the code and scripts on the exit code, so both are a promise."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter

import pytest

from gpu_skills import errors
from gpu_skills.errors import Failed, GpuError, HostKeyMismatch, Unreachable, all_errors, one_line

CLASSES = all_errors()
ROOT = Path(__file__).parents[1]
EXITS = {1: "failed", 2: "usage", 3: "refused", 4: "approval", 5: "provider", 6: "uncertain"}


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def details(cls: type[GpuError]) -> dict[str, str]:
    """A value for each field of the class's template."""
    return {name: f"<{name}>" for name in fields(cls.template)}


def build(cls: type[GpuError]) -> GpuError:
    given = details(cls)
    return cls(given.pop("message")) if set(given) == {"message"} else cls(**given)


def test_every_class_below_the_base_has_a_code_of_its_own_but_for_the_groups():
    owners: dict[str, list[str]] = {}
    for cls in CLASSES:
        if "code" in cls.__dict__:
            owners.setdefault(cls.code, []).append(cls.__name__)
    assert {code: names for code, names in owners.items() if len(names) > 1} == {}
    # Only what nobody raises itself, the base and the first level, may go without.
    assert {cls.__name__ for cls in CLASSES if "code" not in cls.__dict__} <= {"Failed"}


def test_a_code_is_one_word_of_lower_case_letters():
    assert [cls.code for cls in CLASSES if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", cls.code)] == []


def test_each_class_ends_with_the_exit_code_of_its_branch():
    for cls in CLASSES:
        assert cls.exit_code in EXITS
        for parent in cls.__mro__:
            if parent is not cls and parent is not GpuError and issubclass(parent, GpuError):
                assert cls.exit_code == parent.exit_code, f"{cls.__name__} leaves the exit code of {parent.__name__}"


def test_the_six_exit_codes_have_one_class_each_directly_below_the_base():
    assert sorted(cls.exit_code for cls in GpuError.__subclasses__()) == sorted(EXITS)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_message_and_next_step_are_one_printable_line_without_gaps(cls):
    error = build(cls)
    assert error.message and error.message.isprintable()
    assert error.next_step and error.next_step.isprintable()
    assert "{" not in error.message
    document = error.to_dict()
    assert list(document) == ["code", "message", "next_step", "retryable", "may_be_billing", "details"]
    assert document["code"] == cls.code


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_next_step_names_no_field_that_is_unknown_or_has_all_of_them_when_given(cls):
    wanted = fields(cls.next_step)
    given = {**details(cls), **{name: f"<{name}>" for name in wanted}}
    given.pop("message", None)
    error = cls(None if "message" not in fields(cls.template) else "text", **given)
    assert "{" not in error.next_step
    assert all(f"<{name}>" in error.next_step for name in wanted)


def test_the_tree_drawn_at_the_top_is_the_tree_there_is():
    drawn = re.findall(r"^([│├└─ ]*)(\w+)(?: +exit (\d))?", errors.__doc__.partition("\n\n")[2], re.MULTILINE)
    tree = [(len(indent) // 4, name, code) for indent, name, code in drawn if hasattr(errors, name)]
    assert tree[0] == (0, "GpuError", "")
    path: list[type[GpuError]] = []
    for depth, name, code in tree:
        cls = getattr(errors, name)
        if depth:
            assert path[depth - 1] in cls.__bases__, f"{name} is not drawn below its parent"
            if depth == 1:
                assert int(code) == cls.exit_code
        path[depth:] = [cls]
    groups = {cls.__name__ for cls in CLASSES if cls.__subclasses__()}
    assert groups | {cls.__name__ for cls in GpuError.__subclasses__()} <= {name for _, name, _ in tree}


def test_what_a_machine_said_cannot_reach_the_terminal_raw():
    error = Unreachable(host="gpu\x1b[2J\n1", reason="a\rb\u202ec")
    assert error.message == "gpu\\x1b[2J\\n1 did not answer: a\\rb\\u202ec"
    assert error.next_step == "ssh gpu\\x1b[2J\\n1 true"


def test_braces_in_what_a_machine_said_are_text():
    error = Unreachable(host="{reason}", reason="{0} {host.__class__} {")
    assert error.message == "{reason} did not answer: {0} {host.__class__} {"


def test_a_long_text_keeps_its_beginning_and_its_end():
    shown = one_line("begin" + "x" * 5000 + "end")
    assert len(shown) < 700 and shown.startswith("begin") and shown.endswith("end") and " … " in shown


def test_a_message_and_a_next_step_can_be_given_and_details_are_kept():
    error = Failed("the disk is on fire", next_step="call {who}", who="the fire brigade")
    assert (error.message, error.next_step) == ("the disk is on fire", "call the fire brigade")
    assert error.to_dict()["details"] == {"who": "the fire brigade"}
    assert str(error) == "the disk is on fire"


def test_a_field_that_is_missing_is_our_own_mistake_and_is_not_hidden():
    with pytest.raises(KeyError):
        HostKeyMismatch(host="gpu1")


def test_every_class_is_raised_caught_or_built_upon_somewhere():
    sources = {path: path.read_text() for path in (ROOT / "scripts").rglob("*.py")}
    for cls in all_errors():
        others = (
            line for text in sources.values() for line in text.splitlines() if f"class {cls.__name__}(" not in line
        )
        assert any(re.search(rf"\b{cls.__name__}\b", line) for line in others), cls.__name__
