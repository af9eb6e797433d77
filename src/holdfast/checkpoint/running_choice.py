"""Which blocks a partial save takes: those with the highest scores that there is room for."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.checkpoint.running_codec import span, wide

CHOICES = ("priority", "round-robin", "random")
CHUNK_NUMBERS = 1 << 17
"""Numbers of a tensor that are computed at a time where there is a temporary: half a megabyte, which stays in cache."""


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distance of each row of ``a`` to that of ``b``; both of shape (blocks, width).

    It is not finite where a number is not, nor where the square of the distance is too large for the dtype.
    """
    if a.dtype == b.dtype == wide(a.dtype):
        return span(a, b, 2)
    dtype = torch.promote_types(wide(a.dtype), wide(b.dtype))
    parts = [span(a[some].to(dtype), b[some].to(dtype), 2) for some in chunks(a)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def chunks(rows: Tensor) -> list[slice]:
    """Return consecutive pieces of ``rows``, each small enough that a temporary of its size stays in cache."""
    length = max(1, CHUNK_NUMBERS // max(1, rows.shape[1]))
    return [slice(begin, begin + length) for begin in range(0, len(rows), length)]


def drawn(blocks: int, seed: int, step: int) -> Tensor:
    """Return a random score of each block, a function of seed and step alone."""
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.rand(blocks, dtype=torch.float64, generator=generator)


def highest(scores: Tensor, sizes: Tensor, room: int) -> Tensor:
    """Return the blocks with the highest scores that there is room for.

    Of equal scores the lower block number goes first. Blocks are taken while they fit; the first that does not ends it.

    Args:
        scores: Of each block; one that is negative is never taken.
        sizes: Of each block, bytes ``>= 0``; or one size for all, of shape (1,).
        room: Bytes, ``>= 0``.

    Returns:
        Numbers of the blocks in rising order, int64.
    """
    values, bytes_of = scores.numpy(), sizes.numpy()
    if len(bytes_of) == 1:
        size = int(bytes_of[0])
        return torch.from_numpy(_highest(values, room // size if size else len(values)))
    count = 1 + room // max(1, int(bytes_of.mean()))
    while True:
        taken = _highest(values, count)
        order = taken[np.argsort(-values[taken], kind="stable")]
        fit = int(np.searchsorted(np.cumsum(bytes_of[order]), room, side="right"))
        if fit < len(taken) or len(taken) < count:
            return torch.from_numpy(np.sort(order[:fit]))
        count *= 2  # they are smaller than most


def _highest(values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the numbers of the ``count`` highest values, in rising order; of fewer, if not so many are ``>= 0``."""
    if count >= len(values):
        return np.flatnonzero(values >= 0)
    if count < 1:
        return np.zeros(0, np.int64)
    edge = np.partition(values, -count)[-count]
    if edge < 0:
        return np.flatnonzero(values >= 0)
    taken = values > edge
    equal = np.flatnonzero(values == edge)
    taken[equal[: count - np.count_nonzero(taken)]] = True
    return np.flatnonzero(taken)
