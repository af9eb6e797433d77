"""Many virtual workers in one process: deterministic, and able to lose any of them at an exact moment."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from holdfast.comm.base import FixedMembership, Placed
from holdfast.errors import InternalError, JobError, PeerFailed
from holdfast.recovery.messages import LOADING, Progress


class VirtualCommunicator(FixedMembership):
    """All members run in this process, so collectives move no data.

    Args:
        ranks: The workers, or their number.
        reached: Called when a worker fails after entering a collective; returns the survivors on which that collective
            still completes. The process then acts as one of them, and the other workers are one collective behind, as
            on a real communicator. By default it completes on none.
    """

    num_processes = 1

    def __init__(self, ranks: int | Sequence[int], *, reached: Callable[[int], Collection[int]] = lambda _: ()) -> None:
        self.members = tuple(range(ranks)) if isinstance(ranks, int) else tuple(sorted(ranks))
        self._reached = reached
        self._dead: set[int] = set()
        self._late: set[int] = set()
        self._completes = False
        self._shared = False
        self.generation = 0
        self._posted: deque[torch.Tensor] = deque()

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return self.members

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        return (self.members,)

    def fail(self, rank: int, *, entered: bool = False) -> None:
        """Make ``rank`` fail now, unless it has failed already.

        ``entered``: it has contributed to the all-reduce in progress, or to the next one.
        """
        if rank not in self.members or rank in self._dead:
            return
        first = not self._dead
        self._dead.add(rank)
        if entered and first:
            lucky = set(self._reached(rank)) & (set(self.members) - self._dead)
            self._completes = bool(lucky)
            self._late = set(self.members) - self._dead - lucky if lucky else set()

    def alltoall(self, send: torch.Tensor, out: torch.Tensor) -> None:
        self._enter()
        out.copy_(send)

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        self._enter()
        out[0].copy_(part)

    def sendrecv(self, send: Placed, receive: Placed, tag: int = 0) -> None:
        self._enter()
        for (_, source), (_, target) in zip(send, receive, strict=True):
            target.copy_(source)

    def post(self, rank: int, data: torch.Tensor) -> None:
        """Keep the message for this process, which runs all workers, unless a worker has failed."""
        self.check_failures()
        self._posted.append(data)

    def take(self, rank: int, data: torch.Tensor) -> None:
        """Copy the message that was posted first, unless a worker has failed."""
        self.check_failures()
        if not self._posted:  # there is no other process that could post one
            raise InternalError(f"take from worker {rank}: no message was posted")
        data.copy_(self._posted.popleft())

    def maximum(self, values: Sequence[int]) -> list[int]:
        self._enter()
        return list(values)

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        self._enter()

    def share_progress(self, progress: Progress) -> Mapping[int, Progress]:
        """Return one progress for all, minus one collective for workers that the last one did not reach."""
        self._enter()
        self._shared = True
        if progress.completed == LOADING:
            return dict.fromkeys(self.members, progress)
        behind = dataclasses.replace(progress, completed=progress.completed - 1, computed=True)
        return {rank: behind if rank in self._late else progress for rank in self.members}

    def barrier(self) -> None:
        self._enter()

    def check_failures(self) -> None:
        if self._dead:
            raise PeerFailed(f"workers {sorted(self._dead)} have failed")

    def agree(self, flag: bool) -> bool:
        agreed = flag and not self._dead
        if agreed and self._shared:  # all know which workers were behind, and that all know it: these catch up now
            self._late.clear()
            self._shared = False
        return agreed

    def revoke(self) -> None:
        """Do nothing: no process waits in a collective."""

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> bool:
        """Start a new generation with the survivors; no worker joins or leaves. ``JobError`` if none is left."""
        self.members = tuple(rank for rank in self.members if rank not in self._dead)
        self._late -= self._dead
        if self._late >= set(self.members):  # it did reach this process, but the other workers that it reached failed
            self._late.clear()
        self._dead.clear()
        self._posted.clear()
        self._shared = False
        self.generation += 1
        if not self.members:
            raise JobError("every worker has failed")
        return True

    def failed(self) -> tuple[int, ...]:
        return tuple(sorted(self._dead))

    def _enter(self) -> None:
        if not self._completes:
            self.check_failures()
        self._completes = False
