"""Randomness that belongs to the job: keyed by what is computed, never by who computes it."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable

import numpy as np
import torch


def seed_of(*parts: int | str) -> int:
    """Return 32 bits that depend on all ``parts``.

    32, because torch's CPU generator keeps only the low 32 bits of a seed: keys must be hashed, not packed.
    """
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def order_of(seed: int, epoch: int, num_samples: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the order in which ``epoch`` visits the samples, a function of its arguments alone."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    order: np.ndarray[tuple[int], np.dtype[np.int64]] = torch.randperm(num_samples, generator=generator).numpy()
    return order


@functools.cache
def _seed_torch() -> Callable[[int], object]:
    """Return what seeds torch: all of its devices if there is one besides the CPU, which takes a hundred times longer."""
    return torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


def seed_slice(seed: int, step: int, slice_: int) -> None:
    """Seed torch's, NumPy's and Python's global generators for one slice of one step."""
    key = seed_of("slice", seed, step, slice_)
    _seed_torch()(key)
    np.random.seed(key)  # the global one: datasets augment with it
    random.seed(key)
