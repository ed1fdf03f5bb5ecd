"""`gpu job artifacts`: what a job left and where it is; push it to a durable home; read it back."""

from __future__ import annotations

from typing import Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import Context
from gpu_skills.cli.output import Output, say
from gpu_skills.units import counted, format_bytes

SHOWN = 200
SHOWN_LINES = 20


@command(
    "artifacts",
    reads_only=True,
    example="gpu job artifacts J-000001 --to s3://bucket/runs --verify",
    exits="0 done · 1 an object or a file is not what is on record · 2 usage, no credential, no such bucket · "
    "3 not pulled yet, or a store that ignores conditional writes · 5 the store refused or is not there",
)
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option("--to", "uri", metavar="URI", help="Push them there: s3://BUCKET/PREFIX, file:///FOLDER or a path.")
@click.option("--direct", is_flag=True, help="With --to: from the machine straight to the bucket, without a pull.")
@click.option("--verify", is_flag=True, help="Read every object back whole and compare its hash.")
def artifacts(context: Context, job_id: str | None, uri: str | None, direct: bool, verify: bool) -> Output:
    """List what a job left and where it is. Costs nothing; with --to it stores, which your store may bill.

    --to sends what was pulled and verified, and of that only what is not there yet; run it again after an interruption.
    With --direct the machine sends it, by signed addresses: no key of yours is there. With --verify it then counts as
    collected for a day. S3 settings are boto3's: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL_S3 (R2 and others).
    """
    from gpu_skills.cli.job import job_line
    from gpu_skills.errors import ModeForbids, UsageError
    from gpu_skills.jobs.records import JobFolder

    line = job_line(context, job_id)
    job = line["id"]
    if direct and uri is None:
        raise UsageError("--direct needs --to", next_step="gpu job artifacts --to s3://BUCKET/PREFIX --direct")
    if (uri or verify) and not context.may_write:  # what was seen has to be written down
        raise ModeForbids(
            command=f"gpu job artifacts {'--to' if uri else '--verify'}", mode=context.mode, needed="operate"
        )
    pushed = None if uri is None else push(context, job, uri, is_direct=direct)
    line = context.ledger.latest(job) or line
    verified = _read_back(context, job) if verify else None
    document = _document(context, JobFolder(context.project, job), line)
    document |= {"pushed": pushed, "verified": verified}
    return Output(document, _text(document))


def push(context: Context, job: str, uri: str, *, is_direct: bool = False) -> dict[str, Any]:
    """Push what was pulled and verified, or let the machine do it; what that was, for a document."""
    from gpu_skills.cli.job import job_link, settle
    from gpu_skills.cli.progress import byte_bar
    from gpu_skills.jobs import direct, durable

    with byte_bar(context, "push", before="comparing", after="recording") as progress:
        if is_direct:
            link = job_link(context, job)
            done = direct.push(context.project, context.clock, link, job, uri, progress=progress)
            settle(context, link)  # after it, so that the ledger's line can say where the outputs are
        else:
            done = durable.push(context.project, context.clock, job, uri, progress=progress)
    return {
        "uri": done.uri,
        "files": done.files,
        "kept": done.kept,
        "bytes": done.bytes_sent,
        "left_out": done.left_out[:50],
    }


def offer_home(context: Context, link: Any, job: str) -> None:
    """At the start: what a rented machine needs to send the outputs away itself, should nobody come for them."""
    from gpu_skills.jobs import durable

    if link.machine.is_rented and durable.wanted_home(context.project, job) is not None:
        from gpu_skills.jobs import expiry

        if (problem := expiry.offer(context.project, context.clock, link, job)) is not None:
            say(f"gpu: {problem}")


def push_home(context: Context, link: Any, job: str) -> dict[str, Any] | None:
    """After a pull: push to where the job's `outputs.uri` says, if it says so. Nothing is lost when that fails: the
    outputs are here, and the command that does it again is named."""
    from gpu_skills.errors import GpuError
    from gpu_skills.jobs import durable, expiry

    uri = durable.wanted_home(context.project, job)
    if uri is None:
        return None
    try:
        done = push(context, job, uri)
        if link.machine.is_rented:
            expiry.withdraw(context.project, link, job)
    except GpuError as exc:
        say(f"gpu: not pushed to {uri}: {exc.message} [{exc.code}]")
        context.say(f"next: gpu job artifacts {job} --to {uri}")
        return {"uri": uri, "error": exc.to_dict() | {"details": {}}}
    say(f"{counted(done['files'], 'output')} in {done['uri']}, {format_bytes(done['bytes'])} sent")
    return done


def fetch_home(context: Context, job: str, destination: Any) -> Output | None:
    """Instead of a pull from a machine that cannot answer: what it sent to the job's home at its end, if it did."""
    from gpu_skills.errors import ArtifactMissing
    from gpu_skills.jobs import durable, expiry
    from gpu_skills.jobs.records import JobFolder, is_collected

    uri = durable.wanted_home(context.project, job)
    if uri is None or is_collected(context.project, job):
        return None
    if destination is not None and not destination.is_absolute():
        destination = context.cwd / destination
    try:
        count = expiry.fetch(context.project, context.clock, job, uri, destination=destination)
    except ArtifactMissing:
        return None
    collected = JobFolder(context.project, job).read("collected") or {}
    document = {
        "job": job,
        "destination": collected["destination"],
        "new": count,
        "unchanged": 0,
        "changing": [],
        "bytes": collected["bytes"],
        "files": count,
        "final": True,
        "skipped": [],
    }
    return Output(document, f"{counted(count, 'output file')}, which its machine sent to {uri} at its end")


def _read_back(context: Context, job: str) -> int:
    from gpu_skills.cli.progress import byte_bar
    from gpu_skills.jobs import durable

    with byte_bar(context, "verify", before="reading back", after="recording") as progress:
        return durable.read_back(context.project, context.clock, job, progress=progress)


def _document(context: Context, folder: Any, line: dict[str, Any]) -> dict[str, Any]:
    from gpu_skills.jobs import durable
    from gpu_skills.jobs.records import is_collected

    files = list(durable.files_listed(folder))
    record, collected = folder.read("artifacts"), folder.read("collected")
    return {
        "job": folder.job,
        "state": context.ledger.state_of(line),
        "collected": is_collected(context.project, folder.job),
        "outputs_dir": collected["destination"] if collected else None,
        "uri": record["uri"] if record else None,
        "kept": durable.is_kept(context.project, folder.job, context.clock.now()),
        "files": files[:SHOWN],
        "files_left_out": max(0, len(files) - SHOWN),
        "bytes": sum(file["bytes"] for file in files),
        "not_pushed": (record or {}).get("left_out", [])[:50],
        "ledger": [
            {"name": str(a["name"]), "uri": a.get("uri")}
            for a in (line.get("artifacts") or [])[:SHOWN]
            if isinstance(a, dict) and "name" in a
        ],
    }


def _text(document: dict[str, Any]) -> str:
    lines = [f"{document['job']} {document['state']}: {_sum(document)}"]
    for file in document["files"][:SHOWN_LINES]:
        where = file["uri"] or file["local"] or "not here"
        seen = f", read back {file['verified_at']}" if file["verified_at"] else ""
        lines.append(f"  {format_bytes(file['bytes']):>10}  {file['path']}  {where}{seen}")
    more = len(document["files"]) - SHOWN_LINES + document["files_left_out"]
    if more > 0:
        lines.append(f"  … and {more} more")
    if not document["files"]:
        lines += [f"  {a['name']}  {a['uri'] or '-'}" for a in document["ledger"][:SHOWN_LINES]]
    for left in document["not_pushed"][:5]:
        lines.append(f"not pushed: {left['path']} ({left['why']})")
    if document["verified"] is not None:
        lines.append(f"read back and right: {counted(document['verified'], 'object')}")
    if document["files"] and not document["collected"] and not document["kept"]:
        lines.append(f"next: gpu job pull {document['job']}")
    return "\n".join(lines)


def _sum(document: dict[str, Any]) -> str:
    if not document["files"]:
        return "nothing is listed" if not document["ledger"] else counted(len(document["ledger"]), "artifact")
    return (
        f"{counted(len(document['files']) + document['files_left_out'], 'output')}, {format_bytes(document['bytes'])}"
    )
