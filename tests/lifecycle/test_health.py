"""What the facts of a machine mean for the plan it was rented by; and the program that tells them, run for real."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpu_skills import resources
from gpu_skills.errors import ArchUnsupported, NotReady
from gpu_skills.lifecycle.plans.plan import Candidate, Plan
from gpu_skills.lifecycle.renting import health

A100 = {"index": 0, "name": "NVIDIA A100-SXM4-80GB", "vram_mib": 81920, "driver": "570.86.15"}


def a_plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "project_id": "p",
        "machine_class": "job",
        "provider": "vast",
        "image": "i",
        "disk_gb": 50,
        "gpu_count": 1,
        "candidates": (Candidate("A100"),),
        "max_rate_usd_hr": Decimal(2),
        "deadline_s": 3600.0,
        "storage_grace_s": 0.0,
        "worst_case_usd": Decimal(2),
        "measured_at": "2026-01-01T00:00:00Z",
        "expires_at": "2026-01-01T01:00:00Z",
    }
    return Plan(**{**given, **changes})


def judged(*, gpus: Any = (A100,), facts: Any = None, gpu: str = "A100 SXM4", probe: Any = None, **plan: Any):
    probe = {"bash": True, "gpus": list(gpus), "gpu_error": None, **(probe or {})}
    told = {"gpu": {"how": "torch", "ok": True}, "cuda": 12.8, "shm_mib": 4096, "disk_free_gb": 40, "reaches": True}
    return health.judge(a_plan(**plan), probe, {**told, **(facts or {})}, gpu=gpu)


def codes(**given: Any) -> list[str]:
    return [problem.code for problem in judged(**given).problems]


def test_a_machine_that_is_what_was_rented_and_computes_is_healthy():
    found = judged(min_cuda=12.8, min_driver="570.26", min_vram_gb=80)
    assert (found.problems, found.warnings) == ((), ())
    assert (found.gpu, found.gpu_count, found.vram_gb, found.how, found.cuda) == (A100["name"], 1, 80.0, "torch", 12.8)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpus": ()}, ["gpu_missing"]),
        ({"probe": {"bash": False}}, ["machine_lacks"]),
        ({"gpu_count": 2}, ["gpu_missing"]),
        ({"gpu": "RTX 4090"}, ["gpu_other"]),
        ({"min_vram_gb": 96}, ["vram_too_small"]),
        ({"min_cuda": 13.0}, ["cuda_too_old"]),
        ({"min_driver": "580.10"}, ["driver_too_old"]),
        ({"min_driver": "570.86.16"}, ["driver_too_old"]),
        ({"min_driver": "99"}, []),
        ({"facts": {"gpu": {"how": "torch", "ok": False, "error": "CUDA error: out of order"}}}, ["gpu_failed"]),
        ({"facts": {"gpu": {"how": "driver", "ok": False}}}, ["gpu_failed"]),
        ({"facts": {"gpu": None}}, ["gpu_failed"]),
        ({"facts": {"disk_free_gb": 0.5}}, ["disk_full"]),
        ({"facts": {"reaches": False, "reach_error": "timed out"}}, ["no_network"]),
        ({"min_cuda": 13.0, "min_vram_gb": 96, "gpu_count": 4}, ["gpu_missing", "vram_too_small", "cuda_too_old"]),
    ],
)
def test_everything_that_is_wrong_is_told_at_once(given, expected):
    assert codes(**given) == expected


def test_many_problems_are_one_error_of_the_first_kind():
    error = judged(min_cuda=13.0, min_vram_gb=96).error("m_1")
    assert isinstance(error, NotReady) and error.code == "machine_not_ready"
    assert "CUDA 12.8" in error.message and "96 GB" in error.message
    assert [p["code"] for p in error.details["problems"]] == ["vram_too_small", "cuda_too_old"]


@pytest.mark.parametrize(
    ("operation", "is_arch"),
    [
        ({"error": "CUDA error: no kernel image is available for execution on the device"}, True),
        ({"error": "something else", "arch_list": ["sm_80", "sm_90"]}, True),
        ({"error": "something else", "arch_list": ["sm_80", "sm_120"]}, False),
        ({"error": "something else", "arch_list": ["sm_80", "compute_90"]}, False),
        ({"error": "something else", "arch_list": ["not one", 7, None]}, True),
        ({"error": "something else"}, False),
    ],
)
def test_a_gpu_that_the_image_has_no_code_for_is_told_apart_from_one_that_is_broken(operation, is_arch):
    blackwell = {**A100, "name": "NVIDIA GeForce RTX 5090", "vram_mib": 32607}
    facts = {"gpu": {"how": "torch", "ok": False, "capabilities": [12.0], "version": "2.4.1", **operation}}
    found = judged(gpus=(blackwell,), gpu="RTX 5090", facts=facts, min_cuda=13.0)
    assert (found.problems[0].code == "arch_unsupported") is is_arch
    error = found.error("m_1")
    assert isinstance(error, ArchUnsupported) is is_arch
    if is_arch:
        assert "sm_120" in error.message and "torch 2.7 or newer built for cu128" in error.next_step


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        (8.9, ["sm_80", "sm_86"], True),
        (8.6, ["sm_80", "sm_89"], True),
        (8.0, ["sm_86"], False),
        (12.0, ["sm_120a"], True),
        (9.0, ["sm_90a"], True),
        (9.0, ["compute_80"], True),
        (7.0, ["compute_80", "sm_75"], False),
        (10.3, ["sm_100"], True),
    ],
)
def test_code_of_the_same_generation_or_portable_older_code_runs_on_a_gpu(capability, arch_list, runs):
    assert health.has_code_for(capability, arch_list) is runs


def test_the_wheel_that_is_advised_has_code_for_the_gpu():
    assert "cu128" in health.wheel_for(12.0) and "cu118" in health.wheel_for(9.0)
    assert "cu126 or older" in health.wheel_for(7.0)


def test_little_shared_memory_and_a_gpu_nobody_could_try_are_warnings():
    found = judged(facts={"shm_mib": 64, "gpu": {"how": "nvidia-smi", "ok": True}})
    assert found.problems == () and len(found.warnings) == 2 and "64 MiB" in found.warnings[0]


HOSTILE = ["x", 1e300, -5, None, [], {}, True, [{}], {"how": 7, "ok": "yes", "capabilities": "many", "arch_list": {}}]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_facts_of_any_kind_make_a_verdict_and_never_a_traceback(value):
    for name in ("gpu", "cuda", "shm_mib", "disk_free_gb", "reaches", "reach_error"):
        judged(facts={name: value}, min_cuda=12.0)
    for name in ("name", "vram_mib", "driver"):
        judged(gpus=({**A100, name: value},), min_driver="1", min_vram_gb=4)
    judged(probe={"gpus": value, "gpu_error": value})


# the program ----------------------------------------------------------------------------------------------------------

TORCH = """
__version__ = "{version}"
class cuda:
    def device_count(): return {count}
    def get_arch_list(): return {arch_list}
    def get_device_capability(index): return {capability}
class _Tensor:
    def __matmul__(self, other): return self
    def sum(self): return self
    def item(self): return {result}
def ones(shape, device):
    if {kernel_missing}: raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
    return _Tensor()
"""


def run_checkup(tmp_path: Path, **torch: Any) -> dict[str, Any]:
    """The facts of this computer, with a torch that is as told; none without."""
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    (tmp_path / "python").symlink_to(sys.executable)
    if torch:
        given = {"version": "2.4.1", "count": 1, "arch_list": ["sm_90"], "capability": (9, 0), "kernel_missing": False}
        given["result"] = 256.0**3
        (tmp_path / "torch.py").write_text(TORCH.format(**{**given, **torch}))
        environ["PYTHONPATH"] = str(tmp_path)
    asked = json.dumps({"root": str(tmp_path), "reach": ["127.0.0.1", 1], "gpus": torch.get("wanted", 1)})
    done = subprocess.run(
        [sys.executable, "-", asked],
        input=resources.checkup().read_bytes(),
        capture_output=True,
        env=environ,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    mark, _, facts = done.stdout.decode().strip().partition(" ")
    assert mark == "GPU-SKILLS-ANSWER"
    return json.loads(facts)


@pytest.mark.subprocess
def test_the_program_computes_with_the_torch_of_the_image(tmp_path):
    facts = run_checkup(tmp_path, count=2)
    assert facts["gpu"] == {
        "how": "torch",
        "ok": True,
        "version": "2.4.1",
        "built_for": None,
        "python": platform.python_version(),
        "count": 2,
        "arch_list": ["sm_90"],
        "capabilities": [9.0, 9.0],
    }
    assert facts["disk_free_gb"] > 0 and facts["reaches"] is False and facts["reach_error"]


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("torch", "error"),
    [
        ({"kernel_missing": True, "capability": (12, 0)}, "no kernel image"),
        ({"result": 1.0}, "computed 1.0"),
        ({"count": 1, "wanted": 2}, "torch finds 1 GPUs, not 2"),
        ({"count": 0}, "torch finds no GPU"),
        ({"count": "1/0"}, "ZeroDivisionError"),
    ],
)
def test_the_program_tells_why_its_computation_failed(tmp_path, torch, error):
    gpu = run_checkup(tmp_path, **torch)["gpu"]
    assert gpu["ok"] is False and error in gpu["error"]


@pytest.mark.subprocess
def test_without_torch_and_driver_the_program_asks_nvidia_smi(tmp_path):
    assert run_checkup(tmp_path)["gpu"]["ok"] is False
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\n[ $# = 0 ] && echo "CUDA Version: 12.4 |" && exit\n'
        'echo "0, NVIDIA L4, 8.9"\necho "1, NVIDIA L4, 8.9"\n'
    )
    smi.chmod(0o755)
    (tmp_path / "python").unlink()
    facts = run_checkup(tmp_path)
    assert facts["gpu"] == {"how": "nvidia-smi", "ok": True, "count": 2, "capabilities": [8.9, 8.9]}
    assert facts["cuda"] == 12.4
