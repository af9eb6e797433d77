"""Differences between two checkpoints or foreign files, tensor by tensor.

The rules, for tensors of one shape:

- Two floats of one dtype differ if their bits do: a NaN equals itself, and 0.0 differs from -0.0, with error 0. Integers and
  bools differ by value, and so do tensors of different dtypes.
- If one file has bfloat16 and the other uint16, the stand-in in formats without bfloat16, the bits are compared as
  bfloat16; likewise uint8 as float8.
- Errors are computed in float64 whatever the dtypes. ``max_abs`` is the largest ``|a - b|``, ``max_rel`` the largest
  ``|a - b| / max(|a|, |b|)``, ``distance`` the square root of the sum of all ``(a - b)**2``. If one of two values
  is NaN, they differ without an error; NaNs are counted in ``nans``.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.tools.formats.base import STAND_INS, TensorSource

_CHUNK = 1 << 20
"""Number of values compared at a time; each needs a few float64."""

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """The difference between two tensors with the same path."""

    path: str  # Of both
    dtypes: tuple[str, str]  # Of each
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # Of each; if they differ, nothing was computed
    values: int = 0  # Number of values in one of them
    differ: int = 0  # Number of values that differ
    max_abs: float = 0.0  # Largest absolute error, >= 0; inf if one value is infinite and the other is not
    max_rel: float = 0.0  # Largest relative error, 0 to 2
    distance: float = 0.0  # Euclidean distance
    nans: tuple[int, int] = (0, 0)  # Number of NaNs in each

    @property
    def is_same(self) -> bool:
        """Whether dtype, shape and all values are equal."""
        return self.dtypes[0] == self.dtypes[1] and self.shapes[0] == self.shapes[1] and not self.differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The difference between two sources."""

    tensors: tuple[TensorDiff, ...]  # Common tensors, in the order of the first source, including equal ones
    only_first: tuple[str, ...]  # Paths of tensors in the first source only
    only_second: tuple[str, ...]  # Paths of tensors in the second source only
    scalars: dict[str, tuple[str, str]] | None
    """Differing values that are not tensors, by path, both as text, "" if missing; None if one of
    the two sources can hold only tensors."""

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs."""
        alone = self.only_first or self.only_second or self.scalars
        return not alone and all(tensor.is_same for tensor in self.tensors)


def compare(
    first: TensorSource, second: TensorSource, on_tensor: Callable[[str], None] = lambda path: None
) -> Comparison:
    """Compare two sources, holding one tensor of each in memory at a time.

    Args:
        first: The reference.
        second: The source to compare with it.
        on_tensor: Called with each tensor's path before it is read.

    Raises:
        CheckpointCorrupt: if a tensor is damaged.
    """
    comparisons = []
    for path in (path for path in first.tensors if path in second.tensors):
        on_tensor(path)
        comparisons.append(_compare(path, first, second))
    return Comparison(
        tensors=tuple(comparisons),
        only_first=tuple(path for path in first.tensors if path not in second.tensors),
        only_second=tuple(path for path in second.tensors if path not in first.tensors),
        scalars=_compare_scalars(first.scalars, second.scalars),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A value that differs between two sources."""

    path: str  # Path of the tensor
    index: tuple[int, ...]
    """Index in the tensor; also empty if the shapes differ, or one tensor is missing."""
    values: tuple[str, str]  # In each source, as text; the shapes if these differ, "" for a missing tensor


def first_difference(first: TensorSource, second: TensorSource, under: str = "") -> ValueDifference | None:
    """Return the first value that differs, in the first source's tensor order and row-major in each tensor; None if all are equal.

    Args:
        first: The reference.
        second: The source to compare with it.
        under: Restricts the comparison to paths with this prefix.

    Raises:
        CheckpointCorrupt: if a tensor is damaged.
    """
    for path in (path for path in {**first.tensors, **second.tensors} if path.startswith(under)):
        entries = [source.tensors.get(path) for source in (first, second)]
        shapes = tuple("" if entry is None else str(list(entry.shape)) for entry in entries)
        if shapes[0] != shapes[1]:
            return ValueDifference(path=path, index=(), values=(shapes[0], shapes[1]))
        a, b = first.read(path), second.read(path)
        at = 0
        for x, y in _chunks(a.reshape(-1), b.reshape(-1)):
            odd = _odd(x, y).nonzero()
            if len(odd):
                offset = int(odd[0])
                index = tuple(int(i) for i in np.unravel_index(at + offset, tuple(a.shape)))
                return ValueDifference(path=path, index=index, values=(repr(x[offset].item()), repr(y[offset].item())))
            at += x.numel()
    return None


def _compare(path: str, first: TensorSource, second: TensorSource) -> TensorDiff:
    one, other = first.tensors[path], second.tensors[path]
    dtypes = (_meant(one.dtype, other.dtype), _meant(other.dtype, one.dtype))
    diff = TensorDiff(path=path, dtypes=(_name(dtypes[0]), _name(dtypes[1])), shapes=(one.shape, other.shape))
    if one.shape != other.shape:
        return diff
    return compare_tensors(diff, first.read(path).view(dtypes[0]), second.read(path).view(dtypes[1]))


def _meant(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that is meant: uint16 in a numpy file holds the bits of bfloat16 if the other file has bfloat16."""
    names = [str(kind).removeprefix("torch.") for kind in (dtype, other)]
    return other if STAND_INS.get(names[1]) == names[0] else dtype


def compare_tensors(diff: TensorDiff, a: torch.Tensor, b: torch.Tensor) -> TensorDiff:
    """Return ``diff`` completed with the errors between two contiguous CPU tensors of the same shape."""
    differ, max_abs, max_rel, squares, nans = 0, 0.0, 0.0, [0.0], [0, 0]
    for x, y in _chunks(a.reshape(-1), b.reshape(-1)):
        odd = _odd(x, y)
        nans = [nans[0] + _num_nans(x), nans[1] + _num_nans(y)]
        if not odd.any():
            continue
        x, y = _selected(x, odd), _selected(y, odd)
        error, scale = _errors(x, y)
        differ += x.numel()
        if error.numel():
            max_abs = max(max_abs, float(error.max()))
            relative = torch.where(torch.isinf(error), 1.0, error / torch.where(scale > 0, scale, 1.0))
            max_rel = max(max_rel, float(relative.max()))
            squares.append(float(torch.linalg.vector_norm(error)))
    return dataclasses.replace(
        diff,
        values=a.numel(),
        differ=differ,
        max_abs=max_abs,
        max_rel=max_rel,
        distance=math.hypot(*squares),
        nans=(nans[0], nans[1]),
    )


def _chunks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start in range(0, a.numel(), _CHUNK):
        yield a[start : start + _CHUNK], b[start : start + _CHUNK]


def _selected(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the selected values. They are selected as integers: torch 2.9 cannot index unsigned integers and float8."""
    return x[wanted] if x.element_size() == 16 else x.view(_SAME_WIDTH[x.element_size()])[wanted].view(x.dtype)


def _odd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a mask of the values that differ."""
    if x.dtype is torch.bool and y.dtype is torch.bool:
        return (x.view(torch.uint8) != 0) != (y.view(torch.uint8) != 0)
    if x.dtype == y.dtype:
        width = _SAME_WIDTH[x.element_size()]
        bits = x.view(width) != y.view(width)
        return bits.view(-1, 2).any(1) if x.element_size() == 16 else bits
    if _is_whole(x) and _is_whole(y):
        return _whole_differ(x, y)
    wide_x, wide_y = _wide(x), _wide(y)
    return (wide_x != wide_y) & ~(torch.isnan(wide_x) & torch.isnan(wide_y))


def _whole_differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a mask of the integers that differ; the upper half of uint64 appears negative in int64."""
    too_large = [
        t.to(torch.int64) < 0 if t.dtype is torch.uint64 else torch.zeros_like(t, dtype=torch.bool) for t in (x, y)
    ]
    return (x.to(torch.int64) != y.to(torch.int64)) | (too_large[0] != too_large[1])


def _errors(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``|x - y|`` and ``max(|x|, |y|)`` of the values that are not NaN, in float64."""
    wide_x, wide_y = _wide(x), _wide(y)
    scale = torch.maximum(wide_x.abs(), wide_y.abs())
    error = torch.where(wide_x == wide_y, 0.0, (wide_x - wide_y).abs())  # infinity minus infinity is NaN
    if x.dtype == y.dtype and _is_whole(x):
        error = _whole_errors(x, y)
    mask = ~(torch.isnan(wide_x) | torch.isnan(wide_y))
    return error[mask], scale[mask]


def _whole_errors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``|x - y|`` of integers, computed exactly before the conversion to float64."""
    a, b = x.numpy(), y.numpy()
    return torch.from_numpy(
        (np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)).astype(np.float64)
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _num_nans(tensor: torch.Tensor) -> int:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return 0
    return int(torch.isnan(_wide(tensor) if tensor.element_size() == 1 else tensor).sum())


def _compare_scalars(
    first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
) -> dict[str, tuple[str, str]] | None:
    if first is None or second is None:
        return None
    return {
        path: (_shown(a), _shown(b))
        for path in {**first, **second}
        if not _is_same(a := first.get(path, _MISSING), b := second.get(path, _MISSING))
    }


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    return type(a) is type(b) and bool(a == b)


def _shown(value: Any) -> str:
    return "" if value is _MISSING else repr(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
