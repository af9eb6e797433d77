"""Choosing the fabric."""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast.comm.base import Communicator
from holdfast.comm.launchers import others_started
from holdfast.comm.virtual import VirtualCommunicator
from holdfast.errors import ConfigError


def connect(fabric: str, workers: int, ranks: str, *, rank: int = -1, store: str = "", token: str = "") -> Communicator:
    """Return the communicator of this process.

    Args:
        fabric: ``"ulfm"``, ``"gloo"``, ``"virtual"``, or "" for ``ulfm`` under mpirun and one virtual worker otherwise.
        workers: How many there are, where nobody else knows it.
        ranks: Comma-separated worker numbers, or "" for 0, 1, 2, ...
        rank: This worker's number; ``gloo`` needs it.
        store: Where membership is kept; ``gloo`` needs it.
        token: What the store asks for.

    Raises:
        ConfigError: if the fabric cannot work here; or if it was not given, and another launcher started this process beside
            others: each would train alone, and save where the others do.
    """
    from holdfast.comm import ulfm

    numbers = [int(rank) for rank in ranks.split(",")] if ranks else None
    if numbers is not None and numbers != sorted(set(numbers)):
        msg = f"ranks must be ascending, each once, got {ranks}"
        raise ConfigError(msg)
    if fabric == "ulfm" or (not fabric and ulfm.under_mpirun()):
        return ulfm.UlfmCommunicator(numbers)
    if fabric == "gloo":
        return _connect_gloo(rank, range(workers) if numbers is None else numbers, store, token)
    if not fabric and (said := others_started(os.environ)):
        raise ConfigError(said)
    return VirtualCommunicator(workers if numbers is None else numbers)


def _connect_gloo(rank: int, world: Sequence[int], store: str, token: str) -> Communicator:
    from holdfast.comm.c10d import C10dCommunicator
    from holdfast.membership import open_store

    if not store or rank < 0:
        msg = "the gloo fabric needs a launcher, which says who the workers are: start with `holdfast run --fabric gloo -n 4 SCRIPT`"
        raise ConfigError(msg)
    return C10dCommunicator(open_store(store, token), rank, world if rank in world else None)
