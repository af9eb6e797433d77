"""Counting what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from holdfast.comm import Communicator
from holdfast.recovery.messages import Progress


class CountingCommunicator:
    """Counts the collectives that go through it, and the bytes that this process puts into them.

    Args:
        comm: Does the work.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    @property
    def members(self) -> tuple[int, ...]:
        """See :class:`Communicator`."""
        return self._comm.members

    @property
    def here(self) -> tuple[int, ...]:
        """See :class:`Communicator`."""
        return self._comm.here

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """See :class:`Communicator`."""
        return self._comm.processes

    @property
    def crowd(self) -> int:
        """See :class:`Communicator`."""
        return self._comm.crowd

    @property
    def generation(self) -> int:
        """See :class:`Communicator`."""
        return self._comm.generation

    def alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        """Count and hand on."""
        self._count("alltoall", send.numel() * send.element_size())
        self._comm.alltoall(send, out)

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Count and hand on."""
        self._count("allgather", part.numel() * part.element_size())
        self._comm.allgather(part, out)

    def swap(
        self, send: Sequence[tuple[int, torch.Tensor]], receive: Sequence[tuple[int, torch.Tensor]], tag: int = 0
    ) -> None:
        """Count and hand on."""
        self._count("swap", sum(data.numel() * data.element_size() for _, data in send))
        self._comm.swap(send, receive, tag)

    def post(self, rank: int, data: torch.Tensor) -> None:
        """Count and hand on."""
        self._count("post", data.numel() * data.element_size())
        self._comm.post(rank, data)

    def take(self, rank: int, data: torch.Tensor) -> None:
        """Hand on; it was counted where it was posted."""
        self._comm.take(rank, data)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Count and hand on."""
        self._count("maximum", 8 * len(values))
        return self._comm.maximum(values)

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Count and hand on."""
        self._count("broadcast", data.numel() * data.element_size())
        self._comm.broadcast(data, root)

    def share_progress(self, progress: Progress) -> Mapping[int, Progress]:
        """Count and hand on."""
        self._count("share_progress", 0)
        return self._comm.share_progress(progress)

    def barrier(self) -> None:
        """Count and hand on."""
        self._count("barrier", 0)
        self._comm.barrier()

    def look(self) -> None:
        """Hand on; nothing is sent."""
        self._comm.look()

    def agree(self, flag: bool) -> bool:
        """Count and hand on."""
        self._count("agree", 0)
        return self._comm.agree(flag)

    def revoke(self) -> None:
        """Count and hand on."""
        self._count("revoke", 0)
        self._comm.revoke()

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> bool:
        """Count and hand on."""
        self._count("shrink", 0)
        return self._comm.shrink(admits=admits, leaves=leaves)

    def newcomers(self, loop: int) -> tuple[int, ...]:
        """Hand on; nothing is sent."""
        return self._comm.newcomers(loop)

    def announce(self, loop: int, kind: str) -> None:
        """Hand on."""
        self._comm.announce(loop, kind)

    def wanted_kind(self) -> str:
        """Hand on."""
        return self._comm.wanted_kind()

    def join(self, loop: int) -> bool:
        """Hand on."""
        return self._comm.join(loop)

    @property
    def is_stranded(self) -> bool:
        """Hand on."""
        return self._comm.is_stranded

    def failed(self) -> tuple[int, ...]:
        """Hand on."""
        return self._comm.failed()

    def _count(self, name: str, size_bytes: int) -> None:
        self.calls[name] += 1
        self.sent_bytes[name] += size_bytes
