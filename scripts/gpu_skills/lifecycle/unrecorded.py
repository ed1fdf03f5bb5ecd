"""What may be true at a provider and could not be written down: a full disk must not read as if nothing bills.

Between a request and the record of what came of it lie several writes, and each may fail. Whatever fails there is told
as OutcomeUnrecorded, with the machine: the journal has the intent, so `gpu reconcile` goes on from it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from gpu_skills.errors import ChangedMeanwhile, DiskFull, GpuError, NotWritable, StateBusy, StateError, Uncertain
from gpu_skills.lifecycle import intents, machines, states
from gpu_skills.state.project import Project

KINDS = (DiskFull, NotWritable, StateError, StateBusy, ChangedMeanwhile)

Function = TypeVar("Function", bound=Callable[..., Any])


class OutcomeUnrecorded(Uncertain):
    """The records could not take what came of a request. details: machine, label, and `cause`, the code of why."""

    code, may_be_billing = "outcome_unrecorded", True
    template = "what came of the {action} of {machine} ({label}) is not on record, it may be billing: {reason}"
    next_step = "gpu reconcile"


@contextlib.contextmanager
def told(project: Project, action: intents.Action, machine_ids: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Whatever state error is raised in here says whether a request of this action may have left, and for what.

    machine_ids: asked only then, those that it is about.
    """
    try:
        yield
    except KINDS as exc:
        error = _as_it_is(project, action, machine_ids, exc)
        if error is exc:
            raise
        raise error from exc


def tells(action: intents.Action) -> Callable[[Function], Function]:
    """`told` around a function of (operator, machine, …)."""

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def telling(op: Any, machine: machines.Machine, *args: Any, **more: Any) -> Any:
            with told(op.project, action, lambda: [machine.id]):
                return function(op, machine, *args, **more)

        return telling  # type: ignore[return-value]

    return wrap


def _as_it_is(
    project: Project, action: intents.Action, machine_ids: Callable[[], Iterable[str]], exc: GpuError
) -> GpuError:
    try:
        ids = list(machine_ids())
        on_record = {m.id: m for m in machines.all_machines(project) if m.id in ids}
        begun = [i for i in intents.read(project).values() if i.action == action and i.machine_id in ids]
    except KINDS:  # what cannot be read tells nothing either
        return OutcomeUnrecorded(
            action=action, machine="a machine", label="label not known", reason=exc.message, cause=exc.code
        )
    over = {id for id, machine in on_record.items() if machine.status in states.FINAL}
    # A create that is closed as done made a machine; other requests that are closed have their outcome on record.
    open_now = [
        i for i in begun if i.machine_id not in over and (i.is_open or (action, i.result) == ("create", "done"))
    ]
    if open_now:
        newest = open_now[-1]
        return OutcomeUnrecorded(
            action=action,
            machine=", ".join(dict.fromkeys(str(i.machine_id) for i in open_now)),
            label=newest.label,
            reason=exc.message,
            cause=exc.code,
        )
    if action != "create" and set(ids) - over:  # it is as it was before, and bills as it did
        exc.may_be_billing = True  # type: ignore[misc]
        exc.details.setdefault("machine", ", ".join(ids))
    return exc
