"""Durations as options take them: `90s`, `15m`, `1h30m`."""

from __future__ import annotations

from typing import Any

import click

from gpu_skills.units import parse_duration


class Duration(click.ParamType):
    """Seconds. is_positive: nothing is not enough."""

    name = "duration"

    def __init__(self, *, is_positive: bool = False):
        self._is_positive = is_positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = parse_duration(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)
        if self._is_positive and seconds <= 0:
            self.fail("it must be more than 0", param, ctx)
        return seconds


DURATION = Duration()
POSITIVE_DURATION = Duration(is_positive=True)
