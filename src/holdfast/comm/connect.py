"""Choosing the fabric."""

from __future__ import annotations

from holdfast.comm.base import Communicator
from holdfast.comm.virtual import VirtualCommunicator
from holdfast.errors import ConfigError


def connect(fabric: str, workers: int, ranks: str) -> Communicator:
    """Return the communicator of this process.

    Args:
        fabric: ``"ulfm"``, ``"virtual"``, or "" for ``ulfm`` under mpirun and one virtual worker otherwise.
        workers: Number of virtual workers.
        ranks: Comma-separated worker numbers of a job that was started again, or "".

    Raises:
        ConfigError: if the fabric cannot work here.
    """
    from holdfast.comm import ulfm

    numbers = [int(rank) for rank in ranks.split(",")] if ranks else None
    if numbers is not None and numbers != sorted(set(numbers)):
        msg = f"ranks must be ascending, each once, got {ranks}"
        raise ConfigError(msg)
    if fabric == "ulfm" or (not fabric and ulfm.under_mpirun()):
        return ulfm.UlfmCommunicator(numbers)
    return VirtualCommunicator(workers if numbers is None else numbers)
