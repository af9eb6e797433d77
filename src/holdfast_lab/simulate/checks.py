"""Range checks with one-line errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.errors import ConfigError

NS = 1_000_000_000
"""Time is counted in whole nanoseconds, so that the parts of a run add up to the whole and two simulators can agree to
the bit."""

LONGEST_S = 1e9
"""About thirty years. Longer times are clipped to this, so that no total exceeds 64 bits."""


MOST_STEPS = 10**11
"""Thirty years of steps of ten milliseconds. Their work also fits into 64 bits, in shares of ten million workers."""

_SHORTEST_S = 1e-3


def ticks(seconds: float) -> int:
    """Return whole nanoseconds, at most :data:`LONGEST_S`."""
    return round(min(seconds, LONGEST_S) * NS)


def check_range(name: str, value: float, least: float, *, above: bool = False, most: float = math.inf) -> None:
    """Check that a number is from ``least`` to ``most``.

    Args:
        name: Its name in the error.
        value: The number.
        least: The smallest allowed value.
        above: ``least`` itself is not allowed.
        most: The largest allowed value.

    Raises:
        ConfigError: if it is out of range.
    """
    low = value > least if above else value >= least
    if not low or not value <= most:
        floor = f"more than {least:g}" if above else f"at least {least:g}"
        ceiling = "" if most == math.inf else f" and at most {most:g}"
        raise ConfigError(f"{name} must be {floor}{ceiling}, got {_shown(value)}")


def check_mtbf(mtbf_s: float) -> None:
    """Check that there is time between two failures of a job.

    Raises:
        ConfigError: if there is less than a millisecond.
    """
    if mtbf_s < _SHORTEST_S:
        raise ConfigError(f"a failure every {mtbf_s:g} s leaves no time to train; check the mean time between failures")


def _shown(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # an integer too large for a float
        return f"{str(value)[:20]}..., of {len(str(value))} digits"


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Check that a word is one of ``allowed``.

    Raises:
        ConfigError: if it is not.
    """
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
