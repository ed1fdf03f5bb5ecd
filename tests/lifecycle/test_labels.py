"""The label of a machine: what it says, and what is not ours."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpu_skills.errors import StateError
from gpu_skills.lifecycle import labels, states
from gpu_skills.lifecycle.labels import Label
from gpu_skills.state.project import PROJECT_ID

END = datetime(2026, 11, 30, 21, 0, tzinfo=UTC)


@pytest.mark.parametrize("project", ["p-abc", "a", "my-own-project", "x-y-1764536400"])
@pytest.mark.parametrize("deadline", [END, None])
@pytest.mark.parametrize("rest", ["", "image-46607014-l1-3"])
def test_a_label_is_read_back_as_written(project, deadline, rest):
    label = Label(project, labels.create_intent("job", "a_1", 1), deadline, rest)
    assert labels.parse(str(label)) == label


@pytest.mark.parametrize(
    "text",
    [
        None, "", "train", "gpu1-p-abc", "gpu1-p-abc-j0123456789abcdef", "gpu2-p-abc-j0123456789abcdef-1764536400",
        "gpu1-p-abc-z0123456789abcdef-1764536400", "gpu1-p-abc-j0123456789abcdef-1764536400-",
        "gpu1-p-abc-j0123456789abcdef-1764536400\n", "xgpu1-p-abc-j0123456789abcdef-1764536400",
    ],
)  # fmt: skip
def test_what_is_no_label_of_this_tool_is_none(text):
    assert labels.parse(text) is None


LIKE_A_LABEL = "-j0123456789abcdef-1764536400"


@pytest.mark.parametrize("head", ["a", "p-4tq7k2mzab", "j0123456789abcdef"])
@pytest.mark.parametrize("middle", [LIKE_A_LABEL, "-c0123456789abcdef-never", "-p0123456789abcdef", "-never"])
@pytest.mark.parametrize("tail", ["", "-", "-x", "0", "x"])
def test_a_project_id_is_refused_exactly_where_its_labels_would_be_read_as_another_ones(head, middle, tail):
    project = head + middle + tail
    label = Label(project, labels.create_intent("job", "a_1", 1), END)
    is_read_back = labels.parse(str(label)) == label
    assert bool(PROJECT_ID.fullmatch(project)) == is_read_back
    if is_read_back:
        assert labels.written(label) == str(label)
    else:
        with pytest.raises(StateError, match="would not be read as one of project"):
            labels.written(label)


def test_only_the_own_project_is_ours():
    label = str(Label("p-abc", labels.create_intent("project", "a_1", 1), END))
    assert labels.ours(label, "p-abc") is not None
    assert labels.ours(label, "p-ab") is None and labels.ours(label, "p-abcd") is None


def test_the_same_approval_and_attempt_give_the_same_machine_and_others_do_not():
    intents = {labels.create_intent(kind, a, n) for kind in ("job", "project") for a in ("a_1", "a_2") for n in (1, 2)}
    assert len(intents) == 8 and len({labels.machine_id(i) for i in intents}) == 8
    assert labels.create_intent("job", "a_1", 1) == labels.create_intent("job", "a_1", 1)


def test_a_label_without_an_end_is_production_whatever_made_it():
    label = Label("p-abc", labels.create_intent("canary", "a_1", 1), END)
    assert label.machine_class == "canary"
    assert label.with_deadline(None).machine_class == "production"


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [
        ("booting", "ready", ("ready",)),
        ("ready", "ready", ("ready",)),
        ("ready", "stopped", ("stopping", "stopped")),
        ("booting", "stopped", ("unknown", "stopped")),
        ("stopped", "ready", ("booting", "ready")),
        ("requested", "destroyed", ("unknown", "destroyed")),
    ],
)
def test_the_way_from_one_state_to_another(before, after, way):
    assert states.path(before, after) == way
    for one, next_one in zip((before, *way), way, strict=False):
        assert states.may_follow(one, next_one)


@pytest.mark.parametrize("final", states.FINAL)
def test_nothing_follows_the_final_states(final):
    with pytest.raises(ValueError, match="final"):
        states.path(final, "ready")


def test_every_state_says_whether_it_bills():
    assert set(states.BILLS) == set(states.FOLLOWS)
