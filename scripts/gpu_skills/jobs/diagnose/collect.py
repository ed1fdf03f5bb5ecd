"""What there is to know about a job that failed: its log, how it ended, its machine while that answers. Reads only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_skills import resources
from gpu_skills.errors import GpuError, one_line
from gpu_skills.jobs import follow
from gpu_skills.jobs.diagnose.classify import Text
from gpu_skills.jobs.records import JobFolder
from gpu_skills.lifecycle.connect import Link
from gpu_skills.state import journal

# Of a long log its beginning, where imports fail, and its end, where programs die.
HEAD_BYTES = 1 << 20
TAIL_BYTES = 4 << 20
EVENTS_READ = 100
CHECK_TIMEOUT_S = 300.0
FULL_GB = 0.2
SHOWN_SMI_LINES = 60


@dataclass(frozen=True)
class Log:
    """The parts of a log that are read. kept: machine, local, or none where there is none."""

    kept: str
    size: int
    head: bytes = b""
    tail: bytes = b""

    @property
    def left_out_bytes(self) -> int:
        return max(0, self.size - len(self.head) - len(self.tail))

    def text(self) -> Text:
        gap = f"\n{follow.gap_notice(self.left_out_bytes)}\n".encode() if self.left_out_bytes else b""
        return Text("log", (self.head, gap, self.tail), is_account=True)


@dataclass
class Look:
    """A machine as it is now. facts: see `cli/job_diagnose`; why_not: the reason it could not be asked."""

    machine: str | None
    why_not: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    texts: list[Text] = field(default_factory=list)


def local_log(folder: JobFolder) -> Log | None:
    """The log that was kept when the job's outputs were collected; None without one."""
    try:
        with folder.log.open("rb") as log:
            size = folder.log.stat().st_size
            head = log.read(HEAD_BYTES)
            log.seek(max(len(head), size - TAIL_BYTES))
            return Log("local", size, head, log.read(TAIL_BYTES))
    except OSError:
        return None


def machine_log(link: Link, project_id: str, job: str) -> Log:
    """The log as the machine has it, also of a job that still runs. Raises RemoteError kinds."""
    first = follow.read_log(link, project_id, job, offset=0)
    last = follow.read_log(link, project_id, job, tail_bytes=TAIL_BYTES)
    seen_twice = max(0, first.next - last.offset)
    return Log("machine", max(first.next, last.next), first.data, last.data[seen_twice:])


def ending(line: Mapping[str, Any], answer: Mapping[str, Any] | None) -> Text:
    """What ledger and runner say of the end, as a text: `failed, exit code 137, reason exit_code`."""
    said = [str(line.get("status"))]
    for source in filter(None, (line, answer)):
        if source.get("exit_code") is not None:
            said.append(f"exit code {source['exit_code']}")
        said += [str(source[name]) for name in ("reason", "message", "error") if source.get(name)]
    return Text("end", (one_line(", ".join(dict.fromkeys(said)), limit=4000).encode(),), is_account=True)


def history(folder: JobFolder) -> Text:
    """What the runner noticed while the job ran: standstills, limits, a restart of the machine."""
    events = [record for _, _, record in journal.scan(folder.events) if isinstance(record, dict)]
    lines = (json.dumps(event, ensure_ascii=True) for event in events[-EVENTS_READ:])
    return Text("events", ("\n".join(lines).encode(),))


def look(link: Link, *, may_compute: bool) -> Look:
    """Ask a machine about its GPU, memory, disk and versions.

    may_compute: try the GPU as well; not while somebody is at work there, whose memory that would take.
    """
    seen = Look(link.machine.id)
    try:
        probe = link.session.call("probe", {})
        asked = {"look": True, "compute": may_compute, "root": link.session.greeting.root}
        told = link.session.run_program(resources.checkup().read_text("utf-8"), asked, timeout_s=CHECK_TIMEOUT_S)
    except GpuError as exc:
        seen.why_not = exc.message
        return seen
    gpu = told.get("gpu") if isinstance(told.get("gpu"), dict) else {}
    seen.facts = _facts(probe, told, gpu)
    seen.texts = list(_texts(probe, seen.facts, gpu))
    return seen


def _facts(probe: Mapping[str, Any], told: Mapping[str, Any], gpu: Mapping[str, Any]) -> dict[str, Any]:
    gpus = [g for g in probe.get("gpus") or () if isinstance(g, dict)][:64]
    arches = gpu.get("arch_list")
    table = told.get("nvidia_smi")
    return {
        "python": _text(gpu.get("python")) or _text(probe.get("python")),
        "torch": _text(gpu.get("version")),
        "torch_cuda": _text(gpu.get("built_for")),
        "torch_arches": [one_line(str(arch), limit=20) for arch in arches[:40]] if isinstance(arches, list) else [],
        "cuda": _number(told.get("cuda")),
        "driver": _text(gpus[0].get("driver")) if gpus else None,
        "gpus": [
            {"name": one_line(str(g.get("name")), limit=80), "vram_mib": _number(g.get("vram_mib"))} for g in gpus
        ],
        "gpu_works": gpu.get("ok") if isinstance(gpu.get("ok"), bool) else None,
        "capability": max((_number(c) or 0.0 for c in _list(gpu.get("capabilities"))), default=None),
        "disk_free_gb": _number(told.get("disk_free_gb")),
        "shm_mib": _number(told.get("shm_mib")),
        "nvidia_smi": [one_line(row, limit=120) for row in table.splitlines()[:SHOWN_SMI_LINES]]
        if isinstance(table, str)
        else [],
    }


def _texts(probe: Mapping[str, Any], facts: Mapping[str, Any], gpu: Mapping[str, Any]) -> Iterator[Text]:
    """What of the facts may name a failure."""
    if problem := _text(probe.get("gpu_error")):
        yield Text("gpu", (problem.encode(),))
    if gpu.get("how") and (problem := _text(gpu.get("error"))):
        yield Text("gpu", (problem.encode(),))
    if facts["nvidia_smi"]:
        yield Text("nvidia-smi", ("\n".join(facts["nvidia_smi"]).encode(),))
    free = facts["disk_free_gb"]
    if free is not None and free < FULL_GB:
        yield Text("disk", (f"no space left: {free:g} GB of its disk are free now".encode(),))


def _text(value: Any) -> str | None:
    return one_line(value, limit=400) if isinstance(value, str) and value else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e12 else None


def _list(value: Any) -> list[Any]:
    return value[:64] if isinstance(value, list) else []
