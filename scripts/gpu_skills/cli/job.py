"""`gpu job …`: run your own code as a job and get its outputs back."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from gpu_skills.cli.base import LazyGroup, command, emit
from gpu_skills.cli.context import Context
from gpu_skills.cli.job_view import job_document, job_text, line_document, summary
from gpu_skills.cli.job_watch import show_line, stream
from gpu_skills.cli.output import Output, say, table
from gpu_skills.errors import EXIT_CANCELLED, PlanUnknown
from gpu_skills.units import counted, format_bytes, format_duration, format_usd

_HERE = "gpu_skills.cli.job:"
job = LazyGroup(
    "job",
    help="Run your own code as a job. Commands without JOB take the latest one.",
    lazy={
        "run": (_HERE + "run", "Pack, upload, run, stream and download; exits with the job's code."),
        "ls": (_HERE + "ls", "List jobs, newest first; reads only."),
        "status": (_HERE + "status", "State, exit code, time, cost and outputs; reads only."),
        "logs": (_HERE + "logs", "The job's log; reads only."),
        "pull": (_HERE + "pull", "Download what changed into gpu-outputs/<job>, verified; also mid-run."),
        "cancel": (_HERE + "cancel", "End a running job and everything it started."),
        "diagnose": ("gpu_skills.cli.job_diagnose:diagnose", "Why it failed, and whether to try again; reads only."),
        "artifacts": (
            "gpu_skills.cli.job_artifacts:artifacts",
            "What a job left and where; push it to a durable home, read it back.",
        ),
        "finish": ("gpu_skills.cli.job_finish:finish", "Write down how a job ended that no machine reports."),
    },
)

_RUN_EXITS = "the job's own code · 124 timeout · 130 cancelled · 125 gpu itself failed (class on the last stderr line)"


@command(
    "run",
    in_job_run=True,
    example="gpu job run --timeout 30m -- python train.py --epochs 3",
    exits=_RUN_EXITS,
    context_settings={"ignore_unknown_options": False},
)
@click.argument("cmd", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="The directory to send; default: the project's."
)
@click.option("--detach", is_flag=True, help="Return once the job has started.")
@click.option(
    "--copies",
    type=click.IntRange(1, 1000),
    default=1,
    help="With --detach: start so many, each with its own GPU_JOB_INDEX from 0.",
)
@click.option("--setup", "setup_command", metavar="CMD", help="Run first; if it fails the job does not start.")
@click.option("--timeout", metavar="TIME", help='For example "30m"; the job then ends with exit 124.')
@click.option("--label", metavar="TEXT", help="A name for people.")
@click.option(
    "--env",
    "env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Pass a variable; without =VALUE from the environment or .env. Never recorded.",
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out (gitignore pattern).")
@click.option("--expect", multiple=True, metavar="PATTERN", help="An output without which exit 0 is not believed.")
@click.option("--require-input", multiple=True, metavar="PATH", help="Refuse when this would not be on the machine.")
@click.option(
    "--allow-secret-file", multiple=True, metavar="PATH", help="Send this file although it looks like a credential."
)
@click.option("--no-pull", is_flag=True, help="Leave the outputs on the machine.")
@click.option("--plan", "plan", metavar="PLAN", help="Rent a machine of the job's own, as this frozen plan says.")
@click.option(
    "--yes", is_flag=True, help="The user's explicit instruction to rent; GPU, rate and deadline are printed."
)
@click.option("--hold-for", metavar="TIME", help="With --plan, shorter: keep the machine for review. 0: not at all.")
@click.option("--max-lease", metavar="TIME", help="With --plan, shorter: billing ends so long after the create.")
@click.option("--job-timeout", metavar="TIME", help="With --plan, shorter: the job then ends with exit 124.")
@click.option("--resume-from", metavar="JOB", help="With --plan: the job whose checkpoint the plan goes on from.")
def run(
    context: Context,
    cmd: tuple[str, ...],
    directory: Path | None,
    detach: bool,
    copies: int,
    no_pull: bool,
    plan: str | None,
    **flags: Any,
) -> Output | None:
    """Run code as a job on the project's machine, setting it up when none is ready. Costs nothing on local and ssh.

    CMD goes after `--`; without it gpujob.yaml says what to run. Ctrl-C stops watching; the job goes on. With --plan
    the job gets a machine of its own, as approved; repeating that call follows and collects, it never rents twice.
    """
    from gpu_skills.cli.job_artifacts import offer_home
    from gpu_skills.cli.progress import byte_bar, spinner
    from gpu_skills.errors import UsageError
    from gpu_skills.jobs import pack, submit
    from gpu_skills.jobs.spec import load_spec

    if plan is not None:
        frozen = {"a command": cmd, "--dir": directory, "--copies": copies > 1, "--no-pull": no_pull}
        return _run_plan(context, plan, frozen, detach=detach, **flags)
    for name in ("hold_for", "max_lease", "job_timeout", "resume_from"):
        if flags[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            step = f"gpu plan --freeze {flag} {flags[name]}" + (f" -- {shlex.join(cmd)}" if cmd else "")
            raise UsageError(f"{flag} needs --plan", next_step=step)
    if len(cmd) == 1:
        _require_no_plan(context, cmd[0])
    if copies > 1 and not detach:
        raise UsageError("--copies needs --detach", next_step="gpu job run --detach --copies 8 -- CMD")
    spec = load_spec(
        _job_directory(context, directory),
        command=cmd,
        setup=flags["setup_command"],
        timeout=flags["timeout"],
        label=flags["label"],
        env=flags["env"],
        exclude=flags["exclude"],
        expect=flags["expect"],
        max_lifetime_s=context.config.lifecycle.max_lifetime_s,
        environ=context.environ,
        dotenv_root=context.project.root,
    )
    context.connect_ahead()
    if spec.outputs_uri is not None:  # now, not when it has ended
        from gpu_skills.jobs import durable

        durable.require_home(context.project, spec.outputs_uri)
    with byte_bar(context, "pack", before="looking at the files") as progress:
        packed = pack.pack(
            spec.directory,
            exclude=spec.exclude,
            require_inputs=flags["require_input"],
            allow_secret_files=flags["allow_secret_file"],
            cache_path=pack.cache_path(context.project.state, spec.directory),
            progress=progress,
        )
    _say_packed(packed)
    with spinner(context, "set-up") as step:
        link = context.ready_machine(progress=step, yes=flags["yes"])
    with byte_bar(context, "upload", before="comparing", after="verifying") as progress:
        report = submit.send(context.project, link, packed, progress)
    where = f"{link.machine.host}" + (f" ({link.machine.gpu})" if link.machine.gpu else "")
    for index in range(copies):
        submitted = submit.start(
            context.project,
            context.ledger,
            context.clock,
            link,
            spec,
            packed,
            report,
            env_values=spec.env_values(),
            hf_token=_hf_token(context),
            copy=(index, copies) if copies > 1 else None,
        )
        sent, total = format_bytes(report.bytes_sent), format_bytes(report.bytes_total)
        say(f"{submitted.job} started on {where}; sent {sent} of {total}")
        if spec.outputs_uri is not None:
            offer_home(context, link, submitted.job)
        if detach:
            document = job_document(context, submitted.job, submitted.status)
            emit(Output(document, submitted.job), as_json=context.json, sandbox=context.sandbox)
    if detach:
        context.say(f"next: gpu job logs -f {submitted.job}")
        return None
    return _attached(context, link, submitted.job, no_pull=no_pull)


_FROZEN = ("setup_command", "timeout", "label", "exclude", "expect", "require_input")


def _require_no_plan(context: Context, word: str) -> None:
    """One that looks like the name of a plan was meant for --plan."""
    from gpu_skills.lifecycle.plans import plan as plans

    try:
        plans.require_no_plan(context.project, word)
    except PlanUnknown as exc:
        known = exc.details["known"]
        raise PlanUnknown(
            f"{word} would be run as a command; of plans there are {', '.join(known)}",
            plan=word,
            known=known,
            next_step=f"gpu job run --plan {known[0]}",
        ) from exc


def _run_plan(context: Context, plan: str, frozen: dict[str, Any], **flags: Any) -> Output:
    """What a plan froze cannot be given again; the rest goes on to `job_plan`."""
    from gpu_skills.cli.job_plan import run_plan
    from gpu_skills.errors import UsageError

    frozen |= {f"--{name.removesuffix('_command').replace('_', '-')}": flags.pop(name) for name in _FROZEN}
    if given := [name for name, value in frozen.items() if value]:
        cmd = frozen["a command"]
        raise UsageError(
            f"with --plan everything is as it was frozen, so {', '.join(given)} cannot be given",
            next_step=_plan_again(context, plan, cmd),
        )
    return run_plan(context, plan, **flags)


def _plan_again(context: Context, plan: str, cmd: tuple[str, ...]) -> str:
    """The command that plans what was given, or what was frozen."""
    from gpu_skills.errors import GpuError
    from gpu_skills.jobs import agreed, staging

    if cmd:
        return f"gpu plan --freeze -- {shlex.join(cmd)}"
    try:
        return staging.plan_again(agreed.open_plan(context.project, plan)[1])
    except GpuError:
        return "gpu plan --freeze -- CMD"


@command("ls", reads_only=True, example="gpu job ls --limit 20")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
def ls(context: Context, limit: int) -> Output:
    """List jobs, newest first; one whose machine is being made comes first. Reads only."""
    from gpu_skills.jobs import launch

    _settle_all(context)
    shown = context.ledger.jobs(limit=limit)
    documents = [line_document(context, line) for line in shown]
    if (pending := launch.latest_pending(context.project, context.ledger)) is not None:
        from gpu_skills.cli.job_plan import pending_line

        documents.insert(0, line_document(context, pending_line(context, pending)))
    rows = [
        [
            d["job"],
            d["state"],
            "-" if d["exit_code"] is None else str(d["exit_code"]),
            d["started_at"] or "-",
            format_duration(d["duration_s"]) if d["duration_s"] is not None else "-",
            format_usd(d["cost_usd"]) if d["cost_usd"] is not None else "-",
            d["title"],
        ]
        for d in documents
    ]
    text = (
        table(rows, ["JOB", "STATE", "EXIT", "STARTED", "TIME", "COST", "WHAT"])
        if rows
        else "no jobs yet: gpu job run -- CMD"
    )
    left_out = max(0, context.ledger.count_jobs() - len(shown))
    if left_out:
        text += f"\n… and {left_out} more (--limit)"
    return Output({"jobs": documents, "left_out": left_out}, text)


@command("status", reads_only=True, example="gpu job status --json")
@click.argument("job_id", metavar="[JOB]", required=False)
def status(context: Context, job_id: str | None) -> Output:
    """State, exit code, time, cost_usd and output files of a job. Reads only, and records the end it sees."""
    from gpu_skills.jobs.records import JobFolder

    launched = _launch(context, job_id)
    if launched is not None and context.ledger.latest(launched.job) is None:
        from gpu_skills.cli.job_plan import pending_document

        document = pending_document(context, launched)
        return Output(document, job_text(document))
    line = job_line(context, job_id)
    answer = None
    if context.ledger.is_open(line):
        answer = _ask(context, line["id"])
        line = context.ledger.latest(line["id"]) or line
        if not context.ledger.is_open(line):
            answer = None  # the ledger has the end now, also one the machine knows nothing of
        context.tell_what_is_due(job=line["id"])
    document = job_document(context, line["id"], answer, line)
    if JobFolder(context.project, line["id"]).events.exists():
        document["events"] = _events(context, line["id"])
    return Output(document, job_text(document))


@command("logs", reads_only=True, example="gpu job logs -f")
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--tail", type=click.IntRange(1, 100_000), metavar="N", help="Only the last N lines.")
@click.option("--offset", type=click.IntRange(min=0), help="Start at this byte; `next` of the JSON continues.")
def logs(context: Context, job_id: str | None, follow: bool, tail: int | None, offset: int | None) -> Output | None:
    """The job's log. Returns at once unless -f. Control sequences are taken out. Reads only.

    With --json: {text, offset, next, state}; with -f one such document a piece.
    """
    from gpu_skills.jobs import follow as following
    from gpu_skills.jobs.records import JobFolder

    line = job_line(context, job_id)
    folder = JobFolder(context.project, line["id"])
    if folder.log.exists():
        return _kept_log(context, folder, line, tail, offset)
    link = job_link(context, line["id"])
    project_id = context.project.project_id
    if not follow:
        size = None if offset is not None else (tail * 400 if tail else None)
        if size is not None:
            piece = following.read_log(link, project_id, line["id"], tail_bytes=min(size, 4 << 20))
            lines = following.last_lines(piece.data, tail or 1)
        else:
            pieces, start = bytearray(), offset or 0
            first = start
            while True:
                piece = following.read_log(link, project_id, line["id"], offset=start)
                if piece.gap_bytes:
                    pieces += f"\n{following.gap_notice(piece.gap_bytes)}\n".encode()
                pieces += piece.data
                start = piece.next
                if not piece.data or len(pieces) > 64 << 20:
                    break
            lines = following.last_lines(bytes(pieces), 1 << 30)
            piece = following.Piece(first, start, b"", 0, piece.status)
        text = "\n".join(lines)
        return Output(
            {
                "job": line["id"],
                "text": text,
                "offset": piece.offset,
                "next": piece.next,
                "state": piece.status["state"],
            },
            text,
        )
    start = offset or 0
    if tail:
        piece = following.read_log(link, project_id, line["id"], tail_bytes=min(tail * 400, 4 << 20))
        start = piece.offset if offset is None else offset
        skip = following.last_lines(piece.data, tail)
        for shown in skip:
            show_line(context, line["id"], shown, piece)
        start = piece.next
    try:
        final = stream(context, link, line["id"], start)
    except KeyboardInterrupt:  # a program had its documents already, each with the `next` to go on from
        _stopped_watching(context, line["id"])
        raise click.exceptions.Exit(EXIT_CANCELLED) from None
    settle(context, link)
    return Output(
        {"job": line["id"], "text": "", "offset": final.next, "next": final.next, "state": final.status["state"]}
    )


@command("pull", example="gpu job pull J-000001", exits="0 everything verified · 1 something is missing or changed")
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option("--to", "destination", type=click.Path(path_type=Path), help="Another folder than gpu-outputs/<job>.")
@click.option("--force", is_flag=True, help="Check every local file again instead of trusting earlier pulls.")
@click.option(
    "--since-step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only checkpoints after step N: paths such as checkpoint-1200/ or step_1200.pt.",
)
def pull(context: Context, job_id: str | None, destination: Path | None, force: bool, since_step: int | None) -> Output:
    """Download what changed into gpu-outputs/<job>, every file verified by SHA-256. Works while the job runs."""
    from gpu_skills.cli.job_artifacts import fetch_home
    from gpu_skills.jobs.collect import MachineGone, MachineStopped

    line = job_line(context, job_id)
    try:
        link = job_link(context, line["id"])
    except (MachineGone, MachineStopped):
        fetched = fetch_home(context, line["id"], destination)
        if fetched is None:
            raise
        return fetched
    settle(context, link)
    return pull_outputs(context, link, line["id"], destination=destination, force=force, since_step=since_step)


@command("cancel", example="gpu job cancel J-000001", exits="0 ended · 1 it still runs · 6 its machine may still bill")
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option(
    "--abandon-outputs", is_flag=True, help="The user's explicit instruction to lose what was not pulled yet."
)
def cancel(context: Context, job_id: str | None, abandon_outputs: bool) -> Output:
    """End a running job and everything it started: TERM, KILL after 10 s. Its outputs stay and can be pulled.

    A job with a machine of its own can be cancelled from the moment it is launched: its outputs are pulled and its
    machine is destroyed.
    """
    from gpu_skills.jobs import cancelling

    launched = _launch(context, job_id)
    if launched is not None:
        return _cancel_launch(context, launched, abandon_outputs)
    line = job_line(context, job_id)
    if not context.ledger.is_open(line):
        return Output(job_document(context, line["id"], None, line), f"{line['id']} had already ended")
    link = job_link(context, line["id"])
    answer = cancelling.end_on_machine(context.project, context.clock, link, line["id"], wait_s=30)
    settle(context, link)
    document = job_document(context, line["id"], answer)
    still_runs = answer["state"] == "running"
    hints = [f"{line['id']} has not ended yet; next: gpu job cancel {line['id']}"] if still_runs else []
    return Output(document, job_text(document), exit_code=1 if still_runs else 0, hints=hints)


def _cancel_launch(context: Context, launched: Any, gives_up_outputs: bool) -> Output:
    from gpu_skills.jobs import cancelling

    line = context.ledger.latest(launched.job)
    if launched.ended_at is not None and line is not None and not context.ledger.is_open(line):
        return Output(job_document(context, launched.job, None, line), f"{launched.job} had already ended")
    state = cancelling.cancel(
        context.operator,
        launched,
        collect=lambda link, job: say(pull_outputs(context, link, job).text),
        gives_up_outputs=gives_up_outputs,
    )
    document = job_document(context, launched.job)
    text = job_text(document) + f"\nits machine is {state}"
    hints = [] if state == "destroyed" else ["it counts as burning until it is proven gone; next: gpu reconcile"]
    return Output(document, text, exit_code=0 if state == "destroyed" else 6, hints=hints)


# watching a run --------------------------------------------------------------------------------


def _attached(context: Context, link: Any, job_id: str, *, no_pull: bool) -> Output:
    """Stream the log, pull, write the ledger's end, and exit as the job did."""
    from gpu_skills.errors import GpuError
    from gpu_skills.jobs import observe

    try:
        final = stream(context, link, job_id, 0, to_stderr=context.json)
    except KeyboardInterrupt:
        _stopped_watching(context, job_id)
        return Output(job_document(context, job_id), "", exit_code=EXIT_CANCELLED)
    answer = final.status
    pulled, problem = None, None
    if not no_pull:
        try:
            pulled = pull_outputs(context, link, job_id)
        except GpuError as exc:
            problem = exc
    # After the pull, so that the ledger's line can say where the outputs are now.
    answer = settle(context, link).get(job_id, answer)
    document = job_document(context, job_id, answer)
    if pulled is not None:
        document["pulled"] = pulled.document
        if pulled.text:
            say(pulled.text)
    say(summary(document))
    if problem is not None:
        problem.details["job"] = document
        raise problem
    return Output(document, "", exit_code=observe.exit_code_of(answer))


def _stopped_watching(context: Context, job_id: str) -> None:
    context.say(f"gpu: stopped watching, {job_id} goes on; next: gpu job logs -f {job_id}, or gpu job cancel {job_id}")


def _kept_log(context: Context, folder: Any, line: dict[str, Any], tail: int | None, offset: int | None) -> Output:
    from gpu_skills.jobs import follow as following

    data = folder.log.read_bytes()
    start = min(offset or 0, len(data))
    lines = following.last_lines(data[start:], tail or (1 << 30))
    text = "\n".join(lines)
    state = context.ledger.state_of(line)
    return Output({"job": folder.job, "text": text, "offset": start, "next": len(data), "state": state}, text)


def pull_outputs(
    context: Context,
    link: Any,
    job_id: str,
    *,
    destination: Path | None = None,
    force: bool = False,
    since_step: int | None = None,
) -> Output:
    """Download what changed and tell of it."""
    from gpu_skills.cli.progress import byte_bar
    from gpu_skills.jobs import collect

    if destination is not None and not destination.is_absolute():
        destination = context.cwd / destination
    with byte_bar(context, "pull", before="comparing", after="verifying") as progress:
        got = collect.pull(
            context.project,
            context.clock,
            link,
            job_id,
            destination=destination,
            progress=progress,
            force=force,
            since_step=since_step,
        )
    shown = _shown_path(context, got.destination)
    document = {
        "job": job_id,
        "destination": str(got.destination),
        "new": got.report.new,
        "unchanged": got.report.unchanged,
        "changing": list(got.report.changing)[:50],
        "bytes": got.report.bytes,
        "files": got.files,
        "final": got.final,
        "skipped": got.skipped[:50],
    }
    new = f"{got.report.new} new ({format_bytes(got.report.bytes)})"
    kind = "output file" if since_step is None else "checkpoint file"
    text = f"{counted(got.files, kind)} in {shown}: {new}, {got.report.unchanged} unchanged"
    if got.report.changing:
        text += f", {len(got.report.changing)} still being written (pull again later)"
    if got.skipped:
        text += f"; not pulled: {', '.join(str(s.get('path')) for s in got.skipped[:5])}"
    if got.final and got.files:
        from gpu_skills.cli.job_artifacts import push_home

        if (home := push_home(context, link, job_id)) is not None:
            document["home"] = home
    nothing = "no outputs" if got.final else f"no outputs of {job_id} yet"
    if since_step is not None:
        nothing = f"no checkpoint of {job_id} after step {since_step} yet"
    return Output(document, text if got.files or got.skipped else nothing)


# shared by the verbs --------------------------------------------------------------------------------


def job_line(context: Context, job_id: str | None) -> dict[str, Any]:
    """The ledger's last line of this job, or of the latest one."""
    from gpu_skills.errors import JobNotFound, NoJobs

    wanted = job_id or context.ledger.last_id()
    if wanted is None:
        raise NoJobs()
    line = context.ledger.latest(wanted)
    if line is None:
        raise JobNotFound(job=wanted)
    return line


def _launch(context: Context, job_id: str | None) -> Any:
    """The launch of this job, or of the latest one; None for a job on the project's machine."""
    from gpu_skills.jobs import launch

    if job_id is None:
        pending = launch.latest_pending(context.project, context.ledger)
        job_id = pending.job if pending is not None else context.ledger.last_id()
    return None if job_id is None else launch.of_job(context.project, job_id)


def job_link(context: Context, job_id: str) -> Any:
    """A link to the machine a job ran on, if that can answer."""
    from gpu_skills.jobs import collect
    from gpu_skills.lifecycle import machines

    machine_id = _submission(context, job_id)["machine_id"]
    machine = machines.find(context.project, machine_id)
    if machine is not None:
        collect.awake(machine, job_id)
    return context.machine_link(machine_id)


def _submission(context: Context, job_id: str) -> dict[str, Any]:
    from gpu_skills.jobs.records import JobFolder

    return JobFolder(context.project, job_id).submission()


def _ask(context: Context, job_id: str) -> dict[str, Any] | None:
    from gpu_skills.jobs import observe

    link = job_link(context, job_id)
    answer = settle(context, link).get(job_id)
    if answer is not None and answer["state"] == "running" and context.may_write:
        events = observe.sync_events(context.project, link, job_id)
        if link.machine.is_rented and any(event["event"] == "no_progress" for event in events):
            context.notifier.send("job_stalled", job_id, rate_usd_hr=link.machine.rate_usd_hr)
    return answer


def settle(context: Context, link: Any) -> dict[str, dict[str, Any]]:
    from gpu_skills.jobs import observe

    return observe.settle(
        context.project,
        context.ledger,
        context.clock,
        link,
        write=context.may_write,
        notify=lambda event, subject, **facts: context.notifier.send(event, subject, **facts),
    )


def _settle_all(context: Context) -> None:
    """Ask every machine that has open jobs; one that does not answer is named and skipped."""
    from gpu_skills.errors import RemoteError, StateError

    for machine_id in sorted({line.get("machine_id") for line in context.ledger.open_jobs() if line.get("machine_id")}):
        try:
            settle(context, context.machine_link(machine_id))
        except (RemoteError, StateError) as exc:
            say(f"gpu: {exc.message}; its jobs are shown as last seen")


def _events(context: Context, job_id: str) -> list[dict[str, Any]]:
    from gpu_skills.jobs.records import JobFolder
    from gpu_skills.state import journal

    records = [r for _, _, r in journal.scan(JobFolder(context.project, job_id).events) if isinstance(r, dict)]
    return records[-20:]


def _job_directory(context: Context, directory: Path | None) -> Path:
    if directory is None:
        return context.project.root
    return directory if directory.is_absolute() else context.cwd / directory


def _hf_token(context: Context) -> str | None:
    from gpu_skills import credentials

    return credentials.hf_token(context.project.root, context.environ)


def _shown_path(context: Context, path: Path) -> str:
    try:
        return str(path.relative_to(context.cwd))
    except ValueError:
        return str(path)


def _say_packed(packed: Any) -> None:
    files = sum(1 for e in packed.tree.entries if not e.is_dir)
    text = f"{counted(files, 'file')}, {format_bytes(packed.total_bytes)}"
    if packed.left_out:
        shown = ", ".join(f"{o.path} ({format_bytes(o.bytes)})" for o in packed.left_out[:8])
        more = len(packed.left_out) - 8
        text += f"; left out: {shown}" + (f" and {more} more" if more > 0 else "")
    say(text)
    for warning in packed.warnings:
        say(f"warning: {warning}")
