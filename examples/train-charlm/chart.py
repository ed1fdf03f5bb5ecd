"""The curves of a run as an SVG of its own: no library, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 780, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 650, 96, 376  # the plot area

STYLE = """
  .page { fill: #ffffff; }
  text { font: 12px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #5b6472; }
  .title { fill: #16202e; font-size: 18px; font-weight: 600; }
  .end { font-size: 13px; font-weight: 600; }
  .grid { stroke: #e7eaef; }
  .axis { stroke: #a3acb9; }
  .baseline { stroke: #8b95a3; stroke-dasharray: 5 4; stroke-width: 1.5; }
  .curve { fill: none; stroke-width: 2.5; stroke-linejoin: round; stroke-linecap: round; }
  .training { stroke: #2f7de1; } .training-text { fill: #1f67c4; }
  .held-out { stroke: #d9622b; } .held-out-text { fill: #bb4c19; }
  circle.training { fill: #2f7de1; stroke: #ffffff; } circle.held-out { fill: #d9622b; stroke: #ffffff; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #12171f; }
    text { fill: #9aa6b6; }
    .title { fill: #eef2f7; }
    .grid { stroke: #252d39; }
    .axis { stroke: #566174; }
    .baseline { stroke: #77839a; }
    .training { stroke: #6aa9ff; } .training-text { fill: #8bbcff; }
    .held-out { stroke: #ff9361; } .held-out-text { fill: #ffab82; }
    circle.training { fill: #6aa9ff; stroke: #12171f; } circle.held-out { fill: #ff9361; stroke: #12171f; }
  }
"""


def loss_chart(history: list[dict], unigram_loss: float, subtitle: str) -> str:
    """Training and held-out loss by step, over the dashed line of a model that knows only how frequent letters are.

    history: points with `step`, `held_out_loss` and `train_loss`, the mean since the point before (None at the first of
    a run), which is why the training curve lies on the middles of the intervals.
    """
    held_out = [(p["step"], p["held_out_loss"]) for p in history]
    training = [
        ((before["step"] + point["step"]) / 2, point["train_loss"])
        for before, point in pairwise(history)
        if point["train_loss"] is not None
    ]
    values = [value for _, value in held_out + training] + [unigram_loss]
    y_ticks = nice_ticks(min(values), max(values), 6)
    low, high = y_ticks[0], y_ticks[-1]
    last_step = max(10, history[-1]["step"])
    x_ticks = nice_ticks(0, last_step, 7)

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / last_step

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="title about">',
        '<title id="title">Loss of the character model while it trained</title>',
        f'<desc id="about">{escape(subtitle)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
        _text(LEFT - 36, 36, "How surprised the model is by the next character", kind="title"),
        _text(LEFT - 36, 57, escape(subtitle)),
        _text(LEFT - 36, TOP - 14, "loss, nats per character"),
    ]
    for loss in y_ticks:
        parts.append(_line("axis" if loss == low else "grid", LEFT, RIGHT, y(loss), y(loss)))
        parts.append(_text(LEFT - 10, y(loss) + 4, f"{loss:.{decimals(y_ticks)}f}", anchor="end"))
    for step in x_ticks:
        if step <= last_step:
            parts.append(_line("axis", x(step), x(step), BOTTOM, BOTTOM + 5))
            parts.append(_text(x(step), BOTTOM + 21, f"{step:,.0f}", anchor="middle"))
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 44, "training steps", anchor="middle"))
    parts.append(_line("baseline", LEFT, RIGHT, y(unigram_loss), y(unigram_loss)))
    known = f"letter frequencies alone: {unigram_loss:.2f}"
    parts.append(_text(RIGHT - 6, y(unigram_loss) - 8, known, anchor="end"))
    curves = [("training", training), ("held-out", held_out)]
    for kind, points in curves:
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline class="curve {kind}" points="{path}"/>')
    parts += _ends([(kind, points[-1]) for kind, points in curves if points], x, y)
    return "\n".join([*parts, "</svg>", ""])


def _ends(ends: list, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    """A dot and a name where each curve ends, the names pushed apart when they would touch."""
    placed = sorted((y(value), kind, step, value) for kind, (step, value) in ends)
    labels = [place for place, *_ in placed]
    for i in range(1, len(labels)):
        if labels[i] - labels[i - 1] < 18:
            middle = (labels[i] + labels[i - 1]) / 2
            labels[i - 1], labels[i] = middle - 9, middle + 9
    parts = []
    for label, (place, kind, step, value) in zip(labels, placed, strict=True):
        parts.append(f'<circle class="{kind}" cx="{x(step):.1f}" cy="{place:.1f}" r="4.5" stroke-width="2"/>')
        parts.append(_text(RIGHT + 12, label + 4, f"{kind} {value:.2f}", kind=f"end {kind}-text"))
    return parts


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str = "label", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers 1, 2 or 5 times a power of ten apart, that cover low to high."""
    span = max(high - low, 1e-9)
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / distance + 1e-9), math.ceil(high / distance - 1e-9)
    return [i * distance for i in range(first, max(last, first + 1) + 1)]


def decimals(ticks: list[float]) -> int:
    return max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
