"""Is this machine what was rented, and does its GPU work? Asked of the machine itself before anything runs there.

`remote/checkup.py` runs there and tells facts; what they mean is decided here. A GPU that a library finds
available may still have no code in it: so something is computed, with the image's own PyTorch where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpu_skills import resources
from gpu_skills.errors import ArchUnsupported, NotReady, one_line
from gpu_skills.lifecycle.machines import VRAM_TOLERANCE
from gpu_skills.lifecycle.plans.plan import Plan
from gpu_skills.providers.gpus import canonical, same_model, size_class_gb

if TYPE_CHECKING:
    from gpu_skills.lifecycle.connect import Link

# A first import of PyTorch from a slow disk takes a minute; each GPU is tried, one after the other.
TIMEOUT_S = 300.0
# Of the disk that was asked for, what has to be free after the image and what came with it.
FREE_SHARE, FREE_GB = 0.1, 2.0
# Docker's default: data loaders with workers die of it.
SMALL_SHM_MIB = 512
# What the builds of PyTorch have code for: the first that knows an architecture, and the last.
_FIRST_BUILD = ((12.0, "cu128", "2.7"), (10.0, "cu128", "2.7"), (9.0, "cu118", "2.0"), (8.9, "cu118", "2.0"))
_LAST_BUILD_OF_OLD = (7.5, "cu126")


@dataclass(frozen=True)
class Problem:
    """code: gpu_missing, gpu_other, vram_too_small, cuda_too_old, driver_too_old, gpu_failed, arch_unsupported,
    disk_full, no_network or machine_lacks."""

    code: str
    reason: str
    wheel: str | None = None


@dataclass(frozen=True)
class Health:
    """What was found. how: torch, driver or nvidia-smi: how the GPU was tried. warnings: it works, but."""

    problems: tuple[Problem, ...]
    warnings: tuple[str, ...] = ()
    gpu: str | None = None
    gpu_count: int = 0
    vram_gb: float | None = None
    how: str | None = None
    cuda: float | None = None

    def error(self, machine: str) -> NotReady:
        """All problems in one; the class is that of the first."""
        first = self.problems[0]
        reason = "; ".join(problem.reason for problem in self.problems)
        details = {"machine": machine, "what": first.code, "reason": reason}
        details["problems"] = [{"code": problem.code, "reason": problem.reason} for problem in self.problems]
        if first.code == "arch_unsupported":
            return ArchUnsupported(**details, wheel=first.wheel or "built for it")
        return NotReady(**details)


def check(link: Link, plan: Plan, *, gpu: str | None, base_url: str) -> Health:
    """Ask the machine. gpu: the model that was rented. base_url: of its provider, which it must reach to end its bill.

    Raises RemoteError kinds when it cannot be asked.
    """
    probe = link.session.call("probe", {})
    asked = {"root": link.session.greeting.root, "reach": _address(base_url), "gpus": plan.gpu_count}
    facts = link.session.run_program(resources.checkup().read_text(encoding="utf-8"), asked, timeout_s=TIMEOUT_S)
    return judge(plan, probe, facts, gpu=gpu)


def judge(plan: Plan, probe: Mapping[str, Any], facts: Mapping[str, Any], *, gpu: str | None) -> Health:
    """What the facts mean for this plan. Pure; facts come from a machine and may be anything."""
    gpus = [g for g in _list(probe.get("gpus")) if isinstance(g, dict)]
    operation = _mapping(facts.get("gpu"))
    problems = [
        *_missing(probe, gpus),
        *_gpus(plan, gpus, gpu),
        *_drivers(plan, gpus, _number(facts.get("cuda"))),
        *(_operation(operation) if gpus else []),
        *_surroundings(plan, facts),
    ]
    # The most telling first: an architecture is no fault of this machine.
    problems.sort(key=lambda problem: problem.code != "arch_unsupported")
    vram = _number(gpus[0].get("vram_mib")) if gpus else None
    return Health(
        tuple(problems),
        tuple(_warnings(facts, operation)),
        gpu=one_line(str(gpus[0].get("name")), limit=80) if gpus else None,
        gpu_count=len(gpus),
        vram_gb=size_class_gb(vram) if vram else None,
        how=_text(operation.get("how")),
        cuda=_number(facts.get("cuda")),
    )


def _missing(probe: Mapping[str, Any], gpus: list[dict[str, Any]]) -> list[Problem]:
    if not probe.get("bash"):
        return [Problem("machine_lacks", "it has no bash")]
    if not gpus:
        why = _text(probe.get("gpu_error")) or "nvidia-smi shows none"
        return [Problem("gpu_missing", f"it has no GPU that works: {why}")]
    return []


def _gpus(plan: Plan, gpus: list[dict[str, Any]], gpu: str | None) -> list[Problem]:
    if not gpus:
        return []
    problems = []
    if len(gpus) < plan.gpu_count:
        problems.append(Problem("gpu_missing", f"it has {len(gpus)} GPUs, rented were {plan.gpu_count}"))
    names = {str(g.get("name")) for g in gpus}
    others = [name for name in names if gpu and not (same_model(gpu, name) or same_model(name, gpu))]
    if others:
        shown = canonical(one_line(others[0], limit=80))
        problems.append(Problem("gpu_other", f"its GPU is {shown}, rented was {gpu}"))
    least_mib = min((_number(g.get("vram_mib")) or 0.0 for g in gpus), default=0.0)
    if plan.min_vram_gb is not None and least_mib and least_mib < plan.min_vram_gb * 1024 * VRAM_TOLERANCE:
        problems.append(
            Problem("vram_too_small", f"a GPU has {least_mib / 1024:.1f} GiB, needed are {plan.min_vram_gb:g} GB")
        )
    return problems


def _drivers(plan: Plan, gpus: list[dict[str, Any]], cuda: float | None) -> list[Problem]:
    """CUDA of the host is read anew at every start: a machine may come back on a host with an older driver."""
    problems = []
    if plan.min_cuda is not None and cuda is not None and cuda < plan.min_cuda:
        problems.append(Problem("cuda_too_old", f"its driver allows CUDA {cuda:g}, the image needs {plan.min_cuda:g}"))
    driver = _text(gpus[0].get("driver")) if gpus else None
    if plan.min_driver is not None and driver is not None and _parts(driver) < _parts(plan.min_driver):
        problems.append(Problem("driver_too_old", f"its driver is {driver}, needed is {plan.min_driver}"))
    return problems


def _operation(operation: Mapping[str, Any]) -> list[Problem]:
    if operation.get("ok") is True:
        return []
    error = one_line(_text(operation.get("error")) or "it said nothing", limit=300)
    capability = max((_number(c) or 0.0 for c in _list(operation.get("capabilities"))), default=0.0)
    known = [str(arch) for arch in _list(operation.get("arch_list"))][:40]
    if (
        operation.get("how") == "torch"
        and capability
        and ("no kernel image" in error.lower() or (known and not has_code_for(capability, known)))
    ):
        wheel = wheel_for(capability)
        version = _text(operation.get("version")) or "PyTorch"
        sm = f"sm_{capability * 10:.0f}"
        knows = f"has code for {', '.join(known)}" if known else "has no code for it"
        return [Problem("arch_unsupported", f"the GPU is {sm}, torch {version} {knows}; needed is {wheel}", wheel)]
    return [Problem("gpu_failed", f"a computation on its GPU failed ({operation.get('how') or 'not tried'}): {error}")]


def has_code_for(capability: float, arch_list: list[str]) -> bool:
    """Whether a build runs on it: binary code of the same major version, or portable code of an older one."""
    major, minor = divmod(round(capability * 10), 10)
    for arch in arch_list:
        found = re.fullmatch(r"(sm|compute)_(\d{1,2})(\d)[af]?", arch)
        if found is None:
            continue
        theirs = int(found[2]), int(found[3])
        if theirs == (major, minor) or (found[1] == "sm" and theirs[0] == major and theirs[1] <= minor):
            return True
        if found[1] == "compute" and theirs <= (major, minor):
            return True
    return False


def wheel_for(capability: float) -> str:
    """The build of PyTorch that has code for this architecture."""
    if capability < _LAST_BUILD_OF_OLD[0]:
        return f"one built for {_LAST_BUILD_OF_OLD[1]} or older (later ones leave sm_{capability * 10:.0f} out)"
    for least, build, version in _FIRST_BUILD:
        if capability >= least:
            return f"torch {version} or newer built for {build} or newer"
    return "one built for cu118 or newer"


def _surroundings(plan: Plan, facts: Mapping[str, Any]) -> list[Problem]:
    problems = []
    free = _number(facts.get("disk_free_gb"))
    needed = min(FREE_GB, plan.disk_gb * FREE_SHARE)
    if free is not None and free < needed:
        problems.append(Problem("disk_full", f"{free:g} GB of its disk are free, of {plan.disk_gb} GB asked for"))
    if facts.get("reaches") is False:
        why = one_line(_text(facts.get("reach_error")) or "no reason", limit=160)
        problems.append(Problem("no_network", f"it does not reach its provider, so it could not end its bill: {why}"))
    return problems


def _warnings(facts: Mapping[str, Any], operation: Mapping[str, Any]) -> list[str]:
    warnings = []
    shm = _number(facts.get("shm_mib"))
    if shm is not None and shm < SMALL_SHM_MIB:
        warnings.append(f"/dev/shm has {shm:g} MiB: data loaders with workers may need more (num_workers=0 helps)")
    if operation.get("ok") is True and operation.get("how") == "nvidia-smi":
        warnings.append("the GPU is there, but nothing was computed on it: the image has no PyTorch and no libcuda")
    return warnings


def _address(base_url: str) -> list[Any]:
    parts = urlsplit(base_url)
    return [parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,6}", version)[:4])


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return one_line(value, limit=400) if isinstance(value, str) and value else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e12 else None
