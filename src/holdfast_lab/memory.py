"""The memory that training takes on a worker, counted from the tensors that exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from holdfast.comm import OrderedAllReduce
from holdfast.models.part import ModelPart


def memory_in_use(part: ModelPart, adds: OrderedAllReduce) -> dict[str, int]:
    """Return how many bytes of memory training takes on this worker, by purpose; activations are not included.

    =============  ===================================================================================================
    purpose        memory
    =============  ===================================================================================================
    parameters     those of ``part``
    buffers        its buffers, such as running means, and their copies from the beginning of the step
    optimizer      the optimizer's state
    rows           the terms of the all-reduce: the gradients of slices, or of sums of slices
    gradients      those of the slice that is being computed, as far as they are in no row
    result         the result of the all-reduce; in shared memory one for all workers of a host
    messages       what the all-reduce receives and sends
    copies         gradients that the optimizer, clipping or a scaler may modify
    =============  ===================================================================================================

    Memory that has two purposes counts for the first of them.
    """
    room = adds.memory()
    tensors_by_purpose: dict[str, Iterable[torch.Tensor]] = {
        "parameters": part.model.parameters(),
        "buffers": [*part.model.buffers(), *(tensor for _, tensor in part.buckets.buffers.initial())],
        "optimizer": _tensors(part.optimizer.state),
        "rows": room["terms"],
        "gradients": [p.grad for p in part.buckets.parameters if p.grad is not None],
        "result": room["result"],
        "messages": room["messages"],
        "copies": part.buckets.copied,
    }
    seen: set[int] = set()
    return {purpose: sum(_new_bytes(tensors, seen)) for purpose, tensors in tensors_by_purpose.items()}


def _new_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[int]:
    """Yield the size of each memory block that was not ``seen`` before."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage.nbytes()


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)
