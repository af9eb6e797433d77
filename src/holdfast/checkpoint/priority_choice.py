"""Chooses the blocks of a partial save: those with the highest scores that fit."""

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
"""One in this many scores is sampled to estimate which are high."""
_FEW = 1 / 4
"""Up to this fraction of all blocks, filtering the high scores before partitioning pays off."""


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return the Euclidean distance between the rows of ``a`` and ``b``; both of shape (blocks, width).

    It is not finite if a number is not finite, or if the squared distance overflows the dtype.
    """
    if a.dtype == b.dtype == wide(a.dtype):
        return span(a, b, 2)
    dtype = torch.promote_types(wide(a.dtype), wide(b.dtype))
    size = chunk_rows(a.shape[1])
    return torch.cat([span(x.to(dtype), y.to(dtype), 2) for x, y in zip(a.split(size), b.split(size), strict=True)])


def unit(rows: Tensor) -> float:
    """Return the root mean square of all numbers, the same with any number of threads; 1 if it is 0 or overflows."""
    pieces = rows.split(chunk_rows(rows.shape[1]))
    lengths = torch.cat([torch.linalg.vector_norm(piece.to(wide(rows.dtype)), dim=1) for piece in pieces])
    rms = float(np.sqrt(np.mean(lengths.double().numpy() ** 2) / rows.shape[1]))
    return rms if 0 < rms < np.inf else 1.0


def drawn(blocks: int, seed: int, step: int) -> Tensor:
    """Return a random score for each block, a function of seed and step alone."""
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.rand(blocks, dtype=torch.float64, generator=generator)


def highest(scores: Tensor, sizes: Tensor, room: int) -> Tensor:
    """Return the blocks with the highest scores that fit.

    Among equal scores the lower block number comes first. Blocks are taken until the first one that does not fit.

    Args:
        scores: One per block; negative scores and those that are not finite are never taken.
        sizes: Size of each block in bytes, ``>= 0``; or one size for all, of shape (1,).
        room: Available bytes, ``>= 0``.

    Returns:
        Block numbers in ascending order, int64.
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
        count *= 2  # these blocks are smaller than most


def _highest(values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the indices of the ``count`` highest values, ascending; fewer if fewer can be taken."""
    if count < 1:
        return np.zeros(0, np.int64)
    if count <= _FEW * len(values):
        numbers = np.flatnonzero(values >= _floor(values, count))  # excludes NaN
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

    Partitioning only those values takes a fraction of the time.
    """
    share = count / _STRIDE
    above = int(share + 4 * share**0.5) + 1  # so that too few values reach it only once in about ten thousand times
    sample = values[::_STRIDE]
    return max(0, np.partition(sample, -above)[-above]) if above <= len(sample) else 0


def _reaching(values: NDArray[Any], count: int, edge: float) -> NDArray[np.int64]:
    """Return the indices of the first ``count`` values above ``edge``, filled up with values equal to it."""
    numbers = np.flatnonzero(values >= edge)
    if len(numbers) == count:
        return numbers
    equal = np.flatnonzero(values[numbers] == edge)
    return np.delete(numbers, equal[count - len(numbers) :])
