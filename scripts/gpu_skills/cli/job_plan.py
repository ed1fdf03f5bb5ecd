"""`gpu job run --plan P`: a job with a machine of its own, from the frozen plan to the machine's proven end."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gpu_skills.cli.context import Context
from gpu_skills.cli.job_view import job_document, summary
from gpu_skills.cli.job_watch import stream
from gpu_skills.cli.output import Output, say
from gpu_skills.errors import EXIT_CANCELLED, EXIT_TIMEOUT, GpuError, RemoteError, StateBusy, UsageError
from gpu_skills.units import counted, format_bytes, format_duration, format_usd

if TYPE_CHECKING:
    from gpu_skills.jobs.launch import Launch
    from gpu_skills.jobs.pack import Packed
    from gpu_skills.jobs.spec import JobSpec
    from gpu_skills.jobs.watching import Watch
    from gpu_skills.lifecycle.connect import Link
    from gpu_skills.lifecycle.machines import Machine
    from gpu_skills.lifecycle.operator import Operator
    from gpu_skills.lifecycle.plans.plan import Plan

OTHER_WAIT_S = 2.0


def run_plan(
    context: Context,
    name: str,
    *,
    yes: bool = False,
    hold_for: str | None = None,
    max_lease: str | None = None,
    job_timeout: str | None = None,
    resume_from: str | None = None,
    env: tuple[str, ...] = (),
    allow_secret_file: tuple[str, ...] = (),
    detach: bool = False,
) -> Output:
    """Launch what was approved, or follow what was launched already; the same call is right in both cases."""
    from gpu_skills.jobs import agreed, disposable, durable, launch, parting
    from gpu_skills.lifecycle.guard import receipts
    from gpu_skills.lifecycle.renting import specs

    op = context.operator
    full, found = agreed.open_plan(context.project, name)
    limits = agreed.limits(found, hold_for=hold_for, max_lease=max_lease, job_timeout=job_timeout)
    _require_same_checkpoint(found, resume_from)
    launched = launch.find(context.project, full)
    if launched is not None and launched.ended_at is not None and op.ledger.latest(launched.job) is not None:
        return _finished(context, op, launched)
    if launched is not None and launched.ended_at is None:
        launched = disposable.shorten(op, launched, limits)
        limits = launched.limits
    if launched is not None and (machine := parting.won_machine(op, launched)) is not None:
        if disposable.may_try_again(op, launched, machine):
            launched = disposable.try_again(op, launched)
    if launched is not None and disposable.has_begun(op, launched):
        return _gone_on_with(context, op, launched, found, detach=detach)
    uri = (found.job or {}).get("outputs_uri")
    if uri and launched is None:  # before anything is rented, not when the job has ended
        durable.require_home(context.project, uri)
    work = _prepared(context, found, limits.job_timeout_s, env, allow_secret_file, launched)
    approval = _agreed(context, full, found, yes=yes)
    if launched is None or launched.ended_at is not None:  # what refuses before it begins leaves nothing half-begun
        receipts.require_recent(op, found.provider, specs.fuse_action(op, found))
    launched, approval = disposable.begin(op, full, found, limits, approval)
    say(f"{launched.job} is plan {full[:12]}")
    launched, link = _launched(context, op, launched, found, approval, work)
    watch = _watch(context, op, launched, found, link.machine)
    watch.joins(link)
    return _to_the_end(context, op, launched, found, link, watch, work, detach=detach)


def _gone_on_with(context: Context, op: Operator, launched: Launch, found: Plan, *, detach: bool) -> Output:
    """Follow a job that has begun, or finish what is left of one that has ended."""
    from gpu_skills.jobs import parting
    from gpu_skills.jobs.disposable import CancelRequested
    from gpu_skills.jobs.watching import LOST
    from gpu_skills.lifecycle import states

    machine = parting.won_machine(op, launched)
    is_collected = parting.is_collected(op, launched)
    if machine is not None and is_collected and machine.status not in states.FINAL:
        machine = parting.as_shown(op, machine)
    if machine is None or (is_collected and machine.status in ("terminating", "stopped")):
        _let_go(context, op, launched)
        return _finished(context, op, launched)
    if machine.status in states.FINAL:
        parting.end_machines(op, launched, why="job_over")
        return _finished(context, op, launched)
    say(f"{launched.job} was launched by this plan: following it on {machine.id}")
    watch = _watch(context, op, launched, found, machine)
    try:
        link = watch.connect()
    except (*LOST, CancelRequested) as exc:
        return _without_machine(context, op, launched, exc)
    return _to_the_end(context, op, launched, found, link, watch, None, detach=detach)


# before ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """What it takes to submit the job."""

    spec: JobSpec
    packed: Packed
    hf_token: str | None = field(repr=False)


def _prepared(
    context: Context,
    found: Plan,
    timeout_s: float | None,
    env: tuple[str, ...],
    allow_secret_file: tuple[str, ...],
    launched: Launch | None,
) -> _Work:
    """Stage the inputs and find the secrets: everything that can be wrong here is found before anything is rented."""
    from gpu_skills.cli.progress import byte_bar
    from gpu_skills.jobs import agreed, parting, staging
    from gpu_skills.jobs.spec import given_env

    try:
        given = given_env(env, context.environ, context.project.root)
        values, hf_token = agreed.secret_values(found, given, _known_secrets(context))
        spec = agreed.spec_of(context.project, found, secret_env=values, timeout_s=timeout_s)
        with byte_bar(context, "pack", before="looking at the files") as progress:
            packed = staging.stage(context.project, found, progress=progress, allow_secret_files=allow_secret_file)
    except GpuError as exc:
        machine = None if launched is None else parting.won_machine(context.operator, launched)
        if machine is not None and launched is not None:
            exc.next_step = f"{exc.next_step}; {machine.id} is rented and waits: or gpu job cancel {launched.job}"
            exc.details["machine"] = machine.id
        raise
    files = sum(1 for entry in packed.tree.files)
    say(f"{counted(files, 'file')}, {format_bytes(packed.total_bytes)}, as planned")
    for warning in packed.warnings:
        say(f"warning: {warning}")
    return _Work(spec, packed, hf_token)


def _known_secrets(context: Context) -> Any:
    from gpu_skills import credentials
    from gpu_skills.config import read_dotenv

    def known(name: str) -> str | None:
        if name == "HF_TOKEN":
            return credentials.hf_token(context.project.root, context.environ)
        return context.environ.get(name) or read_dotenv(context.project.root, [name]).get(name)

    return known


def _agreed(context: Context, full: str, found: Plan, *, yes: bool) -> Any:
    from gpu_skills.cli.approve import agree
    from gpu_skills.lifecycle.approval import approvals

    return agree(context, approvals.ask_of_plan(full, found), yes=yes)


def _require_same_checkpoint(found: Plan, resume_from: str | None) -> None:
    from gpu_skills.jobs import staging

    if resume_from is None:
        return
    frozen = (found.resume_from or {}).get("job")
    if frozen != resume_from:
        says = f"resumes from {frozen}" if frozen else "starts from the beginning"
        step = staging.plan_again(found, "--resume-from", resume_from)
        raise UsageError(f"--resume-from {resume_from}: this plan {says}", next_step=step)


# launch ---------------------------------------------------------------------------------------------------------------


def _launched(
    context: Context, op: Operator, launched: Launch, found: Plan, approval: Any, work: _Work
) -> tuple[Launch, Link]:
    """Rent and submit, or wait for the command that is at it already."""
    from gpu_skills.jobs import disposable, parting

    while True:
        try:
            machine, link = disposable.rent(op, launched, found, approval)
            say(
                f"{launched.job} on {machine.id}: {machine.provider} {machine.gpu or ''} at "
                f"{format_usd(machine.rate_usd_hr)}/h until {machine.deadline_at}"
            )
            return _submitted(context, op, launched, found, link, work), link
        except StateBusy:
            launched = _other_command(op, launched)
            if disposable.has_begun(op, launched):
                machine = parting.won_machine(op, launched)
                if machine is None:
                    raise
                return launched, op.connect(machine)
        except KeyboardInterrupt:
            _cancelled_early(context, op, launched)
            raise


def _submitted(context: Context, op: Operator, launched: Launch, found: Plan, link: Link, work: _Work) -> Launch:
    from gpu_skills.cli.job_artifacts import offer_home
    from gpu_skills.cli.progress import byte_bar
    from gpu_skills.jobs import disposable

    with byte_bar(context, "upload", before="comparing", after="verifying") as progress:
        submitted = disposable.submit(
            op, launched, found, link, work.spec, work.packed, hf_token=work.hf_token, progress=progress
        )
    report = submitted.upload
    say(f"{launched.job} started; sent {format_bytes(report.bytes_sent)} of {format_bytes(report.bytes_total)}")
    offer_home(context, link, launched.job)
    return launched


def _other_command(op: Operator, launched: Launch) -> Launch:
    """Wait a moment for the command that works on this launch; how it stands then."""
    from gpu_skills.jobs import launch

    op.clock.sleep(OTHER_WAIT_S)
    return launch.find(op.project, launched.plan) or launched


def _cancelled_early(context: Context, op: Operator, launched: Launch) -> None:
    """Ctrl-C, or a cancel from elsewhere, before the job began: its machine was ended already."""
    from gpu_skills.jobs import parting
    from gpu_skills.jobs.records import JobFolder

    if not JobFolder(context.project, launched.job).was_sent:
        parting.cancelled_before_it_began(op, launched)


# follow, collect, hold, let go --------------------------------------------------------------------------------------


def _to_the_end(
    context: Context,
    op: Operator,
    launched: Launch,
    found: Plan,
    link: Link,
    watch: Watch,
    work: _Work | None,
    *,
    detach: bool,
) -> Output:
    """Everything after the start. Whatever breaks off here, the same command again goes on."""
    from gpu_skills.jobs import disposable
    from gpu_skills.jobs.disposable import CancelRequested
    from gpu_skills.jobs.watching import LOST

    if detach:
        return _detached(context, launched, link)
    while True:
        try:
            link, state = _followed(context, op, launched, link, watch)
        except (*LOST, CancelRequested) as exc:
            return _without_machine(context, op, launched, exc)
        except KeyboardInterrupt:
            _say_it_goes_on(launched, link)
            return _output(context, op, launched, EXIT_CANCELLED)
        except RemoteError as exc:  # the provider shows it running: nothing is concluded
            exc.details["job"] = _document(context, op, launched)
            exc.next_step = f"gpu job run --plan {launched.plan[:12]} follows again; {_until(link.machine)}"
            raise
        # First, so that the ledger's line can say where the outputs are. What fails here is told by the next try.
        pulled = _pull_if_possible(context, link, launched.job) if state != "lost" else None
        disposable.settle(op, link)
        if not disposable.may_try_again(op, launched, _machine_now(op, link)):
            return _collected(context, op, launched, link, pulled)
        work = work or _prepared(context, found, launched.job_timeout_s, (), (), launched)
        before, launched = launched.job, disposable.try_again(op, launched)
        say(f"{before} went down with its container; {launched.job} is its second and last try, on the same machine")
        _submitted(context, op, launched, found, link, work)
        watch = _watch(context, op, launched, found, link.machine)
        watch.joins(link)


def _watch(context: Context, op: Operator, launched: Launch, found: Plan, machine: Machine) -> Watch:
    from gpu_skills.jobs.watching import Watch

    return Watch(op, launched, found, machine, last_pull=lambda link: _pull_quietly(context, link, launched.job))


def _machine_now(op: Operator, link: Link) -> Machine:
    from gpu_skills.lifecycle import machines

    return machines.find(op.project, link.machine.id) or link.machine


def _followed(context: Context, op: Operator, launched: Launch, link: Link, watch: Watch) -> tuple[Link, str]:
    """Stream to the job's end: the link it ended on, which is another one when the machine has moved, and its state."""
    from gpu_skills.jobs.watching import Moved

    while True:
        try:
            final = stream(context, link, launched.job, watch.offset, to_stderr=context.json, watch=watch)
            return link, final.status["state"]
        except Moved:
            say(f"{link.machine.id} is back at another address")
            link = watch.connect()


def _without_machine(context: Context, op: Operator, launched: Launch, exc: BaseException) -> Output:
    """The machine is lost, or somebody cancelled from elsewhere while it did not answer."""
    from gpu_skills.jobs import cancelling, checkpoints
    from gpu_skills.jobs.watching import LOST

    if not isinstance(exc, LOST):
        cancelling.cancel(op, launched, collect=lambda there, job: _pull(context, there, job))
        return _output(context, op, launched, EXIT_CANCELLED)
    if op.ledger.state_of(op.ledger.latest(launched.job) or {}) == "timeout":
        return _output(context, op, launched, EXIT_TIMEOUT)
    exc.details["job"] = _document(context, op, launched)
    with contextlib.suppress(GpuError):
        newest = checkpoints.latest(context.project, launched.job)
        exc.next_step = f"gpu plan --freeze --resume-from {launched.job} (step {newest.step} of it is here)"
    raise exc


def _collected(context: Context, op: Operator, launched: Launch, link: Link, pulled: Output | None) -> Output:
    from gpu_skills.jobs import device_errors, observe

    job = launched.job
    try:
        pulled = pulled or _pull(context, link, job)
    except GpuError as exc:
        exc.details["job"] = _document(context, op, launched)
        again = f"gpu job pull {job} --force, then gpu job run --plan {launched.plan[:12]}"
        exc.next_step = f"{again}; {_until(link.machine)}"
        raise
    say(pulled.text)
    line = op.ledger.latest(job) or {}
    if op.ledger.state_of(line) == "failed" and (advice := device_errors.advice(op, launched, link.machine)):
        say(advice)
    say(summary(job_document(context, job, None, line)))
    held = _held(context, op, launched, link)
    state = _let_go(context, op, launched, why="interrupted" if held == "interrupted" else "job_over")
    output = _output(context, op, launched, observe.exit_code_of(_as_answer(op, line)))
    output.document |= {"pulled": pulled.document, "held": held, "machine_state": state}
    if state != "destroyed":
        output.hints.append(f"{link.machine.id} is not proven gone and counts as burning; next: gpu reconcile")
    return output


def _held(context: Context, op: Operator, launched: Launch, link: Link) -> str | None:
    """Hold the machine for review; how that ended, None without a hold."""
    from gpu_skills.jobs import hold, launch, parting
    from gpu_skills.lifecycle import machines, states
    from gpu_skills.lifecycle.connect import ssh_command

    until = parting.keep(op, launched, link)
    if until is None:
        return None
    machine = link.machine
    rate = format_usd(machine.rate_usd_hr)
    way_in = ssh_command(machine, known_hosts=context.project.state / "known_hosts")
    if way_in is not None:
        say(f"to look at it: {way_in}")

    def tell(left_s: float) -> None:
        say(f"{machine.id} is held for review at {rate}/h, {format_duration(left_s)} left; Ctrl-C ends it now")

    def is_ended() -> bool:
        now = machines.find(op.project, machine.id)
        return now is None or now.status in states.FINAL or launch.is_cancelled(op.project, launched.plan)

    def held_until() -> datetime:
        """Longer, when somebody has said so by `gpu machine hold`."""
        return max(until, parting.held_by_hand(op, launched) or until)

    return hold.review(context.clock, held_until, tell=tell, is_ended=is_ended)


def _let_go(context: Context, op: Operator, launched: Launch, *, why: str = "job_over") -> str:
    from gpu_skills.jobs import parting
    from gpu_skills.jobs.hold import unhurried

    say("destroying the machine, and watching until it is proven gone")
    try:
        with unhurried():
            return parting.let_go(op, launched, why=why)
    except GpuError as exc:
        exc.details["job"] = _document(context, op, launched)
        raise


def _pull(context: Context, link: Link, job: str) -> Output:
    from gpu_skills.cli.job import pull_outputs
    from gpu_skills.jobs import disposable

    output = pull_outputs(context, link, job)
    # Again, so that the ledger's line can say where the outputs are now.
    disposable.settle(context.operator, link)
    return output


def _pull_if_possible(context: Context, link: Link, job: str) -> Output | None:
    from gpu_skills.cli.job import pull_outputs

    try:
        return pull_outputs(context, link, job)
    except GpuError:
        return None


def _pull_quietly(context: Context, link: Link, job: str) -> None:
    """What there is before the machine's end comes; the job still writes."""
    with contextlib.suppress(GpuError):
        say(_pull(context, link, job).text)


# what is said -------------------------------------------------------------------------------------------------------


def pending_line(context: Context, launched: Launch) -> dict[str, Any]:
    """What the ledger would say of a job whose machine is being made, if it had a line."""
    from gpu_skills.lifecycle.plans import plan

    found = plan.load(context.project, launched.plan)[1]
    job = found.job or {}
    inputs = {"run": job.get("run"), "label": job.get("label")}
    return {"id": launched.job, "status": "running", "provider": found.provider, "inputs": inputs}


def pending_document(context: Context, launched: Launch) -> dict[str, Any]:
    """A job whose machine is being made."""
    from gpu_skills.jobs import parting
    from gpu_skills.lifecycle import runs

    op = context.operator
    document = job_document(context, launched.job, None, pending_line(context, launched))
    run = runs.load(op, launched.approval_id) if launched.approval_id else None
    machine = parting.won_machine(op, launched)
    newest = run.attempts[-1] if run is not None and run.attempts else None
    document["phase"] = "setup" if machine is not None else "booting" if newest is not None else "requested"
    document["machine"] = machine.id if machine is not None else newest.machine_id if newest is not None else None
    document["gpu"] = newest.gpu if newest is not None else None
    document["next_step"] = f"gpu job run --plan {launched.plan[:12]}, or gpu job cancel {launched.job}"
    if launched.ended_at is not None:
        document |= {"state": "failed", "phase": None, "reason": "not_launched", "error": "it got no machine"}
        document["next_step"] = "gpu plan --freeze"
    return document


def _document(context: Context, op: Operator, launched: Launch) -> dict[str, Any]:
    from gpu_skills.jobs import parting

    document = job_document(context, launched.job)
    machine = parting.won_machine(op, launched)
    document |= {
        "plan": launched.plan,
        "machine_state": None if machine is None else machine.status,
        "held_until": launched.hold_until,
    }
    if machine is not None:
        document["machine"] = machine.id
    return document


def _output(context: Context, op: Operator, launched: Launch, exit_code: int) -> Output:
    return Output(_document(context, op, launched), "", exit_code=exit_code)


def _finished(context: Context, op: Operator, launched: Launch) -> Output:
    """The plan has run: nothing is launched a second time."""
    from gpu_skills.jobs import observe

    line = op.ledger.latest(launched.job) or {}
    output = _output(context, op, launched, observe.exit_code_of(_as_answer(op, line)))
    say(f"this plan has run: {summary(output.document)}")
    return output


def _detached(context: Context, launched: Launch, link: Link) -> Output:
    output = _output(context, context.operator, launched, 0)
    output.text = launched.job
    output.hints.append(
        f"{link.machine.id} bills until {link.machine.deadline_at} at the latest; "
        f"to follow, collect and let it go: gpu job run --plan {launched.plan[:12]}"
    )
    return output


def _say_it_goes_on(launched: Launch, link: Link) -> None:
    say(
        f"gpu: stopped watching, {launched.job} goes on and {link.machine.id} bills until {link.machine.deadline_at} "
        f"at the latest; next: gpu job run --plan {launched.plan[:12]}, or gpu job cancel {launched.job}"
    )


def _until(machine: Machine) -> str:
    return f"{machine.id} goes on and may bill until {machine.deadline_at}"


def _as_answer(op: Operator, line: dict[str, Any]) -> dict[str, Any]:
    return {"state": op.ledger.state_of(line), "exit_code": line.get("exit_code")}
