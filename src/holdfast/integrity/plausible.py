"""Values that nobody has trained: what a flipped bit leaves in a file that has no digests.

A flip of the highest bit of an exponent makes 3e36 of 0.01. So a value is taken to be odd if it is not a number, or if it is
above :data:`LARGE` and a :data:`FAR` times the median magnitude of its tensor. Not so where such values are common: a mask of
-inf is meant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGE = 1e10
"""No weight, gradient or square of a gradient of a network that learns is as large."""
FAR = 2.0**24
_COMMON = 0.01
"""Where more of a tensor's values than this are infinite or huge, it is a pattern."""


@dataclass(frozen=True, slots=True)
class Odd:
    """A value that is not plausible."""

    index: tuple[int, ...]  # of the first of them
    value: float
    count: int  # how many there are in the tensor
    usual: float  # the median magnitude of its other values

    def __str__(self) -> str:
        more = f", and {self.count - 1} more" if self.count > 1 else ""
        return f"[{', '.join(map(str, self.index))}] is {self.value:.3g} among values of about {self.usual:.1g}{more}"


def find_odd(tensor: torch.Tensor) -> Odd | None:
    """Return what is not plausible in a tensor; None if nothing is, or it holds no floating-point numbers."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    values = tensor.detach().reshape(-1)
    if values.dtype.itemsize < torch.float32.itemsize:
        values = values.float()
    magnitudes = values.abs()
    usual = magnitudes[torch.isfinite(magnitudes) & (magnitudes > 0) & (magnitudes <= LARGE)]
    median = float(usual.median()) if len(usual) else 1.0
    huge = (magnitudes > max(LARGE, FAR * median)) | torch.isinf(magnitudes)
    if int(huge.sum()) > max(1, _COMMON * len(values)):
        huge[:] = False
    odd = torch.isnan(values) | huge
    if not odd.any():
        return None
    first = int(odd.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)) if tensor.dim() else ()
    return Odd(index, float(values[first]), int(odd.sum()), median)
