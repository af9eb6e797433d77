"""Refusing numbers that cannot be, in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.errors import ConfigError

NS = 1_000_000_000
"""Time is counted in whole nanoseconds, so that the parts of a run add up to its whole and two simulators can agree to the bit."""

LONGEST_S = 1e9
"""About thirty years: whoever asks for more gets this much, so that no sum of times leaves 64 bits."""


MOST_STEPS = 10**11
"""Thirty years of steps of ten milliseconds: the work in them is counted in 64 bits, too, in shares of ten million workers."""

_SHORTEST_S = 1e-3


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
        raise ConfigError(f"{name} must be {floor}{ceiling}, got {_shown(value)}")


def check_mtbf(mtbf_s: float) -> None:
    """Make sure that there is time between two failures of a job.

    Raises:
        ConfigError: if there is less than a millisecond.
    """
    if mtbf_s < _SHORTEST_S:
        raise ConfigError(
            f"a failure every {mtbf_s:g} s leaves no time for anything; is the mean time between failures right?"
        )


def _shown(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # a whole number that no float holds
        return f"{str(value)[:20]}..., of {len(str(value))} digits"


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Make sure that a word is one of those that there are.

    Raises:
        ConfigError: if it is not.
    """
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
