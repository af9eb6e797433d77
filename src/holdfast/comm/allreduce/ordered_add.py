"""The ordered addition of terms in the memory of a device: in one pass by a Triton kernel, otherwise by torch.

``torch.add`` for each term reads and writes the sum each time: 3 (K - 1) transfers an element for K terms. The kernel
makes K + 1. Both give the same bits, on a GPU and on a CPU, except for one thing: *the payload of a NaN*. A NaN is a NaN
with each of them, but a CPU keeps the payload of an operand, and a GPU returns one canonical NaN.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence

import torch

from holdfast.base.device_errors import DeviceFailure, classify
from holdfast.base.orders import is_rounded
from holdfast.comm.allreduce.adding import ORDERS, MeanDivisor, Terms
from holdfast.comm.allreduce.checksums import Altered, ChecksummedVector, ignore_corruption

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether the kernel can be compiled; wheels of torch for CUDA bring Triton with them."""
MOST_TERMS = 64
"""Maximum number of terms that the kernel adds in one pass."""
KERNEL_ORDERS = ("fold", "tree", "wide")
KERNEL_DTYPES = (torch.float32, torch.bfloat16)

OrderedAdd = Callable[[Terms, torch.Tensor, str, MeanDivisor | None], None]
"""Adds terms into a tensor, in an order, and divides its first elements."""


def ordered_add(terms: Terms, out: torch.Tensor, order: str, mean: MeanDivisor | None = None) -> None:
    """Add terms into ``out``, with the bits of :data:`~holdfast.comm.allreduce.adding.ORDERS`, in the current stream.

    Args:
        terms: Slice numbers and terms, ascending by slice; numbers may have gaps. All have the type and length of
            ``out``, and are contiguous. They are not modified.
        out: Receives the sum; it must not overlap a term.
        order: One of the orders of :mod:`~holdfast.comm.allreduce.adding`.
        mean: Division of the first elements, correctly rounded.
    """
    if HAS_TRITON and not out.is_cpu and _fits_kernel(terms, out, order) and kernel_works(out.device):
        add_by_kernel(terms, out, order, mean)
    else:
        add_by_torch(terms, out, order, mean)


@functools.cache
def kernel_works(device: torch.device) -> bool:
    """Return whether the kernel has the bits of torch on a device, tried once there; warn if it has not.

    Triton needs a C compiler on the machine, and a GPU that it knows; version 3.5 flushes denormal quotients to
    zero. Torch gives the right bits without it.
    """
    try:
        why = (
            "" if all(_has_bits_of_torch(dtype, device) for dtype in KERNEL_DTYPES) else "it has other bits than torch"
        )
    except Exception as error:
        if classify(error) is DeviceFailure.LOST:
            raise
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if why:
        warnings.warn(f"gradients on {device} are added by torch, which is slower than the kernel: {why}", stacklevel=2)
    return not why


def _has_bits_of_torch(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel has the bits of torch for some numbers, a third of them denormal."""
    numbers = torch.arange(1, 3001, dtype=torch.float32, device=device)
    numbers[:1000] *= 2.0**-136
    terms = [(k, (numbers / (3 + k)).to(dtype)) for k in range(5)]
    result, reference = torch.empty_like(terms[0][1]), torch.empty_like(terms[0][1])
    mean = MeanDivisor(300.0, 2900)
    add_by_torch(terms, reference, "tree", mean)
    add_by_kernel(terms, result, "tree", mean)
    return torch.equal(result, reference)


def _fits_kernel(terms: Terms, out: torch.Tensor, order: str) -> bool:
    return (
        order in KERNEL_ORDERS
        and out.dtype in KERNEL_DTYPES
        and 1 < len(terms) <= MOST_TERMS
        and out.numel() > 0
        and all(tensor.is_contiguous() for tensor in (out, *(term for _, term in terms)))
    )


def add_by_kernel(terms: Terms, out: torch.Tensor, order: str, mean: MeanDivisor | None = None) -> None:
    """:func:`ordered_add` by the kernel; two to :data:`MOST_TERMS` terms of :data:`KERNEL_DTYPES`."""
    from holdfast.comm.allreduce.ordered_add_kernel import add_terms, block_of

    block = block_of(len(terms), out.dtype)
    divided = 0 if mean is None else max(0, min(mean.numbers, out.numel()))
    add_terms[(-(-out.numel() // block),)](
        tuple(term for _, term in terms),
        out,
        out.numel(),
        1.0 if mean is None else float(mean.divisor),
        divided,
        MERGES=merges([number for number, _ in terms], order),
        STEPWISE=order != "wide",
        DIVIDE=divided > 0,
        BLOCK=block,
        enable_fp_fusion=False,
    )


@torch.no_grad()
def add_by_torch(terms: Terms, out: torch.Tensor, order: str, mean: MeanDivisor | None = None) -> None:
    """:func:`ordered_add` by torch: the reference of the kernel."""
    ORDERS[order](terms, out)
    if mean is not None and mean.numbers > 0:
        divide(out[: mean.numbers], mean.divisor)
    if is_rounded(order) and out.dtype == torch.float32:
        out.copy_(out.bfloat16())


def divide(numbers: torch.Tensor, divisor: float) -> None:
    """Divide in place, correctly rounded on every device.

    On CUDA, torch multiplies by the reciprocal where the divisor is a number of the host: for most divisors that is
    another result in a third of the cases or more. So there the divisor is a tensor of the device.
    """
    if numbers.is_cpu:
        numbers.div_(divisor)
        return
    dtype = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    exact = numbers.to(dtype).div_(torch.full((), divisor, dtype=dtype, device=numbers.device))
    numbers.copy_(exact)


def merges(numbers: Sequence[int], order: str) -> tuple[int, ...]:
    """Return the order of additions as a program: after each term, how many times the last two sums are added.

    Args:
        numbers: The slices of the terms, ascending, at least one.
        order: ``"tree"``; all others add one term after another.
    """
    if order != "tree":
        return (0,) + (1,) * (len(numbers) - 1)
    level: list[tuple[int, list[int]]] = [(number, [0]) for number in numbers]
    while len(level) > 1:
        paired: list[tuple[int, list[int]]] = []
        for number, program in level:
            if paired and paired[-1][0] == number // 2:
                paired[-1] = (number // 2, [*paired[-1][1], *program[:-1], program[-1] + 1])
            else:
                paired.append((number // 2, program))
        level = paired
    return tuple(level[0][1])


class WholeSum:
    """The addition of some terms by their device: the counterpart of ``TiledSum``, whose tiles fit the cache of a CPU.

    Args:
        terms: ``(slice, vector)``, ascending by slice; all as long as ``out``. Those with checksums are verified.
        out: Receives the sum, and its checksums if it has any.
        start: Offset of ``out`` in the whole vector.
        order: One of the orders of :mod:`~holdfast.comm.allreduce.adding`.
        add: Adds on the device.
    """

    def __init__(
        self,
        terms: Sequence[tuple[int, ChecksummedVector]],
        out: ChecksummedVector,
        start: int,
        order: str,
        add: OrderedAdd,
    ) -> None:
        self._terms = [(number, term.numbers) for number, term in terms]
        self._checked = [
            (number, tile) for number, term in terms if term.checksums is not None for tile in term.split()
        ]
        self._out, self._start, self._order, self._add = out, start, order, add

    def __call__(self, mean: MeanDivisor | None = None, altered: Altered = ignore_corruption) -> None:
        """Add, and divide by ``mean``; call ``altered`` for each tile of a term that does not match its checksum."""
        for number, tile in self._checked:
            if not tile.is_intact():
                altered(number)
        own_mean = None if mean is None else MeanDivisor(mean.divisor, mean.numbers - self._start)
        self._add(self._terms, self._out.numbers, self._order, own_mean)
        self._out.seal()
