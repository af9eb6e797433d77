"""The ordered addition as one pass over memory, in Triton; see :func:`holdfast.comm.allreduce.ordered_add.ordered_add`.

The bits must be those of the additions of :mod:`~holdfast.comm.allreduce.adding`. So there are only additions in
float32, roundings that are written out, and a correctly rounded division: a compiler may fuse or approximate other
operations. This module imports Triton, which needs a GPU to run it, or its interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MANY_TERMS = 24


def block_of(num_terms: int, dtype: torch.dtype) -> int:
    """Return how many elements one program adds.

    The compiler loads all terms before it adds. With many terms of float32, twice as many elements would not fit into
    the registers of a thread: for 64 terms, ptxas 13 then spills 3.6 KB a thread for an H100.
    """
    return 512 if num_terms > _MANY_TERMS and dtype == torch.float32 else 1024


@triton.jit
def round_to_bf16(x):
    """Return float32 numbers rounded to the nearest bfloat16, ties to even, as float32; NaN stays NaN.

    In integers: the conversion of the hardware, between two additions, would let the compiler use additions of bfloat16.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded, bits | 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def widened(x):
    """Return numbers in float32. A bfloat16 is the upper half of a float32; Triton's interpreter loses small ones."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """Return float32 numbers that are rounded already in the type ``DTYPE``."""
    if DTYPE == tl.bfloat16:
        x = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x


@triton.jit
def add_block(
    terms, out, at, mask, divisor, divided, MERGES: tl.constexpr, STEPWISE: tl.constexpr, DIVIDE: tl.constexpr
):
    """Add the elements ``at`` of all terms; ``mask`` says which of them exist, None: all."""
    narrow: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    sums = ()  # the sums that are not added to anything yet; all of this is known when the kernel is compiled
    for k in tl.static_range(len(MERGES)):
        sums = sums + (widened(tl.load(terms[k] + at, mask=mask)),)
        for _ in tl.static_range(tl.constexpr(MERGES[k])):
            total = sums[len(sums) - 2] + sums[len(sums) - 1]
            if narrow and STEPWISE:
                total = round_to_bf16(total)
            sums = sums[: len(sums) - 2] + (total,)
    total = sums[0]
    if narrow and not STEPWISE:
        total = round_to_bf16(total)
    if DIVIDE:
        mean = tl.div_rn(total, divisor)
        if narrow:
            mean = round_to_bf16(mean)
        total = tl.where(at < divided, mean, total)
    tl.store(out + at, narrowed(total, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "divided"])
def add_terms(
    terms,
    out,
    n,
    divisor,
    divided,
    MERGES: tl.constexpr,
    STEPWISE: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the ``n`` elements of all terms into ``out``, and divide the first ``divided`` of them.

    Args:
        terms: A tuple of at least one; contiguous, of the type and length of ``out``.
        out: float32 or bfloat16.
        n: Their length; programs of ``BLOCK`` elements cover it.
        divisor: Of the first ``divided`` elements.
        divided: How many elements are divided.
        MERGES: After each term, how many times the last two sums are added; see
            :func:`~holdfast.comm.allreduce.ordered_add.merges`.
        STEPWISE: Each addition is rounded to the type of ``out``, not only the last.
        DIVIDE: Any are divided.
        BLOCK: Elements of a program; see :func:`block_of`.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # without a mask, elements are loaded four at a time
        add_block(terms, out, at, None, divisor, divided, MERGES, STEPWISE, DIVIDE)
    else:
        add_block(terms, out, at, at < n, divisor, divided, MERGES, STEPWISE, DIVIDE)
