"""How the blocks of a partial save are written: exactly, or as int8 steps from the values that both sides expect.

Owner and peer decode the same bits from the same payload: every operation is a single IEEE 754 one (a product, then
a sum, never fused), so the result does not depend on the processor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CODECS = ("exact", "int8")
CHUNK_NUMBERS = 1 << 17
"""Numbers computed at a time where a temporary is needed: half a megabyte, which stays in cache."""


def chunk_rows(width: int) -> int:
    """Return how many rows of ``width`` numbers are computed at a time; at least 1."""
    return max(1, CHUNK_NUMBERS // max(1, width))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are computed: float64 for itself, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_stepped(tensor: Tensor, codec: str) -> bool:
    """Return whether ``codec`` writes a tensor as steps, in two tensors; otherwise it is written exactly, as one."""
    return codec == "int8" and tensor.is_floating_point()


def coded_bytes(tensor: Tensor, codec: str) -> int:
    """Return the encoded size in bytes of one block of ``tensor``, which has shape (blocks, width)."""
    width = tensor.shape[1]
    return width + 4 if is_stepped(tensor, codec) else width * tensor.element_size()


def encode(rows: Tensor, blocks: Tensor, expected: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the steps from the expected to the actual values of blocks; each number is decoded to within half a step.

    Args:
        rows: All blocks; floating-point, shape (any, width).
        blocks: The blocks to encode; int64, shape (k,).
        expected: Returns the values that both sides expect for some of the blocks; shape (some, width), in the :func:`wide`
            dtype.

    Returns:
        The number of steps, int8 of shape (k, width), and the length of a step, float32 of shape (k,). A length is not finite
        if a number of the block is not, or the difference overflows float32. Lengths are negated if none of the numbers is
        negative, as for the mean squares whose roots Adam divides by: :func:`decode` then returns no value below half
        a step, so none becomes negative, or 0 where it was not.
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
    # A length that is NaN, or rounds to 0, moves nothing.
    usable = torch.where((length > 0) & length.isfinite(), length, torch.inf).to(base.dtype)
    steps.copy_(rows.sub_(base).div_(usable.unsqueeze(1)).round_().clamp_(-127, 127).nan_to_num_(0.0))
    return length.masked_fill_(~is_finite, torch.nan)


def decode(steps: Tensor, length: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows that :func:`encode` encoded as these steps and lengths, or some of them, in ``dtype``.

    ``base`` are the expected values of the blocks.
    """
    ways = length.abs().to(base.dtype).unsqueeze(1)
    rows = steps.to(base.dtype).mul_(ways).add_(base)
    if len(length) and length[0].signbit():
        rows = torch.maximum(rows, ways / 2)  # the actual value is at least as near to that as to 0
    return rows.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def span(a: Tensor, b: Tensor, power: float) -> Tensor:
    """Return the distance between the rows of ``a`` and ``b`` in the norm of ``power``, in one pass and without a temporary.

    Both are float32 or float64. The power is 2 or infinity; with infinity, a NaN may go unnoticed.
    """
    # Each row is its own batch. The alternative, matrix products, suffers from cancellation.
    pairs = torch.cdist(a.unsqueeze(1), b.unsqueeze(1), p=power, compute_mode="donot_use_mm_for_euclid_dist")
    return pairs.view(-1)


def finite(rows: Tensor) -> Tensor:
    """Return for each row whether all its numbers are finite; bool, shape (k,)."""
    if not rows.is_floating_point() or rows.sum().isfinite():  # the sum is not finite if one number is not
        return torch.ones(len(rows), dtype=torch.bool)
    return rows.isfinite().view(len(rows), -1).all(1)
