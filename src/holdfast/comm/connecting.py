"""Choosing the fabric, and connecting this process with the others."""

from __future__ import annotations

import os

from holdfast.comm.base import Communicator
from holdfast.comm.fabrics.base import Endpoint
from holdfast.comm.fabrics.registry import make_fabric
from holdfast.comm.launchers import chosen, others_started
from holdfast.errors import ConfigError


def connect(fabric: str, workers: int, ranks: str, *, rank: int = -1, store: str = "", token: str = "") -> Communicator:
    """Return the communicator of this process.

    Args:
        fabric: One of :func:`~holdfast.comm.fabrics.registry.fabric_names`, or "" for ``ulfm`` under mpirun and one virtual worker otherwise.
        workers: How many there are, where nothing else says it.
        ranks: Comma-separated worker numbers, or "" for 0, 1, 2, ...
        rank: This worker's number; ``gloo`` needs it.
        store: Where membership is kept; ``gloo`` needs it.
        token: What the store asks for.

    Raises:
        ConfigError: if the fabric cannot work here; or if it was not given, and another launcher started this process beside
            others: each would train alone, and save where the others do.
    """
    numbers = [int(rank) for rank in ranks.split(",")] if ranks else None
    if numbers is not None and numbers != sorted(set(numbers)):
        raise ConfigError(f"ranks must be ascending, each once, got {ranks}")
    name = chosen(fabric)
    if not fabric and name == "virtual" and (said := others_started(os.environ)):
        raise ConfigError(said)
    return make_fabric(name).connect(Endpoint(workers=workers, ranks=numbers, rank=rank, store=store, token=token))
