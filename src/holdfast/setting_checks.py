"""Checks of settings that depend on each other, or whose range has a hole."""

from __future__ import annotations

import math

from holdfast.errors import ConfigError
from holdfast.recovery.registry import strategy_class

_LONGEST_HANG_S = 1e9
"""The longest supported timeout of a thread's sleep."""
_SHORTEST_HANG_S = 0.1
"""A beacon pulses ten times a second: with a shorter limit, a worker would seem hung between two pulses."""
_SHORTEST_START_S = 1.0
"""Python alone takes a tenth of a second to start."""


def check_timeouts(hang_timeout_s: float, start_timeout_s: float) -> None:
    """Check the limits of failure detection, in seconds.

    Raises:
        ConfigError: if one is neither 0 nor in its range.
    """
    if hang_timeout_s != 0 and not _SHORTEST_HANG_S <= hang_timeout_s < math.inf:
        raise ConfigError(
            f"hang_timeout_s must be at least {_SHORTEST_HANG_S:g} seconds and finite, or 0 for never, got {hang_timeout_s:g}"
        )
    if hang_timeout_s > _LONGEST_HANG_S:
        raise ConfigError(
            f"hang_timeout_s must be at most {_LONGEST_HANG_S:g} seconds, or 0 for never, got {hang_timeout_s:g}"
        )
    if start_timeout_s != 0 and not _SHORTEST_START_S <= start_timeout_s <= _LONGEST_HANG_S:
        raise ConfigError(
            f"start_timeout_s must be from {_SHORTEST_START_S:g} to {_LONGEST_HANG_S:g} seconds, or 0 for never, got {start_timeout_s:g}"
        )


def check_mirrors(mirror_fraction: float, mirror_every: int, strategy: str) -> None:
    """Check how much of a part is copied to a neighbor, and how often.

    Raises:
        ConfigError: if that would never copy anything, or the strategy cannot use outdated copies.
    """
    if not 0 < mirror_fraction <= 1 or round(mirror_fraction * mirror_every) < 1:
        raise ConfigError(
            f"mirror_fraction must be above 0, at most 1, and at least one step of mirror_every ({mirror_every}), "
            f"got {mirror_fraction:g}"
        )
    if mirror_every > 1 and not strategy_class(strategy).restores_parts:
        raise ConfigError(
            f"mirror_every above 1 needs strategy partial, got {strategy}: an outdated copy cannot restore the same bits"
        )
