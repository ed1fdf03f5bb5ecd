"""`gpu plan` on a vendor of the sandbox: measured, frozen, measured again, and refused with everything at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from gpu_skills.state import project as projects
from sandbox_fixture import make_sandbox
from vendor_clock import VendorClock

__all__ = ["make_sandbox"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    projects.init(root)
    (root / "train.py").write_text("print('trained')\n")
    (root / "gpu.yaml").write_text("provider: vast\ncompute: {gpu: RTX 3090, candidates: [RTX 4090]}\n")
    return root


@pytest.fixture
def market(make_sandbox, monkeypatch):
    sandbox = make_sandbox(limits="virtual", seed=3)
    for name in ("vast", "runpod"):
        monkeypatch.setenv(f"{name.upper()}_API_KEY", sandbox.key(name))
    monkeypatch.setenv("VAST_URL", sandbox.url)
    monkeypatch.setenv("RUNPOD_API_BASE_URL", sandbox.url)
    return sandbox


@pytest.fixture
def plan(gpu, place, market):
    def call(*args: str, **world):
        return gpu("plan", *args, cwd=place, clock=VendorClock(market), **world)

    return call


def creates(market) -> int:
    return sum(count for (_, call), count in market.world.calls.items() if call == "create")


def test_a_draft_says_what_it_would_rent_and_how_to_go_on(plan, place, market):
    result = plan("--expected", "30m", "--", "python", "train.py", "--epochs", "3")
    assert result.exit_code == 0
    for said in ("RTX 3090", "/h at most", "worst case", "deadline", "python train.py --epochs 3", "owner could read"):
        assert said in result.stdout, said
    (draft,) = (place / ".pi/gpu/plans").glob("draft-*.json")
    assert f"next: gpu plan --freeze {draft.stem}" in result.stderr
    assert creates(market) == 0


def test_a_frozen_plan_has_its_hash_as_its_name_and_all_that_is_sent(plan, place):
    document = plan("--freeze", "--json", "--", "python", "train.py").document
    raw = (place / f".pi/gpu/plans/{document['name']}.json").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == document["name"] and document["frozen"]
    assert document["next_step"] == f"gpu approve {document['name'][:12]}"
    frozen = json.loads(raw)
    sent = {file["path"]: file for file in frozen["inputs"]["files"]}
    content = (place / "train.py").read_bytes()
    assert sent["train.py"] == {
        "path": "train.py", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(),
    }  # fmt: skip
    assert frozen["job"]["run"] == "python train.py" and frozen["job"]["directory"] == "."
    assert (frozen["class"], frozen["hold_for_s"], frozen["job_timeout_s"]) == ("job", 1800, 0)
    assert str(place) not in raw.decode()


def test_flags_win_over_the_files(plan, place):
    (place / "gpujob.yaml").write_text("run: python train.py\ntimeout: 2h\n")
    made = plan("--json").document["plan"]
    assert (made["job_timeout_s"], made["candidates"][0]["gpu"]) == (7200, "RTX 3090")
    made = plan(
        "--json", "--gpu", "RTX 4090", "--hold-for", "5m", "--max-lease", "3h", "--job-timeout", "1h",
        "--capacity", "wait", "--disk-gb", "60", "--expected", "20m",
    ).document  # fmt: skip
    record = made["plan"]
    assert [c["gpu"] for c in record["candidates"]] == ["RTX 4090"]
    assert (record["hold_for_s"], record["deadline_s"], record["job_timeout_s"]) == (300, 10800, 3600)
    assert (record["disk_gb"], record["expected_s"], record["capacity"]["mode"]) == (60, 1200, "wait")
    assert made["waits_until"] == record["expires_at"]


def test_a_waiting_plan_says_how_long_it_waits_and_what_the_price_may_become(plan):
    result = plan("--capacity", "wait", "--", "python", "train.py")
    assert "waits in the foreground, 20m00s at most" in result.stdout
    assert "the price may change up to $" in result.stdout


def test_session_plans_the_projects_machine(plan, place):
    (place / "gpu.yaml").write_text("provider: runpod\n")
    record = plan("--session", "--json").document["plan"]
    assert (record["class"], record["idle_timeout_s"], record["outputs_ephemeral"]) == ("project", 900, False)
    assert plan("--session", "--", "python", "train.py").exit_code == 2


def test_a_missing_file_and_a_gpu_too_small_are_both_told_and_nothing_is_created(plan, place, market):
    (place / "gpu.yaml").write_text("provider: vast\ncompute: {gpu: RTX 4090, min_vram_gb: 40}\n")
    result = plan("--json", "--require-input", "data/rows.jsonl", "--", "python", "other.py")
    assert result.exit_code == 3 and result.error["code"] == "plan_refused"
    reasons = result.error["details"]["reasons"]
    assert [r["code"] for r in reasons] == ["missing_file", "missing_file", "vram_too_small"]
    assert "data/rows.jsonl" in reasons[0]["message"] and "other.py" in reasons[1]["message"]
    assert creates(market) == 0 and not list((place / ".pi/gpu").glob("plans/*.json"))


def test_what_cannot_be_sent_is_one_reason_among_others(plan, place):
    (place / "gpu.yaml").write_text("provider: vast\ncompute: {gpu: RTX 4090, disk_gb: 10}\n")
    (place / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n")
    reasons = plan("--json", "--", "python", "gone.py").error["details"]["reasons"]
    assert [r["code"] for r in reasons] == ["missing_file", "secret_shaped", "disk_too_small"]


def test_wheels_of_a_requirements_file_raise_the_driver_that_is_needed(plan, place):
    (place / "reqs").mkdir()
    (place / "reqs/all.txt").write_text("-r gpu.txt\nnumpy\n")
    (place / "reqs/gpu.txt").write_text("torch==2.9.0+cu130\n")
    record = plan("--json", "--setup", "pip install -r reqs/all.txt", "--", "python", "train.py").document["plan"]
    assert (record["min_cuda"], record["min_driver"]) == (13.0, "580")


def test_a_disk_too_small_for_the_image_is_refused_with_a_size(plan, place):
    (place / "gpu.yaml").write_text(
        "provider: vast\ncompute: {gpu: RTX 3090, disk_gb: 20, image: 'me/big:cuda12.4', image_gb: 23.6}\n"
    )
    result = plan("--", "python", "train.py")
    assert result.exit_code == 3
    assert "50 GB will do" in result.stderr and "compute.disk_gb: 50" in result.stderr


def test_a_draft_measured_again_keeps_its_name_and_takes_the_files_of_now(plan, place):
    name = plan("--json", "--max-lease", "3h", "--env", "TOKEN=abcdefghijkl", "--", "python", "train.py").document[
        "name"
    ]
    (place / "train.py").write_text("print('changed')\n")
    again = plan("--json", name).document
    digest = hashlib.sha256(b"print('changed')\n").hexdigest()
    files = {file["path"]: file["sha256"] for file in again["plan"]["inputs"]["files"]}
    assert (again["name"], again["frozen"], files["train.py"]) == (name, False, digest)
    frozen = plan("--json", "--freeze", name).document
    assert frozen["frozen"] and frozen["plan"]["deadline_s"] == 10800
    assert frozen["plan"]["secrets"] == ["TOKEN"]
    everything = "".join(path.read_text() for path in (place / ".pi/gpu/plans").glob("*.json"))
    assert "abcdefghijkl" not in everything


def test_a_plan_measured_again_takes_no_other_flags(plan):
    name = plan("--json", "--", "python", "train.py").document["name"]
    result = plan(name, "--gpu", "H100")
    assert result.exit_code == 2 and "--gpu" in result.stderr


def test_a_plan_edited_by_hand_is_refused(plan, place):
    name = plan("--freeze", "--json", "--", "python", "train.py").document["name"]
    path = place / f".pi/gpu/plans/{name}.json"
    path.write_text(path.read_text().replace('"provider":"vast"', '"provider":"runpod"'))
    result = plan("--json", name[:12])
    assert (result.exit_code, result.error["code"]) == (4, "plan_changed")


@pytest.mark.parametrize(
    "wrong",
    [{"job": {}}, {"job": {"run": 7}}, {"job": {"run": "x", "exclude": [1]}}, {"capacity": {}}, {"deadline_s": 1e400}],
)
def test_a_draft_that_was_edited_into_nonsense_is_named_and_breaks_nothing(plan, place, wrong):
    name = plan("--json", "--", "python", "train.py").document["name"]
    path = place / f".pi/gpu/plans/{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    result = plan("--json", name)
    assert result.exit_code == 2 and result.error["code"] in ("schema_invalid", "state_invalid")


def test_a_command_that_repeats_the_value_of_a_secret_is_refused_without_repeating_it(plan):
    result = plan("--env", "TOKEN=abcdefghijkl", "--", "python", "train.py", "--token", "abcdefghijkl")
    assert result.exit_code == 2 and "abcdefghijkl" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--hold-for", "soon", "--", "x"), "--hold-for"),
        (("--max-lease", "0", "--", "x"), "--max-lease must be more than 0"),
        (("draft-12345678",), "there is no plan"),
        (("draft-oops",), "there is no plan"),
        ((), "no command"),
        (("--download-gb", "nan", "--", "x"), "--download-gb"),
    ],
)
def test_a_wrong_call_is_named(plan, args, said):
    result = plan(*args)
    assert result.exit_code == 2 and said in result.stderr


def test_a_provider_of_ones_own_needs_no_plan(plan, place):
    (place / "gpu.yaml").write_text("provider: local\n")
    result = plan("--", "python", "train.py")
    assert result.exit_code == 2 and "rents nothing" in result.stderr


def test_audit_makes_no_plan(plan, place):
    assert plan("--mode", "audit", "--", "python", "train.py").exit_code == 3
    assert not (place / ".pi/gpu/plans").exists()


def test_many_files_are_listed_in_part_and_counted_whole(plan, place):
    for number in range(70):
        (place / f"f{number}.txt").write_text(str(number))
    inputs = plan("--json", "--", "python", "train.py").document["plan"]["inputs"]
    assert len(inputs["files"]) == 50 and inputs["left_out"] == inputs["count"] - 50 >= 20
