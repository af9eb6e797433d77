"""What this worker computed, slice by slice, to see after going back whether it computes the same again.

A worker whose weights were altered computes other gradients than it should, before anybody else does: the others get to
feel it only when these gradients are in their weights, a step later. So who fails to reproduce its own history first is at
fault. That works with two workers as well, of whom neither is a majority.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

from holdfast.integrity.fingerprint import raw

_LOOKED_AT = 16384
"""Numbers of a slice's gradients that are hashed: those of the last layers, which feel what went wrong in any other."""


class Computed:
    """Remembers what was computed since a step, and compares what is computed again."""

    def __init__(self) -> None:
        self._now: dict[tuple[int, int], int] = {}
        self._before: dict[tuple[int, int], int] = {}

    def note(self, step: int, number: int, parts: Iterable[torch.Tensor]) -> bool:
        """Note the first numbers of what a slice gave; return whether it gave something else before."""
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(raw(part[:_LOOKED_AT]))
        key, value = (step, number), digest.intdigest()
        self._now[key] = value
        return self._before.pop(key, value) != value

    def go_back(self, step: int) -> None:
        """Hear that everything from ``step`` on is computed again."""
        self._before = {key: value for key, value in self._now.items() if key[0] >= step} | {
            key: value for key, value in self._before.items() if key[0] >= step
        }
        self._now = {key: value for key, value in self._now.items() if key[0] < step}

    def forget(self, step: int | None = None) -> None:
        """Forget what was computed before ``step``, to which nobody goes back any more; None: all."""
        self._now = {key: value for key, value in self._now.items() if step is not None and key[0] >= step}
        if step is None:
            self._before = {}
