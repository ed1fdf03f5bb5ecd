"""What is gathered of a failed job, how its attempts are counted, and what follows for the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import pytest

from gpu_skills import resources
from gpu_skills.clock import timestamp
from gpu_skills.errors import Unreachable
from gpu_skills.jobs.diagnose import collect
from gpu_skills.jobs.diagnose.attempts import Attempts, failed_alike
from gpu_skills.jobs.diagnose.classify import classify
from gpu_skills.jobs.diagnose.verdict import judge
from gpu_skills.jobs.records import JobFolder
from gpu_skills.state import project as projects
from gpu_skills.state.ledger import Ledger
from gpu_skills.units import usd

OOM = b"RuntimeError: CUDA error: out of memory\n"
NETWORK = b"curl: (6) Could not resolve host: models.example.org\n"


@pytest.fixture
def project(tmp_path):
    return projects.init(tmp_path)


@pytest.fixture
def ledger(project, fake_clock):
    return Ledger(project, fake_clock)


@pytest.fixture
def attempt(project, ledger, fake_clock):
    """attempt(log, …) → the last ledger line of a job that ran for a minute, one after the other."""

    def run(log=OOM, *, tree="a" * 64, command="python train.py", status="failed", cost_usd=0.5, beside=None):
        record = {"machine_id": "m_1", "upload": {"tree": tree}, "spec": {"run": command}}
        began = beside["started_at"] if beside else timestamp(fake_clock.now())
        job = ledger.start({"status": "running", "provider": "ssh", "started_at": began})["id"]
        JobFolder(project, job).write("job", record)
        JobFolder(project, job).log.write_bytes(log)
        fake_clock.advance(60)
        end = {"id": job, "status": status, "cost_usd": cost_usd, "completed_at": timestamp(fake_clock.now())}
        ledger.finish(end | {"duration_s": 60, "artifacts": []} | ({} if status == "completed" else {"error": "exit"}))
        return ledger.latest(job)

    return run


# the log --------------------------------------------------------------------------------------------------------------


def test_of_a_long_log_beginning_and_end_are_read_and_no_more(project):
    folder = JobFolder(project, "J-000001")
    folder.path.mkdir(parents=True)
    with folder.log.open("wb") as log:
        log.write(NETWORK)
        log.seek(100_000_000)
        log.write(b"\n" + OOM)
    tracemalloc.start()
    try:
        kept = collect.local_log(folder)
        found = classify([kept.text()])
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert [f.failure.name for f in found] == ["cuda_oom", "network_stall"]
    assert kept.left_out_bytes == kept.size - collect.HEAD_BYTES - collect.TAIL_BYTES > 90_000_000


@pytest.mark.parametrize("size", [0, 5, collect.HEAD_BYTES, collect.HEAD_BYTES + 9, collect.HEAD_BYTES + (4 << 20)])
def test_a_shorter_log_is_read_whole_and_once(project, size):
    folder = JobFolder(project, "J-000001")
    folder.path.mkdir(parents=True)
    data = os.urandom(size)
    folder.log.write_bytes(data)
    kept = collect.local_log(folder)
    assert (kept.head + kept.tail == data, kept.left_out_bytes) == (True, 0)


@pytest.mark.parametrize("size", [5, collect.HEAD_BYTES + 100, 7 << 20])
def test_a_log_on_the_machine_is_read_the_same_way(size):
    data = bytes(os.urandom(1)) * size

    def call(verb, args, on_data, timeout_s):
        start = args.get("offset", max(0, size - args.get("tail_bytes", 0)))
        piece = data[start : start + args["max_bytes"]]
        on_data({}, piece)
        status = {"job": "J-000001", "state": "running"}
        return {"offset": start, "next": start + len(piece), "gap_bytes": 0, "status": status}

    link = SimpleNamespace(session=SimpleNamespace(call=call), host="box")
    log = collect.machine_log(link, "p-1", "J-000001")
    assert (log.kept, log.size) == ("machine", size)
    assert len(log.head) + len(log.tail) + log.left_out_bytes == size
    assert log.left_out_bytes == max(0, size - collect.HEAD_BYTES - collect.TAIL_BYTES)


# the machine ----------------------------------------------------------------------------------------------------------


def machine(told, probe=None, broken=None):
    def run_program(source, asked, timeout_s):
        if broken:
            raise broken
        return told

    session = SimpleNamespace(call=lambda verb, args: probe or {}, run_program=run_program)
    session.greeting = SimpleNamespace(root="/r")
    return SimpleNamespace(machine=SimpleNamespace(id="m_1"), session=session, host="box")


def test_a_gpu_that_fails_now_is_evidence_and_so_is_a_disk_that_is_full_now():
    told = {
        "gpu": {
            "how": "torch",
            "ok": False,
            "error": "CUDA error: no kernel image is available",
            "capabilities": [12.0],
        }
    }
    told |= {"disk_free_gb": 0.0, "nvidia_smi": "| No running processes found |"}
    seen = collect.look(machine(told), may_compute=True)
    found = classify(seen.texts, has_failed=False)
    assert [(f.failure.name, f.evidence[0].source) for f in found] == [
        ("arch_unsupported", "gpu"),
        ("disk_full", "disk"),
    ]
    assert (seen.facts["capability"], seen.facts["gpu_works"]) == (12.0, False)


def test_a_machine_without_a_gpu_or_with_a_sound_one_is_no_finding():
    absent = {"how": None, "ok": False, "error": "no PyTorch, no libcuda and no nvidia-smi"}
    sound = {"how": "torch", "ok": True, "version": "2.8.0"}
    for gpu in (absent, sound):
        seen = collect.look(machine({"gpu": gpu, "disk_free_gb": 30.0}), may_compute=True)
        assert classify(seen.texts, has_failed=False) == []


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"gpu": None, "nvidia_smi": 7, "disk_free_gb": "much", "shm_mib": float("nan")},
        {"gpu": {"arch_list": "sm_90", "capabilities": {"a": 1}, "version": ["x"], "ok": "yes", "error": {}}},
        {"gpu": {"error": "\x1b[2J" * 500, "how": "torch"}, "nvidia_smi": "\x1b]0;x\x07\n" * 500, "cuda": 1e300},
    ],
)
def test_whatever_a_machine_tells_becomes_facts_that_fit_the_schema(told):
    from gpu_skills import schemas

    probe = {"gpus": [{"name": "\x1b[1mL4", "vram_mib": "x", "driver": None}, 3], "gpu_error": 5, "python": None}
    seen = collect.look(machine(told, probe), may_compute=False)
    schema = schemas.load("cli/job_diagnose")["properties"]["machine"]["properties"]["facts"]
    assert set(seen.facts) == set(schema["properties"])
    text = json.dumps(seen.facts, allow_nan=False)
    assert "\\u001b" not in text
    assert len(seen.facts["nvidia_smi"]) <= collect.SHOWN_SMI_LINES


def test_a_machine_that_breaks_off_is_said_not_raised():
    seen = collect.look(machine({}, broken=Unreachable(host="box", reason="no route")), may_compute=True)
    assert "no route" in seen.why_not and seen.facts == {}


TORCH = """
class version: cuda = "12.8"
__version__ = "2.8.0+cu128"
class cuda:
    device_count = staticmethod(lambda: 1)
    get_arch_list = staticmethod(lambda: ["sm_90", "sm_120"])
def ones(*args, **more): raise RuntimeError("computed")
"""


@pytest.mark.subprocess
@pytest.mark.parametrize("compute", [False, True])
def test_the_look_at_a_machine_tells_versions_and_computes_only_if_it_may(tmp_path, compute):
    (tmp_path / "torch.py").write_text(TORCH + "cuda.get_device_capability = staticmethod(lambda index: (12, 0))\n")
    (tmp_path / "python").symlink_to(sys.executable)
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "| Driver Version: 570.1  CUDA Version: 12.8 |"\n')
    smi.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    asked = json.dumps({"look": True, "compute": compute, "root": str(tmp_path)})
    program = resources.checkup().read_bytes()
    done = subprocess.run([sys.executable, "-", asked], input=program, capture_output=True, env=environ, timeout=60)
    facts = json.loads(done.stdout.partition(b" ")[2])
    gpu = facts["gpu"]
    assert (gpu["version"], gpu["built_for"], gpu["arch_list"]) == ("2.8.0+cu128", "12.8", ["sm_90", "sm_120"])
    assert gpu["python"] and facts["cuda"] == 12.8 and "570.1" in facts["nvidia_smi"]
    assert ("computed" in gpu.get("error", "")) is compute and "reaches" not in facts


# attempts -------------------------------------------------------------------------------------------------------------


def test_attempts_at_the_same_work_that_failed_alike_are_counted_with_their_money(project, ledger, attempt):
    attempt(NETWORK, cost_usd=9)
    attempt(OOM, tree="b" * 64)  # its remedy changed a file
    attempt(OOM, command="python eval.py", tree="c" * 64)
    last = attempt(OOM, cost_usd=0.25)
    assert failed_alike(project, ledger, last, "cuda_oom") == Attempts(("J-000002", "J-000004"), usd("0.75"))


def test_a_success_of_the_work_begins_the_count_anew(project, ledger, attempt):
    attempt(OOM)
    attempt(b"ok", status="completed")
    assert failed_alike(project, ledger, attempt(OOM), "cuda_oom").jobs == ("J-000003",)


def test_copies_side_by_side_are_not_tries_of_each_other(project, ledger, attempt):
    first = attempt(OOM)
    second = attempt(OOM, beside=first)
    assert failed_alike(project, ledger, second, "cuda_oom").jobs == (second["id"],)


# what follows ---------------------------------------------------------------------------------------------------------


def verdict(log, *, tries=1, retry_limit=1, state="failed", facts=None):
    findings = classify([collect.Log("local", len(log), log).text()], has_failed=state == "failed")
    jobs = tuple(f"J-{n:06d}" for n in range(1, tries + 1))
    attempts = Attempts(jobs, usd("1.20")) if state == "failed" else None
    return judge(jobs[-1], state, findings, attempts, retry_limit, facts or {})


@pytest.mark.parametrize(
    ("log", "may_retry", "retry"),
    [
        (NETWORK, True, "same"),
        (b"GPU is lost", True, "elsewhere"),
        (OOM, False, "changed"),
        (b"what?", False, "changed"),
    ],
)
def test_only_what_may_pass_is_tried_again_unchanged(log, may_retry, retry):
    said = verdict(log)
    assert (said.may_retry, said.retry, said.report) == (may_retry, retry, None)


@pytest.mark.parametrize("log", [NETWORK, b"GPU is lost", OOM])
def test_after_one_failed_retry_there_is_a_report_for_the_user_in_its_place(log):
    said = verdict(log, tries=2)
    assert not said.may_retry and "J-000001, J-000002" in said.report and "$1.20" in said.report
    assert verdict(log, retry_limit=0).may_retry is False
    assert verdict(NETWORK, tries=2, retry_limit=5).may_retry is False


@pytest.mark.parametrize(
    ("log", "facts", "wheel"),
    [
        (b"RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.", {}, "cu128"),
        (b"CUDA error: no kernel image is available for execution on the device", {"capability": 12.0}, "cu128"),
        (b"CUDA error: no kernel image is available for execution on the device", {"capability": 6.1}, "cu126"),
        (b"nvcc fatal : Unsupported gpu architecture 'compute_120'", {}, "cu128"),
        (b"CUDA error: no kernel image is available for execution on the device", {}, "has code for this GPU"),
    ],
)
def test_the_wheel_that_is_needed_is_named(log, facts, wheel):
    said = verdict(log, facts=facts)
    assert wheel in said.remedy[0] and "{" not in " ".join(said.remedy)


def test_the_remedy_names_node_and_module_and_says_to_pin():
    line = b"Cannot import /w/custom_nodes/Reef module for custom nodes: No module named 'comfy_api.latest'"
    remedy = " ".join(verdict(line).remedy)
    assert "commit of Reef" in remedy and "comfy_api.latest" in remedy


@pytest.mark.parametrize("state", ["succeeded", "timeout", "cancelled"])
def test_what_did_not_fail_has_no_class_and_nothing_to_try_again(state):
    said = verdict(OOM, state=state)
    assert (said.cause, said.may_retry, said.remedy) == (None, False, ())


def test_what_still_runs_has_a_class_but_is_not_tried_again():
    said = verdict(NETWORK, state="running")
    assert said.cause.failure.name == "network_stall" and said.may_retry is False
