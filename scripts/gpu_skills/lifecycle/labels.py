"""The label every machine of ours carries: who it belongs to, which intent made it, when its billing has to end.

    gpu1-<project>-<intent>-<deadline>          deadline: epoch seconds, or `never` for production
    gpu1-<project>-<intent>-<deadline>-<rest>   rest: what a candidate of a fleet adds

It is the only handle on a create that was not answered, and all that a sentinel on another host knows. A label that
does not parse, or carries another project, is somebody else's: never touched.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from gpu_skills.errors import StateError

MachineClass = Literal["project", "job", "canary", "production"]

_LETTERS: dict[str, MachineClass] = {"p": "project", "j": "job", "c": "canary"}
_LABEL = re.compile(
    r"gpu1-(?P<project>[a-z0-9][a-z0-9-]{0,63}?)-(?P<intent>[pjc][0-9a-f]{16})-(?P<deadline>[0-9]{10}|never)"
    r"(?:-(?P<rest>[A-Za-z0-9:._-]{1,120}))?"
)


@dataclass(frozen=True)
class Label:
    """deadline_at None: no fuse. machine_class: what it was made as; production is a canary that was promoted."""

    project_id: str
    intent: str
    deadline_at: datetime | None
    rest: str = ""

    @property
    def machine_class(self) -> MachineClass:
        if self.deadline_at is None:
            return "production"
        return _LETTERS[self.intent[0]]

    def with_deadline(self, deadline_at: datetime | None) -> Label:
        return replace(self, deadline_at=deadline_at)

    def __str__(self) -> str:
        end = "never" if self.deadline_at is None else f"{int(self.deadline_at.timestamp()):010d}"
        return f"gpu1-{self.project_id}-{self.intent}-{end}" + (f"-{self.rest}" if self.rest else "")


def written(label: Label) -> str:
    """The text for a machine about to be made: read back first, since a label that says something else loses it."""
    text = str(label)
    if parse(text) != label:
        raise StateError(
            file="project.json",
            at=" /project_id",
            problem=f"the label {text} would not be read as one of project {label.project_id}",
            next_step="choose another project_id in .pi/gpu/project.json, then: gpu doctor",
        )
    return text


def parse(text: str | None) -> Label | None:
    """None: not a label of this tool."""
    found = _LABEL.fullmatch(text or "")
    if found is None:
        return None
    end = found["deadline"]
    deadline_at = None if end == "never" else datetime.fromtimestamp(int(end), UTC)
    return Label(found["project"], found["intent"], deadline_at, found["rest"] or "")


def ours(text: str | None, project_id: str) -> Label | None:
    """The label if this project made it; else None: foreign, whatever it says."""
    label = parse(text)
    return label if label is not None and label.project_id == project_id else None


def intent_of(text: str | None, project_id: str) -> str | None:
    """The create that a label of this project names; None for any other label."""
    label = ours(text, project_id)
    return label.intent if label is not None else None


def create_intent(machine_class: MachineClass, approval_id: str, attempt: int) -> str:
    """The id of the n-th create under an approval. The same approval gives the same ids: a replay finds its machine."""
    letter = next(letter for letter, name in _LETTERS.items() if name == machine_class)
    return letter + hashlib.sha256(f"{approval_id}\0{attempt}".encode()).hexdigest()[:16]


def action_intent(approval_id: str, action: str, machine_id: str, *more: object) -> str:
    """The id of what an approval allows to do to one machine: what died half-way is begun again under it."""
    told = "\0".join(map(str, (approval_id, action, machine_id, *more)))
    return "x" + hashlib.sha256(told.encode()).hexdigest()[:16]


def machine_id(intent: str) -> str:
    """The id of the machine that an intent makes, known before anything is asked of the provider."""
    return "m_" + hashlib.sha256(f"intent\0{intent}".encode()).hexdigest()[:10]
