"""Faults of a device: on a GPU that this process uses, or with the same exceptions on a CPU."""

from __future__ import annotations

import time
from typing import NoReturn

import torch

_MORE_THAN_ANY = 1 << 50
"""Bytes that no device has."""
_SIZE = 512
"""Rows of the matrices that ``gpu-hang`` multiplies: the device is never left with a kernel that does not end."""
_INJECTED = "(injected with --inject)"


def strike_device(kind: str, limit_s: float) -> None:
    """Make the device of this process fail.

    Args:
        kind: One of :data:`holdfast.faults.kinds.OF_DEVICES`.
        limit_s: How long ``gpu-hang`` lasts, seconds.

    Raises:
        AcceleratorError: for ``gpu-error``.
        OutOfMemoryError: for ``gpu-oom``.
    """
    is_real = torch.cuda.is_available() and torch.cuda.is_initialized()
    match kind:
        case "gpu-error":
            _fail(is_real=is_real)
        case "gpu-oom":
            _run_out(is_real=is_real)
        case "gpu-hang":
            _compute_for(limit_s, is_real=is_real)


def _fail(*, is_real: bool) -> NoReturn:
    if is_real:
        torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.int64, device="cuda")]  # a device-side assertion fails
        torch.cuda.synchronize()
    raise torch.AcceleratorError(f"CUDA error: uncorrectable ECC error encountered {_INJECTED}")


def _run_out(*, is_real: bool) -> NoReturn:
    if is_real:
        torch.empty(_MORE_THAN_ANY, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {_MORE_THAN_ANY} bytes {_INJECTED}")


def _compute_for(limit_s: float, *, is_real: bool) -> None:
    """Compute in the main thread, and leave Python's lock to the other threads of the worker meanwhile."""
    ends_s = time.monotonic() + limit_s
    matrix = torch.ones(_SIZE, _SIZE, device="cuda" if is_real else "cpu")
    while time.monotonic() < ends_s:
        torch.mm(matrix, matrix)
        if is_real:
            torch.cuda.synchronize()
