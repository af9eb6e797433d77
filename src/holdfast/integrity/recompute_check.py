"""Digests of the gradients that this worker computed, slice by slice, to check after a rollback that it computes the same again.

A worker whose weights were altered computes wrong gradients first. Other workers are affected one step later, once these
gradients are in their weights. So the worker that first fails to reproduce its own gradients is at
fault. This works even with two workers, where neither is a majority.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

from holdfast.integrity import device_digest
from holdfast.integrity.fingerprint import is_on_device, raw

_LOOKED_AT = 16384
"""Number of a slice's gradient values that are hashed: those of the last layers, which an error in any other layer affects."""


class RecomputeCheck:
    """Stores the digests of computed slices since a step, and compares them when the slices are recomputed."""

    def __init__(self) -> None:
        self._now: dict[tuple[int, int], int] = {}
        self._before: dict[tuple[int, int], int] = {}

    def note(self, step: int, number: int, parts: Iterable[torch.Tensor]) -> bool:
        """Store the digest of a slice's first gradient values; return whether it differs from the earlier digest."""
        digest = xxhash.xxh3_64()
        for looked_at in (part[:_LOOKED_AT] for part in parts):
            if is_on_device(looked_at):  # eight bytes are copied instead of all
                digest.update(device_digest.read([device_digest.mixed_sum(looked_at)])[0].to_bytes(8, "little"))
            else:
                digest.update(raw(looked_at))
        key, value = (step, number), digest.intdigest()
        self._now[key] = value
        return self._before.pop(key, value) != value

    def go_back(self, step: int) -> None:
        """Prepare to recompute everything from ``step`` on."""
        self._before = {key: value for key, value in self._now.items() if key[0] >= step} | {
            key: value for key, value in self._before.items() if key[0] >= step
        }
        self._now = {key: value for key, value in self._now.items() if key[0] < step}

    def forget(self, step: int | None = None) -> None:
        """Drop the digests of steps before ``step``, which no rollback reaches any more; None drops all."""
        self._now = {key: value for key, value in self._now.items() if step is not None and key[0] >= step}
        if step is None:
            self._before = {}
