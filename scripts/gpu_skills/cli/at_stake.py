"""What goes on billing when a command of ours fails for a reason of its own: a full disk, a broken record, a bug.

Such an error knows nothing of machines. The records do, and so does whoever reads them before the error is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_skills.cli.output import OutputLost
from gpu_skills.errors import Bug, GpuError, NoProject

if TYPE_CHECKING:
    from gpu_skills.cli.context import Context

NAMED = 10


def tell(error: GpuError, context: Context, *, needs_records: bool = True) -> None:
    """Mark an error of this computer with what may bill meanwhile and what ends it; errors that know stay as they are.

    needs_records False: of a command that works without a project, whose machines no record may name.
    """
    from gpu_skills.lifecycle import machines, states, unrecorded

    if not isinstance(error, (*unrecorded.KINDS, Bug, OutputLost)) or "may_be_billing" in vars(error):
        return
    try:
        on_record = machines.all_machines(context.project)
        alive = [m.id for m in on_record if m.is_rented and m.status not in states.FINAL]
    except NoProject:
        if needs_records:
            return
        alive = []
    except Exception:  # what cannot be read may name any number of them, and a second defect must not hide the first
        alive = []
    else:
        if not alive:
            return
    error.may_be_billing = True  # type: ignore[misc]
    error.details.setdefault("machines", alive[:NAMED])
    steps = [error.next_step]
    if "gpu reconcile" not in error.next_step:
        steps.append("then: gpu reconcile")
        if len(alive) == 1:
            steps.append(f"or, to end it: gpu machine destroy {alive[0]}")
    error.next_step = "; ".join(steps)
