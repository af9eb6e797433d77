"""Implausible values: the trace that a bit flip leaves in a file without digests.

Flipping the highest exponent bit turns 0.01 into 3e36. So a value is implausible if it is NaN, or if it is
above :data:`LARGE` and :data:`FAR` times the median magnitude of its tensor. The exception are tensors in which such values are
common, such as a mask of -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.errors import CheckpointCorrupt
from holdfast.tools.formats.base import TensorSource

LARGE = 1e10
"""No weight, gradient or squared gradient of a network that learns is this large."""
FAR = 2.0**24
_COMMON = 0.01
"""If more than this fraction of a tensor's values is infinite or huge, the pattern is intended."""


@dataclass(frozen=True, slots=True)
class ImplausibleValue:
    """An implausible value."""

    index: tuple[int, ...]  # index of the first such value
    value: float
    count: int  # number of such values in the tensor
    usual: float  # median magnitude of the other values

    def __str__(self) -> str:
        more = f", and {self.count - 1} more" if self.count > 1 else ""
        return f"[{', '.join(map(str, self.index))}] is {self.value:.3g} among values of about {self.usual:.1g}{more}"


def find_odd(tensor: torch.Tensor) -> ImplausibleValue | None:
    """Return the first implausible value of a tensor; None if there is none, or the tensor is not floating-point."""
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
    return ImplausibleValue(index, float(values[first]), int(odd.sum()), median)


def check_values(source: TensorSource, *, is_fatal: bool, tell: Callable[[str], None]) -> None:
    """Call ``tell`` for each tensor with values that training does not produce; raise a CheckpointCorrupt if ``is_fatal``."""
    for path in source.tensors:
        odd = find_odd(source.read(path))
        if odd is None:
            continue
        msg = f"{source.name}: {path}{odd}: a bit may have flipped; compare with another copy (holdfast ckpt diff)"
        if is_fatal:
            msg += ", or accept it: --guard off"
            raise CheckpointCorrupt(msg)
        tell(msg)
