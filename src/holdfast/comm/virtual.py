"""Many workers in one process: deterministic, and able to lose any of them at an exact moment."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from holdfast.comm.base import FixedMembership, Placed
from holdfast.errors import InternalError, JobError, PeerFailed
from holdfast.recovery.messages import LOADING, Progress


class VirtualCommunicator(FixedMembership):
    """All members are played by this process, so collectives move nothing.

    Args:
        ranks: The workers, or their number.
        reached: Asked when a worker dies after entering a collective: which survivors does that still complete at?
            The process then acts as one of those, and the others are one sum behind, as on a real engine. By default
            it completes nowhere.
    """

    crowd = 1

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
    def here(self) -> tuple[int, ...]:
        """All members."""
        return self.members

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """One process, which plays all members."""
        return (self.members,)

    def fail(self, rank: int, *, entered: bool = False) -> None:
        """Let ``rank`` die now, unless it is dead already.

        ``entered``: it has given its part to the sum in progress, or to the one that is about to begin.
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
        """Copy, unless a worker is dead."""
        self._enter()
        out.copy_(send)

    def allgather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Copy, unless a worker is dead."""
        self._enter()
        out[0].copy_(part)

    def swap(self, send: Placed, receive: Placed, tag: int = 0) -> None:
        """Copy, unless a worker is dead."""
        self._enter()
        for (_, given), (_, taken) in zip(send, receive, strict=True):
            taken.copy_(given)

    def post(self, rank: int, data: torch.Tensor) -> None:
        """Keep it for this process, which plays all workers, unless a worker is dead."""
        self.look()
        self._posted.append(data)

    def take(self, rank: int, data: torch.Tensor) -> None:
        """Copy what was posted first, unless a worker is dead."""
        self.look()
        if not self._posted:  # and no other process could do so
            raise InternalError(f"nothing was posted that could be taken from worker {rank}")
        data.copy_(self._posted.popleft())

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the values, unless a worker is dead."""
        self._enter()
        return list(values)

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Change nothing, unless a worker is dead."""
        self._enter()

    def share_progress(self, progress: Progress) -> Mapping[int, Progress]:
        """Return the same for all, but one sum less for those whom the last sum did not reach."""
        self._enter()
        self._shared = True
        if progress.completed == LOADING:
            return dict.fromkeys(self.members, progress)
        behind = dataclasses.replace(progress, completed=progress.completed - 1, computed=True)
        return {rank: behind if rank in self._late else progress for rank in self.members}

    def barrier(self) -> None:
        """Return at once, unless a worker is dead."""
        self._enter()

    def look(self) -> None:
        """Complain if a worker is dead."""
        if self._dead:
            raise PeerFailed(f"workers {sorted(self._dead)} are dead")

    def agree(self, flag: bool) -> bool:
        """Return ``flag``, or False if a worker is dead."""
        agreed = flag and not self._dead
        if agreed and self._shared:  # everybody knows who was behind, and that all know: they catch up now
            self._late.clear()
            self._shared = False
        return agreed

    def revoke(self) -> None:
        """Do nothing: no process waits anywhere."""

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> bool:
        """Go on with the living; no worker joins or leaves. ``JobError`` if none is left."""
        self.members = tuple(rank for rank in self.members if rank not in self._dead)
        self._late -= self._dead
        if self._late >= set(self.members):  # it did reach this process, though all others that it reached are dead
            self._late.clear()
        self._dead.clear()
        self._posted.clear()
        self._shared = False
        self.generation += 1
        if not self.members:
            raise JobError("every worker has died")
        return True

    def failed(self) -> tuple[int, ...]:
        """Return the members that died since the last shrink."""
        return tuple(sorted(self._dead))

    def _enter(self) -> None:
        if not self._completes:
            self.look()
        self._completes = False
