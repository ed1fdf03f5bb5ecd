"""Train a small character-level language model on corpus.txt for about twenty seconds.

Writes only to $GPU_OUTPUT_DIR (gpu-outputs/by-hand when unset, which no job uploads): checkpoints/step-000500.npz
(the last three), model.npz,
metrics.json and loss.svg, each complete at every moment. Settings come from the environment:

TRAIN_SECONDS   stop after this much wall time (20)
TRAIN_STEPS     stop at this step, counted over all resumed runs (1500)
RESUME_FROM     a checkpoint to go on from; every later step is the one the unbroken run would have made

Ends with 0 when a limit is reached, 1 when the loss is no longer a number or a file cannot be written, 2 for a setting
that cannot be used, and 128 + the signal's number when it was told to stop: then it saves one more checkpoint first.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile

# One thread: the matrices are small. With two, on two cores that another program also used, the threads waited for each
# other and the same run was ten times slower (3,300 instead of 31,000 characters/s). numpy reads this when imported.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import chart  # noqa: E402
import model  # noqa: E402
import numpy as np  # noqa: E402

SEED = 7
HIDDEN = 128
BATCH = 32
WINDOW = 48  # characters a training sequence has
DROPOUT = 0.35
LEARNING_RATE = 0.006
DECAY_STEPS = 600  # over which the learning rate falls in a line, to a twentieth
EVERY_TENTH_NOTE_HELD_OUT = 10
HELD_OUT_LANES = 8
REPORT_EVERY = 25  # steps between two points of the curves
CHECKPOINT_EVERY = 100
CHECKPOINTS_KEPT = 3
SAMPLE_CHARACTERS = 400
SAMPLE_TEMPERATURE = 0.7

HERE = Path(__file__).resolve().parent


class Unusable(Exception):
    """A setting or a checkpoint that this program cannot go on with."""


class Text:
    """The corpus as numbers: notes are divided by empty lines, and every tenth one is kept from training."""

    def __init__(self, path: Path):
        notes = path.read_text(encoding="utf-8").strip().split("\n\n")
        held_out = notes[EVERY_TENTH_NOTE_HELD_OUT // 2 :: EVERY_TENTH_NOTE_HELD_OUT]
        training = [n for i, n in enumerate(notes) if i % EVERY_TENTH_NOTE_HELD_OUT != EVERY_TENTH_NOTE_HELD_OUT // 2]
        self.characters = "".join(sorted(set("\n\n".join(notes))))
        self._number = {character: i for i, character in enumerate(self.characters)}
        self.training = self.encode("\n\n".join(training) + "\n\n")
        self.held_out = self.encode("\n\n".join(held_out) + "\n\n")

    def encode(self, text: str) -> np.ndarray:
        return np.array([self._number[character] for character in text])

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.characters[i] for i in numbers)

    def unigram_loss(self) -> float:
        """What guessing each character by its frequency costs: the score that knows nothing about order."""
        counts = np.bincount(self.training, minlength=len(self.characters)) + 1.0
        return float(-np.log(counts / counts.sum())[self.held_out].mean())

    def batch(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        starts = rng.integers(0, len(self.training) - WINDOW, BATCH)
        windows = self.training[starts + np.arange(WINDOW + 1)[:, None]]
        return windows[:-1], windows[1:]


class Run:
    """All that has to survive an interruption: weights, Adam's moments, where we are and how we got there."""

    def __init__(self, weights: dict, first: dict, second: dict):
        self.weights, self.first, self.second = weights, first, second
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict] = []

    @classmethod
    def fresh(cls, vocabulary: int) -> Run:
        weights = model.initial_parameters(vocabulary, HIDDEN, np.random.default_rng(SEED))
        return cls(weights, *({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2)))

    @classmethod
    def resumed(cls, path: Path, characters: str) -> Run:
        run = cls.fresh(len(characters))
        try:
            with np.load(path) as stored:
                if str(stored["characters"]) != characters:
                    raise Unusable(f"RESUME_FROM: {path} was trained on text with other characters")
                for kind, arrays in run._arrays():
                    for name, array in arrays.items():
                        array[...] = stored[f"{kind}.{name}"]
                run.step, run.seconds = int(stored["step"]), float(stored["seconds"])
                run.history = json.loads(str(stored["history"]))
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as problem:
            raise Unusable(f"RESUME_FROM: {path} is not a checkpoint of this program: {problem}") from problem
        return run

    def save(self, path: Path, characters: str) -> None:
        arrays = {f"{kind}.{name}": a for kind, named in self._arrays() for name, a in named.items()}
        place = {"step": self.step, "seconds": self.seconds, "history": json.dumps(self.history)}
        write(path, lambda file: np.savez(file, characters=characters, **place, **arrays))

    def parameters(self) -> int:
        return sum(w.size for w in self.weights.values())

    def train_one_step(self, text: Text) -> float:
        """The loss of one batch; the weights have moved. What is drawn depends on seed and step alone."""
        rng = np.random.default_rng([SEED, self.step])
        inputs, targets = text.batch(rng)
        kept = rng.random((WINDOW, BATCH, HIDDEN), dtype=np.float32) >= DROPOUT
        mask = kept.astype(np.float32) / np.float32(1 - DROPOUT)
        loss, gradients = model.loss_and_gradients(self.weights, inputs, targets, mask)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {self.step + 1} is not a number")
        rate = LEARNING_RATE * max(0.05, 1 - self.step / DECAY_STEPS)
        model.adam(self.weights, gradients, self.first, self.second, self.step + 1, rate)
        self.step += 1
        return loss

    def _arrays(self) -> list[tuple[str, dict]]:
        return [("weights", self.weights), ("first", self.first), ("second", self.second)]


class Outputs:
    """The files of a run. Each is written beside its place and renamed, so a reader sees the old one or the new one."""

    def __init__(self, directory: Path, text: Text, resumed_from_step: int | None):
        self.directory, self.text, self.resumed_from_step = directory, text, resumed_from_step
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)

    def checkpoint(self, run: Run) -> None:
        path = self.directory / "checkpoints" / f"step-{run.step:06d}.npz"
        run.save(path, self.text.characters)
        write(self.directory / "model.npz", lambda f: np.savez(f, characters=self.text.characters, **run.weights))
        for old in sorted(path.parent.glob("step-*.npz"))[:-CHECKPOINTS_KEPT]:
            old.unlink()
        say(f"saved checkpoints/{path.name}")

    def report(self, run: Run, stopped_by: str | None = None) -> None:
        last, unigram = run.history[-1], self.text.unigram_loss()
        metrics = {
            "loss_unit": "nats per character",
            "train_loss": last["train_loss"],
            "held_out_loss": last["held_out_loss"],
            "held_out_perplexity": round(math.exp(last["held_out_loss"]), 4),
            "unigram_loss": round(unigram, 4),
            "unigram_perplexity": round(math.exp(unigram), 4),
            "steps": run.step,
            "seconds": round(run.seconds, 2),
            "resumed_from_step": self.resumed_from_step,
            "stopped_by": stopped_by,
            "parameters": run.parameters(),
            "train_characters": len(self.text.training),
            "held_out_characters": len(self.text.held_out),
            "seed": SEED,
            "sample": self.sample(run),
            "history": run.history,
        }
        write(self.directory / "metrics.json", lambda file: file.write((json.dumps(metrics, indent=1) + "\n").encode()))
        subtitle = (
            f"{run.parameters():,} parameters, {len(self.text.training):,} characters of text, "
            f"{run.step:,} steps in {run.seconds:.0f} s"
        )
        picture = chart.loss_chart(run.history, unigram, subtitle)
        write(self.directory / "loss.svg", lambda file: file.write(picture.encode()))

    def sample(self, run: Run) -> str:
        """The same dice at every report, so that two samples differ by what was learned between them."""
        prompt = self.text.encode("\n\n").tolist()
        rng = np.random.default_rng(SEED)
        return self.text.decode(model.sample(run.weights, prompt, SAMPLE_CHARACTERS, SAMPLE_TEMPERATURE, rng)).strip()


def train(run: Run, text: Text, outputs: Outputs, seconds: float, steps: int, signals: list[int]) -> str:
    """Take steps until a limit or a signal; returns which: `seconds`, `steps` or a signal's name.

    Raises FloatingPointError when a loss or gradient is not a number, before anything of it reaches a file.
    """
    started, before = time.monotonic(), run.seconds
    pending: list[float] = []
    counted_from, shown_at = time.monotonic(), -math.inf

    def measure() -> None:
        """Put a point on the curves, and the files where a reader finds them."""
        nonlocal counted_from, pending
        held_out = model.sequence_loss(run.weights, text.held_out, HELD_OUT_LANES)
        if not math.isfinite(held_out):
            raise FloatingPointError(f"the held-out loss after step {run.step} is not a number")
        characters_per_s = len(pending) * BATCH * WINDOW / max(1e-9, time.monotonic() - counted_from)
        run.history.append(
            {
                "step": run.step,
                "seconds": round(run.seconds, 2),
                "train_loss": round(float(np.mean(pending)), 4) if pending else None,
                "held_out_loss": round(held_out, 4),
                "characters_per_s": round(characters_per_s),
            }
        )
        outputs.report(run)
        pending, counted_from = [], time.monotonic()

    def show() -> None:
        nonlocal shown_at
        point, shown_at = run.history[-1], time.monotonic()
        say(f"progress steps={run.step}")
        say(
            f"step {run.step:>5}   loss {point['train_loss']:.3f}   held-out {point['held_out_loss']:.3f}   "
            f"{point['characters_per_s']:>7,} chars/s   {run.seconds:5.1f} s"
        )

    def reason_to_stop() -> str | None:
        if signals:
            return signal.Signals(signals[0]).name
        if run.step >= steps:
            return "steps"
        return "seconds" if time.monotonic() - started >= seconds else None

    if not run.history:
        measure()
    while (reason := reason_to_stop()) is None:
        pending.append(run.train_one_step(text))
        run.seconds = before + time.monotonic() - started
        if run.step % REPORT_EVERY == 0:
            measure()
            if time.monotonic() - shown_at >= 1:
                show()
        if run.step % CHECKPOINT_EVERY == 0:
            outputs.checkpoint(run)
    if pending:
        measure()
    if run.history[-1]["train_loss"] is not None:
        show()
    outputs.checkpoint(run)
    outputs.report(run, stopped_by=reason)
    return reason


def main() -> int:
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: signals.append(received))
    try:
        seconds = positive_setting("TRAIN_SECONDS", 20.0)
        steps = int(positive_setting("TRAIN_STEPS", 1500))
        text = Text(HERE / "corpus.txt")
        resume_from = os.environ.get("RESUME_FROM")
        run = Run.resumed(Path(resume_from), text.characters) if resume_from else Run.fresh(len(text.characters))
        outputs = Outputs(
            Path(os.environ.get("GPU_OUTPUT_DIR") or "gpu-outputs/by-hand"), text, run.step if resume_from else None
        )
    except (Unusable, OSError) as problem:
        print(f"train.py: {problem}", file=sys.stderr)
        return 2

    unigram = text.unigram_loss()
    baseline = f"letter frequencies alone: loss {unigram:.3f} nats per character, perplexity {math.exp(unigram):.2f}"
    say(f"{len(text.training):,} characters to learn from, {len(text.held_out):,} held out")
    say(f"{run.parameters():,} parameters, numpy {np.__version__}, at most {seconds:g} s and {steps:,} steps")
    say(baseline)
    if resume_from:
        say(f"going on from step {run.step} of {resume_from}")

    try:
        reason = train(run, text, outputs, seconds, steps, signals)
    except FloatingPointError as problem:
        print(f"train.py: {problem}; the files are from before it", file=sys.stderr)
        return 1
    except OSError as problem:
        print(f"train.py: cannot write the outputs: {problem}", file=sys.stderr)
        return 1

    held_out = run.history[-1]["held_out_loss"]
    say(f"stopped by {reason} at step {run.step} after {run.seconds:.1f} s")
    say(baseline)
    say(f"this model on notes it never saw: loss {held_out:.3f}, perplexity {math.exp(held_out):.2f}")
    say("it now writes like this:\n\n" + outputs.sample(run))
    return 128 + signals[0] if reason.startswith("SIG") else 0


def positive_setting(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise Unusable(f"{name}={text!r} is not a positive number")
    return value


def write(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Fill a file beside `path`, bring it to the disk, then give it its name."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
