"""The layout of the vectors that are all-reduced: which parameters share a bucket, and where their gradients are in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from holdfast.comm import SlotSpan
from holdfast.comm.allreduce.path import ALIGN

_NOWHERE = SlotSpan(0, 0, torch.float32)


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a parameter in its bucket."""

    parameter: nn.Parameter
    name: str
    start: int
    numel: int
    presence: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """The layout of one flat vector: gradients, presences, and in the last bucket the figures."""

    places: tuple[Place, ...]
    length: int
    figures_at: int
    dtype: torch.dtype
    device: torch.device
    span: SlotSpan = _NOWHERE  # in the memory of a slice

    @property
    def may_be_rounded(self) -> bool:
        """Whether an order that rounds to bfloat16 applies to this bucket, of which figures are never a part then."""
        return self.dtype == torch.float32 and bool(self.places)

    @property
    def gradients_end(self) -> int:
        """End of the gradients, and start of the presences."""
        return self.places[-1].start + self.places[-1].numel if self.places else 0

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the gradients in such a vector."""
        return [flat[p.start : p.start + p.numel].view(p.parameter.shape) for p in self.places]


def lay_out(
    named: Sequence[tuple[str, nn.Parameter]],
    figures: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    *,
    checked: bool,
    figures_apart: bool = False,
) -> tuple[Bucket, ...]:
    """Return the buckets of parameters, in their order.

    Args:
        named: The parameters, from the last to the first.
        figures: Length of the figures, which the last bucket carries.
        dtype: Their type.
        bucket_bytes: Maximum size of a bucket, bytes, unless a single parameter is larger.
        checked: Terms have checksums.
        figures_apart: The figures are a bucket of their own, because gradients are rounded.
    """
    layouts = [_lay_out(group) for group in _group(named, bucket_bytes)]
    if layouts and layouts[-1].dtype == dtype and not figures_apart:
        last = layouts.pop()
        layouts.append(Bucket(last.places, last.length + figures, last.length, dtype, last.device))
    else:  # for instance if they need another dtype than the gradients of the last bucket
        device = named[0][1].device if named else torch.device("cpu")
        layouts.append(Bucket((), figures, 0, dtype, device))
    return _place(layouts, checked=checked)


def _place(layouts: Sequence[Bucket], *, checked: bool) -> tuple[Bucket, ...]:
    """Place the buckets one after another in the memory of a slice."""
    placed: list[Bucket] = []
    for bucket in layouts:
        span = SlotSpan(placed[-1].span.end if placed else 0, bucket.length, bucket.dtype, checked)
        placed.append(replace(bucket, span=span))
    return tuple(placed)


def _group(named: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[list[tuple[str, nn.Parameter]]]:
    groups: list[list[tuple[str, nn.Parameter]]] = []
    room, kind = 0, None
    for name, parameter in named:
        size = parameter.numel() * parameter.element_size()
        this_kind = (parameter.dtype, parameter.device)
        if not groups or this_kind != kind or size > room:
            groups.append([])
            room, kind = max(bucket_bytes, size), this_kind
        groups[-1].append((name, parameter))
        room -= size
    return groups


def _lay_out(group: Sequence[tuple[str, nn.Parameter]]) -> Bucket:
    """Return a bucket of these parameters. On a device each gradient is aligned, for optimizers that load vectors.

    In host memory that would only move the numbers among which a planned flip of a message chooses.
    """
    dtype, device = group[0][1].dtype, group[0][1].device
    line = 1 if device.type == "cpu" else ALIGN // dtype.itemsize
    starts, end = [], 0
    for _, parameter in group:
        starts.append(-(-end // line) * line)
        end = starts[-1] + parameter.numel()
    places = tuple(
        Place(parameter, name, start, parameter.numel(), end + i)
        for i, ((name, parameter), start) in enumerate(zip(group, starts, strict=True))
    )
    length = end + len(group)
    return Bucket(places, length, length, dtype, device)
