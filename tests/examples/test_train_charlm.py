"""The example is a real program: these tests run it as a job would, and check its gradient by hand."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import yaml

from gpu_skills import resources

EXAMPLE = resources.example("train-charlm")


@pytest.fixture(scope="module")
def code() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as its own directory imports them and taken out again afterwards."""
    names = ("chart", "model", "train")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(EXAMPLE))
    loaded: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(EXAMPLE))
    yield SimpleNamespace(**loaded)
    for name in names:
        del sys.modules[name]
        if before[name] is not None:
            sys.modules[name] = before[name]


def environment(outputs: Path, **settings: str) -> dict[str, str]:
    defaults = {"GPU_OUTPUT_DIR": str(outputs), "TRAIN_SECONDS": "60", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **defaults, **settings}


def run(outputs: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "train.py")]
    return subprocess.run(
        command, env=environment(outputs, **settings), cwd=outputs.parent, capture_output=True, text=True, timeout=120
    )


def metrics(outputs: Path) -> dict:
    return json.loads((outputs / "metrics.json").read_text())


def files(outputs: Path) -> set[str]:
    return {str(path.relative_to(outputs)) for path in outputs.rglob("*") if path.is_file()}


# The model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [False, True])
def test_the_gradient_by_hand_agrees_with_finite_differences(code: SimpleNamespace, dropout: bool) -> None:
    rng = np.random.default_rng(3)
    weights = {k: v.astype(np.float64) for k, v in code.model.initial_parameters(6, 5, rng).items()}
    weights["d"] += rng.normal(size=6)  # zeros would hide a forgotten bias
    weights["b"] += rng.normal(size=15)
    inputs, targets = rng.integers(0, 6, (2, 7, 3))
    mask = (rng.random((7, 3, 5)) < 0.6) / 0.6 if dropout else None
    _, gradients = code.model.loss_and_gradients(weights, inputs, targets, mask)

    for name, array in weights.items():
        numeric = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            kept, losses = array[place], []
            for nudge in (1e-5, -1e-5):
                array[place] = kept + nudge
                losses.append(code.model.loss_and_gradients(weights, inputs, targets, mask)[0])
            array[place] = kept
            numeric[place] = (losses[0] - losses[1]) / 2e-5
        assert np.abs(numeric).max() > 1e-3, f"{name} does not matter here, so the comparison shows nothing"
        np.testing.assert_allclose(gradients[name], numeric, atol=1e-8, rtol=1e-5, err_msg=name)


def test_a_model_of_zeros_is_as_surprised_as_a_die_with_one_side_per_character(code: SimpleNamespace) -> None:
    weights = {k: np.zeros_like(v) for k, v in code.model.initial_parameters(11, 4, np.random.default_rng(0)).items()}
    inputs, targets = np.random.default_rng(1).integers(0, 11, (2, 5, 2))
    assert code.model.loss_and_gradients(weights, inputs, targets)[0] == pytest.approx(math.log(11))


def test_reading_a_text_in_one_go_costs_what_the_training_loss_says(code: SimpleNamespace) -> None:
    rng = np.random.default_rng(5)
    weights = code.model.initial_parameters(9, 8, rng)
    text = rng.integers(0, 9, 41)
    trained = code.model.loss_and_gradients(weights, text[:-1, None], text[1:, None])[0]
    assert code.model.sequence_loss(weights, text, lanes=1) == pytest.approx(trained, rel=1e-5)


def test_held_out_notes_are_not_among_the_training_notes(code: SimpleNamespace) -> None:
    text = code.train.Text(EXAMPLE / "corpus.txt")
    training = text.decode(text.training.tolist())
    held_out = text.decode(text.held_out.tolist()).strip().split("\n\n")
    assert len(held_out) > 10
    assert not [note for note in held_out if note in training]


# The program ----------------------------------------------------------------------------------------------------------


@pytest.mark.subprocess
def test_sixty_steps_learn_more_than_letter_frequencies_and_leave_all_files(tmp_path: Path) -> None:
    outputs = tmp_path / "out"
    done = run(outputs, TRAIN_STEPS="60")
    assert done.returncode == 0, done.stderr

    found = metrics(outputs)
    assert (found["steps"], found["stopped_by"]) == (60, "steps")
    assert found["history"][0]["held_out_loss"] > found["unigram_loss"]  # it began by knowing nothing
    assert found["held_out_loss"] < found["unigram_loss"] - 0.5
    assert found["held_out_perplexity"] == pytest.approx(math.exp(found["held_out_loss"]), rel=1e-4)
    assert [point["step"] for point in found["history"]] == [0, 25, 50, 60]
    assert len(found["sample"]) > 100

    job = yaml.safe_load((EXAMPLE / "gpujob.yaml").read_text())
    assert files(outputs) == {*job["expect"], "checkpoints/step-000060.npz"}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.iterdir()} == {"out"}
    assert "progress steps=60" in done.stdout.splitlines()
    assert f"{found['unigram_loss']:.3f}" in done.stdout and f"{found['held_out_loss']:.3f}" in done.stdout
    with np.load(outputs / "model.npz") as stored:
        assert sum(stored[name].size for name in stored.files if name != "characters") == found["parameters"]


@pytest.mark.subprocess
def test_time_ends_a_run_too(tmp_path: Path) -> None:
    done = run(tmp_path / "out", TRAIN_SECONDS="0.3")
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "out")["stopped_by"] == "seconds"
    assert 0 < metrics(tmp_path / "out")["steps"] < 1500


@pytest.mark.subprocess
def test_a_resumed_run_makes_the_steps_of_the_unbroken_one(tmp_path: Path) -> None:
    assert run(tmp_path / "whole", TRAIN_STEPS="12").returncode == 0
    assert run(tmp_path / "half", TRAIN_STEPS="7").returncode == 0
    checkpoint = tmp_path / "half" / "checkpoints" / "step-000007.npz"
    done = run(tmp_path / "rest", TRAIN_STEPS="12", RESUME_FROM=str(checkpoint))
    assert done.returncode == 0, done.stderr
    assert "going on from step 7" in done.stdout

    found = metrics(tmp_path / "rest")
    assert (found["steps"], found["resumed_from_step"]) == (12, 7)
    assert [point["step"] for point in found["history"]] == [0, 7, 12]
    assert found["seconds"] > metrics(tmp_path / "half")["seconds"]
    with np.load(tmp_path / "whole" / "model.npz") as whole, np.load(tmp_path / "rest" / "model.npz") as rest:
        for name in ("W", "U", "b", "V", "d"):
            np.testing.assert_allclose(rest[name], whole[name], atol=1e-5)


@pytest.mark.subprocess
def test_sigterm_saves_one_more_checkpoint_and_ends_with_143(tmp_path: Path) -> None:
    outputs = tmp_path / "out"
    command = [sys.executable, "-u", str(EXAMPLE / "train.py")]
    with subprocess.Popen(command, env=environment(outputs), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(re.fullmatch(r"progress steps=\d+\n", line) for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            assert process.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            process.kill()
    found = metrics(outputs)
    assert found["stopped_by"] == "SIGTERM"
    with np.load(outputs / "checkpoints" / f"step-{found['steps']:06d}.npz") as stored:
        assert int(stored["step"]) == found["steps"]


@pytest.mark.subprocess
def test_a_loss_that_is_not_a_number_fails_and_saves_nothing_over_the_good_files(
    tmp_path: Path, code: SimpleNamespace
) -> None:
    characters = code.train.Text(EXAMPLE / "corpus.txt").characters
    broken = code.train.Run.fresh(len(characters))
    broken.weights["U"][0, 0] = math.nan
    broken.save(tmp_path / "broken.npz", characters)
    done = run(tmp_path / "out", RESUME_FROM=str(tmp_path / "broken.npz"))
    assert done.returncode == 1
    assert done.stderr.startswith("train.py: ") and "not a number" in done.stderr and done.stderr.count("\n") == 1
    assert "model.npz" not in files(tmp_path / "out")


def test_a_gradient_that_is_not_a_number_does_not_reach_the_weights(code: SimpleNamespace) -> None:
    state = code.train.Run.fresh(7)
    before = {name: array.copy() for name, array in state.weights.items()}
    gradients = {name: np.ones_like(array) for name, array in state.weights.items()} | {"d": np.full(7, np.inf)}
    with pytest.raises(FloatingPointError, match="step 1"):
        code.model.adam(state.weights, gradients, state.first, state.second, 1, 0.01)
    for name, array in before.items():
        np.testing.assert_array_equal(state.weights[name], array)


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"TRAIN_SECONDS": "soon"}, "TRAIN_SECONDS='soon'"),
        ({"TRAIN_STEPS": "-1"}, "TRAIN_STEPS='-1'"),
        ({"TRAIN_SECONDS": "nan"}, "TRAIN_SECONDS='nan'"),
        ({"RESUME_FROM": "nowhere.npz"}, "nowhere.npz"),
        ({"RESUME_FROM": str(EXAMPLE / "corpus.txt")}, "corpus.txt"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line_and_exit_2(
    tmp_path: Path, settings: dict[str, str], named: str
) -> None:
    done = run(tmp_path / "out", **settings)
    assert done.returncode == 2
    assert named in done.stderr and done.stderr.count("\n") == 1
    assert not files(tmp_path)


def test_three_checkpoints_are_kept_and_no_partial_file_is_left(
    tmp_path: Path, code: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    text = code.train.Text(EXAMPLE / "corpus.txt")
    state = code.train.Run.fresh(len(text.characters))
    outputs = code.train.Outputs(tmp_path, text, None)
    for step in (100, 200, 300, 400, 1000):
        state.step = step
        outputs.checkpoint(state)
    kept = {f"checkpoints/step-{step:06d}.npz" for step in (300, 400, 1000)}
    assert files(tmp_path) == {"model.npz", *kept}


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path, code: SimpleNamespace) -> None:
    (tmp_path / "model.npz").write_bytes(b"good")

    def fail(file) -> None:
        file.write(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        code.train.write(tmp_path / "model.npz", fail)
    assert (tmp_path / "model.npz").read_bytes() == b"good"


# The picture and the job's files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [1, 2, 40])
def test_the_picture_is_well_formed_and_stays_inside_its_frame(code: SimpleNamespace, points: int) -> None:
    history = [
        {"step": 25 * i, "train_loss": None if i == 0 else 1 + 3 / (i + 1), "held_out_loss": 1.2 + 3 / (i + 1)}
        for i in range(points)
    ]
    root = ElementTree.fromstring(code.chart.loss_chart(history, 2.96, "a < b & c"))
    svg = "{http://www.w3.org/2000/svg}"
    curves = root.findall(f"{svg}polyline")
    assert [curve.get("class") for curve in curves] == ["curve training", "curve held-out"]
    places = [pair.split(",") for curve in curves for pair in (curve.get("points") or "").split()]
    assert len(places) == 2 * points - 1
    for x, y in places:
        assert code.chart.LEFT <= float(x) <= code.chart.RIGHT
        assert code.chart.TOP <= float(y) <= code.chart.BOTTOM
    words = [text.text for text in root.findall(f"{svg}text")]
    assert {"loss, nats per character", "training steps", "letter frequencies alone: 2.96"} <= set(words)
    assert "prefers-color-scheme: dark" in (root.findtext(f"{svg}style") or "")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1.2, 4.0, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]),
        (0, 663, [0, 200, 400, 600, 800]),
        (2.5, 2.5, None),
    ],
)
def test_ticks_are_round_and_cover_the_values(
    code: SimpleNamespace, low: float, high: float, ticks: list[float] | None
) -> None:
    found = code.chart.nice_ticks(low, high, 6)
    assert found[0] <= low and found[-1] >= high and len(found) >= 2
    if ticks:
        assert found == pytest.approx(ticks)


def test_the_pinned_numpy_is_the_one_these_tests_ran_with() -> None:
    first = (EXAMPLE / "requirements.txt").read_text().splitlines()[0]
    assert first == f'numpy=={np.__version__}; python_version >= "3.11"'


@pytest.mark.slow
@pytest.mark.subprocess
def test_setup_makes_the_environment_once_also_when_two_jobs_start_together(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    jobs = [tmp_path / name for name in ("first", "second", "third")]
    for job in jobs:
        job.mkdir()
        shutil.copy(EXAMPLE / "setup.sh", job)
        (job / "requirements.txt").write_text("# nothing to install, so no network is needed\n")

    def start(job: Path) -> subprocess.Popen[str]:
        env = {**os.environ, "GPU_WORKSPACE": str(workspace), "GPU_JOB_ID": job.name, "PIP_NO_INDEX": "1"}
        return subprocess.Popen(["bash", "setup.sh"], cwd=job, env=env, stdout=subprocess.PIPE, text=True)

    together = [start(job) for job in jobs[:2]]
    for process in together:
        process.communicate(timeout=120)
        assert process.returncode == 0
    later = start(jobs[2])
    assert later.communicate(timeout=60)[0] == ""  # nothing was made
    assert later.returncode == 0

    assert len(list((workspace / "environments").iterdir())) == 1
    for job in jobs:
        asked = subprocess.run(
            [job / ".venv/bin/python", "-c", "import sys; print(sys.prefix != sys.base_prefix)"],
            capture_output=True,
            text=True,
        )
        assert asked.stdout == "True\n"
