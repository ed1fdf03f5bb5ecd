"""What a stop and a destroy have in common before and while a provider is asked: approval, intent, pauses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from gpu_skills.errors import (
    GpuError,
    Protected,
    RateLimited,
)
from gpu_skills.lifecycle import intents
from gpu_skills.lifecycle.ending import ownership
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.providers.base import Machine as Instance

if TYPE_CHECKING:
    from gpu_skills.lifecycle.approval.approvals import Approval

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
# One line for each look, for a person who waits for it.
Tell = Callable[[str], None]


def untold(line: str) -> None:
    return None


def used_for(
    action: Literal["stop", "destroy"], op: Operator, machine: Machine, seen: Instance | None, approval: Approval | None
) -> Approval | None:
    """The approval that ending a protected machine takes, used up; None for a machine that takes none.

    The same command again goes on with what was used and not begun: a process died in between.
    """
    from gpu_skills.lifecycle.approval import actions, approvals

    if not ownership.needs_named_approval(machine, seen):
        return None
    if approval is None:
        raise Protected(machine=machine.id)
    approvals.use(op, approval, actions.named_by(op.project, approval, action, machine.id).ask())
    return approval


def begin(op: Operator, action: Literal["stop", "destroy"], machine: Machine, why: str, used: Approval | None) -> str:
    """The id of the intent. From here on it goes on by itself, so the approval has done its work."""
    from gpu_skills.lifecycle.approval import approvals

    intent = intents.new_id()
    intents.begin(
        op.project,
        op.clock,
        action,
        intent,
        provider=machine.provider,
        account=machine.account,
        machine_id=machine.id,
        instance_id=machine.instance_id,
        label=machine.label,
        approval_id=None if used is None else used.id,
        details={"why": why},
    )
    if used is not None:
        approvals.finish(op, used)
        approvals.note_used(op, used)
    return intent


def pause_after(exc: GpuError, failures: int) -> float:
    pause_s = min(FIRST_PAUSE_S * 2 ** min(failures - 1, 8), LONGEST_PAUSE_S)
    asked = exc.details.get("retry_after_s") if isinstance(exc, RateLimited) else None
    return max(pause_s, float(asked)) if isinstance(asked, int | float) else pause_s
