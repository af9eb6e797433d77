"""How the blocks of a partial save are written: as they are, or as int8 steps from what both sides expect them to be.

Owner and peer get the same bits out of the same payload: every operation is one of IEEE 754 by itself (a product, then
a sum, never a fused one), so it does not matter on which processor it runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CODECS = ("exact", "int8")
CHUNK_NUMBERS = 1 << 17
"""Numbers that are computed at a time where there is a temporary: half a megabyte of them, which stays in cache."""


def chunk_rows(width: int) -> int:
    """Return how many rows of ``width`` numbers are computed at a time; at least 1."""
    return max(1, CHUNK_NUMBERS // max(1, width))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are computed: float64 for itself, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_stepped(tensor: Tensor, codec: str) -> bool:
    """Return whether ``codec`` writes a tensor as steps, which are two tensors; else it is written as it is, as one."""
    return codec == "int8" and tensor.is_floating_point()


def coded_bytes(tensor: Tensor, codec: str) -> int:
    """Return how many bytes one block of ``tensor``, of shape (blocks, width), takes as it is written."""
    width = tensor.shape[1]
    return width + 4 if is_stepped(tensor, codec) else width * tensor.element_size()


def encode(rows: Tensor, blocks: Tensor, expected: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return steps from what blocks are expected to be to what they are; each number comes back within half a step.

    Args:
        rows: Of all blocks; floating, of shape (any, width).
        blocks: Which of them; int64, of shape (k,).
        expected: Returns what both sides expect some of the blocks to be; of shape (some, width), in the :func:`wide`
            dtype.

    Returns:
        How many steps, int8 of shape (k, width), and the length of a step, float32 of shape (k,); not finite where a
        number of the block is not, or the way is too long for a float32. The lengths are written negative where none of
        the numbers is, as the mean squares of which Adam takes the root: :func:`decode` makes none of these less than half
        a step then, so none negative, nor 0 where it was not, by whose root a step is divided.
    """
    steps = torch.empty(len(blocks), rows.shape[1], dtype=torch.int8)
    lengths = torch.empty(len(blocks))
    has_negative = not len(blocks)
    size = chunk_rows(rows.shape[1])
    for some, its_steps, its_lengths in zip(blocks.split(size), steps.split(size), lengths.split(size), strict=True):
        chosen = rows.index_select(0, some)
        has_negative = has_negative or bool(chosen.min() < 0)
        its_lengths.copy_(_encode_some(chosen, expected(some), its_steps))
    return steps, lengths if has_negative else lengths.neg_()


def _encode_some(rows: Tensor, base: Tensor, steps: Tensor) -> Tensor:
    """Write the steps from ``base`` to ``rows``, which are overwritten, and return their lengths."""
    is_finite = finite(rows)
    rows = rows.to(base.dtype)
    length = (span(rows, base, torch.inf) / 127).to(torch.float32)
    # A length that is no number, or rounds to 0, moves nothing.
    usable = torch.where((length > 0) & length.isfinite(), length, torch.inf).to(base.dtype)
    steps.copy_(rows.sub_(base).div_(usable.unsqueeze(1)).round_().clamp_(-127, 127).nan_to_num_(0.0))
    return length.masked_fill_(~is_finite, torch.nan)


def decode(steps: Tensor, length: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of which :func:`encode` wrote these steps and lengths, or some of them, as numbers of ``dtype``.

    ``base`` is what the blocks were expected to be.
    """
    ways = length.abs().to(base.dtype).unsqueeze(1)
    rows = steps.to(base.dtype).mul_(ways).add_(base)
    if len(length) and length[0].signbit():
        rows = torch.maximum(rows, ways / 2)  # what is there is as far from that as from 0, or nearer
    return rows.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def span(a: Tensor, b: Tensor, power: float) -> Tensor:
    """Return the distance of each row of ``a`` to that of ``b`` in the norm of ``power``, in one pass and no temporary.

    Both are float32 or float64. The power is 2 or infinity; with the latter, a NaN may go unseen.
    """
    # Each row is a batch of its own. Matrix products, the other way to compute it, would cancel.
    pairs = torch.cdist(a.unsqueeze(1), b.unsqueeze(1), p=power, compute_mode="donot_use_mm_for_euclid_dist")
    return pairs.view(-1)


def finite(rows: Tensor) -> Tensor:
    """Return of each row whether all its numbers are finite; bool, of shape (k,)."""
    if not rows.is_floating_point() or rows.sum().isfinite():  # the sum is not, if one number is not
        return torch.ones(len(rows), dtype=torch.bool)
    return rows.isfinite().view(len(rows), -1).all(1)
