"""Refusing numbers that cannot be, in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.errors import ConfigError

NS = 1_000_000_000
"""Time is counted in whole nanoseconds, so that the parts of a run add up to its whole and two simulators can agree to the bit."""

LONGEST_S = 1e9
"""About thirty years: whoever asks for more gets this much, so that no sum of times leaves 64 bits."""


def ticks(seconds: float) -> int:
    """Return whole nanoseconds, of :data:`LONGEST_S` at most."""
    return round(min(seconds, LONGEST_S) * NS)


def check_range(name: str, value: float, least: float, *, above: bool = False, most: float = math.inf) -> None:
    """Make sure that a number is from ``least`` to ``most``.

    Args:
        name: What to call it.
        value: The number.
        least: The smallest that is allowed.
        above: ``least`` itself is not.
        most: The largest that is allowed.

    Raises:
        ConfigError: if it is not.
    """
    low = value > least if above else value >= least
    if not low or not value <= most:
        floor = f"more than {least:g}" if above else f"at least {least:g}"
        ceiling = "" if most == math.inf else f" and at most {most:g}"
        msg = f"{name} must be {floor}{ceiling}, got {value:g}"
        raise ConfigError(msg)


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Make sure that a word is one of those that there are.

    Raises:
        ConfigError: if it is not.
    """
    if value not in allowed:
        msg = f"{name} must be one of {', '.join(allowed)}, got {value!r}"
        raise ConfigError(msg)
