"""A communicator that counts messages and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from holdfast.comm import Communicator


class CountingCommunicator(Communicator):
    """Counts the collectives that pass through it, and the bytes that this process contributes to them.

    Args:
        comm: The communicator that carries them out.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    def _count(self, name: str, size_bytes: int) -> None:
        self.calls[name] += 1
        self.sent_bytes[name] += size_bytes


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(data.numel() * data.element_size() for data in tensors)


_SENT_BYTES: dict[str, Callable[..., int]] = {
    "alltoall": lambda send, out: _bytes(send),
    "allgather": lambda part, out: _bytes(part),
    "sendrecv": lambda send, receive, tag=0: _bytes(*(data for _, data in send)),
    "post": lambda rank, data: _bytes(data),
    "maximum": lambda values: 8 * len(values),
    "broadcast": lambda data, root: _bytes(data),
    **dict.fromkeys(("share_progress", "barrier", "agree", "revoke", "shrink"), lambda *_, **__: 0),
}
"""Counted calls: the number of bytes that each sends."""

_PROPERTIES = (
    "members",
    "local_ranks",
    "processes",
    "num_processes",
    "generation",
    "has_store",
    "has_lost_store",
    "has_atomic_shrink",
    "can_grow",
)
_NOT_COUNTED = ("take", "check_failures", "join", "newcomers", "announce", "wanted_platform", "failed")
"""Calls that are passed on uncounted: they send nothing, or were counted when they were posted."""


def _counted(name: str, sent_bytes: Callable[..., int]) -> Callable[..., Any]:
    def call(self: CountingCommunicator, *args: Any, **kwargs: Any) -> Any:
        self._count(name, sent_bytes(*args, **kwargs))
        return getattr(self._comm, name)(*args, **kwargs)

    return call


for _name, _sent_bytes in _SENT_BYTES.items():
    setattr(CountingCommunicator, _name, _counted(_name, _sent_bytes))
for _name in (*_PROPERTIES, *_NOT_COUNTED):
    setattr(CountingCommunicator, _name, property(attrgetter(f"_comm.{_name}")))
