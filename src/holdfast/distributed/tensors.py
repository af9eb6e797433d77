"""Converts tensors and reductions of ``torch.distributed`` to flat vectors, bytes and names of reduction orders."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from holdfast.comm.allreduce.adding import ORDERS
from holdfast.comm.memory import as_bytes
from holdfast.distributed.staging import check_supported

ORDER_OF = {
    ReduceOp.SUM: "wide",
    ReduceOp.AVG: "wide",
    ReduceOp.PREMUL_SUM: "wide",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "and",
    ReduceOp.BOR: "or",
    ReduceOp.BXOR: "xor",
}
_NAMES = {member: name for name, member in ReduceOp.RedOpType.__members__.items()}


class WrongArgument(RuntimeError, ValueError):
    """An argument that a collective cannot take: torch's backends raise RuntimeError, its Python code ValueError."""


def one(tensors: Sequence[Any], what: str) -> Any:
    """Return the only element of a list that torch passes."""
    if len(tensors) != 1:
        raise WrongArgument(f"{what} takes one tensor per rank, got {len(tensors)}")
    return tensors[0]


def check_device(tensor: torch.Tensor, what: str, layout: torch.layout = torch.strided) -> None:
    """Make sure that a tensor is on a device that the backend supports, and has this layout: dense, if none is given."""
    check_supported(tensor.device, what)
    check_layout(tensor, what, layout)


def check_layout(tensor: torch.Tensor, what: str, layout: torch.layout) -> None:
    """Raise :class:`WrongArgument` unless a tensor has this layout."""
    if tensor.layout != layout:
        wanted = "dense" if layout == torch.strided else "sparse COO"
        raise WrongArgument(f"{what} needs a {wanted} tensor, got one of layout {tensor.layout}")


def type_of(op: Any) -> Any:
    """Return the type of a reduction, without its factor."""
    return getattr(op, "op", op)


def name_of(op: Any) -> str:
    """Return the name of a reduction."""
    return _NAMES[type_of(op)]


def factor_of(op: Any) -> Any:
    """Return the factor of ``PREMUL_SUM``: a number, or a tensor in host memory."""
    factor = op.__getstate__()[1]
    return factor.cpu() if isinstance(factor, torch.Tensor) else factor


def kind_of(op: Any, tensor: torch.Tensor) -> Any:
    """Return the reduction; :class:`WrongArgument` if it is not defined for the tensor's dtype."""
    check_device(tensor, "a reduction")
    kind = next((candidate for candidate in ORDER_OF if type_of(op) == candidate), None)
    if kind is None:
        raise WrongArgument(
            f"reduction {op} is not supported, expected one of {', '.join(_NAMES[k] for k in ORDER_OF)}"
        )
    name, dtype = ORDER_OF[kind], tensor.dtype
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if (name in ("and", "or", "xor") and is_inexact) or (name in ("min", "max") and dtype.is_complex):
        raise WrongArgument(f"reduction {_NAMES[kind]} is not defined for {dtype}")
    if kind in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) and not is_inexact:
        raise WrongArgument(f"reduction {_NAMES[kind]} needs a floating-point dtype, got {dtype}")
    _try_out(name, dtype, divides=kind is ReduceOp.AVG)
    return kind


@functools.cache
def _try_out(order: str, dtype: torch.dtype, *, divides: bool) -> None:
    """Raise :class:`WrongArgument` if torch cannot do this: a later failure, on some ranks only, would block the others."""
    out = torch.ones(1, dtype=dtype)
    try:
        ORDERS[order]([(n, torch.ones(1, dtype=dtype)) for n in range(3)], out)
        if divides:
            out.div_(3)
    except RuntimeError as error:
        raise WrongArgument(f"this reduction is not supported for {dtype}: {error}") from error


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a flat vector; copies only if they are not contiguous."""
    return tensor.detach().reshape(-1).contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes as a flat vector; copies only if they are not contiguous."""
    return as_bytes(plain(tensor))


def of_its_own(flat: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor with storage offset 0, which DDP's reducer expects."""
    return torch.from_numpy(flat.view(torch.uint8).numpy()).view(flat.dtype)


def overwrite(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Overwrite ``tensor`` with the elements, or bytes, of ``flat``."""
    if not flat.numel():
        return
    data = flat if flat.dtype == tensor.dtype else flat.view(tensor.dtype)
    tensor.detach().copy_(data.view(tensor.shape))


def scaled(numbers: torch.Tensor, factor: int, divisor: int) -> torch.Tensor:
    """Return integers times ``factor / divisor``, computed exactly and rounded to the nearest; halves up."""
    whole = numbers.long()
    quotient = whole.div(divisor, rounding_mode="floor")
    rest = whole - quotient * divisor
    more = (2 * rest * factor + divisor).div(2 * divisor, rounding_mode="floor")
    return (quotient * factor + more).to(numbers.dtype)


def split(whole: torch.Tensor, sizes: Sequence[int] | None, count: int, what: str) -> list[torch.Tensor]:
    """Return ``whole`` split along its first dimension, into ``count`` equal pieces if there are no ``sizes``."""
    rows = whole.shape[0] if whole.dim() else 0
    if not sizes:
        if rows % count:
            raise WrongArgument(f"{what} without sizes needs a first dimension divisible by {count} ranks, got {rows}")
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows:
        raise WrongArgument(f"{what} needs {count} sizes that add up to the first dimension {rows}, got {list(sizes)}")
    return list(whole.split(list(sizes)))
