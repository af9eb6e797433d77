"""The monitored barrier: it says which ranks have not arrived in time.

Every other rank sends a message to the lowest rank of the group and waits for its answer, so this barrier does not
occupy the communication thread, and a rank that is missing is known by name.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from holdfast.errors import RanksLost

if TYPE_CHECKING:
    from holdfast.distributed.group_base import GroupBase

_TAG = 1 << 20
"""Tags of these messages begin here; each barrier of a group has the next one."""


def wait_for_all(group: GroupBase, number: int, limit_s: float, *, all_ranks: bool) -> None:
    """Block until all ranks of the group have called this for the ``number``-th time.

    Args:
        group: The group.
        number: How often this rank has called it before.
        limit_s: Seconds that it may take.
        all_ranks: Whether to wait for each rank and name all that are missing, instead of the first.

    Raises:
        RuntimeError: that names the missing ranks, on the lowest rank; that says so, on any other.
        RanksLost: if ranks have failed.
    """
    _Barrier(group, _TAG + number, time.monotonic() + limit_s, limit_s).pass_(all_ranks=all_ranks)


class _Barrier:
    def __init__(self, group: GroupBase, tag: int, ends_s: float, limit_s: float) -> None:
        self._group, self._tag, self._ends_s = group, tag, ends_s
        self._limit = f"{limit_s * 1000:.0f} ms"
        self._works: list[Any] = []

    def pass_(self, *, all_ranks: bool) -> None:
        members, me = self._group.alive_places, self._group.rank()
        try:
            if me == members[0]:
                self._lead(members[1:], all_ranks=all_ranks)
            else:
                self._report(members[0])
        except RuntimeError:
            self._group.engine.abandon(self._works)
            raise

    def _lead(self, peers: list[int], *, all_ranks: bool) -> None:
        arrivals = {rank: self._receive(rank) for rank in peers}
        missing: list[int] = []
        for rank, arrival in arrivals.items():
            if not all_ranks and not missing and self._left_s() <= 0:
                raise RuntimeError(f"Rank {self._group.rank()} timed out in monitoredBarrier after {self._limit}")
            if not self._arrives(arrival):
                missing.append(rank)
                if not all_ranks:
                    break
        if missing:
            ranks = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
            raise RuntimeError(f"{ranks} failed to pass monitoredBarrier in {self._limit}")
        for rank in peers:
            self._send(rank).wait()

    def _report(self, lead: int) -> None:
        self._send(lead)
        if not self._arrives(self._receive(lead)):
            raise RuntimeError(
                f"Rank {self._group.rank()} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank {lead}. Please check rank {lead} logs for faulty rank"
            )

    def _send(self, rank: int) -> Any:
        self._works.append(self._group.send([_token()], rank, self._tag))
        return self._works[-1]

    def _receive(self, rank: int) -> Any:
        self._works.append(self._group.recv([_token()], rank, self._tag))
        return self._works[-1]

    def _left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def _arrives(self, message: Any) -> bool:
        """Return whether a message arrives in time."""
        try:
            message.wait(timedelta(seconds=max(self._left_s(), 1e-3)))
        except RanksLost:
            raise
        except RuntimeError:
            return False
        return True


def _token() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def let_torch_call_it() -> None:
    """Let ``torch.distributed.monitored_barrier`` take groups of this backend: torch's own takes those of Gloo alone."""
    from torch.distributed import distributed_c10d

    original: Any = distributed_c10d.monitored_barrier

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        from holdfast.distributed.group_base import GroupBase

        target: Any = dist.group.WORLD if group is None else group
        if not isinstance(target, GroupBase):
            original(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        cast("Any", target).monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    monitored_barrier.__doc__ = original.__doc__
    setattr(dist, "monitored_barrier", monitored_barrier)  # noqa: B010 - torch has no stubs for it
    setattr(distributed_c10d, "monitored_barrier", monitored_barrier)  # noqa: B010
