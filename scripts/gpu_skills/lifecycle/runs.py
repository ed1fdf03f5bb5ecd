"""A run: what one approval set going. At most one exists per approval, and it is what uses the approval up.

`<user's state>/runs/<approval>.json` is committed whole; its own lock is held by the process that works on it and
freed by its death. The run belongs to the user, not the project: a second state directory of the same project finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gpu_skills.errors import ApprovalUsed, NotWritable, StateBusy, StateError
from gpu_skills.lifecycle import intents, machines
from gpu_skills.lifecycle.machines import Machine
from gpu_skills.lifecycle.operator import Operator
from gpu_skills.state import files, quick_check
from gpu_skills.userdirs import NoHome

State = Literal["open", "won", "exhausted", "closed"]
SIGNED_PREFIX = "a_s"  # of the ids of signed approvals; what follows `a_` in others is hexadecimal


@dataclass(frozen=True)
class Attempt:
    """One create. label and deadline_at are frozen before it is sent. result: as of an intent; None: nobody knows.

    is_over: nothing of it is left at the provider, and that was confirmed.
    """

    number: int
    intent: str
    machine_id: str
    label: str
    deadline_at: str | None
    offer_id: str
    gpu: str | None
    rate_usd_hr: float | int
    began_at: str
    result: str | None = None
    reason: str | None = None
    is_over: bool = False


@dataclass(frozen=True)
class Run:
    """account: name of the account's directory, by which its reservation is settled. owner: the state directory."""

    approval_id: str
    plan_sha256: str
    project_id: str
    provider: str
    account: str
    owner: str
    reserved_usd: float | int
    approval_expires_at: str
    began_at: str
    state: State = "open"
    attempts: tuple[Attempt, ...] = ()
    won: str | None = None  # intent
    is_settled: bool = False

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "attempts": [asdict(a) for a in self.attempts]}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Run:
        """Fields that this version does not know are passed over."""
        attempts = tuple(Attempt(**_known(Attempt, attempt)) for attempt in record["attempts"])
        return cls(**{**_known(cls, record), "attempts": attempts})


def _known(kind: type[Run | Attempt], record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in kind.__dataclass_fields__ if name in record}


def owner_of(op: Operator) -> str:
    """What names a state directory: its real path and its inode, so that a copy is another one."""
    state = Path(os.path.realpath(op.project.state))
    return f"{state}:{state.stat().st_ino}"


def folder(op: Operator, approval_id: str = "") -> Path:
    """Where runs are kept: what a signature allowed by the account, out of reach of HOME and XDG_STATE_HOME.

    An agent sets its own environment. With the marks below a directory that it names, one signature would be worth a
    machine for each new name. The id says which place it is, so a policy that changes moves no mark.
    """
    place = op.account_state if approval_id.startswith(SIGNED_PREFIX) else op.user_state
    return place / "runs"


def working_on(op: Operator, approval_id: str) -> contextlib.AbstractContextManager[None]:
    """Be the one process that works on a run. StateBusy when another does: follow it instead."""
    return _alone(folder(op, approval_id) / f"{checked(approval_id)}.work", f"approval {approval_id}")


def renting_by(op: Operator, plan_sha256: str) -> contextlib.AbstractContextManager[None]:
    """Be the one that rents by a plan, under whichever yes to it: two at once would each find theirs unused."""
    return _alone(folder(op) / f"p_{plan_sha256[:32]}.work", f"plan {plan_sha256[:12]}")


def setting_up(op: Operator, provider: str) -> contextlib.AbstractContextManager[None]:
    """Be the one that rents or starts this state directory's own machine: each terminal would make its own plan."""
    name = hashlib.sha256(f"{owner_of(op)}\0{provider}".encode()).hexdigest()[:32]
    return _alone(folder(op) / f"s_{name}.work", f"the project's machine at {provider}")


@contextlib.contextmanager
def _alone(path: Path, what: str) -> Iterator[None]:
    files.make_directory(path.parent)
    # Outside the order of `files.lock`: it is held for minutes, while all the others come and go.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise files.writing_failed(path, exc) from exc
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise StateBusy(f"another gpu command works on {what}", file=path.name, next_step="gpu status") from exc
        except OSError as exc:  # ENOLCK: a file system without locks
            raise NotWritable(path=str(path), reason=f"it cannot be locked: {exc.strerror}") from exc
        yield
    finally:
        os.close(descriptor)


def is_worked_on(op: Operator, approval_id: str) -> bool:
    """Whether some process is at it now."""
    try:
        with working_on(op, approval_id):
            return False
    except StateBusy:
        return True


def load(op: Operator, approval_id: str) -> Run | None:
    """The run of an approval; StateError, with the file and what to do about it, for one that is not what it was."""
    path = _path(op, approval_id)
    try:
        record = files.read_json(path, default=None)
        return None if record is None else _read(path, record)
    except StateError as exc:
        step = f"restore {path}, or move it away, then: gpu reconcile --adopt"
        raise StateError(exc.message, next_step=step, **{**exc.details, "path": str(path)}) from exc


def all_runs(op: Operator) -> list[Run]:
    """Of every project of this user, oldest first; those that cannot be read are `damaged`."""
    return sorted((run for run in _found(op) if isinstance(run, Run)), key=lambda run: run.began_at)


def damaged(op: Operator) -> list[StateError]:
    """What is wrong with each file that should hold a run and does not."""
    return [problem for problem in _found(op) if isinstance(problem, StateError)]


def require_readable(op: Operator) -> None:
    """Before money is spent: a run that cannot be read may have machines and money that nobody counts."""
    for problem in damaged(op):
        raise problem


def _found(op: Operator) -> Iterator[Run | StateError]:
    """Each from its own place: one that lies elsewhere is nobody's."""
    for name in sorted({path.stem for place in _places(op) for path in place.glob("a_*.json")}):
        try:
            run = load(op, name)
        except StateError as problem:
            yield problem
        else:
            if run is not None:
                yield run


def _read(path: Path, record: Any) -> Run:
    if not quick_check.fits(record, "runs"):
        from gpu_skills import schemas

        schemas.check(record, "runs", file=f"runs/{path.name}", error=StateError)
    if record["approval_id"] != path.stem:
        problem = f"found the run of {record['approval_id']}, allowed is that of {path.stem}"
        raise StateError(file=f"runs/{path.name}", at=" /approval_id", problem=problem)
    return Run.from_record(record)


def own_runs(op: Operator) -> list[Run]:
    """Those this very state directory began: what it has to finish, book and settle."""
    owner = owner_of(op)
    return [run for run in all_runs(op) if run.owner == owner]


def create(op: Operator, run: Run) -> Run:
    """Bind an approval. ApprovalUsed when it is bound already, unless by this very state directory and unfinished."""
    path = _path(op, run.approval_id)
    files.make_directory(path.parent)
    with files.lock(path):
        found = load(op, run.approval_id)
        if found is None:
            files.commit(path, files.dumps_pretty(run.to_record()), expected=None)
            return run
    require_ours(op, found)
    return found


def require_ours(op: Operator, run: Run) -> None:
    """ApprovalUsed when the run is another state directory's; one that was moved here since is taken over first."""
    owner = owner_of(op)
    if run.owner == owner or any(one.approval_id == run.approval_id for one in take_moved(op)):
        return
    step = {} if is_there(run) else {"next_step": "gpu reconcile --adopt"}
    raise ApprovalUsed(reason=f"approval {run.approval_id} was used in another state directory", **step)


def is_there(run: Run) -> bool:
    """Whether the state directory that a run belongs to still exists: the same directory, not one of its name."""
    path, _, inode = run.owner.rpartition(":")
    try:
        return str(os.stat(path).st_ino) == inode
    except OSError:
        return False


def orphaned(op: Operator) -> list[Run]:
    """Runs of this project whose state directory is gone."""
    owner = owner_of(op)
    return [
        run
        for run in all_runs(op)
        if run.project_id == op.project.project_id and run.owner != owner and not is_there(run)
    ]


def take_moved(op: Operator) -> list[Run]:
    """Make this state directory's what it began under another name: the runs that were taken over now.

    A directory that was renamed or moved has its records still: they name what the run made. Of several copies the
    first one that looks becomes the owner, and the others see one that is there.
    """
    without_owner = orphaned(op)
    if not without_owner:
        return []
    owner = owner_of(op)
    on_record = {machine.id for machine in machines.all_machines(op.project)}
    begun = set(intents.read(op.project))
    taken = []
    for run in without_owner:
        if any(attempt.machine_id in on_record or attempt.intent in begun for attempt in run.attempts):
            op.project.require_writable()
            changed = update(op, run.approval_id, _with_owner(run.owner, owner))
            taken += [changed] if changed.owner == owner else []
    return taken


def _with_owner(before: str, after: str) -> Callable[[Run], Run]:
    return lambda run: replace(run, owner=after) if run.owner == before else run


def session_of(op: Operator, machine: Machine) -> str | None:
    """The approval of a machine's session: of its newest start, else of the run that made it."""
    starts = (i for i in intents.read(op.project).values() if i.machine_id == machine.id and i.action == "start")
    newest = [i.approval_id for i in starts if i.result == "done" and i.approval_id]
    return newest[-1] if newest else machine.extra.get("approval_id")


def update(op: Operator, approval_id: str, change: Callable[[Run], Run]) -> Run:
    """Read, change, commit under the lock of the file. change has no effects: it may be applied again."""

    path = _path(op, approval_id)

    def changed(record: Any) -> Any:
        return change(_read(path, record)).to_record()

    return Run.from_record(files.update(path, changed))


def with_attempt(run: Run, attempt: Attempt) -> Run:
    """The run with this attempt in the place of the one of the same number, or added."""
    others = tuple(a for a in run.attempts if a.number != attempt.number)
    return replace(run, attempts=tuple(sorted((*others, attempt), key=lambda a: a.number)))


def _places(op: Operator) -> Iterator[Path]:
    yield folder(op)
    with contextlib.suppress(NoHome):  # an account without a home has no signed approvals
        yield folder(op, SIGNED_PREFIX)


def _path(op: Operator, approval_id: str) -> Path:
    return folder(op, approval_id) / f"{checked(approval_id)}.json"


def checked(approval_id: str) -> str:
    if not (approval_id.startswith("a_") and approval_id[2:].isalnum() and approval_id.isascii()):
        raise StateError(
            file="approvals.jsonl", at="", problem=f"found {approval_id[:40]!r}, allowed is an approval id"
        )
    return approval_id
