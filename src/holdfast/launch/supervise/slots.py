"""Slots: the positions of a node's workers, which stay when workers come and go.

A slot is a worker's rank within its node (``LOCAL_RANK``), and decides which GPU the worker uses. Workers and spares begin
with slots 0, 1, 2, ... in the order of their ranks. A worker that is started later takes the lowest slot whose worker has
ended, and with it the GPU. A spare keeps its slot when it takes over slices: its copy of the state is on that GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

SLOT, SLOTS = "HOLDFAST_SLOT", "HOLDFAST_SLOTS"
"""A worker's slot, and how many slots its node began with; set by a launcher that starts each worker itself."""


class Slots:
    """Assigns slots to the workers of this node.

    Args:
        ranks: Workers that this node begins with.
        wanted: Workers that it should have; it begins with none if it comes back to a running job.
    """

    def __init__(self, ranks: Iterable[int], wanted: int = 1) -> None:
        self._slots = {rank: slot for slot, rank in enumerate(sorted(ranks))}
        self._count = len(self._slots) or wanted

    def take(self, rank: int, is_ended: Callable[[int], bool]) -> int:
        """Return the slot of ``rank``; a worker without one gets the lowest slot whose worker has ended, or a new one."""
        if rank not in self._slots:
            self._slots = {one: slot for one, slot in self._slots.items() if not is_ended(one)}
            taken = set(self._slots.values())
            self._slots[rank] = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        return self._slots[rank]

    def release(self, rank: int) -> None:
        """Free the slot of a worker that could not be started."""
        self._slots.pop(rank, None)

    def variables(self, rank: int, is_ended: Callable[[int], bool]) -> dict[str, str]:
        """Return the variables that tell ``rank`` its slot, after assigning one; see :meth:`take`."""
        return {SLOT: str(self.take(rank, is_ended)), SLOTS: str(self._count)}


def slot_at_start(rank: int, size: int, *, is_numbered: bool, env: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return a worker's slot and the slots of its node, from the environment of its process.

    Args:
        rank: The worker's index among all workers, used if nothing else is known.
        size: Number of workers, used if nothing else is known.
        is_numbered: Whether the launcher started this worker itself; otherwise mpirun did, or it is alone.
        env: The environment.
    """
    env = os.environ if env is None else env
    names = (SLOT, SLOTS) if is_numbered else ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return int(env.get(names[0], rank)), int(env.get(names[1], size))
