"""The rank of a worker before it is connected, from its settings and from what has started it."""

from __future__ import annotations

import os

from holdfast.comm.launchers import own_group
from holdfast.config import Settings

LOOPBACK = "127.0.0.1"
"""Where ranks of ``torch.distributed`` meet if ``MASTER_ADDR`` is not set."""
CHOSEN_ALONE = "HOLDFAST_CHOSEN_ALONE"
"""The ``HOST:PORT`` of that place if one of several launchers chose it for its own workers."""


def mpi_rank() -> int:
    """Return the rank that mpirun assigned to this process, 0 without mpirun."""
    return next((int(os.environ[name]) for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK") if name in os.environ), 0)


def rank_at_start(settings: Settings) -> int:
    """Return the rank of this worker before it is connected, 0 without a launcher."""
    if settings.rank >= 0:
        return settings.rank
    if not settings.fabric and (group := own_group()) is not None:
        return group.rank
    index = mpi_rank()
    return int(settings.ranks.split(",")[index]) if settings.ranks else index


def leads_at_start(settings: Settings) -> bool:
    """Return whether this worker has the lowest rank that the job is started with, which need not be 0 after a restart."""
    return rank_at_start(settings) == (min(map(int, settings.ranks.split(","))) if settings.ranks else 0)
