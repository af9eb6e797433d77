"""Which blocks a partial save takes: those with the highest scores that there is room for."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.checkpoint.priority_codec import chunk_rows, span, wide

CHOICES = ("priority", "round-robin", "random")
_STRIDE = 256
"""Of so many scores one is looked at first, to tell which are high."""
_FEW = 1 / 4
"""Up to this share of all blocks, it pays to tell which are high before they are partitioned."""


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distance of each row of ``a`` to that of ``b``; both of shape (blocks, width).

    It is not finite where a number is not, nor where the square of the distance is too large for the dtype.
    """
    if a.dtype == b.dtype == wide(a.dtype):
        return span(a, b, 2)
    dtype = torch.promote_types(wide(a.dtype), wide(b.dtype))
    size = chunk_rows(a.shape[1])
    return torch.cat([span(x.to(dtype), y.to(dtype), 2) for x, y in zip(a.split(size), b.split(size), strict=True)])


def unit(rows: Tensor) -> float:
    """Return the root of the mean square of all numbers, the same with any number of threads; 1 where that is 0 or too large."""
    pieces = rows.split(chunk_rows(rows.shape[1]))
    lengths = torch.cat([torch.linalg.vector_norm(piece.to(wide(rows.dtype)), dim=1) for piece in pieces])
    found = float(np.sqrt(np.mean(lengths.double().numpy() ** 2) / rows.shape[1]))
    return found if 0 < found < np.inf else 1.0


def drawn(blocks: int, seed: int, step: int) -> Tensor:
    """Return a random score of each block, a function of seed and step alone."""
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.rand(blocks, dtype=torch.float64, generator=generator)


def highest(scores: Tensor, sizes: Tensor, room: int) -> Tensor:
    """Return the blocks with the highest scores that there is room for.

    Of equal scores the lower block number goes first. Blocks are taken while they fit; the first that does not ends it.

    Args:
        scores: Of each block; one that is negative or not finite is never taken.
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
    """Return the numbers of the ``count`` highest values, in rising order; of fewer, if not so many can be taken."""
    if count < 1:
        return np.zeros(0, np.int64)
    if count <= _FEW * len(values):
        numbers = np.flatnonzero(values >= _floor(values, count))  # a NaN is not among them
        if len(numbers) >= count:
            high = values.take(numbers)
            if np.isfinite(high.max()):
                return numbers.take(_reaching(high, count, np.partition(high, -count)[-count]))
    values = torch.from_numpy(values).nan_to_num(nan=-1, posinf=-1, neginf=-1).numpy()
    if count >= len(values):
        return np.flatnonzero(values >= 0)
    edge = np.partition(values, -count)[-count]
    return np.flatnonzero(values >= 0) if edge < 0 else _reaching(values, count, edge)


def _floor(values: NDArray[Any], count: int) -> float:
    """Return a number ``>= 0`` that most likely ``count`` values reach, and not many more.

    Partitioning those that reach it takes a fraction of what partitioning all does.
    """
    share = count / _STRIDE
    above = int(share + 4 * share**0.5) + 1  # so that too few reach it once in some ten thousand times
    sample = values[::_STRIDE]
    return max(0, np.partition(sample, -above)[-above]) if above <= len(sample) else 0


def _reaching(values: NDArray[Any], count: int, edge: float) -> NDArray[np.int64]:
    """Return the numbers of the first ``count`` values that are above ``edge``, or equal and there is room for them."""
    numbers = np.flatnonzero(values >= edge)
    if len(numbers) == count:
        return numbers
    equal = np.flatnonzero(values[numbers] == edge)
    return np.delete(numbers, equal[count - len(numbers) :])
