"""The retention policy: which checkpoints are kept. Pure: no torch, no storage."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import ConfigError

LEAST = 2
"""The newest checkpoint may be damaged, so there must be another."""


def to_remove(steps: Sequence[int], keep_last: int, keep_every: int = 0, intact: int | None = None) -> list[int]:
    """Return the steps whose checkpoints may be removed.

    Args:
        steps: Steps of all complete checkpoints.
        keep_last: Number of newest checkpoints that stay, ``>= 2``; 0: all.
        keep_every: Steps divisible by this number stay, too; 0: none.
        intact: The newest step known to be undamaged, which stays, too.

    Raises:
        ConfigError: if ``keep_last`` is 1 or negative, or ``keep_every`` negative.
    """
    if keep_last < 0 or 0 < keep_last < LEAST:
        raise ConfigError(
            f"keep_last must be at least {LEAST}, or 0 to keep all, got {keep_last}: the newest may be damaged"
        )
    if keep_every < 0:
        raise ConfigError(f"keep_every must be at least 0, got {keep_every}")
    if not keep_last:
        return []
    kept = set(sorted(steps)[-keep_last:]) | {intact}
    return [step for step in sorted(steps) if step not in kept and not (keep_every and step % keep_every == 0)]
